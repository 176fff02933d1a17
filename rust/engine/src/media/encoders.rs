//! What a model has one of for images, or for sounds, or one of each.

use device::Backend;

use super::{
    MediaConfig, MediaEncoder,
    arch::{PHI4, QWEN2_AUDIO, QWEN2_AUDIO_TEMPLATE, VOXTRAL},
};
use crate::{EngineError, MediaKind, model::decoder::VectorRows};

/// One for images, one for sounds, or both.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Encoders<T> {
    images: Option<T>,
    sounds: Option<T>,
}

impl<T> Default for Encoders<T> {
    fn default() -> Self {
        Self { images: None, sounds: None }
    }
}

impl<T> Encoders<T> {
    /// With one more, or another, of this kind.
    #[must_use]
    pub(crate) fn with(mut self, kind: MediaKind, one: T) -> Self {
        *self.place(kind) = Some(one);
        self
    }

    fn place(&mut self, kind: MediaKind) -> &mut Option<T> {
        match kind {
            MediaKind::Image | MediaKind::Video => &mut self.images,
            MediaKind::Sound => &mut self.sounds,
        }
    }

    /// That of this kind; frames of videos are images to it.
    pub(crate) fn get(&self, kind: MediaKind) -> Option<&T> {
        match kind {
            MediaKind::Image | MediaKind::Video => self.images.as_ref(),
            MediaKind::Sound => self.sounds.as_ref(),
        }
    }

    /// The same, to be changed.
    pub(crate) fn get_mut(&mut self, kind: MediaKind) -> Option<&mut T> {
        self.place(kind).as_mut()
    }

    /// All of them, that of images first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.images.iter().chain(&self.sounds)
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// The same made of each.
    ///
    /// # Errors
    /// The first of `make`.
    pub(crate) fn try_map<U, E>(&self, mut make: impl FnMut(&T) -> Result<U, E>) -> Result<Encoders<U>, E> {
        Ok(Encoders {
            images: self.images.as_ref().map(&mut make).transpose()?,
            sounds: self.sounds.as_ref().map(&mut make).transpose()?,
        })
    }
}

impl Encoders<MediaConfig> {
    /// What they take.
    pub(crate) fn kinds(&self) -> Vec<MediaKind> {
        MediaKind::ALL.into_iter().filter(|kind| self.token_id(*kind).is_some()).collect()
    }

    /// The token that stands for images, sounds or videos in a prompt; `None` where these are not taken.
    pub(crate) fn token_id(&self, kind: MediaKind) -> Option<u32> {
        let config = self.get(kind)?;
        if kind == MediaKind::Video { config.video.as_ref().map(|video| video.token_id) } else { Some(config.token_id) }
    }

    /// All of these tokens.
    pub(crate) fn token_ids(&self) -> impl Iterator<Item = (MediaKind, u32)> {
        MediaKind::ALL.into_iter().filter_map(|kind| Some((kind, self.token_id(kind)?)))
    }
    /// What they take, in words.
    pub(crate) fn takes(&self) -> String {
        let kinds: Vec<_> = self.kinds().into_iter().map(MediaKind::plural).collect();
        match &kinds[..] {
            [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
            kinds => kinds.concat(),
        }
    }

    /// The chat template of a family whose files have one of texts, or none: it stands where theirs names no sounds.
    pub(crate) fn chat_template(&self) -> Option<&'static str> {
        self.get(MediaKind::Sound).filter(|config| config.architecture == QWEN2_AUDIO).map(|_| QWEN2_AUDIO_TEMPLATE)
    }

    /// Whether they are those of a Voxtral's GGUF files, which may have no template.
    pub(crate) fn are_voxtral_s(&self) -> bool {
        self.get(MediaKind::Sound).is_some_and(|config| config.architecture == VOXTRAL && config.has_own_file)
    }

    /// What stands behind an image in a prompt whose template knows texts alone.
    pub(crate) fn behind_image(&self) -> &'static str {
        if self.is_phi4() { "" } else { "\n" }
    }

    /// Whether they are of Phi-4-multimodal, whose adapters are chosen by what a request holds.
    pub(crate) fn is_phi4(&self) -> bool {
        self.iter().any(|config| config.architecture == PHI4)
    }

    /// The one whose rows see each other in the decoder, if there is one.
    pub(crate) fn with_spans(&self) -> Option<&MediaConfig> {
        self.iter().find(|config| config.sees_spans)
    }
}

impl Encoders<MediaEncoder> {
    /// The rows of a step whose tokens have vectors as images or sounds have them.
    pub(crate) fn hard_rows(&mut self, backend: &dyn Backend, token_ids: &[u32]) -> Result<Vec<VectorRows>, EngineError> {
        let mut all = Vec::new();
        for encoder in self.images.iter_mut().chain(&mut self.sounds) {
            all.extend(encoder.hard_rows(backend, token_ids)?);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_its_own() {
        let both = Encoders::default().with(MediaKind::Sound, 2).with(MediaKind::Image, 1);
        assert_eq!(both.iter().collect::<Vec<_>>(), [&1, &2]);
        assert_eq!(both.get(MediaKind::Sound), Some(&2));
        let one = Encoders::default().with(MediaKind::Sound, 3);
        assert_eq!((one.is_empty(), one.get(MediaKind::Image), one.get(MediaKind::Video)), (false, None, None));
        assert!(Encoders::<usize>::default().is_empty());
        assert_eq!(
            one.try_map(|value| if *value == 3 { Ok(value + 1) } else { Err(()) }).unwrap().get(MediaKind::Sound),
            Some(&4)
        );
    }
}
