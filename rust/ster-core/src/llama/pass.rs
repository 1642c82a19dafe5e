//! One pass, block by block. `block` is the model; the rest finds rows and hands them to threads.
//!
//! What a family does otherwise than Llama is a value of its config or a weight that is there or not; no family is named here.

mod angles;
mod attention;
mod buffer;
mod input;
mod rows;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::angles::{Angles, Rotary};
use self::buffer::{Buffer, gather};
use self::input::{Input, room_for};
use self::rows::{GRAINS_A_THREAD, Member, count, grid};
use super::cache::{Layout, STORES};
use super::forward::SteeringLlama;
use super::weights::{BlockWeights, Linear};
use crate::batch::{Output, Sequence};
use crate::capture::{CaptureRows, Tap};
use crate::error::{Error, Result};
use crate::kernels::attention::BLOCK;
use crate::kernels::linear::{COLUMN_GRAIN, Then, linear_turned, turn};
use crate::kernels::{activation, norm, steer};
use crate::pool::{Interrupt, Pool};
use crate::tensor::{Panel, Shared};

/// Buffers that the next pass uses again: fresh ones would cost a page fault every 4 KiB.
#[derive(Default)]
pub(super) struct Workspace {
    x: Buffer,
    kept: Buffer,
    normed: Buffer,
    normed_kept: Buffer,
    /// What a sublayer adds, where it is normed or scaled first.
    added: Buffer,
    spare: Buffer,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    mixed: Buffer,
    mlp: Buffer,
    turned: [Buffer; 2],
}

thread_local! {
    /// Scores, gathered queries and half-finished MLP columns of one grain.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// One sequence as the pass sees it.
struct Run<'a> {
    tokens: &'a [u32],
    /// Positions already in the cache.
    past: usize,
    /// Blocks this sequence needs.
    depth: usize,
    /// Rows that must leave its last block, counted from the end.
    kept: usize,
    sequence: &'a Sequence<'a>,
    /// Its keys and values in each store.
    strips: [Strip; STORES],
    /// Numbers between two layers of a written block; 0 when keys and values are dropped layer by layer.
    layer_stride: usize,
    /// For each rotation of the model, which row of the rotary table each token uses.
    angles: Vec<Vec<usize>>,
}

/// The blocks of one sequence in one store of the cache.
#[derive(Default)]
struct Strip {
    /// Blocks before `shared` that are forgotten.
    dropped: usize,
    /// Whole blocks of a prefix that others may share: all layers, only read.
    shared: Vec<*const f32>,
    /// The blocks after those, which this pass writes.
    blocks: Vec<*mut f32>,
    /// The block of the prefix that is only partly filled: its positions are copied into the first written block, layer by layer.
    partial: Option<*const f32>,
}

pub(super) struct Pass<'a> {
    model: &'a SteeringLlama,
    pool: &'a mut Pool,
    work: &'a mut Workspace,
    interrupt: Interrupt<'a>,
    asked: Instant,
    layout: Arc<Layout>,
    runs: Vec<Run<'a>>,
    rotary: Rotary,
    outputs: Vec<Output>,
    /// Keys and values of sequences without a cache, for the current layer.
    _passing: Vec<f32>,
}

