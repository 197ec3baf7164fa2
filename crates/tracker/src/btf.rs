//! The kernel's type information (BTF), as far as it is needed: types by name, where a field is in
//! a structure, and what the arguments of a tracepoint are. It comes from the kernel, but is read
//! like anything from outside: every offset is checked.

use std::collections::HashMap;

const MAGIC: u16 = 0xeb9f;

/// Structures within structures, and names for names, before it is called a circle.
const DEPTH_MAX: u32 = 16;

/// What is wrong with type information.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BtfError {
    /// It ends too early.
    #[error("it is cut off at byte {0}")]
    Short(usize),
    /// It does not begin as it should.
    #[error("it has no header that is known here")]
    Header,
    /// A kind of type from the future.
    #[error("type {id} is of the unknown kind {kind}")]
    Kind {
        /// The type.
        id: u32,
        /// Its kind.
        kind: u32,
    },
}

/// Kinds of types that something is asked of; the others are stepped over.
mod kind {
    pub const INT: u32 = 1;
    pub const PTR: u32 = 2;
    pub const ARRAY: u32 = 3;
    pub const STRUCT: u32 = 4;
    pub const UNION: u32 = 5;
    pub const ENUM: u32 = 6;
    pub const TYPEDEF: u32 = 8;
    pub const VOLATILE: u32 = 9;
    pub const CONST: u32 = 10;
    pub const RESTRICT: u32 = 11;
    pub const FUNC_PROTO: u32 = 13;
    pub const VAR: u32 = 14;
    pub const DATASEC: u32 = 15;
    pub const DECL_TAG: u32 = 17;
    pub const TYPE_TAG: u32 = 18;
    pub const ENUM64: u32 = 19;
}

/// One type: its place and first words.
#[derive(Clone, Copy)]
struct Type {
    name: u32,
    info: u32,
    size_or_type: u32,
    /// Where its further words are.
    rest: usize,
}

impl Type {
    fn kind(&self) -> u32 {
        self.info >> 24 & 0x1f
    }

    fn len(&self) -> usize {
        (self.info & 0xffff) as usize
    }

    /// The offsets of its members have the width of a bit field in their upper byte.
    fn has_bit_fields(&self) -> bool {
        self.info >> 31 != 0
    }

    fn words_after(&self, id: u32) -> Result<usize, BtfError> {
        Ok(match self.kind() {
            kind::INT | kind::VAR | kind::DECL_TAG => 1,
            kind::ARRAY => 3,
            kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 3 * self.len(),
            kind::ENUM | kind::FUNC_PROTO => 2 * self.len(),
            kind::TYPE_TAG | 0..=18 => 0,
            kind => return Err(BtfError::Kind { id, kind }),
        })
    }
}

/// A field of a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Bytes from the beginning.
    pub offset: u32,
    /// Its size in bytes.
    pub size: u32,
}

/// Type information of the kernel, or of one of its modules on top of that.
pub struct Btf<'base> {
    base: Option<&'base Btf<'base>>,
    bytes: Vec<u8>,
    types: Vec<Type>,
    strings: std::ops::Range<usize>,
    /// The first type's number, and the first string's offset: they go on where the base ends.
    first: (u32, u32),
    typedefs: HashMap<Vec<u8>, u32>,
    structs: HashMap<Vec<u8>, u32>,
}

