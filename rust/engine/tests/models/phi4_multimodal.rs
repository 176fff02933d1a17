//! A tiny Phi-4-multimodal, whose weights are drawn from their names, against Transformers with PEFT: as Transformers saves it,
//! and as its first files are.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use device::{
    Backend,
    cuda::{CudaBackend, CudaOptions, Driver},
};
use engine::{
    AdapterChoice, Continuation, Engine, EngineConfig, GenerationRequest, Media, MediaOptions, Message, MessageContent,
    ModelDType, ModelSource, Prompt, SamplingParams,
};
use kernel_tests::{EmulatedDriver, Order};
use safetensors::{SafeTensors, tensor::serialize};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::common::{drawn, golden_dir, log_softmax, media, serving::greedy};

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    /// Width and height.
    images: Vec<[u32; 2]>,
    sounds: Vec<GoldenSound>,
    last_logits: Vec<f32>,
    argmax: Vec<u32>,
    greedy_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct GoldenSound {
    name: String,
    len: usize,
}

#[derive(Deserialize)]
struct Adapter {
    shapes: Value,
    r: usize,
    lora_alpha: usize,
}

fn read<T: for<'a> Deserialize<'a>>(file: &str) -> T {
    serde_json::from_slice(&std::fs::read(golden_dir().join("phi4").join(file)).unwrap()).unwrap()
}

fn write(folder: &Path, file: &str, value: &Value) {
    std::fs::write(folder.join(file), value.to_string()).unwrap();
}

/// A file of weights under other names, in the place of one.
fn rename(file: &Path, rename: impl Fn(&str) -> String) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors.tensors().into_iter().map(|(name, it)| (rename(&name), (it.shape().to_vec(), it.data().to_vec()))).collect()
}

fn save(file: &Path, tensors: &BTreeMap<String, (Vec<usize>, Vec<u8>)>) {
    use safetensors::tensor::{Dtype, TensorView};
    let views = tensors.iter().map(|(name, (shape, data))| (name, TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
    std::fs::write(file, serialize(views, None).unwrap()).unwrap();
}

/// What an adapter's tensors are drawn as, in a folder of their own.
fn drawn_adapter(adapter: &Adapter, folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    write(folder, "shapes.json", &adapter.shapes);
    drawn::write_weights(&folder.join("shapes.json"), folder, drawn::vision_value);
}

fn common_files(folder: &Path) {
    let (own, hearing) = (golden_dir().join("phi4"), golden_dir().join("hearing/gemma4"));
    std::fs::copy(own.join("chat_template.jinja"), folder.join("chat_template.jinja")).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(hearing.join(file), folder.join(file)).unwrap();
    }
    drawn::write_weights(&own.join("tensors.json"), folder, drawn::vision_value);
}

/// As Transformers saves it, with adapters in folders beside.
fn of_transformers(edit: impl Fn(&mut Value)) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    common_files(copy.path());
    let mut config = read("config.json");
    edit(&mut config);
    write(copy.path(), "config.json", &config);
    let images =
        json!({"image_processor_type": "Phi4MultimodalImageProcessor", "dynamic_hd": 4, "resample": 3, "patch_size": 14});
    let sounds = json!({"feature_extractor_type": "Phi4MultimodalFeatureExtractor", "feature_size": 80, "sampling_rate": 16000});
    write(copy.path(), "processor_config.json", &json!({"image_processor": images, "audio_processor": sounds}));
    for (name, adapter) in read::<BTreeMap<String, Adapter>>("adapters.json") {
        let folder = copy.path().join(format!("{name}-lora"));
        drawn_adapter(&adapter, &folder);
        let part = format!(".{name}.");
        save(&folder.join("adapter_model.safetensors"), &rename(&folder.join("model.safetensors"), |it| it.replace(&part, ".")));
        let config = json!({"peft_type": "LORA", "r": adapter.r, "lora_alpha": adapter.lora_alpha});
        write(&folder, "adapter_config.json", &config);
    }
    copy
}

