//! What `libebb` asks, as ioctls on open files ([`ebb_api_format`]). Everything that is checked about a
//! caller is checked here: that it is a request, how the file was opened, and that what its locks
//! protected is still this node's. The kernel has proven which file it is.

use super::convert::{errno, ino};
use super::{Adapter, caller, checked};
use crate::file::CachedFile;
use crate::handles::OpenFile;
use crate::metrics::Operation;
use crate::node::Node;
use crate::ops::coupling;
use crate::ops::lists::ListStored;
use ebb_api_format::{self as format, PiecesRead, Request, Span, Stat, Stored, Which};
use ebb_fuse::{Head, Ioctl, ReplyIoctl};
use ebb_meta_client::Left;
use ebb_types::{Access, ByteRange, Errno, Ino, Name, NodeId};
use std::sync::Arc;

/// Who asks.
#[derive(Clone, Copy)]
struct Asker {
    uid: u32,
    /// The same request may have been carried out by a daemon before this one.
    again: bool,
    /// Room for the answer.
    room: usize,
}

impl Adapter {
    pub(super) fn ioctl(&self, head: &Head, asked: &Ioctl<'_>, reply: ReplyIoctl) {
        let buffer = format::buffer_of(asked.command);
        let fits = buffer == Some(asked.data.len()) && buffer == Some(asked.out_size as usize);
        // Nothing is wrong with asking something else: isatty(3) does, at every open of many languages.
        let open = if fits { self.node.handles.file(asked.handle.0) } else { None };
        if fits
            && open.is_none()
            && let Some(dir) = self.node.handles.dir_or_again(asked.handle.0, ino(asked.inode))
        {
            return self.dir_ioctl(head, dir.ino, asked.data, reply);
        }
        let Some((open, reply)) = checked(open.ok_or(Errno::ENOTTY), reply) else { return };
        let ready = self.node.locks_hold(&open, None).and_then(|()| {
            let request = Request::decode(asked.data).map_err(|_| Errno::EINVAL)?;
            may(&open, &request)
        });
        let Some(((), reply)) = checked(ready, reply) else { return };
        let asker = Asker { uid: head.uid, again: caller(head).again, room: asked.data.len() };
        let (node, buffer) = (Arc::clone(&self.node), asked.data.to_vec());
        let work = async move {
            let request = Request::decode(&buffer).map_err(|_| Errno::EINVAL)?;
            let nothing = |()| Vec::new();
            let answer = match request {
                Request::Join(of) => coupling::join(&node, &open, of).await.map(nothing)?,
                Request::Fail => coupling::gives_up(&node, &open, Left::Died).await.map(nothing)?,
                Request::Withdraw => {
                    coupling::gives_up(&node, &open, Left::Withdrawn).await.map(nothing)?
                }
                Request::Done => coupling::done(&node, &open).await.map(nothing)?,
                request => node.asked_by_library(&open.file, request, asker).await?,
            };
            node.locks_hold(&open, None)?;
            if answer.len() <= asker.room { Ok(answer) } else { Err(Errno::EOVERFLOW) }
        };
        self.spawn_once(Operation::Library, head, work, move |r| match r {
            Ok(answer) => reply.bytes(&answer),
            Err(e) => reply.error(errno(e)),
        });
    }
}

impl Adapter {
    /// The same of a directory. What it may be asked for everybody may ask who has it open.
    fn dir_ioctl(&self, head: &Head, dir: Ino, data: &[u8], reply: ReplyIoctl) {
        let name = match Request::decode(data) {
            Ok(Request::Await(name)) => Name::new(name),
            Ok(_) => Err(Errno::ENOTTY),
            Err(_) => Err(Errno::EINVAL),
        };
        let Some((name, reply)) = checked(name, reply) else { return };
        let node = Arc::clone(&self.node);
        let work = async move { coupling::await_in(&node, dir, name).await };
        self.spawn_once(Operation::Library, head, work, move |r| match r {
            Ok(()) => reply.bytes(&[]),
            Err(e) => reply.error(errno(e)),
        });
    }
}

/// What read and write need, primitives need too: whoever publishes or gives up bytes writes.
fn may(open: &OpenFile, request: &Request<'_>) -> Result<(), Errno> {
    let (reads, writes) = match request {
        Request::Stat | Request::Query(_) | Request::Handle => (false, false),
        Request::Join(_) | Request::Fail | Request::Withdraw | Request::Done => (false, false),
        Request::Await(_) => return Err(Errno::ENOTDIR),
        Request::ReadFrom { .. } | Request::Read { .. } | Request::Fetch { .. } => (true, false),
        Request::Attach(_)
        | Request::Detach(_)
        | Request::Flush(_)
        | Request::Write { .. }
        | Request::Publish(_) => (false, true),
    };
    let allowed = match open.access {
        Some(access) => !(reads && access == Access::Write || writes && access == Access::Read),
        None => !reads && !writes,
    };
    if allowed { Ok(()) } else { Err(Errno::EBADF) }
}

