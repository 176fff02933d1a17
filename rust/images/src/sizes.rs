//! Sizes that images are brought to, `(height, width)` in pixels, in the arithmetic of Transformers 5.23: quotients are doubles,
//! and what is cut or rounded there is cut or rounded here.

use crate::Canvas;

/// The short edge becomes `edge`.
pub(crate) fn shortest_edge((height, width): (usize, usize), edge: usize) -> (usize, usize) {
    let long = |short: usize, long: usize| ((edge * long) as f64 / short as f64) as usize;
    if width <= height { (long(width, height), edge) } else { (edge, long(height, width)) }
}

/// The long edge becomes `edge`, the other one follows, perhaps to 0.
fn longest_edge((height, width): (usize, usize), edge: usize) -> (usize, usize) {
    let ratio = width as f64 / height as f64;
    if width >= height { ((edge as f64 / ratio) as usize, edge) } else { (edge, (edge as f64 * ratio) as usize) }
}

/// A long edge above `edge` becomes `edge`, and the other one is at least 1.
pub(crate) fn at_most((height, width): (usize, usize), edge: usize) -> (usize, usize) {
    let (height, width) = if height.max(width) > edge { longest_edge((height, width), edge) } else { (height, width) };
    (height.max(1), width.max(1))
}

/// Idefics2's `get_resize_output_image_size`.
pub(crate) fn idefics2(size: (usize, usize), shortest: usize, longest: usize) -> (usize, usize) {
    let (height, width) = at_most(size, longest);
    (height.max(shortest), width.max(shortest))
}

/// Idefics3's `get_resize_output_image_size`: the long edge becomes `longest`, the other one even, and none is above 4096.
pub(crate) fn idefics3(size: (usize, usize), longest: usize) -> (usize, usize) {
    const MAX_EDGE: usize = 4096;
    let (mut height, mut width) = longest_edge(size, longest);
    if size.1 >= size.0 {
        height += height % 2;
    } else {
        width += width % 2;
    }
    at_most((height.max(1), width.max(1)), MAX_EDGE)
}

/// Idefics3's `resize_for_vision_encoder`: both edges become multiples of a tile's.
pub(crate) fn idefics3_multiples((height, width): (usize, usize), tile: usize) -> (usize, usize) {
    let up = |edge: usize| edge.div_ceil(tile) * tile;
    let ratio = width as f64 / height as f64;
    if width >= height {
        let width = up(width);
        (up((width as f64 / ratio) as usize), width)
    } else {
        let height = up(height);
        (height, up((height as f64 * ratio) as usize))
    }
}

/// Qwen2-VL's `smart_resize`: multiples of `factor`, and a number of pixels between two limits. Halves are rounded to even
/// multiples.
pub(crate) fn qwen2_vl((height, width): (usize, usize), factor: usize, min_pixels: usize, max_pixels: usize) -> (usize, usize) {
    let unit = factor as f64;
    let round = |edge: usize| (edge as f64 / unit).round_ties_even() as usize * factor;
    let pixels = (height * width) as f64;
    let rounded = (round(height), round(width));
    if rounded.0 * rounded.1 > max_pixels {
        let beta = (pixels / max_pixels as f64).sqrt();
        let down = |edge: usize| ((edge as f64 / beta / unit).floor() as usize * factor).max(factor);
        (down(height), down(width))
    } else if rounded.0 * rounded.1 < min_pixels {
        let beta = (min_pixels as f64 / pixels).sqrt();
        let up = |edge: usize| (edge as f64 * beta / unit).ceil() as usize * factor;
        (up(height), up(width))
    } else {
        rounded
    }
}

/// GLM-4.1V's `smart_resize`, and that of Qwen3-VL's videos: as Qwen2-VL's over all pixels of so many frames, of which a patch
/// has so many. An image of which an edge is less than `factor` is first made larger. `None` where an edge is more than 200 times
/// the other.
pub(crate) fn glm4v(
    (height, width): (usize, usize),
    factor: usize,
    (frames, of_patch): (usize, usize),
    (min_pixels, max_pixels): (usize, usize),
) -> Option<(usize, usize)> {
    let (mut height, mut width) = (height, width);
    if height < factor || width < factor {
        let scale = (factor as f64 / height as f64).max(factor as f64 / width as f64);
        (height, width) = ((height as f64 * scale) as usize, (width as f64 * scale) as usize);
    }
    if height.max(width) as f64 / height.min(width) as f64 > 200.0 {
        return None;
    }
    let unit = factor as f64;
    let round = |edge: usize| (edge as f64 / unit).round_ties_even() as usize * factor;
    let (rounded, pixels) = ((round(height), round(width)), (frames * height * width) as f64);
    let number = (frames as f64 / of_patch as f64).round_ties_even() as usize * of_patch * rounded.0 * rounded.1;
    Some(if number > max_pixels {
        let beta = (pixels / max_pixels as f64).sqrt();
        let down = |edge: usize| ((edge as f64 / beta / unit).floor() as usize * factor).max(factor);
        (down(height), down(width))
    } else if number < min_pixels {
        let beta = (min_pixels as f64 / pixels).sqrt();
        let up = |edge: usize| (edge as f64 * beta / unit).ceil() as usize * factor;
        (up(height), up(width))
    } else {
        rounded
    })
}

