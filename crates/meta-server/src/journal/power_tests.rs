//! The service's journal on a storage that loses its power after any step: what was answered as
//! durable is there, nothing is half there, and what is there is what was once true.

use super::*;
use ebb_journal::power::{Disk, Image, Loss};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A state that grows by one with each record; a snapshot says how far it is.
fn grows(n: u64, padding: usize) -> Vec<u8> {
    let mut body = n.to_le_bytes().to_vec();
    body.resize(8 + padding, n as u8);
    body
}

const SNAPSHOT: u64 = 1 << 32;

/// Where the records of an image lead, or why they cannot be believed.
fn replay(image: &Image, boot: Boot) -> Result<u64, String> {
    let bytes = image.get(NAME).ok_or("no journal")?;
    let Read { job, bodies, .. } =
        parse(Path::new(NAME), bytes, boot).map_err(|e| e.to_string())?;
    assert_eq!(job, 5);
    let mut state = 0;
    for body in bodies {
        let n = u64::from_le_bytes(body[..8].try_into().expect("bodies begin with eight bytes"));
        assert!(body[8..].iter().all(|b| *b == n as u8), "half a record was believed");
        match n.checked_sub(SNAPSHOT) {
            Some(n) => state = n,
            None => {
                assert_eq!(n, state + 1, "a record is missing in the middle");
                state = n;
            }
        }
    }
    Ok(state)
}

/// Notes: the state when a record was answered as written (even) or synced (odd).
fn run(seed: u64) -> Disk {
    let mut dice = ChaCha8Rng::seed_from_u64(seed);
    let disk = Disk::default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let storage: Arc<dyn Storage> = Arc::new(disk.clone());
        let journal = Journal::start_on(storage, None, 5, &[]).unwrap();
        disk.note(1);
        let mut state = 0u64;
        for _ in 0..dice.random_range(4..14) {
            let mut lsn = journal.tail();
            for _ in 0..dice.random_range(1..4) {
                state += 1;
                // From much less than a sector to a few of them.
                let padding = dice.random_range(0..[20, 700, 1500][state as usize % 3]);
                lsn = journal.append(&grows(state, padding));
            }
            match dice.random_range(0..10) {
                0..4 => {
                    journal.written(lsn).await.unwrap();
                    disk.note(state << 1);
                }
                4..8 => {
                    journal.synced(lsn).await.unwrap();
                    disk.note(state << 1 | 1);
                }
                _ => {
                    let mut snapshot = Vec::new();
                    frame(&mut snapshot, &grows(SNAPSHOT + state, 300));
                    if !journal.begin_compaction() {
                        // The one before is not in its place yet.
                        continue;
                    }
                    // What comes before it is finished is behind it.
                    for _ in 0..dice.random_range(0..3) {
                        state += 1;
                        lsn = journal.append(&grows(state, 100));
                        if dice.random_bool(0.5) {
                            journal.synced(lsn).await.unwrap();
                            disk.note(state << 1 | 1);
                        }
                    }
                    journal.finish_compaction(&snapshot);
                }
            }
        }
        journal.stop();
        disk.note(state << 1 | 1);
    });
    disk
}

fn promised(notes: &[u64], synced_only: bool) -> Option<u64> {
    notes.iter().filter(|n| !synced_only || **n & 1 == 1).map(|n| n >> 1).max()
}

/// Every cut of a run; answers how many images were looked at.
fn every_cut(seed: u64) -> usize {
    let disk = run(seed);
    let mut images = 0;
    for cut in 0..=disk.steps() {
        let notes = disk.notes(cut);
        for (loss, boot) in [(Loss::Process, Boot::now()), (Loss::Power, Boot(1))] {
            let Some(least) = promised(&notes, loss == Loss::Power) else { continue };
            for image in disk.images(cut, loss, 12, seed) {
                images += 1;
                let found = replay(&image, boot);
                let found =
                    found.unwrap_or_else(|e| panic!("seed {seed}, cut {cut}, {loss:?}: {e}"));
                assert!(
                    found >= least,
                    "seed {seed}, cut {cut}, {loss:?}: {found}, but {least} was promised"
                );
            }
        }
    }
    images
}

#[test]
fn every_cut_of_the_power_keeps_what_was_promised() {
    let runs = std::env::var("EBB_POWER_RUNS").map_or(12, |n| n.parse().expect("a number"));
    let images: usize = (0..runs).map(every_cut).sum();
    println!("{images} images of {runs} runs");
    assert!(images > 100);
}

/// The checker can fail: a journal that says synced without syncing is found out.
#[test]
fn a_disk_that_lies_about_syncs_is_found_out() {
    struct Liar(Disk);
    struct LyingFile(Arc<dyn Stored>);
    impl Storage for Liar {
        fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
            self.0.read(name)
        }
        fn create(&self, name: &str) -> io::Result<Arc<dyn Stored>> {
            Ok(Arc::new(LyingFile(self.0.create(name)?)))
        }
        fn rename(&self, from: &str, to: &str) -> io::Result<()> {
            self.0.rename(from, to)
        }
        fn sync_names(&self) -> io::Result<()> {
            self.0.sync_names()
        }
    }
    impl Stored for LyingFile {
        fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
            self.0.write_at(bytes, offset)
        }
        fn sync(&self) -> io::Result<()> {
            Ok(())
        }
        fn reserve(&self, _: u64, _: u64) {}
    }
    let disk = Disk::default();
    let journal = Journal::start_on(Arc::new(Liar(disk.clone())), None, 5, &[]).unwrap();
    let lsn = journal.append(&grows(1, 10));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(journal.synced(lsn)).unwrap();
    let images = disk.images(disk.steps(), Loss::Power, 4, 1);
    assert!(images.iter().any(|i| replay(i, Boot(1)) != Ok(1)));
}

#[test]
fn a_flipped_bit_in_what_was_synced_is_an_error_or_changes_nothing() {
    let disk = run(3);
    let image = disk.images(disk.steps(), Loss::Process, 0, 0).remove(0);
    let whole = replay(&image, Boot::now()).unwrap();
    let bytes = &image[NAME];
    for at in 0..bytes.len() {
        let mut bad = image.clone();
        bad.get_mut(NAME).expect("it is there")[at] ^= 1 << (at % 8);
        match replay(&bad, Boot::now()) {
            Err(_) => {}
            // Damage in the last record cannot be told from a torn write, and a bad mark at the
            // end takes nothing away.
            Ok(found) => assert!(found + 1 >= whole, "bit at {at}: {found} of {whole}"),
        }
    }
}
