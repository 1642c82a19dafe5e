//! The laws of the engine, bit for bit, over random batches on tiny random checkpoints: what a sequence gives depends on its tokens and
//! its plan alone. And every error a load or a pass can give.

mod support;

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::json;
use ster_core::kernels::Isa;
use ster_core::sample::Sampling;
use ster_core::tensor::{Dtype, Matrix};
use ster_core::{CapturePlan, CaptureRows, Edit, Error, KvCache, LogitRows, Output, Sequence, SteeringLlama, SteeringPlan, Tap};
use support::asks::{Ask, in_pieces, join, load, rows_of, run, run_cached, run_one, same, same_numbers};
use support::{Rng, Tiny, bits};
use tempfile::TempDir;

// ------------------------------------------------------------------------------------------------------------------------- engines

/// Engines for one checkpoint: all that may differ between them is threads and instruction set.
struct Engines {
    /// The fastest instruction set, one thread.
    plain: SteeringLlama,
    others: Vec<SteeringLlama>,
}

impl Engines {
    fn of(tiny: &Tiny) -> Engines {
        let dir = TempDir::new().unwrap();
        tiny.write(dir.path());
        let load = |threads, isa| SteeringLlama::load_with(dir.path(), Some(threads), isa).unwrap();
        let fastest = Isa::available()[0];
        let mut others = vec![load(2, fastest), load(5, fastest)];
        others.extend(Isa::available().into_iter().enumerate().map(|(n, isa)| load(1 + n % 2, isa)));
        // The files are mapped: the folder may go.
        Engines { plain: load(1, fastest), others }
    }
}

const KINDS: usize = 14;

