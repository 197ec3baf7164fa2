//! What is known of this process, and the writing of records.

use crate::descriptors::Descriptors;
use crate::mapped::Mappings;
use crate::output::Output;
use crate::state;
use crate::stdio::Streams;
use crate::sys::{self, Facts};
use ebb_trace_format::{Act, Call, Header, Record, What};
use std::collections::HashMap;
use std::os::unix::ffi::OsStringExt;

/// By which variables launchers tell their tasks who they are.
const TASKS: [&str; 4] = ["PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "FLUX_TASK_RANK"];

/// Regular files below these are memory that processes share, or the kernel's.
const NOT_STORAGE: [&str; 4] = ["/dev/", "/proc/", "/sys/", "/memfd:"];

/// When and from where a call was made.
#[derive(Clone, Copy, Debug)]
pub struct At {
    pub call: Call,
    /// The return address.
    pub from: usize,
    pub begin: u64,
}

impl At {
    pub fn now(call: Call, from: usize) -> At {
        At { call, from, begin: sys::now() }
    }
}

/// A file's number, and what else the tracer knows of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known {
    /// This process has record locks on it.
    pub has_locks: bool,
}

#[derive(Debug)]
pub struct Tracer {
    dir: Vec<u8>,
    output: Option<Output>,
    files: HashMap<(u64, u64, u64), Option<u32>>,
    pub known: Vec<Known>,
    sites: HashMap<usize, u32>,
    pub descriptors: Descriptors,
    pub streams: Streams,
    pub mappings: Mappings,
    has_ended: bool,
}

impl Tracer {
    /// Where the environment asks for a trace.
    pub fn from_environment() -> Option<Tracer> {
        let dir = std::env::var_os("EBB_TRACE_DIR").filter(|d| !d.is_empty())?.into_vec();
        Some(Tracer::begin(dir))
    }

    fn begin(dir: Vec<u8>) -> Tracer {
        let output = Output::create(&dir, header());
        if output.is_none() {
            say(b"ebb trace: this process is not traced: no file can be made in the trace's directory\n");
        }
        Tracer {
            dir,
            output,
            files: HashMap::new(),
            known: Vec::new(),
            sites: HashMap::new(),
            descriptors: Descriptors::default(),
            streams: Streams::default(),
            mappings: Mappings::default(),
            has_ended: false,
        }
    }

    /// The child of a fork has a file of its own, the same descriptors and streams.
    pub fn in_child(mut self) -> Option<Tracer> {
        if let Some(output) = self.output.take() {
            output.leave();
        }
        let mut child = Tracer::begin(self.dir);
        child.streams = self.streams;
        child.streams.in_child();
        Some(child)
    }

    /// Writes a record.
    pub fn record(&mut self, at: At, what: What) {
        let site = self.site(at.from);
        let end = sys::now();
        self.push(Record {
            begin: at.begin.min(end),
            end,
            thread: state::thread(),
            call: at.call,
            site,
            what,
        });
    }

    fn push(&mut self, record: Record) {
        let Some(output) = &mut self.output else { return };
        if !output.push(&record) {
            self.output = None;
            say(b"ebb trace: the rest of this process is not traced: no room for its trace\n");
        }
    }

    /// An access, if it touches anything.
    pub fn access(&mut self, at: At, file: u32, act: Act, start: u64, end: u64) {
        if start < end {
            self.record(at, What::Access { file, act, start, end });
        }
    }

    /// The number of a file, which is told of when it is met first; nothing for what is memory or the
    /// kernel's.
    pub fn file(&mut self, at: At, fd: i32, facts: &Facts) -> Option<u32> {
        let key = (facts.dev, facts.ino, facts.born);
        if let Some(number) = self.files.get(&key) {
            return *number;
        }
        let path = sys::path_of(fd);
        if NOT_STORAGE.iter().any(|prefix| path.starts_with(prefix.as_bytes())) {
            self.files.insert(key, None);
            return None;
        }
        let file = self.known.len() as u32 + 1;
        self.files.insert(key, Some(file));
        self.known.push(Known::default());
        let what = What::File { file, ino: facts.ino, born: facts.born, path };
        self.record(At { from: 0, ..at }, what);
        Some(file)
    }

    pub fn known(&mut self, file: u32) -> &mut Known {
        &mut self.known[file as usize - 1]
    }

    /// A cut of a file of `old` bytes to `new`: what it takes away, and that there was nothing beyond.
    pub fn cut(&mut self, at: At, file: u32, old: u64, new: u64) {
        self.access(at, file, Act::Write, old.min(new), old.max(new));
        self.access(at, file, Act::Read, old.max(new), u64::MAX);
    }

    fn site(&mut self, from: usize) -> u32 {
        if from == 0 {
            return 0;
        }
        if let Some(site) = self.sites.get(&from) {
            return *site;
        }
        let site = self.sites.len() as u32 + 1;
        self.sites.insert(from, site);
        // SAFETY: all zeros is a value of this structure of pointers.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: any address may be asked for.
        let found = unsafe { libc::dladdr(from as *const _, &raw mut info) } != 0;
        let (object, offset) = match found && !info.dli_fname.is_null() {
            // SAFETY: a name that ends, of an object that stays loaded while it is asked.
            true => (
                unsafe { std::ffi::CStr::from_ptr(info.dli_fname) }.to_bytes().to_vec(),
                from - info.dli_fbase as usize,
            ),
            false => (Vec::new(), from),
        };
        let end = sys::now();
        let what = What::Site { site, offset: offset as u64, object };
        self.push(Record { begin: end, end, thread: 0, call: Call::Start, site: 0, what });
        site
    }

    /// The process ends: what it has open is closed.
    pub fn exit(&mut self, flushes: bool) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        let at = At::now(Call::Exit, 0);
        match flushes {
            true => self.flush_streams(at),
            false => self.settle_streams(Call::Exit),
        }
        self.end_mappings(at);
        self.close_all(at);
        self.record(at, What::Exit);
        if let Some(output) = &self.output {
            output.trim();
        }
    }
}

fn header() -> Header {
    let start = sys::now();
    let mut host = [0u8; 256];
    // SAFETY: as many bytes as are said.
    unsafe { libc::gethostname(host.as_mut_ptr().cast(), host.len() - 1) };
    let len = host.iter().position(|b| *b == 0).unwrap_or(0);
    let task = TASKS.iter().find_map(|name| {
        let value = std::env::var_os(name)?.into_vec();
        Some([name.as_bytes(), b"=", &value].concat())
    });
    Header {
        host: host[..len].to_vec(),
        pid: sys::pid(),
        parent: sys::parent(),
        generation: 0,
        start,
        since_1970: sys::clock(libc::CLOCK_REALTIME).saturating_sub(start),
        task: task.unwrap_or_default(),
        program: program(),
    }
}

fn program() -> Vec<u8> {
    let mut path = vec![0u8; 3000];
    // SAFETY: a path that ends, and as many bytes as are said.
    let got = unsafe {
        libc::syscall(
            libc::SYS_readlinkat,
            libc::AT_FDCWD,
            c"/proc/self/exe".as_ptr(),
            path.as_mut_ptr(),
            path.len(),
        )
    };
    path.truncate(usize::try_from(got).unwrap_or(0));
    path
}

fn say(text: &[u8]) {
    // SAFETY: as many bytes as are said.
    unsafe { libc::syscall(libc::SYS_write, 2, text.as_ptr(), text.len()) };
}
