//! Long random sequences of safe calls: by one thread against a model of the results, and by
//! several threads at once.
//!
//! Each sequence depends on a seed only, which is printed when the sequence fails.
//! `ASCEND_VMM_SEED` runs one seed alone, `ASCEND_VMM_STEPS` makes sequences longer.

mod model;
#[path = "../support/mod.rs"]
mod support;
mod threads;
