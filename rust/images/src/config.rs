//! A model's `preprocessor_config.json`.

use std::{fs, io, path::Path};

use serde::Serialize;
use serde_json::{Map, Value};

use crate::{
    Filter, ImageError,
    of_sounds::OF_SOUNDS,
    resize::check_pixels,
    tiling::{Canvas, PanAndScan, READ_BY, Tiling},
};

/// A family of image processors: which steps there are, and in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub enum ProcessorKind {
    /// Resize, crop the centre: LLaVA 1.5 and others with CLIP.
    Clip,
    /// As [`Self::Clip`], but first filled up to a square where `do_pad` says so.
    Llava,
    /// Resize to one size: PaliGemma and others with SigLIP.
    Siglip,
    /// The whole image, then tiles of the resolution that fits best.
    LlavaNext,
    /// The image within two bounds, behind its quarters if it is split.
    Idefics2,
    /// Rows of tiles, then the whole image: Idefics3, SmolVLM, SmolVLM2.
    Idefics3,
    /// Whole groups of patches, as many as two bounds allow: Qwen2-VL, Qwen2.5-VL, Qwen3-VL.
    Qwen2Vl,
    /// One size, with crops of long images behind if `do_pan_and_scan` says so.
    Gemma3,
    /// Whole patches within a bound: Pixtral, Mistral 3.
    Pixtral,
    /// The whole image, then tiles of the HD transform: Phi-3-vision, Phi-3.5-vision.
    Phi3V,
    /// Whole groups of patches; a large image becomes rows of tiles, then the whole image: LFM2-VL.
    Lfm2Vl,
    /// Rows of tiles of the canvas that fits best, then the whole image: Llama 4.
    Llama4,
    /// Whole groups of patches, as many as a number of tokens allows: Gemma 4.
    Gemma4,
    /// Rows of tiles of the grid whose shape is nearest, then the whole image: InternVL, Aya Vision.
    GotOcr2,
    /// Rows of tiles of the grid that it fills best, then the whole image: Command A Vision.
    Cohere2Vision,
    /// As [`Self::Qwen2Vl`], but an image has as many frames as a patch, and its edges are no less than a group's: GLM-4.1V.
    Glm4v,
    /// Rows of tiles of the canvas that it fills best, in whose upper left corner it lies: Llama 3.2 Vision.
    Mllama,
    /// The whole image, then crops that it fills from their upper left corner: Phi-4-multimodal.
    Phi4Multimodal,
}

const CLIP_MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
const CLIP_STD: [f32; 3] = [0.268_629_55, 0.261_302_6, 0.275_777_1];

impl ProcessorKind {
    /// By the names in files, less "Fast".
    const NAMES: [(&str, Self); 21] = [
        ("CLIPImageProcessor", Self::Clip),
        ("LlavaImageProcessor", Self::Llava),
        ("SiglipImageProcessor", Self::Siglip),
        ("LlavaNextImageProcessor", Self::LlavaNext),
        ("Idefics2ImageProcessor", Self::Idefics2),
        ("Idefics3ImageProcessor", Self::Idefics3),
        ("SmolVLMImageProcessor", Self::Idefics3),
        ("Qwen2VLImageProcessor", Self::Qwen2Vl),
        ("Gemma3ImageProcessor", Self::Gemma3),
        ("PixtralImageProcessor", Self::Pixtral),
        ("Phi3VImageProcessor", Self::Phi3V),
        ("Lfm2VlImageProcessor", Self::Lfm2Vl),
        ("Llama4ImageProcessor", Self::Llama4),
        ("Gemma4ImageProcessor", Self::Gemma4),
        ("GotOcr2ImageProcessor", Self::GotOcr2),
        ("Cohere2VisionImageProcessor", Self::Cohere2Vision),
        ("Glm4vImageProcessor", Self::Glm4v),
        ("Glm46VImageProcessor", Self::Glm4v),
        ("MllamaImageProcessor", Self::Mllama),
        ("Phi4MultimodalImageProcessor", Self::Phi4Multimodal),
        ("Phi4MMImageProcessor", Self::Phi4Multimodal),
    ];

