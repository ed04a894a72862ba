//! Two processes share memory of an NPU.
//!
//! The exporter creates memory and sends it over a Unix socket. The importer maps it and changes
//! it. The socket carries only a ticket, no data of the NPU. The exporter puts the importer on the
//! driver's trust list, so no other process can use the ticket. `Export::trust` and
//! `Export::ticket` do the same over any other channel.
//!
//! Without an NPU: `cargo xtask emulate -- cargo run --quiet --example share`

use ascend_vmm::LogicalId;
use ascend_vmm::{Session, share};
use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::time::Duration;

const SIZE: u64 = 8 << 20;
const TIMEOUT: Duration = Duration::from_secs(30);

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1) {
        None => exporter(),
        Some(socket) => importer(&socket),
    }
}

fn exporter() -> Result<(), Box<dyn Error>> {
    let device = Session::open()?.device(LogicalId(0))?;
    let memory = device.create(SIZE)?;
    let mapping = device.session().reserve(SIZE)?.map(0, &memory)?;
    mapping.write(0, b"hello from the exporter")?;

    let path = std::env::temp_dir().join(format!("ascend-vmm-share-{}", std::process::id()));
    let listener = UnixListener::bind(&path)?;
    let mut child = Command::new(std::env::current_exe()?).arg(&path).spawn()?;
    let (mut socket, _) = listener.accept()?;
    std::fs::remove_file(&path)?;

    // Trusts the process at the other end, sends it the ticket, and waits until it has imported the
    // memory.
    share::send(&socket, &memory, TIMEOUT)?;
    println!("exporter {}: process {} has the memory", std::process::id(), child.id());

    // The importer sends a byte when it has written.
    socket.read_exact(&mut [0])?;
    let mut text = [0; 23];
    mapping.read(0, &mut text)?;
    println!("exporter {}: reads \"{}\"", std::process::id(), String::from_utf8_lossy(&text));
    assert_eq!(&text, b"HELLO FROM THE IMPORTER");
    let status = child.wait()?;
    if status.success() { Ok(()) } else { Err(format!("the importer ended with {status}").into()) }
}

fn importer(path: &str) -> Result<(), Box<dyn Error>> {
    let mut socket = UnixStream::connect(path)?;
    let device = Session::open()?.device(LogicalId(0))?;
    let memory = share::receive(&socket, &device, TIMEOUT)?;
    let mapping = device.session().reserve(memory.size())?.map(0, &memory)?;
    let mut text = [0; 23];
    mapping.read(0, &mut text)?;
    println!("importer {}: reads \"{}\"", std::process::id(), String::from_utf8_lossy(&text));
    mapping.write(0, b"HELLO FROM THE IMPORTER")?;
    socket.write_all(&[1])?;
    Ok(())
}
