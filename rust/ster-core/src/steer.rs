//! What is added where.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::kernels::steer::all_finite;
use crate::tensor::Matrix;

/// One addition: after block `layer`, `vectors` times `scale`.
#[derive(Clone, Debug)]
pub struct Edit {
    pub layer: usize,
    /// `[1, hidden]`, or `[positions, hidden]`.
    pub vectors: Matrix,
    pub scale: f32,
    /// Absolute positions, 0 = first token; `None` is every row that runs.
    pub positions: Option<Positions>,
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
            Some(positions) if rows != 1 && rows != positions.given.len() => {
                return problem(format!("has {rows} vectors for {} positions", positions.given.len()));
            }
            Some(positions) => {
                if let Some(position) = positions.repeated {
                    return problem(format!("names position {position} twice"));
                }
                match positions.ascending.last() {
                    None => return problem("names no position".into()),
                    Some(&(last, _)) if last >= context => {
                        return problem(format!("names position {last}, the model's context ends at {}", context - 1));
                    }
                    Some(_) => {}
                }
            }
            None => {}
        }
        if !self.scale.is_finite() || !all_finite(&self.vectors.data) {
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
                let index = positions.index(position)?;
                Some(self.vectors.row(if self.vectors.rows == 1 { 0 } else { index }))
            }
        }
    }

    /// Those of the `rows` that this edit reaches, ascending.
    pub fn reached(&self, rows: Range<usize>) -> Vec<usize> {
        match &self.positions {
            None => rows.collect(),
            Some(positions) => positions.within(rows),
        }
    }
}

/// Positions in the order they were given, and how to find one.
#[derive(Clone, Debug)]
pub struct Positions {
    given: Vec<usize>,
    /// Each with its place in `given`.
    ascending: Vec<(usize, usize)>,
    /// The lowest that is named twice.
    repeated: Option<usize>,
}

impl From<Vec<usize>> for Positions {
    fn from(given: Vec<usize>) -> Self {
        let mut ascending: Vec<_> = given.iter().enumerate().map(|(index, &position)| (position, index)).collect();
        ascending.sort_unstable();
        let repeated = ascending.windows(2).find(|pair| pair[0].0 == pair[1].0).map(|pair| pair[0].0);
        Positions { given, ascending, repeated }
    }
}

impl Positions {
    pub fn given(&self) -> &[usize] {
        &self.given
    }

    /// The first place of `position` among those given.
    fn index(&self, position: usize) -> Option<usize> {
        let &(found, index) = self.ascending.get(self.before(position))?;
        (found == position).then_some(index)
    }

    fn within(&self, rows: Range<usize>) -> Vec<usize> {
        self.ascending[self.before(rows.start)..self.before(rows.end)].iter().map(|&(position, _)| position).collect()
    }

    /// How many are below `position`.
    fn before(&self, position: usize) -> usize {
        self.ascending.partition_point(|&(p, _)| p < position)
    }
}

/// All additions of one sequence, in order. Those on one layer add up.
#[derive(Clone, Debug, Default)]
pub struct SteeringPlan {
    pub edits: Vec<Arc<Edit>>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Against a search through the list as it was given.
        #[test]
        fn a_position_finds_its_own_vector(
            positions in prop::collection::hash_set(0..60usize, 1..30), each: bool, start in 0..70usize, count in 0..70usize,
        ) {
            let given: Vec<usize> = positions.into_iter().collect();
            let rows = if each { given.len() } else { 1 };
            let vectors = Matrix { rows, cols: 1, data: (0..rows).map(|row| row as f32).collect() };
            let edit = Edit { layer: 0, vectors, scale: 1.0, positions: Some(given.clone().into()), norm_match: false };
            edit.check(1, 1, 60).unwrap();
            for position in 0..70 {
                let expected = given.iter().position(|&p| p == position).map(|index| if each { index as f32 } else { 0.0 });
                prop_assert_eq!(edit.vector_at(position).map(|vector| vector[0]), expected);
            }
            let reached: Vec<usize> = (start..start + count).filter(|position| given.contains(position)).collect();
            prop_assert_eq!(edit.reached(start..start + count), reached);
            let everywhere = Edit { vectors: Matrix::zeros(1, 1), positions: None, ..edit };
            prop_assert_eq!(everywhere.reached(start..start + count), (start..start + count).collect::<Vec<_>>());
        }
    }
}
