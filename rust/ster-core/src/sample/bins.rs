//! The token that [`by_sorting`](super::by_sorting) draws, without its sort.
//!
//! Candidates fall into bins by their distance from the highest score, the likeliest first; only a bin in which a cut or the draw falls
//! is put in order. That takes sums in another order than the definition does, so they differ from its own in the last bits. By how much
//! at most is known ([`Bins::slack`]), and what hangs on less than that is left to the definition: a token drawn here is the one it
//! draws, always.

use super::exp::exp;
use super::{BLOCK, Sampling, Scores};
use crate::kernels::Isa;
use crate::kernels::isa::per_isa;
use crate::kernels::simd::Lanes;

/// Distances at and below the first fall into the first bin, at and above the second into the last. Between them an octave has 128 bins:
/// a vocabulary of 128k then has hundreds of tokens in its fullest bin, and the bins fit in the first-level cache.
const NEAR: f64 = 1.0 / 256.0;
const FAR: f64 = 256.0;
const OCTAVES: usize = 16;
const BITS: u32 = 7;
const COUNT: usize = (OCTAVES << BITS) + 1;

/// By inversion; `None` where rounding might decide, and for scores that are NaN, or not finite at the top.
pub fn draw(isa: Isa, scores: &Scores<'_>, sampling: &Sampling, at: f64) -> Option<u32> {
    let mut bins = Bins::new(isa, scores, sampling);
    if !bins.total().is_finite() {
        return None;
    }
    if let Some(k) = sampling.top_k {
        bins.keep_first(k);
    }
    if sampling.top_p < 1.0 {
        let (bin, mut candidates, reached) = bins.reach(sampling.top_p)?;
        candidates.truncate(reached + 1);
        bins.end(bin, candidates);
    }
    if sampling.min_p > 0.0 {
        bins.keep_weights(sampling.min_p);
    }
    let (_, candidates, drawn) = bins.reach(at)?;
    Some(candidates[drawn].id)
}

#[derive(Clone, Copy)]
struct Candidate {
    id: u32,
    score: f64,
    /// `exp((score - highest) / temperature)`, to the bit what the definition has.
    weight: f64,
}

#[derive(Clone, Copy, Default)]
struct Bin {
    count: usize,
    /// Of the weights.
    sum: f64,
}

struct Bins<'a> {
    scores: &'a Scores<'a>,
    highest: f64,
    temperature: f64,
    /// The bin of each score.
    places: Vec<u16>,
    /// What is kept, the likeliest first: all that is in one bin stands before all that is in the next.
    bins: Vec<Bin>,
    /// What is kept of the last bin, in order, once something was cut.
    last: Option<Vec<Candidate>>,
    /// The first bin with a weight below min-p.
    below: usize,
}

impl<'a> Bins<'a> {
    fn new(isa: Isa, scores: &'a Scores<'a>, sampling: &Sampling) -> Self {
        let (highest, _) = scores.highest();
        let (temperature, min_p) = (sampling.temperature, sampling.min_p);
        let mut places = vec![0; scores.logits.len()];
        let mut bins = vec![Bin::default(); COUNT];
        let mut below = COUNT;
        let mut weights = [0.0; BLOCK];
        scores.blocks(|start, block| {
            let (weights, places) = (&mut weights[..block.len()], &mut places[start..start + block.len()]);
            weigh(isa, weights, places, block, highest, temperature);
            for (&weight, &place) in weights.iter().zip(&*places) {
                let bin = &mut bins[usize::from(place)];
                bin.count += 1;
                bin.sum += weight;
            }
            if min_p > 0.0 {
                let those = weights.iter().zip(&*places).filter(|&(&weight, _)| weight < min_p);
                below = those.fold(below, |below, (_, &place)| below.min(usize::from(place)));
            }
        });
        Bins { scores, highest, temperature, places, bins, last: None, below }
    }

    fn total(&self) -> f64 {
        self.bins.iter().map(|bin| bin.sum).sum()
    }

    /// More than rounding can move `sum` against `part * total`, here and in the definition together.
    ///
    /// No weight goes through more than `n` = scores + bins additions, in whatever order, so a sum is within `n u / (1 - n u)` of the
    /// exact one, relatively, with `u` = `EPSILON` / 2. Two sums on each side make at most `4 n u` of the total, the products `2 u`; the
    /// other `2 n u` are for the denominators and for adding and comparing the slack.
    fn slack(&self, total: f64) -> f64 {
        3.0 * (self.places.len() + COUNT) as f64 * f64::EPSILON * total
    }

