//! Long rows of `w` that are widened before they are multiplied: a span of some columns at a time, for as many rows of `x` as the second-level
//! cache holds spans of. Sums wait in memory from one span to the next.
//!
//! AVX2 on Zen 1, one core, 128 rows of `x`, bf16: of 4,096 numbers 31.6 GFLOP/s, of 14,336 28.3; in blocks of whole rows of `x`, as many as
//! that cache holds, 28.0 and 19.3.

use std::ops::Range;

use super::super::simd::{LANES, Lanes};
use super::{Ahead, F32, Part, Stored, Then, tile, widen_rows};
use crate::tensor::{Panel, Weights};

/// Of `x` in one span, for all rows of a block, and of the sums of a group of columns: both stay in the second-level cache.
const X_BYTES: usize = 256 * 1024;
const SUM_BYTES: usize = 96 * 1024;

/// Of one widened span of all columns of a tile: it stays in the first-level cache.
const SPAN_BYTES: usize = 12 * 1024;

#[inline(always)]
pub(super) fn by_spans<V: Lanes, S: Stored, const ROWS: usize, const COLS: usize>(
    x: &[f32],
    w: Weights<'_>,
    bias: Option<&[f32]>,
    out: &mut Panel<'_>,
    then: Then,
) {
    let longest = SPAN_BYTES / (4 * COLS) / 256 * 256;
    let parts = (4 * out.rows * longest).div_ceil(X_BYTES).max(1);
    let block = out.rows.div_ceil(parts).next_multiple_of(ROWS).max(ROWS);
    let group = (SUM_BYTES / (4 * LANES * block) / COLS * COLS).max(COLS);
    let mut wide = vec![0.0; COLS * longest + LANES];
    let aligned = wide.as_ptr().align_offset(4 * LANES);
    let wide = &mut wide[aligned..][..COLS * longest];
    let mut sums = vec![0.0; group * block * LANES];
    for start in (0..out.rows).step_by(block) {
        let rows = start..(start + block).min(out.rows);
        for first in out.columns.clone().step_by(group) {
            let columns = first..(first + group).min(out.columns.end);
            for from in (0..w.cols).step_by(longest) {
                let span = from..(from + longest).min(w.cols);
                let mut column = columns.start;
                let mut sums = |column: usize| sums[(column - columns.start) * block * LANES..].as_mut_ptr();
                while column + COLS <= columns.end {
                    widen_rows::<V, S>(w, column..column + COLS, span.clone(), wide);
                    let part = Part { w: wide.as_ptr().cast(), k: w.cols, span: span.clone(), sums: sums(column) };
                    tiles::<V, ROWS, COLS>(x, w, part, bias, out, then, rows.clone(), column);
                    column += COLS;
                }
                while column < columns.end {
                    widen_rows::<V, S>(w, column..column + 1, span.clone(), wide);
                    let part = Part { w: wide.as_ptr().cast(), k: w.cols, span: span.clone(), sums: sums(column) };
                    tiles::<V, ROWS, 1>(x, w, part, bias, out, then, rows.clone(), column);
                    column += 1;
                }
            }
        }
    }
}

/// Beside the tiles, the span of the columns that come next is fetched: rows of `w` lie far apart, and hardware foresees little of them.
#[inline(always)]
fn tiles<V: Lanes, const ROWS: usize, const COLS: usize>(
    x: &[f32],
    w: Weights<'_>,
    mut part: Part,
    bias: Option<&[f32]>,
    out: &mut Panel<'_>,
    then: Then,
    rows: Range<usize>,
    column: usize,
) {
    let mut ahead = Ahead::new(w, 0, 0, 1);
    let (from, size) = (part.span.start * w.row_bytes() / w.cols, part.span.len() * w.row_bytes() / w.cols);
    let lines = size.div_ceil(Ahead::LINE);
    let share = (COLS * lines).div_ceil(rows.len().div_ceil(ROWS));
    let mut line = 0;
    let mut row = rows.start;
    loop {
        for _ in 0..share {
            let (next, at) = (column + COLS + line / lines, line % lines);
            if next < w.rows {
                // SAFETY: the instruction set is on, as `Lanes` asks; a prefetch reads nothing.
                unsafe { V::prefetch(w.row_ptr(next).wrapping_add(from + at * Ahead::LINE)) };
            }
            line += 1;
        }
        if row + ROWS > rows.end {
            break;
        }
        tile::<V, F32, ROWS, COLS, 0>(x, &part, bias, out, then, row, column, &mut ahead);
        part.sums = part.sums.wrapping_add(ROWS * COLS * LANES);
        row += ROWS;
    }
    match rows.end - row {
        3 if ROWS > 3 => tile::<V, F32, 3, COLS, 0>(x, &part, bias, out, then, row, column, &mut ahead),
        2 if ROWS > 2 => tile::<V, F32, 2, COLS, 0>(x, &part, bias, out, then, row, column, &mut ahead),
        1 => tile::<V, F32, 1, COLS, 0>(x, &part, bias, out, then, row, column, &mut ahead),
        _ => {}
    }
}
