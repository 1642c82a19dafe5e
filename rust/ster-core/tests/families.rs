//! Every family's config: the defaults of its class in transformers, and no key of another family passed over.

mod support;

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Map, Value, json};
use ster_core::error::Error;
use ster_core::llama::config::{Activation, LlamaConfig};
use ster_core::llama::families;
use ster_core::llama::rope::RopeScaling;
use ster_core::{LogitRows, SteeringLlama, SteeringPlan, Tap};
use support::asks::{Ask, run_one};
use support::{Rng, Tiny};
use tempfile::TempDir;

/// The sizes that no class has a default for here, `keys` beside them; null stays null.
fn read(family: &str, keys: &Value) -> Result<LlamaConfig, Error> {
    let mut config = json!({
        "model_type": family, "hidden_size": 512, "num_attention_heads": 64, "num_hidden_layers": 30, "intermediate_size": 40, "vocab_size": 50,
    });
    for (key, value) in keys.as_object().unwrap() {
        config[key] = value.clone();
    }
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    LlamaConfig::load(dir.path())
}

#[track_caller]
fn refused(family: &str, keys: &Value, field: &str) -> String {
    match read(family, keys) {
        Err(Error::Config { field: found, problem, .. }) => {
            assert_eq!(found, field, "{family} {keys}: {problem}");
            problem
        }
        other => panic!("{family} {keys}: {other:?}"),
    }
}

/// Layers of thirty that `holds` says yes to, as a string of bits.
fn layers(holds: impl Fn(usize) -> bool) -> String {
    (0..30).map(|layer| if holds(layer) { '1' } else { '.' }).collect()
}

/// What `CONFIG_MAPPING[family](hidden_size=512, num_attention_heads=64, num_hidden_layers=30)` of transformers 5.24 holds, and what its
/// modeling file makes of it.
struct Class {
    name: &'static str,
    kv_heads: usize,
    head_dim: usize,
    context: usize,
    norm_eps: f64,
    theta: f64,
    tied: bool,
    activation: Activation,
    window: Option<usize>,
    windowed: &'static str,
    rotated: &'static str,
    biases: [bool; 3],
    attention_scale: f64,
    caps: [Option<f32>; 2],
}

const LLAMA: Class = Class {
    name: "llama",
    kv_heads: 64,
    head_dim: 8,
    context: 2048,
    norm_eps: 1e-6,
    theta: 1e4,
    tied: false,
    activation: Activation::Silu,
    window: None,
    windowed: "..............................",
    rotated: "111111111111111111111111111111",
    biases: [false; 3],
    attention_scale: 0.353_553_390_593_273_8,
    caps: [None; 2],
};
const GEMMA2: Class = Class {
    name: "gemma2",
    kv_heads: 4,
    head_dim: 256,
    context: 8192,
    tied: true,
    activation: Activation::GeluTanh,
    window: Some(4096),
    windowed: "1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.",
    attention_scale: 0.0625,
    caps: [Some(50.0), Some(30.0)],
    ..LLAMA
};
const CLASSES: [Class; 10] = [
    LLAMA,
    Class { name: "mistral", kv_heads: 8, context: 131_072, window: Some(4096), windowed: "111111111111111111111111111111", ..LLAMA },
    Class { name: "qwen2", kv_heads: 32, context: 32_768, biases: [true, false, false], ..LLAMA },
    Class { name: "qwen3", kv_heads: 32, head_dim: 128, context: 32_768, attention_scale: 0.088_388_347_648_318_45, ..LLAMA },
    Class { name: "phi3", context: 4096, norm_eps: 1e-5, ..LLAMA },
    Class { name: "granite", attention_scale: 1.0, ..LLAMA },
    Class { name: "olmo2", norm_eps: 1e-5, ..LLAMA },
    Class { name: "smollm3", kv_heads: 4, context: 32_768, theta: 2e6, tied: true, rotated: "111.111.111.111.111.111.111.11", ..LLAMA },
    GEMMA2,
    Class { name: "gemma3_text", context: 131_072, theta: 1e6, windowed: "11111.11111.11111.11111.11111.", caps: [None; 2], ..GEMMA2 },
];

