//! An expandable segment: memory comes and goes, and the addresses stay.
//!
//! The addresses are reserved once, for the largest possible size, and cost no memory. Any part can
//! be mapped and unmapped. Unmapped memory goes to a cache, so growing again costs one ioctl a
//! page. If memory runs out, the segment is unchanged.
//!
//! Without an NPU: `cargo xtask emulate -- cargo run --quiet --example expandable_segment`

use ascend_vmm::pool::{PageCache, Segment};
use ascend_vmm::{LogicalId, Session};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Session::open()?.device(LogicalId(0))?;
    let cache = PageCache::new(&device);
    let mut segment = Segment::new(&cache, 120 << 30)?;

    segment.ensure(0..32 << 20)?;
    segment.slice(0, 10)?.write(b"still here")?;
    for size in [256 << 20, 64 << 20, 512 << 20] {
        segment.shrink(size..segment.size())?;
        segment.ensure(0..size)?;
        let mut text = [0; 10];
        segment.slice(0, 10)?.read(&mut text)?;
        println!("{:3} MiB at {:#x}: {}", size >> 20, segment.address(), String::from_utf8_lossy(&text));
    }
    println!("{:?}", cache.statistics());

    // More memory than the device has: an error, and nothing has changed.
    match segment.ensure(0..segment.size()) {
        Err(error) if error.is_out_of_memory() => println!("{error}"),
        other => other?,
    }
    assert_eq!(segment.mapped(), 512 << 20);
    Ok(())
}
