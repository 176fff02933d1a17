//! Images and sounds of hosts that are listed.

use std::{fmt, time::Duration};

use engine::MediaKind;
use ureq::{
    Agent, Error,
    config::Config,
    http::Uri,
    unversioned::{
        resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver},
        transport::{DefaultConnector, NextTimeout},
    },
};

use super::{MediaError, address::is_public, media_type, shorten};

/// From the name of a host to the last byte.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Resolves names as the system does; a name that has an address which is not public is refused.
#[derive(Debug)]
struct Guarded {
    inner: DefaultResolver,
    reaches_private: bool,
}

/// A host whose address is not public.
#[derive(Debug)]
struct NotPublic;

impl fmt::Display for NotPublic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("its address is not one of the public internet")
    }
}

impl std::error::Error for NotPublic {}

impl Resolver for Guarded {
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let addresses = self.inner.resolve(uri, config, timeout)?;
        if !self.reaches_private && !addresses.iter().all(|address| is_public(address.ip())) {
            return Err(Error::Other(Box::new(NotPublic)));
        }
        Ok(addresses)
    }
}

/// A client that fetches from listed hosts.
#[derive(Debug)]
pub struct Web {
    domains: Vec<String>,
    /// What allows others.
    hint: &'static str,
    agent: Agent,
}

impl Web {
    /// Of these hosts; `name` is where they were listed.
    pub fn new(domains: &[String], name: &str, hint: &'static str) -> Result<Self, MediaError> {
        let host = |domain: &String| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
            if domain.is_empty() || !domain.chars().all(is_plain) {
                let shown = shorten(domain);
                return Err(MediaError(format!("{name}: {shown:?} is no host: give one such as images.example.com")));
            }
            Ok(domain.to_ascii_lowercase())
        };
        let domains = domains.iter().map(host).collect::<Result<_, _>>()?;
        Ok(Self { domains, hint, agent: agent(false) })
    }

    /// The same, for tests.
    pub fn reaching_private(self) -> Self {
        Self { agent: agent(true), ..self }
    }

    /// The bytes at a URL of a listed host.
    pub fn fetch(&self, url: &str, kind: MediaKind, max_bytes: usize) -> Result<Vec<u8>, MediaError> {
        let shown = shorten(url);
        let uri: Uri = url.parse().map_err(|error| MediaError(format!("{shown:?} is no URL: {error}")))?;
        let authority = uri.authority().ok_or_else(|| MediaError(format!("{shown:?} names no host")))?;
        if authority.as_str().contains('@') {
            return Err(MediaError("the URL has a user or a password, which are not sent: leave them out".into()));
        }
        let host = authority.host().to_ascii_lowercase();
        if !self.domains.contains(&host) {
            let host = shorten(&host);
            return Err(MediaError(format!("images and sounds of the host {host:?} are not fetched: {}", self.hint)));
        }
        let failed = |error: Error| MediaError(format!("{shown:?} cannot be fetched: {}", why(&error, max_bytes)));
        let mut response = self.agent.get(&uri).header("accept", format!("{}*", media_type(kind))).call().map_err(failed)?;
        match response.status().as_u16() {
            200 => {}
            300..400 => {
                return Err(MediaError(format!("{shown:?} leads elsewhere, and redirects are not followed: give the last URL")));
            }
            status => return Err(MediaError(format!("{shown:?} cannot be fetched: the answer is {status}"))),
        }
        response.body_mut().with_config().limit(max_bytes as u64).read_to_vec().map_err(failed)
    }
}

fn why(error: &Error, max_bytes: usize) -> String {
    match error {
        Error::Timeout(_) => format!("it took more than {} s", TIMEOUT.as_secs()),
        Error::BodyExceedsLimit(_) => format!("it has more than the {max_bytes} bytes that are allowed"),
        Error::Other(other) => other.to_string(),
        error => error.to_string(),
    }
}

fn agent(reaches_private: bool) -> Agent {
    let config = Agent::config_builder()
        .timeout_global(Some(TIMEOUT))
        .http_status_as_error(false)
        .max_redirects(0)
        .max_idle_connections(0)
        // A proxy would choose the address.
        .proxy(None)
        .user_agent(concat!("mistral_paged/", env!("CARGO_PKG_VERSION")))
        .build();
    let resolver = Guarded { inner: DefaultResolver::default(), reaches_private };
    Agent::with_parts(config, DefaultConnector::new(), resolver)
}
