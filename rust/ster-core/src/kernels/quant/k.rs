//! Blocks of 256 numbers, the "K" formats: groups of 16 or 32 numbers with scales of their own, which the block's f16 scales.
//!
//! | format | bytes | a number |
//! | --- | --- | --- |
//! | Q2_K | 16 of scales and minima, 64 of pairs of bits, d, dmin | `d * scale * q - dmin * minimum`, groups of 16 |
//! | Q3_K | 32 of third bits, 64 of pairs of bits, 12 of scales, d | `d * (scale - 32) * (q - 4)`, groups of 16 |
//! | Q4_K | d, dmin, 12 of scales and minima, 128 of nibbles | `d * scale * q - dmin * minimum`, groups of 32 |
//! | Q5_K | d, dmin, 12 of scales and minima, 32 of fifth bits, 128 of nibbles | the same |
//! | Q6_K | 128 of nibbles, 64 of pairs of upper bits, 16 of signed scales, d | `d * scale * (q - 32)`, groups of 16 |
//!
//! Pairs of bits: number `128 g + 32 s + l` (l < 32) is in byte `32 g + l`, `2 s` bits up. Nibbles of Q4_K and Q5_K: number
//! `64 c + 32 h + l` is the low (h = 0) or high one of byte `32 c + l`; of Q6_K number `128 g + 64 h + l` (l < 64) that of byte
//! `64 g + l`. Third and fifth bits: bit `i / 32` of byte `i % 32` is number i's.

use super::{Apart, Blocked, bits, half};
use crate::kernels::simd::Lanes;

pub(crate) fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (d, dmin) = (half(block, 80), half(block, 82));
    for (i, out) in out.iter_mut().enumerate() {
        let (scale, minimum) = (block[i / 16] & 15, block[i / 16] >> 4);
        let q = pair(&block[16..80], i);
        *out = d * f32::from(scale) * f32::from(q) - dmin * f32::from(minimum);
    }
}

pub(crate) fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let d = half(block, 108);
    let scales = scales_q3_k(block[96..108].try_into().expect("12 bytes"));
    for (i, out) in out.iter_mut().enumerate() {
        let third = block[i % 32] >> (i / 32) & 1;
        let q = pair(&block[32..96], i) + 4 * third;
        *out = d * f32::from(scales[i / 16]) * (f32::from(q) - 4.0);
    }
}

pub(crate) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (half(block, 0), half(block, 2));
    let scales = scales_q4_k(block[4..16].try_into().expect("12 bytes"));
    for (i, out) in out.iter_mut().enumerate() {
        let q = block[16 + 32 * (i / 64) + i % 32] >> (4 * (i / 32 % 2)) & 15;
        *out = d * f32::from(scales[i / 32]) * f32::from(q) - dmin * f32::from(scales[8 + i / 32]);
    }
}

pub(crate) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin) = (half(block, 0), half(block, 2));
    let scales = scales_q4_k(block[4..16].try_into().expect("12 bytes"));
    for (i, out) in out.iter_mut().enumerate() {
        let fifth = block[16 + i % 32] >> (i / 32) & 1;
        let q = block[48 + 32 * (i / 64) + i % 32] >> (4 * (i / 32 % 2)) & 15 | fifth << 4;
        *out = d * f32::from(scales[i / 32]) * f32::from(q) - dmin * f32::from(scales[8 + i / 32]);
    }
}

pub(crate) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = half(block, 208);
    for (i, out) in out.iter_mut().enumerate() {
        let nibble = block[64 * (i / 128) + i % 64] >> (4 * (i / 64 % 2)) & 15;
        let q = pair(&block[128..192], i) << 4 | nibble;
        *out = d * f32::from(block[192 + i / 16] as i8) * (f32::from(q) - 32.0);
    }
}