#[test]
fn silent_configs_take_the_defaults_of_their_class() {
    assert_eq!(CLASSES.len(), families::ALL.len());
    for class in CLASSES {
        let config = read(class.name, &json!({})).unwrap();
        let name = class.name;
        assert_eq!((config.kv_heads, config.head_dim, config.rotary_dim), (class.kv_heads, class.head_dim, class.head_dim), "{name}");
        assert_eq!((config.context, config.norm_eps, config.tied), (class.context, class.norm_eps, class.tied), "{name}");
        assert_eq!((config.rope.theta, &config.rope.scaling), (class.theta, &RopeScaling::Default), "{name}");
        assert_eq!(config.local_rope.as_ref().map(|rope| rope.theta), (name == "gemma3_text").then_some(1e4), "{name}");
        assert_eq!((config.activation, config.window), (class.activation, class.window), "{name}");
        assert_eq!(layers(|layer| config.window_of(layer).is_some()), class.windowed, "{name}");
        assert_eq!(layers(|layer| config.rope_of(layer).is_some()), class.rotated, "{name}");
        assert_eq!([config.qkv_bias, config.o_bias, config.mlp_bias], class.biases, "{name}");
        assert_eq!(config.attention_scale, class.attention_scale as f32, "{name}");
        assert_eq!([config.score_cap, config.logit_cap], class.caps, "{name}");
        let gemma = name.starts_with("gemma");
        assert_eq!(config.embedding_scale, if gemma { 512f64.sqrt() as f32 } else { 1.0 }, "{name}");
        assert_eq!((config.residual_scale, config.logit_divisor), (1.0, 1.0), "{name}");
    }
}

/// `null` is how configs say "not set": a class that knows no default but a number takes it, any other the value that means none.
#[test]
fn null_is_what_the_class_makes_of_it() {
    for class in CLASSES {
        let name = class.name;
        // `__post_init__`: as many as there are heads.
        assert_eq!(read(name, &json!({"num_key_value_heads": null})).unwrap().kv_heads, 64, "{name}");
        assert_eq!(read(name, &json!({"head_dim": null})).unwrap().head_dim, 8, "{name}");
        assert_eq!(read(name, &json!({"tie_word_embeddings": null})).unwrap().tied, class.tied, "{name}");
        assert_eq!(read(name, &json!({"rope_theta": null, "rope_scaling": null})).unwrap().rope.theta, class.theta, "{name}");
        let silent = read(name, &json!({})).unwrap();
        for key in ["layer_types", "no_rope_layers", "hidden_act", "use_sliding_window", "rms_norm_eps", "max_position_embeddings"] {
            assert_eq!(read(name, &json!({key: null})).unwrap(), silent, "{name} {key}");
        }
    }
    assert_eq!(read("mistral", &json!({"sliding_window": null})).unwrap().window, None);
    let qwen =
        |window: Value| read("qwen2", &json!({"use_sliding_window": true, "sliding_window": window, "max_window_layers": 0})).unwrap();
    assert_eq!((qwen(json!(9)).window_of(0), qwen(json!(null)).window_of(0)), (Some(9), None));
    assert_eq!(read("qwen2", &json!({"use_sliding_window": true, "max_window_layers": 0})).unwrap().window_of(0), Some(4096));
    assert_eq!(read("smollm3", &json!({"use_sliding_window": true})).unwrap().window, None);
    let caps = read("gemma2", &json!({"attn_logit_softcapping": null, "final_logit_softcapping": null})).unwrap();
    assert_eq!((caps.score_cap, caps.logit_cap), (None, None));
    // The masks of Gemma's models are made for windows whether a layer has one or not, and there is none to make without a number.
    for family in ["gemma2", "gemma3_text"] {
        assert!(refused(family, &json!({"sliding_window": null}), "sliding_window").starts_with("is null"));
    }
}

