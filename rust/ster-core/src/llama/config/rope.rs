//! `rope_theta`, `rope_scaling` and `rope_parameters`, in all the spellings that checkpoints have.

use serde_json::Value;

use super::fields::{Fields, brief};
use crate::checkpoint::json::kind;
use crate::error::Result;
use crate::llama::families::Family;
use crate::llama::rope::{Rope, RopeScaling, longrope_attention_factor, yarn_attention_factor};

/// What decides over a rotation beside the rope keys themselves.
pub(super) struct Head {
    pub context: usize,
    pub rotary_dim: usize,
    pub family: &'static Family,
}

/// `rope_theta`, `rope_scaling` and `rope_parameters`, which must agree where they say the same thing. Where `rope_parameters` has one
/// entry for each type of layer, that of `full_attention`.
pub(super) fn rope(fields: &Fields, head: &Head) -> Result<Rope> {
    let old = dictionary(fields, "rope_scaling", None, head)?;
    let new = dictionary(fields, "rope_parameters", Some("full_attention"), head)?;
    if let (Some((old, _)), Some((new, _))) = (&old, &new)
        && old != new
    {
        return fields.refuse("rope_scaling", format!("says {old:?}, but `rope_parameters` says {new:?}"));
    }
    let theta = theta(
        fields,
        head.family.defaults.theta,
        &[
            ("rope_theta", fields.positive("rope_theta")?),
            ("rope_scaling.rope_theta", old.as_ref().and_then(|(_, theta)| *theta)),
            ("rope_parameters.rope_theta", new.as_ref().and_then(|(_, theta)| *theta)),
        ],
    )?;
    let scaling = new.or(old).map_or(RopeScaling::Default, |(scaling, _)| scaling);
    if matches!(scaling, RopeScaling::Dynamic { .. }) && head.rotary_dim == 2 {
        return fields.refuse("head_dim", "must be greater than 2 for rope type `dynamic`, found 2".into());
    }
    Ok(Rope { theta, scaling })
}

/// The rotation of windowed layers, where they have their own: `rope_local_base_freq`, or `sliding_attention` in `rope_parameters`.
pub(super) fn local_rope(fields: &Fields, head: &Head, default: f64) -> Result<Rope> {
    let new = dictionary(fields, "rope_parameters", Some("sliding_attention"), head)?;
    let named = [
        ("rope_local_base_freq", fields.positive("rope_local_base_freq")?),
        ("rope_parameters.sliding_attention.rope_theta", new.as_ref().and_then(|(_, theta)| *theta)),
    ];
    let theta = theta(fields, default, &named)?;
    let rope = Rope { theta, scaling: new.map_or(RopeScaling::Default, |(scaling, _)| scaling) };
    if rope.depends_on_length() {
        // `SteeringLlama::switches_after` speaks for one rotation.
        return fields.refuse("rope_parameters.sliding_attention.rope_type", "may not depend on the length of a sequence".into());
    }
    Ok(rope)
}

