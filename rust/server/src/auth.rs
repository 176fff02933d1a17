//! Who asks.

use std::{
    num::NonZeroU32,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::http::{HeaderMap, header};
use openai::ApiError;
use sha2::{Digest, Sha256};

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
    hash: [u8; 32],
    quota: Option<Arc<Quota>>,
    tenant: Option<Arc<str>>,
    weight: Option<NonZeroU32>,
    is_admin: bool,
}

/// How many choices a key may have at once.
#[derive(Debug)]
pub struct Quota {
    limit: usize,
    in_flight: AtomicUsize,
}

impl Quota {
    /// Takes so many, until what is returned is dropped. One request too large for an idle key still runs, as for an idle server.
    pub fn take(self: &Arc<Self>, num_choices: usize) -> Result<Taken, ApiError> {
        let before = self.in_flight.fetch_add(num_choices, Ordering::SeqCst);
        let taken = Taken { quota: Arc::clone(self), num_choices };
        if before > 0 && before + num_choices > self.limit {
            let message = format!("{before} answers to this API key are being made or wait, and {} may", self.limit);
            return Err(ApiError::new(429, "rate_limit_error", "tenant_limit", None, message));
        }
        Ok(taken)
    }
}

/// Choices that a key has.
#[derive(Debug)]
pub struct Taken {
    quota: Arc<Quota>,
    num_choices: usize,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.quota.in_flight.fetch_sub(self.num_choices, Ordering::SeqCst);
    }
}

/// Who a request comes from.
#[derive(Clone, Debug, Default)]
pub struct Caller {
    /// By the key; the same for all without keys.
    pub tenant: Option<Arc<str>>,
    /// How much longer its tenant's turns are than those of others.
    pub weight: Option<NonZeroU32>,
    /// May pause, resume, drain and cancel: by the key, or anyone where there are none.
    pub is_admin: bool,
    /// How much the key may ask for at once.
    pub quota: Option<Arc<Quota>>,
    /// The id that the request goes by.
    pub request_id: String,
    /// What trace it is a part of, where traces are taken.
    pub trace: Option<opentelemetry::Context>,
}

impl Keys {
    /// Of these keys; an empty one is an error, and so are keys that disagree about a tenant's weight, and a file with a secret
    /// that cannot be read, is short, or is of no use.
    pub fn new(configs: &[KeyConfig], secret: Option<&Path>) -> Result<Self, StartError> {
        let secret = match secret {
            Some(path) => secret_of(path, configs)?,
            None => rand::random(),
        };
        let key = |config: &KeyConfig| {
            let quota = |limit| Arc::new(Quota { limit, in_flight: AtomicUsize::new(0) });
            Ok(Key {
                hash: hash_of(config)?,
                quota: config.max_in_flight.map(quota),
                tenant: config.tenant.as_deref().map(Arc::from),
                weight: weight_of(config, configs)?,
                is_admin: config.admin,
            })
        };
        Ok(Self { keys: configs.iter().map(key).collect::<Result<_, _>>()?, secret })
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
        // Hashes are compared in constant time, and all of them.
        let hash = blake3::Hash::from_bytes(Sha256::digest(given.as_bytes()).into());
        let found = self.keys.iter().fold(None, |found, key| if hash == key.hash { Some(key) } else { found });
        match found {
            Some(key) => {
                let Key { tenant, quota, weight, is_admin, .. } = key;
                let (tenant, quota) = (tenant.clone(), quota.clone());
                Ok(Caller { tenant, quota, weight: *weight, is_admin: *is_admin, ..Caller::default() })
            }
            None => Err(unauthorized("the API key is not one of this server's")),
        }
    }

    /// The salt of a caller's cached blocks: tenants share none, whatever salt a client sends. Events tell it to routers, some of
    /// which take 64 hexadecimal digits alone for an image.
    pub fn salt(&self, caller: &Caller, client: Option<&str>) -> Option<String> {
        let Some(tenant) = &caller.tenant else { return client.map(str::to_owned) };
        let mut hasher = blake3::Hasher::new_keyed(&self.secret);
        for part in [tenant, client.unwrap_or_default()] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        Some(format!("tenant-{}", hasher.finalize().to_hex()))
    }
}

/// Bytes of a secret at least: what nobody guesses.
const MIN_SECRET_BYTES: usize = 32;

