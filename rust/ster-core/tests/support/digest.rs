//! A digest of the bits of a model's activations and logits.

use sha2::{Digest, Sha256};
use ster_core::{CapturePlan, CaptureRows, LogitRows, Result, Sequence, SteeringLlama, SteeringPlan, Tap};

/// Forty fixed token ids, every layer and row, then the logits: SHA-256 over the f32 bytes, little-endian.
pub fn digest(model: &SteeringLlama) -> Result<String> {
    let vocab = model.config().vocab as u32;
    let tokens: Vec<u32> = (0..40).map(|n| (n * 7919 + 5) % vocab).collect();
    let plan = SteeringPlan::default();
    let capture = CapturePlan { layers: (0..model.config().layers).collect(), rows: CaptureRows::All, tap: Tap::PreSteer };
    let mut batch = [Sequence { tokens: &tokens, prefix: None, cache: None, steering: &plan, capture, logits: LogitRows::All }];
    let output = &model.forward(&mut batch, &|| false)?[0];
    let mut hash = Sha256::new();
    for value in output.residual.iter().chain(&output.logits) {
        hash.update(value.to_le_bytes());
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
