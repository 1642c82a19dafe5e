//! config.json of a Llama checkpoint, read so that nothing which could change the maths is passed over.
//!
//! The rule for every key at the top level:
//! - a key of transformers' `LlamaConfig` is read, with the defaults of transformers 5.24 where it may be absent;
//! - a key of [`HARMLESS`], or one that starts with `_`, is ignored: it says nothing about a forward pass;
//! - `null` is ignored: it is how configs say "not set";
//! - a key of [`neutral`], where other families say how they differ from Llama, must have the value that makes no difference;
//! - any other key is refused by name, for Ster cannot know what it means.
//!
//! Inside `rope_scaling` and `rope_parameters` only the keys transformers documents for that rope type are known.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::rope::{Rope, RopeScaling, yarn_attention_factor};
use crate::checkpoint::Source;
use crate::checkpoint::json::{self, kind};
pub use crate::kernels::activation::Activation;

use crate::error::{Error, Result};

/// The facts of config.json that the forward pass needs, checked against each other.
///
/// All sizes are at least 1 and below 2^31, `head_dim` is even, `heads` is a multiple of `kv_heads`.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub mlp: usize,
    /// Rows of the embedding; the tokenizer may know fewer or more.
    pub vocab: usize,
    /// `max_position_embeddings`
    pub context: usize,
    pub norm_eps: f64,
    pub activation: Activation,
    pub rope: Rope,
    /// The output head is the embedding.
    pub tied: bool,
    /// On the q, k, v and o projections.
    pub attention_bias: bool,
    /// On the gate, up and down projections.
    pub mlp_bias: bool,
    pub bos: Option<u32>,
    /// Any of these ends a generation: those of config.json, then those only generation_config.json names. Empty when both are silent;
    /// transformers would then take 2, which is a guess for any tokenizer but Llama 1's and 2's.
    pub eos: Vec<u32>,
}

/// Keys that say nothing about a forward pass: provenance, training, dtypes (each tensor has its own), caching, labels of classifiers, and
/// the options of generation that old transformers kept here.
#[rustfmt::skip]
const HARMLESS: &[&str] = &[
    // provenance and tooling; auto_map names code to download, which transformers does not run for a llama either unless told to
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "transformers.js_config", "is_llama_config",
    "tokenizer_class", "unsloth_version", "unsloth_fixed", "unsloth_merged", "hub_revision", "model_name",
    // training
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "mlp_dropout", "dropout",
    "gradient_checkpointing", "output_router_logits", "classifier_dropout", "summary_type",
    // how to compute the same thing; pretraining_tp sliced some products, and transformers dropped it
    "pretraining_tp", "use_cache", "torchscript", "use_bfloat16", "attn_implementation", "use_flash_attn", "use_flash_attention",
    "flash_attention", "chunk_size_feed_forward", "cache_implementation",
    // lengths that change no number: max_position_embeddings is the one that counts
    "max_sequence_length", "max_seq_len", "model_max_length", "seq_length", "seq_len", "max_window_layers",
    // tokens
    "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "decoder_start_token_id", "bos_token",
    "eos_token", "pad_token", "add_bos_token", "add_eos_token",
    // outputs
    "output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate", "output_scores", "problem_type",
    "id2label", "label2id", "num_labels", "finetuning_task", "task_specific_params", "prefix", "is_decoder", "tf_legacy_loss",
    "tie_encoder_decoder",
    // generation
    "max_length", "max_new_tokens", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
];

/// Keys [`LlamaConfig::load`] reads itself.
#[rustfmt::skip]
const READ: &[&str] = &[
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "bos_token_id", "eos_token_id", "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
];

impl LlamaConfig {
    /// Read `config.json` of `dir`, and of `generation_config.json`, if there, the tokens that end a generation.
    pub fn load(dir: &Path) -> Result<LlamaConfig> {
        let path = dir.join("config.json");
        let object = json::read_object(&path)?.ok_or_else(|| Error::MissingConfig { path: path.clone() })?;
        let mut config = LlamaConfig::read(&Fields { path, prefix: "", object: &object })?;
        let path = dir.join("generation_config.json");
        if let Some(object) = json::read_object(&path)? {
            config.generate_with(&path, &object)?;
        }
        Ok(config)
    }

    /// The same for a model in any form.
    pub fn from_source(source: &Source) -> Result<LlamaConfig> {
        let mut config = LlamaConfig::read(&Fields { path: source.config_path.clone(), prefix: "", object: &source.config })?;
        if let Some((path, object)) = &source.generation {
            config.generate_with(path, object)?;
        }
        Ok(config)
    }

