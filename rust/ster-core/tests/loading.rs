//! Loading: every shape of checkpoint that must load, every refusal, and random damage.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use ster_core::checkpoint::{Checkpoint, Form};
use ster_core::error::Error;
use ster_core::llama::config::{Activation, LlamaConfig};
use ster_core::llama::rope::{Rope, RopeScaling};
use ster_core::llama::weights::LlamaWeights;
use ster_core::tensor::Dtype;
use tempfile::TempDir;

// ---------------------------------------------------------------------------------------------------------------- tiny checkpoints

type Tensor = (String, Vec<usize>, Vec<u8>);

/// A model folder in memory: written, then loaded.
#[derive(Clone)]
struct Model {
    config: Value,
    tensors: BTreeMap<String, Tensor>,
}

/// hidden 8, 2 heads of 4, 1 kv head, mlp 6, vocab 5, 2 layers, untied, F32; value `j` of tensor `i` is `i + j / 1024`.
fn tiny() -> Model {
    let mut model = Model {
        config: json!({
            "model_type": "llama", "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "vocab_size": 5, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "bos_token_id": 1, "eos_token_id": 2,
        }),
        tensors: BTreeMap::new(),
    };
    model.put("model.embed_tokens.weight", &[5, 8]);
    model.put("model.norm.weight", &[8]);
    model.put("lm_head.weight", &[5, 8]);
    for i in 0..2 {
        for (name, shape) in [
            ("input_layernorm", &[8][..]),
            ("post_attention_layernorm", &[8]),
            ("self_attn.q_proj", &[8, 8]),
            ("self_attn.k_proj", &[4, 8]),
            ("self_attn.v_proj", &[4, 8]),
            ("self_attn.o_proj", &[8, 8]),
            ("mlp.gate_proj", &[6, 8]),
            ("mlp.up_proj", &[6, 8]),
            ("mlp.down_proj", &[8, 6]),
        ] {
            model.put(&format!("model.layers.{i}.{name}.weight"), shape);
        }
    }
    model
}

impl Model {
    fn set(mut self, key: &str, value: Value) -> Model {
        self.config[key] = value;
        self
    }

    fn without(mut self, key: &str) -> Model {
        self.config.as_object_mut().unwrap().remove(key);
        self
    }

    fn put(&mut self, name: &str, shape: &[usize]) {
        let i = self.tensors.len() as f32;
        let bytes = (0..shape.iter().product()).flat_map(|j: usize| (i + j as f32 / 1024.0).to_le_bytes()).collect();
        self.tensors.insert(name.into(), ("F32".into(), shape.into(), bytes));
    }

    fn with(mut self, name: &str, shape: &[usize]) -> Model {
        self.put(name, shape);
        self
    }

    fn drop(mut self, name: &str) -> Model {
        self.tensors.remove(name).expect("a tensor to drop");
        self
    }

    fn biases(mut self, names: &[&str]) -> Model {
        for i in 0..2 {
            for name in names {
                let width = self.tensors[&format!("model.layers.{i}.{name}.weight")].1[0];
                self.put(&format!("model.layers.{i}.{name}.bias"), &[width]);
            }
        }
        self
    }

    fn folder(&self) -> TempDir {
        let dir = TempDir::new().unwrap();
        self.write(dir.path());
        dir
    }

    fn write(&self, dir: &Path) {
        fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        fs::write(dir.join("model.safetensors"), self.bytes()).unwrap();
    }

    fn bytes(&self) -> Vec<u8> {
        file(self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)))
    }

    /// Tensors whose name contains `part` in one file, the rest in another.
    fn split(&self, part: &str) -> (Vec<u8>, Vec<u8>) {
        let of = |inside: bool| file(self.tensors.iter().filter(|(n, _)| n.contains(part) == inside).map(|(n, t)| (n.as_str(), t)));
        (of(true), of(false))
    }

    /// A folder with an index over `a.safetensors` (the first layer) and `b.safetensors`.
    fn sharded(&self) -> TempDir {
        let dir = TempDir::new().unwrap();
        let (a, b) = self.split("layers.0.");
        fs::write(dir.path().join("config.json"), self.config.to_string()).unwrap();
        fs::write(dir.path().join("a.safetensors"), a).unwrap();
        fs::write(dir.path().join("b.safetensors"), b).unwrap();
        write_index(dir.path(), self.index());
        dir
    }

    fn index(&self) -> Map<String, Value> {
        let file = |name: &str| if name.contains("layers.0.") { "a.safetensors" } else { "b.safetensors" };
        self.tensors.keys().map(|name| (name.clone(), file(name).into())).collect()
    }

    fn load(&self) -> Result<(LlamaConfig, LlamaWeights), Error> {
        load(self.folder().path())
    }
}

fn write_index(dir: &Path, weight_map: Map<String, Value>) {
    let index = json!({"metadata": {"total_size": 1}, "weight_map": weight_map});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// A safetensors file by hand, so that the tests do not lean on the crate under test.
fn file<'a>(tensors: impl Iterator<Item = (&'a str, &'a Tensor)>) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    for (name, (dtype, shape, bytes)) in tensors {
        let begin = data.len();
        data.extend_from_slice(bytes);
        header.insert(name.into(), json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]}));
    }
    raw(&Value::Object(header).to_string(), &data)
}

fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

fn load(dir: &Path) -> Result<(LlamaConfig, LlamaWeights), Error> {
    let config = LlamaConfig::load(dir)?;
    let weights = LlamaWeights::load(&Checkpoint::open(dir)?, &config, Form::default())?;
    Ok((config, weights))
}

#[track_caller]
fn assert_says<T>(result: Result<T, Error>, parts: &[&str]) {
    let Err(error) = result else { panic!("loaded, expected a refusal with {parts:?}") };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "expected `{part}` in: {message}");
    }
    assert!(!message.ends_with('.') && !message.contains('\n'), "not in Ster's voice: {message}");
}

fn values(matrix: &ster_core::checkpoint::WeightMatrix) -> Vec<f32> {
    let mut all = vec![0.0; matrix.rows() * matrix.cols()];
    for (row, out) in all.chunks_mut(matrix.cols()).enumerate() {
        matrix.view().widen_row(row, out);
    }
    all
}

// ------------------------------------------------------------------------------------------------------------------- what must load

#[test]
fn a_plain_checkpoint_loads_with_every_number_in_its_place() {
    let model = tiny();
    let (config, weights) = model.load().unwrap();
    assert_eq!((config.hidden, config.layers, config.heads, config.kv_heads, config.head_dim), (8, 2, 2, 1, 4));
    assert_eq!((config.mlp, config.vocab, config.context, config.norm_eps), (6, 5, 64, 1e-5));
    assert_eq!((config.tied, config.qkv_bias, config.o_bias, config.mlp_bias), (false, false, false, false));
    assert_eq!((config.bos, config.eos), (Some(1), vec![2]));
    assert_eq!(config.rope, Rope { theta: 10_000.0, scaling: RopeScaling::Default });

    let stored =
        |name: &str| -> Vec<f32> { model.tensors[name].2.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect() };
    assert_eq!(values(&weights.embed), stored("model.embed_tokens.weight"));
    assert_eq!(values(&weights.head), stored("lm_head.weight"));
    assert_eq!(weights.norm, stored("model.norm.weight"));
    let block = &weights.blocks[1];
    assert_eq!(block.attn_norm, Some(stored("model.layers.1.input_layernorm.weight")));
    assert_eq!(block.mlp_norm, Some(stored("model.layers.1.post_attention_layernorm.weight")));
    assert_eq!([&block.attn_post_norm, &block.mlp_post_norm, &block.q_norm, &block.k_norm], [&None; 4]);
    for (linear, name) in [
        (&block.q, "self_attn.q"),
        (&block.k, "self_attn.k"),
        (&block.v, "self_attn.v"),
        (&block.o, "self_attn.o"),
        (&block.gate, "mlp.gate"),
        (&block.up, "mlp.up"),
        (&block.down, "mlp.down"),
    ] {
        assert_eq!(values(&linear.weight), stored(&format!("model.layers.1.{name}_proj.weight")), "{name}");
        assert!(linear.bias.is_none());
    }
    assert_eq!(weights.dtypes(), [Dtype::F32]);
    assert_eq!(weights.bytes(), model.tensors.values().map(|t| t.2.len() as u64).sum::<u64>());
    assert!(weights.warnings.is_empty());
}

