//! The tensors of a checkpoint, each checked against the config, none left over.

use std::collections::BTreeSet;

use super::config::LlamaConfig;
use super::families::{Norms, QkNorm};
use crate::checkpoint::{Checkpoint, Form, Unrounded, WeightMatrix};
use crate::error::{Error, Result};
use crate::pool::Interrupt;
use crate::tensor::{Dtype, Weights};

/// `x @ weight.T + bias`.
#[derive(Clone, Debug)]
pub struct Linear {
    /// `[out, in]`
    pub weight: WeightMatrix,
    /// `[out]`
    pub bias: Option<Vec<f32>>,
}

/// One decoder block. Gains as they are applied: where a family stores `w` for `1 + w`, the 1 is added.
#[derive(Clone, Debug)]
pub struct BlockWeights {
    /// `[hidden]`; before attention
    pub attn_norm: Option<Vec<f32>>,
    /// `[hidden]`; on what attention adds
    pub attn_post_norm: Option<Vec<f32>>,
    /// `[hidden]`; before the MLP
    pub mlp_norm: Option<Vec<f32>>,
    /// `[hidden]`; on what the MLP adds
    pub mlp_post_norm: Option<Vec<f32>>,
    /// `[head_dim]`, or `[heads * head_dim]` for a norm over all heads
    pub q_norm: Option<Vec<f32>>,
    /// `[head_dim]` or `[kv_heads * head_dim]`
    pub k_norm: Option<Vec<f32>>,
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
    /// Weights as they are stored. `rounded` has other ones.
    pub fn load(checkpoint: &Checkpoint, config: &LlamaConfig, form: Form) -> Result<LlamaWeights> {
        LlamaWeights::rounded(checkpoint, config, form, &Rounding::NONE)
    }

    /// Weights rounded to F16 or BF16 first, all of them: those of the checkpoint that one would store so.
    pub fn rounded(checkpoint: &Checkpoint, config: &LlamaConfig, form: Form, rounding: &Rounding<'_>) -> Result<LlamaWeights> {
        let mut reader =
            Reader { checkpoint, config, form, rounding, round: rounding.to, read: 0, used: BTreeSet::new(), dtypes: Vec::new(), bytes: 0 };
        let embed = reader.matrix("model.embed_tokens.weight".into(), config.vocab, config.hidden)?;
        // Not with_capacity: the number of layers is the config's word until their tensors are found.
        let mut blocks = Vec::new();
        for i in 0..config.layers {
            blocks.push(reader.block(&format!("model.layers.{i}"))?);
        }
        let norm = reader.gain("model.norm".into(), config.hidden)?;

        let mut warnings = checkpoint.warnings().to_vec();
        let head = reader.head(&embed, &mut warnings)?;
        if !head.is(&embed) {
            embed.read_sparsely(); // a tied one is also the head, which is read in order
        }
        reader.nothing_left()?;
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

/// How weights are rounded while they are loaded.
pub struct Rounding<'a> {
    /// F16 or BF16. `None`: not at all.
    pub to: Option<Dtype>,
    pub threads: usize,
    pub interrupt: Interrupt<'a>,
    /// Told after each matrix: bytes done and in all, as stored.
    pub report: &'a dyn Fn(u64, u64),
}

impl Rounding<'_> {
    pub const NONE: Rounding<'static> = Rounding { to: None, threads: 1, interrupt: &|| false, report: &|_, _| {} };
}

/// Takes tensors from a checkpoint and remembers which.
struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a LlamaConfig,
    form: Form,
    rounding: &'a Rounding<'a>,
    /// Round to this first.
    round: Option<Dtype>,
    /// Bytes of the matrices that were looked at, as stored.
    read: u64,
    used: BTreeSet<String>,
    dtypes: Vec<Dtype>,
    bytes: u64,
}

