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

    /// Rows `rows`, which begin at a multiple of sixteen, and the same turned where all are.
    pub fn part(&self, rows: Range<usize>) -> (&'a [f32], &'a [f32]) {
        let size = turned_size(self.k);
        let turned = if self.turned.is_empty() { self.turned } else { &self.turned[rows.start / 16 * size..rows.end.div_ceil(16) * size] };
        (&self.rows[rows.start * self.k..rows.end * self.k], turned)
    }
}

/// Sixteens of `rows` rows of `k` that are to be turned, and how much each takes of `room`, which fits them all.
pub(super) fn room_for(isa: Isa, rows: usize, k: usize, room: &mut Buffer) -> (usize, usize) {
    let (count, size) = (sixteens(isa, rows), turned_size(k));
    room.fit(count * size);
    (count, size)
}

#[cfg(test)]
mod tests {
    use super::super::rows::grid;
    use super::*;

    /// However many rows there are and however they are cut, a cell has its rows turned, or no cell has.
    #[test]
    fn parts_are_turned_together() {
        for isa in Isa::available() {
            for k in [64, 1025, 4096] {
                let size = turned_size(k);
                for count in (1..40).chain([63, 64, 127, 128, 255, 256, 257, 300, 479, 480, 511, 512, 513, 1000]) {
                    let rows = vec![0.0; count * k];
                    let mut room = Buffer::default();
                    let (sixteens, _) = room_for(isa, count, k, &mut room);
                    let input = Input::new(&rows, k, &room);
                    for (cell, _) in grid(isa, count, k, 48, 4) {
                        let (x, turned) = input.part(cell.clone());
                        assert_eq!(x.len(), cell.len() * k);
                        assert_eq!(turned.len(), if sixteens == 0 { 0 } else { cell.len().div_ceil(16) * size }, "{count} rows of {k}");
                    }
                }
            }
        }
    }
}
