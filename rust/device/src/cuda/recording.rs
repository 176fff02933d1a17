//! A driver for tests: its memory is the host's, it runs nothing, and it checks what it is asked for.
//!
//! Copies beside the steps are made as late as a GPU may make them, so that whoever does not wait for them sees what was there
//! before.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::kernel_args::{DevicePtr, ElementType};

use super::{
    CudaError, Gpu, GpuMemory,
    driver::{Driver, HostPtr, Launch, MATMUL_WORKSPACE, Matmul},
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
    Launch {
        kernel: &'static str,
        grid: [u32; 3],
    },
    /// Rows, output features, input features.
    Matmul([usize; 3]),
    /// So many kernels and products.
    Recorded(usize),
    Replay,
    AllocateHost(usize),
    FreeHost(usize),
    CopiesAfterSteps,
    StepsAfterCopies,
    FinishCopies,
    CopyOut(usize),
    CopyIn(usize),
}

/// Addresses begin here, far from anything of the host, and none is given twice.
const FIRST: DevicePtr = 0x7f00_0000_0000;

pub struct RecordingDriver {
    gpu: Gpu,
    total_bytes: usize,
    has_matmul: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    allocations: BTreeMap<DevicePtr, Vec<u8>>,
    next: DevicePtr,
    events: Vec<Event>,
    failing: Option<CudaError>,
    /// What was asked for since the recording began, with all arguments.
    recording: Option<Vec<String>>,
    recorded: BTreeMap<u64, Vec<String>>,
    cannot_record: bool,
    pinned: BTreeMap<usize, Vec<u8>>,
    copies: Vec<Copy>,
    /// Copies that the steps wait for from now on.
    awaited: usize,
    /// Something was asked of the steps that copies do not wait for.
    ahead: bool,
}

/// A copy beside the steps, not made yet: what was on the GPU when it was asked for, or an address of page-locked memory to read
/// when it is made.
enum Copy {
    Out { to: usize, bytes: Vec<u8> },
    In { to: DevicePtr, from: usize, bytes: usize },
}

impl RecordingDriver {
    pub fn new(total_bytes: usize) -> Arc<Self> {
        Arc::new(Self::made(total_bytes, true))
    }

    /// On a machine without cuBLASLt.
    pub fn without_matmul(total_bytes: usize) -> Arc<Self> {
        Arc::new(Self::made(total_bytes, false))
    }

    fn made(total_bytes: usize, has_matmul: bool) -> Self {
        let gpu = Gpu { name: "Recording".into(), capability: (9, 0), multiprocessors: 132 };
        let state = Mutex::new(State { next: FIRST, ..State::default() });
        Self { gpu, total_bytes, has_matmul, state }
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

    /// From now on recordings fail when they end.
    pub fn fail_recordings(&self) {
        self.state.lock().unwrap().cannot_record = true;
    }

    /// What was recorded and not forgotten, in the order of recording.
    pub fn recorded(&self) -> Vec<Vec<String>> {
        self.state.lock().unwrap().recorded.values().cloned().collect()
    }

    /// No call gives an error from now on.
    pub fn heal(&self) {
        self.state.lock().unwrap().failing = None;
    }

    fn asked<T>(&self, event: Event, answer: impl FnOnce(&mut State) -> Result<T, CudaError>) -> Result<T, CudaError> {
        let mut state = self.state.lock().unwrap();
        if let Some(error) = &state.failing {
            return Err(error.clone());
        }
        assert!(state.recording.is_none(), "{event:?} in a recording");
        state.events.push(event);
        answer(&mut state)
    }

    /// As [`Self::asked`], of the steps.
    fn step<T>(&self, event: Event, answer: impl FnOnce(&mut State) -> Result<T, CudaError>) -> Result<T, CudaError> {
        self.asked(event, |state| {
            let awaited = std::mem::take(&mut state.awaited);
            state.make_copies(awaited);
            state.ahead = true;
            answer(state)
        })
    }
}

impl State {
    /// Whether it was recorded instead.
    fn record(&mut self, what: impl FnOnce() -> String) -> bool {
        self.recording.as_mut().map(|recording| recording.push(what())).is_some()
    }

    fn used(&self) -> usize {
        self.allocations.values().map(Vec::len).sum()
    }

    fn make_copies(&mut self, count: usize) {
        for copy in self.copies.drain(..count).collect::<Vec<_>>() {
            match copy {
                Copy::Out { to, bytes } => self.host(to, bytes.len()).copy_from_slice(&bytes),
                Copy::In { to, from, bytes } => {
                    let values = self.host(from, bytes).to_vec();
                    self.live(to, bytes).copy_from_slice(&values);
                }
            }
        }
    }

    /// Page-locked memory from `at` on, which must be of one live allocation.
    fn host(&mut self, at: usize, bytes: usize) -> &mut [u8] {
        let (start, memory) = self.pinned.range_mut(..=at).next_back().expect("page-locked memory");
        memory.get_mut(at - start..at - start + bytes).expect("within page-locked memory that is not freed")
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
        assert!(state.copies.is_empty(), "memory was freed beside a copy");
        let freed = state.allocations.remove(&at).unwrap_or_else(|| panic!("{at:#x} was freed twice, or never allocated"));
        state.events.push(Event::Free(freed.len()));
    }

    fn zero(&self, at: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        self.step(Event::Zero(bytes), |state| {
            state.live(at, bytes).fill(0);
            Ok(())
        })
    }

    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), CudaError> {
        self.step(Event::Upload(from.len()), |state| {
            state.live(to, from.len()).copy_from_slice(from);
            Ok(())
        })
    }

