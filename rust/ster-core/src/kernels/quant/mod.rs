//! The block formats of GGUF: what their bytes mean, and how sixteen numbers at a time are widened beside a sum.
//!
//! A block holds 32 or 256 small whole numbers `q`, scales `d` and perhaps minima `m`; a weight is the f32 number `d * q` or
//! `d * q + m`. `d` has 11 bits as f16, times a scale of 6 to 8 bits within a block of 256; `q` has 8 at most: `d * q` is exact in f32,
//! and `d * q + m` is rounded once, whether in two operations or in one.
//!
//! Each format is here twice, once as its definition (`q4_0`: plain, a block at a time, bit for bit what `gguf.quants.dequantize` of
//! gguf-py gives), once as what kernels do ([`Blocked`], on `struct Q4_0`). Sources: `ggml-common.h` (the layouts) and `ggml-quants.c`
//! (`dequantize_row_*`) of <https://github.com/ggml-org/ggml>, `quants.py` of gguf-py.

pub(crate) mod iq4;
pub(crate) mod k;
pub(crate) mod legacy;

use super::simd::{LANES, Lanes};

/// The numbers of whole blocks, by the definition of one.
pub(crate) fn each<const BYTES: usize, const NUMBERS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    definition: impl Fn(&[u8; BYTES], &mut [f32; NUMBERS]),
) {
    for (block, out) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        definition(block, out);
    }
}

/// The f16 number in bytes `at` and `at + 1`.
fn half(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// A block format as kernels read it.
///
/// # Safety
/// Of every function: as [`Lanes`], and a whole block is readable at `block`.
pub(crate) trait Blocked {
    const NUMBERS: usize;
    const BYTES: usize;
    /// Numbers that share loads and scales: their steps of sixteen are best taken in one go. Divides `NUMBERS`.
    const GROUP: usize;
    /// What is worked out once a block.
    type Opened: Copy;
    const CLOSED: Self::Opened;

    unsafe fn open<V: Lanes>(block: *const u8, opened: &mut Self::Opened);
    /// Numbers `16 n..16 n + 16` of the block.
    unsafe fn sixteen<V: Lanes>(block: *const u8, opened: &Self::Opened, n: usize) -> V;
}

/// A block taken apart: `numbers[i] * scales[i / EACH] + minima[i / EACH]`, without minima `numbers[i] * scales[i / EACH]`.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Apart<const NUMBERS: usize> {
    numbers: [i8; NUMBERS],
    scales: [f32; LANES],
    minima: [f32; LANES],
}

impl<const NUMBERS: usize> Apart<NUMBERS> {
    const EMPTY: Self = Apart { numbers: [0; NUMBERS], scales: [0.0; LANES], minima: [0.0; LANES] };

    /// # Safety
    /// As [`Lanes`].
    #[inline(always)]
    unsafe fn scaled<V: Lanes>(&self, n: usize, scale: usize) -> V {
        debug_assert!(LANES * n < NUMBERS);
        // SAFETY: the caller's; inside the array.
        unsafe { V::load_i8(self.numbers.as_ptr().add(LANES * n).cast()).mul(V::splat(self.scales[scale])) }
    }

    /// # Safety
    /// As [`Lanes`].
    #[inline(always)]
    unsafe fn scaled_from<V: Lanes>(&self, n: usize, scale: usize) -> V {
        debug_assert!(LANES * n < NUMBERS);
        // SAFETY: the caller's; inside the array.
        unsafe { V::load_i8(self.numbers.as_ptr().add(LANES * n).cast()).fma(V::splat(self.scales[scale]), V::splat(self.minima[scale])) }
    }
}

/// The block at `block`.
///
/// # Safety
/// It is readable for `'a`.
#[inline(always)]
unsafe fn bytes<'a, const BYTES: usize>(block: *const u8) -> &'a [u8; BYTES] {
    // SAFETY: the caller's; bytes have no alignment.
    unsafe { &*block.cast() }
}
