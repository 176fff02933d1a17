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

    /// Copies a list to the device; it is there until the next [`Self::reset`].
    pub fn put<T: Plain>(&mut self, values: &[T]) -> Result<DevicePtr, CudaError> {
        let bytes = size_of_val(values).next_multiple_of(ALIGNMENT).max(ALIGNMENT);
        if self.chunks.last().is_none_or(|chunk| self.used + bytes > chunk.bytes()) {
            let chunk = bytes.max(1 << 16);
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

/// A buffer that grows to what is asked of it and keeps nothing.
#[derive(Default)]
pub struct Scratch(Option<DeviceMemory>);

impl Scratch {
    /// So many f32 values, which are anything.
    pub fn floats(&mut self, driver: &Arc<dyn Driver>, count: usize) -> Result<DevicePtr, CudaError> {
        let bytes = count * size_of::<f32>();
        if self.0.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            self.0 = None;
            self.0 = Some(DeviceMemory::new(driver, bytes)?);
        }
        Ok(self.0.as_ref().map_or(0, DeviceMemory::at))
    }
}

/// Copies of what models keep on the host: norms and rope tables.
#[derive(Default)]
pub struct Constants(HashMap<*const Vec<f32>, (Weak<Vec<f32>>, DeviceMemory)>);

// SAFETY: the addresses are keys, and never followed.
unsafe impl Send for Constants {}

impl Constants {
    /// The copy of these values, made when it is first asked for.
    pub fn of(&mut self, driver: &Arc<dyn Driver>, values: &Constant) -> Result<DevicePtr, CudaError> {
        // A weak reference keeps its address from being given to others, so an entry is either these values or none that live.
        if let Some((_, memory)) = self.0.get(&Arc::as_ptr(values)).filter(|(weak, _)| weak.strong_count() > 0) {
            return Ok(memory.at());
        }
        self.0.retain(|_, (weak, _)| weak.strong_count() > 0);
        let memory = DeviceMemory::of(driver, values)?;
        let at = memory.at();
        self.0.insert(Arc::as_ptr(values), (Arc::downgrade(values), memory));
        Ok(at)
    }
}
