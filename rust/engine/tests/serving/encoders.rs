//! Vectors of encoders (BERT and its kin), and scores of pairs of texts, compared with those of sentence-transformers.

use std::sync::Arc;

use device::{Backend, cpu::ReferenceBackend};
use engine::{
    EmbeddingInput, EmbeddingOptions, EmbeddingRequest, Engine, EngineConfig, EngineError, ModelSource, Pooling, Prompt,
    RerankRequest, Truncation,
};
use serde_json::{Value, json};

use crate::common::{
    drawn,
    serving::{exact, pool_of, stats},
};

const MODELS: [&str; 9] = ["bert", "xlm-roberta", "roberta", "distilbert", "nomic", "modernbert", "eurobert", "gte", "jina3"];
const SCORERS: [&str; 8] = [
    "bert-rerank",
    "xlm-roberta-rerank",
    "distilbert-rerank",
    "modernbert-rerank",
    "gte-rerank",
    "qwen3-rerank",
    "qwen3-logit-rerank",
    "gemma2-logit-rerank",
];

pub fn source(name: &str) -> ModelSource {
    ModelSource::HuggingFace { path: drawn::encoder(name), tokenizer_json: None }
}

pub fn pooled(config: EngineConfig) -> EngineConfig {
    EngineConfig { embedding: Some(EmbeddingOptions::default()), ..config }
}

fn start(name: &str, config: EngineConfig) -> Engine {
    Engine::load(&source(name), &pooled(config), &|_| {}).unwrap()
}

pub fn json_of(name: &str, file: &str) -> Value {
    serde_json::from_slice(&std::fs::read(drawn::encoder(name).join(file)).unwrap()).unwrap()
}

pub fn golden(name: &str) -> Vec<Value> {
    json_of(name, "golden.json").as_array().unwrap().clone()
}

fn of(inputs: Vec<EmbeddingInput>) -> EmbeddingRequest {
    EmbeddingRequest { inputs, truncation: Truncation::ToModel, ..EmbeddingRequest::default() }
}

fn text(case: &Value) -> EmbeddingInput {
    EmbeddingInput::Text(case["input"].as_str().unwrap().to_owned())
}

