//! The HD transform of Phi-4-multimodal (arXiv:2503.01743): whole crops that an image fills from their upper left corner, behind
//! the whole of them as one tile.

use crate::{
    Filter, ImageError, Processed, Processor, ProcessorKind, RgbImage, Size,
    config::Keys,
    process::{cut, unfit},
    resize,
    resize::check_pixels,
    sizes,
};

/// The largest `dynamic_hd`.
const MAX_CROPS: u64 = 1024;
/// An edge of fewer pixels is refused.
const LEAST_EDGE: usize = 10;

/// The grid of crops of an image: as many as cover it, or where these are more than there may be, that whose shape is nearest.
fn grid((height, width): (usize, usize), edge: usize, most: usize) -> (usize, usize) {
    let covering = (height.div_ceil(edge), width.div_ceil(edge));
    let is_small = covering.0.saturating_mul(covering.1) <= most;
    if is_small { covering } else { sizes::nearest_grid((height, width), (1, most), edge * edge) }
}

/// The largest size within another that keeps an image's shape.
fn fitted((height, width): (usize, usize), (to_height, to_width): (usize, usize)) -> (usize, usize) {
    let (across, down) = (to_width as f64 / width as f64, to_height as f64 / height as f64);
    if across < down { ((height as f64 * across) as usize, to_width) } else { (to_height, (width as f64 * down) as usize) }
}

impl Processor {
    /// Reads what is of this processor alone.
    pub(crate) fn read_hd(&mut self, keys: &Keys<'_>) -> Result<(), ImageError> {
        let (ProcessorKind::Phi4Multimodal, Size::Exact { height, width }) = (self.kind, self.size) else { return Ok(()) };
        if height != width {
            return Err(keys.error(format!("size is {width} x {height}, which is no square")));
        }
        if self.resample != Filter::Bicubic {
            return Err(keys.error("resample is not 3, which is all that is supported for this processor: leave it out"));
        }
        if !self.resize {
            return Err(keys.error("do_resize is false, and this processor always resizes"));
        }
        if self.patch_size == 0 || !height.is_multiple_of(2 * self.patch_size) {
            return Err(keys.error(format!("size is {height}, no multiple of twice patch_size, {}", self.patch_size)));
        }
        self.tile_size = height;
        self.num_crops = keys.up_to("dynamic_hd", MAX_CROPS)?.unwrap_or(self.num_crops);
        Ok(())
    }

    /// Rows and columns of the patches of all crops together that show something of an image; `None` of another processor's, all
    /// of whose patches are seen.
    pub fn seen_patches(&self, image: &Processed) -> Option<[usize; 2]> {
        if self.kind != ProcessorKind::Phi4Multimodal {
            return None;
        }
        let (rows, columns) = (image.grid.0 * self.tile_size, image.grid.1 * self.tile_size);
        let (height, width) = fitted(image.original, (rows, columns));
        // Only whole patches of padding are hidden.
        let seen = |edge: usize, filled: usize| edge / self.patch_size - (edge - filled) / self.patch_size;
        Some([seen(rows, height), seen(columns, width)])
    }

    /// Whether a crop has nothing of the image.
    fn has_empty_crops(&self, image: &Processed) -> bool {
        let side = self.tile_size / self.patch_size;
        let is_empty = |(seen, crops): (usize, usize)| seen <= (crops - 1) * side;
        self.seen_patches(image)
            .is_some_and(|[rows, columns]| is_empty((rows, image.grid.0)) || is_empty((columns, image.grid.1)))
    }

    /// The whole image is made of values and not of pixels, and so is not cut to 8 bits.
    pub(crate) fn phi4_multimodal(&self, image: &RgbImage) -> Result<Processed, ImageError> {
        let (edge, original) = (self.tile_size, image.size());
        let grid = grid(original, edge, self.num_crops);
        let size = (grid.0 * edge, grid.1 * edge);
        check_pixels(size.0, size.1)?;
        let (height, width) = fitted(original, size);
        if height.min(width) < LEAST_EDGE {
            return Err(unfit(image, &format!("its shape is extreme: it would become {width} x {height}")));
        }
        let mut padded = RgbImage::filled(size, [255; 3]);
        padded.paste(&resize(image, (height, width), Filter::Bilinear)?, (0, 0));
        let mut tiles = vec![self.tile(&padded).interpolated((edge, edge))];
        tiles.extend(cut(&padded, (edge, edge)).iter().map(|crop| self.tile(crop)));
        let processed = Processed { tiles, original, grid, whole: 0 };
        if self.has_empty_crops(&processed) {
            return Err(unfit(image, &format!("its shape leaves one of {} crops empty", grid.0 * grid.1)));
        }
        Ok(processed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_the_crops_that_cover_it() {
        assert_eq!(grid((448, 448), 448, 36), (1, 1));
        assert_eq!(grid((500, 900), 448, 36), (2, 3));
        assert_eq!(grid((5000, 5000), 448, 36), (6, 6));
        assert_eq!(grid((448, 44_800), 448, 36), (1, 36));
        assert_eq!(fitted((500, 900), (896, 1344)), (746, 1344));
        assert_eq!(fitted((900, 500), (1344, 896)), (1344, 746));
    }
}
