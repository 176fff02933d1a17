//! The sound files that cases damage, and a folder for what comes of them.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

/// Folders of golden models, in memory.
pub struct Files {
    /// Where cases write.
    pub dir: TempDir,
    pub folders: Vec<Folder>,
    pub ggufs: Vec<Vec<u8>>,
    /// Chat templates of all.
    pub templates: Vec<String>,
    /// Whether what a case writes is printed.
    pub is_shown: bool,
}

/// A Hugging Face folder.
pub struct Folder {
    pub name: &'static str,
    pub path: PathBuf,
    pub config: Value,
    pub generation_config: Value,
    pub tokenizer: Value,
    pub tokenizer_config: Value,
}

const FOLDERS: [&str; 18] = [
    "llama",
    "llama3-rope",
    "mistral-window",
    "phi3-longrope",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "glm4",
    "granite",
    "olmo2",
    "phi2-qknorm",
    "smollm3",
    "stablelm",
    "stablelm-parallel",
    "starcoder2",
    "mistral",
];
const GGUFS: [&str; 8] = ["llama", "llama3-rope", "qwen2", "qwen3", "phi2", "granite", "gemma2", "starcoder2"];

pub fn golden_dir() -> PathBuf {
    goldens::dir().to_owned()
}

fn json(path: &Path) -> Value {
    std::fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_else(|| serde_json::json!({}))
}

impl Files {
    pub fn new(is_shown: bool) -> Self {
        // In memory where there is such a place: a case takes less than a millisecond.
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() }.expect("a folder for cases");
        let folders: Vec<_> = FOLDERS
            .iter()
            .map(|name| {
                let path = golden_dir().join("text").join(name);
                Folder {
                    name,
                    config: json(&path.join("config.json")),
                    generation_config: json(&path.join("generation_config.json")),
                    tokenizer: json(&path.join("tokenizer.json")),
                    tokenizer_config: json(&path.join("tokenizer_config.json")),
                    path,
                }
            })
            .collect();
        let ggufs =
            GGUFS.map(|name| std::fs::read(golden_dir().join(format!("gguf/{name}.gguf"))).expect("a golden file")).into();
        let mut templates: Vec<String> =
            folders.iter().filter_map(|folder| folder.tokenizer_config["chat_template"].as_str().map(str::to_owned)).collect();
        templates.sort();
        templates.dedup();
        Self { dir, folders, ggufs, templates, is_shown }
    }

    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.dir.path().join(name);
        if self.is_shown {
            println!("{name}: {}", String::from_utf8_lossy(bytes));
        }
        std::fs::write(&path, bytes).expect("a file of a case");
        path
    }
}
