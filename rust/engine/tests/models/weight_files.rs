//! What readers of weights accept and what they say of the rest.

use std::path::{Path, PathBuf};

use device::WeightView;
use engine::weights::{
    ExpertIndex, GgufFiles, Matrix, MetadataValue, ModelPlace, Role, SafetensorsFiles, WeightId, WeightSource, hub::HubFormat,
};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{
    gguf_writer::{ARRAY, Gguf, STRING, U32, string},
    sharded,
};

fn assert_error<T>(result: Result<T, String>, words: &[&str]) {
    let error = result.err().expect("an error");
    for word in words {
        assert!(error.contains(word), "{error:?} does not contain {word:?}");
    }
}

#[test]
fn gguf_values_and_tensors_come_back() {
    let mut file = Gguf::new()
        .entry("name", STRING, &string("x\u{1f600}"))
        .entry("n", U32, &7_u32.to_le_bytes())
        .entry("big", 10, &u64::MAX.to_le_bytes())
        .array("list", 5, 2, &[(-1_i32).to_le_bytes(), 5_i32.to_le_bytes()].concat())
        .tensor("matrix", &[4, 2], 0, 32)
        .tensor("vector", &[3], 1, 0);
    file.data[32..36].copy_from_slice(&1.5_f32.to_le_bytes());
    for version in [2, 3] {
        file.version = version;
        let model = file.open().unwrap();
        assert_eq!(model.metadata().str("name"), Some("x\u{1f600}"));
        assert_eq!(model.metadata().usize("n"), Some(7));
        assert_eq!(model.metadata().get("big"), Some(&MetadataValue::Int(i128::from(u64::MAX))));
        assert_eq!(model.metadata().ints("list"), Some(&[-1, 5][..]));
        let (matrix, shape) = model.tensor("matrix").unwrap();
        assert_eq!(shape, [2, 4]);
        assert_eq!((matrix.rows, matrix.cols, &matrix.bytes()[..4]), (2, 4, &1.5_f32.to_le_bytes()[..]));
        assert_eq!(model.vector("vector").unwrap().cols, 3);
        assert_eq!(model.weight_bytes(), 32 + 6);
    }
}

#[test]
fn gguf_versions_and_byte_orders_that_are_not_read_are_named() {
    let with = |version| Gguf { version, ..Gguf::new() }.open();
    assert_error(with(1), &["version 1", "2, 3"]);
    assert_error(with(4), &["version 4", "2, 3"]);
    assert_error(with(3_u32.swap_bytes()), &["big-endian"]);
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, b"PK\x03\x04 some archive").unwrap();
    assert_error(GgufFiles::open(&[path]).map_err(|e| e.to_string()), &["model.gguf", "not a GGUF file"]);
}

#[test]
fn gguf_counts_beyond_the_file_are_errors() {
    for count in [1 << 20, u64::MAX] {
        assert_error(Gguf { counts: Some((count, 0)), ..Gguf::new() }.open(), &[&count.to_string(), "tensors"]);
        assert_error(Gguf { counts: Some((0, count)), ..Gguf::new() }.open(), &[&count.to_string(), "metadata entries"]);
    }
    for kind in [0, 6, STRING, 10] {
        assert_error(Gguf::new().array("list", kind, u64::MAX / 4, &[]).open(), &["`list`", "does not fit"]);
    }
    assert_error(Gguf::new().entry("s", STRING, &u64::MAX.to_le_bytes()).open(), &["`s`", "the file ends"]);
}

#[test]
fn gguf_oddities_are_errors() {
    assert_error(Gguf::new().array("list", ARRAY, 1, &[0; 12]).open(), &["`list`", "arrays of arrays"]);
    assert_error(Gguf::new().entry("key", 13, &[0; 8]).open(), &["`key`", "value type 13"]);
    let twice = Gguf::new().entry("key", U32, &[0; 4]).entry("key", U32, &[0; 4]);
    assert_error(twice.open(), &["`key` occurs twice"]);
    assert_error(Gguf::new().tensor("t", &[4], 0, 0).tensor("t", &[4], 0, 0).open(), &["`t` occurs twice"]);
    for alignment in [0_u32, 3, 48] {
        assert_error(Gguf::new().entry("general.alignment", U32, &alignment.to_le_bytes()).open(), &["general.alignment"]);
    }
}

