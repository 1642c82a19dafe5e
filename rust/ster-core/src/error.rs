//! Everything that can go wrong between a path on disk and a captured activation.

use std::path::PathBuf;

pub type Result<T> = std::result::Result<T, Error>;

/// Not `non_exhaustive`: ster-py matches every variant, so a new one must choose its Python class.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    // Files
    #[error("failed to read {}: {source}", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("model config is missing: {}", .path.display())]
    MissingConfig { path: PathBuf },
    #[error("model directory contains no safetensors weights")]
    NoWeights { dir: PathBuf, found: Vec<String> },
    /// A file that breaks its own format: a truncated shard, an index with `..` in a name.
    #[error("{}: {problem}", .path.display())]
    File { path: PathBuf, problem: String },
    /// A tensor that is missing, unexpected, or not what the config says.
    #[error("{}: tensor `{tensor}` {problem}", .path.display())]
    Tensor { path: PathBuf, tensor: String, problem: String },

    // Config
    /// A field of config.json that is missing, contradictory, or would change the maths and is not supported.
    #[error("{}: `{field}` {problem}", .path.display())]
    Config { path: PathBuf, field: String, problem: String },
    #[error("model type `{model_type}` is not supported; this Ster build runs {}", crate::llama::families::names())]
    ModelType { model_type: String },

    // What was asked
    #[error("layer {layer} is outside the model's 0..{} range", .layers - 1)]
    Layer { layer: usize, layers: usize },
    #[error("layers must be ascending, each once, found {layers:?}")]
    LayerOrder { layers: Vec<usize> },
    #[error("token id {id} at position {position} of sequence {sequence} is outside the embedding's 0..{} range", .vocab - 1)]
    TokenId { id: u32, position: usize, sequence: usize, vocab: usize },
    #[error("tokenizer produced no tokens")]
    NoTokens { sequence: usize },
    #[error("prompt contains {tokens} tokens, model context allows fewer than {limit}")]
    Context { tokens: usize, limit: usize, sequence: usize },
    #[error("steering at layer {layer} {problem}")]
    Steering { layer: usize, problem: String },
    #[error("the cache {problem}")]
    Cache { problem: String },
    #[error("`STER_KERNELS={name}` {problem}")]
    Kernels { name: String, problem: String },
    #[error("{field} {problem}")]
    Sampling { field: &'static str, problem: String },
    #[error("threads must be between 1 and 1024, found {found}")]
    Threads { found: usize },

    // What came out
    /// `token` is the index in the sequence, `sequence` the index in the batch.
    #[error("activation at layer {layer} contains a non-finite value at token {position} (id {id}) of sequence {sequence}")]
    NonFinite { layer: usize, position: usize, id: u32, sequence: usize },
    #[error("logits contain a non-finite value at token {position} (id {id}) of sequence {sequence}")]
    NonFiniteLogits { position: usize, id: u32, sequence: usize },
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// What the reader can do about it, when there is something.
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::MissingConfig { .. } => Some("point to the folder that holds config.json, tokenizer.json and *.safetensors".into()),
            Error::NoWeights { dir, found } if found.iter().any(|name| name.ends_with(".gguf")) => {
                let files: Vec<_> = found.iter().filter(|name| name.ends_with(".gguf")).collect();
                let more = if files.len() > 1 { format!(" ({} are there)", files.len()) } else { String::new() };
                Some(format!("a GGUF model is named by its file: {}{more}", dir.join(files[0]).display()))
            }
            Error::NoWeights { found, .. } if !found.is_empty() => {
                Some(format!("found {}; convert the weights to safetensors first", found.join(", ")))
            }
            Error::Kernels { .. } => Some("unset STER_KERNELS to let Ster choose".into()),
            Error::NonFinite { .. } | Error::NonFiniteLogits { .. } => {
                Some("look for NaN or infinity in the weights, or for a steering strength that overflows f32".into())
            }
            _ => None,
        }
    }
}
