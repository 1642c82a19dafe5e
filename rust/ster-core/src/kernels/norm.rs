//! Root-mean-square norm.

use super::isa::per_isa;
use super::simd::{LANES, Lanes};

per_isa! {
    /// Scale each row to unit root mean square, then apply a gain per column.
    ///
    /// `out[t, h] = (x[t, h] * r[t]) * gain[h]`, with `r[t] = 1 / sqrt(mean_h(x[t, h]^2) + eps)`
    /// - `x`, `out`: `[tokens, hidden]`; `gain`: `[hidden]`
    ///
    /// Squares are summed in f64, where each is exact, and `r` is rounded once.
    /// Source: Zhang and Sennrich 2019, arXiv:1910.07467. Twin: [`reference::rms_norm`](super::reference::rms_norm).
    pub fn rms_norm(out: &mut [f32], x: &[f32], gain: &[f32], eps: f64) = generic
}

#[inline(always)]
fn generic<V: Lanes>(out: &mut [f32], x: &[f32], gain: &[f32], eps: f64) {
    let hidden = gain.len();
    // Not debug_assert: zip stops at the shorter side, so a wrong length would pass in silence.
    assert_eq!(out.len(), x.len());
    assert_eq!(x.len() % hidden, 0);
    for (out, x) in out.chunks_exact_mut(hidden).zip(x.chunks_exact(hidden)) {
        let r = (1.0 / (sum_of_squares(x) / hidden as f64 + eps).sqrt()) as f32;
        for ((out, x), gain) in out.iter_mut().zip(x).zip(gain) {
            *out = x * r * gain;
        }
    }
}

/// In sixteen f64 lanes (`h mod 16`, rising `h`), then lanes 8, 4, 2 and 1 apart.
#[inline(always)]
pub(crate) fn sum_of_squares(x: &[f32]) -> f64 {
    let mut lanes = [0f64; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(v) * f64::from(v);
        }
    }
    for (lane, &v) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(v) * f64::from(v);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}