#[test]
fn gguf_tensors_outside_of_the_file_are_errors() {
    for (dims, offset) in [
        (&[65, 1][..], 0),
        (&[4], 256),
        (&[4], 1 << 40),
        (&[4], u64::MAX - 31),
        (&[u64::MAX, u64::MAX], 0),
        (&[1 << 62, 4], 0),
        (&[], 0),
    ] {
        assert_error(Gguf::new().tensor("t", dims, 0, offset).open(), &["`t`"]);
    }
    assert_error(Gguf::new().tensor("t", &[4], 0, 16).open(), &["`t`", "16", "aligned"]);
    assert_error(Gguf::new().tensor("t", &[33], 2, 0).open(), &["`t`", "Q4_0"]);
    assert_error(Gguf::new().tensor("t", &[1, 1, 1, 1, 1], 0, 0).open(), &["`t`", "5 dimensions"]);
}

#[test]
fn experts_are_found_stacked_and_one_by_one() {
    let stacked = Gguf::new().tensor("blk.0.ffn_up_exps.weight", &[4, 2, 3], 0, 0);
    let single = (0..3).fold(Gguf::new(), |file, i| file.tensor(&format!("blk.0.ffn_up.{i}.weight"), &[4, 2], 0, i * 32));
    for mut file in [stacked, single] {
        for i in 0..24 {
            file.data[i * 4..i * 4 + 4].copy_from_slice(&(i as f32).to_le_bytes());
        }
        let source = WeightSource::Gguf(file.open().unwrap());
        let of = |index, count| {
            let matrix = Matrix::new(WeightId::layer(0, Role::ExpertUp), [2, 4], false);
            source.stored(&matrix.of_expert(Some(ExpertIndex { index, count })))
        };
        for index in 0..3 {
            let (_, view) = of(index, 3).unwrap();
            assert_eq!((view.rows, view.cols, &view.bytes()[..4]), (2, 4, &(8.0 * index as f32).to_le_bytes()[..]));
        }
        let error = of(3, 4).map(drop).unwrap_err().to_string();
        assert!(error.contains("blk.0.ffn_up"), "{error}");
    }
}

#[test]
fn gguf_types_that_are_not_supported_are_named_with_the_tensor() {
    for (number, name) in [(9, "Q8_1"), (15, "Q8_K"), (26, "I32"), (77, "number 77")] {
        let model = Gguf::new().tensor("blk.0.attn_q.weight", &[32, 1], number, 0).open().unwrap();
        let error = model.tensor("blk.0.attn_q.weight").err().unwrap().to_string();
        assert_error::<()>(Err(error), &["blk.0.attn_q.weight", name, "Q4_K", "IQ4_XS", "BF16"]);
    }
}

fn write_split(dir: &Path, numbers: &[u16], names: [&str; 2]) -> Vec<PathBuf> {
    let path = |i: usize| dir.join(format!("model-{:05}-of-{:05}.gguf", i + 1, numbers.len()));
    for (i, number) in numbers.iter().enumerate() {
        Gguf::new()
            .entry("split.no", 2, &number.to_le_bytes())
            .entry("split.count", 2, &(numbers.len() as u16).to_le_bytes())
            .entry("split.tensors.count", 5, &2_i32.to_le_bytes())
            .tensor(names[i], &[4, 1], 0, 0)
            .write(&path(i));
    }
    (0..numbers.len()).map(path).collect()
}

