//! Matrices as the hub's quantized checkpoints have them: FP8, GPTQ, AWQ, compressed-tensors, bitsandbytes' nf4 and MLX.
//!
//! Each becomes a format that the device has, and keeps every value: integer codes with a scale for 32 columns or more become
//! Q4_0, Q5_0 or Q8_0, with a minimum Q4_1 or Q5_1. All else, and what has a scale that f16 does not hold, becomes f32. Which
//! matrices are quantized is seen from their tensors, so that what a checkpoint leaves as it was needs no list.

use ::safetensors::Dtype;
use device::{DType, WeightView, kv_codes::E4M3_VALUES};
use serde_json::{Map, Value};

use super::{SafetensorsFiles, floats, safetensors::float_dtype};
use crate::EngineError;

mod values;
use values::{Matrix, Words};

/// How a checkpoint is quantized, by its config.json.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum HubFormat {
    /// Codes e4m3, with a scale for a tensor, a row, or a block of so many rows and columns.
    Fp8 { block: Option<[usize; 2]> },
    /// Codes by column, packed along columns. `plus_one`: zeros are stored less one.
    Gptq { bits: u32, is_symmetric: bool, plus_one: bool },
    /// Codes of 4 bits by column, packed along rows in an order of their own.
    Awq,
    /// compressed-tensors' integers of so many bits: packed in words, or of 8 bits as they are.
    Integers { bits: u32 },
    /// compressed-tensors' e2m1 codes with e4m3 scales for 16.
    Nvfp4,
    /// bitsandbytes' 4-bit codes of a table, with a scale for some of them.
    Nf4,
    /// MLX's codes with scale and bias.
    Mlx { bits: u32 },
}

impl HubFormat {
    /// Reads `quantization_config`; errors name the key within it and say what would work.
    pub fn read(config: &Map<String, Value>) -> Result<Option<Self>, String> {
        let number = |key: &str| config.get(key).and_then(Value::as_u64).unwrap_or(0) as u32;
        let is = |key: &str, usual: bool| config.get(key).and_then(Value::as_bool).unwrap_or(usual);
        let Some(method) = config.get("quant_method").and_then(Value::as_str) else {
            return match number("bits") {
                _ if config.get("mode").and_then(Value::as_str).is_some_and(|mode| mode != "affine") => {
                    Err(format!("mode is {}; MLX weights are read with mode \"affine\"", config["mode"]))
                }
                bits @ (2..=6 | 8) => Ok(Some(Self::Mlx { bits })),
                bits => Err(format!("bits is {bits}, and there is no quant_method; MLX weights have 2, 3, 4, 5, 6 or 8 bits")),
            };
        };
        match method {
            "mxfp4" => Ok(None),
            "fp8" => {
                let block = match config.get("weight_block_size") {
                    None | Some(Value::Null) => None,
                    Some(sizes) => {
                        let size = |i: usize| sizes.get(i).and_then(Value::as_u64).filter(|n| (1..1 << 20).contains(n));
                        let (Some(rows), Some(cols)) = (size(0), size(1)) else {
                            return Err(format!("weight_block_size is {sizes}; it must be two sizes"));
                        };
                        Some([rows as usize, cols as usize])
                    }
                };
                Ok(Some(Self::Fp8 { block }))
            }
            "gptq" => match number("bits") {
                bits @ (2 | 4 | 8) => {
                    let plus_one = config.get("checkpoint_format").and_then(Value::as_str) != Some("gptq_v2");
                    Ok(Some(Self::Gptq { bits, is_symmetric: is("sym", true), plus_one }))
                }
                bits => Err(format!("bits is {bits}; GPTQ weights are read with 2, 4 or 8")),
            },
            "awq" => match (number("bits"), config.get("version").and_then(Value::as_str).unwrap_or("gemm")) {
                (4, "gemm" | "GEMM") => Ok(Some(Self::Awq)),
                (4, version) => Err(format!("version is {version:?}; AWQ weights are read in version \"gemm\"")),
                (bits, _) => Err(format!("bits is {bits}; AWQ weights are read with 4")),
            },
            "bitsandbytes" => match config.get("bnb_4bit_quant_type").and_then(Value::as_str) {
                Some("nf4" | "fp4") if is("load_in_4bit", false) => Ok(Some(Self::Nf4)),
                _ => Err("load_in_4bit is not true, or bnb_4bit_quant_type neither \"nf4\" nor \"fp4\"; those are read".into()),
            },
            "compressed-tensors" => compressed_tensors(config),
            other => Err(format!(
                "quant_method is {other:?}; fp8, gptq, awq, compressed-tensors, bitsandbytes (4 bits), mxfp4 and MLX's are read"
            )),
        }
    }
}

