//! Models that hear from two GGUF files, one of them an encoder's (`mmproj`), against the same models as folders.

use std::{path::Path, sync::Arc};

use engine::{
    Engine, EngineConfig, GenerationRequest, Media, MediaKind, MediaOptions, Message, MessageContent, ModelSource,
    SamplingParams,
    audio::Sound,
    images::{self, RgbImage},
};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{
    self, drawn,
    gguf_writer::{Gguf, STRING, U32, string, with_size, without},
    media,
    mmproj::Checkpoint,
    mmproj_sounds::without_keys,
    serving::greedy,
};

/// Those whose weights a file has as they are.
const WHISPERS: [&str; 3] = ["voxtral", "qwen2_audio", "audioflamingo3"];

fn folder(path: &Path) -> Engine {
    let source = ModelSource::HuggingFace { path: path.to_owned(), tokenizer_json: None };
    Engine::load(&source, &media::config(), &|_| {}).unwrap()
}

fn config(mmproj: &Path, max_edge: Option<usize>) -> EngineConfig {
    let options = MediaOptions { mmproj: Some(mmproj.to_owned()), max_edge, ..MediaOptions::default() };
    EngineConfig { media: Some(options), ..media::config() }
}

/// Writes both files and loads them.
fn pair_with(language: &Gguf, encoder: &Gguf, max_edge: Option<usize>) -> Result<Engine, String> {
    let temp = tempfile::tempdir().unwrap();
    let (model, mmproj) = (temp.path().join("model.gguf"), temp.path().join("mmproj.gguf"));
    language.write(&model);
    encoder.write(&mmproj);
    let source = ModelSource::Gguf { files: vec![model], tokenizer_dir: None, tokenizer_json: None };
    Engine::load(&source, &config(&mmproj, max_edge), &|_| {}).map_err(|error| error.to_string())
}

fn pair(language: &Gguf, encoder: &Gguf) -> Result<Engine, String> {
    pair_with(language, encoder, None)
}

fn cases(folder: &Path) -> Vec<Value> {
    let golden: Value = serde_json::from_slice(&std::fs::read(folder.join("golden.json")).unwrap()).unwrap();
    golden["cases"].as_array().unwrap().clone()
}

fn image() -> Arc<RgbImage> {
    let file = std::fs::read(common::golden_dir().join("vision/qwen3_vl/image0.png")).unwrap();
    Arc::new(images::decode(&file, &images::Limits::default()).unwrap())
}

fn request(case: &Value) -> GenerationRequest {
    let sound = |drawn: &Value| {
        let samples = drawn::sound(drawn["name"].as_str().unwrap(), drawn["len"].as_u64().unwrap() as usize);
        Media::Sound(Arc::new(Sound::new(16_000, samples).unwrap()))
    };
    let mut sounds = case["sounds"].as_array().unwrap().iter().map(sound);
    let message = |message: &Value| {
        let parts = message["content"].as_array().unwrap().clone();
        let media_of = |part: &Value| match part["type"].as_str() {
            Some("audio") => sounds.next(),
            Some("image") => Some(image().into()),
            _ => None,
        };
        let media = parts.iter().filter_map(media_of).collect();
        Message { media, ..Message::new(message["role"].as_str().unwrap(), MessageContent::Parts(parts)) }
    };
    let messages = case["messages"].as_array().unwrap().iter().map(message).collect();
    let sampling = SamplingParams { logprobs: Some(20), ..greedy(case["greedy_ids"].as_array().unwrap().len()) };
    GenerationRequest { return_token_ids: true, ..GenerationRequest::chat(messages, sampling) }
}

