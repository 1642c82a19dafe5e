//! The ragged batch: sequences with their cache, steering plan and capture plan.

use crate::capture::CapturePlan;
use crate::llama::KvCache;
use crate::steer::SteeringPlan;

/// For which rows of this pass logits are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    None,
    Last,
    All,
}

impl LogitRows {
    pub fn count(self, tokens: usize) -> usize {
        match self {
            LogitRows::None => 0,
            LogitRows::Last => 1,
            LogitRows::All => tokens,
        }
    }
}

/// What to run for one sequence, and what to keep of it.
pub struct Sequence<'a> {
    /// To run now, after what the cache or the prefix holds. At least one.
    pub tokens: &'a [u32],
    /// A cache that several sequences of a batch may go on from; it is only read. A sequence has this or a cache of its own, not both.
    pub prefix: Option<&'a KvCache>,
    /// Extended by `tokens` when the pass succeeds. `None`: keys and values are dropped layer by layer.
    pub cache: Option<&'a mut KvCache>,
    pub steering: &'a SteeringPlan,
    pub capture: CapturePlan,
    pub logits: LogitRows,
}

impl Sequence<'_> {
    /// Positions before the first token that runs now.
    pub fn past(&self) -> usize {
        match (&self.cache, self.prefix) {
            (Some(cache), _) => cache.len(),
            (None, Some(prefix)) => prefix.len(),
            (None, None) => 0,
        }
    }
}

/// What a pass kept of one sequence.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// `[layers, rows, hidden]`, layers and rows as the capture plan asked; empty when it asked for nothing.
    pub residual: Vec<f32>,
    pub residual_shape: [usize; 3],
    /// `[rows, vocab]`
    pub logits: Vec<f32>,
    pub logits_shape: [usize; 2],
    /// For each edit of the plan, the absolute positions it reached in this pass.
    pub steered: Vec<Vec<usize>>,
}
