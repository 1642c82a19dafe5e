//! Damaged files: whatever bytes a file holds, opening it gives a model or says what is wrong; and what was given can be read.
//!
//! `STER_DAMAGE` is how many damaged files of each format are tried: 2000 unless it says otherwise. `STER_DAMAGE_SEED` picks others.
//! The same under AddressSanitizer, which sees reads past a buffer that a map of the same page would hide:
//! `RUSTFLAGS=-Zsanitizer=address cargo +nightly test -p ster-core --test damage --target x86_64-unknown-linux-gnu`

#[path = "support/gguf.rs"]
mod support;

use std::fs;
use std::path::Path;

use serde_json::{Map, json};
use ster_core::checkpoint::Source;
use ster_core::checkpoint::gguf::Gguf;
use ster_core::llama::config::LlamaConfig;
use ster_core::llama::weights::LlamaWeights;
use support::{File, tiny};
use tempfile::TempDir;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} must be a number, found {text}")))
}

/// Marsaglia 2003, xorshift64: the same damage everywhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.roll() % n.max(1) as u64) as usize
    }

    /// Numbers at which checks go wrong.
    fn extreme(&mut self) -> u64 {
        let near = self.roll() % 9;
        match self.below(8) {
            0 => near,
            1 => u64::MAX - near,
            2 => (1u64 << self.below(64)).wrapping_sub(near),
            3 => (1u64 << self.below(64)).wrapping_add(near),
            4 => i64::MAX as u64 - near,
            5 => u64::from(u32::MAX) - near,
            6 => self.roll() % 4096,
            _ => self.roll(),
        }
    }
}

/// One to four changes; most fall into the first `header` bytes.
fn damage(dice: &mut Dice, bytes: &mut Vec<u8>, header: usize, other: &[u8]) {
    for _ in 0..=dice.below(4) {
        if bytes.is_empty() {
            return;
        }
        let reach = if dice.below(8) == 0 { bytes.len() } else { header.min(bytes.len()) };
        let at = dice.below(reach);
        match dice.below(8) {
            0 | 1 => bytes[at] ^= 1 << dice.below(8),
            2 => bytes.truncate(at),
            3 => {
                let value = dice.extreme().to_le_bytes();
                let len = value.len().min(bytes.len() - at);
                bytes[at..at + len].copy_from_slice(&value[..len]);
            }
            4 => {
                let value = (dice.extreme() as u32).to_le_bytes();
                let len = value.len().min(bytes.len() - at);
                bytes[at..at + len].copy_from_slice(&value[..len]);
            }
            5 => {
                let from = dice.below(other.len());
                let len = dice.below(64).min(other.len() - from).min(bytes.len() - at);
                bytes[at..at + len].copy_from_slice(&other[from..from + len]);
            }
            6 => {
                let end = at + dice.below(64).min(bytes.len() - at);
                if dice.below(2) == 0 { drop(bytes.drain(at..end)) } else { bytes.extend_from_within(at..end) }
            }
            _ => {
                let value = dice.extreme().to_le_bytes();
                bytes.splice(at..at, value);
            }
        }
    }
}

/// Open what is at `path`, load it, and read rows of every tensor that opening promises is there. Whether it opened.
fn exercise(path: &Path) -> bool {
    let source = match Source::open(path) {
        Ok(source) => source,
        Err(error) => {
            let message = error.to_string();
            assert!(!message.is_empty() && !message.ends_with('.'), "{message}");
            return false;
        }
    };
    for name in source.checkpoint.names() {
        let shape = &source.checkpoint.get(name).unwrap().shape;
        let rows = if shape.len() < 2 { 1 } else { shape[0] };
        for row in [0, rows / 2, rows.saturating_sub(1)] {
            if let Ok(found) = source.rows(name, row..(row + 1).min(rows)) {
                std::hint::black_box(found.data.iter().sum::<f32>());
            }
        }
        if let &[len] = shape.as_slice() {
            std::hint::black_box(source.checkpoint.vector(name, len).is_ok());
        }
    }
    if let Ok(config) = LlamaConfig::from_source(&source) {
        std::hint::black_box(LlamaWeights::load(&source.checkpoint, &config, source.form).is_ok());
    }
    true
}

