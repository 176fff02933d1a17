//! That what files say of an encoder makes sense.

use serde_json::json;

use super::{Reader, VISION, mllama::MAX_TILES};
use crate::{
    EngineError,
    keys::{self, Off},
    media::{
        config::{Body, ConformerConfig, ConformerStyle, MediaConfig, Positions, Regroup, Tiled, TowerConfig},
        tower::MAX_ROWS,
    },
    model::{
        config::{DecoderConfig, MAX_LAYERS, MAX_SIZE},
        fields::Fields,
    },
};

impl MediaConfig {
    /// That every value that memory or a kernel depends on is within bounds; else what is not.
    pub(super) fn check(&self, decoder: &DecoderConfig) -> Result<(), String> {
        match &self.body {
            Body::Tower(tower) => self.check_tower(tower, decoder),
            Body::Conformer(conformer) => check_conformer(conformer),
            Body::Speech(speech) => speech.check(),
            // What it is made of was checked block by block.
            Body::Mobile(_) => Ok(()),
        }
    }

    fn check_tower(&self, tower: &TowerConfig, decoder: &DecoderConfig) -> Result<(), String> {
        let TowerConfig { hidden_size, num_heads, intermediate_size, num_layers, patch_size, num_frames, .. } = *tower;
        let sizes = [
            ("a width", hidden_size, MAX_SIZE),
            ("a number of heads", num_heads, 4096),
            ("a feed-forward size", intermediate_size, MAX_SIZE),
            ("a number of layers", num_layers, MAX_LAYERS),
            ("a patch size", patch_size, 1024),
            ("a temporal patch size", num_frames, 16),
        ];
        check_sizes(&sizes)?;
        let deep: Vec<_> = self.deep.iter().map(|deep| deep.layer).collect();
        let is_behind = |layers: &[usize]| layers[0] < layers[1];
        if !deep.windows(2).all(is_behind)
            || deep.last().is_some_and(|last| *last >= num_layers)
            || deep.len() > decoder.layers.len()
        {
            return Err(format!(
                "takes states behind the layers {deep:?} of {num_layers}, for a decoder of {}",
                decoder.layers.len()
            ));
        }
        if let Some(tiled) = &tower.tiled {
            let Tiled { max_tiles, num_global_layers, taken } = tiled;
            if !(1..=MAX_TILES).contains(max_tiles) || *num_global_layers > MAX_LAYERS {
                return Err(format!(
                    "has {num_global_layers} layers over {max_tiles} tiles; there may be {MAX_LAYERS} over 1 to {MAX_TILES}"
                ));
            }
            if taken.len() > num_layers || taken.iter().any(|layer| *layer >= num_layers) {
                return Err(format!("takes states behind the layers {taken:?}, which are counted from 0, of {num_layers}"));
            }
        }
        if !hidden_size.is_multiple_of(num_heads) {
            return Err(format!("has a width of {hidden_size}, not a multiple of {num_heads} heads"));
        }
        if let Some(kv_heads) = tower.num_kv_heads
            && (kv_heads == 0 || !num_heads.is_multiple_of(kv_heads))
        {
            return Err(format!("has {num_heads} heads of queries, not a multiple of {kv_heads} heads of keys and values"));
        }
        let head_dim = hidden_size / num_heads;
        match tower.positions {
            Positions::Rotary { theta, .. }
            | Positions::Interpolated { theta, .. }
            | Positions::Cubic { theta, .. }
            | Positions::Turned { theta, .. }
            | Positions::Axes { theta, .. }
                if !head_dim.is_multiple_of(4) || !theta.is_finite() || theta <= 0.0 =>
            {
                return Err(format!("has heads of {head_dim} elements, which do not rotate by rows and columns"));
            }
            Positions::Learned { side }
            | Positions::Fractions { side }
            | Positions::Resized { side }
            | Positions::Interpolated { side, .. }
            | Positions::Cubic { side, .. }
            | Positions::Turned { side, .. }
                if !(1..=4096).contains(&side) =>
            {
                return Err(format!("has tiles of {side} patches a side; it must be from 1 to 4096"));
            }
            Positions::Line { len } | Positions::Turns { len, .. } if !(1..=MAX_ROWS).contains(&len) => {
                return Err(format!("has {len} positions of a chunk; they must be from 1 to {MAX_ROWS}"));
            }
            Positions::Turns { rotary_dim, theta, .. }
                if rotary_dim > head_dim
                    || !rotary_dim.is_multiple_of(2)
                    || rotary_dim == 0
                    || !(theta > 0.0 && theta.is_finite()) =>
            {
                return Err(format!("has heads of {head_dim} elements, of which {rotary_dim} do not rotate"));
            }
            Positions::Axes { side, .. } if !(1..=1 << 16).contains(&side) => {
                return Err(format!("has positions of {side} patches a side; it must be from 1 to 65536"));
            }
            _ => {}
        }
        let side = match self.projector.regroup {
            Regroup::Each => 1,
            Regroup::Runs(side)
            | Regroup::Squares(side)
            | Regroup::Interleaved(side)
            | Regroup::Means(side)
            | Regroup::MeansOf(side)
            | Regroup::MeansOfRuns(side) => side,
        };
        if !(1..=64).contains(&side) {
            return Err(format!("puts {side} patches a side together; it must be from 1 to 64"));
        }
        if let (Positions::Learned { side }, Regroup::Means(num)) = (&tower.positions, self.projector.regroup)
            && num > *side
        {
            return Err(format!("makes {num} means along {side} patches"));
        }
        Ok(())
    }
}

