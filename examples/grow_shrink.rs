//! A segment that grows and shrinks while its address stays: what allocators call an expandable segment.
//!
//! Addresses are reserved once, for the largest size that there can ever be; they cost nothing. Physical memory is put behind them piece by piece as the
//! segment grows, and taken away from the end as it shrinks. Nothing moves, so pointers into the segment stay good.
//!
//! Without an NPU: `cargo xtask emulate -- cargo run --quiet --example grow_shrink`

use ascend_vmm::discovery::LogicalId;
use ascend_vmm::{Device, Mapping, Reservation, Session};

/// Size of a piece: a multiple of the 2 MiB that physical memory comes in.
const PIECE: u64 = 16 << 20;

struct Segment {
    device: Device,
    reservation: Reservation,
    /// The pieces from the start on. Each mapping keeps its physical memory alive.
    pieces: Vec<Mapping>,
}

impl Segment {
    fn new(device: &Device, largest: u64) -> ascend_vmm::Result<Segment> {
        let reservation = device.session().reserve(largest)?;
        Ok(Segment { device: device.clone(), reservation, pieces: Vec::new() })
    }

    fn size(&self) -> u64 {
        self.pieces.len() as u64 * PIECE
    }

    /// Grows or shrinks to at least `size`. If memory runs out on the way, what was there before is still there.
    fn resize(&mut self, size: u64) -> ascend_vmm::Result<()> {
        let wanted = size.div_ceil(PIECE) as usize;
        let before = self.pieces.len();
        while self.pieces.len() < wanted {
            match self.add_piece() {
                Ok(piece) => self.pieces.push(piece),
                Err(error) => {
                    self.pieces.truncate(before);
                    return Err(error);
                }
            }
        }
        // Dropping a mapping unmaps it, and with it goes the last reference to its memory.
        self.pieces.truncate(wanted);
        Ok(())
    }

    fn add_piece(&self) -> ascend_vmm::Result<Mapping> {
        let memory = self.device.create(PIECE)?;
        self.reservation.map(self.size(), &memory)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Session::open()?.device(LogicalId(0))?;
    let mut segment = Segment::new(&device, 1 << 30)?;
    let address = segment.reservation.address();

    for size in [32 << 20, 256 << 20, 64 << 20, 512 << 20] {
        segment.resize(size)?;
        // The first bytes are the same ones all the time.
        let first = &segment.pieces[0];
        if segment.size() == 32 << 20 {
            first.write(0, b"still here")?;
        }
        let mut text = [0; 10];
        first.read(0, &mut text)?;
        println!("{:3} MiB at {address:#x}: {}", segment.size() >> 20, String::from_utf8_lossy(&text));
        assert_eq!(&text, b"still here");
        assert_eq!(segment.reservation.address(), address);
    }

    // A copy may run over several pieces: they are neighbours in the address space.
    let seam = segment.reservation.slice(PIECE - 4, 8)?;
    seam.write(b"AcrossIt")?;
    let mut text = [0; 4];
    segment.pieces[1].read(0, &mut text)?;
    assert_eq!(&text, b"ssIt");
    println!("copied across the seam of two pieces");
    Ok(())
}