/// The key that a file's bytes stand for.
fn secret_of(path: &Path, configs: &[KeyConfig]) -> Result<[u8; 32], StartError> {
    let wrong = |why: String| StartError(format!("cache_salt_secret: {}: {why}", path.display()));
    if configs.iter().all(|config| config.tenant.is_none()) {
        return Err(wrong("no API key has a tenant, whose salts it would make: leave it out, or give keys tenants".into()));
    }
    let bytes = std::fs::read(path).map_err(|error| wrong(error.to_string()))?;
    if bytes.len() < MIN_SECRET_BYTES {
        return Err(wrong(format!("it has {} bytes; a secret has {MIN_SECRET_BYTES} random ones or more", bytes.len())));
    }
    Ok(blake3::derive_key("mistral_paged 2026 salts of tenants", &bytes))
}

/// The SHA-256 of a key, which is all that is kept of it.
fn hash_of(config: &KeyConfig) -> Result<[u8; 32], StartError> {
    match (config.key.as_deref(), config.sha256.as_deref()) {
        (Some(key), None) if key.trim().is_empty() => Err(StartError("an API key is empty; give some text, or no key".into())),
        (Some(key), None) => Ok(Sha256::digest(key.as_bytes()).into()),
        (None, Some(digits)) => {
            let hash = blake3::Hash::from_hex(digits);
            hash.map(Into::into)
                .map_err(|_| StartError(format!("sha256 = {digits:?} of an API key is not 64 hexadecimal digits")))
        }
        _ => Err(StartError("an API key needs key or sha256, and not both".into())),
    }
}

/// The weight of a key's tenant, which any of its keys may give.
fn weight_of(config: &KeyConfig, configs: &[KeyConfig]) -> Result<Option<NonZeroU32>, StartError> {
    let Some(tenant) = &config.tenant else {
        return match config.weight {
            None => Ok(None),
            Some(_) => Err(StartError("an API key has a weight and no tenant, whose it would be: give it one".into())),
        };
    };
    let mut weights = configs.iter().filter(|other| other.tenant.as_ref() == Some(tenant)).filter_map(|other| other.weight);
    let first = weights.next();
    match weights.find(|weight| Some(*weight) != first).zip(first) {
        None => Ok(first),
        Some((second, first)) => {
            Err(StartError(format!("the API keys of tenant {tenant:?} give it weights {first} and {second}")))
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Vec<KeyConfig> {
        let key = |key: &str, tenant: &str| KeyConfig {
            key: Some(key.into()),
            sha256: None,
            tenant: Some(tenant.into()),
            weight: None,
            max_in_flight: None,
            admin: false,
        };
        vec![key("a", "one"), key("b", "two")]
    }

    fn salt(keys: &Keys, tenant: &str, client: Option<&str>) -> String {
        keys.salt(&Caller { tenant: Some(tenant.into()), ..Caller::default() }, client).unwrap()
    }

    #[test]
    fn servers_with_one_secret_make_the_same_salts_and_others_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        let of = |secret: &[u8]| {
            std::fs::write(&path, secret).unwrap();
            Keys::new(&keys(), Some(&path)).unwrap()
        };
        let (one, same, other) = (of(&[1; 32]), of(&[1; 32]), of(&[2; 32]));
        assert_eq!(salt(&one, "one", Some("x")), salt(&same, "one", Some("x")));
        let own = salt(&one, "one", None);
        for differs in [salt(&one, "two", None), salt(&one, "one", Some("x")), salt(&other, "one", None)] {
            assert_ne!(differs, own);
        }
        let (random, again) = (Keys::new(&keys(), None).unwrap(), Keys::new(&keys(), None).unwrap());
        assert_ne!(salt(&random, "one", None), salt(&again, "one", None));
    }

    #[test]
    fn a_secret_that_cannot_be_honoured_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        let refused = |keys: &[KeyConfig]| Keys::new(keys, Some(&path)).unwrap_err().0;
        assert!(refused(&keys()).contains("No such file"));
        std::fs::write(&path, [1; 31]).unwrap();
        assert!(refused(&keys()).contains("it has 31 bytes"));
        std::fs::write(&path, [1; 32]).unwrap();
        let [mut key, _] = <[KeyConfig; 2]>::try_from(keys()).unwrap();
        key.tenant = None;
        assert!(refused(&[key]).contains("no API key has a tenant"));
    }
}
