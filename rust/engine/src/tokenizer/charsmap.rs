//! Precompiled character maps of a tokenizer.json's normalizer, checked before the library reserves memory for them.

use serde::Deserialize;
use serde_json::Value;

/// The part that is looked at; all else is skipped.
#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    normalizer: Value,
}

/// What is wrong with a map of a tokenizer.json: it begins with the bytes of its trie, for which memory is reserved.
pub(super) fn check(file: &[u8]) -> Result<(), String> {
    // What follows may be no JSON, which the library finds too late.
    let head: Head = serde_json::from_slice(file).map_err(|error| error.to_string())?;
    check_value(&head.normalizer)
}

fn check_value(value: &Value) -> Result<(), String> {
    match value {
        Value::Array(list) => list.iter().try_for_each(check_value),
        Value::Object(object) => object.iter().try_for_each(|(key, value)| match value {
            Value::String(map) if key == "precompiled_charsmap" => check_map(map),
            value => check_value(value),
        }),
        _ => Ok(()),
    }
}

fn check_map(base64: &str) -> Result<(), String> {
    check_len(base64.len() / 4 * 3, trie_bytes(base64))
}

/// The same of a map itself.
pub(super) fn check_bytes(map: &[u8]) -> Result<(), String> {
    check_len(map.len(), map.first_chunk().map(|bytes| u32::from_le_bytes(*bytes)))
}

fn check_len(num_bytes: usize, trie: Option<u32>) -> Result<(), String> {
    match trie {
        Some(trie) if trie as usize > num_bytes => {
            Err(format!("its precompiled_charsmap of about {num_bytes} bytes says that it has a trie of {trie} bytes"))
        }
        _ => Ok(()),
    }
}

/// The first four bytes, little-endian.
fn trie_bytes(base64: &str) -> Option<u32> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let bits = base64.as_bytes().get(..6)?.iter().try_fold(0_u64, |bits, c| Some(bits << 6 | u64::from(digit(*c)?)))?;
    Some(((bits >> 4) as u32).swap_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_is_the_first_four_bytes() {
        assert_eq!(trie_bytes("ALQCAACEAAAA"), Some(0x0002_b400));
        assert_eq!(trie_bytes("////////"), Some(u32::MAX));
        assert_eq!((trie_bytes("AAAA"), trie_bytes("AA=AAAAA")), (None, None));
    }

    #[test]
    fn a_trie_that_is_longer_than_its_map_is_refused_wherever_it_stands() {
        let bad = br#"{"normalizer": {"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": "////////"}]}}"#;
        assert!(check(bad).unwrap_err().contains("4294967295"));
        let sound = br#"{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAAAAAAA"}, "model": {}}"#;
        check(sound).unwrap();
        check(br#"{"normalizer": null}"#).unwrap();
        check(&bad[..bad.len() - 1]).unwrap_err();
    }
}