fn check_sizes(sizes: &[(&str, usize, usize)]) -> Result<(), String> {
    match sizes.iter().find(|(_, value, most)| !(1..=*most).contains(value)) {
        Some((name, value, most)) => Err(format!("has {name} of {value}; it must be from 1 to {most}")),
        None => Ok(()),
    }
}

fn check_conformer(conformer: &ConformerConfig) -> Result<(), String> {
    let ConformerConfig { hidden_size, num_heads, channels, .. } = *conformer;
    check_sizes(&[
        ("a width", hidden_size, MAX_SIZE / 4),
        ("a number of heads", num_heads, 4096),
        ("a number of layers", conformer.num_layers, MAX_LAYERS),
        ("a first number of channels", channels[0], 4096),
        ("a second number of channels", channels[1], 4096),
        ("a width of convolutions", conformer.kernel_size, 1024),
        ("an attention chunk", conformer.chunk_size, 1024),
        ("a reach to the left", conformer.left, 1024),
        ("an output width", conformer.out_features, MAX_SIZE),
    ])?;
    if conformer.right > 1024 {
        return Err(format!("has a reach to the right of {}; it must be from 0 to 1024", conformer.right));
    }
    if let ConformerStyle::Gemma3n { reduction } = conformer.style {
        check_sizes(&[("a reduction", reduction, 1024)])?;
    }
    if !hidden_size.is_multiple_of(num_heads) || !hidden_size.is_multiple_of(2) {
        return Err(format!("has a width of {hidden_size}, not a multiple of 2 and of {num_heads} heads"));
    }
    // Scores are divided by theirs; there may be as good as none of states.
    let positive = [conformer.score_cap, conformer.state_cap, conformer.eps, conformer.stem_eps];
    if !positive.iter().all(|value| *value > 0.0) || !conformer.score_cap.is_finite() || !conformer.ffn_scale.is_finite() {
        return Err("has bounds, a scale or an epsilon that are no positive numbers".into());
    }
    Ok(())
}

impl Reader<'_, '_> {
    /// That nothing else is asked for: what nobody has read of the encoder's part of the file says nothing, and what nobody has
    /// read of the whole would not change the results. `idle`: keys of that part without effect.
    pub(super) fn check_rest(&self, idle: &[&str]) -> Result<(), EngineError> {
        let channels = ["in_channels", "in_chans", "num_channels"].map(|key| (key, json!(3)));
        self.encoder.only(&channels)?;
        if let Some(rope) = self.encoder.child("rope_parameters")? {
            let kind = rope.text("rope_type")?.unwrap_or_else(|| "axial".into());
            if !["axial", "default"].contains(&&kind[..]) {
                return Err(rope.error("rope_type", format!("is `{kind}`; implemented: axial, default")));
            }
            rope.only(&[("partial_rotary_factor", json!(1.0))])?;
            if let Some(key) = rope.object.keys().find(|key| !ROPE.contains(&&key[..])) {
                return Err(rope.error(key, "is not supported; leave it out"));
            }
        }
        for key in idle {
            self.encoder.value(key);
        }
        for key in OF_WHOLE {
            self.whole.value(key);
        }
        let says = |key: &&str| self.encoder.object.get(*key).is_some_and(|value| !Off::Empty.is_off(value));
        let prefix = format!("{VISION}.");
        let unknown = self.encoder.unknown_keys()?;
        if let Some(key) = unknown.iter().filter_map(|key| key.strip_prefix(&prefix)).find(says) {
            let shown: String = self.encoder.object[key].to_string().chars().take(80).collect();
            return Err(self.encoder.error(key, format!("is {shown}, which is not supported; leave it out")));
        }
        keys::warn_of(&self.whole.unknown_keys()?, self.whole.what);
        Ok(())
    }
}

/// What the rotation of an encoder may say.
const ROPE: [&str; 3] = ["rope_type", "rope_theta", "partial_rotary_factor"];

/// Keys of a whole model that are read elsewhere, or that the chat template and the tokenizer stand for.
const OF_WHOLE: [&str; 8] = [
    "text_config",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
    "image_start_token_id",
    "image_end_token_id",
    "video_start_token_id",
    "video_end_token_id",
];