#[test]
fn a_split_gguf_is_one_model() {
    let dir = TempDir::new().unwrap();
    let files = write_split(dir.path(), &[0, 1], ["a", "b"]);
    for given in [&files[..], &files[..1]] {
        let model = GgufFiles::open(given).unwrap();
        assert!(model.contains("a") && model.contains("b"));
    }
    let open = |files: &[PathBuf]| GgufFiles::open(files).map(|_| ()).map_err(|e| e.to_string());
    assert_error(open(&[files[1].clone(), files[0].clone()]), &["split.no", "should be 1, found 0"]);
    assert_error(open(&[files[0].clone(), files[1].clone(), files[1].clone()]), &["2 parts", "3 files"]);
    write_split(dir.path(), &[0, 1], ["a", "a"]);
    assert_error(open(&files), &["`a` is also in an earlier part"]);
    std::fs::remove_file(&files[1]).unwrap();
    assert_error(open(&files[..1]), &["model-00002-of-00002.gguf"]);
    let renamed = dir.path().join("renamed.gguf");
    std::fs::rename(&files[0], &renamed).unwrap();
    assert_error(open(&[renamed]), &["-00001-of-00002.gguf"]);
}

fn golden() -> PathBuf {
    goldens::dir().join("text/llama")
}

#[test]
fn a_sharded_checkpoint_has_the_tensors_of_the_single_file() {
    let dir = TempDir::new().unwrap();
    sharded::write(&golden(), dir.path());
    let (single, shards) = (SafetensorsFiles::open(&golden()).unwrap(), SafetensorsFiles::open(dir.path()).unwrap());
    assert_eq!(single.weight_bytes(), shards.weight_bytes());
    for name in ["lm_head.weight", "model.layers.2.self_attn.v_proj.weight"] {
        let ((a, _), (b, _)) = (single.tensor(name).unwrap(), shards.tensor(name).unwrap());
        assert_eq!((a.rows, a.cols, a.bytes()), (b.rows, b.cols, b.bytes()));
    }
}

#[test]
fn checkpoints_that_lack_something_are_errors() {
    let dir = TempDir::new().unwrap();
    let open = || SafetensorsFiles::open(dir.path()).map(|_| ()).map_err(|e| e.to_string());
    assert_error(open(), &["none of model.safetensors, model.safetensors.index.json, pytorch_model.bin"]);
    sharded::write(&golden(), dir.path());
    let shard = dir.path().join("model-00002-of-00002.safetensors");
    let sound = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &sound[..sound.len() - 1]).unwrap();
    assert_error(open(), &["model-00002-of-00002.safetensors"]);
    std::fs::remove_file(&shard).unwrap();
    assert_error(open(), &["model-00002-of-00002.safetensors"]);
    let index = dir.path().join("model.safetensors.index.json");
    let first = "model-00001-of-00002.safetensors";
    let write = |map| std::fs::write(&index, json!({"weight_map": map}).to_string()).unwrap();
    write(json!({"absent.weight": first}));
    assert_error(open(), &["`absent.weight` is not in", first]);
    for outside in ["../model.safetensors", "/etc/hostname", "sub/model.safetensors", "..", ""] {
        write(json!({"lm_head.weight": outside}));
        assert_error(open(), &[&format!("{outside:?}"), "within the folder"]);
    }
    std::fs::write(&index, "{").unwrap();
    assert_error(open(), &["index.json", "not valid JSON"]);
    let model = SafetensorsFiles::open(&golden()).unwrap();
    assert_error(model.tensor("nothing").map_err(|e| e.to_string()), &["`nothing` is missing"]);
    let names = &[(Role::FfnDown, "input_layernorm")];
    let place = ModelPlace::find(names, |name| model.contains(name), |start| model.names().any(|name| name.starts_with(start)));
    let model = WeightSource::Safetensors { files: model, names, place };
    let error = model.matrix(WeightId::layer(0, Role::FfnDown), [64, 96]).map(drop).map_err(|e| e.to_string());
    assert_error(error, &["`model.layers.0.input_layernorm.weight` has shape [64]", "asks for [64, 96]"]);
}

