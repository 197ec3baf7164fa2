//! What must be true of this machine before a daemon is started: directories, addresses, the
//! token. Every refusal names the path or flag to look at; nothing is mounted or started here.

use crate::exit::{Context, Failure};
use crate::mounts;
use ebb_fs_client::config::MountConfig;
use ebb_transport::Secure;
use ebb_transport::auth::Token;
use rustix::fs::{Access, access};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Copies are of no use to those who cannot find them.
const COPIES_WITHOUT_SERVICE: &str = "--replicas 2 without --meta: the metadata service is part of \
    this node, and when this node is lost the copies of its bytes cannot be found; run `ebb meta` on \
    a node that is not lost with it, and name that with --meta on all nodes";

/// Checks a configuration; answers what the user should know although it is no error.
pub fn mount(config: &MountConfig) -> Result<Vec<String>, Failure> {
    // First, because a look at a dead mount's files would only say "not connected".
    mount_point(&config.mountpoint)?;
    let mut notes = backing(&config.backing)?;
    if config.replicas > 1 && config.meta.is_none() {
        notes.push(COPIES_WITHOUT_SERVICE.to_owned());
    }
    nothing_inside_itself(config)?;
    socket_name(&config.cache)?;
    crate::models::check(config)?;
    watermarks(config)?;
    listen(&config.listen, config.token_file.as_deref(), "--listen")?;
    secure(config.secure, config.token_file.as_deref())?;
    ebb_fs_client::carrier::check(config).map_err(Failure::usage)?;
    if let Some(meta) = &config.meta {
        service(meta)?;
    }
    fuse_device()?;
    Ok(notes)
}

fn mount_point(point: &Path) -> Result<(), Failure> {
    let shown = point.display();
    if let Some(mount) = mounts::at(point).or_failed("/proc/self/mountinfo")? {
        let limit = std::time::Duration::from_secs(5);
        return Err(Failure::usage(match mount.is_ebb() {
            true if mounts::answers(point, limit) => {
                format!("mount point {shown}: Ebb is mounted there already (`ebb umount {shown}`)")
            }
            true => format!(
                "mount point {shown}: a mount whose daemon is dead is in the way \
                 (`ebb umount {shown}` takes it away, or `umount -l {shown}`)"
            ),
            false => format!("mount point {shown}: {} is mounted there already", mount.fstype),
        }));
    }
    let what = format!("mount point {shown}");
    let mut entries = std::fs::read_dir(point).or_usage(&what)?;
    if entries.next().is_some() {
        return Err(Failure::usage(format!("{what}: not empty (use an empty directory)")));
    }
    Ok(())
}

fn backing(dir: &Path) -> Result<Vec<String>, Failure> {
    let what = format!("backing {}", dir.display());
    let meta = std::fs::metadata(dir).or_usage(&what)?;
    if !meta.is_dir() {
        return Err(Failure::usage(format!("{what}: not a directory")));
    }
    access(dir, Access::READ_OK | Access::EXEC_OK)
        .or_usage(format!("{what}: this user cannot read it"))?;
    Ok(match access(dir, Access::WRITE_OK) {
        Ok(()) => Vec::new(),
        Err(e) => vec![format!(
            "{what}: not writable for this user ({e}): new files at its top \
                                cannot be drained"
        )],
    })
}

/// Refuses arrangements in which the daemon would look at files through its own mount, or
/// would show its own files in it.
fn nothing_inside_itself(config: &MountConfig) -> Result<(), Failure> {
    let point = ("mount point", config.mountpoint.as_path());
    let backing = ("backing", config.backing.as_path());
    let cache = ("cache", config.cache.as_path());
    let state = ("state directory", config.state.as_path());
    let pairs = [
        (point, backing),
        (backing, point),
        (point, cache),
        (cache, point),
        (state, point),
        (cache, backing),
        (backing, cache),
        (state, backing),
    ];
    for ((inner_name, inner), (outer_name, outer)) in pairs {
        if is_inside(inner, outer) {
            return Err(Failure::usage(format!(
                "{inner_name} {} is inside the {outer_name} {}: the mount would contain itself",
                inner.display(),
                outer.display()
            )));
        }
    }
    Ok(())
}

/// True when `inner` is `outer` or below it, also by another path to the same directory (a
/// symbolic link, a bind mount). Parts of `inner` that do not exist yet count by name.
fn is_inside(inner: &Path, outer: &Path) -> bool {
    let same = |a: &Path, b: &Path| match (std::fs::metadata(a), std::fs::metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => a == b,
    };
    let real = real_path(inner);
    real.ancestors().any(|a| same(a, outer))
}

/// The canonical path of the longest part that exists, and the rest as it is.
fn real_path(path: &Path) -> PathBuf {
    for existing in path.ancestors() {
        if let Ok(real) = existing.canonicalize() {
            return match path.strip_prefix(existing) {
                Ok(rest) if rest.as_os_str().is_empty() => real,
                Ok(rest) => real.join(rest),
                Err(_) => real,
            };
        }
    }
    path.to_owned()
}

/// The control socket stands in the cache directory, and the kernel bounds its name.
fn socket_name(cache: &Path) -> Result<(), Failure> {
    const LONGEST: usize = 107;
    let (length, shown) = (cache.join("control.sock").as_os_str().len(), cache.display());
    if length <= LONGEST {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "cache {shown}: with control.sock in it {length} bytes long, {LONGEST} are possible (name \
         a shorter --cache)"
    )))
}