#[test]
fn options_of_a_family_are_read() {
    let windows = |family: &str, keys: Value| {
        let config = read(family, &keys).unwrap();
        layers(|layer| config.window_of(layer).is_some())
    };
    let above = |first: usize| layers(|layer| layer >= first);
    let used = |more: Value| {
        let mut keys = json!({"use_sliding_window": true, "sliding_window": 8});
        keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        keys
    };
    for family in ["qwen2", "qwen3"] {
        assert_eq!(windows(family, used(json!({}))), above(28));
        assert_eq!(windows(family, used(json!({"max_window_layers": 0}))), above(0));
        assert_eq!(windows(family, used(json!({"max_window_layers": 7}))), above(7));
        assert_eq!(windows(family, used(json!({"max_window_layers": 99}))), above(99));
        assert_eq!(windows(family, json!({"sliding_window": 8, "max_window_layers": 7})), above(99));
        let kinds: Vec<_> = (0..30).map(|layer| if layer % 3 == 1 { "sliding_attention" } else { "full_attention" }).collect();
        assert_eq!(windows(family, used(json!({"max_window_layers": 7, "layer_types": kinds}))), layers(|layer| layer % 3 == 1));
        // transformers forgets the window, then asks it for a mask.
        refused(family, &json!({"sliding_window": 8, "layer_types": kinds}), "layer_types");
    }
    assert_eq!(windows("smollm3", used(json!({}))), layers(|layer| layer % 4 == 3));
    assert_eq!(windows("smollm3", used(json!({"no_rope_layer_interval": 2}))), layers(|layer| layer % 2 == 1));
    let flags: Vec<_> = (0..31).map(|layer| u8::from(layer % 5 != 0)).collect();
    let listed = read("smollm3", &used(json!({"no_rope_layers": flags, "no_rope_layer_interval": 2}))).unwrap();
    assert_eq!(layers(|layer| listed.rope_of(layer).is_none()), layers(|layer| layer % 5 == 0));
    assert_eq!(layers(|layer| listed.window_of(layer).is_some()), layers(|layer| layer % 5 == 0));
    assert_eq!(windows("gemma3_text", json!({"sliding_window_pattern": 1})), above(99));
    assert_eq!(windows("gemma3_text", json!({"sliding_window_pattern": 4})), layers(|layer| layer % 4 != 3));
    refused("gemma3_text", &json!({"sliding_window_pattern": 0}), "sliding_window_pattern");
    refused("smollm3", &json!({"no_rope_layers": [1, 0]}), "no_rope_layers");
    refused("smollm3", &json!({"no_rope_layers": vec![2; 30]}), "no_rope_layers");
    refused("gemma2", &json!({"layer_types": vec!["sliding_attention"; 29]}), "layer_types");
    refused("gemma2", &json!({"layer_types": vec!["chunked_attention"; 30]}), "layer_types");
    refused("gemma2", &json!({"use_bidirectional_attention": true}), "use_bidirectional_attention");
    for (family, key) in [
        ("granite", "embedding_multiplier"),
        ("granite", "residual_multiplier"),
        ("granite", "attention_multiplier"),
        ("granite", "logits_scaling"),
        ("gemma2", "query_pre_attn_scalar"),
        ("gemma2", "attn_logit_softcapping"),
        ("gemma3_text", "final_logit_softcapping"),
        ("gemma3_text", "rope_local_base_freq"),
        ("phi3", "partial_rotary_factor"),
    ] {
        for bad in [json!(0), json!(-1), json!("1"), json!(1e300), json!(true)] {
            refused(family, &json!({key: bad}), key);
        }
    }
    let part = |part: f64| read("phi3", &json!({"head_dim": 96, "partial_rotary_factor": part})).unwrap().rotary_dim;
    assert_eq!((part(0.75), part(0.5), part(1.0)), (72, 48, 96));
    for bad in [0.01, 1.01, 0.99] {
        refused("phi3", &json!({"head_dim": 96, "partial_rotary_factor": bad}), "partial_rotary_factor"); // 0.99: 95, odd
    }
}

