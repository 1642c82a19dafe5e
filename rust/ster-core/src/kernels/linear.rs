//! Matrix product with weights where they lie: `out[m, n] = sum_k x[m, k] * w[n, k]`.
//!
//! A register tile sums several rows of `x` against several rows of `w` at once, walking `k` upwards, sixteen lanes a sum. The order of
//! operations of one output is the same in every tile, so a row's result does not depend on the rows beside it. Twin:
//! [`reference::linear`](super::reference::linear).
//!
//! Weights in [`blocks`](super::blocks) give the bits of the same numbers in f32.

mod lanes;
mod spans;

use std::ops::Range;

use self::lanes::{by_lanes, turns};
pub use self::lanes::{sixteens, turn, turned_size};
use self::spans::by_spans;
use super::blocks::{sum_row, widen_blocks};
use super::isa::{Isa, per_isa};
use super::simd::{LANES, Lanes};
use crate::tensor::{Dtype, Panel, Weights};

/// Rows of `x` that one thread should take at once, at most: as many as the cache holds a span of; the weights pass once for all of them.
pub fn rows_at_once(isa: Isa, k: usize) -> usize {
    let bytes = if turns(isa) { TURNED_BYTES } else { X_BLOCK_BYTES };
    (bytes / (4 * k.clamp(1, SPAN))).max(LANES)
}

/// Columns are handed to threads in multiples of this: every tile width divides it.
pub const COLUMN_GRAIN: usize = 12;

/// About so many numbers of a row of `x` are used again and again before the next ones are, where rows are longer.
const SPAN: usize = 1024;

/// Rows of `x` are taken in blocks of about this many bytes, so that a block stays in the second-level cache while all of `w` passes.
const X_BLOCK_BYTES: usize = 384 * 1024;

/// As [`X_BLOCK_BYTES`], where rows are turned: they pass in one stream, and the last-level cache gives it as fast.
const TURNED_BYTES: usize = 1024 * 1024;

/// Rows of `w` that are widened first, all of them beside each other, lie in so much of the first-level cache; longer ones are widened and
/// multiplied in [`spans`].
///
/// AVX2 on Zen 3, one core, 128 rows of `x`: bf16 of 1,536 numbers 75 GFLOP/s whole, 69 in spans.
const WIDE_BYTES: usize = 20 * 1024;

/// What happens to a finished sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// `out = sum (+ bias)`
    Store,
    /// `out = out + (sum (+ bias))`: the residual addition.
    Add,
}

/// `out[m, n] = sum_k x[m, k] * w[n, k] + bias[n]` for the columns `n` of the panel.
/// - `x`: `[rows, k]`, `w`: `[n, k]`, `bias`: `[n]`
///
/// # Panics
/// If the sizes do not fit.
pub fn linear(isa: Isa, x: &[f32], w: Weights<'_>, bias: Option<&[f32]>, out: Panel<'_>, then: Then) {
    let size = turned_size(w.cols);
    let mut turned = vec![0.0; sixteens(isa, out.rows) * size];
    for (x, turned) in x.chunks((LANES * w.cols).max(1)).zip(turned.chunks_exact_mut(size.max(1))) {
        turn(isa, x, w.cols, turned);
    }
    linear_turned(isa, x, &turned, w, bias, out, then);
}

per_isa! {
    /// [`linear`] of an `x` that has been [turned](turn) already, all sixteens of it, or not at all: the same bits.
    ///
    /// # Panics
    /// As [`linear`]; if only some of it is turned, or the instruction set turns nothing.
    pub fn linear_turned(x: &[f32], turned: &[f32], w: Weights<'_>, bias: Option<&[f32]>, out: Panel<'_>, then: Then) = by_dtype
}

