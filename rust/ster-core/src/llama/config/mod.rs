//! config.json of a checkpoint, read so that nothing which could change the maths is passed over.
//!
//! The rule for every key at the top level:
//! - a key of transformers' config class of the family is read, with the defaults of transformers 5.24 where it may be absent;
//! - a key of [`keys::HARMLESS`], or one that starts with `_`, is ignored: it says nothing about a forward pass;
//! - `null` is ignored: it is how configs say "not set";
//! - a key of [`keys::neutral`], where other families say how they differ from Llama, must have the value that makes no difference;
//! - any other key is refused by name, for Ster cannot know what it means.
//!
//! Inside `rope_scaling` and `rope_parameters` only the keys transformers documents for that rope type are known.

mod fields;
mod keys;
mod rope;

use std::path::Path;

use serde_json::{Map, Value};

pub use self::fields::Fields;
use self::fields::brief;
use self::keys::{HARMLESS, READ, neutral};
use super::families::{Bias, Family};
use super::rope::Rope;
use crate::checkpoint::{Source, json};
use crate::error::{Error, Result};
pub use crate::kernels::activation::Activation;

/// The facts of config.json that the forward pass needs, checked against each other.
///
/// All sizes are at least 1 and below 2^31, `head_dim` and `rotary_dim` are even, `heads` is a multiple of `kv_heads`.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    pub family: &'static Family,
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
    /// Numbers of a head that are rotated, from its first on; the rest passes as it is.
    pub rotary_dim: usize,
    pub rope: Rope,
    /// The rotation of layers with a window, where it is another.
    pub local_rope: Option<Rope>,
    /// Layers whose queries and keys are rotated.
    pub rotated: Layers,
    /// Keys that a query of a `windowed` layer sees, its own among them.
    pub window: Option<usize>,
    pub windowed: Layers,
    /// Multiplied onto every number of the embedding.
    pub embedding_scale: f32,
    /// Multiplied onto what attention and MLP add to the residual stream.
    pub residual_scale: f32,
    /// Multiplied onto the products of queries and keys.
    pub attention_scale: f32,
    /// `c tanh(score / c)` on scores, after their scale.
    pub score_cap: Option<f32>,
    /// Logits are divided by it.
    pub logit_divisor: f32,
    /// `c tanh(logit / c)` on logits, after their divisor.
    pub logit_cap: Option<f32>,
    /// The output head is the embedding.
    pub tied: bool,
    /// On the q, k and v projections.
    pub qkv_bias: bool,
    /// On the output projection of attention.
    pub o_bias: bool,
    /// On the gate, up and down projections.
    pub mlp_bias: bool,
    pub bos: Option<u32>,
    /// Any of these ends a generation: those of config.json, then those only generation_config.json names. Empty when both are silent;
    /// transformers would then take 2, which is a guess for any tokenizer but Llama 1's and 2's.
    pub eos: Vec<u32>,
}

impl LlamaConfig {
    /// Read `config.json` of `dir`, and of `generation_config.json`, if there, the tokens that end a generation.
    pub fn load(dir: &Path) -> Result<LlamaConfig> {
        let path = dir.join("config.json");
        let object = json::read_object(&path)?.ok_or_else(|| Error::MissingConfig { path: path.clone() })?;
        let mut config = LlamaConfig::read(&Fields { path, prefix: String::new(), object: &object })?;
        let path = dir.join("generation_config.json");
        if let Some(object) = json::read_object(&path)? {
            config.generate_with(&path, &object)?;
        }
        Ok(config)
    }

    /// The same for a model in any form.
    pub fn from_source(source: &Source) -> Result<LlamaConfig> {
        let mut config = LlamaConfig::read(&Fields { path: source.config_path.clone(), prefix: String::new(), object: &source.config })?;
        if let Some((path, object)) = &source.generation {
            config.generate_with(path, object)?;
        }
        Ok(config)
    }