pub fn ids(list: &Value) -> Vec<u32> {
    list.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn numbers(list: &Value) -> Vec<f32> {
    list.as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect()
}

pub fn farthest(got: &[f32], expected: &Value) -> f32 {
    let expected = numbers(expected);
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The query and the documents of a golden.
pub fn pairs(golden: &Value) -> RerankRequest {
    let text = |text: &Value| text.as_str().unwrap().to_owned();
    let documents = golden["documents"].as_array().unwrap().iter().map(text).collect();
    RerankRequest { query: text(&golden["query"]), documents, truncation: Truncation::ToModel, ..RerankRequest::default() }
}

fn bits(vectors: &[Vec<f32>]) -> Vec<Vec<u32>> {
    vectors.iter().map(|vector| vector.iter().map(|value| value.to_bits()).collect()).collect()
}

pub fn check(engine: &Engine, name: &str) {
    for case in golden(name) {
        let [request] = &engine.embedding_requests(of(vec![text(&case)])).unwrap()[..] else { panic!("one request") };
        let engine::Prompt::TokenIds(tokens) = &request.prompt else { panic!("token ids") };
        assert_eq!(*tokens, ids(&case["ids"]), "{name}: {}", case["input"]);
        let got = &engine.embed(of(vec![text(&case)])).unwrap()[0];
        let farthest = farthest(got, &case["vector"]);
        assert!(farthest <= 2e-5, "{name}: a value is {farthest} away for {}", case["input"]);
    }
}

#[test]
fn vectors_of_encoders_are_those_of_sentence_transformers() {
    for name in MODELS {
        check(&start(name, exact()), name);
        let backend: Arc<dyn Backend> = Arc::new(ReferenceBackend::new());
        check(&Engine::load_onto(&backend, &source(name), &pooled(exact()), &|_| {}).unwrap(), name);
    }
}

#[test]
fn the_fast_path_of_encoders_points_the_same_way() {
    for name in MODELS {
        let engine = start(name, EngineConfig::default());
        for case in golden(name) {
            let got = &engine.embed(of(vec![text(&case)])).unwrap()[0];
            let cosine: f32 = got.iter().zip(numbers(&case["vector"])).map(|(a, b)| a * b).sum();
            assert!(cosine > 0.999, "{name}: {cosine} for {}", case["input"]);
        }
    }
}

#[test]
fn an_encoder_s_vector_has_the_same_bits_alone_and_in_a_batch() {
    for name in MODELS {
        let cases = golden(name);
        let engine = start(name, exact());
        let alone: Vec<_> = cases.iter().flat_map(|case| engine.embed(of(vec![text(case)])).unwrap()).collect();
        let tight = start(name, EngineConfig { paged_attention: pool_of(160, 8), max_num_batched_tokens: 150, ..exact() });
        for engine in [&engine, &tight] {
            assert_eq!(bits(&engine.embed(of(cases.iter().map(text).collect())).unwrap()), bits(&alone), "{name}");
            assert_eq!(stats(engine).blocks_used, 0);
        }
    }
}

#[test]
fn the_memory_plan_counts_what_encoders_add_to_token_embeddings() {
    for name in MODELS.into_iter().chain(SCORERS) {
        let plan = Engine::memory_plan(&source(name), &pooled(exact()), None).unwrap();
        assert_eq!(plan.devices[0].weights, start(name, exact()).weight_bytes(), "{name}");
    }
}

#[test]
fn an_encoder_writes_no_text() {
    for name in ["bert", "modernbert"] {
        let Err(error) = Engine::load(&source(name), &exact(), &|_| {}) else { panic!("text by {name}") };
        assert!(error.to_string().contains("Which.Embedding"), "{error}");
    }
}

pub fn check_scores(engine: &Engine, name: &str) {
    let golden = json_of(name, "golden.json");
    let requests = engine.rerank_requests(pairs(&golden)).unwrap();
    for (number, request) in requests.iter().enumerate() {
        let Prompt::TokenPair { ids: tokens, second } = &request.prompt else { panic!("a pair") };
        assert_eq!(*tokens, ids(&golden["ids"][number]), "{name}");
        let types: Vec<_> = (0..tokens.len()).map(|at| u32::from(at >= *second)).collect();
        assert_eq!(types, ids(&golden["types"][number]), "{name}");
    }
    // MS MARCO's models give logits.
    let expected = &golden[if ["bert-rerank", "qwen3-logit-rerank"].contains(&name) { "logits" } else { "scores" }];
    let farthest = farthest(&engine.rerank(pairs(&golden)).unwrap(), expected);
    assert!(farthest <= 2e-5, "{name}: a score is {farthest} away");
}

#[test]
fn scores_of_pairs_are_those_of_sentence_transformers() {
    for name in SCORERS {
        check_scores(&start(name, exact()), name);
        let backend: Arc<dyn Backend> = Arc::new(ReferenceBackend::new());
        check_scores(&Engine::load_onto(&backend, &source(name), &pooled(exact()), &|_| {}).unwrap(), name);
    }
}

#[test]
fn a_score_has_the_same_bits_alone_in_a_batch_and_in_a_tight_pool() {
    for name in SCORERS {
        let golden = json_of(name, "golden.json");
        let engine = start(name, exact());
        let together = engine.rerank(pairs(&golden)).unwrap();
        let alone = |document: &String| {
            let request = RerankRequest { documents: vec![document.clone()], ..pairs(&golden) };
            engine.rerank(request).unwrap()[0]
        };
        assert_eq!(pairs(&golden).documents.iter().map(alone).collect::<Vec<_>>(), together, "{name}");
        let tight = start(name, EngineConfig { paged_attention: pool_of(160, 8), max_num_batched_tokens: 150, ..exact() });
        assert_eq!(tight.rerank(pairs(&golden)).unwrap(), together, "{name}");
        assert_eq!(stats(&tight).blocks_used, 0);
    }
}

#[test]
fn the_longer_text_of_a_pair_is_cut() {
    let engine = start("bert-rerank", exact());
    let long = "crabs live where it rained ".repeat(60);
    let request = |truncation| RerankRequest {
        query: "A crab.".into(),
        documents: vec![long.clone()],
        truncation,
        ..RerankRequest::default()
    };
    match engine.rerank(request(Truncation::Refuse)) {
        Err(EngineError::PromptTooLong { max_tokens, message, .. }) => {
            assert!(max_tokens == 150 && message.starts_with("documents[0] and the query have "), "{message}");
        }
        other => panic!("{other:?}"),
    }
    for (truncation, len) in [(Truncation::ToModel, 150), (Truncation::To(20), 20)] {
        let Prompt::TokenPair { ids, second } = &engine.rerank_requests(request(truncation)).unwrap()[0].prompt else {
            panic!("a pair")
        };
        // The query is whole: [CLS] a crab . [SEP].
        assert_eq!((ids.len(), *second), (len, 5));
    }
    let error = engine.rerank(request(Truncation::To(4))).unwrap_err().to_string();
    assert!(error.contains("leave room"), "{error}");
}

#[test]
fn vectors_and_scores_are_refused_where_a_model_makes_the_other() {
    let scorer = start("bert-rerank", exact());
    let error = scorer.embed(of(vec![EmbeddingInput::Text("A crab.".into())])).unwrap_err().to_string();
    assert!(error.contains("POST /v1/rerank") && error.contains("pooling"), "{error}");
    let golden = json_of("bert-rerank", "golden.json");
    let error = start("bert", exact()).rerank(pairs(&golden)).unwrap_err().to_string();
    assert!(error.contains("ForSequenceClassification"), "{error}");
    let embedding = Some(EmbeddingOptions { pooling: Some(Pooling::Mean) });
    let vectors = Engine::load(&source("bert-rerank"), &EngineConfig { embedding, ..exact() }, &|_| {}).unwrap();
    assert_eq!(vectors.embed(of(vec![EmbeddingInput::Text("A crab.".into())])).unwrap()[0].len(), 64);
}

#[test]
fn a_vocab_txt_is_what_a_tokenizer_json_says() {
    let dir = tempfile::tempdir().unwrap();
    let folder = drawn::encoder("bert");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(folder.join(file), dir.path().join(file)).unwrap();
    }
    let tokenizer = json_of("bert", "tokenizer.json");
    let mut tokens: Vec<_> = tokenizer["model"]["vocab"].as_object().unwrap().iter().collect();
    tokens.sort_by_key(|(_, id)| id.as_u64());
    let lines: String = tokens.iter().flat_map(|(token, _)| [token, "\n"]).collect();
    std::fs::write(dir.path().join("vocab.txt"), lines).unwrap();
    let load = || {
        let source = ModelSource::HuggingFace { path: dir.path().to_owned(), tokenizer_json: None };
        let embedding = Some(EmbeddingOptions { pooling: Some(Pooling::Mean) });
        Engine::load(&source, &EngineConfig { embedding, ..exact() }, &|_| {})
    };
    check(&load().unwrap(), "bert");
    // Capitals have no tokens there.
    std::fs::write(dir.path().join("tokenizer_config.json"), r#"{"do_lower_case": false}"#).unwrap();
    let ids = load().unwrap().tokenize_text("A crab.", true).unwrap();
    assert_eq!((ids[1], &ids[2..]), (1, &ids_of_crab()[2..]));
    std::fs::write(dir.path().join("vocab.txt"), "a\nb\n").unwrap();
    let error = load().map(drop).unwrap_err().to_string();
    assert!(error.contains("no token [CLS]"), "{error}");
}

/// `[CLS] a crab . [SEP]`.
fn ids_of_crab() -> Vec<u32> {
    ids(&golden("bert")[0]["ids"])
}

/// A copy of a golden in which one JSON file is another, null where it was not there.
pub fn changed(name: &str, file: &str, change: &dyn Fn(&mut Value)) -> tempfile::TempDir {
    let (dir, folder) = (tempfile::tempdir().unwrap(), drawn::encoder(name));
    for below in ["", "1_Pooling", "1_LogitScore"] {
        std::fs::create_dir_all(dir.path().join(below)).unwrap();
        for entry in std::fs::read_dir(folder.join(below)).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_file() {
                std::fs::copy(&path, dir.path().join(below).join(path.file_name().unwrap())).unwrap();
            }
        }
    }
    let path = dir.path().join(file);
    let mut value = std::fs::read(&path).map_or(Value::Null, |bytes| serde_json::from_slice(&bytes).unwrap());
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
    dir
}

fn open(dir: &tempfile::TempDir) -> Result<Engine, EngineError> {
    let source = ModelSource::HuggingFace { path: dir.path().to_owned(), tokenizer_json: None };
    Engine::load(&source, &pooled(exact()), &|_| {})
}

#[test]
fn what_would_change_scores_is_refused_by_name() {
    let own = "config_sentence_transformers.json";
    let refused =
        |file: &str, change: &dyn Fn(&mut Value)| open(&changed("bert-rerank", file, change)).map(drop).unwrap_err().to_string();
    assert!(refused(own, &|value| value["activation_fn"] = json!("mine.Softplus")).contains("mine.Softplus"));
    assert!(refused(own, &|value| value["default_prompt_name"] = json!("query")).contains("default_prompt_name"));
    assert!(refused("config.json", &|value| value["position_embedding_type"] = json!("relative_key")).contains("relative_key"));
    assert!(refused("config.json", &|value| value["type_vocab_size"] = json!(3)).contains("token_type_embeddings"));
    assert!(refused("config.json", &|value| value["type_vocab_size"] = json!(1)).contains("type_vocab_size is 1"));
    assert!(refused("sentence_bert_config.json", &|value| value["nonsense"] = json!(3)).contains("nonsense"));
    let dense = json!({"type": "sentence_transformers.models.Dense", "path": "1_Dense"});
    assert!(refused("modules.json", &|value| value.as_array_mut().unwrap().push(dense.clone())).contains("Dense"));
    open(&changed("bert-rerank", own, &|value| value["activation_fn"] = json!("torch.nn.modules.activation.Sigmoid"))).unwrap();
}

#[test]
fn what_would_change_scores_of_logits_is_refused_by_name() {
    let refused = |file: &str, change: &dyn Fn(&mut Value)| {
        open(&changed("qwen3-logit-rerank", file, change)).map(drop).unwrap_err().to_string()
    };
    let model = "sentence_bert_config.json";
    for (file, key, value) in [
        (model, "transformer_task", json!("any-to-any")),
        (model, "module_output_name", json!("scores")),
        (model, "do_lower_case", json!(true)),
        (model, "nonsense", json!(1)),
        ("1_LogitScore/config.json", "true_token_id", json!(100_000)),
        ("1_LogitScore/config.json", "true_token_id", Value::Null),
        ("1_LogitScore/config.json", "false_token_id", json!(-1)),
        ("1_LogitScore/config.json", "module_input_name", json!("scores")),
        ("1_LogitScore/config.json", "nonsense", json!(1)),
        ("config_sentence_transformers.json", "default_prompt_name", json!("passage")),
    ] {
        let error = refused(file, &|object| object[key] = value.clone());
        assert!(error.contains(&format!("`{key}`")), "{key}: {error}");
    }
    for kind in ["image", "message"] {
        let change = |value: &mut Value| value["modality_config"][kind] = json!({"method": "forward", "format": "auto"});
        assert!(refused(model, &change).contains("`modality_config`"));
    }
    let processing = |key: &'static str, value: Value| {
        refused(model, &move |config| config["processing_kwargs"]["chat_template"][key] = value.clone())
    };
    assert!(processing("max_length", json!(20)).contains("chat_template.max_length"));
    assert!(processing("add_generation_prompt", json!("yes")).contains("chat_template.add_generation_prompt"));
    let error = refused(model, &|value| value["processing_kwargs"]["text"] = json!({"padding_side": "right"}));
    assert!(error.contains("processing_kwargs.text"), "{error}");
    let dense = json!({"type": "sentence_transformers.models.Dense", "path": "2_Dense"});
    assert!(refused("modules.json", &|value| value.as_array_mut().unwrap().push(dense.clone())).contains("LogitScore"));
    // Without such a module it is a model of text, for which nothing is guessed.
    let error = refused("modules.json", &|value| drop(value.as_array_mut().unwrap().pop()));
    assert!(error.contains("pooling=") && error.contains("LogitScore"), "{error}");
    let templates = |template: &str| {
        let dir = changed("qwen3-logit-rerank", "config.json", &|_| {});
        std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
        open(&dir).map(drop).unwrap_err().to_string()
    };
    assert!(templates("{{ messages[1].content }}").contains("which leaves out the document"));
    assert!(templates("{{ messages[2].content }}").contains("which leaves out the query"));
    let embedding = Some(EmbeddingOptions { pooling: Some(Pooling::Mean) });
    let vectors = Engine::load(&source("qwen3-logit-rerank"), &EngineConfig { embedding, ..exact() }, &|_| {}).unwrap();
    assert_eq!(vectors.embed(of(vec![EmbeddingInput::Text("A crab.".into())])).unwrap()[0].len(), 64);
}