#[inline(always)]
fn by_dtype<V: Lanes>(x: &[f32], turned: &[f32], w: Weights<'_>, bias: Option<&[f32]>, out: Panel<'_>, then: Then) {
    // Checked here once: the tiles below use raw pointers.
    assert_eq!(x.len(), out.rows * w.cols);
    assert!(out.columns.end <= w.rows);
    assert!(bias.is_none_or(|bias| bias.len() == w.rows));
    assert!(turned.is_empty() || turns(V::ISA) && turned.len() == out.rows.div_ceil(LANES) * turned_size(w.cols));
    match w.dtype {
        Dtype::F32 => by_rows::<V, F32>(x, turned, w, bias, out, then),
        Dtype::F16 => by_rows::<V, F16>(x, turned, w, bias, out, then),
        Dtype::BF16 => by_rows::<V, BF16>(x, turned, w, bias, out, then),
        _ if out.rows == 1 => sum_row(V::ISA, x, w, bias, out, then),
        // Widened first, so that tiles read f32.
        _ => by_rows::<V, F32>(x, turned, w, bias, out, then),
    }
}

#[inline(always)]
fn by_rows<V: Lanes, S: Stored>(x: &[f32], turned: &[f32], w: Weights<'_>, bias: Option<&[f32]>, mut out: Panel<'_>, then: Then) {
    if turns(V::ISA) && !turned.is_empty() {
        by_lanes::<V, S>(turned, w, bias, &mut out, then);
    } else {
        by_tile::<V, S>(x, w, bias, out, then);
    }
}

/// The tile as a constant: one arm is left once `V` is known.
#[inline(always)]
fn by_tile<V: Lanes, S: Stored>(x: &[f32], w: Weights<'_>, bias: Option<&[f32]>, out: Panel<'_>, then: Then) {
    match V::TILE {
        (4, 6) => blocks::<V, S, 4, 6>(x, w, bias, out, then),
        (3, 4) => blocks::<V, S, 3, 4>(x, w, bias, out, then),
        (3, 2) => blocks::<V, S, 3, 2>(x, w, bias, out, then),
        (2, 3) => blocks::<V, S, 2, 3>(x, w, bias, out, then),
        (2, 2) => blocks::<V, S, 2, 2>(x, w, bias, out, then),
        _ => unreachable!("a tile without its arm"),
    }
}

#[inline(always)]
pub(super) fn blocks<V: Lanes, S: Stored, const ROWS: usize, const COLS: usize>(
    x: &[f32],
    w: Weights<'_>,
    bias: Option<&[f32]>,
    mut out: Panel<'_>,
    then: Then,
) {
    let rows = out.rows;
    if rows == 1 {
        one_row::<V, S>(x, w, bias, &mut out, then);
        return;
    }
    let widens = w.dtype.block().0 > 1 || V::WIDEN_FIRST && S::BYTES < 4 && rows >= 16;
    if widens && 4 * COLS * w.cols > WIDE_BYTES {
        by_spans::<V, S, ROWS, COLS>(x, w, bias, &mut out, then);
        return;
    }
    let mut wide = vec![0.0; if widens { COLS * w.cols + LANES } else { 0 }];
    let block = (X_BLOCK_BYTES / (4 * w.cols.max(1)) / ROWS * ROWS).max(ROWS);
    let mut start = 0;
    while start < rows {
        let end = (start + block).min(rows);
        let mut column = out.columns.start;
        while column + COLS <= out.columns.end {
            rows_by_columns::<V, S, ROWS, COLS>(x, w, bias, &mut out, then, start..end, column, &mut wide);
            column += COLS;
        }
        while column < out.columns.end {
            rows_by_columns::<V, S, ROWS, 1>(x, w, bias, &mut out, then, start..end, column, &mut wide);
            column += 1;
        }
        start = end;
    }
}

