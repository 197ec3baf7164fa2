//! A program that writes and syncs until its disk loses power, and tells of each operation before
//! and after it. See `ebb_tests::power`.

fn main() {
    ebb_tests::power::run();
}
