//! The daemon's end of the control socket: one request a connection, events until it is done.

use crate::control::{Event, Outcome, Request};
use crate::daemon::Daemon;
use crate::drain::{Drain, Progress};
use crate::stage::Stage;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

/// Longest request line: paths of some hundred thousand files to stage.
const REQUEST_BYTES_MAX: u64 = 64 << 20;

/// Opens the socket at `path` for this user only.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    // The directory above is 0700; the mode of the socket is a second bar.
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    Ok(listener)
}

/// Serves clients until the runtime ends.
pub async fn serve(listener: UnixListener, daemon: Arc<Daemon>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let daemon = Arc::clone(&daemon);
                tokio::spawn(async move {
                    if let Err(e) = client(stream, &daemon).await {
                        tracing::debug!(error = %e, "control client");
                    }
                });
            }
            Err(e) => {
                tracing::warn!(error = %e, "control socket");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn client(stream: UnixStream, daemon: &Arc<Daemon>) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut line = String::new();
    BufReader::new(reader.take(REQUEST_BYTES_MAX)).read_line(&mut line).await?;
    let request: Request = match serde_json::from_str(&line) {
        Ok(request) => request,
        Err(e) => {
            let text = format!("not a request: {e}");
            return send(&mut writer, &Event::Done(Outcome::Failed { text })).await;
        }
    };
    let _busy = daemon.busy.clone();
    let (events, mut queue) = mpsc::unbounded_channel();
    let worker = tokio::spawn(answer(Arc::clone(daemon), request, events));
    while let Some(event) = queue.recv().await {
        if send(&mut writer, &event).await.is_err() {
            // The client is gone; what it asked for goes on.
            break;
        }
    }
    let _ = worker.await;
    Ok(())
}

async fn send(writer: &mut (impl AsyncWriteExt + Unpin), event: &Event) -> io::Result<()> {
    let mut line = serde_json::to_vec(event)?;
    line.push(b'\n');
    writer.write_all(&line).await
}

async fn answer(daemon: Arc<Daemon>, request: Request, events: mpsc::UnboundedSender<Event>) {
    let reply = |body| {
        let _ = events.send(Event::Reply { body });
        Outcome::Ok { bytes: 0, files: 0 }
    };
    let outcome = match request {
        Request::Status => match serde_json::to_value(daemon.status().await) {
            Ok(body) => reply(body),
            Err(e) => Outcome::Failed { text: e.to_string() },
        },
        Request::Stats { prometheus } => {
            let text = match prometheus {
                true => daemon.prometheus().await,
                false => daemon.node.metrics.table(),
            };
            reply(serde_json::Value::String(text))
        }
        Request::Config => match serde_json::to_value(&daemon.node.config) {
            Ok(body) => reply(body),
            Err(e) => Outcome::Failed { text: e.to_string() },
        },
        Request::Drain { paths, timeout_ms } => {
            drain(&daemon, &paths, timeout_ms, events.clone()).await
        }
        Request::StageIn { paths, timeout_ms } => {
            let progress = sender(events.clone());
            let stage = Stage { node: Arc::clone(&daemon.node), progress };
            stage.run(&paths, timeout_ms.map(Duration::from_millis)).await
        }
        Request::Unmount { drain: false, .. } => daemon.unmount(false).await,
        Request::Unmount { drain: true, timeout_ms } => {
            let outcome = match drain(&daemon, &[], timeout_ms, events.clone()).await {
                Outcome::Ok { .. } => daemon.unmount(true).await,
                other => other,
            };
            let _ = events.send(Event::Summary { ledger: daemon.ledger() });
            outcome
        }
    };
    let _ = events.send(Event::Done(outcome));
}

fn sender(events: mpsc::UnboundedSender<Event>) -> Progress {
    Arc::new(move |event| {
        let _ = events.send(event);
    })
}

async fn drain(
    daemon: &Arc<Daemon>,
    paths: &[PathBuf],
    timeout_ms: Option<u64>,
    events: mpsc::UnboundedSender<Event>,
) -> Outcome {
    let progress = sender(events);
    let drain =
        Drain { node: Arc::clone(&daemon.node), flusher: Arc::clone(&daemon.flusher), progress };
    drain.run(paths, timeout_ms.map(Duration::from_millis)).await
}
