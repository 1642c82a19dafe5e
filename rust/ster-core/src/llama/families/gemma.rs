//! Gemma 2 and 3 (text): norms around the sublayers with gains `1 + w`, a scaled embedding, windows on most layers.

use super::llama::LLAMA;
use super::{Bias, Defaults, Family, Norms, QkNorm};
use crate::error::Result;
use crate::llama::config::{Fields, Layers, LlamaConfig};

pub(super) const GEMMA2: Family = Family {
    name: "gemma2",
    adds: "norms around attention and MLP with gains 1 + w; embedding times sqrt(hidden); soft caps on scores and logits; \
           its own query scale; a sliding window on every other layer; tied head",
    keys: &["query_pre_attn_scalar", "sliding_window", "layer_types", "attn_logit_softcapping", "final_logit_softcapping", BIDIRECTIONAL],
    defaults: Defaults { kv_heads: Some(4), head_dim: Some(256), context: 8192, tied: true, ..LLAMA.defaults },
    activation: ("hidden_activation", "gelu_pytorch_tanh"),
    norms: Norms::Around,
    gain_plus_one: true,
    mlp_bias: Bias::Never,
    read: |fields, config| {
        config.score_cap = fields.cap("attn_logit_softcapping", Some(50.0))?;
        config.logit_cap = fields.cap("final_logit_softcapping", Some(30.0))?;
        both(fields, config, 2)
    },
    ..LLAMA
};

pub(super) const GEMMA3: Family = Family {
    name: "gemma3_text",
    adds: "as gemma2, with norms over each head's queries and keys instead of soft caps, five windowed layers to one, \
           and another rotary base (`rope_local_base_freq`) on those",
    keys: &[
        "query_pre_attn_scalar",
        "sliding_window",
        "sliding_window_pattern",
        "layer_types",
        "final_logit_softcapping",
        "rope_local_base_freq",
        BIDIRECTIONAL,
    ],
    defaults: Defaults { context: 131_072, theta: 1_000_000.0, ..GEMMA2.defaults },
    qk_norm: QkNorm::Head,
    read: |fields, config| {
        config.logit_cap = fields.cap("final_logit_softcapping", None)?;
        config.local_rope = Some(fields.local_rope(config, 10_000.0)?);
        let pattern = fields.size("sliding_window_pattern")?.unwrap_or(6);
        both(fields, config, pattern)
    },
    ..GEMMA2
};

const BIDIRECTIONAL: &str = "use_bidirectional_attention";

fn both(fields: &Fields, config: &mut LlamaConfig, full_every: usize) -> Result<()> {
    if fields.flag(BIDIRECTIONAL)? == Some(true) {
        return fields.refuse(BIDIRECTIONAL, "is true, which changes the maths and is not supported".into());
    }
    config.embedding_scale = (config.hidden as f64).sqrt() as f32;
    let scalar = fields.positive("query_pre_attn_scalar")?.unwrap_or(256.0);
    config.attention_scale = (1.0 / scalar.sqrt()) as f32;
    config.window = fields.size_or("sliding_window", Some(4096))?;
    if config.window.is_none() {
        return fields
            .refuse("sliding_window", "is null, but this family looks through windows (transformers does not run it without)".into());
    }
    config.windowed = Layers::NotEvery(full_every);
    fields.override_windows(config)
}
