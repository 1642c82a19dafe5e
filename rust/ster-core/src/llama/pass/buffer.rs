//! Numbers that begin at a cache line, and with them every row of sixteen or a multiple: AVX2 loads a register across two lines half as fast.

use std::ops::{Deref, DerefMut};

use super::rows::{Member, count};

const LINE: usize = 64;

#[derive(Default)]
pub(super) struct Buffer {
    room: Vec<f32>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// Make it `len` long. What is in it then is any old numbers.
    pub fn fit(&mut self, len: usize) {
        let needed = len + LINE / size_of::<f32>();
        if self.room.len() < needed {
            self.room.resize(needed, 0.0);
        }
        self.start = self.room.as_ptr().align_offset(LINE);
        self.len = len;
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.room[self.start..self.start + self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.room[self.start..self.start + self.len]
    }
}

/// Copy the rows of `to` out of `x`, whose rows are `from`; `to` keeps the ends of some of its sequences.
pub(super) fn gather(x: &[f32], from: &[Member], out: &mut Buffer, to: &[Member], width: usize) {
    out.fit(count(to) * width);
    let mut source = from.iter();
    for member in to {
        let source = source.find(|source| source.run == member.run).expect("rows kept are rows that ran");
        let start = (source.start + source.rows - member.rows) * width;
        out[member.start * width..(member.start + member.rows) * width].copy_from_slice(&x[start..start + member.rows * width]);
    }
}