#[test]
fn a_pair_of_files_hears_what_the_folder_does_to_the_bit() {
    for name in WHISPERS {
        let dir = drawn::hearing(name);
        let checkpoint = Checkpoint::open(&dir);
        let pair = pair(&checkpoint.language(true), &checkpoint.hearing()).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(pair.media_kinds(), [MediaKind::Sound], "{name}");
        let folder = folder(&dir);
        for (number, case) in cases(&dir).iter().enumerate() {
            let ((prompt, answer), (same, expected)) = (media::run(&pair, request(case)), media::run(&folder, request(case)));
            assert_eq!(prompt, same, "{name}, case {number}: tokens of the prompt");
            assert_eq!(media::bits(&answer), media::bits(&expected), "{name}, case {number}");
        }
    }
}

/// A copy of Gemma 4's folder without what a file does not say.
fn gemma4_as_said() -> TempDir {
    let dir = drawn::hearing("gemma4");
    let copy = media::edited(&dir, "config.json", "", "");
    let edit = |file: &str, part: &[&str], keys: &[&str]| {
        let path = copy.path().join(file);
        let text = without_keys(&std::fs::read_to_string(&path).unwrap(), part, keys);
        std::fs::write(&path, text).unwrap();
    };
    let unsaid = ["attention_chunk_size", "attention_context_left", "attention_context_right", "attention_logit_cap"];
    edit("config.json", &["audio_config"], &unsaid);
    // The row that stands for those of images is the first, as of all models that there are.
    edit("config.json", &["text_config"], &["use_bidirectional_attention", "pad_token_id"]);
    edit("processor_config.json", &["image_processor"], &["max_soft_tokens"]);
    copy
}