    fn generate_with(&mut self, path: &Path, object: &Map<String, Value>) -> Result<()> {
        let fields = Fields { path: path.into(), prefix: "", object };
        for id in fields.tokens("eos_token_id")? {
            if !self.eos.contains(&id) {
                self.eos.push(id);
            }
        }
        self.bos = self.bos.or(fields.token("bos_token_id")?);
        Ok(())
    }

    fn read(fields: &Fields) -> Result<LlamaConfig> {
        let model_type = fields.text("model_type")?.ok_or_else(|| fields.missing("model_type"))?;
        if model_type != "llama" {
            return Err(Error::ModelType { model_type: model_type.into() });
        }
        let hidden = fields.required_size("hidden_size")?;
        let heads = fields.required_size("num_attention_heads")?;
        let kv_heads = fields.size("num_key_value_heads")?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            return fields.refuse("num_key_value_heads", format!("must divide `num_attention_heads` = {heads}, found {kv_heads}"));
        }
        let head_dim = match fields.size("head_dim")? {
            Some(head_dim) => head_dim,
            None if hidden % heads == 0 => hidden / heads,
            None => {
                let problem = format!("must be a multiple of `num_attention_heads` = {heads} when `head_dim` is not given, found {hidden}");
                return fields.refuse("hidden_size", problem);
            }
        };
        if head_dim % 2 != 0 {
            return fields.refuse("head_dim", format!("must be even, for rotary embedding turns pairs, found {head_dim}"));
        }
        // Every product of two sizes fits into 64 bits; this one is used as a size itself.
        if heads.checked_mul(head_dim).is_none_or(|width| width >= MAX_SIZE) {
            return fields.refuse("head_dim", format!("times `num_attention_heads` is too large: {head_dim} x {heads}"));
        }
        let layers = fields.required_size("num_hidden_layers")?;
        let context = fields.size("max_position_embeddings")?.unwrap_or(2048);
        let norm_eps = fields.number("rms_norm_eps")?.unwrap_or(1e-6);
        if !(0.0..1.0).contains(&norm_eps) {
            return fields.refuse("rms_norm_eps", format!("must be between 0 and 1, found {norm_eps}"));
        }
        let name = fields.text("hidden_act")?.unwrap_or("silu");
        let Some(activation) = activation(name) else {
            return fields.refuse("hidden_act", format!("is \"{name}\", expected silu, gelu or gelu_pytorch_tanh"));
        };

        let config = LlamaConfig {
            hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            mlp: fields.required_size("intermediate_size")?,
            vocab: fields.required_size("vocab_size")?,
            context,
            norm_eps,
            activation,
            rope: rope(fields, context, head_dim)?,
            tied: fields.flag("tie_word_embeddings")?.unwrap_or(false),
            attention_bias: fields.flag("attention_bias")?.unwrap_or(false),
            mlp_bias: fields.flag("mlp_bias")?.unwrap_or(false),
            bos: fields.token("bos_token_id")?,
            eos: fields.tokens("eos_token_id")?,
        };
        for (key, value) in fields.object {
            let known = READ.contains(&key.as_str()) || HARMLESS.contains(&key.as_str()) || key.starts_with('_');
            if known || value.is_null() {
                continue;
            }
            match neutral(key, value, &config, fields.object) {
                Some(true) => {}
                Some(false) => return fields.refuse(key, format!("is {}, which changes the maths and is not supported", brief(value))),
                None => {
                    let problem = format!("is {}, a field Ster does not know; if it does not change the maths, remove it", brief(value));
                    return fields.refuse(key, problem);
                }
            }
        }
        Ok(config)
    }
}

/// Sizes stay below this, so that a product of two fits into 64 bits.
const MAX_SIZE: usize = 1 << 31;

/// The functions behind the names in transformers' `ACT2CLS`, synonyms included; all others are other functions and are refused.
fn activation(name: &str) -> Option<Activation> {
    match name {
        "silu" | "swish" => Some(Activation::Silu),
        "gelu" | "gelu_python" => Some(Activation::Gelu),
        "gelu_pytorch_tanh" | "gelu_new" | "gelu_python_tanh" => Some(Activation::GeluTanh),
        _ => None,
    }
}

