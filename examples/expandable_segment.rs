//! An expandable segment: an allocator's addresses stay where they are while memory comes and goes.
//!
//! The addresses are reserved once, for the largest possible size; they cost no memory. Memory is
//! put behind any part of them and taken away again, into a cache, so that growing a second time
//! costs one ioctl a page. If memory runs out, the segment is as it was before.
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

    // More than there is: an error, and nothing has changed.
    match segment.ensure(0..segment.size()) {
        Err(error) if error.is_out_of_memory() => println!("{error}"),
        other => other?,
    }
    assert_eq!(segment.mapped(), 512 << 20);
    Ok(())
}
