//! JSON files of a model folder, read up to a bounded size.

use std::{
    fs::File,
    io::{Error, ErrorKind, Read},
    path::Path,
};

use serde_json::Value;

use crate::EngineError;

const MAX_JSON_BYTES: u64 = 64 << 20;

/// The key of an object that stands for a number that JSON lacks.
pub(crate) const PYTHON_FLOAT: &str = "__float__";

/// A JSON file, or `None` where there is none. The error names the file.
pub(crate) fn read_json(path: &Path) -> Result<Option<Value>, String> {
    let bytes = match read_bounded(path, MAX_JSON_BYTES) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(format!("{} cannot be read: {e}", path.display())),
    };
    let json = serde_json::from_slice(&bytes).or_else(|e| python_json(&bytes).ok_or(e));
    json.map(Some).map_err(|e| format!("{} is not valid JSON: {e}", path.display()))
}

/// JSON as Python writes it, with `Infinity` and `NaN` for numbers that JSON lacks: `{"__float__": "Infinity"}` stands for one
/// then, as in files of Transformers 5. `None` for what is no JSON all the same.
fn python_json(bytes: &[u8]) -> Option<Value> {
    let (mut text, mut rest, mut is_string) = (Vec::with_capacity(bytes.len()), bytes, false);
    while let [first, behind @ ..] = rest {
        let word = ["-Infinity", "Infinity", "NaN"].into_iter().find(|word| !is_string && rest.starts_with(word.as_bytes()));
        if let Some(word) = word {
            text.extend(format!("{{\"{PYTHON_FLOAT}\":\"{word}\"}}").bytes());
            rest = &rest[word.len()..];
            continue;
        }
        let len = if is_string && *first == b'\\' { rest.len().min(2) } else { 1 };
        is_string ^= *first == b'"';
        text.extend(&rest[..len]);
        rest = if len == 1 { behind } else { &rest[len..] };
    }
    serde_json::from_slice(&text).ok()
}

/// A JSON file that must be there.
pub(crate) fn required_json(path: &Path) -> Result<Value, EngineError> {
    let json = read_json(path).map_err(EngineError::Load)?;
    json.ok_or_else(|| EngineError::Load(format!("{} does not exist", path.display())))
}

/// A whole file, refused when it is larger than `max_bytes`.
pub(crate) fn read_bounded(path: &Path, max_bytes: u64) -> std::io::Result<Vec<u8>> {
    // Opening a pipe would wait for a writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("it is larger than {max_bytes} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_json_lacks_are_read_as_python_writes_them() {
        let json = python_json(br#"{"a": [0.0, Infinity, -Infinity, NaN], "b \" Infinity": "NaN \\"}"#).unwrap();
        let float = |word: &str| serde_json::json!({"__float__": word});
        assert_eq!(json["a"], serde_json::json!([0.0, float("Infinity"), float("-Infinity"), float("NaN")]));
        assert_eq!(json["b \" Infinity"], "NaN \\");
        for bad in ["", "Infinit", "{\"a\": Infinity", "\"\\", "NaNNaN"] {
            assert_eq!(python_json(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn a_file_beyond_its_bound_is_refused_and_one_at_it_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"12345").unwrap();
        assert_eq!(read_bounded(&path, 5).unwrap(), b"12345");
        assert!(read_bounded(&path, 4).unwrap_err().to_string().contains("larger than 4 bytes"));
    }

    #[test]
    fn a_json_file_of_any_size_takes_bounded_memory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        assert_eq!(read_json(&path), Ok(None));
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(read_json(&path).unwrap_err().contains("larger than"));
    }

    #[test]
    fn a_pipe_is_refused_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert!(read_json(&path).unwrap_err().contains("not a regular file"));
        assert!(device::mmap::Bytes::map_file(&path).is_err());
        assert!(crate::chat_template::read_template(&path.with_extension("json")).is_err());
    }
}
