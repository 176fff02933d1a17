//! How many rows of a prompt an image or a sound takes, which they are, and what text stands for them.

use std::fmt::Write;

use images::{Processed, Tile};

use super::config::{Arrangement, MediaConfig, Placeholder, TowerConfig};
use crate::{MediaKind, Tokenizer};

/// What an image, or a chunk of a sound, becomes in a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ItemLayout {
    /// Rows of the prompt: one for each of its vectors, unless these stand in none.
    pub(crate) num_rows: usize,
    /// Vectors.
    pub(crate) num_vectors: usize,
    /// Vectors of each tile, the whole image among them.
    of_tiles: Vec<usize>,
    /// Rows and columns of vectors of a tile.
    pub(crate) of_tile: [usize; 2],
    /// Rows and columns of tiles beside the whole image; zeros where it is not cut.
    tiles: [usize; 2],
    /// Where the vectors of the tiles without their padding lie, rows and columns of all tiles together.
    unpadded: [std::ops::Range<usize>; 2],
}

impl ItemLayout {
    pub(crate) fn new(config: &MediaConfig, image: &Processed) -> Self {
        let Some(tile) = image.tiles.first() else {
            return Self {
                num_rows: 0,
                num_vectors: 0,
                of_tiles: Vec::new(),
                of_tile: [0; 2],
                tiles: [0; 2],
                unpadded: [0..0, 0..0],
            };
        };
        let vectors = |tile: &Tile| {
            let [height, width] = config.vectored(image, tile);
            let [down, across] = config.projector.regroup.sides(height);
            [height / down.max(1), width / across.max(1)]
        };
        let of_tile = vectors(tile);
        let rows = |tile| config.resampler.map_or_else(|| vectors(tile).iter().product(), |resampler| resampler.num_latents);
        let of_tiles: Vec<_> = image.tiles.iter().map(rows).collect();
        let per_tile = of_tiles[0];
        let tiles = [image.grid.0, image.grid.1];
        let whole = [tiles[0] * of_tile[0], tiles[1] * of_tile[1]];
        let unpadded = match config.arrangement {
            Arrangement::Separated { .. } => {
                config.seen_patches(image).map_or(whole, |seen| config.lines_of(seen)).map(|len| 0..len)
            }
            _ => unpadded(whole, image.original),
        };
        let num_rows = match config.arrangement {
            Arrangement::Tiles => of_tiles.iter().sum(),
            Arrangement::Unpadded if image.tiles.len() == 1 => per_tile + 1,
            Arrangement::Unpadded => per_tile + unpadded[0].len() * (unpadded[1].len() + 1),
            Arrangement::Separated { .. } => {
                let lines = |[rows, columns]: [usize; 2]| rows * (columns + 1);
                lines(of_tile) + 1 + lines([unpadded[0].len(), unpadded[1].len()])
            }
        };
        let (num_rows, num_vectors) = if config.is_crossed {
            (1, image.tiles.len() * config.tower().map_or(0, TowerConfig::rows_of_tile))
        } else {
            let filled = config.hard.as_ref().and_then(|hard| hard.filled).filter(|_| num_rows > 0);
            let num_rows = filled.map_or(num_rows, |filled| filled.num_rows);
            (num_rows, num_rows)
        };
        Self { num_rows, num_vectors, of_tiles, of_tile, tiles, unpadded }
    }

    /// The vectors in their order in a prompt, of those of the tiles, `[tiles][rows, cols]`. `separators` are those of the
    /// encoder itself: the one behind rows, and perhaps the one between the parts.
    pub(crate) fn arrange(&self, config: &MediaConfig, tiles: &[Vec<f32>], separators: &[f32]) -> Vec<f32> {
        let [height, width] = self.of_tile;
        match config.arrangement {
            Arrangement::Tiles => tiles.concat(),
            Arrangement::Unpadded if tiles.len() == 1 => [&tiles[0], separators].concat(),
            Arrangement::Unpadded => {
                let mut rows = tiles[0].clone();
                rows.extend(self.lines(&tiles[1..], (self.tiles[1], width), self.unpadded.clone(), separators));
                rows
            }
            Arrangement::Separated { whole_last } => {
                let (newline, between) = separators.split_at(separators.len() / 2);
                let whole = self.lines(&tiles[..1], (1, width), [0..height, 0..width], newline);
                // Of the last column of tiles there may be a part.
                let last = self.unpadded[1].end - (self.tiles[1] - 1) * width;
                let cut = self.lines(&tiles[1..], (self.tiles[1], last), self.unpadded.clone(), newline);
                if whole_last { [&cut, between, &whole].concat() } else { [&whole, between, &cut].concat() }
            }
        }
    }