    fn generate_with(&mut self, path: &Path, object: &Map<String, Value>) -> Result<()> {
        let fields = Fields { path: path.into(), prefix: String::new(), object };
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
        let family = Family::named(model_type).ok_or_else(|| Error::ModelType { model_type: model_type.into() })?;
        let defaults = family.defaults;
        let hidden = fields.required_size("hidden_size")?;
        let heads = fields.required_size("num_attention_heads")?;
        let kv_heads = fields.size_or("num_key_value_heads", defaults.kv_heads)?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            return fields.refuse("num_key_value_heads", format!("must divide `num_attention_heads` = {heads}, found {kv_heads}"));
        }
        let head_dim = match fields.size_or("head_dim", defaults.head_dim)? {
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
        let context = fields.size("max_position_embeddings")?.unwrap_or(defaults.context);
        let norm_eps = fields.number("rms_norm_eps")?.unwrap_or(defaults.norm_eps);
        if !(0.0..1.0).contains(&norm_eps) {
            return fields.refuse("rms_norm_eps", format!("must be between 0 and 1, found {norm_eps}"));
        }
        let (key, default) = family.activation;
        let name = fields.text(key)?.unwrap_or(default);
        let Some(activation) = activation(name) else {
            return fields.refuse(key, format!("is \"{name}\", expected silu, gelu or gelu_pytorch_tanh"));
        };
        let rotary_dim = rotary_dim(fields, family, head_dim)?;
        let head = rope::Head { context, rotary_dim, family };
        let (attention_bias, mlp_bias) =
            (bias(fields, "attention_bias", family.attention_bias)?, bias(fields, "mlp_bias", family.mlp_bias)?);

        let mut config = LlamaConfig {
            family,
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
            rotary_dim,
            rope: rope::rope(fields, &head)?,
            local_rope: None,
            rotated: Layers::All,
            window: None,
            windowed: Layers::None,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            attention_scale: (1.0 / (head_dim as f64).sqrt()) as f32,
            score_cap: None,
            logit_divisor: 1.0,
            logit_cap: None,
            tied: fields.flag("tie_word_embeddings")?.unwrap_or(defaults.tied),
            qkv_bias: attention_bias || family.attention_bias == Bias::Qkv,
            o_bias: attention_bias,
            mlp_bias,
            bos: fields.token("bos_token_id")?,
            eos: fields.tokens("eos_token_id")?,
        };
        (family.read)(fields, &mut config)?;
        for (key, value) in fields.object {
            let known = [READ, family.keys, HARMLESS].iter().any(|keys| keys.contains(&key.as_str())) || key.starts_with('_');
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

/// Some of the layers. Not a list of all: how many there are is the config's word until their tensors are found.
#[derive(Clone, Debug, PartialEq)]
pub enum Layers {
    None,
    All,
    /// This one and those after it.
    From(usize),
    /// Every n-th: n - 1, 2n - 1 ...
    Every(usize),
    /// All but every n-th.
    NotEvery(usize),
    Listed(Vec<bool>),
}

impl Layers {
    pub fn holds(&self, layer: usize) -> bool {
        match self {
            Layers::None => false,
            Layers::All => true,
            Layers::From(first) => layer >= *first,
            Layers::Every(n) => (layer + 1).is_multiple_of(*n),
            Layers::NotEvery(n) => !(layer + 1).is_multiple_of(*n),
            Layers::Listed(flags) => flags.get(layer).copied().unwrap_or(false),
        }
    }
}

impl LlamaConfig {
    /// How many keys a query of `layer` sees at most; `None`: all before it.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        self.window.filter(|_| self.windowed.holds(layer))
    }

    /// The rotations of the model: that of most layers, then, where there is one, that of windowed layers.
    pub fn ropes(&self) -> impl Iterator<Item = &Rope> {
        std::iter::once(&self.rope).chain(&self.local_rope)
    }

    /// Which of [`ropes`](Self::ropes) turns queries and keys of `layer`, if any does.
    pub fn rope_of(&self, layer: usize) -> Option<usize> {
        self.rotated.holds(layer).then(|| usize::from(self.local_rope.is_some() && self.windowed.holds(layer)))
    }
}

/// How many numbers of a head are rotated. `partial_rotary_factor` may stand alone or with the rope keys.
fn rotary_dim(fields: &Fields, family: &Family, head_dim: usize) -> Result<usize> {
    const KEY: &str = "partial_rotary_factor";
    if !family.keys.contains(&KEY) {
        return Ok(head_dim);
    }
    let inside = |name: &str| fields.object.get(name).and_then(|dictionary| dictionary.get(KEY)).and_then(|value| value.as_f64());
    let mut said = None;
    for found in [fields.number(KEY)?, inside("rope_scaling"), inside("rope_parameters")].into_iter().flatten() {
        if said.is_some_and(|earlier| earlier != found) {
            return fields.refuse(KEY, format!("is {} in one place and {found} in another", said.unwrap_or_default()));
        }
        said = Some(found);
    }
    let part = said.unwrap_or(1.0);
    let rotary_dim = (head_dim as f64 * part) as usize; // Python's int()
    if !(0.0..=1.0).contains(&part) || rotary_dim < 2 || !rotary_dim.is_multiple_of(2) {
        return fields.refuse(KEY, format!("must leave an even number of a head's {head_dim} numbers to rotate, found {part}"));
    }
    Ok(rotary_dim)
}

/// Whether all projections of a kind have biases. transformers has no such flag where the family never has them, and would pass it over.
fn bias(fields: &Fields, key: &str, bias: Bias) -> Result<bool> {
    let said = fields.flag(key)?.unwrap_or(false);
    if said && bias != Bias::Configured {
        return fields.refuse(key, "is true, which this family does not know (transformers would leave it out)".into());
    }
    Ok(said)
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
