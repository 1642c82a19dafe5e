//! What is added where.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::tensor::Matrix;

/// One addition: after block `layer`, `vectors` times `scale`.
#[derive(Clone, Debug)]
pub struct Edit {
    pub layer: usize,
    /// `[1, hidden]`, or `[positions, hidden]`.
    pub vectors: Matrix,
    pub scale: f32,
    /// Absolute positions, 0 = first token; `None` is every row that runs.
    pub positions: Option<Vec<usize>>,
    /// Add `scale * ||h|| * v / ||v||` instead, with `h` the whole row before any steering at this layer.
    pub norm_match: bool,
}

impl Edit {
    /// Whether this can be applied to a model of this shape, before anything runs.
    pub fn check(&self, layers: usize, hidden: usize, context: usize) -> Result<()> {
        let problem = |problem: String| Err(Error::Steering { layer: self.layer, problem });
        if self.layer >= layers {
            return Err(Error::Layer { layer: self.layer, layers });
        }
        if self.vectors.cols != hidden {
            return problem(format!("has vector width {}, expected {hidden}", self.vectors.cols));
        }
        let rows = self.vectors.rows;
        match &self.positions {
            None if rows != 1 => return problem(format!("has {rows} vectors without positions; give one, or a position for each")),
            Some(positions) if rows != 1 && rows != positions.len() => {
                return problem(format!("has {rows} vectors for {} positions", positions.len()));
            }
            Some(positions) => {
                let mut sorted = positions.clone();
                sorted.sort_unstable();
                if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
                    return problem(format!("names position {} twice", pair[0]));
                }
                if let Some(&last) = sorted.last().filter(|&&last| last >= context) {
                    return problem(format!("names position {last}, the model's context ends at {}", context - 1));
                }
                if sorted.is_empty() {
                    return problem("names no position".into());
                }
            }
            None => {}
        }
        if !self.scale.is_finite() || !self.vectors.data.iter().all(|v| v.is_finite()) {
            return problem("contains a non-finite value".into());
        }
        if self.norm_match && (0..rows).any(|row| self.vectors.row(row).iter().all(|&v| v == 0.0)) {
            return problem("cannot norm-match a zero vector".into());
        }
        Ok(())
    }

    /// The vector for the row at `position`, if this edit reaches it.
    pub fn vector_at(&self, position: usize) -> Option<&[f32]> {
        match &self.positions {
            None => Some(self.vectors.row(0)),
            Some(positions) => {
                let index = positions.iter().position(|&p| p == position)?;
                Some(self.vectors.row(if self.vectors.rows == 1 { 0 } else { index }))
            }
        }
    }
}

/// All additions of one sequence, in order. Those on one layer add up.
#[derive(Clone, Debug, Default)]
pub struct SteeringPlan {
    pub edits: Vec<Arc<Edit>>,
}
