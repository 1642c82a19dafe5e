//! Causal attention of some query rows over one KV head of one sequence, over all keys before them or the last few.
//!
//! Keys and values lie in blocks of [`BLOCK`] positions anchored at position 0. A row's result is defined by its own query and the keys
//! that it sees alone: scores are dot products in sixteen lanes; the weighted sum of values is one FMA chain a block and column, in rising
//! position, and block sums are added in order. How many rows share a tile, and how a sequence was cut into passes, cannot show.
//! Twin: [`reference::attention`](super::reference::attention).

use super::isa::per_isa;
use super::linear::{F32, Then, blocks};
use super::math::{exp, tanh};
use super::simd::{LANES, Lanes};
use crate::tensor::{Panel, Weights};

/// Positions in a block of keys and values.
pub const BLOCK: usize = 64;

/// One KV head of one sequence: block `b` holds the keys of positions `b * BLOCK ..` `[BLOCK, width]`, then their values, the same shape.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    /// Where each block begins, from one on before which no row sees anything.
    pub blocks: &'a [*const f32],
    /// Where this head's keys begin in a block, in numbers.
    pub offset: usize,
    /// head_dim rounded up to sixteen lanes; the padding is zero.
    pub width: usize,
}

impl Head<'_> {
    fn keys(&self, block: usize) -> &[f32] {
        // SAFETY: the cache lays `2 * BLOCK * width` numbers at `offset` of every block, and lends them for `'a`.
        unsafe { std::slice::from_raw_parts(self.blocks[block].add(self.offset), BLOCK * self.width) }
    }

    fn values(&self, block: usize) -> &[f32] {
        // SAFETY: as above; the values follow the keys.
        unsafe { std::slice::from_raw_parts(self.blocks[block].add(self.offset + BLOCK * self.width), BLOCK * self.width) }
    }
}

/// The rows of one call. Row `r` is query head `r % group` of the group at token `r / group`, and sees the last `window` of the first
/// `first + r / group` positions of the blocks.
#[derive(Clone, Copy)]
pub struct Rows {
    pub count: usize,
    pub group: usize,
    pub first: usize,
    /// `usize::MAX`: all.
    pub window: usize,
}

impl Rows {
    fn sees(&self, row: usize) -> usize {
        self.first + row / self.group
    }

    /// The first position that `row` sees.
    fn from(&self, row: usize) -> usize {
        self.sees(row).saturating_sub(self.window)
    }
}

/// What becomes of the product of a query and a key.
#[derive(Clone, Copy)]
pub struct Score {
    pub scale: f32,
    /// `cap tanh(scale q . k / cap)` in place of `scale q . k`.
    pub cap: Option<f32>,
}

per_isa! {
    /// `out[r] = sum_j softmax_j(score(q[r] . k[j])) v[j]` over the positions that row `r` sees.
    /// - `q`, `out`: `[rows, width]`, padding zero; `scores`: room for `[rows, positions of the last row]`
    pub fn attend(q: &[f32], rows: Rows, head: Head<'_>, score: Score, scores: &mut [f32], out: &mut [f32]) = generic
}

#[inline(always)]
fn generic<V: Lanes>(q: &[f32], rows: Rows, head: Head<'_>, score: Score, scores: &mut [f32], out: &mut [f32]) {
    let (count, width) = (rows.count, head.width);
    let longest = rows.sees(count - 1);
    assert!(q.len() == count * width && out.len() == count * width && width.is_multiple_of(LANES));
    assert!(longest <= head.blocks.len() * BLOCK && scores.len() >= count * longest);

    for block in 0..longest.div_ceil(BLOCK) {
        let start = block * BLOCK;
        let keys = BLOCK.min(longest - start);
        let w = Weights::of_f32(&head.keys(block)[..keys * width], keys, width);
        let panel = Panel::strided(&mut scores[start..], count, longest, keys);
        match V::TILE {
            (4, _) => blocks::<V, F32, 4, 4>(q, w, None, panel, Then::Store),
            (3, 4) => blocks::<V, F32, 3, 4>(q, w, None, panel, Then::Store),
            _ => blocks::<V, F32, 2, 2>(q, w, None, panel, Then::Store),
        }
    }
    out.fill(0.0);
    let mut row = 0;
    while row < count {
        // As many rows as the register tile holds; what is left at the end goes in smaller tiles.
        let taken = match (V::MIX.0, count - row) {
            (4, 4..) => 4,
            (3.., 3..) => 3,
            (2.., 2..) => 2,
            _ => 1,
        };
        let mut sums = [0f64; 4];
        for (r, sum) in sums.iter_mut().enumerate().take(taken) {
            let row = row + r;
            let (from, scores) = (rows.from(row), &mut scores[row * longest..][..rows.sees(row)]);
            // What stands before the window has weight 0: a chain of sums that begins with zeros has the bits of one without them.
            scores[..from].fill(0.0);
            *sum = softmax(&mut scores[from..], score);
        }
        let (scores, mixed) = (&scores[row * longest..], &mut out[row * width..(row + taken) * width]);
        match taken {
            4 => mix_rows::<V, 4>(scores, longest, rows, row, head, mixed),
            3 => mix_rows::<V, 3>(scores, longest, rows, row, head, mixed),
            2 => mix_rows::<V, 2>(scores, longest, rows, row, head, mixed),
            _ => mix_rows::<V, 1>(scores, longest, rows, row, head, mixed),
        }
        for (out, sum) in mixed.chunks_exact_mut(width).zip(sums) {
            let sum = sum as f32;
            for out in out {
                *out /= sum;
            }
        }
        row += taken;
    }
}

/// `s[j] = exp(score(s[j]) - max)`; their sum, in f64.
#[inline(always)]
fn softmax(s: &mut [f32], score: Score) -> f64 {
    let mut scale = score.scale;
    if let Some(cap) = score.cap {
        for s in s.iter_mut() {
            *s = cap * tanh(scale * *s / cap);
        }
        scale = 1.0;
    }
    let mut highest = [f32::NEG_INFINITY; LANES];
    let mut chunks = s.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (highest, s) in highest.iter_mut().zip(chunk) {
            *s *= scale;
            *highest = if *s > *highest { *s } else { *highest };
        }
    }
    for (highest, s) in highest.iter_mut().zip(chunks.into_remainder()) {
        *s *= scale;
        *highest = if *s > *highest { *s } else { *highest };
    }
    // The largest is the same in any order; a NaN is passed over here and shows in its own exponential.
    let highest = highest.into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a });

    for s in s.iter_mut() {
        *s = exp(*s - highest);
    }
    let mut lanes = [0f64; LANES];
    let chunks = s.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &p) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(p);
        }
    }
    for (lane, &p) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(p);
    }
    lanes.into_iter().sum()
}

