//! Vectors of texts, compared with those of sentence-transformers, and with themselves in other company.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use device::{Backend, KvDType, Precision, cpu::ReferenceBackend};
use engine::{
    EmbeddingInput, EmbeddingOptions, EmbeddingRequest, Engine, EngineConfig, EngineError, ModelDType, ModelSource, Pooling,
    Truncation,
};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{
    Harness,
    gguf_writer::{Gguf, STRING, U32, string},
    golden_dir, hugging_face, load,
    serving::{exact, pool_of, prompt, request, stats},
};

const MODELS: [&str; 2] = ["embeddinggemma", "qwen3-embedding"];

fn folder(model: &str) -> PathBuf {
    golden_dir().join("embed").join(model)
}

fn source(dir: &Path) -> ModelSource {
    ModelSource::HuggingFace { path: dir.to_owned(), tokenizer_json: None }
}

fn pooled(config: EngineConfig, pooling: Option<Pooling>) -> EngineConfig {
    EngineConfig { embedding: Some(EmbeddingOptions { pooling }), ..config }
}

fn start(model: &str, config: EngineConfig) -> Engine {
    Engine::load(&source(&folder(model)), &pooled(config, None), &|_| {}).unwrap()
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn golden(model: &str) -> Value {
    json(&folder(model).join("golden.json"))
}

fn cases(golden: &Value) -> &[Value] {
    golden["embeddings"].as_array().unwrap()
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|n| n.as_f64().unwrap() as f32).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32).collect()
}

fn text(text: &Value) -> EmbeddingInput {
    EmbeddingInput::Text(text.as_str().unwrap().to_owned())
}

fn of(inputs: Vec<EmbeddingInput>) -> EmbeddingRequest {
    EmbeddingRequest { inputs, ..EmbeddingRequest::default() }
}

fn words(word: &str, times: usize) -> EmbeddingInput {
    EmbeddingInput::Text(vec![word; times].join(" "))
}

fn assert_close(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= 5e-4, "{what}: value {i} is {a}, not {b}");
    }
}

fn bits(vectors: &[Vec<f32>]) -> Vec<Vec<u32>> {
    vectors.iter().map(|vector| vector.iter().map(|value| value.to_bits()).collect()).collect()
}

