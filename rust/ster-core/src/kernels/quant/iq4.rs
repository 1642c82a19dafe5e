//! Nibbles that number sixteen uneven values.
//!
//! IQ4_NL: 32 numbers in 18 bytes, laid out as Q4_0; a number is `d * VALUES[q]`.

use super::{Blocked, half};
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

impl Blocked for Iq4Nl {
    const NUMBERS: usize = 32;
    const BYTES: usize = 18;
    const GROUP: usize = 32;
    type Opened = ();
    const CLOSED: () = ();

    #[inline(always)]
    unsafe fn open<V: Lanes>(_: *const u8, _: &mut ()) {}
    #[inline(always)]
    unsafe fn sixteen<V: Lanes>(block: *const u8, _: &(), n: usize) -> V {
        // SAFETY: the caller's; both lie in the block.
        unsafe {
            let (scale, nibbles) = (V::splat_f16(block), block.add(2));
            let values = if n == 0 { V::low_values(nibbles, &VALUES) } else { V::high_values(nibbles, &VALUES) };
            values.mul(scale)
        }
    }
}