/// What the first files call a weight.
fn first_name(name: &str) -> String {
    if name.starts_with("model.layers.") {
        let is_adapted = name.contains("_proj.");
        return if is_adapted { name.replace(".weight", ".base_layer.weight") } else { name.to_owned() };
    }
    if name.contains("image_embed") {
        return name
            .replace("global_img_feature_extensor", "glb_GN")
            .replace("sub_img_feature_extensor", "sub_GN")
            .replace("img_projection_up", "img_projection.0")
            .replace("img_projection_down", "img_projection.2");
    }
    let mut name = name.to_owned();
    for (from, to) in [("vision_speech", "vision"), ("speech", "speech")] {
        name = name.replace(&format!("up_proj_for_{from}"), &format!("audio_projection.{to}.0"));
        name = name.replace(&format!("down_proj_for_{from}"), &format!("audio_projection.{to}.2"));
    }
    if name.contains("feed_forward") {
        name = name.replace("gate_up_proj", "net.0.linear").replace("down_proj", "net.2");
    }
    for part in ["q", "k", "v"] {
        name = name.replace(&format!("self_attn.{part}_proj"), &format!("self_attn.linear_{part}"));
    }
    name.replace("self_attn.o_proj", "self_attn.linear_out")
}

/// As its first files are, with adapters among the weights.
fn of_the_hub(edit: impl Fn(&mut Value)) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    common_files(copy.path());
    let mut config: Value = read("config.json");
    let (rope, audio) = (config["rope_parameters"].take(), config["audio_config"].take());
    let lora = |adapter: &Adapter| {
        let layer = "layers.*((self_attn\\.(qkv_proj|o_proj))|(mlp\\.(gate_up|down)_proj))";
        json!({"dp": 0.0, "layer": layer, "lora_alpha": adapter.lora_alpha, "r": adapter.r})
    };
    let adapters = read::<BTreeMap<String, Adapter>>("adapters.json");
    let hearing = json!({
        "activation": "swish", "attention_dim": audio["hidden_size"], "attention_heads": audio["num_attention_heads"],
        "activation_checkpointing": {"interval": 1, "module": "transformer", "offload": false},
        "batch_norm": false, "bias_in_glu": true, "causal": true, "chunk_size": -1, "cnn_layer_norm": true,
        "conv_activation": "swish", "conv_glu_type": "swish", "depthwise_multiplier": 1,
        "depthwise_seperable_out_channel": audio["depthwise_separable_out_channel"], "dropout_rate": 0.0,
        "encoder_embedding_config": {"input_size": 80}, "ext_pw_kernel_size": 1,
        "ext_pw_out_channel": audio["ext_pw_out_channel"], "input_layer": "nemo_conv", "input_size": 80, "kernel_size": 3,
        "left_chunk": 18, "linear_units": audio["intermediate_size"],
        "nemo_conv_settings": {"conv_channels": audio["nemo_conv_channels"]}, "num_blocks": audio["num_blocks"],
        "relative_attention_bias_args": {"t5_bias_max_distance": audio["bias_max_distance"], "type": "t5"}, "time_reduction": 8,
    });
    let own = json!({
        "architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm", "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_scaling": {"type": "longrope", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]},
        "audio_token_id": audio["audio_token_id"], "vision_lora": lora(&adapters["vision"]), "speech_lora": lora(&adapters["speech"]),
        "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": false, "mlp_bias": false, "attention_bias": false,
        "embd_layer": {
            "embedding_cls": "image_audio",
            "image_embd_layer": {
                "crop_size": 448, "embedding_cls": "tune_image", "enable_gradient_checkpointing": true,
                "hd_transform_order": "sub_glb", "image_token_compression_cls": "avg_pool_2d", "projection_cls": "mlp",
                "use_hd_transform": true, "with_learnable_separator": true,
            },
            "audio_embd_layer": {
                "compression_rate": 8, "downsample_rate": 1, "embedding_cls": "audio", "enable_gradient_checkpointing": true,
                "projection_cls": "mlp", "use_conv_downsample": false, "use_qformer": false,
            },
        },
        "audio_processor": {"name": "cascades", "config": hearing},
    });
    for (key, value) in own.as_object().unwrap() {
        config[key] = value.clone();
    }
    edit(&mut config);
    write(copy.path(), "config.json", &config);
    let processor = json!({
        "audio_compression_rate": 8, "audio_downsample_rate": 1, "audio_feat_stride": 1, "dynamic_hd": 4,
        "feature_extractor_type": "Phi4MMAudioFeatureExtractor", "image_processor_type": "Phi4MMImageProcessor",
        "processor_class": "Phi4MMProcessor",
    });
    write(copy.path(), "preprocessor_config.json", &processor);
    let mut weights = rename(&copy.path().join("model.safetensors"), first_name);
    for (name, adapter) in adapters {
        let folder = copy.path().join(&name);
        drawn_adapter(&adapter, &folder);
        weights.extend(rename(&folder.join("model.safetensors"), |it| it.replace("base_model.model.", "")));
        std::fs::remove_dir_all(folder).unwrap();
    }
    save(&copy.path().join("model.safetensors"), &weights);
    copy
}

