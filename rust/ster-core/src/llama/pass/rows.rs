//! Which packed rows belong to whom, and how work over them is cut.

use std::ops::Range;

use crate::kernels::Isa;
use crate::kernels::linear::{COLUMN_GRAIN, rows_at_once};

/// The rows of one sequence among the packed rows: its tokens `first..`, at packed rows `start..start + rows`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Member {
    pub run: usize,
    pub first: usize,
    pub start: usize,
    pub rows: usize,
}

pub(super) fn count(rows: &[Member]) -> usize {
    rows.last().map_or(0, |member| member.start + member.rows)
}

/// Work for each thread in about this many pieces: enough to even out a thread that the system interrupts.
pub(super) const GRAINS_A_THREAD: usize = 6;

/// Cut `[rows, columns]` into about `wanted` cells. Rows first, in sixteens and in blocks whose inputs fit a cache: then the weights stream
/// past once a block, and the inputs are read once.
pub(super) fn grid(isa: Isa, rows: usize, k: usize, columns: usize, wanted: usize) -> Vec<(Range<usize>, Range<usize>)> {
    if rows == 0 {
        return Vec::new();
    }
    let row_cells = rows.div_ceil(rows_at_once(isa, k));
    let row_step = rows.div_ceil(row_cells).next_multiple_of(16);
    let column_cells = wanted.div_ceil(row_cells).max(1);
    let column_step = columns.div_ceil(column_cells).next_multiple_of(COLUMN_GRAIN);
    (0..rows)
        .step_by(row_step)
        .flat_map(|row| {
            (0..columns)
                .step_by(column_step)
                .map(move |column| (row..(row + row_step).min(rows), column..(column + column_step).min(columns)))
        })
        .collect()
}
