//! The backend's calls, seen by a driver that records them.

use std::sync::Arc;

use super::{
    CudaBackend, CudaError, EMBEDDED, Kernel,
    driver::{DeviceMemory, Driver},
    memory::{Constants, StepArena},
    recording::{Event, RecordingDriver},
};
use crate::{Backend, Constant, KvCacheSpec, KvDType, KvGroupMetadata, StepMetadata};

fn recording() -> (Arc<RecordingDriver>, Arc<dyn Driver>) {
    let recording = RecordingDriver::new(1 << 20);
    (Arc::clone(&recording), recording)
}

#[test]
fn device_memory_is_given_back_when_it_is_dropped() {
    let (recording, driver) = recording();
    let memory = DeviceMemory::of(&driver, &[1u32, 2, 3]).unwrap();
    assert_eq!((memory.bytes(), recording.used_bytes()), (16, 16), "padded to 16 bytes");
    let mut read = [0u32; 2];
    memory.download(4, &mut read).unwrap();
    assert_eq!(read, [2, 3]);
    drop(memory);
    assert_eq!(recording.events(), [Event::Allocate(16), Event::Upload(12), Event::Download(8), Event::Free(16)]);
    assert_eq!(recording.used_bytes(), 0);
}

#[test]
#[should_panic(expected = "12 bytes at 8 of device memory of 16 bytes")]
fn a_copy_beyond_device_memory_is_refused() {
    let (_, driver) = recording();
    let memory = DeviceMemory::new(&driver, 16).unwrap();
    let _ = memory.upload(8, &[0u32; 3]);
}

#[test]
fn a_full_card_is_an_error_with_both_figures() {
    let (_, driver) = recording();
    let _most = DeviceMemory::new(&driver, 1 << 19).unwrap();
    let Err(error) = DeviceMemory::new(&driver, 1 << 20) else { panic!("a card of 1 MB gave 1.5 MB") };
    assert_eq!(error, CudaError::OutOfMemory { needed_bytes: 1 << 20, free_bytes: 1 << 19 });
}

#[test]
fn lists_of_a_step_are_forgotten_with_it_and_reuse_its_memory() {
    let (recording, driver) = recording();
    let mut arena = StepArena::new(&driver);
    for _ in 0..3 {
        arena.reset().unwrap();
        let lists: Vec<_> = (0..5u32).map(|i| arena.put(&vec![i; 5000]).unwrap()).collect::<Vec<u64>>();
        assert!(lists.iter().all(|at| at % 256 == 0));
        assert!(lists.windows(2).all(|pair| pair[0].abs_diff(pair[1]) >= 20_000));
    }
    recording.events();
    arena.reset().unwrap();
    for i in 0..5u32 {
        arena.put(&vec![i; 5000]).unwrap();
    }
    assert!(
        recording.events().iter().all(|event| matches!(event, Event::Upload(20_000))),
        "no allocation in a step like the last"
    );
}

#[test]
fn constants_are_copied_once_and_forgotten_with_the_model() {
    let (recording, driver) = recording();
    let mut constants = Constants::default();
    let mut values: Constant = Arc::new(vec![1.0; 8]);
    let at = constants.of(&driver, &values).unwrap();
    assert_eq!(constants.of(&driver, &values).unwrap(), at);
    assert_eq!(recording.events(), [Event::Allocate(32), Event::Upload(32)]);
    // A table that grows is another one, wherever it lies.
    Arc::make_mut(&mut values).push(2.0);
    constants.of(&driver, &values).unwrap();
    assert_eq!(recording.events(), [Event::Free(32), Event::Allocate(48), Event::Upload(36)]);
    drop(values);
    constants.of(&driver, &Arc::new(vec![0.0; 4])).unwrap();
    assert_eq!(recording.events()[0], Event::Free(48));
}

#[test]
fn a_cache_of_heads_without_kernels_is_refused_with_what_would_work() {
    let (_, driver) = recording();
    let backend = CudaBackend::new(driver).unwrap();
    let spec = |head_dim, dtype| KvCacheSpec { num_blocks: 4, block_size: 8, num_kv_heads: 2, head_dim, num_planes: 1, dtype };
    let text = backend.alloc_kv_cache(&spec(72, KvDType::BF16)).err().expect("there is no kernel for 72").to_string();
    assert!(text.contains("72") && text.contains("80") && text.contains("PagedCacheType.F32"), "{text}");
    assert!(backend.alloc_kv_cache(&spec(72, KvDType::F32)).is_ok());
    assert!(backend.alloc_kv_cache(&spec(64, KvDType::BF16)).is_ok());
}

#[test]
fn blocks_are_copied_out_and_in_and_by_one_launch_for_all_planes() {
    let (recording, driver) = recording();
    let backend = CudaBackend::new(driver).unwrap();
    let spec = KvCacheSpec { num_blocks: 4, block_size: 8, num_kv_heads: 2, head_dim: 64, num_planes: 3, dtype: KvDType::Int8 };
    let cache = backend.alloc_kv_cache(&spec).unwrap();
    let bytes: Vec<u8> = (0..cache.block_bytes()).map(|i| (i % 251) as u8).collect();
    cache.import_block(2, &bytes);
    let mut read = vec![0; bytes.len()];
    cache.export_block(2, &mut read);
    assert_eq!(read, bytes);
    cache.export_block(1, &mut read);
    assert!(read.iter().all(|byte| *byte == 0), "a neighbour was written to");
    recording.events();
    cache.copy_blocks(&[(2, 3), (1, 0)]);
    let launch = Event::Launch { kernel: "copy_blocks", grid: [2, 6, 1] };
    assert_eq!(recording.events(), [Event::Allocate(16), Event::Upload(16), launch, Event::Free(16)]);
    drop(cache);
}

#[test]
fn a_lost_device_ends_the_step_with_the_drivers_words() {
    let (recording, driver) = recording();
    let backend = CudaBackend::new(driver).unwrap();
    let code = "CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)".to_owned();
    recording.fail(CudaError::Lost { what: "starting kernel rms_norm".into(), code });
    let step = StepMetadata {
        positions: vec![0],
        rope_positions: vec![0],
        query_start_loc: vec![0, 1],
        seq_lens: vec![1],
        groups: vec![KvGroupMetadata { block_tables: vec![1], max_blocks: 1, slot_mapping: vec![8] }],
    };
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| backend.begin_step(&step))).unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    for part in ["rms_norm", "CUDA_ERROR_LAUNCH_FAILED", "start a new one"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn embedded_kernels_and_the_manifest_are_the_same() {
    let mut embedded: Vec<_> = EMBEDDED.modules.iter().flat_map(|module| module.kernels.iter().copied()).collect();
    embedded.sort_unstable();
    if !embedded.is_empty() {
        assert_eq!(embedded, Kernel::all().keys().copied().collect::<Vec<_>>());
    }
}
