//! The bits themselves, frozen: what was extracted with one release can be compared with another one's, bit for bit, on any machine.
//!
//! A change here is a change of every user's numbers: it needs a reason, and a line in CHANGELOG.md.

#[path = "support/digest.rs"]
mod digest;

use std::path::{Path, PathBuf};

use ster_core::SteeringLlama;
use ster_core::kernels::Isa;

fn check(dir: &Path, expected: &str) {
    for isa in Isa::available() {
        for threads in [1, 3] {
            let model = SteeringLlama::load_with(dir, Some(threads), isa).unwrap();
            assert_eq!(digest::digest(&model).unwrap(), expected, "{} with {threads} threads: {}", isa.name(), dir.display());
        }
    }
}

#[test]
fn toy() {
    check(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/toy-llama"),
        "cce8c87c1370b96f4bafee5cb273660ace44ce90753d1753ce25ac6032ebccce",
    );
}

/// Grouped heads, bf16 weights and the llama3 rope scaling.
#[test]
fn reference_checkpoint() {
    let Some(folder) = std::env::var_os("STER_REFERENCES") else {
        eprintln!("skipped: STER_REFERENCES names no folder of reference checkpoints");
        return;
    };
    let dir: PathBuf = Path::new(&folder).join("golden/llama3-rope-bf16");
    check(&dir, "631bf00bf4dda707dd454b4ad77e620d9af45ab697da7fb93f087be83b77801e");
}
