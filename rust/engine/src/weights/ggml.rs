//! Llama in the files that came before GGUF (the format: llama.cpp's `llama.cpp` of June 2023, `llama_file_loader`): GGML, GGMF
//! and GGJT. Everything in them is untrusted.
//!
//! The layout of quantized blocks changed twice, and files do not say how they count; so of quantized weights only GGJT v3 is
//! read, of F32 and F16 every version.

use std::{collections::HashMap, path::Path};

use device::{DType, mmap::Bytes};

use super::{
    gguf::{GgufFiles, Tensor},
    meta::{Known, gguf_name},
    metadata::{Metadata, MetadataValue},
};
use crate::EngineError;

/// What the first four bytes may be, and whether a version and scores of tokens follow, and whether tensors are aligned.
const MAGICS: [(u32, Kind); 3] = [
    (0x6767_6d6c, Kind { name: "GGML", has_version: false, is_aligned: false }),
    (0x6767_6d66, Kind { name: "GGMF", has_version: true, is_aligned: false }),
    (0x6767_6a74, Kind { name: "GGJT", has_version: true, is_aligned: true }),
];
const ALIGNMENT: usize = 32;
/// The version whose quantized blocks are those of today.
const LAST_VERSION: u32 = 3;
/// Tokens and tensors at most.
const MAX_TOKENS: u32 = 1 << 22;
const MAX_TENSORS: usize = 1 << 17;
/// What the files do not say: as the models that were published so have it.
const EPSILON: f64 = 1e-5;
const CONTEXT: usize = 4096;
const THETA: f64 = 10_000.0;

type Entries = HashMap<String, MetadataValue>;

#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    has_version: bool,
    is_aligned: bool,
}

