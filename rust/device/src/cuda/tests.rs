//! The backend's calls, seen by a driver that records them.

use std::sync::Arc;

use super::{
    CudaBackend, CudaError, CudaOptions, EMBEDDED, Kernel,
    driver::{DeviceMemory, Driver},
    memory::{Constants, StepArena},
    planes::Plane,
    recording::{Event, RecordingDriver},
    swap::Swap,
};
use crate::{
    Constant, DType, Device, GgmlType, KvCacheSpec, KvDType, KvGroupMetadata, KvShape, KvSource, LinearOptions, Norm, NormKind,
    Phases, Precision, Projection, StepMetadata, WeightView, mmap::Bytes,
};

fn recording() -> (Arc<RecordingDriver>, Arc<dyn Driver>) {
    recording_of(1 << 20)
}

fn recording_of(bytes: usize) -> (Arc<RecordingDriver>, Arc<dyn Driver>) {
    let recording = RecordingDriver::new(bytes);
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
fn layers_without_keys_and_values_need_no_kernels_for_them() {
    let (_, driver) = recording();
    let backend = CudaBackend::new(driver).unwrap();
    let sources = [KvSource::Nothing, KvSource::Own(KvShape::new(1, 64))];
    let spec = KvCacheSpec::grouped((4, 8), KvDType::F16, &sources, &[&[1]]).unwrap();
    assert_eq!(backend.alloc_kv_cache(&spec).map(|cache| cache.spec().layers.len()).unwrap(), 2);
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
    let spec = |head_dim, dtype| KvCacheSpec::uniform((4, 8), dtype, KvShape::new(2, head_dim), 1).unwrap();
    let text = backend.alloc_kv_cache(&spec(72, KvDType::BF16)).err().expect("there is no kernel for 72").to_string();
    assert!(text.contains("72") && text.contains("80") && text.contains("PagedCacheType.F32"), "{text}");
    assert!(backend.alloc_kv_cache(&spec(72, KvDType::F32)).is_ok());
    assert!(backend.alloc_kv_cache(&spec(64, KvDType::BF16)).is_ok());
    for dtype in KvDType::ALL {
        assert!(backend.alloc_kv_cache(&spec(512, dtype)).is_ok());
        for (head_dim, most) in [(128, 64), (512, 32)] {
            let check = |queries_per_kv| backend.check_kv_layer(dtype, KvShape::new(1, head_dim), queries_per_kv);
            assert!(check(most).is_ok());
            if dtype == KvDType::F32 {
                assert!(check(most + 7).is_ok());
            } else {
                let text = check(most + 7).expect_err("too many query heads").to_string();
                assert!(text.contains(&format!("{} query heads", most + 7)) && text.contains("PagedCacheType.F32"), "{text}");
            }
        }
    }
    for head_dim in [18, 516, 1024] {
        let text = backend.alloc_kv_cache(&spec(head_dim, KvDType::F32)).err().expect("nothing takes it").to_string();
        assert!(text.contains(&format!("heads of {head_dim}")) && text.contains("device=\"cpu\""), "{text}");
    }
}

#[test]
fn blocks_are_copied_out_and_in_and_by_one_launch_for_all_planes() {
    let (recording, driver) = recording();
    let backend = CudaBackend::new(driver).unwrap();
    let spec = KvCacheSpec::uniform((4, 8), KvDType::Int8, KvShape::new(2, 64), 3).unwrap();
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
    assert_eq!(recording.events(), [Event::Allocate(16), Event::Upload(16), launch.clone()]);
    cache.copy_blocks(&[(3, 1), (2, 0)]);
    assert_eq!(recording.events(), [Event::Upload(16), launch], "nothing is freed in a step, which would wait");
    drop(cache);
}

/// Blocks of 4 planes in a storage of so many bytes each.
fn swapping(block_bytes: usize) -> (Arc<RecordingDriver>, Vec<Plane>, Swap) {
    let (recording, driver) = recording_of(16 * block_bytes);
    let memory = || DeviceMemory::zeroed(&driver, 4 * block_bytes).unwrap();
    let planes = (0..4).map(|i| Plane { memory: memory(), start: i * block_bytes, len: block_bytes }).collect();
    recording.events();
    (recording, planes, Swap::new(&driver, 4 * block_bytes))
}

#[test]
fn blocks_go_out_after_the_steps_so_far_and_in_before_the_steps_to_come() {
    let (recording, planes, mut swap) = swapping(64);
    let block = |seed: usize| -> Vec<u8> { (0..256).map(|i| (i * 7 + seed * 31) as u8).collect() };
    swap.copy_in(&planes, 2, &block(1)).unwrap();
    let events = recording.events();
    assert!(matches!(events[0], Event::AllocateHost(_)));
    let copies = [Event::CopyIn(64), Event::CopyIn(64), Event::CopyIn(64), Event::CopyIn(64)];
    let around = |first: Event, last: Event| [&[first], &copies[..], &[last]].concat();
    assert_eq!(events[1..], around(Event::CopiesAfterSteps, Event::StepsAfterCopies), "the host does not wait");
    let mut read = [0u8; 64];
    planes[3].memory.download(2 * 64, &mut read).unwrap();
    assert_eq!(read, block(1)[192..], "a step sees it");
    recording.events();
    swap.copy_in(&planes, 0, &block(2)).unwrap();
    assert_eq!(recording.events(), around(Event::CopiesAfterSteps, Event::StepsAfterCopies), "its memory is there already");
    assert_eq!(swap.copy_out(&planes, &[0, 2, 1]).unwrap(), [block(2), block(1), vec![0; 256]]);
    let out = vec![Event::CopyOut(64); 12];
    let expected = [&[Event::FinishCopies, Event::CopiesAfterSteps], &out[..], &[Event::FinishCopies]].concat();
    assert_eq!(recording.events(), expected, "what came in is waited for, for its slots are needed");
}

#[test]
fn page_locked_memory_is_used_again_only_when_its_copies_are_done() {
    // A block is a quarter of the room.
    let (recording, planes, mut swap) = swapping(2 << 20);
    let count = |event: Event| recording.events().into_iter().filter(|e| *e == event).count();
    for i in 0..9u8 {
        swap.copy_in(&planes, u32::from(i % 4), &vec![i; 8 << 20]).unwrap();
    }
    assert_eq!(count(Event::FinishCopies), 2, "before the fifth and the ninth");
    let out = swap.copy_out(&planes, &[0, 1, 2, 3, 0]).unwrap();
    assert_eq!(
        out.iter().map(|block| (block[0], block[(8 << 20) - 1])).collect::<Vec<_>>(),
        [(8, 8), (5, 5), (6, 6), (7, 7), (8, 8)]
    );
    drop(out);
    recording.events();
    swap.copy_in(&planes, 1, &vec![1; 8 << 20]).unwrap();
    drop(swap);
    let last = recording.events();
    assert_eq!(last[last.len() - 2..], [Event::FinishCopies, Event::FreeHost(32 << 20)]);
}

#[test]
fn a_copy_that_fails_leaves_blocks_that_can_be_copied() {
    let (recording, planes, mut swap) = swapping(64);
    let error = CudaError::Driver { what: "copying blocks to the GPU".into(), code: "CUDA_ERROR_INVALID_VALUE".into() };
    recording.fail(error.clone());
    assert_eq!(swap.copy_in(&planes, 1, &[7; 256]), Err(error.clone()));
    assert_eq!(swap.copy_out(&planes, &[1]), Err(error));
    recording.heal();
    swap.copy_in(&planes, 1, &[8; 256]).unwrap();
    assert_eq!(swap.copy_out(&planes, &[1]).unwrap(), [vec![8; 256]]);
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
        ..StepMetadata::default()
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

/// Launches and products of a projection of so many rows.
fn multiplied(recording: &Arc<RecordingDriver>, dtype: DType, precision: Precision, rows: usize) -> Vec<Event> {
    projected(recording, &[dtype], precision, [rows, 64], None)
}

/// Launches and products of projections of `[rows, cols]` to 33 features each.
fn projected(
    recording: &Arc<RecordingDriver>,
    dtypes: &[DType],
    precision: Precision,
    [rows, cols]: [usize; 2],
    norm: Option<&Norm>,
) -> Vec<Event> {
    let backend = CudaBackend::new(Arc::<RecordingDriver>::clone(recording) as _).unwrap();
    let load = |dtype: &DType| {
        let bytes = Bytes::from_vec(vec![0; dtype.row_bytes(cols).unwrap() * 33]);
        let weight = WeightView::new(*dtype, 33, cols, bytes).unwrap();
        backend.load_linear(&weight, &LinearOptions { name: "w".into(), precision, bias: None }).unwrap()
    };
    let linears: Vec<_> = dtypes.iter().map(load).collect();
    let mut x = backend.alloc(rows, cols).unwrap();
    let mut outs: Vec<_> = linears.iter().map(|_| backend.alloc(rows, 33).unwrap()).collect();
    x.set_rows(rows);
    recording.events();
    let projections = linears.iter().zip(&mut outs).map(|(linear, out)| Projection { linear, out });
    backend.norm_linear(&x, norm, &mut projections.collect::<Vec<_>>(), &StepMetadata::default());
    let events = recording.events().into_iter();
    events.filter(|event| matches!(event, Event::Launch { .. } | Event::Matmul(_))).collect()
}

fn launched(kernel: &'static str, columns: u32) -> Event {
    Event::Launch { kernel, grid: [columns, 1, 1] }
}

/// Of weights that are read again for each 8 rows.
fn launched_for_rows(kernel: &'static str, rows: u32) -> Event {
    Event::Launch { kernel, grid: [9, rows.div_ceil(8), 1] }
}

#[test]
fn many_rows_are_one_product_and_few_are_for_kernels_of_our_own() {
    let q4 = DType::Ggml(GgmlType::Q4_0);
    let run = |dtype, precision, rows| multiplied(&RecordingDriver::new(1 << 28), dtype, precision, rows);
    for rows in [1, 8] {
        assert_eq!(run(DType::BF16, Precision::Fast, rows), [launched("gemm_bf16_r8", 1)], "{rows} rows");
    }
    assert_eq!(run(DType::F16, Precision::Fast, 9), [launched("round_values", 1), launched("gemm_f16_r16", 1)]);
    assert_eq!(run(DType::BF16, Precision::Fast, 32), [launched("round_values", 2), launched("gemm_bf16_r32", 1)]);
    assert_eq!(run(DType::BF16, Precision::Fast, 33), [launched("round_values", 3), Event::Matmul([33, 33, 64])]);
    assert_eq!(run(DType::F32, Precision::Fast, 8), [launched("gemv_f32_r8", 9)]);
    assert_eq!(run(DType::F32, Precision::Fast, 9), [Event::Matmul([9, 33, 64])]);
    assert_eq!(run(q4, Precision::Fast, 8), [launched("gemm_q4_0_r8", 1)]);
    assert_eq!(run(q4, Precision::Fast, 16), [launched("round_values", 1), launched("gemm_q4_0_r16", 1)]);
    assert_eq!(run(q4, Precision::Fast, 32), [launched("round_values", 2), launched("gemm_q4_0_r32", 1)]);
    let tiled = |kernel, row_tiles| Event::Launch { kernel, grid: [1, row_tiles, 1] };
    assert_eq!(run(q4, Precision::Fast, 33), [launched("round_values", 3), tiled("gemm_q4_0_r64", 1)]);
    assert_eq!(run(q4, Precision::Fast, 65)[1..], [tiled("gemm_q4_0_r128", 1)]);
    assert_eq!(run(q4, Precision::Fast, 256)[1..], [tiled("gemm_q4_0_r128", 2)]);
    let taken_apart = [launched("round_values", 17), launched("packed_dequantize_q4_0", 1), Event::Matmul([257, 33, 64])];
    assert_eq!(run(q4, Precision::Fast, 257), taken_apart);
    let in_passes = [launched("round_values", 3), launched("gemm_q4_0_r32", 1), launched("gemm_q4_0_r16", 1)];
    assert_eq!(run(q4, Precision::Deterministic, 33), in_passes);
    assert_eq!(run(q4, Precision::Exact, 9), [launched_for_rows("gemv_q4_0_r8", 9)]);
    let q5 = DType::Ggml(GgmlType::Q5_0);
    assert_eq!(run(q5, Precision::Fast, 32), [launched_for_rows("gemv_q5_0_r8", 32)]);
    let taken_apart = [launched("round_values", 3), launched("dequantize_q5_0", 1), Event::Matmul([33, 33, 64])];
    assert_eq!(run(q5, Precision::Fast, 33), taken_apart);
    for precision in [Precision::Exact, Precision::Deterministic] {
        assert_eq!(run(DType::BF16, precision, 9), [launched_for_rows("gemv_bf16_r8", 9)]);
    }
}

#[test]
fn few_rows_of_f32_that_are_wide_are_one_product() {
    let run = |dtype, rows, cols| projected(&RecordingDriver::new(1 << 28), &[dtype], Precision::Fast, [rows, cols], None);
    assert_eq!(run(DType::F32, 4, 4096), [launched("gemv_f32_r4", 9)]);
    assert_eq!(run(DType::F32, 5, 4096), [Event::Matmul([5, 33, 4096])]);
    assert_eq!(run(DType::F32, 1, 20_480), [launched("gemv_f32_r1", 9)]);
    // In pieces of four stages.
    assert_eq!(run(DType::BF16, 5, 4096), [launched("gemm_bf16_r8", 4)]);
}

#[test]
fn weights_that_are_alike_share_a_launch() {
    let run = |dtypes: &[DType]| projected(&RecordingDriver::new(1 << 28), dtypes, Precision::Fast, [1, 64], None);
    assert_eq!(run(&[DType::F32; 3]), [launched("gemv_f32_r1", 27)]);
    assert_eq!(run(&[DType::BF16; 3]), [launched("gemm_bf16_r8", 3)]);
    assert_eq!(run(&[DType::BF16; 5]), [launched("gemm_bf16_r8", 3), launched("gemm_bf16_r8", 2)]);
    assert_eq!(run(&[DType::BF16, DType::F16, DType::F16]), [launched("gemm_bf16_r8", 1), launched("gemm_f16_r8", 2)]);
    let [q4, q8] = [GgmlType::Q4_0, GgmlType::Q8_0].map(DType::Ggml);
    assert_eq!(run(&[q4; 4]), [launched("gemm_q4_0_r8", 3), launched("gemm_q4_0_r8", 1)]);
    assert_eq!(run(&[q4, q4, q8]), [launched("gemm_q4_0_r8", 2), launched("gemm_q8_0_r8", 1)]);
}

#[test]
fn norms_write_what_all_products_read() {
    let norm = Norm { kind: NormKind::Rms, weight: vec![1.0; 64].into(), bias: None, eps: 1e-5 };
    let run =
        |dtypes: &[DType], rows| projected(&RecordingDriver::new(1 << 28), dtypes, Precision::Fast, [rows, 64], Some(&norm));
    let product = || Event::Matmul([33, 33, 64]);
    assert_eq!(run(&[DType::BF16; 2], 33), [launched("rms_norm", 33), product(), product()]);
    let normed = launched("rms_norm", 9);
    assert_eq!(run(&[DType::BF16; 2], 9), [normed.clone(), launched("gemm_bf16_r16", 2)]);
    let q4 = DType::Ggml(GgmlType::Q4_0);
    assert_eq!(run(&[DType::BF16, q4], 9), [normed.clone(), launched("gemm_bf16_r16", 1), launched("gemm_q4_0_r16", 1)]);
    let rounded = || launched("round_values", 1);
    let [bf16, f16] = ["gemm_bf16_r16", "gemm_f16_r16"].map(|kernel| launched(kernel, 1));
    assert_eq!(run(&[DType::BF16, DType::F16], 9), [normed.clone(), rounded(), bf16, rounded(), f16.clone()]);
    // Values beyond f16 become its largest as they are rounded.
    assert_eq!(run(&[DType::F16], 9), [normed, rounded(), f16]);
}

#[test]
fn without_cublaslt_many_rows_are_for_kernels_of_our_own() {
    let run = |dtype, rows| multiplied(&RecordingDriver::without_matmul(1 << 28), dtype, Precision::Fast, rows);
    assert_eq!(run(DType::F32, 17), [launched_for_rows("gemv_f32_r8", 17)]);
    let in_passes = [launched("round_values", 3), launched("gemm_bf16_r32", 1), launched("gemm_bf16_r16", 1)];
    assert_eq!(run(DType::BF16, 33), in_passes);
    let tiled = |kernel, row_tiles| Event::Launch { kernel, grid: [1, row_tiles, 1] };
    let in_tiles = [launched("round_values", 19), tiled("gemm_q4_0_r128", 2), tiled("gemm_q4_0_r64", 1)];
    assert_eq!(run(DType::Ggml(GgmlType::Q4_0), 300), in_tiles);
}

#[test]
fn slices_of_a_quantized_weight_cover_its_features_once() {
    let (recording, cols, features) = (RecordingDriver::new(1 << 30), 16384, 1024 * 2 + 3);
    let options = CudaOptions { slice_bytes: 1024 * cols * 2, ..CudaOptions::default() };
    let backend = CudaBackend::with(Arc::<RecordingDriver>::clone(&recording) as _, options).unwrap();
    let dtype = DType::Ggml(GgmlType::Q4_0);
    let bytes = Bytes::from_vec(vec![0; dtype.row_bytes(cols).unwrap() * features]);
    let weight = WeightView::new(dtype, features, cols, bytes).unwrap();
    let options = LinearOptions { name: "w".into(), precision: Precision::Fast, bias: None };
    let linear = backend.load_linear(&weight, &options).unwrap();
    let (mut x, mut out) = (backend.alloc(260, cols).unwrap(), backend.alloc(260, features).unwrap());
    x.set_rows(260);
    recording.events();
    backend.norm_linear(&x, None, &mut [Projection { linear: &linear, out: &mut out }], &StepMetadata::default());
    let products = recording.events().into_iter().filter(|event| matches!(event, Event::Matmul(_)));
    assert_eq!(products.collect::<Vec<_>>(), [1024, 1024, 3].map(|features| Event::Matmul([260, features, cols])));
}