/// Every family, with what it adds; and Llama's own options.
fn kind(kind: usize) -> Tiny {
    let of = |family, keys| Tiny { family, keys, ..Tiny::default() };
    match kind {
        0 => Tiny::default(),
        1 => {
            let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
            Tiny { dtype: Dtype::BF16, head_dim: 24, biases: true, rope: Some(yarn), ..Tiny::default() }
        }
        2 => Tiny { dtype: Dtype::F16, tied: true, activation: "gelu_pytorch_tanh", layers: 4, ..Tiny::default() },
        3 => of("mistral", json!({"sliding_window": 16})),
        4 => of("qwen2", json!({"use_sliding_window": true, "sliding_window": 65, "max_window_layers": 1})),
        5 => Tiny { head_dim: 20, kv_heads: 1, ..of("qwen3", json!({})) },
        6 => of("phi3", json!({"partial_rotary_factor": 0.5, "sliding_window": 2})),
        7 => of(
            "granite",
            json!({"embedding_multiplier": 3.1, "residual_multiplier": 0.37, "attention_multiplier": 0.21, "logits_scaling": 1.7}),
        ),
        8 => of("olmo2", json!({})),
        9 => Tiny { tied: true, ..of("smollm3", json!({"no_rope_layer_interval": 2, "use_sliding_window": true, "sliding_window": 3})) },
        10 => Tiny {
            tied: true,
            dtype: Dtype::BF16,
            ..of(
                "gemma2",
                json!({"sliding_window": 16, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 10}),
            )
        },
        11 => Tiny {
            tied: true,
            dtype: Dtype::F16,
            layers: 4,
            head_dim: 24,
            ..of("gemma3_text", json!({"sliding_window": 64, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20}))
        },
        12 => Tiny { rope: Some(json!({"type": "dynamic", "factor": 4.0})), context: 64, ..Tiny::default() },
        _ => Tiny {
            rope: Some(json!({"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0]})),
            ..of("phi3", json!({"partial_rotary_factor": 0.5, "original_max_position_embeddings": 64}))
        },
    }
}

fn engines(number: usize) -> &'static Engines {
    static LOADED: [OnceLock<Engines>; KINDS] = [const { OnceLock::new() }; KINDS];
    LOADED[number].get_or_init(|| Engines::of(&kind(number)))
}

/// Kinds for which a sequence may be cut anywhere: dynamic and longrope rotations depend on its length, as the documentation says.
fn cuttable() -> impl Strategy<Value = usize> {
    0..KINDS - 2
}

/// The first `len` positions, where the cache still has what they see; where it has not, it says so.
fn cut(cache: &KvCache, len: usize) -> Option<KvCache> {
    let fork = cache.fork(len);
    assert_eq!(fork.is_ok(), (cache.shortest()..=cache.len()).contains(&len), "{} to {len} of {}", cache.shortest(), cache.len());
    fork.ok()
}

const HIDDEN: usize = 48;
const VOCAB: u32 = 50;

// ------------------------------------------------------------------------------------------------------------------------ strategies

fn token_count() -> impl Strategy<Value = usize> {
    prop_oneof![3 => 1..24usize, 2 => select(&[1usize, 2, 17, 63, 64, 65, 130][..])]
}

fn tokens() -> impl Strategy<Value = Vec<u32>> {
    token_count().prop_flat_map(|count| prop::collection::vec(0..VOCAB, count))
}

fn edit(layers: usize) -> impl Strategy<Value = Edit> {
    let positions = prop::option::of(prop::collection::btree_set(0..40usize, 1..5));
    (0..layers, any::<u64>(), -3.0..3.0f32, positions, any::<bool>(), any::<bool>()).prop_map(
        |(layer, seed, scale, positions, each, norm_match)| {
            let positions: Option<Vec<usize>> = positions.map(|set| set.into_iter().rev().collect());
            let rows = positions.as_ref().map_or(1, |positions| if each { positions.len() } else { 1 });
            Edit { layer, vectors: vectors(rows, seed), scale, positions: positions.map(Into::into), norm_match }
        },
    )
}

fn vectors(rows: usize, seed: u64) -> Matrix {
    let mut rng = Rng::new(seed);
    Matrix { rows, cols: HIDDEN, data: (0..rows * HIDDEN).map(|_| rng.normal() as f32).collect() }
}

fn plan() -> impl Strategy<Value = SteeringPlan> {
    prop_oneof![
        Just(SteeringPlan::default()),
        prop::collection::vec(edit(3).prop_map(Arc::new), 1..4).prop_map(|edits| SteeringPlan { edits })
    ]
}

fn capture() -> impl Strategy<Value = CapturePlan> {
    let rows = select(&[CaptureRows::Last, CaptureRows::All][..]);
    let tap = select(&[Tap::PreSteer, Tap::PostSteer][..]);
    (prop::collection::btree_set(0..3usize, 0..4), rows, tap).prop_map(|(layers, rows, tap)| CapturePlan {
        layers: layers.into_iter().collect(),
        rows,
        tap,
    })
}

fn ask() -> impl Strategy<Value = Ask> {
    let logits = select(&[LogitRows::None, LogitRows::Last, LogitRows::All][..]);
    (tokens(), plan(), capture(), logits).prop_map(|(tokens, steering, capture, logits)| Ask { tokens, steering, capture, logits })
}

/// A batch, some of it repeated.
fn batch() -> impl Strategy<Value = Vec<Ask>> {
    (prop::collection::vec(ask(), 1..6), prop::collection::vec(any::<Index>(), 0..4)).prop_map(|(mut asks, repeated)| {
        for index in repeated {
            let again = index.get(&asks).clone();
            asks.push(again);
        }
        asks
    })
}

/// Ends of the pieces that a sequence of `count` tokens is cut into: all in one, one by one, or at random.
fn pieces(count: usize) -> impl Strategy<Value = Vec<usize>> {
    let random = prop::collection::btree_set(1..=count, 0..6).prop_map(move |mut ends| {
        ends.insert(count);
        ends.into_iter().collect::<Vec<_>>()
    });
    prop_oneof![1 => Just(vec![count]), 1 => Just((1..=count).collect()), 4 => random]
}

fn cut_tokens() -> impl Strategy<Value = (Vec<u32>, Vec<usize>)> {
    tokens().prop_flat_map(|tokens| {
        let ends = pieces(tokens.len());
        (Just(tokens), ends)
    })
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

// --------------------------------------------------------------------------------------------------- companions, threads, processors

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn a_sequence_gives_the_same_alone_and_in_any_batch_in_any_order(
        kind in 0..KINDS, asks in batch(), order in any::<u64>(),
    ) {
        let model = &engines(kind).plain;
        let alone: Vec<_> = asks.iter().map(|ask| run_one(model, ask)).collect();
        for (n, found) in run(model, &asks).iter().enumerate() {
            same(&format!("sequence {n} of {}", asks.len()), found, &alone[n]);
        }
        let mut places: Vec<usize> = (0..asks.len()).collect();
        let mut rng = Rng::new(order);
        for n in (1..places.len()).rev() {
            places.swap(n, rng.below(n + 1));
        }
        let shuffled: Vec<_> = places.iter().map(|&place| asks[place].clone()).collect();
        for (found, &place) in run(model, &shuffled).iter().zip(&places) {
            same(&format!("sequence {place} in the order {places:?}"), found, &alone[place]);
        }
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit(kind in 0..KINDS, asks in batch()) {
        let engines = engines(kind);
        let expected = run(&engines.plain, &asks);
        for other in &engines.others {
            for (n, (found, expected)) in run(other, &asks).iter().zip(&expected).enumerate() {
                same(&format!("sequence {n} with {} threads on {}", other.threads(), other.isa().name()), found, expected);
            }
        }
    }
}

#[test]
fn a_batch_of_sixty_four_is_sixty_four_sequences() {
    let engines = engines(1);
    let mut rng = Rng::new(64);
    let asks: Vec<Ask> = (0..64)
        .map(|n| {
            let count = [1, 2, 17, 63, 64, 65, 130, 200][n % 8];
            let tokens: Vec<u32> = (0..count).map(|_| rng.below(VOCAB as usize) as u32).collect();
            Ask::all(&engines.plain, &tokens, &SteeringPlan::default(), Tap::PreSteer)
        })
        .collect();
    let alone: Vec<_> = asks.iter().map(|ask| run_one(&engines.plain, ask)).collect();
    for model in [&engines.plain, &engines.others[0], &engines.others[1]] {
        for (n, found) in run(model, &asks).iter().enumerate() {
            same(&format!("sequence {n} of 64 with {} threads", model.threads()), found, &alone[n]);
        }
    }
}

/// Long enough rows, and enough of them, that a product is cut by rows too: whole sixteens, and more or less of one at the end.
#[test]
fn a_long_prompt_is_the_prompt_in_pieces_on_every_instruction_set() {
    let dir = TempDir::new().unwrap();
    Tiny { layers: 2, mlp: 1100, context: 1024, dtype: Dtype::BF16, ..Tiny::default() }.write(dir.path());
    let models: Vec<_> =
        Isa::available().into_iter().map(|isa| (isa, SteeringLlama::load_with(dir.path(), Some(2), isa).unwrap())).collect();
    let mut rng = Rng::new(257);
    for count in [65, 255, 256, 257, 300, 470, 513] {
        let tokens: Vec<u32> = (0..count).map(|_| rng.below(50) as u32).collect();
        let model = &models[0].1;
        let ends: Vec<usize> = (0..count).step_by(40).skip(1).chain([count]).collect();
        let expected = join(&in_pieces(model, &tokens, &SteeringPlan::default(), &ends, &mut model.cache()));
        for (isa, model) in &models {
            let found = run_one(model, &Ask::all(model, &tokens, &SteeringPlan::default(), Tap::PostSteer));
            same_numbers(&format!("{count} tokens, {}", isa.name()), &found.residual, &expected.residual, &[count * 48, 48]);
        }
    }
}

// --------------------------------------------------------------------------------------------------------------------------- caches

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn a_sequence_gives_the_same_whole_token_by_token_and_in_any_pieces(kind in cuttable(), (tokens, ends) in cut_tokens(), plan in plan()) {
        let model = &engines(kind).plain;
        let whole = run_one(model, &Ask::all(model, &tokens, &plan, Tap::PostSteer));
        let mut cache = model.cache();
        let found = join(&in_pieces(model, &tokens, &plan, &ends, &mut cache));
        same(&format!("in pieces to {ends:?}"), &found, &whole);
        prop_assert_eq!(cache.len(), tokens.len());
    }

    /// Several cached sequences, each cut in its own way, run side by side with an uncached one.
    #[test]
    fn pieces_of_several_sequences_share_passes(kind in cuttable(), cuts in prop::collection::vec(cut_tokens(), 2..5), beside in ask()) {
        let engines = engines(kind);
        for model in [&engines.plain, &engines.others[0]] {
            let plan = SteeringPlan::default();
            let mut caches: Vec<_> = cuts.iter().map(|_| model.cache()).collect();
            let mut found: Vec<Vec<Output>> = vec![Vec::new(); cuts.len()];
            let companion = run_one(&engines.plain, &beside);
            for round in 0..cuts.iter().map(|(_, ends)| ends.len()).max().unwrap() {
                let due: Vec<usize> = (0..cuts.len()).filter(|&n| round < cuts[n].1.len()).collect();
                let asks: Vec<Ask> = due
                    .iter()
                    .map(|&n| {
                        let (tokens, ends) = &cuts[n];
                        let start = if round == 0 { 0 } else { ends[round - 1] };
                        Ask::all(model, &tokens[start..ends[round]], &plan, Tap::PostSteer)
                    })
                    .collect();
                let mut sequences = vec![beside.sequence(None)];
                let mut free = caches.iter_mut().enumerate();
                for (ask, &n) in asks.iter().zip(&due) {
                    let (_, cache) = free.find(|(index, _)| *index == n).unwrap();
                    sequences.push(ask.sequence(Some(cache)));
                }
                let mut outputs = model.forward(&mut sequences, &|| false).unwrap().into_iter();
                same("the companion", &outputs.next().unwrap(), &companion);
                for (output, n) in outputs.zip(due) {
                    found[n].push(output);
                }
            }
            for (n, (tokens, ends)) in cuts.iter().enumerate() {
                let whole = run_one(&engines.plain, &Ask::all(model, tokens, &plan, Tap::PostSteer));
                same(&format!("sequence {n} in pieces to {ends:?}"), &join(&found[n]), &whole);
            }
        }
    }

    /// Any number of sequences of a batch go on from one cache, which is only read, beside one that extends its fork.
    #[test]
    fn a_shared_prefix_is_a_recomputed_one(
        kind in cuttable(), stem in tokens(), at in any::<Index>(), rest in prop::collection::vec(tokens(), 1..5), plan in plan(), beside in ask(),
    ) {
        let model = &engines(kind).plain;
        let mut trunk = model.cache();
        in_pieces(model, &stem, &plan, &[stem.len()], &mut trunk);
        let Some(prefix) = cut(&trunk, at.index(stem.len() + 1)) else { return Ok(()) };
        let mut extended = prefix.clone();
        let asks: Vec<Ask> = rest.iter().map(|tokens| Ask::all(model, tokens, &plan, Tap::PostSteer)).collect();
        let mut batch = vec![beside.sequence(None), asks[0].sequence(Some(&mut extended))];
        batch.extend(asks.iter().map(|ask| Sequence { prefix: Some(&prefix), ..ask.sequence(None) }));
        let found = model.forward(&mut batch, &|| false).unwrap();

        same("the companion", &found[0], &run_one(model, &beside));
        let expected: Vec<Output> = asks.iter().map(|ask| run_cached(model, ask, &mut prefix.clone()).unwrap()).collect();
        same("the cache that is extended", &found[1], &expected[0]);
        prop_assert_eq!(extended.len(), prefix.len() + rest[0].len());
        for (found, expected) in found[2..].iter().zip(&expected) {
            same("the prefix goes on", found, expected);
        }
    }

    /// One prefix, two continuations from a fork anywhere, taken in turns; then a third from the fork of a fork.
    #[test]
    fn a_forked_cache_is_a_recomputed_one(
        kind in cuttable(), stem in tokens(), at in any::<Index>(), first in tokens(), second in tokens(), first_half in any::<Index>(),
    ) {
        let model = &engines(kind).plain;
        let plan = SteeringPlan::default();
        let mut trunk = model.cache();
        in_pieces(model, &stem, &plan, &[stem.len()], &mut trunk);
        let kept = at.index(stem.len() + 1);
        let Some(mut fork) = cut(&trunk, kept) else { return Ok(()) };
        prop_assert_eq!(fork.len(), kept);

        let half = first_half.index(first.len());
        if half > 0 {
            in_pieces(model, &first[..half], &plan, &[half], &mut trunk);
        }
        let second_found = in_pieces(model, &second, &plan, &[second.len()], &mut fork);
        let first_found = in_pieces(model, &first[half..], &plan, &[first.len() - half], &mut trunk);
        let third_found = cut(&fork, kept).map(|mut fork| in_pieces(model, &first, &plan, &[first.len()], &mut fork));

        let tail = |before: &[u32], tokens: &[u32]| {
            let mut cache = model.cache();
            let mut ends = vec![before.len(), before.len() + tokens.len()];
            ends.dedup();
            let all = [before, tokens].concat();
            ends.retain(|&end| end > 0);
            in_pieces(model, &all, &plan, &ends, &mut cache).pop().unwrap()
        };
        same("the trunk goes on", &first_found[0], &tail(&[&stem[..], &first[..half]].concat(), &first[half..]));
        same("the fork goes on", &second_found[0], &tail(&stem[..kept], &second));
        if let Some(found) = third_found {
            same("the fork of the fork goes on", &found[0], &tail(&stem[..kept], &first));
        }
    }
}

#[test]
fn a_cache_grows_over_the_edges_of_its_blocks() {
    let model = &engines(0).plain;
    let mut rng = Rng::new(9);
    let tokens: Vec<u32> = (0..140).map(|_| rng.below(VOCAB as usize) as u32).collect();
    for length in [63, 64, 65, 127, 128, 129, 130] {
        let plan = SteeringPlan::default();
        let whole = run_one(model, &Ask::all(model, &tokens[..length + 3], &plan, Tap::PostSteer));
        let mut cache = model.cache();
        in_pieces(model, &tokens, &plan, &[length], &mut cache);
        for fork in [cache.fork(length).unwrap(), cache.fork(length - 1).unwrap(), cache] {
            let mut fork = fork;
            let start = fork.len();
            let rest = in_pieces(model, &tokens[start..length + 3], &plan, &[length + 3 - start], &mut fork);
            let expected = Output {
                residual: (0..3)
                    .flat_map(|layer| whole.residual[(layer * (length + 3) + start) * HIDDEN..][..(length + 3 - start) * HIDDEN].to_vec())
                    .collect(),
                residual_shape: rest[0].residual_shape,
                logits: whole.logits[start * VOCAB as usize..].to_vec(),
                logits_shape: rest[0].logits_shape,
                steered: Vec::new(),
            };
            same(&format!("from {start} on"), &rest[0], &expected);
        }
    }
}

#[test]
fn a_cache_filled_by_a_pass_that_stopped_early_is_not_used_deeper() {
    let model = &engines(0).plain;
    let shallow = |tokens: &[u32]| Ask {
        capture: CapturePlan { layers: vec![1], rows: CaptureRows::All, tap: Tap::PreSteer },
        logits: LogitRows::None,
        ..Ask::all(model, tokens, &SteeringPlan::default(), Tap::PreSteer)
    };
    let mut cache = model.cache();
    run_cached(model, &shallow(&[1, 2, 3]), &mut cache).unwrap();
    let refused = run_cached(model, &Ask::all(model, &[4], &SteeringPlan::default(), Tap::PreSteer), &mut cache);
    assert!(matches!(refused, Err(Error::Cache { .. })), "{refused:?}");
    let on = run_cached(model, &shallow(&[4]), &mut cache).unwrap();
    let whole = run_one(model, &shallow(&[1, 2, 3, 4]));
    same_numbers("layer 1 through a shallow cache", &on.residual, &whole.residual[3 * HIDDEN..4 * HIDDEN], &[HIDDEN]);
    // An emptied one starts again.
    let mut emptied = cache.fork(0).unwrap();
    run_cached(model, &Ask::all(model, &[4], &SteeringPlan::default(), Tap::PreSteer), &mut emptied).unwrap();
}

// ------------------------------------------------------------------------------------------------------------- what is kept of a pass

proptest! {
    #![proptest_config(config(300))]

    /// Every way to ask for less gives a part of what asking for everything gives.
    #[test]
    fn asking_for_less_changes_nothing_that_is_given(kind in 0..KINDS, ask in ask()) {
        let model = &engines(kind).plain;
        let all = Ask::all(model, &ask.tokens, &ask.steering, ask.capture.tap);
        let full = run_one(model, &all);
        let found = run_one(model, &ask);
        let count = ask.tokens.len();

        let kept = match ask.capture.rows {
            CaptureRows::Last => count - 1..count,
            CaptureRows::All => 0..count,
        };
        let rows = if ask.capture.layers.is_empty() { 0 } else { kept.len() };
        prop_assert_eq!(found.residual_shape, [ask.capture.layers.len(), rows, HIDDEN]);
        for &layer in &ask.capture.layers {
            let expected = &all.layer(&full, layer)[kept.start * HIDDEN..kept.end * HIDDEN];
            same_numbers(&format!("layer {layer}"), ask.layer(&found, layer), expected, &[HIDDEN]);
        }
        let vocab = VOCAB as usize;
        let expected = match ask.logits {
            LogitRows::None => &[][..],
            LogitRows::Last => &full.logits[(count - 1) * vocab..],
            LogitRows::All => &full.logits[..],
        };
        same_numbers("logits", &found.logits, expected, &[vocab]);
        prop_assert_eq!(found.steered, full.steered);
    }
}

// ------------------------------------------------------------------------------------------------------------------------- steering

/// Both taps of every layer, and the logits.
fn taps(model: &SteeringLlama, tokens: &[u32], plan: &SteeringPlan) -> [Output; 2] {
    [Tap::PreSteer, Tap::PostSteer].map(|tap| run_one(model, &Ask::all(model, tokens, plan, tap)))
}

/// Adding 0 would turn -0.0 into 0.0. A residual of -0.0 is rare: here the embedding holds one, and every lane of what is added to it
/// is a negative product that underflows.
#[test]
fn a_scale_of_zero_leaves_a_negative_zero_alone() {
    const COLUMN: usize = 5;
    let mut spoiled = Vec::new();
    let mut fill = |name, range: std::ops::Range<usize>, value| spoiled.extend(range.map(|index| (name, index, value)));
    fill("model.embed_tokens.weight", HIDDEN + COLUMN..HIDDEN + COLUMN + 1, -0.0); // of token 1
    for (matrix, bias, rows, value) in [
        ("model.layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.v_proj.bias", 16, 1e-30),
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.gate_proj.bias", 48, 1.0),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.bias", 48, 1e-30),
    ] {
        fill(matrix, 0..rows * HIDDEN, 0.0);
        fill(bias, 0..rows, value);
    }
    for (matrix, bias) in [
        ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.bias"),
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.bias"),
    ] {
        fill(matrix, COLUMN * 48..(COLUMN + 1) * 48, -1e-30);
        fill(bias, COLUMN..COLUMN + 1, -0.0);
    }
    let model = load(&Tiny { mlp: 48, biases: true, spoiled, ..Tiny::default() });
    let [plain, _] = taps(&model, &[1], &SteeringPlan::default());
    assert_eq!(plain.residual[COLUMN].to_bits(), (-0.0f32).to_bits(), "the test has its -0.0");
    for scale in [0.0, -0.0] {
        let vectors = Matrix { rows: 1, cols: HIDDEN, data: vec![1.0; HIDDEN] };
        let plan = SteeringPlan { edits: vec![Arc::new(Edit { layer: 0, vectors, scale, positions: None, norm_match: false })] };
        let [_, post] = taps(&model, &[1], &plan);
        same_numbers("scale 0 on -0.0", &post.residual, &plain.residual, &[HIDDEN]);
    }
}

proptest! {
    #![proptest_config(config(250))]

    #[test]
    fn a_scale_of_zero_is_no_steering(kind in 0..KINDS, tokens in tokens(), edit in edit(3), negative: bool) {
        let model = &engines(kind).plain;
        let scale = if negative { -0.0 } else { 0.0 };
        let plan = SteeringPlan { edits: vec![Arc::new(Edit { scale, ..edit })] };
        let [pre, post] = taps(model, &tokens, &plan);
        let [plain, _] = taps(model, &tokens, &SteeringPlan::default());
        for mut found in [pre, post] {
            found.steered.clear();
            same("scale 0", &found, &plain);
        }
    }

    #[test]
    fn a_vector_moves_its_layer_by_scale_times_itself_and_nothing_before_it(kind in 0..KINDS, tokens in tokens(), edit in edit(3)) {
        let model = &engines(kind).plain;
        let edit = Edit { norm_match: false, ..edit };
        let plan = SteeringPlan { edits: vec![Arc::new(edit.clone())] };
        let [plain, _] = taps(model, &tokens, &SteeringPlan::default());
        let [pre, post] = taps(model, &tokens, &plan);
        let reached: Vec<usize> = (0..tokens.len()).filter(|&p| edit.vector_at(p).is_some()).collect();
        prop_assert_eq!(&post.steered[0], &reached);

        for layer in 0..edit.layer {
            same_numbers(&format!("pre of layer {layer}"), rows_of(&pre, layer), rows_of(&plain, layer), &[HIDDEN]);
            same_numbers(&format!("post of layer {layer}"), rows_of(&post, layer), rows_of(&plain, layer), &[HIDDEN]);
        }
        same_numbers("pre of its own layer", rows_of(&pre, edit.layer), rows_of(&plain, edit.layer), &[HIDDEN]);
        let mut expected = rows_of(&plain, edit.layer).to_vec();
        for &position in &reached {
            let vector = edit.vector_at(position).unwrap();
            for (h, v) in expected[position * HIDDEN..].iter_mut().zip(vector) {
                let product = edit.scale * v;
                *h += product;
            }
        }
        same_numbers("post of its own layer", rows_of(&post, edit.layer), &expected, &[HIDDEN]);
        // Rows before the first steered position are as they were at every layer, and so are their logits.
        let untouched = reached.first().copied().unwrap_or(tokens.len());
        for layer in 0..model.config().layers {
            let (found, expected) = (&rows_of(&post, layer)[..untouched * HIDDEN], &rows_of(&plain, layer)[..untouched * HIDDEN]);
            same_numbers(&format!("rows before the first steered one, layer {layer}"), found, expected, &[HIDDEN]);
        }
        let vocab = VOCAB as usize;
        same_numbers("logits before the first steered row", &post.logits[..untouched * vocab], &plain.logits[..untouched * vocab], &[vocab]);
        if untouched < tokens.len() && edit.scale != 0.0 {
            prop_assert_ne!(bits(&post.logits), bits(&plain.logits), "steering reaches the logits");
        }
    }

    #[test]
    fn vectors_on_one_layer_add_up_in_their_order(kind in 0..KINDS, tokens in tokens(), first in edit(3), second in edit(3)) {
        let model = &engines(kind).plain;
        let layer = first.layer;
        let edits = [Edit { norm_match: false, ..first }, Edit { norm_match: false, layer, ..second }];
        let plan = SteeringPlan { edits: edits.iter().cloned().map(Arc::new).collect() };
        let [pre, post] = taps(model, &tokens, &plan);
        let mut expected = rows_of(&pre, layer).to_vec();
        for edit in &edits {
            for (position, row) in expected.chunks_exact_mut(HIDDEN).enumerate() {
                let Some(vector) = edit.vector_at(position) else { continue };
                for (h, v) in row.iter_mut().zip(vector) {
                    let product = edit.scale * v;
                    *h += product;
                }
            }
        }
        same_numbers("both vectors", rows_of(&post, layer), &expected, &[HIDDEN]);
        // The same one twice is two additions.
        let twice = SteeringPlan { edits: vec![Arc::clone(&plan.edits[0]), Arc::clone(&plan.edits[0])] };
        let apart = SteeringPlan { edits: vec![Arc::new(edits[0].clone()), Arc::new(edits[0].clone())] };
        same("the same edit twice", &taps(model, &tokens, &twice)[1], &taps(model, &tokens, &apart)[1]);
    }

    /// `h + scale ||h|| v / ||v||`, with `||h||` of the row before any vector of the layer, whatever stands before it in the plan.
    #[test]
    fn norm_matching_scales_a_vector_to_the_unsteered_row(
        kind in 0..KINDS, tokens in tokens(), matched in edit(3), other in edit(3), first: bool, size in -42.0..30.0f64,
    ) {
        let model = &engines(kind).plain;
        let mut matched = Edit { norm_match: true, ..matched };
        // The size of the vector itself does not count, even far below the normal range of f32.
        matched.vectors.data.iter_mut().for_each(|v| *v = (f64::from(*v) * 10f64.powf(size)) as f32);
        if matched.vectors.data.chunks_exact(HIDDEN).any(|v| v.iter().all(|&v| v == 0.0)) {
            return Ok(());
        }
        let other = Edit { norm_match: false, layer: matched.layer, ..other };
        let mut edits = vec![matched.clone(), other.clone()];
        if !first {
            edits.reverse();
        }
        let plan = SteeringPlan { edits: edits.into_iter().map(Arc::new).collect() };
        let [pre, post] = taps(model, &tokens, &plan);
        let (pre, post) = (rows_of(&pre, matched.layer), rows_of(&post, matched.layer));
        let norm = |row: &[f32]| row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        for position in 0..tokens.len() {
            let h = &pre[position * HIDDEN..][..HIDDEN];
            let plain = other.vector_at(position);
            let vector = matched.vector_at(position);
            for column in 0..HIDDEN {
                let a = plain.map_or(0.0, |v| f64::from(other.scale) * f64::from(v[column]));
                let b = vector.map_or(0.0, |v| f64::from(matched.scale) * norm(h) * f64::from(v[column]) / norm(v));
                let expected = f64::from(h[column]) + a + b;
                let found = f64::from(post[position * HIDDEN + column]);
                // Roundings of 2^-24: two for each product (the factor, the product), two sums of at most |h| + |a| + |b|.
                let bound = 2f64.powi(-24) * 4.01 * (f64::from(h[column]).abs() + a.abs() + b.abs()) + 1e-44;
                prop_assert!(
                    (found - expected).abs() <= bound,
                    "position {position} column {column}: {found} for {expected}, off by {:e}, bound {bound:e}", (found - expected).abs()
                );
            }
        }
    }

    /// Companions of a steered sequence, steered ones among them, do not see each other's plans.
    #[test]
    fn steering_one_sequence_leaves_its_companions_alone(kind in 0..KINDS, tokens in tokens(), edit in edit(3)) {
        let model = &engines(kind).plain;
        let steered = Ask::all(model, &tokens, &SteeringPlan { edits: vec![Arc::new(edit)] }, Tap::PostSteer);
        let plain = Ask::all(model, &tokens, &SteeringPlan::default(), Tap::PostSteer);
        let found = run(model, &[plain.clone(), steered.clone(), plain.clone()]);
        let expected = run_one(model, &plain);
        same("before it", &found[0], &expected);
        same("after it", &found[2], &expected);
        same("itself", &found[1], &run_one(model, &steered));
    }
}

// ------------------------------------------------------------------------------------------------------------------------- failures

/// Some layers of NaN: the model runs until it meets them.
fn spoiled(spoiled: &[(&'static str, usize, f32)]) -> SteeringLlama {
    load(&Tiny { spoiled: spoiled.into(), ..Tiny::default() })
}

const LAST_TOKEN: u32 = VOCAB - 1;
const NAN_IN_LAST_EMBEDDING: (&str, usize, f32) = ("model.embed_tokens.weight", LAST_TOKEN as usize * HIDDEN + 7, f32::NAN);

#[test]
fn nan_in_a_weight_is_named_by_layer_and_token() {
    let tokens = [3, 1, LAST_TOKEN, 4];
    let fail = |model: &SteeringLlama| {
        let plain = Ask::all(model, &[5, 6], &SteeringPlan::default(), Tap::PreSteer);
        let ask = Ask::all(model, &tokens, &SteeringPlan::default(), Tap::PreSteer);
        model.forward(&mut [plain.sequence(None), ask.sequence(None)], &|| false).unwrap_err()
    };
    for bad in [f32::NAN, f32::INFINITY] {
        let error = fail(&spoiled(&[(NAN_IN_LAST_EMBEDDING.0, NAN_IN_LAST_EMBEDDING.1, bad)]));
        assert!(matches!(error, Error::NonFinite { layer: 0, position: 2, id: LAST_TOKEN, sequence: 1, .. }), "{error:?}");
    }
    for name in
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    {
        let tensor: &'static str = Box::leak(format!("model.layers.1.{name}.weight").into_boxed_str());
        let error = fail(&spoiled(&[(tensor, 11, f32::NAN)]));
        assert!(matches!(error, Error::NonFinite { layer: 1, position: 0, id: 5, sequence: 0, .. }), "{name}: {error:?}");
    }
    // The same token is named when the last block keeps the last row alone.
    let last_row = |model: &SteeringLlama, layer: usize| {
        let capture = CapturePlan { layers: vec![layer], rows: CaptureRows::Last, tap: Tap::PreSteer };
        let ask = Ask { tokens: tokens.into(), steering: SteeringPlan::default(), capture, logits: LogitRows::None };
        model.forward(&mut [ask.sequence(None)], &|| false).unwrap_err()
    };
    let error = last_row(&spoiled(&[NAN_IN_LAST_EMBEDDING]), 0);
    assert!(matches!(error, Error::NonFinite { layer: 0, position: 2, id: LAST_TOKEN, .. }), "{error:?}");
    for name in ["model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"] {
        let error = last_row(&spoiled(&[(name, 11, f32::NAN)]), 1);
        assert!(matches!(error, Error::NonFinite { layer: 1, position: 0, id: 3, .. }), "{error:?}");
    }
    let error = fail(&spoiled(&[("lm_head.weight", 17, f32::NAN)]));
    assert!(matches!(error, Error::NonFiniteLogits { position: 0, id: 5, sequence: 0 }), "{error:?}");
    // In a cached pass positions count from the start of the sequence.
    let model = spoiled(&[NAN_IN_LAST_EMBEDDING]);
    let mut cache = model.cache();
    run_cached(&model, &Ask::all(&model, &[1, 2, 3], &SteeringPlan::default(), Tap::PreSteer), &mut cache).unwrap();
    let error = run_cached(&model, &Ask::all(&model, &[1, LAST_TOKEN], &SteeringPlan::default(), Tap::PreSteer), &mut cache).unwrap_err();
    assert!(matches!(error, Error::NonFinite { layer: 0, position: 4, id: LAST_TOKEN, sequence: 0, .. }), "{error:?}");
    assert!(error.to_string().contains("layer 0") && error.to_string().contains("token 4"), "{error}");
}

#[test]
fn nan_in_a_weight_that_nobody_needs_is_no_error() {
    let model = spoiled(&[NAN_IN_LAST_EMBEDDING, ("model.layers.2.mlp.up_proj.weight", 0, f32::NAN), ("lm_head.weight", 0, f32::NAN)]);
    let expected = run_one(&engines(0).plain, &Ask::all(&engines(0).plain, &[1, 2, 3], &SteeringPlan::default(), Tap::PreSteer));
    let capture = CapturePlan { layers: vec![0, 1], rows: CaptureRows::All, tap: Tap::PreSteer };
    let ask = Ask { tokens: vec![1, 2, 3], steering: SteeringPlan::default(), capture, logits: LogitRows::None };
    same_numbers(
        "layers before the spoiled one",
        &run_one(&model, &ask).residual,
        &expected.residual[..2 * 3 * HIDDEN],
        &[3 * HIDDEN, HIDDEN],
    );
}

#[test]
fn steering_past_the_range_of_f32_is_an_error_at_its_layer() {
    let model = &engines(0).plain;
    let vectors = Matrix { rows: 1, cols: HIDDEN, data: vec![1e30; HIDDEN] };
    let edit = Edit { layer: 1, vectors, scale: 1e30, positions: Some(vec![2].into()), norm_match: false };
    let plan = SteeringPlan { edits: vec![Arc::new(edit)] };
    let ask = Ask::all(model, &[5, 6, 7], &plan, Tap::PreSteer);
    let error = model.forward(&mut [ask.sequence(None)], &|| false).unwrap_err();
    assert!(matches!(error, Error::NonFinite { layer: 1, position: 2, id: 7, sequence: 0, .. }), "{error:?}");
}

#[test]
fn a_failed_pass_leaves_every_cache_as_it_was() {
    let model = spoiled(&[NAN_IN_LAST_EMBEDDING]);
    let plan = SteeringPlan::default();
    let mut rng = Rng::new(4);
    let tokens: Vec<u32> = (0..150).map(|_| rng.below(VOCAB as usize - 1) as u32).collect();
    let all = |tokens: &[u32]| Ask::all(&model, tokens, &plan, Tap::PostSteer);
    for held in [0, 1, 63, 64, 65, 100] {
        let (mut a, mut b) = (model.cache(), model.cache());
        if held > 0 {
            run_cached(&model, &all(&tokens[..held]), &mut a).unwrap();
            run_cached(&model, &all(&tokens[..held]), &mut b).unwrap();
        }
        let twin = a.fork(held).unwrap();
        let bad = all(&[&[1; 70][..], &[LAST_TOKEN]].concat());
        let good = all(&[2; 9]);
        let error = model.forward(&mut [good.sequence(Some(&mut a)), bad.sequence(Some(&mut b))], &|| false).unwrap_err();
        assert!(matches!(error, Error::NonFinite { position, .. } if position == held + 70), "{error:?}");
        let expected = run_one(&model, &all(&tokens));
        for (name, mut cache) in [("a", a), ("b", b), ("its fork", twin)] {
            assert_eq!(cache.len(), held, "{name}");
            let found = in_pieces(&model, &tokens[held..], &plan, &[150 - held], &mut cache);
            let expected = &expected.logits[held * VOCAB as usize..];
            same_numbers(&format!("{name} after {held}"), &found[0].logits, expected, &[VOCAB as usize]);
        }
    }
}

/// Long enough to be asked: a pass over 12,000 tokens takes a second.
fn long_batch(model: &SteeringLlama) -> Vec<Ask> {
    let mut rng = Rng::new(2);
    (0..6)
        .map(|_| {
            let tokens: Vec<u32> = (0..2000).map(|_| rng.below(VOCAB as usize) as u32).collect();
            Ask { logits: LogitRows::None, ..Ask::all(model, &tokens, &SteeringPlan::default(), Tap::PreSteer) }
        })
        .collect()
}

#[test]
fn an_interrupt_stops_a_large_batch_soon_and_leaves_its_caches() {
    let dir = TempDir::new().unwrap();
    let tiny = Tiny { context: 4000, ..Tiny::default() };
    tiny.write(dir.path());
    for threads in [1, 2] {
        // Portable, so that it takes its time.
        let model = SteeringLlama::load_with(dir.path(), Some(threads), Isa::PORTABLE).unwrap();
        let asks = long_batch(&model);
        let mut caches: Vec<KvCache> = asks.iter().map(|_| model.cache()).collect();
        run_cached(&model, &Ask::all(&model, &[1, 2, 3], &SteeringPlan::default(), Tap::PreSteer), &mut caches[0]).unwrap();
        let caller = std::thread::current().id();
        for patience in [0, 3] {
            let asked = AtomicUsize::new(0);
            let start = Instant::now();
            let result = {
                let mut sequences: Vec<_> = asks.iter().zip(&mut caches).map(|(ask, cache)| ask.sequence(Some(cache))).collect();
                model.forward(&mut sequences, &|| {
                    assert_eq!(std::thread::current().id(), caller, "only the caller is asked");
                    asked.fetch_add(1, Ordering::SeqCst) >= patience
                })
            };
            assert!(matches!(result, Err(Error::Interrupted)), "{:?}", result.map(|_| "it ran through"));
            assert!(start.elapsed() < Duration::from_secs(1), "stopped after {:?}", start.elapsed());
            assert_eq!(caches.iter().map(KvCache::len).collect::<Vec<_>>(), [3, 0, 0, 0, 0, 0]);
        }
        // The engine goes on, and so does a cache that was there.
        let plan = SteeringPlan::default();
        let on = in_pieces(&model, &[4, 5], &plan, &[2], &mut caches[0]);
        let whole = run_one(&model, &Ask::all(&model, &[1, 2, 3, 4, 5], &plan, Tap::PostSteer));
        same_numbers("after an interrupt", &on[0].logits, &whole.logits[3 * VOCAB as usize..], &[VOCAB as usize]);
    }
}

// --------------------------------------------------------------------------------------------------------------- subnormal numbers

/// Libraries built with fast-math switch subnormals off for the thread that loads them.
#[cfg(target_arch = "x86_64")]
fn with_subnormals_off<T>(work: impl FnOnce() -> T) -> T {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            set(0x1F80);
        }
    }
    fn set(control: u32) {
        // SAFETY: writes the floating-point control register of this thread only.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &control, options(nostack)) };
    }
    let _restore = Restore;
    set(0x9FC0);
    assert_eq!(std::hint::black_box(f32::MIN_POSITIVE) * std::hint::black_box(0.5), 0.0, "subnormals are off");
    work()
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_thread_that_flushes_subnormals_gets_the_same_bits() {
    // Rows of 1e-38, whose squares are nothing beside eps: all that a block multiplies and adds is near the edge of the normal range.
    let tiny = Tiny { embed_size: 1e-38, weight_size: 1e-2, ..Tiny::default() };
    let dir = TempDir::new().unwrap();
    tiny.write(dir.path());
    let mut tail = vectors(1, 3);
    tail.data.iter_mut().for_each(|v| *v *= 1e-39);
    for isa in Isa::available() {
        for threads in [1, 2] {
            let model = SteeringLlama::load_with(dir.path(), Some(threads), isa).unwrap();
            let edit = |norm_match| Edit { layer: 1, vectors: tail.clone(), scale: 0.7, positions: None, norm_match };
            for plan in [vec![], vec![Arc::new(edit(false))], vec![Arc::new(edit(true))]] {
                let ask = Ask::all(&model, &[1, 2, 3, 4, 5, 6, 7, 8, 9], &SteeringPlan { edits: plan }, Tap::PostSteer);
                let expected = run_one(&model, &ask);
                let subnormal = expected.residual.iter().chain(&expected.logits).filter(|v| v.is_subnormal()).count();
                assert!(subnormal > 100, "{subnormal} subnormals");
                let found = with_subnormals_off(|| run_one(&model, &ask));
                same(&format!("{} with {threads} threads", isa.name()), &found, &expected);
                // Engine and threads made while they are off.
                let found = with_subnormals_off(|| run_one(&SteeringLlama::load_with(dir.path(), Some(threads), isa).unwrap(), &ask));
                same(&format!("{} loaded with subnormals off", isa.name()), &found, &expected);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------- every error

/// One list for the names and for the match, which the compiler keeps complete.
macro_rules! variants {
    ($($name:ident),* $(,)?) => {
        const VARIANTS: &[&str] = &[$(stringify!($name)),*];
        fn variant(error: &Error) -> &'static str {
            match error {
                $(Error::$name { .. } => stringify!($name),)*
            }
        }
    };
}

variants!(
    Read,
    MissingConfig,
    NoWeights,
    File,
    Tensor,
    Config,
    ModelType,
    Layer,
    LayerOrder,
    TokenId,
    NoTokens,
    Context,
    Steering,
    Cache,
    Kernels,
    Sampling,
    Threads,
    NonFinite,
    NonFiniteLogits,
    Interrupted,
);

/// `Err` of loading the tiny checkpoint after `change` to its folder.
fn load_changed(change: impl FnOnce(&Path)) -> Error {
    let dir = TempDir::new().unwrap();
    Tiny::default().write(dir.path());
    change(dir.path());
    SteeringLlama::load(dir.path(), Some(1)).err().expect("a refusal")
}

fn set(dir: &Path, key: &str, value: serde_json::Value) {
    let mut config = Tiny::default().config();
    config[key] = value;
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn every_error_is_provoked() {
    let model = &engines(0).plain;
    let plan = SteeringPlan::default();
    let fail = |model: &SteeringLlama, ask: Ask| model.forward(&mut [ask.sequence(None)], &|| false).unwrap_err();
    let all = |tokens: &[u32]| Ask::all(model, tokens, &plan, Tap::PreSteer);
    let capture = |layers: &[usize]| Ask { capture: CapturePlan { layers: layers.into(), ..CapturePlan::nothing() }, ..all(&[1]) };
    let steer = |vectors: Matrix| {
        let edit = Edit { layer: 0, vectors, scale: 1.0, positions: None, norm_match: false };
        Ask { steering: SteeringPlan { edits: vec![Arc::new(edit)] }, ..all(&[1]) }
    };
    let shards = |dir: &Path| dir.join("model.safetensors");

    let provoked = [
        (
            "Read",
            load_changed(|dir| {
                std::fs::remove_file(dir.join("config.json")).unwrap();
                std::os::unix::fs::symlink("nowhere", dir.join("config.json")).unwrap();
            }),
        ),
        ("MissingConfig", load_changed(|dir| std::fs::remove_file(dir.join("config.json")).unwrap())),
        ("NoWeights", load_changed(|dir| std::fs::rename(shards(dir), dir.join("pytorch_model.bin")).unwrap())),
        (
            "File",
            load_changed(|dir| {
                let bytes = std::fs::read(shards(dir)).unwrap();
                std::fs::write(shards(dir), &bytes[..100]).unwrap();
            }),
        ),
        ("Tensor", load_changed(|dir| set(dir, "vocab_size", 51.into()))),
        ("Config", load_changed(|dir| set(dir, "sliding_window", 16.into()))),
        ("ModelType", load_changed(|dir| set(dir, "model_type", "gpt2".into()))),
        ("Layer", fail(model, capture(&[0, 3]))),
        ("LayerOrder", fail(model, capture(&[1, 0]))),
        ("TokenId", fail(model, all(&[1, 2, VOCAB]))),
        ("NoTokens", fail(model, all(&[]))),
        ("Context", fail(model, all(&[1; 512]))),
        ("Steering", fail(model, steer(Matrix::zeros(1, HIDDEN - 1)))),
        ("Cache", {
            let mut foreign = engines(1).plain.cache();
            run_cached(model, &all(&[1]), &mut foreign).unwrap_err()
        }),
        ("Kernels", Isa::named("mmx").unwrap_err()),
        ("Sampling", Sampling { temperature: f64::NAN, ..Sampling::GREEDY }.check().unwrap_err()),
        ("Threads", SteeringLlama::load(Path::new("nowhere"), Some(0)).err().unwrap()),
        ("NonFinite", fail(&spoiled(&[NAN_IN_LAST_EMBEDDING]), all(&[LAST_TOKEN]))),
        ("NonFiniteLogits", fail(&spoiled(&[("lm_head.weight", 0, f32::NAN)]), all(&[1]))),
        ("Interrupted", {
            let slow = load(&Tiny { context: 4000, ..Tiny::default() });
            let asks = long_batch(&slow);
            let mut sequences: Vec<_> = asks.iter().map(|ask| ask.sequence(None)).collect();
            slow.forward(&mut sequences, &|| true).unwrap_err()
        }),
    ];
    for (name, error) in &provoked {
        assert_eq!(variant(error), *name, "{error:?}");
        assert!(!error.to_string().is_empty() && error.hint() != Some(String::new()));
    }
    let missing: Vec<_> = VARIANTS.iter().filter(|variant| !provoked.iter().any(|(name, _)| name == *variant)).collect();
    assert!(missing.is_empty(), "no test provokes {missing:?}");
}

/// Each sentence of a refusal, so that a wrong one is not refused for another's reason.
#[test]
fn refusals_say_what_was_found() {
    let model = &engines(0).plain;
    let plan = SteeringPlan::default();
    let all = |tokens: &[u32]| Ask::all(model, tokens, &plan, Tap::PreSteer);
    let with = |edit: Edit| Ask { steering: SteeringPlan { edits: vec![Arc::new(edit)] }, ..all(&[1, 2]) };
    let edit = || Edit { layer: 1, vectors: vectors(1, 1), scale: 1.0, positions: None, norm_match: false };
    let mut nan = vectors(1, 1);
    nan.data[5] = f32::NAN;
    let capture = |layers: &[usize]| Ask { capture: CapturePlan { layers: layers.into(), ..CapturePlan::nothing() }, ..all(&[1]) };

    for (ask, sentence) in [
        (all(&[]), "tokenizer produced no tokens"),
        (all(&[1; 512]), "prompt contains 512 tokens, model context allows fewer than 512"),
        (all(&[1, 2, 77]), "token id 77 at position 2 of sequence 0 is outside the embedding's 0..49 range"),
        (capture(&[0, 3]), "layer 3 is outside the model's 0..2 range"),
        (capture(&[1, 1]), "layers must be ascending, each once, found [1, 1]"),
        (with(Edit { layer: 3, ..edit() }), "layer 3 is outside the model's 0..2 range"),
        (with(Edit { vectors: Matrix::zeros(1, 47), ..edit() }), "steering at layer 1 has vector width 47, expected 48"),
        (
            with(Edit { vectors: vectors(2, 1), ..edit() }),
            "steering at layer 1 has 2 vectors without positions; give one, or a position for each",
        ),
        (
            with(Edit { vectors: vectors(2, 1), positions: Some(vec![0, 1, 2].into()), ..edit() }),
            "steering at layer 1 has 2 vectors for 3 positions",
        ),
        (with(Edit { positions: Some(vec![3, 0, 3].into()), ..edit() }), "steering at layer 1 names position 3 twice"),
        (
            with(Edit { positions: Some(vec![512].into()), ..edit() }),
            "steering at layer 1 names position 512, the model's context ends at 511",
        ),
        (with(Edit { positions: Some(vec![].into()), ..edit() }), "steering at layer 1 names no position"),
        (with(Edit { scale: f32::INFINITY, ..edit() }), "steering at layer 1 contains a non-finite value"),
        (with(Edit { vectors: nan, ..edit() }), "steering at layer 1 contains a non-finite value"),
        (
            with(Edit { vectors: Matrix::zeros(1, HIDDEN), norm_match: true, ..edit() }),
            "steering at layer 1 cannot norm-match a zero vector",
        ),
    ] {
        // A sound sequence before it does not run either, and its cache stays empty.
        let mut cache = model.cache();
        let sound = all(&[1, 2, 3]);
        let error = model.forward(&mut [ask.sequence(None), sound.sequence(Some(&mut cache))], &|| false).unwrap_err();
        assert_eq!(error.to_string(), sentence);
        assert!(cache.is_empty());
    }
    // What the cache holds counts.
    let mut cache = model.cache();
    run_cached(model, &all(&[1; 200]), &mut cache).unwrap();
    let error = run_cached(model, &all(&[1; 312]), &mut cache).unwrap_err();
    assert_eq!(error.to_string(), "prompt contains 512 tokens, model context allows fewer than 512");
    run_cached(model, &all(&[1; 311]), &mut cache).unwrap();
    assert_eq!(cache.fork(512).unwrap_err().to_string(), "the cache holds 511 tokens, cannot keep 512");
    let error = run_cached(&engines(0).others[0], &all(&[1]), &mut cache.fork(9).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "the cache belongs to another engine");
    assert_eq!(Isa::named("sse9").unwrap_err().to_string(), "`STER_KERNELS=sse9` is unknown; expected avx512, avx2, neon or portable");
}

#[test]
fn a_batch_of_nothing_gives_nothing() {
    let model = &engines(0).plain;
    assert!(model.forward(&mut [], &|| false).unwrap().is_empty());
    let plan = SteeringPlan::default();
    let ask = Ask { capture: CapturePlan::nothing(), logits: LogitRows::None, ..Ask::all(model, &[1, 2], &plan, Tap::PreSteer) };
    let output = run_one(model, &ask);
    assert!(output.residual.is_empty() && output.logits.is_empty());
}
