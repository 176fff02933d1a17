//! From pixels to tiles. The order of steps is that of Transformers 5.23's image processors over Pillow.

use crate::{Filter, ImageError, Processor, ProcessorKind, RgbImage, Size, resize, resize::check_pixels, sizes};

/// One input of a vision encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Tile {
    /// In pixels.
    pub height: usize,
    /// In pixels.
    pub width: usize,
    /// `[3, height, width]`, rescaled and normalised.
    pub pixels: Vec<f32>,
}

/// What became of an image.
#[derive(Clone, Debug, PartialEq)]
pub struct Processed {
    /// Row by row, and the whole image before or behind them.
    pub tiles: Vec<Tile>,
    /// `(height, width)` of the image, after [`Processor::max_edge`] and before all else, in pixels.
    pub original: (usize, usize),
    /// Rows and columns of tiles beside the whole image. `(0, 0)`: the image is not cut.
    pub grid: (usize, usize),
    /// Which tile shows the whole image.
    pub whole: usize,
}

/// Images of 8 bits, before they become tiles.
pub(crate) struct Pieces {
    pub(crate) images: Vec<RgbImage>,
    pub(crate) grid: (usize, usize),
    pub(crate) whole: usize,
}

impl From<RgbImage> for Pieces {
    fn from(image: RgbImage) -> Self {
        Self { images: vec![image], grid: (0, 0), whole: 0 }
    }
}

impl Processor {
    /// The tiles of an image.
    ///
    /// # Errors
    /// [`ImageError::Unfit`] for shapes that the processor makes nothing of, [`ImageError::TooManyPixels`] for those that would
    /// take too much.
    pub fn process(&self, image: &RgbImage) -> Result<Processed, ImageError> {
        let small = self.max_edge.filter(|&edge| image.width().max(image.height()) as usize > edge);
        let small = small.map(|edge| resize(image, sizes::at_most(image.size(), edge.max(1)), self.resample)).transpose()?;
        let image = small.as_ref().unwrap_or(image);
        let original = image.size();
        if self.kind == ProcessorKind::Phi3V {
            return self.phi3_v(image);
        }
        if self.kind == ProcessorKind::Phi4Multimodal {
            return self.phi4_multimodal(image);
        }
        let pieces = match self.kind {
            ProcessorKind::LlavaNext => self.llava_next(image)?,
            ProcessorKind::Idefics2 => self.idefics2(image)?,
            ProcessorKind::Idefics3 => self.idefics3(image)?,
            ProcessorKind::Gemma3 => self.gemma3(image)?,
            ProcessorKind::Lfm2Vl => self.lfm2_vl(image)?,
            ProcessorKind::Llama4 => self.llama4(image)?,
            ProcessorKind::Mllama => self.mllama(image)?,
            ProcessorKind::GotOcr2 | ProcessorKind::Cohere2Vision => self.tiled(image)?,
            ProcessorKind::Qwen2Vl | ProcessorKind::Glm4v => self.qwen2_vl(image)?.into(),
            ProcessorKind::Gemma4 => self.gemma4(image)?.into(),
            ProcessorKind::Pixtral => self.crop(self.pixtral(image)?).into(),
            ProcessorKind::Llava if self.pad_to_square => self.crop(self.to_size(&self.squared(image)?)?).into(),
            _ => self.crop(self.to_size(image)?).into(),
        };
        let Pieces { images, grid, whole } = pieces;
        Ok(Processed { tiles: images.iter().map(|image| self.tile(image)).collect(), original, grid, whole })
    }

    pub(crate) fn resized(&self, image: &RgbImage, size: (usize, usize)) -> Result<RgbImage, ImageError> {
        resize(image, size, self.resample)
    }

    /// `size` as Transformers' base class understands it.
    pub(crate) fn to_size(&self, image: &RgbImage) -> Result<RgbImage, ImageError> {
        match self.size {
            _ if !self.resize => Ok(image.clone()),
            Size::Exact { height, width } => self.resized(image, (height, width)),
            Size::ShortestEdge(edge) => self.resized(image, sizes::shortest_edge(image.size(), edge)),
            Size::LongestEdge(_) | Size::Edges { .. } => {
                Err(unfit(image, "its processor has no size of one edge, or of height and width"))
            }
        }
    }

