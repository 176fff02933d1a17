//! A folder in Hugging Face layout as a GGUF file: metadata, and tensors by name, as llama.cpp's converter writes them.

use device::{NormKind, RopeStyle};

use super::{
    entries::{Entries, Value},
    families::{self, FAMILIES, Family, Windows},
    model_name,
    tensors::Tensors,
    vocabulary,
    writer::PlannedTensor,
};
use crate::{
    EngineError, Isq, ModelSource,
    chat_template::template_in_dir,
    model::{
        DecoderConfig, LayerConfig, ModelFiles, RopeConfig, RopeScaling,
        arch::PERMUTED,
        architectures,
        config::{DeltaLayout, FfnConfig, RecurrentConfig},
    },
};

/// Metadata and tensors of the file.
pub(super) fn contents(source: &ModelSource, files: &ModelFiles, isq: Isq) -> Result<(Entries, Vec<PlannedTensor>), EngineError> {
    let (config, weights) = (files.config(), files.weights());
    let not_converted = |why: String| EngineError::NotSupported(format!("{}: {why}", weights.path().display()));
    let name = families::name(config);
    let gguf = architectures().find(|architecture| architecture.model_types[0] == name);
    let family = FAMILIES.iter().find(|family| family.name == name);
    let (Some(prefix), Some(family)) = (gguf.map(|found| found.gguf), family) else {
        return Err(not_converted(format!(
            "a folder of the architecture {} is not made into a GGUF file; folders of {} are, and float GGUF files of any",
            config.architecture,
            FAMILIES.map(|family| family.name).join(", ")
        )));
    };
    let ModelSource::HuggingFace { path, tokenizer_json } = source else {
        return Err(not_converted(
            "only a folder with config.json, safetensors and tokenizer.json is made into a GGUF file".into(),
        ));
    };
    let mut entries = metadata(config, (prefix, family), path, isq)?;
    vocabulary::write(path, tokenizer_json.as_deref(), config.vocab_size, &mut entries)?;
    if let Some(template) = template_in_dir(path)? {
        entries.text("tokenizer.chat_template", template);
    }
    Ok((entries, Tensors::new(weights, config, isq, family)?.all()?))
}

