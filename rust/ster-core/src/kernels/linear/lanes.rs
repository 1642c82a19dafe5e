//! Many rows of `x`: one in each lane of a register, beside the same number of a row of `w` in all lanes.
//!
//! A tile of two rows by three, all that sixteen registers hold, loads five registers for six multiply-adds. Sixteen rows by six columns
//! take two loads and six numbers for twelve. The sums are still those of [`tile`](super::tile), but one lane of each after the other, and
//! they are added by the same tree: the same bits.
//!
//! For this `x` is turned: once for all products that read it, however their columns are cut.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::isa::{Isa, per_isa};
use super::super::simd::{LANES, Lanes};
use super::{Ahead, Stored, Then, put, widen_row};
use crate::tensor::{Panel, Weights};

/// Rows, at least.
const FEW: usize = 64;

/// Columns of a tile.
const COLS: usize = 6;

/// Of a row of `w` in one go, in numbers: those of a tile stay in the first-level cache while sums pass over them sixteen times.
const LONGEST: usize = 1024;

/// Between two widened rows, in numbers: their k-th ones are in different banks of that cache.
const STRIDE: usize = LONGEST + 8;

/// Columns whose finished sums are turned back into rows together: whole tiles, and whole sixteens.
const DONE: usize = 48;

/// Rows and columns whose sums wait for the next span together, so that `x` comes out of the last-level cache as often as it can.
const WAITING_ROWS: usize = 128;
const WAITING_COLUMNS: usize = DONE;

/// Lanes in the order in which the tree wants their sums: of each two that it adds, the second is complete right after the first. It is its
/// own inverse.
const ORDER: [usize; LANES] = [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15];
const LEVELS: usize = 4;

/// Whether rows are ever turned: where registers are too few for a tile that needs few loads.
#[inline(always)]
pub(super) fn turns(isa: Isa) -> bool {
    match isa.0 {
        #[cfg(target_arch = "x86_64")]
        crate::kernels::isa::Kind::Avx2 => true,
        _ => false,
    }
}

/// How many sixteens `rows` rows are, where they are best turned; else none. Fewer rows do not pay for it, nor do lanes of which more than a
/// thirty-second is idle: tiles are as fast then.
pub fn sixteens(isa: Isa, rows: usize) -> usize {
    let full = rows >= FEW && 32 * rows >= 31 * rows.next_multiple_of(LANES);
    if full && turns(isa) { rows.div_ceil(LANES) } else { 0 }
}

/// Numbers that sixteen turned rows of `k` take.
pub fn turned_size(k: usize) -> usize {
    let span = span(k);
    let rest = k - k / span * span;
    LANES * (k / span * apart(span) + if rest > 0 { apart(rest) } else { 0 })
}

/// Numbers of a row that are summed in one go; a multiple of every block of weights, where they are not all.
fn span(k: usize) -> usize {
    let spans = k.div_ceil(LONGEST);
    if spans <= 1 { k.max(1) } else { k.div_ceil(spans).next_multiple_of(256) }
}

/// Between the numbers of one lane and those of the next. An odd number of lines: else those that are written together would be in the
/// same set of the first-level cache.
fn apart(span: usize) -> usize {
    (span.div_ceil(LANES) | 1) * LANES
}

per_isa! {
    /// Up to sixteen rows `x` `[rows, k]`, as the sums want them: for each span and each lane, in their [`ORDER`], the numbers of that lane,
    /// sixteen rows beside each other. Zeros stand for rows and numbers that there are not.
    ///
    /// # Panics
    /// If `turned` is not as long as [`turned_size`] says.
    pub fn turn(x: &[f32], k: usize, turned: &mut [f32]) = turn_rows
}

#[inline(always)]
fn turn_rows<V: Lanes>(x: &[f32], k: usize, turned: &mut [f32]) {
    assert!(turned.len() == turned_size(k) && x.len() <= LANES * k);
    let rows = x.len() / k.max(1);
    let mut turned = turned;
    for from in (0..k).step_by(span(k)) {
        let end = (from + span(k)).min(k);
        let apart = apart(end - from);
        for (step, from) in (from..end).step_by(LANES).enumerate() {
            if rows == LANES && from + LANES <= end {
                // SAFETY: sixteen rows of sixteen numbers each are there, and so are the lines they go to. The instruction set is on.
                unsafe { V::transpose(x.as_ptr().add(from), k, turned.as_mut_ptr().add(step * LANES), apart, &ORDER) };
                continue;
            }
            for lane in 0..LANES {
                for row in 0..LANES {
                    let there = row < rows && from + lane < end;
                    turned[ORDER[lane] * apart + step * LANES + row] = if there { x[row * k + from + lane] } else { 0.0 };
                }
            }
        }
        turned = &mut turned[LANES * apart..];
    }
}