/// Opens a file; `gqa` is how many heads of queries share one of keys, which it does not say.
///
/// # Errors
/// [`EngineError::Load`] for what is no such file, malformed, or of a version whose blocks are not read.
pub(crate) fn open(path: &Path, gqa: usize) -> Result<GgufFiles, EngineError> {
    let mut next = path.as_os_str().to_owned();
    next.push(".1");
    if Path::new(&next).is_file() {
        let why = "it is the first of several parts, which are not put together here: convert the model to GGUF";
        return Err(EngineError::Load(format!("{}: {why}", path.display())));
    }
    let bytes = Bytes::map_file(path)?;
    let mut reader = Reader { bytes: bytes.as_slice(), at: 0 };
    let (metadata, tensors) = reader.file(&bytes, gqa).map_err(|why| EngineError::Load(format!("{}: {why}", path.display())))?;
    Ok(GgufFiles::of_tensors(path, Metadata::new(metadata), tensors, bytes.watch()))
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| format!("it is cut off at byte {}", self.at))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u32, String> {
        Ok(self.take(4)?.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte)))
    }

    fn file(&mut self, bytes: &Bytes, gqa: usize) -> Result<(Entries, HashMap<String, Tensor>), String> {
        let magic = self.number()?;
        let kind = MAGICS.into_iter().find(|(number, _)| *number == magic).map(|(_, kind)| kind);
        let kind = kind.ok_or("it is none of GGML, GGMF and GGJT: a GGUF file is loaded as GGUF")?;
        let version = if kind.has_version { self.number()? } else { 0 };
        let most = if kind.is_aligned { LAST_VERSION } else { 1 };
        if version > most {
            return Err(format!("{} of version {version} is not known; the last is {most}", kind.name));
        }
        let mut next = || self.number();
        let [num_tokens, width, _multiple, num_heads, num_layers, rotated, _type] =
            [next()?, next()?, next()?, next()?, next()?, next()?, next()?];
        let num_heads_kv = (num_heads as usize).checked_div(gqa).filter(|heads| *heads > 0 && heads * gqa == num_heads as usize);
        let num_heads_kv = num_heads_kv
            .ok_or_else(|| format!("gqa is {gqa}, which does not divide its {num_heads} heads: 1, or 8 for Llama 2 70B"))?;
        let mut metadata = self.vocabulary(num_tokens, kind.has_version)?;
        let tensors = self.tensors(bytes, kind, version)?;
        let inner = tensors.get("blk.0.ffn_gate.weight").and_then(|tensor| tensor.dims().get(1).copied());
        let inner = inner.ok_or("it has no `layers.0.feed_forward.w1.weight`: only Llama models are read in this form")?;
        let int = |value: usize| MetadataValue::Int(value as i128);
        metadata.extend(
            [
                ("general.architecture", MetadataValue::String("llama".into())),
                ("llama.block_count", int(num_layers as usize)),
                ("llama.context_length", int(CONTEXT)),
                ("llama.embedding_length", int(width as usize)),
                ("llama.feed_forward_length", int(inner)),
                ("llama.attention.head_count", int(num_heads as usize)),
                ("llama.attention.head_count_kv", int(num_heads_kv)),
                ("llama.attention.layer_norm_rms_epsilon", MetadataValue::Float(EPSILON)),
                ("llama.rope.dimension_count", int(rotated as usize)),
                ("llama.rope.freq_base", MetadataValue::Float(THETA)),
                ("llama.vocab_size", int(num_tokens as usize)),
            ]
            .map(|(key, value)| (key.to_owned(), value)),
        );
        Ok((metadata, tensors))
    }

    /// The tokens as a GGUF file of the same model has them: visible spaces, and bytes by their number.
    fn vocabulary(&mut self, num_tokens: u32, has_scores: bool) -> Result<Entries, String> {
        const UNKNOWN: i64 = 2;
        const CONTROL: i64 = 3;
        const BYTE: i64 = 6;
        if num_tokens > MAX_TOKENS {
            return Err(format!("it has {num_tokens} tokens; at most {MAX_TOKENS} are read"));
        }
        let (mut texts, mut scores, mut types) = (Vec::new(), Vec::new(), Vec::new());
        for id in 0..num_tokens {
            let len = self.number()?;
            let text = self.take(len as usize)?;
            scores.push(if has_scores { f32::from_bits(self.number()?) } else { -(id as f32) });
            // Three special ones, then every byte.
            let (text, kind) = match (id, text) {
                (0, _) => ("<unk>".to_owned(), UNKNOWN),
                (1, _) => ("<s>".to_owned(), CONTROL),
                (2, _) => ("</s>".to_owned(), CONTROL),
                (3..=258, [byte]) => (format!("<0x{byte:02X}>"), BYTE),
                _ => (String::from_utf8_lossy(text).replace(' ', "\u{2581}"), 1),
            };
            texts.push(text);
            types.push(kind);
        }
        let entries = [
            ("model", MetadataValue::String("llama".into())),
            ("tokens", MetadataValue::Strings(texts)),
            ("scores", MetadataValue::Floats(scores)),
            ("token_type", MetadataValue::Ints(types)),
            ("unknown_token_id", MetadataValue::Int(0)),
            ("bos_token_id", MetadataValue::Int(1)),
            ("eos_token_id", MetadataValue::Int(2)),
        ];
        Ok(entries.map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).into())
    }

    fn tensors(&mut self, bytes: &Bytes, kind: Kind, version: u32) -> Result<HashMap<String, Tensor>, String> {
        let mut tensors = HashMap::new();
        while self.at < self.bytes.len() {
            if tensors.len() == MAX_TENSORS {
                return Err(format!("it has more than {MAX_TENSORS} tensors"));
            }
            let (num_dims, name_len, number) = (self.number()?, self.number()?, self.number()?);
            if !(1..=2).contains(&num_dims) {
                return Err(format!("a tensor at byte {} has {num_dims} dimensions; 1 and 2 are known", self.at));
            }
            let dims = (0..num_dims).map(|_| self.number().map(|n| n as usize)).collect::<Result<Vec<_>, _>>()?;
            let name = self.take(name_len as usize)?;
            let name = std::str::from_utf8(name).map_err(|_| "the name of a tensor is not UTF-8")?.to_owned();
            let dtype =
                DType::of_ggml(number).ok_or_else(|| format!("tensor `{name}` is of type {number}, which is not known"))?;
            if matches!(dtype, DType::Ggml(_)) && (version < LAST_VERSION || !kind.is_aligned) {
                return Err(format!(
                    "tensor `{name}` is {dtype} in {} of version {version}, whose blocks lie otherwise: quantise the model anew as GGUF",
                    kind.name
                ));
            }
            if kind.is_aligned {
                self.at = self.at.next_multiple_of(ALIGNMENT);
            }
            let rows = dims.get(1).copied().unwrap_or(1);
            let len = dtype.row_bytes(dims[0]).and_then(|row| row.checked_mul(rows));
            let len = len.ok_or_else(|| format!("tensor `{name}` of type {dtype} cannot have the shape {dims:?}"))?;
            let start = self.at;
            self.take(len).map_err(|_| format!("tensor `{name}` is cut off"))?;
            match gguf_name(&name) {
                Some(Known::Named(gguf)) => {
                    if tensors.insert(gguf, Tensor::new(dims, dtype, bytes.slice(start, self.at))).is_some() {
                        return Err(format!("tensor `{name}` is there twice"));
                    }
                }
                Some(Known::Unused) => {}
                None => return Err(format!("tensor `{name}` is no part of a Llama model")),
            }
        }
        Ok(tensors)
    }
}
