//! How the library is built: its floors, its public types, and the pages about it.

mod documentation;
mod floors;
mod public_types;
