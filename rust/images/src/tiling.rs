//! How LFM2-VL, Llama 4 and others cut images.

use serde::Serialize;

use crate::{
    ImageError, Processor, ProcessorKind, RgbImage, Size,
    config::{Keys, MAX_EDGE},
    process::{Pieces, cut, unfit},
    resize::check_pixels,
    sizes,
};

/// How Gemma 3 cuts long images ("pan and scan").
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PanAndScan {
    /// Crops are no smaller, in pixels.
    pub min_crop_size: usize,
    /// There are no more crops.
    pub max_num_crops: usize,
    /// Images are cut from this ratio of the long edge to the short one on.
    pub min_ratio: f64,
}

/// When LFM2-VL and others cut an image, and into how many tiles.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Tiling {
    /// There are no fewer tiles.
    pub min_tiles: usize,
    /// There are no more.
    pub max_tiles: usize,
    /// The whole image stands behind them.
    pub thumbnail: bool,
    /// Tokens of an image of LFM2-VL that is not cut, at least; of others 0, as what follows.
    pub min_tokens: usize,
    /// The same, at most.
    pub max_tokens: usize,
    /// An image is cut from so many times that number on.
    pub tolerance: f64,
}

impl Tiling {
    /// What holds where a file says nothing.
    pub(crate) fn usual(kind: ProcessorKind) -> Option<Self> {
        let tiling = Self { min_tiles: 1, max_tiles: 12, thumbnail: true, min_tokens: 0, max_tokens: 0, tolerance: 0.0 };
        match kind {
            ProcessorKind::Lfm2Vl => {
                Some(Self { min_tiles: 2, max_tiles: 10, min_tokens: 64, max_tokens: 256, tolerance: 2.0, ..tiling })
            }
            ProcessorKind::GotOcr2 | ProcessorKind::Cohere2Vision => Some(tiling),
            _ => None,
        }
    }
}

/// The canvases of Llama 4 and of Llama 3.2 Vision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Canvas {
    /// Tiles of the largest.
    pub max_tiles: usize,
    /// The image becomes as large as it may, and not only as large as it must. Of Llama 4 alone.
    pub is_largest: bool,
}

impl Canvas {
    /// What holds where a file says nothing.
    pub(crate) fn usual(kind: ProcessorKind) -> Option<Self> {
        match kind {
            ProcessorKind::Llama4 => Some(Self { max_tiles: 16, is_largest: false }),
            ProcessorKind::Mllama => Some(Self { max_tiles: 4, is_largest: false }),
            _ => None,
        }
    }
}

/// `dynamic_hd`, and what is of sounds, about which files of Phi-4-multimodal are as well.
const OF_PHI4: [&str; 13] = [
    "dynamic_hd",
    "audio_compression_rate",
    "audio_downsample_rate",
    "audio_feat_stride",
    "feature_size",
    "hop_length",
    "n_fft",
    "padding_side",
    "padding_value",
    "preemphasis",
    "return_attention_mask",
    "sampling_rate",
    "win_length",
];

/// Keys that are read of one kind alone.
pub(crate) const READ_BY: [(ProcessorKind, &[&str]); 7] = [
    (
        ProcessorKind::Lfm2Vl,
        &[
            "downsample_factor",
            "encoder_patch_size",
            "max_image_tokens",
            "max_pixels_tolerance",
            "max_tiles",
            "min_image_tokens",
            "min_tiles",
            "tile_size",
            "use_thumbnail",
            // Up to which a tile is filled up beside others.
            "max_num_patches",
        ],
    ),
    (ProcessorKind::Llama4, &["max_patches", "resize_to_max_canvas"]),
    (ProcessorKind::Mllama, &["max_image_tiles"]),
    (ProcessorKind::Gemma4, &["max_soft_tokens", "pooling_kernel_size"]),
    (ProcessorKind::GotOcr2, &["crop_to_patches", "min_patches", "max_patches"]),
    // It takes the fewest tiles that there may be, whatever it says.
    (ProcessorKind::Cohere2Vision, &["crop_to_patches", "min_patches", "max_patches"]),
    (ProcessorKind::Phi4Multimodal, &OF_PHI4),
];

