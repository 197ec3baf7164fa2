//! What a program does to the names, sizes and attributes of its files.

use super::book::{DIRECTORIES, NAMES, TAG, Unanswered};
use super::judge::tag;
use super::program::{Program, WRITE_MAX, answered};
use crate::content;
use crate::model::close;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};

impl Program {
    pub(super) fn truncate(&mut self, name: &'static str) {
        let len = self.book.files.get(name).map_or(0, |known| known.expected.len());
        let len = self.dice.random_range(0..=len);
        self.attempt(format!("truncate {name} to {len}"), |p| {
            p.open(name)?;
            let known = p.book.files.get_mut(name).expect("it was opened");
            let open = known.open.as_ref().expect("it was opened");
            known.in_doubt = true;
            known.expected.cut(len);
            open.file.set_len(len)?;
            known.expected.acknowledge_cut(len);
            known.in_doubt = false;
            Ok(())
        });
    }

    pub(super) fn rename(&mut self, from: &'static str) {
        let to = NAMES[self.dice.random_range(0..NAMES.len())];
        if from == to || !self.book.files.contains_key(from) {
            return;
        }
        self.close(to);
        self.attempt(format!("rename {from} to {to}"), |p| {
            let path = |name| p.book.path(&p.setup.root, name);
            let (old, new) = (path(from), path(to));
            p.book.unanswered =
                Some(Unanswered::Rename { from: from.to_owned(), to: to.to_owned() });
            std::fs::rename(old, new)?;
            p.book.unanswered = None;
            p.book.rename(from, to);
            Ok(())
        });
    }

    pub(super) fn unlink(&mut self, name: &'static str) {
        if !self.book.files.contains_key(name) {
            return;
        }
        self.close(name);
        self.attempt(format!("unlink {name}"), |p| {
            p.book.unanswered = Some(Unanswered::Unlink(name.to_owned()));
            std::fs::remove_file(p.book.path(&p.setup.root, name))?;
            p.book.unanswered = None;
            p.book.files.remove(name);
            Ok(())
        });
    }

    /// A checkpoint over the one before: O_TRUNC, new bytes, close.
    pub(super) fn rewrite(&mut self, name: &'static str) {
        if !self.book.files.contains_key(name) {
            return;
        }
        self.close(name);
        let len = self.dice.random_range(0..WRITE_MAX);
        self.attempt(format!("rewrite {name} with {len} bytes"), |p| {
            let path = p.book.path(&p.setup.root, name);
            let known = p.book.files.get_mut(name).expect("it was just there");
            (known.in_doubt, known.is_published) = (true, false);
            known.expected.cut(0);
            let file = File::options().write(true).truncate(true).open(path)?;
            known.expected.acknowledge_cut(0);
            let data = content::bytes(p.round % 200, p.operation, 0, len);
            known.expected.write(0, &data);
            file.write_all_at(&data, 0)?;
            close(file)?;
            known.in_doubt = false;
            known.acknowledge();
            known.is_published = true;
            Ok(())
        });
    }

    /// A second name, under which the same is seen, and which goes again.
    pub(super) fn link(&mut self, name: &'static str) {
        self.attempt(format!("link {name}"), |p| {
            if !p.book.files.contains_key(name) {
                return Ok(());
            }
            let (path, link) = (p.book.path(&p.setup.root, name), p.book.link(&p.setup.root, name));
            p.book.unanswered = Some(Unanswered::Link(name.to_owned()));
            std::fs::hard_link(&path, &link)?;
            let (first, second) = (std::fs::metadata(&path)?, std::fs::metadata(&link)?);
            assert_eq!((first.ino(), first.nlink()), (second.ino(), 2), "{}", link.display());
            let done = std::fs::remove_file(link);
            answered(&mut p.book, done)
        });
    }

    pub(super) fn attributes(&mut self, name: &'static str) {
        let perm = [0o600, 0o640, 0o644, 0o660][self.dice.random_range(0..4)];
        let sets_tag = self.tags && self.dice.random_bool(0.5);
        self.attempt(format!("attributes of {name}: {perm:o}, {sets_tag}"), |p| {
            let path = p.book.path(&p.setup.root, name);
            let Some(known) = p.book.files.get_mut(name) else { return Ok(()) };
            if !sets_tag {
                known.perm.try_to_set(perm);
                std::fs::set_permissions(&path, PermissionsExt::from_mode(perm))?;
                known.perm.was_set();
                return Ok(());
            }
            let (value, flags) = (p.operation, rustix::fs::XattrFlags::empty());
            known.tag.try_to_set(value);
            match rustix::fs::setxattr(&path, TAG, value.to_string().as_bytes(), flags) {
                Err(rustix::io::Errno::OPNOTSUPP) => {
                    p.tags = false;
                    return Ok(());
                }
                done => done?,
            }
            known.tag.was_set();
            assert_eq!(tag(&path)?, Some(value), "{}", path.display());
            Ok(())
        });
    }

    /// Makes, renames or removes an empty directory.
    pub(super) fn directory(&mut self) {
        let one = |dice: &mut ChaCha8Rng| DIRECTORIES[dice.random_range(0..DIRECTORIES.len())];
        let (name, to) = (one(&mut self.dice), one(&mut self.dice));
        let renames = to != name && self.dice.random_bool(0.5);
        self.attempt(format!("directory {name}, {to}, {renames}"), |p| {
            let (path, other) = (p.book.path(&p.setup.root, name), p.book.path(&p.setup.root, to));
            let (name, to) = (name.to_owned(), to.to_owned());
            if !p.book.directories.contains(&name) {
                p.book.unanswered = Some(Unanswered::MakeDirectory(name.clone()));
                let done = std::fs::create_dir(path);
                answered(&mut p.book, done)?;
                p.book.directories.insert(name);
            } else if renames && !p.book.directories.contains(&to) {
                let from = name.clone();
                p.book.unanswered = Some(Unanswered::RenameDirectory { from, to: to.clone() });
                let done = std::fs::rename(path, other);
                answered(&mut p.book, done)?;
                p.book.directories.remove(&name);
                p.book.directories.insert(to);
            } else {
                p.book.unanswered = Some(Unanswered::RemoveDirectory(name.clone()));
                let done = std::fs::remove_dir(path);
                answered(&mut p.book, done)?;
                p.book.directories.remove(&name);
            }
            Ok(())
        });
    }
}
