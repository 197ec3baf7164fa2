//! An assembler for the few instructions that the tracker's programs consist of. Jumps go forward to
//! labels, and the kernel's verifier is the judge of everything else.

use std::collections::HashMap;

/// A register. R0 has results, R1 to R5 arguments (the fifth is not needed) (gone after a call), R6 to R9 are kept, R10 is
/// the end of the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reg {
    R0,
    R1,
    R2,
    R3,
    R4,
    R6 = 6,
    R7,
    R8,
    R9,
    R10,
}

/// How many bytes are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    B,
    W,
    DW,
}

impl Width {
    fn code(self) -> u8 {
        match self {
            Width::B => 0x10,
            Width::W => 0x00,
            Width::DW => 0x18,
        }
    }
}

/// Conditions of jumps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum If {
    Equal,
    Above,
}

impl If {
    fn code(self) -> u8 {
        match self {
            If::Equal => 0x10,
            If::Above => 0x20,
        }
    }
}

/// Functions of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Helper {
    MapLookup = 1,
    PidTgid = 14,
    RingOutput = 130,
    RingQuery = 134,
}

/// A place in the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Label(u32);

/// A program that is being written.
#[derive(Default)]
pub struct Asm {
    words: Vec<u64>,
    labels: u32,
    places: HashMap<Label, usize>,
    jumps: Vec<(usize, Label)>,
}

impl Asm {
    fn put(&mut self, code: u8, dst: Reg, src: u8, off: i16, imm: i32) {
        let registers = dst as u8 | src << 4;
        let mut bytes = [0; 8];
        (bytes[0], bytes[1]) = (code, registers);
        bytes[2..4].copy_from_slice(&off.to_ne_bytes());
        bytes[4..8].copy_from_slice(&imm.to_ne_bytes());
        self.words.push(u64::from_ne_bytes(bytes));
    }

    /// dst = src
    pub fn mov(&mut self, dst: Reg, src: Reg) {
        self.put(0xbf, dst, src as u8, 0, 0);
    }

    /// dst = the lower half of src
    pub fn mov32(&mut self, dst: Reg, src: Reg) {
        self.put(0xbc, dst, src as u8, 0, 0);
    }

    /// dst = number
    pub fn set(&mut self, dst: Reg, number: i32) {
        self.put(0xb7, dst, 0, 0, number);
    }

    /// dst += number
    pub fn add(&mut self, dst: Reg, number: i32) {
        self.put(0x07, dst, 0, 0, number);
    }

    /// dst >>= number
    pub fn shift_right(&mut self, dst: Reg, number: i32) {
        self.put(0x77, dst, 0, 0, number);
    }

    /// dst = memory at src + off
    pub fn load(&mut self, width: Width, dst: Reg, src: Reg, off: i16) {
        self.put(0x61 | width.code(), dst, src as u8, off, 0);
    }

    /// memory at dst + off = src
    pub fn store(&mut self, width: Width, dst: Reg, off: i16, src: Reg) {
        self.put(0x63 | width.code(), dst, src as u8, off, 0);
    }

    /// memory at dst + off += src, at once
    pub fn add_atomically(&mut self, dst: Reg, off: i16, src: Reg) {
        self.put(0xdb, dst, src as u8, off, 0);
    }

    /// dst = a map
    pub fn load_map(&mut self, dst: Reg, fd: i32) {
        self.put(0x18, dst, 1, 0, fd);
        self.words.push(0);
    }

    /// R0 = what the function says
    pub fn call(&mut self, helper: Helper) {
        self.put(0x85, Reg::R0, 0, 0, helper as i32);
    }

    /// Returns R0.
    pub fn exit(&mut self) {
        self.put(0x95, Reg::R0, 0, 0, 0);
    }

    /// A label to be placed later.
    pub fn label(&mut self) -> Label {
        self.labels += 1;
        Label(self.labels)
    }

    /// The label is here.
    pub fn place(&mut self, label: Label) {
        self.places.insert(label, self.words.len());
    }

    /// Goes to the label when `dst` compares so to a number.
    pub fn jump_if(&mut self, dst: Reg, condition: If, number: i32, to: Label) {
        self.jumps.push((self.words.len(), to));
        self.put(0x05 | condition.code(), dst, 0, 0, number);
    }

    /// Goes to the label when `dst` compares so to `src`.
    pub fn jump_if_reg(&mut self, dst: Reg, condition: If, src: Reg, to: Label) {
        self.jumps.push((self.words.len(), to));
        self.put(0x0d | condition.code(), dst, src as u8, 0, 0);
    }

    /// The instructions; `None` when a label was not placed, or is too far away.
    pub fn finish(mut self) -> Option<Vec<u64>> {
        for (at, label) in std::mem::take(&mut self.jumps) {
            let to = *self.places.get(&label)?;
            let distance = i16::try_from(to as i64 - at as i64 - 1).ok()?;
            let mut bytes = self.words[at].to_ne_bytes();
            bytes[2..4].copy_from_slice(&distance.to_ne_bytes());
            self.words[at] = u64::from_ne_bytes(bytes);
        }
        Some(self.words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_as_the_kernel_documents_them() {
        let mut asm = Asm::default();
        let end = asm.label();
        asm.mov(Reg::R6, Reg::R1);
        asm.jump_if(Reg::R6, If::Equal, 7, end);
        asm.load(Width::DW, Reg::R0, Reg::R6, 16);
        asm.store(Width::W, Reg::R10, -8, Reg::R0);
        asm.place(end);
        asm.exit();
        let bytes: Vec<[u8; 8]> = asm.finish().unwrap().into_iter().map(u64::to_ne_bytes).collect();
        let expected: [[u8; 8]; 5] = [
            [0xbf, 0x16, 0, 0, 0, 0, 0, 0],
            [0x15, 0x06, 2, 0, 7, 0, 0, 0],
            [0x79, 0x60, 16, 0, 0, 0, 0, 0],
            [0x63, 0x0a, 0xf8, 0xff, 0, 0, 0, 0],
            [0x95, 0, 0, 0, 0, 0, 0, 0],
        ];
        assert_eq!(bytes, expected);
    }

    #[test]
    fn a_label_must_be_placed() {
        let mut asm = Asm::default();
        let nowhere = asm.label();
        asm.jump_if(Reg::R0, If::Equal, 0, nowhere);
        assert!(asm.finish().is_none());
    }
}
