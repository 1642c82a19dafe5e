//! The next token.

use numpy::PyReadonlyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ster_core::sample::{Sampling, sample as next_token};

use crate::errors::to_python;

#[pyfunction]
#[pyo3(signature = (logits, text, *, allowed = None, temperature = 0.0, top_k = None, top_p = 1.0, min_p = 0.0, repetition_penalty = 1.0, seed = 0, step = 0))]
pub fn sample(
    logits: PyReadonlyArray1<'_, f32>,
    text: Vec<u32>,
    allowed: Option<usize>,
    temperature: f64,
    top_k: Option<usize>,
    top_p: f64,
    min_p: f64,
    repetition_penalty: f64,
    seed: u64,
    step: u64,
) -> PyResult<u32> {
    let sampling = Sampling { temperature, top_k, top_p, min_p, repetition_penalty };
    sampling.check().map_err(to_python)?;
    let logits = logits.as_slice()?;
    let allowed = allowed.unwrap_or(logits.len());
    if allowed == 0 || allowed > logits.len() {
        return Err(PyValueError::new_err(format!("allowed must be 1 to {}, found {allowed}", logits.len())));
    }
    // With the GIL: a sixth of a millisecond, less than it takes to get it back from a busy thread.
    Ok(next_token(logits, allowed, &text, &sampling, seed, step))
}
