//! The programs that run in the kernel. They are assembled here, with the offsets of the running
//! kernel, so that nothing but this crate is needed to build or load them.

use crate::asm::{Asm, Helper, If, Label, Reg, Width};
use crate::hooks::Fields;
use crate::ring::EVENT_WORDS;

/// How a tracepoint tells of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// `(inode, offset, length asked for, length copied)`, after the bytes were copied.
    WriteEnd,
    /// `(iocb, iter)`, before anything was copied.
    WriteBegin,
    /// `(iocb, iter)` of a direct read or write.
    Direct,
    /// `(mapping)` of which a page is looked for because of a page fault.
    Fault,
    /// `(inode)` of a file that the tracker itself has touched, to have its mappings looked at.
    Ask,
}

/// The map of watched files: what it is asked with, the inode's number and the device's.
pub const KEY_WORDS: usize = 2;

/// What it answers. Each is a word; their order is their place.
#[derive(Clone, Copy)]
#[repr(usize)]
pub enum Value {
    /// Which registration it is.
    Tag,
    /// The process whose writes are left out; 0: none.
    Except,
    /// Events that found no room in the ring.
    Lost,
    /// Direct writes.
    Direct,
    /// Page faults, and looks that found a mapping that can be written through.
    Mapped,
    /// The process that wrote last.
    Writer,
}

/// Words of an answer.
pub const VALUE_WORDS: usize = 6;

impl Value {
    fn offset(self) -> i16 {
        self as i16 * 8
    }
}

/// The reader is woken when the ring is filled to a quarter: the rest is for the time that it
/// takes to come. Below that it looks when somebody asks.
const WAKE_PART: u32 = 4;

/// Flags of the ring.
const NO_WAKEUP: i32 = 1;
const FORCE_WAKEUP: i32 = 2;
const QUERY_AVAILABLE: i32 = 0;

/// Where things are on the stack.
const EVENT: i16 = -8 * EVENT_WORDS as i16;
const KEY: i16 = EVENT - 8 * KEY_WORDS as i16;

/// Registers that live through calls. The context's is R6 at first.
const CONTEXT: Reg = Reg::R6;
const VALUE: Reg = Reg::R8;
const SCRATCH: Reg = Reg::R9;

/// The descriptors that a program names.
#[derive(Clone, Copy)]
pub struct Maps {
    pub watched: i32,
    pub ring: i32,
    pub ring_bytes: u32,
}

/// The program for a tracepoint of this shape.
pub fn assemble(shape: Shape, fields: &Fields, maps: Maps) -> Option<Vec<u64>> {
    let mut asm = Asm::default();
    let out = asm.label();
    asm.mov(CONTEXT, Reg::R1);
    let mut body = Body { asm, fields: *fields, maps, out };
    body.inode(shape);
    body.find_value();
    if matches!(shape, Shape::WriteEnd | Shape::WriteBegin | Shape::Direct) {
        body.leave_own_out();
    }
    match shape {
        Shape::WriteEnd => body.range_of_end(),
        Shape::WriteBegin => body.range_of_begin(),
        Shape::Direct => body.count(Value::Direct),
        Shape::Fault => body.count(Value::Mapped),
        Shape::Ask => body.count_if_mapped(),
    }
    if matches!(shape, Shape::WriteEnd | Shape::WriteBegin) {
        body.send();
    }
    body.asm.place(out);
    body.asm.set(Reg::R0, 0);
    body.asm.exit();
    body.asm.finish()
}

struct Body {
    asm: Asm,
    fields: Fields,
    maps: Maps,
    out: Label,
}

impl Body {
    fn argument(&mut self, dst: Reg, index: i16) {
        self.asm.load(Width::DW, dst, CONTEXT, 8 * index);
    }

    fn field(&mut self, width: Width, dst: Reg, src: Reg, offset: u32) {
        // Checked when the field was looked for.
        self.asm.load(width, dst, src, offset as i16);
    }

    /// R7 is the inode.
    fn inode(&mut self, shape: Shape) {
        self.argument(Reg::R7, 0);
        match shape {
            Shape::WriteEnd | Shape::Ask => return,
            Shape::Fault => {
                return self.field(Width::DW, Reg::R7, Reg::R7, self.fields.mapping_inode);
            }
            Shape::WriteBegin | Shape::Direct => {}
        }
        if shape == Shape::Direct {
            self.argument(Reg::R1, 1);
            self.field(Width::B, Reg::R1, Reg::R1, self.fields.iter_is_source);
            self.asm.jump_if(Reg::R1, If::Equal, 0, self.out);
        }
        self.field(Width::DW, Reg::R7, Reg::R7, self.fields.iocb_file);
        self.field(Width::DW, Reg::R7, Reg::R7, self.fields.file_inode);
    }

