//! The tensors of a Llama checkpoint, each checked against the config, none left over.

use std::collections::BTreeSet;

use super::config::LlamaConfig;
use crate::checkpoint::{Checkpoint, WeightMatrix};
use crate::error::{Error, Result};
use crate::tensor::Dtype;

/// `x @ weight.T + bias`.
#[derive(Clone, Debug)]
pub struct Linear {
    /// `[out, in]`
    pub weight: WeightMatrix,
    /// `[out]`
    pub bias: Option<Vec<f32>>,
}

/// One decoder block.
#[derive(Clone, Debug)]
pub struct BlockWeights {
    /// `[hidden]`; `input_layernorm`
    pub attn_norm: Vec<f32>,
    /// `[hidden]`; `post_attention_layernorm`, which in Llama is the norm before the MLP
    pub mlp_norm: Vec<f32>,
    /// `[heads * head_dim, hidden]`
    pub q: Linear,
    /// `[kv_heads * head_dim, hidden]`
    pub k: Linear,
    /// `[kv_heads * head_dim, hidden]`
    pub v: Linear,
    /// `[hidden, heads * head_dim]`
    pub o: Linear,
    /// `[mlp, hidden]`
    pub gate: Linear,
    /// `[mlp, hidden]`
    pub up: Linear,
    /// `[hidden, mlp]`
    pub down: Linear,
}

/// All weights: matrices where they lie in the files, norm gains and biases copied to f32.
#[derive(Clone, Debug)]
pub struct LlamaWeights {
    /// `[vocab, hidden]`
    pub embed: WeightMatrix,
    pub blocks: Vec<BlockWeights>,
    /// `[hidden]`
    pub norm: Vec<f32>,
    /// `[vocab, hidden]`; of a tied model the embedding
    pub head: WeightMatrix,
    /// What was noticed and went on from, the checkpoint's own included.
    pub warnings: Vec<String>,
    dtypes: Vec<Dtype>,
    bytes: u64,
}

impl LlamaWeights {
    pub fn load(checkpoint: &Checkpoint, config: &LlamaConfig) -> Result<LlamaWeights> {
        let mut reader = Reader { checkpoint, used: BTreeSet::new(), dtypes: Vec::new(), bytes: 0 };
        let (q_width, kv_width) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);

        let embed = reader.matrix("model.embed_tokens.weight".into(), config.vocab, config.hidden)?;
        // Not with_capacity: the number of layers is the config's word until their tensors are found.
        let mut blocks = Vec::new();
        for i in 0..config.layers {
            let mut norm = |name: &str| reader.vector(format!("model.layers.{i}.{name}.weight"), config.hidden);
            let (attn_norm, mlp_norm) = (norm("input_layernorm")?, norm("post_attention_layernorm")?);
            let mut attn = |name: &str, out, input| {
                reader.linear(&format!("model.layers.{i}.self_attn.{name}_proj"), out, input, config.attention_bias)
            };
            let (q, k) = (attn("q", q_width, config.hidden)?, attn("k", kv_width, config.hidden)?);
            let (v, o) = (attn("v", kv_width, config.hidden)?, attn("o", config.hidden, q_width)?);
            let mut mlp = |name: &str, out, input| reader.linear(&format!("model.layers.{i}.mlp.{name}_proj"), out, input, config.mlp_bias);
            let (gate, up) = (mlp("gate", config.mlp, config.hidden)?, mlp("up", config.mlp, config.hidden)?);
            let down = mlp("down", config.hidden, config.mlp)?;
            blocks.push(BlockWeights { attn_norm, mlp_norm, q, k, v, o, gate, up, down });
        }
        let norm = reader.vector("model.norm.weight".into(), config.hidden)?;

        let mut warnings = checkpoint.warnings().to_vec();
        let head = reader.head(&embed, config, &mut warnings)?;
        if !head.is(&embed) {
            embed.read_sparsely(); // a tied one is also the head, which is read in order
        }
        reader.nothing_left(config)?;
        let Reader { mut dtypes, bytes, .. } = reader;
        dtypes.sort_by_key(|dtype| dtype.name());
        Ok(LlamaWeights { embed, blocks, norm, head, warnings, dtypes, bytes })
    }

    /// Stored dtypes that occur, in alphabetical order of their names.
    pub fn dtypes(&self) -> Vec<Dtype> {
        self.dtypes.clone()
    }

    /// Bytes of all tensors in use, as stored.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Takes tensors from a checkpoint and remembers which.
struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    used: BTreeSet<String>,
    dtypes: Vec<Dtype>,
    bytes: u64,
}

impl Reader<'_> {
    fn took(&mut self, name: String, dtype: Dtype, bytes: usize) {
        self.used.insert(name);
        self.bytes += bytes as u64;
        if !self.dtypes.contains(&dtype) {
            self.dtypes.push(dtype);
        }
    }

    fn matrix(&mut self, name: String, rows: usize, cols: usize) -> Result<WeightMatrix> {
        let matrix = self.checkpoint.matrix(&name, rows, cols)?;
        self.took(name, matrix.dtype(), matrix.len());
        Ok(matrix)
    }

    fn vector(&mut self, name: String, len: usize) -> Result<Vec<f32>> {
        let (values, dtype) = self.checkpoint.vector(&name, len)?;
        self.took(name, dtype, dtype.row_bytes(len).expect("whole blocks"));
        Ok(values)
    }

    fn linear(&mut self, name: &str, out: usize, input: usize, bias: bool) -> Result<Linear> {
        let weight = self.matrix(format!("{name}.weight"), out, input)?;
        let bias = if bias { Some(self.vector(format!("{name}.bias"), out)?) } else { None };
        Ok(Linear { weight, bias })
    }

    /// The output head. Tied and a different head in the file: the file wins, as in transformers 5 (`tie_weights` in
    /// `modeling_utils.py`: both present and unequal, so not tied); releases before 5 let the embedding win.
    fn head(&mut self, embed: &WeightMatrix, config: &LlamaConfig, warnings: &mut Vec<String>) -> Result<WeightMatrix> {
        const NAME: &str = "lm_head.weight";
        if config.tied && !self.checkpoint.contains(NAME) {
            return Ok(embed.clone());
        }
        if config.tied {
            let head = self.checkpoint.matrix(NAME, config.vocab, config.hidden)?;
            if same_values(&head, embed) {
                self.used.insert(NAME.into());
                return Ok(embed.clone());
            }
            warnings.push(format!(
                "{}: `tie_word_embeddings` is true, but `{NAME}` differs from the embedding; `{NAME}` is used, as in transformers 5",
                self.checkpoint.path_of(NAME).display()
            ));
        }
        self.matrix(NAME.into(), config.vocab, config.hidden)
    }

    /// Refuse the first tensor the config does not account for.
    fn nothing_left(&self, config: &LlamaConfig) -> Result<()> {
        // Old checkpoints store the rotary frequencies, which follow from the config; transformers ignores them too.
        let left = self.checkpoint.names().find(|name| !self.used.contains(*name) && !name.ends_with(".rotary_emb.inv_freq"));
        let Some(name) = left else { return Ok(()) };
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()).and_then(|i| i.parse::<usize>().ok());
        let problem = match layer {
            Some(i) if i >= config.layers => format!("belongs to layer {i}, but `num_hidden_layers` is {}", config.layers),
            Some(_) if name.ends_with("_proj.bias") => {
                let flag = if name.contains(".self_attn.") { "attention_bias" } else { "mlp_bias" };
                format!("is a bias, but `{flag}` is false (transformers would leave it out)")
            }
            _ => "is not part of a Llama model".into(),
        };
        Err(Error::Tensor { path: self.checkpoint.path_of(name).into(), tensor: name.into(), problem })
    }
}

/// Whether two matrices of one shape hold the same numbers. Reads both to the first difference.
fn same_values(a: &WeightMatrix, b: &WeightMatrix) -> bool {
    let (a, b) = (a.view(), b.view());
    if a.dtype == b.dtype {
        return a.bytes() == b.bytes();
    }
    let (mut x, mut y) = (vec![0.0; a.cols], vec![0.0; b.cols]);
    (0..a.rows).all(|row| {
        a.widen_row(row, &mut x);
        b.widen_row(row, &mut y);
        x == y
    })
}
