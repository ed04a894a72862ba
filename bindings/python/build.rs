//! The module stays loaded: threads of the C library in it go on, and the driver's session is the
//! process's.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
