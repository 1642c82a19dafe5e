//! Random numbers of every size, and tiny random checkpoints.
#![allow(dead_code)] // each test program uses its own part

pub mod asks;

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use ster_core::tensor::Dtype;

/// SplitMix64: a test needs a seed it can print, and nothing more of its generator.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// In [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Mean 0, variance 1: the sum of twelve uniform numbers is close enough.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }
}

/// How large random numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Around 1.
    Usual,
    /// 1e14 to 1e18: a product of two still fits into f32.
    Huge,
    /// 1e-26 to 1e-20: a product of two is subnormal or nothing.
    Tiny,
    /// Below 1.2e-38.
    Subnormal,
    /// Any exponent from the smallest subnormal to 1e18, zeros of both signs among them.
    Mixed,
}

pub const SIZES: [Size; 5] = [Size::Usual, Size::Huge, Size::Tiny, Size::Subnormal, Size::Mixed];

impl Size {
    pub fn one(self, rng: &mut Rng) -> f32 {
        let sign = if rng.next() & 1 == 0 { 1.0 } else { -1.0 };
        let power = |rng: &mut Rng, low: f64, high: f64| sign * 10f64.powf(low + (high - low) * rng.unit());
        let value = match self {
            Size::Usual => rng.normal(),
            Size::Huge => power(rng, 14.0, 18.0),
            Size::Tiny => power(rng, -26.0, -20.0),
            Size::Subnormal => sign * f64::from(f32::from_bits(1 + (rng.next() % 0x7F_FFFF) as u32)),
            Size::Mixed if rng.below(16) == 0 => sign * 0.0,
            Size::Mixed => power(rng, -45.0, 18.0),
        };
        value as f32
    }

    pub fn many(self, rng: &mut Rng, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.one(rng)).collect()
    }
}

/// Numbers as `dtype` stores them, little-endian; what would be infinite in F16 becomes its largest number.
pub fn stored(values: &[f32], dtype: Dtype) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&v| match dtype {
            Dtype::F32 => v.to_le_bytes().to_vec(),
            Dtype::BF16 => bf16::from_f32(v).to_le_bytes().to_vec(),
            Dtype::F16 => f16::from_f32(if v.is_finite() { v.clamp(-65504.0, 65504.0) } else { v }).to_le_bytes().to_vec(),
            _ => panic!("numbers are not quantised here"),
        })
        .collect()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// A random model with everything in it that a wrong kernel could get right by chance in a simpler one: norm gains that are not 1,
/// grouped heads, sizes that are no multiple of sixteen.
#[derive(Clone, Debug)]
pub struct Tiny {
    /// `model_type`
    pub family: &'static str,
    /// Keys of config.json beside those below, or in their place; null takes one away.
    pub keys: Value,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub mlp: usize,
    pub vocab: usize,
    pub context: usize,
    pub dtype: Dtype,
    pub biases: bool,
    pub tied: bool,
    pub activation: &'static str,
    pub rope: Option<Value>,
    /// Standard deviation of the embedding and of the projections.
    pub embed_size: f64,
    pub weight_size: f64,
    pub seed: u64,
    /// Weights to spoil: tensor, index, value.
    pub spoiled: Vec<(&'static str, usize, f32)>,
}

impl Default for Tiny {
    fn default() -> Self {
        Tiny {
            family: "llama",
            keys: json!({}),
            hidden: 48,
            layers: 3,
            heads: 6,
            kv_heads: 2,
            head_dim: 8,
            mlp: 40,
            vocab: 50,
            context: 512,
            dtype: Dtype::F32,
            biases: false,
            tied: false,
            activation: "silu",
            rope: None,
            embed_size: 1.0,
            weight_size: 0.2,
            seed: 1,
            spoiled: Vec::new(),
        }
    }
}

impl Tiny {
    pub fn config(&self) -> Value {
        let mut config = json!({
            "model_type": self.family, "hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "intermediate_size": self.mlp, "vocab_size": self.vocab,
            "max_position_embeddings": self.context, "rms_norm_eps": 1e-5, "hidden_act": self.activation, "rope_theta": 10000.0,
            "attention_bias": self.biases, "mlp_bias": self.biases, "tie_word_embeddings": self.tied,
        });
        if let Some(rope) = &self.rope {
            config["rope_scaling"] = rope.clone();
        }
        let object = config.as_object_mut().expect("an object");
        for (key, value) in self.keys.as_object().expect("an object") {
            if value.is_null() {
                object.remove(key);
            } else {
                object.insert(key.clone(), value.clone());
            }
        }
        config
    }

