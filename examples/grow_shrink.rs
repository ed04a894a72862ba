//! A segment that grows and shrinks at a fixed address: an expandable segment of an allocator.
//!
//! The addresses are reserved once, for the largest possible size; they cost no memory. Physical
//! memory is mapped piece by piece as the segment grows, and unmapped from the end as it shrinks.
//! Nothing moves, so pointers into the segment stay valid.
//!
//! Without an NPU: `cargo xtask emulate -- cargo run --quiet --example grow_shrink`

use ascend_vmm::LogicalId;
use ascend_vmm::{Device, Mapping, Reservation, Session};

/// Size of a piece: a multiple of 2 MiB, the page size.
const PIECE: u64 = 16 << 20;

struct Segment {
    device: Device,
    reservation: Reservation,
    /// The pieces in the order of their addresses. Each mapping keeps its physical memory alive.
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

    /// Grows or shrinks to `size`, rounded up to whole pieces. If memory runs out, the segment
    /// keeps the size that it had.
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
        // Dropping a mapping unmaps it and drops the last reference to its memory.
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
        // The first piece is never unmapped, so its contents stay.
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

    // A copy may cross from one piece into the next, because their addresses are contiguous.
    let seam = segment.reservation.slice(PIECE - 4, 8)?;
    seam.write(b"AcrossIt")?;
    let mut text = [0; 4];
    segment.pieces[1].read(0, &mut text)?;
    assert_eq!(&text, b"ssIt");
    println!("copied across the seam of two pieces");
    Ok(())
}
