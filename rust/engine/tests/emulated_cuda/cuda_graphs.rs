//! Steps that are replayed from a recording, on the kernels' real source compiled for the CPU.

use std::sync::Arc;

use device::{
    KvDType, Precision,
    cuda::{CudaBackend, CudaOptions},
};
use engine::{Engine, EngineConfig, GenerationRequest, Message, MessageContent, ModelSource, images::RgbImage};
use kernel_tests::{EmulatedDriver, Order};
use serde_json::json;

use crate::{
    MIB,
    common::{
        Harness, drawn, gguf, hugging_face, load,
        media::{self, bits},
        serving::{greedy, request},
    },
    gpu,
};

/// Logits of requests that begin with prompts of these lengths and decode in batches of all sizes, in some with more rows, as
/// drafts have; and how many steps are recorded.
fn logits(source: &ModelSource, options: CudaOptions, precision: Precision, prompts: &[usize]) -> (Vec<Vec<Vec<f32>>>, usize) {
    let driver = Arc::new(EmulatedDriver::new(Order::Ascending));
    let backend = CudaBackend::with(Arc::<EmulatedDriver>::clone(&driver), options).unwrap();
    let mut runner = load(source, Arc::new(backend), precision, KvDType::F32);
    let vocab_size = runner.config().vocab_size;
    let mut harness = Harness::new(&mut runner, 8);
    let decoded = 2 * prompts.len() + 14;
    let sequences: Vec<_> = prompts
        .iter()
        .enumerate()
        .map(|(i, prompt)| {
            harness.add((0..prompt + decoded).map(|t| ((t * 7 + i * 31 + 5) % vocab_size) as u32).collect(), *prompt)
        })
        .collect();
    for (sequence, prompt) in sequences.iter().zip(prompts) {
        harness.step(&[(*sequence, *prompt)]);
    }
    for (number, size) in (1..=sequences.len()).chain((1..=sequences.len()).rev()).enumerate() {
        let batch: Vec<_> = sequences[..size].iter().map(|sequence| (*sequence, 1)).collect();
        harness.step(&batch);
        // A step with a prompt in between makes buffers larger, and is not recorded.
        if number == 1 {
            harness.step(&[(sequences[0], 3), (sequences[1], 1)]);
            harness.step(&[(sequences[0], 10), (sequences[1], 1)]);
        }
    }
    let logits = sequences.into_iter().map(|sequence| harness.finish(sequence, 1)).collect();
    (logits, driver.num_recorded())
}

#[test]
fn replayed_steps_have_the_bits_of_steps_that_run_as_they_are() {
    let (_folder, with_positions) = drawn::model("opt");
    let models = [
        (with_positions, Precision::Exact),
        (hugging_face("llama"), Precision::Exact),
        (gguf("llama"), Precision::Fast),
        (hugging_face("gemma3"), Precision::Fast),
        (hugging_face("qwen3-moe"), Precision::Fast),
        (hugging_face("deepseek-v2-lite"), Precision::Fast),
    ];
    for (source, precision) in &models {
        let (precision, prompts) = (*precision, [3, 12, 1]);
        let (expected, none) = logits(source, CudaOptions { graphs: false, ..CudaOptions::default() }, precision, &prompts);
        let (actual, recorded) = logits(source, CudaOptions::default(), precision, &prompts);
        assert_eq!(none, 0, "graphs were asked not to be");
        assert!(recorded > 0, "no CUDA graph was recorded");
        assert!(expected == actual, "{source:?} {precision:?}: a replayed step gives other bits");
    }
}

/// Steps of three requests are padded to four, and the one that pads keeps no states.
fn check_recurrent(model: &str) {
    let (source, prompts) = (hugging_face(model), [2, 1, 1]);
    let (expected, _) = logits(&source, CudaOptions { graphs: false, ..CudaOptions::default() }, Precision::Exact, &prompts);
    let (actual, recorded) = logits(&source, CudaOptions::default(), Precision::Exact, &prompts);
    assert!(recorded > 0 && expected == actual, "{model}: {recorded} recorded");
}

#[test]
#[ignore = "models in the emulation; make test-long"]
fn recurrent_layers_are_replayed_with_the_states_of_each_step() {
    check_recurrent("lfm2");
}

#[test]
#[ignore = "a quarter of a minute; make test-long"]
fn recurrent_layers_of_every_kind_are_replayed() {
    for model in ["granitemoehybrid-dense", "qwen3_5"] {
        check_recurrent(model);
    }
}

#[test]
fn long_contexts_are_replayed_as_well() {
    let source = hugging_face("llama");
    let prompts = [250, 5];
    let (expected, _) = logits(&source, CudaOptions { graphs: false, ..CudaOptions::default() }, Precision::Fast, &prompts);
    let (actual, recorded) = logits(&source, CudaOptions::default(), Precision::Fast, &prompts);
    assert!(recorded > 0 && expected == actual, "{recorded} recorded");
}

/// Steps of four rows are recorded for a text, and rows before an image have coordinates: the graph's table of rotations has no
/// rows for these.
#[test]
fn rows_with_coordinates_are_not_replayed() {
    let source = ModelSource::HuggingFace { path: drawn::seeing("qwen2_vl"), tokenizer_json: None };
    let config = EngineConfig { max_num_batched_tokens: 4, max_num_seqs: 2, ..media::config() };
    let image = Arc::new(RgbImage::new(56, 56, (0..56 * 56 * 3).map(|i| (i * 7 % 256) as u8).collect()).unwrap());
    let text = "Say in a few words what is here";
    let parts = json!([{"type": "text", "text": text}, {"type": "image"}]);
    let content = MessageContent::Parts(serde_json::from_value(parts).unwrap());
    let message = Message { media: vec![image.into()], ..Message::new("user", content) };
    let answers = |graphs| {
        let (backend, driver) = gpu(2048 * MIB, graphs);
        let engine = Engine::load_onto(&backend, &source, &config, &|_| {}).unwrap();
        media::run(&engine, request(0, 8, 2));
        let num_recorded = driver.num_recorded();
        let asked = GenerationRequest::chat(vec![message.clone()], greedy(4));
        (bits(&media::run(&engine, asked).1), num_recorded)
    };
    let ((expected, none), (actual, recorded)) = (answers(false), answers(true));
    assert_eq!(none, 0, "graphs were asked not to be");
    assert!(recorded > 0 && expected == actual, "{recorded} recorded: {expected:?} and {actual:?}");
}
