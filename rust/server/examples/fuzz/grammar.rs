//! Values and texts at random, and damage to sound ones.

use rand::{Rng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};

pub fn pick<'a, T: ?Sized>(rng: &mut ChaCha8Rng, among: &[&'a T]) -> &'a T {
    among.choose(rng).expect("something to choose from")
}

/// Text with what breaks careless code: signs of many bytes, controls, braces, none at all.
pub fn text(rng: &mut ChaCha8Rng) -> String {
    const PARTS: [&str; 24] = [
        "",
        "a",
        " ",
        "\n",
        "\u{0}",
        "\u{7f}",
        "\u{e9}",
        "\u{4e2d}\u{6587}",
        "\u{1f600}",
        "\u{200d}",
        "\u{feff}",
        "\u{fffd}",
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "{{",
        "%}",
        "\\",
        "\"",
        "user",
        "assistant",
        "0",
        "\u{10ffff}",
    ];
    let count = if rng.random_bool(0.02) { rng.random_range(0..400) } else { rng.random_range(0..6) };
    (0..count).map(|_| *PARTS.choose(rng).expect("a part")).collect()
}

/// Numbers that break careless arithmetic, and likely ones.
pub fn number(rng: &mut ChaCha8Rng) -> Value {
    const INTEGERS: [i128; 26] = [
        0,
        1,
        2,
        3,
        7,
        8,
        16,
        31,
        32,
        64,
        127,
        255,
        256,
        511,
        512,
        1024,
        65535,
        65536,
        i32::MAX as i128,
        u32::MAX as i128,
        u32::MAX as i128 + 1,
        i64::MAX as i128,
        u64::MAX as i128,
        -1,
        -2,
        i64::MIN as i128,
    ];
    const FLOATS: [f64; 18] =
        [0.0, -0.0, 0.5, 1.0, 1.5, 2.0, 0.1, 1e-7, 1e-40, 1e-320, 3.4e38, 3.5e38, 1e300, -1e300, -0.5, 1e10, 1e-3, 0.999];
    match rng.random_range(0..5) {
        0 | 1 => {
            let integer = *INTEGERS.choose(rng).expect("an integer");
            u64::try_from(integer).map_or_else(|_| json!(integer as i64), |n| json!(n))
        }
        2 | 3 => json!(*FLOATS.choose(rng).expect("a number")),
        _ => json!(rng.random_range(-4..600)),
    }
}

pub fn leaf(rng: &mut ChaCha8Rng) -> Value {
    match rng.random_range(0..8) {
        0 => Value::Null,
        1 => json!(rng.random::<bool>()),
        2..=4 => number(rng),
        5 => json!(text(rng)),
        6 => json!([]),
        _ => json!({}),
    }
}

/// Any value, sometimes deep or long.
pub fn value(rng: &mut ChaCha8Rng, depth: usize) -> Value {
    if depth == 0 || rng.random_bool(0.6) {
        return leaf(rng);
    }
    if rng.random_bool(0.01) {
        let levels = rng.random_range(1..140);
        return (0..levels).fold(leaf(rng), |inner, at| if at % 2 == 0 { json!([inner]) } else { json!({ "a": inner }) });
    }
    let count = rng.random_range(0..4);
    if rng.random() {
        (0..count).map(|_| value(rng, depth - 1)).collect()
    } else {
        const KEYS: [&str; 8] = ["type", "text", "content", "role", "1", "", "id", "value"];
        Value::Object((0..count).map(|_| (pick(rng, &KEYS).to_owned(), value(rng, depth - 1))).collect())
    }
}

/// Every place of a value, the value itself first, as keys and indices.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(count).sum(),
        Value::Object(map) => map.values().map(count).sum::<usize>(),
        _ => 0,
    }
}

/// The place of a number, as [`count`] counts.
fn nth(value: &mut Value, mut at: usize) -> Option<&mut Value> {
    if at == 0 {
        return Some(value);
    }
    at -= 1;
    let inner: Box<dyn Iterator<Item = &mut Value>> = match value {
        Value::Array(list) => Box::new(list.iter_mut()),
        Value::Object(map) => Box::new(map.values_mut()),
        _ => return None,
    };
    for each in inner {
        let size = count(each);
        if at < size {
            return nth(each, at);
        }
        at -= size;
    }
    None
}

