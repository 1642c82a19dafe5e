//! Rows of weights in blocks: widened for many rows of `x`, or beside the sums of one.
//!
//! Both are exact and keep the order of [`linear`](super::linear): no bit of a product differs from that of the same numbers in f32. Twin:
//! [`Weights::widen_row`] and [`reference::linear`](super::reference::linear).

use std::ops::Range;

use super::isa::per_isa;
use super::linear::{Ahead, Then, put};
use super::quant::{Apart, Blocked, SPAN, iq4, k, legacy};
use super::simd::{LANES, Lanes};
use crate::tensor::{Dtype, Panel, Weights};

per_isa! {
    /// Numbers `span` of row `row` of `w`, widened exactly.
    ///
    /// # Panics
    /// If `span` is not whole blocks of the row, or not as long as `out`.
    pub(super) fn widen_blocks(w: Weights<'_>, row: usize, span: Range<usize>, out: &mut [f32]) = widen_by_dtype
}

per_isa! {
    /// [`linear`](super::linear::linear) of one row: `out[n] = sum_k x[k] * w[n, k] + bias[n]`, of sizes that it checked.
    pub(super) fn sum_row(x: &[f32], w: Weights<'_>, bias: Option<&[f32]>, out: Panel<'_>, then: Then) = sum_by_dtype
}

#[inline(always)]
fn widen_by_dtype<V: Lanes>(w: Weights<'_>, row: usize, span: Range<usize>, out: &mut [f32]) {
    match w.dtype {
        Dtype::Q4_0 => widen::<V, legacy::Q4_0>(w, row, span, out),
        Dtype::Q4_1 => widen::<V, legacy::Q4_1>(w, row, span, out),
        Dtype::Q5_0 => widen::<V, legacy::Q5_0>(w, row, span, out),
        Dtype::Q5_1 => widen::<V, legacy::Q5_1>(w, row, span, out),
        Dtype::Q8_0 => widen::<V, legacy::Q8_0>(w, row, span, out),
        Dtype::Q2K => widen::<V, k::Q2K>(w, row, span, out),
        Dtype::Q3K => widen::<V, k::Q3K>(w, row, span, out),
        Dtype::Q4K => widen::<V, k::Q4K>(w, row, span, out),
        Dtype::Q5K => widen::<V, k::Q5K>(w, row, span, out),
        Dtype::Q6K => widen::<V, k::Q6K>(w, row, span, out),
        Dtype::IQ4NL => widen::<V, iq4::Iq4Nl>(w, row, span, out),
        Dtype::F32 | Dtype::F16 | Dtype::BF16 => unreachable!("no blocks"),
    }
}

#[inline(always)]
fn sum_by_dtype<V: Lanes>(x: &[f32], w: Weights<'_>, bias: Option<&[f32]>, out: Panel<'_>, then: Then) {
    match w.dtype {
        Dtype::Q4_0 => sum::<V, legacy::Q4_0>(x, w, bias, out, then),
        Dtype::Q4_1 => sum::<V, legacy::Q4_1>(x, w, bias, out, then),
        Dtype::Q5_0 => sum::<V, legacy::Q5_0>(x, w, bias, out, then),
        Dtype::Q5_1 => sum::<V, legacy::Q5_1>(x, w, bias, out, then),
        Dtype::Q8_0 => sum::<V, legacy::Q8_0>(x, w, bias, out, then),
        Dtype::Q2K => sum::<V, k::Q2K>(x, w, bias, out, then),
        Dtype::Q3K => sum::<V, k::Q3K>(x, w, bias, out, then),
        Dtype::Q4K => sum::<V, k::Q4K>(x, w, bias, out, then),
        Dtype::Q5K => sum::<V, k::Q5K>(x, w, bias, out, then),
        Dtype::Q6K => sum::<V, k::Q6K>(x, w, bias, out, then),
        Dtype::IQ4NL => sum::<V, iq4::Iq4Nl>(x, w, bias, out, then),
        Dtype::F32 | Dtype::F16 | Dtype::BF16 => unreachable!("no blocks"),
    }
}

#[inline(always)]
fn widen<V: Lanes, B: Blocked>(w: Weights<'_>, row: usize, span: Range<usize>, out: &mut [f32]) {
    assert!(row < w.rows && span.end <= w.cols && out.len() == span.len());
    assert!(span.start.is_multiple_of(B::NUMBERS) && span.len().is_multiple_of(B::NUMBERS));
    let mut apart = Apart::EMPTY;
    // SAFETY: reads and writes stay inside `span` in the row; the instruction set is on, as `Lanes` asks.
    unsafe {
        for start in (0..span.len()).step_by(SPAN) {
            let numbers = SPAN.min(span.len() - start);
            let from = w.row_ptr(row).add((span.start + start) / B::NUMBERS * B::BYTES);
            B::open::<V>(from, numbers, &mut apart);
            for at in (0..numbers).step_by(LANES) {
                apart.sixteen::<V, B>(from, at / LANES).store(out.as_mut_ptr().add(start + at));
            }
        }
    }
}

/// One row with weights in blocks: [`ROWS_AT_ONCE`] of their rows at a time, so that chains of sums do not wait for each other.
#[inline(always)]
fn sum<V: Lanes, B: Blocked>(x: &[f32], w: Weights<'_>, bias: Option<&[f32]>, mut out: Panel<'_>, then: Then) {
    let mut apart = [const { Apart::EMPTY }; ROWS_AT_ONCE];
    let mut column = out.columns.start;
    while column + ROWS_AT_ONCE <= out.columns.end {
        let sums = sum_blocks::<V, B, ROWS_AT_ONCE>(x, w, column, &mut apart);
        put(&mut out, bias, then, 0, column, [sums]);
        column += ROWS_AT_ONCE;
    }
    while column < out.columns.end {
        let sums = sum_blocks::<V, B, 1>(x, w, column, &mut apart);
        put(&mut out, bias, then, 0, column, [sums]);
        column += 1;
    }
}

const ROWS_AT_ONCE: usize = 4;

/// Numbers of a row that are summed before those of the next: blocks hold a multiple of them.
const PAIR: usize = 2 * LANES;

/// The products of `x` and `COLS` rows of `w` from `column` on.
#[inline(always)]
fn sum_blocks<V: Lanes, B: Blocked, const COLS: usize>(
    x: &[f32],
    w: Weights<'_>,
    column: usize,
    apart: &mut [Apart; ROWS_AT_ONCE],
) -> [f32; COLS] {
    let mut ahead = Ahead::new(w, column + 2 * COLS, COLS, 1);
    let lines = (COLS * B::BYTES * PAIR / B::NUMBERS).div_ceil(Ahead::LINE);
    let apart = &mut apart[..COLS];
    // SAFETY: `by_dtype` checked that x holds `cols` numbers, which are whole blocks, and w rows `column..column + COLS`; every read
    // stays in the row. The instruction set is on, as `Lanes` asks.
    unsafe {
        let mut acc = [V::zero(); COLS];
        for start in (0..w.cols).step_by(SPAN) {
            let numbers = SPAN.min(w.cols - start);
            let from: [*const u8; COLS] = std::array::from_fn(|j| w.row_ptr(column + j).wrapping_add(start / B::NUMBERS * B::BYTES));
            for (apart, from) in apart.iter_mut().zip(from) {
                B::open::<V>(from, numbers, apart);
            }
            for at in (0..numbers).step_by(PAIR) {
                (0..lines).for_each(|_| ahead.fetch::<V>());
                for ((acc, apart), from) in acc.iter_mut().zip(apart.iter()).zip(from) {
                    for step in 0..PAIR / LANES {
                        let weights = apart.sixteen::<V, B>(from, at / LANES + step);
                        *acc = V::load(x.as_ptr().add(start + at + LANES * step)).fma(weights, *acc);
                    }
                }
            }
        }
        let mut sums = [0.0; COLS];
        for (first, sums) in sums.chunks_mut(4).enumerate() {
            let four = std::array::from_fn(|n| if 4 * first + n < COLS { acc[4 * first + n] } else { V::zero() });
            let four = V::reduce4(four);
            sums.copy_from_slice(&four[..sums.len()]);
        }
        sums
    }
}