/// LFM2-VL's `smart_resize`: as Qwen2-VL's, but no edge is less than `factor`.
pub(crate) fn lfm2_vl(size: (usize, usize), factor: usize, min_pixels: usize, max_pixels: usize) -> (usize, usize) {
    let unit = factor as f64;
    let round = |edge: usize| ((edge as f64 / unit).round_ties_even() as usize * factor).max(factor);
    let rounded = (round(size.0), round(size.1));
    if (min_pixels..=max_pixels).contains(&(rounded.0 * rounded.1)) {
        return rounded;
    }
    let (pixels, too_many) = ((size.0 * size.1) as f64, rounded.0 * rounded.1 > max_pixels);
    let scaled = |edge: usize| {
        if too_many {
            ((edge as f64 / (pixels / max_pixels as f64).sqrt() / unit).floor() as usize * factor).max(factor)
        } else {
            (edge as f64 * (min_pixels as f64 / pixels).sqrt() / unit).ceil() as usize * factor
        }
    };
    (scaled(size.0), scaled(size.1))
}

/// By which LFM2-VL tells whether an image is large: the pixels of whole groups of patches, or of a patch where there is none.
pub(crate) fn lfm2_vl_pixels((height, width): (usize, usize), factor: usize, patch: usize) -> usize {
    let round = |edge: usize| ((edge as f64 / factor as f64).round_ties_even() as usize * factor).max(patch);
    round(height) * round(width)
}

/// Grids of so many tiles at least and at most, `(rows, columns)`: those of fewer tiles first, of these those of fewer columns.
fn grids(least: usize, most: usize) -> Vec<(usize, usize)> {
    let mut grids: Vec<_> = (1..=most).flat_map(|columns| (1..=most / columns).map(move |rows| (rows, columns))).collect();
    grids.retain(|(rows, columns)| rows * columns >= least);
    grids.sort_by_key(|(rows, columns)| rows * columns);
    grids
}

/// The `get_optimal_tiled_canvas` of Command A Vision and of Llama 3.2 Vision: the grid on which the image becomes larger by the
/// least, or where it has to become smaller, by the least; of equal ones the smallest.
pub(crate) fn fullest_grid((height, width): (usize, usize), most: usize, tile: usize) -> (usize, usize) {
    let grids = grids(1, most);
    let scale =
        |&(rows, columns): &(usize, usize)| ((columns * tile) as f64 / width as f64).min((rows * tile) as f64 / height as f64);
    let larger = grids.iter().filter(|grid| scale(grid) >= 1.0).min_by(|a, b| scale(a).total_cmp(&scale(b)));
    let smaller = || grids.iter().rev().max_by(|a, b| scale(a).total_cmp(&scale(b)));
    larger.or_else(smaller).copied().unwrap_or((1, 1))
}

/// The `find_closest_aspect_ratio` of LFM2-VL, and InternVL's `get_optimal_tiled_canvas`, for tiles of so many pixels: rows and
/// columns of tiles whose shape is nearest to the image's; of grids of one shape the larger one, if the image has more than half
/// of its pixels.
pub(crate) fn nearest_grid((height, width): (usize, usize), (least, most): (usize, usize), pixels: usize) -> (usize, usize) {
    let ratio = width as f64 / height as f64;
    let grids = grids(least, most);
    let (mut nearest, mut best) = (f64::INFINITY, (1, 1));
    for (rows, columns) in grids {
        let distance = (ratio - columns as f64 / rows as f64).abs();
        let is_filled = (height * width) as f64 > 0.5 * (pixels * rows * columns) as f64;
        if distance < nearest || (distance == nearest && is_filled) {
            (nearest, best) = (distance, (rows, columns));
        }
    }
    best
}

