//! How each family of models differs from Llama: a short description a file, on the same blocks.
//!
//! To add one, write its description beside these and put it into [`ALL`]; `docs/adding-a-family.md` has the steps. Source of every
//! description: transformers 5.24, `models/<name>/configuration_<name>.py` and `modeling_<name>.py`.

mod gemma;
mod granite;
mod llama;
mod mistral;
mod olmo2;
mod phi3;
mod qwen;
mod smollm3;

use super::config::{Fields, LlamaConfig};
use crate::error::Result;

/// Every family this build runs, Llama first, then by name.
pub static ALL: &[&Family] = &[
    &llama::LLAMA,
    &gemma::GEMMA2,
    &gemma::GEMMA3,
    &granite::GRANITE,
    &mistral::MISTRAL,
    &olmo2::OLMO2,
    &phi3::PHI3,
    &qwen::QWEN2,
    &qwen::QWEN3,
    &smollm3::SMOLLM3,
];

/// What a `model_type` means where it is not Llama's.
pub struct Family {
    /// `model_type` in config.json.
    pub name: &'static str,
    /// What it adds to Llama, for a person.
    pub adds: &'static str,
    /// Keys of config.json that `read` gives a meaning to, beside Llama's.
    pub keys: &'static [&'static str],
    /// What holds where config.json is silent.
    pub defaults: Defaults,
    /// The key that names the function of the MLP's gate, and its default; Gemma's configs carry a stale `hidden_act` beside theirs.
    pub activation: (&'static str, &'static str),
    pub norms: Norms,
    pub qk_norm: QkNorm,
    /// Norm gains are stored as `w` and applied as `1 + w`.
    pub gain_plus_one: bool,
    /// q, k and v are one tensor, gate and up another.
    pub fused: bool,
    pub attention_bias: Bias,
    pub mlp_bias: Bias,
    /// Reads the family's own keys, after Llama's.
    pub read: fn(&Fields, &mut LlamaConfig) -> Result<()>,
}

#[derive(Clone, Copy)]
pub struct Defaults {
    /// `None`: as many as heads.
    pub kv_heads: Option<usize>,
    /// `None`: hidden / heads.
    pub head_dim: Option<usize>,
    pub context: usize,
    pub norm_eps: f64,
    pub theta: f64,
    pub tied: bool,
}

/// Which of a block's norms there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// `x += f(norm(x))`
    Before,
    /// `x += norm(f(x))`
    After,
    /// `x += norm(f(norm(x)))`
    Around,
}

/// A norm over queries and keys before they are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    None,
    /// Over each head.
    Head,
    /// Over the whole projection.
    Whole,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    /// On every projection, when `attention_bias` or `mlp_bias` says so.
    Configured,
    /// On q, k and v, whatever the config says.
    Qkv,
    Never,
}

impl Family {
    pub fn named(name: &str) -> Option<&'static Family> {
        ALL.iter().copied().find(|family| family.name == name)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Family) -> bool {
        self.name == other.name
    }
}

impl std::fmt::Debug for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// All names, for people: "llama, gemma2 and qwen3".
pub fn names() -> String {
    let names: Vec<_> = ALL.iter().map(|family| family.name).collect();
    let (last, rest) = names.split_last().expect("there are families");
    format!("{} and {last}", rest.join(", "))
}
