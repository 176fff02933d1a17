//! Addresses and the sockets behind them.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};

use crate::{KvEventsConfig, KvEventsError};

/// Sockets that listen, before anything is published.
#[derive(Debug)]
pub struct Listeners {
    pub(crate) subscribers: TcpListener,
    pub(crate) replay: Option<TcpListener>,
    pub(crate) topic: String,
    pub(crate) address: String,
    pub(crate) replay_address: Option<String>,
}

impl Listeners {
    /// Listens where a configuration says.
    ///
    /// # Errors
    /// [`KvEventsError::Address`] and [`KvEventsError::Bind`], which name the argument and the address.
    pub fn bind(config: &KvEventsConfig) -> Result<Self, KvEventsError> {
        let (subscribers, address) = listen("kv_events", &config.address)?;
        let replay = config.replay_address.as_deref().map(|address| listen("kv_events_replay", address)).transpose()?;
        let (replay, replay_address) = replay.unzip();
        Ok(Self { subscribers, replay, topic: config.topic.clone(), address, replay_address })
    }
}

/// A listener, and its address with the port that was taken.
fn listen(argument: &'static str, given: &str) -> Result<(TcpListener, String), KvEventsError> {
    let invalid = || KvEventsError::Address { argument, given: given.to_owned() };
    let (host, port) = given.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(invalid)?;
    let port: u16 = port.parse().map_err(|_| invalid())?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let host = if host == "*" { "0.0.0.0" } else { host };
    if host.is_empty() {
        return Err(invalid());
    }
    let bound = (host, port).to_socket_addrs().and_then(|addresses| {
        let addresses: Vec<SocketAddr> = addresses.collect();
        let listener = TcpListener::bind(&addresses[..])?;
        let local = listener.local_addr()?;
        Ok((listener, local))
    });
    let (listener, local) = bound.map_err(|source| KvEventsError::Bind { argument, address: given.to_owned(), source })?;
    if !local.ip().is_loopback() {
        tracing::warn!("{argument}: anyone who reaches {local} can read the tokens of every prompt");
    }
    Ok((listener, format!("tcp://{local}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bind(address: &str, replay: Option<&str>) -> Result<Listeners, KvEventsError> {
        Listeners::bind(&KvEventsConfig { address: address.into(), replay_address: replay.map(Into::into), topic: String::new() })
    }

    #[test]
    fn an_address_is_taken_with_its_port_or_refused_by_its_argument() {
        let listeners = bind("tcp://127.0.0.1:0", Some("tcp://[::1]:0")).or_else(|_| bind("tcp://127.0.0.1:0", None)).unwrap();
        assert!(listeners.address.starts_with("tcp://127.0.0.1:") && !listeners.address.ends_with(":0"));
        for wrong in ["", "127.0.0.1:5557", "ipc:///tmp/x", "tcp://", "tcp://:5", "tcp://127.0.0.1", "tcp://127.0.0.1:70000"] {
            let error = bind(wrong, None).unwrap_err().to_string();
            assert!(error.contains(&format!("kv_events is {wrong:?}")) && error.contains("tcp://127.0.0.1:5557"), "{error}");
        }
        let taken = listeners.address.as_str();
        let error = bind(taken, None).unwrap_err().to_string();
        assert!(error.starts_with(&format!("kv_events: cannot listen on {taken}")), "{error}");
        let error = bind("tcp://127.0.0.1:0", Some(taken)).unwrap_err().to_string();
        assert!(error.starts_with("kv_events_replay: cannot listen on"), "{error}");
    }
}
