//! Sliding windows: what a layer sees through one, and a cache that forgets what no later position sees.

mod support;

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Value, json};
use ster_core::kernels::Isa;
use ster_core::{CapturePlan, CaptureRows, Error, KvCache, LogitRows, Output, Sequence, SteeringLlama, SteeringPlan, Tap};
use support::asks::{Ask, in_pieces, join, load, rows_of, run_cached, run_one, same, same_numbers};
use support::{Rng, Tiny, bits};
use tempfile::TempDir;

const HIDDEN: usize = 48;
const VOCAB: usize = 50;
const BLOCK: usize = 64;
const WINDOWS: [usize; 6] = [1, 3, 16, 64, 65, 130];

/// `mistral`: every layer has the window; `gemma3_text`: every other one, with a rotation of its own; `qwen2`: those from the second on.
fn tiny(family: &'static str, window: usize) -> Tiny {
    let keys = match family {
        "gemma3_text" => json!({"sliding_window": window, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8}),
        "qwen2" => json!({"sliding_window": window, "use_sliding_window": true, "max_window_layers": 1}),
        _ => json!({"sliding_window": window}),
    };
    Tiny { family, keys, context: 1024, tied: family == "gemma3_text", ..Tiny::default() }
}

const FAMILIES: [&str; 3] = ["mistral", "gemma3_text", "qwen2"];