#[test]
fn a_prompt_that_is_cut_keeps_what_its_template_ends_with() {
    let request = |truncation| RerankRequest {
        query: "A crab.".into(),
        documents: vec!["crabs live where it rained ".repeat(60)],
        truncation,
        ..RerankRequest::default()
    };
    let prompt = |file: &str, change: &dyn Fn(&mut Value)| {
        let engine = open(&changed("qwen3-logit-rerank", file, change)).unwrap();
        match &engine.rerank_requests(request(Truncation::To(40))).unwrap()[0].prompt {
            Prompt::TokenPair { ids, .. } => (ids.clone(), engine.tokenize_text("[SEP] What do they eat? crabs", false).unwrap()),
            _ => panic!("a pair"),
        }
    };
    let (ids, end) = prompt("config.json", &|_| {});
    assert!(ids.len() == 40 && ids[0] == 2 && ids.ends_with(&end));
    let (left, _) = prompt("tokenizer_config.json", &|value| value["truncation_side"] = json!("left"));
    assert!(left.len() == 40 && left[0] != 2 && left.ends_with(&end));
    let (bare, _) = prompt("sentence_bert_config.json", &|value| {
        value["processing_kwargs"]["chat_template"]["restore_suffix"] = json!(false);
    });
    assert!(bare.len() == 40 && !bare.ends_with(&end));
    let error = start("qwen3-logit-rerank", exact()).rerank(request(Truncation::Refuse)).unwrap_err().to_string();
    assert!(error.starts_with("documents[0] and the query have "), "{error}");
}

