//! Kernels of weights that are packed for tensor cores: products with up to 32 rows, dequantization, the embedding.

use device::{
    DType, Precision, WeightView,
    cuda::packed::PackedFormat,
    kernel_args::{ElementType, GemmArgs, GemmTarget, MAX_TARGETS, PackedDequantizeArgs, PackedEmbedArgs},
    mmap::Bytes,
};
use half::{bf16, f16};
use kernel_tests::{
    Buffer, Order, assert_close,
    packed::{Packed, Product, SCALE, formats},
    random::Rng,
};

#[test]
fn exact_weights_and_floats_are_not_packed() {
    assert_eq!(formats().count(), 7);
    for format in DType::all() {
        assert!(PackedFormat::of(format, Precision::Exact).is_none(), "{format}");
        let is_packed = |precision| PackedFormat::of(format, precision).is_some();
        assert_eq!(is_packed(Precision::Fast), is_packed(Precision::Deterministic), "{format}");
    }
    assert!(!formats().any(|format| matches!(format, DType::F32 | DType::F16 | DType::BF16)));
}

#[test]
fn packed_weights_taken_apart_are_those_of_the_file_bit_for_bit() {
    let mut rng = Rng::new(1);
    for format in formats() {
        for (rows, cols) in [(1, 32), (70, 160), (130, 768)] {
            let packed = Packed::random(format, rows, cols, &mut rng);
            let cols = packed.weight.cols;
            let w = Buffer::input(&packed.bytes);
            for out_type in [ElementType::F32, ElementType::F16, ElementType::BF16] {
                let value_bytes = if out_type == ElementType::F32 { 4 } else { 2 };
                let out = Buffer::output::<u8>(rows.next_multiple_of(64) * cols * value_bytes);
                let args = PackedDequantizeArgs {
                    w: w.ptr(),
                    out: out.ptr(),
                    panel_bytes: packed.panel_bytes(),
                    cols: cols as u32,
                    out_type: out_type as u32,
                };
                let grid = [(cols / 32).div_ceil(4), rows.div_ceil(64), 1];
                packed.kernel("packed_dequantize", "").launch(grid, &args, Order::Ascending);
                let bits = |x: &f32| match out_type {
                    ElementType::F32 => x.to_bits(),
                    ElementType::F16 => f16::from_f32(*x).to_bits().into(),
                    ElementType::BF16 => bf16::from_f32(*x).to_bits().into(),
                };
                let written: Vec<u32> = match out_type {
                    ElementType::F32 => out.values(),
                    _ => out.values::<u16>().into_iter().map(u32::from).collect(),
                };
                let expected = packed.weight.values.iter().map(bits);
                let wrong = written.iter().zip(expected).position(|(written, expected)| *written != expected);
                assert_eq!(wrong, None, "{format} {rows} x {cols} to {out_type:?}");
            }
        }
    }
}

#[test]
fn embeddings_are_rows_of_the_packed_table() {
    let mut rng = Rng::new(2);
    for format in formats() {
        for cols in [32, 576] {
            let packed = Packed::random(format, 150, cols, &mut rng);
            let cols = packed.weight.cols;
            let ids: Vec<u32> = [149, 0, 63, 64, 64, 8, 23, 150, u32::MAX].into_iter().collect();
            let (table, token_ids) = (Buffer::input(&packed.bytes), Buffer::input(&ids));
            let out = Buffer::output::<f32>(ids.len() * cols);
            let args = PackedEmbedArgs {
                table: table.ptr(),
                token_ids: token_ids.ptr(),
                out: out.ptr(),
                panel_bytes: packed.panel_bytes(),
                num_tokens: ids.len() as u32,
                cols: cols as u32,
                vocab_size: 150,
                beyond: 77,
                scale: 1.5,
                reserved: 0,
            };
            packed.kernel("packed_embed", "").launch([ids.len(), 1, 1], &args, Order::Descending);
            let rows = ids.iter().flat_map(|&id| &packed.weight.values[if id < 150 { id as usize } else { 77 } * cols..][..cols]);
            assert_eq!(out.values::<f32>(), rows.map(|x| x * 1.5).collect::<Vec<_>>(), "{format} {cols}");
        }
    }
}

/// `rows` rows from `first` on, by the kernel for `capacity`.
fn run(product: &Product, packed: &Packed, (first, rows): (usize, usize), capacity: usize, order: Order) -> Vec<f32> {
    run_together(&[(packed, product)], (first, rows), capacity, order).remove(0)
}

