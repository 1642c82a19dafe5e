//! Plain Rust: the definition the other instruction sets are held to.

use super::{LANES, Lanes, tree};
use crate::kernels::isa::{Isa, Kind};

#[derive(Clone, Copy)]
pub(crate) struct V([f32; LANES]);

impl Lanes for V {
    const ISA: Isa = Isa(Kind::Portable);
    const TILE: (usize, usize) = (2, 2);
    const MIX: (usize, usize) = (1, 1);

    #[inline(always)]
    unsafe fn zero() -> Self {
        V([0.0; LANES])
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        V([value; LANES])
    }
    #[inline(always)]
    unsafe fn splat_f16(bits: u16) -> Self {
        V([half::f16::from_bits(bits).to_f32(); LANES])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller gives sixteen readable floats.
        V(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f32(from: *const u8) -> Self {
        // SAFETY: the caller gives sixteen readable floats.
        let bytes = unsafe { from.cast::<[[u8; 4]; LANES]>().read_unaligned() };
        V(bytes.map(f32::from_le_bytes))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        // SAFETY: the caller gives sixteen readable halves.
        let bytes = unsafe { from.cast::<[[u8; 2]; LANES]>().read_unaligned() };
        V(bytes.map(|b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller gives sixteen readable halves.
        let bytes = unsafe { from.cast::<[[u8; 2]; LANES]>().read_unaligned() };
        V(bytes.map(|b| half::f16::from_le_bytes(b).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        // SAFETY: the caller gives sixteen readable bytes.
        let bytes = unsafe { from.cast::<[i8; LANES]>().read_unaligned() };
        V(bytes.map(f32::from))
    }
    #[inline(always)]
    unsafe fn pick(indices: [u8; LANES], values: &[i8; LANES]) -> [i8; LANES] {
        indices.map(|i| values[usize::from(i)])
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller gives sixteen writable floats.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn mul(self, by: Self) -> Self {
        V(std::array::from_fn(|l| self.0[l] * by.0[l]))
    }
    #[inline(always)]
    unsafe fn fma(self, by: Self, to: Self) -> Self {
        V(std::array::from_fn(|l| self.0[l].mul_add(by.0[l], to.0[l])))
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        V(std::array::from_fn(|l| self.0[l] + other.0[l]))
    }
    #[inline(always)]
    unsafe fn reduce4(vectors: [Self; 4]) -> [f32; 4] {
        vectors.map(|v| tree(v.0))
    }
}
