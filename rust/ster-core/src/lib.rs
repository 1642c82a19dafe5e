//! The engine: Llama-family forward passes in f32 with taps and steering on the residual stream.
//!
//! | module | what |
//! | --- | --- |
//! | [`checkpoint`] | files on disk -> named, typed, memory-mapped tensors |
//! | [`llama`] | config, weights, RoPE and the forward pass |
//! | [`batch`], [`capture`], [`steer`] | what runs, what is kept, what is added |
//! | [`sample`] | logits -> next token |
//! | [`kernels`] | slices in, slices out; one operation a file, the same bits on every instruction set |
//! | [`pool`] | threads that share rows and columns, never a sum |
//!
//! Nothing here knows about Python.

pub mod batch;
pub mod capture;
pub mod checkpoint;
pub mod error;
pub mod kernels;
pub mod llama;
pub mod pool;
pub mod sample;
pub mod steer;
pub mod tensor;

pub use batch::{LogitRows, Output, Sequence};
pub use capture::{CapturePlan, CaptureRows, Tap};
pub use error::{Error, Result};
pub use llama::{KvCache, SteeringLlama};
pub use steer::{Edit, SteeringPlan};
