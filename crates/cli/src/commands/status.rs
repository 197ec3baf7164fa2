//! `ebb status`: one screen about a mount (from its daemon) or a job (from its metadata service).

use crate::client;
use crate::exit::{Code, Context, Failure};
use crate::mounts;
use crate::options::MountOptions;
use ebb_fs_client::control::Request;
use ebb_meta_client::service_status;
use ebb_transport::auth::Token;
use ebb_types::units::Size;
use ebb_wire::pb;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

/// The service must answer within this time.
const LIMIT: Duration = Duration::from_secs(10);
/// Entries of a list that fit on the screen.
const SHOWN: usize = 10;

/// One screen: model, dirty and clean bytes, flush state, peers, errors
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ebb status /local/run7
  ebb status /local/run7 --json | jq .dirty_bytes
  ebb status node001:7400                   asks a metadata service about the whole job
  ebb status dir:/lustre/proj/run7.ebb      the same, wherever it is now (ebb meta --coordinator)")]
pub struct Args {
    /// As one JSON object
    #[arg(long)]
    json: bool,
    /// The job's shared secret, to ask a metadata service of another machine [default: as
    /// `ebb mount` finds it]
    #[arg(long, value_name = "FILE")]
    token_file: Option<String>,
    /// Which connections are encrypted: on, loopback (all but those over loopback) or off [default: as
    /// `ebb mount` finds it]
    #[arg(long, value_name = "WHICH")]
    secure: Option<String>,
    /// Mount point, or a metadata service: HOST:PORT, or the directory that says where it is
    #[arg(value_name = "MOUNTPOINT|HOST:PORT|dir:DIR")]
    target: String,
}

impl Args {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        let (status, screen): (Value, fn(&Value) -> String) = match is_address(&self.target) {
            true => (of_service(&self.target, self.token_file, self.secure)?, service_screen),
            false => {
                let point = mounts::resolve(Path::new(&self.target)).or_usage(&self.target)?;
                (client::ask_body(&client::daemon_of(&point)?, &Request::Status)?, mount_screen)
            }
        };
        match self.json {
            true => println!("{status:#}"),
            false => print!("{}", screen(&status)),
        }
        Ok(())
    }
}

/// `HOST:PORT` or `dir:DIR`, and not a path.
fn is_address(target: &str) -> bool {
    if ebb_coordinator::directory_of(target).is_some() {
        return true;
    }
    let port = target.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    port && !target.contains('/') && !Path::new(target).exists()
}

fn of_service(
    address: &str,
    token_file: Option<String>,
    secure: Option<String>,
) -> Result<Value, Failure> {
    let settings = MountOptions { token_file, secure, ..MountOptions::default() }.resolve()?;
    let token = settings.text("token-file").map(Token::load).transpose();
    let token = token.or_usage(settings.named("token-file"))?;
    let secure = settings.text("secure").map(str::parse).transpose();
    let secure = secure.or_usage(settings.named("secure"))?.unwrap_or_default();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().or_failed("threads")?;
    let reply = runtime.block_on(service_status(address, token.as_ref(), secure, LIMIT));
    let reply = reply.map_err(|why| Failure::new(Code::Unreachable, why.to_string()))?;
    Ok(service_object(address, reply))
}

