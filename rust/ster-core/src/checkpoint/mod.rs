//! Files on disk -> named, typed, memory-mapped tensors.
//!
//! Which files, in this order:
//! 1. `model.safetensors`, as in transformers also when an index stands beside it (which is then named in a warning);
//! 2. the files named by `model.safetensors.index.json`, which must agree with it tensor by tensor;
//! 3. every other `*.safetensors` of the folder, when no tensor name occurs in two of them.
//!
//! `consolidated*.safetensors` (Meta's and Mistral's own layout) and subfolders are never read. Files left aside are named in one warning.
//!
//! [`Source`] is a model: such a folder with its config.json, or a GGUF file ([`gguf`]), from which both follow.

pub mod gguf;
pub mod json;
mod safetensors;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use memmap2::Mmap;
use serde_json::Value;

use crate::error::{Error, Result};
use crate::pool::Interrupt;
use crate::tensor::{Dtype, Weights};
pub use source::{Form, Source};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// All weight files of one directory, memory-mapped and header-checked. Nothing but headers has been read.
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<Mapped>,
    tensors: BTreeMap<String, TensorInfo>,
    warnings: Vec<String>,
}

struct Mapped {
    path: PathBuf,
    file: File,
    map: Arc<Mmap>,
}

/// One file of tensors, mapped and header-checked.
struct Shard {
    path: PathBuf,
    file: File,
    map: Arc<Mmap>,
    /// Name, dtype, shape and byte range in the file, in the file's order.
    tensors: Vec<(String, Stored, Vec<usize>, Range<usize>)>,
}

/// A dtype the kernels read, or the name of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    Read(Dtype),
    Other(String),
}

/// Where a tensor lies and what the header says it is.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    pub dtype: Stored,
    pub shape: Vec<usize>,
    file: usize,
    bytes: Range<usize>,
}