    /// What holds where a file says nothing.
    fn defaults(self) -> Processor {
        let (mean, std) = match self {
            Self::Siglip
            | Self::Idefics2
            | Self::Idefics3
            | Self::Gemma3
            | Self::Lfm2Vl
            | Self::Llama4
            | Self::Gemma4
            | Self::Mllama
            | Self::Phi4Multimodal => ([0.5; 3], [0.5; 3]),
            Self::Clip
            | Self::Llava
            | Self::LlavaNext
            | Self::Qwen2Vl
            | Self::Glm4v
            | Self::Pixtral
            | Self::Phi3V
            | Self::GotOcr2
            | Self::Cohere2Vision => (CLIP_MEAN, CLIP_STD),
        };
        let cropped = matches!(self, Self::Clip | Self::Llava | Self::LlavaNext);
        let (filter, size) = match self {
            Self::Clip | Self::Llava | Self::LlavaNext => (Filter::Bicubic, Size::ShortestEdge(224)),
            // The bound of Gemma 4 is a number of tokens.
            Self::Siglip | Self::Gemma4 => (Filter::Bicubic, Size::Exact { height: 224, width: 224 }),
            Self::Idefics2 => (Filter::Bilinear, Size::Edges { shortest: 378, longest: 980 }),
            Self::Idefics3 => (Filter::Lanczos, Size::LongestEdge(4 * 364)),
            Self::Qwen2Vl => (Filter::Bicubic, Size::Edges { shortest: 56 * 56, longest: 28 * 28 * 1280 }),
            Self::Glm4v => (Filter::Bicubic, Size::Edges { shortest: 112 * 112, longest: 28 * 28 * 15_000 }),
            Self::Gemma3 | Self::Mllama => (Filter::Bilinear, Size::Exact { height: 224, width: 224 }),
            Self::Pixtral => (Filter::Bicubic, Size::LongestEdge(1024)),
            Self::Phi3V | Self::Llama4 => (Filter::Bilinear, Size::Exact { height: 336, width: 336 }),
            Self::Lfm2Vl => (Filter::Bilinear, Size::Exact { height: 512, width: 512 }),
            Self::Phi4Multimodal => (Filter::Bicubic, Size::Exact { height: 448, width: 448 }),
            Self::GotOcr2 => (Filter::Bicubic, Size::Exact { height: 384, width: 384 }),
            Self::Cohere2Vision => (Filter::Bicubic, Size::Exact { height: 512, width: 512 }),
        };
        let grid_pinpoints = match self {
            Self::LlavaNext => vec![(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)],
            _ => Vec::new(),
        };
        Processor {
            kind: self,
            resize: true,
            size,
            crop: cropped.then_some((224, 224)),
            resample: filter,
            rescale: Some(1.0 / 255.0),
            normalize: Some((mean, std)),
            pad_to_square: false,
            grid_pinpoints,
            split: matches!(self, Self::Idefics3 | Self::Lfm2Vl | Self::Cohere2Vision),
            tile_size: match self {
                Self::Phi3V => 336,
                Self::Phi4Multimodal => 448,
                Self::Lfm2Vl => 512,
                _ => 364,
            },
            patch_size: if matches!(self, Self::Pixtral | Self::Lfm2Vl | Self::Gemma4) { 16 } else { 14 },
            merge_size: match self {
                Self::Qwen2Vl | Self::Glm4v | Self::Lfm2Vl => 2,
                Self::Gemma4 => 3,
                _ => 1,
            },
            temporal_patch_size: if matches!(self, Self::Qwen2Vl | Self::Glm4v) { 2 } else { 1 },
            num_crops: if self == Self::Phi4Multimodal { 36 } else { 1 },
            pan_and_scan: None,
            tiling: Tiling::usual(self),
            canvas: Canvas::usual(self),
            max_tokens: (self == Self::Gemma4).then_some(280),
            max_edge: None,
        }
    }
}

