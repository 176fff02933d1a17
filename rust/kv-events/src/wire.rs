//! Batches of events as MessagePack, in the form that vLLM 0.26 sends.
//!
//! | event | keys |
//! |---|---|
//! | `BlockStored` | `block_hashes`, `parent_block_hash`, `token_ids`, `block_size`, `lora_id`, `lora_name`, `medium` |
//! | and | `extra_keys`, `group_idx`, `kv_cache_spec_kind`; of a window `kv_cache_spec_sliding_window` |
//! | `BlockRemoved` | `block_hashes`, `medium`, `group_idx` |
//! | `AllBlocksCleared` | |

use paged::{CacheIdentity, IdentityField, KvEvent, StoredBlock};
use rmp::encode;

/// What consumers call the pool, wherever its memory is.
const MEDIUM: &str = "GPU";

/// What events tell of an engine beside its blocks.
pub struct Layout {
    /// Tokens a block.
    pub block_size: usize,
    /// For each KV group, how many tokens its layers see; `None`: all.
    pub windows: Vec<Option<usize>>,
    /// Finds what requests call an adapter, by the digest that is in their identity.
    pub adapter_name: Box<FindName>,
}

/// Finds a name by a digest.
pub type FindName = dyn Fn(&str) -> Option<String> + Send;

/// Neighbours that one event tells of.
enum Told<'a> {
    /// Blocks of one group, each the parent of the next.
    Stored(Vec<&'a StoredBlock>),
    Removed(u32, Vec<u64>),
    Cleared,
}

/// Puts together what one event can tell: blocks in a row of one group. Between two events about the same block the order stays.
fn gather(events: &[KvEvent], num_groups: usize) -> Vec<Told<'_>> {
    let mut told: Vec<Told<'_>> = Vec::new();
    // For each group, the event that its next block may join.
    let mut open: Vec<Option<usize>> = vec![None; num_groups];
    for event in events {
        match event {
            KvEvent::Stored(block) => {
                let place = open.get(block.group as usize).copied().flatten();
                if let Some(Told::Stored(blocks)) = place.and_then(|at| told.get_mut(at))
                    && blocks.last().is_some_and(|last| block.parent == Some(last.digest) && block.identity == last.identity)
                {
                    blocks.push(block);
                    continue;
                }
                if let Some(place) = open.get_mut(block.group as usize) {
                    *place = Some(told.len());
                }
                told.push(Told::Stored(vec![block]));
            }
            KvEvent::Removed { digest, group } => {
                open.fill(None);
                match told.last_mut() {
                    Some(Told::Removed(last, digests)) if last == group => digests.push(*digest),
                    _ => told.push(Told::Removed(*group, vec![*digest])),
                }
            }
            KvEvent::Cleared => {
                open.fill(None);
                told.push(Told::Cleared);
            }
        }
    }
    told
}

/// A batch: `[timestamp, events, 0]`, the last the data-parallel rank. `timestamp` is in seconds since 1970.
pub fn encode(timestamp: f64, events: &[KvEvent], layout: &Layout) -> Vec<u8> {
    let told = gather(events, layout.windows.len());
    let mut out = Writer(Vec::with_capacity(64 + events.len() * (layout.block_size * 3 + 32)));
    out.array(3);
    out.float(timestamp);
    out.array(told.len());
    for event in told {
        match event {
            Told::Stored(blocks) => stored(&mut out, &blocks, layout),
            Told::Removed(group, digests) => {
                out.map(4);
                out.pair("type", "BlockRemoved");
                out.text("block_hashes");
                out.array(digests.len());
                for digest in digests {
                    out.number(digest);
                }
                out.pair("medium", MEDIUM);
                out.text("group_idx");
                out.number(u64::from(group));
            }
            Told::Cleared => {
                out.map(1);
                out.pair("type", "AllBlocksCleared");
            }
        }
    }
    out.number(0);
    out.0
}

fn stored(out: &mut Writer, blocks: &[&StoredBlock], layout: &Layout) {
    let Some(first) = blocks.first() else { return };
    let window = layout.windows.get(first.group as usize).copied().flatten();
    let adapter = CacheIdentity::find(&first.identity, IdentityField::Adapter).map(|id| {
        let id = String::from_utf8_lossy(id);
        (layout.adapter_name)(&id).unwrap_or_else(|| id.into_owned())
    });
    out.map(if window.is_some() { 12 } else { 11 });
    out.pair("type", "BlockStored");
    out.text("block_hashes");
    out.array(blocks.len());
    for block in blocks {
        out.number(block.digest);
    }
    out.text("parent_block_hash");
    out.number_or_nil(first.parent);
    out.text("token_ids");
    out.array(blocks.iter().map(|block| block.tokens.len()).sum());
    blocks.iter().flat_map(|block| &block.tokens).for_each(|token| out.number(u64::from(*token)));
    out.text("block_size");
    out.number(layout.block_size as u64);
    // The name says it, and is the same on every replica.
    out.text("lora_id");
    out.nil();
    out.pair("medium", MEDIUM);
    out.text("lora_name");
    out.text_or_nil(adapter.as_deref());
    out.text("extra_keys");
    out.array(blocks.len());
    for block in blocks {
        let salt = block.salt.as_deref().map(String::from_utf8_lossy);
        let keys = [adapter.as_deref(), salt.as_deref()];
        match keys.iter().flatten().count() {
            0 => out.nil(),
            count => {
                out.array(count);
                keys.into_iter().flatten().for_each(|key| out.text(key));
            }
        }
    }
    out.text("group_idx");
    out.number(u64::from(first.group));
    out.pair("kv_cache_spec_kind", if window.is_some() { "sliding_window" } else { "full_attention" });
    if let Some(window) = window {
        out.text("kv_cache_spec_sliding_window");
        out.number(window as u64);
    }
}

