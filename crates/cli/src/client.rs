//! Talks to a daemon over its control socket. Every wait has an end: a daemon that says nothing
//! for too long counts as stuck.

use crate::exit::{Code, Context, Failure};
use crate::mounts;
use ebb_fs_client::control::{Event, Outcome, Request};
use ebb_fs_client::registry::{self, Record};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// A drain without a time limit gives up by itself when nothing has moved for ten minutes; a
/// daemon that says nothing for longer is stuck.
const SILENCE_LIMIT: Duration = Duration::from_secs(660);
/// Answers that need no draining come within this time.
pub const SHORT: Duration = Duration::from_secs(15);
/// How long a socket may refuse while its daemon lives (it is just starting or just ending).
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Another daemon is there by then, or never: longer than a supervisor usually tries.
const BETWEEN_LIMIT: Duration = Duration::from_secs(60);

/// What stands behind a mount point.
#[derive(Debug)]
pub enum Behind {
    /// A daemon that lives.
    Daemon(Record),
    /// A daemon that is no more, perhaps with a dead mount.
    Dead(Record),
    /// A mount of Ebb that no record of this user leads to.
    Unknown,
    /// Nothing of Ebb.
    Nothing,
}

/// What is behind a resolved mount point.
pub fn behind(point: &Path) -> Result<Behind, Failure> {
    let mut record = registry::find(point).or_failed("registry of mounts")?;
    if record.as_ref().is_some_and(Record::is_between) {
        mounts::poll(BETWEEN_LIMIT, || {
            record = registry::find(point).ok().flatten();
            !record.as_ref().is_some_and(Record::is_between)
        });
    }
    let mounted = mounts::at(point).or_failed("/proc/self/mountinfo")?.is_some_and(|m| m.is_ebb());
    Ok(match record {
        Some(r) if r.is_alive() => Behind::Daemon(r),
        Some(r) => Behind::Dead(r),
        None if mounted => Behind::Unknown,
        None => Behind::Nothing,
    })
}

/// The daemon of a mount point, or why there is none to talk to.
pub fn daemon_of(point: &Path) -> Result<Record, Failure> {
    let shown = point.display();
    match behind(point)? {
        Behind::Daemon(record) => Ok(record),
        Behind::Dead(record) => Err(Failure::failed(format!(
            "{shown}: its daemon (process {}) is dead; what it had is in {} (`ebb umount {shown}` \
             takes the mount away and says what that is)",
            record.pid,
            record.cache.display()
        ))),
        Behind::Unknown => Err(Failure::failed(format!(
            "{shown}: mounted, but not by this user as far as {} knows (see EBB_RUNTIME_DIR)",
            registry::directory().map(|d| d.display().to_string()).unwrap_or_default()
        ))),
        Behind::Nothing => Err(Failure::failed(format!("{shown}: no mount of Ebb"))),
    }
}

/// Asks one thing and shows every event but the last to `seen`; the last one is the answer.
/// `limit` bounds the whole exchange, if given.
pub fn ask(
    record: &Record,
    request: &Request,
    limit: Option<Duration>,
    mut seen: impl FnMut(Event),
) -> Result<Outcome, Failure> {
    let end = limit.map(|l| Instant::now() + l);
    let mut socket = connect(record)?;
    let name = record.socket.display().to_string();
    let mut line = serde_json::to_vec(request).or_failed(&name)?;
    line.push(b'\n');
    socket.set_write_timeout(Some(SHORT)).or_failed(&name)?;
    socket.write_all(&line).or_failed(&name)?;
    let mut reader = BufReader::new(socket);
    loop {
        let wait = end.map_or(SILENCE_LIMIT, |e| e.saturating_duration_since(Instant::now()));
        let wait = wait.max(Duration::from_millis(1));
        reader.get_ref().set_read_timeout(Some(wait)).or_failed(&name)?;
        match read_event(&mut reader) {
            Ok(Some(Event::Done(outcome))) => return Ok(outcome),
            Ok(Some(event)) => seen(event),
            Ok(None) => {
                return Err(Failure::failed(format!(
                    "the daemon (process {}) is gone",
                    record.pid
                )));
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Err(Failure::new(
                    Code::TimedOut,
                    format!("the daemon (process {}) does not answer", record.pid),
                ));
            }
            Err(e) => return Err(e).or_failed(&name),
        }
        if end.is_some_and(|e| Instant::now() >= e) {
            return Err(Failure::new(Code::TimedOut, "the daemon is not done in time"));
        }
    }
}