fn config() -> EngineConfig {
    let mut config = EngineConfig { dtype: ModelDType::F32, media: Some(MediaOptions::default()), ..EngineConfig::default() };
    config.cpu.num_threads = Some(2);
    config.paged_attention.mem_gpu = Some(engine::MemoryGpuConfig::ContextSize(4000));
    config
}

fn load(folder: &tempfile::TempDir) -> Result<Engine, String> {
    let source = ModelSource::HuggingFace { path: folder.path().to_owned(), tokenizer_json: None };
    Engine::load(&source, &config(), &|_| {}).map_err(|error| error.to_string())
}

fn sound(sound: &GoldenSound) -> Media {
    Arc::new(engine::audio::Sound::new(16_000, drawn::sound(&sound.name, sound.len)).unwrap()).into()
}

fn request(case: &Case) -> GenerationRequest {
    let images = case.images.iter().enumerate().map(|(seed, size)| media::pattern(seed, *size).into());
    let media: Vec<_> = images.chain(case.sounds.iter().map(sound)).collect();
    let mut parts = vec![json!({ "type": "image" }); case.images.len()];
    parts.extend(vec![json!({ "type": "audio" }); case.sounds.len()]);
    parts.push(json!({ "type": "text", "text": "describe the image" }));
    let content = if media.is_empty() { MessageContent::Text("describe the image".into()) } else { MessageContent::Parts(parts) };
    let message = Message { media, ..Message::new("user", content) };
    let sampling = SamplingParams { logprobs: Some(20), ..greedy(case.greedy_ids.len()) };
    let mut request = GenerationRequest::chat(vec![message], sampling);
    (request.return_token_ids, request.prompt_logprobs) = (true, Some(1));
    request
}

fn check(engine: &Engine, case: &Case, what: &str) {
    let stream = engine.submit(request(case)).unwrap();
    assert_eq!(stream.prompt_token_ids().len(), case.argmax.len(), "{what}: tokens of the prompt");
    let completion = stream.wait().unwrap();
    let choice = &completion.choices[0];
    let expected = log_softmax(&case.last_logits);
    for top in &choice.logprobs.as_ref().unwrap()[0].top_logprobs {
        let (got, expected) = (f64::from(top.logprob), expected[top.token_id as usize]);
        assert!((got - expected).abs() < 2e-3, "{what}: token {} has {got} and not {expected}", top.token_id);
    }
    for (position, token) in completion.prompt_logprobs.iter().enumerate().skip(1) {
        let likeliest = token.token.top_logprobs[0].token_id;
        assert_eq!(likeliest, case.argmax[position - 1], "{what}: the likeliest behind position {}", position - 1);
    }
    assert_eq!(choice.token_ids, case.greedy_ids, "{what}: the answer");
}

#[test]
fn both_kinds_of_files_answer_as_transformers_with_their_adapters() {
    for (kind, folder) in [("Transformers'", of_transformers(|_| ())), ("first", of_the_hub(|_| ()))] {
        let engine = load(&folder).unwrap();
        for (number, case) in read::<Golden>("golden.json").cases.iter().enumerate() {
            check(&engine, case, &format!("{kind}, case {number}"));
        }
    }
}

/// A request's answer, and how many of its prompt's tokens were there already.
fn answer(stream: engine::RequestStream) -> (Vec<u32>, usize) {
    let completion = stream.wait().unwrap();
    (completion.choices[0].token_ids.clone(), completion.usage.cached_tokens)
}