/// The same of several weights in one launch; x, its stride and `accumulate` are those of the first.
fn run_together(of: &[(&Packed, &Product)], (first, rows): (usize, usize), capacity: usize, order: Order) -> Vec<Vec<f32>> {
    let (packed, one) = of[0];
    let cols = packed.weight.cols;
    let x = &one.x[first * one.x_stride..][..rows * one.x_stride];
    let rounded: Vec<u16> = x.iter().map(|x| bf16::from_f32(*x).to_bits()).collect();
    let x = if capacity == 8 { Buffer::input(x) } else { Buffer::input(&rounded) };
    // Of many rows a CTA takes two panels.
    let (tile_features, row_tiles) = if capacity > 32 { (128, rows.div_ceil(capacity)) } else { (64, 1) };
    let (mut targets, mut buffers, mut pieces) = ([GemmTarget::default(); MAX_TARGETS], Vec::new(), 0);
    for (target, (packed, product)) in targets.iter_mut().zip(of) {
        let features = packed.weight.rows;
        let w = Buffer::input(&packed.bytes);
        let bias = Buffer::input(product.bias.as_deref().unwrap_or(&[]));
        let out = Buffer::inout(&product.before[first * product.out_stride..][..rows * product.out_stride]);
        *target = GemmTarget {
            w: w.ptr(),
            bias: if product.bias.is_some() { bias.ptr() } else { 0 },
            out: out.ptr(),
            out_features: features as u32,
            out_stride: product.out_stride as u32,
            first_piece: pieces as u32,
            part_stages: product.part_stages as u32,
        };
        buffers.push((w, bias, out));
        let stages = features.div_ceil(tile_features) * cols.div_ceil(packed.format.stage_columns());
        pieces += stages.div_ceil(product.part_stages);
    }
    let parts = Buffer::output::<f32>(row_tiles * pieces * 2 * tile_features * capacity);
    let arrivals = Buffer::inout(&vec![0u32; row_tiles * pieces]);
    let args = GemmArgs {
        x: x.ptr(),
        targets,
        parts: parts.ptr(),
        arrivals: arrivals.ptr(),
        w_stride: packed.panel_bytes(),
        num_rows: rows as u32,
        in_features: cols as u32,
        x_stride: one.x_stride as u32,
        accumulate: u32::from(one.accumulate),
        scale: SCALE,
        reserved: 0,
    };
    let produced: Vec<_> = buffers.iter().map(|(_, _, out)| out).chain([&x, &parts, &arrivals]).collect();
    packed.kernel("gemm", &format!("_r{capacity}")).launch_behind(&produced, [pieces, row_tiles, 1], &args, order);
    assert_eq!(arrivals.values::<u32>(), vec![0; row_tiles * pieces], "arrivals are forgotten");
    buffers.iter().map(|(_, _, out)| out.values()).collect()
}

#[test]
fn products_of_packed_weights_agree_with_the_oracle() {
    let mut rng = Rng::new(3);
    for format in formats() {
        // Less than a stage, a ragged one, whole ones; features of less than a tile, of a panel and some, of three; pieces that
        // end with a panel, that begin and end within one, that have whole ones between.
        let shapes = [(5, 32, 9), (70, 576, 9), (129, 1312, 2), (64, 2304, 3), (129, 1312, 4), (300, 512, 5), (300, 512, 3)];
        for (features, cols, part_stages) in shapes {
            let packed = Packed::random(format, features, cols, &mut rng);
            let largest = packed.weight.values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            for (rows, capacity) in [(1, 8), (3, 8), (8, 8), (11, 16), (32, 32)] {
                if (features == 64 || features == 5 || features == 300) && rows != 3 && rows != 32 {
                    continue;
                }
                let product = Product::random(&packed, rows, part_stages, &mut rng);
                let order = if rows % 2 == 0 { Order::Ascending } else { Order::Descending };
                // A product is first made with codes of up to 256 times what the weight is worth.
                let tolerance = [2e-6 * largest * (packed.weight.cols as f32).sqrt() * 8.0 + 1e-6, 1e-5];
                let what = format!("{format} {features} x {}, {rows} rows", packed.weight.cols);
                assert_close(
                    &run(&product, &packed, (0, rows), capacity, order),
                    &product.expected(&packed, rows),
                    tolerance,
                    &what,
                );
            }
        }
    }
}

