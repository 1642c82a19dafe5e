//! The engine, off the GIL.

use std::cell::RefCell;
use std::path::PathBuf;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ster_core::kernels::Isa;
use ster_core::llama::families;
use ster_core::tensor::Dtype;
use ster_core::{Error, SteeringLlama};

use crate::errors::to_python;
use crate::sequence::{Cache, Output, Sequence};

#[pyclass(frozen, module = "ster._native")]
pub struct Engine(SteeringLlama);

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (path, *, threads = None, round = None, progress = None))]
    fn new(py: Python<'_>, path: PathBuf, threads: Option<usize>, round: Option<&str>, progress: Option<Py<PyAny>>) -> PyResult<Self> {
        let round = match round {
            None => None,
            Some("f16") => Some(Dtype::F16),
            Some("bf16") => Some(Dtype::BF16),
            Some(other) => return Err(PyValueError::new_err(format!("weights are rounded to f16 or bf16, not `{other}`"))),
        };
        py.detach(|| {
            // What Python's own Ctrl-C handler or `progress` raised, if that is what stopped the rounding.
            let raised = RefCell::new(None);
            let interrupt = || {
                raised.borrow().is_some() || Python::attach(|py| py.check_signals().map_err(|error| raised.replace(Some(error))).is_err())
            };
            let report = |done: u64, total: u64| {
                if let Some(progress) = &progress
                    && let Err(error) = Python::attach(|py| progress.call1(py, (done, total)).map(drop))
                {
                    raised.replace(Some(error));
                }
            };
            let loaded = Isa::choose().and_then(|isa| SteeringLlama::load_rounded(&path, threads, isa, round, &interrupt, &report));
            match (loaded, raised.take()) {
                (_, Some(raised)) => Err(raised),
                (loaded, None) => loaded.map(Engine).map_err(to_python),
            }
        })
    }

    #[getter]
    fn layer_count(&self) -> usize {
        self.0.config().layers
    }

    #[getter]
    fn hidden_size(&self) -> usize {
        self.0.config().hidden
    }

    #[getter]
    fn vocab_size(&self) -> usize {
        self.0.config().vocab
    }

    #[getter]
    fn context_length(&self) -> usize {
        self.0.context_length()
    }

    #[getter]
    fn chunkable(&self) -> bool {
        self.0.config().ropes().all(|rope| !rope.depends_on_length())
    }

    #[getter]
    fn switches_after(&self) -> Option<usize> {
        self.0.switches_after()
    }

    #[getter]
    fn family(&self) -> &'static str {
        self.0.config().family.name
    }

    #[getter]
    fn sliding_window(&self) -> Option<usize> {
        self.0.config().window
    }

    #[getter]
    fn bos_token_id(&self) -> Option<u32> {
        self.0.config().bos
    }

    #[getter]
    fn eos_token_ids(&self) -> Vec<u32> {
        self.0.config().eos.clone()
    }

    #[getter]
    fn weight_dtypes(&self) -> Vec<&'static str> {
        self.0.weights().dtypes().into_iter().map(|dtype| dtype.name()).collect()
    }

    #[getter]
    fn weight_bytes(&self) -> u64 {
        self.0.weights().bytes()
    }

    #[getter]
    fn kernels(&self) -> &'static str {
        self.0.isa().name()
    }

    #[getter]
    fn threads(&self) -> usize {
        self.0.threads()
    }

    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.0.warnings().to_vec()
    }

    #[getter]
    fn cache_block_bytes(&self) -> usize {
        self.0.cache_block_bytes()
    }

    fn cache(&self) -> Cache {
        Cache::new(self.0.cache())
    }

    fn forward(&self, py: Python<'_>, sequences: Vec<Bound<'_, Sequence>>) -> PyResult<Vec<Output>> {
        let held: Vec<&Sequence> = sequences.iter().map(|sequence| sequence.get()).collect();
        // Before the caches are taken: a sequence may go on from a cache that another one extends.
        let prefixes =
            held.iter().map(|s| s.prefix.as_ref().map(|cache| cache.get().snapshot()).transpose()).collect::<PyResult<Vec<_>>>()?;
        let mut caches = Caches::take(&held)?;
        let outputs = {
            let mut batch: Vec<ster_core::Sequence<'_>> = held
                .iter()
                .zip(&mut caches.taken)
                .zip(&prefixes)
                .map(|((s, cache), prefix)| ster_core::Sequence {
                    tokens: &s.tokens,
                    prefix: prefix.as_ref(),
                    cache: cache.as_mut(),
                    steering: &s.steering,
                    capture: s.capture.clone(),
                    logits: s.logits,
                })
                .collect();
            py.detach(|| {
                // What Python's own Ctrl-C handler raised, if that is what stopped the pass.
                let raised = RefCell::new(None);
                let interrupt = || {
                    Python::attach(|py| match py.check_signals() {
                        Ok(()) => false,
                        Err(error) => {
                            *raised.borrow_mut() = Some(error);
                            true
                        }
                    })
                };
                self.0.forward(&mut batch, &interrupt).map_err(|error| match (error, raised.take()) {
                    (Error::Interrupted, Some(raised)) => raised,
                    (error, _) => to_python(error),
                })
            })
        };
        drop(caches);
        outputs?.into_iter().map(|output| Output::new(py, output)).collect()
    }
}

/// Caches taken out of their Python objects for one pass; they go back whatever happens.
struct Caches<'a> {
    owners: &'a [&'a Sequence],
    taken: Vec<Option<ster_core::KvCache>>,
}

impl<'a> Caches<'a> {
    fn take(owners: &'a [&'a Sequence]) -> PyResult<Self> {
        let mut caches = Caches { owners, taken: Vec::new() };
        for owner in owners {
            // On an error, those taken so far are put back by drop.
            caches.taken.push(owner.cache.as_ref().map(|cache| cache.get().take()).transpose()?);
        }
        Ok(caches)
    }
}

impl Drop for Caches<'_> {
    fn drop(&mut self) {
        for (owner, taken) in self.owners.iter().zip(self.taken.drain(..)) {
            if let (Some(cache), Some(taken)) = (&owner.cache, taken) {
                cache.get().put_back(taken);
            }
        }
    }
}

#[pyfunction]
#[pyo3(name = "families")]
pub fn list_families() -> Vec<(&'static str, &'static str)> {
    families::ALL.iter().map(|family| (family.name, family.adds)).collect()
}
