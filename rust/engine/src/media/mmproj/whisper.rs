//! Encoders of sounds that are Whisper's: Voxtral, Qwen2-Audio, Audio Flamingo 3.

use serde_json::{Map, json};

use super::{Reader, SoundKind, TOWER, positive, rename, set};
use crate::{
    EngineError,
    media::config::{Body, Frames, MediaConfig, MediaProcessor, Places, TowerNames},
    model::fields::{Fields, HfFields},
};

pub(super) const VOXTRAL: SoundKind = SoundKind {
    name: "voxtral",
    tokens: &["[AUDIO]"],
    read: |reader, token| {
        reader.check_run()?;
        whisper(reader, token, "voxtral", &[("linear_1", "mm.a.mlp.1"), ("linear_2", "mm.a.mlp.2")])
    },
};

pub(super) const QWEN2_AUDIO: SoundKind = SoundKind {
    name: "qwen2a",
    tokens: &["<|AUDIO|>"],
    read: |reader, token| {
        let names = [("multi_modal_projector.linear", "mm.a.fc"), POST_NORM];
        reader.check_no_run()?;
        whisper(reader, token, "qwen2_audio", &names)
    },
};

pub(super) const AUDIO_FLAMINGO: SoundKind = SoundKind {
    name: "musicflamingo",
    tokens: &["<sound>"],
    read: |reader, token| {
        let (first, second) = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2");
        reader.check_no_run()?;
        whisper(reader, token, "audioflamingo3", &[(first, "mm.a.mlp.1"), (second, "mm.a.mlp.2"), POST_NORM])
    },
};

/// The norm behind means of two states, which is the tower's where there are no means.
const POST_NORM: (&str, &str) = ("audio_tower.layer_norm", "a.post_ln");

const NAMES: TowerNames = TowerNames { patch: "", class: "", pre_norm: "", gate: "", ..TOWER };

pub(super) const PLACES: Places = Places { tower: &["a."], projector: &[""], newline: &[] };

const POSITIONS: &str = "a.position_embd.weight";
/// Positions of a second: Whisper has a hundred frames of one, of which two become a position.
const RATE: usize = 50;
const STACK: &str = "projector.stack_factor";

impl Reader<'_> {
    /// That as many states become a vector as are as wide as a feed-forward network.
    fn check_run(&self) -> Result<(), EngineError> {
        let run = positive(&self.audio, "feed_forward_length")? / positive(&self.audio, "embedding_length")?;
        match self.audio.size(STACK)? {
            Some(given) if given != run => {
                Err(self.audio.error(STACK, format!("is {given}; implemented beside the other sizes: {run}")))
            }
            _ => Ok(()),
        }
    }

    fn check_no_run(&self) -> Result<(), EngineError> {
        match self.audio.size(STACK)? {
            Some(given) => Err(self.audio.error(STACK, format!("is {given}, and this projector makes means of states"))),
            None => Ok(()),
        }
    }
}

fn whisper(
    reader: &Reader<'_>,
    token: usize,
    model_type: &str,
    names: &[(&str, &'static str)],
) -> Result<MediaConfig, EngineError> {
    let audio = &reader.audio;
    if reader.metadata.bool("clip.use_silu") == Some(true) {
        return Err(reader.error("`clip.use_silu` is true; implemented for these sounds: GELU"));
    }
    let (hidden, bins) = (positive(audio, "embedding_length")?, positive(audio, "num_mel_bins")?);
    let [len, columns] = reader.shape(POSITIONS)?;
    if columns != hidden || len == 0 || !len.is_multiple_of(RATE) {
        let why =
            format!("tensor `{POSITIONS}` has shape [{len}, {columns}]; it must have {RATE} rows of {hidden} values a second");
        return Err(reader.error(&why));
    }
    let mut features = Map::new();
    let extractor = "WhisperFeatureExtractor";
    set(&mut features, json!({ "feature_extractor_type": extractor, "feature_size": bins, "chunk_length": len / RATE }));
    let processor = audio::Processor::from_json(reader.what, &features).map_err(|why| EngineError::Load(why.to_string()))?;
    let mut whole = Map::new();
    let tower = json!({
        "hidden_size": hidden, "intermediate_size": positive(audio, "feed_forward_length")?,
        "num_hidden_layers": positive(audio, "block_count")?, "num_attention_heads": positive(audio, "attention.head_count")?,
        "num_mel_bins": bins, "max_source_positions": len,
    });
    set(&mut whole, json!({ "model_type": model_type, "audio_token_id": token, "audio_config": tower }));
    let fields = HfFields::new(reader.what, whole);
    let mut config = MediaConfig::read(&fields, reader.decoder, MediaProcessor::Sounds(processor))?;
    let eps = reader.sound_eps()?;
    if let Body::Tower(tower) = &mut config.body {
        tower.eps = eps;
        tower.names = NAMES;
        tower.frames = Some(Frames { num_mel_bins: bins, names: ["conv1d.1", "conv1d.2"] });
    }
    if let Some(norm) = &mut config.projector.late_norm {
        norm.eps = eps;
    }
    rename(&mut config.projector, names);
    Ok(MediaConfig { places: PLACES, ..config })
}