    /// The centre of `crop`'s size. An image that is too small is filled up with black.
    fn crop(&self, image: RgbImage) -> RgbImage {
        let Some(target) = self.crop else { return image };
        let size = image.size();
        let room = (size.0.max(target.0), size.1.max(target.1));
        let image = if room == size {
            image
        } else {
            let mut padded = RgbImage::filled(room, [0; 3]);
            padded.paste(&image, ((room.0 - size.0).div_ceil(2), (room.1 - size.1).div_ceil(2)));
            padded
        };
        // An edge that was filled up is cropped from its own beginning.
        image.crop(((room.0 - target.0) / 2, (room.1 - target.1) / 2), target)
    }

    /// In the middle of a square of the mean colour.
    fn squared(&self, image: &RgbImage) -> Result<RgbImage, ImageError> {
        let (height, width) = image.size();
        let edge = height.max(width);
        check_pixels(edge, edge)?;
        let mean = self.normalize.map_or([0.0; 3], |(mean, _)| mean);
        let mut square = RgbImage::filled((edge, edge), mean.map(|mean| (f64::from(mean) * 255.0) as u8));
        square.paste(image, ((edge - height) / 2, (edge - width) / 2));
        Ok(square)
    }

    fn llava_next(&self, image: &RgbImage) -> Result<Pieces, ImageError> {
        let base = match self.size {
            Size::Exact { height, width } => (height, width),
            Size::ShortestEdge(edge) => (edge, edge),
            Size::LongestEdge(_) | Size::Edges { .. } => {
                return Err(unfit(image, "its processor has no size for the whole image"));
            }
        };
        let edge = self.crop.map_or(base.0, |(height, _)| height);
        let best = sizes::best_resolution(image.size(), &self.grid_pinpoints)
            .ok_or_else(|| unfit(image, "no size of image_grid_pinpoints keeps a pixel of it"))?;
        if best.0 % edge != 0 || best.1 % edge != 0 {
            return Err(unfit(image, &format!("the size {best:?} of image_grid_pinpoints is no multiple of {edge}")));
        }
        let fitted = self.resized(image, sizes::fit(image.size(), best))?;
        let mut padded = RgbImage::filled(best, [0; 3]);
        padded.paste(&fitted, ((best.0 - fitted.size().0) / 2, (best.1 - fitted.size().1) / 2));
        let mut images = vec![self.resized(image, base)?];
        images.extend(cut(&padded, (edge, edge)));
        let images = images.iter().map(|image| Ok(self.crop(self.to_size(image)?))).collect::<Result<_, _>>()?;
        Ok(Pieces { images, grid: (best.0 / edge, best.1 / edge), whole: 0 })
    }

    fn idefics2(&self, image: &RgbImage) -> Result<Pieces, ImageError> {
        let Size::Edges { shortest, longest } = self.size else {
            return Err(unfit(image, "its processor has no size of two edges"));
        };
        let (height, width) = image.size();
        let mut images = vec![image.clone()];
        if self.split {
            if height < 2 || width < 2 {
                return Err(unfit(image, "it cannot be split into quarters"));
            }
            let (rows, columns) = ([(0, height / 2), (height / 2, height)], [(0, width / 2), (width / 2, width)]);
            let quarter = |(top, bottom), (left, right)| image.crop((top, left), (bottom - top, right - left));
            images = rows.iter().flat_map(|&row| columns.map(|column| quarter(row, column))).collect();
            images.push(image.clone());
        }
        if self.resize {
            images = images
                .iter()
                .map(|image| self.resized(image, sizes::idefics2(image.size(), shortest, longest)))
                .collect::<Result<_, _>>()?;
        }
        let whole = images.len() - 1;
        Ok(Pieces { images, grid: if self.split { (2, 2) } else { (0, 0) }, whole })
    }

