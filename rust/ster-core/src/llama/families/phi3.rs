//! Phi-3, Phi-3.5 and Phi-4: fused projections, a part of each head rotated, LongRoPE, a window over all layers.

use super::llama::LLAMA;
use super::{Bias, Defaults, Family};
use crate::llama::config::Layers;

pub(super) const PHI3: Family = Family {
    name: "phi3",
    adds: "q, k, v in one tensor, gate and up in another; partial rotation; longrope; a sliding window over all layers",
    keys: &["partial_rotary_factor", "sliding_window"],
    defaults: Defaults { context: 4096, norm_eps: 1e-5, ..LLAMA.defaults },
    fused: true,
    attention_bias: Bias::Never,
    mlp_bias: Bias::Never,
    read: |fields, config| {
        config.window = fields.size_or("sliding_window", None)?;
        config.windowed = if config.window.is_some() { Layers::All } else { Layers::None };
        Ok(())
    },
    ..LLAMA
};
