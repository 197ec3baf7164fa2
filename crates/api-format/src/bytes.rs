//! Numbers as bytes.

use crate::{Malformed, Span};

/// Reads one number or piece after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn take(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(n).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.take(N)?.try_into().map_err(|_| Malformed)
    }

    pub fn byte(&mut self) -> Result<u8, Malformed> {
        self.array().map(u8::from_le_bytes)
    }

    pub fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// LEB128; at most ten bytes, and no more than 64 bits in them.
    pub fn number(&mut self) -> Result<u64, Malformed> {
        let mut value = 0_u64;
        for at in 0..10 {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if at == 9 && bits > 1 {
                return Err(Malformed);
            }
            value |= bits << (7 * at);
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Malformed)
    }

    /// A signed one: zigzag.
    pub fn signed(&mut self) -> Result<i64, Malformed> {
        let n = self.number()?;
        Ok((n >> 1) as i64 ^ -((n & 1) as i64))
    }

    pub fn span(&mut self) -> Result<Span, Malformed> {
        Span::new(self.u64()?, self.u64()?)
    }

    /// Nothing may be left.
    pub fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed) }
    }
}

pub(crate) fn put_number(into: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        into.push(n as u8 | 0x80);
        n >>= 7;
    }
    into.push(n as u8);
}

pub(crate) fn put_signed(into: &mut Vec<u8>, n: i64) {
    put_number(into, (n << 1 ^ n >> 63) as u64);
}

pub(crate) fn put_span(into: &mut Vec<u8>, span: Span) {
    into.extend_from_slice(&span.offset.to_le_bytes());
    into.extend_from_slice(&span.len.to_le_bytes());
}
