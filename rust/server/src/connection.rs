//! Accepts connections, and ends them when the server is told to end.

use std::{
    fs,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::{Path, PathBuf},
    pin::pin,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use axum::{Router, body::Body, http::Request};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    signal::unix::{Signal, SignalKind, signal},
    sync::Semaphore,
    time::{sleep, timeout},
};
use tower::Service;

use crate::{StartError, app::App, router};

/// A request's head must be complete after so long.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Streams that were told of the end have so long to write it.
const FAREWELL: Duration = Duration::from_secs(2);

/// How a server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Every request had its answer.
    Drained,
    /// Requests were cut, for their time was over or a second signal came.
    Forced,
    /// As [`Self::Drained`], after Ctrl-C.
    Interrupted,
}

enum Listener {
    Tcp(TcpListener),
    Unix { listener: UnixListener, _file: SocketFile },
}

/// Removed at the end.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

impl Listener {
    async fn bind(app: &App) -> Result<(Self, String), StartError> {
        let config = &app.config;
        if let Some(path) = config.unix_path() {
            return Self::bind_unix(&path);
        }
        let place = format!("{}:{}", config.host, config.port);
        let failed = |error| StartError(format!("cannot listen on {place}: {error}; choose another --host or --port"));
        let listener = TcpListener::bind((config.host.as_str(), config.port)).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok((Self::Tcp(listener), format!("http://{address}")))
    }

    fn bind_unix(path: &Path) -> Result<(Self, String), StartError> {
        let failed = |error| StartError(format!("cannot listen on {}: {error}", path.display()));
        // What a server that was killed has left.
        if fs::metadata(path).is_ok_and(|file| file.file_type().is_socket())
            && std::os::unix::net::UnixStream::connect(path).is_err()
        {
            fs::remove_file(path).map_err(failed)?;
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        let file = SocketFile(path.to_owned());
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        Ok((Self::Unix { listener, _file: file }, format!("unix:{}", path.display())))
    }

    async fn accept(&self) -> std::io::Result<Box<dyn Connection>> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                // Tokens are small, and go at once.
                stream.set_nodelay(true)?;
                Ok(Box::new(stream))
            }
            Self::Unix { listener, .. } => Ok(Box::new(listener.accept().await?.0)),
        }
    }
}

/// Serves until a signal says to end.
pub async fn run(app: Arc<App>, listening: impl FnOnce(&str)) -> Result<Exit, StartError> {
    let signal_of = |kind| signal(kind).map_err(|error| StartError(format!("signals cannot be caught: {error}")));
    let (mut terminate, mut interrupt) = (signal_of(SignalKind::terminate())?, signal_of(SignalKind::interrupt())?);
    let (listener, address) = Listener::bind(&app).await?;
    let router = router(&app);
    let connections = Arc::new(Semaphore::new(app.config.max_connections));
    let graceful = GracefulShutdown::new();
    listening(&address);
    let interrupted = loop {
        tokio::select! {
            accepted = accept(&listener, &connections) => {
                let (stream, permit) = accepted;
                let connection = serve(stream, router.clone());
                let connection = graceful.watch(connection);
                tokio::spawn(async move {
                    // What a client does to its own connection is its own affair.
                    let _ = connection.await;
                    drop(permit);
                });
            }
            _ = terminate.recv() => break false,
            _ = interrupt.recv() => break true,
        }
    };
    drop(listener);
    end(&app, graceful, [&mut terminate, &mut interrupt], interrupted).await
}

async fn accept(listener: &Listener, connections: &Arc<Semaphore>) -> (Box<dyn Connection>, tokio::sync::OwnedSemaphorePermit) {
    loop {
        let Ok(permit) = Arc::clone(connections).acquire_owned().await else { std::future::pending().await };
        match listener.accept().await {
            Ok(stream) => return (stream, permit),
            // The client has gone, or there are no file descriptors for now.
            Err(error) => {
                tracing::warn!("a connection cannot be accepted: {error}");
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

fn serve(
    stream: Box<dyn Connection>,
    router: Router,
) -> http1::Connection<
    TokioIo<Box<dyn Connection>>,
    impl hyper::service::HttpService<Incoming, ResBody = Body, Future: Send + 'static> + Send,
> {
    let service = service_fn(move |request: Request<Incoming>| router.clone().call(request));
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service)
}

/// Lets running requests end, then tells them to, then ends.
async fn end(
    app: &App,
    graceful: GracefulShutdown,
    [terminate, interrupt]: [&mut Signal; 2],
    interrupted: bool,
) -> Result<Exit, StartError> {
    app.is_draining.store(true, Ordering::SeqCst);
    let patience = Duration::try_from_secs_f64(app.config.shutdown_timeout).unwrap_or(Duration::ZERO);
    let mut idle = pin!(graceful.shutdown());
    let drained = tokio::select! {
        done = timeout(patience, &mut idle) => done.is_ok(),
        _ = terminate.recv() => false,
        _ = interrupt.recv() => false,
    };
    if !drained {
        app.abort.send_replace(true);
        let _ = timeout(FAREWELL, idle).await;
        return Ok(Exit::Forced);
    }
    Ok(if interrupted { Exit::Interrupted } else { Exit::Drained })
}
