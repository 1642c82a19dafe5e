//! What a GGUF file says of the rotation -> `rope_theta`, `rope_scaling` and what stands beside them in config.json.
//!
//! Linear and yarn are keys. The other two are tensors of factors, by which llama.cpp divides frequencies:
//! - longrope (phi3): the very lists of config.json, in f32, which is where transformers takes them too;
//! - llama3: computed by the converter from `factor`, 1, 4 and 8192; so those are looked for again ([`llama3`]).

use serde_json::{Value as Json, json};

use super::config::{Config, Keys, decimal, json as number, put};
use crate::error::{Error, Result};
use crate::llama::rope::{Rope, RopeScaling};

const LLAMA3: &str = "rope_freqs.weight";
const LONG: &str = "rope_factors_long.weight";
const SHORT: &str = "rope_factors_short.weight";
/// Not weights of any layer.
pub(super) const FACTORS: [&str; 3] = [LLAMA3, LONG, SHORT];

pub(super) fn translate(keys: &Keys, set: &mut Config) -> Result<()> {
    let (arch, gguf, head_dim) = (keys.arch.name, keys.gguf, keys.head_dim()?);
    let theta = keys.number("rope.freq_base")?.unwrap_or(10_000.0); // as in llama.cpp
    put(set, "rope_theta", number(theta));
    let rotated = keys.size_or("rope.dimension_count")?.unwrap_or(head_dim);
    match rotated {
        all if all == head_dim => {}
        part if arch == "phi3" && part < head_dim => put(set, "partial_rotary_factor", number(fraction(part, head_dim))),
        other => return keys.refuse("rope.dimension_count", format!("must be the {head_dim} of a head, found {other}")),
    }
    // Gemma 3's layers with a window turn by a theta of their own: 10000 in `gemma3.cpp` where the file is silent.
    if arch == "gemma3" {
        put(set, "rope_local_base_freq", number(keys.number("rope.freq_base_swa")?.unwrap_or(10_000.0)));
    } else if arch == "gemma2" && keys.number("rope.freq_base_swa")?.is_some_and(|local| local != theta) {
        return keys.refuse("rope.freq_base_swa", "differs from `rope.freq_base`, which is not supported".into());
    }

    let kind = keys.text("rope.scaling.type")?;
    let old = keys.number("rope.scale_linear")?;
    let factor = keys.number("rope.scaling.factor")?.or(old).filter(|&factor| factor != 0.0 && factor != 1.0);
    let original = keys.size_or("rope.scaling.original_context_length")?;
    let attention = keys.number("rope.scaling.attn_factor")?.filter(|&factor| factor != 1.0);
    keys.flag("rope.scaling.finetuned")?; // says how the model was trained; granite has looked at it
    if arch == "phi3" {
        put(set, "original_max_position_embeddings", original); // beside the dictionary, as in its config.json
    }

    let (long, short, llama3_factors) = (gguf.numbers(LONG)?, gguf.numbers(SHORT)?, gguf.numbers(LLAMA3)?);
    let at = |tensor: &str, problem: String| Error::Tensor { path: gguf.path().into(), tensor: tensor.into(), problem };
    let scaling = match (kind.as_deref(), long, short) {
        (_, Some(long), Some(short)) if arch == "phi3" => {
            let Some(original) = original else {
                return keys.refuse("rope.scaling.original_context_length", "is missing".into());
            };
            for (tensor, factors) in [(LONG, &long), (SHORT, &short)] {
                if factors.len() as u64 != rotated / 2 {
                    return Err(at(tensor, format!("has {} factors, expected {}", factors.len(), rotated / 2)));
                }
                if let Some(factor) = factors.iter().find(|factor| !(factor.is_finite() && **factor > 0.0)) {
                    return Err(at(tensor, format!("must hold positive numbers, found {factor}")));
                }
            }
            let list = |factors: &[f32]| factors.iter().map(|&factor| number(f64::from(factor))).collect::<Vec<Json>>();
            let mut scaling = json!({"rope_type": "longrope", "long_factor": list(&long), "short_factor": list(&short)});
            // What the converter computes from both contexts, transformers computes again and exactly; anything else is said.
            let follows = longrope_attention(keys.size("context_length")?, original);
            if let Some(attention) = attention.filter(|&given| (given - follows).abs() > 1e-6 * follows) {
                scaling["attention_factor"] = number(attention);
            }
            Some(scaling)
        }
        (_, Some(_), _) => return Err(at(LONG, "is there, but the model is not a phi3 with both lists of factors".into())),
        (_, _, Some(_)) => return Err(at(SHORT, "is there, but the model is not a phi3 with both lists of factors".into())),
        (_, None, None) if attention.is_some() => return keys.refuse("rope.scaling.attn_factor", "is set without longrope factors".into()),
        (None | Some("linear"), ..) => factor.map(|factor| json!({"rope_type": "linear", "factor": factor})),
        (Some("none"), ..) => None,
        (Some("yarn"), ..) => Some(yarn(keys, factor.unwrap_or(1.0), original)?),
        (Some("longrope"), ..) => return keys.refuse("rope.scaling.type", format!("is \"longrope\", but there is no tensor `{LONG}`")),
        (Some(other), ..) => return keys.refuse("rope.scaling.type", format!("is \"{other}\", which Ster does not know")),
    };
    let scaling = match llama3_factors {
        None => scaling,
        // Of the architectures here, llama.cpp turns only these by them.
        Some(_) if !matches!(arch, "llama" | "granite") => {
            return Err(at(LLAMA3, format!("is not part of a {arch} model")));
        }
        Some(_) if scaling.is_some() => return Err(at(LLAMA3, "is there beside another rope scaling".into())),
        Some(factors) => llama3(&factors, theta, head_dim).map_err(|problem| at(LLAMA3, problem))?,
    };
    if let Some(scaling) = scaling {
        put(set, "rope_scaling", scaling);
    }
    Ok(())
}

