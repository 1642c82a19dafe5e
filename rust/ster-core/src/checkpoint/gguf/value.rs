//! Metadata of a GGUF file, copied out of it: numbers and strings, and lists of them.

use std::collections::BTreeMap;

pub type Metadata = BTreeMap<String, Value>;

/// One value of the metadata. Integers of every width are `Int`: the largest, u64, and the smallest, i64, both fit.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Int(i128),
    F32(f32),
    F64(f64),
    Bool(bool),
    Text(String),
    List(List),
}

#[derive(Clone, Debug, PartialEq)]
pub enum List {
    Numbers(Numbers),
    Bools(Vec<bool>),
    Texts(Texts),
    Lists(Vec<List>),
}

/// Numbers of one type, little-endian, as they lay in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Numbers {
    pub kind: Kind,
    pub bytes: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F32,
    F64,
}

/// Strings end to end: a vocabulary is hundreds of thousands of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Texts {
    text: String,
    ends: Vec<usize>,
}

impl Texts {
    pub(super) fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.ends.push(self.text.len());
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &str> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| &self.text[start..end])
    }
}

impl Kind {
    pub fn size(self) -> usize {
        match self {
            Kind::U8 | Kind::I8 => 1,
            Kind::U16 | Kind::I16 => 2,
            Kind::U32 | Kind::I32 | Kind::F32 => 4,
            Kind::U64 | Kind::I64 | Kind::F64 => 8,
        }
    }

    /// One number of this type; `bytes` is exactly its size.
    pub(super) fn read(self, bytes: &[u8]) -> Value {
        macro_rules! of {
            ($number:ty) => {
                <$number>::from_le_bytes(bytes.try_into().expect("as many bytes as the type has"))
            };
        }
        match self {
            Kind::U8 => Value::Int(of!(u8).into()),
            Kind::I8 => Value::Int(of!(i8).into()),
            Kind::U16 => Value::Int(of!(u16).into()),
            Kind::I16 => Value::Int(of!(i16).into()),
            Kind::U32 => Value::Int(of!(u32).into()),
            Kind::I32 => Value::Int(of!(i32).into()),
            Kind::U64 => Value::Int(of!(u64).into()),
            Kind::I64 => Value::Int(of!(i64).into()),
            Kind::F32 => Value::F32(of!(f32)),
            Kind::F64 => Value::F64(of!(f64)),
        }
    }
}

impl Numbers {
    pub fn iter(&self) -> impl Iterator<Item = Value> {
        self.bytes.chunks_exact(self.kind.size()).map(|bytes| self.kind.read(bytes))
    }
}

impl Value {
    /// The word a message uses.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Int(_) => "an integer",
            Value::F32(_) | Value::F64(_) => "a number",
            Value::Bool(_) => "true or false",
            Value::Text(_) => "a string",
            Value::List(_) => "a list",
        }
    }

    /// The value as a message shows it.
    pub(super) fn brief(&self) -> String {
        match self {
            Value::Int(n) => n.to_string(),
            Value::F32(n) => n.to_string(),
            Value::F64(n) => n.to_string(),
            Value::Bool(b) => b.to_string(),
            Value::Text(text) if text.len() <= 60 => format!("{text:?}"),
            other => other.kind().into(),
        }
    }
}