impl<'base> Btf<'base> {
    /// Of the kernel itself.
    pub fn parse(bytes: Vec<u8>) -> Result<Btf<'static>, BtfError> {
        Btf::read(bytes, None)
    }

    /// Of a module.
    pub fn parse_module(bytes: Vec<u8>, base: &'base Btf<'base>) -> Result<Btf<'base>, BtfError> {
        Btf::read(bytes, Some(base))
    }

    fn read<'a>(bytes: Vec<u8>, base: Option<&'a Btf<'a>>) -> Result<Btf<'a>, BtfError> {
        let header = (u16_at(&bytes, 0)?, *bytes.get(2).ok_or(BtfError::Short(2))?);
        if header != (MAGIC, 1) {
            return Err(BtfError::Header);
        }
        let word = |at| u32_at(&bytes, at).map(|w| w as usize);
        let start = word(4)?;
        let section = |off: usize, len: usize| {
            let range = start + off..start + off + len;
            if range.end > bytes.len() { Err(BtfError::Short(bytes.len())) } else { Ok(range) }
        };
        let types = section(word(8)?, word(12)?)?;
        let strings = section(word(16)?, word(20)?)?;
        let first = base.map_or((1, 0), |b| (b.first.0 + b.count(), b.first.1 + b.strings_len()));
        let types = list(&bytes, types, first.0)?;
        let (typedefs, structs) = (HashMap::new(), HashMap::new());
        let mut btf = Btf { base, bytes, types, strings, first, typedefs, structs };
        btf.index();
        Ok(btf)
    }

    fn count(&self) -> u32 {
        self.types.len() as u32
    }

    fn strings_len(&self) -> u32 {
        self.strings.len() as u32
    }

    fn index(&mut self) {
        let (mut typedefs, mut structs) = (HashMap::new(), HashMap::new());
        for (i, of) in self.types.iter().enumerate() {
            let id = self.first.0 + i as u32;
            let names = match of.kind() {
                kind::TYPEDEF => &mut typedefs,
                kind::STRUCT => &mut structs,
                _ => continue,
            };
            if let Some(name) = self.string(of.name).filter(|name| !name.is_empty()) {
                names.entry(name.to_vec()).or_insert(id);
            }
        }
        (self.typedefs, self.structs) = (typedefs, structs);
    }

    fn string(&self, offset: u32) -> Option<&[u8]> {
        let Some(own) = offset.checked_sub(self.first.1) else { return self.base?.string(offset) };
        let strings = self.bytes.get(self.strings.clone())?.get(own as usize..)?;
        strings.split(|b| *b == 0).next()
    }

    fn get(&self, id: u32) -> Option<&Type> {
        match id.checked_sub(self.first.0) {
            Some(own) => self.types.get(own as usize),
            None => self.base?.get(id),
        }
    }

    /// Whose bytes a type's further words are in.
    fn home(&self, id: u32) -> Option<&Btf<'base>> {
        if id >= self.first.0 { Some(self) } else { self.base?.home(id) }
    }

    /// The number of the type that `name` is another name of; of this one's own only.
    #[must_use]
    pub fn typedef(&self, name: &str) -> Option<u32> {
        self.typedefs.get(name.as_bytes()).copied()
    }

    /// The number of a structure.
    #[must_use]
    pub fn structure(&self, name: &str) -> Option<u32> {
        let own = self.structs.get(name.as_bytes()).copied();
        own.or_else(|| self.base?.structure(name))
    }

    /// A field of a structure, also when it is in a nameless part of it. None for bit fields.
    #[must_use]
    pub fn field(&self, structure: &str, name: &str) -> Option<Field> {
        self.field_of(self.structure(structure)?, name.as_bytes(), DEPTH_MAX)
    }

    fn field_of(&self, id: u32, name: &[u8], depth: u32) -> Option<Field> {
        let of = *self.get(id)?;
        if !matches!(of.kind(), kind::STRUCT | kind::UNION) || depth == 0 {
            return None;
        }
        let home = self.home(id)?;
        for i in 0..of.len() {
            let at = of.rest + 12 * i;
            let word = |k: usize| u32_at(&home.bytes, at + 4 * k).ok();
            let (called, inner, place) = (self.string(word(0)?)?, word(1)?, word(2)?);
            let (bits, width) = match of.has_bit_fields() {
                true => (place & 0xff_ffff, place >> 24),
                false => (place, 0),
            };
            let offset = bits / 8;
            if called == name && bits % 8 == 0 && width == 0 {
                return Some(Field { offset, size: self.size(inner, DEPTH_MAX)? });
            }
            if called.is_empty()
                && let Some(found) = self.field_of(inner, name, depth - 1)
            {
                return Some(Field { offset: offset.checked_add(found.offset)?, size: found.size });
            }
        }
        None
    }

    fn size(&self, id: u32, depth: u32) -> Option<u32> {
        let of = self.get(id)?;
        match of.kind() {
            _ if depth == 0 => None,
            kind::INT | kind::STRUCT | kind::UNION | kind::ENUM | kind::ENUM64 => {
                Some(of.size_or_type)
            }
            kind::PTR => Some(8),
            kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                self.size(of.size_or_type, depth - 1)
            }
            _ => None,
        }
    }

    /// The arguments of a tracepoint: its number, and for each argument the structure it points to,
    /// or its size when it is a number.
    #[must_use]
    pub fn tracepoint(&self, name: &str) -> Option<(u32, Vec<Argument>)> {
        let id = self.typedef(&format!("btf_trace_{name}"))?;
        let pointer = self.get(self.get(id)?.size_or_type)?;
        let proto_id = pointer.size_or_type;
        let proto = self.get(proto_id).filter(|t| t.kind() == kind::FUNC_PROTO)?;
        let home = self.home(proto_id)?;
        let argument = |i: usize| {
            let inner = u32_at(&home.bytes, proto.rest + 8 * i + 4).ok()?;
            Some(self.argument(inner))
        };
        // The first one is for the tracepoint itself.
        Some((id, (1..proto.len()).map(argument).collect::<Option<Vec<_>>>()?))
    }

    fn argument(&self, id: u32) -> Argument {
        let plain = |id| self.plain(id, DEPTH_MAX);
        let Some((_, of)) = plain(id) else { return Argument::Other };
        match of.kind() {
            kind::INT | kind::ENUM => Argument::Number(of.size_or_type),
            kind::PTR => match plain(of.size_or_type) {
                Some((_, inner)) if inner.kind() == kind::STRUCT => {
                    let name = self.string(inner.name).unwrap_or_default();
                    Argument::Structure(String::from_utf8_lossy(name).into_owned())
                }
                _ => Argument::Other,
            },
            _ => Argument::Other,
        }
    }

    /// A type without its other names and qualifiers.
    fn plain(&self, id: u32, depth: u32) -> Option<(u32, &Type)> {
        let of = self.get(id)?;
        match of.kind() {
            _ if depth == 0 => None,
            kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                self.plain(of.size_or_type, depth - 1)
            }
            _ => Some((id, of)),
        }
    }
}

/// What an argument of a tracepoint is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// A pointer to this structure.
    Structure(String),
    /// A number of so many bytes.
    Number(u32),
    /// Anything else.
    Other,
}

fn list(bytes: &[u8], section: std::ops::Range<usize>, first: u32) -> Result<Vec<Type>, BtfError> {
    let (mut at, mut types) = (section.start, Vec::new());
    while at < section.end {
        let of = Type {
            name: u32_at(bytes, at)?,
            info: u32_at(bytes, at + 4)?,
            size_or_type: u32_at(bytes, at + 8)?,
            rest: at + 12,
        };
        at = of.rest + 4 * of.words_after(first + types.len() as u32)?;
        if at > section.end {
            return Err(BtfError::Short(section.end));
        }
        types.push(of);
    }
    Ok(types)
}

fn u16_at(bytes: &[u8], at: usize) -> Result<u16, BtfError> {
    let two = bytes.get(at..at + 2).and_then(|b| b.try_into().ok());
    two.map(u16::from_ne_bytes).ok_or(BtfError::Short(at))
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, BtfError> {
    let four = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
    four.map(u32::from_ne_bytes).ok_or(BtfError::Short(at))
}

#[cfg(test)]
#[path = "btf_tests.rs"]
mod tests;