/// The `size` of a processor, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Size {
    /// This one.
    Exact {
        /// In pixels.
        height: usize,
        /// In pixels.
        width: usize,
    },
    /// The shorter edge becomes this, the other one follows.
    ShortestEdge(usize),
    /// The longer edge becomes this, the other one follows.
    LongestEdge(usize),
    /// Two bounds: of edges, but at [`ProcessorKind::Qwen2Vl`] and [`ProcessorKind::Glm4v`] of the number of pixels.
    Edges {
        /// The lower bound.
        shortest: usize,
        /// The upper bound.
        longest: usize,
    },
}

/// What makes tiles of an image. Fields that a kind has no use for are ignored.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Processor {
    /// The steps.
    pub kind: ProcessorKind,
    /// `do_resize`.
    pub resize: bool,
    /// `size`.
    pub size: Size,
    /// `crop_size`, `(height, width)`, if `do_center_crop`.
    pub crop: Option<(usize, usize)>,
    /// `resample`.
    pub resample: Filter,
    /// `rescale_factor`, if `do_rescale`.
    pub rescale: Option<f64>,
    /// `image_mean` and `image_std`, of red, green and blue, if `do_normalize`.
    pub normalize: Option<([f32; 3], [f32; 3])>,
    /// `do_pad` of [`ProcessorKind::Llava`].
    pub pad_to_square: bool,
    /// `image_grid_pinpoints`, `(height, width)` each.
    pub grid_pinpoints: Vec<(usize, usize)>,
    /// `do_image_splitting` of Idefics and LFM2-VL, `crop_to_patches` of InternVL and others.
    pub split: bool,
    /// Edge of a tile: `max_image_size` of Idefics3, `tile_size` of LFM2-VL, `size` of Phi-4-multimodal; of Phi-3-vision 336.
    pub tile_size: usize,
    /// Edge of a patch, in pixels. Of Pixtral: of what becomes one token, so `spatial_merge_size` is in it.
    pub patch_size: usize,
    /// Patches, along each edge, that become one token.
    pub merge_size: usize,
    /// Frames of a video that become one patch. An image is repeated as often.
    pub temporal_patch_size: usize,
    /// `num_crops` of Phi-3-vision, `dynamic_hd` of Phi-4-multimodal.
    pub num_crops: usize,
    /// If `do_pan_and_scan`.
    pub pan_and_scan: Option<PanAndScan>,
    /// Of [`ProcessorKind::Lfm2Vl`], [`ProcessorKind::GotOcr2`] and [`ProcessorKind::Cohere2Vision`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tiling: Option<Tiling>,
    /// Of [`ProcessorKind::Llama4`] and [`ProcessorKind::Mllama`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub canvas: Option<Canvas>,
    /// Of [`ProcessorKind::Gemma4`]: what an image becomes at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
    /// An image with a longer edge is first made smaller, with its aspect kept. No file sets it.
    pub max_edge: Option<usize>,
}

/// Keys that change nothing for a single image that is RGB, or that others read.
const IGNORED: [&str; 25] = [
    "_valid_processor_keys",
    "auto_map",
    "data_format",
    "default_to_square",
    "device",
    "disable_grouping",
    "do_convert_rgb",
    "do_pad",
    "do_sample_frames",
    "feature_extractor_type",
    "fps",
    "image_processor_type",
    "image_seq_len",
    "image_seq_length",
    "image_token",
    "input_data_format",
    "max_frames",
    "min_frames",
    "model_input_names",
    "num_img_tokens",
    "processor_class",
    "return_row_col_info",
    "return_tensors",
    "transformers_version",
    "video_sampling",
];

/// Keys that are read below.
const READ: [&str; 24] = [
    "crop_size",
    "do_center_crop",
    "do_image_splitting",
    "do_normalize",
    "do_pan_and_scan",
    "do_rescale",
    "do_resize",
    "image_grid_pinpoints",
    "image_mean",
    "image_std",
    "max_image_size",
    "max_pixels",
    "merge_size",
    "min_pixels",
    "num_crops",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_min_ratio_to_activate",
    "patch_size",
    "resample",
    "rescale_factor",
    "size",
    "spatial_merge_size",
    "temporal_patch_size",
];

