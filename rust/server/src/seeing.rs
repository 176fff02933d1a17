//! The images and sounds of a request, fetched beside the server's thread.

use std::sync::Arc;

use engine::{GenerationRequest, Media as Given, MediaKind, Message, Prompt, audio, images};
use openai::{ApiError, media};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::{StartError, app::App, config::ServerConfig, errors::internal, media::Media};

/// Requests whose images and sounds are fetched and decoded at once; others wait.
pub const MAX_AT_ONCE: usize = 2;

/// How a server gets at images and sounds.
pub struct Seeing {
    media: Arc<Media>,
    max_images: usize,
    turns: Semaphore,
}

impl Seeing {
    pub(crate) fn new(config: &ServerConfig) -> Result<Self, StartError> {
        let root = config.allowed_local_media_path.as_deref();
        let media = Media::of_clients(root, &config.allowed_media_domains).map_err(|error| StartError(error.0))?;
        Ok(Self { media: Arc::new(media), max_images: config.max_num_images, turns: Semaphore::new(MAX_AT_ONCE) })
    }

    /// Waits until one more may fetch or decode, as long as what is returned lives.
    pub async fn turn(&self) -> Result<SemaphorePermit<'_>, ApiError> {
        self.turns.acquire().await.map_err(|_| internal("the server no longer fetches images and sounds".into()))
    }
}

/// Puts the images and sounds of requests in place.
pub async fn place_all(app: &App, requests: &mut [GenerationRequest]) -> Result<(), ApiError> {
    for request in requests {
        if let Prompt::Chat { messages, .. } = &mut request.prompt {
            *messages = place(app, std::mem::take(messages)).await?;
        }
    }
    Ok(())
}

/// Puts the images and sounds of messages in place, of which there may be so many. Together they may have as many pixels as one
/// image may, and as many seconds as one sound.
pub async fn place(app: &App, mut messages: Vec<Message>) -> Result<Vec<Message>, ApiError> {
    if !media::are_pending(&messages) {
        return Ok(messages);
    }
    let Seeing { media: web, max_images, .. } = &app.seeing;
    let (web, max_images) = (Arc::clone(web), *max_images);
    let _turn = app.seeing.turn().await?;
    let work = move || {
        let (mut of_images, mut of_sounds) = (images::Limits::default(), audio::Limits::default());
        let mut num_given: usize = messages.iter().map(|message| message.media.len()).sum();
        media::place(&mut messages, |kind, url| {
            num_given += 1;
            if num_given > max_images {
                return Err(format!(
                    "a request may have {max_images} images and sounds; the server's --max-num-images allows more"
                ));
            }
            match kind {
                MediaKind::Image => {
                    let image = web.image(url, &of_images).map_err(|error| error.0)?;
                    of_images.max_pixels -= u64::from(image.width()) * u64::from(image.height());
                    Ok(Given::Image(Arc::new(image)))
                }
                MediaKind::Sound => {
                    let sound = web.sound(url, &of_sounds).map_err(|error| error.0)?;
                    of_sounds.max_seconds -= sound.seconds() as u32;
                    of_sounds.max_samples -= sound.samples().len();
                    Ok(Given::Sound(Arc::new(sound)))
                }
            }
        })?;
        Ok(messages)
    };
    let placed = tokio::task::spawn_blocking(work).await;
    placed.map_err(|panic| internal(format!("a defect ended the request: {panic}")))?
}
