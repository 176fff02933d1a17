//! The images of a request, fetched beside the server's thread.

use std::sync::Arc;

use engine::{GenerationRequest, Message, Prompt, images::Limits};
use openai::{ApiError, images};
use tokio::sync::Semaphore;

use crate::{StartError, app::App, config::ServerConfig, errors::internal, media::Media};

/// Requests whose images are fetched and decoded at once; others wait.
pub const MAX_AT_ONCE: usize = 2;

/// How a server gets at images.
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
}

/// Puts the images of requests in place.
pub async fn place_all(app: &App, requests: &mut [GenerationRequest]) -> Result<(), ApiError> {
    for request in requests {
        if let Prompt::Chat { messages, .. } = &mut request.prompt {
            *messages = place(app, std::mem::take(messages)).await?;
        }
    }
    Ok(())
}

/// Puts the images of messages in place, of which there may be so many, and so many pixels together as one image may have.
pub async fn place(app: &App, mut messages: Vec<Message>) -> Result<Vec<Message>, ApiError> {
    if !images::are_pending(&messages) {
        return Ok(messages);
    }
    let Seeing { media, max_images, turns } = &app.seeing;
    let (media, max_images) = (Arc::clone(media), *max_images);
    let _turn = turns.acquire().await.map_err(|_| internal("the server no longer fetches images".into()))?;
    let work = move || {
        let mut limits = Limits::default();
        let mut num_images: usize = messages.iter().map(|message| message.images.len()).sum();
        images::place(&mut messages, |url| {
            num_images += 1;
            if num_images > max_images {
                return Err(format!("a request may have {max_images} images; the server's --max-num-images allows more"));
            }
            let image = media.image(url, &limits).map_err(|error| error.0)?;
            limits.max_pixels -= u64::from(image.width()) * u64::from(image.height());
            Ok(Arc::new(image))
        })?;
        Ok(messages)
    };
    let placed = tokio::task::spawn_blocking(work).await;
    placed.map_err(|panic| internal(format!("a defect ended the request: {panic}")))?
}
