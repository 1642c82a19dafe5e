//! GGUF files: what each architecture's becomes, every refusal, splits.

#[path = "support/gguf.rs"]
mod support;

use std::fs;

use serde_json::{Map, Value, json};
use ster_core::checkpoint::gguf::Gguf;
use ster_core::checkpoint::{Form, Source};
use ster_core::error::{Error, Result};
use ster_core::llama::config::LlamaConfig;
use ster_core::llama::rope::{Rope, RopeScaling};
use ster_core::llama::weights::LlamaWeights;
use support::{BF16, File, string, tiny};
use tempfile::TempDir;

fn open_bytes(bytes: &[u8]) -> Result<Source> {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    Source::open(&path)
}

fn open(file: &File) -> Result<Source> {
    open_bytes(&file.bytes())
}

fn config(file: &File) -> Map<String, Value> {
    open(file).unwrap_or_else(|error| panic!("{error}")).config
}

#[track_caller]
fn assert_says<T>(result: Result<T>, parts: &[&str]) {
    let Err(error) = result else { panic!("opened, expected a refusal with {parts:?}") };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "expected `{part}` in: {message}");
    }
    assert!(!message.ends_with('.') && !message.contains('\n'), "not in Ster's voice: {message}");
}

/// `config` of a tiny model with `more` on top; null takes a key away.
fn expected(model_type: &str, more: Value) -> Map<String, Value> {
    let mut all = json!({
        "model_type": model_type, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 5, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": true, "rope_theta": 500000.0, "bos_token_id": null, "eos_token_id": null,
    });
    for (key, value) in more.as_object().unwrap() {
        match value {
            Value::String(absent) if absent == "absent" => all.as_object_mut().unwrap().remove(key),
            value => all.as_object_mut().unwrap().insert(key.clone(), value.clone()),
        };
    }
    all.as_object().unwrap().clone()
}

// ------------------------------------------------------------------------------------------------------------------- what must load

#[test]
fn a_llama_file_is_the_config_and_the_tensors_of_its_folder() {
    let file = tiny("llama").tensor("output.weight", &[5, 8]).int("llama.vocab_size", 5);
    let source = open(&file).unwrap();
    assert_eq!(source.config, expected("llama", json!({"tie_word_embeddings": false})));
    assert_eq!(source.form, Form { interleaved: true, gains_with_one: false });
    let config = LlamaConfig::from_source(&source).unwrap();
    assert_eq!((config.norm_eps, config.tied, config.context), (1e-5, false, 64), "1e-5 as config.json has it, not 9.99999974e-6");
    assert_eq!(config.rope, Rope { theta: 500000.0, scaling: RopeScaling::Default });

    let weights = LlamaWeights::load(&source.checkpoint, &config).unwrap();
    assert_eq!(weights.blocks[1].mlp_norm, file.values("blk.1.ffn_norm.weight"));
    for (matrix, name) in [(&weights.embed, "token_embd.weight"), (&weights.blocks[1].down.weight, "blk.1.ffn_down.weight")] {
        let values: Vec<f32> = (0..matrix.rows())
            .flat_map(|row| {
                let mut out = vec![0.0; matrix.cols()];
                matrix.view().widen_row(row, &mut out);
                out
            })
            .collect();
        assert_eq!(values, file.values(name));
    }
    assert_eq!((weights.head.rows(), weights.head.cols()), (5, 8));
}