/// How many of the damaged files still opened.
fn run(files: &[(Vec<u8>, usize)], seed: u64, write: impl Fn(&[u8]), path: &Path) -> u64 {
    let mut dice = Dice(seed | 1);
    let count = setting("STER_DAMAGE", 2000);
    let mut opened = 0;
    for _ in 0..count {
        let (whole, header) = &files[dice.below(files.len())];
        let other = &files[dice.below(files.len())].0;
        let mut bytes = whole.clone();
        damage(&mut dice, &mut bytes, *header, other);
        write(&bytes);
        opened += u64::from(exercise(path));
    }
    println!("{opened} of {count} damaged files opened");
    opened
}

/// Every architecture, with lists, factors and tokens.
fn gguf_models() -> Vec<File> {
    let archs = ["llama", "qwen2", "qwen3", "phi3", "granite", "olmo2", "smollm3", "gemma2", "gemma3"];
    let mut files: Vec<File> = archs.map(tiny).into();
    for file in &mut files {
        *file = file.clone().texts("tokenizer.ggml.tokens", &["a", "<|im_end|>", "é"]).ints("tokenizer.ggml.token_type", &[1, 3, 1]);
    }
    files[0] = files[0].clone().numbers("rope_freqs.weight", &[1.0, 8.0]).int("general.alignment", 32);
    let factors = files[3].clone().numbers("rope_factors_long.weight", &[1.0, 2.0]).numbers("rope_factors_short.weight", &[1.0, 1.5]);
    files[3] = factors.int("phi3.rope.scaling.original_context_length", 16).float("phi3.rope.scaling.attn_factor", 1.2);
    let nested = [&5u32.to_le_bytes()[..], &1u64.to_le_bytes(), &7i32.to_le_bytes()].concat();
    files[1] = files[1].clone().list("own.nested", 9, nested, 1).text("qwen2.rope.scaling.type", "yarn");
    files
}

/// Their bytes, and how many of them are header.
fn gguf_files() -> Vec<(Vec<u8>, usize)> {
    let data = |file: &File| file.tensors.iter().map(|tensor| tensor.3.len().next_multiple_of(32)).sum::<usize>();
    gguf_models().iter().map(|file| (file.bytes(), file.bytes().len().saturating_sub(data(file)))).collect()
}

#[test]
fn damaged_gguf_files_are_refused_or_can_be_read() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    let files = gguf_files();
    for (bytes, _) in &files {
        fs::write(&path, bytes).unwrap();
        exercise(&path);
    }
    let opened = run(&files, setting("STER_DAMAGE_SEED", 0x5EED), |bytes| fs::write(&path, bytes).unwrap(), &path);
    assert!(opened > 0, "damage to numbers alone opens");
}

/// A file whose bytes are in order and whose numbers are not: sizes, types and values, as its header gives them.
fn disorder(dice: &mut Dice, file: &mut File) {
    for _ in 0..=dice.below(3) {
        let tensor = dice.below(file.tensors.len());
        let tensor = &mut file.tensors[tensor];
        match dice.below(8) {
            0 if !tensor.1.is_empty() => {
                let axis = dice.below(tensor.1.len());
                tensor.1[axis] = dice.extreme();
            }
            1 => tensor.1 = (0..dice.below(6)).map(|_| [1, 2, 32, dice.extreme()][dice.below(4)]).collect(),
            2 => tensor.2 = dice.below(45) as u32,
            3 => tensor.3.truncate(dice.below(32)),
            4 => tensor.0 = file.keys[dice.below(file.keys.len())].0.clone(),
            kind => {
                let key = dice.below(file.keys.len());
                let key = &mut file.keys[key];
                if kind == 5 {
                    key.1 = dice.below(14) as u32;
                } else if key.2.len() <= 8 {
                    let value = [dice.extreme(), u64::from((dice.extreme() as f32).to_bits()), 0x7F80_0000][dice.below(3)];
                    let len = key.2.len();
                    key.2.copy_from_slice(&value.to_le_bytes()[..len]);
                }
            }
        }
    }
}

