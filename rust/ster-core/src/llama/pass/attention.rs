//! Keys and values into their blocks, and attention over them.

use super::rows::{Member, count};
use super::{Pass, Run, SCRATCH};
use crate::error::Result;
use crate::kernels::attention::{self, BLOCK};
use crate::tensor::Shared;

/// Pointers that threads may share: each grain writes rows of its own.
#[derive(Clone, Copy)]
struct Blocks<'a>(&'a [Run<'a>]);
// SAFETY: `store_keys` writes each position once, in one grain; `attend` only reads, in a later region.
unsafe impl Sync for Blocks<'_> {}
// SAFETY: as above.
unsafe impl Send for Blocks<'_> {}

impl Pass<'_> {
    /// What a shared prefix has in its last block goes into the sequence's own first block.
    pub(super) fn copy_partial_blocks(&mut self, index: usize, rows: &[Member]) {
        let layout = &self.layout;
        let (store, slot) = layout.place(index);
        for member in rows {
            let run = &self.runs[member.run];
            let strip = &run.strips[store];
            let Some(partial) = strip.partial else { continue };
            let filled = run.past % BLOCK * layout.width;
            for head in 0..layout.kv_heads {
                for half in [0, BLOCK * layout.width] {
                    let at = layout.head(head) + half;
                    // SAFETY: both are blocks of `layout`; the prefix is only read, the other is this sequence's own, and nobody else
                    // runs now.
                    unsafe {
                        let from = partial.add(slot * layout.layer() + at);
                        std::ptr::copy_nonoverlapping(from, strip.blocks[0].add(slot * run.layer_stride + at), filled);
                    }
                }
            }
        }
    }

    /// Turn the keys to their positions and put them, with the values, where attention reads them.
    pub(super) fn store_keys(&mut self, index: usize, rows: &[Member], k: &[f32], v: &[f32]) -> Result<()> {
        let (isa, layout, config) = (self.model.isa, self.layout.clone(), &self.model.config);
        let (rope, (store, slot)) = (config.rope_of(index), layout.place(index));
        let dim = config.head_dim;
        let kv_width = config.kv_heads * dim;
        let owners: Vec<(usize, usize)> = rows.iter().flat_map(|member| (0..member.rows).map(|n| (member.run, member.first + n))).collect();
        let runs = std::mem::take(&mut self.runs);
        let rotary = std::mem::take(&mut self.rotary);
        let lent = Blocks(&runs);
        let result = self.over_rows(owners.len(), &|range| {
            let lent = &lent;
            for row in range {
                let (run, token) = owners[row];
                let run = &lent.0[run];
                let position = run.past + token;
                let angle = rope.map(|rope| run.angles[rope][token]);
                let strip = &run.strips[store];
                let block = strip.blocks[position / BLOCK - strip.dropped - strip.shared.len()];
                for head in 0..config.kv_heads {
                    let from = row * kv_width + head * dim;
                    let key = slot * run.layer_stride + layout.head(head) + position % BLOCK * layout.width;
                    let value = key + BLOCK * layout.width;
                    // SAFETY: `Layout` leaves `width` >= head_dim numbers here; this grain alone writes this position; nobody reads now.
                    let (key, value) = unsafe {
                        (std::slice::from_raw_parts_mut(block.add(key), dim), std::slice::from_raw_parts_mut(block.add(value), dim))
                    };
                    rotary.turn(isa, key, &k[from..from + dim], angle);
                    value.copy_from_slice(&v[from..from + dim]);
                }
            }
        });
        self.runs = runs;
        self.rotary = rotary;
        result
    }

    /// `mixed` `[kept, heads * head_dim]`: each query over the keys of its sequence up to its own position, as far back as the layer sees.
    pub(super) fn attend(&mut self, index: usize, kept: &[Member], q: &[f32], mixed: &mut [f32]) -> Result<()> {
        /// Numbers of scores in a grain: they stay in the second-level cache.
        const SCORES: usize = 48 * 1024;
        let (isa, layout, config) = (self.model.isa, self.layout.clone(), &self.model.config);
        let (rope, (store, slot)) = (config.rope_of(index), layout.place(index));
        let window = config.window_of(index).unwrap_or(usize::MAX);
        let (dim, group) = (config.head_dim, config.heads / config.kv_heads);
        let q_width = config.heads * dim;
        let score = attention::Score { scale: config.attention_scale, cap: config.score_cap };
        let runs = std::mem::take(&mut self.runs);
        let rotary = std::mem::take(&mut self.rotary);
        let mut grains = Vec::new();
        for member in kept.iter().filter(|member| member.rows > 0) {
            let longest = runs[member.run].past + member.first + member.rows;
            let tile = (SCORES / (longest.min(window.saturating_add(BLOCK)) * group)).clamp(1, 32);
            for head in 0..config.kv_heads {
                for start in (0..member.rows).step_by(tile) {
                    grains.push((member, head, start..(start + tile).min(member.rows)));
                }
            }
        }
        let out = Shared::new(mixed, count(kept), q_width);
        let lent = Blocks(&runs);
        let result = self.region(grains.len(), &|grain| {
            let lent = &lent;
            let (member, head, tokens) = grains[grain].clone();
            let run = &lent.0[member.run];
            let strip = &run.strips[store];
            let (first, end) = (run.past + member.first + tokens.start + 1, run.past + member.first + tokens.end);
            // Blocks before the first that any of these rows sees are left out, and positions counted from there.
            let skipped = first.saturating_sub(window) / BLOCK;
            let (first, longest) = (first - skipped * BLOCK, end - skipped * BLOCK);
            let rows = attention::Rows { count: tokens.len() * group, group, first, window };
            // `wrapping_add`: pointers only; `attend` reads inside the blocks.
            let shared = strip.shared.iter().map(|block| block.wrapping_add(slot * layout.layer()));
            let own = strip.blocks.iter().map(|block| block.cast_const().wrapping_add(slot * run.layer_stride));
            let blocks: Vec<*const f32> = shared.chain(own).skip(skipped - strip.dropped).take(longest.div_ceil(BLOCK)).collect();
            let head_place = attention::Head { blocks: &blocks, offset: layout.head(head), width: layout.width };
            SCRATCH.with_borrow_mut(|scratch| {
                let size = rows.count * layout.width;
                scratch.clear();
                scratch.resize(2 * size + rows.count * longest, 0.0);
                let (queries, rest) = scratch.split_at_mut(size);
                let (result, scores) = rest.split_at_mut(size);
                let source = |row: usize| {
                    let token = tokens.start + row / group;
                    (token, (head * group + row % group) * dim)
                };
                for (row, query) in queries.chunks_exact_mut(layout.width).enumerate() {
                    let (token, column) = source(row);
                    let from = (member.start + token) * q_width + column;
                    rotary.turn(isa, query, &q[from..from + dim], rope.map(|rope| run.angles[rope][member.first + token]));
                }
                attention::attend(isa, queries, rows, head_place, score, scores, result);
                for (row, result) in result.chunks_exact(layout.width).enumerate() {
                    let (token, column) = source(row);
                    let at = member.start + token;
                    // SAFETY: no other grain has this head at this token.
                    let mut panel = unsafe { out.panel(at..at + 1, column..column + dim) };
                    panel.row(0).copy_from_slice(&result[..dim]);
                }
            });
        });
        self.runs = runs;
        self.rotary = rotary;
        result
    }
}
