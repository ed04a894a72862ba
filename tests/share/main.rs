//! Memory that processes share: exports and imports, tickets, sockets, brokers and names.

mod broker;
mod exports;
mod named;
mod socket;
mod stress;
#[path = "../support/mod.rs"]
mod support;
mod tickets;
mod two_servers;
mod untrusted_bytes;
