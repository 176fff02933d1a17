//! Models that see tiles, and GLM-4.1V, from two GGUF files, one of them an encoder's (`mmproj`), against the same as folders.

use std::{path::Path, sync::Arc};

use engine::{
    Completion, Engine, EngineConfig, GenerationRequest, MediaOptions, Message, MessageContent, ModelSource, SamplingParams,
    images::{Limits, RgbImage, decode},
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{
    drawn,
    gguf_writer::{Gguf, U32, string, with_size, without},
    media,
    mmproj::Checkpoint,
    serving::greedy,
};

const MODELS: [&str; 4] = ["internvl", "lfm2_vl", "llama4_vision", "glm4v"];
/// The converter gives its rows of q and k another order, in which sums of products have another one as well.
const REORDERED: &str = "glm4v";

fn checkpoint(name: &str) -> Checkpoint {
    Checkpoint::open(&drawn::seeing(name))
}

fn engine(source: &ModelSource, mmproj: Option<&Path>) -> Result<Engine, String> {
    let options = MediaOptions { mmproj: mmproj.map(Path::to_owned), ..MediaOptions::default() };
    let config = EngineConfig { media: Some(options), ..media::config() };
    Engine::load(source, &config, &|_| {}).map_err(|error| error.to_string())
}

/// Writes both files and loads them.
fn pair(language: &Gguf, encoder: &Gguf) -> Result<Engine, String> {
    let temp = tempfile::tempdir().unwrap();
    let (model, mmproj) = (temp.path().join("model.gguf"), temp.path().join("mmproj.gguf"));
    language.write(&model);
    encoder.write(&mmproj);
    engine(&ModelSource::Gguf { files: vec![model], tokenizer_dir: None, tokenizer_json: None }, Some(&mmproj))
}

/// A copy of a folder which says what its files would say, and what holds where they say nothing.
fn as_said(name: &str) -> TempDir {
    let copy = media::edited(&drawn::seeing(name), "config.json", "", "");
    let change = |file: &str, change: &dyn Fn(&mut Value)| {
        let path = copy.path().join(file);
        let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        std::fs::write(path, json.to_string()).unwrap();
    };
    let without = |keys: &'static [&'static str]| {
        change("preprocessor_config.json", &|json| keys.iter().for_each(|key| drop(json.as_object_mut().unwrap().remove(*key))));
    };
    match name {
        "lfm2_vl" => without(&[
            "tile_size",
            "min_tiles",
            "max_tiles",
            "min_image_tokens",
            "max_image_tokens",
            "max_pixels_tolerance",
            "size",
        ]),
        "llama4_vision" => {
            without(&["max_patches"]);
            change("config.json", &|json| {
                json["text_config"]["attention_chunk_size"] = json!(8192);
                json["text_config"]["floor_scale"] = json!(8192);
            });
        }
        "glm4v" => without(&["size"]),
        _ => {}
    }
    copy
}

fn request(folder: &Path, case: &Value) -> GenerationRequest {
    let read = |file: &Value| {
        let bytes = std::fs::read(folder.join(file.as_str().unwrap())).unwrap();
        Arc::new(decode(&bytes, &Limits::default()).unwrap())
    };
    let images: Vec<Arc<RgbImage>> = case["images"].as_array().unwrap().iter().map(read).collect();
    let mut images = images.into_iter();
    let message = |message: &Value| {
        let parts = message["content"].as_array().unwrap().clone();
        let num_images = parts.iter().filter(|part| part["type"] == "image").count();
        let media = images.by_ref().take(num_images).map(Into::into).collect();
        Message { media, ..Message::new(message["role"].as_str().unwrap(), MessageContent::Parts(parts)) }
    };
    let messages = case["messages"].as_array().unwrap().iter().map(message).collect();
    let sampling = SamplingParams { logprobs: Some(20), ..greedy(8) };
    GenerationRequest { return_token_ids: true, ..GenerationRequest::chat(messages, sampling) }
}

#[test]
fn a_pair_of_files_sees_what_the_folder_does() {
    for name in MODELS {
        let (copy, checkpoint) = (as_said(name), checkpoint(name));
        let folder = engine(&ModelSource::HuggingFace { path: copy.path().to_owned(), tokenizer_json: None }, None).unwrap();
        let pair = pair(&checkpoint.language_of_tiles(), &checkpoint.encoder_of_tiles());
        let pair = pair.unwrap_or_else(|error| panic!("{name}: {error}"));
        let golden: Value = serde_json::from_slice(&std::fs::read(copy.path().join("golden.json")).unwrap()).unwrap();
        for (number, case) in golden["cases"].as_array().unwrap().iter().enumerate() {
            let asked = || request(copy.path(), case);
            let ((prompt, answer), (same, expected)) = (media::run(&pair, asked()), media::run(&folder, asked()));
            assert_eq!(prompt, same, "{name}, case {number}: tokens of the prompt");
            if name != REORDERED {
                assert_eq!(media::bits(&answer), media::bits(&expected), "{name}, case {number}");
                continue;
            }
            let tokens = |completion: &Completion| completion.choices[0].logprobs.clone().unwrap();
            for (found, expected) in tokens(&answer).iter().zip(tokens(&expected)) {
                assert_eq!(found.token_id, expected.token_id, "{name}, case {number}");
                assert!((found.logprob.unwrap() - expected.logprob.unwrap()).abs() < 1e-5, "{name}: {found:?}, {expected:?}");
            }
        }
    }
}

