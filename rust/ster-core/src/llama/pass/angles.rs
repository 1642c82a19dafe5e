//! The rotary angles of a pass, each computed once; and queries and keys turned by them.

use super::SteeringLlama;
use crate::kernels::{Isa, rotary};

/// Cosines and sines `[rows, rotary_dim / 2]`.
#[derive(Default)]
pub(super) struct Rotary {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
    interleaved: bool,
}

impl Rotary {
    /// One head's query or key `x` `[head_dim]`, turned by the angles of table row `row` (`None`: as it is), into the first `head_dim` numbers
    /// of `out`.
    pub fn turn(&self, isa: Isa, out: &mut [f32], x: &[f32], row: Option<usize>) {
        let turned = 2 * self.half;
        match row {
            Some(row) => {
                let angles = row * self.half..(row + 1) * self.half;
                let (cos, sin) = (&self.cos[angles.clone()], &self.sin[angles]);
                if self.interleaved {
                    rotary::rotate_pairs(isa, out, &x[..turned], cos, sin);
                } else {
                    rotary::rotate(isa, out, &x[..turned], cos, sin);
                }
                out[turned..x.len()].copy_from_slice(&x[turned..]);
            }
            None if self.interleaved => {
                let (low, high) = out[..x.len()].split_at_mut(x.len() / 2);
                for ((low, high), pair) in low.iter_mut().zip(high).zip(x.chunks_exact(2)) {
                    (*low, *high) = (pair[0], pair[1]);
                }
            }
            None => out[..x.len()].copy_from_slice(x),
        }
    }
}

/// The distinct (inverse frequencies, position) of a pass, so that each angle is computed once.
#[derive(Default)]
pub(super) struct Angles {
    /// Of which rotation of the model, in which regime of lengths, with which attention factor: inverse frequencies `[rotary_dim / 2]`.
    sets: Vec<(usize, usize, f32, Vec<f32>)>,
    places: std::collections::HashMap<(usize, usize), usize>,
    order: Vec<(usize, usize)>,
}

impl Angles {
    /// For each rotation of the model, the table row of each of `count` tokens from position `past` on.
    pub fn rows(&mut self, model: &SteeringLlama, past: usize, count: usize) -> Vec<Vec<usize>> {
        let config = &model.config;
        let one = |(number, rope): (usize, &super::super::rope::Rope)| {
            let regime = rope.regime(config.context, past + count);
            let set = self.sets.iter().position(|set| (set.0, set.1) == (number, regime)).unwrap_or_else(|| {
                let inverse = rope.inverse_frequencies(config.rotary_dim, config.context, regime);
                self.sets.push((number, regime, rope.attention_factor(), inverse));
                self.sets.len() - 1
            });
            let mut place = |position| {
                *self.places.entry((set, position)).or_insert_with(|| {
                    self.order.push((set, position));
                    self.order.len() - 1
                })
            };
            (past..past + count).map(&mut place).collect()
        };
        config.ropes().enumerate().map(one).collect()
    }

    pub fn table(&self, model: &SteeringLlama) -> Rotary {
        let half = model.config.rotary_dim / 2;
        let mut cos = vec![0.0; self.order.len() * half];
        let mut sin = vec![0.0; self.order.len() * half];
        let tables = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
        for (&(set, position), (cos, sin)) in self.order.iter().zip(tables) {
            let (_, _, factor, inverse) = &self.sets[set];
            rotary::angles(model.isa, cos, sin, position, inverse, *factor);
        }
        Rotary { cos, sin, half, interleaved: model.form.interleaved }
    }
}
