//! The library under stress from outside: wrong answers, signals, limits, and events for others.

#[path = "../support/mod.rs"]
mod support;

mod hostile_answers;
mod time_limits;
mod tracing_events;