/// Larger edges are a mistake, and would overflow products.
pub(crate) const MAX_EDGE: u64 = 1 << 16;

/// Keys of an object, with errors that name them. `null` is as good as nothing.
pub(crate) struct Keys<'a> {
    pub(crate) what: &'a str,
    pub(crate) json: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    pub(crate) fn error(&self, reason: impl Into<String>) -> ImageError {
        ImageError::Config { what: self.what.into(), reason: reason.into() }
    }

    fn wrong(&self, key: &str, value: &Value, wanted: &str) -> ImageError {
        self.error(format!("{key} is {value}, and {wanted} is wanted"))
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn bool(&self, key: &str, default: bool) -> Result<bool, ImageError> {
        self.get(key).map_or(Ok(default), |value| value.as_bool().ok_or_else(|| self.wrong(key, value, "true or false")))
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, ImageError> {
        let number = |value: &Value| value.as_f64().ok_or_else(|| self.wrong(key, value, "a number"));
        self.get(key).map(number).transpose()
    }

    pub(crate) fn up_to(&self, key: &str, max: u64) -> Result<Option<usize>, ImageError> {
        self.get(key).map(|value| self.whole(key, value, max)).transpose()
    }

    fn whole(&self, key: &str, value: &Value, max: u64) -> Result<usize, ImageError> {
        let fits = value.as_u64().filter(|number| (1..=max).contains(number));
        fits.map(|number| number as usize).ok_or_else(|| self.wrong(key, value, &format!("a whole number from 1 to {max}")))
    }

    /// One number for each colour, or one for all.
    fn colors(&self, key: &str, default: [f32; 3]) -> Result<[f32; 3], ImageError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let numbers = match value {
            Value::Array(values) => values.iter().map(Value::as_f64).collect::<Option<Vec<_>>>(),
            value => value.as_f64().map(|number| vec![number; 3]),
        };
        let numbers = numbers.and_then(|numbers| <[f64; 3]>::try_from(numbers).ok());
        Ok(numbers.ok_or_else(|| self.wrong(key, value, "a list of three numbers"))?.map(|number| number as f32))
    }

    /// `{"height", "width"}`, `[height, width]`, or one number for both.
    fn height_width(&self, key: &str, value: &Value) -> Result<(usize, usize), ImageError> {
        let whole = |value| self.whole(key, value, MAX_EDGE);
        match value {
            Value::Number(_) => whole(value).map(|edge| (edge, edge)),
            Value::Array(sides) if sides.len() == 2 => Ok((whole(&sides[0])?, whole(&sides[1])?)),
            Value::Object(sides) if sides.contains_key("height") && sides.contains_key("width") => {
                Ok((whole(&sides["height"])?, whole(&sides["width"])?))
            }
            _ => Err(self.wrong(key, value, "an object with height and width")),
        }
    }

    /// A size whose pixels are not too many.
    fn area(&self, key: &str, value: &Value) -> Result<(usize, usize), ImageError> {
        let (height, width) = self.height_width(key, value)?;
        check_pixels(height, width)?;
        Ok((height, width))
    }

    /// `square`: one number is an edge of a square, and not the shorter edge.
    fn size(&self, square: bool, default: Size, max: u64) -> Result<Size, ImageError> {
        let Some(value) = self.get("size") else { return Ok(default) };
        let Value::Object(sides) = value else {
            if let (false, Value::Number(_)) = (square, value) {
                return Ok(Size::ShortestEdge(self.whole("size", value, max)?));
            }
            let (height, width) = self.height_width("size", value)?;
            return Ok(Size::Exact { height, width });
        };
        let edge = |names: [&str; 2]| {
            let value = names.iter().find_map(|name| sides.get(*name).filter(|value| !value.is_null()));
            value.map(|value| self.whole("size", value, max)).transpose()
        };
        match (edge(["shortest_edge", "min_pixels"])?, edge(["longest_edge", "max_pixels"])?) {
            (Some(shortest), Some(longest)) => Ok(Size::Edges { shortest, longest }),
            (Some(edge), None) => Ok(Size::ShortestEdge(edge)),
            (None, Some(edge)) => Ok(Size::LongestEdge(edge)),
            (None, None) => self.height_width("size", value).map(|(height, width)| Size::Exact { height, width }),
        }
    }

    fn kind(&self) -> Result<ProcessorKind, ImageError> {
        let known = || ProcessorKind::NAMES.map(|(name, _)| name).join(", ");
        let named = |key: &str| self.get(key).and_then(Value::as_str);
        let named = named("image_processor_type")
            .map(ToOwned::to_owned)
            .or_else(|| named("feature_extractor_type").map(|name| name.replace("FeatureExtractor", "ImageProcessor")));
        let Some(name) = named else {
            return Err(self.error(format!("image_processor_type is missing; known are {}", known())));
        };
        let plain = name.strip_suffix("Fast").or_else(|| name.strip_suffix("Pil")).unwrap_or(&name);
        let kind = ProcessorKind::NAMES.iter().find(|(known, _)| *known == plain);
        kind.map(|(_, kind)| *kind)
            .ok_or_else(|| self.error(format!("image_processor_type {name} is not known; known are {}", known())))
    }

    /// Keys that nobody reads are refused if they switch something on, and logged otherwise.
    fn check_rest(&self, kind: ProcessorKind) -> Result<(), ImageError> {
        let is_own = |key: &str| READ_BY.iter().any(|(own, keys)| *own == kind && keys.contains(&key));
        let named = |key: &str| self.get(key).and_then(Value::as_str).unwrap_or_default();
        let is_both = !named("image_processor_type").is_empty() && named("feature_extractor_type").contains("Audio");
        for (key, value) in self.json.iter().filter(|(key, _)| !is_both || !OF_SOUNDS.contains(&key.as_str())) {
            let off = value.is_null() || value == &Value::Bool(false);
            if off || IGNORED.contains(&key.as_str()) || READ.contains(&key.as_str()) || is_own(key) {
                continue;
            }
            if value == &Value::Bool(true) || key == "pad_size" || key == "crop_pct" {
                return Err(self.error(format!("{key} is {value}, which is not supported; without it images can be processed")));
            }
            tracing::warn!("{}: {key} is not known and not used", self.what);
        }
        Ok(())
    }

    fn grid_pinpoints(&self, default: Vec<(usize, usize)>) -> Result<Vec<(usize, usize)>, ImageError> {
        const KEY: &str = "image_grid_pinpoints";
        let Some(value) = self.get(KEY) else { return Ok(default) };
        let points =
            value.as_array().filter(|points| !points.is_empty()).ok_or_else(|| self.wrong(KEY, value, "a list of sizes"))?;
        points.iter().map(|point| self.area(KEY, point)).collect()
    }
}

