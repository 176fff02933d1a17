//! Adapters against what PEFT and Transformers computed (tests/data/golden), and beside each other.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use device::{
    Backend,
    cpu::{Isa, ReferenceBackend},
};
use engine::{
    AdapterChoice, AdapterInfo, AdapterOptions, CpuOptions, Engine, EngineConfig, EngineError, GenerationRequest, LoadAdapter,
    ModelDType, ModelSource, Prompt, PromptLookup, Speculation,
};
use safetensors::{
    SafeTensors,
    tensor::{Dtype, TensorView},
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{
    self, drawn, gguf, hugging_face, log_softmax,
    lora::{PEFT, ask, bits, check, folder, golden, request, with_adapters},
    serving::{exact, greedy, prompt, stats, tokens},
};

fn load(source: &ModelSource, config: &EngineConfig) -> Engine {
    Engine::load(source, config, &|_| {}).unwrap()
}

fn llama_with(adapters: &[(&str, PathBuf)]) -> Engine {
    load(&hugging_face("llama"), &with_adapters(exact(), adapters))
}

#[test]
fn adapters_agree_with_goldens() {
    for name in PEFT {
        let source = hugging_face(&golden(name).base);
        let engine = load(&source, &with_adapters(exact(), &[("it", folder(name))]));
        check(&engine, name, "whole");
        let config = EngineConfig { max_num_batched_tokens: 7, ..exact() };
        check(&load(&source, &with_adapters(config, &[("it", folder(name))])), name, "in chunks of 7");
    }
}

#[test]
fn adapters_agree_with_goldens_on_the_reference_backend() {
    let backend: Arc<dyn Backend> = Arc::new(ReferenceBackend::new());
    for name in PEFT {
        let config = with_adapters(exact(), &[("it", folder(name))]);
        let engine = Engine::load_onto(&backend, &hugging_face(&golden(name).base), &config, &|_| {}).unwrap();
        check(&engine, name, "on the reference");
    }
}

#[test]
fn adapters_of_gguf_files_agree_with_goldens() {
    for name in ["llama", "qwen2"] {
        let adapter = format!("{name}-gguf");
        let file = folder(&adapter).join(format!("{adapter}.gguf"));
        let engine = load(&gguf(name), &with_adapters(exact(), &[("it", file)]));
        check(&engine, &adapter, "of a GGUF file");
    }
}

/// Rows of q and k lie in another order in the file than PEFT's.
#[test]
fn adapters_of_peft_go_on_a_gguf_base() {
    for (name, base) in [
        ("granitemoehybrid-mamba", "granitemoehybrid"),
        ("lfm2-conv", "lfm2"),
        ("llama-all-rslora", "llama"),
        ("llama-dora", "llama"),
        ("mistral-all-rslora", "mistral"),
        ("qwen2-bias", "qwen2"),
    ] {
        let engine = load(&gguf(base), &with_adapters(exact(), &[("it", folder(name))]));
        check(&engine, name, "on a GGUF base");
    }
}

#[test]
fn every_isa_agrees_with_goldens() {
    for isa in Isa::ALL.into_iter().filter(|isa| *isa <= Isa::detect()) {
        for name in ["lfm2-conv", "llama-all-rslora", "llama-dora", "llama-embed-head", "qwen3-moe-experts", "qwen3_5-mixers"] {
            let cpu = CpuOptions { isa: Some(isa.name().to_owned()), num_threads: Some(2) };
            let config = with_adapters(EngineConfig { cpu, ..exact() }, &[("it", folder(name))]);
            check(&load(&hugging_face(&golden(name).base), &config), name, isa.name());
        }
    }
}

/// As the fast path computes them: near, and with the drift of its quantized activations.
#[test]
fn the_fast_path_is_near_the_goldens() {
    for name in ["llama-all-rslora", "llama-dora", "qwen2-bias"] {
        let config = EngineConfig { dtype: ModelDType::Auto, ..EngineConfig::default() };
        let engine = load(&hugging_face(&golden(name).base), &with_adapters(config, &[("it", folder(name))]));
        for case in golden(name).completions {
            let completion = ask(&engine, case.prompt_ids.clone(), Some("it"), 1);
            let wanted = log_softmax(&case.last_logits);
            for top in &completion.choices[0].logprobs.iter().flatten().next().unwrap().top_logprobs {
                assert!((f64::from(top.logprob) - wanted[top.token_id as usize]).abs() <= 0.15, "{name}: {}", top.token_id);
            }
        }
    }
}

/// Whatever runs beside it, a request has the bits that it has alone; one without adapter those of a model without any.
#[test]
fn any_mixture_has_the_bits_of_each_alone() {
    let adapters: Vec<_> = PEFT.iter().filter(|name| name.starts_with("llama")).map(|name| (*name, folder(name))).collect();
    let choices: Vec<_> = adapters.iter().map(|(name, _)| Some(*name)).chain([None, None]).collect();
    let wishes: Vec<_> = (0..24).map(|i| (prompt(i, 3 + i * 7 % 61), choices[i * 5 % choices.len()])).collect();
    for config in [exact(), EngineConfig { deterministic: true, ..EngineConfig::default() }] {
        let config = EngineConfig { prefix_caching: false, max_num_batched_tokens: 64, ..config };
        let engine = load(&hugging_face("llama"), &with_adapters(config.clone(), &adapters));
        let plain = load(&hugging_face("llama"), &config);
        let alone: Vec<_> = wishes
            .iter()
            .map(|(ids, adapter)| bits(&ask(if adapter.is_some() { &engine } else { &plain }, ids.clone(), *adapter, 12)))
            .collect();
        let streams: Vec<_> =
            wishes.iter().map(|(ids, adapter)| engine.submit(request(ids.clone(), *adapter, 12)).unwrap()).collect();
        for ((stream, alone), (_, adapter)) in streams.into_iter().zip(&alone).zip(&wishes) {
            assert_eq!(bits(&stream.wait().unwrap()), *alone, "{adapter:?}");
        }
    }
}

#[test]
fn drafts_change_no_bit_of_an_adapted_answer() {
    let adapters = [("attn", folder("llama-attn")), ("layers", folder("llama-layers"))];
    let speculation = Some(Speculation::always(Arc::new(PromptLookup)));
    let engine = load(&hugging_face("llama"), &with_adapters(EngineConfig { speculation, ..exact() }, &adapters));
    let plain = llama_with(&adapters);
    let wishes = [Some("attn"), None, Some("layers"), Some("attn")].into_iter().enumerate();
    let wishes: Vec<_> = wishes.map(|(i, adapter)| (prompt(i, 12).repeat(3), adapter)).collect();
    let streams: Vec<_> =
        wishes.iter().map(|(ids, adapter)| engine.submit(request(ids.clone(), *adapter, 60)).unwrap()).collect();
    let answers: Vec<_> = streams.into_iter().map(|stream| stream.wait().unwrap()).collect();
    for ((ids, adapter), answer) in wishes.into_iter().zip(&answers) {
        assert_eq!(bits(answer), bits(&ask(&plain, ids, adapter, 60)), "{adapter:?}");
    }
    assert!(answers.iter().any(|answer| answer.usage.accepted_draft_tokens > 0), "no draft was right");
}

#[test]
fn experts_in_a_mixture_have_the_bits_of_each_alone() {
    check_mixture("qwen3-moe", ["qwen3-moe-experts", "qwen3-moe-params"], false);
}

/// Their states are those of requests with the same adapter, also where a prompt begins with one that was there before.
#[test]
fn recurrent_layers_in_a_mixture_have_the_bits_of_each_alone() {
    for prefix_caching in [false, true] {
        check_mixture("granitemoehybrid", ["granitemoehybrid-mamba"; 2], prefix_caching);
        check_mixture("qwen3_5", ["qwen3_5-mixers"; 2], prefix_caching);
    }
}

fn check_mixture(base: &str, [one, other]: [&str; 2], prefix_caching: bool) {
    let adapters = [("one", folder(one)), ("other", folder(other))];
    let config = with_adapters(EngineConfig { prefix_caching, ..exact() }, &adapters);
    let wishes: Vec<_> = (0..9).map(|i| (prompt(i, 5 + i * 3), [Some("one"), None, Some("other")][i % 3])).collect();
    let engine = load(&hugging_face(base), &EngineConfig { prefix_caching: false, ..config.clone() });
    let alone: Vec<_> = wishes.iter().map(|(ids, adapter)| bits(&ask(&engine, ids.clone(), *adapter, 6))).collect();
    let engine = load(&hugging_face(base), &config);
    for _ in 0..2 {
        let all = wishes.iter().map(|(ids, adapter)| engine.submit(request(ids.clone(), *adapter, 6)).unwrap());
        let streams: Vec<_> = all.collect();
        for (stream, alone) in streams.into_iter().zip(&alone) {
            assert_eq!(bits(&stream.wait().unwrap()), *alone, "{base}");
        }
    }
}

/// Blocks are found by requests of the same weights only.
#[test]
fn a_prefix_is_shared_within_an_adapter_and_not_across() {
    let engine = llama_with(&[("a", folder("llama-attn")), ("b", folder("llama-layers"))]);
    let ids = prompt(3, 96);
    let mut seen = Vec::new();
    for adapter in [Some("a"), Some("b"), None, Some("a"), Some("b"), None] {
        let before = stats(&engine).prefix_hit_tokens;
        let answer = bits(&ask(&engine, ids.clone(), adapter, 8));
        seen.push((adapter, stats(&engine).prefix_hit_tokens - before, answer));
    }
    let (first, second) = seen.split_at(3);
    assert!(first.iter().all(|(_, hits, _)| *hits == 0), "blocks were found across adapters");
    assert!(second.iter().all(|(_, hits, _)| *hits >= 64), "blocks were not found again");
    for ((adapter, _, a), (_, _, b)) in first.iter().zip(second) {
        assert_eq!(a, b, "{adapter:?}");
    }
    assert!(first[0].2 != first[1].2 && first[1].2 != first[2].2 && first[0].2 != first[2].2);
}

/// Another adapter under the same alias: what runs keeps the old one, what comes has the new, and no block is stale.
#[test]
fn a_reloaded_alias_serves_nothing_stale() {
    let engine = llama_with(&[("it", folder("llama-attn")), ("old", folder("llama-attn")), ("new", folder("llama-layers"))]);
    let ids = prompt(1, 80);
    let [old, new] = ["old", "new"].map(|alias| bits(&ask(&engine, ids.clone(), Some(alias), 200)));
    assert_ne!(old, new);
    assert_eq!(bits(&ask(&engine, ids.clone(), Some("it"), 200)), old);
    let before = engine.adapters();
    engine.pause().unwrap();
    let running = engine.submit(request(ids.clone(), Some("it"), 200)).unwrap();
    let in_place = LoadAdapter { in_place: true, ..LoadAdapter::default() };
    let info = engine.load_adapter("it", &folder("llama-layers"), &in_place).unwrap();
    let behind = engine.submit(request(ids.clone(), Some("it"), 200)).unwrap();
    engine.resume().unwrap();
    assert_eq!(bits(&running.wait().unwrap()), old);
    assert_eq!(bits(&behind.wait().unwrap()), new);
    assert_eq!(bits(&ask(&engine, ids.clone(), Some("it"), 200)), new);
    assert_ne!(before.iter().find(|one| one.alias == "it").unwrap().generation, info.generation);
    // The same weights under two aliases are there once.
    assert_eq!(
        engine.adapter_status().unwrap().bytes,
        engine.adapters().iter().filter(|a| a.alias != "it").map(|a| a.bytes).sum::<u64>()
    );
    let of_old = AdapterChoice::Generation(before[0].generation.clone());
    let mut by_generation = request(ids, None, 200);
    by_generation.adapter = Some(of_old);
    assert_eq!(bits(&engine.submit(by_generation).unwrap().wait().unwrap()), old);
}

#[test]
fn an_unloaded_adapter_lives_as_long_as_its_requests() {
    let engine = llama_with(&[("it", folder("llama-attn"))]);
    let ids = prompt(2, 40);
    let alone = bits(&ask(&engine, ids.clone(), Some("it"), 300));
    engine.pause().unwrap();
    let running = engine.submit(request(ids.clone(), Some("it"), 300)).unwrap();
    engine.unload_adapter("it", None).unwrap();
    assert!(engine.adapters().is_empty());
    assert!(engine.adapter_status().unwrap().bytes > 0, "a request still uses it");
    engine.resume().unwrap();
    assert_eq!(bits(&running.wait().unwrap()), alone);
    // The request is gone once the thread has handed its end over.
    engine.drain().unwrap().wait_timeout(std::time::Duration::from_secs(10)).unwrap();
    assert_eq!(engine.adapter_status().unwrap().bytes, 0);
    engine.resume().unwrap();
    assert_eq!(code(engine.submit(request(ids, Some("it"), 3)).map(drop)), "lora_adapter_not_found");
}

fn code<T>(result: Result<T, EngineError>) -> &'static str {
    match result {
        Err(EngineError::Adapter { code, message }) => {
            assert!(!message.is_empty());
            code
        }
        Err(other) => panic!("{other}"),
        Ok(_) => "none",
    }
}

