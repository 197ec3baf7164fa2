//! The report as one page: a table, the races, and for the first of them what both processes did around
//! it. Nothing is loaded from elsewhere, and everything that comes from the trace is escaped.

use crate::report::{named, path};
use crate::{Checked, Places, Traced, words};
use ebb_consistency::checker::Process;
use ebb_consistency::sweep::{Example, Group};
use ebb_trace_format::{Act, Event, Reader, What};
use std::fmt::Write;

/// Records of each process that a time line shows, before and after the race.
const AROUND: u64 = 6;
/// Races of one model that are shown.
const SHOWN: usize = 200;

const STYLE: &str = "body{font:15px/1.45 sans-serif;max-width:72em;margin:2em auto;padding:0 1em}\
table{border-collapse:collapse}td,th{border:1px solid #bbb;padding:.25em .7em;text-align:left}\
td.n{text-align:right}.race{border-left:4px solid #b33;padding-left:1em;margin:1.2em 0}\
.hit{background:#fdd;font-weight:bold}code{background:#eee}.a{background:#eef6ff}.b{background:#f4ffee}";

/// The page.
#[must_use]
pub fn page(traced: &Traced, checked: &[Checked]) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_page(traced, checked, &mut out);
    out
}

/// Text that means nothing to a browser.
fn safe(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

fn write_page(traced: &Traced, checked: &[Checked], out: &mut String) -> std::fmt::Result {
    writeln!(out, "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\">")?;
    writeln!(out, "<title>ebb check</title><style>{STYLE}</style></head><body>")?;
    let (processes, files) = (traced.processes.len(), traced.files.len());
    writeln!(out, "<h1>Storage races</h1>")?;
    writeln!(out, "<p>{processes} process(es), {files} file(s), {} records.</p>", traced.records)?;
    for doubt in words::doubts(&traced.doubts) {
        writeln!(out, "<p><b>Note:</b> {}</p>", safe(&doubt))?;
    }
    writeln!(out, "<table><tr><th>model<th>races<th>pairs of places<th>files<th>conflicts</tr>")?;
    for c in checked {
        let v = &c.verdict;
        let (races, places) = (v.races(), v.groups.len());
        write!(out, "<tr><td>{}<td class=n>{races}<td class=n>{places}", safe(&c.name))?;
        writeln!(out, "<td class=n>{}<td class=n>{}</tr>", c.files(), v.conflicts)?;
    }
    writeln!(out, "</table>")?;
    let places = named(traced, checked);
    let mut is_first = true;
    for c in checked.iter().filter(|c| !c.verdict.groups.is_empty()) {
        writeln!(out, "<h2>{}</h2>", safe(&c.name))?;
        for group in c.verdict.groups.iter().take(SHOWN) {
            write_group(traced, &places, group, out)?;
            if std::mem::take(&mut is_first) {
                write_line(traced, &group.example, out)?;
            }
        }
    }
    writeln!(out, "</body></html>")
}

fn write_group(
    traced: &Traced,
    places: &Places,
    group: &Group,
    out: &mut String,
) -> std::fmt::Result {
    let e = &group.example;
    let file = safe(&path(traced, group.file));
    writeln!(out, "<div class=race><p><code>{file}</code>, {}</p><ol>", words::bytes(e.range))?;
    for party in [&e.first, &e.second] {
        writeln!(out, "<li>{}", safe(&words::party(traced, places, party)))?;
    }
    writeln!(out, "</ol><p>{}.</p>", safe(&words::missing(&e.missing)))?;
    let (pairs, unordered) = (group.pairs, group.unordered);
    let hull = words::bytes(group.hull);
    writeln!(out, "<p>{pairs} pair(s), {unordered} of them without any order; {hull}.</p></div>")
}

struct Moment {
    time: u64,
    is_second: bool,
    is_hit: bool,
    text: String,
}

fn write_line(traced: &Traced, example: &Example, out: &mut String) -> std::fmt::Result {
    let mut moments = Vec::new();
    for (party, is_second) in [(&example.first, false), (&example.second, true)] {
        around(traced, party.process, u64::from(party.step), is_second, &mut moments);
    }
    moments.sort_by_key(|m| m.time);
    let start = moments.first().map_or(0, |m| m.time);
    let (a, b) = (example.first.process, example.second.process);
    writeln!(out, "<h3>What both did around it</h3><table><tr><th>time")?;
    for process in [a, b] {
        writeln!(out, "<th>{}", safe(&words::process(traced, process)))?;
    }
    writeln!(out, "</tr>")?;
    for m in moments {
        let micros = m.time.saturating_sub(start) / 1000;
        let hit = if m.is_hit { " hit" } else { "" };
        let text = safe(&m.text);
        match m.is_second {
            false => {
                writeln!(out, "<tr><td class=n>{micros} us<td class='a{hit}'>{text}<td></tr>")?
            }
            true => writeln!(out, "<tr><td class=n>{micros} us<td><td class='b{hit}'>{text}</tr>")?,
        }
    }
    writeln!(out, "</table>")
}

/// Reads the records of a process around one of them.
fn around(traced: &Traced, process: Process, step: u64, is_second: bool, into: &mut Vec<Moment>) {
    let mut number = 0;
    for part in &traced.lines.parts[process.0 as usize] {
        let first = number;
        number += part.records;
        if step + AROUND < first || step > number + AROUND {
            continue;
        }
        // A file that cannot be read again shows nothing.
        let Ok(file) = std::fs::File::open(&part.path) else { return };
        let Ok(mut reader) = Reader::new(file) else { return };
        let mut at = first;
        while let Ok(Some(record)) = reader.read() {
            if at.abs_diff(step) <= AROUND {
                let name = |file: u32| {
                    let known = part.files.get(&file).map(|f| &traced.files[*f as usize].path);
                    let path =
                        String::from_utf8_lossy(known.map_or(b"?", Vec::as_slice)).into_owned();
                    path.rsplit('/').next().unwrap_or_default().to_owned()
                };
                if let Some(what) = in_words(&record.what, &name) {
                    let text = format!("{at}: {} {what}", record.call.name());
                    let time = part.header.since_1970(record.end);
                    into.push(Moment { time, is_second, is_hit: at == step, text });
                }
            }
            at += 1;
        }
    }
}

fn in_words(what: &What, name: &dyn Fn(u32) -> String) -> Option<String> {
    Some(match what {
        What::File { .. } | What::Site { .. } => return None,
        What::Access { file, act, start, end } => {
            let does = match act {
                Act::Read => "reads",
                Act::Write => "writes",
                Act::Append => "appends",
            };
            format!("{does} {}, {start} to {}", name(*file), end.saturating_sub(1))
        }
        What::Sync { file, event } => match event {
            Event::Open => format!("{} is open", name(*file)),
            Event::Close => format!("{} is closed", name(*file)),
            Event::Fsync => format!("{} is synced", name(*file)),
            Event::Commit => format!("{} is committed", name(*file)),
        },
        What::Lock { file, start, .. } => format!("locks {} from {start}", name(*file)),
        What::Unlock { file, start, .. } => format!("unlocks {} from {start}", name(*file)),
        What::Fork { pid } => format!("makes process {pid}"),
        What::Reaped { pid } => format!("hears of the end of {pid}"),
        What::Spawning => "makes a process".to_owned(),
        What::Spawned => "hears of the end of its processes".to_owned(),
        What::Exit => "ends".to_owned(),
        What::World { rank, size, .. } => format!("is rank {rank} of {size}"),
        What::Send { to, tag, .. } => format!("to {to}, tag {tag}"),
        What::Recv { from, tag, .. } => format!("from {from}, tag {tag}"),
        What::Enter { .. } | What::Asked => "begins".to_owned(),
        What::Leave { .. } | What::Answered => "is over".to_owned(),
        What::Unknown => "is not understood".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_from_a_trace_is_escaped() {
        assert_eq!(safe("<script>'\"&"), "&lt;script&gt;&#39;&quot;&amp;");
    }
}
