//! Sixteen f32 lanes: the unit in which every dot product is defined, whatever register holds them.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod portable;

pub(crate) const LANES: usize = 16;

/// Sixteen lanes and the few operations the kernels need of them.
///
/// # Safety
/// Every function may use the implementing instruction set: call it only, inlined, from a function that has it switched on (see
/// `per_isa!`). Loads and stores touch sixteen numbers at the pointer, at any alignment.
pub(crate) trait Lanes: Copy {
    /// The register tile of a matrix product: rows of `x` by rows of `W` that are summed at once.
    const TILE: (usize, usize);
    /// The register tile of a weighted sum: rows by groups of sixteen columns.
    const MIX: (usize, usize);

    unsafe fn zero() -> Self;
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// Sixteen f32 at any alignment, little-endian.
    unsafe fn load_f32(from: *const u8) -> Self;
    unsafe fn load_bf16(from: *const u8) -> Self;
    unsafe fn load_f16(from: *const u8) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// `self * by + to`, rounded once.
    unsafe fn fma(self, by: Self, to: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
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
