//! The calls of bpf(2) that the tracker makes. The layouts are the kernel's (`linux/bpf.h`); what it
//! adds at their ends later does not matter, a shorter one is filled up with zeros.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

const MAP_CREATE: libc::c_int = 0;
const MAP_LOOKUP: libc::c_int = 1;
const MAP_UPDATE: libc::c_int = 2;
const MAP_DELETE: libc::c_int = 3;
const PROG_LOAD: libc::c_int = 5;
const INFO_BY_FD: libc::c_int = 15;
const RAW_TRACEPOINT_OPEN: libc::c_int = 17;
const BTF_FD_BY_ID: libc::c_int = 19;
const BTF_NEXT_ID: libc::c_int = 23;

/// An element that is there is an error.
const ONLY_NEW: u64 = 1;

const MAP_TYPE_HASH: u32 = 1;
const MAP_TYPE_RING: u32 = 27;
/// Elements take memory when they are put in.
const MAP_NO_PREALLOC: u32 = 1;
const PROG_TYPE_TRACING: u32 = 26;
const ATTACH_RAW_TP: u32 = 23;

/// The program is offered to the kernel under both licences: the fields of its structures are for
/// programs under the GPL.
const LICENSE: &CStr = c"Dual MIT/GPL";

/// What the kernel says of a program that it refuses.
const LOG_BYTES: usize = 64 << 10;

/// The end of `bpf_prog_info` as far as it is read here.
const INFO_WORDS: usize = 27;
const INFO_RECURSION_MISSES: usize = 26;

fn bpf<T>(command: libc::c_int, attr: &mut T) -> io::Result<RawFd> {
    let size = size_of::<T>();
    // SAFETY: `attr` is a plain structure of this size; the addresses in it are those of buffers
    // that live until the call returns.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done as RawFd) }
}

fn bpf_fd<T>(command: libc::c_int, attr: &mut T) -> io::Result<OwnedFd> {
    let fd = bpf(command, attr)?;
    // SAFETY: the kernel has made this descriptor just now (with close-on-exec).
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[repr(C)]
#[derive(Default)]
struct MapCreate {
    kind: u32,
    key_bytes: u32,
    value_bytes: u32,
    entries_max: u32,
    flags: u32,
}

fn map(kind: u32, key: usize, value: usize, entries: u32, flags: u32) -> io::Result<OwnedFd> {
    let (key_bytes, value_bytes) = (key as u32, value as u32);
    let mut attr = MapCreate { kind, key_bytes, value_bytes, entries_max: entries, flags };
    bpf_fd(MAP_CREATE, &mut attr)
}

/// A hash map.
pub fn hash_map(key_bytes: usize, value_bytes: usize, entries_max: u32) -> io::Result<OwnedFd> {
    map(MAP_TYPE_HASH, key_bytes, value_bytes, entries_max, MAP_NO_PREALLOC)
}

/// A ring of so many bytes: a power of two, and of pages.
pub fn ring(bytes: u32) -> io::Result<OwnedFd> {
    map(MAP_TYPE_RING, 0, 0, bytes, 0)
}

#[repr(C)]
struct Element {
    map: u32,
    _pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

fn element(map: &OwnedFd, key: &[u64], value: u64) -> Element {
    Element { map: map.as_raw_fd() as u32, _pad: 0, key: address(key), value, flags: 0 }
}

fn address<T>(of: &[T]) -> u64 {
    of.as_ptr() as u64
}

/// Puts a new element into a hash map. The lengths are those of the map.
pub fn insert(map: &OwnedFd, key: &[u64], value: &[u64]) -> io::Result<()> {
    let flags = ONLY_NEW;
    bpf(MAP_UPDATE, &mut Element { flags, ..element(map, key, address(value)) }).map(drop)
}

/// Reads an element of a hash map. The lengths are those of the map.
pub fn lookup(map: &OwnedFd, key: &[u64], value: &mut [u64]) -> io::Result<()> {
    bpf(MAP_LOOKUP, &mut element(map, key, value.as_mut_ptr() as u64)).map(drop)
}

/// Takes an element of a hash map out.
pub fn delete(map: &OwnedFd, key: &[u64]) -> io::Result<()> {
    bpf(MAP_DELETE, &mut element(map, key, 0)).map(drop)
}

#[repr(C)]
#[derive(Default)]
struct ProgLoad {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_bytes: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attach_type: u32,
    debug: [u64; 4],
    debug_count: u32,
    attach_btf_id: u32,
    attach_btf: u32,
    _pad: u32,
}

/// Loads a program for the tracepoint whose type has this number, in the type information of a
/// module or of the kernel itself. With an error comes the end of what the kernel said.
pub fn load(
    name: &str,
    words: &[u64],
    btf_id: u32,
    module: Option<&OwnedFd>,
) -> Result<OwnedFd, (io::Error, String)> {
    let mut attr = ProgLoad {
        kind: PROG_TYPE_TRACING,
        count: words.len() as u32,
        instructions: address(words),
        license: LICENSE.as_ptr() as u64,
        attach_type: ATTACH_RAW_TP,
        attach_btf_id: btf_id,
        attach_btf: module.map_or(0, |fd| fd.as_raw_fd() as u32),
        ..ProgLoad::default()
    };
    // The last byte of a name is a zero.
    for (to, from) in attr.name[..15].iter_mut().zip(name.bytes()) {
        *to = from;
    }
    let first = match bpf_fd(PROG_LOAD, &mut attr) {
        Ok(fd) => return Ok(fd),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EPERM)) => return Err((e, String::new())),
        Err(e) => e,
    };
    let mut log = vec![0u8; LOG_BYTES];
    (attr.log_level, attr.log_bytes, attr.log) = (1, LOG_BYTES as u32, log.as_mut_ptr() as u64);
    bpf_fd(PROG_LOAD, &mut attr).map_err(|_| (first, log_end(&log)))
}