fn metadata(
    config: &DecoderConfig,
    (prefix, family): (&str, &Family),
    path: &std::path::Path,
    isq: Isq,
) -> Result<Entries, EngineError> {
    let mut entries = Entries::default();
    entries.text("general.architecture", prefix);
    entries.text("general.type", "model");
    if let Some(name) = model_name(path) {
        entries.text("general.name", name);
    }
    let key = |name: &str| format!("{prefix}.{name}");
    let size =
        |n: usize| u32::try_from(n).map(Value::U32).map_err(|_| EngineError::Load(format!("a size of {n} in config.json")));
    let first = config.layers.first().ok_or_else(|| EngineError::Load("a model without layers".into()))?;
    let experts = config.layers.iter().enumerate().find_map(|(index, layer)| match &layer.ffn {
        FfnConfig::Experts(experts) => Some((if family.counts_widths { 0 } else { index }, experts)),
        FfnConfig::Dense(_) | FfnConfig::Nothing => None,
    });
    let dense = config.layers.iter().find(|layer| layer.ffn.num_experts() == 0).map(|layer| layer.ffn.intermediate_size());
    let width = dense.or(experts.map(|(_, experts)| experts.intermediate_size)).unwrap_or(0);
    let rope = config.ropes.first();
    if rope.is_none() && config.positions.is_none() {
        return Err(EngineError::NotSupported("a model whose heads do not rotate".into()));
    }
    for (name, n) in [
        ("block_count", config.layers.len()),
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("attention.head_count", first.attention.num_heads),
        ("attention.key_length", first.attention.head_dim),
        ("attention.value_length", first.attention.latent.map_or(first.attention.head_dim, |latent| latent.kv_rank)),
        ("vocab_size", config.vocab_size),
    ]
    .into_iter()
    .chain(rope.map(|rope| ("rope.dimension_count", rope.rotary_dim)))
    {
        entries.push(key(name), size(n)?);
    }
    let kv_heads = |layer: &LayerConfig| if layer.has_attention { layer.attention.num_kv_heads } else { 0 };
    let kv_heads = if family.counts_heads {
        Value::I32s(config.layers.iter().map(|layer| kv_heads(layer) as i32).collect())
    } else {
        size(first.attention.num_kv_heads)?
    };
    entries.push(key("attention.head_count_kv"), kv_heads);
    let width = if family.counts_widths {
        Value::I32s(config.layers.iter().map(|layer| layer.ffn.intermediate_size() as i32).collect())
    } else {
        size(width)?
    };
    entries.push(key("feed_forward_length"), width);
    if let Some(recurrent) = config.layers.iter().find_map(|layer| layer.recurrent) {
        for (name, n) in families::recurrent(&recurrent, config.hidden_size) {
            entries.push(key(name), size(n)?);
        }
    }
    let epsilon = match config.norm.kind {
        NormKind::Layer if !family.calls_norm_rms => "attention.layer_norm_epsilon",
        NormKind::Layer | NormKind::Rms => "attention.layer_norm_rms_epsilon",
    };
    entries.push(key(epsilon), Value::F32(config.norm.eps));
    if let Some(rope) = rope {
        entries.push(key("rope.freq_base"), Value::F32(rope.theta as f32));
    }
    if let Some(local) = config.ropes.get(1) {
        entries.push(key("rope.freq_base_swa"), Value::F32(local.theta as f32));
    }
    let makes_up = families::log_multiplier(&first.attention, config).is_some();
    for (name, value) in rope.map(|rope| scaling(rope, makes_up)).unwrap_or_default() {
        entries.push(key(&format!("rope.scaling.{name}")), value);
    }
    if let Some(cap) = config.final_softcap {
        entries.push(key("final_logit_softcapping"), Value::F32(cap));
    }
    let of_experts = experts.map(|(first, experts)| families::experts(first, experts)).transpose()?.unwrap_or_default();
    for (name, value) in windows(config, family)?.into_iter().chain(of_experts).chain((family.own)(config)) {
        entries.push(key(name), value);
    }
    entries.push("general.file_type", Value::U32(isq.file_type()));
    entries.push("general.quantization_version", Value::U32(2));
    Ok(entries)
}

/// How far layers see, and which of them do not see all.
fn windows(config: &DecoderConfig, family: &Family) -> Result<Vec<(&'static str, Value)>, EngineError> {
    let key = "attention.sliding_window";
    let windows: Vec<_> = config.layers.iter().map(|layer| layer.attention.window).collect();
    let Some(window) = windows.iter().flatten().next() else {
        // Without the key, the reader of some assumes that of the first files.
        return Ok(if family.windows == Windows::Always { vec![(key, Value::U32(0))] } else { Vec::new() });
    };
    let size = u32::try_from(*window).map_err(|_| EngineError::Load(format!("a window of {window} tokens in config.json")))?;
    let mut entries = vec![(key, Value::U32(size))];
    let full = windows.iter().position(Option::is_none);
    match (family.windows, full) {
        (Windows::Flags, _) => {
            let flags = windows.iter().map(Option::is_some).collect();
            entries.push(("attention.sliding_window_pattern", Value::Bools(flags)));
        }
        (Windows::Period(usual), Some(full)) if full as u32 + 1 != usual => {
            entries.push(("attention.sliding_window_pattern", Value::U32(full as u32 + 1)));
        }
        (Windows::Implied, None) => {
            let name = family.name;
            tracing::warn!("attention sees {window} tokens back in all layers; llama.cpp would let {name} see all of them");
        }
        _ => {}
    }
    Ok(entries)
}

/// How a rotation is stretched, but for factors, which are tensors; whether the scale of scores makes up for its factor.
fn scaling(rope: &RopeConfig, makes_up: bool) -> Vec<(&'static str, Value)> {
    let original = |n: usize| ("original_context_length", Value::U32(u32::try_from(n).unwrap_or(u32::MAX)));
    match &rope.scaling {
        RopeScaling::None
        | RopeScaling::Backwards
        | RopeScaling::Llama3 { .. }
        | RopeScaling::Factors(_)
        | RopeScaling::Partial(_) => Vec::new(),
        RopeScaling::Linear(factor) => vec![("type", Value::Text("linear".into())), ("factor", Value::F32(*factor as f32))],
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_positions, attention_factor, .. } => {
            // Readers multiply by this one besides.
            let usual = if *factor > 1.0 && !makes_up { 0.1 * factor.ln() + 1.0 } else { 1.0 };
            vec![
                ("type", Value::Text("yarn".into())),
                ("factor", Value::F32(*factor as f32)),
                original(*original_max_positions),
                ("yarn_beta_fast", Value::F32(*beta_fast as f32)),
                ("yarn_beta_slow", Value::F32(*beta_slow as f32)),
                ("attn_factor", Value::F32((f64::from(*attention_factor) / usual) as f32)),
            ]
        }
        RopeScaling::LongRope { original_max_positions, attention_factor, .. } => {
            vec![original(*original_max_positions), ("attn_factor", Value::F32(*attention_factor))]
        }
    }
}

