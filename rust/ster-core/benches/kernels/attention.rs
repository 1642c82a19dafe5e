//! Attention in the shape of SmolLM2-135M: 9 heads of 64 over 3 heads of keys and values.

use std::cell::RefCell;
use std::hint::black_box;

use ster_core::kernels::Isa;
use ster_core::kernels::attention::{BLOCK, Head, Rows, Score, attend};
use ster_core::pool::Pool;

use crate::runner::{Case, Data, Runner, Threads, Work};
use crate::weights::Weights;

const KV_HEADS: usize = 3;
const GROUP: usize = 3;
const WIDTH: usize = 64;

/// Numbers of scores in a grain, as in `llama/pass/attention.rs`.
const SCORES: usize = 48 * 1024;

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

pub fn measure(runner: &mut Runner, isa: Isa, weights: &Weights) {
    for positions in [128, 512, 2048] {
        if isa == Isa::PORTABLE && positions > 128 {
            continue;
        }
        // One token, each layer's keys from memory, as in decoding; or the last 64 of a prompt, whose keys were just written.
        for (tokens, data) in [(1, Data::Cold), (64, Data::Warm)] {
            let case = Case { kernel: "attention".into(), shape: format!("g3-d64-{positions}pos"), rows: tokens, data };
            runner.case(isa, case, Threads::OneAndAll, |_| work(isa, weights.numbers(), positions, tokens, data));
        }
    }
}

fn work(isa: Isa, numbers: &[f32], positions: usize, tokens: usize, data: Data) -> Work<'_> {
    let block = KV_HEADS * 2 * BLOCK * WIDTH;
    let blocks = positions.div_ceil(BLOCK);
    let layers = if data == Data::Cold { numbers.len() / (blocks * block) } else { 1 };

    let tile = (SCORES / (positions * GROUP)).clamp(1, 32);
    let before = positions - tokens;
    let grains: Vec<_> =
        (0..KV_HEADS).flat_map(|head| (0..tokens).step_by(tile).map(move |start| (head, start..(start + tile).min(tokens)))).collect();
    let seen: usize = (0..tokens).map(|token| before + token + 1).sum();
    // A dot product with each key and a multiple of each value.
    let flops = (KV_HEADS * GROUP * seen * 4 * WIDTH) as f64;
    let bytes = (4 * KV_HEADS * WIDTH * (2 * positions + 2 * GROUP * tokens)) as f64;

    let q: Vec<f32> = (0..tokens * GROUP * WIDTH).map(|n| (n % 251) as f32 / 128.0 - 0.95).collect();
    let score = Score { scale: 1.0 / (WIDTH as f32).sqrt(), cap: None };
    let mut layer = 0;
    let run = Box::new(move |pool: &mut Pool, _: &mut [f32]| {
        let keys = &numbers[layer * blocks * block..][..blocks * block];
        pool.run(grains.len(), &|| false, &|grain| {
            let (head, tokens) = grains[grain].clone();
            let rows = Rows { count: tokens.len() * GROUP, group: GROUP, first: before + tokens.start + 1, window: usize::MAX };
            let longest = before + tokens.end;
            let blocks: Vec<*const f32> = keys.chunks_exact(block).take(longest.div_ceil(BLOCK)).map(<[f32]>::as_ptr).collect();
            let head = Head { blocks: &blocks, offset: head * 2 * BLOCK * WIDTH, width: WIDTH };
            let q = &q[tokens.start * GROUP * WIDTH..tokens.end * GROUP * WIDTH];
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.resize((q.len() + rows.count * longest).max(scratch.len()), 0.0);
                let (out, scores) = scratch.split_at_mut(q.len());
                attend(isa, q, rows, head, score, scores, out);
                black_box(out);
            });
        });
        layer = (layer + 1) % layers;
        1.0
    });
    Work { flops, bytes, run }
}
