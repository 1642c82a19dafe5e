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

use super::{Apart, Blocked, half};
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

/// Blocks of 32 numbers: `numbers` takes those of one apart; `d`, with minima also `m`, stand at its beginning.
macro_rules! blocked {
    ($format:ident, $bytes:literal, minima: $minima:literal, $numbers:ident) => {
        impl Blocked for $format {
            const NUMBERS: usize = 32;
            const BYTES: usize = $bytes;
            const EACH: usize = 32;
            const MINIMA: bool = $minima;

            #[inline(always)]
            unsafe fn open<V: Lanes>(from: *const u8, numbers: usize, into: &mut Apart) {
                // SAFETY: the caller's.
                unsafe { open::<V, $bytes, $minima>(from, numbers / 32, into, $numbers::<V>) }
            }
        }
    };
}
pub(super) use blocked;

blocked!(Q4_0, 18, minima: false, open_q4_0);
blocked!(Q4_1, 20, minima: true, open_q4_1);
blocked!(Q5_0, 22, minima: false, open_q5_0);
blocked!(Q5_1, 24, minima: true, open_q5_1);

/// # Safety
/// As [`Lanes`], and so many blocks are readable.
#[inline(always)]
pub(super) unsafe fn open<V: Lanes, const BYTES: usize, const MINIMA: bool>(
    from: *const u8,
    blocks: usize,
    into: &mut Apart,
    numbers: impl Fn(&[u8; BYTES], &mut [i8; 32]),
) {
    for b in 0..blocks {
        // SAFETY: the caller's.
        let block: &[u8; BYTES] = unsafe { &*from.add(b * BYTES).cast() };
        numbers(block, into.numbers[32 * b..].first_chunk_mut().expect("32 numbers a block"));
    }
    // Joined in general registers: a vector put together in memory would wait until all its parts are written.
    let halves = |at: usize| -> [u64; 4] {
        std::array::from_fn(|four| {
            (0..4).rev().fold(0, |word, i| {
                let b = (4 * four + i).min(blocks - 1);
                // SAFETY: the caller's.
                word << 16 | u64::from(unsafe { from.add(b * BYTES + at).cast::<u16>().read_unaligned() })
            })
        })
    };
    // SAFETY: the caller's; arrays of sixteen.
    unsafe {
        let [a, b, ..] = halves(0);
        V::load_f16([a, b, 0, 0].as_ptr().cast()).store(into.scales.as_mut_ptr());
        if MINIMA {
            let [a, b, ..] = halves(2);
            V::load_f16([a, b, 0, 0].as_ptr().cast()).store(into.minima.as_mut_ptr());
        }
    }
}

#[inline(always)]
fn open_q4_0<V: Lanes>(block: &[u8; 18], out: &mut [i8; 32]) {
    for j in 0..16 {
        let byte = block[2 + j];
        out[j] = (byte & 15) as i8 - 8;
        out[16 + j] = (byte >> 4) as i8 - 8;
    }
}

#[inline(always)]
fn open_q4_1<V: Lanes>(block: &[u8; 20], out: &mut [i8; 32]) {
    for j in 0..16 {
        let byte = block[4 + j];
        out[j] = (byte & 15) as i8;
        out[16 + j] = (byte >> 4) as i8;
    }
}

#[inline(always)]
fn open_q5_0<V: Lanes>(block: &[u8; 22], out: &mut [i8; 32]) {
    open_fives(block[2..].first_chunk().expect("20 bytes"), -16, out);
}

#[inline(always)]
fn open_q5_1<V: Lanes>(block: &[u8; 24], out: &mut [i8; 32]) {
    open_fives(block[4..].first_chunk().expect("20 bytes"), 0, out);
}

/// [`fives`] plus `offset`: the byte with a number's fifth bit is copied eight times, and the bit asked for by a mask.
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

/// Its numbers need no taking apart.
impl Blocked for Q8_0 {
    const NUMBERS: usize = 32;
    const BYTES: usize = 34;
    const EACH: usize = 32;
    const MINIMA: bool = false;

    #[inline(always)]
    unsafe fn open<V: Lanes>(from: *const u8, numbers: usize, into: &mut Apart) {
        // SAFETY: the caller's.
        unsafe { open::<V, 34, false>(from, numbers / 32, into, |_, _| ()) }
    }
    #[inline(always)]
    fn numbers(from: *const u8, _: &Apart, n: usize) -> *const i8 {
        from.wrapping_add(34 * (n / 2) + 2 + 16 * (n % 2)).cast()
    }
}
