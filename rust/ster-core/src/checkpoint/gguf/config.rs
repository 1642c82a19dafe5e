//! Metadata -> the object config.json would hold, under transformers' keys.
//!
//! The rule for every key that begins with the architecture's name is that of config.json: it is read here, or it is one of
//! [`HARMLESS`], or it is 0 and one of [`OFF_AT_ZERO`]; any other is refused by name. llama.cpp reads no other keys for a model's maths.
//!
//! Numbers of 32 bits become the shortest decimal that rounds to them: 9.99999974e-6, which is what the converter made of 1e-5 in
//! config.json, is 1e-5 again, and a GGUF file and its folder give the same bits.
//!
//! Facts that the metadata of a family lacks are what llama.cpp takes (`src/models/*.cpp`): named where they are used.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Number, Value as Json};

use super::arch::Arch;
use super::value::{List, Value};
use super::{Gguf, rope, tokens};
use crate::error::{Error, Result};

pub(super) type Config = Map<String, Json>;

/// Keys, after the architecture's name, that say nothing about a forward pass: `vocab_size` is what the embedding has rows,
/// `layer_norm_epsilon` belongs to a norm these families do not have, pooling and labels to what others make of the last layer.
const HARMLESS: &[&str] = &["vocab_size", "attention.layer_norm_epsilon", "pooling_type", "classifier.output_labels"];

/// Keys by which other families and forks differ, unless they are 0: llama.cpp, too, takes 0 for "not so".
#[rustfmt::skip]
const OFF_AT_ZERO: &[&str] = &[
    "expert_count", "expert_used_count", "expert_shared_count", "leading_dense_block_count", "nextn_predict_layers",
    "attention.max_alibi_bias", "attention.clamp_kqv", "attention.scale", "attention.sliding_window", "attn_logit_softcapping",
    "final_logit_softcapping", "logit_scale", "residual_scale", "embedding_scale", "use_parallel_residual",
    "rope.scaling.yarn_log_multiplier",
];

/// config.json and generation_config.json.
pub(super) fn translate(gguf: &Gguf, arch: &'static Arch) -> Result<(Config, Config)> {
    // Keys outside the architecture's own that llama.cpp reads: an adapter is not a model.
    if let Some(key) = gguf.metadata.keys().find(|key| key.starts_with("adapter.")) {
        return Err(Error::Config {
            path: gguf.path().into(),
            field: key.clone(),
            problem: "belongs to an adapter, not to a model".into(),
        });
    }
    let keys = Keys { gguf, arch, read: RefCell::default() };
    let mut config = Config::new();
    let set = &mut config;
    put(set, "model_type", arch.model_type);
    common(&keys, set)?;
    match arch.name {
        "llama" => llama(&keys, set)?,
        "phi3" => phi3(&keys, set)?,
        "granite" => granite(&keys, set)?,
        "olmo2" => olmo2(&keys)?,
        "smollm3" => put(set, "no_rope_layers", no_rope_layers(&keys)?),
        "gemma2" | "gemma3" => gemma(&keys, set)?,
        _ => {}
    }
    rope::translate(&keys, set)?;
    let generation = tokens::translate(&keys, set)?;
    keys.nothing_left()?;
    Ok((config, generation))
}

pub(super) fn put(config: &mut Config, key: &str, value: impl Into<Json>) {
    config.insert(key.into(), value.into());
}

/// What all families have.
fn common(keys: &Keys, set: &mut Config) -> Result<()> {
    let (hidden, heads, layers) = (keys.size("embedding_length")?, keys.size("attention.head_count")?, keys.layers()?);
    put(set, "hidden_size", hidden);
    put(set, "intermediate_size", keys.size("feed_forward_length")?);
    put(set, "num_hidden_layers", layers);
    put(set, "num_attention_heads", heads);
    put(set, "num_key_value_heads", keys.size_or("attention.head_count_kv")?.unwrap_or(heads));
    put(set, "max_position_embeddings", keys.size("context_length")?);
    put(
        set,
        "rms_norm_eps",
        keys.number("attention.layer_norm_rms_epsilon")?.ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon"))?,
    );

    let head_dim = keys.size_or("attention.key_length")?;
    if let Some(head_dim) = head_dim {
        put(set, "head_dim", head_dim);
    }
    let width = head_dim.unwrap_or(hidden / heads);
    if let Some(values) = keys.size_or("attention.value_length")?
        && values != width
    {
        return keys.refuse("attention.value_length", format!("must be the {width} of a key, found {values}"));
    }
    if keys.flag("attention.causal")? == Some(false) {
        return keys.refuse("attention.causal", "is false, which changes the maths and is not supported".into());
    }

    let Some((_, embedding)) = keys.gguf.find("token_embd.weight") else {
        let problem = "is missing".into();
        return Err(Error::Tensor { path: keys.gguf.path().into(), tensor: "token_embd.weight".into(), problem });
    };
    put(set, "vocab_size", embedding.shape.first().copied().unwrap_or(1));
    put(set, "tie_word_embeddings", keys.gguf.find("output.weight").is_none());
    let gemma = keys.arch.name.starts_with("gemma");
    put(set, if gemma { "hidden_activation" } else { "hidden_act" }, if gemma { "gelu_pytorch_tanh" } else { "silu" });
    // Of qwen2 q, k and v always have a bias and its config no such flag; phi3 has neither.
    if !matches!(keys.arch.name, "qwen2" | "phi3") {
        let biased = |part: &str| keys.gguf.find(&format!("blk.0.{part}.bias")).is_some();
        for (flag, part) in [("attention_bias", "attn_q"), ("mlp_bias", "ffn_up")] {
            if biased(part) {
                put(set, flag, true);
            }
        }
    }
    Ok(())
}

