//! The images, sounds and videos of a request, fetched beside the server's thread.

use std::{sync::Arc, time::Instant};

use engine::{
    GenerationRequest, Media as Given, MediaKind, Message, Prompt,
    audio::{self, Sound, SoundError},
    images, video,
};
use openai::{
    ApiError,
    media::{self, Named},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    StartError,
    app::App,
    config::ServerConfig,
    errors::internal,
    media::{Media, MediaError},
    models::Model,
};

/// Requests whose images, sounds and videos are fetched and decoded at once; others wait.
pub const MAX_AT_ONCE: usize = 2;

/// The right to fetch and decode.
pub type Turn = OwnedSemaphorePermit;

/// How a server gets at images, sounds and videos.
pub struct Seeing {
    media: Arc<Media>,
    turns: Arc<Semaphore>,
}

impl Seeing {
    pub(crate) fn new(config: &ServerConfig) -> Result<Self, StartError> {
        let root = config.allowed_local_media_path.as_deref();
        let media = Media::of_clients(root, &config.allowed_media_domains).map_err(|error| StartError(error.0))?;
        Ok(Self { media: Arc::new(media), turns: Arc::new(Semaphore::new(MAX_AT_ONCE)) })
    }

    /// One of the turns, of which there are [`MAX_AT_ONCE`].
    async fn turn(&self) -> Result<Turn, ApiError> {
        let turn = Arc::clone(&self.turns).acquire_owned().await;
        turn.map_err(|_| internal("the server no longer fetches images, sounds and videos".into()))
    }

    /// Runs `work`, which fetches or decodes, beside the server's thread, once fewer than [`MAX_AT_ONCE`] do.
    pub async fn decode<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let turn = self.turn().await?;
        decode_in(turn, work).await.map(|(done, _)| done)
    }
}

/// The same in a turn, which is given back behind it.
async fn decode_in<T: Send + 'static>(
    turn: Turn,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, Turn), ApiError> {
    // The turn is the work's: it goes on when the client has gone.
    let done = tokio::task::spawn_blocking(move || work().map(|done| (done, turn))).await;
    done.map_err(|panic| internal(format!("a defect ended the request: {panic}")))?
}

fn has_videos(messages: &[Message]) -> bool {
    messages.iter().any(|message| message.media.iter().any(|media| media.kind() == MediaKind::Video))
}

/// Puts the images, sounds and videos of requests in place. Where videos are among them, which are decoded as the requests are
/// submitted, the turn lasts until then.
pub async fn place_all(app: &App, model: &Model, requests: &mut [GenerationRequest]) -> Result<Option<Turn>, ApiError> {
    let mut turn = None;
    for request in requests {
        if let Prompt::Chat { messages, .. } = &mut request.prompt {
            (*messages, turn) = place_in(app, model, std::mem::take(messages), turn).await?;
        }
    }
    Ok(turn)
}

/// Puts the images, sounds and videos of messages in place, of which there may be as many as the model takes, as [`place_all`]
/// does. Together they may have as many pixels as one image may, as many seconds as one sound, and as many bytes as one video,
/// and all videos are fetched and looked at within the time of one.
pub async fn place(app: &App, model: &Model, messages: Vec<Message>) -> Result<(Vec<Message>, Option<Turn>), ApiError> {
    place_in(app, model, messages, None).await
}

/// The same where there may be a turn already.
async fn place_in(
    app: &App,
    model: &Model,
    mut messages: Vec<Message>,
    turn: Option<Turn>,
) -> Result<(Vec<Message>, Option<Turn>), ApiError> {
    if !media::are_pending(&messages) && (turn.is_some() || !has_videos(&messages)) {
        return Ok((messages, turn));
    }
    let was_there = turn.is_some();
    let turn = match turn {
        Some(turn) => turn,
        None => app.seeing.turn().await?,
    };
    let (web, max_images) = (Arc::clone(&app.seeing.media), model.config.max_num_images);
    let (messages, turn) = decode_in(turn, move || {
        let (mut of_images, mut of_sounds) = (images::Limits::default(), audio::Limits::default());
        let mut of_videos = video::Limits::default();
        let mut num_given: usize = messages.iter().map(|message| message.media.len()).sum();
        media::place(&mut messages, |Named { kind, url, fps }| {
            num_given += 1;
            if num_given > max_images {
                return Err(format!(
                    "a request may have {max_images} images, sounds and videos; the server's --max-num-images allows more"
                ));
            }
            match kind {
                MediaKind::Image => {
                    let image = web.image(url, &of_images).map_err(|error| error.0)?;
                    of_images.max_pixels -= u64::from(image.width()) * u64::from(image.height());
                    Ok(Given::Image(Arc::new(image)))
                }
                MediaKind::Sound => {
                    let bytes = web.bytes(url, kind, of_sounds.max_bytes).map_err(|error| error.0)?;
                    let sound = hear(&bytes, &mut of_sounds).map_err(|error| error.to_string())?;
                    Ok(Given::Sound(Arc::new(sound)))
                }
                MediaKind::Video => {
                    let begun = Instant::now();
                    let video = web.video(url, fps, &of_videos).map_err(|error| error.0)?;
                    of_videos.max_time = of_videos.max_time.saturating_sub(begun.elapsed());
                    let pixels = video.given().map_or(0, |_| video.num_bytes() as u64 / 3);
                    of_videos.max_kept_pixels = of_videos.max_kept_pixels.saturating_sub(pixels);
                    of_videos.max_bytes = of_videos.max_bytes.saturating_sub(video.file().map_or(0, <[u8]>::len));
                    // To decode them there is as much time again.
                    Ok(Given::Video(Arc::new(video.with_time(video::Limits::default().max_time))))
                }
            }
        })?;
        Ok(messages)
    })
    .await?;
    let keeps = was_there || has_videos(&messages);
    Ok((messages, keeps.then_some(turn)))
}

