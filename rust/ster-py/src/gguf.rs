//! GGUF files: their metadata, and their tensors as transformers has them.

use std::path::PathBuf;

use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use ster_core::checkpoint::Source;
use ster_core::checkpoint::gguf::{Gguf, Kind, List, Numbers, Value};

use crate::errors::to_python;

#[pyfunction]
pub fn gguf_metadata(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let gguf = py.detach(|| Gguf::open(&path)).map_err(to_python)?;
    let found = PyDict::new(py);
    for (key, value) in &gguf.metadata {
        found.set_item(key, object(py, value)?)?;
    }
    Ok(found)
}

fn object<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    match value {
        Value::Int(n) => n.into_bound_py_any(py),
        Value::F32(n) => n.into_bound_py_any(py),
        Value::F64(n) => n.into_bound_py_any(py),
        Value::Bool(b) => b.into_bound_py_any(py),
        Value::Text(text) => text.into_bound_py_any(py),
        Value::List(list) => self::list(py, list),
    }
}

fn list<'py>(py: Python<'py>, list: &List) -> PyResult<Bound<'py, PyAny>> {
    match list {
        List::Numbers(numbers) => Ok(array(py, numbers)),
        List::Bools(bools) => bools.into_bound_py_any(py),
        List::Texts(texts) => Ok(PyList::new(py, texts.iter().collect::<Vec<_>>())?.into_any()),
        List::Lists(lists) => {
            let inner = lists.iter().map(|inner| self::list(py, inner)).collect::<PyResult<Vec<_>>>()?;
            Ok(PyList::new(py, inner)?.into_any())
        }
    }
}

fn array<'py>(py: Python<'py>, numbers: &Numbers) -> Bound<'py, PyAny> {
    macro_rules! of {
        ($number:ty) => {{
            let bytes = numbers.bytes.chunks_exact(size_of::<$number>());
            let values = bytes.map(|bytes| <$number>::from_le_bytes(bytes.try_into().expect("as many bytes as the type has")));
            PyArray1::from_vec(py, values.collect()).into_any()
        }};
    }
    match numbers.kind {
        Kind::U8 => of!(u8),
        Kind::I8 => of!(i8),
        Kind::U16 => of!(u16),
        Kind::I16 => of!(i16),
        Kind::U32 => of!(u32),
        Kind::I32 => of!(i32),
        Kind::U64 => of!(u64),
        Kind::I64 => of!(i64),
        Kind::F32 => of!(f32),
        Kind::F64 => of!(f64),
    }
}

#[pyclass(frozen, module = "ster._native")]
pub struct Tensors(Source);

#[pymethods]
impl Tensors {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| Source::open(&path)).map(Tensors).map_err(to_python)
    }

    #[getter]
    fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        let held = &self.0.checkpoint;
        held.names().filter_map(|name| Some((name.into(), held.get(name)?.shape.clone()))).collect()
    }

    fn rows<'py>(&self, py: Python<'py>, name: &str, start: usize, stop: usize) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let values = py.detach(|| self.0.rows(name, start..stop)).map_err(to_python)?;
        PyArray1::from_vec(py, values.data).reshape([values.rows, values.cols])
    }
}