/// Whether `key`, by which another family or a fork says that it differs from Llama, has the value that makes no difference.
/// `None`: not such a key. `value` is not null.
#[rustfmt::skip]
fn neutral(key: &str, value: &Value, config: &LlamaConfig, object: &Map<String, Value>) -> Option<bool> {
    let is = |expected: f64| value.as_f64() == Some(expected);
    let all = |expected: &Value| value.as_array().is_some_and(|list| list.iter().all(|item| item == expected));
    let absent = || value == &Value::Bool(false);
    let empty = || value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty);
    Some(match key {
        // attention windows and masks
        "sliding_window" => object.get("use_sliding_window") == Some(&Value::Bool(false)),
        "layer_types" => all(&"full_attention".into()) && value.as_array().is_some_and(|list| list.len() == config.layers),
        "is_causal" | "causal" => value == &Value::Bool(true),
        "sliding_window_pattern" | "attention_chunk_size" | "window_size" | "attention_window" | "window_layers" => false,
        // scales
        "logit_scale" | "logits_scaling" | "embedding_multiplier" | "residual_multiplier" | "scale_emb" | "lm_head_multiplier"
        | "attention_out_multiplier" | "key_multiplier" | "embedding_scale" | "emb_scale" | "output_multiplier" => is(1.0),
        "attention_multiplier" | "attention_scale" | "softmax_scale" => is(1.0 / (config.head_dim as f64).sqrt()),
        "query_pre_attn_scalar" => is(config.head_dim as f64),
        "attn_logit_softcapping" | "final_logit_softcapping" | "logit_softcapping" | "clip_qkv" | "scale_depth" | "dim_model_base"
        | "mup_width_multiplier" | "mlp_multipliers" | "attn_temperature_tuning" | "scale_attn" | "scale_embedding"
        | "scale_embeddings" => absent(),
        // rotation
        "partial_rotary_factor" | "rotary_pct" | "rope_percent" | "rope_pct" | "rope_ratio" => is(1.0),
        "rotary_dim" => is(config.head_dim as f64),
        "rope_interleaved" | "interleaved_rope" | "is_neox_style" | "rope_interleave" => absent(),
        "no_rope_layers" => all(&1.into()),
        "no_rope_layer_interval" | "nope_layer_interval" | "rope_local_base_freq" | "rope_global_base_freq" | "alibi"
        | "use_alibi" => absent(),
        "use_rope" | "rope" => value == &Value::Bool(true),
        // norms, biases, shapes of blocks
        "use_qk_norm" | "qk_layernorm" | "qk_norm" | "use_qk_layernorm" | "use_post_norm" | "post_norm" | "parallel_residual"
        | "use_parallel_residual" | "parallel_attn" | "norm_after" | "layernorm_zero_centered"
        | "apply_residual_connection_post_layernorm" => absent(),
        "bias" | "use_bias" | "qkv_bias" | "use_qkv_bias" | "attention_in_bias" | "attention_out_bias" | "lm_head_bias" => absent(),
        "no_bias" => value == &Value::Bool(true),
        "hidden_activation" => value.as_str().and_then(activation) == Some(config.activation),
        "pruned_heads" | "block_configs" | "layers_block_type" => empty(),
        "embedding_size" => is(config.hidden as f64),
        "rms_norm_epsilon" | "norm_eps" | "norm_epsilon" | "layer_norm_eps" | "layer_norm_epsilon" => is(config.norm_eps),
        // experts, other towers
        "num_experts" | "num_local_experts" | "n_routed_experts" | "num_experts_per_tok" | "moe_num_experts" => is(0.0),
        "is_moe" | "is_encoder_decoder" | "add_cross_attention" | "cross_attention_hidden_size" | "text_config"
        | "vision_config" => absent(),
        // stored forms
        "quantization_config" | "compression_config" | "quantization" | "sparsity_config" => false,
        "use_sliding_window" => absent(),
        _ => return None,
    })
}

/// `rope_theta`, `rope_scaling` and `rope_parameters`, which must agree where they say the same thing.
fn rope(fields: &Fields, context: usize, head_dim: usize) -> Result<Rope> {
    let old = rope_dict(fields, "rope_scaling", context)?;
    let new = rope_dict(fields, "rope_parameters", context)?;
    if let (Some((old, _)), Some((new, _))) = (&old, &new)
        && old != new
    {
        return fields.refuse("rope_scaling", format!("says {old:?}, but `rope_parameters` says {new:?}"));
    }

    let mut theta = None;
    for (name, found) in [
        ("rope_theta", positive(fields, "rope_theta")?),
        ("rope_scaling.rope_theta", old.as_ref().and_then(|(_, theta)| *theta)),
        ("rope_parameters.rope_theta", new.as_ref().and_then(|(_, theta)| *theta)),
    ] {
        match (theta, found) {
            (Some((earlier, a)), Some(b)) if a != b => return fields.refuse(name, format!("is {b}, but `{earlier}` is {a}")),
            (None, Some(found)) => theta = Some((name, found)),
            _ => {}
        }
    }
    let (name, theta) = theta.unwrap_or(("rope_theta", 10_000.0));
    if theta <= 1.0 || !(theta as f32).is_finite() {
        return fields.refuse(name, format!("must be greater than 1 and fit into f32, found {theta}"));
    }
    let scaling = new.or(old).map_or(RopeScaling::Default, |(scaling, _)| scaling);
    if matches!(scaling, RopeScaling::Dynamic { .. }) && head_dim == 2 {
        return fields.refuse("head_dim", "must be greater than 2 for rope type `dynamic`, found 2".into());
    }
    Ok(Rope { theta, scaling })
}