/// The sound of a file, which counts against what the sounds of a request may still have.
fn hear(bytes: &[u8], left: &mut audio::Limits) -> Result<Sound, MediaError> {
    let whole = audio::Limits::default();
    let sound = audio::decode(bytes, left).map_err(|error| match error {
        SoundError::TooLong { .. } | SoundError::TooManySamples { .. } if *left != whole => MediaError(format!(
            "the sounds of a request are too long: they may have {} seconds and {} samples together",
            whole.max_seconds, whole.max_samples
        )),
        error => MediaError(error.to_string()),
    })?;
    left.max_seconds = left.max_seconds.saturating_sub(sound.seconds().ceil() as u32);
    left.max_samples = left.max_samples.saturating_sub(sound.samples().len());
    Ok(sound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_nobody_waits_for_keeps_its_turn() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let seeing = Seeing::new(&ServerConfig::default()).unwrap();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        runtime.block_on(async {
            let work = seeing.decode(move || {
                let _ = ended.recv();
                Ok(())
            });
            assert!(tokio::time::timeout(std::time::Duration::from_millis(20), work).await.is_err());
            assert_eq!(seeing.turns.available_permits(), MAX_AT_ONCE - 1);
            drop(end);
            let turns = seeing.turns.acquire_many(MAX_AT_ONCE as u32);
            assert!(tokio::time::timeout(std::time::Duration::from_secs(60), turns).await.is_ok());
        });
    }

    #[test]
    fn a_turn_lasts_until_videos_are_submitted() {
        let source = engine::ModelSource::from_path(goldens::dir().join("text/llama")).unwrap();
        let size = engine::MemoryGpuConfig::ContextSize(64);
        let paged_attention = engine::PagedAttentionConfig { mem_gpu: Some(size), ..Default::default() };
        let config = engine::EngineConfig { paged_attention, ..Default::default() };
        let engine = engine::Engine::load(&source, &config, &|_| {}).unwrap();
        let app = App::new(vec![Arc::new(engine)], ServerConfig::default()).unwrap();
        let kinds = vec![MediaKind::Image, MediaKind::Video];
        let context = openai::ModelContext { media: kinds, ..openai::ModelContext::default() };
        let pixel = "R0lGODlhAQABAIAAAAUEBAAAACwAAAAAAQABAAACAkQBADs=";
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for (part, lasts) in [("image", false), ("video", true)] {
            let kind = if part == "image" { "image/gif" } else { "video/jpeg" };
            let url = serde_json::json!({ "url": format!("data:{kind};base64,{pixel}") });
            let part = serde_json::json!({ "type": format!("{part}_url"), format!("{part}_url"): url });
            let message = serde_json::json!({ "role": "user", "content": [part] });
            let messages = openai::messages::parse(vec![message], &context).unwrap();
            let (placed, turn) = runtime.block_on(place(&app, app.models.default(), messages)).unwrap();
            assert_eq!((placed[0].media.len(), turn.is_some()), (1, lasts));
            assert_eq!(app.seeing.turns.available_permits(), MAX_AT_ONCE - usize::from(lasts));
            // What is in place already takes a turn for what is left to decode.
            let (_, again) = runtime.block_on(place(&app, app.models.default(), placed)).unwrap();
            assert_eq!(again.is_some(), lasts);
            drop((turn, again));
            assert_eq!(app.seeing.turns.available_permits(), MAX_AT_ONCE);
        }
    }

    #[test]
    fn sounds_have_so_many_seconds_together() {
        let file = [
            b"RIFF\x2c\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0",
            &1000_u32.to_le_bytes()[..],
            &2000_u32.to_le_bytes()[..],
            b"\x02\0\x10\0data\x08\0\0\0",
            &[1; 8],
        ]
        .concat();
        let whole = audio::Limits::default();
        let mut left = whole;
        assert_eq!(hear(&file, &mut left).unwrap().samples().len(), 4);
        assert_eq!((left.max_seconds, left.max_samples), (whole.max_seconds - 1, whole.max_samples - 4));
        for mut left in [audio::Limits { max_seconds: 0, ..whole }, audio::Limits { max_samples: 3, ..whole }] {
            let error = hear(&file, &mut left).unwrap_err().0;
            assert!(error.contains("2400 seconds and 115200000 samples together"), "{error}");
        }
    }
}
