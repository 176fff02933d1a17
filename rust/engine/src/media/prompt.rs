//! The images and sounds of a prompt: which of its tokens they stand for, and where these lie.

use std::{borrow::Cow, ops::Range, sync::Arc};

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
    /// Layers of the decoder look at the vectors, from the row of an image on. An item is then the images of rows that follow
    /// each other.
    pub(crate) are_crossed: bool,
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
        for (kind, token_id) in configs.token_ids() {
            let of_kind = || items.iter().filter(move |item| item.kind == kind);
            let mut places = positions_of(token_id, token_ids);
            let num_rows: usize = of_kind().map(|item| item.layout.num_rows).sum();
            let num_places = positions_of(token_id, token_ids).count();
            if num_places != num_rows {
                return Err(EngineError::InvalidArgument(format!(
                    "the prompt has {num_places} tokens of {}, which have {num_rows} vectors: the chat template must write one place \
                     for each",
                    kind.plural()
                )));
            }
            for item in of_kind() {
                let positions: Vec<_> = places.by_ref().take(item.layout.num_rows).collect();
                if configs.get(kind).is_some_and(|config| config.sees_spans) {
                    spans.extend(runs(&positions));
                }
                placed.push(PlacedItem { item: Arc::clone(item), positions });
            }
        }
        placed.sort_by_key(|placed| placed.positions.first().copied());
        let are_crossed = configs.iter().any(|config| config.is_crossed);
        let placed = if are_crossed { together(&placed) } else { placed };
        let (mut coordinates, mut shift) = (Vec::new(), 0);
        if has_axes {
            shift = add_coordinates(&placed, &mut coordinates);
        }
        Ok(Self { items: placed, coordinates, shift, spans, are_crossed })
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

    /// What a row of these positions sees, where layers look at images: of each item that some see, these positions in order, and
    /// how many of its vectors each sees. As Transformers' `get_cross_attention_token_mask`: a row sees the last image before it
    /// or of its own, and those whose rows come right before that image's.
    pub(crate) fn seen(&self, positions: Range<u32>) -> impl Iterator<Item = (&PlacedItem, Vec<(u32, u32)>)> {
        let firsts = |placed: &PlacedItem| placed.positions.first().copied().unwrap_or(u32::MAX);
        self.items.iter().enumerate().filter_map(move |(index, placed)| {
            let end = self.items.get(index + 1).map_or(u32::MAX, firsts);
            let own = positions.start.max(firsts(placed))..positions.end.min(end);
            let images = || placed.item.before.iter().chain([&placed.item]);
            let num_vectors = |position: u32| {
                let seen = images().zip(&placed.positions).take_while(|(_, at)| **at <= position);
                seen.map(|(image, _)| image.layout.num_vectors as u32).sum()
            };
            let rows: Vec<_> = own.map(|position| (position, num_vectors(position))).collect();
            (!rows.is_empty()).then_some((placed, rows))
        })
    }

    /// What the keys and values of rows from a position on depend on besides their tokens, and that position: of an image at
    /// which layers look there is but one row, whose id alone does not tell it from all others.
    pub(crate) fn salt(&self) -> Option<(Vec<u8>, usize)> {
        let first = self.items.first().filter(|_| self.are_crossed)?.positions.first()?;
        let mut hasher = blake3::Hasher::new();
        for placed in &self.items {
            hasher.update(placed.item.key.as_bytes());
        }
        Some((hasher.finalize().as_bytes().to_vec(), *first as usize))
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

/// Images whose rows follow each other without a gap, as one item.
fn together(items: &[PlacedItem]) -> Vec<PlacedItem> {
    let follow = |a: &PlacedItem, b: &PlacedItem| a.positions.last().map(|last| last + 1) == b.positions.first().copied();
    let join = |run: &[PlacedItem]| {
        let images: Vec<_> = run.iter().map(|placed| Arc::clone(&placed.item)).collect();
        let positions = run.iter().flat_map(|placed| placed.positions.iter().copied()).collect();
        PromptItem::together(&images).map(|item| PlacedItem { item, positions })
    };
    items.chunk_by(follow).filter_map(join).collect()
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
/// columns from there. Groups of a video's frames have one beginning, and differ in their time. Returns what is added to
/// positions behind the last image.
fn add_coordinates(items: &[PlacedItem], coordinates: &mut Vec<[u32; 3]>) -> i64 {
    let (mut next, mut start) = (0, 0);
    for PlacedItem { item, positions } in items {
        let Some(first) = positions.first() else { continue };
        while coordinates.len() < *first as usize {
            coordinates.push([next; 3]);
            next += 1;
        }
        let ItemLayout { of_tile: [height, width], .. } = item.layout;
        let time = item.moment.and_then(|moment| Some((moment.time?, moment.is_first)));
        if !matches!(time, Some((_, false))) {
            start = next;
        }
        let time = time.map_or(0, |(time, _)| time);
        for row in 0..positions.len() {
            let (y, x) = (row / width.max(1), row % width.max(1));
            coordinates.push([start + time, start + y as u32, start + x as u32]);
        }
        next = next.max(start + (height.max(width) as u32).max(time + 1));
    }
    i64::from(next) - coordinates.len() as i64
}

#[cfg(test)]
mod tests {
    use images::Processed;
    use paged::{EncoderContent, EncoderItem};

    use super::*;
    use crate::MediaKind;

    fn image(number: u8, num_vectors: usize) -> Arc<PromptItem> {
        let content = EncoderContent::Samples(&[number]);
        let item = EncoderItem { dimensions: &[1], mode: "", processor: &[], tower: &[], adapter: &[], content };
        let processed = Processed { tiles: Vec::new(), original: (1, 1), grid: (1, 1), whole: 0 };
        Arc::new(PromptItem {
            kind: MediaKind::Image,
            token_id: 0,
            processed,
            layout: ItemLayout::looked_at(num_vectors),
            key: item.key(&[0; 32]),
            before: Vec::new(),
            is_beside_images: false,
            moment: None,
        })
    }

    #[test]
    fn a_row_sees_the_last_image_and_those_right_before_it() {
        let placed = |number, num_vectors, position| PlacedItem { item: image(number, num_vectors), positions: vec![position] };
        let given = [placed(1, 10, 2), placed(2, 20, 5), placed(3, 40, 6)];
        let items = PromptItems { items: together(&given), are_crossed: true, ..PromptItems::default() };
        let seen = |positions| items.seen(positions).map(|(placed, rows)| (placed.item.num_vectors(), rows)).collect::<Vec<_>>();
        assert_eq!(
            seen(0..9),
            [(10, vec![(2, 10), (3, 10), (4, 10)]), (60, vec![(5, 20), (6, 60), (7, 60), (8, 60)])],
            "all of a prompt"
        );
        assert_eq!(seen(0..2), []);
        assert_eq!(seen(4..6), [(10, vec![(4, 10)]), (60, vec![(5, 20)])]);
        assert_eq!(seen(100..101), [(60, vec![(100, 60)])], "what is answered");
        let (salt, first) = items.salt().unwrap();
        assert_eq!(first, 2);
        let others = [placed(1, 10, 2), placed(2, 20, 5), placed(4, 40, 6)];
        assert_ne!(PromptItems { items: together(&others), ..items.clone() }.salt().unwrap().0, salt);
        assert_eq!(PromptItems { are_crossed: false, ..items }.salt(), None);
    }
}