fn service_object(address: &str, reply: pb::StatusReply) -> Value {
    let node = |n: pb::NodeRecord| {
        json!({
            "id": n.id, "name": n.name, "address": n.peer_address, "alive": n.alive,
            "dirty_bytes": n.dirty_bytes,
        })
    };
    let standby =
        |s: pb::Standby| json!({"name": s.name, "in_step": s.in_step, "behind": s.behind});
    let lost = |l: pb::LostFile| json!({"path": String::from_utf8_lossy(&l.path), "node": l.node});
    let failure = |f: pb::Failure| {
        json!({
            "path": String::from_utf8_lossy(&f.path), "operation": f.operation, "errno": f.errno,
            "text": std::io::Error::from_raw_os_error(f.errno).to_string(),
        })
    };
    json!({
        "meta": address,
        "backing": reply.backing,
        "consistency": reply.consistency,
        "nodes": reply.nodes.into_iter().map(node).collect::<Vec<_>>(),
        "inodes": reply.inodes,
        "inodes_max": reply.inodes_max,
        "forgotten": reply.forgotten,
        "places": reply.places,
        "standbys": reply.standbys.into_iter().map(standby).collect::<Vec<_>>(),
        "owned_ranges": reply.owned_ranges,
        "unflushed_bytes": reply.unflushed_bytes,
        "journal_bytes": reply.journal_bytes,
        "uptime_ms": reply.uptime_ms,
        "rpc": reply.rpc,
        "leases": reply.leases,
        "recalls": reply.recalls,
        "quiet": reply.quiet,
        "secure": reply.secure,
        "encrypted": {
            "sent_bytes": reply.encrypted_sent_bytes,
            "received_bytes": reply.encrypted_received_bytes,
        },
        "coupled": {
            "files": reply.coupled,
            "awaiting": reply.awaiting,
            "lost": reply.lost.into_iter().map(lost).collect::<Vec<_>>(),
        },
        "errors": reply.errors.into_iter().map(failure).collect::<Vec<_>>(),
    })
}

fn text(status: &Value, key: &str) -> String {
    match &status[key] {
        Value::Null => "-".to_owned(),
        Value::String(s) => s.clone(),
        other => other.to_string(),
    }
}

fn size(status: &Value, key: &str) -> String {
    status[key].as_u64().map_or_else(|| "-".to_owned(), |n| Size(n).to_string())
}

fn list<'a>(status: &'a Value, key: &str) -> &'a [Value] {
    status[key].as_array().map_or(&[], Vec::as_slice)
}

/// Where copies of unflushed bytes are, and what is kept for others; nothing, when neither is.
fn copies(copies: &Value) -> Option<String> {
    let mut told = Vec::new();
    if copies["replicas"].as_u64() == Some(2) {
        let partner = copies["partner_name"].as_str();
        told.push(match partner {
            Some(name) => format!("{} so far to {name}", size(copies, "copied_bytes")),
            None => "no partner".to_owned(),
        });
        if let Some(why) = copies["degraded"]["why"].as_str() {
            told.push(format!("degraded ({why}; {} here alone)", size(copies, "uncopied_bytes")));
        }
        if copies["lost_with_this_node"] == true {
            told.push("cannot be found when this node is lost (no --meta)".to_owned());
        }
    }
    if copies["held_bytes"].as_u64().is_some_and(|n| n > 0) {
        told.push(format!("{} kept for other nodes", size(copies, "held_bytes")));
    }
    if copies["adopted_bytes"].as_u64().is_some_and(|n| n > 0) {
        told.push(format!("{} adopted from lost nodes", size(copies, "adopted_bytes")));
    }
    (!told.is_empty()).then(|| told.join(", "))
}

/// One screen about a mount.
fn mount_screen(status: &Value) -> String {
    let mut out = String::new();
    let mut row = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<12} {value}");
    };
    row("mount", format!("{} on {}", text(status, "backing"), text(status, "mountpoint")));
    row("node", text(status, "node"));
    row("model", text(status, "consistency"));
    row("meta", text(status, "meta"));
    row("network", network(status));
    row("transport", transport(status));
    row("supervisor", supervisor(status));
    row("dirty", format!("{} not on the backing yet", size(status, "dirty_bytes")));
    row("clean", size(status, "clean_bytes"));
    row("cache", format!("{} on disk", size(status, "cache_bytes")));
    row(
        "flush",
        format!("{}, {} so far", text(status, "flush_state"), size(status, "flushed_bytes")),
    );
    let (peers, backing) =
        (size(status, "fetched_bytes_peer"), size(status, "fetched_bytes_backing"));
    row("fetched", format!("{peers} from peers, {backing} from the backing"));
    let stuck = match status["stuck"]["now"].as_u64() {
        Some(n) if n > 0 => format!(", {n} of them stuck (see the log)"),
        _ => String::new(),
    };
    row("in flight", format!("{} operation(s){stuck}", text(status, "activity")));
    row("requests", counts(&status["rpc"]));
    row("leases", leases(&status["leases"]));
    row("opens", opens(status));
    if let Some(tracker) = tracker(status) {
        row("tracker", tracker);
    }
    if let Some(copies) = copies(&status["copies"]) {
        row("copies", copies);
    }
    section(&mut out, "peers", list(status, "peers"), peer_line);
    section(&mut out, "errors", list(status, "errors"), error_line);
    out
}

