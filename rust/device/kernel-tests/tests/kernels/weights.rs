//! Kernels that read weights as they lie in their file: the embedding, dequantization, products with few rows.

use device::{
    DType, Precision,
    cuda::packed::PackedFormat,
    kernel_args::{DequantizeArgs, ElementType, EmbedArgs, GemvArgs, GemvTarget, MAX_TARGETS},
};
use half::{bf16, f16};
use kernel_tests::{
    Buffer, Kernel, Order, assert_close,
    random::Rng,
    weight::{Weight, kernel_suffix as name},
};

fn block_len(format: DType) -> usize {
    if let DType::Ggml(format) = format { format.block_len() } else { 8 }
}

#[test]
fn dequantized_rows_are_those_of_the_cpu_bit_for_bit() {
    let mut rng = Rng::new(1);
    for format in DType::all().filter(|format| PackedFormat::of(*format, Precision::Fast).is_none()) {
        for (rows, cols) in [(1, 256), (3, 768), (7, 1280)] {
            let weight = Weight::random(format, rows, cols, &mut rng);
            let w = Buffer::input(&weight.bytes);
            for out_type in [ElementType::F32, ElementType::F16, ElementType::BF16] {
                let out = Buffer::output::<u8>(rows * cols * if out_type == ElementType::F32 { 4 } else { 2 });
                let args = DequantizeArgs {
                    w: w.ptr(),
                    out: out.ptr(),
                    row_bytes: weight.row_bytes(),
                    num_rows: rows as u32,
                    cols: cols as u32,
                    out_type: out_type as u32,
                    reserved: 0,
                };
                let kernel = Kernel::named(&format!("dequantize_{}", name(format)));
                kernel.launch([(rows * cols).div_ceil(4096), 1, 1], &args, Order::Ascending);
                let halves = || out.values::<u16>();
                match out_type {
                    ElementType::F32 => {
                        let expected: Vec<_> = weight.values.iter().map(|x| x.to_bits()).collect();
                        assert_eq!(out.values::<u32>(), expected, "{format} {cols}");
                    }
                    ElementType::F16 => {
                        let expected: Vec<_> = weight.values.iter().map(|x| f16::from_f32(*x).to_bits()).collect();
                        assert_eq!(halves(), expected, "{format} {cols} to f16");
                    }
                    ElementType::BF16 => {
                        let expected: Vec<_> = weight.values.iter().map(|x| bf16::from_f32(*x).to_bits()).collect();
                        assert_eq!(halves(), expected, "{format} {cols} to bf16");
                    }
                }
            }
        }
    }
}

#[test]
fn embeddings_are_rows_of_the_table() {
    let mut rng = Rng::new(2);
    for format in DType::all() {
        // Rows of floats end within a run of 32.
        let odd: &[usize] = if matches!(format, DType::Ggml(_)) { &[] } else { &[8, 72] };
        for &cols in [256, 2304].iter().chain(odd) {
            let weight = Weight::random(format, 9, cols, &mut rng);
            let ids = [8u32, 0, 5, 9];
            let (table, token_ids, out) = (Buffer::input(&weight.bytes), Buffer::input(&ids), Buffer::output::<f32>(4 * cols));
            let args = EmbedArgs {
                table: table.ptr(),
                token_ids: token_ids.ptr(),
                out: out.ptr(),
                row_bytes: weight.row_bytes(),
                num_tokens: 4,
                cols: cols as u32,
                vocab_size: 9,
                beyond: 5,
                scale: 1.5,
                reserved: 0,
            };
            Kernel::named(&format!("embed_{}", name(format))).launch([4, 1, 1], &args, Order::Ascending);
            let expected: Vec<f32> = ids
                .iter()
                .flat_map(|&id| weight.values[if id < 9 { id as usize } else { 5 } * cols..][..cols].iter().map(|x| x * 1.5))
                .collect();
            assert_eq!(out.values::<f32>(), expected, "{format} {cols}");
        }
    }
}

#[test]
fn an_embedding_may_have_more_than_2_32_bytes() {
    let (cols, rows) = (1024, (1 << 20) + 9);
    let table = Buffer::sparse(rows * cols * 4);
    let (ids, out) = (Buffer::input(&[rows as u32 - 1, 0]), Buffer::output::<f32>(2 * cols));
    let values = Rng::new(5).floats(cols);
    table.write_at((rows - 1) * cols * 4, &values);
    let args = EmbedArgs {
        table: table.ptr(),
        token_ids: ids.ptr(),
        out: out.ptr(),
        row_bytes: cols as u64 * 4,
        num_tokens: 2,
        cols: cols as u32,
        vocab_size: rows as u32,
        beyond: 0,
        scale: 1.0,
        reserved: 0,
    };
    Kernel::named("embed_f32").launch([2, 1, 1], &args, Order::Ascending);
    assert_eq!(out.values::<f32>(), [values, vec![0.0; cols]].concat());
}