#[test]
fn what_cannot_be_loaded_is_refused_with_a_code() {
    let options = AdapterOptions { max_adapters: 2, max_rank: 4, max_bytes: 200_000, adapters: Vec::new() };
    let engine = load(&hugging_face("llama"), &EngineConfig { adapters: Some(options), ..exact() });
    let load = |alias: &str, name: &str| engine.load_adapter(alias, &folder(name), &LoadAdapter::default());
    let first: AdapterInfo = load("a", "llama-attn").unwrap();
    assert_eq!((first.rank, first.generation.len()), (4, 64));
    assert_eq!(code(load("a", "llama-attn")), "lora_adapter_already_loaded");
    assert_eq!(code(load("", "llama-attn")), "invalid_lora_name");
    assert_eq!(code(load("b\n", "llama-attn")), "invalid_lora_name");
    assert_eq!(code(load("b", "llama-all-rslora")), "lora_rank_limit_exceeded");
    assert_eq!(code(load("b", "llama-save")), "lora_byte_limit_exceeded");
    assert_eq!(code(load("b", "nowhere")), "adapter_file_not_found");
    assert_eq!(code(load("b", "mistral-all-rslora")), "lora_rank_limit_exceeded");
    let wrong = LoadAdapter { in_place: true, expected_generation: Some("0".repeat(64)) };
    assert_eq!(code(engine.load_adapter("a", &folder("llama-attn"), &wrong)), "lora_generation_mismatch");
    assert_eq!(code(engine.unload_adapter("a", Some("0"))), "lora_generation_mismatch");
    assert_eq!(code(engine.unload_adapter("b", None)), "lora_adapter_not_found");
    load("b", "llama-layers").unwrap();
    assert_eq!(code(load("c", "llama-tokens")), "lora_adapter_limit_exceeded");
    let plain = common::serving::start("llama", &exact());
    assert_eq!(code(plain.submit(request(prompt(0, 3), Some("a"), 1)).map(drop)), "lora_runtime_unavailable");
    assert!(plain.adapters().is_empty());
}