impl Checkpoint {
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        let listing = Listing::of(dir)?;
        let mut checkpoint = Checkpoint::empty(dir.into());
        let mut left = listing.safetensors.clone();
        let reason = if left.remove(SINGLE) {
            checkpoint.add(safetensors::open(&dir.join(SINGLE))?)?;
            if listing.index {
                left.insert(INDEX.into());
            }
            format!("the weights are in `{SINGLE}`")
        } else if listing.index {
            for file in checkpoint.open_indexed()? {
                left.remove(&file);
            }
            format!("not in `{INDEX}`")
        } else {
            for name in &listing.safetensors {
                if !name.starts_with("consolidated") {
                    checkpoint.add(safetensors::open(&dir.join(name))?)?;
                    left.remove(name);
                }
            }
            "not in the Hugging Face layout".into()
        };
        if checkpoint.files.is_empty() {
            return Err(Error::NoWeights { dir: dir.into(), found: listing.found() });
        }
        left.extend(listing.original);
        if !left.is_empty() {
            let names: Vec<_> = left.iter().map(|name| format!("`{name}`")).collect();
            checkpoint.warnings.push(format!("{}: ignored {}: {reason}", dir.display(), names.join(", ")));
        }
        Ok(checkpoint)
    }

    fn empty(dir: PathBuf) -> Checkpoint {
        Checkpoint { dir, files: Vec::new(), tensors: BTreeMap::new(), warnings: Vec::new() }
    }

    /// Open what the index names; returns the file names.
    fn open_indexed(&mut self) -> Result<BTreeSet<String>> {
        let path = self.dir.join(INDEX);
        let refuse = |problem: String| Error::File { path: path.clone(), problem };
        let index = json::read_object(&path)?.ok_or_else(|| refuse("disappeared".into()))?;
        let Some(Value::Object(weight_map)) = index.get("weight_map") else {
            return Err(refuse("has no `weight_map` object".into()));
        };
        let mut files: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for (tensor, file) in weight_map {
            let Value::String(file) = file else {
                return Err(refuse(format!("places tensor `{tensor}` in {}, expected a file name", json::kind(file))));
            };
            // Backslashes and colons lead out of the folder on Windows alone, but a checkpoint must mean the same everywhere.
            let inside = !file.is_empty()
                && !file.contains(['\\', ':', '\0'])
                && Path::new(file).components().all(|part| matches!(part, Component::Normal(_)));
            if !inside {
                return Err(refuse(format!("places tensor `{tensor}` in `{file}`, which is not a file inside the folder")));
            }
            files.entry(file.clone()).or_default().insert(tensor);
        }
        if files.is_empty() {
            return Err(refuse("places no tensor in any file".into()));
        }
        for (file, tensors) in &files {
            let shard_path = self.dir.join(file);
            let shard = safetensors::open(&shard_path).map_err(|error| match error {
                Error::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                    refuse(format!("names the file `{file}`, which is missing"))
                }
                error => error,
            })?;
            let held: BTreeSet<&str> = shard.tensors.iter().map(|(name, ..)| name.as_str()).collect();
            let at = |tensor: &str, problem: String| Err(Error::Tensor { path: shard_path.clone(), tensor: tensor.into(), problem });
            if let Some(tensor) = tensors.difference(&held).next() {
                return at(tensor, format!("is missing, though `{INDEX}` places it here"));
            }
            if let Some(tensor) = held.difference(tensors).next() {
                return at(
                    tensor,
                    match weight_map.get(*tensor) {
                        Some(other) => format!("is here, but `{INDEX}` places it in `{}`", other.as_str().unwrap_or_default()),
                        None => format!("is here, but `{INDEX}` does not know it"),
                    },
                );
            }
            self.add(shard)?;
        }
        Ok(files.into_keys().collect())
    }

    fn add(&mut self, shard: Shard) -> Result<()> {
        let file = self.files.len();
        for (name, dtype, shape, bytes) in shard.tensors {
            if let Some(earlier) = self.tensors.get(&name) {
                let problem = format!("is also in `{}`, and no `{INDEX}` says which to use", self.files[earlier.file].path.display());
                return Err(Error::Tensor { path: shard.path, tensor: name, problem });
            }
            self.tensors.insert(name, TensorInfo { dtype, shape, file, bytes });
        }
        self.files.push(Mapped { path: shard.path, file: shard.file, map: shard.map });
        Ok(())
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// In alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// Bytes of all tensors, as stored.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|info| info.bytes.len() as u64).sum()
    }

    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The file that holds tensor `name`; without one, the only file, or the folder of several.
    pub fn path_of(&self, name: &str) -> &Path {
        match (self.tensors.get(name), self.files.as_slice()) {
            (Some(info), files) => &files[info.file].path,
            (None, [only]) => &only.path,
            (None, _) => &self.dir,
        }
    }

    /// Tensor `name`, which must be `[rows, cols]` in a dtype the kernels read.
    pub fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<WeightMatrix> {
        let (info, dtype) = self.expect(name, &[rows, cols])?;
        Ok(self.weights(info, dtype, rows, cols))
    }

    /// Tensor `name` of any shape, as rows of its later axes; a vector is one row.
    fn tensor(&self, name: &str) -> Result<WeightMatrix> {
        let info = self.get(name).ok_or_else(|| self.error(name, "is missing".into()))?;
        let dtype = self.readable(name, info)?;
        let (rows, axes) = match info.shape.as_slice() {
            [rows, axes @ ..] if !axes.is_empty() => (*rows, axes),
            axes => (1, axes),
        };
        Ok(self.weights(info, dtype, rows, axes.iter().product()))
    }

    fn weights(&self, info: &TensorInfo, dtype: Dtype, rows: usize, cols: usize) -> WeightMatrix {
        let (offset, len) = (info.bytes.start, info.bytes.len());
        WeightMatrix { bytes: Bytes::Mapped(self.files[info.file].map.clone()), offset, len, dtype, rows, cols }
    }

    /// Tensor `name`, which must be `[len]`, as a copy widened exactly to f32; and its stored dtype.
    pub fn vector(&self, name: &str, len: usize) -> Result<(Vec<f32>, Dtype)> {
        let (info, dtype) = self.expect(name, &[len])?;
        let Mapped { path, file, map } = &self.files[info.file];
        let bytes = read(file, map, info.bytes.clone()).map_err(|source| Error::Read { path: path.clone(), source })?;
        let mut values = vec![0.0; len];
        Weights::new(&bytes, dtype, 1, len).widen_row(0, &mut values);
        Ok((values, dtype))
    }

    fn expect(&self, name: &str, shape: &[usize]) -> Result<(&TensorInfo, Dtype)> {
        let info = self.get(name).ok_or_else(|| self.error(name, "is missing".into()))?;
        if info.shape != shape {
            return Err(self.error(name, format!("has the wrong shape: expected {shape:?}, found {:?}", info.shape)));
        }
        Ok((info, self.readable(name, info)?))
    }

    fn readable(&self, name: &str, info: &TensorInfo) -> Result<Dtype> {
        match &info.dtype {
            Stored::Read(dtype) => Ok(*dtype),
            Stored::Other(other) => Err(self.error(name, format!("has dtype {other}, which Ster does not read"))),
        }
    }

    fn error(&self, name: &str, problem: String) -> Error {
        Error::Tensor { path: self.path_of(name).into(), tensor: name.into(), problem }
    }
}