    fn download(&self, to: &mut [u8], from: DevicePtr) -> Result<(), CudaError> {
        self.step(Event::Download(to.len()), |state| {
            to.copy_from_slice(state.live(from, to.len()));
            Ok(())
        })
    }

    fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        self.step(Event::Copy(bytes), |state| {
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
        if self.state.lock().unwrap().record(|| format!("{launch:?}")) {
            return Ok(());
        }
        self.step(Event::Launch { kernel: kernel.name, grid }, |state| {
            assert!(args.len() % 8 == 0, "{} bytes of arguments", args.len());
            let words = args.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
            // Addresses of this driver are like no other number in the arguments.
            for at in words.filter(|word| (FIRST..FIRST << 1).contains(word)) {
                state.live(at, 1);
            }
            Ok(())
        })
    }
    fn check_matmul(&self) -> Result<(), CudaError> {
        let missing = || CudaError::MissingLibrary { library: "libcublasLt.so.13".into(), looked_in: "a test".into() };
        self.has_matmul.then_some(()).ok_or_else(missing)
    }

    unsafe fn matmul(&self, matmul: &Matmul) -> Result<(), CudaError> {
        let Matmul { x, weight, out, element, rows, out_features, in_features, out_stride, workspace, .. } = *matmul;
        assert!(self.has_matmul, "a product that no library computes");
        let bytes = if element == ElementType::F32 { 4 } else { 2 };
        if self.state.lock().unwrap().record(|| format!("{matmul:?}")) {
            return Ok(());
        }
        self.step(Event::Matmul([rows, out_features, in_features]), |state| {
            assert!(rows > 0 && out_features > 0 && (in_features * bytes).is_multiple_of(16), "{matmul:?}");
            assert!([x, weight, out, workspace].iter().all(|at| at % 256 == 0), "{matmul:?}");
            assert!(out_stride >= out_features, "{matmul:?}");
            state.live(x, rows * in_features * bytes);
            state.live(weight, out_features * in_features * bytes);
            state.live(out, ((rows - 1) * out_stride + out_features) * 4);
            state.live(workspace, MATMUL_WORKSPACE);
            Ok(())
        })
    }

    fn allocate_host(&self, bytes: usize) -> Result<HostPtr, CudaError> {
        self.asked(Event::AllocateHost(bytes), |state| {
            let mut memory = vec![0xff; bytes];
            let at = memory.as_mut_ptr();
            state.pinned.insert(at as usize, memory);
            Ok(HostPtr(at))
        })
    }

    fn free_host(&self, at: HostPtr) {
        let mut state = self.state.lock().unwrap();
        assert!(state.copies.is_empty(), "page-locked memory was freed under a copy");
        let freed = state.pinned.remove(&(at.0 as usize)).expect("page-locked memory");
        state.events.push(Event::FreeHost(freed.len()));
    }

    fn copies_after_steps(&self) -> Result<(), CudaError> {
        self.asked(Event::CopiesAfterSteps, |state| {
            state.ahead = false;
            Ok(())
        })
    }

    fn begin_recording(&self) -> Result<(), CudaError> {
        let mut state = self.state.lock().unwrap();
        assert!(state.recording.replace(Vec::new()).is_none(), "a recording in a recording");
        Ok(())
    }

    fn end_recording(&self) -> Result<u64, CudaError> {
        let mut state = self.state.lock().unwrap();
        let recording = state.recording.take().expect("a recording");
        if state.cannot_record {
            return Err(CudaError::Driver {
                what: "recording a step".into(),
                code: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED".into(),
            });
        }
        state.events.push(Event::Recorded(recording.len()));
        let id = state.recorded.keys().next_back().map_or(1, |id| id + 1);
        state.recorded.insert(id, recording);
        Ok(id)
    }

    unsafe fn replay(&self, recorded: u64) -> Result<(), CudaError> {
        self.step(Event::Replay, |state| {
            assert!(state.recorded.contains_key(&recorded), "a recording that was forgotten");
            Ok(())
        })
    }

    fn steps_after_copies(&self) -> Result<(), CudaError> {
        self.asked(Event::StepsAfterCopies, |state| {
            state.awaited = state.copies.len();
            Ok(())
        })
    }

    fn forget(&self, recorded: u64) {
        assert!(self.state.lock().unwrap().recorded.remove(&recorded).is_some(), "forgotten twice");
    }

    fn finish_copies(&self) -> Result<(), CudaError> {
        self.asked(Event::FinishCopies, |state| {
            state.awaited = 0;
            state.make_copies(state.copies.len());
            Ok(())
        })
    }

    unsafe fn copy_out(&self, to: HostPtr, from: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        self.asked(Event::CopyOut(bytes), |state| {
            assert!(!state.ahead, "a copy that does not wait for the steps before it");
            assert!(state.copies.iter().all(|copy| matches!(copy, Copy::Out { .. })), "blocks go out while others come in");
            let bytes = state.live(from, bytes).to_vec();
            state.copies.push(Copy::Out { to: to.0 as usize, bytes });
            Ok(())
        })
    }

    unsafe fn copy_in(&self, to: DevicePtr, from: HostPtr, bytes: usize) -> Result<(), CudaError> {
        self.asked(Event::CopyIn(bytes), |state| {
            assert!(!state.ahead, "a copy that does not wait for the steps before it");
            state.live(to, bytes);
            state.copies.push(Copy::In { to, from: from.0 as usize, bytes });
            Ok(())
        })
    }
}
