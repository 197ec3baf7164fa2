//! What all charts are made of: the sheet, words, a polyline, round ticks. As plain SVG text, without
//! scripts or styles, so that every viewer knows it.

use std::fmt::Write;

/// A whole SVG file: the panels one below the other on white paper, each of this width and height.
#[must_use]
pub fn sheet(width: f64, height: f64, font_size: u32, panels: &[String]) -> String {
    let whole = height * panels.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {whole}\" \
         width=\"{width:.0}\" height=\"{whole}\" font-family=\"sans-serif\" \
         font-size=\"{font_size}\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (i, panel) in panels.iter().enumerate() {
        let _ = writeln!(svg, "<g transform=\"translate(0 {})\">\n{panel}</g>", height * i as f64);
    }
    svg.push_str("</svg>\n");
    svg
}

/// Words at a place; `anchor` as SVG has it: start, middle or end.
pub fn label(svg: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    let words = escape(words);
    let _ =
        writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>");
}

/// A line through places.
pub fn polyline(svg: &mut String, places: impl Iterator<Item = (f64, f64)>, colour: &str) {
    let places: Vec<String> = places.map(|(x, y)| format!("{x:.2},{y:.2}")).collect();
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
        places.join(" ")
    );
}

/// Text that may stand in XML.
#[must_use]
pub fn escape(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A round distance between about five ticks up to `most`: 1, 2 or 5 times a power of ten.
#[must_use]
pub fn tick(most: f64) -> f64 {
    let rough = (most / 5.0).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(rough.log10().floor());
    let round = [1.0, 2.0, 5.0, 10.0].into_iter().find(|m| m * power >= rough * 0.999);
    (round.unwrap_or(10.0) * power).max(1e-3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!((tick(10.0), tick(43.0), tick(0.9)), (2.0, 10.0, 0.2));
        assert_eq!((tick(4096.0), tick(3.39), tick(1.2)), (1000.0, 1.0, 0.5));
        for most in [0.0, 0.01, 1.0, 17.07, 480.0, 99_999.0] {
            let ticks = most / tick(most);
            assert!(ticks <= 10.0 && tick(most) > 0.0, "{most}: {ticks}");
        }
    }

    #[test]
    fn panels_are_below_each_other_and_words_escaped() {
        let mut panel = String::new();
        label(&mut panel, 1.0, 2.0, "end", "a < b & \"c\"");
        polyline(&mut panel, [(0.0, 1.0), (2.5, 3.0)].into_iter(), "red");
        let svg = sheet(100.0, 50.0, 12, &[panel.clone(), panel]);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("viewBox=\"0 0 100 100\"") && svg.contains("translate(0 50)"));
        assert_eq!(svg.matches("a &lt; b &amp; &quot;c&quot;").count(), 2);
        assert_eq!(svg.matches("points=\"0.00,1.00 2.50,3.00\"").count(), 2);
    }
}
