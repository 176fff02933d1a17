//! JSON files of a model folder, read up to a bounded size.

use std::{
    fs::File,
    io::{Error, ErrorKind, Read},
    path::Path,
};

use serde_json::Value;

use crate::EngineError;

const MAX_JSON_BYTES: u64 = 64 << 20;

/// A JSON file, or `None` where there is none. The error names the file.
pub(crate) fn read_json(path: &Path) -> Result<Option<Value>, String> {
    let bytes = match read_bounded(path, MAX_JSON_BYTES) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(format!("{} cannot be read: {e}", path.display())),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|e| format!("{} is not valid JSON: {e}", path.display()))
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