thread_local! {
    /// Allocated once, for the allocator takes so much from the system each time, and gives it back.
    static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// [`linear`](super::linear) of an `x` that is all turned.
#[inline(always)]
pub(super) fn by_lanes<V: Lanes, S: Stored>(turned: &[f32], w: Weights<'_>, bias: Option<&[f32]>, out: &mut Panel<'_>, then: Then) {
    let (rows, k, size) = (out.rows, w.cols, turned_size(w.cols));
    assert_eq!(turned.len(), rows.div_ceil(LANES) * size);
    let whole = span(k) >= k;
    let block = if whole { rows } else { rows.min(WAITING_ROWS) }.next_multiple_of(LANES);
    let group = if whole { out.columns.len() } else { WAITING_COLUMNS }.max(1);
    let (done_size, sums_size) = (DONE * block, if whole { 0 } else { group * block * LANES });
    let mut scratch = SCRATCH.take();
    let need = COLS * STRIDE + done_size + sums_size + LANES;
    if scratch.len() < need {
        scratch.resize(need, 0.0);
    }
    let aligned = scratch.as_ptr().align_offset(4 * LANES);
    let (wide, rest) = scratch[aligned..].split_at_mut(COLS * STRIDE);
    let (done, sums) = rest.split_at_mut(done_size);
    for start in (0..rows).step_by(block) {
        let rows = start..(start + block).min(rows);
        let turned = &turned[start / LANES * size..rows.end.div_ceil(LANES) * size];
        for first in out.columns.clone().step_by(group) {
            let columns = first..(first + group).min(out.columns.end);
            for from in (0..k.max(1)).step_by(span(k)) {
                let span = from..(from + span(k)).min(k);
                let last = span.end == k;
                let mut work = Work { w, span, turned, size, wide, sums, done };
                for first in columns.clone().step_by(DONE) {
                    let some = first..(first + DONE).min(columns.end);
                    let mut column = some.start;
                    while column + COLS <= some.end {
                        work.columns::<V, S, COLS>(column, column - columns.start, column - some.start);
                        column += COLS;
                    }
                    while column < some.end {
                        work.columns::<V, S, 1>(column, column - columns.start, column - some.start);
                        column += 1;
                    }
                    if last {
                        put_back::<V>(work.done, bias, out, then, rows.clone(), some);
                    }
                }
            }
        }
    }
    SCRATCH.set(scratch);
}

/// Finished sums of `columns`, which lie sixteen rows beside each other, for `rows` of `out`.
#[inline(always)]
fn put_back<V: Lanes>(done: &[f32], bias: Option<&[f32]>, out: &mut Panel<'_>, then: Then, rows: Range<usize>, columns: Range<usize>) {
    const AS_THEY_ARE: [usize; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    let mut turned = [0f32; LANES * LANES];
    for (first, done) in rows.clone().step_by(LANES).zip(done.chunks_exact(DONE * LANES)) {
        let mut column = columns.start;
        while column + LANES <= columns.end {
            // SAFETY: sixteen columns of sixteen sums are there; what is written is inside the panel, which this thread alone writes.
            unsafe {
                V::transpose(done.as_ptr().add((column - columns.start) * LANES), LANES, turned.as_mut_ptr(), LANES, &AS_THEY_ARE);
                for row in first..(first + LANES).min(rows.end) {
                    let mut value = V::load(turned.as_ptr().add((row - first) * LANES));
                    if let Some(bias) = bias {
                        value = value.add(V::load(bias.as_ptr().add(column)));
                    }
                    let to = out.at(row, column);
                    match then {
                        Then::Store => value.store(to),
                        Then::Add => V::load(to).add(value).store(to),
                    }
                }
            }
            column += LANES;
        }
        for column in column..columns.end {
            for row in first..(first + LANES).min(rows.end) {
                put(out, bias, then, row, column, [[done[(column - columns.start) * LANES + row - first]]]);
            }
        }
    }
}

struct Work<'a> {
    w: Weights<'a>,
    span: Range<usize>,
    /// Sixteens, of `size` numbers each.
    turned: &'a [f32],
    size: usize,
    wide: &'a mut [f32],
    sums: &'a mut [f32],
    done: &'a mut [f32],
}

impl Work<'_> {
    /// `COLS` columns from `column` on. waiting, done: which they are of those whose sums wait for the next span, and are put back,
    /// together.
    #[inline(always)]
    fn columns<V: Lanes, S: Stored, const COLS: usize>(&mut self, column: usize, waiting: usize, done: usize) {
        let steps = self.span.len().div_ceil(LANES);
        for (n, wide) in self.wide.chunks_exact_mut(STRIDE).take(COLS).enumerate() {
            widen_row::<V, S>(self.w, column + n, self.span.clone(), &mut wide[..self.span.len()]);
            wide[self.span.len()..steps * LANES].fill(0.0);
        }
        let ends = (self.span.start == 0, self.span.end == self.w.cols);
        let before = self.span.start / span(self.w.cols) * LANES * apart(span(self.w.cols));
        let apart = apart(self.span.len());
        let sixteens = self.turned.len() / self.size;
        let mut ahead = Fetch::new(self.w, column + COLS, COLS, &self.span, sixteens);
        for (sixteen, turned) in self.turned.chunks_exact(self.size).enumerate() {
            // SAFETY: the instruction set is on, as `Lanes` asks.
            unsafe { ahead.fetch::<V>() };
            let whole = &mut self.done[(sixteen * DONE + done) * LANES..][..COLS * LANES];
            let saved = match ends {
                (true, true) => &mut [],
                _ => &mut self.sums[(waiting * sixteens + sixteen * COLS) * LANES * LANES..][..COLS * LANES * LANES],
            };
            sum_sixteen(V::ISA, &turned[before..][..LANES * apart], self.wide, steps, ends, saved, whole);
        }
    }
}

