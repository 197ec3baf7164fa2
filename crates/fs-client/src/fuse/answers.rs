//! The ends of operations: a result becomes the answer of its kind.

use super::TTL;
use super::convert::{attr, errno};
use ebb_fuse::{ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyWrite, ReplyXattr};
use ebb_types::{Attr, Errno};

pub fn empty(reply: ReplyEmpty) -> impl FnOnce(Result<(), Errno>) + Send {
    move |r| match r {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(errno(e)),
    }
}

pub fn entry(reply: ReplyEntry) -> impl FnOnce(Result<Attr, Errno>) + Send {
    move |r| match r {
        Ok(a) => reply.entry(TTL, &attr(&a)),
        Err(e) => reply.error(errno(e)),
    }
}

pub fn attributes(reply: ReplyAttr) -> impl FnOnce(Result<Attr, Errno>) + Send {
    move |r| match r {
        Ok(a) => reply.attr(TTL, &attr(&a)),
        Err(e) => reply.error(errno(e)),
    }
}

pub fn data<B: AsRef<[u8]>>(reply: ReplyData) -> impl FnOnce(Result<B, Errno>) + Send {
    move |r| match r {
        Ok(bytes) => reply.data(bytes.as_ref()),
        Err(e) => reply.error(errno(e)),
    }
}

pub fn written(reply: ReplyWrite) -> impl FnOnce(Result<u32, Errno>) + Send {
    move |r| match r {
        Ok(n) => reply.written(n),
        Err(e) => reply.error(errno(e)),
    }
}

pub fn offset(reply: ReplyLseek) -> impl FnOnce(Result<i64, Errno>) + Send {
    move |r| match r {
        Ok(at) => reply.offset(at),
        Err(e) => reply.error(errno(e)),
    }
}

pub fn xattr(reply: ReplyXattr, size: u32) -> impl FnOnce(Result<Vec<u8>, Errno>) + Send {
    move |r| match r {
        Ok(v) if size == 0 => reply.size(v.len() as u32),
        Ok(v) if v.len() > size as usize => reply.error(errno(Errno::ERANGE)),
        Ok(v) => reply.data(&v),
        Err(e) => reply.error(errno(e)),
    }
}
