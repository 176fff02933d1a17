//! Buffers that live from step to step.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use crate::{Constant, kernel_args::DevicePtr};

use super::{
    CudaError,
    driver::{DeviceMemory, Driver, Plain},
};

/// Device allocations begin at a multiple of this.
const ALIGNMENT: usize = 256;

/// Lists take so many bytes at least.
const MIN_CHUNK: usize = 1 << 16;

/// What the host tells the GPU about a step: lists, one after the other, forgotten when the next step begins.
pub struct StepArena {
    driver: Arc<dyn Driver>,
    chunks: Vec<DeviceMemory>,
    /// Bytes of the last chunk in use.
    used: usize,
}

impl StepArena {
    /// Empty.
    pub fn new(driver: &Arc<dyn Driver>) -> Self {
        Self { driver: Arc::clone(driver), chunks: Vec::new(), used: 0 }
    }

    /// Forgets all lists. What took several chunks has one from now on.
    pub fn reset(&mut self) -> Result<(), CudaError> {
        self.used = 0;
        if self.chunks.len() > 1 {
            let bytes = self.chunks.drain(..).map(|chunk| chunk.bytes()).sum();
            self.chunks.push(DeviceMemory::new(&self.driver, bytes)?);
        }
        Ok(())
    }

    /// Bytes that lists of so many take.
    pub const fn bytes_of(lists: usize) -> usize {
        if lists < MIN_CHUNK { MIN_CHUNK } else { lists }
    }

    /// Copies a list to the device; it is there until the next [`Self::reset`].
    pub fn put<T: Plain>(&mut self, values: &[T]) -> Result<DevicePtr, CudaError> {
        let bytes = size_of_val(values).next_multiple_of(ALIGNMENT).max(ALIGNMENT);
        if self.chunks.last().is_none_or(|chunk| self.used + bytes > chunk.bytes()) {
            let chunk = Self::bytes_of(bytes);
            self.chunks.push(DeviceMemory::new(&self.driver, chunk)?);
            self.used = 0;
        }
        let chunk = &self.chunks[self.chunks.len() - 1];
        let at = chunk.at() + self.used as u64;
        chunk.upload(self.used, values)?;
        self.used += bytes;
        Ok(at)
    }
}

/// A buffer that grows to what is asked of it and keeps nothing. What was planned for it is allocated at once: graphs know its
/// address, and are recorded anew when it grows.
#[derive(Default)]
pub struct Scratch {
    memory: Option<DeviceMemory>,
    planned_bytes: usize,
}

impl Scratch {
    /// Where it is now; 0 before anything was asked of it.
    pub fn at(&self) -> DevicePtr {
        self.memory.as_ref().map_or(0, DeviceMemory::at)
    }

    /// So many bytes will be asked of it at most.
    pub fn plan(&mut self, bytes: usize) {
        self.planned_bytes = self.planned_bytes.max(bytes);
    }

    /// So many f32 values, which are anything.
    pub fn floats(&mut self, driver: &Arc<dyn Driver>, count: usize) -> Result<DevicePtr, CudaError> {
        self.bytes(driver, count * size_of::<f32>())
    }

    /// So many bytes, which are anything.
    pub fn bytes(&mut self, driver: &Arc<dyn Driver>, bytes: usize) -> Result<DevicePtr, CudaError> {
        if self.memory.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            self.memory = None;
            self.memory = Some(DeviceMemory::new(driver, bytes.max(self.planned_bytes))?);
        }
        Ok(self.at())
    }
}

/// Row numbers from 0 on, for rows that follow each other.
#[derive(Default)]
pub struct RowNumbers(Option<DeviceMemory>);

/// Row numbers that are there at least.
const MIN_ROW_NUMBERS: usize = 1024;