per_isa! {
    /// One sixteen of rows by the `whole.len() / 16` rows that are wide. ends: whether the span is the first of the row, and the last.
    /// saved: sums from one span to the next, unless it is both.
    fn sum_sixteen(x: &[f32], wide: &[f32], steps: usize, ends: (bool, bool), saved: &mut [f32], whole: &mut [f32]) = sum_by_ends
}

#[inline(always)]
fn sum_by_ends<V: Lanes>(x: &[f32], wide: &[f32], steps: usize, ends: (bool, bool), saved: &mut [f32], whole: &mut [f32]) {
    match (whole.len() / LANES, ends) {
        (COLS, (true, true)) => sum_lanes::<V, COLS, true, true>(x, wide, steps, saved, whole),
        (COLS, (true, false)) => sum_lanes::<V, COLS, true, false>(x, wide, steps, saved, whole),
        (COLS, (false, false)) => sum_lanes::<V, COLS, false, false>(x, wide, steps, saved, whole),
        (COLS, (false, true)) => sum_lanes::<V, COLS, false, true>(x, wide, steps, saved, whole),
        (_, (true, true)) => sum_lanes::<V, 1, true, true>(x, wide, steps, saved, whole),
        (_, (true, false)) => sum_lanes::<V, 1, true, false>(x, wide, steps, saved, whole),
        (_, (false, false)) => sum_lanes::<V, 1, false, false>(x, wide, steps, saved, whole),
        (_, (false, true)) => sum_lanes::<V, 1, false, true>(x, wide, steps, saved, whole),
    }
}

