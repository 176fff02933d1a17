//! Connections: who may connect, what a thread of a connection does, and how all of them end.

use std::{
    io::{Error, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::{
    queue::Queue,
    zmtp::{self, SocketType},
};

/// Connections of a socket at most; further ones are closed at once.
pub const MAX_PEERS: usize = 128;
/// How long a peer has to open a connection, and to take anything of what it is sent.
const PATIENCE: Duration = Duration::from_secs(30);
/// Messages, and their bytes, that wait for one subscriber at most.
pub const MAX_WAITING: usize = 10_000;
pub const MAX_WAITING_BYTES: usize = 64 << 20;
/// Subscriptions of a peer, and bytes of one, at most.
const MAX_TOPICS: usize = 64;
const MAX_TOPIC_BYTES: usize = 1024;

/// Bytes to be written, whoever else they are for.
pub type Bytes = Arc<[u8]>;

pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The connections of a listener, each served by a thread, until they are closed.
#[derive(Default)]
pub struct Peers {
    streams: Mutex<Vec<Arc<TcpStream>>>,
    closed: AtomicBool,
}

impl Peers {
    /// Accepts connections on a thread and serves each on one of its own: `serve` ends when its stream does.
    pub fn accept(
        self: &Arc<Self>,
        listener: TcpListener,
        serve: impl Fn(&Arc<TcpStream>) -> Result<(), Error> + Send + Sync + 'static,
    ) -> Result<Acceptor, Error> {
        let (peers, serve, address) = (Arc::clone(self), Arc::new(serve), listener.local_addr()?);
        let run = move || {
            loop {
                let accepted = listener.accept();
                if peers.closed.load(Ordering::SeqCst) {
                    return;
                }
                let Ok((stream, peer)) = accepted else {
                    // Out of file descriptors, for instance.
                    thread::sleep(Duration::from_millis(100));
                    continue;
                };
                peers.begin(stream, peer, &serve);
            }
        };
        let thread = thread::Builder::new().name("mistral-paged-kv-accept".into()).spawn(run)?;
        Ok(Acceptor { peers: Arc::clone(self), address, thread: Some(thread) })
    }

    fn begin<S>(self: &Arc<Self>, stream: TcpStream, peer: SocketAddr, serve: &Arc<S>)
    where
        S: Fn(&Arc<TcpStream>) -> Result<(), Error> + Send + Sync + 'static,
    {
        let stream = Arc::new(stream);
        {
            let mut streams = locked(&self.streams);
            if streams.len() >= MAX_PEERS || self.closed.load(Ordering::SeqCst) {
                tracing::warn!("kv_events: {peer} is turned away: {MAX_PEERS} are connected");
                return;
            }
            streams.push(Arc::clone(&stream));
        }
        let (peers, own, serve) = (Arc::clone(self), Arc::clone(&stream), Arc::clone(serve));
        let run = move || {
            if let Err(error) = serve(&own) {
                tracing::debug!("kv_events: {peer}: {error}");
            }
            peers.end(&own);
        };
        if let Err(error) = thread::Builder::new().name("mistral-paged-kv-peer".into()).spawn(run) {
            tracing::warn!("kv_events: {peer} is turned away: {error}");
            self.end(&stream);
        }
    }

    fn end(&self, stream: &Arc<TcpStream>) {
        let _ = stream.shutdown(Shutdown::Both);
        locked(&self.streams).retain(|other| !Arc::ptr_eq(other, stream));
    }
}

/// Ends its thread and all connections when it is dropped.
pub struct Acceptor {
    peers: Arc<Peers>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.peers.closed.store(true, Ordering::SeqCst);
        // The thread waits for a connection; this is one.
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(if address.is_ipv4() { [127, 0, 0, 1].into() } else { std::net::Ipv6Addr::LOCALHOST.into() });
        }
        if TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
        for stream in locked(&self.peers.streams).iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Opens a connection as a socket of a type. What is sent later is given up when the peer takes none of it for a while.
pub fn open(mut stream: &TcpStream, kind: SocketType) -> Result<(), Error> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    zmtp::open(&mut stream, kind)?;
    stream.set_read_timeout(None)
}

/// Somebody who may have subscribed.
pub struct Subscriber {
    /// What waits to be written to it.
    pub queue: Queue<Bytes>,
    topics: Mutex<Vec<Vec<u8>>>,
}

impl Subscriber {
    fn new() -> Self {
        Self { queue: Queue::new(MAX_WAITING, MAX_WAITING_BYTES), topics: Mutex::default() }
    }

    /// Whether it wants messages of a topic: those that begin with one of its own.
    pub fn wants(&self, topic: &[u8]) -> bool {
        locked(&self.topics).iter().any(|wanted| topic.starts_with(wanted))
    }

    /// Hears what the peer says: subscriptions as messages of version 3.0 or commands of 3.1, and whether anybody is there.
    fn hear(&self, frame: &zmtp::Frame) -> Result<(), Error> {
        let (name, data) = match frame.body.split_first() {
            Some((1, topic)) if !frame.is_command => (&b"SUBSCRIBE"[..], topic),
            Some((0, topic)) if !frame.is_command => (&b"CANCEL"[..], topic),
            _ if frame.is_command => zmtp::command(&frame.body).unwrap_or_default(),
            _ => return Ok(()),
        };
        let mut topics = locked(&self.topics);
        match name {
            b"SUBSCRIBE" if topics.len() >= MAX_TOPICS => return Err(Error::other("the peer has too many subscriptions")),
            b"SUBSCRIBE" => topics.push(data.to_vec()),
            b"CANCEL" => {
                if let Some(at) = topics.iter().position(|topic| topic == data) {
                    topics.swap_remove(at);
                }
            }
            b"PING" => {
                let mut pong = Vec::new();
                zmtp::write_command(&mut pong, b"PONG", data.get(2..).unwrap_or_default());
                let len = pong.len();
                self.queue.push(pong.into(), len);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Those who may have subscribed.
#[derive(Default)]
pub struct Subscribers(Mutex<Vec<Arc<Subscriber>>>);

impl Subscribers {
    /// How many they are.
    pub fn len(&self) -> usize {
        locked(&self.0).len()
    }

    /// Gives a message to all who want it; to how many it did not get.
    pub fn send(&self, topic: &[u8], message: &Bytes) -> u64 {
        let wanting = |subscriber: &&Arc<Subscriber>| subscriber.wants(topic);
        let subscribers = locked(&self.0);
        let sent = |subscriber: &Arc<Subscriber>| subscriber.queue.push(Arc::clone(message), message.len());
        subscribers.iter().filter(wanting).filter(|subscriber| !sent(subscriber)).count() as u64
    }

    /// Waits for what is on its way to them, in all so long.
    pub fn flush(&self, at_most: Duration) {
        let began = std::time::Instant::now();
        let all: Vec<_> = locked(&self.0).clone();
        for subscriber in all {
            subscriber.queue.wait_until_done(at_most.saturating_sub(began.elapsed()));
        }
    }

    /// Serves a connection: one thread hears it, another writes to it.
    pub fn serve(&self, stream: &Arc<TcpStream>) -> Result<(), Error> {
        open(stream, SocketType::Pub)?;
        let subscriber = Arc::new(Subscriber::new());
        let (own, out) = (Arc::clone(&subscriber), Arc::clone(stream));
        let write = move || {
            while let Some(bytes) = own.queue.pop() {
                if (&*out).write_all(&bytes).is_err() {
                    break;
                }
            }
            own.queue.close();
            let _ = out.shutdown(Shutdown::Both);
        };
        thread::Builder::new().name("mistral-paged-kv-writer".into()).spawn(write)?;
        locked(&self.0).push(Arc::clone(&subscriber));
        let heard = hear_all(&mut &**stream, &subscriber);
        locked(&self.0).retain(|other| !Arc::ptr_eq(other, &subscriber));
        subscriber.queue.close();
        heard
    }
}

fn hear_all(stream: &mut impl Read, subscriber: &Subscriber) -> Result<(), Error> {
    loop {
        subscriber.hear(&zmtp::read_frame(stream, MAX_TOPIC_BYTES)?)?;
    }
}
