//! Logits -> next token: greedy, or drawn with a seed, the same on every machine.
//!
//! What is drawn is defined by `by_sorting`, to the last bit of its sums. `bins` finds the same token without the sort, ten
//! to fifteen times sooner for a vocabulary of 49k, or says that it cannot tell; then the definition runs.

mod bins;
mod exp;

use std::sync::LazyLock;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::error::{Error, Result};
use crate::kernels::Isa;

/// Scores that are looked at together, in the first-level cache.
const BLOCK: usize = 1024;
/// Fewer are sorted sooner than binned.
const FEW: usize = 256;

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
    let scores = Scores::new(&logits[..allowed], text, sampling.repetition_penalty);
    if sampling.temperature == 0.0 { scores.highest().1 } else { draw(&scores, sampling, uniform(seed, step)) }
}

/// Logits in f64, after the repetition penalty.
struct Scores<'a> {
    logits: &'a [f32],
    /// Those that the penalty changes, by id.
    penalised: Vec<(u32, f64)>,
}

impl<'a> Scores<'a> {
    fn new(logits: &'a [f32], text: &[u32], penalty: f64) -> Self {
        let mut seen = if penalty == 1.0 { Vec::new() } else { text.to_vec() };
        seen.sort_unstable();
        seen.dedup();
        let penalised = |&id: &u32| {
            let logit = f64::from(*logits.get(id as usize)?);
            Some((id, if logit > 0.0 { logit / penalty } else { logit * penalty }))
        };
        Scores { logits, penalised: seen.iter().filter_map(penalised).collect() }
    }

    fn get(&self, id: u32) -> f64 {
        match self.penalised.binary_search_by_key(&id, |&(id, _)| id) {
            Ok(n) => self.penalised[n].1,
            Err(_) => f64::from(self.logits[id as usize]),
        }
    }

    fn all(&self) -> Vec<f64> {
        let mut all = Vec::with_capacity(self.logits.len());
        self.blocks(|_, block| all.extend_from_slice(block));
        all
    }

    /// All of them, in order, a few at a time with the id of the first.
    fn blocks(&self, mut each: impl FnMut(usize, &[f64])) {
        let mut penalised = self.penalised.iter().peekable();
        let mut block = [0.0; BLOCK];
        for (n, logits) in self.logits.chunks(BLOCK).enumerate() {
            let (start, block) = (n * BLOCK, &mut block[..logits.len()]);
            for (score, &logit) in block.iter_mut().zip(logits) {
                *score = f64::from(logit);
            }
            while let Some(&(id, score)) = penalised.next_if(|&&(id, _)| (id as usize) < start + block.len()) {
                block[id as usize - start] = score;
            }
            each(start, block);
        }
    }

    /// The highest, and the lowest id that has it. NaN counts for nothing, or for everything in the first place.
    fn highest(&self) -> (f64, u32) {
        let mut best = (self.get(0), 0);
        self.blocks(|start, block| {
            // In eight lanes, which the compiler may keep in vector registers.
            let (eights, rest) = block.as_chunks::<8>();
            let higher = |a: f64, b: f64| if b > a { b } else { a };
            let mut lanes = [f64::NEG_INFINITY; 8];
            for eight in eights {
                lanes = std::array::from_fn(|lane| higher(lanes[lane], eight[lane]));
            }
            let highest = lanes.iter().chain(rest).fold(f64::NEG_INFINITY, |a, &b| higher(a, b));
            if highest > best.0 {
                let first = block.iter().position(|&score| score == highest).unwrap_or(0);
                best = (highest, (start + first) as u32);
            }
        });
        best
    }
}

fn draw(scores: &Scores<'_>, sampling: &Sampling, at: f64) -> u32 {
    /// All give the same weights.
    static ISA: LazyLock<Isa> = LazyLock::new(|| Isa::choose().unwrap_or(Isa::PORTABLE));

    let found = if scores.logits.len() < FEW { None } else { bins::draw(*ISA, scores, sampling, at) };
    found.unwrap_or_else(|| by_sorting(&scores.all(), sampling, at))
}