    /// The value of the inode, or the end.
    fn find_value(&mut self) {
        self.field(Width::DW, Reg::R1, Reg::R7, self.fields.inode_ino);
        self.asm.store(Width::DW, Reg::R10, KEY, Reg::R1);
        self.asm.store(Width::DW, Reg::R10, EVENT + 8, Reg::R1);
        self.field(Width::DW, Reg::R1, Reg::R7, self.fields.inode_sb);
        self.field(Width::W, Reg::R1, Reg::R1, self.fields.sb_dev);
        self.asm.store(Width::DW, Reg::R10, KEY + 8, Reg::R1);
        self.asm.load_map(Reg::R1, self.maps.watched);
        self.asm.mov(Reg::R2, Reg::R10);
        self.asm.add(Reg::R2, KEY.into());
        self.asm.call(Helper::MapLookup);
        self.asm.jump_if(Reg::R0, If::Equal, 0, self.out);
        self.asm.mov(VALUE, Reg::R0);
    }

    fn leave_own_out(&mut self) {
        self.asm.call(Helper::PidTgid);
        self.asm.shift_right(Reg::R0, 32);
        self.asm.load(Width::DW, Reg::R1, VALUE, Value::Except.offset());
        self.asm.jump_if_reg(Reg::R0, If::Equal, Reg::R1, self.out);
        self.asm.store(Width::DW, VALUE, Value::Writer.offset(), Reg::R0);
    }

    /// Offset and length of the event.
    fn range_of_end(&mut self) {
        self.argument(SCRATCH, 3);
        self.asm.mov32(SCRATCH, SCRATCH);
        self.asm.jump_if(SCRATCH, If::Equal, 0, self.out);
        self.asm.store(Width::DW, Reg::R10, EVENT + 24, SCRATCH);
        self.argument(SCRATCH, 1);
        self.asm.store(Width::DW, Reg::R10, EVENT + 16, SCRATCH);
    }

    fn range_of_begin(&mut self) {
        self.argument(SCRATCH, 1);
        self.field(Width::DW, SCRATCH, SCRATCH, self.fields.iter_count);
        self.asm.jump_if(SCRATCH, If::Equal, 0, self.out);
        self.asm.store(Width::DW, Reg::R10, EVENT + 24, SCRATCH);
        self.argument(SCRATCH, 0);
        self.field(Width::DW, SCRATCH, SCRATCH, self.fields.iocb_pos);
        self.asm.store(Width::DW, Reg::R10, EVENT + 16, SCRATCH);
    }

    /// The event into the ring; where that fails it is counted.
    fn send(&mut self) {
        self.asm.load(Width::DW, Reg::R1, VALUE, Value::Tag.offset());
        self.asm.store(Width::DW, Reg::R10, EVENT, Reg::R1);
        self.asm.load_map(Reg::R1, self.maps.ring);
        self.asm.set(Reg::R2, QUERY_AVAILABLE);
        self.asm.call(Helper::RingQuery);
        let known = self.asm.label();
        self.asm.set(Reg::R4, FORCE_WAKEUP);
        let threshold = (self.maps.ring_bytes / WAKE_PART) as i32;
        self.asm.jump_if(Reg::R0, If::Above, threshold, known);
        self.asm.set(Reg::R4, NO_WAKEUP);
        self.asm.place(known);
        self.asm.load_map(Reg::R1, self.maps.ring);
        self.asm.mov(Reg::R2, Reg::R10);
        self.asm.add(Reg::R2, EVENT.into());
        self.asm.set(Reg::R3, 8 * EVENT_WORDS as i32);
        self.asm.call(Helper::RingOutput);
        self.asm.jump_if(Reg::R0, If::Equal, 0, self.out);
        self.count(Value::Lost);
    }

    fn count_if_mapped(&mut self) {
        self.field(Width::DW, SCRATCH, Reg::R7, self.fields.inode_mapping);
        self.field(Width::W, SCRATCH, SCRATCH, self.fields.mapping_writable);
        self.asm.jump_if(SCRATCH, If::Equal, 0, self.out);
        self.count(Value::Mapped);
    }

    fn count(&mut self, what: Value) {
        self.asm.set(Reg::R1, 1);
        self.asm.add_atomically(VALUE, what.offset(), Reg::R1);
    }
}