#[test]
fn a_template_gets_contents_as_lists_where_its_files_say_so() {
    let dir = changed("qwen3-logit-rerank", "sentence_bert_config.json", &|value| {
        value["modality_config"]["message"]["format"] = json!("structured");
    });
    let template = std::fs::read_to_string(dir.path().join("chat_template.jinja")).unwrap();
    let template = template.replace("message.content", "message.content[0].text").replace(" | first }}", " | first)[0].text }}");
    let template = template.replace("{{ messages |", "{{ (messages |");
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    check_scores(&open(&dir).unwrap(), "qwen3-logit-rerank");
}

#[test]
fn the_memory_of_a_scorer_by_logits_is_planned_without_its_weights() {
    let dir = changed("qwen3-logit-rerank", "config.json", &|_| {});
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let source = ModelSource::HuggingFace { path: dir.path().to_owned(), tokenizer_json: None };
    let plan = Engine::memory_plan(&source, &pooled(exact()), None).unwrap();
    assert!(plan.devices[0].weights > 0);
}

#[test]
fn files_say_how_texts_of_pairs_are_written_cut_and_told_apart() {
    let golden = json_of("bert-rerank", "golden.json");
    let prompts = |file: &str, change: &dyn Fn(&mut Value)| {
        let requests = open(&changed("bert-rerank", file, change)).unwrap().rerank_requests(pairs(&golden)).unwrap();
        let of = |request: engine::GenerationRequest| match request.prompt {
            Prompt::TokenPair { ids, second } => (ids, second),
            _ => panic!("a pair"),
        };
        requests.into_iter().map(of).collect::<Vec<_>>()
    };
    let long = prompts("sentence_bert_config.json", &|value| value["max_seq_length"] = json!(12));
    assert!(long.iter().all(|(ids, _)| ids.len() <= 12));
    let untold = prompts("tokenizer_config.json", &|value| value["model_input_names"] = json!(["input_ids", "attention_mask"]));
    assert!(untold.iter().all(|(ids, second)| *second == ids.len()));
    let left = prompts("tokenizer_config.json", &|value| {
        (value["truncation_side"], value["model_max_length"]) = (json!("left"), json!(20));
    });
    let whole = ids(&golden["ids"][2]);
    assert_eq!(left[2].0[10..], whole[whole.len() - 10..]);
}

