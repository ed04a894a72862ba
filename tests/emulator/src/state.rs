//! A view of the model's state for tests: who holds what.

/// Everything that clients hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// Open files, in the order of their opening.
    pub files: Vec<FileState>,
}

impl State {
    /// Whether nobody holds anything, as on a freshly booted host.
    pub fn is_empty(&self) -> bool {
        self == &State::default()
    }
}

/// An open file of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileState {
    /// Its path.
    pub path: String,
    /// The process that opened it.
    pub tgid: i32,
    /// The module that it is bound to.
    pub module: Option<String>,
}