#[test]
fn f16_and_bf16_may_stand_beside_f32_and_widen_exactly() {
    let mut model = tiny();
    let one_half = |dtype: &str| if dtype == "F16" { 0x3800u16 } else { 0x3F00 };
    for (name, dtype, shape, count) in [
        ("model.embed_tokens.weight", "F16", vec![5, 8], 40),
        ("model.norm.weight", "BF16", vec![8], 8),
        ("lm_head.weight", "BF16", vec![5, 8], 40),
    ] {
        model.tensors.insert(name.into(), (dtype.into(), shape, one_half(dtype).to_le_bytes().repeat(count)));
    }
    let (_, weights) = model.load().unwrap();
    assert_eq!(weights.dtypes(), [Dtype::BF16, Dtype::F16, Dtype::F32]);
    assert_eq!(weights.norm, [0.5; 8]);
    assert_eq!(values(&weights.embed), [0.5; 40]);
    assert_eq!(values(&weights.head), [0.5; 40]);
}

#[test]
fn a_dtype_the_kernels_cannot_read_is_refused_by_name() {
    for (dtype, size) in [("F64", 8), ("I8", 1), ("F8_E4M3", 1), ("I64", 8), ("BOOL", 1)] {
        let mut model = tiny();
        model.tensors.insert("lm_head.weight".into(), (dtype.into(), vec![5, 8], vec![0; 40 * size]));
        assert_says(model.load(), &["model.safetensors", "`lm_head.weight`", dtype, "which Ster does not read"]);
    }
}

#[test]
fn case_24_shapes_of_heads() {
    let config = |model: Model| LlamaConfig::load(model.folder().path());
    // A given head_dim wins, also where hidden is no multiple of heads.
    let given = config(
        tiny()
            .set("hidden_size", json!(48))
            .set("num_attention_heads", json!(6))
            .set("head_dim", json!(16))
            .set("num_key_value_heads", json!(3)),
    );
    assert_eq!(given.unwrap().head_dim, 16);
    let odd = config(
        tiny()
            .set("hidden_size", json!(50))
            .set("num_attention_heads", json!(6))
            .set("head_dim", json!(16))
            .set("num_key_value_heads", json!(6)),
    );
    assert_eq!(odd.unwrap().head_dim, 16);
    assert_eq!(config(tiny().set("head_dim", Value::Null)).unwrap().head_dim, 4);
    assert_eq!(config(tiny().without("num_key_value_heads")).unwrap().kv_heads, 2);
    assert_eq!(config(tiny().set("num_key_value_heads", Value::Null)).unwrap().kv_heads, 2);

    let six = |kv: Value| config(tiny().set("hidden_size", json!(48)).set("num_attention_heads", json!(6)).set("num_key_value_heads", kv));
    assert_says(six(json!(0)), &["`num_key_value_heads`", "found 0"]);
    assert_says(six(json!(4)), &["`num_key_value_heads`", "= 6", "found 4"]);
    assert_says(six(json!(12)), &["`num_key_value_heads`"]);
    assert_says(config(tiny().set("hidden_size", json!(9))), &["`hidden_size`", "multiple of", "= 2", "found 9"]);
    assert_says(config(tiny().set("head_dim", json!(3))), &["`head_dim`", "even", "found 3"]);
    assert_says(config(tiny().set("hidden_size", json!(6))), &["`head_dim`", "even", "found 3"]);

    // And the weights follow the given head_dim.
    let mut wide = tiny().set("head_dim", json!(6));
    for i in 0..2 {
        for (name, shape) in [("q", [12, 8]), ("k", [6, 8]), ("v", [6, 8]), ("o", [8, 12])] {
            wide.put(&format!("model.layers.{i}.self_attn.{name}_proj.weight"), &shape);
        }
    }
    assert_eq!(wide.load().unwrap().1.blocks[0].o.weight.cols(), 12);
    assert_says(tiny().set("head_dim", json!(6)).load(), &["`model.layers.0.self_attn.q_proj.weight`", "expected [12, 8], found [8, 8]"]);
}

#[test]
fn case_25_biases() {
    let attention = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
    let mlp = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];
    let both = tiny().set("attention_bias", json!(true)).set("mlp_bias", json!(true)).biases(&attention).biases(&mlp);
    let (_, weights) = both.load().unwrap();
    let block = &weights.blocks[1];
    let widths = [&block.q, &block.k, &block.v, &block.o, &block.gate, &block.up, &block.down].map(|l| l.bias.as_ref().unwrap().len());
    assert_eq!(widths, [8, 4, 4, 8, 6, 6, 8]);
    let stored = &both.tensors["model.layers.1.self_attn.k_proj.bias"].2;
    assert_eq!(block.k.bias.as_ref().unwrap()[0].to_le_bytes(), stored[..4]);

    let name = "model.layers.1.self_attn.o_proj.bias";
    assert_says(both.clone().drop(name).load(), &["model.safetensors", name, "is missing"]);
    assert_says(both.clone().with(name, &[7]).load(), &[name, "expected [8], found [7]"]);
    let flags_off = |names: &[&str]| tiny().biases(names).load();
    assert_says(flags_off(&attention), &["_proj.bias`", "`attention_bias` is false", "transformers would leave it out"]);
    assert_says(flags_off(&mlp), &["_proj.bias`", "`mlp_bias` is false"]);
}

#[test]
fn case_26_output_head() {
    let head = "lm_head.weight";
    let tied = tiny().set("tie_word_embeddings", json!(true));

    let (_, weights) = tied.clone().drop(head).load().unwrap();
    assert_eq!(values(&weights.head), values(&weights.embed));
    assert!(weights.warnings.is_empty());
    let bytes = weights.bytes();

    let mut same = tied.clone();
    same.tensors.insert(head.into(), same.tensors["model.embed_tokens.weight"].clone());
    let (_, weights) = same.load().unwrap();
    assert_eq!((weights.bytes(), weights.warnings.len()), (bytes, 0));

    // The same numbers in another dtype are the same head.
    let mut half = tied.clone();
    half.tensors.insert(head.into(), ("F32".into(), vec![5, 8], 0.5f32.to_le_bytes().repeat(40)));
    half.tensors.insert("model.embed_tokens.weight".into(), ("BF16".into(), vec![5, 8], 0x3F00u16.to_le_bytes().repeat(40)));
    assert!(half.load().unwrap().1.warnings.is_empty());

    // Different: as in transformers 5 the stored head is used, and said so.
    let (_, weights) = tied.load().unwrap();
    assert_ne!(values(&weights.head), values(&weights.embed));
    assert_eq!(weights.warnings.len(), 1);
    assert!(weights.warnings[0].contains("`tie_word_embeddings` is true") && weights.warnings[0].contains("`lm_head.weight` is used"));

    assert_says(tiny().set("tie_word_embeddings", json!(false)).drop(head).load(), &["`lm_head.weight`", "is missing"]);
    assert_says(tiny().drop(head).load(), &["`lm_head.weight`", "is missing"]); // absent means false
    let only_head = tiny().set("tie_word_embeddings", json!(true)).drop("model.embed_tokens.weight");
    assert_says(only_head.load(), &["`model.embed_tokens.weight`", "is missing"]);
}

