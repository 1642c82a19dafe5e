//! A digest of the bits of a model's activations and logits, to compare instruction sets and machines:
//! `cargo run --release --example digest -- fixtures/toy-llama`.

#[path = "../tests/support/digest.rs"]
mod digest;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = std::env::args().nth(1).ok_or("usage: digest MODEL_DIR")?;
    let model = ster_core::SteeringLlama::load(dir.as_ref(), None)?;
    println!("{} {}", digest::digest(&model)?, model.isa().name());
    Ok(())
}
