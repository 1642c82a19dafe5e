//! What goes into a pass and what comes out.

use std::sync::{Arc, Mutex};

use numpy::{PyArray2, PyArray3, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods, ToPyArray};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ster_core::tensor::Matrix;
use ster_core::{CapturePlan, CaptureRows, Error, KvCache, LogitRows, SteeringPlan, Tap};

use crate::errors::to_python;

#[pyclass(frozen, module = "ster._native")]
#[derive(Clone)]
pub struct Edit(pub Arc<ster_core::Edit>);

#[pymethods]
impl Edit {
    #[new]
    #[pyo3(signature = (layer, vectors, *, scale = 1.0, positions = None, norm_match = false))]
    fn new(
        layer: usize,
        vectors: PyReadonlyArray2<'_, f32>,
        scale: f32,
        positions: Option<Vec<usize>>,
        norm_match: bool,
    ) -> PyResult<Self> {
        let (rows, cols) = (vectors.shape()[0], vectors.shape()[1]);
        // Copied on purpose: off the GIL, another thread may write to the caller's array.
        let data = vectors.as_array().iter().copied().collect();
        let positions = positions.map(Into::into);
        let edit = ster_core::Edit { layer, vectors: Matrix { rows, cols, data }, scale, positions, norm_match };
        // Against itself: what does not depend on a model is refused here already.
        edit.check(layer.saturating_add(1), cols, usize::MAX).map_err(to_python)?;
        Ok(Edit(Arc::new(edit)))
    }

    #[getter]
    fn layer(&self) -> usize {
        self.0.layer
    }

    #[getter]
    fn scale(&self) -> f32 {
        self.0.scale
    }

    #[getter]
    fn positions(&self) -> Option<Vec<usize>> {
        self.0.positions.as_ref().map(|positions| positions.given().to_vec())
    }

    #[getter]
    fn norm_match(&self) -> bool {
        self.0.norm_match
    }

    #[getter]
    fn vectors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let vectors = &self.0.vectors;
        vectors.data.to_pyarray(py).reshape([vectors.rows, vectors.cols])
    }
}

/// The cache is out while a pass uses it.
#[pyclass(frozen, module = "ster._native")]
pub struct Cache(Mutex<Option<KvCache>>);

impl Cache {
    pub fn new(cache: KvCache) -> Self {
        Cache(Mutex::new(Some(cache)))
    }

    pub fn take(&self) -> PyResult<KvCache> {
        self.lock().take().ok_or_else(in_use)
    }

    pub fn put_back(&self, cache: KvCache) {
        *self.lock() = Some(cache);
    }

    /// As it is now; blocks are shared, not copied.
    pub fn snapshot(&self) -> PyResult<KvCache> {
        self.lock().clone().ok_or_else(in_use)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<KvCache>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn in_use() -> PyErr {
    to_python(Error::Cache { problem: "is in use: it stands twice in one batch, or another thread runs it".into() })
}

#[pymethods]
impl Cache {
    #[getter]
    fn length(&self) -> PyResult<usize> {
        Ok(self.lock().as_ref().ok_or_else(in_use)?.len())
    }

    #[getter]
    fn shortest(&self) -> PyResult<usize> {
        Ok(self.lock().as_ref().ok_or_else(in_use)?.shortest())
    }

    #[getter]
    fn bytes(&self) -> PyResult<usize> {
        Ok(self.lock().as_ref().ok_or_else(in_use)?.bytes())
    }

    #[pyo3(signature = (length = None))]
    fn fork(&self, length: Option<usize>) -> PyResult<Cache> {
        let guard = self.lock();
        let cache = guard.as_ref().ok_or_else(in_use)?;
        Ok(Cache::new(cache.fork(length.unwrap_or(cache.len())).map_err(to_python)?))
    }
}

#[pyclass(frozen, module = "ster._native")]
pub struct Sequence {
    pub tokens: Vec<u32>,
    pub cache: Option<Py<Cache>>,
    pub prefix: Option<Py<Cache>>,
    pub steering: SteeringPlan,
    pub capture: CapturePlan,
    pub logits: LogitRows,
}

#[pymethods]
impl Sequence {
    #[new]
    #[pyo3(signature = (tokens, *, cache = None, prefix = None, steering = vec![], layers = vec![], rows = "last", point = "pre_steer", logits = "none"),
           text_signature = "(tokens, *, cache=None, prefix=None, steering=(), layers=(), rows='last', point='pre_steer', logits='none')")]
    fn new(
        tokens: PyReadonlyArray1<'_, u32>,
        cache: Option<Py<Cache>>,
        prefix: Option<Py<Cache>>,
        steering: Vec<Bound<'_, Edit>>,
        layers: Vec<usize>,
        rows: &str,
        point: &str,
        logits: &str,
    ) -> PyResult<Self> {
        let rows = choose("rows", rows, &[("last", CaptureRows::Last), ("all", CaptureRows::All)])?;
        let tap = choose("point", point, &[("pre_steer", Tap::PreSteer), ("post_steer", Tap::PostSteer)])?;
        let logits = choose("logits", logits, &[("none", LogitRows::None), ("last", LogitRows::Last), ("all", LogitRows::All)])?;
        Ok(Sequence {
            tokens: tokens.as_array().iter().copied().collect(),
            cache,
            prefix,
            steering: SteeringPlan { edits: steering.iter().map(|edit| edit.get().0.clone()).collect() },
            capture: CapturePlan { layers, rows, tap },
            logits,
        })
    }
}

fn choose<T: Copy>(what: &str, name: &str, choices: &[(&str, T)]) -> PyResult<T> {
    choices.iter().find(|(known, _)| *known == name).map(|(_, value)| *value).ok_or_else(|| {
        let known = choices.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        PyValueError::new_err(format!("unknown {what} \"{name}\"; expected one of {known}"))
    })
}

#[pyclass(frozen, module = "ster._native")]
pub struct Output {
    residual: Option<Py<PyArray3<f32>>>,
    logits: Option<Py<PyArray2<f32>>>,
    steered: Vec<Vec<usize>>,
}

impl Output {
    /// The arrays take over the core's memory.
    pub fn new(py: Python<'_>, output: ster_core::Output) -> PyResult<Self> {
        let residual = match output.residual_shape {
            [0, ..] => None,
            shape => Some(numpy::PyArray1::from_vec(py, output.residual).reshape(shape)?.unbind()),
        };
        let logits = match output.logits_shape {
            [0, _] => None,
            shape => Some(numpy::PyArray1::from_vec(py, output.logits).reshape(shape)?.unbind()),
        };
        Ok(Output { residual, logits, steered: output.steered })
    }
}

#[pymethods]
impl Output {
    #[getter]
    fn residual(&self, py: Python<'_>) -> Option<Py<PyArray3<f32>>> {
        self.residual.as_ref().map(|array| array.clone_ref(py))
    }

    #[getter]
    fn logits(&self, py: Python<'_>) -> Option<Py<PyArray2<f32>>> {
        self.logits.as_ref().map(|array| array.clone_ref(py))
    }

    #[getter]
    fn steered(&self) -> Vec<Vec<usize>> {
        self.steered.clone()
    }
}