#[test]
fn shapes_and_names_are_checked_against_the_config() {
    assert_says(
        tiny().set("vocab_size", json!(6)).load(),
        &["model.safetensors: tensor `model.embed_tokens.weight`", "expected [6, 8], found [5, 8]"],
    );
    assert_says(tiny().with("model.norm.weight", &[8, 1]).load(), &["`model.norm.weight`", "expected [8], found [8, 1]"]);
    assert_says(tiny().with("model.norm.weight", &[]).load(), &["`model.norm.weight`", "expected [8], found []"]);
    assert_says(
        tiny().drop("model.layers.1.mlp.up_proj.weight").load(),
        &["model.safetensors", "`model.layers.1.mlp.up_proj.weight` is missing"],
    );
    assert_says(tiny().set("num_hidden_layers", json!(1)).load(), &["`model.layers.1.", "belongs to layer 1", "`num_hidden_layers` is 1"]);
    assert_says(tiny().set("num_hidden_layers", json!(2_000_000_000)).load(), &["`model.layers.2.input_layernorm.weight` is missing"]);
    for name in [
        "model.layers.0.self_attn.q_norm.weight",
        "score.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.x.y",
        "lm_head.bias",
    ] {
        assert_says(tiny().with(name, &[8]).load(), &[&format!("`{name}` is not part of a llama model")]);
    }
    let old = tiny().with("model.layers.0.self_attn.rotary_emb.inv_freq", &[2]).with("model.rotary_emb.inv_freq", &[2]);
    assert!(old.load().unwrap().1.warnings.is_empty());
}

// ------------------------------------------------------------------------------------------------------------------------ which files

#[test]
fn case_27_index_is_obeyed_and_strays_are_named() {
    let model = tiny();
    let dir = model.sharded();
    let mut stray = model.clone();
    stray.put("model.norm.weight", &[8]); // other values under the same name
    fs::write(dir.path().join("model-old.safetensors"), stray.bytes()).unwrap();
    fs::write(dir.path().join("consolidated.00.safetensors"), b"junk").unwrap();
    fs::write(dir.path().join("._a.safetensors"), b"junk").unwrap();
    fs::create_dir(dir.path().join("original")).unwrap();
    fs::write(dir.path().join("original/consolidated.00.pth"), b"junk").unwrap();

    let (_, weights) = load(dir.path()).unwrap();
    assert_eq!(weights.norm, model.load().unwrap().1.norm);
    assert_eq!(weights.warnings.len(), 1);
    for part in ["`model-old.safetensors`", "`consolidated.00.safetensors`", "`original/`", "not in `model.safetensors.index.json`"] {
        assert!(weights.warnings[0].contains(part), "{part}: {}", weights.warnings[0]);
    }
    assert!(!weights.warnings[0].contains("._a"));
}

#[test]
fn an_index_that_disagrees_with_its_files_is_refused() {
    let model = tiny();
    let with = |edit: &dyn Fn(&mut Map<String, Value>, &Path)| {
        let dir = model.sharded();
        let mut index = model.index();
        edit(&mut index, dir.path());
        write_index(dir.path(), index);
        load(dir.path())
    };
    assert_says(with(&|_, dir| fs::remove_file(dir.join("a.safetensors")).unwrap()), &["index.json", "`a.safetensors`, which is missing"]);
    assert_says(
        with(&|index, _| _ = index.insert("extra".into(), "a.safetensors".into())),
        &["a.safetensors: tensor `extra` is missing", "index.json"],
    );
    assert_says(
        with(&|index, _| _ = index.insert("model.layers.0.mlp.up_proj.weight".into(), "b.safetensors".into())),
        &["a.safetensors", "`model.layers.0.mlp.up_proj.weight`", "places it in `b.safetensors`"],
    );
    assert_says(with(&|index, _| _ = index.remove("model.norm.weight")), &["b.safetensors", "`model.norm.weight`", "does not know it"]);
    for outside in
        ["../a.safetensors", "/tmp/a.safetensors", "x/../../a.safetensors", "..", ".", "", "..\\a.safetensors", "C:a.safetensors", "./../a"]
    {
        assert_says(
            with(&|index, _| _ = index.insert("model.norm.weight".into(), outside.into())),
            &["index.json", "`model.norm.weight`", &format!("`{outside}`"), "not a file inside the folder"],
        );
    }
    assert_says(
        with(&|index, _| _ = index.insert("model.norm.weight".into(), json!(3))),
        &["`model.norm.weight`", "a number, expected a file name"],
    );
    assert_says(with(&|index, _| index.clear()), &["places no tensor"]);

    for (text, part) in
        [("{}", "no `weight_map`"), ("[]", "a list"), ("{\"weight_map\": 3}", "no `weight_map`"), ("", "is empty"), ("{", "not valid JSON")]
    {
        let dir = model.sharded();
        fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
        assert_says(load(dir.path()), &["model.safetensors.index.json", part]);
    }
}

#[test]
fn an_index_may_name_a_subfolder() {
    let model = tiny();
    let dir = model.sharded();
    fs::create_dir(dir.path().join("sub")).unwrap();
    fs::rename(dir.path().join("a.safetensors"), dir.path().join("sub/a.safetensors")).unwrap();
    let index =
        model.index().into_iter().map(|(name, file)| (name, if file == "a.safetensors" { "sub/a.safetensors".into() } else { file }));
    write_index(dir.path(), index.collect());
    load(dir.path()).unwrap();
}

#[test]
fn without_an_index_the_files_of_the_folder_are_one_checkpoint() {
    let model = tiny();
    let (a, b) = model.split("layers.0.");
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("config.json"), model.config.to_string()).unwrap();
    fs::write(dir.path().join("x-00001-of-00002.safetensors"), &a).unwrap();
    assert_says(load(dir.path()), &["`model.embed_tokens.weight` is missing"]);
    fs::write(dir.path().join("x-00002-of-00002.safetensors"), &b).unwrap();
    fs::write(dir.path().join("consolidated.safetensors"), model.bytes()).unwrap();
    let (_, weights) = load(dir.path()).unwrap();
    assert!(weights.warnings.len() == 1 && weights.warnings[0].contains("`consolidated.safetensors`"), "{:?}", weights.warnings);

    // One name twice: nothing says which counts.
    fs::write(dir.path().join("y.safetensors"), &a).unwrap();
    assert_says(load(dir.path()), &["y.safetensors: tensor `model.layers.0.", "is also in `", "x-00001-of-00002.safetensors`"]);
}

#[test]
fn model_safetensors_wins_over_an_index_as_in_transformers() {
    let model = tiny();
    let dir = model.sharded();
    model.write(dir.path());
    let (_, weights) = load(dir.path()).unwrap();
    let all = "ignored `a.safetensors`, `b.safetensors`, `model.safetensors.index.json`: the weights are in `model.safetensors`";
    assert!(weights.warnings.len() == 1 && weights.warnings[0].ends_with(all), "{:?}", weights.warnings);
}

#[test]
fn folders_without_usable_weights_are_refused_plainly() {
    let dir = TempDir::new().unwrap();
    let open = || Checkpoint::open(dir.path()).map(|_| ());
    assert_says(LlamaConfig::load(dir.path()), &["model config is missing: ", "config.json"]);
    assert_says(open(), &["model directory contains no safetensors weights"]);
    for name in ["pytorch_model.bin", "model.gguf", "consolidated.safetensors", "training_args.bin"] {
        fs::write(dir.path().join(name), b"x").unwrap();
    }
    match open() {
        Err(Error::NoWeights { found, .. }) => assert_eq!(found, ["consolidated.safetensors", "model.gguf", "pytorch_model.bin"]),
        other => panic!("{other:?}"),
    }
    assert_eq!(open().unwrap_err().hint(), Some(format!("a GGUF model is named by its file: {}", dir.path().join("model.gguf").display())));
    fs::remove_file(dir.path().join("model.gguf")).unwrap();
    assert!(open().unwrap_err().hint().unwrap().contains("pytorch_model.bin"));
    fs::write(dir.path().join("model.gguf"), b"x").unwrap();
    let nowhere = dir.path().join("nowhere");
    assert_says(Checkpoint::open(&nowhere).map(|_| ()), &["failed to read", "nowhere"]);
    assert_says(LlamaConfig::load(&nowhere), &["model config is missing"]);
    assert_says(LlamaConfig::load(&dir.path().join("model.gguf")), &["model config is missing"]);
    fs::create_dir(dir.path().join("config.json")).unwrap();
    assert_says(LlamaConfig::load(dir.path()), &["config.json", "is not a file"]);
}

