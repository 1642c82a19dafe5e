//! The block formats of GGUF: what their bytes mean, and how they are taken apart beside a sum.
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
    half::f16::from_bits(bits(block, at)).to_f32()
}

#[inline(always)]
fn bits(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// Numbers that are taken apart at a time: the largest block, or several small ones.
pub(crate) const SPAN: usize = 256;

/// A block format as kernels read it.
pub(crate) trait Blocked {
    const NUMBERS: usize;
    const BYTES: usize;
    /// Numbers that share a scale: 16 or 32.
    const EACH: usize;
    const MINIMA: bool;

    /// Take apart the blocks at `from` that make up `numbers` numbers, at most [`SPAN`].
    ///
    /// # Safety
    /// As [`Lanes`], and the blocks are readable.
    unsafe fn open<V: Lanes>(from: *const u8, numbers: usize, into: &mut Apart);

    /// Where numbers `16 n..16 n + 16` of the blocks at `from` are, once these are taken apart.
    #[inline(always)]
    fn numbers(from: *const u8, apart: &Apart, n: usize) -> *const i8 {
        let _ = from;
        apart.numbers.as_ptr().wrapping_add(LANES * n)
    }
}

/// Blocks taken apart: number i is `numbers[i] * scales[i / EACH]`, or `numbers[i] * scales[i / EACH] + minima[i / EACH]`.
///
/// Small whole numbers are picked out of bits 16 or 32 at a time, by plain loops that compilers turn into vectors; widening them to f32
/// lanes, the larger part, reads them back from memory, which is free where crossing lanes of a register is not. AVX2 on Zen 3, one core,
/// Q4_0 / Q4_1 / Q4_K: 1.35 / 1.5 / 1.25 times as fast as widening nibbles in registers.
#[repr(align(64))]
pub(crate) struct Apart {
    numbers: [i8; SPAN],
    scales: [f32; LANES],
    minima: [f32; LANES],
}

impl Apart {
    pub(crate) const EMPTY: Apart = Apart { numbers: [0; SPAN], scales: [0.0; LANES], minima: [0.0; LANES] };

    /// Numbers `16 n..16 n + 16` of the blocks at `from`, widened.
    ///
    /// # Safety
    /// As [`Lanes`], and these blocks, of so many numbers, were taken apart.
    #[inline(always)]
    pub(crate) unsafe fn sixteen<V: Lanes, B: Blocked>(&self, from: *const u8, n: usize) -> V {
        debug_assert!(LANES * n < SPAN);
        // SAFETY: the caller's; inside the arrays.
        unsafe {
            let numbers = V::load_i8(B::numbers(from, self, n).cast());
            let scale = V::splat(*self.scales.get_unchecked(LANES * n / B::EACH));
            if B::MINIMA { numbers.fma(scale, V::splat(*self.minima.get_unchecked(LANES * n / B::EACH))) } else { numbers.mul(scale) }
        }
    }
}