/// Map the file at `path`, which may be of any format.
fn map(path: &Path) -> Result<(File, Arc<Mmap>)> {
    let read = |source| Error::Read { path: path.into(), source };
    // Before it is opened: opening a pipe waits for its writer.
    let meta = std::fs::metadata(path).map_err(read)?;
    if !meta.is_file() {
        return Err(Error::File { path: path.into(), problem: "is not a file".into() });
    }
    if meta.len() == 0 {
        return Err(Error::File { path: path.into(), problem: "is empty".into() }); // and cannot be mapped everywhere
    }
    let file = File::open(path).map_err(read)?;
    // SAFETY: the map is read-only and private to this process, so Rust never sees it written through this map. Another process can
    // still change the file while it is mapped. Overwritten in place, the numbers read later are those of the new file (every bit
    // pattern is a valid number of every dtype, so this is wrong output, not undefined memory); the header is parsed once, when it is
    // opened, and never looked at again. Truncated, the kernel raises SIGBUS at the first page past the new end and the process dies.
    // Replacing the file by a rename, as download tools do, is safe: the map keeps the old one.
    let map = Arc::new(unsafe { Mmap::map(&file) }.map_err(read)?);
    Ok((file, map))
}

/// A few bytes, past the map where the system can: through it, every norm of a model would bring in megabytes of the weights around it.
fn read(file: &File, map: &Mmap, bytes: Range<usize>) -> std::io::Result<Vec<u8>> {
    #[cfg(unix)]
    {
        let _ = map;
        let mut found = vec![0; bytes.len()];
        std::os::unix::fs::FileExt::read_exact_at(file, &mut found, bytes.start as u64)?;
        Ok(found)
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        Ok(map[bytes].to_vec())
    }
}

/// A weight matrix `[out, in]`, where it lies in its file, or rounded, in memory. A clone shares the bytes.
#[derive(Clone)]
pub struct WeightMatrix {
    bytes: Bytes,
    offset: usize,
    /// Bytes in the file, as the header was checked to say.
    len: usize,
    dtype: Dtype,
    rows: usize,
    cols: usize,
}

/// Why a matrix was not rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unrounded {
    /// Finite, and too large for the dtype.
    TooLarge(f32),
    Interrupted,
}

#[derive(Clone)]
enum Bytes {
    Mapped(Arc<Mmap>),
    Rounded(Arc<Vec<u8>>),
}