impl RowNumbers {
    /// These rows as a list on the device, if each is one behind the one before.
    pub fn of(&mut self, driver: &Arc<dyn Driver>, rows: &[u32]) -> Result<Option<DevicePtr>, CudaError> {
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else { return Ok(None) };
        if rows.windows(2).any(|pair| pair[0].checked_add(1) != Some(pair[1])) {
            return Ok(None);
        }
        let end = *last as usize + 1;
        let memory = match &self.0 {
            Some(memory) if memory.bytes() >= end * size_of::<u32>() => memory,
            _ => {
                let numbers: Vec<u32> = (0..end.next_power_of_two().max(MIN_ROW_NUMBERS) as u32).collect();
                self.0 = None;
                self.0.insert(DeviceMemory::of(driver, &numbers)?)
            }
        };
        Ok(Some(memory.range(*first as usize * size_of::<u32>(), size_of_val(rows))))
    }
}

/// What was made on the device of values that others share, for as long as they do.
pub struct Made<T: ?Sized, V> {
    by_address: HashMap<usize, Entry<T, V>>,
    /// How often some were given up that graphs may know.
    losses: u64,
}

struct Entry<T: ?Sized, V> {
    values: Weak<T>,
    made: V,
    /// Whether a graph was recorded since it was made.
    is_recorded: bool,
}

impl<T: ?Sized, V> Default for Made<T, V> {
    fn default() -> Self {
        Self { by_address: HashMap::new(), losses: 0 }
    }
}

impl<T: ?Sized, V> Made<T, V> {
    /// What `make` makes of these values when they are first asked about.
    pub fn of(&mut self, values: &Arc<T>, make: impl FnOnce() -> Result<V, CudaError>) -> Result<&V, CudaError> {
        let address = Arc::as_ptr(values).cast::<()>() as usize;
        // A weak reference keeps its address from being given to others, so an entry is either of these values or of none that
        // live.
        if self.by_address.get(&address).is_none_or(|entry| entry.values.strong_count() == 0) {
            self.clear_lost();
            self.by_address.insert(address, Entry { values: Arc::downgrade(values), made: make()?, is_recorded: false });
        }
        Ok(&self.by_address[&address].made)
    }

    /// A graph was recorded: it may know all that there is.
    pub fn mark_recorded(&mut self) {
        self.by_address.values_mut().for_each(|entry| entry.is_recorded = true);
    }

    /// Gives up what is of values that are gone, and tells how often some of it was what graphs may know. What serves a single
    /// step, as a table of rotations for its rows does, is nothing to them.
    pub fn clear_lost(&mut self) -> u64 {
        let mut is_known = false;
        self.by_address.retain(|_, entry| {
            let lives = entry.values.strong_count() > 0;
            is_known |= !lives && entry.is_recorded;
            lives
        });
        self.losses += u64::from(is_known);
        self.losses
    }
}

/// Copies of what models keep on the host: norms and rope tables.
#[derive(Default)]
pub struct Constants(Made<Vec<f32>, DeviceMemory>);

impl Constants {
    /// The copy of these values, made when it is first asked for.
    pub fn of(&mut self, driver: &Arc<dyn Driver>, values: &Constant) -> Result<DevicePtr, CudaError> {
        self.0.of(values, || DeviceMemory::of(driver, values)).map(DeviceMemory::at)
    }

    /// See [`Made::mark_recorded`].
    pub fn mark_recorded(&mut self) {
        self.0.mark_recorded();
    }

    /// See [`Made::clear_lost`].
    pub fn clear_lost(&mut self) -> u64 {
        self.0.clear_lost()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_loss_of_what_graphs_may_know_is_told() {
        let mut made = Made::<Vec<f32>, u32>::default();
        let [kept, replaced, of_a_step] = [1.0, 2.0, 3.0].map(|value| Arc::new(vec![value]));
        assert_eq!(*made.of(&kept, || Ok(7)).unwrap(), 7);
        made.of(&replaced, || Ok(8)).unwrap();
        made.mark_recorded();
        made.of(&of_a_step, || Ok(9)).unwrap();
        drop(of_a_step);
        assert_eq!((made.clear_lost(), made.by_address.len()), (0, 2), "no graph was recorded since");
        drop(replaced);
        assert_eq!((made.clear_lost(), made.by_address.len()), (1, 1));
        assert_eq!(*made.of(&kept, || unreachable!()).unwrap(), 7);
        assert_eq!(made.clear_lost(), 1);
    }
}
