//! The rotary angles of a pass, each computed once.

use super::SteeringLlama;
use crate::kernels::rotary;

/// Cosines and sines `[rows, head_dim / 2]`.
pub(super) struct Rotary {
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

/// The distinct (inverse frequencies, position) of a pass, so that each angle is computed once.
#[derive(Default)]
pub(super) struct Angles {
    /// Inverse frequencies `[head_dim / 2]`: one set, unless they depend on the length of the sequence.
    sets: Vec<(Option<usize>, Vec<f32>)>,
    places: std::collections::HashMap<(usize, usize), usize>,
    order: Vec<(usize, usize)>,
}

impl Angles {
    /// The table row of each of `count` tokens from position `past` on.
    pub fn rows(&mut self, model: &SteeringLlama, past: usize, count: usize) -> Vec<usize> {
        let rope = &model.config.rope;
        let length = rope.depends_on_length().then_some((past + count).max(model.config.context));
        let set = self.sets.iter().position(|(of, _)| *of == length).unwrap_or_else(|| {
            let inverse = rope.inverse_frequencies(model.config.head_dim, model.config.context, length.unwrap_or(0));
            self.sets.push((length, inverse));
            self.sets.len() - 1
        });
        (past..past + count)
            .map(|position| {
                *self.places.entry((set, position)).or_insert_with(|| {
                    self.order.push((set, position));
                    self.order.len() - 1
                })
            })
            .collect()
    }

    pub fn table(&self, model: &SteeringLlama) -> Rotary {
        let half = model.config.head_dim / 2;
        let factor = model.config.rope.attention_factor();
        let mut cos = vec![0.0; self.order.len() * half];
        let mut sin = vec![0.0; self.order.len() * half];
        let tables = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
        for (&(set, position), (cos, sin)) in self.order.iter().zip(tables) {
            rotary::angles(model.isa, cos, sin, position, &self.sets[set].1, factor);
        }
        Rotary { cos, sin }
    }
}