#[test]
fn a_norm_of_llama_4_may_have_the_name_of_gemma_4_s() {
    let checkpoint = checkpoint("llama4_vision");
    let mut encoder = checkpoint.encoder_of_tiles();
    let mut num_renamed = 0;
    for tensor in &mut encoder.tensors {
        let end = 8 + u64::from_le_bytes(tensor[..8].try_into().unwrap()) as usize;
        let name = String::from_utf8(tensor[8..end].to_vec()).unwrap();
        if name.contains(".ln2.") {
            tensor.splice(..end, string(&name.replace(".ln2.", ".attn_post_norm.")));
            num_renamed += 1;
        }
    }
    assert_eq!(num_renamed, 2 * 3);
    pair(&checkpoint.language_of_tiles(), &encoder).unwrap();
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let fails = |name: &str, change: &dyn Fn(Gguf) -> Gguf, part: &str| {
        let checkpoint = checkpoint(name);
        let encoder = change(checkpoint.encoder_of_tiles());
        let Err(error) = pair(&checkpoint.language_of_tiles(), &encoder) else { panic!("{name}: {part}") };
        assert!(error.contains(part) && error.contains("mmproj.gguf"), "{name}: {error}");
    };
    let row = |gguf: Gguf, name: &str| gguf.weight(name, &[8], 0, &[0; 32]);
    let scale = "clip.vision.projector.scale_factor";
    fails("internvl", &|gguf| with_size(gguf, scale, 0), "`clip.vision.projector.scale_factor` is 0");
    fails("internvl", &|gguf| with_size(gguf, scale, 3), "`downsample_ratio` is 0.333");
    fails(
        "internvl",
        &|gguf| with_size(gguf, "clip.vision.preproc_min_tiles", 5),
        "`clip.vision.preproc_min_tiles` is 5, more than",
    );
    fails("internvl", &|gguf| with_size(gguf, "clip.vision.preproc_max_tiles", 1 << 20), "max_patches is 1048576");
    fails("internvl", &|gguf| row(gguf, "v.blk.0.attn_q_norm.weight"), "tensor `v.blk.0.attn_q_norm.weight` is of a kind");
    fails("internvl", &|gguf| row(gguf, "v.post_ln.weight"), "tensor `v.post_ln.weight` is of a kind");
    fails("lfm2_vl", &|gguf| with_size(gguf, scale, 0), "`clip.vision.projector.scale_factor` is 0");
    fails("lfm2_vl", &|gguf| with_size(gguf, "clip.vision.patch_size", 5), "tile_size is 512, which is no multiple of 10");
    fails("lfm2_vl", &|gguf| row(gguf, "mm.3.weight"), "tensor `mm.3.weight` is of a kind");
    fails("llama4_vision", &|gguf| without(gguf, "clip.use_gelu"), "`clip.use_gelu` is not true");
    fails("llama4_vision", &|gguf| with_size(gguf, scale, 5), "`vision_config.pixel_shuffle_ratio` is 0.2");
    fails("glm4v", &|gguf| row(gguf, "v.blk.0.attn_q_norm.weight"), "tensor `v.blk.0.attn_q_norm.weight` is of a kind");
    fails("glm4v", &|gguf| with_size(gguf, "clip.vision.attention.head_count", 16), "heads of 1 elements");
    let size = |gguf: Gguf, key: &str| gguf.entry(key, U32, &[4, 0, 0, 0]);
    fails("lfm2_vl", &|gguf| size(gguf, "clip.vision.image_max_pixels"), "`clip.vision.image_max_pixels` asks for what is not");
    fails("llama4_vision", &|gguf| size(gguf, "clip.vision.preproc_max_tiles"), "preproc_max_tiles` asks for what is not");
    fails("internvl", &|gguf| size(gguf, "clip.vision.spatial_merge_size"), "spatial_merge_size` asks for what is not");
    fails("glm4v", &|gguf| size(gguf, "clip.vision.window_size"), "window_size` asks for what is not");
    let glm = checkpoint("glm4v");
    let language = without(glm.language_of_tiles(), "glm4.rope.dimension_sections");
    let Err(error) = pair(&language, &glm.encoder_of_tiles()) else { panic!("without sections") };
    assert!(error.contains("no `rope.dimension_sections`"), "{error}");
}