#[inline(always)]
fn sum_lanes<V: Lanes, const COLS: usize, const FIRST: bool, const LAST: bool>(
    x: &[f32],
    wide: &[f32],
    steps: usize,
    saved: &mut [f32],
    whole: &mut [f32],
) {
    let apart = x.len() / LANES;
    assert!(steps * LANES <= apart && steps * LANES <= LONGEST && wide.len() >= COLS * STRIDE && whole.len() == COLS * LANES);
    assert!(FIRST && LAST || saved.len() == LANES * COLS * LANES);
    let mut levels = [[MaybeUninit::<V>::uninit(); COLS]; LEVELS];
    for (n, lane) in ORDER.into_iter().enumerate() {
        // SAFETY: checked above: `x` has sixteen lanes of `steps` lines, `wide` COLS rows of as many, `saved` sixteen sums of each row and
        // column where the span is not all of the row. A level is read after it was written. The instruction set is on.
        unsafe {
            let saved = saved.as_mut_ptr().wrapping_add(n * COLS * LANES);
            let mut acc = [V::zero(); COLS];
            if !FIRST {
                acc = std::array::from_fn(|j| V::load(saved.add(j * LANES)));
            }
            multiply::<V, COLS>(&mut acc, x.as_ptr().add(n * apart), wide.as_ptr().add(lane), steps);
            if !LAST {
                for (j, acc) in acc.into_iter().enumerate() {
                    acc.store(saved.add(j * LANES));
                }
                continue;
            }
            // As the bits of a counter: what is complete on one level is added to what waits there.
            let complete = (n + 1).trailing_zeros() as usize;
            for level in &levels[..complete] {
                for (acc, waits) in acc.iter_mut().zip(level) {
                    *acc = waits.assume_init_read().add(*acc);
                }
            }
            if complete < LEVELS {
                for (acc, waits) in acc.into_iter().zip(&mut levels[complete]) {
                    waits.write(acc);
                }
            } else {
                for (j, acc) in acc.into_iter().enumerate() {
                    acc.store(whole.as_mut_ptr().add(j * LANES));
                }
            }
        }
    }
}

/// `acc[j] += x[s] * w[j, 16 s]`, row by row, for `steps` of `s`: four at a time, for then the end of a loop of 36 is foreseen.
///
/// # Safety
/// As [`Lanes`]: `steps` times sixteen numbers of `x` are readable, and as many of each row of `w` less those before its first.
#[inline(always)]
unsafe fn multiply<V: Lanes, const COLS: usize>(acc: &mut [V; COLS], mut x: *const f32, mut w: *const f32, steps: usize) {
    // SAFETY: the caller's.
    unsafe {
        for _ in 0..steps / 4 {
            step::<V, COLS>(acc, x, w);
            step::<V, COLS>(acc, x.add(LANES), w.add(LANES));
            step::<V, COLS>(acc, x.add(2 * LANES), w.add(2 * LANES));
            step::<V, COLS>(acc, x.add(3 * LANES), w.add(3 * LANES));
            (x, w) = (x.add(4 * LANES), w.add(4 * LANES));
        }
        for _ in 0..steps % 4 {
            step::<V, COLS>(acc, x, w);
            (x, w) = (x.add(LANES), w.add(LANES));
        }
    }
}

/// # Safety
/// As [`multiply`], of one step.
#[inline(always)]
unsafe fn step<V: Lanes, const COLS: usize>(acc: &mut [V; COLS], x: *const f32, w: *const f32) {
    // SAFETY: the caller's.
    unsafe {
        let row = V::load(x);
        for (j, acc) in acc.iter_mut().enumerate() {
            *acc = row.fma(V::splat(*w.add(j * STRIDE)), *acc);
        }
    }
}

/// A span of the rows of `w` that come next, fetched line by line beside the arithmetic: rows lie far apart, and hardware foresees little of
/// them.
struct Fetch {
    row: *const u8,
    row_bytes: usize,
    lines: usize,
    line: usize,
    rows: usize,
    share: usize,
}

impl Fetch {
    /// `count` rows from `row` on, as far as there are any, in `turns` turns.
    #[inline(always)]
    fn new(w: Weights<'_>, row: usize, count: usize, span: &Range<usize>, turns: usize) -> Self {
        let (start, end) = (row.min(w.rows), (row + count).min(w.rows));
        let row_bytes = w.row_bytes();
        let (from, bytes) = (span.start * row_bytes / w.cols.max(1), span.len() * row_bytes / w.cols.max(1));
        let lines = bytes.div_ceil(Ahead::LINE);
        let share = ((end - start) * lines).div_ceil(turns);
        Fetch { row: w.row_ptr(start).wrapping_add(from), row_bytes, lines, line: 0, rows: end - start, share }
    }

    /// # Safety
    /// As [`Lanes`].
    #[inline(always)]
    unsafe fn fetch<V: Lanes>(&mut self) {
        for _ in 0..self.share {
            if self.rows == 0 {
                return;
            }
            // SAFETY: the caller's; a prefetch reads nothing.
            unsafe { V::prefetch(self.row.wrapping_add(self.line * Ahead::LINE)) };
            self.line += 1;
            if self.line == self.lines {
                self.line = 0;
                self.rows -= 1;
                self.row = self.row.wrapping_add(self.row_bytes);
            }
        }
    }
}
