//! Which tracepoints tell of the writes of a file system, and whether this kernel has them as they
//! are expected.

use crate::btf::{Argument, Btf};
use crate::program::Shape;
use crate::sys;
use crate::unavailable::Unavailable;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Where the kernel shows its type information, and that of its modules.
const BTF_DIR: &str = "/sys/kernel/btf";

/// A file system that can be tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Ext4,
    Xfs,
}

/// One tracepoint.
#[derive(Debug)]
struct Hook {
    name: &'static str,
    shape: Shape,
}

/// ext4 ends a buffered write in one of three ways, by its mount options and by how full it is.
/// Each tells what was copied, for each piece of a write.
const EXT4: &[Hook] = &[
    Hook { name: "ext4_da_write_end", shape: Shape::WriteEnd },
    Hook { name: "ext4_write_end", shape: Shape::WriteEnd },
    Hook { name: "ext4_journalled_write_end", shape: Shape::WriteEnd },
];

/// XFS tells of a whole write when it begins.
const XFS: &[Hook] = &[Hook { name: "xfs_file_buffered_write", shape: Shape::WriteBegin }];

/// What both have in common: direct writes, page faults of mapped files (one of the two comes before
/// the first store through any mapping), and what the tracker asks by unlocking a file.
const BOTH: &[Hook] = &[
    Hook { name: "iomap_dio_rw_begin", shape: Shape::Direct },
    Hook { name: "mm_filemap_fault", shape: Shape::Fault },
    Hook { name: "mm_filemap_map_pages", shape: Shape::Fault },
    Hook { name: "locks_get_lock_context", shape: Shape::Ask },
];

impl Kind {
    /// By what statfs says.
    pub fn of(magic: u64) -> Option<Kind> {
        match magic {
            0xef53 => Some(Kind::Ext4),
            0x5846_5342 => Some(Kind::Xfs),
            _ => None,
        }
    }

    fn hooks(self) -> impl Iterator<Item = &'static Hook> {
        let own = match self {
            Kind::Ext4 => EXT4,
            Kind::Xfs => XFS,
        };
        own.iter().chain(BOTH)
    }

    /// The module that it is in, where it is one.
    fn module(self) -> &'static str {
        match self {
            Kind::Ext4 => "ext4",
            Kind::Xfs => "xfs",
        }
    }
}

/// A tracepoint of this kernel, and its number.
pub struct Point {
    pub name: &'static str,
    pub shape: Shape,
    pub btf_id: u32,
    pub module: bool,
}

/// What is known of this kernel.
pub struct Kernel {
    pub points: Vec<Point>,
    pub fields: Fields,
    /// The module's type information.
    pub module: Option<OwnedFd>,
}

/// Where the fields of the kernel's structures are, with their sizes.
#[derive(Clone, Copy, Debug)]
pub struct Fields {
    pub inode_ino: u32,
    pub inode_sb: u32,
    pub sb_dev: u32,
    pub iocb_file: u32,
    pub iocb_pos: u32,
    pub file_inode: u32,
    pub iter_count: u32,
    pub iter_is_source: u32,
    pub inode_mapping: u32,
    pub mapping_inode: u32,
    pub mapping_writable: u32,
}

impl Fields {
    fn find(btf: &Btf<'_>) -> Result<Fields, Unavailable> {
        let at = |structure: &str, field: &str, size: u32| match btf.field(structure, field) {
            Some(found) if found.size == size && found.offset <= i16::MAX as u32 => {
                Ok(found.offset)
            }
            Some(found) => {
                let what = format!("{size} bytes in {structure}.{field}, but {}", found.size);
                Err(Unavailable::Kernel(what))
            }
            None => Err(Unavailable::Kernel(format!("the field {structure}.{field}"))),
        };
        Ok(Fields {
            inode_ino: at("inode", "i_ino", 8)?,
            inode_sb: at("inode", "i_sb", 8)?,
            sb_dev: at("super_block", "s_dev", 4)?,
            iocb_file: at("kiocb", "ki_filp", 8)?,
            iocb_pos: at("kiocb", "ki_pos", 8)?,
            file_inode: at("file", "f_inode", 8)?,
            iter_count: at("iov_iter", "count", 8)?,
            iter_is_source: at("iov_iter", "data_source", 1)?,
            inode_mapping: at("inode", "i_mapping", 8)?,
            mapping_inode: at("address_space", "host", 8)?,
            mapping_writable: at("address_space", "i_mmap_writable", 4)?,
        })
    }
}

/// Looks this kernel over for a file system.
pub fn survey(kind: Kind) -> Result<Kernel, Unavailable> {
    let kernel = Btf::parse(read("vmlinux")?)?;
    let fields = Fields::find(&kernel)?;
    let built_in = kind.hooks().all(|hook| kernel.tracepoint(hook.name).is_some());
    let in_module = match built_in {
        true => None,
        false => Some(Btf::parse_module(read(kind.module())?, &kernel)?),
    };
    let points = kind.hooks().map(|hook| {
        let found = in_module.as_ref().and_then(|btf| Some((btf.tracepoint(hook.name)?, true)));
        let found = found.or_else(|| Some((kernel.tracepoint(hook.name)?, false)));
        let missing = || Unavailable::Kernel(format!("the tracepoint {}", hook.name));
        let ((btf_id, arguments), module) = found.ok_or_else(missing)?;
        if !hook.shape.fits(&arguments) {
            let what = format!("{} with arguments that are known here", hook.name);
            return Err(Unavailable::Kernel(what));
        }
        Ok(Point { name: hook.name, shape: hook.shape, btf_id, module })
    });
    let points = points.collect::<Result<Vec<_>, _>>()?;
    let module = match points.iter().any(|p| p.module) {
        true => Some(sys::module_btf(kind.module()).map_err(|e| {
            Unavailable::refused("finding the module's type information", e, String::new())
        })?),
        false => None,
    };
    Ok(Kernel { points, fields, module })
}

fn read(name: &str) -> Result<Vec<u8>, Unavailable> {
    let path: PathBuf = Path::new(BTF_DIR).join(name);
    std::fs::read(&path).map_err(|source| Unavailable::NoBtf { path, source })
}

impl Shape {
    /// These are its arguments; more may follow.
    fn fits(self, arguments: &[Argument]) -> bool {
        let structure = |i: usize, name: &str| {
            arguments.get(i).is_some_and(|a| *a == Argument::Structure(name.into()))
        };
        let number = |i: usize, size: u32| arguments.get(i) == Some(&Argument::Number(size));
        match self {
            Shape::WriteEnd => {
                structure(0, "inode") && number(1, 8) && number(2, 4) && number(3, 4)
            }
            Shape::Fault => structure(0, "address_space"),
            Shape::Ask => structure(0, "inode"),
            Shape::WriteBegin | Shape::Direct => structure(0, "kiocb") && structure(1, "iov_iter"),
        }
    }
}