#[test]
fn files_of_odd_sizes_types_and_values_are_refused_or_can_be_read() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    let mut dice = Dice(setting("STER_DAMAGE_SEED", 0x5EED) | 1);
    let (files, count) = (gguf_models(), setting("STER_DAMAGE", 2000));
    let mut opened = 0;
    for _ in 0..count {
        let mut file = files[dice.below(files.len())].clone();
        disorder(&mut dice, &mut file);
        fs::write(&path, file.bytes()).unwrap();
        opened += u64::from(exercise(&path));
    }
    println!("{opened} of {count} odd files opened");
    assert!(opened > 0, "an odd value may be harmless");
}

#[test]
fn damaged_parts_of_a_split_are_refused_or_can_be_read() {
    let dir = TempDir::new().unwrap();
    let whole = tiny("llama");
    let part = |n: u16| {
        let mut part = if n == 0 { whole.clone() } else { File { keys: Vec::new(), ..whole.clone() } };
        part.tensors = whole.tensors.chunks(10).nth(n.into()).unwrap().to_vec();
        let part = part.key("split.no", 2, n.to_le_bytes().into()).key("split.count", 2, 2u16.to_le_bytes().into());
        part.key("split.tensors.count", 5, (whole.tensors.len() as i32).to_le_bytes().into()).bytes()
    };
    let path = |n: u16| dir.path().join(format!("m-0000{}-of-00002.gguf", n + 1));
    fs::write(path(0), part(0)).unwrap();
    fs::write(path(1), part(1)).unwrap();
    assert!(exercise(&path(1)));
    let header = part(1).len() / 2;
    let opened = run(&[(part(1), header)], setting("STER_DAMAGE_SEED", 0x5EED), |bytes| fs::write(path(1), bytes).unwrap(), &path(0));
    assert!(opened > 0, "damage to numbers alone opens");
}

#[test]
fn damaged_metadata_alone_is_refused_or_can_be_read() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    let mut dice = Dice(setting("STER_DAMAGE_SEED", 0x5EED) | 1);
    for (mut bytes, header) in gguf_files().into_iter().cycle().take(setting("STER_DAMAGE", 2000) as usize / 4) {
        damage(&mut dice, &mut bytes, header, b"");
        fs::write(&path, &bytes).unwrap();
        if let Ok(gguf) = Gguf::open(&path) {
            std::hint::black_box(format!("{:?}", gguf.metadata));
        }
    }
}

#[test]
fn damaged_safetensors_are_refused_or_can_be_read() {
    let dir = TempDir::new().unwrap();
    let config = json!({
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 5, "tie_word_embeddings": true,
    });
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let block = "model.layers.0.";
    let tensors = [
        ("model.embed_tokens.weight".to_string(), "F32", vec![5, 8]),
        ("model.norm.weight".into(), "F16", vec![8]),
        (format!("{block}input_layernorm.weight"), "BF16", vec![8]),
        (format!("{block}post_attention_layernorm.weight"), "F32", vec![8]),
        (format!("{block}self_attn.q_proj.weight"), "BF16", vec![8, 8]),
        (format!("{block}self_attn.k_proj.weight"), "F16", vec![4, 8]),
        (format!("{block}self_attn.v_proj.weight"), "F32", vec![4, 8]),
        (format!("{block}self_attn.o_proj.weight"), "F32", vec![8, 8]),
        (format!("{block}mlp.gate_proj.weight"), "F32", vec![6, 8]),
        (format!("{block}mlp.up_proj.weight"), "F32", vec![6, 8]),
        (format!("{block}mlp.down_proj.weight"), "F32", vec![8, 6]),
    ];
    let (mut header, mut end) = (Map::new(), 0);
    for (name, dtype, shape) in tensors {
        let len = shape.iter().product::<usize>() * if dtype == "F32" { 4 } else { 2 };
        header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [end, end + len]}));
        end += len;
    }
    let text = serde_json::Value::Object(header).to_string();
    let bytes = [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &vec![0x3F; end]].concat();
    let path = dir.path().join("model.safetensors");
    fs::write(&path, &bytes).unwrap();
    assert!(exercise(dir.path()));
    let files = [(bytes, 8 + text.len())];
    let opened = run(&files, setting("STER_DAMAGE_SEED", 0x5EED), |bytes| fs::write(&path, bytes).unwrap(), dir.path());
    assert!(opened > 0, "damage to numbers alone opens");
}
