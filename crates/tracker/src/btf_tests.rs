//! Type information made by hand, cut off and damaged; and that of this machine.

use super::*;
use proptest::prelude::*;

struct Builder {
    types: Vec<u32>,
    strings: Vec<u8>,
    first_string: u32,
}

impl Builder {
    fn new(first_string: u32) -> Builder {
        Builder { types: Vec::new(), strings: vec![0], first_string }
    }

    fn name(&mut self, name: &str) -> u32 {
        if name.is_empty() {
            return 0;
        }
        let at = self.strings.len() as u32;
        self.strings.extend(name.bytes().chain([0]));
        at + self.first_string
    }

    fn add(&mut self, name: &str, kind: u32, len: u32, size_or_type: u32, rest: &[u32]) {
        let name = self.name(name);
        self.types.extend([name, kind << 24 | len, size_or_type]);
        self.types.extend(rest);
    }

    fn finish(self) -> Vec<u8> {
        let types = self.types.len() as u32 * 4;
        let mut out = Vec::new();
        out.extend(MAGIC.to_ne_bytes());
        out.extend([1, 0]);
        for word in [24, 0, types, types, self.strings.len() as u32] {
            out.extend(word.to_ne_bytes());
        }
        self.types.iter().for_each(|w| out.extend(w.to_ne_bytes()));
        out.extend(self.strings);
        out
    }
}

/// 1: long, 2: struct inner {nameless part {i_a at 8}}, 3: the nameless part, 4: pointer to 2,
/// 5: the arguments (void, inner *, long), 6: pointer to 5, 7: their other name.
fn small() -> Vec<u8> {
    let mut b = Builder::new(0);
    b.add("long", kind::INT, 0, 8, &[64]);
    let (x, y) = (b.name("x"), b.name("i_a"));
    b.add("inner", kind::STRUCT, 2, 24, &[x, 1, 0, 0, 3, 64]);
    b.add("", kind::UNION, 1, 16, &[y, 1, 64]);
    b.add("", kind::PTR, 0, 2, &[]);
    b.add("", kind::FUNC_PROTO, 3, 0, &[0, 0, 0, 4, 0, 1]);
    b.add("", kind::PTR, 0, 5, &[]);
    b.add("btf_trace_it", kind::TYPEDEF, 0, 6, &[]);
    b.finish()
}

#[test]
fn fields_and_arguments_are_found() {
    let btf = Btf::parse(small()).unwrap();
    assert_eq!(btf.field("inner", "x"), Some(Field { offset: 0, size: 8 }));
    assert_eq!(btf.field("inner", "i_a"), Some(Field { offset: 16, size: 8 }));
    assert_eq!(btf.field("inner", "z"), None);
    assert_eq!(btf.field("outer", "x"), None);
    let arguments = vec![Argument::Structure("inner".into()), Argument::Number(8)];
    assert_eq!(btf.tracepoint("it"), Some((7, arguments)));
}

#[test]
fn a_module_goes_on_where_the_kernel_ends() {
    let base = Btf::parse(small()).unwrap();
    let mut b = Builder::new(base.strings_len());
    b.add("", kind::FUNC_PROTO, 2, 0, &[0, 0, 0, 4]);
    b.add("", kind::PTR, 0, 8, &[]);
    b.add("btf_trace_other", kind::TYPEDEF, 0, 9, &[]);
    let module = Btf::parse_module(b.finish(), &base).unwrap();
    let arguments = vec![Argument::Structure("inner".into())];
    assert_eq!(module.tracepoint("other"), Some((10, arguments)));
    assert_eq!(module.tracepoint("it"), None, "that is the kernel's own");
    assert_eq!(module.field("inner", "i_a"), Some(Field { offset: 16, size: 8 }));
}

#[test]
fn what_ends_too_early_is_an_error() {
    let whole = small();
    for len in 0..whole.len() {
        assert!(Btf::parse(whole[..len].to_vec()).is_err(), "{len} bytes");
    }
}

#[test]
fn circles_come_to_an_end() {
    let mut b = Builder::new(0);
    b.add("a", kind::TYPEDEF, 0, 1, &[]);
    let x = b.name("x");
    b.add("s", kind::STRUCT, 2, 8, &[0, 2, 0, x, 1, 0]);
    let btf = Btf::parse(b.finish()).unwrap();
    assert_eq!(btf.field("s", "x"), None);
    assert_eq!(btf.tracepoint("a"), None);
}

proptest! {
    /// Nothing panics or runs away, whatever is damaged.
    #[test]
    fn damage_is_survived(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = small();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(btf) = Btf::parse(bytes) {
            let _ = (btf.field("inner", "i_a"), btf.field("inner", "x"), btf.tracepoint("it"));
        }
    }
}

#[test]
fn this_kernel_is_understood() {
    let Ok(bytes) = std::fs::read("/sys/kernel/btf/vmlinux") else {
        return eprintln!("SKIPPED: the kernel shows no type information");
    };
    let btf = Btf::parse(bytes).unwrap();
    assert_eq!(btf.field("super_block", "s_dev").map(|f| f.size), Some(4));
    assert!(btf.field("inode", "i_ino").is_some());
}
