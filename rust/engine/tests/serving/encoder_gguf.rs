//! Encoders in GGUF files, compared with the folders that they would be made of.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use engine::{Engine, ModelSource, Prompt, Tokenizer};
use serde_json::json;

use super::encoders::{check, check_scores, farthest, ids, json_of, pairs, pooled};
use crate::common::{
    drawn,
    gguf_writer::{Gguf, STRING, U32, string, without},
    serving::exact,
};

const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const U8: u32 = 0;

/// A golden as llama.cpp's converter writes it: what is left of names, and words that begin with a visible space. Of one tensor
/// and its bias 10 rows are left.
fn write_gguf(name: &str, path: &std::path::Path, pooling_type: u32, cut: &str) {
    let (config, folder) = (json_of(name, "config.json"), drawn::encoder(name));
    let is_xlm = config["model_type"] == "xlm-roberta";
    // As many as the folder takes. Two rows before them are no positions.
    let num_positions = 150;
    let is_nomic = config["model_type"] == "nomic_bert";
    let architecture = if is_nomic { "nomic-bert" } else { "bert" };
    let mut gguf = Gguf::new().entry("general.architecture", STRING, &string(architecture));
    for (key, field) in [
        ("embedding_length", "hidden_size"),
        ("attention.head_count", "num_attention_heads"),
        ("feed_forward_length", "intermediate_size"),
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
    ] {
        let mut value = config[field].as_u64().unwrap() as u32;
        if key == "context_length" && is_xlm {
            value = num_positions;
        }
        gguf = gguf.entry(&format!("{architecture}.{key}"), U32, &value.to_le_bytes());
    }
    gguf = gguf
        .entry(&format!("{architecture}.pooling_type"), U32, &pooling_type.to_le_bytes())
        .entry(&format!("{architecture}.attention.causal"), BOOL, &[0])
        .entry(&format!("{architecture}.attention.layer_norm_epsilon"), F32, &1e-12_f32.to_le_bytes())
        .entry(&format!("{architecture}.rope.freq_base"), F32, &1000_f32.to_le_bytes());
    gguf = if config["model_type"] == "xlm-roberta" {
        unigram(gguf, name).entry("tokenizer.ggml.remove_extra_whitespaces", BOOL, &[0])
    } else {
        word_piece(gguf, name)
    };
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for (name, tensor) in tensors.tensors() {
        let mut shape = tensor.shape().to_vec();
        let (name, mut bytes) = (gguf_name(&name), tensor.data());
        if name == "position_embd.weight" && is_xlm {
            shape[0] = num_positions as usize;
            bytes = &bytes[4 * shape[1] * 2..];
        }
        if name.rsplit_once('.').is_some_and(|(name, _)| name == cut) {
            shape[0] = 10;
        }
        let dims: Vec<_> = shape.iter().rev().map(|n| *n as u64).collect();
        gguf = gguf.weight(&name, &dims, 0, &bytes[..4 * shape.iter().product::<usize>()]);
    }
    gguf.write(path);
}

/// Its tokenizer, of words that begin with a visible space.
fn word_piece(gguf: Gguf, name: &str) -> Gguf {
    let tokenizer = json_of(name, "tokenizer.json");
    let mut tokens: Vec<_> = tokenizer["model"]["vocab"].as_object().unwrap().iter().collect();
    tokens.sort_by_key(|(_, id)| id.as_u64());
    let is_special = |token: &str| token.starts_with('[') && token.len() > 3;
    let used = used_ids(name);
    let unused = tokens.iter().rposition(|(_, id)| !used.contains(&(id.as_u64().unwrap() as u32)));
    let written = |at: usize, token: &str| match token.strip_prefix("##") {
        _ if is_special(token) => string(token),
        // A capital without a small letter, as vocabularies without case have it.
        _ if Some(at) == unused => string("\u{2581}\u{211d}"),
        Some(within) => string(within),
        None => string(&format!("\u{2581}{token}")),
    };
    let count = tokens.len() as u64;
    let texts: Vec<u8> = tokens.iter().enumerate().flat_map(|(at, (token, _))| written(at, token)).collect();
    let types: Vec<u8> = tokens.iter().flat_map(|(token, _)| if is_special(token) { 3_i32 } else { 1 }.to_le_bytes()).collect();
    gguf.entry("tokenizer.ggml.model", STRING, &string("bert")).array("tokenizer.ggml.tokens", STRING, count, &texts).array(
        "tokenizer.ggml.token_type",
        I32,
        count,
        &types,
    )
}

