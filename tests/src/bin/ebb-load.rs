//! A process that writes to files of a mount until it is told to stop, and judges what it finds
//! there afterwards. See `ebb_tests::load`.

fn main() {
    ebb_tests::load::serve();
}