/// A copy of an adapter with a change of its configuration.
fn changed(dir: &TempDir, name: &str, change: impl Fn(&mut Value)) -> PathBuf {
    let to = dir.path().join("changed");
    fs::create_dir_all(&to).unwrap();
    fs::copy(folder(name).join("adapter_model.safetensors"), to.join("adapter_model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(folder(name).join("adapter_config.json")).unwrap()).unwrap();
    change(&mut config);
    fs::write(to.join("adapter_config.json"), config.to_string()).unwrap();
    to
}

fn why(engine: &Engine, source: &Path) -> String {
    engine.load_adapter("it", source, &LoadAdapter::default()).unwrap_err().to_string()
}

#[test]
fn what_cannot_be_honoured_is_refused_by_its_name() {
    let engine = llama_with(&[]);
    let dir = TempDir::new().unwrap();
    let cases = [
        ("peft_type", json!("LOHA")),
        ("layer_replication", json!([[0, 2]])),
        ("use_qalora", json!(true)),
        ("alora_invocation_tokens", json!([1, 2])),
        ("ensure_weight_tying", json!(true)),
        ("bias", json!("lora_only")),
        ("init_lora_weights", json!("pissa_niter_16")),
        ("init_lora_weights", json!("OLoRA")),
        ("init_lora_weights", json!({ "lora_ga": 1 })),
        ("use_rslora", json!(1)),
        ("use_dora", json!(true)),
        ("lora_bias", json!(true)),
        ("alpha_pattern", json!([3])),
        ("lora_alpha", json!("16")),
        ("lora_alpha", json!(1e300)),
        ("alpha_pattern", json!({ "q_proj": null })),
        ("alpha_pattern", json!({ "(": 3 })),
    ];
    for (key, value) in cases {
        let source = changed(&dir, "llama-attn", |config| config[key] = value.clone());
        let why = why(&engine, &source);
        assert!(why.contains(&format!("`{key}`")), "{key}: {why}");
    }
    let source = changed(&dir, "llama-tokens", |config| config["trainable_token_indices"] = json!({ "embed_tokens": [1, 2] }));
    assert!(why(&engine, &source).contains("trainable_token_indices"));
    let other = load(&hugging_face("qwen3-moe"), &with_adapters(exact(), &[]));
    assert!(why(&other, &folder("llama-attn")).contains("layer is ["), "{}", why(&other, &folder("llama-attn")));
    let source = changed(&dir, "qwen3-moe-experts", |_| {});
    assert!(why(&engine, &source).contains("no linear layer of this model"));
    assert!(why(&engine, &folder("llama-gguf").join("llama-gguf.gguf")).contains("goes with a model in one"));
    fs::write(source.join("adapter_model.safetensors"), b"short").unwrap();
    assert!(why(&engine, &source).contains("adapter_model.safetensors"));
}

#[test]
fn a_recurrent_layer_is_not_adapted_in_silence() {
    let dir = TempDir::new().unwrap();
    let engine = load(&hugging_face("granitemoehybrid"), &with_adapters(exact(), &[]));
    let source = changed(&dir, "llama-attn", |_| {});
    let why = why(&engine, &source);
    assert!(why.contains("self_attn.q_proj") && why.contains("no linear layer"), "{why}");
}

/// The converter puts the value heads of Qwen 3.5 in another order.
#[test]
fn value_heads_in_another_order_are_not_adapted_in_silence() {
    let engine = load(&gguf("qwen3_5-moe"), &with_adapters(exact(), &[]));
    let why = why(&engine, &folder("qwen3_5-mixers"));
    assert!(why.contains("linear_attn.in_proj_a") && why.contains("no linear layer"), "{why}");
}

/// Trained on a decoder within a model that sees, with fields that name modules in full.
#[test]
fn modules_of_a_decoder_within_another_model_are_those_of_the_decoder() {
    let inner = "model.language_model";
    let experts: Vec<_> = (0..3)
        .flat_map(|layer| ["down_proj", "gate_up_proj"].map(|matrix| format!("{inner}.layers.{layer}.mlp.experts.{matrix}")))
        .collect();
    let cases = [
        ("llama-tokens", json!({"trainable_token_indices": {"model.language_model.embed_tokens": [11, 37, 200]}})),
        ("llama-patterns", json!({"alpha_pattern": {"model.language_model.layers\\.2\\..*gate_proj": 16, "v_proj": 4}})),
        ("qwen3-moe-params", json!({"target_parameters": experts})),
    ];
    for (name, changes) in cases {
        let dir = TempDir::new().unwrap();
        let source = changed(&dir, name, |config| {
            config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        });
        let path = source.join("adapter_model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.tensors().into_iter();
        let renamed = tensors.map(|(name, view)| (name.replace("model.model.model.", "model.model.model.language_model."), view));
        let renamed = safetensors::serialize(renamed.collect::<Vec<_>>(), None).unwrap();
        fs::write(&path, renamed).unwrap();
        let engine = load(&hugging_face(&golden(name).base), &with_adapters(exact(), &[("it", source)]));
        check(&engine, name, "within another model");
    }
}

/// Writes an adapter of these tensors; their names lack what PEFT puts before all.
fn written(dir: &TempDir, fields: &Value, tensors: &[(String, Vec<usize>, Vec<f32>)]) -> PathBuf {
    let mut config = json!({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "bias": "none"});
    config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    fs::write(dir.path().join("adapter_config.json"), config.to_string()).unwrap();
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|(_, _, values)| values.iter().flat_map(|v| v.to_le_bytes()).collect()).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        (format!("base_model.model.{name}"), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    fs::write(dir.path().join("adapter_model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    dir.path().to_owned()
}

fn drawn_values(name: &str, shape: &[usize]) -> Vec<f32> {
    drawn::drawn(name, shape.iter().product()).map(|u| drawn::text_value(name, shape, u)).collect()
}

/// Token 11 becomes what token 37 is.
#[test]
fn tokens_are_trained_whatever_their_embedding_is_called() {
    for (name, embedding) in
        [("gpt_neox", "gpt_neox.embed_in"), ("falcon-new", "transformer.word_embeddings"), ("nemotron_h", "backbone.embeddings")]
    {
        let (folder, source) = drawn::model(name);
        let weights = fs::read(folder.path().join("model.safetensors")).unwrap();
        let weights = SafeTensors::deserialize(&weights).unwrap();
        let shape = weights.tensor(&format!("{embedding}.weight")).unwrap().shape().to_vec();
        let row = drawn_values(&format!("{embedding}.weight"), &shape)[37 * shape[1]..][..shape[1]].to_vec();
        let dir = TempDir::new().unwrap();
        let last = embedding.rsplit('.').next().unwrap();
        let fields = json!({"target_modules": [], "trainable_token_indices": {last: [11]}});
        let tensor = (format!("{embedding}.token_adapter.trainable_tokens_delta"), vec![1, shape[1]], row);
        let adapter = written(&dir, &fields, &[tensor]);
        let engine = load(&source, &with_adapters(exact(), &[("it", adapter)]));
        let adapted = ask(&engine, vec![20, 11, 30, 11, 41], Some("it"), 6);
        assert_eq!(bits(&adapted), bits(&ask(&engine, vec![20, 37, 30, 37, 41], None, 6)), "{name}");
        assert_ne!(bits(&adapted), bits(&ask(&engine, vec![20, 11, 30, 11, 41], None, 6)), "{name}");
    }
}

/// Of matrices that lie transposed in the checkpoint, as in what PEFT saves: a product of low rank beside what its sum with the
/// weight computes, and the transpose of a square matrix as itself.
#[test]
fn modules_of_gpt2_are_adapted_as_they_lie() {
    let (name, shape) = ("transformer.h.1.attn.c_attn", [48, 144]);
    let (a, b) = (drawn_values("a", &[2, 48]), drawn_values("b", &[144, 2]));
    let [adapter, other] = [(); 2].map(|()| TempDir::new().unwrap());
    let product = written(
        &adapter,
        &json!({"target_modules": ["c_attn"], "fan_in_fan_out": true}),
        &[(format!("{name}.lora_A.weight"), vec![2, 48], a.clone()), (format!("{name}.lora_B.weight"), vec![144, 2], b.clone())],
    );
    let square = "transformer.h.1.attn.c_proj.weight";
    let replaced = drawn_values("another", &[48, 48]);
    let whole = written(
        &other,
        &json!({"target_modules": [], "modules_to_save": ["c_proj"]}),
        &[(square.to_owned(), vec![48, 48], replaced.clone())],
    );
    let (_folder, source) = drawn::model("gpt2");
    let engine = load(&source, &with_adapters(exact(), &[("it", product), ("whole", whole)]));
    let ids = vec![20, 11, 30, 80, 41];
    for (alias, changed) in [("it", format!("{name}.weight")), ("whole", square.to_owned())] {
        let (folder, merged) = drawn::model("gpt2");
        let path = folder.path().join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        let view = SafeTensors::deserialize(&bytes).unwrap();
        let at = view.tensor(&changed).unwrap().data().as_ptr() as usize - bytes.as_ptr() as usize;
        let values: Vec<f32> = if alias == "it" {
            let weight = drawn_values(&changed, &shape);
            let sum = |place: usize| {
                let (input, output) = (place / 144, place % 144);
                weight[place] + 2.0 * (b[output * 2] * a[input] + b[output * 2 + 1] * a[48 + input])
            };
            (0..weight.len()).map(sum).collect()
        } else {
            replaced.clone()
        };
        for (value, bytes) in values.iter().zip(bytes[at..].chunks_exact_mut(4)) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
        fs::write(&path, &bytes).unwrap();
        let engine_of_sum = load(&merged, &exact());
        let logprobs = |completion: &engine::Completion| -> Vec<_> {
            completion.choices[0].logprobs.iter().flatten().map(|token| (token.token_id, token.logprob.unwrap())).collect()
        };
        let got = logprobs(&ask(&engine, ids.clone(), Some(alias), 6));
        let wanted = logprobs(&ask(&engine_of_sum, ids.clone(), None, 6));
        let is_near = |(a, b): (&(u32, f32), &(u32, f32))| a.0 == b.0 && (a.1 - b.1).abs() < 1e-3;
        assert!(got.len() == wanted.len() && got.iter().zip(&wanted).all(is_near), "{alias}: {got:?} and {wanted:?}");
        assert_ne!(bits(&ask(&engine, ids.clone(), Some(alias), 6)), bits(&ask(&engine, ids.clone(), None, 6)), "{alias}");
    }
}

#[test]
fn adapters_are_in_the_ledger() {
    let bytes = |adapters: Option<AdapterOptions>| {
        let config = EngineConfig { adapters, ..exact() };
        Engine::memory_plan(&hugging_face("llama"), &config, None).unwrap().devices[0].adapters
    };
    let of = |names: &[&str]| {
        let adapters = names.iter().map(|name| ((*name).to_owned(), folder(name))).collect();
        bytes(Some(AdapterOptions { adapters, ..AdapterOptions::default() }))
    };
    assert_eq!(bytes(None), 0);
    let one = of(&["llama-attn"]) - of(&[]);
    let engine = llama_with(&[("it", folder("llama-attn"))]);
    assert_eq!(one, engine.adapters()[0].bytes);
    assert_eq!(of(&["llama-attn", "llama-dora"]) - of(&["llama-attn"]), of(&["llama-dora"]) - of(&[]));
}

#[test]
fn a_sequence_keeps_its_adapter() {
    let engine = llama_with(&[("it", folder("llama-attn"))]);
    let ids = prompt(4, 30);
    let whole = tokens(&ask(&engine, ids.clone(), Some("it"), 20));
    let mut first = request(ids, Some("it"), 8);
    first.service.keep = true;
    let sequence = engine.submit(first).unwrap().wait().unwrap().choices[0].sequence.clone().unwrap();
    let go_on = || Prompt::Sequence { sequence: sequence.clone(), then: engine::Continuation::TokenIds(Vec::new()) };
    let rest = engine.submit(GenerationRequest::new(go_on(), greedy(12))).unwrap().wait().unwrap();
    assert_eq!(tokens(&rest), whole[8..]);
    let mut other = GenerationRequest::new(go_on(), greedy(1));
    other.adapter = Some(AdapterChoice::Alias("it".into()));
    assert!(engine.submit(other).map(drop).unwrap_err().to_string().contains("began with"));
}
