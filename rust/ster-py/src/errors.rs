//! Each error of the core becomes a class of `ster.errors`, with its sentence and its hint.

use pyo3::PyErr;
use ster_core::Error;

/// The Python classes; `ster/errors.py` says what else each inherits from.
mod class {
    use pyo3::import_exception;

    import_exception!(ster.errors, CacheError);
    import_exception!(ster.errors, CheckpointError);
    import_exception!(ster.errors, ConfigError);
    import_exception!(ster.errors, ContextError);
    import_exception!(ster.errors, InputError);
    import_exception!(ster.errors, LayerError);
    import_exception!(ster.errors, NonFiniteError);
    import_exception!(ster.errors, SteeringError);
    import_exception!(ster.errors, TokenError);
}

pub fn to_python(error: Error) -> PyErr {
    let args = (error.to_string(), error.hint());
    match error {
        Error::Read { .. } | Error::MissingConfig { .. } | Error::NoWeights { .. } | Error::File { .. } | Error::Tensor { .. } => {
            class::CheckpointError::new_err(args)
        }
        Error::Config { .. } | Error::ModelType { .. } => class::ConfigError::new_err(args),
        Error::Layer { .. } | Error::LayerOrder { .. } => class::LayerError::new_err(args),
        Error::TokenId { .. } | Error::NoTokens { .. } => class::TokenError::new_err(args),
        Error::Context { .. } => class::ContextError::new_err(args),
        Error::Steering { .. } => class::SteeringError::new_err(args),
        Error::Cache { .. } => class::CacheError::new_err(args),
        Error::Kernels { .. } | Error::Sampling { .. } | Error::Threads { .. } => class::InputError::new_err(args),
        Error::NonFinite { .. } | Error::NonFiniteLogits { .. } => class::NonFiniteError::new_err(args),
        // The caller raises what interrupted it instead; this is for an interrupt nobody claims.
        Error::Interrupted => pyo3::exceptions::PyKeyboardInterrupt::new_err(()),
    }
}
