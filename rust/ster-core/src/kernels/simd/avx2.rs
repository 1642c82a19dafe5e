//! AVX2 with FMA and F16C: lanes 0 to 7 in one register, 8 to 15 in another.

use std::arch::x86_64::*;

use super::{LANES, Lanes};
use crate::kernels::isa::{Isa, Kind};
use crate::kernels::linear::{Ahead, Stored};

#[derive(Clone, Copy)]
pub(crate) struct V(__m256, __m256);

// SAFETY of every block below: the trait asks its callers for the instruction set and for valid pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for V {
    const ISA: Isa = Isa(Kind::Avx2);
    // 12 registers of sums, 3 for rows of W, 1 for a row of x: all 16.
    const TILE: (usize, usize) = (2, 3);
    const MIX: (usize, usize) = (3, 2);
    const WIDEN_FIRST: bool = true;

    #[inline(always)]
    unsafe fn zero() -> Self {
        unsafe { V(_mm256_setzero_ps(), _mm256_setzero_ps()) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        unsafe { V(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }
    #[inline(always)]
    unsafe fn splat_f16(bits: u16) -> Self {
        unsafe {
            let all = _mm256_cvtph_ps(_mm_set1_epi16(bits as i16));
            V(all, all)
        }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { V(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn load_f32(from: *const u8) -> Self {
        unsafe { Self::load(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        #[inline(always)]
        unsafe fn eight(from: *const u8) -> __m256 {
            unsafe {
                let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
            }
        }
        unsafe { V(eight(from), eight(from.add(16))) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        unsafe { V(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())), _mm256_cvtph_ps(_mm_loadu_si128(from.add(16).cast()))) }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        #[inline(always)]
        unsafe fn eight(from: *const u8) -> __m256 {
            unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
        }
        unsafe { V(eight(from), eight(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn pick(indices: [u8; LANES], values: &[i8; LANES]) -> [i8; LANES] {
        let mut found = [0; LANES];
        unsafe {
            let picked = _mm_shuffle_epi8(_mm_loadu_si128(values.as_ptr().cast()), _mm_loadu_si128(indices.as_ptr().cast()));
            _mm_storeu_si128(found.as_mut_ptr().cast(), picked);
        }
        found
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn mul(self, by: Self) -> Self {
        unsafe { V(_mm256_mul_ps(self.0, by.0), _mm256_mul_ps(self.1, by.1)) }
    }
    #[inline(always)]
    unsafe fn fma(self, by: Self, to: Self) -> Self {
        unsafe { V(_mm256_fmadd_ps(self.0, by.0, to.0), _mm256_fmadd_ps(self.1, by.1, to.1)) }
    }
    /// Lanes 0 to 7, then lanes 8 to 15 of each sixteen: both at once would not leave a register for `x`.
    #[inline(always)]
    unsafe fn multiply<S: Stored, const ROWS: usize, const COLS: usize, const LINES: usize>(
        acc: &mut [[Self; COLS]; ROWS],
        x: *const f32,
        k: usize,
        w: *const u8,
        stride: usize,
        count: usize,
        ahead: &mut Ahead,
    ) {
        unsafe {
            for at in (0..count).step_by(LANES) {
                (0..LINES).for_each(|_| ahead.fetch::<Self>());
                let low: [__m256; COLS] = std::array::from_fn(|j| S::load::<Self>(w.add(j * stride + at * S::BYTES)).0);
                for (i, acc) in acc.iter_mut().enumerate() {
                    let row = _mm256_loadu_ps(x.add(i * k + at));
                    for (acc, column) in acc.iter_mut().zip(low) {
                        acc.0 = _mm256_fmadd_ps(row, column, acc.0);
                    }
                }
                let high: [__m256; COLS] = std::array::from_fn(|j| S::load::<Self>(w.add(j * stride + at * S::BYTES)).1);
                for (i, acc) in acc.iter_mut().enumerate() {
                    let row = _mm256_loadu_ps(x.add(i * k + at + LANES / 2));
                    for (acc, column) in acc.iter_mut().zip(high) {
                        acc.1 = _mm256_fmadd_ps(row, column, acc.1);
                    }
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, apart: usize, order: &[usize; LANES]) {
        unsafe {
            for (i, j) in [(0, 0), (4, 0), (8, 0), (12, 0), (0, 8), (4, 8), (8, 8), (12, 8)] {
                // Halves of rows j and j + 4 come together as they are loaded: crossing them later is slow on Zen 1.
                let rows: [__m256; 4] = std::array::from_fn(|n| {
                    let from = from.add((j + n) * stride + i);
                    let low = _mm256_castps128_ps256(_mm_loadu_ps(from));
                    _mm256_insertf128_ps::<1>(low, _mm_loadu_ps(from.add(4 * stride)))
                });
                let [a, b, c, d] = rows;
                let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
                let (ef, gh) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
                _mm256_storeu_ps(to.add(order[i] * apart + j), _mm256_shuffle_ps::<0x44>(ab, cd));
                _mm256_storeu_ps(to.add(order[i + 1] * apart + j), _mm256_shuffle_ps::<0xEE>(ab, cd));
                _mm256_storeu_ps(to.add(order[i + 2] * apart + j), _mm256_shuffle_ps::<0x44>(ef, gh));
                _mm256_storeu_ps(to.add(order[i + 3] * apart + j), _mm256_shuffle_ps::<0xEE>(ef, gh));
            }
        }
    }
    #[inline(always)]
    unsafe fn prefetch(line: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe { V(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn reduce4([a, b, c, d]: [Self; 4]) -> [f32; 4] {
        /// Lane 0 of each half: the sum of `a` and of `b`.
        #[inline(always)]
        unsafe fn two(a: V, b: V) -> __m256 {
            unsafe {
                let (a, b) = (_mm256_add_ps(a.0, a.1), _mm256_add_ps(b.0, b.1));
                let by4 = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
                let by2 = _mm256_add_ps(by4, _mm256_permute_ps::<0x4E>(by4));
                _mm256_add_ps(by2, _mm256_permute_ps::<0xB1>(by2))
            }
        }
        unsafe {
            let (ab, cd) = (two(a, b), two(c, d));
            [
                _mm256_cvtss_f32(ab),
                _mm_cvtss_f32(_mm256_extractf128_ps::<1>(ab)),
                _mm256_cvtss_f32(cd),
                _mm_cvtss_f32(_mm256_extractf128_ps::<1>(cd)),
            ]
        }
    }
}