/// Two bits of number `i`.
fn pair(bytes: &[u8], i: usize) -> u8 {
    bytes[32 * (i / 128) + i % 32] >> (2 * (i / 32 % 4)) & 3
}

/// Sixteen scales of six bits, less 32: four lower bits each in the nibbles of eight bytes, as Q4_0's lie, then the upper ones in pairs.
#[inline(always)]
fn scales_q3_k(bytes: &[u8; 12]) -> [i8; 16] {
    std::array::from_fn(|i| {
        let low = bytes[i % 8] >> (4 * (i / 8)) & 15;
        let high = bytes[8 + i % 4] >> (2 * (i / 4)) & 3;
        (low | high << 4) as i8 - 32
    })
}

/// Eight scales of six bits, then eight minima. The first four of each are the lower six bits of bytes 0 to 3 and 4 to 7, whose two
/// upper bits are those of the last four; the lower four bits of these are the nibbles of bytes 8 to 11.
#[inline(always)]
fn scales_q4_k(bytes: &[u8; 12]) -> [u8; 16] {
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let (scales, minima, last) = (word(0), word(4), word(8));
    let six = |word: u32| word & 0x3F3F_3F3F;
    let upper = |word: u32| word >> 2 & 0x3030_3030;
    let words = [six(scales), last & 0x0F0F_0F0F | upper(scales), six(minima), last >> 4 & 0x0F0F_0F0F | upper(minima)];
    let mut all = [0; 16];
    for (four, word) in all.chunks_exact_mut(4).zip(words) {
        four.copy_from_slice(&word.to_le_bytes());
    }
    all
}

pub(crate) struct Q2K;
pub(crate) struct Q3K;
pub(crate) struct Q4K;
pub(crate) struct Q5K;
pub(crate) struct Q6K;

/// The sign of an f16 number.
const SIGN: u16 = 0x8000;

impl Blocked for Q2K {
    const NUMBERS: usize = 256;
    const BYTES: usize = 84;
    const EACH: usize = 16;
    const MINIMA: bool = true;

    #[inline(always)]
    unsafe fn open<V: Lanes>(block: *const u8, _: usize, into: &mut Apart) {
        // SAFETY: the caller's.
        let b: &[u8; 84] = unsafe { &*block.cast() };
        for g in 0..2 {
            for l in 0..32 {
                let byte = b[16 + 32 * g + l];
                for s in 0..4 {
                    into.numbers[128 * g + 32 * s + l] = (byte >> (2 * s) & 3) as i8;
                }
            }
        }
        let scales: [u8; 16] = std::array::from_fn(|i| b[i] & 15);
        let minima: [u8; 16] = std::array::from_fn(|i| b[i] >> 4);
        // SAFETY: the caller's.
        unsafe {
            V::load_i8(scales.as_ptr()).mul(V::splat_f16(bits(b, 80))).store(into.scales.as_mut_ptr());
            V::load_i8(minima.as_ptr()).mul(V::splat_f16(bits(b, 82) ^ SIGN)).store(into.minima.as_mut_ptr());
        }
    }
}

impl Blocked for Q3K {
    const NUMBERS: usize = 256;
    const BYTES: usize = 110;
    const EACH: usize = 16;
    const MINIMA: bool = false;

    #[inline(always)]
    unsafe fn open<V: Lanes>(block: *const u8, _: usize, into: &mut Apart) {
        // SAFETY: the caller's.
        let b: &[u8; 110] = unsafe { &*block.cast() };
        for g in 0..2 {
            for l in 0..32 {
                let (byte, thirds) = (b[32 + 32 * g + l], b[l] >> (4 * g));
                for s in 0..4 {
                    into.numbers[128 * g + 32 * s + l] = (byte >> (2 * s) & 3 | (thirds >> s & 1) << 2) as i8 - 4;
                }
            }
        }
        let scales = scales_q3_k(b[96..108].try_into().expect("12 bytes"));
        // SAFETY: the caller's.
        unsafe { V::load_i8(scales.as_ptr().cast()).mul(V::splat_f16(bits(b, 108))).store(into.scales.as_mut_ptr()) }
    }
}