impl Processor {
    /// From a model's folder: the `image_processor` of its `processor_config.json`, or else its `preprocessor_config.json`.
    /// `None` where the folder has neither. Transformers looks in the same order.
    ///
    /// # Errors
    /// For files that cannot be read, and as [`Self::from_json`].
    pub fn from_folder(dir: &Path) -> Result<Option<Self>, ImageError> {
        let outer = read_object(&dir.join("processor_config.json"))?;
        let inner =
            outer.as_ref().and_then(|(what, json)| Some((what.clone(), json.get("image_processor")?.as_object()?.clone())));
        let Some((what, json)) =
            inner.map_or_else(|| read_object(&dir.join("preprocessor_config.json")), |inner| Ok(Some(inner)))?
        else {
            return Ok(None);
        };
        let mut processor = Self::from_json(&what, &json)?;
        if let (ProcessorKind::Lfm2Vl, Some((what, json))) = (processor.kind, &outer) {
            let (keys, key) = (Keys { what, json }, "use_image_special_tokens");
            if !keys.bool(key, true)? {
                return Err(keys.error(format!("{key} is false, which is not supported; without it images can be processed")));
            }
        }
        if let (ProcessorKind::Pixtral, Some((what, json))) = (processor.kind, &outer) {
            // The processor around Pixtral's hands these on to it; that of LightOnOCR does not.
            let keys = Keys { what, json };
            let is_handed_on = keys.get("processor_class").is_none_or(|class| class != "LightOnOcrProcessor");
            if let Some(patch_size) = keys.up_to("patch_size", 1024)?.filter(|_| is_handed_on) {
                processor.patch_size = patch_size * keys.up_to("spatial_merge_size", 64)?.unwrap_or(1);
            }
        }
        Ok(Some(processor))
    }

