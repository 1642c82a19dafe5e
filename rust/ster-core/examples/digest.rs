//! A digest of the bits of a model's activations and logits, to compare instruction sets and machines:
//! `cargo run --release --example digest -- fixtures/toy-llama`.
//!
//! Forty fixed token ids, every layer and row, 64-bit FNV-1a over the bytes, low byte first.

use ster_core::{CapturePlan, CaptureRows, LogitRows, Sequence, SteeringLlama, SteeringPlan, Tap};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = std::env::args().nth(1).ok_or("usage: digest MODEL_DIR")?;
    let model = SteeringLlama::load(dir.as_ref(), None)?;
    let vocab = model.config().vocab as u32;
    let tokens: Vec<u32> = (0..40).map(|n| (n * 7919 + 5) % vocab).collect();
    let plan = SteeringPlan::default();
    let capture = CapturePlan { layers: (0..model.config().layers).collect(), rows: CaptureRows::All, tap: Tap::PreSteer };
    let mut batch = [Sequence { tokens: &tokens, prefix: None, cache: None, steering: &plan, capture, logits: LogitRows::All }];
    let output = &model.forward(&mut batch, &|| false)?[0];
    let mut hash = 0xCBF2_9CE4_8422_2325u64;
    for byte in output.residual.iter().chain(&output.logits).flat_map(|v| v.to_bits().to_le_bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3);
    }
    println!("{hash:016x} {}", model.isa().name());
    Ok(())
}