/// One screen about a job.
fn service_screen(status: &Value) -> String {
    let mut out = String::new();
    let mut row = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<12} {value}");
    };
    row("meta", text(status, "meta"));
    row("network", network(status));
    row("backing", text(status, "backing"));
    row("model", text(status, "consistency"));
    row("unflushed", format!("{} not on the backing yet", size(status, "unflushed_bytes")));
    row(
        "inodes",
        format!(
            "{}, {} owned ranges, {} forgotten (at most {} that could be)",
            text(status, "inodes"),
            text(status, "owned_ranges"),
            text(status, "forgotten"),
            text(status, "inodes_max"),
        ),
    );
    row("journal", size(status, "journal_bytes"));
    let up = Duration::from_millis(status["uptime_ms"].as_u64().unwrap_or(0));
    row("up", format!("{} s", up.as_secs()));
    row("requests", counts(&status["rpc"]));
    let (held, recalls) = (text(status, "leases"), text(status, "recalls"));
    let quiet = text(status, "quiet");
    row("leases", format!("{held} held, {recalls} called back, {quiet} of quiet writes"));
    let coupled = &status["coupled"];
    if coupled["files"].as_u64().is_some_and(|n| n > 0) || coupled["awaiting"].as_u64() > Some(0) {
        let (files, awaiting) = (text(coupled, "files"), text(coupled, "awaiting"));
        row("coupled", format!("{files} file(s), {awaiting} open(s) that wait for one"));
    }
    if !list(coupled, "lost").is_empty() {
        section(&mut out, "lost", list(coupled, "lost"), lost_line);
    }
    section(&mut out, "nodes", list(status, "nodes"), peer_line);
    section(&mut out, "standbys", list(status, "standbys"), standby_line);
    section(&mut out, "errors", list(status, "errors"), error_line);
    out
}

/// A coupled file that cannot be read.
fn lost_line(lost: &Value) -> String {
    let (path, node) = (text(lost, "path"), text(lost, "node"));
    format!("{path}: a producer at node {node} died while it wrote; to be written anew (O_TRUNC)")
}

fn standby_line(standby: &Value) -> String {
    let name = text(standby, "name");
    match standby["in_step"].as_bool() {
        Some(true) => format!("{name}: in step, {} changes behind", text(standby, "behind")),
        _ => format!("{name}: not in step yet"),
    }
}

/// What is encrypted on the network, and what went so.
fn network(status: &Value) -> String {
    let encrypted = &status["encrypted"];
    let which = match status["secure"].as_str() {
        _ if encrypted["has_keys"] == false => {
            return "loopback only, without a job token".to_owned();
        }
        Some("off") => return "nothing is encrypted (--secure off)".to_owned(),
        Some("on") => "everything is encrypted (--secure on)",
        _ => "encrypted but for loopback",
    };
    let [sent, received] = ["sent_bytes", "received_bytes"].map(|way| size(encrypted, way));
    format!("{which}: {sent} sent, {received} received")
}

