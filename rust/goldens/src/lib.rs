//! Tiny models with reference outputs (tests/data/golden/README.md). They lie in the repository as an archive each, and are
//! unpacked beside the archives when a test first asks for one. `tests/conftest.py` does the same.
#![forbid(unsafe_code)]

use std::{
    fs::{self, File},
    io::{self, BufReader},
    path::{Path, PathBuf},
    sync::OnceLock,
};

const ENDING: &str = ".tar.xz";
/// Says which archives, of which sizes, the unpacked files are of.
const STAMP: &str = ".unpacked";

/// The folder with `text/NAME/`, `gguf/NAME.gguf` and so on.
///
/// # Panics
/// When archives cannot be unpacked.
pub fn dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/golden");
        unpack(&dir).unwrap_or_else(|error| panic!("{} cannot be unpacked: {error}", dir.display()));
        dir
    })
}

/// Unpacks a folder's archives where that has not been done.
fn unpack(dir: &Path) -> io::Result<()> {
    let lock = File::create(dir.join(".lock"))?;
    lock.lock()?;
    let mut archives = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().into_string().unwrap_or_default();
        if name.ends_with(ENDING) {
            archives.push((name, entry.metadata()?.len()));
        }
    }
    archives.sort_unstable();
    let lines: Vec<_> = archives.iter().map(|(name, len)| format!("{name} {len}\n")).collect();
    let stamp = lines.concat();
    if fs::read_to_string(dir.join(STAMP)).is_ok_and(|unpacked| unpacked == stamp) {
        return Ok(());
    }
    for (name, _) in &archives {
        let archive = BufReader::new(File::open(dir.join(name))?);
        tar::Archive::new(lzma_rust2::XzReader::new(archive, false)).unpack(dir)?;
    }
    fs::write(dir.join(STAMP), stamp)
}