    /// From the object of such a file; `what` is the file's name in errors.
    ///
    /// # Errors
    /// [`ImageError::Config`] for processors that are not known, with those that are; for values of a wrong form; for keys that
    /// would change the result and are not honoured.
    pub fn from_json(what: &str, json: &Map<String, Value>) -> Result<Self, ImageError> {
        let keys = Keys { what, json };
        let kind = keys.kind()?;
        keys.check_rest(kind)?;
        let mut processor = kind.defaults();
        processor.resize = keys.bool("do_resize", true)?;
        processor.read_size(&keys)?;
        processor.read_values(&keys)?;
        processor.pad_to_square = kind == ProcessorKind::Llava && keys.bool("do_pad", false)?;
        processor.split = keys.bool("do_image_splitting", processor.split)?;
        processor.num_crops = keys.up_to("num_crops", 64)?.unwrap_or(processor.num_crops);
        processor.merge_size = keys.up_to("merge_size", 64)?.unwrap_or(processor.merge_size);
        processor.temporal_patch_size = keys.up_to("temporal_patch_size", 64)?.unwrap_or(processor.temporal_patch_size);
        if kind == ProcessorKind::Gemma3 {
            processor.pan_and_scan = keys.pan_and_scan()?;
        }
        processor.read_tiling(&keys)?;
        if let Some(value) = keys.get("patch_size").filter(|_| kind != ProcessorKind::Lfm2Vl) {
            let (height, width) = keys.height_width("patch_size", value)?;
            if height != width || height > 1024 {
                return Err(keys.wrong("patch_size", value, "one edge of at most 1024 for both"));
            }
            processor.patch_size = height;
        }
        if let Some(value) = keys.get("max_image_size").filter(|_| kind == ProcessorKind::Idefics3) {
            let edge =
                value.get("longest_edge").ok_or_else(|| keys.wrong("max_image_size", value, "an object with longest_edge"))?;
            processor.tile_size = keys.whole("max_image_size", edge, MAX_EDGE)?;
        }
        processor.read_hd(&keys)?;
        Ok(processor)
    }