    fn idefics3(&self, image: &RgbImage) -> Result<Pieces, ImageError> {
        let resized = match self.size {
            _ if !self.resize => image.clone(),
            Size::LongestEdge(edge) => self.resized(image, sizes::idefics3(image.size(), edge))?,
            Size::Exact { height, width } => self.resized(image, (height, width))?,
            Size::ShortestEdge(_) | Size::Edges { .. } => {
                return Err(unfit(image, "its processor has no size of the longest edge"));
            }
        };
        let tile = self.tile_size;
        if !self.split {
            return Ok(self.resized(&resized, (tile, tile))?.into());
        }
        let resized = self.resized(&resized, sizes::idefics3_multiples(resized.size(), tile))?;
        if resized.size() == (tile, tile) {
            return Ok(resized.into());
        }
        let grid = (resized.size().0 / tile, resized.size().1 / tile);
        let mut images = cut(&resized, (tile, tile));
        images.push(self.resized(&resized, (tile, tile))?);
        Ok(Pieces { whole: images.len() - 1, images, grid })
    }

    fn gemma3(&self, image: &RgbImage) -> Result<Pieces, ImageError> {
        let (height, width) = image.size();
        let grid = self
            .pan_and_scan
            .and_then(|pan| sizes::pan_and_scan((height, width), pan.min_crop_size, pan.max_num_crops, pan.min_ratio));
        let mut images = vec![image.clone()];
        if let Some((rows, columns)) = grid {
            let crop = (height.div_ceil(rows), width.div_ceil(columns));
            for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                let (top, left) = (crop.0 * row, crop.1 * column);
                if top >= height || left >= width {
                    return Err(unfit(image, &format!("it cannot be cut into {} crops", rows * columns)));
                }
                images.push(image.crop((top, left), (crop.0.min(height - top), crop.1.min(width - left))));
            }
        }
        let images = images.iter().map(|image| self.to_size(image)).collect::<Result<_, _>>()?;
        Ok(Pieces { images, grid: grid.unwrap_or((0, 0)), whole: 0 })
    }

    fn qwen2_vl(&self, image: &RgbImage) -> Result<RgbImage, ImageError> {
        const MAX_RATIO: usize = 200;
        let Size::Edges { shortest, longest } = self.size else {
            return Err(unfit(image, "its processor has no bounds of pixels"));
        };
        let (height, width) = image.size();
        let factor = self.patch_size * self.merge_size;
        if !self.resize {
            return if height % factor == 0 && width % factor == 0 {
                Ok(image.clone())
            } else {
                Err(unfit(image, &format!("do_resize is false, and its edges are no multiples of {factor}")))
            };
        }
        if self.kind == ProcessorKind::Glm4v {
            let frames = self.temporal_patch_size;
            let size = sizes::glm4v((height, width), factor, (frames, frames), (shortest, longest));
            let size = size.ok_or_else(|| unfit(image, &format!("one edge is more than {MAX_RATIO} times the other")))?;
            return self.resized(image, size);
        }
        if height.max(width) > MAX_RATIO * height.min(width) {
            return Err(unfit(image, &format!("one edge is more than {MAX_RATIO} times the other")));
        }
        self.resized(image, sizes::qwen2_vl((height, width), factor, shortest, longest))
    }

    fn pixtral(&self, image: &RgbImage) -> Result<RgbImage, ImageError> {
        let bound = match self.size {
            _ if !self.resize => return Ok(image.clone()),
            Size::LongestEdge(edge) => (edge, edge),
            Size::Exact { height, width } => (height, width),
            Size::ShortestEdge(_) | Size::Edges { .. } => return Err(unfit(image, "its processor has no longest edge")),
        };
        self.resized(image, sizes::pixtral(image.size(), bound, self.patch_size))
    }

    /// The HD transform. The whole image is made of values and not of pixels, and so is not cut to 8 bits.
    fn phi3_v(&self, image: &RgbImage) -> Result<Processed, ImageError> {
        let edge = self.tile_size;
        let portrait = image.width() < image.height();
        let turned = portrait.then(|| image.transposed());
        let upright = turned.as_ref().unwrap_or(image);
        let fitted = resize(upright, sizes::phi3_v(upright.size(), self.num_crops, edge), Filter::Bilinear)?;
        let (height, width) = fitted.size();
        let mut padded = RgbImage::filled((height.div_ceil(edge) * edge, width), [255; 3]);
        padded.paste(&fitted, ((padded.size().0 - height) / 2, 0));
        let padded = if portrait { padded.transposed() } else { padded };
        let whole = self.tile(&padded);
        let mut tiles = vec![whole.interpolated((edge, edge))];
        tiles.extend(cut(&padded, (edge, edge)).iter().map(|image| self.tile(image)));
        let (height, width) = padded.size();
        Ok(Processed { tiles, original: image.size(), grid: (height / edge, width / edge), whole: 0 })
    }

    /// Rescaled and normalised. The product with the factor is of doubles, the rest of floats, as in Transformers.
    pub(crate) fn tile(&self, image: &RgbImage) -> Tile {
        let value = |channel: usize, level: u8| {
            match (self.kind, self.rescale, self.normalize) {
                (ProcessorKind::Llama4, Some(factor), Some((mean, std))) => {
                    return in_bf16(level, factor as f32, mean[channel], std[channel]);
                }
                (ProcessorKind::Llama4, Some(factor), None) => return f32::from(level) * factor as f32,
                _ => {}
            }
            let value = self.rescale.map_or(f32::from(level), |factor| (f64::from(level) * factor) as f32);
            self.normalize.map_or(value, |(mean, std)| (value - mean[channel]) / std[channel])
        };
        let mut pixels = Vec::with_capacity(image.pixels().len());
        for channel in 0..3 {
            let levels: [f32; 256] = std::array::from_fn(|level| value(channel, level as u8));
            pixels.extend(image.pixels().as_chunks::<3>().0.iter().map(|pixel| levels[usize::from(pixel[channel])]));
        }
        Tile { height: image.height() as usize, width: image.width() as usize, pixels }
    }
}

