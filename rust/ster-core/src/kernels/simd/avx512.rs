//! AVX-512: sixteen lanes are one register.

use std::arch::x86_64::*;

use super::{LANES, Lanes};
use crate::kernels::isa::{Isa, Kind};

#[derive(Clone, Copy)]
pub(crate) struct V(__m512);

// SAFETY of every block below: the trait asks its callers for the instruction set and for valid pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for V {
    const ISA: Isa = Isa(Kind::Avx512);
    // 24 sums, 6 rows of W and 1 of x: 31 of 32 registers.
    const TILE: (usize, usize) = (4, 6);
    const MIX: (usize, usize) = (4, 4);

    #[inline(always)]
    unsafe fn zero() -> Self {
        V(unsafe { _mm512_setzero_ps() })
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        V(unsafe { _mm512_set1_ps(value) })
    }
    #[inline(always)]
    unsafe fn splat_f16(bits: u16) -> Self {
        V(unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(bits as i16)) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        V(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn load_f32(from: *const u8) -> Self {
        V(unsafe { _mm512_loadu_ps(from.cast()) })
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        unsafe {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            V(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        V(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) })
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        unsafe { V(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))) }
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
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn mul(self, by: Self) -> Self {
        V(unsafe { _mm512_mul_ps(self.0, by.0) })
    }
    #[inline(always)]
    unsafe fn fma(self, by: Self, to: Self) -> Self {
        V(unsafe { _mm512_fmadd_ps(self.0, by.0, to.0) })
    }
    #[inline(always)]
    unsafe fn prefetch(line: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        V(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    /// All four at once: a quarter of a register each once the lanes 8 and 4 apart are added. `_mm512_reduce_add_ps` would leave
    /// the order to the compiler.
    #[inline(always)]
    unsafe fn reduce4([a, b, c, d]: [Self; 4]) -> [f32; 4] {
        unsafe {
            let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a.0, b.0), _mm512_shuffle_f32x4::<0xEE>(a.0, b.0));
            let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c.0, d.0), _mm512_shuffle_f32x4::<0xEE>(c.0, d.0));
            let by4 = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xDD>(ab, cd));
            let by2 = _mm512_add_ps(by4, _mm512_permute_ps::<0x4E>(by4));
            let by1 = _mm512_add_ps(by2, _mm512_permute_ps::<0xB1>(by2));
            let first = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), by1);
            let mut sums = [0.0; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), _mm512_castps512_ps128(first));
            sums
        }
    }
}
