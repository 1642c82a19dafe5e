//! Granite: Llama with four multipliers.

use super::Family;
use super::llama::LLAMA;

pub(super) const GRANITE: Family = Family {
    name: "granite",
    adds: "multipliers on the embedding, on what each sublayer adds, on attention scores and (as a divisor) on logits",
    keys: &["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"],
    read: |fields, config| {
        config.embedding_scale = fields.scale("embedding_multiplier")?.unwrap_or(1.0);
        config.residual_scale = fields.scale("residual_multiplier")?.unwrap_or(1.0);
        config.attention_scale = fields.scale("attention_multiplier")?.unwrap_or(1.0);
        config.logit_divisor = fields.scale("logits_scaling")?.unwrap_or(1.0);
        Ok(())
    },
    ..LLAMA
};
