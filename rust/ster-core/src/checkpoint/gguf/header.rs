//! The header of a GGUF file: magic, version, metadata, and what lies where.
//!
//! Source: `docs/gguf.md` of ggml. Layout: `GGUF`, u32 version, u64 tensors, u64 keys; per key its name, u32 type, value; per tensor its
//! name, u32 dimensions, u64 each (fastest first), u32 type, u64 offset; from the next multiple of the alignment on, the tensors.
//! A string is a u64 length and its bytes; a list a u32 type, a u64 count and its items.
//!
//! The file's word is taken for nothing: a length or count is compared with the bytes that are left before anything is sized by it.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::Range;

use super::types;
use super::value::{Kind, List, Metadata, Numbers, Texts, Value};

/// Vocabulary, merges and template of the largest vocabularies take 20 MB.
const MAX_HEADER: usize = 256 << 20;
/// Keys and tensor names; `docs/gguf.md` allows keys 65535 bytes.
const MAX_NAME: u64 = 65535;
/// `GGML_MAX_DIMS`
const MAX_DIMENSIONS: u32 = 4;
/// Lists in lists. llama.cpp reads none at all.
const MAX_DEPTH: u32 = 4;
/// `GGUF_DEFAULT_ALIGNMENT`
const ALIGNMENT: u64 = 32;

pub(super) struct Header {
    pub metadata: Metadata,
    /// In the file's order, each name once, no two overlapping.
    pub tensors: Vec<Tensor>,
}

pub(super) struct Tensor {
    pub name: String,
    /// Id of the GGML type.
    pub kind: u32,
    /// Slowest axis first, as everywhere but in the file.
    pub shape: Vec<usize>,
    /// Bytes in the file; empty where the type is of unknown size.
    pub bytes: Range<usize>,
}

/// What is wrong, and with which key or tensor.
pub(super) enum Problem {
    File(String),
    Key(String, String),
    Tensor(String, String),
}

type Result<T> = std::result::Result<T, Problem>;

pub(super) fn parse(file: &[u8]) -> Result<Header> {
    let mut reader = Reader { rest: &file[..file.len().min(MAX_HEADER)], whole: file.len() };
    magic(&mut reader, file)?;
    let (tensors, keys) = (reader.u64("the number of tensors")?, reader.u64("the number of keys")?);

    let mut metadata = BTreeMap::new();
    for n in 0..keys {
        let key = reader.name(format_args!("key {n} of {keys}"))?;
        let at = |what: String| Problem::Key(key.clone(), what);
        let kind = reader.u32("its type").map_err(|what| at(text(what)))?;
        let value = reader.value(kind, 0).map_err(|what| at(text(what)))?;
        if metadata.contains_key(&key) {
            return Err(at("occurs twice".into()));
        }
        metadata.insert(key, value);
    }

    let alignment = alignment(&metadata)?;
    let mut placed = Vec::new();
    for n in 0..tensors {
        let name = reader.name(format_args!("the name of tensor {n} of {tensors}"))?;
        let found = reader.tensor().map_err(|what| Problem::Tensor(name.clone(), text(what)))?;
        placed.push((name, found));
    }
    let start = (file.len() - reader.left_of_file()) as u64;
    let start = start.checked_next_multiple_of(alignment).expect("a file's length and an alignment of 32 bits");
    place(placed, file.len() as u64, start, alignment).map(|tensors| Header { metadata, tensors })
}

fn magic(reader: &mut Reader, file: &[u8]) -> Result<()> {
    let refuse = |what: &str| Err(Problem::File(what.into()));
    match file {
        [b'G', b'G', b'U', b'F', ..] => {}
        [] => return refuse("is empty"),
        [b'F', b'U', b'G', b'G', ..] => return refuse("is big-endian GGUF; Ster reads little-endian files"),
        [b'l', b'm', b'g', b'g', ..] | [b't', b'j', b'g', b'g', ..] | [b'f', b'm', b'g', b'g', ..] | [b'a', b'l', b'g', b'g', ..] => {
            return refuse("is of the GGML formats that came before GGUF; convert the model again");
        }
        _ if file.starts_with(b"version https://git-lfs") => return refuse("is a Git LFS pointer, not the weights; run `git lfs pull`"),
        _ => {
            let found = file[..file.len().min(4)].escape_ascii();
            return Err(Problem::File(format!("is not a GGUF file: it begins with `{found}`, expected `GGUF`")));
        }
    }
    reader.take(4, "the magic")?;
    match reader.u32("the version")? {
        2 | 3 => Ok(()),
        1 => refuse("is GGUF version 1; Ster reads versions 2 and 3"),
        other if matches!(other.swap_bytes(), 1..=3) => refuse("is big-endian GGUF; Ster reads little-endian files"),
        other => Err(Problem::File(format!("is GGUF version {other}; Ster reads versions 2 and 3"))),
    }
}