/// The weight `w` of a checkpoint of compressed-tensors with these tensors, `[1, 64]`.
fn compressed(tensors: &[(&str, Dtype, &[usize], &[u8])], config: &Value) -> Result<WeightView, String> {
    let dir = TempDir::new().unwrap();
    let views = tensors.iter().map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
    let file = safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    let format = HubFormat::read(config.as_object().unwrap()).unwrap();
    let files = SafetensorsFiles::open(dir.path()).unwrap().quantized(format);
    let (view, shape) = files.tensor("w.weight").map_err(|error| error.to_string())?;
    assert_eq!(shape, [1, 64]);
    Ok(view)
}

fn floats(view: &WeightView) -> Vec<f32> {
    view.bytes().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// compressed-tensors with `actorder`: one row of 64 codes from -8 on, in two groups.
#[test]
fn columns_have_the_groups_that_activations_were_sorted_for() {
    let codes: Vec<u8> = (0..8).flat_map(|_| 0x7654_3210_u32.to_le_bytes()).collect();
    let scales: Vec<u8> = [1.0_f32, 100.0].iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let config = json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"0": {"weights": {"num_bits": 4, "type": "int", "symmetric": true}}}});
    let values = |groups: Vec<i32>| {
        let of_columns: Vec<u8> = groups.iter().flat_map(|group| group.to_le_bytes()).collect();
        let tensors: [(_, _, &[usize], &[u8]); 3] = [
            ("w.weight_packed", Dtype::I32, &[1, 8], &codes),
            ("w.weight_scale", Dtype::F32, &[1, 2], &scales),
            ("w.weight_g_idx", Dtype::I32, &[groups.len()], &of_columns),
        ];
        compressed(&tensors, &config)
    };
    let mixed = floats(&values((0..64).map(|col| col % 2).collect()).unwrap());
    let expected: Vec<_> = (0..64).map(|col| (col % 8 - 8) as f32 * [1.0, 100.0][col as usize % 2]).collect();
    assert_eq!(mixed, expected);
    let in_order = values((0..64).map(|col| col / 32).collect()).unwrap();
    assert_eq!(values(vec![-1; 64]).unwrap().bytes(), in_order.bytes(), "nothing was sorted");
    assert_ne!(in_order.bytes().len(), mixed.len() * 4, "groups of columns in a row stay integers");
    assert_error(values((0..64).map(|col| col / 31).collect()), &["`w.weight_g_idx` names group 2 of 2"]);
    assert_error(values(vec![0; 63]), &["`w.weight_g_idx`", "[63]", "64 columns"]);
}

/// compressed-tensors' signed bytes: one row of 64 codes from -32 on, in two groups, each with a zero of its own.
#[test]
fn signed_bytes_have_zeros_and_groups_of_their_own() {
    let codes: Vec<u8> = (-32..32).map(i8::cast_unsigned).collect();
    let scales: Vec<u8> = [1.0_f32, 100.0].iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let groups: Vec<u8> = (0..64).flat_map(|col| (col % 2_i32).to_le_bytes()).collect();
    let zeros = [5_i8, -100].map(i8::cast_unsigned);
    let config = json!({"quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": {"0": {"weights": {"num_bits": 8, "type": "int", "symmetric": false}}}});
    let values = |zeros: &[u8]| {
        let tensors: [(_, _, &[usize], &[u8]); 4] = [
            ("w.weight", Dtype::I8, &[1, 64], &codes),
            ("w.weight_scale", Dtype::F32, &[1, 2], &scales),
            ("w.weight_g_idx", Dtype::I32, &[64], &groups),
            ("w.weight_zero_point", Dtype::I8, &[1, zeros.len()], zeros),
        ];
        compressed(&tensors, &config)
    };
    let expected: Vec<_> = (0..64).map(|col| [(col - 37) as f32, (col + 68) as f32 * 100.0][col as usize % 2]).collect();
    assert_eq!(floats(&values(&zeros).unwrap()), expected);
    assert_error(values(&zeros[..1]), &["`w.weight_zero_point`", "[1, 1]", "2 groups"]);
}
