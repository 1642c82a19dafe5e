//! One safetensors file: mapped, its header checked, its tensors' places known. No tensor is read here.
//!
//! Layout: u64 little-endian header length, JSON header, tensor bytes without gaps (<https://github.com/huggingface/safetensors>).
//! The `safetensors` crate decides whether a file is valid; [`diagnose`] only finds words for what it refused.

use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::{Shard, Stored, json};
use crate::error::{Error, Result};

/// The limit of the crate, and of the reference implementation.
const MAX_HEADER: u64 = 100_000_000;

pub(super) fn open(path: &Path) -> Result<Shard> {
    let refuse = |problem: String| Error::File { path: path.into(), problem };

    let (file, map) = super::map(path)?;
    if map.len() < 8 {
        return Err(refuse(format!("holds {} bytes, too few for a safetensors header length", map.len())));
    }
    let header = u64::from_le_bytes(map[..8].try_into().expect("checked: at least 8 bytes"));
    let room = map.len() as u64 - 8;
    if map.starts_with(b"version https://git-lfs") {
        return Err(refuse("is a Git LFS pointer, not the weights; run `git lfs pull`".into()));
    }
    if header > room {
        return Err(refuse(format!("says its header takes {header} bytes, found {room} after the length: truncated, or not safetensors")));
    }
    if header > MAX_HEADER {
        return Err(refuse(format!("says its header takes {header} bytes, more than the {MAX_HEADER} safetensors allows")));
    }
    let start = 8 + header as usize;
    let text = std::str::from_utf8(&map[8..start]).map_err(|e| refuse(format!("has a header that is not UTF-8: {e}")))?;
    if let Some(tensor) = json::repeated_key(text) {
        return Err(Error::Tensor { path: path.into(), tensor, problem: "occurs twice in the header".into() });
    }

    let metadata = match SafeTensors::read_metadata(&map) {
        Ok((_, metadata)) => metadata,
        Err(error) => {
            return Err(match diagnose(text, map.len() - start) {
                Some((Some(tensor), problem)) => Error::Tensor { path: path.into(), tensor, problem },
                Some((None, problem)) => refuse(problem),
                None => refuse(format!("is not a valid safetensors file: {error}")),
            });
        }
    };
    let mut tensors = Vec::new();
    for name in metadata.offset_keys() {
        let info = metadata.info(&name).expect("a key of this header");
        let (begin, end) = info.data_offsets;
        // Checked by the crate: ranges are in order, without gaps, and the last ends where the file does.
        tensors.push((name, stored(info.dtype), info.shape.clone(), start + begin..start + end));
    }
    Ok(Shard { path: path.into(), file, map, tensors })
}

fn stored(dtype: Dtype) -> Stored {
    match dtype {
        Dtype::F32 => Stored::Read(crate::tensor::Dtype::F32),
        Dtype::F16 => Stored::Read(crate::tensor::Dtype::F16),
        Dtype::BF16 => Stored::Read(crate::tensor::Dtype::BF16),
        other => Stored::Other(format!("{other:?}")),
    }
}

/// What is wrong with a header the crate refused, and with which tensor: the first in file order. `None`: nothing found.
fn diagnose(text: &str, data: usize) -> Option<(Option<String>, String)> {
    let object: serde_json::Map<String, Value> = match serde_json::from_str(text) {
        Ok(object) => object,
        Err(error) => return Some((None, format!("has a header that is not a JSON object: {error}"))),
    };
    if let Some(metadata) = object.get("__metadata__") {
        let strings = metadata.as_object().is_some_and(|m| m.values().all(Value::is_string));
        if !strings && !metadata.is_null() {
            return Some((None, "has a `__metadata__` that is not a map of strings".into()));
        }
    }

    let mut placed = Vec::new();
    for (name, entry) in object.iter().filter(|(name, _)| *name != "__metadata__") {
        let at = |problem: String| Some((Some(name.clone()), problem));
        let Some(fields) = entry.as_object() else {
            return at(format!("is {} in the header, expected an object", json::kind(entry)));
        };
        for field in ["dtype", "shape", "data_offsets"] {
            if !fields.contains_key(field) {
                return at(format!("has no `{field}`"));
            }
        }
        let numbers = |field: &str| -> Option<Vec<u64>> { fields[field].as_array()?.iter().map(Value::as_u64).collect() };
        let Ok(dtype) = serde_json::from_value::<Dtype>(fields["dtype"].clone()) else {
            return at(format!("has an unknown dtype {}", fields["dtype"]));
        };
        let Some(shape) = numbers("shape") else {
            return at(format!("has shape {}, expected a list of sizes", fields["shape"]));
        };
        let Some(&[begin, end]) = numbers("data_offsets").as_deref() else {
            return at(format!("has data_offsets {}, expected [begin, end]", fields["data_offsets"]));
        };
        if begin > end {
            return at(format!("has data_offsets [{begin}, {end}], which end before they begin"));
        }
        let bits = shape.iter().try_fold(dtype.bitsize() as u64, |n, &axis| n.checked_mul(axis));
        let Some(bits) = bits else {
            return at(format!("has shape {shape:?}, too large for any file"));
        };
        if bits % 8 != 0 || bits / 8 != end - begin {
            return at(format!("is {dtype:?} {shape:?} and takes {} bytes, found {}", bits.div_ceil(8), end - begin));
        }
        placed.push((begin, end, name));
    }
    placed.sort();
    let mut last = (0, None::<&String>);
    for (begin, end, name) in placed {
        let at = |problem: String| Some((Some(name.clone()), problem));
        match last {
            (expected, Some(before)) if begin < expected => {
                return at(format!("begins at byte {begin} and overlaps `{before}`, which ends at byte {expected}"));
            }
            (expected, _) if begin > expected => {
                return at(format!("begins at byte {begin}, expected {expected}: the bytes between belong to no tensor"));
            }
            _ => {}
        }
        if end > data as u64 {
            return at(format!("ends at byte {end} of the data, found {data} bytes: the file is truncated"));
        }
        last = (end, Some(name));
    }
    if last.0 < data as u64 {
        return Some((None, format!("holds {} bytes after its last tensor, expected none", data as u64 - last.0)));
    }
    None
}
