//! Matrix product with weights where they lie: `out[m, n] = sum_k x[m, k] * w[n, k]`.
//!
//! A register tile sums several rows of `x` against several rows of `w` at once, walking `k` upwards, sixteen lanes a sum. The order of
//! operations of one output is the same in every tile, so a row's result does not depend on the rows beside it. Twin:
//! [`reference::linear`](super::reference::linear).

use super::isa::per_isa;
use super::simd::{LANES, Lanes};
use crate::tensor::{Dtype, Panel, Weights};

/// Columns are handed to threads in multiples of this: every tile width divides it.
pub const COLUMN_GRAIN: usize = 12;

/// Rows of `x` are taken in blocks of about this many bytes, so that a block stays in the second-level cache while all of `w` passes.
const X_BLOCK_BYTES: usize = 384 * 1024;

/// What happens to a finished sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// `out = sum (+ bias)`
    Store,
    /// `out = out + (sum (+ bias))`: the residual addition.
    Add,
}

per_isa! {
    /// `out[m, n] = sum_k x[m, k] * w[n, k] + bias[n]` for the columns `n` of the panel.
    /// - `x`: `[rows, k]`, `w`: `[n, k]`, `bias`: `[n]`
    ///
    /// # Panics
    /// If the sizes do not fit.
    pub fn linear(x: &[f32], w: Weights<'_>, bias: Option<&[f32]>, out: Panel<'_>, then: Then) = by_dtype
}

#[inline(always)]
fn by_dtype<V: Lanes>(x: &[f32], w: Weights<'_>, bias: Option<&[f32]>, out: Panel<'_>, then: Then) {
    // Checked here once: the tiles below use raw pointers.
    assert_eq!(x.len(), out.rows * w.cols);
    assert!(out.columns.end <= w.rows);
    assert!(bias.is_none_or(|bias| bias.len() == w.rows));
    match w.dtype {
        Dtype::F32 => by_tile::<V, F32>(x, w, bias, out, then),
        Dtype::F16 => by_tile::<V, F16>(x, w, bias, out, then),
        Dtype::BF16 => by_tile::<V, BF16>(x, w, bias, out, then),
    }
}

/// The tile as a constant: one arm is left once `V` is known.
#[inline(always)]
fn by_tile<V: Lanes, S: Stored>(x: &[f32], w: Weights<'_>, bias: Option<&[f32]>, out: Panel<'_>, then: Then) {
    match V::TILE {
        (4, 6) => blocks::<V, S, 4, 6>(x, w, bias, out, then),
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
        // Bound by memory: one row of w after the other is the stream that hardware prefetches best. Tiles of 2, 3, 4 and 6 rows, and
        // prefetching a tile ahead, all read SmolLM2 slower on Zen 4.
        for column in out.columns.clone() {
            tile::<V, S, 1, 1>(x, w, bias, &mut out, then, 0, column);
        }
        return;
    }
    let block = (X_BLOCK_BYTES / (4 * w.cols.max(1)) / ROWS * ROWS).max(ROWS);
    let mut start = 0;
    while start < rows {
        let end = (start + block).min(rows);
        let mut column = out.columns.start;
        while column + COLS <= out.columns.end {
            rows_by_columns::<V, S, ROWS, COLS>(x, w, bias, &mut out, then, start..end, column);
            column += COLS;
        }
        while column < out.columns.end {
            rows_by_columns::<V, S, ROWS, 1>(x, w, bias, &mut out, then, start..end, column);
            column += 1;
        }
        start = end;
    }
}

/// `COLS` columns from `column` on, for the rows of a block.
///
/// Prefetching the next tile's rows of `w`, a share beside each tile of rows, gained nothing on Zen 4 (16 rows 1.00, 128 rows 0.95).
#[inline(always)]
fn rows_by_columns<V: Lanes, S: Stored, const ROWS: usize, const COLS: usize>(
    x: &[f32],
    w: Weights<'_>,
    bias: Option<&[f32]>,
    out: &mut Panel<'_>,
    then: Then,
    rows: std::ops::Range<usize>,
    column: usize,
) {
    let mut row = rows.start;
    while row + ROWS <= rows.end {
        tile::<V, S, ROWS, COLS>(x, w, bias, out, then, row, column);
        row += ROWS;
    }
    // What is left is fewer than ROWS rows.
    match rows.end - row {
        3 if ROWS > 3 => tile::<V, S, 3, COLS>(x, w, bias, out, then, row, column),
        2 if ROWS > 2 => tile::<V, S, 2, COLS>(x, w, bias, out, then, row, column),
        1 => tile::<V, S, 1, COLS>(x, w, bias, out, then, row, column),
        _ => {}
    }
}

#[inline(always)]
fn tile<V: Lanes, S: Stored, const ROWS: usize, const COLS: usize>(
    x: &[f32],
    w: Weights<'_>,
    bias: Option<&[f32]>,
    out: &mut Panel<'_>,
    then: Then,
    row: usize,
    column: usize,
) {
    let k = w.cols;
    let stride = k * S::BYTES;
    let mut sums = [[0f32; COLS]; ROWS];
    // SAFETY: `by_dtype` checked that x holds rows `row..row + ROWS` of k numbers and w rows `column..column + COLS`; every read stays
    // below `k` in its row. The instruction set is on, as `Lanes` asks.
    unsafe {
        let x = x.as_ptr().add(row * k);
        let w = w.bytes().as_ptr().add(column * stride);
        let mut acc = [[V::zero(); COLS]; ROWS];
        let whole = k / LANES * LANES;
        let mut at = 0;
        while at < whole {
            let mut columns = [V::zero(); COLS];
            for (j, column) in columns.iter_mut().enumerate() {
                let from = w.add(j * stride + at * S::BYTES);
                *column = S::load::<V>(from);
            }
            for (i, acc) in acc.iter_mut().enumerate() {
                let row = V::load(x.add(i * k + at));
                for (acc, column) in acc.iter_mut().zip(columns) {
                    *acc = row.fma(column, *acc);
                }
            }
            at += LANES;
        }
        if whole < k {
            let rest = k - whole;
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

/// How a weight is stored, and how sixteen of them are widened.
pub(super) trait Stored {
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

pub(super) struct F32;
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