fn compressed_tensors(config: &Map<String, Value>) -> Result<Option<HubFormat>, String> {
    let groups: Vec<_> = config.get("config_groups").and_then(Value::as_object).into_iter().flatten().collect();
    let [(_, group)] = groups[..] else {
        return Err(format!("config_groups has {} entries; one is read", groups.len()));
    };
    let weights = group.get("weights").cloned().unwrap_or_default();
    let bits = weights.get("num_bits").and_then(Value::as_u64).unwrap_or(0) as u32;
    let format = group.get("format").or_else(|| config.get("format")).and_then(Value::as_str).unwrap_or_default();
    match (format, bits) {
        ("pack-quantized", 4 | 8) | ("int-quantized", 8) => Ok(Some(HubFormat::Integers { bits })),
        ("float-quantized", 8) => Ok(Some(HubFormat::Fp8 { block: None })),
        ("nvfp4-pack-quantized", 4) => Ok(Some(HubFormat::Nvfp4)),
        _ => Err(format!(
            "format is {format:?} with {bits} bits; pack-quantized with 4 or 8, int-quantized and float-quantized with 8, and \
             nvfp4-pack-quantized are read"
        )),
    }
}

/// The tensors that stand for the one of this name, `NAME.weight`; `None` where it is there as floats.
pub struct Packed<'a> {
    files: &'a SafetensorsFiles,
    format: HubFormat,
    /// Without `.weight`.
    base: &'a str,
}

/// A tensor's shape, type and bytes.
type Raw<'a> = (&'a [usize], Dtype, &'a [u8]);

impl<'a> Packed<'a> {
    /// Looks for them.
    pub fn find(files: &'a SafetensorsFiles, format: HubFormat, name: &'a str) -> Option<Self> {
        let packed = Self { files, format, base: name.strip_suffix(".weight")? };
        let is_float = |(_, dtype, _): Raw<'_>| float_dtype(dtype).is_some();
        let weight = packed.raw(".weight").map(is_float);
        let is_there = weight != Some(true)
            && match format {
                HubFormat::Gptq { .. } | HubFormat::Awq => packed.raw(".qweight").is_some(),
                HubFormat::Integers { .. } => weight.is_some() || packed.raw(".weight_packed").is_some(),
                HubFormat::Nvfp4 => packed.raw(".weight_packed").is_some(),
                HubFormat::Fp8 { .. } | HubFormat::Nf4 | HubFormat::Mlx { .. } => weight.is_some(),
            };
        is_there.then_some(packed)
    }