/// Bound by memory, which a mapped file gives at 22 GB/s a core on Zen 4 and huge pages at 31 (there are none for files).
///
/// Short rows: one after the other is the stream that hardware foresees best (26 to 28 GB/s; tiles of 2 to 12 rows 12 to 21, prefetching
/// 2 to 8 KiB ahead 22 to 24). In long rows the chain of one sum leaves memory idle (k = 8192: 13 GB/s), so four are summed at once, with
/// the tile after the next fetched beside them (18 to 21; a model of 1B decodes 1.09 times as fast).
#[inline(always)]
fn one_row<V: Lanes, S: Stored>(x: &[f32], w: Weights<'_>, bias: Option<&[f32]>, out: &mut Panel<'_>, then: Then) {
    const LONG: usize = 2048;
    const COLS: usize = 4;
    let mut column = out.columns.start;
    while w.cols >= LONG && column + COLS <= out.columns.end {
        let mut ahead = Ahead::new(w, column + 2 * COLS, COLS, 1);
        tile::<V, S, 1, COLS, 2>(x, &Part::whole(w, column), bias, out, then, 0, column, &mut ahead);
        column += COLS;
    }
    let mut nothing = Ahead::new(w, 0, 0, 1);
    while column < out.columns.end {
        tile::<V, S, 1, 1, 0>(x, &Part::whole(w, column), bias, out, then, 0, column, &mut nothing);
        column += 1;
    }
}

/// `COLS` columns from `column` on, for the rows of a block. wide: room for rows of `w` that are widened first, empty where none are.
#[inline(always)]
fn rows_by_columns<V: Lanes, S: Stored, const ROWS: usize, const COLS: usize>(
    x: &[f32],
    w: Weights<'_>,
    bias: Option<&[f32]>,
    out: &mut Panel<'_>,
    then: Then,
    rows: Range<usize>,
    column: usize,
    wide: &mut [f32],
) {
    let mut ahead = Ahead::new(w, column + 2 * COLS, COLS, rows.len().div_ceil(ROWS));
    if !wide.is_empty() {
        // At a cache line: 1.05 x on Zen 3, which loads a register across two lines half as fast.
        let aligned = wide.as_ptr().align_offset(4 * LANES);
        let wide = &mut wide[aligned..][..COLS * w.cols];
        widen_rows::<V, S>(w, column..column + COLS, 0..w.cols, wide);
        let part = Part { w: wide.as_ptr().cast(), ..Part::whole(w, column) };
        tiles::<V, F32, ROWS, COLS, 1>(x, part, bias, out, then, rows, column, &mut ahead);
    } else if ahead.hurry {
        tiles::<V, S, ROWS, COLS, 3>(x, Part::whole(w, column), bias, out, then, rows, column, &mut ahead);
    } else {
        tiles::<V, S, ROWS, COLS, 1>(x, Part::whole(w, column), bias, out, then, rows, column, &mut ahead);
    }
}

/// What a tile reads of rows of `w`: numbers `span` of `k`.
#[derive(Clone)]
struct Part {
    /// Where the first row's begin.
    w: *const u8,
    k: usize,
    span: Range<usize>,
    /// Where sums stand between one span and the next.
    sums: *mut f32,
}

impl Part {
    /// All numbers of the rows from `row` on.
    #[inline(always)]
    fn whole(w: Weights<'_>, row: usize) -> Part {
        Part { w: w.row_ptr(row), k: w.cols, span: 0..w.cols, sums: std::ptr::null_mut() }
    }
}

#[inline(always)]
fn tiles<V: Lanes, S: Stored, const ROWS: usize, const COLS: usize, const LINES: usize>(
    x: &[f32],
    mut part: Part,
    bias: Option<&[f32]>,
    out: &mut Panel<'_>,
    then: Then,
    rows: Range<usize>,
    column: usize,
    ahead: &mut Ahead,
) {
    let mut row = rows.start;
    while row + ROWS <= rows.end {
        tile::<V, S, ROWS, COLS, LINES>(x, &part, bias, out, then, row, column, ahead);
        part.sums = part.sums.wrapping_add(ROWS * COLS * LANES);
        row += ROWS;
    }
    // What is left is fewer than ROWS rows.
    match rows.end - row {
        3 if ROWS > 3 => tile::<V, S, 3, COLS, LINES>(x, &part, bias, out, then, row, column, ahead),
        2 if ROWS > 2 => tile::<V, S, 2, COLS, LINES>(x, &part, bias, out, then, row, column, ahead),
        1 => tile::<V, S, 1, COLS, LINES>(x, &part, bias, out, then, row, column, ahead),
        _ => {}
    }
}

