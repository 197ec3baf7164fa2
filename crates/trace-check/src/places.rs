//! Places in programs as people know them: source file and line, where the program has them and
//! `addr2line` (binutils) is there; else object and address.

use crate::Place;
use std::collections::HashMap;
use std::path::Path;
use std::process::{Command, Stdio};

/// Names of places.
#[derive(Debug, Default)]
pub struct Places {
    lines: HashMap<(Vec<u8>, u64), String>,
}

impl Places {
    /// Looks up where these are: one run of `addr2line` for each object.
    #[must_use]
    pub fn of<'a>(places: impl Iterator<Item = &'a Place>) -> Places {
        let mut by_object: HashMap<&[u8], Vec<u64>> = HashMap::new();
        for place in places.filter(|p| !p.object.is_empty() && p.offset > 0) {
            by_object.entry(&place.object).or_default().push(place.offset);
        }
        let mut found = Places::default();
        for (object, mut offsets) in by_object {
            offsets.sort_unstable();
            offsets.dedup();
            for (offset, line) in offsets.iter().zip(lines_of(object, &offsets)) {
                if !line.starts_with('?') && !line.ends_with(":?") && !line.ends_with(":0") {
                    let line = line.split(" (").next().unwrap_or_default();
                    let name =
                        Path::new(line).file_name().map(|n| n.to_string_lossy().into_owned());
                    found.lines.insert((object.to_vec(), *offset), name.unwrap_or_default());
                }
            }
        }
        found
    }

    /// A place in words; nothing where it is not known.
    #[must_use]
    pub fn name(&self, place: &Place) -> Option<String> {
        if place.object.is_empty() {
            return None;
        }
        let key = (place.object.clone(), place.offset);
        self.lines.get(&key).cloned().or_else(|| {
            let object = String::from_utf8_lossy(&place.object);
            let name = object.rsplit('/').next().unwrap_or_default().to_owned();
            Some(format!("{name}+{:#x}", place.offset))
        })
    }
}

/// What `addr2line` says; nothing when it is not there.
fn lines_of(object: &[u8], offsets: &[u64]) -> Vec<String> {
    let object = String::from_utf8_lossy(object).into_owned();
    let mut found = Vec::new();
    // Command lines have an end.
    for some in offsets.chunks(500) {
        let mut command = Command::new("addr2line");
        // A return address is behind the call.
        command.arg("-e").arg(&object).args(some.iter().map(|o| format!("{:#x}", o - 1)));
        let Ok(output) = command.stdin(Stdio::null()).stderr(Stdio::null()).output() else {
            return Vec::new();
        };
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        if lines.len() != some.len() {
            return Vec::new();
        }
        found.extend(lines);
    }
    found
}
