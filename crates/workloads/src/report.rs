//! What a run measured: a table for the terminal, a CSV file, and one HTML page with charts.

use crate::paper::escape;
use crate::svg::{Bars, short};
use crate::{Measure, Spread, Unit};
use std::fmt::Write;

/// Where a number comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The group of workloads: one section of the report.
    pub section: String,
    /// The workload with its parameters.
    pub workload: String,
    /// Which part of it.
    pub phase: String,
    /// How many nodes.
    pub nodes: usize,
    /// Under what it ran: a model, a switch, the bare directory.
    pub variant: String,
    /// What is counted.
    pub unit: Unit,
}

/// All numbers of a run.
#[derive(Debug, Default)]
pub struct Report {
    entries: Vec<(Key, Vec<f64>)>,
}

impl Report {
    /// An empty one.
    #[must_use]
    pub fn new() -> Report {
        Report::default()
    }

    /// Adds what one round measured.
    pub fn add(
        &mut self,
        section: &str,
        workload: &str,
        nodes: usize,
        variant: &str,
        measures: Vec<Measure>,
    ) {
        for m in measures {
            let key = Key {
                section: section.to_owned(),
                workload: workload.to_owned(),
                phase: m.phase,
                nodes,
                variant: variant.to_owned(),
                unit: m.unit,
            };
            match self.entries.iter_mut().find(|(k, _)| *k == key) {
                Some((_, values)) => values.push(m.value),
                None => self.entries.push((key, vec![m.value])),
            }
        }
    }

    /// All numbers in the order in which they came.
    pub fn numbers(&self) -> impl Iterator<Item = (&Key, Spread)> {
        self.entries.iter().filter_map(|(key, values)| Some((key, Spread::of(values)?)))
    }

    /// The one number of that place.
    #[must_use]
    pub fn median(&self, workload: &str, phase: &str, nodes: usize, variant: &str) -> Option<f64> {
        let is = |k: &Key| {
            k.workload == workload && k.phase == phase && k.nodes == nodes && k.variant == variant
        };
        self.numbers().find(|(k, _)| is(k)).map(|(_, s)| s.median)
    }

    /// One line for each number.
    #[must_use]
    pub fn csv(&self) -> String {
        let mut csv =
            String::from("section,workload,phase,nodes,variant,unit,median,least,most,rounds\n");
        for (k, s) in self.numbers() {
            let _ = writeln!(
                csv,
                "{},{},{},{},{},{},{:.3},{:.3},{:.3},{}",
                field(&k.section),
                field(&k.workload),
                field(&k.phase),
                k.nodes,
                field(&k.variant),
                k.unit,
                s.median,
                s.least,
                s.most,
                s.rounds
            );
        }
        csv
    }

