//! Sleep and wake: an inference engine releases all its NPU memory for a while and allocates it
//! again at the same addresses.
//!
//! Data that must be kept (weights) is copied to the host before sleeping and back on waking. Data
//! that can be computed again (a KV cache) is dropped. The addresses stay reserved, so pointers and
//! captured graphs are still valid afterwards.
//!
//! Without an NPU: `cargo xtask emulate -- cargo run --quiet --example sleep_wake`

use ascend_vmm::LogicalId;
use ascend_vmm::{Device, Mapping, MemoryKind, Reservation, Session};

/// A block of memory with a fixed address.
struct Block {
    device: Device,
    reservation: Reservation,
    state: State,
}

enum State {
    Awake(Mapping),
    /// The contents, if they are to be kept.
    Asleep(Option<Vec<u8>>),
}

impl Block {
    fn new(device: &Device, size: u64) -> ascend_vmm::Result<Block> {
        let reservation = device.session().reserve(size)?;
        let mapping = reservation.map(0, &device.create(size)?)?;
        Ok(Block { device: device.clone(), reservation, state: State::Awake(mapping) })
    }

    fn address(&self) -> u64 {
        self.reservation.address()
    }

    fn mapping(&self) -> Option<&Mapping> {
        match &self.state {
            State::Awake(mapping) => Some(mapping),
            State::Asleep(_) => None,
        }
    }

    /// Releases the memory, after copying its contents to the host if `keep` is set.
    fn sleep(&mut self, keep: bool) -> ascend_vmm::Result<()> {
        let State::Awake(mapping) = &self.state else { return Ok(()) };
        let kept = if keep {
            let mut bytes = vec![0; mapping.size() as usize];
            mapping.read(0, &mut bytes)?;
            Some(bytes)
        } else {
            None
        };
        // This drops the mapping. It held the last reference to its memory, which is released.
        self.state = State::Asleep(kept);
        Ok(())
    }

    /// Allocates memory at the same address. If there is none, the block stays asleep and keeps its
    /// contents.
    fn wake(&mut self) -> ascend_vmm::Result<()> {
        let State::Asleep(kept) = &self.state else { return Ok(()) };
        let mapping = self.reservation.map(0, &self.device.create(self.reservation.size())?)?;
        if let Some(bytes) = kept {
            mapping.write(0, bytes)?;
        }
        self.state = State::Awake(mapping);
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Session::open()?.device(LogicalId(0))?;
    let free = || device.memory_info(MemoryKind::Hbm).map(|info| info.huge_free >> 20);

    let mut weights = Block::new(&device, 64 << 20)?;
    let mut cache = Block::new(&device, 128 << 20)?;
    if let Some(mapping) = weights.mapping() {
        mapping.fill(0, mapping.size(), 7)?;
    }
    let (weights_at, cache_at) = (weights.address(), cache.address());
    println!("awake: weights at {weights_at:#x}, cache at {cache_at:#x}, {} MiB free", free()?);

    let before = free()?;
    weights.sleep(true)?;
    cache.sleep(false)?;
    println!("asleep: {} MiB free", free()?);
    assert_eq!(free()?, before + 64 + 128);

    weights.wake()?;
    cache.wake()?;
    assert_eq!((weights.address(), cache.address()), (weights_at, cache_at));
    let mut last = [0];
    if let Some(mapping) = weights.mapping() {
        mapping.read(mapping.size() - 1, &mut last)?;
    }
    assert_eq!(last, [7]);
    println!("awake again: same addresses, same weights, {} MiB free", free()?);
    Ok(())
}