/// What the product is made of besides the weight.
struct Product {
    x: Vec<f32>,
    x_stride: usize,
    bias: Option<Vec<f32>>,
    before: Vec<f32>,
    out_stride: usize,
    accumulate: bool,
    scale: f32,
}

impl Product {
    fn random(weight: &Weight, rows: usize, rng: &mut Rng) -> Self {
        let (x_stride, out_stride) = (weight.cols + 4, weight.rows + 3);
        Self {
            x: rng.floats(rows * x_stride),
            x_stride,
            bias: (rng.below(2) == 0).then(|| rng.floats(weight.rows)),
            before: rng.floats(rows * out_stride),
            out_stride,
            accumulate: rng.below(2) == 0,
            scale: 0.75,
        }
    }

    /// The first `rows` rows, by the kernel for `capacity`.
    fn run(&self, weight: &Weight, rows: usize, capacity: usize, order: Order) -> Vec<f32> {
        let (x, w) = (Buffer::input(&self.x), Buffer::input(&weight.bytes));
        let (bias, out) = (Buffer::input(self.bias.as_deref().unwrap_or(&[])), Buffer::inout(&self.before));
        // The weight's features are those of several, one after the other.
        let (mut targets, mut ctas) = ([GemvTarget::default(); MAX_TARGETS], 0);
        for (i, target) in targets.iter_mut().enumerate() {
            let (first, end) = (weight.rows * i / MAX_TARGETS, weight.rows * (i + 1) / MAX_TARGETS);
            *target = GemvTarget {
                w: w.ptr() + first as u64 * weight.row_bytes(),
                bias: if self.bias.is_some() { bias.ptr() + first as u64 * 4 } else { 0 },
                out: out.ptr() + first as u64 * 4,
                out_features: (end - first) as u32,
                out_stride: self.out_stride as u32,
                first_cta: ctas as u32,
                reserved: 0,
            };
            ctas += (end - first).div_ceil(4);
        }
        let args = GemvArgs {
            x: x.ptr(),
            targets,
            w_stride: weight.row_bytes(),
            num_rows: rows as u32,
            in_features: weight.cols as u32,
            x_stride: self.x_stride as u32,
            accumulate: u32::from(self.accumulate),
            scale: self.scale,
            reserved: 0,
        };
        let kernel = Kernel::named(&format!("gemv_{}_r{capacity}", name(weight.format)));
        kernel.launch([ctas, 1, 1], &args, order);
        out.values()
    }

    fn expected(&self, weight: &Weight, rows: usize) -> Vec<f32> {
        let mut out = self.before.clone();
        for (out, x) in out.chunks_exact_mut(self.out_stride).zip(self.x.chunks_exact(self.x_stride)).take(rows) {
            for (n, w) in weight.values.chunks_exact(weight.cols).enumerate() {
                let dot: f64 = w.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                let sum = (dot + self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[n]))) * f64::from(self.scale);
                out[n] = (sum + if self.accumulate { f64::from(out[n]) } else { 0.0 }) as f32;
            }
        }
        out
    }
}

#[test]
fn products_with_few_rows_agree_with_the_oracle() {
    let mut rng = Rng::new(3);
    for format in DType::all() {
        let block = block_len(format);
        // Less than a run of a warp, odd numbers of blocks, more than all warps take at once.
        for (i, (features, cols)) in
            [(5, block), (9, 576usize.next_multiple_of(block)), (4, 5000usize.next_multiple_of(block))].into_iter().enumerate()
        {
            let weight = Weight::random(format, features, cols, &mut rng);
            let largest = weight.values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            for (rows, capacity) in [(1, 1), (2, 2), (3, 4), (8, 8)] {
                if i == 2 && rows == 3 {
                    continue;
                }
                let product = Product::random(&weight, rows, &mut rng);
                let order = if rows % 2 == 0 { Order::Ascending } else { Order::Descending };
                let tolerance = [2e-7 * largest * (cols as f32).sqrt() * 8.0 + 1e-6, 1e-5];
                let what = format!("{format} {features} x {cols}, {rows} rows");
                assert_close(&product.run(&weight, rows, capacity, order), &product.expected(&weight, rows), tolerance, &what);
            }
        }
    }
}

#[test]
fn a_row_of_a_product_has_the_same_bits_alone_and_beside_others() {
    let mut rng = Rng::new(4);
    for format in DType::all() {
        let weight = Weight::random(format, 6, 1280, &mut rng);
        let product = Product::random(&weight, 8, &mut rng);
        let together = product.run(&weight, 8, 8, Order::Ascending);
        for capacity in [1, 2, 4] {
            let fewer = product.run(&weight, capacity, capacity, Order::Descending);
            let cols = product.out_stride * capacity;
            assert_eq!(fewer[..cols], together[..cols], "{format}, {capacity} rows");
        }
    }
}