    /// What is kept of `bin`, the likeliest first, the lower id among equals.
    fn in_order(&self, bin: usize) -> Vec<Candidate> {
        /// Most groups have none, which a few vector instructions tell.
        const GROUP: usize = 64;

        if let Some(last) = self.last.as_ref().filter(|_| bin + 1 == self.bins.len()) {
            return last.clone();
        }
        let mut candidates = Vec::with_capacity(self.bins[bin].count);
        for (n, group) in self.places.chunks(GROUP).enumerate() {
            if !group.iter().fold(false, |any, &place| any | (usize::from(place) == bin)) {
                continue;
            }
            for (id, _) in (n * GROUP..).zip(group).filter(|&(_, &place)| usize::from(place) == bin) {
                let score = self.scores.get(id as u32);
                candidates.push(Candidate { id: id as u32, score, weight: exp((score - self.highest) / self.temperature) });
            }
        }
        candidates.sort_unstable_by(|a, b| b.score.total_cmp(&a.score).then(a.id.cmp(&b.id)));
        candidates
    }

    /// Keep nothing past `candidates`, the first of `bin`.
    fn end(&mut self, bin: usize, candidates: Vec<Candidate>) {
        self.bins.truncate(bin + 1);
        self.bins[bin] = Bin { count: candidates.len(), sum: candidates.iter().map(|candidate| candidate.weight).sum() };
        self.last = Some(candidates);
    }

    fn keep_first(&mut self, k: usize) {
        let mut before = 0;
        for bin in 0..self.bins.len() {
            let count = self.bins[bin].count;
            if before + count >= k {
                let mut candidates = self.in_order(bin);
                candidates.truncate(k - before);
                return self.end(bin, candidates);
            }
            before += count;
        }
    }

    /// End before the first weight below `min_p`.
    fn keep_weights(&mut self, min_p: f64) {
        if self.below < self.bins.len() {
            let mut candidates = self.in_order(self.below);
            candidates.truncate(candidates.iter().take_while(|candidate| candidate.weight >= min_p).count());
            self.end(self.below, candidates);
        }
    }

    /// Where the sum of the weights, from the likeliest down, passes `part` of the total: the bin, what is in it, and which of those.
    fn reach(&self, part: f64) -> Option<(usize, Vec<Candidate>, usize)> {
        let total = self.total();
        let (below, past) = (part * total - self.slack(total), part * total + self.slack(total));
        let mut before = 0.0;
        for (bin, Bin { sum, .. }) in self.bins.iter().enumerate() {
            if before + sum >= below {
                let candidates = self.in_order(bin);
                let mut sum = before;
                for (n, candidate) in candidates.iter().enumerate() {
                    sum += candidate.weight;
                    if sum >= below {
                        // Nothing before it passes; whether it does itself may be too close to call.
                        return (sum > past).then_some((bin, candidates, n));
                    }
                }
            }
            before += sum;
        }
        None
    }
}

per_isa! {
    /// `weights[i] = exp((scores[i] - highest) / temperature)`, and the bin of `highest - scores[i]`.
    fn weigh(weights: &mut [f64], places: &mut [u16], scores: &[f64], highest: f64, temperature: f64) = weigh_generic
}

#[inline(always)]
fn weigh_generic<V: Lanes>(weights: &mut [f64], places: &mut [u16], scores: &[f64], highest: f64, temperature: f64) {
    assert!(weights.len() == scores.len() && places.len() == scores.len());
    for ((weight, place), score) in weights.iter_mut().zip(places).zip(scores) {
        *weight = exp((score - highest) / temperature);
        *place = bin(highest - score);
    }
}

/// Exponent and leading bits of the mantissa, which rise with the distance.
#[inline(always)]
fn bin(distance: f64) -> u16 {
    const SHIFT: u32 = f64::MANTISSA_DIGITS - 1 - BITS;
    let distance = if distance > NEAR { distance } else { NEAR };
    let distance = if distance < FAR { distance } else { FAR };
    ((distance.to_bits() >> SHIFT) - (NEAR.to_bits() >> SHIFT)) as u16
}
