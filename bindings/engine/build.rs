//! The shared library gets the name under which programs link it.

fn main() {
    // Not `rustc-cdylib-link-arg`: cargo passes that on to every shared library that contains this
    // one.
    println!("cargo:rustc-link-arg=-Wl,-soname,libascend_vmm_service.so");
    println!("cargo:rerun-if-changed=build.rs");
}