#[test]
fn an_empty_pair_is_named() {
    let engine = open(&changed("qwen3-rerank", "tokenizer.json", &|value| value["post_processor"] = Value::Null)).unwrap();
    let documents = vec!["a".to_owned(), String::new()];
    let error = engine.rerank(RerankRequest { documents, ..RerankRequest::default() }).unwrap_err().to_string();
    assert!(error.starts_with("documents[1] and the query are empty"), "{error}");
}

#[test]
fn a_folder_that_pools_makes_vectors_whatever_class_its_model_is_of() {
    let classes = json!(["BertForSequenceClassification"]);
    check(&open(&changed("bert", "config.json", &|value| value["architectures"] = classes.clone())).unwrap(), "bert");
}

/// Keys as the hub's files of these families have them; goldens have Transformers 5's.
#[test]
fn configurations_as_the_hub_has_them() {
    let modern = changed("modernbert", "config.json", &|value| {
        let config = value.as_object_mut().unwrap();
        config.remove("layer_types").unwrap();
        config.remove("rope_parameters").unwrap();
        config.insert("position_embedding_type".into(), json!("absolute"));
        config.insert("global_rope_theta".into(), json!(160_000.0));
        config.insert("local_rope_theta".into(), json!(10_000.0));
    });
    check(&open(&modern).unwrap(), "modernbert");
    let nomic = changed("nomic", "config.json", &|value| {
        *value = json!({
            "model_type": "nomic_bert", "activation_function": "swiglu", "n_embd": 64, "n_head": 4, "n_inner": 96, "n_layer": 3,
            "n_positions": 256, "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
            "rotary_emb_interleaved": false, "rotary_emb_scale_base": null, "rotary_scaling_factor": null, "qkv_proj_bias": false,
            "mlp_fc1_bias": false, "mlp_fc2_bias": false, "prenorm": false, "parallel_block": false, "use_rms_norm": false,
            "causal": false, "type_vocab_size": 2, "vocab_size": value["vocab_size"], "pad_vocab_size_multiple": 64,
            "fused_bias_fc": true, "use_flash_attn": true,
        });
    });
    check(&open(&nomic).unwrap(), "nomic");
}

