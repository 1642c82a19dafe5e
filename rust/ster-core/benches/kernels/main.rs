//! Each kernel beside what the machine can do: `make bench-kernels`; docs/performance.md says how to read the table.
//!
//! Criterion takes the samples. `peaks.rs` measures the machine, `linear.rs`, `attention.rs` and `rowwise.rs` say what runs, `runner.rs`
//! runs it on one thread and on all, `table.rs` prints.

mod attention;
mod linear;
mod peaks;
/// How the pass itself cuts a product into cells: what is measured is what runs.
#[allow(dead_code)]
#[path = "../../src/llama/pass/rows.rs"]
mod rows;
mod rowwise;
mod runner;
mod table;
mod weights;

use std::time::Duration;

use criterion::Criterion;
use ster_core::kernels::{self, Isa};

use self::runner::Runner;
use self::weights::Weights;

fn main() {
    // Cargo says `--bench` when it benches. `cargo test --all-targets` does not, and then a build is all the test there is.
    if !std::env::args().any(|arg| arg == "--bench") {
        println!("nothing measured; run `make bench-kernels`");
        return;
    }
    let isas = match std::env::var_os("STER_KERNELS") {
        None => Isa::available(),
        Some(_) => vec![Isa::choose().unwrap_or_else(|error| panic!("{error}"))],
    };
    let criterion = Criterion::default()
        .without_plots()
        .sample_size(runner::SAMPLES)
        .nresamples(1001)
        .warm_up_time(Duration::from_millis(15))
        .measurement_time(runner::MEASUREMENT)
        .configure_from_args();
    let weights = Weights::mapped();
    let mut runner = Runner::new(criterion, &isas, &weights);
    for isa in isas {
        linear::measure(&mut runner, isa, &weights);
        attention::measure(&mut runner, isa, &weights);
        rowwise::measure(&mut runner, isa);
    }
    runner.finish(&weights);
}
