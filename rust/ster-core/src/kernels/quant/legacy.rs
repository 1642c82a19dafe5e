//! Blocks of 32 numbers with one scale, after two or four bytes of f16.
//!
//! | format | bytes | a number |
//! | --- | --- | --- |
//! | Q4_0 | d, 16 of nibbles | `d * (q - 8)` |
//! | Q4_1 | d, m, 16 of nibbles | `d * q + m` |
//! | Q5_0 | d, 4 of fifth bits, 16 of nibbles | `d * (q - 16)` |
//! | Q5_1 | d, m, 4 of fifth bits, 16 of nibbles | `d * q + m` |
//! | Q8_0 | d, 32 signed | `d * q` |
//!
//! Nibbles: the low one of byte j is number j, the high one number 16 + j. Fifth bits: bit i of the little-endian word is number i's.

use super::{Apart, Blocked, bytes, half};
use crate::kernels::simd::Lanes;

pub(crate) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half(block, 0);
    for j in 0..16 {
        let byte = block[2 + j];
        out[j] = d * (f32::from(byte & 15) - 8.0);
        out[16 + j] = d * (f32::from(byte >> 4) - 8.0);
    }
}

pub(crate) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for j in 0..16 {
        let byte = block[4 + j];
        out[j] = d * f32::from(byte & 15) + m;
        out[16 + j] = d * f32::from(byte >> 4) + m;
    }
}

pub(crate) fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half(block, 0);
    let q = fives(&block[2..]);
    for (out, q) in out.iter_mut().zip(q) {
        *out = d * (f32::from(q) - 16.0);
    }
}

pub(crate) fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    let q = fives(&block[4..]);
    for (out, q) in out.iter_mut().zip(q) {
        *out = d * f32::from(q) + m;
    }
}

/// 32 numbers of five bits: four bytes of fifth bits, then the nibbles.
fn fives(bytes: &[u8]) -> [u8; 32] {
    std::array::from_fn(|i| {
        let fifth = bytes[i / 8] >> (i % 8) & 1;
        let nibble = bytes[4 + i % 16] >> (4 * (i / 16)) & 15;
        fifth << 4 | nibble
    })
}

pub(crate) fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half(block, 0);
    for (out, &q) in out.iter_mut().zip(&block[2..]) {
        *out = d * f32::from(q as i8);
    }
}

pub(crate) struct Q4_0;
pub(crate) struct Q4_1;
pub(crate) struct Q5_0;
pub(crate) struct Q5_1;
pub(crate) struct Q8_0;

impl Blocked for Q4_0 {
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
            if n == 0 { V::low_nibbles_less_8(nibbles, scale) } else { V::high_nibbles_less_8(nibbles, scale) }
        }
    }
}

impl Blocked for Q4_1 {
    const NUMBERS: usize = 32;
    const BYTES: usize = 20;
    const GROUP: usize = 32;
    type Opened = ();
    const CLOSED: () = ();

    #[inline(always)]
    unsafe fn open<V: Lanes>(_: *const u8, _: &mut ()) {}
    #[inline(always)]
    unsafe fn sixteen<V: Lanes>(block: *const u8, _: &(), n: usize) -> V {
        // SAFETY: the caller's; all lie in the block.
        unsafe {
            let (scale, minimum, nibbles) = (V::splat_f16(block), V::splat_f16(block.add(2)), block.add(4));
            if n == 0 { V::low_nibbles(nibbles, scale, minimum) } else { V::high_nibbles(nibbles, scale, minimum) }
        }
    }
}

impl Blocked for Q5_0 {
    const NUMBERS: usize = 32;
    const BYTES: usize = 22;
    const GROUP: usize = 32;
    type Opened = Apart<32>;
    const CLOSED: Apart<32> = Apart::EMPTY;

    #[inline(always)]
    unsafe fn open<V: Lanes>(block: *const u8, opened: &mut Apart<32>) {
        // SAFETY: the caller's.
        let block: &[u8; 22] = unsafe { bytes(block) };
        open_fives(block[2..].try_into().expect("20 bytes"), -16, &mut opened.numbers);
    }
    #[inline(always)]
    unsafe fn sixteen<V: Lanes>(block: *const u8, opened: &Apart<32>, n: usize) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_i8(opened.numbers.as_ptr().add(16 * n).cast()).mul(V::splat_f16(block)) }
    }
}

impl Blocked for Q5_1 {
    const NUMBERS: usize = 32;
    const BYTES: usize = 24;
    const GROUP: usize = 32;
    type Opened = Apart<32>;
    const CLOSED: Apart<32> = Apart::EMPTY;

    #[inline(always)]
    unsafe fn open<V: Lanes>(block: *const u8, opened: &mut Apart<32>) {
        // SAFETY: the caller's.
        let block: &[u8; 24] = unsafe { bytes(block) };
        open_fives(block[4..].try_into().expect("20 bytes"), 0, &mut opened.numbers);
    }
    #[inline(always)]
    unsafe fn sixteen<V: Lanes>(block: *const u8, opened: &Apart<32>, n: usize) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_i8(opened.numbers.as_ptr().add(16 * n).cast()).fma(V::splat_f16(block), V::splat_f16(block.add(2))) }
    }
}

/// [`fives`] plus `offset`, in loops that compilers turn into vectors: the byte with a number's fifth bit is copied eight times, and the
/// bit asked for by a mask.
#[inline(always)]
fn open_fives(bytes: &[u8; 20], offset: i8, out: &mut [i8; 32]) {
    const BITS: [u8; 16] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];
    let fifths: [u8; 32] = std::array::from_fn(|i| bytes[i / 8]);
    for j in 0..16 {
        let byte = bytes[4 + j];
        let fifth = |of: u8| if of & BITS[j] != 0 { 16 } else { 0 };
        out[j] = (byte & 15 | fifth(fifths[j])) as i8 + offset;
        out[16 + j] = (byte >> 4 | fifth(fifths[16 + j])) as i8 + offset;
    }
}

impl Blocked for Q8_0 {
    const NUMBERS: usize = 32;
    const BYTES: usize = 34;
    const GROUP: usize = 32;
    type Opened = ();
    const CLOSED: () = ();

    #[inline(always)]
    unsafe fn open<V: Lanes>(_: *const u8, _: &mut ()) {}
    #[inline(always)]
    unsafe fn sixteen<V: Lanes>(block: *const u8, _: &(), n: usize) -> V {
        // SAFETY: the caller's; both lie in the block.
        unsafe { V::load_i8(block.add(2 + 16 * n)).mul(V::splat_f16(block)) }
    }
}