#[test]
fn products_of_packed_weights_and_many_rows_agree_with_the_oracle() {
    let mut rng = Rng::new(8);
    for format in formats() {
        // As above; and a block that is alone in its chunk, and a panel in its tile.
        let (few, many) = ([(1, 64), (33, 128)], [(70, 64), (200, 128)]);
        let shapes = [
            (5, 32, 9, &few[..]),
            (130, 608, 9, &few),
            (128, 2304, 3, &few[1..]),
            (258, 1312, 2, &many[..1]),
            (300, 512, 5, &many[..1]),
            (300, 512, 3, &many[1..]),
        ];
        for (features, cols, part_stages, runs) in shapes {
            let packed = Packed::random(format, features, cols, &mut rng);
            let largest = packed.weight.values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            for &(rows, capacity) in runs {
                let product = Product::random(&packed, rows, part_stages, &mut rng);
                let order = if rows % 2 == 0 { Order::Ascending } else { Order::Descending };
                let tolerance = [2e-6 * largest * (packed.weight.cols as f32).sqrt() + 1e-6, 1e-5];
                let what = format!("{format} {features} x {}, {rows} rows", packed.weight.cols);
                let expected = product.expected_of(&packed, rows, |w| bf16::from_f32(w).to_f32());
                assert_close(&run(&product, &packed, (0, rows), capacity, order), &expected, tolerance, &what);
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_among_many_at_any_place() {
    let mut rng = Rng::new(9);
    for format in formats() {
        for (features, part_stages) in [(70, 9), (150, 1)] {
            let packed = Packed::random(format, features, 2 * packed_columns(format), &mut rng);
            let product = Product::random(&packed, 140, part_stages, &mut rng);
            let together = run(&product, &packed, (0, 140), 128, Order::Ascending);
            for (first, rows, capacity) in [(0, 64, 64), (3, 137, 64), (139, 1, 64), (75, 65, 128)] {
                let fewer = run(&product, &packed, (first, rows), capacity, Order::Descending);
                let expected = &together[first * product.out_stride..][..rows * product.out_stride];
                assert_eq!(fewer, expected, "{format}: {rows} rows from {first} on, {capacity} at once");
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_beside_any_others_and_at_any_place() {
    let mut rng = Rng::new(4);
    for format in formats() {
        for (features, part_stages) in [(70, 9), (70, 1), (150, 2)] {
            let packed = Packed::random(format, features, 2 * packed_columns(format), &mut rng);
            let product = Product::random(&packed, 32, part_stages, &mut rng);
            let together = run(&product, &packed, (0, 32), 32, Order::Ascending);
            let places =
                [(0, 1, 8), (3, 1, 8), (3, 5, 8), (24, 8, 8), (0, 9, 16), (7, 16, 16), (31, 1, 16), (5, 20, 32), (30, 1, 32)];
            for (first, rows, capacity) in places {
                let fewer = run(&product, &packed, (first, rows), capacity, Order::Descending);
                let expected = &together[first * product.out_stride..][..rows * product.out_stride];
                assert_eq!(fewer, expected, "{format}: {rows} rows from {first} on, room for {capacity}");
            }
        }
    }
}

#[test]
fn several_weights_in_a_launch_have_the_bits_they_have_alone() {
    let mut rng = Rng::new(6);
    for format in formats() {
        let cols = 2 * packed_columns(format);
        let weights = [(150, 2), (70, 3), (33, 9)].map(|(features, part_stages)| {
            let packed = Packed::random(format, features, cols, &mut rng);
            let product = Product::random(&packed, 11, part_stages, &mut rng);
            (packed, product)
        });
        let [(_, one), ..] = &weights;
        let (x, accumulate) = (one.x.clone(), one.accumulate);
        let alike = weights.map(|(packed, product)| (packed, Product { x: x.clone(), accumulate, ..product }));
        for (rows, capacity) in [(3, 8), (11, 16), (11, 32), (11, 64)] {
            let of: Vec<_> = alike.iter().map(|(packed, product)| (packed, product)).collect();
            for together in [&of[..], &of[1..]] {
                let outs = run_together(together, (0, rows), capacity, Order::Descending);
                for (out, (packed, product)) in outs.iter().zip(together) {
                    let alone = run(product, packed, (0, rows), capacity, Order::Ascending);
                    assert_eq!(*out, alone, "{format}: {} features, {rows} rows", packed.weight.rows);
                }
            }
        }
    }
}

/// A stage and a bit of another one.
fn packed_columns(format: DType) -> usize {
    let DType::Ggml(ggml) = format else { unreachable!("floats are not packed") };
    288usize.next_multiple_of(ggml.block_len())
}

#[test]
fn threads_change_nothing_that_is_packed() {
    let mut rng = Rng::new(5);
    for format in formats() {
        let packed = Packed::random(format, 200, 2 * 256, &mut rng);
        let bytes = Bytes::from_vec(packed.weight.bytes.clone());
        let view = WeightView::new(format, 200, packed.weight.cols, bytes).unwrap();
        for num_threads in [0, 1, 3, 7] {
            assert!(packed.format.pack(&view, num_threads) == packed.bytes, "{format}, {num_threads} threads");
        }
    }
}