/// Gemma 4's `get_aspect_ratio_preserving_size`: the most groups of `side` by `side` patches that make up to so many tokens, a
/// token each. `None` for an image so narrow that nothing is left, or too much.
pub(crate) fn gemma4((height, width): (usize, usize), patch: usize, side: usize, max_tokens: usize) -> Option<(usize, usize)> {
    let unit = side * patch;
    let most = (max_tokens * side * side * patch * patch) as f64;
    let factor = (most / (height * width) as f64).sqrt();
    let down = |edge: usize| (factor * edge as f64 / unit as f64).floor() as usize * unit;
    let long = |long: usize, short: usize| ((long as f64 / short as f64).floor() as usize * unit).min(max_tokens * unit);
    let size = match (down(height), down(width)) {
        (0, 0) => return None,
        (0, _) => (unit, long(width, height)),
        (_, 0) => (long(height, width), unit),
        size => size,
    };
    ((size.0 * size.1) as f64 <= most).then_some(size)
}

/// The grids of tiles that Llama 4 knows, `(rows, columns)`: those of the most tiles first, behind each the others of its shape.
fn llama4_grids(max_tiles: usize) -> Vec<(usize, usize)> {
    let mut shapes: Vec<Vec<(usize, usize)>> = Vec::new();
    for count in (1..=max_tiles).rev() {
        for rows in (1..=count).filter(|rows| count % rows == 0) {
            let columns = count / rows;
            match shapes.iter_mut().find(|shape| shape[0].0 * columns == rows * shape[0].1) {
                Some(shape) => shape.push((rows, columns)),
                None => shapes.push(vec![(rows, columns)]),
            }
        }
    }
    shapes.concat()
}

/// Llama 4's `get_best_fit`: rows and columns of the canvas on which the image becomes larger by the least, or by the most where
/// that is asked for; where it has to become smaller, by the least; of equal ones the smallest. In f32, as the model was trained.
pub(crate) fn llama4_canvas((height, width): (usize, usize), tile: usize, canvas: Canvas) -> (usize, usize) {
    let grids = llama4_grids(canvas.max_tiles);
    let scale = |&(rows, columns): &(usize, usize)| {
        let (down, across) = ((rows * tile) as f32 / height as f32, (columns * tile) as f32 / width as f32);
        down.min(across)
    };
    let larger = grids.iter().map(scale).filter(|scale| *scale >= 1.0);
    let chosen = if canvas.is_largest { larger.reduce(f32::max) } else { larger.reduce(f32::min) };
    let chosen = chosen.or_else(|| grids.iter().map(scale).reduce(f32::max));
    let fitting = grids.iter().filter(|grid| Some(scale(grid)) == chosen);
    fitting.min_by_key(|(rows, columns)| rows * columns).copied().unwrap_or((1, 1))
}

/// Llama 4's `get_max_res_without_distortion`: the size of the image on its canvas, on which it grows to a tile's edge at most,
/// unless the largest is asked for. Where the canvas limits it, quotients are of f32, and else of f64.
pub(crate) fn llama4_fit((height, width): (usize, usize), size: (usize, usize), tile: usize, canvas: Canvas) -> (usize, usize) {
    let bound = |edge: usize, of_canvas: usize| {
        let own = if canvas.is_largest { usize::MAX } else { edge.max(tile) };
        if of_canvas < own { (of_canvas, true) } else { (own, false) }
    };
    let ((to_height, high), (to_width, wide)) = (bound(height, size.0), bound(width, size.1));
    let scale = |to: usize, edge: usize, is_f32: bool| {
        if is_f32 { f64::from(to as f32 / edge as f32) } else { to as f64 / edge as f64 }
    };
    let (down, across) = (scale(to_height, height, high), scale(to_width, width, wide));
    let is_less = if high || wide { (across as f32) < down as f32 } else { across < down };
    let scaled = |edge: usize, scale: f64, is_f32: bool| {
        let scaled = if is_f32 { f64::from(edge as f32 * scale as f32) } else { edge as f64 * scale };
        scaled.floor() as usize
    };
    if is_less {
        (scaled(height, across, wide).min(to_height).max(1), to_width.max(1))
    } else {
        (to_height.max(1), scaled(width, down, high).min(to_width).max(1))
    }
}

/// Llama 3.2 Vision's `get_image_size_fit_to_canvas`: the size of the image on its canvas, on which it grows to a tile's edge at
/// most.
pub(crate) fn mllama_fit((height, width): (usize, usize), size: (usize, usize), tile: usize) -> (usize, usize) {
    let (to_height, to_width) = (height.clamp(tile, size.0), width.clamp(tile, size.1));
    let (down, across) = (to_height as f64 / height as f64, to_width as f64 / width as f64);
    let scaled = |edge: usize, scale: f64, most: usize| ((edge as f64 * scale).floor() as usize).max(1).min(most);
    if across < down { (scaled(height, across, to_height), to_width) } else { (to_height, scaled(width, down, to_width)) }
}

