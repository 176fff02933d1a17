//! The images and sounds of a prompt: which of its tokens they stand for, and where these lie.

use std::{borrow::Cow, sync::Arc};

use super::{Encoders, ItemLayout, MediaConfig, PromptItem};
use crate::EngineError;

/// Ids from here on are no tokens of any vocabulary: they stand for rows of images and sounds, so that the prefix cache tells
/// them apart.
pub(crate) const FIRST_ROW_ID: u32 = 1 << 31;

/// An image, or a chunk of a sound, and its places in a prompt.
#[derive(Clone, Debug)]
pub(crate) struct PlacedItem {
    pub(crate) item: Arc<PromptItem>,
    /// Positions of its vectors, ascending, `[num_rows]`.
    pub(crate) positions: Vec<u32>,
}

/// The images of a prompt and the chunks of its sounds, in their order.
#[derive(Clone, Debug, Default)]
pub(crate) struct PromptItems {
    pub(crate) items: Vec<PlacedItem>,
    /// By position up to the end of the last item, time, row and column; empty where positions are all there is.
    coordinates: Vec<[u32; 3]>,
    /// Added to a position behind these to give its coordinates.
    shift: i64,
    /// Positions of the tiles whose rows see each other, in order: first and end.
    pub(crate) spans: Vec<(u32, u32)>,
}

impl PromptItems {
    /// Places items in a prompt of these tokens, in which their rows stand in order.
    ///
    /// # Errors
    /// [`EngineError::InvalidArgument`] where the prompt has not as many of their tokens as the items have rows.
    pub(crate) fn place(
        configs: &Encoders<MediaConfig>,
        has_axes: bool,
        items: &[Arc<PromptItem>],
        token_ids: &[u32],
    ) -> Result<Self, EngineError> {
        let mut placed = Vec::with_capacity(items.len());
        let mut spans = Vec::new();
        for config in configs.iter() {
            let kind = config.kind();
            let of_kind = || items.iter().filter(move |item| item.kind == kind);
            let mut places = positions_of(config.token_id, token_ids);
            let num_rows: usize = of_kind().map(|item| item.layout.num_rows).sum();
            let num_places = positions_of(config.token_id, token_ids).count();
            if num_places != num_rows {
                return Err(EngineError::InvalidArgument(format!(
                    "the prompt has {num_places} tokens of {}, which have {num_rows} vectors: the chat template must write one place \
                     for each",
                    kind.plural()
                )));
            }
            for item in of_kind() {
                let positions: Vec<_> = places.by_ref().take(item.layout.num_rows).collect();
                if config.sees_spans {
                    spans.extend(runs(&positions));
                }
                placed.push(PlacedItem { item: Arc::clone(item), positions });
            }
        }
        placed.sort_by_key(|placed| placed.positions.first().copied());
        let (mut coordinates, mut shift) = (Vec::new(), 0);
        if has_axes {
            shift = add_coordinates(&placed, &mut coordinates);
        }
        Ok(Self { items: placed, coordinates, shift, spans })
    }

    /// The prompt's ids with those of the items' rows in their places.
    pub(crate) fn with_row_ids(&self, token_ids: &[u32]) -> Vec<u32> {
        let mut ids = token_ids.to_vec();
        for placed in &self.items {
            // A stream of bits that the key seeds: equal rows of equal items have equal ids, and 31 bits of each row together
            // are enough that others have not.
            let mut stream = blake3::Hasher::new_keyed(placed.item.key.as_bytes()).finalize_xof();
            for position in &placed.positions {
                let mut bytes = [0; 4];
                stream.fill(&mut bytes);
                if let Some(id) = ids.get_mut(*position as usize) {
                    *id = FIRST_ROW_ID | u32::from_le_bytes(bytes);
                }
            }
        }
        ids
    }

    /// Whether positions are not all that a token has, somewhere from `position` on within the items.
    pub(crate) fn has_coordinates_from(&self, position: usize) -> bool {
        position < self.coordinates.len()
    }

    /// Time, row and column of a position.
    pub(crate) fn coordinates(&self, position: usize) -> [u32; 3] {
        self.coordinates.get(position).copied().unwrap_or_else(|| [self.shifted(position); 3])
    }

    /// The coordinate of a position behind all items.
    pub(crate) fn shifted(&self, position: usize) -> u32 {
        u32::try_from(position as i64 + self.shift).unwrap_or(0)
    }

    /// One more than the last position that a row sees.
    pub(crate) fn end_of_span(&self, position: u32) -> u32 {
        let at = self.spans.partition_point(|(_, end)| *end <= position);
        self.spans.get(at).filter(|(first, _)| *first <= position).map_or(position + 1, |(_, end)| *end)
    }

    /// The items with rows among these positions.
    pub(crate) fn touched(&self, first: u32, end: u32) -> impl Iterator<Item = &PlacedItem> {
        self.items.iter().filter(move |placed| {
            let from = placed.positions.partition_point(|position| *position < first);
            placed.positions.get(from).is_some_and(|position| *position < end)
        })
    }
}

/// Where a token stands.
fn positions_of(token_id: u32, token_ids: &[u32]) -> impl Iterator<Item = u32> {
    token_ids.iter().enumerate().filter(move |(_, id)| **id == token_id).map(|(at, _)| at as u32)
}

/// Where ascending positions follow each other without a gap: first and end of each run.
fn runs(positions: &[u32]) -> impl Iterator<Item = (u32, u32)> {
    positions.chunk_by(|a, b| a + 1 == *b).filter_map(|run| run.first().zip(run.last()).map(|(first, last)| (*first, last + 1)))
}

/// Token ids with those of rows in the places of images and sounds, if there are any.
pub(crate) fn with_row_ids<'a>(items: Option<&PromptItems>, token_ids: &'a [u32]) -> Cow<'a, [u32]> {
    items.map_or(Cow::Borrowed(token_ids), |items| Cow::Owned(items.with_row_ids(token_ids)))
}

/// As Qwen2-VL counts: text goes on behind the largest coordinate of what is before it, and so does an image, with its rows and
/// columns from there. Returns what is added to positions behind the last image.
fn add_coordinates(items: &[PlacedItem], coordinates: &mut Vec<[u32; 3]>) -> i64 {
    let mut next = 0;
    for PlacedItem { item, positions } in items {
        let Some(first) = positions.first() else { continue };
        while coordinates.len() < *first as usize {
            coordinates.push([next; 3]);
            next += 1;
        }
        let ItemLayout { of_tile: [height, width], .. } = item.layout;
        for row in 0..positions.len() {
            let (y, x) = (row / width.max(1), row % width.max(1));
            coordinates.push([next, next + y as u32, next + x as u32]);
        }
        next += height.max(width) as u32;
    }
    i64::from(next) - coordinates.len() as i64
}