fn check_goldens(engine: &Engine, model: &str) {
    let golden = golden(model);
    let dimensions: Vec<_> = golden["dimensions"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
    for case in cases(&golden) {
        let what = format!("{model}: {}", case["input"]);
        let [request] = &engine.embedding_requests(of(vec![text(&case["input"])])).unwrap()[..] else { panic!("one request") };
        let engine::Prompt::TokenIds(tokens) = &request.prompt else { panic!("token ids") };
        assert_eq!(*tokens, ids(&case["ids"]), "{what}");
        let [vector] = &engine.embed(of(vec![text(&case["input"])])).unwrap()[..] else { panic!("one vector") };
        assert_close(vector, &numbers(&case["vector"]), &what);
        for n in &dimensions {
            let dimensions = Some(*n as usize);
            let request = EmbeddingRequest { dimensions, ..of(vec![text(&case["input"])]) };
            assert_close(&engine.embed(request).unwrap()[0], &numbers(&case[&format!("vector_{n}")]), &what);
        }
    }
}

#[test]
fn vectors_are_those_of_sentence_transformers() {
    for model in MODELS {
        check_goldens(&start(model, exact()), model);
        let backend: Arc<dyn Backend> = Arc::new(ReferenceBackend::new());
        let plain = Engine::load_onto(&backend, &source(&folder(model)), &pooled(exact(), None), &|_| {}).unwrap();
        check_goldens(&plain, model);
    }
}

#[test]
fn the_fast_path_points_the_same_way() {
    for model in MODELS {
        let engine = start(model, EngineConfig::default());
        assert_eq!(EngineConfig::default().dtype, ModelDType::Auto);
        for case in cases(&golden(model)) {
            let vector = &engine.embed(of(vec![text(&case["input"])])).unwrap()[0];
            let cosine: f32 = vector.iter().zip(numbers(&case["vector"])).map(|(a, b)| a * b).sum();
            assert!(cosine > 0.999, "{model}: {cosine} for {}", case["input"]);
        }
    }
}

#[test]
fn a_vector_has_the_same_bits_alone_in_a_batch_from_token_ids_and_in_a_tight_pool() {
    for model in MODELS {
        let golden = golden(model);
        let engine = start(model, exact());
        let alone: Vec<_> =
            cases(&golden).iter().flat_map(|case| engine.embed(of(vec![text(&case["input"])])).unwrap()).collect();
        let texts = || cases(&golden).iter().map(|case| text(&case["input"])).collect();
        let lists = || cases(&golden).iter().map(|case| EmbeddingInput::TokenIds(ids(&case["ids"]))).collect();
        let tight = start(model, EngineConfig { paged_attention: pool_of(210, 8), max_num_batched_tokens: 300, ..exact() });
        for (engine, way) in [(&engine, "in a batch"), (&tight, "in a tight pool")] {
            assert_eq!(bits(&alone), bits(&engine.embed(of(texts())).unwrap()), "{model} {way}");
            assert_eq!(bits(&alone), bits(&engine.embed(of(lists())).unwrap()), "{model} {way}, from token ids");
            assert_eq!(stats(engine).blocks_used, 0);
        }
        for vector in &alone {
            let square: f64 = vector.iter().map(|value| f64::from(*value).powi(2)).sum();
            assert!((square - 1.0).abs() < 1e-6, "{model}: {square}");
        }
    }
}

/// The plain mean of the hidden states of a decoder that is nobody's embedding model.
#[test]
fn any_decoder_pools_as_it_is_told_to() {
    let tokens = prompt(3, 90);
    let mut runner = load(&hugging_face("llama"), Arc::new(ReferenceBackend::new()), Precision::Exact, KvDType::F32);
    let mut harness = Harness::new(&mut runner, 16);
    let sequence = harness.add(tokens.clone(), tokens.len());
    harness.finish(sequence, tokens.len());
    let mut hidden = Vec::new();
    for rows in (0..tokens.len() as u32).collect::<Vec<_>>().chunks(50) {
        let vectors = runner.vectors(rows).unwrap();
        hidden.extend((0..rows.len()).map(|row| vectors.row(row).to_vec()));
    }
    let mean: Vec<f32> = (0..hidden[0].len()).map(|i| hidden.iter().map(|row| row[i]).sum::<f32>() / 90.0).collect();
    for (pooling, expected) in [(Pooling::Mean, &mean), (Pooling::Cls, &hidden[0]), (Pooling::Last, &hidden[89])] {
        let length = expected.iter().map(|value| value * value).sum::<f32>().sqrt();
        let expected: Vec<_> = expected.iter().map(|value| value / length).collect();
        let engine = Engine::load(&hugging_face("llama"), &pooled(exact(), Some(pooling)), &|_| {}).unwrap();
        let vectors = engine.embed(of(vec![EmbeddingInput::TokenIds(tokens.clone())])).unwrap();
        assert_close(&vectors[0], &expected, pooling.name());
    }
    let Err(error) = Engine::load(&hugging_face("llama"), &pooled(exact(), None), &|_| {}) else { panic!("no pooling") };
    assert!(error.to_string().contains("pooling=\"last\""), "{error}");
}

#[test]
fn what_sees_only_the_past_is_computed_in_chunks_and_found_again() {
    let golden = golden("qwen3-embedding");
    let input = || of(vec![text(&cases(&golden)[2]["input"])]);
    let expected = start("qwen3-embedding", exact()).embed(input()).unwrap();
    let chunked = start("qwen3-embedding", EngineConfig { max_num_batched_tokens: 7, ..exact() });
    assert_eq!(bits(&chunked.embed(input()).unwrap()), bits(&expected));
    let hits = stats(&chunked).prefix_hit_tokens;
    assert_eq!(bits(&chunked.embed(input()).unwrap()), bits(&expected));
    assert!(stats(&chunked).prefix_hit_tokens > hits, "the second time its blocks are found");
    let gemma = start("embeddinggemma", exact());
    gemma.embed(input()).unwrap();
    gemma.embed(input()).unwrap();
    assert_eq!(stats(&gemma).prefix_hit_tokens, 0, "what follows a prefix changes it");
}

#[test]
fn an_input_that_is_too_long_is_refused_or_cut_between_what_the_tokenizer_adds() {
    for (model, config, why) in [
        ("embeddinggemma", exact(), "takes 512 at most: shorten it"),
        ("qwen3-embedding", exact(), "takes 512 at most: shorten it"),
        ("embeddinggemma", EngineConfig { max_num_batched_tokens: 100, ..exact() }, "max_num_batched_tokens"),
        ("embeddinggemma", EngineConfig { paged_attention: pool_of(96, 8), ..exact() }, "in this KV pool"),
    ] {
        let engine = start(model, config);
        let long = || words("sand", 400);
        match engine.embed(of(vec![words("sand", 3), long()])) {
            Err(EngineError::PromptTooLong { max_tokens, message, .. }) => {
                assert_eq!(max_tokens, engine.max_sequence_length());
                assert!(message.starts_with("input[1] has ") && message.contains(why), "{message}");
            }
            other => panic!("{model}: {other:?}"),
        }
        let whole = engine.tokenize_text("x", true).unwrap();
        for truncation in [Truncation::ToModel, Truncation::To(20)] {
            let requests = engine.embedding_requests(EmbeddingRequest { truncation, ..of(vec![long()]) }).unwrap();
            let engine::Prompt::TokenIds(tokens) = &requests[0].prompt else { panic!("token ids") };
            let limit = if truncation == Truncation::To(20) { 20 } else { engine.max_sequence_length() };
            assert_eq!((tokens.len(), tokens.last()), (limit, whole.last()), "{model} {truncation:?}");
            assert_eq!(engine.embed(EmbeddingRequest { truncation, ..of(vec![long()]) }).unwrap().len(), 1);
        }
        // The longest that fits is computed.
        let longest = EmbeddingInput::TokenIds(prompt(1, engine.max_sequence_length()));
        assert_eq!(engine.embed(of(vec![longest])).unwrap().len(), 1);
    }
}

#[test]
fn prompts_go_before_texts_by_name() {
    for model in MODELS {
        let engine = start(model, exact());
        let prompts = engine.embedding().unwrap().prompts.clone();
        assert_eq!(prompts.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["query", "document"]);
        let named = EmbeddingRequest { prompt_name: Some("query".into()), ..of(vec![words("crab", 2)]) };
        let spelled = of(vec![EmbeddingInput::Text(format!("{}crab crab", prompts[0].1))]);
        assert_eq!(bits(&engine.embed(named.clone()).unwrap()), bits(&engine.embed(spelled).unwrap()));
        let refused = |request| engine.embed(request).unwrap_err().to_string();
        let unknown = EmbeddingRequest { prompt_name: Some("title".into()), ..named.clone() };
        assert!(refused(unknown).contains("the model's prompts are \"query\", \"document\""));
        let of_ids = EmbeddingRequest { inputs: vec![EmbeddingInput::TokenIds(vec![5])], ..named };
        assert!(refused(of_ids).contains("put the prompt's before them"));
    }
}

#[test]
fn what_cannot_be_done_is_refused_by_name() {
    let engine = start("qwen3-embedding", exact());
    let refused = |request| engine.embed(request).unwrap_err().to_string();
    for dimensions in [0, 65] {
        let error = refused(EmbeddingRequest { dimensions: Some(dimensions), ..of(vec![words("sand", 1)]) });
        assert!(error.contains(&format!("dimensions is {dimensions}")) && error.contains("64"), "{error}");
    }
    assert!(refused(of(vec![EmbeddingInput::TokenIds(vec![])])).contains("input is empty"));
    assert!(refused(of(vec![EmbeddingInput::TokenIds(vec![5, 512])])).contains("512"));
    let truncation = Truncation::To(1);
    assert!(refused(EmbeddingRequest { truncation, ..of(vec![words("sand", 9)]) }).contains("leave room"));
    let Err(error) = engine.submit(request(1, 8, 2)) else { panic!("text from an embedding model") };
    assert!(error.to_string().contains("POST /v1/embeddings"), "{error}");
    let text = Engine::load(&hugging_face("llama"), &exact(), &|_| {}).unwrap();
    let error = text.embed(of(vec![words("sand", 1)])).unwrap_err().to_string();
    assert!(error.contains("Which.Embedding"), "{error}");
    let Err(error) = Engine::load(&source(&folder("embeddinggemma")), &exact(), &|_| {}) else { panic!("text by it") };
    assert!(error.to_string().contains("serve embedding"), "{error}");
    let kv_tier = Some(engine::KvTierConfig::File { path: "/tmp".into(), max_bytes: 1 << 20 });
    let config = pooled(EngineConfig { kv_tier, ..exact() }, None);
    let Err(error) = Engine::load(&source(&folder("embeddinggemma")), &config, &|_| {}) else { panic!("a tier") };
    assert!(error.to_string().contains("kv_tier"), "{error}");
}

/// What is done to a JSON file.
type Change = Box<dyn Fn(&mut Value)>;

/// A copy of a folder in which one JSON file is another.
fn changed(model: &str, file: &str, change: impl Fn(&mut Value)) -> TempDir {
    let dir = TempDir::new().unwrap();
    let mut folders = vec![PathBuf::new()];
    while let Some(below) = folders.pop() {
        fs::create_dir_all(dir.path().join(&below)).unwrap();
        for entry in fs::read_dir(folder(model).join(&below)).unwrap() {
            let name = below.join(entry.unwrap().file_name());
            if folder(model).join(&name).is_dir() {
                folders.push(name);
            } else {
                fs::copy(folder(model).join(&name), dir.path().join(&name)).unwrap();
            }
        }
    }
    let mut value = json(&dir.path().join(file));
    change(&mut value);
    fs::write(dir.path().join(file), value.to_string()).unwrap();
    dir
}

#[test]
fn keys_that_would_change_the_vectors_are_refused_by_name() {
    let set = |key: &'static str, to: Value| move |value: &mut Value| value[key] = to.clone();
    let pooling = "1_Pooling/config.json";
    let changes: Vec<(&str, Change, &str)> = vec![
        (pooling, Box::new(set("pooling_mode_max_tokens", true.into())), "pooling_mode_max_tokens"),
        (pooling, Box::new(set("pooling_mode_cls_token", true.into())), "several poolings"),
        (pooling, Box::new(set("include_prompt", false.into())), "include_prompt"),
        (pooling, Box::new(set("word_embedding_dimension", 32.into())), "word_embedding_dimension"),
        (pooling, Box::new(set("nonsense", 1.into())), "`nonsense` is not supported"),
        ("2_Dense/config.json", Box::new(set("activation_function", "torch.nn.ReLU".into())), "activation_function"),
        ("2_Dense/config.json", Box::new(set("in_features", 32.into())), "in_features"),
        ("3_Dense/config.json", Box::new(set("bias", true.into())), "dense_3.linear.bias"),
        ("3_Dense/config.json", Box::new(set("out_features", 32.into())), "dense_3.linear.weight"),
        ("sentence_bert_config.json", Box::new(set("transformer_task", "fill-mask".into())), "transformer_task"),
        ("config_sentence_transformers.json", Box::new(set("default_prompt_name", "title".into())), "default_prompt_name"),
        ("config_sentence_transformers.json", Box::new(set("truncate_dim", 5.into())), "truncate_dim"),
        ("modules.json", Box::new(|value| value[4]["type"] = "sentence_transformers.models.LayerNorm".into()), "LayerNorm"),
        ("modules.json", Box::new(|value| value[4]["type"] = "mine.Normalize".into()), "code of the model's own"),
        ("modules.json", Box::new(|value| value[2]["path"] = "../2_Dense".into()), "../2_Dense"),
        ("modules.json", Box::new(|value| *value = Value::Null), "modules.json"),
    ];
    for (file, change, name) in changes {
        let dir = changed("embeddinggemma", file, change);
        let Err(error) = Engine::load(&source(dir.path()), &pooled(exact(), None), &|_| {}) else { panic!("{file}: {name}") };
        assert!(error.to_string().contains(name), "{name}: {error}");
    }
    let newer = changed("embeddinggemma", pooling, |value| {
        *value = serde_json::json!({ "embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": true });
    });
    check_goldens(&Engine::load(&source(newer.path()), &pooled(exact(), None), &|_| {}).unwrap(), "embeddinggemma");
    let small = changed("embeddinggemma", "sentence_bert_config.json", set("do_lower_case", true.into()));
    let small = Engine::load(&source(small.path()), &pooled(exact(), None), &|_| {}).unwrap();
    let tokens = |text: &str| {
        let request = small.embedding_requests(of(vec![EmbeddingInput::Text(text.into())])).unwrap().remove(0);
        let engine::Prompt::TokenIds(tokens) = request.prompt else { panic!("token ids") };
        tokens
    };
    assert_eq!((tokens("CRABS on \u{c9}vian"), tokens("crab")), (tokens("crabs on \u{e9}vian"), tokens("CRAB")));
    let prompted =
        changed("embeddinggemma", "config_sentence_transformers.json", |value| value["default_prompt_name"] = "query".into());
    let prompted = Engine::load(&source(prompted.path()), &pooled(exact(), None), &|_| {}).unwrap();
    let golden = golden("embeddinggemma");
    let vector = prompted.embed(of(vec![text(&cases(&golden)[1]["input"])])).unwrap();
    assert_close(&vector[0], &numbers(&cases(&golden)[4]["vector"]), "the default prompt");
}

/// Floats of a tensor, as little-endian f32 bytes, and its shape.
fn floats(bytes: &[u8], name: &str, offset: f32) -> (Vec<u64>, Vec<u8>) {
    let files = safetensors::SafeTensors::deserialize(bytes).unwrap();
    let tensor = files.tensor(name).unwrap();
    let values: Vec<f32> = match tensor.dtype() {
        safetensors::Dtype::BF16 => {
            tensor.data().chunks_exact(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect()
        }
        _ => tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
    };
    let dims = tensor.shape().iter().rev().map(|n| *n as u64).collect();
    (dims, values.into_iter().flat_map(|value| (value + offset).to_le_bytes()).collect())
}

/// The folder as a GGUF file, with the names and keys of llama.cpp's converter.
fn write_gguf(path: &Path, pooling_type: u32) {
    const F32: u32 = 6;
    let dir = folder("embeddinggemma");
    let mut gguf = Gguf::new().entry("general.architecture", STRING, &string("gemma-embedding"));
    for (key, value) in [
        ("embedding_length", 64),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("feed_forward_length", 96),
        ("block_count", 6),
        ("context_length", 512),
        ("attention.sliding_window", 24),
        ("pooling_type", pooling_type),
    ] {
        gguf = gguf.entry(&format!("gemma-embedding.{key}"), U32, &u32::to_le_bytes(value));
    }
    for (key, value) in [("attention.layer_norm_rms_epsilon", 1e-6_f32), ("rope.freq_base", 1e6)] {
        gguf = gguf.entry(&format!("gemma-embedding.{key}"), F32, &value.to_le_bytes());
    }
    let model = fs::read(dir.join("model.safetensors")).unwrap();
    let mut names = vec![("token_embd".to_owned(), "embed_tokens".to_owned(), 0.0), ("output_norm".into(), "norm".into(), 1.0)];
    for layer in 0..6 {
        let parts = [
            ("attn_norm", "input_layernorm", 1.0),
            ("attn_q", "self_attn.q_proj", 0.0),
            ("attn_k", "self_attn.k_proj", 0.0),
            ("attn_v", "self_attn.v_proj", 0.0),
            ("attn_q_norm", "self_attn.q_norm", 1.0),
            ("attn_k_norm", "self_attn.k_norm", 1.0),
            ("attn_output", "self_attn.o_proj", 0.0),
            ("post_attention_norm", "post_attention_layernorm", 1.0),
            ("ffn_norm", "pre_feedforward_layernorm", 1.0),
            ("ffn_gate", "mlp.gate_proj", 0.0),
            ("ffn_up", "mlp.up_proj", 0.0),
            ("ffn_down", "mlp.down_proj", 0.0),
            ("post_ffw_norm", "post_feedforward_layernorm", 1.0),
        ];
        let named = |(gguf, hub, offset)| (format!("blk.{layer}.{gguf}"), format!("layers.{layer}.{hub}"), offset);
        names.extend(parts.map(named));
    }
    for (name, hub, offset) in names {
        let (dims, bytes) = floats(&model, &format!("{hub}.weight"), offset);
        gguf = gguf.weight(&format!("{name}.weight"), &dims, 0, &bytes);
    }
    for (name, module) in [("dense_2", "2_Dense"), ("dense_3", "3_Dense")] {
        let (dims, bytes) = floats(&fs::read(dir.join(module).join("model.safetensors")).unwrap(), "linear.weight", 0.0);
        gguf = gguf.weight(&format!("{name}.weight"), &dims, 0, &bytes);
    }
    gguf.write(path);
}

#[test]
fn a_gguf_file_gives_the_same_vectors() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    let source =
        || ModelSource::Gguf { files: vec![path.clone()], tokenizer_dir: Some(folder("embeddinggemma")), tokenizer_json: None };
    write_gguf(&path, 1);
    check_goldens(&Engine::load(&source(), &pooled(exact(), None), &|_| {}).unwrap(), "embeddinggemma");
    write_gguf(&path, 4);
    let Err(error) = Engine::load(&source(), &pooled(exact(), None), &|_| {}) else { panic!("a reranker") };
    assert!(error.to_string().contains("pooling_type"), "{error}");
    check_goldens(&Engine::load(&source(), &pooled(exact(), Some(Pooling::Mean)), &|_| {}).unwrap(), "embeddinggemma");
}

#[test]
fn the_memory_plan_counts_the_dense_layers() {
    let config = pooled(exact(), None);
    for model in MODELS {
        let plan = Engine::memory_plan(&source(&folder(model)), &config, None).unwrap();
        let engine = start(model, exact());
        assert_eq!(plan.devices[0].weights, engine.weight_bytes(), "{model}");
        assert_eq!(engine.memory_ledger().devices[0].weights, engine.weight_bytes(), "{model}");
    }
}