/// `out[r] += sum_j p[r, j] v[j]`, block by block, for `R` rows from `row` on. `p`: `[R, longest]`, `out`: `[R, width]`.
#[inline(always)]
fn mix_rows<V: Lanes, const R: usize>(p: &[f32], longest: usize, rows: Rows, row: usize, head: Head<'_>, out: &mut [f32]) {
    let last = rows.sees(row + R - 1);
    for block in 0..last.div_ceil(BLOCK) {
        let start = block * BLOCK;
        let values = head.values(block);
        let mut column = 0;
        while column < head.width {
            let taken = match (V::MIX.1, (head.width - column) / LANES) {
                (4, 4..) => mix::<V, R, 4>(p, longest, rows, row, start, values, head.width, column, out),
                (2.., 2..) => mix::<V, R, 2>(p, longest, rows, row, start, values, head.width, column, out),
                _ => mix::<V, R, 1>(p, longest, rows, row, start, values, head.width, column, out),
            };
            column += taken * LANES;
        }
    }
}

/// One block, `C` groups of sixteen columns from `column` on; gives `C`.
#[inline(always)]
fn mix<V: Lanes, const R: usize, const C: usize>(
    p: &[f32],
    longest: usize,
    rows: Rows,
    row: usize,
    start: usize,
    values: &[f32],
    width: usize,
    column: usize,
    out: &mut [f32],
) -> usize {
    let seen = |r: usize| rows.sees(row + r).saturating_sub(start).min(BLOCK);
    let shared = seen(0); // later rows see more
    assert!(p.len() >= (R - 1) * longest + start + seen(R - 1) && out.len() == R * width && column + C * LANES <= width);
    // SAFETY: the reads of `p` and `values` are bounded by the assertion and by BLOCK, which `values` holds; the instruction set is on.
    unsafe {
        let p = p.as_ptr().add(start);
        let values = values.as_ptr().add(column);
        let mut acc = [[V::zero(); C]; R];
        for j in 0..shared {
            let value: [V; C] = std::array::from_fn(|c| V::load(values.add(j * width + c * LANES)));
            for (r, acc) in acc.iter_mut().enumerate() {
                let weight = V::splat(*p.add(r * longest + j));
                for (acc, value) in acc.iter_mut().zip(value) {
                    *acc = weight.fma(value, *acc);
                }
            }
        }
        for (r, acc) in acc.iter_mut().enumerate() {
            for j in shared..seen(r) {
                let weight = V::splat(*p.add(r * longest + j));
                for (c, acc) in acc.iter_mut().enumerate() {
                    *acc = weight.fma(V::load(values.add(j * width + c * LANES)), *acc);
                }
            }
            for (c, acc) in acc.iter().enumerate() {
                let to = out.as_mut_ptr().add(r * width + column + c * LANES);
                V::load(to).add(*acc).store(to);
            }
        }
    }
    C
}
