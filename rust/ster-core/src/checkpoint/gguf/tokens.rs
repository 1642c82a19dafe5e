//! Which tokens begin and end a text.

use serde_json::Value as Json;

use super::config::{Config, Keys, put};
use super::value::{List, Value};
use crate::error::{Error, Result};

/// Names of tokens that end a generation wherever they are in a vocabulary: `llama-vocab.cpp`, whose files often name one of several.
#[rustfmt::skip]
const ENDS: &[&str] = &[
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "[EOT]", "<|end_of_text|>", "<end_of_utterance>",
];
/// `tokenizer.ggml.token_type` of tokens that are no text: control, and user-defined.
const SPECIAL: [i128; 2] = [3, 4];

/// `bos_token_id` and `eos_token_id` of config.json; of generation_config.json, which is returned, every token that ends a generation.
pub(super) fn translate(keys: &Keys, set: &mut Config) -> Result<Config> {
    let metadata = &keys.gguf.metadata;
    let id = |name: &str| -> Result<Option<u32>> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        match metadata.get(&key) {
            None | Some(Value::Int(-1 | 0xFFFF_FFFF)) => Ok(None), // LLAMA_TOKEN_NULL
            Some(&Value::Int(id)) if (0..1 << 31).contains(&id) => Ok(Some(id as u32)),
            Some(other) => {
                let problem = format!("must be a token id, found {}", other.brief());
                Err(Error::Config { path: keys.gguf.path().into(), field: key, problem })
            }
        }
    };
    let (bos, eos) = (id("bos")?, id("eos")?);
    put(set, "bos_token_id", bos);
    put(set, "eos_token_id", eos);

    let mut ends: Vec<u32> = [eos, id("eot")?, id("eom")?].into_iter().flatten().collect();
    if let (Some(Value::List(List::Texts(tokens))), Some(Value::List(List::Numbers(kinds)))) =
        (metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type"))
    {
        let special = |kind: Value| matches!(kind, Value::Int(kind) if SPECIAL.contains(&kind));
        let named = tokens.iter().zip(kinds.iter()).zip(0u32..).filter(|((token, _), _)| ENDS.contains(token));
        ends.extend(named.filter(|((_, kind), _)| special(kind.clone())).map(|(_, id)| id));
    }
    let mut seen = std::collections::HashSet::new();
    ends.retain(|id| seen.insert(*id));

    let mut generation = Config::new();
    put(&mut generation, "bos_token_id", bos);
    put(&mut generation, "eos_token_id", if ends.is_empty() { Json::Null } else { ends.into() });
    Ok(generation)
}
