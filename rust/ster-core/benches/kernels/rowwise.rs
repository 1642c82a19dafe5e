//! Norm, rotary positions and the gate of the MLP: a few operations a number, each row alone, on what the kernel before has just written.

use ster_core::kernels::Isa;
use ster_core::kernels::activation::{Activation, gate};
use ster_core::kernels::norm::rms_norm;
use ster_core::kernels::rotary::rotate;
use ster_core::pool::Pool;
use ster_core::tensor::Shared;

use crate::runner::{Case, Data, Runner, Threads, Work};

pub fn measure(runner: &mut Runner, isa: Isa) {
    for (rows, hidden) in [(1, 576), (512, 576), (1, 4096), (64, 4096)] {
        runner.case(isa, case("rms-norm", format!("{hidden}"), rows), threads(rows), |_| norm_work(isa, rows, hidden));
    }
    for (rows, heads, dim) in [(1, 12, 64), (512, 12, 64), (64, 40, 128)] {
        runner.case(isa, case("rotate", format!("{heads}x{dim}"), rows), threads(rows), |_| rotate_work(isa, rows, heads, dim));
    }
    // The pass takes the gate 48 columns at a time.
    for (name, act, rows, columns) in [
        ("gate-silu", Activation::Silu, 1, 48),
        ("gate-silu", Activation::Silu, 128, 48),
        ("gate-gelu-tanh", Activation::GeluTanh, 128, 48),
    ] {
        runner.case(isa, case(name, format!("{columns}"), rows), Threads::One, |_| gate_work(isa, act, rows * columns));
    }
}

fn case(kernel: &str, shape: String, rows: usize) -> Case {
    Case { kernel: kernel.into(), shape, rows, data: Data::Rowwise }
}

fn threads(rows: usize) -> Threads {
    if rows == 1 { Threads::One } else { Threads::OneAndAll }
}

/// Sixteen rows and more to a thread, as the pass does.
fn over_rows(pool: &mut Pool, rows: usize, work: &(dyn Fn(usize) + Sync)) {
    let grain = rows.div_ceil(pool.threads() * 4).max(16);
    pool.run(rows.div_ceil(grain), &|| false, &|n| (n * grain..((n + 1) * grain).min(rows)).for_each(work));
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|n| (n % 251) as f32 / 128.0 - 0.95).collect()
}

fn norm_work(isa: Isa, rows: usize, hidden: usize) -> Work<'static> {
    let (x, gain) = (numbers(rows * hidden), numbers(hidden));
    let run = Box::new(move |pool: &mut Pool, out: &mut [f32]| {
        let out = Shared::new(&mut out[..rows * hidden], rows, hidden);
        over_rows(pool, rows, &|row| {
            // SAFETY: rows are disjoint.
            let mut panel = unsafe { out.panel(row..row + 1, 0..hidden) };
            rms_norm(isa, panel.row(0), &x[row * hidden..(row + 1) * hidden], &gain, 1e-5);
        });
        1.0
    });
    Work { flops: (4 * rows * hidden) as f64, bytes: (8 * rows * hidden) as f64, run }
}

fn rotate_work(isa: Isa, rows: usize, heads: usize, dim: usize) -> Work<'static> {
    let width = heads * dim;
    let (x, cos, sin) = (numbers(rows * width), numbers(dim / 2), numbers(dim / 2));
    let run = Box::new(move |pool: &mut Pool, out: &mut [f32]| {
        let out = Shared::new(&mut out[..rows * width], rows, width);
        over_rows(pool, rows, &|row| {
            // SAFETY: rows are disjoint.
            let mut panel = unsafe { out.panel(row..row + 1, 0..width) };
            let x = &x[row * width..(row + 1) * width];
            for (out, x) in panel.row(0).chunks_exact_mut(dim).zip(x.chunks_exact(dim)) {
                rotate(isa, out, x, &cos, &sin);
            }
        });
        1.0
    });
    Work { flops: (3 * rows * width) as f64, bytes: (8 * rows * width) as f64, run }
}

/// The gate is written in place. From -1 it stays in reach of -1: `up` undoes the activation, and what rounding adds shrinks.
fn gate_work(isa: Isa, activation: Activation, count: usize) -> Work<'static> {
    let mut once = [-1.0];
    gate(isa, &mut once, &[1.0], activation);
    let up = vec![-1.0 / once[0]; count];
    let mut numbers = vec![-1.0; count];
    let run = Box::new(move |_: &mut Pool, _: &mut [f32]| {
        gate(isa, &mut numbers, &up, activation);
        1.0
    });
    // Negation, exponential, sum, quotient, product; the tanh form's polynomial is not counted.
    Work { flops: (5 * count) as f64, bytes: (12 * count) as f64, run }
}