impl WeightMatrix {
    pub fn view(&self) -> Weights<'_> {
        let bytes = match &self.bytes {
            Bytes::Mapped(map) => &map[..],
            Bytes::Rounded(bytes) => &bytes[..],
        };
        Weights::new(&bytes[self.offset..self.offset + self.len], self.dtype, self.rows, self.cols)
    }

    /// Bytes of all numbers as stored.
    pub(crate) fn bytes(&self) -> usize {
        self.len
    }

    /// Each number rounded to the nearest of `dtype`, F16 or BF16, ties to even; as it is where it is stored so. The pages of the file that
    /// were read for it are given back. `interrupt` is asked by the calling thread while others work.
    pub fn rounded(&self, dtype: Dtype, threads: usize, interrupt: Interrupt<'_>) -> std::result::Result<WeightMatrix, Unrounded> {
        if self.dtype == dtype {
            return Ok(self.clone());
        }
        let (view, row, stopped) = (self.view(), 2 * self.cols, AtomicBool::new(false));
        let mut bytes = vec![0; self.rows * row];
        let rows = self.rows.div_ceil(threads).max(1);
        let round = |first: usize, bytes: &mut [u8]| {
            let mut wide = vec![0.0; view.cols];
            for (n, out) in bytes.chunks_exact_mut(row).enumerate() {
                if stopped.load(Ordering::Relaxed) {
                    return Err(Unrounded::Interrupted);
                }
                view.widen_row(first + n, &mut wide);
                for (out, &value) in out.chunks_exact_mut(2).zip(&wide) {
                    out.copy_from_slice(&dtype.round(value).map_err(Unrounded::TooLarge)?);
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let parts: Vec<_> = bytes
                .chunks_mut((rows * row).max(1))
                .enumerate()
                .map(|(part, bytes)| scope.spawn(move || round(part * rows, bytes)))
                .collect();
            while parts.iter().any(|part| !part.is_finished()) {
                std::thread::sleep(Duration::from_millis(1));
                if interrupt() {
                    stopped.store(true, Ordering::Relaxed);
                }
            }
            parts.into_iter().try_for_each(|part| part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })?;
        #[cfg(unix)]
        if let Bytes::Mapped(map) = &self.bytes {
            // SAFETY: the map is of a file and read-only: what is read there again comes from the file again.
            let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, self.offset, self.len) };
        }
        let len = bytes.len();
        Ok(WeightMatrix { bytes: Bytes::Rounded(Arc::new(bytes)), offset: 0, len, dtype, ..*self })
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Rows `from..from + rows`, as a matrix of their own.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn rows_from(&self, from: usize, rows: usize) -> WeightMatrix {
        assert!(from + rows <= self.rows);
        let row = self.dtype.row_bytes(self.cols).expect("rows of whole blocks");
        WeightMatrix { offset: self.offset + from * row, len: rows * row, rows, ..self.clone() }
    }

    /// Whether both are the same tensor of the same file.
    pub fn is(&self, other: &WeightMatrix) -> bool {
        let same = match (&self.bytes, &other.bytes) {
            (Bytes::Mapped(a), Bytes::Mapped(b)) => Arc::ptr_eq(a, b),
            (Bytes::Rounded(a), Bytes::Rounded(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        same && self.offset == other.offset
    }

    /// A few rows here and there will be read, so that the system need not bring in what lies around them. Advice, nothing more.
    pub fn read_sparsely(&self) {
        #[cfg(unix)]
        if let Bytes::Mapped(map) = &self.bytes {
            let _ = map.advise_range(memmap2::Advice::Random, self.offset, self.len);
        }
    }
}

impl std::fmt::Debug for WeightMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "WeightMatrix({} [{}, {}])", self.dtype.name(), self.rows, self.cols)
    }
}

/// What a model folder holds, as far as weights go.
struct Listing {
    safetensors: BTreeSet<String>,
    index: bool,
    /// `original/`, when it holds weights: Meta's own files beside the converted ones.
    original: Option<String>,
    /// Weights in formats that are not read.
    other: BTreeSet<String>,
}

impl Listing {
    fn of(dir: &Path) -> Result<Listing> {
        let mut listing = Listing { safetensors: BTreeSet::new(), index: false, original: None, other: BTreeSet::new() };
        for name in names_in(dir)? {
            let holds_weights = |folder: &Path| {
                names_in(folder).is_ok_and(|names| names.iter().any(|name| foreign(name) || name.ends_with(".safetensors")))
            };
            if name == "original" && holds_weights(&dir.join(&name)) {
                listing.original = Some("original/".into());
            } else if name == INDEX {
                listing.index = true;
            } else if name.ends_with(".safetensors") && !dir.join(&name).is_dir() {
                listing.safetensors.insert(name);
            } else if foreign(&name) {
                listing.other.insert(name);
            }
        }
        Ok(listing)
    }

    fn found(&self) -> Vec<String> {
        self.safetensors.iter().chain(&self.other).chain(&self.original).cloned().collect()
    }
}

fn foreign(name: &str) -> bool {
    [".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz"].iter().any(|ending| name.ends_with(ending))
        && name != "training_args.bin"
}

/// Names in a folder, in alphabetical order; hidden ones (macOS leaves `._model.safetensors` behind) left out.
fn names_in(dir: &Path) -> Result<BTreeSet<String>> {
    let read = |source| Error::Read { path: dir.into(), source };
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(dir).map_err(read)? {
        // A name that is not Unicode cannot be one that is looked for.
        if let Ok(name) = entry.map_err(read)?.file_name().into_string()
            && !name.starts_with('.')
        {
            names.insert(name);
        }
    }
    Ok(names)
}
