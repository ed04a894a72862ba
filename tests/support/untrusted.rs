//! What must hold for any bytes from another process: they are refused with a sentence, or read as
//! exactly what they say. Used by the tests and by the targets of `tests/fuzz`.

// Each user of this file checks some of it.
#![allow(dead_code)]

use ascend_vmm::discovery::PciAddress;
use ascend_vmm::share::{FabricHandle, Ticket};

/// Reads bytes as a ticket. What is accepted is exactly what its writer wrote.
pub fn ticket(bytes: &[u8]) -> Option<Ticket> {
    match Ticket::from_bytes(bytes) {
        Ok(ticket) => {
            assert_eq!(ticket.to_bytes(), bytes);
            assert_eq!(ticket.to_string().parse(), Ok(ticket));
            Some(ticket)
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            None
        }
    }
}

/// A ticket as bytes and as text.
pub fn tickets(bytes: &[u8]) {
    ticket(bytes);
    if let Some(ticket) = std::str::from_utf8(bytes).ok().and_then(|text| text.parse::<Ticket>().ok()) {
        assert_eq!(ticket.to_string().parse(), Ok(ticket));
    }
}

/// Reads bytes as a fabric handle.
pub fn fabric_handle(bytes: &[u8]) -> Option<FabricHandle> {
    let read = |bytes: &[u8; FabricHandle::LENGTH]| FabricHandle::from_bytes(bytes);
    let handle = read(bytes.try_into().ok()?)?;
    assert_eq!(read(&handle.to_bytes()).map(|again| again.to_bytes()), Some(handle.to_bytes()), "{bytes:02x?}");
    let _ = format!("{handle:?}");
    Some(handle)
}

/// A fabric handle, cut or filled up to its length.
pub fn fabric_handles(bytes: &[u8]) {
    let mut whole = bytes.to_vec();
    whole.resize(FabricHandle::LENGTH, 0);
    fabric_handle(&whole);
}

/// PCI addresses.
pub fn device_names(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(address) = text.parse::<PciAddress>() {
        assert_eq!(address.to_string().parse(), Ok(address), "{text}");
    }
}
