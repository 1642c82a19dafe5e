//! What products read: rows, and the same rows turned where the kernels want them so, once for all products and all threads.

use std::ops::Range;

use super::buffer::Buffer;
use crate::kernels::Isa;
use crate::kernels::linear::{sixteens, turned_size};

/// `rows` `[n, k]`.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    pub rows: &'a [f32],
    pub k: usize,
    turned: &'a [f32],
}

impl<'a> Input<'a> {
    /// turned: of `rows`, as [`room_for`] made room.
    pub fn new(rows: &'a [f32], k: usize, turned: &'a Buffer) -> Self {
        Input { rows, k, turned }
    }

    pub fn count(&self) -> usize {
        self.rows.len() / self.k
    }

    /// Rows `rows`, which begin at a multiple of sixteen, and what is turned of them: all, or nothing where they are few.
    pub fn part(&self, isa: Isa, rows: Range<usize>) -> (&'a [f32], &'a [f32]) {
        let size = turned_size(self.k);
        let turned = &self.turned[(rows.start / 16 * size).min(self.turned.len())..][..sixteens(isa, rows.len()) * size];
        (&self.rows[rows.start * self.k..rows.end * self.k], turned)
    }
}

/// Sixteens of `rows` rows of `k` that are to be turned, and how much each takes of `room`, which fits them all.
pub(super) fn room_for(isa: Isa, rows: usize, k: usize, room: &mut Buffer) -> (usize, usize) {
    let (count, size) = (sixteens(isa, rows), turned_size(k));
    room.fit(count * size);
    (count, size)
}
