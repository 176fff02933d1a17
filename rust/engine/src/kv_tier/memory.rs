//! A tier in host memory: for pools that lie elsewhere.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use paged::{TierBlock, TierRecordId};

use super::{
    Changes, KvTier, TierError,
    lru::{Lru, stamp},
    record::{RecordFormat, checksum, verify},
};
use crate::EngineError;

/// Records in memory, the least recently used dropped beyond a size.
pub struct MemoryTier {
    format: RecordFormat,
    max_bytes: u64,
    state: Mutex<State>,
}

struct State {
    lru: Lru<TierRecordId>,
    records: HashMap<TierRecordId, Record>,
}

struct Record {
    header: Vec<u8>,
    payload: Box<[u8]>,
    checksum: [u8; 32],
}

impl MemoryTier {
    /// An empty tier of at most `max_bytes`.
    ///
    /// # Errors
    /// [`EngineError::InvalidArgument`] when not even one block fits.
    pub fn new(format: RecordFormat, max_bytes: u64) -> Result<Self, EngineError> {
        super::check_size(&format, max_bytes)?;
        let state = State { lru: Lru::new(), records: HashMap::new() };
        Ok(Self { format, max_bytes, state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KvTier for MemoryTier {
    fn records(&self) -> Vec<TierRecordId> {
        self.lock().lru.keys().copied().collect()
    }

    fn store(&self, block: &TierBlock, payload: Vec<u8>) -> Result<Changes, TierError> {
        let header = self.format.header(block);
        let record = Record { checksum: checksum(&header, &payload), header, payload: payload.into() };
        let mut state = self.lock();
        state.lru.remove(&block.id);
        let lost = state.lru.make_room(self.format.record_bytes(), self.max_bytes);
        for id in &lost {
            state.records.remove(id);
        }
        state.lru.insert(block.id, stamp(block.index), self.format.record_bytes());
        state.records.insert(block.id, record);
        Ok(Changes { found: vec![block.id], lost })
    }

    fn load(&self, block: &TierBlock, payload: &mut [u8]) -> Result<(), TierError> {
        let mut state = self.lock();
        state.lru.touch(&block.id, stamp(block.index));
        let record = state.records.get(&block.id).filter(|record| record.payload.len() == payload.len());
        let record = record.ok_or(TierError::Gone)?;
        verify(&self.format.header(block), &record.header, &record.payload, record.checksum)
            .map_err(|why| TierError::Refused { place: "host memory".into(), why })?;
        payload.copy_from_slice(&record.payload);
        Ok(())
    }
}