#[test]
fn requests_beside_each_other_have_their_own_adapters() {
    let engine = load(&of_the_hub(|_| ())).unwrap();
    let cases = read::<Golden>("golden.json").cases;
    let cases = [&cases[0], &cases[1], &cases[4], &cases[7], &cases[5]];
    for round in 0..2 {
        // What is told of a prompt is computed.
        let request = |case: &Case| GenerationRequest { prompt_logprobs: None, ..request(case) };
        let streams: Vec<_> = cases.iter().map(|case| engine.submit(request(case)).unwrap()).collect();
        for (case, stream) in cases.iter().zip(streams) {
            let (ids, num_cached) = answer(stream);
            assert_eq!(ids, case.greedy_ids, "round {round}");
            let len = case.argmax.len();
            assert!(num_cached < len && (round == 0 || num_cached + 32 >= len), "{num_cached} of {len} cached in round {round}");
        }
    }
}

#[test]
fn the_kernels_of_a_gpu_hear_the_same() {
    on_a_gpu(&[4]);
}

#[test]
#[ignore = "a minute; make test-long"]
fn the_kernels_of_a_gpu_see_the_same() {
    on_a_gpu(&[1]);
}

/// Cases on a GPU whose kernels run on the CPU.
fn on_a_gpu(numbers: &[usize]) {
    let folder = of_transformers(|_| ());
    let source = ModelSource::HuggingFace { path: folder.path().to_owned(), tokenizer_json: None };
    let driver: Arc<dyn Driver> = Arc::new(EmulatedDriver::with_memory(Order::Ascending, 512 << 20));
    let options = CudaOptions { graphs: false, ..CudaOptions::default() };
    let gpu: Arc<dyn Backend> = Arc::new(CudaBackend::with(driver, options).unwrap());
    let small = EngineConfig { max_num_batched_tokens: 512, max_num_seqs: 2, ..config() };
    let engine = Engine::load_onto(&gpu, &source, &small, &|_| {}).unwrap();
    let cases = read::<Golden>("golden.json").cases;
    for number in numbers {
        check(&engine, &cases[*number], &format!("a GPU, case {number}"));
    }
}

/// A sequence without images cannot go on with one: the adapter would be another.
#[test]
fn a_sequence_keeps_its_adapter() {
    let engine = load(&of_transformers(|_| ())).unwrap();
    let cases = read::<Golden>("golden.json").cases;
    let mut asked = request(&cases[0]);
    (asked.service.keep, asked.prompt_logprobs) = (true, None);
    let sequence = engine.submit(asked).unwrap().wait().unwrap().choices[0].sequence.take().unwrap();
    let go_on = |messages: Vec<Message>| {
        let prompt = Prompt::Sequence { sequence: sequence.clone(), then: Continuation::Messages(messages) };
        engine.submit(GenerationRequest { prompt, prompt_logprobs: None, ..request(&cases[0]) })
    };
    assert_eq!(go_on(messages(&cases[0])).unwrap().wait().unwrap().choices[0].token_ids.len(), cases[0].greedy_ids.len());
    let error = go_on(messages(&cases[1])).err().unwrap().to_string();
    assert!(error.contains("a sequence keeps the adapter that it began with"), "{error}");
}

/// The messages of a case.
fn messages(case: &Case) -> Vec<Message> {
    match request(case).prompt {
        Prompt::Chat { messages, .. } => messages,
        _ => unreachable!("a chat"),
    }
}

/// A request of a case that answers alone, from whatever there is of its prompt.
fn plain(case: &Case) -> GenerationRequest {
    GenerationRequest { prompt_logprobs: None, ..request(case) }
}

/// Its answer, and how many images and sounds were encoded for it.
fn encoded(engine: &Engine, request: GenerationRequest) -> (Vec<u32>, [usize; 2]) {
    let completion = engine.submit(request).unwrap().wait().unwrap();
    let usage = &completion.usage;
    (completion.choices[0].token_ids.clone(), [usage.encoded_images, usage.encoded_sounds])
}