/// Scales and minima of Q4_K and Q5_K, times `d` and `-dmin`.
///
/// # Safety
/// As [`Lanes`].
#[inline(always)]
unsafe fn open_scales<V: Lanes>(bytes: &[u8], into: &mut Apart) {
    let both = scales_q4_k(bytes[4..].first_chunk().expect("12 bytes"));
    // SAFETY: the caller's; arrays of sixteen.
    unsafe {
        let both = V::load_i8(both.as_ptr());
        both.mul(V::splat_f16(bits(bytes, 0))).store(into.scales.as_mut_ptr());
        both.mul(V::splat_f16(bits(bytes, 2) ^ SIGN)).store(into.minima.as_mut_ptr());
    }
    into.minima.copy_within(8.., 0);
}

impl Blocked for Q4K {
    const NUMBERS: usize = 256;
    const BYTES: usize = 144;
    const EACH: usize = 32;
    const MINIMA: bool = true;

    #[inline(always)]
    unsafe fn open<V: Lanes>(block: *const u8, _: usize, into: &mut Apart) {
        // SAFETY: the caller's.
        let b: &[u8; 144] = unsafe { &*block.cast() };
        for c in 0..4 {
            for l in 0..32 {
                let byte = b[16 + 32 * c + l];
                into.numbers[64 * c + l] = (byte & 15) as i8;
                into.numbers[64 * c + 32 + l] = (byte >> 4) as i8;
            }
        }
        // SAFETY: the caller's.
        unsafe { open_scales::<V>(b, into) }
    }
}

impl Blocked for Q5K {
    const NUMBERS: usize = 256;
    const BYTES: usize = 176;
    const EACH: usize = 32;
    const MINIMA: bool = true;

    #[inline(always)]
    unsafe fn open<V: Lanes>(block: *const u8, _: usize, into: &mut Apart) {
        // SAFETY: the caller's.
        let b: &[u8; 176] = unsafe { &*block.cast() };
        for c in 0..4 {
            for l in 0..32 {
                let (byte, fifths) = (b[48 + 32 * c + l], b[16 + l] >> (2 * c));
                into.numbers[64 * c + l] = (byte & 15 | (fifths & 1) << 4) as i8;
                into.numbers[64 * c + 32 + l] = (byte >> 4 | (fifths & 2) << 3) as i8;
            }
        }
        // SAFETY: the caller's.
        unsafe { open_scales::<V>(b, into) }
    }
}

impl Blocked for Q6K {
    const NUMBERS: usize = 256;
    const BYTES: usize = 210;
    const EACH: usize = 16;
    const MINIMA: bool = false;

    #[inline(always)]
    unsafe fn open<V: Lanes>(block: *const u8, _: usize, into: &mut Apart) {
        // SAFETY: the caller's.
        let b: &[u8; 210] = unsafe { &*block.cast() };
        for g in 0..2 {
            for l in 0..32 {
                let (one, two, upper) = (b[64 * g + l], b[64 * g + 32 + l], b[128 + 32 * g + l]);
                let numbers = &mut into.numbers[128 * g..];
                numbers[l] = (one & 15 | (upper & 3) << 4) as i8 - 32;
                numbers[32 + l] = (two & 15 | (upper >> 2 & 3) << 4) as i8 - 32;
                numbers[64 + l] = (one >> 4 | (upper >> 4 & 3) << 4) as i8 - 32;
                numbers[96 + l] = (two >> 4 | (upper >> 6) << 4) as i8 - 32;
            }
        }
        // SAFETY: the caller's; the scales lie in the block.
        unsafe { V::load_i8(block.add(192)).mul(V::splat_f16(bits(b, 208))).store(into.scales.as_mut_ptr()) }
    }
}
