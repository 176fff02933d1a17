//! Adapters on a GPU whose kernels run on the CPU: against what PEFT and Transformers computed, and beside each other.

use std::{path::PathBuf, sync::Arc, time::Duration};

use device::Backend;
use engine::{AdapterOptions, Engine, EngineConfig, EngineError, LoadAdapter};

use crate::{
    MIB,
    common::{
        hugging_face,
        lora::{PEFT, ask, bits, check_some, folder, golden, request, with_adapters},
        serving::{exact, pool_of, prompt},
    },
    gpu, used,
};

fn small() -> EngineConfig {
    EngineConfig {
        max_num_batched_tokens: 32,
        max_num_seqs: 8,
        prefix_caching: false,
        paged_attention: pool_of(600, 8),
        ..exact()
    }
}

fn load(backend: &Arc<dyn Backend>, base: &str, config: &EngineConfig, adapters: &[(&str, PathBuf)]) -> Engine {
    Engine::load_onto(backend, &hugging_face(base), &with_adapters(config.clone(), adapters), &|_| {}).unwrap()
}

fn check_golden(name: &str, num_tokens: usize) {
    let (backend, _) = gpu(1 << 40, false);
    let engine = load(&backend, &golden(name).base, &small(), &[("it", folder(name))]);
    check_some(&engine, name, "on CUDA", [23, num_tokens]);
}

#[test]
fn an_adapter_agrees_with_its_golden() {
    check_golden("llama-dora", 6);
}

#[test]
fn an_adapter_of_recurrent_layers_agrees_with_its_golden() {
    check_golden("qwen3-next-mixers", 2);
}

#[test]
#[ignore = "some minutes: every adapter of PEFT's"]
fn adapters_agree_with_their_goldens() {
    for name in PEFT {
        check_golden(name, 24);
    }
}

/// Adapters of each kind beside each other and beside requests without, eager and in graphs.
#[test]
fn any_mixture_has_the_bits_of_each_alone() {
    let names = ["llama-dora", "llama-embed-head", "llama-save"];
    let adapters: Vec<_> = names.iter().map(|name| (*name, folder(name))).collect();
    let choices: Vec<_> = names.iter().copied().map(Some).chain([None, Some("llama-dora")]).collect();
    let wishes: Vec<_> = choices.iter().enumerate().map(|(i, adapter)| (prompt(i, 3 + i * 7 % 11), *adapter)).collect();
    let (plain, _) = gpu(1 << 40, false);
    let plain = Engine::load_onto(&plain, &hugging_face("llama"), &small(), &|_| {}).unwrap();
    let mut alone = Vec::new();
    for graphs in [false, true] {
        let (backend, driver) = gpu(1 << 40, graphs);
        let engine = load(&backend, "llama", &small(), &adapters);
        if alone.is_empty() {
            let one = |(ids, adapter): &(Vec<u32>, Option<&str>)| {
                bits(&ask(if adapter.is_some() { &engine } else { &plain }, ids.clone(), *adapter, 5))
            };
            alone = wishes.iter().map(one).collect();
        }
        let streams: Vec<_> =
            wishes.iter().map(|(ids, adapter)| engine.submit(request(ids.clone(), *adapter, 5)).unwrap()).collect();
        for ((stream, alone), (_, adapter)) in streams.into_iter().zip(&alone).zip(&wishes) {
            assert_eq!(bits(&stream.wait().unwrap()), *alone, "{adapter:?}, graphs: {graphs}");
        }
        assert_eq!(driver.num_recorded() > 0, graphs);
    }
}