#[test]
fn one_file_with_two_encoders_sees_and_hears() {
    let copy = gemma4_as_said();
    let checkpoint = Checkpoint::open(&drawn::hearing("gemma4"));
    let pair = pair(&checkpoint.language(true), &checkpoint.hearing()).unwrap();
    assert_eq!(pair.media_kinds(), [MediaKind::Image, MediaKind::Sound]);
    let folder = folder(copy.path());
    let cases = cases(copy.path());
    let has = |kind: &str| cases.iter().any(|case| case["messages"].to_string().contains(kind));
    assert!(has(r#""type":"audio""#) && has(r#""type":"image""#));
    for (number, case) in cases.iter().enumerate() {
        let ((prompt, answer), (same, expected)) = (media::run(&pair, request(case)), media::run(&folder, request(case)));
        assert_eq!(prompt, same, "case {number}: tokens of the prompt");
        assert_eq!(answer.choices[0].token_ids, expected.choices[0].token_ids, "case {number}: the answer");
        // The file has factors that have been through softplus, in 32 bits.
        let tops = |completion: &engine::Completion| {
            let tokens = completion.choices[0].logprobs.clone().unwrap();
            tokens.into_iter().flat_map(|token| token.top_logprobs).collect::<Vec<_>>()
        };
        for (found, expected) in tops(&answer).iter().zip(tops(&expected)) {
            assert!((found.logprob - expected.logprob).abs() < 1e-4, "case {number}: {found:?}, {expected:?}");
        }
    }
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let fails = |name: &str, change: &dyn Fn(Gguf) -> Gguf, part: &str| {
        let checkpoint = Checkpoint::open(&drawn::hearing(name));
        let Err(error) = pair(&checkpoint.language(true), &change(checkpoint.hearing())) else { panic!("{part}") };
        assert!(error.contains(part), "{name}: {error}");
        assert!(error.contains("mmproj.gguf"), "{name}: {error}");
    };
    let text = |gguf: Gguf, key: &str, name: &str| without(gguf, key).entry(key, STRING, &string(name));
    let kind = |gguf: Gguf, name: &str| text(gguf, "clip.projector_type", name);
    let row = |gguf: Gguf, name: &str| gguf.weight(name, &[8], 0, &[0; 32]);
    let flag = |gguf: Gguf, key: &str, value: u8| gguf.entry(key, 7, &[value]);
    let size = |gguf: Gguf, key: &str, size: u32| gguf.entry(key, U32, &size.to_le_bytes());
    fails(
        "voxtral",
        &|gguf| kind(gguf, "glma"),
        "`clip.projector_type` is `glma`, which is not computed; voxtral, qwen2a, musicf",
    );
    fails("voxtral", &|gguf| kind(gguf, "ultravox"), "is `ultravox`, which is not computed");
    fails("voxtral", &|gguf| kind(gguf, "mlp"), "is `mlp`, which is not computed; voxtral");
    fails("voxtral", &|gguf| with_size(gguf, "clip.audio.projector.stack_factor", 4), "`clip.audio.projector.stack_factor` is 4");
    fails("qwen2_audio", &|gguf| size(gguf, "clip.audio.projector.stack_factor", 2), "and this projector makes means");
    fails("voxtral", &|gguf| size(gguf, "clip.audio.chunk_size", 2), "`clip.audio.chunk_size` asks for what is not computed");
    fails("voxtral", &|gguf| with_size(gguf, "clip.audio.num_mel_bins", 0), "`clip.audio.num_mel_bins` is 0");
    fails("voxtral", &|gguf| with_size(gguf, "clip.audio.num_mel_bins", 17), "tensor `a.conv1d.1.weight` has shape");
    fails("voxtral", &|gguf| with_size(gguf, "clip.audio.embedding_length", 16), "is 5; implemented beside the other sizes: 10");
    fails("qwen2_audio", &|gguf| with_size(gguf, "clip.audio.embedding_length", 16), "tensor `a.position_embd.weight` has shape");
    fails("voxtral", &|gguf| with_size(gguf, "clip.audio.block_count", 3), "tensor `a.blk.2.attn_q.weight` is missing");
    fails(
        "voxtral",
        &|gguf| with_size(gguf, "clip.audio.block_count", 1),
        "tensor `a.blk.1.attn_k.weight` is of a kind of encoder",
    );
    fails("voxtral", &|gguf| with_size(gguf, "clip.audio.attention.head_count", 5), "not a multiple of 5 heads");
    fails("voxtral", &|gguf| without(gguf, "clip.audio.attention.layer_norm_epsilon"), "layer_norm_epsilon` is missing");
    fails("voxtral", &|gguf| flag(gguf, "clip.use_silu", 1), "`clip.use_silu` is true");
    fails("voxtral", &|gguf| row(gguf, "mm.a.norm_pre.weight"), "tensor `mm.a.norm_pre.weight` is of a kind of encoder");
    fails("voxtral", &|gguf| row(gguf, "v.post_ln.weight"), "and `clip.has_vision_encoder` does not say that there is one");
    fails(
        "voxtral",
        &|gguf| flag(gguf, "clip.has_vision_encoder", 1),
        "`clip.projector_type` is `voxtral`, which is not computed; mlp",
    );
    fails(
        "gemma4",
        &|gguf| without(gguf, "clip.has_audio_encoder"),
        "and `clip.has_audio_encoder` does not say that there is one",
    );
    fails("gemma4", &|gguf| text(gguf, "clip.audio.projector_type", "gemma3na"), "`clip.audio.projector_type` is `gemma3na`");
    fails("gemma4", &|gguf| row(gguf, "a.blk.0.per_dim_k_scale.weight"), "tensor `a.blk.0.per_dim_k_scale.weight` is of a kind");
    fails("gemma4", &|gguf| row(gguf, "v.blk.0.out_scale.weight"), "tensor `v.blk.0.out_scale.weight` is of a kind");
    fails("gemma4", &|gguf| with_size(gguf, "clip.audio.feed_forward_length", 9), "`clip.audio.feed_forward_length` is 9");
    fails("gemma4", &|gguf| with_size(gguf, "clip.audio.embedding_length", 0), "`clip.audio.embedding_length` is 0");
}

#[test]
fn a_file_goes_with_its_language_model_and_arguments_about_images_with_images() {
    let [voxtral, qwen] = ["voxtral", "qwen2_audio"].map(|name| Checkpoint::open(&drawn::hearing(name)));
    let gemma = Checkpoint::open(&drawn::hearing("gemma4"));
    let Err(error) = pair(&qwen.language(true), &gemma.hearing()) else { panic!("Gemma's encoders with Qwen2") };
    assert!(error.contains("has no token `<|image|>`"), "{error}");
    let Err(error) = pair_with(&voxtral.language(true), &voxtral.hearing(), Some(64)) else { panic!("max_edge") };
    assert!(error.contains("max_edge (--max-edge) is about images"), "{error}");
    let silent = without(without(voxtral.hearing(), "clip.has_audio_encoder"), "clip.projector_type");
    let Err(error) = pair(&voxtral.language(true), &silent.entry("clip.has_vision_encoder", 7, &[0])) else { panic!("none") };
    assert!(error.contains("neither `clip.has_vision_encoder` nor `clip.has_audio_encoder` is true"), "{error}");
}

#[test]
fn files_without_a_template_of_sounds_have_that_of_their_family() {
    let trained = ["[INST][BEGIN_AUDIO][AUDIO]", "Audio 1: <|audio_bos|><|AUDIO|>"];
    for (name, trained, of_texts) in [("voxtral", trained[0], "[BEGIN_AUDIO][AUDIO]"), ("qwen2_audio", trained[1], trained[1])] {
        let checkpoint = Checkpoint::open(&drawn::hearing(name));
        let plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}";
        let language = without(checkpoint.language(true), "tokenizer.chat_template");
        for (language, part) in [(with_template(&language, None), trained), (with_template(&language, Some(plain)), of_texts)] {
            let engine = pair(&language, &checkpoint.hearing()).unwrap();
            let (prompt, _) = media::run(&engine, request(&cases(&drawn::hearing(name))[0]));
            let text = engine.detokenize_text(&prompt, false).unwrap();
            assert!(text.contains(part), "{name}: {text}");
            assert_eq!(text.contains("[INST]"), name == "voxtral" && part == trained, "{name}: {text}");
        }
    }
}

fn with_template(language: &Gguf, template: Option<&str>) -> Gguf {
    match template {
        Some(text) => language.clone().entry("tokenizer.chat_template", STRING, &string(text)),
        None => language.clone(),
    }
}

/// As those of a Qwen2.5-Omni are, which is neither of the models that have such encoders.
#[test]
fn two_encoders_of_other_models_are_refused() {
    let (seeing, hearing) = (Checkpoint::open(&drawn::seeing("qwen2_vl")), Checkpoint::open(&drawn::hearing("qwen2_audio")));
    let mut language = seeing.language(true);
    let tokens = language.entries.iter_mut().find(|entry| entry.starts_with(&string("tokenizer.ggml.tokens"))).unwrap();
    let (from, to) = (string("[IMG]"), string("<|AUDIO|>"));
    let at = tokens.windows(from.len()).position(|window| window == from).unwrap();
    tokens.splice(at..at + from.len(), to);
    let (mut both, sounds) = (without(seeing.encoder(), "clip.projector_type"), hearing.hearing());
    let is_audio = |entry: &&Vec<u8>| entry[8..].starts_with(b"clip.audio.") || entry[8..].starts_with(b"clip.has_audio");
    both.entries.extend(sounds.entries.iter().filter(is_audio).cloned());
    let both = both.weight("a.position_embd.weight", &[32, 50], 0, &[0; 4 * 32 * 50]);
    let one = both.clone().entry("clip.projector_type", STRING, &string("qwen2.5o"));
    let Err(error) = pair(&language, &one) else { panic!("Omni") };
    assert!(error.contains("`clip.projector_type` is `qwen2.5o`, which is not computed"), "{error}");
    let named = both.entry("clip.vision.projector_type", STRING, &string("qwen2vl_merger"));
    let Err(error) = pair(&language, &named.entry("clip.audio.projector_type", STRING, &string("qwen2a"))) else { panic!("two") };
    assert!(error.contains("is of qwen2_vl and `clip.audio.projector_type` of qwen2_audio"), "{error}");
}