/// As Llama 4 was trained: each step is rounded to bfloat16.
fn in_bf16(level: u8, factor: f32, mean: f32, std: f32) -> f32 {
    let rounded = |value: f32| f32::from_bits(value.to_bits().wrapping_add(0x7fff + (value.to_bits() >> 16 & 1)) & 0xffff_0000);
    let value = rounded(f32::from(level) * factor);
    rounded(rounded(value - rounded(mean)) / rounded(std))
}

pub(crate) fn unfit(image: &RgbImage, reason: &str) -> ImageError {
    ImageError::Unfit { width: image.width(), height: image.height(), reason: reason.into() }
}

/// Tiles of a size, row by row. The image's edges are multiples of theirs.
pub(crate) fn cut(image: &RgbImage, size: (usize, usize)) -> Vec<RgbImage> {
    let (height, width) = image.size();
    let corner = |row: usize, column: usize| (row * size.0, column * size.1);
    let corners = (0..height / size.0).flat_map(|row| (0..width / size.1).map(move |column| corner(row, column)));
    corners.map(|corner| image.crop(corner, size)).collect()
}

/// Four inputs and their weights, of one output.
type Taps = [(usize, f32); 4];

/// As PyTorch's `interpolate(mode="bicubic")` weighs along one axis: a = -0.75, four inputs even where the image becomes smaller,
/// and at the ends the last input again.
fn taps(input: usize, output: usize) -> Vec<Taps> {
    const A: f32 = -0.75;
    let near = |x: f32| ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0;
    let far = |x: f32| ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A;
    let scale = input as f32 / output as f32;
    let taps = |at: usize| {
        let position = scale * (at as f32 + 0.5) - 0.5;
        let t = position - position.floor();
        let weights = [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)];
        std::array::from_fn(|tap| {
            let at = position.floor() as i64 + tap as i64 - 1;
            (at.clamp(0, input as i64 - 1) as usize, weights[tap])
        })
    };
    (0..output).map(taps).collect()
}

impl Tile {
    /// In another size, as PyTorch's `interpolate(mode="bicubic")` makes it.
    pub(crate) fn interpolated(&self, (height, width): (usize, usize)) -> Self {
        let (down, across) = (taps(self.height, height), taps(self.width, width));
        let mut pixels = Vec::with_capacity(3 * height * width);
        for plane in self.pixels.chunks_exact(self.height * self.width) {
            for rows in &down {
                for columns in &across {
                    let row = |y: usize| columns.iter().map(|&(x, weight)| plane[y * self.width + x] * weight).sum::<f32>();
                    pixels.push(rows.iter().map(|&(y, weight)| row(y) * weight).sum());
                }
            }
        }
        Self { height, width, pixels }
    }
}
