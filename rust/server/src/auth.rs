//! Who asks.

use std::sync::Arc;

use axum::http::{HeaderMap, header};
use openai::ApiError;

use crate::{StartError, config::KeyConfig};

/// The keys of a server. Only their hashes are kept.
#[derive(Debug, Default)]
pub struct Keys {
    keys: Vec<Key>,
    /// Makes the salts of tenants.
    secret: [u8; 32],
}

#[derive(Debug)]
struct Key {
    hash: blake3::Hash,
    tenant: Option<Arc<str>>,
    is_admin: bool,
}

/// Who a request comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// By the key; the same for all without keys.
    pub tenant: Option<Arc<str>>,
    /// May pause, resume, drain and cancel: by the key, or anyone where there are none.
    pub is_admin: bool,
    /// The id that the request goes by.
    pub request_id: String,
}

impl Keys {
    /// Of these keys; an empty one is an error.
    pub fn new(configs: &[KeyConfig]) -> Result<Self, StartError> {
        let key = |config: &KeyConfig| {
            if config.key.trim().is_empty() {
                return Err(StartError("an API key is empty; give some text, or no key".into()));
            }
            Ok(Key {
                hash: blake3::hash(config.key.as_bytes()),
                tenant: config.tenant.as_deref().map(Arc::from),
                is_admin: config.admin,
            })
        };
        Ok(Self { keys: configs.iter().map(key).collect::<Result<_, _>>()?, secret: rand::random() })
    }

    /// Who has the key of a request's headers: `Authorization: Bearer KEY` or `x-api-key: KEY`.
    pub fn caller(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        if self.keys.is_empty() {
            return Ok(Caller { is_admin: true, ..Caller::default() });
        }
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let bearer = text(header::AUTHORIZATION.as_str()).and_then(|value| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
        });
        let Some(given) = bearer.or_else(|| text("x-api-key")) else {
            return Err(unauthorized("send an API key as `Authorization: Bearer KEY` or `x-api-key: KEY`"));
        };
        let hash = blake3::hash(given.as_bytes());
        // Hashes are compared in constant time, and all of them.
        let found = self.keys.iter().fold(None, |found, key| if key.hash == hash { Some(key) } else { found });
        match found {
            Some(key) => Ok(Caller { tenant: key.tenant.clone(), is_admin: key.is_admin, ..Caller::default() }),
            None => Err(unauthorized("the API key is not one of this server's")),
        }
    }

    /// The salt of a caller's cached blocks: tenants share none, whatever salt a client sends.
    pub fn salt(&self, caller: &Caller, client: Option<&str>) -> Option<String> {
        let Some(tenant) = &caller.tenant else { return client.map(str::to_owned) };
        let mut hasher = blake3::Hasher::new_keyed(&self.secret);
        for part in [tenant, client.unwrap_or_default()] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        Some(hasher.finalize().to_hex().to_string())
    }
}

fn unauthorized(message: &str) -> ApiError {
    ApiError::new(401, "authentication_error", "invalid_api_key", None, message.to_owned())
}

/// An error unless the caller may administer.
pub fn require_admin(caller: &Caller) -> Result<(), ApiError> {
    if caller.is_admin {
        return Ok(());
    }
    Err(ApiError::new(403, "permission_error", "admin_only", None, "this needs a key with admin rights".into()))
}