#[cfg(unix)]
#[test]
fn case_29_links_spaces_and_accents_in_paths() {
    use std::os::unix::fs::symlink;
    let root = TempDir::new().unwrap();
    let (blobs, snapshot) = (root.path().join("blobs"), root.path().join("modèle à moi/snapshots/abc"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(blobs.join("1"), tiny().config.to_string()).unwrap();
    fs::write(blobs.join("2"), tiny().bytes()).unwrap();
    symlink("../../../blobs/1", snapshot.join("config.json")).unwrap();
    symlink("../../../blobs/2", snapshot.join("model.safetensors")).unwrap();
    load(&snapshot).unwrap();

    // A link to nothing is a broken download, not an absent file.
    fs::remove_file(blobs.join("2")).unwrap();
    assert_says(load(&snapshot), &["failed to read", "model.safetensors"]);
    symlink("../../../blobs/3", snapshot.join("generation_config.json")).unwrap();
    assert_says(load(&snapshot), &["failed to read", "generation_config.json"]);
    fs::remove_file(blobs.join("1")).unwrap();
    assert_says(load(&snapshot), &["failed to read", "config.json"]);
}

#[test]
fn case_29_encodings() {
    let text = tiny().config.to_string();
    let utf16 = |to: fn(u16) -> [u8; 2], bom: bool| -> Vec<u8> {
        bom.then_some(0xFEFF).into_iter().chain(text.encode_utf16()).flat_map(to).collect()
    };
    let with = |bytes: &[u8]| {
        let dir = tiny().folder();
        fs::write(dir.path().join("config.json"), bytes).unwrap();
        LlamaConfig::load(dir.path())
    };
    with(&[b"\xEF\xBB\xBF", text.as_bytes()].concat()).unwrap();
    for bom in [true, false] {
        assert_says(with(&utf16(u16::to_le_bytes, bom)), &["config.json: is encoded as UTF-16 (little-endian)"]);
        assert_says(with(&utf16(u16::to_be_bytes, bom)), &["config.json: is encoded as UTF-16 (big-endian)"]);
    }
    let utf32: Vec<u8> = text.chars().flat_map(|c| (c as u32).to_le_bytes()).collect();
    assert_says(with(&utf32), &["UTF-32"]);
    assert_says(with(b"{\"model_type\": \"ll\xFFma\"}"), &["not UTF-8", "offset 18"]);
    assert_says(with(b""), &["is empty"]);
    assert_says(with(b" \n"), &["is empty"]);
    assert_says(with(b"[1]"), &["must hold a JSON object, found a list"]);
    assert_says(with(b"{\"a\": 1} x"), &["not valid JSON"]);
    assert_says(with(b"{\"model_type\": \"llama\", \"model_type\": \"qwen2\"}"), &["key `model_type` occurs twice"]);
    assert_says(with(b"{\"rope_scaling\": {\"factor\": 1, \"factor\": 2}}"), &["key `factor` occurs twice"]);
    for literal in ["NaN", "Infinity", "-Infinity", "1e999"] {
        assert_says(with(format!("{{\"rms_norm_eps\": {literal}}}").as_bytes()), &["not valid JSON"]);
    }
    assert_says(with("[".repeat(100_000).as_bytes()), &["not valid JSON"]);
}

// ---------------------------------------------------------------------------------------------------------------- broken safetensors

#[test]
fn broken_files_are_refused_with_file_and_tensor() {
    let with = |bytes: &[u8]| {
        let dir = TempDir::new().unwrap();
        fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        Checkpoint::open(dir.path()).map(|_| ())
    };
    let header = |text: &str, data: usize| with(&raw(text, &vec![0; data]));
    let whole = tiny().bytes();

    assert_says(with(b""), &["model.safetensors: is empty"]);
    assert_says(with(b"abc"), &["holds 3 bytes"]);
    assert_says(with(&u64::MAX.to_le_bytes()), &["its header takes 18446744073709551615 bytes, found 0"]);
    assert_says(with(&whole[..200]), &["its header takes", "truncated"]);
    assert_says(with(&whole[..whole.len() - 1]), &["tensor `model.norm.weight` ends at byte", "the file is truncated"]);
    assert_says(
        with(&whole[..whole.len() - 40]),
        &["tensor `model.layers.1.self_attn.v_proj.weight` ends at byte", "the file is truncated"],
    );
    assert_says(with(&[&whole[..], b"tail"].concat()), &["model.safetensors: holds 4 bytes after its last tensor"]);
    assert_says(with(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"), &["Git LFS pointer"]);
    assert_says(with(b"PK\x03\x04 a zip of pytorch weights"), &["not safetensors"]);

    assert_says(header("", 0), &["header that is not a JSON object"]);
    assert_says(header("[]", 0), &["header that is not a JSON object"]);
    assert_says(header("{\"a\": 1}", 0), &["`a` is a number in the header"]);
    assert_says(header("\u{0}\u{1}{}", 0), &["header that is not a JSON object"]);
    assert_says(header(r#"{"__metadata__": {"x": 1}}"#, 0), &["`__metadata__`"]);
    assert_says(with(&raw("{}", b"").into_iter().chain([0xFF]).collect::<Vec<_>>()), &["holds 1 bytes after"]);
    let mut invalid = raw("{\"aaaa\": 1}", b"");
    invalid[10] = 0xFF;
    assert_says(with(&invalid), &["header that is not UTF-8"]);

    let one = |fields: &str, data| header(&format!("{{\"w\": {{{fields}}}}}"), data);
    assert!(one(r#""dtype":"F32","shape":[2,2],"data_offsets":[0,16]"#, 16).is_ok());
    assert_says(one(r#""dtype":"F32","shape":[2,2],"data_offsets":[0,16]"#, 15), &["`w` ends at byte 16", "found 15"]);
    assert_says(one(r#""dtype":"F32","shape":[2,3],"data_offsets":[0,16]"#, 16), &["`w` is F32 [2, 3] and takes 24 bytes, found 16"]);
    assert_says(one(r#""dtype":"F31","shape":[2],"data_offsets":[0,8]"#, 8), &["`w` has an unknown dtype \"F31\""]);
    assert_says(one(r#""dtype":"F32","shape":[-2],"data_offsets":[0,8]"#, 8), &["`w` has shape [-2]"]);
    assert_says(one(r#""dtype":"F32","shape":"x","data_offsets":[0,8]"#, 8), &["`w` has shape"]);
    assert_says(one(r#""dtype":"F32","shape":[2],"data_offsets":[8,0]"#, 8), &["`w`", "end before they begin"]);
    assert_says(one(r#""dtype":"F32","shape":[2],"data_offsets":[0]"#, 8), &["`w` has data_offsets [0]"]);
    assert_says(one(r#""dtype":"F32","shape":[2],"data_offsets":[8,16]"#, 16), &["`w` begins at byte 8, expected 0"]);
    assert_says(one(r#""dtype":"F32","shape":[2]"#, 8), &["`w` has no `data_offsets`"]);
    assert_says(one(r#""shape":[2],"data_offsets":[0,8]"#, 8), &["`w` has no `dtype`"]);
    let huge = r#""dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]"#;
    assert_says(one(huge, 0), &["`w` has shape [4294967296, 4294967296], too large"]);
    assert_says(one(r#""dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]"#, 8), &["duplicate field `shape`"]);

    let v = r#""v": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let w = |at: &str| format!(r#"{{{v}, "w": {{"dtype":"F32","shape":[2],"data_offsets":{at}}}}}"#);
    assert!(header(&w("[8,16]"), 16).is_ok());
    assert_says(header(&w("[4,12]"), 12), &["`w` begins at byte 4 and overlaps `v`, which ends at byte 8"]);
    assert_says(header(&w("[0,8]"), 8), &["`w` begins at byte 0 and overlaps `v`"]);
    assert_says(header(&w("[12,20]"), 20), &["`w` begins at byte 12, expected 8"]);
    assert_says(header(&format!("{{{v}, {v}}}"), 8), &["model.safetensors: tensor `v` occurs twice in the header"]);
}

#[test]
fn weights_that_are_not_a_file_are_refused() {
    let dir = tiny().sharded();
    fs::remove_file(dir.path().join("a.safetensors")).unwrap();
    fs::create_dir(dir.path().join("a.safetensors")).unwrap();
    assert_says(load(dir.path()), &["a.safetensors: is not a file"]);
}

// ---------------------------------------------------------------------------------------------------------------------------- config

#[track_caller]
fn config_with(edits: Value) -> Result<LlamaConfig, Error> {
    let mut model = tiny();
    for (key, value) in edits.as_object().unwrap() {
        model = model.set(key, value.clone());
    }
    LlamaConfig::load(model.folder().path())
}

#[test]
fn other_model_types_are_refused_by_name_before_anything_else() {
    for name in ["mixtral", "qwen2_moe", "gemma", "llama4", "Yi"] {
        assert_says(
            config_with(json!({"model_type": name, "sliding_window": 4, "hidden_size": "x"})),
            &[&format!("model type `{name}` is not supported")],
        );
    }
    assert_says(config_with(json!({"model_type": null})), &["`model_type` is missing"]);
    assert_says(config_with(json!({"model_type": 3})), &["`model_type` must be a string, found 3"]);
}

#[test]
fn required_fields_are_named_and_types_checked() {
    for key in ["model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"] {
        assert_says(LlamaConfig::load(tiny().without(key).folder().path()), &["config.json: ", &format!("`{key}` is missing")]);
    }
    for key in [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "head_dim",
        "max_position_embeddings",
    ] {
        for bad in [json!("64"), json!(0), json!(-1), json!(64.0), json!(2147483648u64), json!(1e300), json!(true), json!([8]), json!({})] {
            assert_says(config_with(json!({key: bad})), &[&format!("`{key}` must be an integer from 1 to 2147483647")]);
        }
    }
    assert_says(
        config_with(json!({"head_dim": 2147483646, "num_attention_heads": 2, "num_key_value_heads": 2})),
        &["`head_dim`", "too large"],
    );
    for key in ["tie_word_embeddings", "attention_bias", "mlp_bias"] {
        assert_says(config_with(json!({key: "true"})), &[&format!("`{key}` must be true or false, found \"true\"")]);
        assert_says(config_with(json!({key: 1})), &[&format!("`{key}` must be true or false, found 1")]);
    }
    assert_says(config_with(json!({"rms_norm_eps": "1e-5"})), &["`rms_norm_eps` must be a number, found \"1e-5\""]);
    assert_says(config_with(json!({"rms_norm_eps": -1e-5})), &["`rms_norm_eps`", "found -0.00001"]);
    assert_says(config_with(json!({"rope_theta": "10000"})), &["`rope_theta` must be a number"]);
    for bad in [json!(0), json!(-1), json!(1e39), json!(1e-60)] {
        assert_says(config_with(json!({"rope_theta": bad})), &["`rope_theta` must be positive and fit into f32"]);
    }
    assert_says(config_with(json!({"rope_theta": 1})), &["`rope_theta` must be greater than 1"]);
}

#[test]
fn absent_fields_take_the_defaults_of_transformers() {
    let mut model = tiny();
    for key in ["num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act", "bos_token_id", "eos_token_id"] {
        model = model.without(key);
    }
    let config = LlamaConfig::load(model.folder().path()).unwrap();
    assert_eq!((config.kv_heads, config.context, config.norm_eps, config.activation), (2, 2048, 1e-6, Activation::Silu));
    assert_eq!((config.bos, config.eos, config.rope.theta, config.tied), (None, vec![], 10_000.0, false));
}

#[test]
fn activations_by_the_names_transformers_gives_them() {
    for (name, expected) in [
        ("silu", Activation::Silu),
        ("swish", Activation::Silu),
        ("gelu", Activation::Gelu),
        ("gelu_pytorch_tanh", Activation::GeluTanh),
        ("gelu_new", Activation::GeluTanh),
    ] {
        assert_eq!(config_with(json!({"hidden_act": name})).unwrap().activation, expected);
    }
    for name in ["relu", "gelu_fast", "quick_gelu", "SiLU", "gelu_10", ""] {
        assert_says(config_with(json!({"hidden_act": name})), &["`hidden_act` is", name, "expected silu, gelu or gelu_pytorch_tanh"]);
    }
    assert_says(config_with(json!({"hidden_act": 3})), &["`hidden_act` must be a string"]);
}

#[test]
fn fields_that_change_the_maths_are_refused_and_their_neutral_values_are_not() {
    for (key, changes, neutral) in [
        ("sliding_window", json!(4096), json!(null)),
        ("layer_types", json!(["full_attention", "sliding_attention"]), json!(["full_attention", "full_attention"])),
        ("layer_types", json!(["full_attention"]), json!(null)),
        ("quantization_config", json!({"bits": 4}), json!(null)),
        ("attn_logit_softcapping", json!(50.0), json!(null)),
        ("final_logit_softcapping", json!(30.0), json!(null)),
        ("logit_scale", json!(0.0625), json!(1.0)),
        ("logits_scaling", json!(8), json!(1)),
        ("embedding_multiplier", json!(12.0), json!(1.0)),
        ("residual_multiplier", json!(0.22), json!(1.0)),
        ("attention_multiplier", json!(0.0625), json!(0.5)), // 1 / sqrt(4)
        ("query_pre_attn_scalar", json!(256), json!(4)),
        ("partial_rotary_factor", json!(0.5), json!(1.0)),
        ("rope_interleaved", json!(true), json!(false)),
        ("no_rope_layers", json!([1, 0]), json!([1, 1])),
        ("no_rope_layer_interval", json!(4), json!(null)),
        ("use_qk_norm", json!(true), json!(false)),
        ("qk_layernorm", json!(true), json!(false)),
        ("num_local_experts", json!(8), json!(0)),
        ("num_experts", json!(8), json!(null)),
        ("scale_emb", json!(12), json!(1)),
        ("scale_depth", json!(1.4), json!(null)),
        ("attention_chunk_size", json!(8192), json!(null)),
        ("pruned_heads", json!({"1": [0]}), json!({})),
        ("hidden_activation", json!("gelu"), json!("silu")),
        ("clip_qkv", json!(8.0), json!(null)),
        ("is_causal", json!(false), json!(true)),
        ("qkv_bias", json!(true), json!(false)),
        ("use_sliding_window", json!(true), json!(false)),
        ("use_mrope", json!(true), json!(false)),
        ("full_attn_mod", json!(2), json!(1)),
        ("interpolate_factor", json!(2), json!(1)),
    ] {
        assert_says(config_with(json!({key: changes})), &[&format!("`{key}` is "), "changes the maths"]);
        config_with(json!({key: neutral})).unwrap();
    }
    config_with(json!({"sliding_window": 4096, "use_sliding_window": false})).unwrap();
    for unknown in [json!(1), json!(true), json!(false), json!("x"), json!([]), json!({})] {
        assert_says(config_with(json!({"a_new_idea": unknown})), &["`a_new_idea` is ", "a field Ster does not know"]);
    }
    config_with(json!({"a_new_idea": null})).unwrap();
}

#[test]
fn keys_that_say_nothing_about_the_forward_pass_are_ignored() {
    config_with(json!({
        "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "dtype": "float32", "transformers_version": "5.0.0",
        "use_cache": false, "pad_token_id": -1, "initializer_range": 0.02, "pretraining_tp": 2, "attention_dropout": 0.1,
        "_name_or_path": "x", "id2label": {"0": "a"},
        "max_sequence_length": 2048, "is_llama_config": true, "auto_map": {"AutoConfig": "x.Y"}, "temperature": 0.6, "do_sample": true,
        "_flash_attn_2_enabled": true, "unsloth_version": "2024.9", "transformers.js_config": {"dtype": "q4"},
    }))
    .unwrap();
}

#[test]
fn tokens_that_end_a_generation_come_from_both_files() {
    let with = |config: Value, generation: Option<Value>| {
        let dir = tiny().set("eos_token_id", config).set("bos_token_id", Value::Null).folder();
        if let Some(generation) = generation {
            fs::write(dir.path().join("generation_config.json"), generation.to_string()).unwrap();
        }
        LlamaConfig::load(dir.path()).map(|config| (config.eos, config.bos))
    };
    assert_eq!(with(json!(2), None).unwrap().0, [2]);
    assert_eq!(with(json!([4, 2, 4]), None).unwrap().0, [4, 2]);
    assert_eq!(with(json!(null), None).unwrap().0, [0u32; 0]);
    assert_eq!(
        with(json!(2), Some(json!({"eos_token_id": [3, 2, 4], "temperature": 0.6, "bos_token_id": 1}))).unwrap(),
        (vec![2, 3, 4], Some(1))
    );
    assert_eq!(with(json!(null), Some(json!({"eos_token_id": 3}))).unwrap().0, [3]);
    assert_eq!(with(json!(2), Some(json!({"eos_token_id": null}))).unwrap().0, [2]);
    for bad in [json!(-1), json!("</s>"), json!(2.0), json!([2, "x"]), json!(4294967296u64), json!({})] {
        assert_says(with(bad.clone(), None), &["config.json: `eos_token_id` must be a token id or a list of them"]);
        assert_says(with(json!(2), Some(json!({"eos_token_id": bad}))), &["generation_config.json: `eos_token_id`"]);
    }
    assert_says(with(json!(2), Some(json!([1]))), &["generation_config.json: must hold a JSON object"]);
}

// ------------------------------------------------------------------------------------------------------------------------------ rope

fn rope_of(edits: Value) -> Result<Rope, Error> {
    config_with(edits).map(|config| config.rope)
}

#[test]
fn rope_scaling_in_all_spellings() {
    let linear = Rope { theta: 10_000.0, scaling: RopeScaling::Linear { factor: 4.0 } };
    for spelling in [
        json!({"rope_scaling": {"type": "linear", "factor": 4.0}}),
        json!({"rope_scaling": {"rope_type": "linear", "factor": 4}}),
        json!({"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4}}),
        json!({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
        json!({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000}, "rope_theta": 10000.0}),
        json!({"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_scaling": {"type": "linear", "factor": 4}}),
        json!({"rope_scaling": {"type": "linear", "factor": 4.0, "partial_rotary_factor": 1.0, "attention_factor": null}}),
    ] {
        assert_eq!(rope_of(spelling.clone()).unwrap(), linear, "{spelling}");
    }
    let plain = Rope { theta: 5e5, scaling: RopeScaling::Default };
    for spelling in [
        json!({"rope_theta": 500000}),
        json!({"rope_theta": 5e5, "rope_scaling": null, "rope_parameters": null}),
        json!({"rope_theta": 5e5, "rope_scaling": {}}),
        json!({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}),
        json!({"rope_parameters": {"rope_theta": 500000.0}}),
        json!({"rope_scaling": {"rope_theta": 500000.0, "type": "default"}}),
    ] {
        assert_eq!(rope_of(spelling.clone()).unwrap(), plain, "{spelling}");
    }
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    });
    let expected = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 32 };
    assert_eq!(rope_of(json!({"rope_scaling": llama3})).unwrap().scaling, expected);
    assert_eq!(rope_of(json!({"rope_scaling": llama3, "original_max_position_embeddings": 32})).unwrap().scaling, expected);

    let yarn = |edits: Value| {
        let mut dict = json!({"rope_type": "yarn", "factor": 4.0});
        dict.as_object_mut().unwrap().extend(edits.as_object().unwrap().clone());
        rope_of(json!({"rope_scaling": dict})).map(|rope| match rope.scaling {
            RopeScaling::Yarn { factor, attention_factor, beta_fast, beta_slow, truncate, original_context } => {
                (factor, (attention_factor * 1e6).round() / 1e6, beta_fast, beta_slow, truncate, original_context)
            }
            other => panic!("{other:?}"),
        })
    };
    // 0.1 ln 4 + 1 = 1.138629; the context where none is given
    assert_eq!(yarn(json!({})).unwrap(), (4.0, 1.138629, 32.0, 1.0, true, 64));
    assert_eq!(
        yarn(json!({"original_max_position_embeddings": 16, "truncate": false, "finetuned": true})).unwrap(),
        (4.0, 1.138629, 32.0, 1.0, false, 16)
    );
    assert_eq!(yarn(json!({"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2})).unwrap(), (4.0, 1.5, 16.0, 2.0, true, 64));
    // (0.1 * 0.5 ln 4 + 1) / (0.1 * 2 ln 4 + 1) = 1.0693147 / 1.2772589 = 0.837195; one alone, or 0, does not count
    assert_eq!(yarn(json!({"mscale": 0.5, "mscale_all_dim": 2.0})).unwrap().1, 0.837195);
    assert_eq!(yarn(json!({"mscale": 1.0, "mscale_all_dim": 1.0})).unwrap().1, 1.0);
    assert_eq!(yarn(json!({"mscale": 0.5, "mscale_all_dim": 0, "beta_fast": 0})).unwrap(), (4.0, 1.138629, 32.0, 1.0, true, 64));
    // null: the ratio of the contexts, 64 / 16
    assert_eq!(yarn(json!({"factor": null, "original_max_position_embeddings": 16})).unwrap().0, 4.0);
    for (edit, part) in [
        (json!({"finetuned": false}), "`rope_scaling.finetuned` is false"),
        (json!({"beta_fast": 1, "beta_slow": 2}), "`rope_scaling.beta_fast` must be at least `beta_slow` = 2"),
        (json!({"beta_fast": -1}), "`rope_scaling.beta_fast` must be positive"),
        (json!({"attention_factor": 0}), "`rope_scaling.attention_factor` must be positive"),
        (json!({"factor": 0.5}), "`rope_scaling.factor` must be at least 1, found 0.5"),
        (json!({"truncate": 1}), "`rope_scaling.truncate` must be true or false"),
        (json!({"long_factor": [1.0]}), "`rope_scaling.long_factor` is [1.0], which rope type `yarn` does not know"),
    ] {
        assert_says(yarn(edit), &[part]);
    }
}

#[test]
fn rope_that_is_unknown_or_contradicts_itself_is_refused_by_name() {
    let linear = json!({"type": "linear", "factor": 4.0});
    for (edits, parts) in [
        (json!({"rope_scaling": {"type": "longrope", "factor": 4.0}}), &["`rope_scaling.short_factor` is missing"][..]),
        (json!({"rope_scaling": {"rope_type": "su"}}), &["`rope_scaling.rope_type` is \"su\""]),
        (
            json!({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}),
            &["`rope_parameters.rope_type` is \"proportional\""],
        ),
        (
            json!({"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 4.0}}),
            &["`rope_scaling.type` is \"dynamic\"", "is \"linear\""],
        ),
        (json!({"rope_scaling": {"type": "linear"}}), &["`rope_scaling.factor` is missing"]),
        (json!({"rope_scaling": {"type": "linear", "factor": "4"}}), &["`rope_scaling.factor` must be a number"]),
        (json!({"rope_scaling": {"type": "linear", "factor": 0}}), &["`rope_scaling.factor` must be positive"]),
        (json!({"rope_scaling": {"type": "linear", "factor": 4.0, "beta_fast": 3}}), &["`rope_scaling.beta_fast`", "rope type `linear`"]),
        (json!({"rope_scaling": {"factor": 4.0}}), &["`rope_scaling.factor` is 4.0, which rope type `default` does not know"]),
        (json!({"rope_scaling": {"type": "linear", "factor": 4.0, "x": 1}}), &["`rope_scaling.x`"]),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}}),
            &["`rope_scaling.partial_rotary_factor`", "found 0.5"],
        ),
        (json!({"rope_scaling": "linear"}), &["`rope_scaling` must be an object, found a string"]),
        (json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}), &["`rope_parameters.full_attention`"]),
        (
            json!({"rope_scaling": linear, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
            &["`rope_scaling` says", "4.0", "`rope_parameters` says", "2.0"],
        ),
        (
            json!({"rope_scaling": linear, "rope_parameters": {"rope_theta": 1e4}}),
            &["`rope_scaling` says", "`rope_parameters` says Default"],
        ),
        (
            json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}),
            &["`rope_parameters.rope_theta` is 500000", "`rope_theta` is 10000"],
        ),
        (
            json!({"rope_scaling": {"type": "dynamic", "factor": 2, "original_max_position_embeddings": 32}}),
            &["`rope_scaling.original_max_position_embeddings`", "= 64", "found 32"],
        ),
        (json!({"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}), &["`head_dim`", "`dynamic`"]),
        (
            json!({"rope_scaling": {
                "type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4, "original_max_position_embeddings": 32,
            }}),
            &["`rope_scaling.high_freq_factor`"],
        ),
        (
            json!({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}}),
            &["`rope_scaling.original_max_position_embeddings` is missing"],
        ),
        (
            json!({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1, "original_max_position_embeddings": 32}}),
            &["`rope_scaling.high_freq_factor` is missing"],
        ),
        (
            json!({
                "rope_scaling": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 32},
                "original_max_position_embeddings": 16,
            }),
            &["`original_max_position_embeddings` is 16", "is 32"],
        ),
    ] {
        assert_says(rope_of(edits), parts);
    }
}

fn frequencies(theta: f64, scaling: RopeScaling, head_dim: usize, length: usize) -> Vec<f32> {
    Rope { theta, scaling }.inverse_frequencies(head_dim, 64, length)
}

/// Each within `ulps` of the f64 value.
#[track_caller]
fn assert_near(found: &[f32], expected: &[f64], ulps: f64) {
    assert_eq!(found.len(), expected.len());
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let distance = (f64::from(found) - expected).abs() / expected / f64::from(f32::EPSILON);
        assert!(distance <= ulps, "frequency {i}: {found} is {distance} ulp from {expected}");
    }
}

#[test]
fn frequencies_by_hand() {
    assert_eq!(frequencies(1e4, RopeScaling::Default, 8, 1), [1.0, 0.1, 0.01, 0.001]);
    assert_eq!(frequencies(1e4, RopeScaling::Linear { factor: 4.0 }, 4, 1), [0.25, 0.0025]);
    // theta grows by (2 * 128 / 64 - 1) ^ (4 / 2) = 9, and sqrt(90000) = 300
    assert_eq!(frequencies(1e4, RopeScaling::Dynamic { factor: 2.0 }, 4, 128), [1.0, 1.0 / 300.0]);
    assert_eq!(frequencies(1e4, RopeScaling::Dynamic { factor: 2.0 }, 4, 64), [1.0, 0.01]);
    let llama3 = |original_context| RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context };
    // Wavelengths 6.28 and 628; kept below 64 / 4, divided above 64 / 1.
    assert_eq!(frequencies(1e4, llama3(64), 4, 1), [1.0, 0.00125]);
    // Between 1257 / 4 and 1257: 1257 / 628.3185 = 2.0005776 turns, smooth = 1.0005776 / 3 = 0.3335259.
    assert_near(&frequencies(1e4, llama3(1257), 4, 1), &[1.0, (1.0 - 0.3335259) * 0.00125 + 0.3335259 * 0.01], 4.0);
    // low = floor(4 ln(64 / 201.06) / (2 ln 1e4)) = -1 -> 0; high = ceil(4 ln(64 / 6.283) / (2 ln 1e4)) = 1: pair 0 kept, pair 1 divided.
    let yarn =
        RopeScaling::Yarn { factor: 4.0, attention_factor: 1.0, beta_fast: 32.0, beta_slow: 1.0, truncate: true, original_context: 64 };
    assert_eq!(frequencies(1e4, yarn, 4, 1), [1.0, 0.0025]);
}

#[test]
fn frequencies_of_real_models_against_the_papers_formulas() {
    for (theta, head_dim) in [(1e4f64, 64), (1e4, 128), (5e5, 64), (5e5, 128), (1e6, 128), (1e5, 64), (1e4, 100), (1e4, 24), (1e4, 2)] {
        let plain: Vec<f64> = (0..head_dim / 2).map(|i| (-theta.ln() * 2.0 * i as f64 / head_dim as f64).exp()).collect();
        // The exponent is rounded to f32 first, as in transformers: relative 6e-8 * ln(theta) at most, and three more roundings.
        let slack = 0.5 * theta.ln() + 2.0;
        assert_near(&frequencies(theta, RopeScaling::Default, head_dim, 1), &plain, slack);
        assert_near(
            &frequencies(theta, RopeScaling::Linear { factor: 3.0 }, head_dim, 1),
            &plain.iter().map(|f| f / 3.0).collect::<Vec<_>>(),
            slack,
        );

        // Llama 3.1: the share of `f` kept rises from 0 to 1 between one and four turns within the original context.
        let scaling = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 };
        let share = |f: f64| ((8192.0 * f / std::f64::consts::TAU - 1.0) / 3.0).clamp(0.0, 1.0);
        let expected: Vec<f64> = plain.iter().map(|&f| f * (share(f) + (1.0 - share(f)) / 8.0)).collect();
        assert_near(&frequencies(theta, scaling, head_dim, 1), &expected, 4.0 * slack);

        // Yarn: the share falls linearly over pairs between those that turn 32 times and once (arXiv:2309.00071, section 3.2).
        let pair = |turns: f64| head_dim as f64 * (4096.0 / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln());
        for truncate in [false, true] {
            let (mut low, mut high) = (pair(32.0), pair(1.0));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
            let scaling = RopeScaling::Yarn {
                factor: 16.0,
                attention_factor: 1.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                truncate,
                original_context: 4096,
            };
            let expected: Vec<f64> = (0..head_dim / 2)
                .map(|i| {
                    let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    plain[i] * ((1.0 - ramp) + ramp / 16.0)
                })
                .collect();
            assert_near(&frequencies(theta, scaling, head_dim, 1), &expected, 16.0 * slack);
        }

        if head_dim > 2 {
            let grown = theta * (2.0f64 * 1000.0 / 64.0 - 1.0).powf(head_dim as f64 / (head_dim as f64 - 2.0));
            let expected: Vec<f64> = (0..head_dim / 2).map(|i| grown.powf(-2.0 * i as f64 / head_dim as f64)).collect();
            assert_near(&frequencies(theta, RopeScaling::Dynamic { factor: 2.0 }, head_dim, 1000), &expected, slack + 4.0);
        }
    }
}

#[test]
fn frequencies_take_the_roundings_of_transformers() {
    // 10^1.5 = 31.6227766 is 31.622776 in f32, whose reciprocal rounds to 0.03162278; the exact 10^-1.5 rounds to the f32 below.
    let found = frequencies(1e4, RopeScaling::Default, 16, 1)[3];
    assert_eq!(found.to_bits(), 0x3d01_86e3);
    assert_eq!((0.001f64.sqrt() as f32).to_bits(), 0x3d01_86e2);
}

#[test]
fn only_dynamic_depends_on_length_and_only_yarn_scales_attention() {
    let yarn =
        RopeScaling::Yarn { factor: 4.0, attention_factor: 1.25, beta_fast: 32.0, beta_slow: 1.0, truncate: true, original_context: 64 };
    for (scaling, depends, factor) in [
        (RopeScaling::Default, false, 1.0),
        (RopeScaling::Linear { factor: 2.0 }, false, 1.0),
        (RopeScaling::Dynamic { factor: 2.0 }, true, 1.0),
        (yarn, false, 1.25),
    ] {
        let rope = Rope { theta: 1e4, scaling };
        assert_eq!((rope.depends_on_length(), rope.attention_factor()), (depends, factor));
        assert_eq!(rope.inverse_frequencies(16, 64, 64) != rope.inverse_frequencies(16, 64, 65), depends);
    }
}

// --------------------------------------------------------------------------------------------------------------- damage, and real files

/// Open, load, and read every number that loading promises is there.
fn exercise(dir: &Path) {
    if let Ok(checkpoint) = Checkpoint::open(dir) {
        for name in checkpoint.names() {
            if let &[rows, cols] = checkpoint.get(name).unwrap().shape.as_slice()
                && let Ok(matrix) = checkpoint.matrix(name, rows, cols)
            {
                std::hint::black_box(values(&matrix).iter().sum::<f32>());
            }
        }
    }
    if let Err(error) = load(dir) {
        assert!(!error.to_string().is_empty());
    }
}

#[derive(Clone, Debug)]
enum Damage {
    Byte(usize, u8),
    Length(u64),
    Cut(usize),
    Append(Vec<u8>),
    /// Replace the n-th number of the header.
    Number(usize, u64),
    /// Replace one character sequence of the header by another.
    Word(usize, usize),
}

const WORDS: &[&str] = &[
    "\"F32\"",
    "\"shape\"",
    "\"dtype\"",
    "\"data_offsets\"",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "null",
    "-1",
    "1e400",
    "\"I8\"",
    "\"\"",
    "[[",
    "0.5",
    "\"F4\"",
];

fn damage() -> impl Strategy<Value = Damage> {
    let edge = prop_oneof![Just(0), Just(1), Just(u64::MAX), Just(u64::MAX - 7), Just(1 << 63), Just(1 << 32), any::<u64>(), 0..5000u64];
    prop_oneof![
        (any::<usize>(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        edge.clone().prop_map(Damage::Length),
        any::<usize>().prop_map(Damage::Cut),
        prop::collection::vec(any::<u8>(), 1..20).prop_map(Damage::Append),
        (any::<usize>(), edge).prop_map(|(at, value)| Damage::Number(at, value)),
        (any::<usize>(), 0..WORDS.len()).prop_map(|(at, word)| Damage::Word(at, word)),
    ]
}

fn apply(bytes: &mut Vec<u8>, damage: Damage) {
    let header = |bytes: &[u8]| -> Option<(usize, String)> {
        let n = u64::from_le_bytes(bytes.get(..8)?.try_into().unwrap());
        let end = usize::try_from(n).ok()?.checked_add(8)?;
        Some((end, std::str::from_utf8(bytes.get(8..end)?).ok()?.to_string()))
    };
    let rewrite = |bytes: &mut Vec<u8>, end: usize, text: &str| *bytes = raw(text, &bytes[end..]);
    match damage {
        Damage::Byte(at, byte) if !bytes.is_empty() => {
            let at = at % bytes.len().min(3000); // mostly header
            bytes[at] = byte;
        }
        Damage::Length(n) if bytes.len() >= 8 => bytes[..8].copy_from_slice(&n.to_le_bytes()),
        Damage::Cut(at) => bytes.truncate(at % (bytes.len() + 1)),
        Damage::Append(tail) => bytes.extend(tail),
        Damage::Number(at, value) => {
            if let Some((end, text)) = header(bytes) {
                let starts: Vec<usize> = text
                    .char_indices()
                    .filter(|&(i, c)| c.is_ascii_digit() && !text[..i].ends_with(|c: char| c.is_ascii_digit()))
                    .map(|(i, _)| i)
                    .collect();
                if !starts.is_empty() {
                    let from = starts[at % starts.len()];
                    let rest = text[from..].trim_start_matches(|c: char| c.is_ascii_digit());
                    rewrite(bytes, end, &format!("{}{value}{rest}", &text[..from]));
                }
            }
        }
        Damage::Word(at, word) => {
            if let Some((end, text)) = header(bytes) {
                let found: Vec<(usize, &str)> = WORDS.iter().flat_map(|w| text.match_indices(w)).collect();
                if !found.is_empty() {
                    let (from, old) = found[at % found.len()];
                    rewrite(bytes, end, &format!("{}{}{}", &text[..from], WORDS[word], &text[from + old.len()..]));
                }
            }
        }
        _ => {}
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        prop_oneof![Just(0i64), Just(1), Just(-1), Just(2), Just(i64::MAX), Just(1 << 31), any::<i64>(), 0..70i64].prop_map(Value::from),
        prop_oneof![Just(0.0), Just(1e-300), Just(1e300), Just(0.5), any::<f64>()].prop_map(Value::from),
        prop::sample::select(vec!["", "linear", "yarn", "llama3", "dynamic", "default", "silu", "gelu", "llama"]).prop_map(Value::from),
    ];
    let rope_keys = vec![
        "type",
        "rope_type",
        "factor",
        "rope_theta",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ];
    let dict = prop::collection::vec((prop::sample::select(rope_keys), leaf.clone()), 0..8)
        .prop_map(|pairs| Value::Object(pairs.into_iter().map(|(key, value)| (key.to_string(), value)).collect()));
    prop_oneof![3 => leaf.clone(), 2 => dict, 1 => prop::collection::vec(leaf, 0..4).prop_map(Value::from)]
}

const KEYS: &[&str] = &[
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_bias",
    "eos_token_id",
    "bos_token_id",
    "layer_types",
    "sliding_window",
    "no_rope_layers",
    "original_max_position_embeddings",
    "quantization_config",
    "x",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_weights_load_or_are_refused_but_never_panic(damages in prop::collection::vec(damage(), 1..4)) {
        let mut bytes = tiny().bytes();
        for damage in damages {
            apply(&mut bytes, damage);
        }
        let dir = TempDir::new().unwrap();
        fs::write(dir.path().join("config.json"), tiny().config.to_string()).unwrap();
        fs::write(dir.path().join("model.safetensors"), &bytes).unwrap();
        exercise(dir.path());
    }

    #[test]
    fn any_config_loads_or_is_refused_and_its_frequencies_are_finite(
        edits in prop::collection::vec((prop::sample::select(KEYS), any_json()), 1..5)
    ) {
        let mut model = tiny();
        for (key, value) in edits {
            model = model.set(key, value);
        }
        let dir = model.folder();
        if let Ok(config) = LlamaConfig::load(dir.path()) {
            let head_dim = config.rotary_dim.min(512);
            for length in [1, config.context, config.context * 2] {
                let frequencies = config.rope.inverse_frequencies(head_dim, config.context, length);
                prop_assert!(frequencies.iter().all(|f| f.is_finite() && *f >= 0.0), "{:?}: {frequencies:?}", config.rope);
            }
            prop_assert!(config.rope.attention_factor().is_finite());
        }
        exercise(dir.path());
    }
}

/// Folder `name` of the reference data, or None with a printed reason.
fn references(name: &str) -> Option<PathBuf> {
    let Some(root) = std::env::var_os("STER_REFERENCES") else {
        println!("skipped: STER_REFERENCES is not set, so there is no {name} to read");
        return None;
    };
    Some(PathBuf::from(root).join(name))
}

#[test]
fn golden_checkpoints_load() {
    let Some(golden) = references("golden") else { return };
    let mut loaded = 0;
    for entry in fs::read_dir(&golden).unwrap() {
        let dir = entry.unwrap().path();
        let Ok(config) = fs::read_to_string(dir.join("config.json")) else { continue };
        let (_, weights) = load(&dir).unwrap_or_else(|error| panic!("{config}: {error}"));
        assert!(weights.warnings.is_empty(), "{}: {:?}", dir.display(), weights.warnings);
        loaded += 1;
    }
    assert!(loaded >= 16, "only {loaded} checkpoints in {}", golden.display());
}

/// Opening a pipe waits for its writer, out of reach of Ctrl-C: it must be refused unopened.
#[cfg(unix)]
#[test]
fn pipes_in_place_of_files_are_refused_without_waiting() {
    let pipe = |path: &Path| assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    let dir = TempDir::new().unwrap();
    pipe(&dir.path().join("config.json"));
    assert_says(LlamaConfig::load(dir.path()), &["config.json", "is not a file"]);
    pipe(&dir.path().join("model.safetensors"));
    assert_says(Checkpoint::open(dir.path()).map(|_| ()), &["model.safetensors", "is not a file"]);
}
