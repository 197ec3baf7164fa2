//! Gives the shared library its name with a version: programs that were linked with it look for that.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libebb.so.0");
}