    /// Vectors of tiles that lie side by side in so many columns, of which the last is so wide, line by line, each with `newline`
    /// behind it.
    fn lines(
        &self,
        tiles: &[Vec<f32>],
        (columns, last): (usize, usize),
        [ys, xs]: [std::ops::Range<usize>; 2],
        newline: &[f32],
    ) -> Vec<f32> {
        let ([height, width], cols) = (self.of_tile, newline.len());
        let mut rows = Vec::new();
        for y in ys {
            for x in xs.clone() {
                let column = x / width;
                let (tile, across) = (&tiles[y / height * columns + column], if column + 1 == columns { last } else { width });
                let row = y % height * across + x % width;
                rows.extend_from_slice(&tile[row * cols..(row + 1) * cols]);
            }
            rows.extend_from_slice(newline);
        }
        rows
    }
}

#[cfg(test)]
impl ItemLayout {
    /// Of an image of so many vectors, at which layers look from one row on.
    pub(crate) fn looked_at(num_vectors: usize) -> Self {
        Self { num_rows: 1, num_vectors, of_tiles: Vec::new(), of_tile: [0; 2], tiles: [0; 2], unpadded: [0..0, 0..0] }
    }
}

impl ItemLayout {
    /// The text of LFM2-VL, by the token of a vector.
    fn cells(&self, token: &str) -> String {
        let [rows, columns] = self.tiles;
        let mut text = String::from("<|image_start|>");
        for (at, num_rows) in self.of_tiles.iter().enumerate() {
            if at < rows * columns {
                let _ = write!(text, "<|img_row_{}_col_{}|>", at / columns + 1, at % columns + 1);
            } else if rows > 0 {
                text.push_str("<|img_thumbnail|>");
            }
            text.push_str(&token.repeat(*num_rows));
        }
        text + "<|image_end|>"
    }

    /// The same of Aya Vision.
    fn numbered(&self, token: &str) -> String {
        let mut text = String::from("<|START_OF_IMG|>");
        for (at, num_rows) in self.of_tiles.iter().enumerate() {
            let _ = if at + 1 < self.of_tiles.len() { write!(text, "TILE_{}", at + 1) } else { write!(text, "TILE_GLOBAL") };
            text.push_str(&token.repeat(*num_rows));
        }
        text + "<|END_OF_IMG|>"
    }

    /// The same of Llama 4.
    fn canvas(&self, token: &str) -> String {
        let tile = token.repeat(self.of_tiles[0]);
        let [rows, columns] = self.tiles;
        let row = format!("{}<|tile_y_separator|>", vec![&tile[..]; columns].join("<|tile_x_separator|>"));
        format!("<|image_start|>{}{WHOLE}{tile}<|image_end|>", row.repeat(rows))
    }
}

/// Tokens between two others, with empty lines around these.
fn apart(tokenizer: &Tokenizer, ids: [u32; 2], tokens: &str) -> String {
    let [before, after] = ids.map(|id| tokenizer.token_text(id));
    format!("\n\n{before}{tokens}{after}\n\n")
}

/// Which rows and columns of a picture of `[height, width]` are not padding, of an image of such a size that was made to fit it.
/// As the models were trained: the padding before and behind is equal, rounded down.
fn unpadded([height, width]: [usize; 2], original: (usize, usize)) -> [std::ops::Range<usize>; 2] {
    if height == 0 || width == 0 || original.0 == 0 || original.1 == 0 {
        return [0..0, 0..0];
    }
    let (original_height, original_width) = (original.0 as f64, original.1 as f64);
    let inner = |len: usize, scaled: f64| {
        // To seven digits, then down.
        let scaled = ((scaled * 1e7).round() / 1e7) as usize;
        let padding = len.saturating_sub(scaled) / 2;
        padding..len - padding
    };
    if original_width / original_height > width as f64 / height as f64 {
        [inner(height, original_height * (width as f64 / original_width)), 0..width]
    } else {
        [0..height, inner(width, original_width * (height as f64 / original_height))]
    }
}

/// Stands before and behind images, and tiles of them, of Idefics.
const AROUND: &str = "<fake_token_around_image>";

/// What a chat template writes for an image of Llama 4, and its prompt before the whole image.
const WHOLE: &str = "<|image|>";

impl MediaConfig {
    /// A prompt with all its expansions, in which one of two fences, or fringes, that meet is left out.
    pub(crate) fn joined(&self, text: String) -> String {
        match self.placeholder {
            Placeholder::Fenced => text.replace(&AROUND.repeat(2), AROUND),
            Placeholder::Fringed { before, after } => {
                let text = text.replace(&before.repeat(2), before);
                if after.is_empty() { text } else { text.replace(&after.repeat(2), after) }
            }
            _ => text,
        }
    }