/// Pixtral's `get_resize_output_image_size`: within `bound`, then up to whole patches.
pub(crate) fn pixtral((height, width): (usize, usize), bound: (usize, usize), patch: usize) -> (usize, usize) {
    let ratio = (height as f64 / bound.0 as f64).max(width as f64 / bound.1 as f64);
    let fit = |edge: usize| if ratio > 1.0 { (edge as f64 / ratio).floor() as usize } else { edge };
    (fit(height).div_ceil(patch) * patch, fit(width).div_ceil(patch) * patch)
}

/// LLaVA-NeXT's `select_best_resolution`: the one that keeps most pixels of the image, and of these the smallest. `None` if there
/// is none.
pub(crate) fn best_resolution((height, width): (usize, usize), candidates: &[(usize, usize)]) -> Option<(usize, usize)> {
    let fitted = |&(to_height, to_width): &(usize, usize)| {
        let scale = (to_width as f64 / width as f64).min(to_height as f64 / height as f64);
        let (fit_width, fit_height) = ((width as f64 * scale) as usize, (height as f64 * scale) as usize);
        let effective = (fit_width * fit_height).min(width * height);
        (effective, (to_width * to_height).saturating_sub(effective))
    };
    let mut best = None;
    let (mut most, mut least) = (0, usize::MAX);
    for candidate in candidates {
        let (effective, wasted) = fitted(candidate);
        if effective > most || (effective == most && wasted < least) {
            (most, least, best) = (effective, wasted, Some(*candidate));
        }
    }
    best
}

/// LLaVA-NeXT's `get_patch_output_size`: the largest size of the image's aspect that fits.
pub(crate) fn fit((height, width): (usize, usize), (to_height, to_width): (usize, usize)) -> (usize, usize) {
    let (across, down) = (to_width as f64 / width as f64, to_height as f64 / height as f64);
    if across < down {
        (((height as f64 * across).ceil() as usize).min(to_height), to_width)
    } else {
        (to_height, ((width as f64 * down).ceil() as usize).min(to_width))
    }
}

/// Gemma 3's `pan_and_scan`: rows and columns of crops, or `None` where the image is not cut.
pub(crate) fn pan_and_scan(
    (height, width): (usize, usize),
    min_crop: usize,
    max_crops: usize,
    min_ratio: f64,
) -> Option<(usize, usize)> {
    let (long, short) = (height.max(width), height.min(width));
    let ratio = long as f64 / short as f64;
    if ratio < min_ratio {
        return None;
    }
    let crops = ((ratio + 0.5).floor() as usize).min(long / min_crop).max(2).min(max_crops);
    if crops == 0 || long.div_ceil(crops).min(short) < min_crop {
        return None;
    }
    Some(if width >= height { (1, crops) } else { (crops, 1) })
}

/// The HD transform of Phi-3-vision on a landscape image: `(height, width)` it is resized to, before its height is filled up to
/// whole tiles.
pub(crate) fn phi3_v((height, width): (usize, usize), num_crops: usize, tile: usize) -> (usize, usize) {
    let ratio = width as f64 / height as f64;
    let fits = |scale: usize| scale as f64 * (scale as f64 / ratio).ceil() <= num_crops as f64;
    let scale = (1..=num_crops).take_while(|&scale| fits(scale)).last().unwrap_or(0);
    let width = scale * tile;
    ((width as f64 / ratio) as usize, width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_rounded_to_even_multiples() {
        let size = |height| qwen2_vl((height, 280), 28, 1, 1 << 30);
        assert_eq!(size(28 * 2 + 14), (56, 280));
        assert_eq!(size(28 * 3 + 14), (112, 280));
    }

    #[test]
    fn of_resolutions_that_keep_as_much_the_smallest_is_taken() {
        let candidates = [(672, 672), (336, 672), (672, 336)];
        assert_eq!(best_resolution((300, 600), &candidates), Some((336, 672)));
        assert_eq!(best_resolution((600, 300), &candidates), Some((672, 336)));
        assert_eq!(best_resolution((600, 300), &[]), None);
    }

    #[test]
    fn phi3_takes_as_many_tiles_as_it_may() {
        assert_eq!(phi3_v((300, 600), 16, 336), (840, 1680));
        assert_eq!(phi3_v((336, 336), 4, 336), (672, 672));
    }
}