fn range(span: Span) -> ByteRange {
    ByteRange::at(span.offset, span.len)
}

fn ranges(spans: &[Span]) -> Vec<ByteRange> {
    spans.iter().map(|s| range(*s)).collect()
}

fn chosen(which: Which) -> Option<ByteRange> {
    match which {
        Which::File => None,
        Which::Range(span) => Some(range(span)),
    }
}

impl Node {
    async fn asked_by_library(
        &self,
        file: &Arc<CachedFile>,
        request: Request<'_>,
        asker: Asker,
    ) -> Result<Vec<u8>, Errno> {
        let nothing = |()| Vec::new();
        match request {
            Request::Stat => self.library_stat(file).await,
            Request::Attach(which) => self.attach_asked(file, chosen(which)).await.map(nothing),
            Request::Query(which) => self.library_query(file, which, asker).await,
            Request::Detach(which) => {
                self.detach_asked(file, chosen(which), asker.again).await.map(nothing)
            }
            Request::Flush(which) => self.flush_asked(file, chosen(which)).await.map(nothing),
            Request::ReadFrom { span, owner } => {
                let len = span.len.min(asker.room as u64);
                let range = ByteRange::at(span.offset, len);
                self.read_from(file, range, NodeId(owner)).await.map(|bytes| bytes.to_vec())
            }
            Request::Write { pieces, data, publish } => {
                self.library_write(file, (&pieces, data), publish, asker).await
            }
            Request::Publish(around) => self.end_list(file, range(around)).await.map(nothing),
            Request::Read { pieces, ask } => {
                if !format::fits(&pieces, asker.room) {
                    return Err(Errno::EINVAL);
                }
                self.library_ask(file, ask).await?;
                let mut answer = PiecesRead::default();
                self.read_list(file, &ranges(&pieces), |bytes| answer.push(bytes)).await?;
                Ok(answer.encode())
            }
            Request::Fetch { pieces, ask } => {
                self.library_ask(file, ask).await?;
                self.fetch_list(file, &ranges(&pieces)).await;
                Ok(Vec::new())
            }
            Request::Handle => self.reference(file.ino).map(|handle| handle.to_vec()),
            // Of opens, not of files.
            _ => Err(Errno::ENOTTY),
        }
    }

    async fn library_ask(&self, file: &Arc<CachedFile>, ask: Option<Span>) -> Result<(), Errno> {
        match ask {
            Some(around) => self.ask_for_list(file, range(around)).await,
            None => self.wait_for_the_disk(file).await,
        }
    }

    async fn library_stat(&self, file: &Arc<CachedFile>) -> Result<Vec<u8>, Errno> {
        let standing = self.standing(file).await?;
        let stat = Stat {
            size: standing.size,
            node: self.me.0,
            unattached: standing.unattached,
            unflushed: standing.unflushed,
            model: standing.model,
        };
        Ok(stat.encode())
    }

    async fn library_query(
        &self,
        file: &Arc<CachedFile>,
        which: Which,
        asker: Asker,
    ) -> Result<Vec<u8>, Errno> {
        let range = chosen(which).unwrap_or(ByteRange::new(0, format::OFFSET_MAX));
        let (owned, end) = self.owners(file, range).await?;
        let owned: Vec<format::Owned> = owned
            .into_iter()
            .map(|o| format::Owned {
                span: Span { offset: o.range.start(), len: o.range.len() },
                owner: o.node.0,
            })
            .collect();
        let next = (end < range.end()).then_some(end);
        Ok(format::Owners::encode(&owned, next, asker.room))
    }

    async fn library_write(
        &self,
        file: &Arc<CachedFile>,
        (pieces, data): (&[Span], &[u8]),
        publish: Option<Span>,
        asker: Asker,
    ) -> Result<Vec<u8>, Errno> {
        if !data.is_empty() && asker.uid != 0 {
            // The kernel, which asks for that with a write, does not know that this is one.
            let attr = self.getattr(file.ino).await?;
            if attr.perm & 0o6000 != 0 {
                self.kill_priv(file.ino).await?;
            }
        }
        let stored = self.write_list(file, &ranges(pieces), data).await;
        let ListStored { bytes, stopped, publish: owes } = stored;
        match publish {
            // After an error the rest of the list is not written, and what is stored is published by a
            // request of its own.
            Some(around) if stopped.is_none() => {
                self.end_list(file, range(around)).await?;
                Ok(Stored { bytes: bytes as u32, errno: 0, publish: false }.encode())
            }
            _ => {
                let errno = stopped.map_or(0, |e| e.0.unsigned_abs());
                Ok(Stored { bytes: bytes as u32, errno, publish: owes }.encode())
            }
        }
    }
}
