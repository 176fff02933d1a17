//! Kernels of packed weights and many rows.

use device::kernel_args::{GemmArgs, GemmTarget, MAX_TARGETS};
use half::bf16;
use kernel_tests::{
    Buffer, Order, assert_close,
    packed::{Packed, Product, SCALE, formats},
    random::Rng,
};

/// Rows and features of a tile, and columns of a stage.
const TILE: [usize; 2] = [128, 128];
const STAGE: usize = 64;

/// `rows` rows from `first` on of several weights in one launch; x and `accumulate` are those of the first.
fn run(of: &[(&Packed, &Product)], (first, rows): (usize, usize), order: Order) -> Vec<Vec<f32>> {
    let (packed, one) = of[0];
    let cols = packed.weight.cols;
    // Rows begin at multiples of 16 bytes.
    let x_stride = cols + 8;
    let row = |x: &[f32]| -> Vec<u16> {
        let x = x[..cols].iter().map(|x| bf16::from_f32(*x).to_bits());
        x.chain([u16::MAX; 8]).collect()
    };
    let x = Buffer::input(&one.x.chunks_exact(one.x_stride).skip(first).take(rows).flat_map(row).collect::<Vec<_>>());
    let (mut targets, mut buffers, mut ctas) = ([GemmTarget::default(); MAX_TARGETS], Vec::new(), 0);
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
            first_piece: ctas as u32,
            part_stages: product.part_stages as u32,
        };
        buffers.push((w, bias, out));
        let parts = cols.div_ceil(STAGE).div_ceil(product.part_stages);
        ctas += rows.div_ceil(TILE[0]) * features.div_ceil(TILE[1]) * parts;
    }
    let parts = Buffer::output::<f32>(ctas * TILE[0] * TILE[1]);
    let arrivals = Buffer::inout(&vec![0u32; ctas]);
    let args = GemmArgs {
        x: x.ptr(),
        targets,
        parts: parts.ptr(),
        arrivals: arrivals.ptr(),
        w_stride: packed.panel_bytes(),
        num_rows: rows as u32,
        in_features: cols as u32,
        x_stride: x_stride as u32,
        accumulate: u32::from(one.accumulate),
        scale: SCALE,
        reserved: 0,
    };
    packed.kernel("tiled_gemm", "").launch([ctas, 1, 1], &args, order);
    assert_eq!(arrivals.values::<u32>(), vec![0; ctas], "arrivals are forgotten");
    buffers.iter().map(|(_, _, out)| out.values()).collect()
}

#[test]
fn products_with_many_rows_agree_with_the_oracle() {
    let mut rng = Rng::new(1);
    for format in formats() {
        // Features of less than a panel, of one and a bit, of tiles and a bit; rows of less than a tile and of more; parts of one
        // stage, of several, and no parts.
        for (features, cols, rows, part_stages) in [(5, 64, 1, 9), (70, 128, 129, 1), (300, 320, 260, 2), (64, 256, 64, 9)] {
            let packed = Packed::random(format, features, cols, &mut rng);
            let product = Product::random(&packed, rows, part_stages, &mut rng);
            let largest = packed.weight.values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            let rounded = |w: f32| bf16::from_f32(w).to_f32();
            let order = if rows % 2 == 0 { Order::Ascending } else { Order::Descending };
            let written = run(&[(&packed, &product)], (0, rows), order).remove(0);
            let what = format!("{format} {features} x {}, {rows} rows", packed.weight.cols);
            // A weight between two numbers of bf16 may become either of them.
            assert_close(&written, &product.expected(&packed, rows, rounded), [0.02 * largest, 1e-5], &what);
        }
    }
}

#[test]
fn a_row_has_the_same_bits_at_any_place_and_beside_any_others() {
    let mut rng = Rng::new(2);
    for format in formats() {
        let packed = Packed::random(format, 70, 320, &mut rng);
        for part_stages in [2, 9] {
            let product = Product::random(&packed, 260, part_stages, &mut rng);
            let together = run(&[(&packed, &product)], (0, 260), Order::Ascending).remove(0);
            for (first, rows) in [(0, 1), (127, 2), (200, 60), (1, 259)] {
                let fewer = run(&[(&packed, &product)], (first, rows), Order::Descending).remove(0);
                let expected = &together[first * product.out_stride..][..rows * product.out_stride];
                assert_eq!(fewer, expected, "{format}: {rows} rows from {first} on");
            }
        }
    }
}

#[test]
fn several_weights_in_a_launch_have_the_bits_they_have_alone() {
    let mut rng = Rng::new(3);
    for format in formats() {
        let weights = [150, 70, 300].map(|features| Packed::random(format, features, 192, &mut rng));
        let products = weights.each_ref().map(|packed| Product::random(packed, 130, 2, &mut rng));
        let (x, accumulate) = (products[0].x.clone(), products[0].accumulate);
        let products = products.map(|product| Product { x: x.clone(), accumulate, ..product });
        let of: Vec<_> = weights.iter().zip(&products).collect();
        let together = run(&of, (0, 130), Order::Descending);
        for (together, one) in together.iter().zip(of) {
            assert_eq!(*together, run(&[one], (0, 130), Order::Ascending)[0], "{format}: {} features", one.0.weight.rows);
        }
    }
}