/// The same of a unigram model. The scores of tokens that are no text are not the least, and of what is unused they are.
fn unigram(gguf: Gguf, name: &str) -> Gguf {
    let tokenizer = json_of(name, "tokenizer.json");
    let vocab = tokenizer["model"]["vocab"].as_array().unwrap();
    let special = |id: usize| tokenizer["added_tokens"].as_array().unwrap().iter().any(|token| token["id"] == id);
    let texts = vocab.iter().flat_map(|entry| string(entry[0].as_str().unwrap())).chain(string("[PAD]"));
    let scores = vocab.iter().map(|entry| entry[1].as_f64().unwrap() as f32).chain([-10_000.0]);
    let types = (0..vocab.len())
        .map(|id| {
            if id == 3 {
                2
            } else if special(id) {
                3
            } else {
                1_i32
            }
        })
        .chain([5]);
    let count = vocab.len() as u64 + 1;
    let id = |id: u32| id.to_le_bytes();
    gguf.entry("tokenizer.ggml.model", STRING, &string("t5"))
        .array("tokenizer.ggml.tokens", STRING, count, &texts.collect::<Vec<_>>())
        .array("tokenizer.ggml.scores", F32, count, &scores.flat_map(f32::to_le_bytes).collect::<Vec<_>>())
        .array("tokenizer.ggml.token_type", I32, count, &types.flat_map(i32::to_le_bytes).collect::<Vec<_>>())
        .entry("tokenizer.ggml.bos_token_id", U32, &id(0))
        .entry("tokenizer.ggml.eos_token_id", U32, &id(2))
        .entry("tokenizer.ggml.unknown_token_id", U32, &id(3))
        .entry("tokenizer.ggml.padding_token_id", U32, &id(1))
        .entry("tokenizer.ggml.token_type_count", U32, &id(1))
}

/// The ids of a golden's texts.
fn used_ids(name: &str) -> Vec<u32> {
    let golden = json_of(name, "golden.json");
    let lists: Vec<_> = match golden.as_array() {
        Some(cases) => cases.iter().map(|case| ids(&case["ids"])).collect(),
        None => golden["ids"].as_array().unwrap().iter().map(ids).collect(),
    };
    lists.concat()
}

/// What a tensor of BERT or Nomic BERT is called there.
fn gguf_name(name: &str) -> String {
    let mut name = name.trim_start_matches("bert.").trim_start_matches("roberta.").to_owned();
    for (own, other) in [
        ("embeddings.word_embeddings", "token_embd"),
        ("embeddings.position_embeddings", "position_embd"),
        ("embeddings.token_type_embeddings", "token_types"),
        ("embeddings.LayerNorm", "token_embd_norm"),
        ("emb_ln", "token_embd_norm"),
        ("encoder.layer.", "blk."),
        ("encoder.layers.", "blk."),
        ("attention.self.query", "attn_q"),
        ("attention.self.key", "attn_k"),
        ("attention.self.value", "attn_v"),
        ("attention.output.dense", "attn_output"),
        ("attention.output.LayerNorm", "attn_output_norm"),
        ("intermediate.dense", "ffn_up"),
        ("output.dense", "ffn_down"),
        ("output.LayerNorm", "layer_output_norm"),
        ("attn.Wqkv", "attn_qkv"),
        ("attn.out_proj", "attn_output"),
        ("mlp.fc11", "ffn_up"),
        ("mlp.fc12", "ffn_gate"),
        ("mlp.fc2", "ffn_down"),
        ("norm1", "attn_output_norm"),
        ("norm2", "layer_output_norm"),
        ("pooler.dense", "cls"),
        ("classifier.dense", "cls"),
        ("classifier.out_proj", "cls.output"),
        ("classifier", "cls.output"),
    ] {
        name = name.replace(own, other);
    }
    name
}

