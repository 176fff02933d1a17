//! A tier in files, which survives the process.
//!
//! `PATH/<model and KV layout>/<prefix>-<group>.kv`, a record a file. A file is written under another name and renamed when it is
//! whole, and its name says what it holds, so any number of processes may use one folder without a lock: whoever writes the
//! same name writes the same bytes. Nothing is synced to the disk; what a crash tears is refused by its checksum.

use std::{
    collections::HashSet,
    fs::{self, DirBuilder, File},
    io::{ErrorKind, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use paged::{TierBlock, TierRecordId};

use super::{
    Changes, KvTier, TierError, check_size,
    lru::{Lru, Stamp, stamp},
    record::{RecordFormat, checksum, file_name, hex, parse_file_name, verify},
};
use crate::EngineError;

/// Digits of a folder's name.
const SPACE_DIGITS: usize = 32;
/// What another process may have under its temporary name.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);
/// File systems tell times of a second's precision at worst.
const SETTLED_AFTER: Duration = Duration::from_secs(2);
/// The folder is looked at again, for its size, whenever this part of it was written.
const RESCAN_DIVISOR: u64 = 8;

/// Path of a record below the tier's folder: a folder's name and a file's.
type Place = (String, String);

/// Records in the files of a folder, the least recently used deleted beyond a size.
pub struct FileTier {
    root: PathBuf,
    space: String,
    format: RecordFormat,
    max_bytes: u64,
    state: Mutex<State>,
}

struct State {
    /// Of every model, for the size is that of the whole folder.
    lru: Lru<Place>,
    written_since_scan: u64,
    /// When the folder of this model changed last, as of the last scan; `None`: look again.
    changed: Option<SystemTime>,
}

impl FileTier {
    /// Opens a folder, made if need be, readable by its owner alone.
    ///
    /// # Errors
    /// [`EngineError::InvalidArgument`] for a path that is no folder or cannot be written, or a size without room for a block.
    pub fn open(root: &Path, format: RecordFormat, max_bytes: u64) -> Result<Self, EngineError> {
        check_size(&format, max_bytes)?;
        if root.exists() && !root.is_dir() {
            let why = format!("kv_tier: {} is a file; name a folder, which is made if there is none", root.display());
            return Err(EngineError::InvalidArgument(why));
        }
        let space = hex(&format.space)[..SPACE_DIGITS].to_owned();
        let tier = Self {
            root: root.to_owned(),
            space,
            format,
            max_bytes,
            state: Mutex::new(State { lru: Lru::new(), written_since_scan: 0, changed: None }),
        };
        tier.prepare().map_err(|error| {
            let why = format!("kv_tier: cannot use {}: {error}; name a folder that you may write to", root.display());
            EngineError::InvalidArgument(why)
        })?;
        let mut state = tier.lock();
        state.changed = tier.changed();
        state.lru = tier.scan();
        for place in state.lru.make_room(0, max_bytes) {
            tier.delete(&place);
        }
        drop(state);
        Ok(tier)
    }

    /// Makes the folders and tries to write.
    fn prepare(&self) -> std::io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(self.root.join(&self.space))?;
        let path = self.temporary_path();
        let written = create_private(&path).and_then(|mut file| file.write_all(b"."));
        let removed = fs::remove_file(&path);
        written.and(removed)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A name that nobody else has: process ids are not enough, for containers share a folder and not their ids.
    fn temporary_path(&self) -> PathBuf {
        self.root.join(&self.space).join(format!(".{:032x}.tmp", rand::random::<u128>()))
    }

    fn path(&self, place: &Place) -> PathBuf {
        self.root.join(&place.0).join(&place.1)
    }

    fn place(&self, id: TierRecordId) -> Place {
        (self.space.clone(), file_name(id))
    }

    /// The record of a place, if it is of this model and layout.
    fn record(&self, place: &Place) -> Option<TierRecordId> {
        (place.0 == self.space).then(|| parse_file_name(&place.1)).flatten()
    }

    fn delete(&self, place: &Place) {
        let path = self.path(place);
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != ErrorKind::NotFound
        {
            tracing::warn!("kv_tier: cannot delete {}: {error}", path.display());
        }
    }

    /// Every record below the folder. What is named otherwise is not ours and is left alone.
    fn scan(&self) -> Lru<Place> {
        let mut lru = Lru::new();
        for dir in entries(&self.root) {
            let Ok(space) = dir.file_name().into_string() else { continue };
            let is_space = space.len() == SPACE_DIGITS && space.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            if !is_space || !dir.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            for file in entries(&dir.path()) {
                let (Ok(name), Ok(metadata)) = (file.file_name().into_string(), file.metadata()) else { continue };
                let modified = metadata.modified().unwrap_or(UNIX_EPOCH);
                if !metadata.is_file() {
                    continue;
                }
                if parse_file_name(&name).is_some() {
                    let age = modified.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as Stamp;
                    lru.insert((space.clone(), name), age, metadata.len());
                } else if name.starts_with('.')
                    && name.strip_suffix(".tmp").is_some()
                    && modified.elapsed().is_ok_and(|age| age > ABANDONED_AFTER)
                {
                    self.delete(&(space.clone(), name));
                }
            }
        }
        lru
    }

    /// When a file last came to the folder of this model, or left it; `None` where that was just now, for what comes next may
    /// have the same time.
    fn changed(&self) -> Option<SystemTime> {
        let modified = fs::metadata(self.root.join(&self.space)).and_then(|metadata| metadata.modified()).ok()?;
        modified.elapsed().is_ok_and(|age| age > SETTLED_AFTER).then_some(modified)
    }

    /// Looks at the folder again, and tells what other processes added and took away.
    fn rescan(&self, state: &mut State) -> Changes {
        state.written_since_scan = 0;
        // Before the scan: what changes meanwhile is seen by the next one.
        state.changed = self.changed();
        let before = std::mem::replace(&mut state.lru, self.scan());
        let ids = |lru: &Lru<Place>| lru.keys().filter_map(|place| self.record(place)).collect::<HashSet<_>>();
        let (before, after) = (ids(&before), ids(&state.lru));
        Changes { found: after.difference(&before).copied().collect(), lost: before.difference(&after).copied().collect() }
    }

    fn write(&self, path: &Path, block: &TierBlock, payload: &[u8], stamp: Stamp) -> std::io::Result<()> {
        let header = self.format.header(block);
        let temporary = self.temporary_path();
        let written = create_private(&temporary).and_then(|mut file| {
            file.write_all(&header)?;
            file.write_all(payload)?;
            file.write_all(&checksum(&header, payload))?;
            fs::rename(&temporary, path)?;
            // Not before: a temporary file that looks old is taken for abandoned.
            file.set_modified(UNIX_EPOCH + Duration::from_micros(stamp))
        });
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    fn read(&self, path: &Path, block: &TierBlock, payload: &mut [u8]) -> Result<(), TierError> {
        let io = |source| TierError::Io { path: path.to_owned(), source };
        let refused = |why| TierError::Refused { place: path.display().to_string(), why };
        let mut file = match File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(TierError::Gone),
            file => file.map_err(io)?,
        };
        if file.metadata().map_err(io)?.len() != self.format.record_bytes() {
            return Err(refused("its length is wrong"));
        }
        let mut header = vec![0; self.format.header_bytes()];
        let mut sum = [0; 32];
        file.read_exact(&mut header).map_err(io)?;
        file.read_exact(payload).map_err(io)?;
        file.read_exact(&mut sum).map_err(io)?;
        verify(&self.format.header(block), &header, payload, sum).map_err(refused)?;
        // Only so that it stays longer.
        let _ = file.set_modified(UNIX_EPOCH + Duration::from_micros(stamp(block.index)));
        Ok(())
    }
}

impl KvTier for FileTier {
    fn records(&self) -> Vec<TierRecordId> {
        self.lock().lru.keys().filter_map(|place| self.record(place)).collect()
    }

    fn refresh(&self) -> Changes {
        let mut state = self.lock();
        let is_same = state.changed.is_some() && self.changed() == state.changed;
        if is_same { Changes::default() } else { self.rescan(&mut state) }
    }

    fn store(&self, block: &TierBlock, payload: Vec<u8>) -> Result<Changes, TierError> {
        let place = self.place(block.id);
        let (path, stamp, bytes) = (self.path(&place), stamp(block.index), self.format.record_bytes());
        let mut state = self.lock();
        let is_time = state.written_since_scan >= self.max_bytes / RESCAN_DIVISOR;
        let mut changes = if is_time { self.rescan(&mut state) } else { Changes::default() };
        state.lru.remove(&place);
        let gone = state.lru.make_room(bytes, self.max_bytes);
        drop(state);
        for place in &gone {
            self.delete(place);
        }
        changes.lost.extend(gone.iter().filter_map(|place| self.record(place)));
        // Without the lock, so that nobody who reads waits for the disk.
        let written = self.write(&path, block, &payload, stamp);
        match written {
            Ok(()) => {
                let mut state = self.lock();
                state.lru.insert(place, stamp, bytes);
                state.written_since_scan += bytes;
                changes.found.push(block.id);
                Ok(changes)
            }
            Err(source) => {
                changes.lost.push(block.id);
                Err(TierError::NotStored { changes, path, source })
            }
        }
    }

    fn load(&self, block: &TierBlock, payload: &mut [u8]) -> Result<(), TierError> {
        let place = self.place(block.id);
        let read = self.read(&self.path(&place), block, payload);
        let mut state = self.lock();
        match read {
            Ok(()) => state.lru.touch(&place, stamp(block.index)),
            Err(TierError::Gone) => {
                state.lru.remove(&place);
            }
            Err(_) => {}
        }
        read
    }
}

/// A new file for its owner alone, whatever the process's mask: it holds prompts and answers.
fn create_private(path: &Path) -> std::io::Result<File> {
    File::options().write(true).create_new(true).mode(0o600).open(path)
}

fn entries(dir: &Path) -> impl Iterator<Item = fs::DirEntry> {
    fs::read_dir(dir).into_iter().flatten().flatten()
}
