//! SmolLM3: every fourth layer looks at keys without regard to their position.

use super::llama::LLAMA;
use super::{Defaults, Family};
use crate::llama::config::Layers;

pub(super) const SMOLLM3: Family = Family {
    name: "smollm3",
    adds: "layers without rotary positions (`no_rope_layers`), which may look through a sliding window",
    keys: &["no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types"],
    defaults: Defaults { kv_heads: Some(4), context: 32_768, theta: 2_000_000.0, tied: true, ..LLAMA.defaults },
    read: |fields, config| {
        config.rotated = match fields.layer_flags("no_rope_layers", config.layers)? {
            Some(listed) => Layers::Listed(listed),
            None => Layers::NotEvery(fields.size("no_rope_layer_interval")?.unwrap_or(4)),
        };
        if fields.flag("use_sliding_window")? == Some(true) {
            config.window = fields.size_or("sliding_window", None)?;
            config.windowed = match (config.window, &config.rotated) {
                (None, _) => Layers::None,
                (Some(_), Layers::NotEvery(n)) => Layers::Every(*n),
                (Some(_), Layers::Listed(rotated)) => Layers::Listed(rotated.iter().map(|rotated| !rotated).collect()),
                (Some(_), _) => unreachable!("set above"),
            };
        }
        fields.override_windows(config)
    },
    ..LLAMA
};