/// A folder whose base is all that there is.
fn without_adapters() -> tempfile::TempDir {
    let folder = of_transformers(|_| ());
    for name in ["vision", "speech"] {
        std::fs::remove_dir_all(folder.path().join(format!("{name}-lora"))).unwrap();
    }
    folder
}

#[test]
fn a_sound_alone_and_beside_an_image_are_told_apart() {
    let [beside, mut alone] = [(); 2].map(|()| read::<Golden>("golden.json").cases.remove(7));
    alone.images.clear();
    for folder in [of_transformers(|_| ()), without_adapters()] {
        let fresh = |case| encoded(&load(&folder).unwrap(), plain(case));
        let (of_alone, of_beside) = (fresh(&alone), fresh(&beside));
        assert_eq!((of_alone.1, of_beside.1), ([0, 1], [1, 1]));
        let engine = load(&folder).unwrap();
        assert_eq!(encoded(&engine, plain(&alone)), of_alone);
        assert_eq!(encoded(&engine, plain(&beside)), of_beside, "beside an image, behind the same alone");
        assert_eq!(encoded(&engine, plain(&alone)), (of_alone.0.clone(), [0, 0]), "what was heard is kept");
        let engine = load(&folder).unwrap();
        assert_eq!(encoded(&engine, plain(&beside)), of_beside);
        assert_eq!(encoded(&engine, plain(&alone)), of_alone, "alone, behind the same beside an image");
    }
}

#[test]
fn a_long_sound_is_encoded_part_by_part() {
    let engine = load(&of_transformers(|_| ())).unwrap();
    let case = &read::<Golden>("golden.json").cases[6];
    assert_eq!(encoded(&engine, plain(case)), (case.greedy_ids.clone(), [0, 2]));
    assert_eq!(encoded(&engine, plain(case)).1, [0, 0]);
}

/// What goes on from an image with a sound, and where there are no adapters the reverse, is answered as the whole conversation.
#[test]
fn a_sequence_goes_on_as_the_whole_conversation_would() {
    let cases = read::<Golden>("golden.json").cases;
    let (seen, heard) = (&cases[1], &cases[4]);
    for (folder, [first, then]) in
        [(of_transformers(|_| ()), [seen, heard]), (without_adapters(), [seen, heard]), (without_adapters(), [heard, seen])]
    {
        let engine = load(&folder).unwrap();
        let mut asked = plain(first);
        asked.service.keep = true;
        let sequence = engine.submit(asked).unwrap().wait().unwrap().choices[0].sequence.take().unwrap();
        let answer = Message::new("assistant", MessageContent::Text(sequence.text()));
        let whole = [messages(first), vec![answer], messages(then)].concat();
        let whole = GenerationRequest { prompt_logprobs: None, ..GenerationRequest::chat(whole, plain(then).sampling) };
        let then = Prompt::Sequence { sequence, then: Continuation::Messages(messages(then)) };
        let behind = GenerationRequest { prompt: then, return_token_ids: true, ..whole.clone() };
        let (ids, _) = encoded(&engine, behind);
        let whole = GenerationRequest { return_token_ids: true, ..whole };
        assert_eq!(ids, encoded(&load(&folder).unwrap(), whole).0);
        assert!(!ids.is_empty());
    }
}

/// Nothing is refused for adapters that are not there.
#[test]
fn a_folder_without_adapters_may_be_asked_for_the_base() {
    let engine = load(&without_adapters()).unwrap();
    let case = &read::<Golden>("golden.json").cases[4];
    let base = GenerationRequest { adapter: Some(AdapterChoice::Base), ..plain(case) };
    assert_eq!(encoded(&engine, base), encoded(&load(&without_adapters()).unwrap(), plain(case)));
}

