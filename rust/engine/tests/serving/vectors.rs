//! Hidden states behind the output norm: what logits are computed from, and what a request may end with.

use std::{collections::BTreeMap, fs, sync::Arc};

use device::{KvDType, Precision, cpu::ReferenceBackend};
use engine::{EngineConfig, EngineError, FinishReason, GenerationRequest, OutputEvent, OutputKind, Prompt, SamplingParams};

use crate::common::{
    Harness, golden_dir, hugging_face, load,
    serving::{exact, greedy, pool_of, prompt, start, stats, tokens},
};

/// Rows of a matrix of bfloat16, from a safetensors file.
fn bf16_rows(model: &str, name: &str) -> Vec<Vec<f32>> {
    let bytes = fs::read(golden_dir().join("text").join(model).join("model.safetensors")).unwrap();
    let (len, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(*len)).unwrap());
    let header: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header).unwrap();
    let entry = &header[name];
    assert_eq!(entry["dtype"], "BF16");
    let number = |value: &serde_json::Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    let offsets = &entry["data_offsets"];
    let value = |bytes: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
    let values: Vec<f32> = data[number(&offsets[0])..number(&offsets[1])].chunks_exact(2).map(value).collect();
    values.chunks_exact(number(&entry["shape"][1])).map(<[f32]>::to_vec).collect()
}

/// The model, the matrix that its logits come from, and what the products are multiplied by.
const MODELS: [(&str, &str, f64); 4] = [
    ("llama", "lm_head.weight", 1.0),
    ("qwen3", "lm_head.weight", 1.0),
    ("gemma3", "model.embed_tokens.weight", 1.0),
    ("granite", "lm_head.weight", 0.5),
];

/// The vector of each token of a prompt by the plain backend, and the logits of these.
fn reference(model: &str, ids: &[u32]) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let mut runner = load(&hugging_face(model), Arc::new(ReferenceBackend::new()), Precision::Exact, KvDType::F32);
    let mut harness = Harness::new(&mut runner, 16);
    let sequence = harness.add(ids.to_vec(), ids.len());
    let logits = harness.finish(sequence, ids.len());
    let rows: Vec<u32> = (0..ids.len() as u32).collect();
    let vectors = runner.vectors(&rows).unwrap();
    ((0..ids.len()).map(|row| vectors.row(row).to_vec()).collect(), logits)
}

#[test]
fn logits_are_the_output_matrix_times_the_vector() {
    for (model, output, scale) in MODELS {
        let (vectors, logits) = reference(model, &prompt(3, 24));
        let matrix = bf16_rows(model, output);
        for (vector, logits) in vectors.iter().zip(&logits) {
            for (row, &logit) in matrix.iter().zip(logits) {
                let products = row.iter().zip(vector).map(|(a, b)| f64::from(*a) * f64::from(*b) * scale);
                let (sum, size) = products.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                assert!((sum - f64::from(logit)).abs() <= 1e-6 * size + 1e-9, "{model}: {logit} is not {sum}");
            }
        }
    }
}

fn vector_of(i: usize, len: usize) -> GenerationRequest {
    let request = GenerationRequest::new(Prompt::TokenIds(prompt(i, len)), SamplingParams::default());
    GenerationRequest { output: OutputKind::Vector, ..request }
}

#[test]
fn a_request_ends_with_the_vector_of_its_last_token() {
    for (model, _, _) in MODELS {
        let configs = [
            ("at once", exact()),
            ("in chunks", EngineConfig { max_num_batched_tokens: 7, ..exact() }),
            ("without KV cache", EngineConfig { no_kv_cache: true, ..exact() }),
        ];
        let mut bits = Vec::new();
        for (way, config) in configs {
            let engine = start(model, &config);
            for again in [false, true] {
                let completion = engine.submit(vector_of(3, 24)).unwrap().wait().unwrap();
                let [choice] = &completion.choices[..] else { panic!("one choice") };
                assert_eq!((choice.finish_reason, choice.text.as_str()), (FinishReason::Stop, ""));
                assert_eq!((completion.usage.prompt_tokens, completion.usage.completion_tokens), (24, 0));
                let cached = again && !config.no_kv_cache;
                assert_eq!(completion.usage.cached_tokens, if cached { 23 } else { 0 }, "its blocks are found again");
                let vector = choice.vector.as_ref().expect("a vector");
                let (expected, _) = reference(model, &prompt(3, 24));
                let expected = expected.last().unwrap();
                let size = expected.iter().fold(0.0_f32, |size, x| size.max(x.abs()));
                assert_eq!(vector.len(), expected.len());
                for (a, b) in vector.iter().zip(expected) {
                    assert!((a - b).abs() <= 1e-4 * size, "{model}, {way}: {a} is not {b}");
                }
                bits.push(vector.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
            }
            let stats = stats(&engine);
            assert_eq!((stats.blocks_used, stats.requests_running, stats.requests_waiting), (0, 0, 0));
        }
        assert!(bits.windows(2).all(|pair| pair[0] == pair[1]), "{model}: not the same bits");
    }
}

#[test]
fn vectors_and_answers_share_steps_in_a_tight_pool() {
    let engine = start("llama", &EngineConfig { paged_attention: pool_of(200, 8), ..exact() });
    let alone = |i| engine.submit(vector_of(i, 60)).unwrap().wait().unwrap().choices.remove(0).vector;
    let expected: Vec<_> = (0..6).map(alone).collect();
    let answer = |i| GenerationRequest::new(Prompt::TokenIds(prompt(i, 50)), greedy(40));
    let expected_answers: Vec<_> = (6..9).map(|i| tokens(&engine.submit(answer(i)).unwrap().wait().unwrap())).collect();
    engine.pause().unwrap();
    let submit = |request| engine.submit(request).unwrap();
    let streams: Vec<_> = (0..6).map(|i| (submit(vector_of(i, 60)), (i < 3).then(|| submit(answer(6 + i))))).collect();
    engine.resume().unwrap();
    let mut answers = Vec::new();
    for ((vector, answer), expected) in streams.into_iter().zip(&expected) {
        assert_eq!(vector.wait().unwrap().choices[0].vector, *expected);
        answers.extend(answer.map(|stream| tokens(&stream.wait().unwrap())));
    }
    assert_eq!(answers, expected_answers);
    assert_eq!(stats(&engine).blocks_used, 0);
}

#[test]
fn events_are_the_vector_the_end_and_the_usage() {
    let engine = start("llama", &exact());
    let stream = engine.submit(vector_of(1, 10)).unwrap();
    let next = || stream.next_timeout(std::time::Duration::from_secs(20)).unwrap().expect("an event in time");
    assert!(matches!(next(), OutputEvent::Vector { index: 0, values } if values.len() == 64));
    assert!(matches!(next(), OutputEvent::Finished { index: 0, reason: FinishReason::Stop, .. }));
    assert!(matches!(next(), OutputEvent::Done(_)));
}

#[test]
fn what_is_about_tokens_alone_is_refused_by_name() {
    let engine = start("llama", &exact());
    let mut given = [vector_of(1, 8), vector_of(1, 8), vector_of(1, 8)];
    given[0].n_choices = 2;
    given[1].sampling.logprobs = Some(1);
    given[2].service.keep = true;
    for (request, name) in given.into_iter().zip(["n_choices", "logprobs", "keep"]) {
        match engine.submit(request) {
            Err(EngineError::InvalidArgument(message)) => assert!(message.starts_with(name), "{message}"),
            _ => panic!("{name} was taken"),
        }
    }
}
