#![no_main]

#[path = "../../support/untrusted.rs"]
mod untrusted;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| untrusted::fabric_handles(bytes));
