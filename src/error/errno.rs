//! An errno, by its name.

use nix::libc;
use std::fmt;

/// What a system call answers when it fails. Prints as its name: `EINVAL (Invalid argument)` with
/// `{}`, `EINVAL` with `{:?}`.
///
/// ```
/// use ascend_vmm::error::Errno;
///
/// assert_eq!(format!("{:?}", Errno::EBUSY), "EBUSY");
/// assert_eq!(Errno::from_raw(22), Errno::EINVAL);
/// let io: std::io::Error = Errno::ENOENT.into();
/// assert_eq!(io.kind(), std::io::ErrorKind::NotFound);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Errno(i32);

macro_rules! errnos {
    ($($name:ident)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`, see errno(3).")]
            pub const $name: Errno = Errno(libc::$name);
        )*
    };
}

impl Errno {
    errnos! {
        E2BIG EACCES EADDRINUSE EADDRNOTAVAIL EAGAIN EALREADY EBADFD EBADRQC EBUSY ECONNRESET
        EDQUOT EEXIST EFAULT EFBIG EINTR EINVAL EIO EMFILE ENFILE ENODEV ENOENT ENOMEM ENONET ENOSPC
        ENOSYS ENOTDIR ENXIO EOPNOTSUPP EPERM EPIPE ESRCH ETIMEDOUT EUSERS
    }

    /// The errno with this number.
    pub const fn from_raw(number: i32) -> Errno {
        Errno(number)
    }

    /// Its number.
    pub const fn raw(self) -> i32 {
        self.0
    }

    pub(crate) const fn of(errno: nix::errno::Errno) -> Errno {
        Errno(errno as i32)
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match nix::errno::Errno::from_raw(self.0) {
            nix::errno::Errno::UnknownErrno => write!(f, "errno {}", self.0),
            known => fmt::Debug::fmt(&known, f),
        }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match nix::errno::Errno::from_raw(self.0) {
            nix::errno::Errno::UnknownErrno => write!(f, "errno {}", self.0),
            known => write!(f, "{known:?} ({})", known.desc()),
        }
    }
}

impl From<Errno> for std::io::Error {
    fn from(errno: Errno) -> Self {
        std::io::Error::from_raw_os_error(errno.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_without_a_name_are_printed_as_numbers() {
        assert_eq!(Errno::from_raw(41).to_string(), "errno 41");
        assert_eq!(format!("{:?}", Errno::from_raw(4095)), "errno 4095");
        assert_eq!(Errno::EINVAL.to_string(), "EINVAL (Invalid argument)");
    }
}
