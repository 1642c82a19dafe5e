//! Qwen2 (and Qwen2.5): biases on q, k and v. Qwen3: a norm on every head's queries and keys instead.

use super::llama::LLAMA;
use super::{Bias, Defaults, Family, QkNorm};
use crate::error::Result;
use crate::llama::config::{Fields, Layers, LlamaConfig};

pub(super) const QWEN2: Family = Family {
    name: "qwen2",
    adds: "biases on q, k and v; a sliding window over the upper layers where `use_sliding_window` is true",
    keys: &["use_sliding_window", "sliding_window", "max_window_layers", "layer_types"],
    defaults: Defaults { kv_heads: Some(32), context: 32_768, ..LLAMA.defaults },
    attention_bias: Bias::Qkv,
    mlp_bias: Bias::Never,
    read: window,
    ..LLAMA
};

pub(super) const QWEN3: Family = Family {
    name: "qwen3",
    adds: "a norm over each head's queries and keys; a sliding window as in qwen2",
    defaults: Defaults { head_dim: Some(128), ..QWEN2.defaults },
    qk_norm: QkNorm::Head,
    attention_bias: Bias::Configured,
    ..QWEN2
};

fn window(fields: &Fields, config: &mut LlamaConfig) -> Result<()> {
    if fields.flag("use_sliding_window")? == Some(true) {
        config.window = fields.size_or("sliding_window", Some(4096))?;
        config.windowed = match config.window {
            Some(_) => Layers::From(fields.count("max_window_layers")?.unwrap_or(28)),
            None => Layers::None,
        };
    }
    fields.override_windows(config)
}
