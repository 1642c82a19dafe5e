//! The architectures: what llama.cpp's converter calls the tensors of each, and what it does to them.
//!
//! Source: `conversion/*.py` and `gguf-py/gguf/tensor_mapping.py` of llama.cpp. `LlamaModel.permute` reorders the rows of q and k where
//! `undo_permute` is set: for llama and what derives from it (granite, smollm3). `norm.weight + 1`: gemma2, gemma3. Everything else is
//! stored as transformers has it.

use std::path::Path;

use super::value::{Metadata, Value};
use crate::error::{Error, Result};

pub(super) struct Arch {
    /// `general.architecture`
    pub name: &'static str,
    pub model_type: &'static str,
    pub interleaved: bool,
    pub gains_with_one: bool,
    /// `blk.N.<first>` is `model.layers.N.<second>`.
    blocks: &'static [(&'static str, &'static str)],
}

const LLAMA: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

const QWEN3: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// q, k and v are one matrix, gate and up another, as in transformers.
const PHI3: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_up", "mlp.gate_up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Norms stand after attention and MLP, none before.
const OLMO2: &[(&str, &str)] = &[
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_output", "self_attn.o_proj"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

const GEMMA: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_q_norm", "self_attn.q_norm"), // of gemma3
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_output", "self_attn.o_proj"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

#[rustfmt::skip]
const ARCHS: &[Arch] = &[
    Arch { name: "llama", model_type: "llama", interleaved: true, gains_with_one: false, blocks: LLAMA },
    Arch { name: "qwen2", model_type: "qwen2", interleaved: false, gains_with_one: false, blocks: LLAMA },
    Arch { name: "qwen3", model_type: "qwen3", interleaved: false, gains_with_one: false, blocks: QWEN3 },
    Arch { name: "phi3", model_type: "phi3", interleaved: false, gains_with_one: false, blocks: PHI3 },
    Arch { name: "granite", model_type: "granite", interleaved: true, gains_with_one: false, blocks: LLAMA },
    Arch { name: "olmo2", model_type: "olmo2", interleaved: false, gains_with_one: false, blocks: OLMO2 },
    Arch { name: "smollm3", model_type: "smollm3", interleaved: true, gains_with_one: false, blocks: LLAMA },
    Arch { name: "gemma2", model_type: "gemma2", interleaved: false, gains_with_one: true, blocks: GEMMA },
    Arch { name: "gemma3", model_type: "gemma3_text", interleaved: false, gains_with_one: true, blocks: GEMMA },
];

/// The architecture a file names.
pub(super) fn find(path: &Path, metadata: &Metadata) -> Result<&'static Arch> {
    let refuse = |field: &str, problem: String| Err(Error::Config { path: path.into(), field: field.into(), problem });
    // Adapters, projectors of images and bare vocabularies are GGUF files too.
    match metadata.get("general.type") {
        None => {}
        Some(Value::Text(kind)) if kind == "model" => {}
        Some(other) => return refuse("general.type", format!("is {}, expected \"model\"", other.brief())),
    }
    const KEY: &str = "general.architecture";
    match metadata.get(KEY) {
        None => refuse(KEY, "is missing".into()),
        Some(Value::Text(name)) => match ARCHS.iter().find(|arch| arch.name == name) {
            Some(arch) => Ok(arch),
            None => {
                let names: Vec<_> = ARCHS.iter().map(|arch| arch.name).collect();
                refuse(KEY, format!("is \"{name}\", which is not supported; expected one of {}", names.join(", ")))
            }
        },
        Some(other) => refuse(KEY, format!("must be a string, found {}", other.brief())),
    }
}

impl Arch {
    /// The name transformers has for tensor `name`; a tensor that is not this architecture's keeps its own, by which the loader refuses it.
    pub fn hf_name(&self, name: &str) -> String {
        match name {
            "token_embd.weight" => return "model.embed_tokens.weight".into(),
            "output_norm.weight" => return "model.norm.weight".into(),
            "output.weight" => return "lm_head.weight".into(),
            _ => {}
        }
        let known = || {
            let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
            let (kind, suffix) = rest.split_once('.')?;
            let number = layer.bytes().all(|b| b.is_ascii_digit()) && (layer == "0" || !layer.starts_with('0')) && !layer.is_empty();
            let (_, found) = self.blocks.iter().find(|(gguf, _)| *gguf == kind)?;
            (number && matches!(suffix, "weight" | "bias")).then(|| format!("model.layers.{layer}.{found}.{suffix}"))
        };
        known().unwrap_or_else(|| name.into())
    }
}
