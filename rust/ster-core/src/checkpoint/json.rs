//! JSON as checkpoints carry it: UTF-8 with or without a byte order mark, no key twice in one object.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::{Error, Result};

/// The largest real file of this kind, the index of a model of thousands of experts, stays under 20 MB.
const MAX_BYTES: u64 = 256 << 20;

/// The object in the JSON file at `path`. `Ok(None)` when there is no such file.
pub fn read_object(path: &Path) -> Result<Option<Map<String, Value>>> {
    let read = |source| Error::Read { path: path.into(), source };
    let refuse = |problem| Error::File { path: path.into(), problem };
    match std::fs::metadata(path) {
        Ok(meta) if !meta.is_file() => return Err(refuse("is not a file".into())),
        Ok(meta) if meta.len() > MAX_BYTES => return Err(refuse(format!("holds {} bytes; refused as JSON", meta.len()))),
        Ok(_) => {}
        // A link that leads nowhere is a broken download, not an absent file.
        Err(e) if absent(&e) && path.symlink_metadata().is_err() => return Ok(None),
        Err(e) => return Err(read(e)),
    }
    let bytes = std::fs::read(path).map_err(read)?;
    match parse(decode(&bytes).map_err(refuse)?).map_err(refuse)? {
        Value::Object(object) => Ok(Some(object)),
        other => Err(refuse(format!("must hold a JSON object, found {}", kind(&other)))),
    }
}

fn absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory)
}

/// UTF-8 text without its byte order mark.
fn decode(bytes: &[u8]) -> std::result::Result<&str, String> {
    // JSON starts with an ASCII character, so a zero among the first four bytes tells UTF-16 and UTF-32 apart (RFC 4627, section 3).
    let found = match bytes {
        [0xFF, 0xFE, 0, 0, ..] | [_, 0, 0, 0, ..] => Some("UTF-32 (little-endian)"),
        [0, 0, 0xFE, 0xFF, ..] | [0, 0, 0, _, ..] => Some("UTF-32 (big-endian)"),
        [0xFF, 0xFE, ..] | [_, 0, ..] => Some("UTF-16 (little-endian)"),
        [0xFE, 0xFF, ..] | [0, _, ..] => Some("UTF-16 (big-endian)"),
        _ => None,
    };
    if let Some(encoding) = found {
        return Err(format!("is encoded as {encoding}; JSON must be UTF-8"));
    }
    let bytes = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes);
    std::str::from_utf8(bytes).map_err(|e| format!("is not UTF-8: invalid byte at offset {}", e.valid_up_to()))
}

/// One JSON document; NaN, Infinity and repeated keys are refused.
fn parse(text: &str) -> std::result::Result<Value, String> {
    if text.trim().is_empty() {
        return Err("is empty".into());
    }
    let mut reader = serde_json::Deserializer::from_str(text);
    Strict.deserialize(&mut reader).and_then(|value| reader.end().map(|()| value)).map_err(|e| format!("is not valid JSON: {e}"))
}

/// The word a message uses for a value.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The first key that occurs twice in the object `text`; serde_json would silently keep the last value.
pub fn repeated_key(text: &str) -> Option<String> {
    struct Keys<'a>(&'a mut Option<String>);
    impl<'de> Visitor<'de> for Keys<'_> {
        type Value = ();
        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
            let mut seen = HashSet::new();
            while let Some(key) = map.next_key::<String>()? {
                map.next_value::<IgnoredAny>()?;
                if seen.contains(&key) {
                    self.0.get_or_insert(key);
                } else {
                    seen.insert(key);
                }
            }
            Ok(())
        }
    }
    let mut repeated = None;
    // Broken JSON is the caller's to report; keys seen before the break still count.
    let _ = serde_json::Deserializer::from_str(text).deserialize_map(Keys(&mut repeated));
    repeated
}

/// Builds a [`Value`], refusing an object that names a key twice.
struct Strict;

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_bool<E>(self, v: bool) -> std::result::Result<Value, E> {
        Ok(Value::Bool(v))
    }
    fn visit_u64<E>(self, v: u64) -> std::result::Result<Value, E> {
        Ok(v.into())
    }
    fn visit_i64<E>(self, v: i64) -> std::result::Result<Value, E> {
        Ok(v.into())
    }
    fn visit_f64<E: serde::de::Error>(self, v: f64) -> std::result::Result<Value, E> {
        Number::from_f64(v).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }
    fn visit_str<E>(self, v: &str) -> std::result::Result<Value, E> {
        Ok(v.into())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(Strict)? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(Strict)?;
            if object.contains_key(&key) {
                return Err(A::Error::custom(format_args!("key `{key}` occurs twice")));
            }
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}
