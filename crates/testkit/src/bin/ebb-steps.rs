//! A process of its own that carries out file operations, one a line, as it is told on standard
//! input. See `ebb_testkit::steps`.

fn main() -> std::io::Result<()> {
    ebb_testkit::steps::serve(std::io::stdin().lock(), std::io::stdout().lock())
}
