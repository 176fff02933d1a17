//! The GGUF file of a made-up checkpoint with a head that predicts further tokens, as llama.cpp's converter would name it.

use std::path::PathBuf;

use super::{
    gguf_writer::{Gguf, U32},
    mtp::Checkpoint,
};

const F32: u32 = 0;
/// Parts of layers, and the rest, in a checkpoint and in the file; experts are stacked.
const NAMES: [(&str, &str); 28] = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.experts.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.up_proj", "ffn_up_exps"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("eh_proj", "nextn.eh_proj"),
    ("enorm", "nextn.enorm"),
    ("hnorm", "nextn.hnorm"),
    ("shared_head.norm", "nextn.shared_head_norm"),
    ("shared_head.head", "nextn.shared_head_head"),
    ("embed_tokens", "nextn.embed_tokens"),
];

/// The bytes of a file, read from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len);
        self.0 = rest;
        taken
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn len(&mut self) -> usize {
        u64::from_le_bytes(self.take(8).try_into().unwrap()) as usize
    }

    fn skip(&mut self, kind: u32) {
        match kind {
            8 => {
                let len = self.len();
                self.take(len);
            }
            9 => {
                let (kind, count) = (self.u32(), self.len());
                (0..count).for_each(|_| self.skip(kind));
            }
            0 | 1 | 7 => drop(self.take(1)),
            2 | 3 => drop(self.take(2)),
            4..=6 => drop(self.take(4)),
            _ => drop(self.take(8)),
        }
    }
}

/// Key and bytes of each entry of the metadata.
fn entries(file: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut reader = Reader(file);
    reader.take(16);
    let count = reader.len();
    let mut entry = |_| {
        let whole = reader.0;
        let len = reader.len();
        let key = String::from_utf8(reader.take(len).to_vec()).unwrap();
        let kind = reader.u32();
        reader.skip(kind);
        (key, whole[..whole.len() - reader.0.len()].to_vec())
    };
    (0..count).map(&mut entry).collect()
}

/// The name in the file, and the number of the expert.
fn translated(name: &str) -> (String, Option<usize>) {
    let mut words: Vec<_> = name.split('.').collect();
    let mut expert = None;
    if let Some(at) = words.iter().position(|word| *word == "experts") {
        expert = Some(words.remove(at + 1).parse().unwrap());
    }
    let layer = (words[1] == "layers").then(|| words[2]);
    let rest = words[if layer.is_some() { 3 } else { 0 }..].join(".");
    let (part, ending) = rest.rsplit_once('.').unwrap();
    // That one is no bias of the router.
    let (part, ending) = if ending == "e_score_correction_bias" { (&*rest, "bias") } else { (part, ending) };
    let (_, own) = NAMES.iter().find(|(known, _)| *known == part).unwrap_or_else(|| panic!("{name}"));
    (layer.map_or_else(String::new, |layer| format!("blk.{layer}.")) + own + "." + ending, expert)
}

/// Writes it beside the checkpoint.
pub fn write(checkpoint: &Checkpoint, golden: &str, prefix: &str) -> PathBuf {
    let bytes = std::fs::read(goldens::dir().join(format!("gguf/{golden}.gguf"))).unwrap();
    let layers = checkpoint.config["num_hidden_layers"].as_u64().unwrap() as u32;
    let mut gguf = Gguf::new();
    let changed =
        [("block_count", layers + 1), ("nextn_predict_layers", 1)].map(|(key, value)| (format!("{prefix}.{key}"), value));
    gguf.entries.extend(
        entries(&bytes).into_iter().filter(|(key, _)| !changed.iter().any(|(other, _)| other == key)).map(|(_, entry)| entry),
    );
    for (key, value) in &changed {
        gguf = gguf.entry(key, U32, &value.to_le_bytes());
    }
    let mut tensors: Vec<(String, Vec<u64>, Vec<u8>)> = Vec::new();
    let mut named: Vec<_> = checkpoint.tensors.iter().map(|(name, tensor)| (translated(name), tensor)).collect();
    named.sort_by(|a, b| a.0.cmp(&b.0));
    for ((name, expert), (shape, values)) in named {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        if let Some((_, dims, all)) = tensors.last_mut().filter(|(last, ..)| *last == name) {
            all.extend(bytes);
            *dims.last_mut().unwrap() += 1;
        } else {
            let dims = shape.iter().rev().map(|dim| *dim as u64).chain(expert.map(|_| 1)).collect();
            tensors.push((name, dims, bytes));
        }
    }
    for (name, dims, bytes) in &tensors {
        gguf = gguf.weight(name, dims, F32, bytes);
    }
    let path = checkpoint.path.with_extension("gguf");
    gguf.write(&path);
    path
}
