//! Sequences that own what they ask for, ways to run them, and outputs compared bit for bit.

use ster_core::{CapturePlan, CaptureRows, KvCache, LogitRows, Output, Result, Sequence, SteeringLlama, SteeringPlan, Tap};
use tempfile::TempDir;

use super::Tiny;

/// A sequence that owns what `Sequence` borrows.
#[derive(Clone, Debug)]
pub struct Ask {
    pub tokens: Vec<u32>,
    pub steering: SteeringPlan,
    pub capture: CapturePlan,
    pub logits: LogitRows,
}

impl Ask {
    /// Everything there is to see: all layers, all rows, all logits.
    pub fn all(model: &SteeringLlama, tokens: &[u32], steering: &SteeringPlan, tap: Tap) -> Ask {
        let capture = CapturePlan { layers: (0..model.config().layers).collect(), rows: CaptureRows::All, tap };
        Ask { tokens: tokens.into(), steering: steering.clone(), capture, logits: LogitRows::All }
    }

    pub fn sequence<'a>(&'a self, cache: Option<&'a mut KvCache>) -> Sequence<'a> {
        Sequence { tokens: &self.tokens, prefix: None, cache, steering: &self.steering, capture: self.capture.clone(), logits: self.logits }
    }
}

pub fn run(model: &SteeringLlama, asks: &[Ask]) -> Vec<Output> {
    let mut sequences: Vec<_> = asks.iter().map(|ask| ask.sequence(None)).collect();
    model.forward(&mut sequences, &|| false).unwrap()
}

pub fn run_one(model: &SteeringLlama, ask: &Ask) -> Output {
    run(model, std::slice::from_ref(ask)).remove(0)
}

pub fn run_cached(model: &SteeringLlama, ask: &Ask, cache: &mut KvCache) -> Result<Output> {
    Ok(model.forward(&mut [ask.sequence(Some(cache))], &|| false)?.remove(0))
}

/// All outputs of `tokens`, run in pieces that end at `ends` through `cache`.
pub fn in_pieces(model: &SteeringLlama, tokens: &[u32], steering: &SteeringPlan, ends: &[usize], cache: &mut KvCache) -> Vec<Output> {
    let mut start = 0;
    ends.iter()
        .map(|&end| {
            let piece = Ask::all(model, &tokens[start..end], steering, Tap::PostSteer);
            start = end;
            run_cached(model, &piece, cache).unwrap()
        })
        .collect()
}

/// Outputs of consecutive pieces as the output of the whole.
pub fn join(pieces: &[Output]) -> Output {
    let [layers, _, hidden] = pieces[0].residual_shape;
    let vocab = pieces[0].logits_shape[1];
    let mut whole = Output::default();
    for layer in 0..layers {
        for piece in pieces {
            let size = piece.residual_shape[1] * hidden;
            whole.residual.extend(&piece.residual[layer * size..(layer + 1) * size]);
        }
    }
    let rows = pieces.iter().map(|piece| piece.residual_shape[1]).sum();
    whole.residual_shape = [layers, rows, hidden];
    for piece in pieces {
        whole.logits.extend(&piece.logits);
        whole.logits_shape = [whole.logits_shape[0] + piece.logits_shape[0], vocab];
        whole.steered.resize(piece.steered.len(), Vec::new());
        for (all, part) in whole.steered.iter_mut().zip(&piece.steered) {
            all.extend(part);
        }
    }
    whole
}

/// Bit for bit, or a panic that names the first place where they part.
#[track_caller]
pub fn same(what: &str, found: &Output, expected: &Output) {
    assert_eq!(found.residual_shape, expected.residual_shape, "{what}");
    assert_eq!(found.logits_shape, expected.logits_shape, "{what}");
    assert_eq!(found.steered, expected.steered, "{what}");
    let [_, rows, hidden] = expected.residual_shape;
    same_numbers(&format!("{what}: residual"), &found.residual, &expected.residual, &[rows * hidden, hidden]);
    same_numbers(&format!("{what}: logits"), &found.logits, &expected.logits, &[expected.logits_shape[1]]);
}

#[track_caller]
pub fn same_numbers(what: &str, found: &[f32], expected: &[f32], strides: &[usize]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    if let Some(at) = (0..found.len()).find(|&at| found[at].to_bits() != expected[at].to_bits()) {
        let mut left = at;
        let mut index: Vec<usize> = Vec::new();
        for stride in strides {
            index.push(left / stride);
            left %= stride;
        }
        index.push(left);
        let ulps = i64::from(found[at].to_bits()) - i64::from(expected[at].to_bits());
        let differ = (0..found.len()).filter(|&at| found[at].to_bits() != expected[at].to_bits()).count();
        panic!("{what} differs first at {index:?}: {} for {}, {ulps} ulp; {differ} of {} differ", found[at], expected[at], found.len());
    }
}

impl Ask {
    /// The rows of `output`'s layer `layer` of those captured.
    pub fn layer<'a>(&self, output: &'a Output, layer: usize) -> &'a [f32] {
        let slot = self.capture.layers.iter().position(|&l| l == layer).expect("a captured layer");
        let size = output.residual_shape[1] * output.residual_shape[2];
        &output.residual[slot * size..(slot + 1) * size]
    }
}

/// The rows of the `layer`-th captured layer.
pub fn rows_of(output: &Output, layer: usize) -> &[f32] {
    let size = output.residual_shape[1] * output.residual_shape[2];
    &output.residual[layer * size..(layer + 1) * size]
}

/// The files are mapped: the folder may go.
pub fn load(tiny: &Tiny) -> SteeringLlama {
    let dir = TempDir::new().unwrap();
    tiny.write(dir.path());
    SteeringLlama::load(dir.path(), Some(2)).unwrap()
}
