//! Why a ticket is not valid.

/// Why a ticket is not valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TicketError {
    /// It has not the length of a ticket.
    #[error("a ticket has {expected} bytes, this has {got}")]
    Length {
        /// Bytes of a ticket of this version.
        expected: usize,
        /// Bytes that were given.
        got: usize,
    },
    /// The text does not have the form of a ticket.
    #[error("the text of a ticket is \"avm1-\" followed by hexadecimal digits, and this is not")]
    Text,
    /// The bytes do not start like a ticket.
    #[error("these bytes are not a ticket")]
    Magic,
    /// It comes from a newer or older version of this library.
    #[error("it has version {got}, and this library reads version {expected}")]
    Version {
        /// The version that this library reads.
        expected: u16,
        /// The ticket's.
        got: u16,
    },
    /// It was damaged.
    #[error("its checksum is wrong")]
    Checksum,
    /// A field has a value that no exporter writes.
    #[error("its {0} has a value that no exporter writes")]
    Field(&'static str),
}

impl TicketError {
    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            TicketError::Length { .. } | TicketError::Checksum => {
                "It was damaged or cut on the way: pass on exactly what Export::ticket made."
            }
            TicketError::Text | TicketError::Magic => "Pass on exactly what Export::ticket made.",
            TicketError::Version { .. } => "Use the same version of this library on both sides.",
            TicketError::Field(_) => "Take tickets only from processes that use this library.",
        }
    }
}