impl Keys<'_> {
    /// Gemma 3's.
    pub(crate) fn pan_and_scan(&self) -> Result<Option<PanAndScan>, ImageError> {
        if !self.bool("do_pan_and_scan", false)? {
            return Ok(None);
        }
        let missing = |key: &str| self.error(format!("do_pan_and_scan needs {key}"));
        let whole = |key: &str| self.up_to(key, MAX_EDGE)?.ok_or_else(|| missing(key));
        let ratio = "pan_and_scan_min_ratio_to_activate";
        Ok(Some(PanAndScan {
            min_crop_size: whole("pan_and_scan_min_crop_size")?,
            max_num_crops: whole("pan_and_scan_max_num_crops")?,
            min_ratio: self.number(ratio)?.ok_or_else(|| missing(ratio))?,
        }))
    }

    /// LFM2-VL's, where images are cut or not.
    fn tiling(&self, usual: Tiling, is_split: bool) -> Result<Tiling, ImageError> {
        let size = |key: &str, max: u64, usual: usize| Ok::<_, ImageError>(self.up_to(key, max)?.unwrap_or(usual));
        let tolerance = self.number("max_pixels_tolerance")?.unwrap_or(usual.tolerance);
        let tiling = Tiling {
            min_tiles: size("min_tiles", 1024, usual.min_tiles)?,
            max_tiles: size("max_tiles", 1024, usual.max_tiles)?,
            thumbnail: self.bool("use_thumbnail", usual.thumbnail)?,
            min_tokens: size("min_image_tokens", MAX_EDGE, usual.min_tokens)?,
            max_tokens: size("max_image_tokens", MAX_EDGE, usual.max_tokens)?,
            tolerance,
        };
        if tiling.min_tiles > tiling.max_tiles {
            return Err(self.error(format!("min_tiles is {}, more than max_tiles, {}", tiling.min_tiles, tiling.max_tiles)));
        }
        Ok(if is_split { tiling } else { Tiling { min_tiles: 1, max_tiles: 1, ..tiling } })
    }
}

impl Processor {
    /// What only LFM2-VL, Llama 4, Llama 3.2 Vision and Gemma 4 have.
    pub(crate) fn read_tiling(&mut self, keys: &Keys<'_>) -> Result<(), ImageError> {
        let always = [ProcessorKind::Lfm2Vl, ProcessorKind::Llama4, ProcessorKind::Mllama, ProcessorKind::Gemma4];
        if !self.resize && always.contains(&self.kind) {
            return Err(keys.error("do_resize is false, and this processor always resizes"));
        }
        if self.kind == ProcessorKind::Mllama && !keys.bool("do_pad", true)? {
            return Err(keys.error("do_pad is false, and this processor always fills up its tiles"));
        }
        if matches!(self.kind, ProcessorKind::GotOcr2 | ProcessorKind::Cohere2Vision)
            && let Some(tiling) = &mut self.tiling
        {
            self.split = keys.bool("crop_to_patches", self.split)?;
            tiling.min_tiles = keys.up_to("min_patches", 1024)?.unwrap_or(tiling.min_tiles);
            tiling.max_tiles = keys.up_to("max_patches", 1024)?.unwrap_or(tiling.max_tiles);
        } else if let Some(tiling) = self.tiling {
            self.tiling = Some(keys.tiling(tiling, self.split)?);
            self.patch_size = keys.up_to("encoder_patch_size", 1024)?.unwrap_or(self.patch_size);
            self.merge_size = keys.up_to("downsample_factor", 64)?.unwrap_or(self.merge_size);
            self.tile_size = keys.up_to("tile_size", MAX_EDGE)?.unwrap_or(self.tile_size);
            let group = self.patch_size * self.merge_size;
            if !self.tile_size.is_multiple_of(group) {
                return Err(keys.error(format!("tile_size is {}, which is no multiple of {group}", self.tile_size)));
            }
        }
        if let Some(most) = &mut self.max_tokens {
            const KNOWN: [usize; 5] = [70, 140, 280, 560, 1120];
            *most = keys.up_to("max_soft_tokens", MAX_EDGE)?.unwrap_or(*most);
            if !KNOWN.contains(most) {
                return Err(keys.error(format!("max_soft_tokens is {most}; it must be one of {KNOWN:?}")));
            }
            self.merge_size = keys.up_to("pooling_kernel_size", 64)?.unwrap_or(self.merge_size);
        }
        if let (Some(canvas), Size::Exact { height, width }) = (&mut self.canvas, self.size) {
            if self.kind == ProcessorKind::Mllama {
                canvas.max_tiles = keys.up_to("max_image_tiles", 64)?.unwrap_or(canvas.max_tiles);
            } else {
                canvas.max_tiles = keys.up_to("max_patches", 1024)?.unwrap_or(canvas.max_tiles);
                canvas.is_largest = keys.bool("resize_to_max_canvas", canvas.is_largest)?;
            }
            if height != width {
                return Err(keys.error(format!("size is {width} x {height}, which is no square")));
            }
        }
        Ok(())
    }

    /// One piece of whole groups of patches, as large as its tokens allow.
    pub(crate) fn gemma4(&self, image: &RgbImage) -> Result<RgbImage, ImageError> {
        let most = self.max_tokens.ok_or_else(|| unfit(image, "its processor says nothing of tokens"))?;
        let size = sizes::gemma4(image.size(), self.patch_size, self.merge_size, most);
        let size = size.ok_or_else(|| unfit(image, "it is too narrow to become whole groups of patches"))?;
        if size == image.size() { Ok(image.clone()) } else { self.resized(image, size) }
    }

