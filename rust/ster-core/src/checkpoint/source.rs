//! A model in whatever form it is kept: its config, its tensors, and how they are stored.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::gguf::Gguf;
use super::{Checkpoint, json};
use crate::error::{Error, Result};
use crate::tensor::Matrix;

/// What a forward pass is made from. Behind this, nothing knows whether it came from a folder or from a GGUF file.
pub struct Source {
    /// The file `config` is from, for messages.
    pub config_path: PathBuf,
    /// config.json, or what it would be.
    pub config: Map<String, Value>,
    /// generation_config.json, if there is one, and its path.
    pub generation: Option<(PathBuf, Map<String, Value>)>,
    /// Tensors under the names transformers gives them.
    pub checkpoint: Checkpoint,
    pub form: Form,
}

/// How tensors lie in the file, where that is not how transformers has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Form {
    /// Rows of q and k, and their biases, in pairs that rotate together: within a head, row `i + half * dim / 2` of transformers is
    /// row `2 * i + half`.
    pub interleaved: bool,
    /// Gains of norms are `1 + w`, where transformers has `w` and adds the 1.
    pub gains_with_one: bool,
}

impl Source {
    /// Open `path`: a folder with config.json and safetensors, or a GGUF file.
    pub fn open(path: &Path) -> Result<Source> {
        if !path.is_dir() && is_gguf(path) {
            return Gguf::open(path)?.into_source();
        }
        let config_path = path.join("config.json");
        let config = json::read_object(&config_path)?.ok_or_else(|| Error::MissingConfig { path: config_path.clone() })?;
        let generation_path = path.join("generation_config.json");
        let generation = json::read_object(&generation_path)?.map(|object| (generation_path, object));
        Ok(Source { config_path, config, generation, checkpoint: Checkpoint::open(path)?, form: Form::default() })
    }

    /// Rows `rows` of tensor `name` as transformers has them, widened to f32: `[rows, width]`, `width` the product of the axes after the
    /// first. A vector is one row.
    ///
    /// Gains lose their 1 where that is exact for all of a vector; else they are as stored.
    pub fn rows(&self, name: &str, rows: Range<usize>) -> Result<Matrix> {
        let tensor = self.checkpoint.tensor(name)?;
        let at = |problem: String| Error::Tensor { path: self.checkpoint.path_of(name).into(), tensor: name.into(), problem };
        if rows.start > rows.end || rows.end > tensor.rows() {
            return Err(at(format!("has {} rows, asked for {rows:?}", tensor.rows())));
        }
        let vector = self.checkpoint.get(name).is_some_and(|info| info.shape.len() < 2);
        let length = if vector { tensor.cols() } else { tensor.rows() };
        let dim = match self.interleaved_heads(name) {
            None => None,
            Some(heads) if heads > 0 && length % heads == 0 && length / heads % 2 == 0 => Some(length / heads),
            Some(heads) => return Err(at(format!("has {length} rows, expected {heads} heads of an even number"))),
        };
        // Where the row (of a vector: the number) that transformers has at `row` is stored.
        let stored = |row: usize| match dim {
            None => row,
            Some(dim) => row / dim * dim + row % dim % (dim / 2) * 2 + row % dim / (dim / 2),
        };

        let (view, mut out) = (tensor.view(), Matrix::zeros(rows.len(), tensor.cols()));
        if vector && rows.len() == 1 {
            let mut values = vec![0.0; tensor.cols()];
            view.widen_row(0, &mut values);
            out.data = (0..tensor.cols()).map(|i| values[stored(i)]).collect();
            if self.form.gains_with_one && name.ends_with("norm.weight") && out.data.iter().all(|&gain| (gain - 1.0) + 1.0 == gain) {
                out.data.iter_mut().for_each(|gain| *gain -= 1.0);
            }
        } else {
            rows.enumerate().for_each(|(i, row)| view.widen_row(stored(row), out.row_mut(i)));
        }
        Ok(out)
    }

    /// How many heads the rows of `name` are, when they lie interleaved.
    fn interleaved_heads(&self, name: &str) -> Option<usize> {
        let count = |key: &str| self.config.get(key).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
        match name.rsplit_once('.')?.0.rsplit_once('.')?.1 {
            _ if !self.form.interleaved => None,
            "q_proj" => Some(count("num_attention_heads")),
            "k_proj" => Some(count("num_key_value_heads")),
            _ => None,
        }
    }
}

/// By the ending of the name; what begins like one but is called otherwise is one too.
fn is_gguf(path: &Path) -> bool {
    use std::io::Read;
    let magic = || -> std::io::Result<bool> {
        if !path.metadata()?.is_file() {
            return Ok(false); // opening a pipe waits for its writer
        }
        let mut start = [0; 4];
        std::fs::File::open(path)?.read_exact(&mut start)?;
        Ok(&start == b"GGUF")
    };
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")) || magic().unwrap_or(false)
}
