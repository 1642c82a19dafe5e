//! GGUF files by hand, so that the tests do not lean on the reader under test.
#![allow(dead_code)] // each test binary uses a part

use std::collections::BTreeMap;

/// A file in memory: written, then opened.
#[derive(Clone)]
pub struct File {
    pub version: u32,
    pub alignment: usize,
    /// In the order in which they are written: the type's id and the value's bytes.
    pub keys: Vec<(String, u32, Vec<u8>)>,
    /// Dimensions as in the file, fastest first; the GGML type; the bytes.
    pub tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

pub const F32: u32 = 0;
pub const BF16: u32 = 30;

pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl File {
    pub fn new(arch: &str) -> File {
        File { version: 3, alignment: 32, keys: Vec::new(), tensors: Vec::new() }.text("general.architecture", arch)
    }

    /// A key, in the place of one with the same name.
    pub fn key(mut self, name: &str, kind: u32, value: Vec<u8>) -> File {
        match self.keys.iter_mut().find(|key| key.0 == name) {
            Some(key) => *key = (name.into(), kind, value),
            None => self.keys.push((name.into(), kind, value)),
        }
        self
    }

    pub fn text(self, name: &str, value: &str) -> File {
        self.key(name, 8, string(value))
    }

    pub fn int(self, name: &str, value: u32) -> File {
        self.key(name, 4, value.to_le_bytes().into())
    }

    pub fn float(self, name: &str, value: f32) -> File {
        self.key(name, 6, value.to_le_bytes().into())
    }

    pub fn flag(self, name: &str, value: bool) -> File {
        self.key(name, 7, vec![value.into()])
    }

    pub fn texts(self, name: &str, items: &[&str]) -> File {
        self.list(name, 8, items.iter().flat_map(|item| string(item)).collect(), items.len() as u64)
    }

    pub fn ints(self, name: &str, items: &[i32]) -> File {
        self.list(name, 5, items.iter().flat_map(|item| item.to_le_bytes()).collect(), items.len() as u64)
    }

    pub fn list(self, name: &str, kind: u32, items: Vec<u8>, count: u64) -> File {
        self.key(name, 9, [&kind.to_le_bytes()[..], &count.to_le_bytes(), &items].concat())
    }

    pub fn without(mut self, name: &str) -> File {
        self.keys.retain(|key| key.0 != name);
        self
    }

    /// An f32 tensor whose value `j` is its number among the tensors plus `j / 1024`; `shape` slowest axis first.
    pub fn tensor(mut self, name: &str, shape: &[u64]) -> File {
        let i = self.tensors.len() as f32;
        let bytes = (0..shape.iter().product()).flat_map(|j: u64| (i + j as f32 / 1024.0).to_le_bytes()).collect();
        self.tensors.push((name.into(), shape.iter().rev().copied().collect(), F32, bytes));
        self
    }

    pub fn numbers(self, name: &str, values: &[f32]) -> File {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.stored(name, &[values.len() as u64], F32, bytes)
    }

    pub fn stored(mut self, name: &str, shape: &[u64], kind: u32, bytes: Vec<u8>) -> File {
        self.tensors.retain(|tensor| tensor.0 != name);
        self.tensors.push((name.into(), shape.iter().rev().copied().collect(), kind, bytes));
        self
    }

    pub fn drop(mut self, name: &str) -> File {
        self.tensors.retain(|tensor| tensor.0 != name);
        self
    }

    pub fn values(&self, name: &str) -> Vec<f32> {
        let bytes = &self.tensors.iter().find(|tensor| tensor.0 == name).expect("a tensor of this name").3;
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (name, kind, value) in &self.keys {
            out.extend(string(name));
            out.extend(kind.to_le_bytes());
            out.extend(value);
        }
        let mut offset = 0;
        for (name, dims, kind, bytes) in &self.tensors {
            out.extend(string(name));
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += bytes.len().next_multiple_of(self.alignment);
        }
        for (_, _, _, bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(bytes);
        }
        out
    }
}

/// A model of each architecture: hidden 8, 2 heads of 4, 1 kv head, mlp 6, vocab 5, 2 layers, tied.
pub fn tiny(arch: &str) -> File {
    let key = |name: &str| format!("{arch}.{name}");
    let mut file = File::new(arch)
        .int(&key("block_count"), 2)
        .int(&key("context_length"), 64)
        .int(&key("embedding_length"), 8)
        .int(&key("feed_forward_length"), 6)
        .int(&key("attention.head_count"), 2)
        .int(&key("attention.head_count_kv"), 1)
        .float(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .float(&key("rope.freq_base"), 500000.0)
        .int(&key("rope.dimension_count"), 4)
        .tensor("token_embd.weight", &[5, 8])
        .tensor("output_norm.weight", &[8]);
    let sizes: BTreeMap<&str, &[u64]> = BTreeMap::from([
        ("attn_norm", &[8][..]),
        ("attn_q", &[8, 8]),
        ("attn_k", &[4, 8]),
        ("attn_v", &[4, 8]),
        ("attn_output", &[8, 8]),
        ("ffn_norm", &[8]),
        ("ffn_gate", &[6, 8]),
        ("ffn_up", &[6, 8]),
        ("ffn_down", &[8, 6]),
        ("post_attention_norm", &[8]),
        ("post_ffw_norm", &[8]),
    ]);
    #[rustfmt::skip]
    let parts: &[&str] = match arch {
        "phi3" => &["attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down"],
        "olmo2" => &[
            "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "attn_output", "post_attention_norm", "ffn_gate", "ffn_up",
            "ffn_down", "post_ffw_norm",
        ],
        "qwen3" => &[
            "attn_norm", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "attn_output", "ffn_norm", "ffn_gate", "ffn_up",
            "ffn_down",
        ],
        "gemma2" | "gemma3" => &[
            "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "post_attention_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
            "post_ffw_norm",
        ],
        _ => &["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"],
    };
    for layer in 0..2 {
        for part in parts {
            let shape = match (arch, *part) {
                ("phi3", "attn_qkv") => &[16, 8][..],
                ("phi3", "ffn_up") => &[12, 8],
                ("olmo2", "attn_q_norm") => &[8],
                (_, "attn_q_norm" | "attn_k_norm") => &[4],
                (_, part) => sizes[part],
            };
            file = file.tensor(&format!("blk.{layer}.{part}.weight"), shape);
        }
    }
    match arch {
        "granite" => file.float("granite.logit_scale", 8.0),
        _ => file,
    }
}