/// That a reader of the file gets the model of the source: what GGUF metadata cannot say would be lost.
pub(super) fn check(source: &DecoderConfig, file: &DecoderConfig, output: &std::path::Path) -> Result<(), EngineError> {
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-5 * a.abs().max(b.abs());
    let near32 = |a: f32, b: f32| near(a.into(), b.into());
    let near_option = |a: Option<f32>, b: Option<f32>| a.unwrap_or(0.0) == b.unwrap_or(0.0);
    let same_rope = |a: &RopeConfig, b: &RopeConfig| {
        let tables = a.num_tables().max(b.num_tables());
        let far = source.max_position_embeddings;
        a.rotary_dim == b.rotary_dim
            && a.axes == b.axes
            && near32(a.attention_factor(), b.attention_factor())
            && [1, 64, far / 2, far].iter().all(|len| a.table(*len) == b.table(*len))
            && (0..tables).all(|table| a.frequencies(table).iter().zip(b.frequencies(table)).all(|(a, b)| near32(*a, b)))
    };
    let layers = |config: &DecoderConfig| {
        let mut layers = config.layers.clone();
        for layer in &mut layers {
            // Whether there are biases is seen from the tensors.
            (layer.attention.qkv_bias, layer.attention.output_bias) = (false, false);
            layer.ffn.set_dense(|dense| dense.bias = false);
            // Compared by themselves, or another one in files, whose tensors lie so.
            (layer.attention.scale, layer.attention.qkv_groups) = (1.0, 1);
            if let Some(RecurrentConfig::GatedDelta { layout, .. }) = &mut layer.recurrent {
                *layout = DeltaLayout::Apart;
            }
        }
        layers
    };
    let scales = |config: &DecoderConfig| config.layers.iter().map(|layer| layer.attention.scale).collect::<Vec<_>>();
    let is_permuted = PERMUTED.contains(&source.architecture);
    let style = |rope: &RopeConfig| if is_permuted { RopeStyle::Interleaved } else { rope.style };
    let differs = [
        ("the sizes", (source.hidden_size, source.vocab_size) != (file.hidden_size, file.vocab_size)),
        ("the context length", source.max_position_embeddings != file.max_position_embeddings),
        ("the norms", source.norm.kind != file.norm.kind || !near32(source.norm.eps, file.norm.eps)),
        ("the layers", layers(source) != layers(file)),
        ("the scale of scores", !scales(source).into_iter().zip(scales(file)).all(|(a, b)| near32(a, b))),
        ("the scale of embeddings", !near32(source.embedding_scale, file.embedding_scale)),
        ("the scale of logits", !near32(source.logit_scale, file.logit_scale)),
        ("the softcap of logits", !near_option(source.final_softcap, file.final_softcap)),
        ("the tied embeddings", source.tie_word_embeddings != file.tie_word_embeddings),
        ("the vectors of positions", source.positions != file.positions),
        ("the number of rotations", source.ropes.len() != file.ropes.len()),
        ("the pairs that rotate", !source.ropes.iter().zip(&file.ropes).all(|(a, b)| style(a) == b.style)),
        ("the rotation", !source.ropes.iter().zip(&file.ropes).all(|(a, b)| same_rope(a, b))),
    ];
    match differs.into_iter().find(|(_, differs)| *differs) {
        None => Ok(()),
        Some((what, _)) => Err(EngineError::NotSupported(format!(
            "{}: {what} of this {} cannot be said in the metadata of a GGUF file",
            output.display(),
            source.architecture
        ))),
    }
}