    /// The text that a chat template writes for an image or a sound, or for a video.
    pub(crate) fn replaced(&self, tokenizer: &Tokenizer, kind: MediaKind) -> String {
        match self.placeholder {
            _ if kind == MediaKind::Video => self.video.as_ref().map(|video| video.replaced(tokenizer)).unwrap_or_default(),
            Placeholder::Between { replaced, .. } => tokenizer.token_text(replaced),
            Placeholder::Canvas => WHOLE.to_owned(),
            Placeholder::Numbered => "<image>".to_owned(),
            _ => tokenizer.token_text(self.token_id),
        }
    }

    /// What comes in its place, of the chunks of a sound.
    pub(crate) fn expansion_of_chunks<'a>(&self, tokenizer: &Tokenizer, chunks: impl Iterator<Item = &'a ItemLayout>) -> String {
        let tokens = tokenizer.token_text(self.token_id).repeat(chunks.map(|chunk| chunk.num_rows).sum());
        match self.placeholder {
            Placeholder::Fringed { before, after } => [before, &tokens, after].concat(),
            Placeholder::Enclosed { before, after } => {
                [tokenizer.token_text(before), tokens, tokenizer.token_text(after)].concat()
            }
            Placeholder::Apart { before, after } => apart(tokenizer, [before, after], &tokens),
            _ => tokens,
        }
    }

    /// What comes in its place, of an image.
    pub(crate) fn expansion(&self, tokenizer: &Tokenizer, image: &ItemLayout) -> String {
        let token = tokenizer.token_text(self.token_id);
        let [rows, cols] = image.of_tile;
        match &self.placeholder {
            Placeholder::Fenced => {
                let tiles: Vec<_> = image.of_tiles.iter().map(|rows| token.repeat(*rows)).collect();
                format!("{AROUND}{}{AROUND}", tiles.join(AROUND))
            }
            Placeholder::Repeated | Placeholder::Fringed { .. } => token.repeat(image.num_rows),
            Placeholder::Enclosed { before, after } => {
                let [before, after] = [*before, *after].map(|id| tokenizer.token_text(id));
                format!("{before}{}{after}", token.repeat(image.num_rows))
            }
            Placeholder::Apart { before, after } => apart(tokenizer, [*before, *after], &token.repeat(image.num_rows)),
            Placeholder::Between { before, after, .. } => {
                let tile = format!("{before}{}{after}", token.repeat(image.of_tiles[0]));
                let num_tiles = image.of_tiles.len();
                if num_tiles < 2 {
                    return tile;
                }
                // As Gemma 3 was trained, whose crops stand behind the whole image.
                let crops = vec![&tile[..]; num_tiles - 1].join(" ");
                format!("Here is the original image {tile} and here are some crops to help you see better {crops}")
            }
            Placeholder::Cells => image.cells(&token),
            Placeholder::Numbered => image.numbered(&token),
            Placeholder::Wrapped { before, behind_tile, after } => {
                let tiles = image.of_tiles.iter().map(|rows| token.repeat(*rows) + behind_tile);
                format!("{before}{}{after}", tiles.collect::<String>())
            }
            Placeholder::Canvas => image.canvas(&token),
            Placeholder::Rows => {
                let row = token.repeat(cols);
                format!("{}[IMG_END]", vec![row; rows].join("[IMG_BREAK]"))
            }
            Placeholder::Tiles => {
                let tile = token.repeat(rows * cols);
                let mut text = String::new();
                for row in 1..=image.tiles[0] {
                    for col in 1..=image.tiles[1] {
                        let _ = write!(text, "{AROUND}<row_{row}_col_{col}>{tile}");
                    }
                    text.push('\n');
                }
                if image.tiles != [0; 2] {
                    text.push('\n');
                }
                let _ = write!(text, "{AROUND}<global-img>{tile}{AROUND}");
                text
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_is_cut_where_the_image_was_made_to_fit() {
        // 100 by 50 pixels in a square of 48 by 48 patches.
        assert_eq!(unpadded([48, 48], (50, 100)), [12..36, 0..48]);
        assert_eq!(unpadded([48, 48], (100, 50)), [0..48, 12..36]);
        assert_eq!(unpadded([48, 24], (640, 320)), [0..48, 0..24]);
        // Of three rows of padding one is before and none more than that behind.
        assert_eq!(unpadded([24, 24], (21, 24)), [1..23, 0..24]);
    }
}