    /// Names, shapes, means and deviations of all tensors, as transformers has them.
    fn tensors(&self) -> Vec<(String, Vec<usize>, f64, f64)> {
        let Tiny { family, hidden, mlp, .. } = *self;
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let gemma = family.starts_with("gemma");
        let gain = if gemma { 0.0 } else { 1.0 }; // stored without their 1
        let mut tensors = vec![
            ("model.embed_tokens.weight".into(), vec![self.vocab, hidden], 0.0, self.embed_size),
            ("model.norm.weight".into(), vec![hidden], gain, 0.3),
        ];
        if !self.tied {
            tensors.push(("lm_head.weight".into(), vec![self.vocab, hidden], 0.0, self.weight_size));
        }
        let norms: &[(&str, usize)] = &match family {
            "olmo2" => {
                vec![
                    ("post_attention_layernorm", hidden),
                    ("post_feedforward_layernorm", hidden),
                    ("self_attn.q_norm", q),
                    ("self_attn.k_norm", kv),
                ]
            }
            "gemma2" | "gemma3_text" => {
                ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
                    .map(|name| (name, hidden))
                    .into()
            }
            _ => vec![("input_layernorm", hidden), ("post_attention_layernorm", hidden)],
        };
        let head_norms: &[(&str, usize)] = match family {
            "qwen3" | "gemma3_text" => &[("self_attn.q_norm", self.head_dim), ("self_attn.k_norm", self.head_dim)],
            _ => &[],
        };
        let projections: &[(&str, usize, usize)] = match family {
            "phi3" => &[
                ("self_attn.qkv_proj", q + 2 * kv, hidden),
                ("self_attn.o_proj", hidden, q),
                ("mlp.gate_up_proj", 2 * mlp, hidden),
                ("mlp.down_proj", hidden, mlp),
            ],
            _ => &[
                ("self_attn.q_proj", q, hidden),
                ("self_attn.k_proj", kv, hidden),
                ("self_attn.v_proj", kv, hidden),
                ("self_attn.o_proj", hidden, q),
                ("mlp.gate_proj", mlp, hidden),
                ("mlp.up_proj", mlp, hidden),
                ("mlp.down_proj", hidden, mlp),
            ],
        };
        for i in 0..self.layers {
            for (name, size) in norms.iter().chain(head_norms) {
                tensors.push((format!("model.layers.{i}.{name}.weight"), vec![*size], gain, 0.3));
            }
            for &(name, out, input) in projections {
                tensors.push((format!("model.layers.{i}.{name}.weight"), vec![out, input], 0.0, self.weight_size));
                let always = family == "qwen2" && ["q_proj", "k_proj", "v_proj"].iter().any(|end| name.ends_with(end));
                if self.biases || always {
                    tensors.push((format!("model.layers.{i}.{name}.bias"), vec![out], 0.0, self.weight_size));
                }
            }
        }
        tensors
    }

    pub fn write(&self, dir: &Path) {
        let mut rng = Rng::new(self.seed);
        let mut tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
        for (name, shape, mean, size) in self.tensors() {
            let values = (0..shape.iter().product()).map(|_| (mean + size * rng.normal()) as f32).collect();
            tensors.insert(name, (shape, values));
        }
        for &(name, index, value) in &self.spoiled {
            tensors.get_mut(name).expect("a tensor to spoil").1[index] = value;
        }
        let dtype = match self.dtype {
            Dtype::F32 => safetensors::Dtype::F32,
            Dtype::F16 => safetensors::Dtype::F16,
            Dtype::BF16 => safetensors::Dtype::BF16,
            _ => panic!("not a dtype of safetensors"),
        };
        let bytes: BTreeMap<_, _> =
            tensors.iter().map(|(name, (shape, values))| (name, (shape.clone(), stored(values, self.dtype)))).collect();
        let views = bytes.iter().map(|(name, (shape, bytes))| (name, TensorView::new(dtype, shape.clone(), bytes).unwrap()));
        safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
        std::fs::write(dir.join("config.json"), self.config().to_string()).unwrap();
    }
}
