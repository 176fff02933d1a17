//! Adapters as llama.cpp's converter writes them: GGUF files with `<tensor>.lora_a` and `<tensor>.lora_b`.

use std::path::Path;

use device::{EmbeddingProduct, mmap::Bytes};

use super::{
    builder::{AdapterBuilder, Floats, Product, invalid},
    sites::SitePart,
};
use crate::{
    EngineError,
    weights::{GgufFiles, MetadataValue, Role, WeightId, floats as decode},
};

/// Opens an adapter's file, whose bytes are these.
pub(super) fn open(path: &Path, bytes: &Bytes) -> Result<GgufFiles, EngineError> {
    let files = GgufFiles::of_bytes(path, bytes)?;
    let text = |key| files.metadata().str(key).unwrap_or_default().to_owned();
    if text("general.type") != "adapter" || text("adapter.type") != "lora" {
        return Err(invalid(format!(
            "{}: `general.type` is {:?} and `adapter.type` {:?}; an adapter's are \"adapter\" and \"lora\"",
            path.display(),
            text("general.type"),
            text("adapter.type")
        )));
    }
    for key in ["split.count", "adapter.alora.invocation_tokens"] {
        if files.metadata().get(key).is_some() {
            return Err(invalid(format!("`{key}` is there, which is not supported")));
        }
    }
    Ok(files)
}

/// Values of all its tensors.
pub(super) fn num_values(path: &Path) -> Result<u64, EngineError> {
    let files = open(path, &Bytes::map_file(path)?)?;
    let of = |name| files.tensor(name).map(|(view, _)| (view.rows as u64).saturating_mul(view.cols as u64));
    files.names().map(of).sum()
}

/// Puts an adapter together.
pub(super) fn build<'a>(mut builder: AdapterBuilder<'a>, files: &GgufFiles) -> Result<AdapterBuilder<'a>, EngineError> {
    if !builder.sites.is_gguf {
        return Err(invalid("an adapter in a GGUF file goes with a model in one: its rows are in that order".into()));
    }
    let base = builder.sites.gguf_architecture();
    let architecture = files.metadata().str("general.architecture").unwrap_or_default();
    if base != Some(architecture) {
        let base = base.unwrap_or_default();
        return Err(invalid(format!("`general.architecture` is {architecture:?}, and that of the model {base:?}")));
    }
    let alpha = match files.metadata().get("adapter.lora.alpha") {
        Some(MetadataValue::Float(alpha)) if alpha.is_finite() => *alpha as f32,
        other => return Err(invalid(format!("`adapter.lora.alpha` is {other:?}, and must be a number"))),
    };
    let known = builder.sites.gguf();
    let embedding = WeightId::global(Role::Embedding).gguf();
    let mut names: Vec<_> = files.names().map(str::to_owned).collect();
    names.sort_unstable();
    for name in &names {
        let Some(tensor) = name.strip_suffix(".lora_a") else {
            let has_other = name.strip_suffix(".lora_b").is_some_and(|tensor| files.contains(&format!("{tensor}.lora_a")));
            if has_other {
                continue;
            }
            return Err(invalid(format!("tensor `{name}` is none of a product of low rank")));
        };
        let [a, b] = [floats(files, name)?, floats(files, &format!("{tensor}.lora_b"))?];
        let num_stacked = if a.shape.len() == 3 { a.shape[0] } else { 1 };
        if a.shape.len() != b.shape.len() || (num_stacked != 1 && b.shape[0] != num_stacked) {
            return Err(invalid(format!("`{tensor}` has factors of shapes {:?} and {:?}", a.shape, b.shape)));
        }
        let rank = b.shape.last().copied().unwrap_or(0);
        let scale = if alpha == 0.0 { 1.0 } else { alpha / rank as f32 };
        if tensor == embedding {
            add_embedding(&mut builder, tensor, &a, &b, scale)?;
            if !builder.sites.config.tie_word_embeddings {
                continue;
            }
            return Err(invalid(format!("`{tensor}` of a model whose logits come of the same weights is not supported")));
        }
        let Some(parts) = known.get(tensor) else {
            return Err(invalid(format!(
                "it changes `{tensor}`, which is no linear layer of this model that adapters may change"
            )));
        };
        for part in parts {
            let expert = builder.sites.list[part.site].matrix.expert;
            let index = expert.map_or(0, |expert| expert.index);
            if expert.map_or(1, |expert| expert.count) != num_stacked {
                return Err(invalid(format!("`{tensor}` is of {num_stacked} experts, and the model has others")));
            }
            let [a, b] = [&a, &b].map(|floats| stacked(floats, index, num_stacked));
            let parts: &[SitePart] = std::slice::from_ref(part);
            let (b_bias, magnitude) = (None, None);
            builder.product(parts, &Product { name: tensor, a: &a, b: &b, b_bias, magnitude, scale, is_hugging_face: false })?;
        }
    }
    Ok(builder)
}

fn floats(files: &GgufFiles, name: &str) -> Result<Floats, EngineError> {
    let (view, shape) = files.tensor(name)?;
    let values = decode(view.dtype, view.bytes())
        .ok_or_else(|| invalid(format!("tensor `{name}` has type {}; F32, F16 and BF16 are taken", view.dtype)))?;
    let floats = Floats { shape, values };
    if floats.are_finite() { Ok(floats) } else { Err(invalid(format!("tensor `{name}` has values that are no numbers"))) }
}

/// One of several matrices.
fn stacked(floats: &Floats, index: usize, count: usize) -> Floats {
    if count == 1 {
        return floats.clone();
    }
    let len = floats.values.len() / count;
    Floats { shape: floats.shape[1..].to_vec(), values: floats.values[index * len..(index + 1) * len].to_vec() }
}

/// Of the token embedding the first factor has a row a token.
fn add_embedding(builder: &mut AdapterBuilder<'_>, name: &str, a: &Floats, b: &Floats, scale: f32) -> Result<(), EngineError> {
    let (vocab_size, hidden) = (builder.sites.config.vocab_size, builder.sites.config.hidden_size);
    let ([tokens, rank], [rows, b_rank]) = (a.matrix(name)?, b.matrix(name)?);
    builder.check_rank(name, rank)?;
    if (tokens, rows, b_rank) != (vocab_size, hidden, rank) {
        return Err(invalid(format!("`{name}` has factors of shapes {:?} and {:?}", a.shape, b.shape)));
    }
    let of_hidden = (0..rank).flat_map(|k| (0..hidden).map(move |row| b.values[row * rank + k] * scale)).collect();
    builder.embedding().low_rank = Some(EmbeddingProduct { rank, a: a.values.clone(), b: of_hidden });
    Ok(())
}
