//! A session: the handshake, and event loops that read requests and hand them to a file system. It can
//! end without the mount, and another process go on with its devices.

use crate::abi::{self, opcode};
use crate::mount::Mount;
use crate::{
    Answer, Call, Device, Handshake, Head, Init, Notifier, REQUEST_DATA_MAX, ReplyEmpty, Request,
};
use fuser::{Errno, INodeNo, RequestId};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use zerocopy::IntoBytes;

/// The largest request: data, the heads before it, and names.
pub const REQUEST_BYTES_MAX: usize = REQUEST_DATA_MAX as usize + 8192;

/// What serves requests. Calls come from all event loops at once; whoever waits in one holds it up, so
/// what must wait takes its reply elsewhere.
pub trait Filesystem: Send + Sync + 'static {
    /// Asks the kernel for what is needed, once, before the first request; not when another process's
    /// session is resumed.
    ///
    /// # Errors
    /// When there can be no mount.
    fn init(&mut self, _kernel: &mut Handshake) -> io::Result<()> {
        Ok(())
    }

    /// What every operation that is answered fails with, if that is so now. What ends handles and
    /// look-ups goes on.
    fn refuses(&self) -> Option<Errno> {
        None
    }

    /// Whoever waits for the answer to this request has got a signal. It still wants one. The request
    /// can be on its way in another event loop, and can have been answered.
    fn interrupt(&self, _unique: RequestId) {}

    /// The kernel lets go of an inode, after so many look-ups.
    fn forget(&self, _inode: INodeNo, _lookups: u64) {}

    /// Answers a request, now or later.
    fn serve(&self, head: &Head, call: Call<'_>);
}

/// How it is mounted and served.
#[derive(Clone, Debug)]
pub struct Options {
    /// What is shown as the mount's source.
    pub name: String,
    /// What is shown behind `fuse.` as its type, where the helper mounts.
    pub subtype: String,
    /// The kernel checks permissions.
    pub default_permissions: bool,
    /// Everybody may use it, not only who mounts it.
    pub allow_other: bool,
    /// Event loops.
    pub loops: usize,
}

impl Options {
    /// A mount for its owner, with one event loop.
    #[must_use]
    pub fn new(name: &str) -> Options {
        Options {
            name: name.to_owned(),
            subtype: String::new(),
            default_permissions: false,
            allow_other: false,
            loops: 1,
        }
    }

    /// What kernel and helper understand alike.
    pub(crate) fn words(&self) -> impl Iterator<Item = &'static str> {
        let permissions = self.default_permissions.then_some("default_permissions");
        permissions.into_iter().chain(self.allow_other.then_some("allow_other"))
    }
}

/// A mount that is ready to be served.
#[derive(Debug)]
pub struct Session<F> {
    filesystem: F,
    /// One for each event loop; those that are missing are made when they are needed.
    devices: Vec<Arc<Device>>,
    loops: usize,
    users: Users,
    mount: Option<Mount>,
}

impl<F: Filesystem> Session<F> {
    /// Mounts, and comes to terms with the kernel.
    ///
    /// # Errors
    /// When it cannot be mounted, or the kernel is too old.
    pub fn mount(mut filesystem: F, at: &Path, options: &Options) -> io::Result<Session<F>> {
        let mount = Mount::new(at, options)?;
        handshake(mount.device(), &mut filesystem)?;
        let devices = vec![Arc::clone(mount.device())];
        let users = Users::of(options);
        Ok(Session { filesystem, devices, loops: options.loops.max(1), users, mount: Some(mount) })
    }