/// `ROWS` rows of `x` from `row` on by `COLS` rows of `w`, which belong to the columns from `column` on.
#[inline(always)]
fn tile<V: Lanes, S: Stored, const ROWS: usize, const COLS: usize, const LINES: usize>(
    x: &[f32],
    part: &Part,
    bias: Option<&[f32]>,
    out: &mut Panel<'_>,
    then: Then,
    row: usize,
    column: usize,
    ahead: &mut Ahead,
) {
    let Part { w, k, ref span, sums: saved } = *part;
    let stride = span.len() * S::BYTES;
    let mut sums = [[0f32; COLS]; ROWS];
    // SAFETY: `by_dtype` checked that x holds rows `row..row + ROWS` of k numbers and w rows `column..column + COLS`; every read stays
    // inside `span` in its row. Where this is not all of the row, there is room for the sums. The instruction set is on, as `Lanes` asks.
    unsafe {
        let x = x.as_ptr().add(row * k + span.start);
        let saved = |i: usize, j: usize| saved.add((i * COLS + j) * LANES);
        let mut acc = [[V::zero(); COLS]; ROWS];
        if span.start > 0 {
            acc = std::array::from_fn(|i| std::array::from_fn(|j| V::load(saved(i, j))));
        }
        let whole = span.len() / LANES * LANES;
        V::multiply::<S, ROWS, COLS, LINES>(&mut acc, x, k, w, stride, whole, ahead);
        if span.end < k {
            for (i, acc) in acc.iter().enumerate() {
                for (j, acc) in acc.iter().enumerate() {
                    acc.store(saved(i, j));
                }
            }
            return;
        }
        if whole < span.len() {
            let rest = span.len() - whole;
            let mut columns = [V::zero(); COLS];
            for (j, column) in columns.iter_mut().enumerate() {
                *column = S::load_part::<V>(w.add(j * stride + whole * S::BYTES), rest);
            }
            for (i, acc) in acc.iter_mut().enumerate() {
                let row = F32::load_part::<V>(x.add(i * k + whole).cast(), rest);
                for (acc, column) in acc.iter_mut().zip(columns) {
                    *acc = row.fma(column, *acc);
                }
            }
        }
        let mut first = 0;
        while first < ROWS * COLS {
            let four = std::array::from_fn(|n| {
                let index = first + n;
                if index < ROWS * COLS { acc[index / COLS][index % COLS] } else { V::zero() }
            });
            for (n, sum) in V::reduce4(four).into_iter().enumerate() {
                let index = first + n;
                if index < ROWS * COLS {
                    sums[index / COLS][index % COLS] = sum;
                }
            }
            first += 4;
        }
    }
    put(out, bias, then, row, column, sums);
}

/// Finished sums, for the rows from `row` and the columns from `column` on.
#[inline(always)]
pub(super) fn put<const ROWS: usize, const COLS: usize>(
    out: &mut Panel<'_>,
    bias: Option<&[f32]>,
    then: Then,
    row: usize,
    column: usize,
    sums: [[f32; COLS]; ROWS],
) {
    for (i, sums) in sums.iter().enumerate() {
        for (j, &sum) in sums.iter().enumerate() {
            let value = match bias {
                Some(bias) => sum + bias[column + j],
                None => sum,
            };
            let to = out.at(row + i, column + j);
            // SAFETY: inside the panel, which this thread alone writes.
            unsafe {
                *to = match then {
                    Then::Store => value,
                    Then::Add => *to + value,
                };
            }
        }
    }
}

/// Numbers `span` of some rows of `w`, widened exactly, beside each other.
#[inline(always)]
fn widen_rows<V: Lanes, S: Stored>(w: Weights<'_>, rows: Range<usize>, span: Range<usize>, wide: &mut [f32]) {
    for (row, wide) in rows.zip(wide.chunks_exact_mut(span.len().max(1))) {
        widen_row::<V, S>(w, row, span.clone(), wide);
    }
}

