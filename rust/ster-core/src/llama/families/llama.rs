//! Llama 1 to 3, TinyLlama, SmolLM2, Yi, DeepSeek-LLM, CodeLlama, Vicuna ...: what the others are measured by.

use super::{Bias, Defaults, Family, Norms, QkNorm};

pub(super) const LLAMA: Family = Family {
    name: "llama",
    adds: "the base of all: RMS norms before attention and MLP, rotary positions, grouped queries, gated MLP",
    keys: &[],
    defaults: Defaults { kv_heads: None, head_dim: None, context: 2048, norm_eps: 1e-6, theta: 10_000.0, tied: false },
    activation: ("hidden_act", "silu"),
    norms: Norms::Before,
    qk_norm: QkNorm::None,
    gain_plus_one: false,
    fused: false,
    attention_bias: Bias::Configured,
    mlp_bias: Bias::Configured,
    read: |_, _| Ok(()),
};