fn alignment(metadata: &Metadata) -> Result<u64> {
    const KEY: &str = "general.alignment";
    match metadata.get(KEY) {
        None => Ok(ALIGNMENT),
        Some(&Value::Int(n)) if (1..=1 << 31).contains(&n) && (n as u64).is_power_of_two() => Ok(n as u64),
        Some(other) => Err(Problem::Key(KEY.into(), format!("must be a power of two of 32 bits, found {}", other.brief()))),
    }
}

/// A tensor as the header describes it.
struct Described {
    kind: u32,
    shape: Vec<usize>,
    offset: u64,
    /// Unknown where the type's size is.
    len: Option<u64>,
}

/// Where each tensor lies: aligned, inside the file, apart from the others.
fn place(described: Vec<(String, Described)>, file: u64, start: u64, alignment: u64) -> Result<Vec<Tensor>> {
    let mut tensors: Vec<Tensor> = Vec::new();
    let mut names = std::collections::HashSet::new();
    for (name, Described { kind, shape, offset, len }) in described {
        let at = |what: String| Err(Problem::Tensor(name.clone(), what));
        if !names.insert(name.clone()) {
            return at("occurs twice".into());
        }
        if offset % alignment != 0 {
            return at(format!("begins at byte {offset} of the data, expected a multiple of the alignment {alignment}"));
        }
        let data = file.saturating_sub(start);
        let Some(end) = offset.checked_add(len.unwrap_or(0)).filter(|&end| end <= data) else {
            let needs = len.unwrap_or(0);
            return at(format!("takes {needs} bytes from byte {offset} of the data on, found {data} bytes: the file is truncated"));
        };
        // A file in memory: its length, and with it both ends, fits into usize.
        let bytes = if len.is_some() { (start + offset) as usize..(start + end) as usize } else { 0..0 };
        tensors.push(Tensor { name, kind, shape, bytes });
    }
    let mut order: Vec<&Tensor> = tensors.iter().filter(|tensor| !tensor.bytes.is_empty()).collect();
    order.sort_by_key(|tensor| tensor.bytes.start);
    for pair in order.windows(2) {
        let [before, after] = pair else { unreachable!("windows of two") };
        if after.bytes.start < before.bytes.end {
            let what =
                format!("begins at byte {} and overlaps `{}`, which ends at byte {}", after.bytes.start, before.name, before.bytes.end);
            return Err(Problem::Tensor(after.name.clone(), what));
        }
    }
    Ok(tensors)
}

fn text(problem: Problem) -> String {
    match problem {
        Problem::File(what) | Problem::Key(_, what) | Problem::Tensor(_, what) => what,
    }
}

/// Takes bytes from the front of the header.
struct Reader<'a> {
    rest: &'a [u8],
    /// Bytes of the file.
    whole: usize,
}

impl<'a> Reader<'a> {
    fn left_of_file(&self) -> usize {
        self.rest.len() + self.whole.saturating_sub(MAX_HEADER)
    }