/// Llama and Mistral are one architecture; only the second has a window, which llama.cpp's own converter does not write.
fn llama(keys: &Keys, set: &mut Config) -> Result<()> {
    if let Some(window) = keys.window()? {
        put(set, "model_type", "mistral");
        put(set, "sliding_window", window);
    }
    // What convert.py of 2023 wrote: the order of rows that Meta's files have, which is the one of this architecture.
    match keys.text("tensor_data_layout")?.as_deref() {
        None | Some("Meta AI original pth") => Ok(()),
        Some(other) => keys.refuse("tensor_data_layout", format!("is \"{other}\", which Ster does not know")),
    }
}

/// transformers looks back `sliding_window` tokens; llama.cpp no longer does (pull request 13676).
fn phi3(keys: &Keys, set: &mut Config) -> Result<()> {
    put(set, "sliding_window", keys.window()?);
    Ok(())
}

fn granite(keys: &Keys, set: &mut Config) -> Result<()> {
    // A switch for the rotation, in this architecture alone.
    if keys.flag("rope.scaling.finetuned")? == Some(false) {
        return keys.refuse("rope.scaling.finetuned", "is false: no rotation, which is not supported".into());
    }
    let scale = |key: &str| Ok(keys.number(key)?.filter(|&scale| scale != 0.0));
    let logits = scale("logit_scale")?.ok_or_else(|| keys.missing("logit_scale"))?;
    put(set, "logits_scaling", logits);
    put(set, "embedding_multiplier", scale("embedding_scale")?.unwrap_or(1.0));
    put(set, "residual_multiplier", scale("residual_scale")?.unwrap_or(1.0));
    let attention = scale("attention.scale")?.map_or_else(|| keys.head_dim().map(|dim| 1.0 / (dim as f64).sqrt()), Ok)?;
    put(set, "attention_multiplier", attention);
    Ok(())
}

/// Olmo 3 goes by the same name, with windows.
fn olmo2(keys: &Keys) -> Result<()> {
    match keys.window()? {
        None => Ok(()),
        Some(window) => keys.refuse("attention.sliding_window", format!("is {window}: Olmo 3, which is not supported")),
    }
}

/// 1 where a layer rotates. The metadata is silent; `smollm3.cpp` leaves out every fourth, as does transformers' `SmolLM3Config`.
fn no_rope_layers(keys: &Keys) -> Result<Vec<u64>> {
    Ok((1..=keys.layers()?).map(|layer| u64::from(layer % 4 != 0)).collect())
}

fn gemma(keys: &Keys, set: &mut Config) -> Result<()> {
    let (layers, third) = (keys.layers()?, keys.arch.name == "gemma3");
    // `gemma2.cpp`: 4096 where the file is silent. `gemma3.cpp`: no window, so every layer sees everything.
    let window = keys.window()?.or((!third).then_some(4096));
    put(set, "sliding_window", window);
    let period = keys.size_or("attention.sliding_window_pattern")?.unwrap_or(if third { 6 } else { 2 });
    let full = |layer: u64| window.is_none() || layer % period == period - 1;
    let kinds: Vec<&str> = (0..layers).map(|layer| if full(layer) { "full_attention" } else { "sliding_attention" }).collect();
    put(set, "layer_types", kinds);

    // The largest of both scale queries by the mean width of a head and not by a head's own; `gemma2.cpp` and `gemma3.cpp` tell them
    // by the number of layers.
    let largest = layers == if third { 62 } else { 46 };
    let scalar = if largest { keys.size("embedding_length")? / keys.size("attention.head_count")? } else { keys.head_dim()? };
    put(set, "query_pre_attn_scalar", scalar);

    let cap = |key: &str, default: Option<f64>| Ok(keys.number(key)?.or(default).filter(|&cap| cap != 0.0));
    // `llama-hparams.h`: 50 and 30. Gemma 3 has none, unless the file says so.
    put(set, "attn_logit_softcapping", cap("attn_logit_softcapping", (!third).then_some(50.0))?);
    put(set, "final_logit_softcapping", cap("final_logit_softcapping", (!third).then_some(30.0))?);
    Ok(())
}

