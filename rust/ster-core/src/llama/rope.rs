//! Rotary position embedding: the frequencies, as transformers computes them.
//!
//! Source: transformers 5.24, `modeling_rope_utils.py` and `LlamaRotaryEmbedding`. Checkpoints are trained and served with frequencies that
//! went through f32 at every step there, and a frequency one ulp off turns position 10,000 by 6e-4 rad. So the same steps are taken
//! here in the same order, each rounded to f32 where torch rounds; only the power is computed in f64 (by `libm`, in Rust, the same bits on
//! every platform) and rounded once. What transformers does in Python floats is f64 here.

/// Frequencies of the rotation and how a longer context changes them.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub theta: f64,
    pub scaling: RopeScaling,
}

#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    Default,
    /// Positions divided by `factor`.
    Linear {
        factor: f64,
    },
    /// NTK-aware: theta grows once the sequence is longer than the context.
    Dynamic {
        factor: f64,
    },
    /// Llama 3.1: high frequencies kept, low ones divided by `factor`, a ramp between.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_context: usize,
    },
    /// Peng et al. 2023, arXiv:2309.00071: a ramp over dimensions, and `attention_factor` on cos and sin.
    Yarn {
        factor: f64,
        attention_factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        truncate: bool,
        original_context: usize,
    },
    /// Ding et al. 2024, arXiv:2402.13753: each pair's frequency divided by its own factor, of one list up to the original context and of
    /// another for longer sequences; `attention_factor` on cos and sin.
    LongRope {
        short: Vec<f32>,
        long: Vec<f32>,
        attention_factor: f64,
        original_context: usize,
    },
}

impl Rope {
    /// Inverse frequencies `[head_dim / 2]`: the angle of pair `i` at position `p` is `p * frequencies[i]`.
    ///
    /// `context` is `max_position_embeddings`, `length` the number of positions of the whole sequence after this pass; only
    /// [`RopeScaling::Dynamic`] and [`RopeScaling::LongRope`] look at it. transformers remembers the longest pass of a model and this does
    /// not: the frequencies are those of a model that sees the sequence in one pass.
    pub fn inverse_frequencies(&self, head_dim: usize, context: usize, length: usize) -> Vec<f32> {
        let theta = self.theta as f32;
        match self.scaling {
            RopeScaling::Default => default(theta, head_dim),
            RopeScaling::Linear { factor } => default(theta, head_dim).iter().map(|f| f / factor as f32).collect(),
            RopeScaling::Dynamic { factor } => {
                if length <= context {
                    return default(theta, head_dim);
                }
                let growth = factor as f32 * length as f32 / context as f32 - (factor - 1.0) as f32;
                let exponent = head_dim as f64 / (head_dim as f64 - 2.0);
                default(theta * pow(growth, exponent as f32), head_dim)
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let original = original_context as f64;
                let low_wavelength = (original / low_freq_factor) as f32;
                let high_wavelength = (original / high_freq_factor) as f32;
                let blend = |f: f32| {
                    let wavelength = (1.0 / f) * std::f64::consts::TAU as f32;
                    if wavelength > low_wavelength {
                        f / factor as f32
                    } else if wavelength < high_wavelength {
                        f
                    } else {
                        let turns = (1.0 / wavelength) * original as f32;
                        let smooth = (turns - low_freq_factor as f32) / (high_freq_factor - low_freq_factor) as f32;
                        (1.0 - smooth) * f / factor as f32 + smooth * f
                    }
                };
                default(theta, head_dim).into_iter().map(blend).collect()
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, original_context, .. } => {
                // The pair that turns `rotations` times within the original context, on a continuous scale.
                let pair = |rotations: f64| {
                    let wavelengths = original_context as f64 / (rotations * std::f64::consts::TAU);
                    head_dim as f64 * libm::log(wavelengths) / (2.0 * libm::log(self.theta))
                };
                let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                low = low.max(0.0);
                high = high.min(head_dim as f64 - 1.0);
                if low == high {
                    high += 0.001;
                }
                powers(theta, head_dim)
                    .enumerate()
                    .map(|(i, power)| {
                        let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                        let kept = 1.0 - ramp;
                        (1.0 / (factor as f32 * power)) * (1.0 - kept) + (1.0 / power) * kept
                    })
                    .collect()
            }
            RopeScaling::LongRope { ref short, ref long, original_context, .. } => {
                let factors = if length > original_context { long } else { short };
                powers(theta, head_dim).zip(factors).map(|(power, factor)| 1.0 / (factor * power)).collect()
            }
        }
    }

    /// Multiplied onto cos and sin.
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::LongRope { attention_factor, .. } => attention_factor as f32,
            _ => 1.0,
        }
    }

    /// Whether frequencies change while a sequence grows.
    pub fn depends_on_length(&self) -> bool {
        matches!(self.scaling, RopeScaling::Dynamic { .. } | RopeScaling::LongRope { .. })
    }

    /// The length that stands for all lengths with the frequencies of `length`.
    pub fn regime(&self, context: usize, length: usize) -> usize {
        match self.scaling {
            RopeScaling::Dynamic { .. } => length.max(context),
            RopeScaling::LongRope { original_context, .. } => original_context + usize::from(length > original_context),
            _ => 0,
        }
    }

    /// Sequences longer than this are rotated otherwise from their first position on, and keys that were cached before mean nothing to
    /// what follows: such a sequence must be run again from its start, as transformers' Phi-3 does.
    pub fn switches_after(&self) -> Option<usize> {
        match self.scaling {
            RopeScaling::LongRope { original_context, .. } => Some(original_context),
            _ => None,
        }
    }
}

/// The attention factor of yarn where the config gives none; `mscale` as DeepSeek extends it.
pub(in crate::llama) fn yarn_attention_factor(factor: f64, mscale: Option<(f64, f64)>) -> f64 {
    let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * libm::log(factor) + 1.0 };
    match mscale {
        Some((mscale, mscale_all_dim)) => scale(mscale) / scale(mscale_all_dim),
        None => scale(1.0),
    }
}

/// The attention factor of longrope where the config gives none.
pub(in crate::llama) fn longrope_attention_factor(factor: f64, original_context: usize) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + libm::log(factor) / libm::log(original_context as f64)).sqrt() }
}

fn default(theta: f32, head_dim: usize) -> Vec<f32> {
    powers(theta, head_dim).map(|power| 1.0 / power).collect()
}

/// `theta ^ (2i / head_dim)`, `[head_dim / 2]`.
fn powers(theta: f32, head_dim: usize) -> impl Iterator<Item = f32> {
    (0..head_dim / 2).map(move |i| pow(theta, (2 * i) as f32 / head_dim as f32))
}

/// Rounded once from f64. torch's f32 power (SLEEF's, within one ulp; compared by its Rust port) gives the same bits for the theta and
/// head sizes of Llama 1 to 3, TinyLlama and SmolLM2, and a neighbour for 1 in 100 values over 104 combinations of theta and head size.
fn pow(base: f32, exponent: f32) -> f32 {
    libm::pow(f64::from(base), f64::from(exponent)) as f32
}
