//! Products with the weights of SmolLM2-135M and Llama-3-8B, cut as the pass cuts them.

use ster_core::kernels::Isa;
use ster_core::kernels::linear::{Then, linear_turned, sixteens, turn, turned_size};
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
        for dtype in Dtype::ALL {
            if !shown(dtype).contains(&name) && dtype != Dtype::BF16 || dtype.row_bytes(k).is_none() {
                continue;
            }
            for rows in [1, 4, 16, 128, 512] {
                // A tenth of a percent of the speed of the others: enough to see that it moved.
                if isa == Isa::PORTABLE && !(["smol-gate,up", "odd"].contains(&name) && rows <= 16) {
                    continue;
                }
                // Weights in blocks are widened for 4 rows as for 16, and for 512 as for 128.
                if dtype.block().0 > 1 && ![1, 16, 128].contains(&rows) {
                    continue;
                }
                let kernel = format!("linear-{}", dtype.name().to_lowercase());
                let case = Case { kernel, shape: format!("{name}-{n}x{k}"), rows, data: Data::Cold };
                runner.case(isa, case, Threads::OneAndAll, |threads| {
                    work(isa, &x[..rows * k], weights.bytes(), dtype, [rows, n, k], threads)
                });
            }
        }
    }
}

/// Shapes to measure a dtype at: bf16 is what checkpoints hold and goes through all; others differ from it in how a weight is loaded,
/// which few shapes show. K formats need multiples of 256.
fn shown(dtype: Dtype) -> &'static [&'static str] {
    match dtype {
        Dtype::BF16 => &[],
        Dtype::F32 | Dtype::F16 => &["smol-gate,up", "smol-head", "llama-gate,up"],
        Dtype::Q8_0 | Dtype::Q4_0 | Dtype::Q4_1 | Dtype::Q4K | Dtype::Q6K => &["smol-gate,up", "smol-down", "llama-k,v", "llama-gate,up"],
        _ => &["smol-down", "llama-k,v"],
    }
}

/// The pass's cells, in its order, of one matrix after the other; a large matrix takes several iterations.
fn work<'a>(isa: Isa, x: &'a [f32], bytes: &'a [u8], dtype: Dtype, [rows, n, k]: [usize; 3], threads: usize) -> Work<'a> {
    let cells = grid(isa, rows, k, n, threads * GRAINS_A_THREAD);
    let flops = (2 * rows * n * k) as f64;
    let iterations = (flops / FLOPS).ceil().min(cells.len().div_ceil(threads) as f64) as usize;
    let cells_each = cells.len().div_ceil(iterations);
    let iterations = cells.len().div_ceil(cells_each);
    let size = n * dtype.row_bytes(k).expect("rows of whole blocks");
    let read = (size + 4 * rows * (n + k)) as f64;

    // The pass turns rows once for several products, so this is not counted.
    let room = turned_size(k);
    let mut turned = vec![0.0; sixteens(isa, rows) * room];
    for (x, turned) in x.chunks(16 * k).zip(turned.chunks_exact_mut(room)) {
        turn(isa, x, k, turned);
    }

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
            let turned = if turned.is_empty() { &turned[..] } else { &turned[rows.start / 16 * room..rows.end.div_ceil(16) * room] };
            linear_turned(isa, &x[rows.start * k..rows.end * k], turned, w, None, panel, Then::Store);
        });
        first += cells_each;
        if first >= cells.len() {
            (matrix, first) = ((matrix + 1) % matrices, 0);
        }
        cells_now.iter().map(|(rows, columns)| (2 * rows.len() * columns.len() * k) as f64).sum::<f64>() / flops
    });
    Work { flops, bytes: read, run }
}
