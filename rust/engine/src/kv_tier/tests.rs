use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::{Duration, UNIX_EPOCH},
};

use paged::{BlockId, TierKey};
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

const PAYLOAD: usize = 300;
const BLOCK_SIZE: usize = 4;

fn format(space: u8) -> RecordFormat {
    RecordFormat { space: [space; 32], block_size: BLOCK_SIZE, payload_bytes: PAYLOAD }
}

fn block(n: u8) -> TierBlock {
    TierBlock {
        id: TierRecordId { key: TierKey([n; 32]), group: u32::from(n) % 3 },
        parent: TierKey([n.wrapping_sub(1); 32]),
        index: u32::from(n),
        tokens: (0..BLOCK_SIZE as u32).map(|i| i + u32::from(n)).collect(),
        block: BlockId(1),
    }
}

fn payload(n: u8) -> Vec<u8> {
    (0..PAYLOAD).map(|i| (i as u8).wrapping_mul(n)).collect()
}

fn load(tier: &dyn KvTier, n: u8) -> Result<Vec<u8>, TierError> {
    let mut bytes = vec![0; PAYLOAD];
    tier.load(&block(n), &mut bytes).map(|()| bytes)
}

fn open(dir: &TempDir, num_records: u64) -> FileTier {
    FileTier::open(dir.path(), format(1), num_records * format(1).record_bytes()).unwrap()
}

/// The files of records, below any folder.
fn files(dir: &TempDir) -> Vec<PathBuf> {
    let folders = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = folders.flat_map(|folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path())).collect();
    files.sort();
    files
}

fn ids(tier: &dyn KvTier) -> Vec<TierRecordId> {
    let mut ids = tier.records();
    ids.sort();
    ids
}

#[test]
fn what_another_process_of_the_same_id_is_writing_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(&dir, 3));
    let folder = fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
    let others: Vec<_> = (0..3).map(|i| folder.join(format!(".{}-{i}.tmp", std::process::id()))).collect();
    for path in &others {
        fs::write(path, "half a record").unwrap();
    }
    let tier = open(&dir, 3);
    tier.store(&block(1), payload(1)).unwrap();
    assert_eq!(load(&tier, 1).unwrap(), payload(1));
    assert!(others.iter().all(|path| path.exists()));
}

#[test]
fn what_was_stored_is_loaded_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let tiers: [Box<dyn KvTier>; 2] = [Box::new(open(&dir, 10)), Box::new(MemoryTier::new(format(1), 10_000).unwrap())];
    for tier in tiers {
        for n in [1, 2, 3] {
            let changes = tier.store(&block(n), payload(n)).unwrap();
            assert_eq!(changes, Changes { found: vec![block(n).id], lost: vec![] });
        }
        assert_eq!(load(&*tier, 2).unwrap(), payload(2));
        assert!(matches!(load(&*tier, 4), Err(TierError::Gone)));
        assert_eq!(ids(&*tier), [1, 2, 3].map(|n| block(n).id));
        // The same name with other tokens, another parent or place is not served.
        for other in [
            TierBlock { tokens: [9; BLOCK_SIZE].into(), ..block(2) },
            TierBlock { parent: TierKey([9; 32]), ..block(2) },
            TierBlock { index: 9, ..block(2) },
        ] {
            let error = tier.load(&other, &mut vec![0; PAYLOAD]).unwrap_err();
            assert!(error.to_string().contains("the record of another block"), "{error}");
        }
    }
}

#[test]
fn files_survive_the_tier_and_its_folders_are_private() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("a/b");
    let open = || FileTier::open(&root, format(1), 1 << 20).unwrap();
    open().store(&block(5), payload(5)).unwrap();
    let again = open();
    assert_eq!(ids(&again), [block(5).id]);
    assert_eq!(load(&again, 5).unwrap(), payload(5));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&root), 0o700);
    let space = fs::read_dir(&root).unwrap().next().unwrap().unwrap().path();
    let record = fs::read_dir(space).unwrap().next().unwrap().unwrap().path();
    assert_eq!(mode(&record), 0o600, "prompts and answers are their owner's");
}