/// How bytes come from other nodes, and which of them are not reached over RDMA.
fn transport(status: &Value) -> String {
    let (of, rdma) = (&status["transport"], &status["transport"]["rdma"]);
    if rdma.is_null() {
        return format!("tcp ({})", of["tcp_because"].as_str().unwrap_or("--transport tcp"));
    }
    if let Some(why) = rdma["failed"].as_str() {
        return format!("tcp (rdma at {} failed: {why})", text(rdma, "address"));
    }
    let peers: Vec<_> = rdma["peers"].as_object().into_iter().flatten().collect();
    let over_tcp: Vec<String> = peers
        .iter()
        .filter_map(|(peer, why)| why.as_str().map(|why| format!("; {peer} over tcp: {why}")))
        .collect();
    format!(
        "rdma at {}, not encrypted: {} of {} peers, {} came, {} went{}",
        text(rdma, "address"),
        peers.len() - over_tcp.len(),
        peers.len(),
        size(rdma, "placed_bytes"),
        size(rdma, "written_bytes"),
        over_tcp.concat(),
    )
}

/// Who starts another daemon when this one ends, or why nobody does.
fn supervisor(status: &Value) -> String {
    let of = &status["supervisor"];
    if of.is_null() {
        let why = text(status, "unsupervised");
        return format!("none ({why}): when the daemon ends unexpectedly, so do open files");
    }
    let mut out = format!("process {}, {} restart(s)", text(of, "pid"), text(of, "restarts"));
    if of["restarts"].as_u64().is_some_and(|n| n > 0) {
        let _ = write!(out, ", the last one: {}", text(of, "reason"));
    }
    if of["alive"] == false {
        out.push_str(" (it is gone)");
    }
    out
}

/// What was not asked.
fn leases(of: &Value) -> String {
    let [held, recalled, answered, quiet, told, seats, at_seats] =
        ["held", "recalled", "answered", "quiet", "told", "seats", "at_seats"]
            .map(|key| text(of, key));
    format!(
        "{held} held, {recalled} called back, {answered} questions answered, {quiet} writes told in {told} requests, {seats} files sat here, {at_seats} operations done where others sit"
    )
}

/// Which way opens went, and what keeps all of them from going past the daemon.
fn opens(status: &Value) -> String {
    match &status["io_path_obstacle"] {
        Value::String(why) => format!("{} (no passthrough: {why})", counts(&status["opens"])),
        _ => counts(&status["opens"]),
    }
}

/// Whether the kernel tells what is written past the daemon, where anything is.
fn tracker(status: &Value) -> Option<String> {
    let (Value::Null, Value::String(state)) = (&status["io_path_obstacle"], &status["tracker"])
    else {
        return None;
    };
    Some(match status["tracker_losses"].as_u64() {
        Some(n) if n > 0 => format!("{state} (files whose writes had to be looked for: {n})"),
        _ => state.clone(),
    })
}

/// The most frequent of what was counted.
fn counts(rpc: &Value) -> String {
    let Some(map) = rpc.as_object() else { return "-".to_owned() };
    let mut all: Vec<(&String, u64)> =
        map.iter().filter_map(|(k, v)| v.as_u64().filter(|n| *n > 0).map(|n| (k, n))).collect();
    all.sort_by_key(|(name, n)| (std::cmp::Reverse(*n), *name));
    let shown: Vec<String> = all.iter().take(SHOWN).map(|(k, n)| format!("{k} {n}")).collect();
    if shown.is_empty() { "none".to_owned() } else { shown.join(", ") }
}

fn section(out: &mut String, name: &str, items: &[Value], line: fn(&Value) -> String) {
    if items.is_empty() {
        let _ = writeln!(out, "{name:<12} none");
        return;
    }
    let _ = writeln!(out, "{name:<12} {}", items.len());
    for item in items.iter().take(SHOWN) {
        let _ = writeln!(out, "  {}", line(item));
    }
    if items.len() > SHOWN {
        let _ = writeln!(out, "  ... and {} more (--json shows all)", items.len() - SHOWN);
    }
}