impl<'a> Pass<'a> {
    pub fn new(
        model: &'a SteeringLlama,
        sequences: &'a mut [Sequence<'_>],
        depths: &[usize],
        pool: &'a mut Pool,
        work: &'a mut Workspace,
        interrupt: Interrupt<'a>,
    ) -> Self {
        let layout = model.layout.clone();
        let layer = layout.layer();
        // First the writers of caches, then everything else is read-only.
        let mut grown: Vec<[(usize, Vec<*mut f32>); STORES]> = sequences
            .iter_mut()
            .map(|s| {
                let more = s.tokens.len();
                s.cache.as_mut().map_or_else(Default::default, |cache| cache.grow(more))
            })
            .collect();
        let sequences: &'a [Sequence<'a>] = shorten(sequences);
        let passing_blocks = |s: &Sequence<'_>| if s.cache.is_some() { 0 } else { (s.past() % BLOCK + s.tokens.len()).div_ceil(BLOCK) };
        let without: usize = sequences.iter().map(passing_blocks).sum();
        let mut passing = vec![0.0f32; without * layer];
        let mut free = passing.as_mut_ptr();
        let mut angles = Angles::default();
        let mut outputs = Vec::new();
        let mut runs = Vec::new();
        for ((s, &depth), grown) in sequences.iter().zip(depths).zip(&mut grown) {
            let (past, count) = (s.past(), s.tokens.len());
            // Blocks that hold one layer at a time, whichever store it belongs to.
            let here: Vec<*mut f32> = (0..passing_blocks(s)).map(|n| free.wrapping_add(n * layer)).collect();
            free = free.wrapping_add(here.len() * layer);
            let mut strips: [Strip; STORES] = Default::default();
            for (number, (strip, (dropped, blocks))) in strips.iter_mut().zip(std::mem::take(grown)).enumerate() {
                *strip = match s.prefix {
                    _ if s.cache.is_some() => Strip { dropped, blocks, ..Strip::default() },
                    None => Strip { blocks: here.clone(), ..Strip::default() },
                    Some(prefix) => {
                        let (dropped, mut held) = prefix.blocks(number);
                        let shared = held.by_ref().take(past / BLOCK - dropped).collect();
                        Strip { dropped, shared, blocks: here.clone(), partial: held.next() }
                    }
                };
            }
            let captured = s.capture.count(count);
            let at_last_block = if s.capture.layers.last() == Some(&(depth.wrapping_sub(1))) { captured } else { 0 };
            outputs.push(Output {
                residual: vec![0.0; s.capture.layers.len() * captured * model.config.hidden],
                residual_shape: [s.capture.layers.len(), captured, model.config.hidden],
                logits: Vec::new(),
                logits_shape: [s.logits.count(count), model.config.vocab],
                steered: s.steering.edits.iter().map(|edit| edit.reached(past..past + count)).collect(),
            });
            runs.push(Run {
                tokens: s.tokens,
                past,
                depth,
                kept: at_last_block.max(s.logits.count(count)),
                sequence: s,
                strips,
                layer_stride: if s.cache.is_some() { layer } else { 0 },
                angles: angles.rows(model, past, count),
            });
        }
        let rotary = angles.table(model);
        Pass { model, pool, work, interrupt, asked: Instant::now(), layout, runs, rotary, outputs, _passing: passing }
    }

    pub fn run(mut self) -> Result<Vec<Output>> {
        let deepest = self.runs.iter().map(|run| run.depth).max().unwrap_or(0);
        let mut rows = self.members(|run| (run.depth > 0).then_some(run.tokens.len()));
        self.embed(&rows);
        self.check_finite(0, &rows)?; // here, so that a bad embedding is laid to its own token
        for index in 0..deepest {
            self.poll()?;
            rows = self.block(index, &rows)?;
        }
        self.logits(&rows)?;
        Ok(self.outputs)
    }

    /// `x` = the embedding of every token, widened exactly, times the model's scale.
    fn embed(&mut self, rows: &[Member]) {
        let (hidden, scale) = (self.model.config.hidden, self.model.config.embedding_scale);
        let table = self.model.weights.embed.view();
        self.work.x.fit(count(rows) * hidden);
        for member in rows {
            for (n, &id) in self.runs[member.run].tokens.iter().enumerate() {
                let at = (member.start + n) * hidden;
                let row = &mut self.work.x[at..at + hidden];
                table.widen_row(id as usize, row);
                if scale != 1.0 {
                    row.iter_mut().for_each(|x| *x *= scale);
                }
            }
        }
    }

    /// One decoder block: `x += attention(norm(x))`, then `x += mlp(norm(x))`, with `x` `[rows, hidden]`. A family may norm what is added
    /// instead, or too, and scale it.
    ///
    /// Taps, in this order: `PreSteer`, the block's own output; the steering plan's addition; `PostSteer`. Gives the rows that go on.
    fn block(&mut self, index: usize, rows: &[Member]) -> Result<Vec<Member>> {
        let model = self.model;
        let w = &model.weights.blocks[index];
        // A sequence that ends here keeps only the rows somebody asked for; its keys and values are still computed for all.
        let kept = self.members(|run| match run.depth {
            depth if depth <= index => None,
            depth if depth == index + 1 => Some(run.kept),
            _ => Some(run.tokens.len()),
        });

        self.attention(index, w, rows, &kept)?;
        self.mlp(w, count(&kept))?;
        self.check_finite(index, &kept)?;
        self.capture(Tap::PreSteer, index, &kept);
        if self.steer(index, &kept) {
            self.check_finite(index, &kept)?;
        }
        self.capture(Tap::PostSteer, index, &kept);

        let next = self.members(|run| match run.depth {
            depth if depth > index + 1 => Some(run.tokens.len()),
            // Rows that the head will read travel on to the end.
            depth if depth == model.config.layers && index + 1 == depth => Some(run.kept),
            _ => None,
        });
        if next != kept {
            let mut x = std::mem::take(&mut self.work.kept);
            gather(&self.work.x, &kept, &mut x, &next, model.config.hidden);
            self.work.kept = std::mem::replace(&mut self.work.x, x);
        }
        Ok(next)
    }

    /// `x[kept] += o(attention(q, k, v))`, with `q, k, v` of `norm(x)`. Leaves only the kept rows in `x`.
    fn attention(&mut self, index: usize, w: &BlockWeights, rows: &[Member], kept: &[Member]) -> Result<()> {
        let config = &self.model.config;
        let (hidden, all, some) = (config.hidden, count(rows), count(kept));
        let (q_width, kv_width) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let mut work = std::mem::take(self.work);
        self.norm_or_copy(&mut work.normed, &work.x, w.attn_norm.as_deref())?;
        let partly = rows != kept;
        if partly {
            gather(&work.normed, rows, &mut work.normed_kept, kept, hidden);
            gather(&work.x, rows, &mut work.kept, kept, hidden);
            std::mem::swap(&mut work.x, &mut work.kept);
        }
        work.q.fit(some * q_width);
        work.k.fit(all * kv_width);
        work.v.fit(all * kv_width);
        let [all_turned, kept_turned] = &mut work.turned;
        let every = self.input(&work.normed, hidden, all_turned)?;
        let kept_ones = if partly { self.input(&work.normed_kept, hidden, kept_turned)? } else { every };
        self.project(&mut [
            Projection::new(kept_ones, &w.q, &mut work.q, Then::Store),
            Projection::new(every, &w.k, &mut work.k, Then::Store),
            Projection::new(every, &w.v, &mut work.v, Then::Store),
        ])?;
        for (x, gain) in [(&mut work.q, &w.q_norm), (&mut work.k, &w.k_norm)] {
            if let Some(gain) = gain {
                self.norm_in_place(x, &mut work.spare, gain)?;
            }
        }
        if partly {
            self.check_keys(index, rows, &work.k, &work.v)?;
        }
        self.copy_partial_blocks(index, rows);
        self.store_keys(index, rows, &work.k, &work.v)?;
        work.mixed.fit(some * q_width);
        self.attend(index, kept, &work.q, &mut work.mixed)?;
        let mixed = self.input(&work.mixed, q_width, &mut work.turned[0])?;
        self.add(&mut work.x, mixed, &w.o, w.attn_post_norm.as_deref(), &mut work.added, &mut work.spare)?;
        *self.work = work;
        Ok(())
    }

    /// `x += down(activation(gate(norm(x))) * up(norm(x)))`
    fn mlp(&mut self, w: &BlockWeights, rows: usize) -> Result<()> {
        let mut work = std::mem::take(self.work);
        self.norm_or_copy(&mut work.normed, &work.x, w.mlp_norm.as_deref())?;
        work.mlp.fit(rows * self.model.config.mlp);
        let normed = self.input(&work.normed, w.gate.weight.cols(), &mut work.turned[0])?;
        self.gate_up(w, normed, &mut work.mlp)?;
        let mlp = self.input(&work.mlp, w.down.weight.cols(), &mut work.turned[0])?;
        self.add(&mut work.x, mlp, &w.down, w.mlp_post_norm.as_deref(), &mut work.added, &mut work.spare)?;
        *self.work = work;
        Ok(())
    }

    /// `x += scale norm(linear(from))`; in one step where there is neither a norm nor a scale. `added`, `spare`: room.
    fn add(
        &mut self,
        x: &mut [f32],
        from: Input<'_>,
        linear: &Linear,
        gain: Option<&[f32]>,
        added: &mut Buffer,
        spare: &mut Buffer,
    ) -> Result<()> {
        let (isa, scale, hidden) = (self.model.isa, self.model.config.residual_scale, linear.weight.rows());
        if gain.is_none() && scale == 1.0 {
            return self.project(&mut [Projection::new(from, linear, x, Then::Add)]);
        }
        added.fit(x.len());
        self.project(&mut [Projection::new(from, linear, added, Then::Store)])?;
        if let Some(gain) = gain {
            self.norm_in_place(added, spare, gain)?;
        }
        let rows = x.len() / hidden;
        let (x, added) = (Shared::new(x, rows, hidden), &*added);
        self.over_rows(rows, &|range| {
            // SAFETY: ranges are disjoint.
            let mut panel = unsafe { x.panel(range.clone(), 0..hidden) };
            for (n, row) in range.enumerate() {
                steer::add_scaled(isa, panel.row(n), &added[row * hidden..(row + 1) * hidden], scale);
            }
        })
    }

    fn norm_or_copy(&mut self, out: &mut Buffer, x: &[f32], gain: Option<&[f32]>) -> Result<()> {
        out.fit(x.len());
        match gain {
            Some(gain) => self.norm(out, x, gain),
            None => {
                out.copy_from_slice(x);
                Ok(())
            }
        }
    }

    fn norm_in_place(&mut self, x: &mut Buffer, spare: &mut Buffer, gain: &[f32]) -> Result<()> {
        spare.fit(x.len());
        self.norm(spare, x, gain)?;
        std::mem::swap(x, spare);
        Ok(())
    }

    /// Each row of `gain.len()` numbers of `x`, normed.
    fn norm(&mut self, out: &mut [f32], x: &[f32], gain: &[f32]) -> Result<()> {
        let (isa, eps, hidden) = (self.model.isa, self.model.config.norm_eps, gain.len());
        let rows = x.len() / hidden;
        let out = Shared::new(out, rows, hidden);
        self.over_rows(rows, &|range| {
            // SAFETY: ranges are disjoint.
            let mut panel = unsafe { out.panel(range.clone(), 0..hidden) };
            for (n, row) in range.enumerate() {
                norm::rms_norm(isa, panel.row(n), &x[row * hidden..(row + 1) * hidden], gain, eps);
            }
        })
    }

    /// `x` `[rows, k]` for products to read. room: for what is turned of it.
    fn input<'x>(&mut self, x: &'x [f32], k: usize, room: &'x mut Buffer) -> Result<Input<'x>> {
        let isa = self.model.isa;
        let (count, size) = room_for(isa, x.len() / k, k, room);
        if count > 0 {
            let turned = Shared::new(room, count, size);
            self.region(count, &|n| {
                // SAFETY: each sixteen is turned once.
                let mut panel = unsafe { turned.panel(n..n + 1, 0..size) };
                turn(isa, &x[n * 16 * k..((n + 1) * 16 * k).min(x.len())], k, panel.row(0));
            })?;
        }
        Ok(Input::new(x, k, room))
    }

    /// Several products in one region, so that threads meet once.
    fn project(&mut self, projections: &mut [Projection<'_>]) -> Result<()> {
        let isa = self.model.isa;
        let threads = self.pool.threads();
        let columns: usize = projections.iter().map(|p| p.linear.weight.rows()).sum();
        let mut grains = Vec::new();
        for (n, p) in projections.iter().enumerate() {
            let (rows, width) = (p.rows(), p.linear.weight.rows());
            let share = (threads * GRAINS_A_THREAD * width).div_ceil(columns);
            for cell in grid(isa, rows, p.x.k, width, share) {
                grains.push((n, cell));
            }
        }
        let shared: Vec<_> = projections
            .iter_mut()
            .map(|p| {
                let rows = p.rows();
                (p.x, p.linear, Shared::new(p.out, rows, p.linear.weight.rows()), p.then)
            })
            .collect();
        self.region(grains.len(), &|grain| {
            let (n, (rows, columns)) = grains[grain].clone();
            let (x, linear, out, then) = &shared[n];
            let (x, turned) = x.part(rows.clone());
            // SAFETY: the cells of a grid are disjoint.
            let panel = unsafe { out.panel(rows, columns) };
            linear_turned(isa, x, turned, linear.weight.view(), linear.bias.as_deref(), panel, *then);
        })
    }

    /// `out = activation(gate(x)) * up(x)`, some columns at a time so that both halves meet in the cache.
    fn gate_up(&mut self, w: &BlockWeights, x: Input<'_>, out: &mut [f32]) -> Result<()> {
        /// Numbers of `up` at a time; with few rows many columns, for one long stream of weights.
        const NUMBERS: usize = 8 * 1024;
        let (isa, act) = (self.model.isa, self.model.config.activation);
        let (rows, mlp) = (x.count(), w.gate.weight.rows());
        let cells = grid(isa, rows, x.k, mlp, self.pool.threads() * GRAINS_A_THREAD);
        let out = Shared::new(out, rows, mlp);
        self.region(cells.len(), &|grain| {
            let (rows, columns) = cells[grain].clone();
            let (x, turned) = x.part(rows.clone());
            let step = (NUMBERS / rows.len()).next_multiple_of(4 * COLUMN_GRAIN);
            SCRATCH.with_borrow_mut(|scratch| {
                for start in columns.clone().step_by(step) {
                    let part = start..(start + step).min(columns.end);
                    let width = part.len();
                    scratch.resize(rows.len() * width, 0.0);
                    let up = Panel::apart(scratch, rows.len(), part.clone());
                    linear_turned(isa, x, turned, w.up.weight.view(), w.up.bias.as_deref(), up, Then::Store);
                    // SAFETY: the cells of a grid are disjoint, and each panel is gone before the next is taken.
                    let panel = unsafe { out.panel(rows.clone(), part.clone()) };
                    linear_turned(isa, x, turned, w.gate.weight.view(), w.gate.bias.as_deref(), panel, Then::Store);
                    // SAFETY: as above.
                    let mut panel = unsafe { out.panel(rows.clone(), part) };
                    for (n, up) in scratch.chunks_exact(width).enumerate() {
                        activation::gate(isa, panel.row(n), up, act);
                    }
                }
            });
        })
    }

    /// Add what the plans say after block `index`; whether they said anything.
    fn steer(&mut self, index: usize, rows: &[Member]) -> bool {
        let (isa, hidden) = (self.model.isa, self.model.config.hidden);
        let mut touched = false;
        for member in rows {
            let run = &self.runs[member.run];
            let edits: Vec<_> = run.sequence.steering.edits.iter().filter(|edit| edit.layer == index && edit.scale != 0.0).collect();
            if edits.is_empty() {
                continue;
            }
            for n in 0..member.rows {
                let position = run.past + member.first + n;
                let row = &mut self.work.x[(member.start + n) * hidden..][..hidden];
                // Of the row before any vector of this layer, so that the order of vectors does not change their sizes.
                let length = if edits.iter().any(|edit| edit.norm_match) { steer::norm(row) } else { 0.0 };
                for edit in &edits {
                    let Some(vector) = edit.vector_at(position) else { continue };
                    if edit.norm_match {
                        steer::add_matched(isa, row, vector, f64::from(edit.scale) * length / steer::norm(vector));
                    } else {
                        steer::add_scaled(isa, row, vector, edit.scale);
                    }
                    touched = true;
                }
            }
        }
        touched
    }

    fn capture(&mut self, tap: Tap, index: usize, rows: &[Member]) {
        let hidden = self.model.config.hidden;
        for member in rows {
            let plan = &self.runs[member.run].sequence.capture;
            let Ok(slot) = plan.layers.binary_search(&index) else { continue };
            if plan.tap != tap {
                continue;
            }
            let kept = match plan.rows {
                CaptureRows::Last => 1,
                CaptureRows::All => member.rows,
            };
            let output = &mut self.outputs[member.run];
            let to = slot * output.residual_shape[1] * hidden;
            let from = (member.start + member.rows - kept) * hidden;
            output.residual[to..to + kept * hidden].copy_from_slice(&self.work.x[from..from + kept * hidden]);
        }
    }

    /// Where only some rows leave the block, the others are never looked at again; but a NaN in their keys or values would show in a row
    /// that is kept, and be laid to its token. `k`, `v`: `[rows, kv_heads * head_dim]`.
    fn check_keys(&self, layer: usize, rows: &[Member], k: &[f32], v: &[f32]) -> Result<()> {
        let width = self.model.config.kv_heads * self.model.config.head_dim;
        // An infinite key may be finite again behind the softmax; anything else always reaches its own row.
        let bad = |row: usize| {
            let numbers = row * width..(row + 1) * width;
            k[numbers.clone()].iter().any(|k| k.is_nan()) || !steer::all_finite(&v[numbers])
        };
        match self.first_row(rows, bad) {
            None => Ok(()),
            Some((sequence, position, id)) => Err(Error::NonFinite { layer, position, id, sequence }),
        }
    }

    fn check_finite(&self, layer: usize, rows: &[Member]) -> Result<()> {
        match self.first_bad(&self.work.x, self.model.config.hidden, rows) {
            None => Ok(()),
            Some((sequence, position, id)) => Err(Error::NonFinite { layer, position, id, sequence }),
        }
    }

    /// Sequence, position and token of the first row of `values` `[rows, width]` that is not finite.
    fn first_bad(&self, values: &[f32], width: usize, rows: &[Member]) -> Option<(usize, usize, u32)> {
        self.first_row(rows, |row| !steer::all_finite(&values[row * width..(row + 1) * width]))
    }

    fn first_row(&self, rows: &[Member], bad: impl Fn(usize) -> bool) -> Option<(usize, usize, u32)> {
        rows.iter().find_map(|member| {
            let n = (0..member.rows).find(|n| bad(member.start + n))?;
            let run = &self.runs[member.run];
            Some((member.run, run.past + member.first + n, run.tokens[member.first + n]))
        })
    }

    /// Final norm and head for the rows whose logits were asked for.
    fn logits(&mut self, rows: &[Member]) -> Result<()> {
        let model = self.model;
        let wanted = self.members(|run| match run.sequence.logits.count(run.tokens.len()) {
            0 => None,
            count => Some(count),
        });
        if wanted.is_empty() {
            return Ok(());
        }
        let mut work = std::mem::take(self.work);
        gather(&work.x, rows, &mut work.kept, &wanted, model.config.hidden);
        work.normed.fit(work.kept.len());
        self.norm(&mut work.normed, &work.kept, &model.weights.norm)?;
        let vocab = model.config.vocab;
        let mut logits = vec![0.0; count(&wanted) * vocab];
        let head = Linear { weight: model.weights.head.clone(), bias: None };
        let normed = self.input(&work.normed, model.config.hidden, &mut work.turned[0])?;
        self.project(&mut [Projection::new(normed, &head, &mut logits, Then::Store)])?;
        *self.work = work;
        self.finish_logits(&mut logits)?;
        if let Some((sequence, position, id)) = self.first_bad(&logits, vocab, &wanted) {
            return Err(Error::NonFiniteLogits { position, id, sequence });
        }
        if let [member] = wanted[..] {
            self.outputs[member.run].logits = logits;
        } else {
            for member in &wanted {
                self.outputs[member.run].logits = logits[member.start * vocab..(member.start + member.rows) * vocab].to_vec();
            }
        }
        Ok(())
    }

    /// What some families do to logits last. In f32, in the order of transformers.
    fn finish_logits(&mut self, logits: &mut [f32]) -> Result<()> {
        let (divisor, cap, vocab) = (self.model.config.logit_divisor, self.model.config.logit_cap, self.model.config.vocab);
        if divisor == 1.0 && cap.is_none() {
            return Ok(());
        }
        let isa = self.model.isa;
        let rows = logits.len() / vocab;
        let cells: Vec<_> = (0..rows).flat_map(|row| (0..vocab).step_by(4096).map(move |start| (row, start))).collect();
        let logits = Shared::new(logits, rows, vocab);
        self.region(cells.len(), &|cell| {
            let (row, start) = cells[cell];
            // SAFETY: the cells are disjoint.
            let mut panel = unsafe { logits.panel(row..row + 1, start..(start + 4096).min(vocab)) };
            activation::divide_and_cap(isa, panel.row(0), divisor, cap);
        })
    }

    /// The last `rows(run)` tokens of each sequence that has any, packed in order.
    fn members(&self, rows: impl Fn(&Run<'_>) -> Option<usize>) -> Vec<Member> {
        let mut start = 0;
        self.runs
            .iter()
            .enumerate()
            .filter_map(|(index, run)| {
                let rows = rows(run)?;
                let member = Member { run: index, first: run.tokens.len() - rows, start, rows };
                start += rows;
                Some(member)
            })
            .collect()
    }

    fn region(&mut self, grains: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        if self.pool.run(grains, self.interrupt, work) { Ok(()) } else { Err(Error::Interrupted) }
    }

    /// Rows in disjoint ranges; a few rows are not worth waking anyone for.
    fn over_rows(&mut self, rows: usize, work: &(dyn Fn(Range<usize>) + Sync)) -> Result<()> {
        const FEW: usize = 16;
        let grain = rows.div_ceil(self.pool.threads() * 4).max(FEW);
        self.region(rows.div_ceil(grain), &|n| work(n * grain..((n + 1) * grain).min(rows)))
    }

    /// Short regions never ask; so once a block, now and then.
    fn poll(&mut self) -> Result<()> {
        if self.asked.elapsed() > Duration::from_millis(20) {
            self.asked = Instant::now();
            if (self.interrupt)() {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }
}

/// One product of a region: `out` `[rows, out]` from `x`.
struct Projection<'a> {
    x: Input<'a>,
    linear: &'a Linear,
    out: &'a mut [f32],
    then: Then,
}

impl<'a> Projection<'a> {
    fn new(x: Input<'a>, linear: &'a Linear, out: &'a mut [f32], then: Then) -> Self {
        Projection { x, linear, out, then }
    }

    fn rows(&self) -> usize {
        self.x.count()
    }
}

/// `&'a mut [Sequence<'b>]` as `&'a [Sequence<'a>]`: no cache is reached through it while the pass holds raw block pointers, only lengths.
fn shorten<'a>(sequences: &'a mut [Sequence<'_>]) -> &'a [Sequence<'a>] {
    // SAFETY: a shared reference to a shorter lifetime; `Sequence` is invariant only because of `&mut KvCache`, which a shared
    // reference to the sequence cannot write through.
    unsafe { std::mem::transmute::<&[Sequence<'_>], &'a [Sequence<'a>]>(sequences) }
}
