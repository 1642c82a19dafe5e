//! GGUF files: the tensors of a model, and metadata from which its config follows.
//!
//! | file | what |
//! | --- | --- |
//! | `header` | bytes -> metadata, and where the tensors lie; everything checked |
//! | `types`, `value` | the tensor types of GGML; the values of metadata |
//! | `arch` | one table an architecture: names of tensors, what llama.cpp's converter changed |
//! | `config`, `rope`, `tokens` | metadata -> the keys config.json would have |
//!
//! Versions 2 and 3, little-endian. A model in several files (`NAME-00001-of-00003.gguf`) is opened by any of them.

mod arch;
mod config;
mod header;
mod rope;
mod tokens;
mod types;
mod value;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use super::{Form, Source, Stored};
use crate::error::{Error, Result};
use crate::tensor::{Dtype, Weights};
use header::{Header, Problem};
pub use value::{Kind, List, Metadata, Numbers, Texts, Value};

/// One GGUF model: its files, mapped and header-checked. No tensor has been read.
pub struct Gguf {
    /// Of the first file; the others repeat or add nothing.
    pub metadata: Metadata,
    files: Vec<Part>,
}

struct Part {
    path: PathBuf,
    file: File,
    map: Arc<Mmap>,
    tensors: Vec<header::Tensor>,
}

impl Gguf {
    /// Open the file at `path`, and of a split model all the others.
    pub fn open(path: &Path) -> Result<Gguf> {
        let (part, metadata) = open_part(path)?;
        let Some(split) = Split::of(path, &metadata)? else {
            return Ok(Gguf { metadata, files: vec![part] });
        };
        let mut first = None;
        let mut files = Vec::new();
        for number in 0..split.count {
            let path = split.path(number);
            let (part, metadata) = open_part(&path).map_err(|error| match error {
                Error::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound => Error::File {
                    problem: format!("is missing: part {} of the {} of this model", number + 1, split.count),
                    path: path.clone(),
                },
                error => error,
            })?;
            split.check(&path, &metadata, number)?;
            let first = first.get_or_insert_with(|| metadata.clone());
            // A part of its own says nothing but which it is.
            if let Some((key, _)) = metadata.iter().find(|(key, value)| !key.starts_with("split.") && first.get(*key) != Some(*value)) {
                let problem = format!("differs from the first part's, `{}`", split.path(0).display());
                return Err(Error::Config { path, field: key.clone(), problem });
            }
            files.push(part);
        }
        let metadata = first.expect("a split has parts");
        let gguf = Gguf { metadata, files };
        let found: usize = gguf.files.iter().map(|part| part.tensors.len()).sum();
        if split.tensors.is_some_and(|tensors| tensors != found as i128) {
            let problem = format!("must be the {found} tensors of all parts, found {}", split.tensors.unwrap_or_default());
            return Err(Error::Config { path: gguf.path().into(), field: "split.tensors.count".into(), problem });
        }
        Ok(gguf)
    }

    /// The file, or the first of them.
    pub fn path(&self) -> &Path {
        &self.files[0].path
    }

    /// The model as every other: config keys and tensors under the names transformers gives them.
    pub fn into_source(self) -> Result<Source> {
        let arch = arch::find(self.path(), &self.metadata)?;
        let (config, generation) = config::translate(&self, arch)?;
        let config_path = self.path().to_path_buf();
        let form = Form { interleaved: arch.interleaved, gains_with_one: arch.gains_with_one };
        let mut checkpoint = super::Checkpoint::empty(config_path.parent().unwrap_or(Path::new("")).into());
        for part in self.files {
            let tensors = part.tensors.into_iter().filter(|tensor| !rope::FACTORS.contains(&tensor.name.as_str()));
            let mut named = Vec::new();
            for tensor in tensors {
                let name = arch.hf_name(&tensor.name);
                let refuse =
                    |problem: &str| Err(Error::Tensor { path: part.path.clone(), tensor: tensor.name.clone(), problem: problem.into() });
                if name == tensor.name && (name.starts_with("model.") || name.starts_with("lm_head.")) {
                    return refuse("has a name of transformers, not of GGUF");
                }
                if checkpoint.contains(&name) {
                    return refuse("is also in an earlier part");
                }
                let dtype = Dtype::of_ggml(tensor.kind).map_or_else(|| Stored::Other(types::name(tensor.kind)), Stored::Read);
                named.push((name, dtype, tensor.shape, tensor.bytes));
            }
            checkpoint.add(super::Shard { path: part.path, file: part.file, map: part.map, tensors: named })?;
        }
        Ok(Source { generation: Some((config_path.clone(), generation)), config_path, config, checkpoint, form })
    }

