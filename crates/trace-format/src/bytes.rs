//! Numbers of variable length, and a cursor that refuses to leave its bytes.

/// Writes into a slice that may be too short.
pub(crate) struct Out<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl<'a> Out<'a> {
    pub(crate) fn new(bytes: &'a mut [u8]) -> Out<'a> {
        Out { bytes, at: 0 }
    }

    pub(crate) fn byte(&mut self, byte: u8) -> Option<()> {
        *self.bytes.get_mut(self.at)? = byte;
        self.at += 1;
        Some(())
    }

    pub(crate) fn number(&mut self, mut n: u64) -> Option<()> {
        while n >= 0x80 {
            self.byte((n & 0x7f) as u8 | 0x80)?;
            n >>= 7;
        }
        self.byte(n as u8)
    }

    pub(crate) fn signed(&mut self, n: i64) -> Option<()> {
        self.number(((n << 1) ^ (n >> 63)).cast_unsigned())
    }

    pub(crate) fn text(&mut self, text: &[u8]) -> Option<()> {
        self.number(text.len() as u64)?;
        self.bytes.get_mut(self.at..self.at + text.len())?.copy_from_slice(text);
        self.at += text.len();
        Some(())
    }

    pub(crate) fn len(&self) -> usize {
        self.at
    }
}

/// Reads from a slice; nothing where it ends too early or says something impossible.
pub(crate) struct In<'a> {
    bytes: &'a [u8],
}

impl<'a> In<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> In<'a> {
        In { bytes }
    }

    pub(crate) fn rest(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(len)?;
        self.bytes = rest;
        Some(taken)
    }

    pub(crate) fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|b| b[0])
    }

    pub(crate) fn number(&mut self) -> Option<u64> {
        let mut n = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let part = u64::from(byte & 0x7f);
            if shift == 63 && part > 1 {
                return None;
            }
            n |= part << shift;
            if byte & 0x80 == 0 {
                return Some(n);
            }
        }
        None
    }

    pub(crate) fn small(&mut self) -> Option<u32> {
        u32::try_from(self.number()?).ok()
    }

    pub(crate) fn signed(&mut self) -> Option<i64> {
        let n = self.number()?;
        Some((n >> 1).cast_signed() ^ -(n & 1).cast_signed())
    }

    pub(crate) fn text(&mut self, longest: usize) -> Option<Vec<u8>> {
        let len = usize::try_from(self.number()?).ok().filter(|len| *len <= longest)?;
        self.take(len).map(<[u8]>::to_vec)
    }

    pub(crate) fn fixed<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }
}