#[test]
fn an_adapter_may_not_be_asked_for() {
    let engine = load(&of_transformers(|_| ())).unwrap();
    let cases = read::<Golden>("golden.json").cases;
    for (choice, part) in [
        (AdapterChoice::Base, "has adapters of its own, which go by the images and sounds"),
        (AdapterChoice::Alias("vision".into()), "loaded without adapters"),
    ] {
        let asked = GenerationRequest { adapter: Some(choice), ..request(&cases[1]) };
        let error = engine.submit(asked).err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn what_the_encoders_are_not_is_refused_by_name() {
    let of_transformers_is = |part: &str, edit: &dyn Fn(&mut Value)| {
        let error = load(&of_transformers(edit)).err().unwrap_or_else(|| panic!("{part} is taken"));
        assert!(error.contains(part), "{error}");
    };
    of_transformers_is("`vision_config.crop_size` is 384; implemented: 448", &|it| it["vision_config"]["crop_size"] = json!(384));
    of_transformers_is("`vision_config.image_size` goes with crops of 224", &|it| it["vision_config"]["image_size"] = json!(224));
    of_transformers_is("`vision_config.feature_layer` is -9", &|it| it["vision_config"]["feature_layer"] = json!(-9));
    of_transformers_is("`vision_config.image_token_id` is 700", &|it| it["vision_config"]["image_token_id"] = json!(700));
    of_transformers_is("`audio_config.chunk_size` is 18; implemented: -1", &|it| it["audio_config"]["chunk_size"] = json!(18));
    of_transformers_is("`audio_config.bias_symmetric` is true", &|it| it["audio_config"]["bias_symmetric"] = json!(true));
    of_transformers_is("`audio_config.ext_pw_out_channel` is 8", &|it| it["audio_config"]["ext_pw_out_channel"] = json!(8));
    of_transformers_is("`audio_config.input_size` is 64", &|it| it["audio_config"]["input_size"] = json!(64));
    of_transformers_is("`time_reduction` 6; the feature extractor", &|it| it["audio_config"]["time_reduction"] = json!(6));
    of_transformers_is("shape [40, 2]", &|it| it["audio_config"]["bias_max_distance"] = json!(30));
    let of_the_hub_is = |part: &str, edit: &dyn Fn(&mut Value)| {
        let error = load(&of_the_hub(edit)).err().unwrap_or_else(|| panic!("{part} is taken"));
        assert!(error.contains(part), "{error}");
    };
    let image = "/embd_layer/image_embd_layer";
    for (at, value, part) in [
        (format!("{image}/hd_transform_order"), json!("glb_sub"), "hd_transform_order` is \"glb_sub\"; implemented: \"sub_glb\""),
        (format!("{image}/use_hd_transform"), json!(false), "use_hd_transform` is false"),
        ("/embd_layer/audio_embd_layer/use_qformer".into(), json!(true), "use_qformer` is true"),
        ("/embd_layer/audio_embd_layer/compression_rate".into(), json!(4), "compression_rate` is 4; implemented: 8"),
        ("/audio_processor/config/causal".into(), json!(false), "causal` is false"),
        ("/audio_processor/config/relative_attention_bias_args/type".into(), json!("alibi"), "type` is \"alibi\""),
        ("/vision_lora/r".into(), json!(8), "`vision_lora.r` is 8"),
        ("/vision_lora/layer".into(), json!("layers.*lm"), "which is no linear layer of this model that `layer` has"),
        ("/vision_lora/layer".into(), json!("("), "`vision_lora.layer` is no pattern"),
        ("/speech_lora/dp".into(), json!(0.1), ""),
    ] {
        let edit = |it: &mut Value| *it.pointer_mut(&at).unwrap() = value.clone();
        if part.is_empty() {
            assert!(load(&of_the_hub(edit)).is_ok(), "{at}");
            continue;
        }
        of_the_hub_is(part, &edit);
    }
    of_the_hub_is("`audio_processor.config.conv2d_extra_padding` is not known", &|it| {
        it["audio_processor"]["config"]["conv2d_extra_padding"] = json!("feat");
    });
    let folder = of_the_hub(|_| ());
    let file = folder.path().join("model.safetensors");
    let other = rename(&file, |it| it.replace("layers.1.mlp.down_proj.lora_A.vision", "layers.1.mlp.down_proj.lora_A.other"));
    save(&file, &other);
    let error = load(&folder).err().unwrap();
    assert!(error.contains("down_proj.lora_A.other.weight` is of no adapter that is known"), "{error}");
    of_the_hub_is("`vision_lora.use_dora` is not known", &|it| it["vision_lora"]["use_dora"] = json!(true));
    of_the_hub_is("`speech_lora` is missing", &|it| drop(it.as_object_mut().unwrap().remove("speech_lora")));
}
