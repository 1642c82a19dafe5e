//! Rotary positions: pairs `(h, h + head_dim / 2)` of a head are turned by `position * inverse frequency`.

use super::isa::per_isa;
use super::math::sin_cos;
use super::simd::Lanes;

per_isa! {
    /// `cos` and `sin` `[head_dim / 2]` of one position: the angle is `f32(position) * inverse`, in f32, as checkpoints are trained and
    /// served; both are multiplied by `factor` (YaRN's attention factor, else 1).
    pub fn angles(cos: &mut [f32], sin: &mut [f32], position: usize, inverse: &[f32], factor: f32) = angles_generic
}

#[inline(always)]
fn angles_generic<V: Lanes>(cos: &mut [f32], sin: &mut [f32], position: usize, inverse: &[f32], factor: f32) {
    assert!(cos.len() == inverse.len() && sin.len() == inverse.len());
    for ((cos, sin), inverse) in cos.iter_mut().zip(sin).zip(inverse) {
        let (s, c) = sin_cos(position as f32 * inverse);
        *cos = c * factor;
        *sin = s * factor;
    }
}

per_isa! {
    /// `out[h] = x[h] cos[h] - x[h + half] sin[h]`, `out[h + half] = x[h + half] cos[h] + x[h] sin[h]`; products with `cos` are rounded
    /// first, then one FMA. `x`: `[head_dim]`; `out` may be longer (padding is left alone); `cos`, `sin`: `[head_dim / 2]`.
    ///
    /// Source: Su et al. 2021, arXiv:2104.09864, with the halves apart as in Hugging Face checkpoints.
    pub fn rotate(out: &mut [f32], x: &[f32], cos: &[f32], sin: &[f32]) = rotate_generic
}

#[inline(always)]
fn rotate_generic<V: Lanes>(out: &mut [f32], x: &[f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    let (x_low, x_high) = x.split_at(half);
    let (out_low, out_high) = out[..2 * half].split_at_mut(half);
    assert!(x_high.len() == half && sin.len() == half);
    for h in 0..half {
        out_low[h] = (-x_high[h]).mul_add(sin[h], x_low[h] * cos[h]);
        out_high[h] = x_low[h].mul_add(sin[h], x_high[h] * cos[h]);
    }
}

per_isa! {
    /// As [`rotate`], where the two numbers of a pair lie side by side in `x`: `x[2h]` and `x[2h + 1]` for `x[h]` and `x[h + half]`.
    pub fn rotate_pairs(out: &mut [f32], x: &[f32], cos: &[f32], sin: &[f32]) = rotate_pairs_generic
}

#[inline(always)]
fn rotate_pairs_generic<V: Lanes>(out: &mut [f32], x: &[f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    let (out_low, out_high) = out[..2 * half].split_at_mut(half);
    assert!(x.len() == 2 * half && sin.len() == half);
    for h in 0..half {
        let (low, high) = (x[2 * h], x[2 * h + 1]);
        out_low[h] = (-high).mul_add(sin[h], low * cos[h]);
        out_high[h] = low.mul_add(sin[h], high * cos[h]);
    }
}