fn peer_line(peer: &Value) -> String {
    let state = match peer["alive"].as_bool() {
        Some(false) => "gone",
        _ => "alive",
    };
    let (name, address) = (text(peer, "name"), text(peer, "address"));
    format!("{name:<24} {address:<22} {state:<6} dirty {}", size(peer, "dirty_bytes"))
}

fn error_line(error: &Value) -> String {
    let (path, operation) = (text(error, "path"), text(error, "operation"));
    let since = match &error["since"] {
        Value::Null => String::new(),
        _ => format!(" (since {})", text(error, "since")),
    };
    format!("{path}: {operation}: {}{since}", text(error, "text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_paths_are_told_apart() {
        assert!(is_address("node001:7400") && is_address("127.0.0.1:1") && is_address("[::1]:9"));
        assert!(!is_address("/mnt/a:1") && !is_address("mnt") && !is_address("a:port"));
    }

    #[test]
    fn the_screen_shows_what_matters_and_bears_what_is_missing() {
        let status = json!({
            "node": "n1", "consistency": "session", "backing": "/pfs", "mountpoint": "/m",
            "meta": "h:1", "dirty_bytes": 3 << 20, "flush_state": "waiting", "activity": 0,
            "rpc": {"lookup": 7, "attach": 9, "query": 0},
            "opens": {"passthrough-write": 2, "daemon:not-local": 5},
            "peers": [{"name": "n2", "address": "h:2", "alive": true}],
            "errors": [{"path": "a", "operation": "flush", "errno": 28, "text": "No space"}],
        });
        let screen = mount_screen(&status);
        for part in [
            "/pfs on /m",
            "3MiB",
            "waiting",
            "attach 9, lookup 7",
            "n2",
            "a: flush: No space",
            "daemon:not-local 5, passthrough-write 2\n",
        ] {
            assert!(screen.contains(part), "{part} in\n{screen}");
        }
        let daemon = json!({"opens": {"daemon:kernel": 1}, "io_path_obstacle": "kernel"});
        assert!(mount_screen(&daemon).contains("daemon:kernel 1 (no passthrough: kernel)"));
        let told = json!({"tracker": "on", "tracker_losses": 2});
        let expected = "on (files whose writes had to be looked for: 2)";
        assert!(mount_screen(&told).contains(expected));
        for (secure, keys, said) in [
            ("off", true, "nothing is encrypted (--secure off)"),
            ("loopback", true, "encrypted but for loopback: 3B sent, 4B received"),
            ("on", true, "everything is encrypted (--secure on): 3B sent, 4B received"),
            ("loopback", false, "loopback only, without a job token"),
        ] {
            let encrypted = json!({"has_keys": keys, "sent_bytes": 3, "received_bytes": 4});
            let screen = mount_screen(&json!({"secure": secure, "encrypted": encrypted}));
            assert!(screen.contains(said), "{said} in\n{screen}");
        }
        let peers = json!({"a:1": null, "b:2": "has no RDMA"});
        let rdma =
            json!({"address": "10.0.0.1:7", "placed_bytes": 5, "written_bytes": 6, "peers": peers});
        for (transport, said) in [
            (json!({"tcp_because": "no device"}), "tcp (no device)"),
            (json!({"rdma": rdma}), "1 of 2 peers, 5B came, 6B went; b:2 over tcp: has no RDMA"),
            (
                json!({"rdma": {"address": "x:1", "failed": "gone"}}),
                "tcp (rdma at x:1 failed: gone)",
            ),
        ] {
            let screen = mount_screen(&json!({"transport": transport}));
            assert!(screen.contains(said), "{said} in\n{screen}");
        }
        assert!(screen.lines().count() < 24);
        assert!(mount_screen(&json!({})).contains("errors"));
        assert!(service_screen(&json!({"nodes": [{}]})).contains("nodes"));
    }
}