/// MessagePack into memory, which never fails.
struct Writer(Vec<u8>);

impl Writer {
    fn array(&mut self, len: usize) {
        let _ = encode::write_array_len(&mut self.0, len as u32);
    }

    fn map(&mut self, len: u32) {
        let _ = encode::write_map_len(&mut self.0, len);
    }

    fn text(&mut self, text: &str) {
        let _ = encode::write_str(&mut self.0, text);
    }

    fn text_or_nil(&mut self, text: Option<&str>) {
        match text {
            Some(text) => self.text(text),
            None => self.nil(),
        }
    }

    fn pair(&mut self, key: &str, value: &str) {
        self.text(key);
        self.text(value);
    }

    fn number(&mut self, number: u64) {
        let _ = encode::write_uint(&mut self.0, number);
    }

    fn number_or_nil(&mut self, number: Option<u64>) {
        match number {
            Some(number) => self.number(number),
            None => self.nil(),
        }
    }

    fn float(&mut self, number: f64) {
        let _ = encode::write_f64(&mut self.0, number);
    }

    fn nil(&mut self) {
        let _ = encode::write_nil(&mut self.0);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn block(digest: u64, parent: Option<u64>, group: u32) -> StoredBlock {
        let tokens = [digest as u32, 70_000].into();
        StoredBlock { digest, parent, group, tokens, identity: [].into(), salt: None }
    }

    fn layout() -> Layout {
        let adapter_name = Box::new(|id: &str| (id == "abc").then(|| "sql".to_owned()));
        Layout { block_size: 2, windows: vec![Some(512), None], adapter_name }
    }

    fn decoded(events: &[KvEvent]) -> Value {
        rmp_serde::from_slice(&encode(1.5, events, &layout())).unwrap()
    }

    #[test]
    fn blocks_in_a_row_are_one_event_with_every_field_that_vllm_sends() {
        let adapted = CacheIdentity::new().with(IdentityField::Rope, b"x").with(IdentityField::Adapter, b"abc").into_bytes();
        let identity: Box<[u8]> = adapted.into();
        let first = StoredBlock { identity: identity.clone(), salt: Some((*b"tenant").into()), ..block(1, None, 1) };
        let events = [
            KvEvent::Cleared,
            KvEvent::Stored(first),
            KvEvent::Stored(block(1, None, 0)),
            KvEvent::Stored(StoredBlock { identity, ..block(u64::MAX, Some(1), 1) }),
            KvEvent::Removed { digest: 1, group: 0 },
            KvEvent::Removed { digest: 5, group: 0 },
            KvEvent::Removed { digest: 1, group: 1 },
        ];
        let full = json!({
            "type": "BlockStored", "block_hashes": [1, u64::MAX], "parent_block_hash": null,
            "token_ids": [1, 70_000, u32::MAX, 70_000], "block_size": 2, "lora_id": null, "lora_name": "sql", "medium": "GPU",
            "extra_keys": [["sql", "tenant"], ["sql"]], "group_idx": 1, "kv_cache_spec_kind": "full_attention",
        });
        let windowed = json!({
            "type": "BlockStored", "block_hashes": [1], "parent_block_hash": null, "token_ids": [1, 70_000], "block_size": 2,
            "lora_id": null, "lora_name": null, "medium": "GPU", "extra_keys": [null], "group_idx": 0,
            "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 512,
        });
        let removed = |hashes: &[u64], group| json!({ "type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": group });
        let expected = json!([1.5, [{ "type": "AllBlocksCleared" }, full, windowed, removed(&[1, 5], 0), removed(&[1], 1)], 0]);
        assert_eq!(decoded(&events), expected);
    }

    #[test]
    fn what_is_stored_again_behind_its_removal_stays_behind_it() {
        let events = [
            KvEvent::Stored(block(1, None, 0)),
            KvEvent::Removed { digest: 1, group: 0 },
            KvEvent::Stored(block(1, None, 0)),
            KvEvent::Stored(block(2, Some(1), 0)),
            // Another branch.
            KvEvent::Stored(block(3, Some(1), 0)),
        ];
        let kinds: Vec<_> = decoded(&events)[1]
            .as_array()
            .unwrap()
            .iter()
            .map(|event| format!("{} {}", event["type"].as_str().unwrap(), event["block_hashes"]))
            .collect();
        assert_eq!(kinds, ["BlockStored [1]", "BlockRemoved [1]", "BlockStored [1,2]", "BlockStored [3]"]);
    }
}