    /// One piece of whole groups of patches; where that would be much too large, tiles of the grid whose shape is nearest, and
    /// the whole image behind them.
    pub(crate) fn lfm2_vl(&self, image: &RgbImage) -> Result<Pieces, ImageError> {
        let tiling = self.tiling.ok_or_else(|| unfit(image, "its processor says nothing of tiles"))?;
        let group = self.patch_size * self.merge_size;
        let [least, most] = [tiling.min_tokens, tiling.max_tokens].map(|tokens| tokens * group * group);
        let whole = self.resized(image, sizes::lfm2_vl(image.size(), group, least, most))?;
        let is_large = sizes::lfm2_vl_pixels(image.size(), group, self.patch_size) as f64 > most as f64 * tiling.tolerance;
        if !is_large || tiling.max_tiles == 1 {
            return Ok(whole.into());
        }
        let tile = self.tile_size;
        let (rows, columns) = sizes::nearest_grid(image.size(), (tiling.min_tiles, tiling.max_tiles), tile * tile);
        if rows * columns == 1 {
            return Err(unfit(image, "its processor would cut it into one tile: min_tiles must be more than 1"));
        }
        let mut images = cut(&self.resized(image, (rows * tile, columns * tile))?, (tile, tile));
        if tiling.thumbnail {
            images.push(whole);
        }
        Ok(Pieces { whole: images.len() - 1, images, grid: (rows, columns) })
    }

    /// Tiles of the canvas that fits best, in whose upper left corner the image lies, and the whole image behind them.
    pub(crate) fn llama4(&self, image: &RgbImage) -> Result<Pieces, ImageError> {
        let (Some(canvas), Size::Exact { height: edge, .. }) = (self.canvas, self.size) else {
            return Err(unfit(image, "its processor has no size of a tile"));
        };
        let (rows, columns) = sizes::llama4_canvas(image.size(), edge, canvas);
        let size = (rows * edge, columns * edge);
        check_pixels(size.0, size.1)?;
        let fitted = self.resized(image, sizes::llama4_fit(image.size(), size, edge, canvas))?;
        let mut padded = RgbImage::filled(size, [0; 3]);
        padded.paste(&fitted, (0, 0));
        let mut images = cut(&padded, (edge, edge));
        if images.len() == 1 {
            return Ok(padded.into());
        }
        images.push(self.resized(image, (edge, edge))?);
        Ok(Pieces { whole: images.len() - 1, images, grid: (rows, columns) })
    }

    /// Tiles of the canvas that it fills best, in whose upper left corner the image lies. The grid is there for one tile too.
    pub(crate) fn mllama(&self, image: &RgbImage) -> Result<Pieces, ImageError> {
        let (Some(canvas), Size::Exact { height: edge, .. }) = (self.canvas, self.size) else {
            return Err(unfit(image, "its processor has no size of a tile"));
        };
        let (rows, columns) = sizes::fullest_grid(image.size(), canvas.max_tiles, edge);
        let size = (rows * edge, columns * edge);
        check_pixels(size.0, size.1)?;
        let mut padded = RgbImage::filled(size, [0; 3]);
        padded.paste(&self.resized(image, sizes::mllama_fit(image.size(), size, edge))?, (0, 0));
        Ok(Pieces { images: cut(&padded, (edge, edge)), grid: (rows, columns), whole: 0 })
    }

    /// Tiles of a grid, of one size, and behind several of them the whole image.
    pub(crate) fn tiled(&self, image: &RgbImage) -> Result<Pieces, ImageError> {
        let (Some(tiling), Size::Exact { height, width }) = (self.tiling, self.size) else {
            return Err(unfit(image, "its processor has no size of a tile"));
        };
        let of_one = self.kind == ProcessorKind::GotOcr2 && tiling.max_tiles == 1;
        if !self.split || of_one {
            return Ok(self.to_size(image)?.into());
        }
        let (rows, columns) = if self.kind == ProcessorKind::GotOcr2 {
            sizes::nearest_grid(image.size(), (tiling.min_tiles, tiling.max_tiles), height * width)
        } else {
            sizes::fullest_grid(image.size(), tiling.max_tiles, height)
        };
        let mut images = cut(&self.resized(image, (rows * height, columns * width))?, (height, width));
        if images.len() == 1 {
            return Ok(Pieces { images, grid: (0, 0), whole: 0 });
        }
        images.push(self.resized(image, (height, width))?);
        Ok(Pieces { whole: images.len() - 1, images, grid: (rows, columns) })
    }
}
