//! Products with the weights of SmolLM2-135M and Llama-3-8B, cut as the pass cuts them.

use ster_core::kernels::Isa;
use ster_core::kernels::linear::{Then, linear};
use ster_core::pool::Pool;
use ster_core::tensor::{Dtype, Shared, Weights};

use crate::rows::{GRAINS_A_THREAD, grid};
use crate::runner::{Case, Data, Runner, Threads, Work};

/// A large product is measured in pieces of about this much: a few milliseconds.
const FLOPS: f64 = 5e8;

/// Name, `[out, in]`.
const SHAPES: [(&str, usize, usize); 10] = [
    ("smol-q,o", 576, 576),
    ("smol-k,v", 192, 576),
    ("smol-gate,up", 1536, 576),
    ("smol-down", 576, 1536),
    ("smol-head", 49152, 576),
    ("odd", 1536, 577),
    ("llama-q,o", 4096, 4096),
    ("llama-k,v", 1024, 4096),
    ("llama-gate,up", 14336, 4096),
    ("llama-down", 4096, 14336),
];

pub fn measure(runner: &mut Runner, isa: Isa, weights: &crate::weights::Weights) {
    // Values do not matter to the time, as long as none is subnormal.
    let x: Vec<f32> = (0..512 * 14336).map(|n| (n % 251) as f32 / 128.0 - 0.95).collect();
    for (name, n, k) in SHAPES {
        for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
            // bf16 is what checkpoints hold; the others differ from it in how a weight is loaded, which few shapes show.
            if dtype != Dtype::BF16 && !["smol-gate,up", "smol-head", "llama-gate,up"].contains(&name) {
                continue;
            }
            for rows in [1, 4, 16, 128, 512] {
                // A tenth of a percent of the speed of the others: enough to see that it moved.
                if isa == Isa::PORTABLE && !(["smol-gate,up", "odd"].contains(&name) && rows <= 16) {
                    continue;
                }
                let kernel = match dtype {
                    Dtype::F32 => "linear-f32",
                    Dtype::F16 => "linear-f16",
                    Dtype::BF16 => "linear-bf16",
                };
                let case = Case { kernel, shape: format!("{name}-{n}x{k}"), rows, data: Data::Cold };
                runner.case(isa, case, Threads::OneAndAll, |threads| {
                    work(isa, &x[..rows * k], weights.bytes(), dtype, [rows, n, k], threads)
                });
            }
        }
    }
}

/// The pass's cells, in its order, of one matrix after the other; a large matrix takes several iterations.
fn work<'a>(isa: Isa, x: &'a [f32], bytes: &'a [u8], dtype: Dtype, [rows, n, k]: [usize; 3], threads: usize) -> Work<'a> {
    let cells = grid(rows, k, n, threads * GRAINS_A_THREAD);
    let flops = (2 * rows * n * k) as f64;
    let iterations = (flops / FLOPS).ceil().min(cells.len().div_ceil(threads) as f64) as usize;
    let cells_each = cells.len().div_ceil(iterations);
    let iterations = cells.len().div_ceil(cells_each);
    let size = n * k * dtype.size();
    let read = (size + 4 * rows * (n + k)) as f64;

    let matrices = bytes.len() / size;
    let (mut matrix, mut first) = (0, 0);
    let (flops, read) = (flops / iterations as f64, read / iterations as f64);
    let run = Box::new(move |pool: &mut Pool, out: &mut [f32]| {
        let w = Weights::new(&bytes[matrix * size..(matrix + 1) * size], dtype, n, k);
        let cells_now = &cells[first..(first + cells_each).min(cells.len())];
        let out = Shared::new(&mut out[..rows * n], rows, n);
        pool.run(cells_now.len(), &|| false, &|cell| {
            let (rows, columns) = cells_now[cell].clone();
            // SAFETY: the cells of a grid are disjoint.
            let panel = unsafe { out.panel(rows.clone(), columns) };
            linear(isa, &x[rows.start * k..rows.end * k], w, None, panel, Then::Store);
        });
        first += cells_each;
        if first >= cells.len() {
            (matrix, first) = ((matrix + 1) % matrices, 0);
        }
        cells_now.iter().map(|(rows, columns)| (2 * rows.len() * columns.len() * k) as f64).sum::<f64>() / flops
    });
    Work { flops, bytes: read, run }
}