/// One of the two dictionaries: what it says of scaling, and its `rope_theta`. `None` when absent, null or empty.
fn rope_dict(top: &Fields, name: &'static str, context: usize) -> Result<Option<(RopeScaling, Option<f64>)>> {
    let object = match top.object.get(name) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Object(object)) if object.is_empty() => return Ok(None),
        Some(Value::Object(object)) => object,
        Some(other) => return top.refuse(name, format!("must be an object, found {}", kind(other))),
    };
    let prefix = if name == "rope_scaling" { "rope_scaling." } else { "rope_parameters." };
    let fields = Fields { path: top.path.clone(), prefix, object };

    let rope_type = match (fields.text("rope_type")?, fields.text("type")?) {
        (Some(new), Some(old)) if new != old => {
            return fields.refuse("type", format!("is \"{old}\", but `{prefix}rope_type` is \"{new}\""));
        }
        (new, old) => new.or(old).unwrap_or("default"),
    };
    let known: &[&str] = match rope_type {
        "default" => &[],
        "linear" => &["factor"],
        "dynamic" => &["factor", "original_max_position_embeddings"],
        "llama3" => &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
        // `finetuned` is from the first code of yarn's authors, where true means what transformers does for all.
        #[rustfmt::skip]
        "yarn" => &[
            "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
            "truncate", "finetuned",
        ],
        _ => {
            let given = if object.contains_key("rope_type") { "rope_type" } else { "type" };
            return fields.refuse(given, format!("is \"{rope_type}\", expected default, linear, dynamic, llama3 or yarn"));
        }
    };
    for (key, value) in object {
        let common = matches!(key.as_str(), "rope_type" | "type" | "rope_theta" | "partial_rotary_factor");
        if !common && !known.contains(&key.as_str()) && !value.is_null() {
            return fields.refuse(key, format!("is {}, which rope type `{rope_type}` does not know", brief(value)));
        }
    }
    if let Some(part) = fields.number("partial_rotary_factor")?
        && part != 1.0
    {
        return fields.refuse("partial_rotary_factor", format!("must be 1, for the whole head is rotated, found {part}"));
    }

    let factor = || match positive(&fields, "factor")? {
        Some(factor) if factor >= 1.0 => Ok(factor),
        Some(factor) => fields.refuse("factor", format!("must be at least 1, found {factor}")),
        None => Err(fields.missing("factor")),
    };
    // Beside the dictionary, too, where transformers lets it win; here both must agree.
    let original = || match (fields.size("original_max_position_embeddings")?, top.size("original_max_position_embeddings")?) {
        (Some(inner), Some(outer)) if inner != outer => {
            let problem = format!("is {outer}, but `{prefix}original_max_position_embeddings` is {inner}");
            top.refuse("original_max_position_embeddings", problem)
        }
        (inner, outer) => Ok(inner.or(outer)),
    };
    let scaling = match rope_type {
        "linear" => RopeScaling::Linear { factor: factor()? },
        "dynamic" => {
            if let Some(original) = fields.size("original_max_position_embeddings")?
                && original != context
            {
                let problem = format!("must be `max_position_embeddings` = {context} for rope type `dynamic`, found {original}");
                return fields.refuse("original_max_position_embeddings", problem);
            }
            RopeScaling::Dynamic { factor: factor()? }
        }
        "llama3" => {
            let low = positive(&fields, "low_freq_factor")?.ok_or_else(|| fields.missing("low_freq_factor"))?;
            let high = positive(&fields, "high_freq_factor")?.ok_or_else(|| fields.missing("high_freq_factor"))?;
            if high <= low {
                return fields.refuse("high_freq_factor", format!("must be greater than `low_freq_factor` = {low}, found {high}"));
            }
            let original_context = original()?.ok_or_else(|| fields.missing("original_max_position_embeddings"))?;
            RopeScaling::Llama3 { factor: factor()?, low_freq_factor: low, high_freq_factor: high, original_context }
        }
        "yarn" => {
            if fields.flag("finetuned")? == Some(false) {
                return fields.refuse("finetuned", "is false, which changes the maths and is not supported".into());
            }
            let original_context = original()?.unwrap_or(context);
            // A null factor means the ratio of the contexts, as DeepSeek writes it.
            let factor = match fields.object.get("factor") {
                Some(Value::Null) => context as f64 / original_context as f64,
                _ => factor()?,
            };
            // Python's `or`: 0 is not set.
            let or = |key: &str, default: f64| -> Result<f64> {
                match fields.number(key)? {
                    None | Some(0.0) => Ok(default),
                    Some(found) if found > 0.0 => Ok(found),
                    Some(found) => fields.refuse(key, format!("must be positive, found {found}")),
                }
            };
            let (beta_fast, beta_slow) = (or("beta_fast", 32.0)?, or("beta_slow", 1.0)?);
            if beta_fast < beta_slow {
                return fields.refuse("beta_fast", format!("must be at least `beta_slow` = {beta_slow}, found {beta_fast}"));
            }
            let mscale = match (or("mscale", 0.0)?, or("mscale_all_dim", 0.0)?) {
                (mscale, all_dim) if mscale != 0.0 && all_dim != 0.0 => Some((mscale, all_dim)),
                _ => None,
            };
            let attention_factor = positive(&fields, "attention_factor")?.unwrap_or_else(|| yarn_attention_factor(factor, mscale));
            let truncate = fields.flag("truncate")?.unwrap_or(true);
            RopeScaling::Yarn { factor, attention_factor, beta_fast, beta_slow, truncate, original_context }
        }
        _ => RopeScaling::Default,
    };
    Ok(Some((scaling, positive(&fields, "rope_theta")?)))
}

