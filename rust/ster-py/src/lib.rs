//! `ster._native`: ster-core as Python sees it. The stub `python/ster/_native.pyi` documents it.

mod engine;
mod errors;
mod gguf;
mod sample;
mod sequence;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<sequence::Edit>()?;
    module.add_class::<sequence::Cache>()?;
    module.add_class::<sequence::Sequence>()?;
    module.add_class::<sequence::Output>()?;
    module.add_class::<engine::Engine>()?;
    module.add_function(wrap_pyfunction!(engine::list_families, module)?)?;
    module.add_class::<gguf::Tensors>()?;
    module.add_function(wrap_pyfunction!(gguf::gguf_metadata, module)?)?;
    module.add_function(wrap_pyfunction!(sample::sample, module)?)?;
    Ok(())
}
