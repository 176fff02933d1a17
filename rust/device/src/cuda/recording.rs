//! A driver for tests: its memory is the host's, it runs nothing, and it checks what it is asked for.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::kernel_args::DevicePtr;

use super::{
    CudaError, Gpu, GpuMemory,
    driver::{Driver, Launch},
};

/// What was asked for, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Allocate(usize),
    Free(usize),
    Zero(usize),
    Upload(usize),
    Download(usize),
    Copy(usize),
    Launch { kernel: &'static str, grid: [u32; 3] },
}

/// Addresses begin here, far from anything of the host, and none is given twice.
const FIRST: DevicePtr = 0x7f00_0000_0000;

pub struct RecordingDriver {
    gpu: Gpu,
    total_bytes: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    allocations: BTreeMap<DevicePtr, Vec<u8>>,
    next: DevicePtr,
    events: Vec<Event>,
    failing: Option<CudaError>,
}

impl RecordingDriver {
    pub fn new(total_bytes: usize) -> Arc<Self> {
        let total = total_bytes as u64;
        let memory = Ok(GpuMemory { total_bytes: total, free_bytes: total });
        let gpu = Gpu { name: "Recording".into(), capability: (9, 0), multiprocessors: 132, memory };
        let state = Mutex::new(State { next: FIRST, ..State::default() });
        Arc::new(Self { gpu, total_bytes, state })
    }

    /// What has happened since the last question.
    pub fn events(&self) -> Vec<Event> {
        std::mem::take(&mut self.state.lock().unwrap().events)
    }

    /// Bytes that are allocated.
    pub fn used_bytes(&self) -> usize {
        self.state.lock().unwrap().used()
    }

    /// Every call from now on gives this error, as a device that was lost.
    pub fn fail(&self, error: CudaError) {
        self.state.lock().unwrap().failing = Some(error);
    }

    fn asked<T>(&self, event: Event, answer: impl FnOnce(&mut State) -> Result<T, CudaError>) -> Result<T, CudaError> {
        let mut state = self.state.lock().unwrap();
        if let Some(error) = &state.failing {
            return Err(error.clone());
        }
        state.events.push(event);
        answer(&mut state)
    }
}

impl State {
    fn used(&self) -> usize {
        self.allocations.values().map(Vec::len).sum()
    }

    /// The memory from `at` on, which must be of one live allocation.
    fn live(&mut self, at: DevicePtr, bytes: usize) -> &mut [u8] {
        let found = self.allocations.range_mut(..=at).next_back();
        let (start, memory) = found.unwrap_or_else(|| panic!("{at:#x} was never allocated"));
        let (offset, len) = ((at - start) as usize, memory.len());
        memory.get_mut(offset..offset + bytes).unwrap_or_else(|| panic!("{bytes} bytes at {offset} of memory of {len}, or freed"))
    }
}

impl Driver for RecordingDriver {
    fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn memory(&self) -> Result<GpuMemory, CudaError> {
        let free = self.total_bytes - self.used_bytes();
        Ok(GpuMemory { total_bytes: self.total_bytes as u64, free_bytes: free as u64 })
    }

    fn allocate(&self, bytes: usize) -> Result<DevicePtr, CudaError> {
        assert!(bytes > 0);
        self.asked(Event::Allocate(bytes), |state| {
            let free = self.total_bytes - state.used();
            if bytes > free {
                return Err(CudaError::OutOfMemory { needed_bytes: bytes as u64, free_bytes: free as u64 });
            }
            let at = state.next;
            // A gap, so that what runs over one allocation does not land in the next.
            state.next = (at + bytes as u64 + 4096).next_multiple_of(256);
            state.allocations.insert(at, vec![0xff; bytes]);
            Ok(at)
        })
    }

    fn free(&self, at: DevicePtr) {
        let mut state = self.state.lock().unwrap();
        let freed = state.allocations.remove(&at).unwrap_or_else(|| panic!("{at:#x} was freed twice, or never allocated"));
        state.events.push(Event::Free(freed.len()));
    }

    fn zero(&self, at: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        self.asked(Event::Zero(bytes), |state| {
            state.live(at, bytes).fill(0);
            Ok(())
        })
    }

    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), CudaError> {
        self.asked(Event::Upload(from.len()), |state| {
            state.live(to, from.len()).copy_from_slice(from);
            Ok(())
        })
    }

    fn download(&self, to: &mut [u8], from: DevicePtr) -> Result<(), CudaError> {
        self.asked(Event::Download(to.len()), |state| {
            to.copy_from_slice(state.live(from, to.len()));
            Ok(())
        })
    }

    fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        self.asked(Event::Copy(bytes), |state| {
            let copied = state.live(from, bytes).to_vec();
            state.live(to, bytes).copy_from_slice(&copied);
            Ok(())
        })
    }

    fn time(&self, work: &mut dyn FnMut()) -> Result<Duration, CudaError> {
        work();
        Ok(Duration::ZERO)
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), CudaError> {
        let Launch { kernel, grid, args } = *launch;
        self.asked(Event::Launch { kernel: kernel.name, grid }, |state| {
            assert!(args.len() % 8 == 0, "{} bytes of arguments", args.len());
            let words = args.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
            // Addresses of this driver are like no other number in the arguments.
            for at in words.filter(|word| (FIRST..FIRST << 1).contains(word)) {
                state.live(at, 1);
            }
            Ok(())
        })
    }
}
