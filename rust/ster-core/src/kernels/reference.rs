//! The same operations, slow and obvious, in f64 throughout: what the kernels are judged by.

use super::activation::Activation;
use crate::tensor::Weights;

/// `out[m, n] = sum_k x[m, k] w[n, k] (+ bias[n])`
pub fn linear(x: &[f32], w: Weights<'_>, bias: Option<&[f32]>) -> Vec<f64> {
    let mut row = vec![0.0; w.cols];
    let rows = x.len() / w.cols;
    let mut out = vec![0.0; rows * w.rows];
    for n in 0..w.rows {
        w.widen_row(n, &mut row);
        for m in 0..rows {
            let x = &x[m * w.cols..(m + 1) * w.cols];
            let sum: f64 = x.iter().zip(&row).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
            out[m * w.rows + n] = sum + bias.map_or(0.0, |bias| f64::from(bias[n]));
        }
    }
    out
}

/// `x[t, h] / sqrt(mean(x[t]^2) + eps) * gain[h]`
pub fn rms_norm(x: &[f32], gain: &[f32], eps: f64) -> Vec<f64> {
    x.chunks_exact(gain.len())
        .flat_map(|row| {
            let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / row.len() as f64;
            let r = 1.0 / (mean + eps).sqrt();
            row.iter().zip(gain).map(move |(&v, &gain)| f64::from(v) * r * f64::from(gain)).collect::<Vec<_>>()
        })
        .collect()
}

/// Softmax attention of one query `[width]` over `keys` and `values` `[positions, width]`, with scores capped at `cap`.
pub fn attention(q: &[f32], keys: &[f32], values: &[f32], scale: f64, cap: Option<f64>) -> Vec<f64> {
    let width = q.len();
    let score = |k: &[f32]| scale * q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>();
    let capped = |s: f64| cap.map_or(s, |cap| cap * libm::tanh(s / cap));
    let scores: Vec<f64> = keys.chunks_exact(width).map(|k| capped(score(k))).collect();
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| libm::exp(s - highest)).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; width];
    for (weight, v) in weights.iter().zip(values.chunks_exact(width)) {
        for (out, &v) in out.iter_mut().zip(v) {
            *out += weight / sum * f64::from(v);
        }
    }
    out
}

pub fn activation(x: f32, activation: Activation) -> f64 {
    let x = f64::from(x);
    match activation {
        Activation::Silu => x / (1.0 + libm::exp(-x)),
        Activation::Gelu => 0.5 * x * libm::erfc(-x / std::f64::consts::SQRT_2),
        Activation::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            // (1 + tanh u) / 2 without the cancellation.
            x / (1.0 + libm::exp(-2.0 * u))
        }
    }
}

/// `x` `[head_dim]` turned by `angle[h]` `[head_dim / 2]`.
pub fn rotate(x: &[f32], angles: &[f64]) -> Vec<f64> {
    let half = angles.len();
    let mut out = vec![0.0; 2 * half];
    for h in 0..half {
        let (a, b) = (f64::from(x[h]), f64::from(x[h + half]));
        let (sin, cos) = (libm::sin(angles[h]), libm::cos(angles[h]));
        out[h] = a * cos - b * sin;
        out[h + half] = b * cos + a * sin;
    }
    out
}
