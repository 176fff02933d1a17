//! Crops of which patches are not seen (Phi-4-multimodal).

use images::Processed;

use super::{
    config::{MediaConfig, MediaProcessor},
    grid::Grid,
};

impl MediaConfig {
    /// Rows and columns of patches of all crops of an image together that show something of it, where others are not seen.
    pub(super) fn seen_patches(&self, image: &Processed) -> Option<[usize; 2]> {
        let MediaProcessor::Images(processor) = &self.processor else { return None };
        processor.seen_patches(image)
    }

    /// Rows and columns of vectors of so many rows and columns of patches, of which the last may be of fewer.
    pub(super) fn lines_of(&self, patches: [usize; 2]) -> [usize; 2] {
        patches.map(|len| len.div_ceil(self.projector.regroup.sides(len)[0].max(1)))
    }

    /// The grids of an image whose crops have patches that are not seen, the whole image first: each as large as its vectors
    /// need.
    pub(super) fn partly_seen(&self, image: &Processed) -> Option<Vec<Grid>> {
        let (seen, tower) = (self.seen_patches(image)?, self.tower()?);
        let whole = tower.patches(image.tiles.first()?);
        let mut grids = vec![Grid::new(whole, None)];
        let side = self.projector.regroup.sides(whole[0])[0].max(1);
        let of_crop = |crop: usize, axis: usize| seen[axis].saturating_sub(crop * whole[axis]).min(whole[axis]);
        for (row, column) in (0..image.grid.0).flat_map(|row| (0..image.grid.1).map(move |column| (row, column))) {
            let own = [of_crop(row, 0), of_crop(column, 1)];
            grids.push(Grid::partly_seen(own.map(|len| len.next_multiple_of(side)), own));
        }
        Some(grids)
    }
}