fn read_event(reader: &mut impl BufRead) -> std::io::Result<Option<Event>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    serde_json::from_str(&line).map(Some).map_err(std::io::Error::from)
}

fn connect(record: &Record) -> Result<UnixStream, Failure> {
    let mut last = None;
    mounts::poll(CONNECT_LIMIT, || {
        match UnixStream::connect(&record.socket) {
            Ok(s) => last = Some(Ok(s)),
            Err(e) => last = Some(Err(e)),
        }
        matches!(last, Some(Ok(_))) || !record.is_alive()
    });
    let name = format!("daemon (process {}), {}", record.pid, record.socket.display());
    last.unwrap_or_else(|| Err(ErrorKind::NotFound.into())).or_failed(name)
}

/// Asks for something that is answered by one body.
pub fn ask_body(record: &Record, request: &Request) -> Result<serde_json::Value, Failure> {
    let mut body = None;
    let outcome = ask(record, request, Some(SHORT), |event| {
        if let Event::Reply { body: b } = event {
            body = Some(b);
        }
    })?;
    match (outcome, body) {
        (Outcome::Ok { .. }, Some(body)) => Ok(body),
        (Outcome::Unreachable { text }, _) => Err(Failure::new(Code::Unreachable, text)),
        (Outcome::Failed { text }, _) => Err(Failure::failed(text)),
        (other, _) => Err(Failure::failed(format!("the daemon answered {other:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread;

    fn record(socket: &Path) -> Record {
        let pid = std::process::id();
        Record {
            pid,
            started: registry::process_start(pid).unwrap(),
            mountpoint: "/nowhere".into(),
            socket: socket.to_owned(),
            cache: "/nowhere".into(),
            supervisor: None,
        }
    }

    fn serve(lines: &'static [&'static str]) -> (tempfile::TempDir, Record) {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("control.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let record = record(&socket);
        thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream);
            let mut request = String::new();
            reader.read_line(&mut request).unwrap();
            serde_json::from_str::<Request>(&request).unwrap();
            for line in lines {
                writeln!(reader.get_mut(), "{line}").unwrap();
            }
            if lines.is_empty() {
                thread::sleep(Duration::from_secs(30));
            }
        });
        (dir, record)
    }

    #[test]
    fn a_body_and_its_end_are_read() {
        let (_dir, record) = serve(&[
            r#"{"event":"reply","body":{"node":"a"}}"#,
            r#"{"event":"done","outcome":"ok","bytes":0,"files":0}"#,
        ]);
        assert_eq!(ask_body(&record, &Request::Status).unwrap()["node"], "a");
    }

    #[test]
    fn a_silent_and_a_dying_daemon_end_the_wait() {
        let (_dir, record) = serve(&[]);
        let e = ask(&record, &Request::Status, Some(Duration::from_millis(100)), |_| {});
        assert_eq!(e.unwrap_err().status, 4);
        let (_dir, record) =
            serve(&["{\"event\":\"progress\",\"bytes_done\":1,\"bytes_total\":2,\
                                      \"files_done\":0,\"files_total\":1,\"stage\":\"flushing\"}"]);
        let mut seen = 0;
        let e = ask(&record, &Request::Status, None, |_| seen += 1).unwrap_err();
        assert_eq!((e.status, seen), (1, 1));
    }
}
