//! NEON: sixteen lanes are four registers.

use std::arch::aarch64::*;

use super::{LANES, Lanes};
use crate::kernels::isa::{Isa, Kind};

#[derive(Clone, Copy)]
pub(crate) struct V([float32x4_t; 4]);

// SAFETY of every block below: NEON is part of every aarch64 target, and the trait asks its callers for valid pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for V {
    const ISA: Isa = Isa(Kind::Neon);
    // 24 registers of sums, 4 for a row of W, 4 for a row of x: all 32.
    const TILE: (usize, usize) = (2, 3);
    const MIX: (usize, usize) = (3, 2);

    #[inline(always)]
    unsafe fn zero() -> Self {
        unsafe { Self::splat(0.0) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        V([unsafe { vdupq_n_f32(value) }; 4])
    }
    #[inline(always)]
    unsafe fn splat_f16(bits: u16) -> Self {
        unsafe { Self::splat(half::f16::from_bits(bits).to_f32()) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { V([vld1q_f32(from), vld1q_f32(from.add(4)), vld1q_f32(from.add(8)), vld1q_f32(from.add(12))]) }
    }
    #[inline(always)]
    unsafe fn load_f32(from: *const u8) -> Self {
        unsafe { Self::load(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        unsafe {
            let (low, high) = (vreinterpretq_u16_u8(vld1q_u8(from)), vreinterpretq_u16_u8(vld1q_u8(from.add(16))));
            V([
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(low))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_high_u16(low))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(high))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_high_u16(high))),
            ])
        }
    }
    /// One by one: the half-precision vector types are not in stable Rust.
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        unsafe {
            let bytes = from.cast::<[[u8; 2]; LANES]>().read_unaligned();
            let wide = bytes.map(|b| half::f16::from_le_bytes(b).to_f32());
            Self::load(wide.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        unsafe {
            let bytes = vld1q_s8(from.cast());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes)));
            V([
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_s16(vget_high_s16(high))),
            ])
        }
    }
    #[inline(always)]
    unsafe fn pick(indices: [u8; LANES], values: &[i8; LANES]) -> [i8; LANES] {
        let mut found = [0; LANES];
        unsafe { vst1q_s8(found.as_mut_ptr(), vqtbl1q_s8(vld1q_s8(values.as_ptr()), vld1q_u8(indices.as_ptr()))) };
        found
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe {
            vst1q_f32(to, self.0[0]);
            vst1q_f32(to.add(4), self.0[1]);
            vst1q_f32(to.add(8), self.0[2]);
            vst1q_f32(to.add(12), self.0[3]);
        }
    }
    #[inline(always)]
    unsafe fn mul(self, by: Self) -> Self {
        unsafe {
            V([vmulq_f32(self.0[0], by.0[0]), vmulq_f32(self.0[1], by.0[1]), vmulq_f32(self.0[2], by.0[2]), vmulq_f32(self.0[3], by.0[3])])
        }
    }
    #[inline(always)]
    unsafe fn fma(self, by: Self, to: Self) -> Self {
        unsafe {
            V([
                vfmaq_f32(to.0[0], self.0[0], by.0[0]),
                vfmaq_f32(to.0[1], self.0[1], by.0[1]),
                vfmaq_f32(to.0[2], self.0[2], by.0[2]),
                vfmaq_f32(to.0[3], self.0[3], by.0[3]),
            ])
        }
    }
    #[inline(always)]
    unsafe fn prefetch(line: *const u8) {
        unsafe { std::arch::asm!("prfm pldl2keep, [{line}]", line = in(reg) line, options(nostack, preserves_flags, readonly)) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe {
            V([
                vaddq_f32(self.0[0], other.0[0]),
                vaddq_f32(self.0[1], other.0[1]),
                vaddq_f32(self.0[2], other.0[2]),
                vaddq_f32(self.0[3], other.0[3]),
            ])
        }
    }
    #[inline(always)]
    unsafe fn reduce4(vectors: [Self; 4]) -> [f32; 4] {
        #[inline(always)]
        unsafe fn one(v: V) -> f32 {
            unsafe {
                let by4 = vaddq_f32(vaddq_f32(v.0[0], v.0[2]), vaddq_f32(v.0[1], v.0[3]));
                let by2 = vadd_f32(vget_low_f32(by4), vget_high_f32(by4));
                vget_lane_f32::<0>(vpadd_f32(by2, by2))
            }
        }
        unsafe { [one(vectors[0]), one(vectors[1]), one(vectors[2]), one(vectors[3])] }
    }
}