/// A copy of a golden whose tensors have other names.
fn renamed(name: &str, rename: &dyn Fn(&str) -> String, change: &dyn Fn(&mut Value)) -> tempfile::TempDir {
    let dir = changed(name, "config.json", change);
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors();
    let renamed = tensors.into_iter().map(|(name, tensor)| (rename(&name), tensor));
    std::fs::write(&path, safetensors::serialize(renamed, None).unwrap()).unwrap();
    dir
}

/// GTE's configuration as the hub has it.
fn hub_gte(value: &mut Value) {
    let config = value.as_object_mut().unwrap();
    config.remove("rope_parameters").unwrap();
    for (key, value) in [
        ("model_type", json!("new")),
        ("rope_theta", json!(160_000.0)),
        ("rope_scaling", Value::Null),
        ("layer_norm_type", json!("layer_norm")),
        ("position_embedding_type", json!("rope")),
        ("logn_attention_scale", json!(false)),
        ("logn_attention_clip1", json!(false)),
        ("pack_qkv", json!(true)),
        ("unpad_inputs", json!("true")),
        ("use_memory_efficient_attention", json!(false)),
    ] {
        config.insert(key.into(), value);
    }
}

#[test]
fn gte_as_the_hub_has_it() {
    check(&open(&changed("gte", "config.json", &hub_gte)).unwrap(), "gte");
    let below_new = |name: &str| name.replace("gte.", "new.");
    check_scores(&open(&renamed("gte-rerank", &below_new, &hub_gte)).unwrap(), "gte-rerank");
    for (key, value) in [
        ("layer_norm_type", json!("rms_norm")),
        ("position_embedding_type", json!("absolute")),
        ("logn_attention_scale", json!(true)),
        ("rope_scaling", json!({"type": "ntk"})),
        ("rope_scaling", json!({"type": "ntk", "factor": 2.0, "mixed_b": 0.5})),
        ("rope_scaling", json!({"type": "ntk", "factor": 0.0})),
        ("rope_scaling", json!({"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16})),
    ] {
        let dir = changed("gte", "config.json", &|config| {
            hub_gte(config);
            config[key] = value.clone();
        });
        let error = open(&dir).map(drop).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
}

/// Transformers keeps each matrix by itself within the model, and so do some files of the hub.
#[test]
fn gte_with_each_matrix_by_itself() {
    for (layers, attention, norms) in [
        ("layers.", "self_attn.", ["post_attention_layernorm", "post_mlp_layernorm"]),
        ("encoder.layer.", "attention.", ["attn_ln", "mlp_ln"]),
    ] {
        let dir = changed("gte", "config.json", &|_| {});
        let path = dir.path().join("model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        let mut parts = Vec::new();
        for (name, tensor) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let (name, whole) = (name.replace("encoder.layer.", layers).replace("attention.", attention), tensor.data());
            let name = name.replace("attn_ln", norms[0]).replace("mlp_ln", norms[1]);
            let all = [("qkv_proj", &["q_proj", "k_proj", "v_proj"][..]), ("up_gate_proj", &["up_proj", "gate_proj"])];
            let names = match all.into_iter().find(|(fused, _)| name.contains(fused)) {
                Some((fused, own)) => own.iter().map(|own| name.replace(fused, own)).collect(),
                None => vec![name],
            };
            let mut shape = tensor.shape().to_vec();
            shape[0] /= names.len();
            for (name, part) in names.iter().zip(whole.chunks(whole.len() / names.len())) {
                let part = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), part).unwrap();
                parts.push((name.clone(), part));
            }
        }
        std::fs::write(&path, safetensors::serialize(parts, None).unwrap()).unwrap();
        check(&open(&dir).unwrap(), "gte");
    }
}

/// The frequencies of `ntk` are those of a larger base, divided (Su, <https://kexue.fm/archives/9706>).
#[test]
fn gte_stretches_its_rotations_by_ntk() {
    let vectors = |change: &dyn Fn(&mut Value)| {
        let engine = open(&changed("gte", "config.json", change)).unwrap();
        engine.embed(of(golden("gte").iter().map(text).collect())).unwrap()
    };
    let by_ntk = vectors(&|config| {
        hub_gte(config);
        config["rope_scaling"] = json!({"type": "ntk", "factor": 2.0});
    });
    let by_base = vectors(&|config| {
        let factor = 2_f64.powf(2.0 / 16.0);
        config["rope_parameters"] = json!({"rope_type": "linear", "factor": factor, "rope_theta": 320_000.0});
    });
    assert_eq!(bits(&by_ntk), bits(&by_base));
    assert_ne!(bits(&by_ntk), bits(&vectors(&|_| {})));
}

#[test]
fn norms_as_tensorflow_called_them_are_read() {
    let older = |name: &str| name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
    check(&open(&renamed("bert", &older, &|_| {})).unwrap(), "bert");
}
