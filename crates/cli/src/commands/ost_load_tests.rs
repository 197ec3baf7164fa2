//! The tables of the published examples, word for word, and what the command refuses.

use super::*;
use clap::Parser;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: Args,
}

fn args(line: &str) -> Args {
    let words = std::iter::once("ost-load").chain(line.split_whitespace());
    Line::try_parse_from(words).unwrap_or_else(|e| panic!("{line}: {e}")).args
}

fn text(line: &str) -> String {
    args(line).tables().unwrap().iter().map(as_text).collect()
}

fn refused(line: &str) -> Failure {
    let args = args(line);
    let failure = args.run().expect_err(line);
    assert_eq!(failure.status, 2, "{failure}");
    failure
}

#[test]
fn ten_jobs_of_160_stripes() {
    assert_eq!(
        text("--targets 480 --stripes 160 --jobs 10"),
        "\
480 targets, 160 stripes for each job
    jobs  in use  required    load
       1  160.00       160   1.000
       2  266.67       320   1.200
       3  337.78       480   1.421
       4  385.19       640   1.662
       5  416.79       800   1.919
       6  437.86       960   2.192
       7  451.91      1120   2.478
       8  461.27      1280   2.775
       9  467.51      1440   3.080
      10  471.68      1600   3.392
"
    );
}

#[test]
fn four_jobs_of_64_and_of_32_stripes() {
    assert_eq!(
        text("--targets 480 --stripes 64 --jobs 4"),
        "\
480 targets, 64 stripes for each job
    jobs  in use  required    load
       1   64.00        64   1.000
       2  119.47       128   1.071
       3  167.54       192   1.146
       4  209.20       256   1.224
"
    );
    assert!(
        text("--targets 480 --stripes 32 --jobs 4")
            .ends_with("       4  115.76       128   1.106\n")
    );
}

#[test]
fn logs_of_4096_ranks() {
    let text = text("--targets 480 --ranks 4096");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "480 targets, a log of 2 stripes for each rank");
    for line in [
        "     512  423.40      1024   2.419",
        "    2048  479.91      4096   8.535",
        "    4096  480.00      8192  17.067",
    ] {
        assert!(lines.contains(&line), "no '{line}' in:\n{text}");
    }
    // A title, a head, 1 to 16, and eight powers of two.
    assert_eq!(lines.len(), 2 + 16 + 8);
}

#[test]
fn unequal_jobs_and_both_tables_at_once() {
    assert_eq!(
        text("--targets 480 --stripes 160,64,32 --ranks 1"),
        "\
480 targets, jobs of 160, 64, 32 stripes
    jobs  in use  required    load
       1  160.00       160   1.000
       2  202.67       224   1.105
       3  221.16       256   1.158
480 targets, a log of 2 stripes for each rank
   ranks  in use  required    load
       1    2.00         2   1.000
"
    );
}

#[test]
fn csv_has_every_line_and_the_plot_both_charts_of_each_table() {
    let tables = args("--targets 480 --stripes 160 --jobs 40 --ranks 3000").tables().unwrap();
    let csv = as_csv(&tables);
    assert_eq!(csv.lines().count(), 1 + 40 + 3000);
    assert!(csv.contains("\njobs,10,471.676066,1600,3.392159\n"), "{csv}");
    let svg = as_svg(&tables, 480);
    assert_eq!(svg.matches("<polyline").count(), 4);
    let points = |nth: usize| {
        let line = svg.split("points=\"").nth(nth + 1).and_then(|s| s.split('"').next());
        line.unwrap().split(' ').count()
    };
    assert_eq!(points(0), 40);
    assert!(points(2) <= POINTS_MAX + 1 && points(2) > POINTS_MAX / 2, "{}", points(2));
}

#[test]
fn advice_is_a_number_and_reasons() {
    let text = args("--targets 480 --jobs 10 --advise --nodes 64 --size 1TiB").advice().unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "stripes: 139");
    assert_eq!(lines.len(), 6);
    assert!(lines[5].contains("a load of 3.00") || lines[5].contains("a load of 2.9"), "{text}");
}

#[test]
fn what_makes_no_sense_is_status_2_and_named() {
    for (line, word) in [
        ("--targets 480", "--ranks"),
        ("--targets 0 --ranks 5", "--targets"),
        ("--targets 480 --stripes 160", "--jobs"),
        ("--targets 480 --stripes 481 --jobs 2", "481"),
        ("--targets 480 --stripes 0 --jobs 2", "--stripes"),
        ("--targets 480 --stripes 160,32 --jobs 3", "2 jobs"),
        ("--targets 480 --stripes 160 --jobs 0", "--jobs"),
        ("--targets 480 --stripes 160 --jobs 100001", "100000"),
        ("--targets 480 --ranks 0", "--ranks"),
        ("--targets 480 --advise", "--jobs"),
        ("--targets 480 --advise --jobs 2 --nodes 0", "--nodes"),
        ("--targets 480 --advise --jobs 2 --stripe-size 0", "--stripe-size"),
        ("--targets 480 --advise --jobs 2 --csv x.csv", "--csv"),
    ] {
        let failure = refused(line);
        assert!(failure.text.contains(word), "{line}: {failure}");
    }
    for line in ["--stripes 5 --jobs 2", "--targets 480 --nodes 3 --ranks 1", "--targets many"] {
        let words = std::iter::once("ost-load").chain(line.split_whitespace());
        assert!(Line::try_parse_from(words).is_err(), "{line}");
    }
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let failure =
        args("--targets 480 --ranks 2 --csv /nonexistent/x.csv").run().expect_err("no such place");
    assert_eq!(failure.status, 1);
    assert!(failure.text.contains("/nonexistent/x.csv"), "{failure}");
}
