//! What answers where the service was while it is away: the service with an older copy of its state, or
//! without one, the service of another job, something that speaks no known protocol. Nodes must refuse each
//! of them, lose nothing, and go on when the right one is back on its newest state.

use crate::plan::Stranger;
use ebb_testkit::{Cluster, Network, Node, Port};
use ebb_tests::tools::wait_until;
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

/// Until every node has heard of who answers, and of who is back.
const SOON: Duration = Duration::from_secs(40);

/// Until what the service has done is on stable storage by itself, and every node has heard so.
const HEARD_WITHIN: Duration = Duration::from_secs(6);

/// When it returns, the right service is back, and all nodes speak to it.
pub fn answer(
    cluster: &mut Cluster,
    network: Option<&Network>,
    syncs_nothing: bool,
    who: Stranger,
    time: Duration,
) {
    match who {
        Stranger::OldState => with_state(cluster, time, |cluster, state, old| {
            copy(state, old);
            // Now every node knows of a state that is newer than that.
            for node in cluster.nodes() {
                let path = node.path(format!("all/known-to-{}", node.name()));
                let file = fs::File::create(path).and_then(|mut f| {
                    f.write_all(b"newer")?;
                    f.sync_all()
                });
                file.unwrap_or_else(|e| {
                    panic!("{}: a file that the older state lacks: {e}", node.name())
                });
            }
            // What is not on stable storage could be lost in any case, and is not missed.
            if syncs_nothing {
                sleep(HEARD_WITHIN);
            }
        }),
        Stranger::NoState => with_state(cluster, time, |_, _, _| {}),
        Stranger::OtherJob => {
            cluster.kill_meta();
            let stranger = cluster.start_stranger();
            sleep(time);
            drop(stranger);
            cluster.restart_meta();
        }
        Stranger::Garbage => {
            let address = cluster.meta_address().expect("a service").to_owned();
            cluster.kill_meta();
            let garbage = Garbage::at(&address, network);
            sleep(time);
            drop(garbage);
            cluster.restart_meta();
        }
    }
    cluster.nodes().iter().for_each(speaks_again);
}

/// The service is started on another state for a while; `before` prepares it.
fn with_state(cluster: &mut Cluster, time: Duration, before: impl Fn(&Cluster, &Path, &Path)) {
    let state = cluster.meta_state();
    let (old, newest) = (cluster.root().join("old state"), cluster.root().join("newest state"));
    before(cluster, &state, &old);
    cluster.kill_meta();
    fs::rename(&state, &newest).expect("put the newest state away");
    if old.exists() {
        fs::rename(&old, &state).expect("an older copy");
    }
    cluster.restart_meta();
    // Nobody may be served: what is done on this state would be gone with it.
    for node in cluster.nodes() {
        let what = format!("{} refuses a service with another state", node.name());
        wait_until(SOON, &what, || is_refused(node));
    }
    sleep(time);
    cluster.kill_meta();
    fs::remove_dir_all(&state).expect("the other state");
    fs::rename(&newest, &state).expect("the newest state comes back");
    cluster.restart_meta();
}

/// The node says whose service answers.
fn is_refused(node: &Node) -> bool {
    let status = node.status();
    let errors = status["errors"].as_array().into_iter().flatten();
    let mut texts =
        errors.filter(|e| e["operation"] == "metadata service").map(|e| e["text"].to_string());
    texts.any(|text| text.contains("another job") || text.contains("older"))
}

fn speaks_again(node: &Node) {
    wait_until(SOON, &format!("{} speaks to its service again", node.name()), || {
        fs::read_dir(node.mountpoint()).is_ok_and(|list| list.flatten().count() > 0)
    });
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("mkdir");
    for entry in fs::read_dir(from).expect("the service's state").flatten() {
        // What is compacted just then may be gone.
        let _ = fs::copy(entry.path(), to.join(entry.file_name()));
    }
}

/// Says what is no protocol, to whoever comes.
struct Garbage {
    ended: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Garbage {
    fn at(address: &str, network: Option<&Network>) -> Garbage {
        let bind = || TcpListener::bind(address);
        let listener = match network {
            Some(network) => network.inside(Port::Service, bind).expect("its network"),
            None => bind(),
        };
        let listener = listener.expect("the service's port");
        listener.set_nonblocking(true).expect("a listener that does not wait");
        let ended = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&ended);
        let thread = std::thread::spawn(move || {
            let mut held = Vec::new();
            while !until.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((mut stream, _)) => {
                        let _ = stream.write_all(&[0xa5; 4096]);
                        held.push(stream);
                    }
                    Err(_) => sleep(Duration::from_millis(5)),
                }
            }
        });
        Garbage { ended, thread: Some(thread) }
    }
}

impl Drop for Garbage {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