/// One engine a family and window.
fn engine(family: &'static str, window: usize) -> &'static SteeringLlama {
    static LOADED: OnceLock<Mutex<HashMap<(&str, usize), &'static SteeringLlama>>> = OnceLock::new();
    let mut loaded = LOADED.get_or_init(Mutex::default).lock().unwrap();
    loaded.entry((family, window)).or_insert_with(|| Box::leak(Box::new(load(&tiny(family, window)))))
}

fn tokens(count: usize, seed: u64) -> Vec<u32> {
    let mut rng = Rng::new(seed);
    (0..count).map(|_| rng.below(VOCAB - 1) as u32).collect()
}

fn whole(model: &SteeringLlama, tokens: &[u32]) -> Output {
    run_one(model, &Ask::all(model, tokens, &SteeringPlan::default(), Tap::PostSteer))
}

/// Goes on after what `cache` holds of `tokens`; all outputs of the rest.
fn go_on(model: &SteeringLlama, cache: &mut KvCache, tokens: &[u32]) -> Output {
    let rest = &tokens[cache.len()..];
    in_pieces(model, rest, &SteeringPlan::default(), &[rest.len()], cache).remove(0)
}

/// The rows of `output` from `start` on; of logits, where there are any.
fn from(output: &Output, start: usize) -> Output {
    let [layers, rows, hidden] = output.residual_shape;
    let [logit_rows, vocab] = output.logits_shape;
    Output {
        residual: (0..layers).flat_map(|layer| rows_of(output, layer)[start * hidden..].to_vec()).collect(),
        residual_shape: [layers, rows - start, hidden],
        logits: output.logits[start.min(logit_rows) * vocab..].to_vec(),
        logits_shape: [logit_rows.saturating_sub(start), vocab],
        steered: Vec::new(),
    }
}

/// What a cache of `len` positions must hold, and no more: every block of layers that see everything; of others, from the block on that
/// holds the first position which position `len` sees.
fn bytes_of(model: &SteeringLlama, len: usize) -> usize {
    let config = model.config();
    let a_layer = 4 * config.kv_heads * 2 * BLOCK * config.head_dim.next_multiple_of(16);
    let blocks = |layer: usize| match config.window_of(layer) {
        None => len.div_ceil(BLOCK),
        Some(window) => len.div_ceil(BLOCK) - (len + 1).saturating_sub(window) / BLOCK,
    };
    (0..config.layers).map(|layer| a_layer * blocks(layer)).sum()
}

// ------------------------------------------------------------------------------------------------------------------ what a layer sees

/// The first windowed layer sees `window` positions, its own among them: one more back changes nothing, that one does.
#[test]
fn a_window_reaches_back_to_its_last_position_and_no_further() {
    for family in ["mistral", "gemma3_text", "phi3"] {
        for window in WINDOWS {
            let model = load(&tiny(family, window));
            let original = tokens(200, 5);
            let expected = whole(&model, &original);
            for last in [window - 1, window, 63, 64, 65, 127, 128, 199] {
                let changed = |position: usize| {
                    let mut tokens = original.clone();
                    tokens[position] = (tokens[position] + 1) % (VOCAB as u32 - 1);
                    let found = whole(&model, &tokens);
                    bits(&rows_of(&found, 0)[last * HIDDEN..][..HIDDEN]) != bits(&rows_of(&expected, 0)[last * HIDDEN..][..HIDDEN])
                };
                if let Some(first) = (last + 1).checked_sub(window) {
                    assert!(changed(first), "{family}, window {window}: position {last} does not see {first}");
                }
                if let Some(before) = last.checked_sub(window) {
                    assert!(!changed(before), "{family}, window {window}: position {last} sees {before}");
                }
            }
        }
    }
}

#[test]
fn a_window_longer_than_the_sequence_is_none() {
    let tokens = tokens(150, 6);
    let of = |window: Value| load(&Tiny { family: "mistral", keys: json!({"sliding_window": window}), ..Tiny::default() });
    let plain = load(&Tiny { family: "mistral", keys: json!({"sliding_window": 2_000_000_000}), ..Tiny::default() });
    same("a window of 150", &whole(&of(json!(150)), &tokens), &whole(&plain, &tokens));
    assert_ne!(bits(&whole(&of(json!(149)), &tokens).logits), bits(&whole(&plain, &tokens).logits));
    // Tiny takes a key away for null: here null itself must stand there.
    let dir = TempDir::new().unwrap();
    let tiny = Tiny { family: "mistral", ..Tiny::default() };
    tiny.write(dir.path());
    let mut config = tiny.config();
    config["sliding_window"] = Value::Null;
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let null = SteeringLlama::load(dir.path(), Some(1)).unwrap();
    assert_eq!(null.config().window, None);
    same("no window", &whole(&null, &tokens), &whole(&plain, &tokens));
}

/// Every processor and number of threads, over sequences of many windows.
#[test]
fn threads_and_instruction_sets_change_no_bit_of_long_windowed_sequences() {
    for family in FAMILIES {
        for window in WINDOWS {
            let dir = TempDir::new().unwrap();
            tiny(family, window).write(dir.path());
            let tokens = tokens(300, 7);
            let expected = whole(engine(family, window), &tokens);
            for (n, isa) in Isa::available().into_iter().enumerate() {
                let model = SteeringLlama::load_with(dir.path(), Some([5, 1, 2][n % 3]), isa).unwrap();
                same(&format!("{family}, window {window} on {}", isa.name()), &whole(&model, &tokens), &expected);
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------------------------- caches

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    /// Pieces of any size, several windows long, give what the whole gives; after each the cache holds what it needs and nothing else.
    #[test]
    fn pieces_through_a_cache_that_forgets_are_the_whole(
        family in select(&FAMILIES[..]), window in select(&WINDOWS[..]), count in 1..420usize, seed: u64,
        cuts in prop::collection::btree_set(1..420usize, 0..12),
    ) {
        let model = engine(family, window);
        let tokens = tokens(count, seed);
        let mut ends: Vec<usize> = cuts.into_iter().filter(|&end| end < count).collect();
        ends.push(count);
        let mut cache = model.cache();
        let mut found = Vec::new();
        for &end in &ends {
            found.push(go_on(model, &mut cache, &tokens[..end]));
            prop_assert_eq!(cache.len(), end);
            prop_assert_eq!(cache.bytes(), bytes_of(model, end), "after {} tokens", end);
            prop_assert!(cache.shortest() <= end);
        }
        same(&format!("{family}, window {window}, in pieces to {ends:?}"), &join(&found), &whole(model, &tokens));
    }

    /// A fork at any length that can be kept, then a fork of that one after it went on.
    #[test]
    fn a_fork_of_a_cache_that_forgets_is_a_recomputed_one(
        family in select(&FAMILIES[..]), window in select(&WINDOWS[..]), count in 1..300usize, at: Index, back: Index, seed: u64,
    ) {
        let model = engine(family, window);
        let stem = tokens(count, seed);
        let mut trunk = model.cache();
        go_on(model, &mut trunk, &stem);
        let kept = trunk.shortest() + at.index(count - trunk.shortest() + 1);
        let mut fork = trunk.fork(kept).unwrap();
        let other = [&stem[..kept], &tokens(90, seed ^ 1)].concat();
        let expected = whole(model, &other);
        same("the fork goes on", &go_on(model, &mut fork, &other), &from(&expected, kept));
        let again = fork.shortest() + back.index(fork.len() - fork.shortest() + 1);
        if again < other.len() {
            let mut fork = fork.fork(again).unwrap();
            same("the fork of the fork goes on", &go_on(model, &mut fork, &other), &from(&expected, again));
        }
        let trunk_on = [&stem[..], &tokens(20, seed ^ 2)].concat();
        same("the trunk goes on", &go_on(model, &mut trunk, &trunk_on), &from(&whole(model, &trunk_on), count));
    }

    /// Sequences that go on from one windowed cache without extending it.
    #[test]
    fn a_shared_prefix_that_forgets_is_a_recomputed_one(
        family in select(&FAMILIES[..]), window in select(&WINDOWS[..]), count in 1..300usize, more in 1..140usize, seed: u64,
    ) {
        let model = engine(family, window);
        let stem = tokens(count, seed);
        let mut prefix = model.cache();
        go_on(model, &mut prefix, &stem);
        let all = [&stem[..], &tokens(more, seed ^ 1)].concat();
        let ask = Ask::all(model, &all[count..], &SteeringPlan::default(), Tap::PostSteer);
        let sequence = Sequence { prefix: Some(&prefix), ..ask.sequence(None) };
        let found = model.forward(&mut [sequence], &|| false).unwrap().remove(0);
        same(&format!("{family}, window {window}"), &found, &from(&whole(model, &all), count));
        prop_assert_eq!((prefix.len(), prefix.bytes()), (count, bytes_of(model, count)));
    }
}

#[test]
fn a_fork_shorter_than_what_is_left_is_refused_and_no_longer_one() {
    for family in FAMILIES {
        for window in WINDOWS {
            let model = engine(family, window);
            let tokens = tokens(260, 8);
            for held in [1, 63, 64, 65, 128, 200, 260] {
                let mut cache = model.cache();
                go_on(model, &mut cache, &tokens[..held]);
                // The first length whose next position still sees everything it must: its window begins in a block that is there.
                let first_block = (held + 1).saturating_sub(window) / BLOCK;
                let least = if first_block == 0 { 0 } else { first_block * BLOCK + window - 1 };
                assert_eq!(cache.shortest(), least, "{family}, window {window}, {held} held");
                for len in 0..=held {
                    match cache.fork(len) {
                        Ok(fork) => assert!(len >= least && fork.len() == len, "{len} is kept of {held}, window {window}"),
                        Err(error) => {
                            let sentence = format!(
                                "the cache has forgotten what lies before its sliding window: it can keep {least} tokens or more, not {len}"
                            );
                            assert_eq!(error.to_string(), sentence);
                            assert!(len < least);
                        }
                    }
                }
            }
        }
    }
}

/// `max_window_layers` may lie above the last layer, as in configs of Qwen2: then nothing has a window, and nothing is forgotten.
#[test]
fn a_window_that_no_layer_has_forgets_nothing() {
    let keys = json!({"use_sliding_window": true, "sliding_window": 3, "max_window_layers": 28});
    let model = load(&Tiny { family: "qwen2", keys, ..Tiny::default() });
    let tokens = tokens(200, 9);
    let mut cache = model.cache();
    go_on(&model, &mut cache, &tokens);
    assert_eq!((cache.shortest(), cache.bytes()), (0, bytes_of(&model, 200)));
    let mut fork = cache.fork(5).unwrap();
    same("from 5 on", &go_on(&model, &mut fork, &tokens), &from(&whole(&model, &tokens), 5));
}

// --------------------------------------------------------------------------------------------------------------------------- failures

const LAST_TOKEN: u32 = VOCAB as u32 - 1;

fn spoiled(family: &'static str, window: usize) -> SteeringLlama {
    let nan = ("model.embed_tokens.weight", LAST_TOKEN as usize * HIDDEN + 7, f32::NAN);
    load(&Tiny { spoiled: vec![nan], ..tiny(family, window) })
}

#[test]
fn a_failed_pass_leaves_a_cache_that_forgets_as_it_was() {
    for family in ["mistral", "gemma3_text"] {
        for window in [1, 16, 64, 65] {
            let model = spoiled(family, window);
            let tokens = tokens(260, 10);
            // Untied, only the embedding of the last token is spoiled; tied, its logit is too, so nobody asks for logits.
            let all =
                |tokens: &[u32]| Ask { logits: LogitRows::None, ..Ask::all(&model, tokens, &SteeringPlan::default(), Tap::PostSteer) };
            let expected = run_one(&model, &all(&tokens));
            for held in [0, 1, 63, 64, 65, 100, 130, 200] {
                let mut cache = model.cache();
                if held > 0 {
                    run_cached(&model, &all(&tokens[..held]), &mut cache).unwrap();
                }
                let before = (cache.len(), cache.shortest(), cache.bytes());
                let twin = cache.fork(held).unwrap();
                let error = run_cached(&model, &all(&[&[1; 150][..], &[LAST_TOKEN]].concat()), &mut cache).unwrap_err();
                assert!(matches!(error, Error::NonFinite { position, .. } if position == held + 150), "{error:?}");
                assert_eq!((cache.len(), cache.shortest(), cache.bytes()), before);
                for (name, mut cache) in [("it", cache), ("its fork", twin)] {
                    let found = run_cached(&model, &all(&tokens[held..]), &mut cache).unwrap();
                    same(&format!("{name} after {held}, {family}, window {window}"), &found, &from(&expected, held));
                }
            }
        }
    }
}

#[test]
fn an_interrupted_pass_leaves_a_cache_that_forgets_as_it_was() {
    for family in ["mistral", "gemma3_text"] {
        let dir = TempDir::new().unwrap();
        Tiny { context: 16_000, ..tiny(family, 16) }.write(dir.path());
        let model = SteeringLlama::load_with(dir.path(), Some(2), Isa::PORTABLE).unwrap();
        let stem = tokens(100, 11);
        let mut cache = model.cache();
        go_on(&model, &mut cache, &stem);
        let before = (cache.len(), cache.shortest(), cache.bytes());
        let long = Ask { logits: LogitRows::None, ..Ask::all(&model, &tokens(12_000, 12), &SteeringPlan::default(), Tap::PreSteer) };
        let result = model.forward(&mut [long.sequence(Some(&mut cache))], &|| true);
        assert!(matches!(result, Err(Error::Interrupted)), "{:?}", result.map(|_| "it ran through"));
        assert_eq!((cache.len(), cache.shortest(), cache.bytes()), before);
        let all = [&stem[..], &tokens(30, 13)].concat();
        same("after an interrupt", &go_on(&model, &mut cache, &all), &from(&whole(&model, &all), 100));
    }
}

/// A NaN is laid to its own token, also where the last block keeps the last row alone and that row's window ends long before.
#[test]
fn a_nan_outside_every_window_is_still_named() {
    for window in [1, 16] {
        let model = spoiled("mistral", window);
        let mut tokens = tokens(200, 14);
        tokens[3] = LAST_TOKEN;
        for (layers, logits) in [(vec![0], LogitRows::None), (vec![], LogitRows::Last), (vec![2], LogitRows::All)] {
            let capture = CapturePlan { layers, rows: CaptureRows::Last, tap: Tap::PreSteer };
            let ask = Ask { tokens: tokens.clone(), steering: SteeringPlan::default(), capture, logits };
            let error = model.forward(&mut [ask.sequence(None)], &|| false).unwrap_err();
            assert!(matches!(error, Error::NonFinite { layer: 0, position: 3, id: LAST_TOKEN, .. }), "{error:?}");
        }
    }
    // In a value projection of one layer: every token has it, the first is named.
    let v = ("model.layers.2.self_attn.v_proj.weight", 11, f32::NAN);
    let model = load(&Tiny { spoiled: vec![v], ..tiny("mistral", 1) });
    let capture = CapturePlan { layers: vec![2], rows: CaptureRows::Last, tap: Tap::PreSteer };
    let ask = Ask { tokens: tokens(200, 15), steering: SteeringPlan::default(), capture, logits: LogitRows::None };
    let error = model.forward(&mut [ask.sequence(None)], &|| false).unwrap_err();
    assert!(matches!(error, Error::NonFinite { layer: 2, position: 0, .. }), "{error:?}");
}

/// Asking for the last row alone, which computes queries and MLP of the last block for that row, changes none of its bits.
#[test]
fn the_last_row_alone_is_the_last_row_of_all() {
    for family in FAMILIES {
        for window in WINDOWS {
            let model = engine(family, window);
            for count in [1, 64, 65, 200] {
                let tokens = tokens(count, 16);
                let expected = whole(model, &tokens);
                for layer in 0..3 {
                    let capture = CapturePlan { layers: vec![layer], rows: CaptureRows::Last, tap: Tap::PostSteer };
                    let ask = Ask { tokens: tokens.clone(), steering: SteeringPlan::default(), capture, logits: LogitRows::None };
                    let found = run_one(model, &ask);
                    let expected = &rows_of(&expected, layer)[(count - 1) * HIDDEN..];
                    same_numbers(&format!("{family}, window {window}, layer {layer}"), &found.residual, expected, &[HIDDEN]);
                }
            }
        }
    }
}