    fn read_size(&mut self, keys: &Keys) -> Result<(), ImageError> {
        let max = if matches!(self.kind, ProcessorKind::Qwen2Vl | ProcessorKind::Glm4v) { 1 << 32 } else { MAX_EDGE };
        let square = matches!(
            self.kind,
            ProcessorKind::Gemma3
                | ProcessorKind::Pixtral
                | ProcessorKind::Llama4
                | ProcessorKind::Mllama
                | ProcessorKind::GotOcr2
                | ProcessorKind::Cohere2Vision
                | ProcessorKind::Phi4Multimodal
        );
        self.size = keys.size(square, self.size, max)?;
        if let (ProcessorKind::Qwen2Vl, Size::Edges { shortest, longest }) = (self.kind, &mut self.size) {
            *shortest = keys.up_to("min_pixels", max)?.unwrap_or(*shortest);
            *longest = keys.up_to("max_pixels", max)?.unwrap_or(*longest);
        }
        let (fits, wanted) = match (self.kind, self.size) {
            (ProcessorKind::Clip | ProcessorKind::Llava | ProcessorKind::LlavaNext | ProcessorKind::Siglip, size) => {
                (matches!(size, Size::ShortestEdge(_) | Size::Exact { .. }), "shortest_edge, or height and width,")
            }
            (ProcessorKind::Idefics2 | ProcessorKind::Qwen2Vl | ProcessorKind::Glm4v, size) => {
                (matches!(size, Size::Edges { .. }), "shortest_edge and longest_edge")
            }
            (ProcessorKind::Idefics3, size) => (matches!(size, Size::LongestEdge(_) | Size::Exact { .. }), "longest_edge"),
            (ProcessorKind::Pixtral, size) => {
                (matches!(size, Size::LongestEdge(_) | Size::Exact { .. }), "longest_edge, or height and width,")
            }
            (
                ProcessorKind::Gemma3
                | ProcessorKind::Llama4
                | ProcessorKind::Mllama
                | ProcessorKind::GotOcr2
                | ProcessorKind::Cohere2Vision
                | ProcessorKind::Phi4Multimodal,
                size,
            ) => (matches!(size, Size::Exact { .. }), "height and width"),
            (ProcessorKind::Phi3V | ProcessorKind::Lfm2Vl | ProcessorKind::Gemma4, _) => (true, ""),
        };
        if !fits {
            return Err(keys.wrong("size", keys.get("size").unwrap_or(&Value::Null), &format!("an object with {wanted}")));
        }
        self.grid_pinpoints = keys.grid_pinpoints(std::mem::take(&mut self.grid_pinpoints))?;
        if let Some(value) = keys.get("crop_size") {
            self.crop = Some(keys.area("crop_size", value)?);
        }
        if !keys
            .bool("do_center_crop", matches!(self.kind, ProcessorKind::Clip | ProcessorKind::Llava | ProcessorKind::LlavaNext))?
        {
            self.crop = None;
        } else if self.crop.is_none() && matches!(self.kind, ProcessorKind::Siglip | ProcessorKind::Pixtral) {
            return Err(keys.error("do_center_crop needs crop_size"));
        }
        Ok(())
    }

    fn read_values(&mut self, keys: &Keys) -> Result<(), ImageError> {
        if let Some(value) = keys.get("resample").filter(|_| self.kind != ProcessorKind::Phi3V) {
            let filter = value.as_u64().and_then(Filter::from_number);
            self.resample = filter.ok_or_else(|| keys.wrong("resample", value, "a number from 0 to 5"))?;
        }
        let factor = keys.number("rescale_factor")?.or(self.rescale);
        self.rescale = factor.filter(|_| keys.bool("do_rescale", true).unwrap_or(true));
        keys.bool("do_rescale", true)?;
        if self.kind == ProcessorKind::Gemma4 {
            // What its model does with pixels is done here, and nothing before it.
            let is_plain = (keys.colors("image_mean", [0.0; 3])?, keys.colors("image_std", [1.0; 3])?) == ([0.0; 3], [1.0; 3]);
            if keys.bool("do_normalize", false)? && !is_plain {
                return Err(keys.error("do_normalize is true, which is not supported for this processor: leave it out"));
            }
        } else if let Some((mean, std)) = self.normalize {
            let values = (keys.colors("image_mean", mean)?, keys.colors("image_std", std)?);
            if values.1.contains(&0.0) {
                return Err(keys.error("image_std has a 0, and images are divided by it"));
            }
            self.normalize = keys.bool("do_normalize", true)?.then_some(values);
        }
        Ok(())
    }

    /// Bytes that differ where these parameters differ: a part of the key of whatever is kept of an image.
    pub fn identity(&self) -> Vec<u8> {
        // Numbers are written with all their digits.
        let mut bytes = b"image processor 1\n".to_vec();
        bytes.extend(serde_json::to_vec(self).unwrap_or_else(|_| format!("{self:?}").into_bytes()));
        bytes
    }
}

type Object = (String, Map<String, Value>);

/// The name and the object of a file. `None` where there is no such file.
pub(crate) fn read_object(path: &Path) -> Result<Option<Object>, ImageError> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(ImageError::Io { path: path.into(), source }),
    };
    let what = path.display().to_string();
    match serde_json::from_slice(&text) {
        Ok(json) => Ok(Some((what, json))),
        Err(error) => Err(ImageError::Config { what, reason: error.to_string() }),
    }
}