/// The keys of an architecture, read with their types checked.
pub(super) struct Keys<'a> {
    pub gguf: &'a Gguf,
    pub arch: &'static Arch,
    read: RefCell<BTreeSet<String>>,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.arch.name)
    }

    pub fn refuse<T>(&self, key: &str, problem: String) -> Result<T> {
        Err(Error::Config { path: self.gguf.path().into(), field: self.full(key), problem })
    }

    fn missing(&self, key: &str) -> Error {
        Error::Config { path: self.gguf.path().into(), field: self.full(key), problem: "is missing".into() }
    }

    /// `key` by way of `convert`, which says no to another type.
    fn typed<T>(&self, key: &str, expected: &str, convert: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        let full = self.full(key);
        let Some(value) = self.gguf.metadata.get(&full) else { return Ok(None) };
        self.read.borrow_mut().insert(full);
        match convert(value) {
            Some(found) => Ok(Some(found)),
            None => self.refuse(key, format!("must be {expected}, found {}", value.brief())),
        }
    }

    pub fn text(&self, key: &str) -> Result<Option<String>> {
        self.typed(key, "a string", |value| if let Value::Text(text) = value { Some(text.clone()) } else { None })
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", |value| if let Value::Bool(flag) = value { Some(*flag) } else { None })
    }

    /// A finite number, as the decimal it was written from.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a finite number", |value| {
            match *value {
                Value::F32(n) => Some(decimal(n)),
                Value::F64(n) => Some(n),
                Value::Int(n) => Some(n as f64),
                _ => None,
            }
            .filter(|n| n.is_finite())
        })
    }

    /// A size of at least 1, or a list of the same size for every layer.
    pub fn size_or(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "an integer from 1 to 2147483647, the same for every layer", |value| {
            let same = match value {
                Value::Int(n) => *n,
                Value::List(List::Numbers(numbers)) => {
                    let mut items = numbers.iter();
                    let Some(Value::Int(first)) = items.next() else { return None };
                    items.all(|item| item == Value::Int(first)).then_some(first)?
                }
                _ => return None,
            };
            (1..1 << 31).contains(&same).then_some(same as u64)
        })
    }

    pub fn size(&self, key: &str) -> Result<u64> {
        self.size_or(key)?.ok_or_else(|| self.missing(key))
    }

    fn layers(&self) -> Result<u64> {
        let layers = self.size("block_count")?;
        // Lists are made with an item a layer; no model comes near.
        if layers > 65536 { self.refuse("block_count", format!("is {layers}, more than 65536")) } else { Ok(layers) }
    }

    pub fn head_dim(&self) -> Result<u64> {
        match self.size_or("attention.key_length")? {
            Some(dim) => Ok(dim),
            None => Ok((self.size("embedding_length")? / self.size("attention.head_count")?).max(1)),
        }
    }

    /// `attention.sliding_window`; 0 is none.
    fn window(&self) -> Result<Option<u64>> {
        const KEY: &str = "attention.sliding_window";
        match self.gguf.metadata.get(&self.full(KEY)) {
            Some(Value::Int(0)) => Ok(None),
            _ => self.size_or(KEY),
        }
    }

    /// Refuse the first key nobody read.
    fn nothing_left(&self) -> Result<()> {
        let read = self.read.borrow();
        for (full, value) in &self.gguf.metadata {
            let Some(key) = full.strip_prefix(self.arch.name).and_then(|rest| rest.strip_prefix('.')) else { continue };
            let off = matches!(value, Value::Int(0) | Value::Bool(false) | Value::F32(0.0) | Value::F64(0.0)) && OFF_AT_ZERO.contains(&key);
            if !read.contains(full) && !HARMLESS.contains(&key) && !off {
                return self.refuse(key, format!("is {}, which Ster does not know for this architecture", value.brief()));
            }
        }
        Ok(())
    }
}

/// The shortest decimal that rounds to `n` in f32, as f64.
pub(super) fn decimal(n: f32) -> f64 {
    n.to_string().parse().unwrap_or(f64::NAN)
}

/// A number as JSON has it; not NaN and not infinite, which [`Keys::number`] refuses.
pub(super) fn json(n: f64) -> Json {
    Number::from_f64(n).map_or(Json::Null, Json::Number)
}
