//! The kernel driver's rules.