#[test]
#[ignore = "models in the emulation; make test-long"]
fn experts_in_a_mixture_have_the_bits_of_each_alone() {
    let adapters = [("each", folder("qwen3-moe-experts")), ("all", folder("qwen3-moe-params"))];
    let (backend, _) = gpu(1 << 40, false);
    let engine = load(&backend, "qwen3-moe", &small(), &adapters);
    let wishes: Vec<_> = (0..3).map(|i| (prompt(i, 3 + i), [Some("each"), None, Some("all")][i])).collect();
    let alone: Vec<_> = wishes.iter().map(|(ids, adapter)| bits(&ask(&engine, ids.clone(), *adapter, 2))).collect();
    // Together in a graph of four rows.
    let (backend, driver) = gpu(1 << 40, true);
    let engine = load(&backend, "qwen3-moe", &small(), &adapters);
    engine.pause().unwrap();
    let streams: Vec<_> = wishes.iter().map(|(ids, adapter)| engine.submit(request(ids.clone(), *adapter, 2)).unwrap()).collect();
    engine.resume().unwrap();
    for ((stream, alone), (_, adapter)) in streams.into_iter().zip(alone).zip(&wishes) {
        assert_eq!(bits(&stream.wait().unwrap()), alone, "{adapter:?}");
    }
    assert!(driver.num_recorded() > 0);
}

/// What runs keeps the adapter that it began with, whose memory on the card is then given back.
#[test]
fn a_reloaded_alias_serves_nothing_stale_and_leaves_no_memory_behind() {
    let (backend, _) = gpu(1 << 40, false);
    let engine = load(&backend, "llama", &small(), &[("it", folder("llama-attn"))]);
    let ids = prompt(1, 12);
    let old = bits(&ask(&engine, ids.clone(), Some("it"), 12));
    let with_old = used(&*backend);
    engine.pause().unwrap();
    let running = engine.submit(request(ids.clone(), Some("it"), 12)).unwrap();
    let in_place = LoadAdapter { in_place: true, ..LoadAdapter::default() };
    let info = engine.load_adapter("it", &folder("llama-layers"), &in_place).unwrap();
    assert!(used(&*backend) >= with_old + info.bytes, "both are on the card");
    let behind = engine.submit(request(ids.clone(), Some("it"), 12)).unwrap();
    engine.resume().unwrap();
    assert_eq!(bits(&running.wait().unwrap()), old);
    let new = bits(&behind.wait().unwrap());
    assert_ne!(new, old);
    engine.drain().unwrap().wait_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(engine.adapter_status().unwrap().bytes, info.bytes);
    let with_new = used(&*backend);
    engine.unload_adapter("it", None).unwrap();
    assert_eq!(with_new - used(&*backend), info.bytes, "the card has what only the alias held");
}

/// Adapters are planned beside the weights and the pool, and what does not fit is refused.
#[test]
fn adapters_have_their_place_on_the_card() {
    let planned = |names: &[&str]| {
        let (backend, _) = gpu(64 * MIB, false);
        let adapters: Vec<_> = names.iter().map(|name| (*name, folder(name))).collect();
        let engine = load(&backend, "llama", &small(), &adapters);
        (engine.memory_ledger().devices[0].adapters, engine.adapters().iter().map(|one| one.bytes).sum::<u64>())
    };
    let [(none, _), (planned, taken)] = [planned(&[]), planned(&["llama-dora", "llama-save"])];
    let tables = 64 << 10;
    assert!(planned - none <= taken && taken <= planned - none + tables, "{} bytes planned, {taken} taken", planned - none);
    // The pool has what is left.
    let (backend, _) = gpu(8 * MIB, false);
    let engine = load(&backend, "llama", &EngineConfig { paged_attention: pool_of(64, 8), ..small() }, &[]);
    let room = backend.memory().unwrap().available_bytes;
    let _taken = backend.alloc(1, (room - 60_000) as usize / 4).unwrap();
    let Err(EngineError::Adapter { code, message }) = engine.load_adapter("it", &folder("llama-save"), &LoadAdapter::default())
    else {
        panic!("there was no room");
    };
    assert_eq!(code, "lora_byte_limit_exceeded", "{message}");
    assert!(message.contains("llama-save") && message.contains("bytes"), "{message}");
    let config = EngineConfig { adapters: Some(AdapterOptions { max_bytes: 1 << 30, ..AdapterOptions::default() }), ..small() };
    let (tiny, _) = gpu(MIB / 2, false);
    assert!(Engine::load_onto(&tiny, &hugging_face("llama"), &config, &|_| {}).is_err());
}