fn place<'a>(value: &'a mut Value, rng: &mut ChaCha8Rng) -> &'a mut Value {
    // The upper levels as often as the many leaves of a list.
    let mut place = value;
    loop {
        let inner = match place {
            Value::Array(list) => list.len(),
            Value::Object(map) => map.len(),
            _ => 0,
        };
        if inner == 0 || rng.random_bool(0.3) {
            return place;
        }
        if rng.random_bool(0.2) {
            let at = rng.random_range(0..count(place));
            return nth(place, at).expect("a place that was counted");
        }
        let at = rng.random_range(0..inner);
        place = match place {
            Value::Array(list) => &mut list[at],
            Value::Object(map) => map.values_mut().nth(at).expect("a value"),
            _ => return place,
        };
    }
}

/// Changes one place of a sound value.
pub fn damage(root: &mut Value, rng: &mut ChaCha8Rng) {
    let other = {
        let size = count(root);
        let at = rng.random_range(0..size);
        nth(root, at).cloned().unwrap_or(Value::Null)
    };
    let place = place(root, rng);
    match (rng.random_range(0..10), &mut *place) {
        (0 | 1, Value::Object(map)) if !map.is_empty() => {
            let key = map.keys().nth(rng.random_range(0..map.len())).expect("a key").clone();
            map.remove(&key);
        }
        (2, Value::Object(map)) => {
            map.insert(text(rng), leaf(rng));
        }
        (3, Value::Object(map)) if !map.is_empty() => {
            let key = map.keys().nth(rng.random_range(0..map.len())).expect("a key").clone();
            let inner = map.remove(&key).expect("its value");
            map.insert(format!("{key}{}", text(rng)), inner);
        }
        (0 | 1, Value::Array(list)) if !list.is_empty() => drop(list.remove(rng.random_range(0..list.len()))),
        (2, Value::Array(list)) => list.insert(rng.random_range(0..=list.len()), leaf(rng)),
        (3, Value::Array(list)) if !list.is_empty() => {
            let each = list[rng.random_range(0..list.len())].clone();
            let times = if rng.random_bool(0.1) { 3000 } else { 1 };
            list.extend(std::iter::repeat_n(each, times));
        }
        (0..=3, Value::String(string)) => *string = damaged(string, rng),
        (0..=3 | 7.., Value::Number(_)) => *place = number(rng),
        (4 | 5, _) => *place = other,
        (6, _) => *place = value(rng, 3),
        _ => *place = leaf(rng),
    }
}

/// A text with some of it cut, repeated, changed or moved.
pub fn damaged(source: &str, rng: &mut ChaCha8Rng) -> String {
    let mut chars: Vec<char> = source.chars().collect();
    for _ in 0..rng.random_range(1..4) {
        let len = chars.len();
        let at = rng.random_range(0..=len);
        let end = (at + rng.random_range(0..=12)).min(len);
        match rng.random_range(0..6) {
            0 => drop(chars.drain(at..end)),
            1 => {
                let piece = chars[at..end].to_vec();
                let times = if rng.random_bool(0.05) { 2000 } else { rng.random_range(1..4) };
                for _ in 0..times {
                    chars.splice(at..at, piece.iter().copied());
                }
            }
            2 => drop(chars.splice(at..at, text(rng).chars().collect::<Vec<_>>())),
            3 => {
                let piece: Vec<char> = chars[at..end].to_vec();
                let to = rng.random_range(0..=len);
                chars.splice(to..to, piece);
            }
            4 => chars.truncate(at),
            _ => {
                if let Some(c) = chars.get_mut(at) {
                    *c = *['{', '}', '%', '\'', '"', '(', ')', '[', ']', '|', '.', '-', '\0', '\u{1f600}']
                        .choose(rng)
                        .expect("a sign");
                }
            }
        }
    }
    chars.into_iter().collect()
}

/// An object with some keys of a table, in any order.
pub fn object(rng: &mut ChaCha8Rng, most: usize, keys: &[&str], mut make: impl FnMut(&mut ChaCha8Rng, &str) -> Value) -> Value {
    let count = rng.random_range(0..=most);
    let mut map = Map::new();
    for _ in 0..count {
        let key = pick(rng, keys);
        map.insert(key.to_owned(), make(rng, key));
    }
    Value::Object(map)
}