#[test]
fn every_architecture_becomes_its_config() {
    assert_eq!(config(&tiny("qwen2")), expected("qwen2", json!({})));
    let qwen3 = tiny("qwen3").int("qwen3.attention.key_length", 4).int("qwen3.attention.value_length", 4);
    assert_eq!(config(&qwen3), expected("qwen3", json!({"head_dim": 4})));
    assert_eq!(config(&tiny("olmo2")), expected("olmo2", json!({})));
    let phi3 = tiny("phi3").int("phi3.attention.sliding_window", 0).int("phi3.rope.scaling.original_context_length", 64);
    assert_eq!(config(&phi3), expected("phi3", json!({"sliding_window": null, "original_max_position_embeddings": 64})));
    assert_eq!(config(&phi3.int("phi3.attention.sliding_window", 2047))["sliding_window"], 2047);

    let granite = tiny("granite").float("granite.attention.scale", 0.015625).float("granite.embedding_scale", 12.0);
    let scales = json!({
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    });
    assert_eq!(config(&granite.float("granite.residual_scale", 0.22)), expected("granite", scales));
    let silent = json!({"attention_multiplier": 0.5, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 8.0});
    assert_eq!(config(&tiny("granite")), expected("granite", silent));

    let mut smollm3 = tiny("smollm3").int("smollm3.block_count", 9);
    assert_eq!(config(&smollm3), expected("smollm3", json!({"num_hidden_layers": 9, "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0, 1]})));
    smollm3 = smollm3.tensor("blk.0.attn_q.bias", &[8]).tensor("blk.0.ffn_up.bias", &[6]);
    assert_eq!((&config(&smollm3)["attention_bias"], &config(&smollm3)["mlp_bias"]), (&json!(true), &json!(true)));

    let mistral = tiny("llama").int("llama.attention.sliding_window", 16);
    assert_eq!(config(&mistral), expected("mistral", json!({"sliding_window": 16})));
    let original = tiny("llama").text("llama.tensor_data_layout", "Meta AI original pth");
    assert_eq!(config(&original), expected("llama", json!({})));
}

#[test]
fn gemma_has_what_its_files_are_silent_about() {
    let gelu = json!({
        "hidden_act": "absent", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, "query_pre_attn_scalar": 4,
        "layer_types": ["sliding_attention", "full_attention"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    });
    let source = open(&tiny("gemma2")).unwrap();
    assert_eq!(source.config, expected("gemma2", gelu));
    assert_eq!(source.form, Form { interleaved: false, gains_with_one: true });
    let said = tiny("gemma2").int("gemma2.attention.sliding_window", 32).float("gemma2.attn_logit_softcapping", 25.0);
    assert_eq!((&config(&said)["sliding_window"], &config(&said)["attn_logit_softcapping"]), (&json!(32), &json!(25.0)));
    let largest = tiny("gemma2").int("gemma2.block_count", 46).int("gemma2.attention.key_length", 6).int("gemma2.rope.dimension_count", 6);
    assert_eq!((&config(&largest)["query_pre_attn_scalar"], &config(&largest)["head_dim"]), (&json!(4), &json!(6)));

    let gemma3 = tiny("gemma3").int("gemma3.block_count", 7).int("gemma3.attention.sliding_window", 16);
    let gemma3 = gemma3.text("gemma3.rope.scaling.type", "linear").float("gemma3.rope.scaling.factor", 8.0);
    let mut kinds = vec!["sliding_attention"; 7];
    kinds[5] = "full_attention";
    let third = json!({
        "hidden_act": "absent", "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 7, "sliding_window": 16,
        "query_pre_attn_scalar": 4, "layer_types": kinds, "attn_logit_softcapping": null, "final_logit_softcapping": null,
        "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    });
    assert_eq!(config(&gemma3), expected("gemma3_text", third));
    let wide = config(&gemma3.without("gemma3.attention.sliding_window"));
    assert_eq!((&wide["sliding_window"], &wide["layer_types"]), (&json!(null), &json!(vec!["full_attention"; 7])));
}

#[test]
fn tensors_have_the_names_of_transformers() {
    for (arch, first, names) in [
        (
            "llama",
            "input_layernorm",
            "mlp.down_proj mlp.gate_proj mlp.up_proj post_attention_layernorm self_attn.k_proj self_attn.o_proj self_attn.q_proj self_attn.v_proj",
        ),
        (
            "qwen3",
            "input_layernorm",
            "mlp.down_proj mlp.gate_proj mlp.up_proj post_attention_layernorm self_attn.k_norm self_attn.k_proj self_attn.o_proj self_attn.q_norm self_attn.q_proj self_attn.v_proj",
        ),
        ("phi3", "input_layernorm", "mlp.down_proj mlp.gate_up_proj post_attention_layernorm self_attn.o_proj self_attn.qkv_proj"),
        (
            "olmo2",
            "mlp.down_proj",
            "mlp.gate_proj mlp.up_proj post_attention_layernorm post_feedforward_layernorm self_attn.k_norm self_attn.k_proj self_attn.o_proj self_attn.q_norm self_attn.q_proj self_attn.v_proj",
        ),
        (
            "gemma2",
            "input_layernorm",
            "mlp.down_proj mlp.gate_proj mlp.up_proj post_attention_layernorm post_feedforward_layernorm pre_feedforward_layernorm self_attn.k_proj self_attn.o_proj self_attn.q_proj self_attn.v_proj",
        ),
    ] {
        let source = open(&tiny(arch)).unwrap();
        let prefix = "model.layers.1.";
        let found: Vec<&str> = source.checkpoint.names().filter_map(|name| name.strip_prefix(prefix)).collect();
        let wanted: Vec<String> = std::iter::once(first).chain(names.split(' ')).map(|name| format!("{name}.weight")).collect();
        assert_eq!(found, wanted, "{arch}");
        assert!(source.checkpoint.contains("model.embed_tokens.weight") && source.checkpoint.contains("model.norm.weight"));
    }
    let source = open(&tiny("llama").tensor("blk.0.attn_gate.weight", &[8, 8]).tensor("blk.01.attn_q.weight", &[8, 8])).unwrap();
    assert!(source.checkpoint.contains("blk.0.attn_gate.weight") && source.checkpoint.contains("blk.01.attn_q.weight"));
    let refused = LlamaWeights::load(&source.checkpoint, &LlamaConfig::from_source(&source).unwrap());
    assert_says(refused, &["model.gguf", "`blk.0.attn_gate.weight` is not part of a Llama model"]);
    assert_says(open(&tiny("llama").tensor("model.norm.weight", &[8])), &["`model.norm.weight` has a name of transformers, not of GGUF"]);
}

#[test]
fn tokens_that_end_a_text_are_all_that_the_file_and_llama_cpp_name() {
    let tokens = ["a", "<|end_of_text|>", "<|eot_id|>", "<end_of_turn>", "<|eom_id|>"];
    let file = tiny("llama").texts("tokenizer.ggml.tokens", &tokens).ints("tokenizer.ggml.token_type", &[1, 3, 3, 1, 4]);
    let source = open(&file.int("tokenizer.ggml.bos_token_id", 0).int("tokenizer.ggml.eos_token_id", 1)).unwrap();
    assert_eq!((&source.config["bos_token_id"], &source.config["eos_token_id"]), (&json!(0), &json!(1)));
    let config = LlamaConfig::from_source(&source).unwrap();
    assert_eq!((config.bos, config.eos), (Some(0), vec![1, 2, 4]), "3 is a word of this vocabulary");
    let bare = open(&tiny("llama").int("tokenizer.ggml.eot_token_id", 3).int("tokenizer.ggml.eos_token_id", u32::MAX)).unwrap();
    assert_eq!(LlamaConfig::from_source(&bare).unwrap().eos, [3]);
    let wrong = tiny("llama").text("tokenizer.ggml.eos_token_id", "</s>");
    assert_says(open(&wrong), &["`tokenizer.ggml.eos_token_id` must be a token id, found \"</s>\""]);
}

// -------------------------------------------------------------------------------------------------------------------------- rotation

#[test]
fn linear_and_yarn_are_keys() {
    let factor = |kind: &str| tiny("llama").text("llama.rope.scaling.type", kind).float("llama.rope.scaling.factor", 4.0);
    assert_eq!(config(&factor("linear"))["rope_scaling"], json!({"rope_type": "linear", "factor": 4.0}));
    assert_eq!(config(&tiny("llama").float("llama.rope.scale_linear", 2.0))["rope_scaling"], json!({"rope_type": "linear", "factor": 2.0}));
    assert!(!config(&factor("none")).contains_key("rope_scaling"));
    let yarn = factor("yarn").int("llama.rope.scaling.original_context_length", 16).float("llama.rope.scaling.yarn_beta_fast", 16.0);
    let yarn = yarn.float("llama.rope.scaling.yarn_attn_factor", 1.1);
    let expected = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0, "attention_factor": 1.1,
    });
    assert_eq!(config(&yarn)["rope_scaling"], expected);
    assert!(matches!(LlamaConfig::from_source(&open(&yarn).unwrap()).unwrap().rope.scaling, RopeScaling::Yarn { factor: 4.0, .. }));

    assert_says(open(&yarn.clone().float("llama.rope.scaling.yarn_ext_factor", 0.5)), &["yarn_ext_factor` must be 1, found 0.5"]);
    assert_says(open(&yarn.float("llama.rope.scaling.yarn_log_multiplier", 1.0)), &["yarn_log_multiplier` is 1, which Ster does not know"]);
    assert_says(open(&factor("spiral")), &["rope.scaling.type` is \"spiral\", which Ster does not know"]);
    assert_says(open(&factor("longrope")), &["is \"longrope\", but there is no tensor `rope_factors_long.weight`"]);
    assert_says(open(&tiny("llama").int("llama.rope.dimension_count", 2)), &["rope.dimension_count` must be the 4 of a head, found 2"]);
}

#[test]
fn longrope_factors_are_the_lists_of_config_json() {
    let phi3 = tiny("phi3").int("phi3.rope.scaling.original_context_length", 16);
    let (short, long) = ([1.05f32, 1.1], [1.25f32, 63.7]);
    let file = phi3.numbers("rope_factors_long.weight", &long).numbers("rope_factors_short.weight", &short);
    let exact = |list: [f32; 2]| list.map(f64::from);
    let scaling = json!({"rope_type": "longrope", "long_factor": exact(long), "short_factor": exact(short)});
    // What the converter writes, in f32: transformers finds the same number again.
    let follows = (1.0 + 4f64.ln() / 16f64.ln()).sqrt() as f32;
    let usual = open(&file.clone().float("phi3.rope.scaling.attn_factor", follows)).unwrap();
    assert_eq!(usual.config["rope_scaling"], scaling);
    assert_eq!(usual.config["original_max_position_embeddings"], 16);
    assert!(!usual.checkpoint.contains("rope_factors_long.weight"), "no weight of the model");
    let own = config(&file.clone().float("phi3.rope.scaling.attn_factor", 1.19));
    assert_eq!(own["rope_scaling"]["attention_factor"], 1.19);

    assert_says(open(&file.clone().numbers("rope_factors_long.weight", &[1.0])), &["rope_factors_long.weight` has 1 factors, expected 2"]);
    assert_says(open(&file.clone().numbers("rope_factors_long.weight", &[1.0, f32::NAN])), &["must hold positive numbers, found NaN"]);
    assert_says(open(&file.clone().drop("rope_factors_short.weight")), &["rope_factors_long.weight` is there, but"]);
    let quarter = file.int("phi3.attention.key_length", 8).int("phi3.attention.value_length", 8);
    assert_eq!(config(&quarter)["partial_rotary_factor"], 0.5);
    let stray = tiny("llama").numbers("rope_factors_long.weight", &long).numbers("rope_factors_short.weight", &short);
    assert_says(open(&stray), &["is not a phi3"]);
}

/// What `generate_extra_tensors` of llama.cpp's `conversion/llama.py` computes, in f32 as torch does.
fn converter_factors(theta: f32, dim: usize, factor: f32, low: f32, high: f32, original: f32) -> Vec<f32> {
    let wavelength = |i: usize| std::f32::consts::TAU / (1.0 / theta.powf((2 * i) as f32 / dim as f32));
    let of = |wavelength: f32| {
        let smooth = (original / wavelength - low) / (high - low);
        match wavelength {
            w if w < original / high => 1.0,
            w if w > original / low => factor,
            _ => 1.0 / ((1.0 - smooth) / factor + smooth),
        }
    };
    (0..dim / 2).map(wavelength).map(of).collect()
}

fn with_factors(theta: f32, factors: &[f32]) -> File {
    let (heads, dim) = (2, factors.len() as u32 * 2);
    let sizes = tiny("llama").int("llama.attention.head_count", heads).int("llama.attention.key_length", dim);
    let sizes = sizes.int("llama.attention.value_length", dim).int("llama.rope.dimension_count", dim);
    sizes.float("llama.rope.freq_base", theta).numbers("rope_freqs.weight", factors)
}

#[test]
fn llama3_scaling_is_found_again_in_the_factors_it_became() {
    for (theta, dim, factor) in
        [(500000.0, 128, 8.0), (500000.0, 64, 32.0), (500000.0, 128, 32.0), (10000000.0, 96, 16.0), (500000.0, 128, 8.5)]
    {
        let mut factors = converter_factors(theta, dim, factor, 1.0, 4.0, 8192.0);
        assert!(factors.iter().any(|&f| f > 1.0 && f < factor), "a ramp");
        let source = open(&with_factors(theta, &factors)).unwrap();
        let expected = json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        });
        assert_eq!(source.config["rope_scaling"], expected);
        assert!(!source.checkpoint.contains("rope_freqs.weight"));
        let config = LlamaConfig::from_source(&source).unwrap();
        assert!(matches!(config.rope.scaling, RopeScaling::Llama3 { original_context: 8192, .. }));

        let ramp = factors.iter().position(|&f| f > 1.0 && f < factor).unwrap();
        let exact = factors[ramp];
        factors[ramp] = f32::from_bits(exact.to_bits() + 1); // another library's power
        assert!(open(&with_factors(theta, &factors)).is_ok());
        factors[ramp] = exact * 1.00002;
        assert_says(open(&with_factors(theta, &factors)), &["model.gguf", "`rope_freqs.weight` holds factors that follow from no llama3"]);
    }
    for (low, high, original) in [(1.0, 4.0, 4096.0), (1.0, 2.0, 8192.0), (2.0, 4.0, 8192.0)] {
        let others = converter_factors(500000.0, 128, 8.0, low, high, original);
        assert_says(open(&with_factors(500000.0, &others)), &["`rope_freqs.weight` holds factors that follow from no llama3"]);
    }
    assert!(!config(&with_factors(10000.0, &[1.0; 32])).contains_key("rope_scaling"), "all 1: nothing is scaled");
    assert_says(open(&with_factors(10000.0, &[f32::NAN; 32])), &["rope_freqs.weight"]);
    let odd = with_factors(10000.0, &[1.0; 32]).int("llama.rope.dimension_count", 32).int("llama.attention.key_length", 32);
    assert_says(open(&odd.int("llama.attention.value_length", 32)), &["has 32 factors, expected 16"]);
    assert_says(open(&tiny("qwen2").numbers("rope_freqs.weight", &[1.0, 2.0])), &["`rope_freqs.weight` is not part of a qwen2 model"]);
}

// ------------------------------------------------------------------------------------------------------------- rows as transformers has

fn widened(source: &Source, name: &str, rows: std::ops::Range<usize>, width: usize) -> Vec<f32> {
    let found = source.rows(name, rows).unwrap();
    assert_eq!(found.cols, width);
    found.data
}

#[test]
fn rows_of_q_and_k_come_out_in_the_order_of_transformers() {
    let biases = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
    let file = tiny("llama").numbers("blk.0.attn_q.bias", &biases);
    let source = open(&file).unwrap();
    // Two heads of four: rows 0, 2, 1, 3 of each.
    let order = [0, 2, 1, 3, 4, 6, 5, 7];
    let stored = file.values("blk.0.attn_q.weight");
    let expected: Vec<f32> = order.iter().flat_map(|&row| stored[row * 8..row * 8 + 8].to_vec()).collect();
    assert_eq!(widened(&source, "model.layers.0.self_attn.q_proj.weight", 0..8, 8), expected);
    assert_eq!(widened(&source, "model.layers.0.self_attn.q_proj.weight", 3..6, 8), expected[24..48]);
    assert_eq!(widened(&source, "model.layers.0.self_attn.q_proj.bias", 0..1, 8), order.map(|row| biases[row]));
    let k = file.values("blk.1.attn_k.weight");
    let expected: Vec<f32> = order[..4].iter().flat_map(|&row| k[row * 8..row * 8 + 8].to_vec()).collect();
    assert_eq!(widened(&source, "model.layers.1.self_attn.k_proj.weight", 0..4, 8), expected);
    assert_eq!(widened(&source, "model.layers.1.self_attn.v_proj.weight", 0..4, 8), file.values("blk.1.attn_v.weight"));
    assert_eq!(widened(&source, "model.norm.weight", 0..1, 8), file.values("output_norm.weight"));

    let qwen2 = tiny("qwen2");
    let plain = open(&qwen2).unwrap();
    assert_eq!(widened(&plain, "model.layers.0.self_attn.q_proj.weight", 0..8, 8), qwen2.values("blk.0.attn_q.weight"));
    assert_says(source.rows("model.norm.weight", 0..2), &["`model.norm.weight` has 1 rows, asked for 0..2"]);
    assert_says(source.rows("nowhere", 0..1), &["`nowhere` is missing"]);
}

#[test]
fn gains_of_gemma_lose_their_one_where_that_is_exact() {
    let gains: Vec<f32> = [0.5f32, -0.25, 0.0, 3.0, 1e-4, -0.9375, 7.0, 0.125].map(|w| half::bf16::from_f32(w).to_f32()).into();
    let stored: Vec<f32> = gains.iter().map(|w| w + 1.0).collect();
    let inexact = [0.1f32, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]; // 0.1 - 1 needs a bit more than f32 has
    let file = tiny("gemma2").numbers("output_norm.weight", &stored).numbers("blk.0.ffn_norm.weight", &inexact);
    let source = open(&file).unwrap();
    assert_eq!(widened(&source, "model.norm.weight", 0..1, 8), gains);
    assert_eq!(widened(&source, "model.layers.0.pre_feedforward_layernorm.weight", 0..1, 8), inexact);
    assert_eq!(widened(&source, "model.layers.0.mlp.down_proj.weight", 0..8, 6), file.values("blk.0.ffn_down.weight"));
}

#[test]
fn types_are_refused_by_name_where_a_model_needs_them() {
    for (kind, name, bytes) in
        [(16, "IQ2_XXS", 66), (39, "MXFP4", 136), (28, "F64", 2048), (26, "I32", 1024), (31, "Q4_0_4_4", 4), (99, "ggml type 99", 4)]
    {
        let odd = |tensor: &str| tiny("llama").stored(tensor, &[256], kind, vec![1; bytes]);
        let source = open(&odd("output_norm.weight")).unwrap();
        let result = source.checkpoint.vector("model.norm.weight", 256);
        assert_says(result, &["model.gguf", "`model.norm.weight` has dtype", name]);
        assert!(open(&odd("beside.weight")).is_ok(), "nobody reads it");
    }
    let bf16 = tiny("llama").stored("output_norm.weight", &[8], BF16, vec![0x80, 0x3F, 0, 0, 0x80, 0xBF, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(open(&bf16).unwrap().checkpoint.vector("model.norm.weight", 8).unwrap().0[..3], [1.0, 0.0, -1.0]);
}

// -------------------------------------------------------------------------------------------------------------------------- refusals

#[test]
fn keys_are_refused_by_name_and_harmless_ones_ignored() {
    let with = |name: &str, n: u32| open(&tiny("llama").int(name, n));
    for name in ["general.file_type", "quantize.imatrix.entries_count", "tokenizer.ggml.padding_token_id", "maker.own", "llama.vocab_size"]
    {
        with(name, 7).unwrap();
    }
    for name in ["llama.expert_count", "llama.attention.clamp_kqv", "llama.final_logit_softcapping", "llama.logit_scale"] {
        with(name, 0).unwrap();
        assert_says(with(name, 3), &["model.gguf: ", &format!("`{name}` is 3, which Ster does not know")]);
    }
    assert_says(with("llama.rope.dimension_sections", 0), &["`llama.rope.dimension_sections` is 0, which Ster does not know"]);
    assert_says(with("adapter.lora.alpha", 1), &["`adapter.lora.alpha` belongs to an adapter"]);
    assert_says(open(&tiny("llama").flag("llama.attention.causal", false)), &["attention.causal` is false"]);
    assert_says(open(&tiny("granite").flag("granite.rope.scaling.finetuned", false)), &["rope.scaling.finetuned` is false"]);
    assert_says(open(&tiny("olmo2").int("olmo2.attention.sliding_window", 4096)), &["Olmo 3"]);
    assert_says(open(&tiny("gemma2").float("gemma2.rope.freq_base_swa", 1.5)), &["differs from `rope.freq_base`"]);
    assert_says(open(&tiny("llama").text("llama.tensor_data_layout", "sideways")), &["is \"sideways\", which Ster does not know"]);

    for key in [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ] {
        let full = format!("llama.{key}");
        assert_says(open(&tiny("llama").without(&full)), &["model.gguf: ", &format!("`{full}` is missing")]);
        assert_says(open(&tiny("llama").text(&full, "many")), &[&format!("`{full}` must be"), "found \"many\""]);
    }
    assert_says(open(&tiny("granite").without("granite.logit_scale")), &["`granite.logit_scale` is missing"]);
    assert_says(with("llama.block_count", 0), &["`llama.block_count` must be an integer from 1"]);
    assert_says(with("llama.block_count", 1 << 20), &["`llama.block_count` is 1048576, more than 65536"]);
    assert_says(with("llama.attention.value_length", 2), &["value_length` must be the 4 of a key, found 2"]);
    assert_says(open(&tiny("llama").float("llama.rope.freq_base", f32::INFINITY)), &["rope.freq_base` must be a finite number, found inf"]);
    assert!(open(&tiny("llama").ints("llama.attention.head_count_kv", &[1, 1])).is_ok(), "the same for every layer");
    assert_says(open(&tiny("llama").ints("llama.attention.head_count_kv", &[1, 2])), &["the same for every layer, found a list"]);
    assert_says(open(&tiny("llama").drop("token_embd.weight")), &["`token_embd.weight` is missing"]);

    assert_says(open(&tiny("qwen3moe")), &["`general.architecture` is \"qwen3moe\", which is not supported; expected one of llama, qwen2"]);
    assert_says(open(&tiny("llama").without("general.architecture")), &["`general.architecture` is missing"]);
    assert_says(open(&tiny("llama").int("general.architecture", 1)), &["`general.architecture` must be a string, found 1"]);
    assert_says(open(&tiny("llama").text("general.type", "mmproj")), &["`general.type` is \"mmproj\", expected \"model\""]);
}

/// `bytes` with those from `at` on replaced.
fn patched(mut bytes: Vec<u8>, at: usize, with: &[u8]) -> Vec<u8> {
    bytes[at..at + with.len()].copy_from_slice(with);
    bytes
}

fn position(bytes: &[u8], of: &[u8]) -> usize {
    bytes.windows(of.len()).position(|window| window == of).unwrap()
}

#[test]
fn headers_that_lie_are_refused_with_what_is_wrong() {
    let file = tiny("llama");
    let good = file.bytes();
    let says = |bytes: &[u8], part: &str| assert_says(open_bytes(bytes), &["model.gguf", part]);
    says(b"", "is empty");
    says(b"GG", "is not a GGUF file: it begins with `GG`");
    says(b"PK\x03\x04 more", "is not a GGUF file: it begins with `PK\\x03\\x04`, expected `GGUF`");
    says(b"tjgg\x03\0\0\0", "is of the GGML formats that came before GGUF");
    says(b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer");
    says(b"GGUF", "ends inside the header: the version takes 4 bytes, found 0");
    says(&patched(good.clone(), 4, &1u32.to_le_bytes()), "is GGUF version 1; Ster reads versions 2 and 3");
    says(&patched(good.clone(), 4, &9u32.to_le_bytes()), "is GGUF version 9");
    says(&patched(good.clone(), 4, &3u32.to_be_bytes()), "is big-endian GGUF");
    says(&patched(good.clone(), 8, &u64::MAX.to_le_bytes()), "has an empty string as the name of tensor 20");
    says(&patched(good.clone(), 16, &u64::MAX.to_le_bytes()), "key ");
    open_bytes(&patched(good.clone(), 4, &2u32.to_le_bytes())).unwrap();
    for cut in [10, 23, 30, 60, 300, good.len() - 1] {
        assert!(open_bytes(&good[..cut]).is_err(), "{cut}");
    }
    says(&good[..good.len() - 1], "the file is truncated");

    // A key: 8 bytes of length, the name, 4 of type, the value.
    let at = position(&good, b"llama.block_count");
    says(&patched(good.clone(), at - 8, &u64::MAX.to_le_bytes()), "ends inside the header");
    says(&patched(good.clone(), at - 8, &0u64.to_le_bytes()), "has an empty string as key");
    says(&patched(good.clone(), at, b"\xFF"), "that is not UTF-8: invalid byte 0 of it");
    says(&patched(good.clone(), at + 17, &77u32.to_le_bytes()), "`llama.block_count` has the unknown value type 77");
    let list = file.clone().list("own.list", 8, string("a"), u64::MAX);
    says(&list.bytes(), "`own.list` ");
    says(&file.clone().list("own.list", 10, vec![], u64::MAX).bytes(), "`own.list` ends inside the header: its items takes");
    says(&file.clone().list("own.list", 44, vec![], 1).bytes(), "`own.list` is a list of the unknown value type 44");
    let nested = (0..9).fold(vec![], |inner, _| [&9u32.to_le_bytes()[..], &1u64.to_le_bytes(), &inner].concat());
    says(&file.clone().key("own.nest", 9, nested).bytes(), "`own.nest` is a list in more than 4 lists");
    says(&file.clone().key("own.flag", 7, vec![2]).bytes(), "`own.flag` is a boolean of value 2");
    let mut twice = file.clone();
    twice.keys.push(twice.keys[1].clone());
    says(&twice.bytes(), "`llama.block_count` occurs twice");
    for (value, shown) in [(0, "found 0"), (48, "found 48"), (3 << 30, "found 3221225472")] {
        says(&file.clone().int("general.alignment", value).bytes(), shown);
    }

    // A tensor: 8 bytes of length, the name, 4 of dimensions, 8 each, 4 of type, 8 of offset.
    let name = b"blk.1.attn_k.weight";
    let dims = position(&good, name) + name.len();
    let tensor =
        |at: usize, with: &[u8], part: &str| says(&patched(good.clone(), dims + at, with), &format!("`blk.1.attn_k.weight` {part}"));
    tensor(0, &5u32.to_le_bytes(), "has 5 dimensions, more than 4");
    tensor(4, &0u64.to_le_bytes(), "has dimensions [0, 4], expected sizes of at least 1");
    tensor(4, &u64::MAX.to_le_bytes(), "has dimensions [18446744073709551615, 4], expected sizes");
    tensor(4, &(1u64 << 61).to_le_bytes(), "has dimensions [2305843009213693952, 4], expected sizes");
    tensor(4, &(1u64 << 60).to_le_bytes(), "has dimensions [1152921504606846976, 4], too large for any file");
    tensor(4, &(1u64 << 50).to_le_bytes(), "takes 18014398509481984 bytes");
    tensor(20, &2u32.to_le_bytes(), "is Q4_0 with rows of 8 numbers, expected a multiple of 32");
    tensor(24, &1u64.to_le_bytes(), "begins at byte 1 of the data, expected a multiple of the alignment 32");
    tensor(24, &(u64::MAX - 31).to_le_bytes(), "takes 128 bytes from byte 18446744073709551584");
    tensor(24, &0u64.to_le_bytes(), "");
    let message = open_bytes(&patched(good.clone(), dims + 24, &0u64.to_le_bytes())).err().unwrap().to_string();
    assert!(message.contains("overlaps"), "{message}");
    let mut again = file.clone();
    again.tensors.push(again.tensors[0].clone());
    says(&again.bytes(), "`token_embd.weight` occurs twice");

    let mut wide = file.int("general.alignment", 256);
    wide.alignment = 256;
    assert_eq!(open(&wide).unwrap().checkpoint.vector("model.norm.weight", 8).unwrap().0, wide.values("output_norm.weight"));
}

#[test]
fn metadata_is_what_was_written() {
    use ster_core::checkpoint::gguf::{Kind, List, Value};
    let file = tiny("llama").texts("t", &["", "é", "b"]).ints("i", &[-1, 2]).key("u", 10, u64::MAX.to_le_bytes().into());
    let file = file.key("f", 12, 0.1f64.to_le_bytes().into()).list("b", 7, vec![1, 0], 2).key("s", 3, (-5i16).to_le_bytes().into());
    let nested = [&5u32.to_le_bytes()[..], &1u64.to_le_bytes(), &7i32.to_le_bytes()].concat();
    let file = file.list("n", 9, nested, 1);
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, file.bytes()).unwrap();
    let found = Gguf::open(&path).unwrap().metadata;
    assert_eq!((&found["u"], &found["f"], &found["s"]), (&Value::Int(u64::MAX.into()), &Value::F64(0.1), &Value::Int(-5)));
    let Value::List(List::Texts(texts)) = &found["t"] else { panic!() };
    assert_eq!(texts.iter().collect::<Vec<_>>(), ["", "é", "b"]);
    assert_eq!((texts.len(), texts.is_empty()), (3, false));
    let Value::List(List::Numbers(numbers)) = &found["i"] else { panic!() };
    assert_eq!((numbers.kind, numbers.iter().collect::<Vec<_>>()), (Kind::I32, vec![Value::Int(-1), Value::Int(2)]));
    assert_eq!(found["b"], Value::List(List::Bools(vec![true, false])));
    let Value::List(List::Lists(lists)) = &found["n"] else { panic!() };
    assert_eq!(lists.len(), 1);
}

// ------------------------------------------------------------------------------------------------------------------------------ splits

/// The parts as llama.cpp's `gguf-split` writes them: all metadata in the first.
fn split(file: &File, count: usize) -> Vec<File> {
    let parts = file.tensors.chunks(file.tensors.len().div_ceil(count)).enumerate();
    let part = |(n, tensors): (usize, &[_])| {
        let part = File { keys: if n == 0 { file.keys.clone() } else { Vec::new() }, tensors: tensors.to_vec(), ..*file };
        let part = part.key("split.no", 2, (n as u16).to_le_bytes().into()).key("split.count", 2, (count as u16).to_le_bytes().into());
        part.key("split.tensors.count", 5, (file.tensors.len() as i32).to_le_bytes().into())
    };
    parts.map(part).collect()
}

#[test]
fn a_split_model_is_opened_by_any_of_its_files() {
    let (dir, file) = (TempDir::new().unwrap(), tiny("llama"));
    let path = |n: usize| dir.path().join(format!("m-{n:05}-of-00003.gguf"));
    let parts = split(&file, 3);
    let write = |n: usize, part: &File| fs::write(path(n), part.bytes()).unwrap();
    (1..=3).for_each(|n| write(n, &parts[n - 1]));
    let whole = open(&file).unwrap();
    for n in 1..=3 {
        let source = Source::open(&path(n)).unwrap();
        assert_eq!((&source.config, &source.config_path), (&whole.config, &path(1)));
        assert_eq!(source.checkpoint.names().collect::<Vec<_>>(), whole.checkpoint.names().collect::<Vec<_>>());
        let weights = LlamaWeights::load(&source.checkpoint, &LlamaConfig::from_source(&source).unwrap()).unwrap();
        assert_eq!(weights.blocks[1].mlp_norm, file.values("blk.1.ffn_norm.weight"));
        assert_eq!(source.checkpoint.path_of("model.layers.1.mlp.down_proj.weight"), path(3));
    }

    let opened = || Source::open(&path(1));
    fs::remove_file(path(2)).unwrap();
    assert_says(Source::open(&path(3)), &["m-00002-of-00003.gguf", "is missing: part 2 of the 3 of this model"]);
    write(2, &parts[2]);
    assert_says(opened(), &["m-00002-of-00003.gguf", "`split.no` must be 1 as the file's name says, found 2"]);
    write(2, &parts[1].clone().int("own.key", 1));
    assert_says(opened(), &["m-00002-of-00003.gguf", "`own.key` differs from the first part's"]);
    write(2, &File { tensors: parts[0].tensors[..1].to_vec(), ..parts[1].clone() });
    write(1, &parts[0].clone().int("split.tensors.count", 14));
    assert_says(opened(), &["m-00002-of-00003.gguf", "`token_embd.weight` is also in an earlier part"]);
    write(2, &parts[1]);
    assert_says(opened(), &["m-00001-of-00003.gguf", "`split.tensors.count` must be the 20 tensors of all parts, found 14"]);
    let renamed = dir.path().join("renamed.gguf");
    fs::copy(path(1), &renamed).unwrap();
    assert_says(Source::open(&renamed), &["renamed.gguf", "`split.count` is 3, but the file is not called `NAME-00001-of-00003.gguf`"]);
}

// ------------------------------------------------------------------------------------------------------------------------------- paths

#[test]
fn a_folder_is_a_folder_whatever_it_is_called_and_a_file_is_known_by_its_magic() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("folder.gguf");
    fs::create_dir(&folder).unwrap();
    assert_says(Source::open(&folder), &["model config is missing"]);
    assert_says(Source::open(&dir.path().join("none.gguf")), &["failed to read", "none.gguf"]);
    let blob = dir.path().join("0123abcd"); // as the Hub's cache names its files
    fs::write(&blob, tiny("llama").bytes()).unwrap();
    Source::open(&blob).unwrap();
    let other = dir.path().join("model.GGUF");
    fs::write(&other, b"PK").unwrap();
    assert_says(Source::open(&other), &["is not a GGUF file"]);
    match Source::open(&dir.path().join("nowhere")) {
        Err(Error::MissingConfig { .. }) => {}
        _ => panic!("expected a missing config"),
    }
}