/// Numbers `span` of row `row` of `w`, widened exactly.
#[inline(always)]
fn widen_row<V: Lanes, S: Stored>(w: Weights<'_>, row: usize, span: Range<usize>, wide: &mut [f32]) {
    if w.dtype.block().0 > 1 {
        widen_blocks(V::ISA, w, row, span, wide);
    } else {
        widen::<V, S>(w, row, span, wide);
    }
}

/// Numbers `span` of row `row` of `w`, widened exactly.
#[inline(always)]
fn widen<V: Lanes, S: Stored>(w: Weights<'_>, row: usize, span: Range<usize>, out: &mut [f32]) {
    assert!(row < w.rows && span.end <= w.cols && out.len() == span.len());
    let whole = span.len() / LANES * LANES;
    // SAFETY: reads and writes stay inside `span` in the row; the instruction set is on, as `Lanes` asks.
    unsafe {
        let from = w.row_ptr(row).add(span.start * S::BYTES);
        for at in (0..whole).step_by(LANES) {
            S::load::<V>(from.add(at * S::BYTES)).store(out.as_mut_ptr().add(at));
        }
        if whole < span.len() {
            let mut last = [0.0; LANES];
            S::load_part::<V>(from.add(whole * S::BYTES), span.len() - whole).store(last.as_mut_ptr());
            out[whole..].copy_from_slice(&last[..span.len() - whole]);
        }
    }
}

/// What a later tile will read of `w`, fetched line by line beside the arithmetic of this one.
///
/// A tile reads several short rows at once, which the hardware does not foresee: without this, reading SmolLM2 at 4 to 32 rows took
/// 30 ms that nothing hid. Two tiles ahead, into the second-level cache, measured best on Zen 4: GFLOP/s at 4 / 16 / 128 rows on one
/// core 85 / 101 / 107; one tile ahead 76 / 96 / 102, into the first-level cache 57 / 102 / 107, without 37 / 70 / 101.
pub(crate) struct Ahead {
    next: *const u8,
    end: *const u8,
    /// Three lines beside each step of sixteen numbers, instead of one, which would come too late.
    hurry: bool,
}

impl Ahead {
    pub(super) const LINE: usize = 64;

    /// `count` rows from `row` on, as far as there are any, beside `tiles` tiles.
    #[inline(always)]
    pub(super) fn new(w: Weights<'_>, row: usize, count: usize, tiles: usize) -> Self {
        let (start, end) = (row.min(w.rows), (row + count).min(w.rows));
        let lines = (end - start) * w.row_bytes() / Self::LINE;
        Ahead { next: w.row_ptr(start), end: w.row_ptr(end), hurry: lines > w.cols / LANES * tiles }
    }

    /// One line; at the end the same line again, which costs less than a branch.
    ///
    /// # Safety
    /// As [`Lanes`].
    #[inline(always)]
    pub(crate) unsafe fn fetch<V: Lanes>(&mut self) {
        // SAFETY: the caller's; a prefetch reads nothing.
        unsafe { V::prefetch(self.next) };
        self.next = self.next.wrapping_add(if self.next < self.end { Self::LINE } else { 0 });
    }
}

/// How a weight is stored, and how sixteen of them are widened.
pub(crate) trait Stored {
    const BYTES: usize;
    /// # Safety
    /// As [`Lanes`]: sixteen numbers are readable, the instruction set is on.
    unsafe fn load<V: Lanes>(from: *const u8) -> V;

    /// The first `count` < 16 numbers, then zeros.
    ///
    /// # Safety
    /// As [`Lanes`], with `count` readable numbers.
    #[inline(always)]
    unsafe fn load_part<V: Lanes>(from: *const u8, count: usize) -> V {
        let mut padded = [0u8; LANES * 4];
        // SAFETY: `count` numbers are readable and fit; zero bytes are zero in all three formats.
        unsafe {
            std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), count * Self::BYTES);
            Self::load::<V>(padded.as_ptr())
        }
    }
}

pub(crate) struct F32;
struct F16;
struct BF16;

impl Stored for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const u8) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_f32(from) }
    }
}

impl Stored for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const u8) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_f16(from) }
    }
}

impl Stored for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const u8) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_bf16(from) }
    }
}