    fn raw(&self, part: &str) -> Option<Raw<'a>> {
        self.files.raw(&format!("{}{part}", self.base))
    }

    /// A tensor that is there and has values: without any, its other sizes may be too large to compute with.
    fn part(&self, part: &str) -> Result<Raw<'a>, EngineError> {
        let found = self.raw(part).ok_or_else(|| self.error(&format!("tensor `{}{part}` is missing", self.base)))?;
        if found.0.contains(&0) {
            return Err(self.error(&format!("tensor `{}{part}` of shape {:?} has no values", self.base, found.0)));
        }
        Ok(found)
    }

    fn error(&self, why: &str) -> EngineError {
        self.files.error(why)
    }

    /// A tensor of this shape and one of these types.
    fn of_shape(&self, part: &str, shape: &[usize], types: &[Dtype]) -> Result<&'a [u8], EngineError> {
        let (stored, dtype, bytes) = self.part(part)?;
        if stored != shape || !types.contains(&dtype) {
            let text =
                format!("tensor `{}{part}` has type {dtype:?} and shape {stored:?} instead of {types:?}, {shape:?}", self.base);
            return Err(self.error(&text));
        }
        Ok(bytes)
    }

    /// A matrix of words, `[rows, cols]`.
    fn words(&self, part: &str) -> Result<(Words<'a>, usize, usize), EngineError> {
        let (shape, dtype, bytes) = self.part(part)?;
        match (shape, dtype) {
            ([rows, cols], Dtype::I32 | Dtype::U32) => Ok((Words(bytes.as_chunks().0), *rows, *cols)),
            _ => Err(self.error(&format!(
                "tensor `{}{part}` has type {dtype:?} and shape {shape:?}; words, [rows, columns], are read",
                self.base
            ))),
        }
    }

    /// A tensor of floats, whatever its shape.
    fn floats(&self, part: &str) -> Result<(&'a [usize], Vec<f32>), EngineError> {
        let (shape, dtype, bytes) = self.part(part)?;
        let values = match dtype {
            Dtype::F8_E4M3 => Some(bytes.iter().map(|b| e4m3(*b)).collect()),
            other => float_dtype(other).and_then(|dtype| floats(dtype, bytes)),
        };
        let not_floats = || self.error(&format!("tensor `{}{part}` has type {dtype:?}; floats are read", self.base));
        Ok((shape, values.ok_or_else(not_floats)?))
    }

    /// How the matrix is stored once it is read.
    pub fn dtype(&self) -> Result<DType, EngineError> {
        Ok(self.open()?.dtype())
    }

    /// The matrix, and its shape.
    pub fn read(&self) -> Result<(WeightView, Vec<usize>), EngineError> {
        let matrix = self.open()?;
        Ok((matrix.read()?, vec![matrix.rows, matrix.cols]))
    }

    fn open(&self) -> Result<Matrix<'a>, EngineError> {
        let matrix = match self.format {
            HubFormat::Gptq { bits, is_symmetric, plus_one } => self.gptq(bits, is_symmetric, plus_one),
            HubFormat::Awq => self.awq(),
            HubFormat::Integers { bits } if self.raw(".weight_packed").is_some() => self.packed_integers(bits),
            HubFormat::Integers { .. } => self.bytes(),
            HubFormat::Fp8 { block } => self.fp8(block),
            HubFormat::Nvfp4 => self.nvfp4(),
            HubFormat::Nf4 => self.nf4(),
            HubFormat::Mlx { bits } => self.mlx(bits),
        }?;
        if matrix.rows == 0 || matrix.cols == 0 {
            return Err(self.error(&format!("tensor `{}` has no values", self.base)));
        }
        Ok(matrix)
    }

    fn gptq(&self, bits: u32, is_symmetric: bool, plus_one: bool) -> Result<Matrix<'a>, EngineError> {
        let per_word = (32 / bits) as usize;
        let (codes, packed_cols, rows) = self.words(".qweight")?;
        let cols = packed_cols * per_word;
        let (shape, scales) = self.floats(".scales")?;
        let (&[num_groups, scale_rows], true) = (shape, rows.is_multiple_of(per_word)) else {
            return Err(self.error(&format!("tensor `{}.scales` has shape {shape:?} for {rows} rows", self.base)));
        };
        let (zeros, zero_groups, zero_words) = self.words(".qzeros")?;
        if scale_rows != rows
            || zero_groups != num_groups
            || zero_words * per_word != rows
            || num_groups == 0
            || !cols.is_multiple_of(num_groups)
        {
            let text = format!("scales and zeros of `{}` do not go with a matrix of {rows} rows and {cols} columns", self.base);
            return Err(self.error(&text));
        }
        let group_of = self.group_of(".g_idx", cols, num_groups)?;
        let middle = 1_i32 << (bits - 1);
        // Symmetric files have one zero, stored as it is or less one, whatever they say of it.
        let is_symmetric = is_symmetric && {
            let stored: Vec<_> = (0..num_groups * rows).map(|i| zeros.at(i / rows * zero_words, i % rows, bits)).collect();
            stored.iter().all(|zero| *zero == middle) || stored.iter().all(|zero| *zero == middle - 1)
        };
        let zero = move |row: usize, group: usize| {
            if is_symmetric { middle } else { zeros.at(group * zero_words, row, bits) + i32::from(plus_one) }
        };
        let code = move |row: usize, col: usize, group: usize| {
            codes.0.get(col / per_word * rows + row).map_or(0, |word| Words::code(*word, col % per_word, bits)) - zero(row, group)
        };
        let range = if is_symmetric { [-middle, middle - 1] } else { [-2 * middle, 2 * middle - 1] };
        let scale = move |row: usize, group: usize| scales.get(group * rows + row).copied().unwrap_or(0.0);
        Ok(Matrix::of_integers([rows, cols], range, num_groups, group_of, Box::new(code), Box::new(scale)))
    }

    /// The group of each column, where groups are not columns in a row: those that activations were sorted for.
    fn group_of(&self, part: &str, cols: usize, num_groups: usize) -> Result<Option<Vec<usize>>, EngineError> {
        let Some((shape, dtype, bytes)) = self.raw(part) else { return Ok(None) };
        if dtype != Dtype::I32 || shape != [cols] {
            let text = format!("tensor `{}{part}` has type {dtype:?} and shape {shape:?} for {cols} columns", self.base);
            return Err(self.error(&text));
        }
        let groups: Vec<_> = bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
        // compressed-tensors begins with such ones, and keeps them where nothing was sorted.
        if part == ".weight_g_idx" && groups.iter().all(|group| *group == -1) {
            return Ok(None);
        }
        let in_range = |group: &i32| usize::try_from(*group).ok().filter(|group| *group < num_groups);
        let Some(groups) = groups.iter().map(in_range).collect::<Option<Vec<_>>>() else {
            let group = groups.iter().find(|group| in_range(group).is_none()).copied().unwrap_or_default();
            return Err(self.error(&format!("tensor `{}{part}` names group {group} of {num_groups}", self.base)));
        };
        let is_in_order = groups.iter().enumerate().all(|(col, group)| *group == col / (cols / num_groups));
        Ok((!is_in_order).then_some(groups))
    }

    fn awq(&self) -> Result<Matrix<'a>, EngineError> {
        /// Where the nibble of each of 8 rows lies.
        const PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
        let (codes, cols, words) = self.words(".qweight")?;
        let rows = words * 8;
        let (shape, scales) = self.floats(".scales")?;
        let (zeros, num_groups, zero_words) = self.words(".qzeros")?;
        if shape != [num_groups, rows] || zero_words != words || num_groups == 0 || !cols.is_multiple_of(num_groups) {
            let text = format!("scales and zeros of `{}` do not go with a matrix of {rows} rows and {cols} columns", self.base);
            return Err(self.error(&text));
        }
        let code = move |row: usize, col: usize, group: usize| {
            let at = |words_: &Words<'_>, line: usize| {
                words_.0.get(line * words + row / 8).map_or(0, |word| Words::code(*word, PLACES[row % 8], 4))
            };
            at(&codes, col) - at(&zeros, group)
        };
        let scale = move |row: usize, group: usize| scales.get(group * rows + row).copied().unwrap_or(0.0);
        Ok(Matrix::of_integers([rows, cols], [-15, 15], num_groups, None, Box::new(code), Box::new(scale)))
    }

    /// Scales `[rows, groups]` of a matrix.
    fn row_scales(&self, part: &str, [rows, cols]: [usize; 2]) -> Result<(usize, Vec<f32>), EngineError> {
        let (shape, scales) = self.floats(part)?;
        match *shape {
            [scale_rows, num_groups] if scale_rows == rows && num_groups > 0 && cols.is_multiple_of(num_groups) => {
                Ok((num_groups, scales))
            }
            [scale_rows] if scale_rows == rows => Ok((1, scales)),
            _ => Err(self.error(&format!("tensor `{}{part}` has shape {shape:?} for a matrix [{rows}, {cols}]", self.base))),
        }
    }

    fn packed_integers(&self, bits: u32) -> Result<Matrix<'a>, EngineError> {
        let per_word = (32 / bits) as usize;
        let (codes, rows, words) = self.words(".weight_packed")?;
        let mut cols = words * per_word;
        if let Some((_, Dtype::I64, bytes)) = self.raw(".weight_shape")
            && let [stored_rows, stored_cols] = bytes.as_chunks().0
        {
            let shape = [*stored_rows, *stored_cols].map(u64::from_le_bytes);
            if shape[0] != rows as u64 || (shape[1] as usize).div_ceil(per_word) != words {
                return Err(
                    self.error(&format!("tensor `{}.weight_shape` is {shape:?} for {rows} rows of {words} words", self.base))
                );
            }
            cols = shape[1] as usize;
        }
        let (num_groups, scales) = self.row_scales(".weight_scale", [rows, cols])?;
        let group_of = self.group_of(".weight_g_idx", cols, num_groups)?;
        let middle = 1_i32 << (bits - 1);
        let zeros = if self.raw(".weight_zero_point").is_some() {
            let (zeros, zero_words, zero_groups) = self.words(".weight_zero_point")?;
            if zero_words != rows.div_ceil(per_word) || zero_groups != num_groups {
                let text = format!("zero points of `{}` do not go with {rows} rows and {num_groups} groups", self.base);
                return Err(self.error(&text));
            }
            Some(zeros)
        } else {
            None
        };
        let range = if zeros.is_some() { [1 - 2 * middle, 2 * middle - 1] } else { [-middle, middle - 1] };
        let code = move |row: usize, col: usize, group: usize| {
            let zero = zeros.map_or(middle, |zeros| {
                zeros.0.get(row / per_word * num_groups + group).map_or(0, |word| Words::code(*word, row % per_word, bits))
            });
            codes.at(row * words, col, bits) - zero
        };
        let scale = move |row: usize, group: usize| scales.get(row * num_groups + group).copied().unwrap_or(0.0);
        Ok(Matrix::of_integers([rows, cols], range, num_groups, group_of, Box::new(code), Box::new(scale)))
    }

    /// Signed bytes.
    fn bytes(&self) -> Result<Matrix<'a>, EngineError> {
        let (shape, dtype, bytes) = self.part(".weight")?;
        let (&[rows, cols], Dtype::I8) = (shape, dtype) else {
            return Err(self.error(&format!(
                "tensor `{}.weight` has type {dtype:?} and shape {shape:?}; a matrix of I8 is read",
                self.base
            )));
        };
        let (num_groups, scales) = self.row_scales(".weight_scale", [rows, cols])?;
        let group_of = self.group_of(".weight_g_idx", cols, num_groups)?;
        let zeros = match self.raw(".weight_zero_point") {
            None => None,
            Some((_, Dtype::I8, zeros)) if zeros.len() == rows * num_groups => Some(zeros),
            Some((shape, dtype, _)) => {
                let text = format!(
                    "tensor `{}.weight_zero_point` has type {dtype:?} and shape {shape:?} for {rows} rows and {num_groups} groups",
                    self.base
                );
                return Err(self.error(&text));
            }
        };
        let range = if zeros.is_some() { [-255, 255] } else { [-128, 127] };
        let code = move |row: usize, col: usize, group: usize| {
            let zero = zeros.map_or(0, |zeros| i32::from(zeros[row * num_groups + group].cast_signed()));
            i32::from(bytes[row * cols + col].cast_signed()) - zero
        };
        let scale = move |row: usize, group: usize| scales[row * num_groups + group];
        Ok(Matrix::of_integers([rows, cols], range, num_groups, group_of, Box::new(code), Box::new(scale)))
    }

    fn fp8(&self, block: Option<[usize; 2]>) -> Result<Matrix<'a>, EngineError> {
        let (shape, dtype, bytes) = self.part(".weight")?;
        let (&[rows, cols], Dtype::F8_E4M3) = (shape, dtype) else {
            return Err(self.error(&format!(
                "tensor `{}.weight` has type {dtype:?} and shape {shape:?}; a matrix of F8_E4M3 is read",
                self.base
            )));
        };
        let part = if self.raw(".weight_scale_inv").is_some() { ".weight_scale_inv" } else { ".weight_scale" };
        let (shape, scales) = self.floats(part)?;
        // What is left over at the ends has blocks of its own.
        let [block_rows, block_cols] = match block {
            Some(block) => block,
            None if scales.len() == 1 => [rows.max(1), cols.max(1)],
            None => [1, cols.max(1)],
        };
        let blocks_a_row = cols.div_ceil(block_cols);
        if scales.len() != rows.div_ceil(block_rows) * blocks_a_row {
            return Err(self.error(&format!(
                "tensor `{}{part}` has shape {shape:?} for a matrix [{rows}, {cols}] in blocks [{block_rows}, {block_cols}]",
                self.base
            )));
        }
        Ok(Matrix::of_floats(
            [rows, cols],
            Box::new(move |row, out| {
                for (col, out) in out.iter_mut().enumerate() {
                    *out = e4m3(bytes[row * cols + col]) * scales[row / block_rows * blocks_a_row + col / block_cols];
                }
            }),
        ))
    }

    fn nvfp4(&self) -> Result<Matrix<'a>, EngineError> {
        const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let (shape, dtype, bytes) = self.part(".weight_packed")?;
        let (&[rows, half_cols], Dtype::U8) = (shape, dtype) else {
            return Err(self.error(&format!(
                "tensor `{}.weight_packed` has type {dtype:?} and shape {shape:?}; a matrix of U8 is read",
                self.base
            )));
        };
        let cols = half_cols * 2;
        let (num_groups, scales) = self.row_scales(".weight_scale", [rows, cols])?;
        let (_, global) = self.floats(".weight_global_scale")?;
        let ([global], true) = (&global[..], num_groups * 16 == cols) else {
            return Err(self.error(&format!("scales of `{}` are not one for 16 columns, and one of all", self.base)));
        };
        let global = *global;
        Ok(Matrix::of_floats(
            [rows, cols],
            Box::new(move |row, out| {
                for (col, out) in out.iter_mut().enumerate() {
                    let nibble = bytes[row * half_cols + col / 2] >> (4 * (col % 2)) & 15;
                    let size = E2M1[usize::from(nibble & 7)];
                    let code = if nibble & 8 == 0 { size } else { -size };
                    *out = code * (scales[row * num_groups + col / 16] / global);
                }
            }),
        ))
    }

    fn nf4(&self) -> Result<Matrix<'a>, EngineError> {
        let state = ["nf4", "fp4"].iter().find_map(|kind| self.raw(&format!(".weight.quant_state.bitsandbytes__{kind}")));
        let state: Value = state.and_then(|(_, _, bytes)| serde_json::from_slice(bytes).ok()).unwrap_or_default();
        let number = |key: &str| state.get(key).and_then(Value::as_u64).filter(|n| (1..1 << 40).contains(n)).map(|n| n as usize);
        let size = |i: usize| state.get("shape").and_then(|shape| shape.get(i)).and_then(Value::as_u64).map(|n| n as usize);
        let (Some(rows), Some(cols), Some(block)) = (size(0), size(1), number("blocksize")) else {
            return Err(
                self.error(&format!("tensor `{}.weight.quant_state...` has no shape of two sizes, or no blocksize", self.base))
            );
        };
        let Some(count) = rows.checked_mul(cols).filter(|count| count.is_multiple_of(2)) else {
            return Err(self.error(&format!("`{}` cannot have the shape [{rows}, {cols}]", self.base)));
        };
        let bytes = self.of_shape(".weight", &[count / 2, 1], &[Dtype::U8])?;
        let (_, table) = self.floats(".weight.quant_map")?;
        let (shape, dtype, absmax) = self.part(".weight.absmax")?;
        let largest: Vec<f32> = if dtype == Dtype::U8 {
            // Quantized themselves.
            let (_, map) = self.floats(".weight.nested_quant_map")?;
            let (_, nested) = self.floats(".weight.nested_absmax")?;
            let nested_block = number("nested_blocksize").unwrap_or(256);
            let offset = state.get("nested_offset").and_then(Value::as_f64).unwrap_or(0.0) as f32;
            let of = |(i, code): (usize, &u8)| Some(map.get(usize::from(*code))? * nested.get(i / nested_block)? + offset);
            absmax.iter().enumerate().map(of).collect::<Option<_>>().unwrap_or_default()
        } else {
            self.floats(".weight.absmax")?.1
        };
        if table.len() != 16 || largest.len() != count.div_ceil(block) {
            return Err(self.error(&format!(
                "`{}` has {} values in its table and scales of shape {shape:?} for blocks of {block}",
                self.base,
                table.len()
            )));
        }
        Ok(Matrix::of_floats(
            [rows, cols],
            Box::new(move |row, out| {
                for (col, out) in out.iter_mut().enumerate() {
                    let at = row * cols + col;
                    let nibble = bytes[at / 2] >> (4 * (1 - at % 2)) & 15;
                    *out = table[usize::from(nibble)] * largest[at / block];
                }
            }),
        ))
    }

    fn mlx(&self, bits: u32) -> Result<Matrix<'a>, EngineError> {
        let (codes, rows, words) = self.words(".weight")?;
        let cols = words * 32 / bits as usize;
        let (num_groups, scales) = self.row_scales(".scales", [rows, cols])?;
        let (min_groups, mins) = self.row_scales(".biases", [rows, cols])?;
        if min_groups != num_groups || words * 32 != cols * bits as usize {
            return Err(self.error(&format!("biases of `{}` do not go with its scales", self.base)));
        }
        let code = move |row: usize, col: usize, _: usize| codes.bits_at(row * words, col, bits);
        let scale = move |row: usize, group: usize| scales[row * num_groups + group];
        let mut matrix =
            Matrix::of_integers([rows, cols], [0, (1 << bits) - 1], num_groups, None, Box::new(code), Box::new(scale));
        matrix.mins = Some(mins);
        Ok(matrix)
    }
}