/// As transformers has them. `yarn_attn_factor` is what config.json gives as `attention_factor`, by the converter.
fn yarn(keys: &Keys, factor: f64, original: Option<u64>) -> Result<Json> {
    let mut scaling = json!({"rope_type": "yarn", "factor": factor});
    if let Some(original) = original {
        scaling["original_max_position_embeddings"] = original.into();
    }
    for (key, name) in [("yarn_attn_factor", "attention_factor"), ("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")] {
        if let Some(value) = keys.number(&format!("rope.scaling.{key}"))? {
            scaling[name] = number(value);
        }
    }
    match keys.number("rope.scaling.yarn_ext_factor")? {
        // Negative: not set, which is 1 for yarn.
        Some(found) if found >= 0.0 && found != 1.0 => keys.refuse("rope.scaling.yarn_ext_factor", format!("must be 1, found {found}")),
        _ => Ok(scaling),
    }
}

/// The attention factor transformers gives a longrope model without one.
fn longrope_attention(context: u64, original: u64) -> f64 {
    let scale = context as f64 / original as f64;
    if scale <= 1.0 { 1.0 } else { (1.0 + scale.ln() / (original as f64).ln()).sqrt() }
}

/// `part / whole`, such that `whole` times it, cut to an integer as transformers does, is `part` again.
fn fraction(part: u64, whole: u64) -> f64 {
    let ratio = part as f64 / whole as f64;
    if ((whole as f64 * ratio) as u64) < part { ratio.next_up() } else { ratio }
}

/// The `rope_scaling` from which llama.cpp's converter computes `factors`: 1 for the pairs that turn fastest, `factor` for the slowest,
/// a ramp between, always with 1, 4 and 8192 (`generate_extra_tensors` of `conversion/llama.py`). `None` when all are 1.
///
/// The ramp is `1 / ((1 - smooth) / factor + smooth)`, with `smooth` from a power that differs between libraries in its last bit; what is
/// compared are therefore the reciprocals, which lie between `1 / factor` and 1, to 2^-21: 4 times what two roundings of that power move.
fn llama3(factors: &[f32], theta: f64, head_dim: u64) -> std::result::Result<Option<Json>, String> {
    if factors.len() as u64 != head_dim / 2 {
        return Err(format!("has {} factors, expected {}", factors.len(), head_dim / 2));
    }
    if factors.iter().all(|&factor| factor == 1.0) {
        return Ok(None);
    }
    let unknown = || "holds factors that follow from no llama3 scaling with 1, 4 and 8192; Ster knows no others".to_string();
    let factor = factors.iter().copied().fold(0.0, f32::max);
    if !(factor.is_finite() && factor > 1.0 && theta > 1.0 && (theta as f32).is_finite()) {
        return Err(unknown());
    }
    let factor = decimal(factor);
    let scaling = RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 };
    let frequencies = |scaling| Rope { theta, scaling }.inverse_frequencies(head_dim as usize, 8192, 1);
    let (plain, scaled) = (frequencies(RopeScaling::Default), frequencies(scaling));
    let near =
        |factor: f32, plain: f32, scaled: f32| (1.0 / f64::from(factor) - f64::from(scaled) / f64::from(plain)).abs() < 2f64.powi(-21);
    if !factors.iter().zip(plain.iter().zip(&scaled)).all(|(&factor, (&plain, &scaled))| near(factor, plain, scaled)) {
        return Err(unknown());
    }
    let original = ("original_max_position_embeddings", 8192);
    Ok(Some(json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, original.0: original.1})))
}
