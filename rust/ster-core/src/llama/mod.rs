//! The Llama decoder and its neighbours: families, config, weights, rotary positions, KV cache, forward pass.

pub mod cache;
pub mod config;
pub mod families;
pub mod forward;
mod pass;
pub mod rope;
pub mod weights;

pub use cache::KvCache;
pub use config::LlamaConfig;
pub use forward::SteeringLlama;
pub use weights::LlamaWeights;