fn e4m3(code: u8) -> f32 {
    E4M3_VALUES[usize::from(code)]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_not_read_is_named_with_what_is() {
        for (config, words) in [
            (json!({"quant_method": "hqq"}), ["hqq", "gptq"]),
            (json!({"quant_method": "gptq", "bits": 3}), ["bits is 3", "4"]),
            (json!({"quant_method": "awq", "bits": 4, "version": "gemv"}), ["gemv", "gemm"]),
            (json!({"quant_method": "bitsandbytes", "load_in_8bit": true}), ["load_in_4bit", "nf4"]),
            (json!({"quant_method": "compressed-tensors", "config_groups": {}}), ["config_groups", "0"]),
            (json!({"quant_method": "fp8", "weight_block_size": [128]}), ["weight_block_size", "two"]),
            (json!({"bits": 7, "group_size": 64}), ["bits is 7", "MLX"]),
        ] {
            let error = HubFormat::read(config.as_object().unwrap()).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }

    #[test]
    fn e4m3_is_the_ocps() {
        for (code, value) in [(0x38, 1.0), (0x7e, 448.0), (0x01, 1.0 / 512.0), (0x08, 1.0 / 64.0), (0xb8, -1.0), (0x80, 0.0)] {
            assert_eq!(e4m3(code), value, "{code:#x}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
    }
}
