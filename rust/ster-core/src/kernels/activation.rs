//! The gate of the MLP: `gate = activation(gate) * up`; and soft caps.

use super::isa::per_isa;
use super::math::{exp, tanh};
use super::simd::Lanes;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`
    Silu,
    /// `x * (1 + erf(x / sqrt 2)) / 2`
    Gelu,
    /// `x * (1 + tanh(u)) / 2` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`
    GeluTanh,
}

per_isa! {
    /// `gate[i] = activation(gate[i]) * up[i]`; both `[rows * mlp]`.
    pub fn gate(gate: &mut [f32], up: &[f32], activation: Activation) = generic
}

#[inline(always)]
fn generic<V: Lanes>(gate: &mut [f32], up: &[f32], activation: Activation) {
    assert_eq!(gate.len(), up.len());
    match activation {
        Activation::Silu => apply(gate, up, silu),
        Activation::Gelu => apply(gate, up, gelu),
        Activation::GeluTanh => apply(gate, up, gelu_tanh),
    }
}

#[inline(always)]
fn apply(gate: &mut [f32], up: &[f32], activation: impl Fn(f32) -> f32) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = activation(*gate) * up;
    }
}

#[inline(always)]
fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// In f64 with the `libm` crate's erf (plain Rust, the same bits everywhere): few checkpoints use it, and none where speed counts.
#[inline(always)]
fn gelu(x: f32) -> f32 {
    let x = f64::from(x);
    // erfc, not 1 + erf: no cancellation for negative x.
    (0.5 * x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)) as f32
}

/// `(1 + tanh u) / 2 = 1 / (1 + e^(-2u))`: one exponential, no cancellation.
#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769_2;
    let u2 = TWO_SQRT_2_OVER_PI * (x * x * x).mul_add(0.044_715, x);
    x / (1.0 + exp(-u2))
}

per_isa! {
    /// `x[i] = x[i] / divisor`, then `x[i] = cap tanh(x[i] / cap)` where there is a cap.
    pub fn divide_and_cap(x: &mut [f32], divisor: f32, cap: Option<f32>) = cap_generic
}

#[inline(always)]
fn cap_generic<V: Lanes>(x: &mut [f32], divisor: f32, cap: Option<f32>) {
    for x in x.iter_mut() {
        *x /= divisor;
    }
    if let Some(cap) = cap {
        for x in x.iter_mut() {
            *x = cap * tanh(*x / cap);
        }
    }
}
