//! Logits -> next token: greedy, or drawn with a seed, the same on every machine.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::error::{Error, Result};

/// How the next token is chosen. The filters apply in this order: repetition penalty, temperature, top-k, top-p, min-p.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0: the likeliest token, the lowest id among equals; nothing is drawn. Above: logits are divided by it.
    pub temperature: f64,
    /// Keep the `k` likeliest.
    pub top_k: Option<usize>,
    /// Keep the fewest tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: f64,
    /// Keep tokens at least this many times as likely as the likeliest; 0 keeps all.
    pub min_p: f64,
    /// Positive logits of tokens that stand in the text are divided by it, negative ones multiplied; 1 changes nothing.
    /// Source: Keskar et al. 2019, arXiv:1909.05858.
    pub repetition_penalty: f64,
}

impl Sampling {
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: None, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 };

    pub fn check(&self) -> Result<()> {
        let refuse = |field: &'static str, problem: String| Err(Error::Sampling { field, problem });
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return refuse("temperature", format!("must be zero or more, found {}", self.temperature));
        }
        if self.top_k == Some(0) {
            return refuse("top_k", "must be at least 1, found 0".into());
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refuse("top_p", format!("must be above 0 and at most 1, found {}", self.top_p));
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return refuse("min_p", format!("must be between 0 and 1, found {}", self.min_p));
        }
        if !(self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0) {
            return refuse("repetition_penalty", format!("must be above zero, found {}", self.repetition_penalty));
        }
        Ok(())
    }
}

/// The next token.
///
/// - `logits`: `[vocab]`, finite; only the first `allowed` are candidates (the tokenizer may know fewer tokens than the head has rows)
/// - `text`: token ids so far, for the repetition penalty
/// - `step`: how many tokens were drawn before; each has its own part of the stream of `seed`, so a draw depends on nothing else
///
/// # Panics
/// If `allowed` is 0 or more than `logits` holds.
pub fn sample(logits: &[f32], allowed: usize, text: &[u32], sampling: &Sampling, seed: u64, step: u64) -> u32 {
    assert!(allowed > 0 && allowed <= logits.len());
    let mut scores: Vec<f64> = logits[..allowed].iter().map(|&logit| f64::from(logit)).collect();
    if sampling.repetition_penalty != 1.0 {
        let mut seen: Vec<u32> = text.to_vec();
        seen.sort_unstable();
        seen.dedup();
        for id in seen {
            if let Some(score) = scores.get_mut(id as usize) {
                *score = if *score > 0.0 { *score / sampling.repetition_penalty } else { *score * sampling.repetition_penalty };
            }
        }
    }
    if sampling.temperature == 0.0 {
        return likeliest(&scores);
    }
    draw(&scores, sampling, uniform(seed, step))
}

fn likeliest(scores: &[f64]) -> u32 {
    let mut best = 0;
    for (id, score) in scores.iter().enumerate() {
        if *score > scores[best] {
            best = id;
        }
    }
    best as u32
}

/// By inversion: tokens from the likeliest down, ids breaking ties, until their sum passes `at` of the whole.
fn draw(scores: &[f64], sampling: &Sampling, at: f64) -> u32 {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    order.sort_unstable_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b)));
    order.truncate(sampling.top_k.unwrap_or(order.len()));
    let highest = scores[order[0] as usize];
    // libm's exp is plain Rust: the same bits on every machine. A temperature so low that all divides to -inf leaves the first.
    let mut weights: Vec<f64> = order.iter().map(|&id| libm::exp((scores[id as usize] - highest) / sampling.temperature)).collect();
    if sampling.top_p < 1.0 {
        let total: f64 = weights.iter().sum();
        let mut sum = 0.0;
        let kept = weights.iter().position(|weight| {
            sum += weight;
            sum >= sampling.top_p * total
        });
        weights.truncate(kept.map_or(weights.len(), |last| last + 1));
    }
    if sampling.min_p > 0.0 {
        let kept = weights.iter().take_while(|&&weight| weight >= sampling.min_p).count();
        weights.truncate(kept);
    }
    let total: f64 = weights.iter().sum();
    let mut sum = 0.0;
    let drawn = weights.iter().position(|weight| {
        sum += weight;
        sum > at * total
    });
    order[drawn.unwrap_or(weights.len() - 1)]
}

/// In `[0, 1)`, 53 bits, from ChaCha8: its output is fixed by its specification.
fn uniform(seed: u64, step: u64) -> f64 {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(step);
    (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.0, 2.0, 1.0, 2.0, -3.0];

    fn counts(sampling: Sampling, logits: &[f32]) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        for step in 0..20_000 {
            counts[sample(logits, logits.len(), &[], &sampling, 7, step) as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_equals() {
        assert_eq!(sample(&LOGITS, 5, &[], &Sampling::GREEDY, 0, 0), 1);
        assert_eq!(sample(&LOGITS, 1, &[], &Sampling::GREEDY, 0, 0), 0);
    }

    #[test]
    fn draws_follow_the_softmax() {
        let counts = counts(Sampling { temperature: 0.5, ..Sampling::GREEDY }, &LOGITS);
        let weights: Vec<f64> = LOGITS.iter().map(|&l| (f64::from(l) / 0.5).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (count, weight) in counts.iter().zip(weights) {
            let expected = 20_000.0 * weight / total;
            // Five standard deviations of a binomial count, and one for counts near zero.
            assert!((*count as f64 - expected).abs() <= 5.0 * expected.sqrt() + 1.0, "{counts:?}");
        }
    }

    #[test]
    fn filters_keep_what_they_say() {
        let warm = Sampling { temperature: 1.0, ..Sampling::GREEDY };
        let drawn = |sampling| counts(sampling, &LOGITS).iter().enumerate().filter(|(_, n)| **n > 0).map(|(id, _)| id).collect::<Vec<_>>();
        assert_eq!(drawn(Sampling { top_k: Some(1), ..warm }), [1]);
        assert_eq!(drawn(Sampling { top_k: Some(2), ..warm }), [1, 3]);
        assert_eq!(drawn(Sampling { top_p: 1e-9, ..warm }), [1]);
        assert_eq!(drawn(Sampling { top_p: 0.79, ..warm }), [1, 3]); // 0.398 + 0.398, then 0.147
        assert_eq!(drawn(Sampling { min_p: 0.3, ..warm }), [1, 2, 3]); // e^-1 = 0.37, e^-2 = 0.14
        assert_eq!(drawn(Sampling { min_p: 1.0, ..warm }), [1, 3]);
        assert_eq!(drawn(Sampling { temperature: 1e-300, ..warm }), [1, 3]);
    }

    #[test]
    fn the_penalty_reaches_what_was_said() {
        let penalty = Sampling { repetition_penalty: 4.0, ..Sampling::GREEDY };
        assert_eq!(sample(&LOGITS, 5, &[1, 1, 99], &penalty, 0, 0), 3);
        assert_eq!(sample(&LOGITS, 5, &[1, 3], &penalty, 0, 0), 2);
        assert_eq!(sample(&[-1.0, -2.0], 2, &[0], &penalty, 0, 0), 1);
    }

    #[test]
    fn a_seed_is_the_same_everywhere() {
        let drawn: Vec<u64> = (0..3).map(|step| (uniform(42, step) * 1e15) as u64).collect();
        assert_eq!(drawn, SEED_42);
        assert_ne!(uniform(42, 0), uniform(43, 0));
    }

    /// Recorded once; a change here changes every seeded text.
    const SEED_42: [u64; 3] = [681_896_192_306_671, 716_791_652_504_788, 183_610_353_637_871];
}
