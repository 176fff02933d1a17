//! Tiles against those of Transformers 5.23, bit for bit.

mod common;

use std::{fs, path::Path};

use images::{Filter, ImageError, Limits, Processed, Processor, ProcessorKind, RgbImage, Size, decode};
use serde_json::{Map, Value, json};

/// What a model's processor hands on, in one row.
fn values(processor: &Processor, processed: &Processed) -> Vec<f32> {
    if matches!(processor.kind, ProcessorKind::Qwen2Vl | ProcessorKind::Glm4v) {
        let tile = &processed.tiles[0];
        let sides = (processor.patch_size, processor.merge_size, processor.temporal_patch_size);
        return common::patches(&tile.pixels, (tile.height, tile.width), sides);
    }
    processed.tiles.iter().flat_map(|tile| tile.pixels.clone()).collect()
}

fn from(config: &Value) -> Result<Processor, ImageError> {
    Processor::from_json("preprocessor_config.json", config.as_object().unwrap())
}

#[test]
fn the_inputs_of_models_are_those_of_transformers() {
    let root = goldens::dir().join("vision");
    let models = [
        "gemma3_vision",
        "idefics3",
        "llava",
        "llava_next",
        "mistral3",
        "qwen2_5_vl",
        "qwen2_vl",
        "lfm2_vl",
        "llama4_vision",
        "gemma4_vision",
        "cohere2_vision",
        "mllama",
    ];
    for name in models {
        let dir = root.join(name);
        let processor = Processor::from_folder(&dir).unwrap().unwrap();
        let inputs: Map<String, Value> = serde_json::from_slice(&fs::read(dir.join("inputs.json")).unwrap()).unwrap();
        assert_eq!(inputs.len(), 2);
        for (file, wanted) in inputs {
            // The images of all models are the same, and do not lie beside each.
            let image = decode(&fs::read(root.join("llava").join(&file)).unwrap(), &Limits::default()).unwrap();
            let processed = processor.process(&image).unwrap();
            if processor.kind != ProcessorKind::Qwen2Vl {
                let shapes: Vec<_> = processed.tiles.iter().map(|tile| json!([3, tile.height, tile.width])).collect();
                assert_eq!(Value::from(shapes), wanted["shapes"], "{name} {file}");
            }
            let digest = common::sha256(common::little_endian(&values(&processor, &processed)));
            assert_eq!(digest, wanted["sha256"], "{name} {file}");
        }
    }
}

#[test]
fn every_processor_makes_what_transformers_makes() {
    let sizes = [(96, 64), (45, 80), (1, 1), (7, 150), (333, 251), (200, 200), (640, 90), (57, 58)];
    let cases: Vec<Value> = serde_json::from_str(include_str!("data/processors.json")).unwrap();
    assert_eq!(cases.len(), 34);
    for case in cases {
        let processor = from(&case["config"]).unwrap();
        for (seed, ((width, height), wanted)) in sizes.into_iter().zip(case["digests"].as_array().unwrap()).enumerate() {
            let digest = match processor.process(&common::image(seed, width, height)) {
                Ok(processed) => common::digest(common::little_endian(&values(&processor, &processed))),
                Err(ImageError::Unfit { .. }) => "refused".into(),
                Err(error) => panic!("{error}"),
            };
            assert_eq!(&digest, wanted, "{width} x {height} {}", case["config"]);
        }
    }
}

