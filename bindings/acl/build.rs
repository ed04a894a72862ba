//! The shared library gets the name under which programs look for it, and stays when a program
//! unloads it: its threads go on, and the driver's session is the process's.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libascendcl.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
