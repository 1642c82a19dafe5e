//! What is kept where.

/// Where a block's value is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tap {
    /// The block's own output, before the steering plan adds to it.
    PreSteer,
    /// After the addition. Equal to `PreSteer` where nothing is added.
    PostSteer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureRows {
    /// The last row of this pass.
    Last,
    /// Every row of this pass.
    All,
}

/// The layers of one sequence to keep. No layers: nothing is kept.
#[derive(Clone, Debug)]
pub struct CapturePlan {
    /// Ascending, each once.
    pub layers: Vec<usize>,
    pub rows: CaptureRows,
    pub tap: Tap,
}

impl CapturePlan {
    pub fn nothing() -> Self {
        CapturePlan { layers: Vec::new(), rows: CaptureRows::Last, tap: Tap::PreSteer }
    }

    /// How many rows are kept of a pass over `tokens` tokens.
    pub fn count(&self, tokens: usize) -> usize {
        match self.rows {
            _ if self.layers.is_empty() => 0,
            CaptureRows::Last => 1,
            CaptureRows::All => tokens,
        }
    }
}
