//! Where in a file the bytes of one program are: all of it, or every n-th record.

/// Small enough that pages and extents are shared, and not aligned to anything.
const RECORD: u64 = 1000;

/// Which bytes of a file belong to one program. `who` of `of`; 0 of 1 is the whole file.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// The number of this program.
    pub who: u64,
    /// How many programs share the file.
    pub of: u64,
}

impl Layout {
    /// A file of one program alone.
    pub const WHOLE: Layout = Layout { who: 0, of: 1 };

    fn place(self, own: u64) -> u64 {
        (own / RECORD * self.of + self.who) * RECORD + own % RECORD
    }

    /// A range of own bytes as ranges of the file: place in the file, own place, length.
    pub fn pieces(self, own: u64, len: u64) -> impl Iterator<Item = (u64, u64, u64)> {
        let end = own + len;
        let mut at = own;
        std::iter::from_fn(move || {
            let from = at;
            at = match self.of {
                1 => end,
                _ => end.min((from / RECORD + 1) * RECORD),
            };
            (from < end).then(|| (self.place(from), from, at - from))
        })
    }

    /// The own bytes of a whole file, as far as there are any; at most `most`, since what others
    /// write makes the file longer.
    #[must_use]
    pub fn own(self, file: Vec<u8>, most: u64) -> Vec<u8> {
        if self.of == 1 {
            return file;
        }
        let place = |own| usize::try_from(self.place(own)).expect("files of tests are small");
        (0..most).map_while(|own| file.get(place(own)).copied()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_a_shared_file_has_one_owner() {
        let mut file = vec![9u8; 7 * RECORD as usize + 5];
        for who in 0..3 {
            let layout = Layout { who, of: 3 };
            for (offset, own, len) in layout.pieces(0, 3 * RECORD) {
                for i in 0..len.min((file.len() as u64).saturating_sub(offset)) {
                    assert_eq!(file[(offset + i) as usize], 9, "taken twice");
                    file[(offset + i) as usize] = (who * 3 + (own + i) / RECORD) as u8;
                }
            }
        }
        assert!(!file.contains(&9), "every byte is somebody's");
        let own = Layout { who: 1, of: 3 }.own(file.clone(), 5 * RECORD);
        assert_eq!(own.len() as u64, 2 * RECORD + 5, "the file ends in its third record");
        assert!(own.iter().enumerate().all(|(i, b)| usize::from(*b) == 3 + i / RECORD as usize));
        assert_eq!(Layout::WHOLE.own(file.clone(), 1).len(), file.len());
        assert_eq!(Layout::WHOLE.pieces(5, 4000).collect::<Vec<_>>(), [(5, 5, 4000)]);
    }
}