#[test]
fn the_least_recently_used_make_room_for_any_model() {
    let dir = tempfile::tempdir().unwrap();
    let other = FileTier::open(dir.path(), format(2), 1 << 20).unwrap();
    // Late in its prefix, so the oldest.
    other.store(&block(200), payload(200)).unwrap();
    let tier = open(&dir, 3);
    tier.store(&block(10), payload(10)).unwrap();
    tier.store(&block(20), payload(20)).unwrap();
    assert_eq!(tier.store(&block(1), payload(1)).unwrap().lost, []);
    assert_eq!(files(&dir).len(), 3);
    assert!(matches!(load(&other, 200), Err(TierError::Gone)));
    let changes = tier.store(&block(2), payload(2)).unwrap();
    assert_eq!(changes.lost, [block(20).id]);
    assert_eq!(files(&dir).len(), 3);
    // A smaller size deletes at once.
    assert_eq!(ids(&open(&dir, 1)), [block(1).id]);
    assert_eq!(files(&dir).len(), 1);

    let memory = MemoryTier::new(format(1), 2 * format(1).record_bytes()).unwrap();
    memory.store(&block(3), payload(3)).unwrap();
    memory.store(&block(4), payload(4)).unwrap();
    assert_eq!(memory.store(&block(1), payload(1)).unwrap().lost, [block(4).id]);
    assert_eq!(load(&memory, 3).unwrap(), payload(3));
}

#[test]
fn what_other_processes_did_is_seen_after_a_while() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, other) = (open(&dir, 8), open(&dir, 8));
    other.store(&block(1), payload(1)).unwrap();
    tier.store(&block(2), payload(2)).unwrap();
    assert_eq!(ids(&tier), [block(2).id]);
    let changes = tier.store(&block(3), payload(3)).unwrap();
    assert_eq!(changes.found, [block(1).id, block(3).id]);
    // One that is deleted meanwhile is gone, which is no error to speak of.
    for file in files(&dir) {
        fs::remove_file(file).unwrap();
    }
    assert!(matches!(load(&tier, 1), Err(TierError::Gone)));
    assert_eq!(tier.store(&block(4), payload(4)).unwrap().lost.len(), 2);
}

#[test]
fn a_look_tells_what_another_process_stored_and_deleted_since_the_last() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (open(&dir, 10), open(&dir, 10));
    one.store(&block(1), payload(1)).unwrap();
    assert_eq!(other.refresh(), Changes { found: vec![block(1).id], lost: vec![] });
    assert_eq!(other.refresh(), Changes::default());
    assert_eq!(load(&other, 1).unwrap(), payload(1));
    let folder = files(&dir)[0].parent().unwrap().to_owned();
    let long_ago = UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    let set_changed = |at| fs::File::open(&folder).unwrap().set_modified(at).unwrap();
    set_changed(long_ago);
    assert_eq!(other.refresh(), Changes::default());
    fs::remove_file(&files(&dir)[0]).unwrap();
    set_changed(long_ago);
    assert_eq!(other.refresh(), Changes::default(), "the folder says that nothing has changed");
    set_changed(long_ago + Duration::from_secs(1));
    assert_eq!(other.refresh(), Changes { found: vec![], lost: vec![block(1).id] });
}

