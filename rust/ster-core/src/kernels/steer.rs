//! What is added to a row of the residual stream, and whether a row is finite.

use super::isa::per_isa;
use super::norm::sum_of_squares;
use super::simd::Lanes;

per_isa! {
    /// `h[i] = h[i] + scale * v[i]`: the product rounded, then the sum, as NumPy does `h + np.float32(scale) * v`.
    pub fn add_scaled(h: &mut [f32], v: &[f32], scale: f32) = add_scaled_generic
}

#[inline(always)]
fn add_scaled_generic<V: Lanes>(h: &mut [f32], v: &[f32], scale: f32) {
    assert_eq!(h.len(), v.len());
    for (h, v) in h.iter_mut().zip(v) {
        *h += scale * v;
    }
}

per_isa! {
    /// `h[i] = h[i] + factor * v[i]`: the product in f64 and rounded once, for the factor of a short vector may be past f32.
    pub fn add_matched(h: &mut [f32], v: &[f32], factor: f64) = add_matched_generic
}

#[inline(always)]
fn add_matched_generic<V: Lanes>(h: &mut [f32], v: &[f32], factor: f64) {
    assert_eq!(h.len(), v.len());
    for (h, &v) in h.iter_mut().zip(v) {
        *h += (factor * f64::from(v)) as f32;
    }
}

/// `||x||`, summed in f64: no overflow, whatever the row.
pub fn norm(x: &[f32]) -> f64 {
    sum_of_squares(x).sqrt()
}

/// Whether no number is NaN or infinite.
pub fn all_finite(x: &[f32]) -> bool {
    // An exponent of all ones; an integer test that becomes a few vector instructions.
    x.iter().fold(0u32, |bad, v| bad | u32::from(v.to_bits() & 0x7F80_0000 == 0x7F80_0000)) == 0
}