fn theta(fields: &Fields, default: f64, said: &[(&'static str, Option<f64>)]) -> Result<f64> {
    let mut theta = None;
    for (name, found) in said {
        match (theta, found) {
            (Some((earlier, a)), Some(b)) if a != *b => return fields.refuse(name, format!("is {b}, but `{earlier}` is {a}")),
            (None, Some(found)) => theta = Some((*name, *found)),
            _ => {}
        }
    }
    let (name, theta) = theta.unwrap_or((said[0].0, default));
    if theta <= 1.0 || !(theta as f32).is_finite() {
        return fields.refuse(name, format!("must be greater than 1 and fit into f32, found {theta}"));
    }
    Ok(theta)
}

/// One of the two dictionaries: what it says of scaling, and its `rope_theta`. `None` when absent, null or empty.
///
/// `layer_type`: which of its entries to read, where the family has layers of two types and the dictionary one entry for each.
fn dictionary(top: &Fields, name: &str, layer_type: Option<&str>, head: &Head) -> Result<Option<(RopeScaling, Option<f64>)>> {
    const LAYER_TYPES: [&str; 2] = ["full_attention", "sliding_attention"];
    let Some(mut object) = object(top, name)? else { return Ok(None) };
    let mut prefix = format!("{name}.");
    if let Some(layer_type) = layer_type
        && head.family.keys.contains(&"rope_local_base_freq")
    {
        if LAYER_TYPES.iter().any(|layer_type| object.contains_key(*layer_type)) {
            let outer = Fields { path: top.path.clone(), prefix: prefix.clone(), object };
            if let Some(key) = object.keys().find(|key| !LAYER_TYPES.contains(&key.as_str())) {
                return outer.refuse(key, "stands beside entries for types of layers".into());
            }
            match self::object(&outer, layer_type)? {
                Some(inner) => object = inner,
                None => return Ok(None),
            }
            prefix = format!("{name}.{layer_type}.");
        } else {
            let problem = "must have entries `full_attention` and `sliding_attention` (transformers passes over anything else)";
            return top.refuse(name, problem.into());
        }
    }
    let fields = Fields { path: top.path.clone(), prefix: prefix.clone(), object };
    let Head { context, rotary_dim, family } = *head;

    let rope_type = match (fields.text("rope_type")?, fields.text("type")?) {
        (Some(new), Some(old)) if new != old => {
            return fields.refuse("type", format!("is \"{old}\", but `{prefix}rope_type` is \"{new}\""));
        }
        (new, old) => new.or(old).unwrap_or("default"),
    };
    // What the first configs of Phi-3 called it.
    let rope_type = if family.name == "phi3" && matches!(rope_type, "su" | "yarn") { "longrope" } else { rope_type };
    let known: &[&str] = match rope_type {
        "default" => &[],
        "linear" => &["factor"],
        "dynamic" => &["factor", "original_max_position_embeddings"],
        "llama3" => &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
        // `finetuned` is from the first code of yarn's authors, where true means what transformers does for all.
        #[rustfmt::skip]
        "yarn" => &[
            "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
            "truncate", "finetuned",
        ],
        "longrope" => &["factor", "original_max_position_embeddings", "attention_factor", "long_factor", "short_factor"],
        _ => {
            let given = if object.contains_key("rope_type") { "rope_type" } else { "type" };
            return fields.refuse(given, format!("is \"{rope_type}\", expected default, linear, dynamic, llama3, yarn or longrope"));
        }
    };
    for (key, value) in object {
        let common = matches!(key.as_str(), "rope_type" | "type" | "rope_theta" | "partial_rotary_factor");
        if !common && !known.contains(&key.as_str()) && !value.is_null() {
            return fields.refuse(key, format!("is {}, which rope type `{rope_type}` does not know", brief(value)));
        }
    }
    if let Some(part) = fields.number("partial_rotary_factor")?
        && part != 1.0
        && !family.keys.contains(&"partial_rotary_factor")
    {
        return fields.refuse("partial_rotary_factor", format!("must be 1, for the whole head is rotated, found {part}"));
    }

    let factor = || match fields.positive("factor")? {
        Some(factor) if factor >= 1.0 => Ok(factor),
        Some(factor) => fields.refuse("factor", format!("must be at least 1, found {factor}")),
        None => Err(fields.missing("factor")),
    };
    // Beside the dictionary, too, where transformers lets it win; here both must agree.
    let original = || match (fields.size("original_max_position_embeddings")?, top.size("original_max_position_embeddings")?) {
        (Some(inner), Some(outer)) if inner != outer => {
            let problem = format!("is {outer}, but `{prefix}original_max_position_embeddings` is {inner}");
            top.refuse("original_max_position_embeddings", problem)
        }
        (inner, outer) => Ok(inner.or(outer)),
    };
    let scaling = match rope_type {
        "linear" => RopeScaling::Linear { factor: factor()? },
        "dynamic" => {
            if let Some(original) = fields.size("original_max_position_embeddings")?
                && original != context
            {
                let problem = format!("must be `max_position_embeddings` = {context} for rope type `dynamic`, found {original}");
                return fields.refuse("original_max_position_embeddings", problem);
            }
            RopeScaling::Dynamic { factor: factor()? }
        }
        "llama3" => {
            let low = fields.positive("low_freq_factor")?.ok_or_else(|| fields.missing("low_freq_factor"))?;
            let high = fields.positive("high_freq_factor")?.ok_or_else(|| fields.missing("high_freq_factor"))?;
            if high <= low {
                return fields.refuse("high_freq_factor", format!("must be greater than `low_freq_factor` = {low}, found {high}"));
            }
            let original_context = original()?.ok_or_else(|| fields.missing("original_max_position_embeddings"))?;
            RopeScaling::Llama3 { factor: factor()?, low_freq_factor: low, high_freq_factor: high, original_context }
        }
        "yarn" => {
            if fields.flag("finetuned")? == Some(false) {
                return fields.refuse("finetuned", "is false, which changes the maths and is not supported".into());
            }
            let original_context = original()?.unwrap_or(context);
            // A null factor means the ratio of the contexts, as DeepSeek writes it.
            let factor = match fields.object.get("factor") {
                Some(Value::Null) => context as f64 / original_context as f64,
                _ => factor()?,
            };
            // Python's `or`: 0 is not set.
            let or = |key: &str, default: f64| -> Result<f64> {
                match fields.number(key)? {
                    None | Some(0.0) => Ok(default),
                    Some(found) if found > 0.0 => Ok(found),
                    Some(found) => fields.refuse(key, format!("must be positive, found {found}")),
                }
            };
            let (beta_fast, beta_slow) = (or("beta_fast", 32.0)?, or("beta_slow", 1.0)?);
            if beta_fast < beta_slow {
                return fields.refuse("beta_fast", format!("must be at least `beta_slow` = {beta_slow}, found {beta_fast}"));
            }
            let mscale = match (or("mscale", 0.0)?, or("mscale_all_dim", 0.0)?) {
                (mscale, all_dim) if mscale != 0.0 && all_dim != 0.0 => Some((mscale, all_dim)),
                _ => None,
            };
            let attention_factor = fields.positive("attention_factor")?.unwrap_or_else(|| yarn_attention_factor(factor, mscale));
            let truncate = fields.flag("truncate")?.unwrap_or(true);
            RopeScaling::Yarn { factor, attention_factor, beta_fast, beta_slow, truncate, original_context }
        }
        "longrope" => {
            // Beside the dictionary it wins, as in transformers; Phi-3's class has one even when the config is silent.
            let outer = top.size("original_max_position_embeddings")?.or((family.name == "phi3").then_some(4096));
            let original_context = outer.or(fields.size("original_max_position_embeddings")?).unwrap_or(context);
            if original_context < 2 {
                return top.refuse("original_max_position_embeddings", "must be at least 2 for rope type `longrope`, found 1".into());
            }
            let factor = fields.positive("factor")?.unwrap_or(context as f64 / original_context as f64);
            let given = fields.positive("attention_factor")?;
            let attention_factor = given.unwrap_or_else(|| longrope_attention_factor(factor, original_context));
            let (short, long) = (fields.factors("short_factor", rotary_dim / 2)?, fields.factors("long_factor", rotary_dim / 2)?);
            RopeScaling::LongRope { short, long, attention_factor, original_context }
        }
        _ => RopeScaling::Default,
    };
    Ok(Some((scaling, fields.positive("rope_theta")?)))
}

/// An object inside another; `None` when absent, null or empty.
fn object<'a>(fields: &Fields<'a>, key: &str) -> Result<Option<&'a serde_json::Map<String, Value>>> {
    match fields.object.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(object)) if object.is_empty() => Ok(None),
        Some(Value::Object(object)) => Ok(Some(object)),
        Some(other) => fields.refuse(key, format!("must be an object, found {}", kind(other))),
    }
}