/// The last lines.
fn log_end(log: &[u8]) -> String {
    let text = log.split(|b| *b == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(6)..].iter().map(|line| format!("\n  {line}")).collect()
}

#[repr(C)]
struct RawTracepoint {
    name: u64,
    program: u32,
    _pad: u32,
}

/// From now on the program runs; it ends with the descriptor.
pub fn attach(program: &OwnedFd) -> io::Result<OwnedFd> {
    let program = program.as_raw_fd() as u32;
    bpf_fd(RAW_TRACEPOINT_OPEN, &mut RawTracepoint { name: 0, program, _pad: 0 })
}

#[repr(C)]
struct Info {
    fd: u32,
    bytes: u32,
    info: u64,
}

/// How often the kernel left a program out because it was running on the same processor; `None`
/// where the kernel does not count that.
pub fn misses(program: &OwnedFd) -> io::Result<Option<u64>> {
    let mut words = [0u64; INFO_WORDS];
    let bytes = size_of_val(&words) as u32;
    let fd = program.as_fd().as_raw_fd() as u32;
    let mut attr = Info { fd, bytes, info: words.as_mut_ptr() as u64 };
    bpf(INFO_BY_FD, &mut attr)?;
    Ok((attr.bytes == bytes).then_some(words[INFO_RECURSION_MISSES]))
}

#[repr(C)]
struct Id {
    id: u32,
    next: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct BtfInfo {
    data: u64,
    bytes: u32,
    id: u32,
    name: u64,
    name_len: u32,
    is_kernel: u32,
}

/// The kernel's own handle of a module's type information.
pub fn module_btf(module: &str) -> io::Result<OwnedFd> {
    let mut id = 0;
    loop {
        let mut attr = Id { id, next: 0, flags: 0 };
        bpf(BTF_NEXT_ID, &mut attr)?;
        id = attr.next;
        let fd = match bpf_fd(BTF_FD_BY_ID, &mut Id { id, next: 0, flags: 0 }) {
            Ok(fd) => fd,
            // It went meanwhile.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => continue,
            Err(e) => return Err(e),
        };
        let mut name = [0u8; 64];
        let name_at = name.as_mut_ptr() as u64;
        let mut info = BtfInfo { name: name_at, name_len: 64, ..BtfInfo::default() };
        let at = std::ptr::from_mut(&mut info) as u64;
        let bytes = size_of::<BtfInfo>() as u32;
        bpf(INFO_BY_FD, &mut Info { fd: fd.as_raw_fd() as u32, bytes, info: at })?;
        let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
        if info.is_kernel == 1 && &name[..end] == module.as_bytes() {
            return Ok(fd);
        }
    }
}