/// Gemma 3's two rotations, in the spelling of old configs and that of transformers 5.
#[test]
fn gemma3_has_two_rotations() {
    let ropes = |keys: Value| {
        let config = read("gemma3_text", &keys).unwrap();
        config.ropes().map(|rope| (rope.theta, rope.scaling.clone())).collect::<Vec<_>>()
    };
    let linear = RopeScaling::Linear { factor: 8.0 };
    let old = json!({"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}});
    assert_eq!(ropes(old), [(5e5, linear.clone()), (2e4, RopeScaling::Default)]);
    let new = json!({"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }});
    assert_eq!(ropes(new), [(5e5, linear), (2e4, RopeScaling::Default)]);
    let half = json!({"rope_parameters": {"full_attention": null, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}});
    assert_eq!(ropes(half), [(1e6, RopeScaling::Default), (1e4, RopeScaling::Linear { factor: 2.0 })]);
    // Not nested: transformers keeps the entry and runs with the defaults.
    let flat = json!({"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}});
    assert!(refused("gemma3_text", &flat, "rope_parameters").contains("`full_attention`"));
    let beside = json!({"rope_parameters": {"full_attention": {"rope_type": "default"}, "rope_theta": 5e5}});
    refused("gemma3_text", &beside, "rope_parameters.rope_theta");
    let differ = json!({"rope_local_base_freq": 3e4, "rope_parameters": {"sliding_attention": {"rope_theta": 2e4}}});
    refused("gemma3_text", &differ, "rope_parameters.sliding_attention.rope_theta");
    let local = json!({"rope_parameters": {"sliding_attention": {"rope_type": "dynamic", "factor": 2.0}}});
    refused("gemma3_text", &local, "rope_parameters.sliding_attention.rope_type");
    // One rotation alone has entries for types of layers nowhere else.
    let nested = json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}});
    refused("qwen3", &nested, "rope_parameters.full_attention");
}

// ------------------------------------------------------------------------------------------------------------------ keys of others

/// Keys by which one family says that it is not Llama, with values that matter there; and which families read the key.
#[rustfmt::skip]
const FOREIGN: &[(&str, &str, &[&str])] = &[
    ("sliding_window", "16", &["mistral", "qwen2", "qwen3", "phi3", "smollm3", "gemma2", "gemma3_text"]),
    ("sliding_window_pattern", "2", &["gemma3_text"]),
    ("no_rope_layer_interval", "4", &["smollm3"]),
    ("partial_rotary_factor", "0.5", &["phi3"]),
    ("rope_local_base_freq", "10000.0", &["gemma3_text"]),
    ("query_pre_attn_scalar", "99", &["gemma2", "gemma3_text"]),
    ("attn_logit_softcapping", "50.0", &["gemma2"]),
    ("final_logit_softcapping", "30.0", &["gemma2", "gemma3_text"]),
    ("embedding_multiplier", "12.0", &["granite"]),
    ("residual_multiplier", "0.22", &["granite"]),
    ("attention_multiplier", "0.015625", &["granite"]),
    ("logits_scaling", "8.0", &["granite"]),
    ("use_sliding_window", "true", &["qwen2", "qwen3", "smollm3"]),
    ("attention_bias", "true", &["llama", "qwen3", "granite", "olmo2", "smollm3", "gemma2", "gemma3_text"]),
    ("mlp_bias", "true", &["llama", "granite", "smollm3"]),
    ("hidden_activation", "\"gelu\"", &["gemma2", "gemma3_text"]),
    ("layers_block_type", "[\"mamba\"]", &[]),
    ("num_local_experts", "8", &[]),
    ("use_qk_norm", "true", &[]),
    ("qk_layernorm", "true", &[]),
    ("clip_qkv", "8.0", &[]),
    ("rope_interleaved", "true", &[]),
    ("use_bidirectional_attention", "true", &[]),
    ("quantization_config", "{\"quant_method\": \"gptq\"}", &[]),
    ("no_rope_layers_pattern", "\"every 4th\"", &[]),
    ("a_new_idea", "1", &[]),
];

fn names() -> Vec<&'static str> {
    families::ALL.iter().map(|family| family.name).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any of them, among keys that say nothing or are null.
    #[test]
    fn what_another_family_means_by_a_key_is_refused_by_name(
        family in select(names()), (key, value, readers) in select(FOREIGN), noise in prop::collection::btree_set(0..6usize, 0..4),
    ) {
        let harmless = [
            ("_name_or_path", json!("x")), ("use_cache", json!(true)), ("torch_dtype", json!("bfloat16")), ("head_dim", json!(null)),
            ("attention_dropout", json!(0.0)), ("a_newer_idea", json!(null)),
        ];
        let mut keys = Map::new();
        for n in noise {
            keys.insert(harmless[n].0.into(), harmless[n].1.clone());
        }
        let silent = read(family, &Value::Object(keys.clone())).unwrap();
        keys.insert(key.into(), serde_json::from_str(value).unwrap());
        let keys = Value::Object(keys);
        if !readers.contains(&family) {
            let problem = refused(family, &keys, key);
            prop_assert!(problem.starts_with("is "), "{}", problem);
        } else if let Ok(config) = read(family, &keys) {
            // Read, and not dropped: only a window that is switched off by its own key, and one equal to the default, may change nothing.
            let idle = ["use_sliding_window", "sliding_window", "final_logit_softcapping", "attn_logit_softcapping", "rope_local_base_freq"];
            let same = config == silent || key == "no_rope_layer_interval";
            prop_assert!(!same || idle.contains(&key) || key == "no_rope_layer_interval", "{family} passes over {key}");
        } else {
            panic!("{family} does not read {key}: {:?}", read(family, &keys));
        }
    }
}

#[test]
fn every_key_a_family_reads_is_tried_on_the_others() {
    for family in families::ALL {
        for key in family.keys {
            let tried =
                FOREIGN.iter().any(|(foreign, _, readers)| foreign == key && (readers.contains(&family.name) || readers.is_empty()));
            let elsewhere = ["layer_types", "no_rope_layers", "max_window_layers", "use_bidirectional_attention"].contains(key);
            assert!(tried || elsewhere, "{} of {}", key, family.name);
        }
    }
    // Lists must have a length, so not from the table. `max_window_layers` alone says nothing: configs of SmolLM3 and Qwen have it idle.
    for name in ["llama", "phi3", "granite", "olmo2"] {
        refused(name, &json!({"layer_types": vec!["sliding_attention"; 30]}), "layer_types");
        read(name, &json!({"layer_types": vec!["full_attention"; 30]})).unwrap();
    }
    refused("mistral", &json!({"layer_types": vec!["full_attention"; 30]}), "layer_types"); // its window is 4096 where it says nothing
    for name in names().into_iter().filter(|name| *name != "smollm3") {
        refused(name, &json!({"no_rope_layers": vec![0; 30]}), "no_rope_layers");
    }
}

// ------------------------------------------------------------------------------------------------------------- published configs

/// A published config of the same proportions, small enough to run: `heads` to `kv_heads`, and `head_dim` to `hidden` where they are odd.
fn shrunk(config: &Map<String, Value>) -> (Tiny, Map<String, Value>) {
    let size = |key: &str| config.get(key).and_then(Value::as_u64).map(|n| n as usize);
    let (hidden, heads) = (size("hidden_size").unwrap(), size("num_attention_heads").unwrap_or(16));
    let family = names().into_iter().find(|name| Some(*name) == config["model_type"].as_str()).unwrap();
    let kv_heads = size("num_key_value_heads").unwrap_or(if family == "smollm3" { 4 } else { heads });
    let (kv_small, heads_small) = match heads / kv_heads {
        1 => (2, 2),
        group => (if kv_heads == 1 { 1 } else { 2 }, if kv_heads == 1 { group } else { 2 * group }),
    };
    // Ten numbers a head where the real one is no multiple of sixteen, else sixteen; the width of the stream as it is to heads times head_dim.
    let real_dim = size("head_dim").unwrap_or(hidden / heads);
    let head_dim = if real_dim.is_multiple_of(16) { 16 } else { 10 };
    let hidden_small = (heads_small * head_dim * hidden / (heads * real_dim)).max(8);
    let mut small = config.clone();
    small.retain(|key, _| !key.starts_with('_'));
    let tiny = Tiny {
        family,
        hidden: hidden_small,
        layers: 5,
        heads: heads_small,
        kv_heads: kv_small,
        head_dim,
        mlp: 30,
        vocab: 40,
        tied: small.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(["smollm3"].contains(&family)),
        biases: small.get("attention_bias").and_then(Value::as_bool).unwrap_or(false),
        ..Tiny::default()
    };
    for (key, value) in [
        ("hidden_size", tiny.hidden),
        ("num_attention_heads", tiny.heads),
        ("num_key_value_heads", tiny.kv_heads),
        ("num_hidden_layers", tiny.layers),
        ("intermediate_size", tiny.mlp),
        ("vocab_size", tiny.vocab),
        ("head_dim", tiny.head_dim),
    ] {
        // Absent keys stay absent where the default is what the sizes give.
        let derived =
            (key == "head_dim" && tiny.hidden == tiny.heads * tiny.head_dim) || (key == "num_key_value_heads" && kv_heads == heads);
        if small.contains_key(key) || !derived {
            small.insert(key.into(), value.into());
        }
    }
    if let Some(Value::Array(flags)) = small.get_mut("no_rope_layers") {
        flags.truncate(5);
    }
    (tiny, small)
}

/// `data/configs` of the reference folder: each runs, or is refused by the field that says why.
#[test]
fn published_configs_run_in_small_or_are_refused_by_field() {
    let Some(root) = std::env::var_os("STER_REFERENCES") else {
        println!("skipped: STER_REFERENCES is not set, so there are no published configs");
        return;
    };
    let mut paths: Vec<PathBuf> =
        fs::read_dir(PathBuf::from(root).join("data/configs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|end| end == "json"));
    paths.sort();
    let mut ran = 0;
    for path in &paths {
        let config: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        let (tiny, small) = shrunk(config.as_object().unwrap());
        let dir = TempDir::new().unwrap();
        tiny.write(dir.path());
        fs::write(dir.path().join("config.json"), Value::Object(small).to_string()).unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap();
        let model = match (SteeringLlama::load(dir.path(), Some(1)), name) {
            (Ok(model), _) => model,
            // A note of ours that is spelled like a key, for `no_rope_layers`.
            (Err(Error::Config { field, .. }), "smollm3-3b") => {
                assert_eq!(field, "no_rope_layers_pattern");
                continue;
            }
            (Err(error), name) => panic!("{name}: {error}"),
        };
        let mut rng = Rng::new(3);
        let tokens: Vec<u32> = (0..150).map(|_| rng.below(40) as u32).collect();
        let output =
            run_one(&model, &Ask { logits: LogitRows::Last, ..Ask::all(&model, &tokens, &SteeringPlan::default(), Tap::PreSteer) });
        assert!(output.residual.iter().chain(&output.logits).all(|v| v.is_finite()), "{name}");
        assert_eq!(output.residual_shape, [5, 150, tiny.hidden], "{name}");
        ran += 1;
    }
    assert!(ran >= 15, "only {ran} of {} ran", paths.len());
}