    /// Goes on with the devices of a mount that another process made. Nothing is unmounted at the end.
    ///
    /// # Errors
    /// When there is no device.
    pub fn resume(filesystem: F, devices: Vec<OwnedFd>, options: &Options) -> io::Result<Self> {
        if devices.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no device to go on with"));
        }
        let devices = devices.into_iter().map(|fd| Arc::new(Device::from(fd))).collect();
        let users = Users::of(options);
        Ok(Session { filesystem, devices, loops: options.loops.max(1), users, mount: None })
    }

    /// Makes the devices of all event loops, so that another process can hold them.
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn devices(&mut self) -> io::Result<Vec<BorrowedFd<'_>>> {
        self.make_devices()?;
        Ok(self.devices.iter().map(|device| device.as_fd()).collect())
    }

    fn make_devices(&mut self) -> io::Result<()> {
        while self.devices.len() < self.loops {
            let sibling = self.devices[0].sibling()?;
            self.devices.push(Arc::new(sibling));
        }
        Ok(())
    }

    /// The first device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.devices[0]
    }

    /// Tells the kernel of this mount.
    #[must_use]
    pub fn notifier(&self) -> Notifier {
        Notifier::new(Arc::clone(self.device()))
    }

    /// Serves requests until the mount has ended. What is then still mounted is unmounted.
    ///
    /// # Errors
    /// The first error of an event loop.
    pub fn run(mut self) -> io::Result<()> {
        self.make_devices()?;
        let Session { filesystem, devices, users, mount, .. } = self;
        let filesystem = Arc::new(filesystem);
        let mut threads = Vec::with_capacity(devices.len());
        for (i, device) in devices.into_iter().enumerate() {
            let served = Loop { device, filesystem: Arc::clone(&filesystem), users };
            let thread = thread::Builder::new().name(format!("fuse-{i}"));
            threads.push(thread.spawn(move || served.run())?);
        }
        let mut ended = Ok(());
        for thread in threads {
            ended = ended.and(joined(thread));
        }
        drop(mount);
        ended
    }

    /// Serves requests in threads of its own.
    ///
    /// # Errors
    /// When there can be no thread.
    pub fn spawn(mut self) -> io::Result<Background> {
        let mount = self.mount.take();
        let session = thread::Builder::new().name("fuse".into()).spawn(move || self.run())?;
        Ok(Background { session, mount })
    }
}

/// A session in threads of its own; dropping it unmounts.
#[derive(Debug)]
pub struct Background {
    session: JoinHandle<io::Result<()>>,
    mount: Option<Mount>,
}

impl Background {
    /// Waits until somebody unmounts it.
    ///
    /// # Errors
    /// The first error of an event loop.
    pub fn join(self) -> io::Result<()> {
        let ended = joined(self.session);
        drop(self.mount);
        ended
    }
}

fn joined(thread: JoinHandle<io::Result<()>>) -> io::Result<()> {
    thread.join().unwrap_or_else(|_| Err(io::Error::other("an event loop panicked")))
}

/// Answers the kernel's offer.
fn handshake(device: &Arc<Device>, filesystem: &mut impl Filesystem) -> io::Result<()> {
    let strange = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut buffer = vec![0; REQUEST_BYTES_MAX];
    loop {
        let len = device.receive(&mut buffer)?.ok_or(io::ErrorKind::NotConnected)?;
        let (head, body) = Head::decode(&buffer[..len]).map_err(|e| strange(&e.to_string()))?;
        let Ok(Request::Init(offer)) = Request::decode(&head, body) else {
            device.refuse(head.unique, Errno::EIO);
            return Err(strange("the kernel asks before it has introduced itself"));
        };
        if offer.major > abi::VERSION {
            // It is told which version is spoken here, and begins again with that.
            let ours = abi::InitOut { major: abi::VERSION, ..abi::InitOut::default() };
            device.answer(head.unique, Ok([ours.as_bytes(), &[]]));
            continue;
        }
        return come_to_terms(device, &head, &offer, filesystem);
    }
}