#[test]
fn gguf_files_give_the_same_vectors_and_scores() {
    let dir = tempfile::tempdir().unwrap();
    let load = |name: &str, pooling_type: u32, cut: &str| {
        let path = dir.path().join(format!("{name}.gguf"));
        write_gguf(name, &path, pooling_type, cut);
        let source = ModelSource::Gguf { files: vec![path], tokenizer_json: None, tokenizer_dir: None };
        Engine::load(&source, &pooled(exact()), &|_| {})
    };
    let open = |name: &str, pooling_type: u32| load(name, pooling_type, "").unwrap();
    for (name, pooling_type) in [("bert", 1), ("nomic", 1), ("xlm-roberta", 2)] {
        check(&open(name, pooling_type), name);
    }
    check_scores(&open("bert-rerank", 4), "bert-rerank");
    let golden = json_of("xlm-roberta-rerank", "golden.json");
    let engine = open("xlm-roberta-rerank", 4);
    for (number, request) in engine.rerank_requests(pairs(&golden)).unwrap().iter().enumerate() {
        let Prompt::TokenPair { ids: tokens, second } = &request.prompt else { panic!("a pair") };
        assert_eq!((tokens, *second), (&ids(&golden["ids"][number]), tokens.len()));
    }
    assert!(farthest(&engine.rerank(pairs(&golden)).unwrap(), &golden["logits"]) <= 2e-5);
    let error = load("bert-rerank", 4, "cls").map(drop).unwrap_err().to_string();
    assert!(error.contains("`cls.weight` makes 10 values of 64"), "{error}");
    let engine = open("bert", 1);
    assert_eq!(engine.tokenize_text("a Crab", false).unwrap(), engine.tokenize_text("A CRAB", false).unwrap());
    assert_eq!(
        engine.detokenize_text(&engine.tokenize_text("where do crabs live, and what?", true).unwrap(), true).unwrap(),
        "where do crabs live, and what?"
    );
}

/// A map of characters that makes `e` of `A` and leaves all else: a double array, in which the leaf of a byte lies beside the
/// byte, and then the texts.
fn charsmap() -> Vec<u8> {
    let mut trie = [0_u32; 512];
    trie[0] = 256 << 10;
    let at = 256 ^ usize::from(b'A');
    trie[at] = 1 << 10 | 1 << 8 | u32::from(b'A');
    trie[at ^ 1] = 1 << 31;
    let bytes: Vec<u8> = trie.iter().flat_map(|unit| unit.to_le_bytes()).collect();
    [&2048_u32.to_le_bytes()[..], &bytes, b"e\0"].concat()
}

#[test]
fn a_unigram_model_of_a_gguf_file_cuts_texts_as_a_tokenizer_json_does() {
    let with_map = |map: &[u8]| {
        let gguf = unigram(Gguf::new(), "xlm-roberta");
        gguf.array("tokenizer.ggml.precompiled_charsmap", U8, map.len() as u64, map)
    };
    let open = |gguf: &Gguf| Tokenizer::from_gguf(gguf.open().unwrap().metadata());
    let mut json = json_of("xlm-roberta", "tokenizer.json");
    json["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": BASE64_STANDARD.encode(charsmap())});
    json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, json["pre_tokenizer"]]});
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, json.to_string()).unwrap();
    let (own, other) = (open(&with_map(&charsmap())).unwrap(), Tokenizer::from_file(&path).unwrap());
    for text in ["", " ", "A crab.", "  A  cr\tAb \n", "<mask> A<s>", "Größe, 東京 A", "1 [PAD] \u{2581}", "\u{3000}x\u{a0}"]
    {
        assert_eq!(own.encode(text, true).unwrap(), other.encode(text, true).unwrap(), "{text:?}");
    }
    assert_eq!(own.encode("A", false).unwrap(), own.encode("e", false).unwrap());
    assert_eq!(own.decode(&own.encode(" a crab", true).unwrap(), true), "a crab");
    let error = open(&with_map(&[255, 255, 255, 127])).map(drop).unwrap_err().to_string();
    assert!(error.contains("precompiled_charsmap"), "{error}");
    // A trie that leads out of itself.
    open(&with_map(&[&4_u32.to_le_bytes()[..], &u32::MAX.to_le_bytes()].concat())).map(drop).unwrap_err();
    let bare = unigram(Gguf::new(), "xlm-roberta");
    let flags = bare.clone().entry("tokenizer.ggml.add_bos_token", BOOL, &[0]).entry("tokenizer.ggml.add_eos_token", BOOL, &[0]);
    assert_eq!(open(&flags).unwrap().encode("a crab", true).unwrap(), open(&bare).unwrap().encode("a crab", false).unwrap());
    let spaces = bare.clone().entry("tokenizer.ggml.add_space_prefix", BOOL, &[0]);
    assert!(open(&spaces).map(drop).unwrap_err().to_string().contains("add_space_prefix"));
    let scores = without(bare, "tokenizer.ggml.scores");
    assert!(open(&scores).map(drop).unwrap_err().to_string().contains("without tokenizer.ggml.scores"));
}