#[test]
fn a_foreign_or_damaged_file_is_refused_by_name_and_healed_by_the_next_store() {
    let dir = tempfile::tempdir().unwrap();
    let tier = open(&dir, 10);
    tier.store(&block(7), payload(7)).unwrap();
    let path = files(&dir).remove(0);
    let good = fs::read(&path).unwrap();
    let flipped = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        bytes
    };
    let cases = [
        (good[..good.len() - 1].to_vec(), "length"),
        ([&good[..], b"x"].concat(), "length"),
        (Vec::new(), "length"),
        (vec![0; good.len()], "not a KV record"),
        (flipped(8), "another version"),
        (flipped(12), "another model or KV layout"),
        (flipped(44), "another block"),
        (flipped(good.len() - 33), "checksum"),
        (flipped(good.len() - 1), "checksum"),
    ];
    for (bytes, why) in cases {
        fs::write(&path, bytes).unwrap();
        let error = load(&tier, 7).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains(path.to_str().unwrap()), "{error}");
        tier.store(&block(7), payload(7)).unwrap();
        assert_eq!(load(&tier, 7).unwrap(), payload(7));
    }
}

#[test]
fn files_that_are_named_otherwise_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(&dir, 10));
    let folder = fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
    let digits = "ab".repeat(32);
    let names = [
        "notes.txt",
        &format!("{digits}-0.txt"),
        &format!("{digits}-+1.kv"),
        &format!("{}-0.kv", digits.to_uppercase()),
        "-0.kv",
    ];
    for name in names {
        fs::write(folder.join(name), [0; 2000]).unwrap();
    }
    fs::create_dir(folder.join(format!("{digits}-0.kv"))).unwrap();
    let tier = open(&dir, 1);
    assert_eq!(tier.records(), []);
    tier.store(&block(1), payload(1)).unwrap();
    assert_eq!(files(&dir).len(), names.len() + 2);
}

#[test]
fn what_cannot_be_used_is_refused_with_the_path_and_what_would_work() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let refused = |path: &Path, max_bytes| {
        let Err(error) = FileTier::open(path, format(1), max_bytes) else { panic!("{} was opened", path.display()) };
        error.to_string()
    };
    let error = refused(&file, 1 << 20);
    assert!(error.contains(file.to_str().unwrap()) && error.contains("name a folder"), "{error}");
    let below = file.join("tier");
    let error = refused(&below, 1 << 20);
    assert!(error.contains(below.to_str().unwrap()) && error.contains("that you may write to"), "{error}");
    let error = refused(dir.path(), 0);
    assert!(error.contains("kv_tier_size is 0 MB") && error.contains("at least 1 MB"), "{error}");
}

#[test]
fn a_record_that_cannot_be_written_is_lost_and_says_where() {
    let dir = tempfile::tempdir().unwrap();
    let tier = open(&dir, 10);
    tier.store(&block(1), payload(1)).unwrap();
    let folder = files(&dir)[0].parent().unwrap().to_owned();
    fs::remove_dir_all(&folder).unwrap();
    fs::write(&folder, "in the way").unwrap();
    let Err(TierError::NotStored { changes, path, .. }) = tier.store(&block(2), payload(2)) else { panic!("it was stored") };
    assert_eq!(changes, Changes { found: vec![], lost: vec![block(2).id] });
    assert!(path.starts_with(&folder));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    /// Whatever happens to a file, what is loaded is what was stored, or nothing.
    #[test]
    fn a_mutated_file_is_never_served_wrong(
        cut in proptest::option::weighted(0.3, 0usize..600),
        flips in proptest::collection::vec((0usize..600, 1u8..), 0..4),
        more in proptest::collection::vec(any::<u8>(), 0..8),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let tier = open(&dir, 10);
        tier.store(&block(9), payload(9)).unwrap();
        let path = files(&dir).remove(0);
        let mut bytes = fs::read(&path).unwrap();
        let good = bytes.clone();
        for (at, by) in flips {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= by;
            }
        }
        bytes.truncate(cut.unwrap_or(bytes.len()));
        bytes.extend(more);
        fs::write(&path, &bytes).unwrap();
        let loaded = load(&tier, 9).ok();
        prop_assert_eq!(loaded, (bytes == good).then(|| payload(9)));
    }
}