fn come_to_terms(
    device: &Arc<Device>,
    head: &Head,
    offer: &Init,
    filesystem: &mut impl Filesystem,
) -> io::Result<()> {
    let Init { major, minor, .. } = *offer;
    if (major, minor) < (abi::VERSION, abi::MINOR_VERSION_MIN) {
        device.refuse(head.unique, Errno::EPROTO);
        let text = format!("this kernel speaks version {major}.{minor} of FUSE, which is too old");
        return Err(io::Error::new(io::ErrorKind::Unsupported, text));
    }
    let mut terms = Handshake::new(offer);
    if let Err(e) = filesystem.init(&mut terms) {
        device.refuse(head.unique, Errno::from_i32(e.raw_os_error().unwrap_or(libc::EIO)));
        return Err(e);
    }
    tracing::debug!(?offer, ?terms, "the kernel's offer is answered");
    device.answer(head.unique, Ok([terms.answer().as_bytes(), &[]]));
    Ok(())
}

/// Whose requests are served. The kernel looks at the same, but not at the user that a process has
/// become for files alone (setfsuid).
#[derive(Clone, Copy, Debug)]
enum Users {
    All,
    One(u32),
}

impl Users {
    fn of(options: &Options) -> Users {
        match options.allow_other {
            true => Users::All,
            false => Users::One(rustix::process::geteuid().as_raw()),
        }
    }

    fn may(self, head: &Head) -> bool {
        match self {
            Users::All => true,
            Users::One(uid) => head.uid == uid || is_the_kernels(head.opcode),
        }
    }
}

/// What the kernel asks in its own name, or for a handle that was opened before.
fn is_the_kernels(opcode: u32) -> bool {
    matches!(
        opcode,
        opcode::READ
            | opcode::WRITE
            | opcode::READDIR
            | opcode::READDIRPLUS
            | opcode::FSYNC
            | opcode::FSYNCDIR
            | opcode::RELEASE
            | opcode::RELEASEDIR
    )
}

struct Loop<F> {
    device: Arc<Device>,
    filesystem: Arc<F>,
    users: Users,
}

impl<F: Filesystem> Loop<F> {
    fn run(&self) -> io::Result<()> {
        // Every page of the buffer is written here (an allocation of zeros would not be): when this
        // process is killed while the kernel copies a request to a page that is not there, the request
        // fails instead of staying for the next process.
        let mut buffer = std::hint::black_box(vec![u8::MAX; REQUEST_BYTES_MAX]);
        while let Some(len) = self.device.receive(&mut buffer)? {
            if self.take(&buffer[..len])?.is_break() {
                break;
            }
        }
        Ok(())
    }

    fn take(&self, bytes: &[u8]) -> io::Result<std::ops::ControlFlow<()>> {
        use std::ops::ControlFlow::{Break, Continue};
        let (head, body) = Head::decode(bytes)
            .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, format!("a request: {e}")))?;
        match Request::decode(&head, body) {
            Ok(Request::Interrupt(unique)) => self.filesystem.interrupt(unique),
            Ok(Request::Forget(forgets)) => {
                forgets.iter().for_each(|(inode, lookups)| self.filesystem.forget(inode, lookups));
            }
            Ok(Request::Destroy) => {
                ReplyEmpty::from(Answer::new(head.unique, &self.device)).ok();
                return Ok(Break(()));
            }
            Ok(request) => self.serve(&head, request),
            Err(e) if head.wants_answer() => {
                tracing::error!(opcode = head.opcode, error = %e, "a request makes no sense");
                self.device.refuse(head.unique, e.errno());
            }
            Err(e) => tracing::error!(opcode = head.opcode, error = %e, "what makes no sense"),
        }
        Ok(Continue(()))
    }

    fn serve(&self, head: &Head, request: Request<'_>) {
        // Handles must end even where nothing else goes on.
        let ends = matches!(head.opcode, opcode::RELEASE | opcode::RELEASEDIR);
        let refused = match self.users.may(head) {
            false => Some(Errno::EACCES),
            true => self.filesystem.refuses().filter(|_| !ends),
        };
        if let Some(error) = refused {
            return self.device.refuse(head.unique, error);
        }
        match request.with(Answer::new(head.unique, &self.device)) {
            Ok(call) => self.filesystem.serve(head, call),
            // The kernel does not ask for it again.
            Err(answer) => ReplyEmpty::from(answer).error(Errno::ENOSYS),
        }
    }
}
