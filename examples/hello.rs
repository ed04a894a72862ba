//! The first program of the README.

use ascend_vmm::{LogicalId, Session};

fn main() -> ascend_vmm::Result<()> {
    let session = Session::open()?;
    let device = session.device(LogicalId(0))?;

    let memory = device.create(64 << 20)?; // 64 MiB of HBM, without an address
    let reservation = session.reserve(1 << 30)?; // 1 GiB of addresses, without memory
    let mapping = reservation.map(0, &memory)?; // the one behind the other

    mapping.write(0, b"hello, NPU")?;
    let mut back = [0; 10];
    mapping.read(0, &mut back)?;
    println!("{} at {:#x}", String::from_utf8_lossy(&back), mapping.address());
    Ok(())
}