fn watermarks(config: &MountConfig) -> Result<(), Failure> {
    let (low, high) = (config.low_watermark, config.high_watermark);
    if low.0 < high.0 {
        return Ok(());
    }
    Err(Failure::usage(format!("--low-watermark {low} must be below --high-watermark {high}")))
}

/// Checks an address to listen on; whoever opens it to other machines must hold a token.
pub fn listen(address: &str, token: Option<&Path>, flag: &str) -> Result<(), Failure> {
    let addresses = resolve(address, flag)?;
    match token {
        Some(file) => Token::load(file).map(drop).map_err(|e| Failure::usage(e.to_string())),
        None if addresses.iter().all(|a| a.ip().is_loopback()) => Ok(()),
        None => Err(Failure::usage(format!(
            "{flag} {address}: other machines could reach this address, so it needs --token-file \
             FILE (`ebb token FILE` makes one)"
        ))),
    }
}

/// Keys are made of the token.
pub fn secure(secure: Secure, token: Option<&Path>) -> Result<(), Failure> {
    match (secure, token) {
        (Secure::On, None) => Err(Failure::usage(
            "--secure on: needs the job's secret, --token-file FILE (`ebb token FILE` makes one)",
        )),
        _ => Ok(()),
    }
}

/// Where the job's service is: HOST:PORT, or `dir:DIR` where it says so.
fn service(meta: &str) -> Result<(), Failure> {
    match ebb_coordinator::directory_of(meta) {
        None => resolve(meta, "--meta").map(drop),
        Some(dir) if !dir.is_absolute() => {
            Err(Failure::usage(format!("--meta {meta}: the directory must begin with /")))
        }
        Some(dir) => match ebb_coordinator::newest_in(dir) {
            Ok(_) => Ok(()),
            Err(e) => Err(Failure::usage(format!("--meta {meta}: {e}"))),
        },
    }
}

/// The socket addresses of `HOST:PORT`.
pub fn resolve(address: &str, flag: &str) -> Result<Vec<SocketAddr>, Failure> {
    let port = address.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
    if !matches!(port, Some(Ok(_))) {
        return Err(Failure::usage(format!("{flag} {address}: not HOST:PORT")));
    }
    let found: Vec<_> = address.to_socket_addrs().or_usage(format!("{flag} {address}"))?.collect();
    if found.is_empty() {
        return Err(Failure::usage(format!("{flag} {address}: the host has no address")));
    }
    Ok(found)
}

fn fuse_device() -> Result<(), Failure> {
    let open = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
    open.map(drop).map_err(|e| {
        let remedy = match e.kind() {
            std::io::ErrorKind::PermissionDenied => "it must be open to users, mode 0666",
            _ => "load the fuse module; in a container pass the device on",
        };
        Failure::failed(format!("/dev/fuse: {e} ({remedy})"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn insides_are_seen_through_links_and_missing_parts() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(base.join("a/b")).unwrap();
        std::os::unix::fs::symlink("a", base.join("link")).unwrap();
        assert!(is_inside(&base.join("a/b"), &base.join("a")));
        assert!(is_inside(&base.join("a"), &base.join("a")));
        assert!(is_inside(&base.join("link/b/not/yet"), &base.join("a")));
        assert!(!is_inside(&base.join("a"), &base.join("a/b")));
        assert!(!is_inside(&base.join("ab"), &base.join("a")));
    }

    #[test]
    fn a_cache_whose_socket_could_not_be_named_is_refused() {
        assert!(socket_name(Path::new("/tmp/cache")).is_ok());
        let long = Path::new("/tmp").join("x".repeat(100));
        assert!(socket_name(&long).unwrap_err().text.contains("--cache"));
    }

    #[test]
    fn open_addresses_need_a_token_and_loopback_does_not() {
        assert!(listen("127.0.0.1:0", None, "--listen").is_ok());
        assert!(listen("[::1]:0", None, "--listen").is_ok());
        let e = listen("0.0.0.0:0", None, "--listen").unwrap_err();
        assert!(e.status == 2 && e.text.contains("--token-file"));
        for bad in ["127.0.0.1", "127.0.0.1:port", "127.0.0.1:70000", "no such host.invalid:1"] {
            assert_eq!(listen(bad, None, "--listen").unwrap_err().status, 2, "{bad}");
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        Token::generate_to(&file).unwrap();
        assert!(listen("0.0.0.0:0", Some(&file), "--listen").is_ok());
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o644))
            .unwrap();
        assert!(listen("127.0.0.1:0", Some(&file), "--listen").is_err());
    }

    #[test]
    fn a_mount_point_must_be_an_empty_directory() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        assert!(mount_point(&base).is_ok());
        std::fs::write(base.join("f"), "").unwrap();
        for (path, says) in
            [(base.clone(), "not empty"), (base.join("f"), "f"), (base.join("none"), "none")]
        {
            let e = mount_point(&path).unwrap_err();
            assert!(e.status == 2 && e.text.contains(says), "{e}");
        }
        assert!(mount_point(Path::new("/proc")).unwrap_err().text.contains("proc"));
    }
}
