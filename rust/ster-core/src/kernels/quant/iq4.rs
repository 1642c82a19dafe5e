//! Nibbles that number sixteen uneven values.
//!
//! IQ4_NL: 32 numbers in 18 bytes, laid out as Q4_0; a number is `d * VALUES[q]`.

use super::legacy::{blocked, open};
use super::{Apart, Blocked, half};
use crate::kernels::simd::Lanes;

/// `kvalues_iq4nl` of `ggml-common.h`.
pub(crate) const VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

pub(crate) fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half(block, 0);
    for j in 0..16 {
        let byte = block[2 + j];
        out[j] = d * f32::from(VALUES[usize::from(byte & 15)]);
        out[16 + j] = d * f32::from(VALUES[usize::from(byte >> 4)]);
    }
}

pub(crate) struct Iq4Nl;

blocked!(Iq4Nl, 18, minima: false, open_iq4_nl);

#[inline(always)]
fn open_iq4_nl<V: Lanes>(block: &[u8; 18], out: &mut [i8; 32]) {
    let nibbles: &[u8; 16] = block[2..].first_chunk().expect("16 bytes");
    // SAFETY: called where `V`'s instruction set is on; nibbles are below 16.
    unsafe {
        out[..16].copy_from_slice(&V::pick(nibbles.map(|byte| byte & 15), &VALUES));
        out[16..].copy_from_slice(&V::pick(nibbles.map(|byte| byte >> 4), &VALUES));
    }
}
