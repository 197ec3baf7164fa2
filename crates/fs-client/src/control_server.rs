//! The daemon's end of the control socket: one request a connection, events until it is done.
//! Only this user and root are heard, whatever the modes of socket and directory say; who says
//! nothing is sent away after a while, or when too many others come.

use crate::control::{Event, Outcome, Request};
use crate::daemon::Daemon;
use crate::drain::{Drain, Progress};
use crate::stage::Stage;
use ebb_transport::gate::Gate;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::OwnedReadHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

/// Longest request line: paths of some hundred thousand files to stage.
const REQUEST_BYTES_MAX: u64 = 64 << 20;

/// Clients that have not said yet what they want.
const SILENT_MAX: usize = 64;

/// How long a client may take to say it.
const REQUEST_TIME: Duration = Duration::from_secs(10);

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
    let gate = Gate::new(SILENT_MAX);
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (daemon, gate) = (Arc::clone(&daemon), Arc::clone(&gate));
                tokio::spawn(async move {
                    if let Err(e) = client(stream, &daemon, &gate).await {
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

async fn client(stream: UnixStream, daemon: &Arc<Daemon>, gate: &Arc<Gate>) -> io::Result<()> {
    let uid = stream.peer_cred()?.uid();
    if uid != 0 && uid != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other(format!("user {uid} is not heard")));
    }
    let (reader, mut writer) = stream.into_split();
    let request = match Request::decode(&read_line(reader, gate).await?) {
        Ok(request) => request,
        Err(text) => return send(&mut writer, &Event::Done(Outcome::Failed { text })).await,
    };
    let _busy = daemon.busy.clone();
    let (events, mut queue) = mpsc::unbounded_channel();
    let worker = tokio::spawn(answer(Arc::clone(daemon), request, events));
    while let Some(event) = queue.recv().await {
        if send(&mut writer, &event).await.is_err() {
            // The client is gone; what it asked for goes on.
            unheard(event, &mut queue).await;
            break;
        }
    }
    let _ = worker.await;
    Ok(())
}

/// What came of a request whose client does not hear it any more.
async fn unheard(event: Event, queue: &mut mpsc::UnboundedReceiver<Event>) {
    let mut next = Some(event);
    while let Some(event) = next {
        match event {
            Event::Done(Outcome::Ok { .. }) => {}
            Event::Done(outcome) => tracing::warn!(?outcome, "the client that asked is gone"),
            _ => {}
        }
        next = queue.recv().await;
    }
}

/// One line, as long as the client is patient and so are we.
async fn read_line(reader: OwnedReadHalf, gate: &Arc<Gate>) -> io::Result<Vec<u8>> {
    let (_silent, shut_out) = gate.enter();
    let mut line = Vec::new();
    let mut reader = BufReader::new(reader.take(REQUEST_BYTES_MAX));
    let read = tokio::time::timeout(REQUEST_TIME, reader.read_until(b'\n', &mut line));
    tokio::select! {
        read = read => read??,
        () = shut_out.wait() => return Err(io::Error::other("too many clients that say nothing")),
    };
    Ok(line)
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
                false => daemon.node.metrics_table(),
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
        Request::Scrub => scrub(&daemon, events.clone()).await,
        Request::Restart => daemon.make_way(),
        // Out of the job nothing can be drained any more, and the mount is of no use.
        Request::Unmount { .. } if daemon.node.is_out.load(Acquire) => daemon.unmount(false).await,
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

async fn scrub(daemon: &Daemon, events: mpsc::UnboundedSender<Event>) -> Outcome {
    let (node, progress) = (&daemon.node, sender(events.clone()));
    let (dirty, clean) = node.local_bytes();
    let (files_total, bytes_total) = (node.all_files().len() as u64, dirty + clean);
    let found = node.scrub(|so_far| {
        progress(Event::Progress {
            bytes_done: so_far.right + so_far.unknown + so_far.damaged,
            bytes_total,
            files_done: so_far.files,
            files_total,
            stage: "scrubbing".into(),
        });
    });
    let found = found.await;
    let body = serde_json::json!({
        "files": found.files,
        "right_bytes": found.right,
        "unknown_bytes": found.unknown,
        "damaged_bytes": found.damaged,
        "lost_bytes": node.lost_bytes(),
    });
    let _ = events.send(Event::Reply { body });
    let remaining = crate::drain::lost(node);
    match remaining.is_empty() {
        true => Outcome::Ok { bytes: found.right, files: found.files },
        false => Outcome::Incomplete { remaining },
    }
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
    let patience = daemon.node.deadline();
    let (node, flusher) = (Arc::clone(&daemon.node), Arc::clone(&daemon.flusher));
    let drain = Drain { node, flusher, progress, patience };
    drain.run(paths, timeout_ms.map(Duration::from_millis)).await
}