    fn take(&mut self, len: u64, what: impl Display) -> Result<&'a [u8]> {
        match usize::try_from(len).ok().and_then(|len| self.rest.split_at_checked(len)) {
            Some((taken, rest)) => {
                self.rest = rest;
                Ok(taken)
            }
            None if self.whole > MAX_HEADER => {
                Err(Problem::File(format!("has a header of more than {MAX_HEADER} bytes; {what} takes {len} of them")))
            }
            None => Err(Problem::File(format!("ends inside the header: {what} takes {len} bytes, found {}", self.rest.len()))),
        }
    }

    fn u32(&mut self, what: impl Display) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take(4, what)?.try_into().expect("four bytes")))
    }

    fn u64(&mut self, what: impl Display) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take(8, what)?.try_into().expect("eight bytes")))
    }

    fn string(&mut self, what: impl Display + Copy) -> Result<&'a str> {
        let len = self.u64(format_args!("the length of {what}"))?;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes)
            .map_err(|e| Problem::File(format!("has {what} that is not UTF-8: invalid byte {} of it", e.valid_up_to())))
    }

    fn name(&mut self, what: impl Display + Copy) -> Result<String> {
        match self.string(what)? {
            "" => Err(Problem::File(format!("has an empty string as {what}"))),
            name if name.len() as u64 > MAX_NAME => Err(Problem::File(format!("has {} bytes as {what}, more than {MAX_NAME}", name.len()))),
            name => Ok(name.into()),
        }
    }

    fn value(&mut self, kind: u32, depth: u32) -> Result<Value> {
        if let Some(kind) = number(kind) {
            return Ok(kind.read(self.take(kind.size() as u64, "its value")?));
        }
        match kind {
            7 => self.bool().map(Value::Bool),
            8 => Ok(Value::Text(self.string("its value")?.into())),
            9 => self.list(depth + 1).map(Value::List),
            _ => Err(Problem::File(format!("has the unknown value type {kind}"))),
        }
    }

    fn bool(&mut self) -> Result<bool> {
        match self.take(1, "its value")? {
            [0] => Ok(false),
            [1] => Ok(true),
            other => Err(Problem::File(format!("is a boolean of value {}, expected 0 or 1", other[0]))),
        }
    }

    fn list(&mut self, depth: u32) -> Result<List> {
        if depth > MAX_DEPTH {
            return Err(Problem::File(format!("is a list in more than {MAX_DEPTH} lists")));
        }
        let (kind, count) = (self.u32("the type of its items")?, self.u64("its count")?);
        if let Some(kind) = number(kind) {
            let len = count.saturating_mul(kind.size() as u64);
            return Ok(List::Numbers(Numbers { kind, bytes: self.take(len, "its items")?.into() }));
        }
        // Nothing is reserved by the count; the smallest items take bytes too, so an honest list ends where the file does.
        match kind {
            7 => Ok(List::Bools((0..count).map(|_| self.bool()).collect::<Result<_>>()?)),
            8 => {
                let mut texts = Texts::default();
                for n in 0..count {
                    texts.push(self.string(format_args!("item {n} of {count}"))?);
                }
                Ok(List::Texts(texts))
            }
            9 => {
                let mut lists = Vec::new();
                for _ in 0..count {
                    lists.push(self.list(depth + 1)?);
                }
                Ok(List::Lists(lists))
            }
            _ => Err(Problem::File(format!("is a list of the unknown value type {kind}"))),
        }
    }

    fn tensor(&mut self) -> Result<Described> {
        let refuse = |what: String| Err(Problem::File(what));
        let dimensions = self.u32("its number of dimensions")?;
        if dimensions > MAX_DIMENSIONS {
            return refuse(format!("has {dimensions} dimensions, more than {MAX_DIMENSIONS}"));
        }
        let sizes = (0..dimensions).map(|_| self.u64("a dimension")).collect::<Result<Vec<u64>>>()?;
        let (kind, offset) = (self.u32("its type")?, self.u64("its offset")?);
        let numbers = sizes.iter().try_fold(1u64, |n, &size| n.checked_mul(size)).filter(|&n| n <= i64::MAX as u64);
        let Some(numbers) = numbers.filter(|&n| n > 0) else {
            return refuse(format!("has dimensions {sizes:?}, expected sizes of at least 1 that a file can hold"));
        };
        let len = match types::block(kind) {
            None => None,
            Some((block, bytes)) => {
                let row = sizes.first().copied().unwrap_or(1);
                if row % block != 0 {
                    return refuse(format!("is {} with rows of {row} numbers, expected a multiple of {block}", types::name(kind)));
                }
                let Some(len) = (numbers / block).checked_mul(bytes) else {
                    return refuse(format!("has dimensions {sizes:?}, too large for any file"));
                };
                Some(len)
            }
        };
        // No size is greater than their product, which fits into 63 bits; usize has 64 wherever such a file is mapped.
        let Ok(shape) = sizes.iter().rev().map(|&size| usize::try_from(size)).collect() else {
            return refuse(format!("has dimensions {sizes:?}, too large for this machine"));
        };
        Ok(Described { kind, shape, offset, len })
    }
}

/// The numeric value types by id.
fn number(kind: u32) -> Option<Kind> {
    Some(match kind {
        0 => Kind::U8,
        1 => Kind::I8,
        2 => Kind::U16,
        3 => Kind::I16,
        4 => Kind::U32,
        5 => Kind::I32,
        6 => Kind::F32,
        10 => Kind::U64,
        11 => Kind::I64,
        12 => Kind::F64,
        _ => return None,
    })
}
