//! The C library as programs see it: its header, its exports, and C and C++ programs on the
//! emulated driver. One binary: the tree that programs are built against is written once, and each
//! program is compiled once.

mod checkers;
mod contract;
mod documentation;
mod exports;
mod header;
mod misuse;
mod programs;
mod readme;
mod seeds;
mod stream_model;
mod support;