/// A number that stays positive and finite in f32, where the frequencies are computed.
fn positive(fields: &Fields, key: &str) -> Result<Option<f64>> {
    match fields.number(key)? {
        Some(found) if found as f32 <= 0.0 || !(found as f32).is_finite() => {
            fields.refuse(key, format!("must be positive and fit into f32, found {found}"))
        }
        found => Ok(found),
    }
}

/// A value as a message shows it: objects and long lists by kind.
fn brief(value: &Value) -> String {
    match value {
        Value::Object(_) | Value::Array(_) if value.to_string().len() > 60 => kind(value).into(),
        _ => value.to_string(),
    }
}

/// The keys of one object of a config, read with their types checked; `null` reads as absent.
struct Fields<'a> {
    path: PathBuf,
    /// Put before a key in messages: `rope_scaling.` for keys of that object.
    prefix: &'static str,
    object: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn error(&self, key: &str, problem: String) -> Error {
        Error::Config { path: self.path.clone(), field: format!("{}{key}", self.prefix), problem }
    }

    fn refuse<T>(&self, key: &str, problem: String) -> Result<T> {
        Err(self.error(key, problem))
    }

    fn missing(&self, key: &str) -> Error {
        self.error(key, "is missing".into())
    }

    /// `key` by way of `convert`, which says no to another type.
    fn typed<'b, T>(&'b self, key: &str, expected: &str, convert: impl Fn(&'b Value) -> Option<T>) -> Result<Option<T>> {
        match self.object.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match convert(value) {
                Some(found) => Ok(Some(found)),
                None => self.refuse(key, format!("must be {expected}, found {}", brief(value))),
            },
        }
    }

    fn text(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", Value::as_str)
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    fn size(&self, key: &str) -> Result<Option<usize>> {
        let convert = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..MAX_SIZE).contains(n));
        self.typed(key, "an integer from 1 to 2147483647", convert)
    }

    fn required_size(&self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    fn token(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "a token id", token_id)
    }

    /// One token id or a list of them, in order, each once.
    fn tokens(&self, key: &str) -> Result<Vec<u32>> {
        let convert = |value: &Value| match value {
            Value::Array(list) => list.iter().map(token_id).collect(),
            one => token_id(one).map(|id| vec![id]),
        };
        let mut ids: Vec<u32> = self.typed(key, "a token id or a list of them", convert)?.unwrap_or_default();
        let mut seen = std::collections::HashSet::new();
        ids.retain(|id| seen.insert(*id));
        Ok(ids)
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}
