#![no_main]

#[path = "../../../service/tests/support/untrusted.rs"]
mod untrusted;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    untrusted::frames(bytes);
    untrusted::policies(bytes);
});