/// By inversion: tokens from the likeliest down, ids breaking ties, until their sum passes `at` of the whole.
fn by_sorting(scores: &[f64], sampling: &Sampling, at: f64) -> u32 {
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
    use proptest::prelude::*;
    use proptest::sample::select;

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

    /// The scores, the greedy choice and the draw, each in the plainest way.
    fn plainly(logits: &[f32], text: &[u32], sampling: &Sampling, at: f64) -> u32 {
        let mut scores: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
        for (id, score) in scores.iter_mut().enumerate().filter(|&(id, _)| text.contains(&(id as u32))) {
            assert_eq!(score.to_bits(), f64::from(logits[id]).to_bits());
            *score = if *score > 0.0 { *score / sampling.repetition_penalty } else { *score * sampling.repetition_penalty };
        }
        if sampling.temperature > 0.0 {
            return by_sorting(&scores, sampling, at);
        }
        let mut best = 0;
        for id in 0..scores.len() {
            if scores[id] > scores[best] {
                best = id;
            }
        }
        best as u32
    }

    /// A few thousand at most; every kind of tie, and what is no logit at all.
    fn logits() -> impl Strategy<Value = Vec<f32>> {
        const ODD: [f32; 11] = [0.0, -0.0, 1e-40, f32::MAX, f32::MIN, -1e30, 700.0, f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -f32::NAN];
        let smooth = (-8.0..4.0f32).boxed();
        let tied = (-9..9i32).prop_map(|n| n as f32 * 0.5).boxed();
        let close = (0..9u32).prop_map(|n| f32::from_bits(1.0f32.to_bits() + n)).boxed();
        let masked = prop_oneof![9 => -8.0..4.0f32, 1 => Just(f32::NEG_INFINITY)].boxed();
        let wild = (-1e3..1e3f32).boxed();
        let any = prop_oneof![20 => -8.0..4.0f32, 1 => select(&ODD[..])].boxed();
        let finite = prop_oneof![20 => -8.0..4.0f32, 1 => select(&ODD[..7])].boxed();
        let one = Just(-2.5f32).boxed();
        let count = prop_oneof![1..9usize, 250..260usize, 1..600usize, 2000..2100usize];
        (select(vec![smooth, tied, close, masked, wild, any, finite, one]), count)
            .prop_flat_map(|(values, count)| prop::collection::vec(values, count))
    }

    fn settings() -> impl Strategy<Value = Sampling> {
        let temperature = select(vec![0.0, f64::MIN_POSITIVE, 1e-300, 1e-3, 0.1, 0.7, 1.0, 1.0, 2.5, 100.0, 1e300]);
        let top_k = prop::option::of(prop_oneof![1..60usize, 1..3000usize, Just(usize::MAX)]);
        let top_p = prop_oneof![Just(1.0), select(vec![f64::MIN_POSITIVE, 1e-9, 0.25, 0.5, 0.75, 0.9, 1.0f64.next_down()]), 0.01..1.0];
        let min_p = prop_oneof![Just(0.0), select(vec![f64::MIN_POSITIVE, 1e-9, 0.05, 0.5, (-0.5f64).exp(), 1.0]), 0.0..1.0];
        let penalty = select(vec![1.0, 1.0, 1.3, 0.5, 1e-300, 1e300]);
        (temperature, top_k, top_p, min_p, penalty).prop_map(|(temperature, top_k, top_p, min_p, repetition_penalty)| Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

        #[test]
        fn bins_draw_what_sorting_draws(
            logits in logits(), settings in settings(), text in prop::collection::vec(0..3000u32, 0..40), at in prop::collection::vec(0.0..1.0, 8),
        ) {
            prop_assert!(settings.check().is_ok());
            let scores = Scores::new(&logits, &text, settings.repetition_penalty);
            // Where the likeliest weight is NaN, min-p leaves none, and the definition gives up.
            let weighed = scores.highest().0.is_finite() && !logits.iter().any(|logit| logit.is_nan());
            let settings = if weighed { settings } else { Sampling { min_p: 0.0, ..settings } };
            let edges = [0.0, f64::EPSILON / 2.0, 0.25, 0.5, 0.75, 1.0f64.next_down()];
            for at in at.into_iter().chain(edges) {
                let expected = plainly(&logits, &text, &settings, at);
                if settings.temperature == 0.0 {
                    prop_assert_eq!(scores.highest().1, expected);
                    continue;
                }
                prop_assert_eq!(draw(&scores, &settings, at), expected);
                for isa in Isa::available() {
                    // Below `FEW` too, where they are not asked.
                    let found = bins::draw(isa, &scores, &settings, at);
                    prop_assert!(found.is_none_or(|found| found == expected), "{found:?} for {expected} on {}", isa.name());
                }
            }
        }
    }

    #[test]
    fn bins_can_nearly_always_tell() {
        // Quantiles of the normal distribution, near enough, shuffled by a stride.
        let vocab = 49_152;
        let quantile = |n: usize| (n as f64 + 0.5) / vocab as f64;
        let logits: Vec<f32> = (0..vocab).map(|n| quantile(n * 12_289 % vocab)).map(|p| ((p / (1.0 - p)).ln() * 1.7) as f32).collect();
        let scores = Scores::new(&logits, &[], 1.0);
        let warm = Sampling { temperature: 1.0, ..Sampling::GREEDY };
        let filtered = Sampling { top_k: Some(50), top_p: 0.9, ..warm };
        let all = Sampling { temperature: 0.8, top_k: Some(20_000), top_p: 0.95, min_p: 1e-3, ..warm };
        for sampling in [warm, filtered, all, Sampling { temperature: 0.05, ..filtered }, Sampling { temperature: 1e3, ..warm }] {
            for step in 0..40 {
                let at = uniform(3, step);
                assert_eq!(bins::draw(Isa::available()[0], &scores, &sampling, at), Some(by_sorting(&scores.all(), &sampling, at)));
            }
        }
    }
}