#[test]
fn grids_and_whole_images_are_where_they_are_said_to_be() {
    let image = common::image(1, 200, 90);
    let told = |config: Value| {
        let processed = from(&config).unwrap().process(&image).unwrap();
        assert_eq!(processed.original, (90, 200));
        (processed.tiles.len(), processed.grid, processed.whole)
    };
    assert_eq!(told(json!({"image_processor_type": "CLIPImageProcessor"})), (1, (0, 0), 0));
    let next = json!({"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 336}, "crop_size": 336});
    assert_eq!(told(next), (3, (1, 2), 0));
    let quarters = json!({"image_processor_type": "Idefics2ImageProcessor", "do_image_splitting": true});
    assert_eq!(told(quarters), (5, (2, 2), 4));
    assert_eq!(told(json!({"image_processor_type": "Idefics3ImageProcessor"})), (9, (2, 4), 8));
    let pan = json!({"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": true, "pan_and_scan_min_crop_size": 30,
        "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2});
    assert_eq!(told(pan), (3, (1, 2), 0));
    assert_eq!(told(json!({"image_processor_type": "Phi3VImageProcessor", "num_crops": 16})), (16, (3, 5), 0));
}

/// By Pillow and ONNX Runtime, whose cubic interpolation is PyTorch's.
#[test]
fn phi3_has_the_tiles_of_its_hd_transform() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("data/phi3.json")).unwrap();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let number = |value: &Value| value.as_u64().unwrap() as usize;
        let [seed, width, height] = [0, 1, 2].map(|at| number(&case["image"][at]));
        let processor = from(&json!({"image_processor_type": "Phi3VImageProcessor", "num_crops": case["num_crops"]})).unwrap();
        let processed = processor.process(&common::image(seed, width, height)).unwrap();
        assert_eq!(json!([processed.grid.0, processed.grid.1]), case["grid"]);
        let tiles = processed.tiles[1..].iter().flat_map(|tile| common::little_endian(&tile.pixels));
        assert_eq!(common::digest(tiles), case["tiles"], "{width} x {height}");
        let whole = &processed.tiles[0].pixels;
        for point in case["whole"].as_array().unwrap() {
            let [channel, y, x] = [0, 1, 2].map(|at| number(&point[at]));
            let difference = f64::from(whole[(channel * 336 + y) * 336 + x]) - point[3].as_f64().unwrap();
            assert!(difference.abs() < 1e-5, "{width} x {height} at {point}: {difference}");
        }
    }
}

#[test]
fn max_edge_makes_an_image_smaller_first() {
    let config = json!({"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1024}, "patch_size": 14});
    let mut processor = from(&config).unwrap();
    let before = processor.identity();
    processor.max_edge = Some(140);
    assert_ne!(processor.identity(), before);
    let processed = processor.process(&common::image(0, 280, 140)).unwrap();
    assert_eq!((processed.original, processed.tiles[0].height, processed.tiles[0].width), ((70, 140), 70, 140));
    assert_eq!(processor.process(&common::image(0, 140, 70)).unwrap().original, (70, 140));
}

#[test]
fn shapes_that_would_take_too_much_are_refused() {
    let refused = |config: Value, width: u32, height: u32| {
        let image = RgbImage::new(width, height, vec![0; (width * height * 3) as usize]).unwrap();
        from(&config).unwrap().process(&image).unwrap_err().to_string()
    };
    let long = refused(json!({"image_processor_type": "CLIPImageProcessor"}), 1, 1_000_000);
    assert!(long.contains("has more than"), "{long}");
    let pad = refused(json!({"image_processor_type": "LlavaImageProcessor", "do_pad": true}), 1, 100_000);
    assert!(pad.contains("has more than"), "{pad}");
    let ratio = refused(json!({"image_processor_type": "Qwen2VLImageProcessor"}), 1, 201);
    assert!(ratio.contains("more than 200 times"), "{ratio}");
    let flat = refused(json!({"image_processor_type": "PixtralImageProcessor"}), 1, 3000);
    assert!(flat.contains("it would become 0 x"), "{flat}");
}

#[test]
fn errors_name_the_key_and_what_would_do() {
    let error = |config: Value| from(&config).unwrap_err().to_string();
    let clip = |key: &str, value: Value| {
        let mut config = json!({"image_processor_type": "CLIPImageProcessor"});
        config[key] = value;
        error(config)
    };
    assert!(error(json!({"image_processor_type": "DonutImageProcessor"})).contains("known are CLIPImageProcessor, "));
    assert!(error(json!({})).contains("image_processor_type is missing"));
    assert!(clip("size", json!({"longest_edge": 5})).contains("shortest_edge, or height and width, is wanted"));
    assert!(clip("size", json!({"shortest_edge": 100_000})).contains("a whole number from 1 to 65536"));
    assert!(clip("resample", json!(9)).contains("resample is 9, and a number from 0 to 5 is wanted"));
    assert!(clip("image_mean", json!([1.0])).contains("a list of three numbers"));
    assert!(clip("image_std", json!(0)).contains("image_std has a 0"));
    assert!(clip("do_flip_channel_order", json!(true)).contains("do_flip_channel_order is true, which is not supported"));
    assert!(clip("pad_size", json!({"height": 9, "width": 9})).contains("pad_size"));
    let pan = json!({"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": true});
    assert!(error(pan).contains("do_pan_and_scan needs pan_and_scan_min_crop_size"));
}

/// Keys and values as files on the hub have them.
#[test]
fn files_of_the_hub_are_understood() {
    let read = |config: Value| from(&config).unwrap_or_else(|error| panic!("{error}"));
    let qwen2 =
        read(json!({"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28],
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}));
    assert_eq!(qwen2.size, Size::Edges { shortest: 3136, longest: 12_845_056 });
    let qwen3 =
        read(json!({"size": {"longest_edge": 16_777_216, "shortest_edge": 65_536}, "patch_size": 16, "temporal_patch_size": 2,
        "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast"}));
    assert_eq!((qwen3.patch_size, qwen3.merge_size, qwen3.normalize), (16, 2, Some(([0.5; 3], [0.5; 3]))));
    let gemma = read(
        json!({"do_convert_rgb": null, "do_normalize": true, "do_pan_and_scan": null, "do_rescale": true, "do_resize": true,
        "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 256,
        "image_std": [0.5, 0.5, 0.5],
        "pan_and_scan_max_num_crops": null, "pan_and_scan_min_crop_size": null, "pan_and_scan_min_ratio_to_activate": null,
        "processor_class": "Gemma3Processor", "resample": 2, "rescale_factor": 0.003_921_568_627_450_98,
        "size": {"height": 896, "width": 896}}),
    );
    assert_eq!((gemma.size, gemma.pan_and_scan), (Size::Exact { height: 896, width: 896 }, None));
    let smol = read(
        json!({"do_convert_rgb": true, "do_image_splitting": true, "do_normalize": true, "do_pad": true, "do_rescale": true,
        "do_resize": true, "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "SmolVLMImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": 512}, "processor_class": "SmolVLMProcessor", "resample": 1,
        "size": {"longest_edge": 2048}, "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}}}),
    );
    assert_eq!((smol.kind, smol.tile_size, smol.resample), (ProcessorKind::Idefics3, 512, Filter::Lanczos));
    let phi =
        read(json!({"auto_map": {"AutoProcessor": "processing_phi3_v.Phi3VProcessor"}, "num_crops": 4, "num_img_tokens": 144,
        "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "do_convert_rgb": true,
        "image_processor_type": "Phi3VImageProcessor", "processor_class": "Phi3VProcessor", "transformers_version": "4.38.1"}));
    assert_eq!(phi.num_crops, 4);
}

#[test]
fn no_shape_makes_a_processor_panic() {
    let names = ["CLIP", "Llava", "Siglip", "LlavaNext", "Idefics2", "Idefics3", "Qwen2VL", "Gemma3", "Pixtral", "Phi3V"];
    for (at, name) in names.iter().enumerate() {
        let mut config = json!({"image_processor_type": format!("{name}ImageProcessor"), "do_pad": true,
            "do_image_splitting": true, "do_pan_and_scan": true, "pan_and_scan_min_crop_size": 1, "pan_and_scan_max_num_crops": 9,
            "num_crops": 3, "pan_and_scan_min_ratio_to_activate": 1.0, "crop_size": 96,
            "image_grid_pinpoints": [[96, 192], [192, 96], [192, 192]], "max_image_size": {"longest_edge": 96}});
        config["size"] = match *name {
            "Idefics2" => json!({"shortest_edge": 50, "longest_edge": 120}),
            "Idefics3" | "Pixtral" => json!({"longest_edge": 240}),
            "Qwen2VL" => json!({"shortest_edge": 3136, "longest_edge": 50_000}),
            _ => json!({"height": 96, "width": 96}),
        };
        let processor = from(&config).unwrap();
        let mut made = 0;
        for case in 0..60 {
            let edge = |draw: usize| {
                let noise = common::noise(case * 4 + draw, at) as usize;
                if noise.is_multiple_of(2) { 1 + noise / 2 % 4 } else { 1 + noise / 2 % 700 }
            };
            if let Ok(processed) = processor.process(&common::image(case, edge(0), edge(1))) {
                made += 1;
                assert!(processed.whole < processed.tiles.len());
                let cut = processed.grid.0 * processed.grid.1;
                assert_eq!(processed.tiles.len(), cut + 1, "{name}");
                assert!(
                    processed
                        .tiles
                        .iter()
                        .all(|tile| tile.pixels.len() == 3 * tile.height * tile.width && !tile.pixels.is_empty())
                );
            }
        }
        assert!(made > 20, "{name}: {made}");
    }
}

#[test]
fn a_folder_has_its_processor_in_either_file() {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("processor_files");
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&root).unwrap();
    assert!(Processor::from_folder(&root).unwrap().is_none());
    let old = json!({"feature_extractor_type": "CLIPFeatureExtractor", "crop_size": 336, "size": 336, "resample": 3});
    fs::write(root.join("preprocessor_config.json"), old.to_string()).unwrap();
    let processor = Processor::from_folder(&root).unwrap().unwrap();
    assert_eq!((processor.kind, processor.crop), (ProcessorKind::Clip, Some((336, 336))));
    let pixtral = json!({"image_processor_type": "PixtralImageProcessorFast", "patch_size": {"height": 14, "width": 14}});
    fs::write(root.join("preprocessor_config.json"), pixtral.to_string()).unwrap();
    fs::write(root.join("processor_config.json"), json!({"patch_size": 14, "spatial_merge_size": 2}).to_string()).unwrap();
    assert_eq!(Processor::from_folder(&root).unwrap().unwrap().patch_size, 28);
    let inner = json!({"image_processor": {"image_processor_type": "SiglipImageProcessor"}, "patch_size": 14});
    fs::write(root.join("processor_config.json"), inner.to_string()).unwrap();
    assert_eq!(Processor::from_folder(&root).unwrap().unwrap().kind, ProcessorKind::Siglip);
    fs::write(root.join("processor_config.json"), "{").unwrap();
    assert!(Processor::from_folder(&root).unwrap_err().to_string().contains("processor_config.json: EOF"));
}
