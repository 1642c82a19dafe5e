//! The keys of a config, read with their types checked.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::{Layers, LlamaConfig, MAX_SIZE, rope};
use crate::checkpoint::json::kind;
use crate::error::{Error, Result};
use crate::llama::rope::Rope;

/// A value as a message shows it: objects and long lists by kind.
pub(super) fn brief(value: &Value) -> String {
    match value {
        Value::Object(_) | Value::Array(_) if value.to_string().len() > 60 => kind(value).into(),
        _ => value.to_string(),
    }
}

/// The keys of one object of a config, read with their types checked; `null` reads as absent.
pub struct Fields<'a> {
    pub(super) path: PathBuf,
    /// Put before a key in messages: `rope_scaling.` for keys of that object.
    pub(super) prefix: String,
    pub(super) object: &'a Map<String, Value>,
}

impl Fields<'_> {
    pub(super) fn error(&self, key: &str, problem: String) -> Error {
        Error::Config { path: self.path.clone(), field: format!("{}{key}", self.prefix), problem }
    }

    pub(crate) fn refuse<T>(&self, key: &str, problem: String) -> Result<T> {
        Err(self.error(key, problem))
    }

    pub(crate) fn missing(&self, key: &str) -> Error {
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

    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", Value::as_str)
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>> {
        let convert = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..MAX_SIZE).contains(n));
        self.typed(key, "an integer from 1 to 2147483647", convert)
    }

    pub(crate) fn required_size(&self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// Like a size, and may be 0.
    pub(crate) fn count(&self, key: &str) -> Result<Option<usize>> {
        let convert = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n < MAX_SIZE);
        self.typed(key, "an integer from 0 to 2147483647", convert)
    }

    /// A size; `default` where the key is absent, `None` where it is null.
    pub(crate) fn size_or(&self, key: &str, default: Option<usize>) -> Result<Option<usize>> {
        if self.object.contains_key(key) { self.size(key) } else { Ok(default) }
    }

    /// A number that stays positive and finite in f32.
    pub(crate) fn positive(&self, key: &str) -> Result<Option<f64>> {
        match self.number(key)? {
            Some(found) if found as f32 <= 0.0 || !(found as f32).is_finite() => {
                self.refuse(key, format!("must be positive and fit into f32, found {found}"))
            }
            found => Ok(found),
        }
    }

    /// A factor of the forward pass.
    pub(crate) fn scale(&self, key: &str) -> Result<Option<f32>> {
        Ok(self.positive(key)?.map(|scale| scale as f32))
    }

    /// The bound of a soft cap; `default` where the key is absent, `None` where it is null.
    pub(crate) fn cap(&self, key: &str, default: Option<f32>) -> Result<Option<f32>> {
        if self.object.contains_key(key) { self.scale(key) } else { Ok(default) }
    }

    /// A list of positive numbers that stay so in f32.
    pub(crate) fn factors(&self, key: &str, len: usize) -> Result<Vec<f32>> {
        let convert = |value: &Value| value.as_array()?.iter().map(|v| v.as_f64().map(|v| v as f32)).collect::<Option<Vec<_>>>();
        let found = self.typed(key, "a list of numbers", convert)?.ok_or_else(|| self.missing(key))?;
        if found.len() != len {
            return self.refuse(key, format!("must have {len} numbers, one for each rotated pair, found {}", found.len()));
        }
        match found.iter().find(|factor| !(**factor > 0.0 && factor.is_finite())) {
            Some(factor) => self.refuse(key, format!("must hold positive numbers, found {factor}")),
            None => Ok(found),
        }
    }

    /// A list of 0 and 1 (or false and true) with one for each layer; transformers lets it be longer.
    pub(crate) fn layer_flags(&self, key: &str, layers: usize) -> Result<Option<Vec<bool>>> {
        let flag = |value: &Value| match value {
            Value::Bool(flag) => Some(*flag),
            value => value.as_u64().filter(|n| *n < 2).map(|n| n == 1),
        };
        let convert = |value: &Value| value.as_array()?.iter().map(flag).collect::<Option<Vec<_>>>();
        let mut found = self.typed(key, "a list of 0 and 1", convert)?;
        if let Some(found) = &mut found {
            if found.len() < layers {
                return self.refuse(key, format!("must have one number for each of {layers} layers, found {}", found.len()));
            }
            found.truncate(layers);
        }
        Ok(found)
    }

    /// `layer_types`: which layers are `sliding_attention` among `full_attention`.
    pub(crate) fn layer_types(&self, layers: usize) -> Result<Option<Layers>> {
        const KEY: &str = "layer_types";
        let name = |value: &Value| match value.as_str() {
            Some("sliding_attention") => Some(true),
            Some("full_attention") => Some(false),
            _ => None,
        };
        let convert = |value: &Value| value.as_array()?.iter().map(name).collect::<Option<Vec<_>>>();
        match self.typed(KEY, "a list of `full_attention` and `sliding_attention`", convert)? {
            Some(found) if found.len() != layers => {
                self.refuse(KEY, format!("must have one entry for each of {layers} layers, found {}", found.len()))
            }
            found => Ok(found.map(Layers::Listed)),
        }
    }

    /// The rotation of windowed layers, from what the config says beside the others.
    pub(crate) fn local_rope(&self, config: &LlamaConfig, default: f64) -> Result<Rope> {
        let head = rope::Head { context: config.context, rotary_dim: config.rotary_dim, family: config.family };
        rope::local_rope(self, &head, default)
    }

    /// `layer_types`, where there is one, has the last word on which layers have a window.
    pub(crate) fn override_windows(&self, config: &mut LlamaConfig) -> Result<()> {
        let Some(listed) = self.layer_types(config.layers)? else { return Ok(()) };
        if config.window.is_none() && (0..config.layers).any(|layer| listed.holds(layer)) {
            return self.refuse("layer_types", "names `sliding_attention`, but no sliding window is set".into());
        }
        config.windowed = listed;
        Ok(())
    }

    pub(crate) fn token(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "a token id", token_id)
    }

    /// One token id or a list of them, in order, each once.
    pub(crate) fn tokens(&self, key: &str) -> Result<Vec<u32>> {
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
