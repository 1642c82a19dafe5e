//! Mistral: Llama with a window that every layer looks through.

use super::llama::LLAMA;
use super::{Bias, Defaults, Family};
use crate::llama::config::Layers;

pub(super) const MISTRAL: Family = Family {
    name: "mistral",
    adds: "a sliding attention window over all layers, or none where `sliding_window` is null",
    keys: &["sliding_window", "layer_types"],
    defaults: Defaults { kv_heads: Some(8), context: 131_072, ..LLAMA.defaults },
    attention_bias: Bias::Never,
    mlp_bias: Bias::Never,
    read: |fields, config| {
        config.window = fields.size_or("sliding_window", Some(4096))?;
        config.windowed = if config.window.is_some() { Layers::All } else { Layers::None };
        // transformers runs `mistral` with one mask for all layers, whatever this list says.
        let windowed = &config.windowed;
        if let Some(listed) = fields.layer_types(config.layers)?
            && (0..config.layers).any(|layer| listed.holds(layer) != windowed.holds(layer))
        {
            return fields
                .refuse("layer_types", "gives layers other windows than `sliding_window`, which is the `ministral` family".into());
        }
        Ok(())
    },
    ..LLAMA
};