    fn find(&self, name: &str) -> Option<(&Part, &header::Tensor)> {
        self.files.iter().find_map(|part| Some((part, part.tensors.iter().find(|tensor| tensor.name == name)?)))
    }

    /// A short list of numbers kept as a tensor, widened; `None` when there is no tensor `name`.
    fn numbers(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some((part, tensor)) = self.find(name) else { return Ok(None) };
        let refuse = |problem: String| Err(Error::Tensor { path: part.path.clone(), tensor: name.into(), problem });
        let &[len] = tensor.shape.as_slice() else {
            return refuse(format!("has shape {:?}, expected one dimension", tensor.shape));
        };
        let Some(dtype) = Dtype::of_ggml(tensor.kind) else {
            return refuse(format!("has type {}, expected F32", types::name(tensor.kind)));
        };
        let mut values = vec![0.0; len];
        Weights::new(&part.map[tensor.bytes.clone()], dtype, 1, len).widen_row(0, &mut values);
        Ok(Some(values))
    }
}

fn open_part(path: &Path) -> Result<(Part, Metadata)> {
    let (file, map) = super::map(path)?;
    let Header { metadata, tensors } = header::parse(&map).map_err(|problem| match problem {
        Problem::File(problem) => Error::File { path: path.into(), problem },
        Problem::Key(field, problem) => Error::Config { path: path.into(), field, problem },
        Problem::Tensor(tensor, problem) => Error::Tensor { path: path.into(), tensor, problem },
    })?;
    Ok((Part { path: path.into(), file, map, tensors }, metadata))
}

/// What the name and the metadata of a part say about the whole.
struct Split {
    folder: PathBuf,
    /// `NAME` of `NAME-00001-of-00003.gguf`
    name: String,
    count: u32,
    tensors: Option<i128>,
}

impl Split {
    /// `None`: the model is this one file.
    fn of(path: &Path, metadata: &Metadata) -> Result<Option<Split>> {
        let refuse = |field: &str, problem: String| Err(Error::Config { path: path.into(), field: field.into(), problem });
        let count = match metadata.get("split.count") {
            None | Some(Value::Int(0 | 1)) => return Ok(None),
            Some(&Value::Int(count)) if (2..=99999).contains(&count) => count as u32,
            Some(other) => return refuse("split.count", format!("must be the number of files, found {}", other.brief())),
        };
        let tensors = match metadata.get("split.tensors.count") {
            None => None,
            Some(&Value::Int(count)) => Some(count),
            Some(other) => return refuse("split.tensors.count", format!("must be an integer, found {}", other.brief())),
        };
        let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some((name, _, of)) = split_name(file).filter(|&(_, _, of)| of == count) else {
            let problem =
                format!("is {count}, but the file is not called `NAME-00001-of-{count:05}.gguf`: the other parts cannot be found");
            return refuse("split.count", problem);
        };
        Ok(Some(Split { folder: path.parent().unwrap_or(Path::new("")).into(), name: name.into(), count: of, tensors }))
    }

    fn path(&self, number: u32) -> PathBuf {
        self.folder.join(format!("{}-{:05}-of-{:05}.gguf", self.name, number + 1, self.count))
    }

    /// Whether the file at `path` is part `number` of this split.
    fn check(&self, path: &Path, metadata: &Metadata, number: u32) -> Result<()> {
        for (field, expected) in [("split.no", number), ("split.count", self.count)] {
            if metadata.get(field) != Some(&Value::Int(expected.into())) {
                let found = metadata.get(field).map_or("nothing".into(), Value::brief);
                let problem = format!("must be {expected} as the file's name says, found {found}");
                return Err(Error::Config { path: path.into(), field: field.into(), problem });
            }
        }
        Ok(())
    }
}

/// `NAME-00001-of-00003.gguf` -> `NAME`, 1, 3.
fn split_name(file: &str) -> Option<(&str, u32, u32)> {
    let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| (text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok()).flatten();
    Some((name, digits(number)?, digits(count)?))
}