impl Reader<'_> {
    fn block(&mut self, name: &str) -> Result<BlockWeights> {
        let LlamaConfig { family, hidden, heads, kv_heads, head_dim, mlp, qkv_bias, o_bias, mlp_bias, .. } = *self.config;
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        // `post_attention_layernorm` is Llama's name for the norm before the MLP, and others' for the one after attention.
        let norms: [Option<&str>; 4] = match family.norms {
            Norms::Before => [Some("input_layernorm"), None, Some("post_attention_layernorm"), None],
            Norms::After => [None, Some("post_attention_layernorm"), None, Some("post_feedforward_layernorm")],
            Norms::Around => [
                Some("input_layernorm"),
                Some("post_attention_layernorm"),
                Some("pre_feedforward_layernorm"),
                Some("post_feedforward_layernorm"),
            ],
        };
        let mut gains = Vec::new();
        for norm in norms {
            gains.push(norm.map(|norm| self.gain(format!("{name}.{norm}"), hidden)).transpose()?);
        }
        let [attn_norm, attn_post_norm, mlp_norm, mlp_post_norm] = gains.try_into().expect("four norms");
        let [q_norm, k_norm] = match family.qk_norm {
            QkNorm::None => [None, None],
            QkNorm::Head => [Some(head_dim), Some(head_dim)],
            QkNorm::Whole => [Some(q_width), Some(kv_width)],
        };
        let q_norm = q_norm.map(|len| self.gain(format!("{name}.self_attn.q_norm"), len)).transpose()?;
        let k_norm = k_norm.map(|len| self.gain(format!("{name}.self_attn.k_norm"), len)).transpose()?;

        let (attn, ffn) = (format!("{name}.self_attn"), format!("{name}.mlp"));
        let ([q, k, v], [gate, up]) = if family.fused {
            let qkv = self.matrix(format!("{attn}.qkv_proj.weight"), q_width + 2 * kv_width, hidden)?;
            let gate_up = self.matrix(format!("{ffn}.gate_up_proj.weight"), 2 * mlp, hidden)?;
            let part = |whole: &WeightMatrix, from, rows| Linear { weight: whole.rows_from(from, rows), bias: None };
            let qkv = [part(&qkv, 0, q_width), part(&qkv, q_width, kv_width), part(&qkv, q_width + kv_width, kv_width)];
            (qkv, [part(&gate_up, 0, mlp), part(&gate_up, mlp, mlp)])
        } else {
            let q = self.linear(&format!("{attn}.q_proj"), q_width, hidden, qkv_bias)?;
            let k = self.linear(&format!("{attn}.k_proj"), kv_width, hidden, qkv_bias)?;
            let v = self.linear(&format!("{attn}.v_proj"), kv_width, hidden, qkv_bias)?;
            let gate = self.linear(&format!("{ffn}.gate_proj"), mlp, hidden, mlp_bias)?;
            ([q, k, v], [gate, self.linear(&format!("{ffn}.up_proj"), mlp, hidden, mlp_bias)?])
        };
        let o = self.linear(&format!("{attn}.o_proj"), hidden, q_width, o_bias)?;
        let down = self.linear(&format!("{ffn}.down_proj"), hidden, mlp, mlp_bias)?;
        Ok(BlockWeights { attn_norm, attn_post_norm, mlp_norm, mlp_post_norm, q_norm, k_norm, q, k, v, o, gate, up, down })
    }

    /// The gains of a norm, as they are applied.
    fn gain(&mut self, name: String, len: usize) -> Result<Vec<f32>> {
        let name = format!("{name}.weight");
        let mut gain = self.stored_vector(&name, len)?;
        let plus_one = self.config.family.gain_plus_one;
        if plus_one && self.form.gains_with_one && self.round.is_some() {
            gain.iter_mut().for_each(|gain| *gain -= 1.0); // what is rounded is the w of 1 + w
        }
        self.round_vector(&name, &mut gain)?;
        if plus_one && !(self.form.gains_with_one && self.round.is_none()) {
            gain.iter_mut().for_each(|gain| *gain += 1.0); // in f32, as transformers does
        }
        Ok(gain)
    }

    fn took(&mut self, name: String, dtype: Dtype, bytes: usize) {
        self.used.insert(name);
        self.bytes += bytes as u64;
        if !self.dtypes.contains(&dtype) {
            self.dtypes.push(dtype);
        }
    }

    fn matrix(&mut self, name: String, rows: usize, cols: usize) -> Result<WeightMatrix> {
        let matrix = self.rounded_matrix(&name, rows, cols)?;
        self.took(name, matrix.dtype(), matrix.bytes());
        Ok(matrix)
    }

    fn vector(&mut self, name: String, len: usize) -> Result<Vec<f32>> {
        let mut values = self.stored_vector(&name, len)?;
        self.round_vector(&name, &mut values)?;
        Ok(values)
    }

    fn stored_vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let (values, dtype) = self.checkpoint.vector(name, len)?;
        let dtype = self.round.unwrap_or(dtype);
        self.took(name.into(), dtype, dtype.row_bytes(len).unwrap_or_default());
        Ok(values)
    }

    fn round_vector(&self, name: &str, values: &mut [f32]) -> Result<()> {
        let Some(dtype) = self.round else { return Ok(()) };
        for value in values {
            let bytes = dtype.round(*value).map_err(|value| self.too_large(name, dtype, value))?;
            Weights::new(&bytes, dtype, 1, 1).widen_row(0, std::slice::from_mut(value));
        }
        Ok(())
    }

    fn rounded_matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<WeightMatrix> {
        let matrix = self.checkpoint.matrix(name, rows, cols)?;
        let Some(dtype) = self.round else { return Ok(matrix) };
        if (self.rounding.interrupt)() {
            return Err(Error::Interrupted);
        }
        let rounded = matrix.rounded(dtype, self.rounding.threads, self.rounding.interrupt).map_err(|why| match why {
            Unrounded::TooLarge(value) => self.too_large(name, dtype, value),
            Unrounded::Interrupted => Error::Interrupted,
        })?;
        self.read += matrix.bytes() as u64;
        (self.rounding.report)(self.read, self.checkpoint.bytes());
        Ok(rounded)
    }

    fn too_large(&self, name: &str, dtype: Dtype, value: f32) -> Error {
        let problem = format!("holds {value}, which is too large for {}", dtype.name());
        Error::Tensor { path: self.checkpoint.path_of(name).into(), tensor: name.into(), problem }
    }

    fn linear(&mut self, name: &str, out: usize, input: usize, bias: bool) -> Result<Linear> {
        let weight = self.matrix(format!("{name}.weight"), out, input)?;
        let bias = if bias { Some(self.vector(format!("{name}.bias"), out)?) } else { None };
        Ok(Linear { weight, bias })
    }

    /// The output head. Tied and a different head in the file: the file wins, as in transformers 5 (`tie_weights` in
    /// `modeling_utils.py`: both present and unequal, so not tied); releases before 5 let the embedding win.
    fn head(&mut self, embed: &WeightMatrix, warnings: &mut Vec<String>) -> Result<WeightMatrix> {
        const NAME: &str = "lm_head.weight";
        let config = self.config;
        if config.tied && !self.checkpoint.contains(NAME) {
            return Ok(embed.clone());
        }
        if config.tied {
            let head = self.rounded_matrix(NAME, config.vocab, config.hidden)?;
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
    fn nothing_left(&self) -> Result<()> {
        let config = self.config;
        // Old checkpoints store the rotary frequencies, which follow from the config; transformers ignores them too.
        let left = self.checkpoint.names().find(|name| !self.used.contains(*name) && !name.ends_with(".rotary_emb.inv_freq"));
        let Some(name) = left else { return Ok(()) };
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()).and_then(|i| i.parse::<usize>().ok());
        let problem = match layer {
            Some(i) if i >= config.layers => format!("belongs to layer {i}, but `num_hidden_layers` is {}", config.layers),
            Some(_) if name.ends_with("_proj.bias") && config.family.name == "llama" => {
                let flag = if name.contains(".self_attn.") { "attention_bias" } else { "mlp_bias" };
                format!("is a bias, but `{flag}` is false (transformers would leave it out)")
            }
            _ => format!("is not part of a {} model", config.family.name),
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
