//! A network of its own for several nodes of one machine: the service and each node in a network
//! namespace, on a bridge in another one, with links that can be cut, parted, slowed and made to lose
//! packets. Nothing of the machine's own network is touched. Needs root, `ip` and `tc` (iproute2).
//! Everything goes when it is dropped.

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Who is on the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// The metadata service.
    Service,
    /// A node, by its number.
    Node(usize),
}

impl Port {
    fn number(self) -> usize {
        match self {
            Port::Service => 0,
            Port::Node(index) => index + 1,
        }
    }
}

/// The namespaces and links.
#[derive(Debug)]
pub struct Network {
    prefix: String,
    ports: usize,
    has_netem: bool,
}

/// Several networks of one process.
static COUNT: AtomicU32 = AtomicU32::new(0);

fn run(line: &str) -> Result<(), String> {
    let words: Vec<&str> = line.split(' ').collect();
    let output = Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).output();
    let output = output.map_err(|e| format!("{}: {e}", words[0]))?;
    let error = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{line}: {}", error.trim())) }
}

fn must(line: &str) {
    run(line).unwrap_or_else(|e| panic!("{e}"));
}

impl Network {
    /// A network for the service and so many nodes; or why there can be none on this machine.
    ///
    /// # Errors
    /// Not root, no namespaces, no `ip` or `tc`.
    pub fn new(nodes: usize) -> Result<Network, String> {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("ebb-links-{}-{count}", std::process::id());
        let mut network = Network { prefix, ports: nodes + 1, has_netem: false };
        network.build()?;
        let first = network.link(Port::Service);
        network.has_netem = run(&format!("{first} root netem delay 1ms")).is_ok();
        network.repair(Port::Service);
        let tbf = format!("{first} root tbf rate 1gbit burst 256kb latency 50ms");
        run(&tbf)?;
        network.repair(Port::Service);
        Ok(network)
    }

    fn build(&self) -> Result<(), String> {
        let hub = self.hub();
        run(&format!("ip netns add {hub}"))?;
        run(&format!("ip -n {hub} link add br0 type bridge"))?;
        run(&format!("ip -n {hub} link set br0 up"))?;
        for number in 0..self.ports {
            let space = self.space_of(number);
            run(&format!("ip netns add {space}"))?;
            run(&format!("ip -n {hub} link add v{number} type veth peer name eth0 netns {space}"))?;
            run(&format!("ip -n {hub} link set v{number} master br0 up"))?;
            run(&format!("ip -n {space} addr add {}/24 dev eth0", host(number)))?;
            run(&format!("ip -n {space} link set lo up"))?;
            run(&format!("ip -n {space} link set eth0 up"))?;
        }
        Ok(())
    }

    fn hub(&self) -> String {
        format!("{}-hub", self.prefix)
    }

    fn space_of(&self, number: usize) -> String {
        format!("{}-{number}", self.prefix)
    }

    fn link(&self, port: Port) -> String {
        format!("tc -n {} qdisc replace dev v{}", self.hub(), port.number())
    }

    /// Whether single packets can be lost and delayed here (the kernel has netem).
    #[must_use]
    pub fn has_netem(&self) -> bool {
        self.has_netem
    }

    /// Where it is reached.
    #[must_use]
    pub fn host(&self, port: Port) -> String {
        host(port.number())
    }

    /// Its namespace, for `nsenter --net`.
    #[must_use]
    pub fn space(&self, port: Port) -> PathBuf {
        Path::new("/run/netns").join(self.space_of(port.number()))
    }

    /// Moves the calling thread there, for good; what it starts is there as well.
    pub fn move_into(&self, port: Port) -> io::Result<()> {
        let space = File::open(self.space(port))?;
        Ok(move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    /// Does `work` there, on a thread of its own.
    pub fn inside<T: Send>(&self, port: Port, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        std::thread::scope(|scope| {
            let there = scope.spawn(|| self.move_into(port).map(|()| work()));
            there.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Nothing comes through any more, and nobody is told.
    pub fn cut(&self, port: Port) {
        must(&format!("ip -n {} link set v{} down", self.hub(), port.number()));
    }

    /// Ends [`Network::cut`].
    pub fn join(&self, port: Port) {
        must(&format!("ip -n {} link set v{} up", self.hub(), port.number()));
    }

    /// These two do not reach each other any more; both reach everybody else.
    pub fn part(&self, one: Port, other: Port, apart: bool) {
        let to = if apart { "on" } else { "off" };
        for port in [one, other] {
            let link = format!("link set dev v{}", port.number());
            must(&format!("ip -n {} {link} type bridge_slave isolated {to}", self.hub()));
        }
    }

    /// What is sent to it is late, and some of it is lost: packet by packet where the kernel has
    /// netem, else by a narrow link with a short queue.
    pub fn spoil(&self, port: Port, delay: Duration, lost_percent: u32) {
        let link = self.link(port);
        if self.has_netem {
            let ms = delay.as_millis();
            must(&format!("{link} root netem delay {ms}ms {}ms loss {lost_percent}%", ms / 3));
        } else {
            let ms = delay.as_millis().max(1);
            let rate = 4_000 / (1 + u64::from(lost_percent));
            must(&format!("{link} root tbf rate {rate}kbit burst 4kb latency {ms}ms"));
        }
    }

    /// What is sent to it comes at `rate` at most, as `tc` writes it (10gbit).
    ///
    /// # Errors
    /// What `tc` says.
    pub fn limit(&self, port: Port, rate: &str) -> Result<(), String> {
        // What a busy machine gets done between two ticks of its clock has to fit.
        run(&format!("{} root tbf rate {rate} burst 8mb latency 20ms", self.link(port)))
    }

    /// Ends [`Network::spoil`] and [`Network::limit`].
    pub fn repair(&self, port: Port) {
        let (hub, number) = (self.hub(), port.number());
        let _ = run(&format!("tc -n {hub} qdisc del dev v{number} root"));
    }
}

fn host(number: usize) -> String {
    format!("10.78.0.{}", number + 1)
}

impl Drop for Network {
    fn drop(&mut self) {
        for number in 0..self.ports {
            let _ = run(&format!("ip netns del {}", self.space_of(number)));
        }
        let _ = run(&format!("ip netns del {}", self.hub()));
    }
}
