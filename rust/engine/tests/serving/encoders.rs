//! Vectors of encoders (BERT and its kin), compared with those of sentence-transformers.

use std::sync::Arc;

use device::{Backend, cpu::ReferenceBackend};
use engine::{EmbeddingInput, EmbeddingOptions, EmbeddingRequest, Engine, EngineConfig, ModelSource, Truncation};
use serde_json::Value;

use crate::common::{
    drawn,
    serving::{exact, pool_of, stats},
};

const MODELS: [&str; 6] = ["bert", "xlm-roberta", "distilbert", "nomic", "modernbert", "eurobert"];

fn source(name: &str) -> ModelSource {
    ModelSource::HuggingFace { path: drawn::encoder(name), tokenizer_json: None }
}

fn pooled(config: EngineConfig) -> EngineConfig {
    EngineConfig { embedding: Some(EmbeddingOptions::default()), ..config }
}

fn start(name: &str, config: EngineConfig) -> Engine {
    Engine::load(&source(name), &pooled(config), &|_| {}).unwrap()
}

fn golden(name: &str) -> Vec<Value> {
    let bytes = std::fs::read(drawn::encoder(name).join("golden.json")).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

fn of(inputs: Vec<EmbeddingInput>) -> EmbeddingRequest {
    EmbeddingRequest { inputs, truncation: Truncation::ToModel, ..EmbeddingRequest::default() }
}

fn text(case: &Value) -> EmbeddingInput {
    EmbeddingInput::Text(case["input"].as_str().unwrap().to_owned())
}

fn ids(case: &Value) -> Vec<u32> {
    case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn vector(case: &Value) -> Vec<f32> {
    case["vector"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect()
}

fn bits(vectors: &[Vec<f32>]) -> Vec<Vec<u32>> {
    vectors.iter().map(|vector| vector.iter().map(|value| value.to_bits()).collect()).collect()
}

fn check(engine: &Engine, name: &str) {
    for case in golden(name) {
        let [request] = &engine.embedding_requests(of(vec![text(&case)])).unwrap()[..] else { panic!("one request") };
        let engine::Prompt::TokenIds(tokens) = &request.prompt else { panic!("token ids") };
        assert_eq!(*tokens, ids(&case), "{name}: {}", case["input"]);
        let got = &engine.embed(of(vec![text(&case)])).unwrap()[0];
        let farthest = got.iter().zip(vector(&case)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(farthest <= 5e-4, "{name}: a value is {farthest} away for {}", case["input"]);
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
            let cosine: f32 = got.iter().zip(vector(&case)).map(|(a, b)| a * b).sum();
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
fn an_encoder_writes_no_text() {
    for name in ["bert", "modernbert"] {
        let Err(error) = Engine::load(&source(name), &exact(), &|_| {}) else { panic!("text by {name}") };
        assert!(error.to_string().contains("Which.Embedding"), "{error}");
    }
}