    /// Sections, workloads and phases with their rows, in the order of the run.
    fn blocks(&self) -> Vec<Block<'_>> {
        let mut blocks: Vec<Block<'_>> = Vec::new();
        for (key, spread) in self.numbers() {
            let at = blocks.iter().position(|b| b.is(key)).unwrap_or_else(|| {
                blocks.push(Block { first: key, variants: Vec::new(), cells: Vec::new() });
                blocks.len() - 1
            });
            let block = &mut blocks[at];
            if !block.variants.contains(&key.variant.as_str()) {
                block.variants.push(&key.variant);
            }
            block.cells.push((key, spread));
        }
        blocks
    }

    /// For the terminal.
    #[must_use]
    pub fn table(&self) -> String {
        let mut out = String::new();
        let mut section = "";
        for block in self.blocks() {
            if block.first.section != section {
                section = &block.first.section;
                let _ = writeln!(out, "\n{section}");
            }
            let _ = writeln!(out, "  {} ({})", block.title(), block.first.unit);
            for (nodes, row) in block.rows() {
                let _ = write!(out, "    {nodes} node{:<2}", if nodes == 1 { "" } else { "s" });
                for (variant, cell) in block.variants.iter().zip(row) {
                    let number = cell.map_or("-".to_owned(), |s| short(s.median));
                    let _ = write!(out, "  {variant} {number}");
                }
                out.push('\n');
            }
        }
        out
    }

    /// One page: what was measured on which machine, a chart and a table for each block. `about`
    /// are lines of a name and a value.
    #[must_use]
    pub fn html(&self, title: &str, about: &[(String, String)]) -> String {
        let mut page = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title>\n\
             <style>body{{font:15px/1.45 sans-serif;max-width:62em;margin:2em auto;padding:0 1em}}\
             table{{border-collapse:collapse;margin:.4em 0 1.6em;font-size:13px}}\
             td,th{{border-bottom:1px solid #ccc;padding:.15em .7em;text-align:right}}\
             td:first-child,th:first-child{{text-align:left}}.s{{color:#777}}</style></head><body>\n\
             <h1>{0}</h1>\n<table>\n",
            escape(title)
        );
        for (name, value) in about {
            let _ = writeln!(page, "<tr><td>{}</td><td>{}</td></tr>", escape(name), escape(value));
        }
        page.push_str(
            "</table>\n<p>Bars and bold numbers are medians of interleaved rounds, thin lines and small \
             numbers the smallest and the largest round.</p>\n",
        );
        let mut section = "";
        for block in self.blocks() {
            if block.first.section != section {
                section = &block.first.section;
                let _ = writeln!(page, "<h2>{}</h2>", escape(section));
            }
            page.push_str(&block.chart().draw());
            block.html_table(&mut page);
        }
        page.push_str("</body></html>\n");
        page
    }
}

/// The numbers of one phase of one workload, over node counts and variants.
struct Block<'a> {
    first: &'a Key,
    variants: Vec<&'a str>,
    cells: Vec<(&'a Key, Spread)>,
}

impl Block<'_> {
    fn is(&self, key: &Key) -> bool {
        let f = self.first;
        (&f.section, &f.workload, &f.phase, f.unit)
            == (&key.section, &key.workload, &key.phase, key.unit)
    }

    fn title(&self) -> String {
        format!("{}: {}", self.first.workload, self.first.phase)
    }

    fn rows(&self) -> Vec<(usize, Vec<Option<Spread>>)> {
        let mut nodes: Vec<usize> = self.cells.iter().map(|(k, _)| k.nodes).collect();
        nodes.sort_unstable();
        nodes.dedup();
        let cell = |n: usize, v: &str| {
            self.cells.iter().find(|(k, _)| k.nodes == n && k.variant == v).map(|(_, s)| *s)
        };
        nodes.into_iter().map(|n| (n, self.variants.iter().map(|v| cell(n, v)).collect())).collect()
    }

    fn chart(&self) -> Bars {
        let name = |n: usize| if n == 1 { "1 node".to_owned() } else { format!("{n} nodes") };
        Bars {
            title: self.title(),
            unit: self.first.unit.to_string(),
            series: self.variants.iter().map(|v| (*v).to_owned()).collect(),
            groups: self.rows().into_iter().map(|(n, cells)| (name(n), cells)).collect(),
        }
    }

    fn html_table(&self, page: &mut String) {
        page.push_str("<table><tr><th>nodes</th>");
        for v in &self.variants {
            let _ = write!(page, "<th>{}</th>", escape(v));
        }
        page.push_str("</tr>\n");
        for (nodes, row) in self.rows() {
            let _ = write!(page, "<tr><td>{nodes}</td>");
            for cell in row {
                match cell {
                    None => page.push_str("<td>–</td>"),
                    Some(s) => {
                        let (median, least, most) =
                            (short(s.median), short(s.least), short(s.most));
                        let _ = write!(
                            page,
                            "<td><b>{median}</b> <span class=\"s\">{least}–{most}</span></td>"
                        );
                    }
                }
            }
            page.push_str("</tr>\n");
        }
        page.push_str("</table>\n");
    }
}

/// As RFC 4180 has it: names of workloads may have commas in them.
fn field(text: &str) -> String {
    if text.contains([',', '"', '\n']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut r = Report::new();
        for round in 1..=3 {
            for (variant, base) in [("session", 100.0), ("commit", 50.0)] {
                let m =
                    Measure::bandwidth("read", (base * f64::from(round)) as u64 * (1 << 20), 1.0);
                r.add("Shared", "CC-R 8 KiB", 2, variant, vec![m]);
            }
        }
        r.add("Shared", "CC-R 8 KiB", 4, "session", vec![Measure::rate("read", 1, 1.0)]);
        r
    }

    #[test]
    fn rounds_of_one_place_are_one_number() {
        let r = report();
        assert_eq!(r.median("CC-R 8 KiB", "read", 2, "session"), Some(200.0));
        assert_eq!(r.median("CC-R 8 KiB", "read", 2, "commit"), Some(100.0));
        assert_eq!(r.median("CC-R 8 KiB", "read", 2, "posix"), None);
        assert_eq!(r.csv().lines().count(), 1 + 3);
        assert!(r.csv().contains("Shared,CC-R 8 KiB,read,2,commit,MiB/s,100.000,50.000,150.000,3"));
    }

    #[test]
    fn every_line_of_the_table_has_as_many_fields_as_the_first() {
        let mut r = Report::new();
        let read = vec![Measure::rate("read", 1, 1.0)];
        r.add("Reads, first", "8 KiB, \"random\"", 1, "session", read);
        let csv = r.csv();
        let line = csv.lines().nth(1).expect("a line");
        assert!(line.starts_with("\"Reads, first\",\"8 KiB, \"\"random\"\"\",read,1,session,"));
    }

    #[test]
    fn the_page_and_the_table_show_all_of_them() {
        let r = report();
        let page = r.html("A <run>", &[("machine".into(), "2 & 3".into())]);
        assert_eq!(page.matches("<svg").count(), 2, "another unit is another block");
        assert!(page.contains("A &lt;run&gt;") && page.contains("2 &amp; 3"));
        assert!(r.table().contains("session 200  commit 100"), "{}", r.table());
    }
}
