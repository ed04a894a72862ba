//! Prints how long an emulated ioctl takes on this host.

fn main() {
    match ascend_emulator::latency::measure(100_000) {
        Ok(latency) => println!("{latency:?}"),
        Err(unavailable) => eprintln!("{unavailable}"),
    }
}
