//! A service that owns the memory of NPUs, so that weights and caches outlive the engines.
//!
//! ```text
//!  engine A (writes, then reads)    engine B (reads)     `service top`
//!        | Unix socket: length, MessagePack |                 |
//!        v                                  v                 v
//!  +--------------------------- front ---------------------------+  may crash, may be replaced
//!  | who has which role in which domain; quotas; waiting         |
//!  +------------------------------+------------------------------+
//!                                 | socket pair: packets of a fixed format
//!  +--------------------------- keeper --------------------------+  must live: it owns the memory
//!  | creates, exports, trusts, releases; never maps, never copies|
//!  +------------------------------+------------------------------+
//!                                 v ioctls of the driver
//! ```
//!
//! A *domain* has a name (`llama-70b/tp0/weights`) and serves a *layout*: allocations, and keys
//! that name bytes in them. The connection is the lock: one writer, many readers. A writer works in
//! new memory; until it commits, and also if it dies, what was committed before is served.

#![deny(clippy::missing_errors_doc)]

mod books;
mod client;
mod entries;
mod front;
mod journal;
mod keeper;
mod layout;
mod link;
mod name;
mod policy;
pub mod protocol;
mod safetensors;
mod sealed;
mod serve;
mod snapshot;

pub use client::{
    Client, Error, FabricReader, FabricTicket, OpenOptions, Opened, Reader, Result, Role, ServedLayout, Writer,
};
pub use entries::{Entries, EntryRef};
pub use keeper::Told;
pub use layout::{Allocation, BadLayout, Entry, Layout, PageSize};
pub use name::{DomainName, NotADomain};
pub use policy::{BadPolicy, Policy};
pub use protocol::Mode;
pub use safetensors::{Comparison, Difference, compare};
pub use serve::{ServeError, activated, bind, keep, replace_front, run_front, tell_systemd};
pub use snapshot::{SavedSnapshot, Snapshot, SnapshotError, save};
