//! Sixteen f32 lanes: the unit in which every dot product is defined, whatever register holds them.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod portable;

use super::Isa;
use super::linear::{Ahead, Stored};

pub(crate) const LANES: usize = 16;

/// Sixteen lanes and the few operations the kernels need of them.
///
/// # Safety
/// Every function may use the implementing instruction set: call it only, inlined, from a function that has it switched on (see
/// `per_isa!`). Loads and stores touch sixteen numbers at the pointer, at any alignment.
pub(crate) trait Lanes: Copy {
    const ISA: Isa;
    /// The register tile of a matrix product: rows of `x` by rows of `W` that are summed at once.
    const TILE: (usize, usize);
    /// The register tile of a weighted sum: rows by groups of sixteen columns.
    const MIX: (usize, usize);
    /// Whether half-width weights are cheaper widened once for some rows of `x` than in every tile.
    const WIDEN_FIRST: bool = false;

    unsafe fn zero() -> Self;
    unsafe fn splat(value: f32) -> Self;
    /// The f16 number of these bits.
    unsafe fn splat_f16(bits: u16) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// Sixteen f32 at any alignment, little-endian.
    unsafe fn load_f32(from: *const u8) -> Self;
    unsafe fn load_bf16(from: *const u8) -> Self;
    unsafe fn load_f16(from: *const u8) -> Self;
    /// Sixteen signed bytes.
    unsafe fn load_i8(from: *const u8) -> Self;
    /// `values[i]` of sixteen indices, each below 16.
    unsafe fn pick(indices: [u8; LANES], values: &[i8; LANES]) -> [i8; LANES];
    unsafe fn store(self, to: *mut f32);
    unsafe fn mul(self, by: Self) -> Self;
    /// `self * by + to`, rounded once.
    unsafe fn fma(self, by: Self, to: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    /// `acc[i][j] += x[i] * w[j]`, lane by lane, for the first `count` numbers of each row, a multiple of sixteen; rows of `x` lie `k`
    /// numbers apart, rows of `w` `stride` bytes. Fetches `LINES` of what is `ahead` beside each sixteen.
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
        // SAFETY: the caller's.
        unsafe {
            for at in (0..count).step_by(LANES) {
                (0..LINES).for_each(|_| ahead.fetch::<Self>());
                let columns: [Self; COLS] = std::array::from_fn(|j| S::load::<Self>(w.add(j * stride + at * S::BYTES)));
                for (i, acc) in acc.iter_mut().enumerate() {
                    let row = Self::load(x.add(i * k + at));
                    for (acc, column) in acc.iter_mut().zip(columns) {
                        *acc = row.fma(column, *acc);
                    }
                }
            }
        }
    }
    /// Sixteen rows of sixteen numbers, `stride` apart, become sixteen columns: number `i` of row `j` goes to `to + order[i] * apart + j`.
    #[inline(always)]
    unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, apart: usize, order: &[usize; LANES]) {
        for (i, place) in order.iter().enumerate() {
            for j in 0..LANES {
                // SAFETY: the caller's.
                unsafe { *to.add(place * apart + j) = *from.add(j * stride + i) };
            }
        }
    }
    /// Fetch the line at the pointer, which may be anywhere, into the second-level cache.
    #[inline(always)]
    unsafe fn prefetch(_line: *const u8) {}
    /// The four sums, each by the one tree: lanes 8 apart, then 4, 2 and 1.
    unsafe fn reduce4(vectors: [Self; 4]) -> [f32; 4];
}

/// The tree of [`Lanes::reduce4`], for one vector in memory.
#[inline(always)]
pub(crate) fn tree(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}
