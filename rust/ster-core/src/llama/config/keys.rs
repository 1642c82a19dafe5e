//! Which keys of config.json may stand there unread.

use serde_json::{Map, Value};

use super::{LlamaConfig, activation};

/// Keys that say nothing about a forward pass: provenance, training, dtypes (each tensor has its own), caching, labels of classifiers, and
/// the options of generation that old transformers kept here.
#[rustfmt::skip]
pub(super) const HARMLESS: &[&str] = &[
    // provenance and tooling; auto_map names code to download, which transformers does not run for a llama either unless told to
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "transformers.js_config", "is_llama_config",
    "tokenizer_class", "unsloth_version", "unsloth_fixed", "unsloth_merged", "hub_revision", "model_name",
    // training
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "mlp_dropout", "dropout",
    "gradient_checkpointing", "output_router_logits", "classifier_dropout", "summary_type",
    // how to compute the same thing; pretraining_tp sliced some products, and transformers dropped it
    "pretraining_tp", "use_cache", "torchscript", "use_bfloat16", "attn_implementation", "use_flash_attn", "use_flash_attention",
    "flash_attention", "chunk_size_feed_forward", "cache_implementation",
    // lengths that change no number: max_position_embeddings is the one that counts
    "max_sequence_length", "max_seq_len", "model_max_length", "seq_length", "seq_len", "max_window_layers",
    // tokens
    "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "decoder_start_token_id", "bos_token",
    "eos_token", "pad_token", "add_bos_token", "add_eos_token",
    // outputs
    "output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate", "output_scores", "problem_type",
    "id2label", "label2id", "num_labels", "finetuning_task", "task_specific_params", "prefix", "is_decoder", "tf_legacy_loss",
    "tie_encoder_decoder",
    // generation
    "max_length", "max_new_tokens", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
];

/// Keys read for every family; each has more of its own.
#[rustfmt::skip]
pub(super) const READ: &[&str] = &[
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "bos_token_id", "eos_token_id", "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
];

/// Whether `key`, by which another family or a fork says that it differs from Llama, has the value that makes no difference.
/// `None`: not such a key. `value` is not null.
#[rustfmt::skip]
pub(super) fn neutral(key: &str, value: &Value, config: &LlamaConfig, object: &Map<String, Value>) -> Option<bool> {
    let is = |expected: f64| value.as_f64() == Some(expected);
    let all = |expected: &Value| value.as_array().is_some_and(|list| list.iter().all(|item| item == expected));
    let absent = || value == &Value::Bool(false);
    let empty = || value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty);
    Some(match key {
        // attention windows and masks
        "sliding_window" => object.get("use_sliding_window") == Some(&Value::Bool(false)),
        "layer_types" => all(&"full_attention".into()) && value.as_array().is_some_and(|list| list.len() == config.layers),
        "is_causal" | "causal" => value == &Value::Bool(true),
        "sliding_window_pattern" | "attention_chunk_size" | "window_size" | "attention_window" | "window_layers" => false,
        // scales
        "logit_scale" | "logits_scaling" | "embedding_multiplier" | "residual_multiplier" | "scale_emb" | "lm_head_multiplier"
        | "attention_out_multiplier" | "key_multiplier" | "embedding_scale" | "emb_scale" | "output_multiplier" => is(1.0),
        "attention_multiplier" | "attention_scale" | "softmax_scale" => is(1.0 / (config.head_dim as f64).sqrt()),
        "query_pre_attn_scalar" => is(config.head_dim as f64),
        "attn_logit_softcapping" | "final_logit_softcapping" | "logit_softcapping" | "clip_qkv" | "scale_depth" | "dim_model_base"
        | "mup_width_multiplier" | "mlp_multipliers" | "attn_temperature_tuning" | "scale_attn" | "scale_embedding"
        | "scale_embeddings" => absent(),
        // rotation
        "partial_rotary_factor" | "rotary_pct" | "rope_percent" | "rope_pct" | "rope_ratio" => is(1.0),
        "rotary_dim" => is(config.head_dim as f64),
        "rope_interleaved" | "interleaved_rope" | "is_neox_style" | "rope_interleave" => absent(),
        "no_rope_layers" => all(&1.into()),
        "no_rope_layer_interval" | "nope_layer_interval" | "rope_local_base_freq" | "rope_global_base_freq" | "alibi"
        | "use_alibi" => absent(),
        "use_rope" | "rope" => value == &Value::Bool(true),
        // of Qwen2.5 and R1-Distill-Qwen, for their siblings that see; of Phi-4 mini, which transformers does not read
        "use_mrope" => absent(),
        "full_attn_mod" | "interpolate_factor" => is(1.0),
        // norms, biases, shapes of blocks
        "use_qk_norm" | "qk_layernorm" | "qk_norm" | "use_qk_layernorm" | "use_post_norm" | "post_norm" | "parallel_residual"
        | "use_parallel_residual" | "parallel_attn" | "norm_after" | "layernorm_zero_centered"
        | "apply_residual_connection_post_layernorm" => absent(),
        "bias" | "use_bias" | "qkv_bias" | "use_qkv_bias" | "attention_in_bias" | "attention_out_bias" | "lm_head_bias" => absent(),
        "no_bias" => value == &Value::Bool(true),
        // Gemma's own key, and read there
        "hidden_activation" => value.as_str().and_then(activation) == Some(config.activation),
        "pruned_heads" | "block_configs" | "layers_block_type" => empty(),
        "embedding_size" => is(config.hidden as f64),
        "rms_norm_epsilon" | "norm_eps" | "norm_epsilon" | "layer_norm_eps" | "layer_norm_epsilon" => is(config.norm_eps),
        // experts, other towers
        "num_experts" | "num_local_experts" | "n_routed_experts" | "num_experts_per_tok" | "moe_num_experts" => is(0.0),
        "is_moe" | "is_encoder_decoder" | "add_cross_attention" | "cross_attention_hidden_size" | "text_config"
        | "vision_config" => absent(),
        // stored forms
        "quantization_config" | "compression_config" | "quantization" | "sparsity_config" => false,
        "use_sliding_window" => absent(),
        _ => return None,
    })
}
