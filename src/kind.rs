//! Kinds of memory: which memory, in pages of which size.

use ascend_ioctl::svm::{
    GIANT_PAGE, HUGE_PAGE, MEMORY_DDR, MEMORY_HBM, MEMORY_P2P_DDR, MEMORY_P2P_HBM, PAGE_GIANT, PAGE_HUGE,
};
use std::fmt;
use std::str::FromStr;

/// The page size of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Page {
    /// 2 MiB.
    #[default]
    Huge,
    /// 1 GiB, if the device has them:
    /// [`Capabilities::giant_pages`](crate::Capabilities::giant_pages).
    Giant,
}

impl Page {
    /// The size in bytes.
    pub const fn size(self) -> u64 {
        match self {
            Page::Huge => HUGE_PAGE,
            Page::Giant => GIANT_PAGE,
        }
    }

    pub(crate) const fn code(self) -> u32 {
        match self {
            Page::Huge => PAGE_HUGE,
            Page::Giant => PAGE_GIANT,
        }
    }

    pub(crate) const fn from_code(code: u32) -> Option<Page> {
        match code {
            PAGE_HUGE => Some(Page::Huge),
            PAGE_GIANT => Some(Page::Giant),
            _ => None,
        }
    }
}

/// Which memory of a device, or of the host.
///
/// ```
/// use ascend_vmm::MemoryKind;
///
/// assert_eq!(MemoryKind::P2pHbm.to_string(), "P2P HBM");
/// assert_eq!("DDR".parse(), Ok(MemoryKind::Ddr));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum MemoryKind {
    /// The device's high-bandwidth memory.
    #[default]
    Hbm,
    /// DDR.
    Ddr,
    /// High-bandwidth memory that peers can reach.
    P2pHbm,
    /// DDR that peers can reach.
    P2pDdr,
}

/// A kind's numbers and name.
struct KindRow {
    kind: MemoryKind,
    /// In MEM_CREATE and MEM_IMPORT.
    code: u32,
    /// In QUERY_MEM_USEDINFO, which counts differently.
    query: u32,
    name: &'static str,
}

/// In the order of the enum.
const ROWS: [KindRow; 4] = [
    KindRow { kind: MemoryKind::Hbm, code: MEMORY_HBM, query: 2, name: "HBM" },
    KindRow { kind: MemoryKind::Ddr, code: MEMORY_DDR, query: 1, name: "DDR" },
    KindRow { kind: MemoryKind::P2pHbm, code: MEMORY_P2P_HBM, query: 4, name: "P2P HBM" },
    KindRow { kind: MemoryKind::P2pDdr, code: MEMORY_P2P_DDR, query: 3, name: "P2P DDR" },
];

impl MemoryKind {
    /// Every kind.
    pub const ALL: [MemoryKind; 4] = [ROWS[0].kind, ROWS[1].kind, ROWS[2].kind, ROWS[3].kind];

    pub(crate) const fn code(self) -> u32 {
        ROWS[self as usize].code
    }

    pub(crate) const fn query(self) -> u32 {
        ROWS[self as usize].query
    }

    pub(crate) fn from_code(code: u32) -> Option<MemoryKind> {
        // The driver counts in the same order; the test below says so.
        ROWS.get(code as usize).filter(|row| row.code == code).map(|row| row.kind)
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(ROWS[*self as usize].name)
    }
}

impl FromStr for MemoryKind {
    type Err = UnknownMemoryKind;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        ROWS.iter().find(|row| row.name == text).map(|row| row.kind).ok_or(UnknownMemoryKind)
    }
}

/// The error for a text that is not the name of a kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("unknown kind of memory; known are HBM, DDR, P2P HBM and P2P DDR")]
pub struct UnknownMemoryKind;

/// A kind of memory.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{Kind, LogicalId, MemoryKind, Page, Session};
///
/// let kind = Kind { page: Page::Giant, memory: MemoryKind::Hbm };
/// let memory = Session::open()?.device(LogicalId(0))?.create_with(1 << 30, kind)?;
/// assert_eq!((memory.page(), memory.memory_kind()), (Page::Giant, MemoryKind::Hbm));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Kind {
    /// Size of its pages.
    pub page: Page,
    /// Which memory.
    pub memory: MemoryKind,
}

impl Kind {
    /// Sizes of this memory are multiples of this.
    ///
    /// ```
    /// use ascend_vmm::{Kind, Page};
    ///
    /// let giant = Kind { page: Page::Giant, ..Kind::default() };
    /// assert_eq!(giant.granularity(), 1 << 30);
    /// ```
    #[doc(alias = "aclrtMemGetAllocationGranularity")]
    #[doc(alias = "cuMemGetAllocationGranularity")]
    pub const fn granularity(self) -> u64 {
        self.page.size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_stands_in_its_own_row() {
        for (place, row) in ROWS.iter().enumerate() {
            assert_eq!(row.kind as usize, place);
            assert_eq!(MemoryKind::from_code(row.kind.code()), Some(row.kind));
            assert_eq!(row.kind.to_string().parse(), Ok(row.kind));
        }
        assert_eq!(MemoryKind::from_code(4), None);
        let error = "hbm".parse::<MemoryKind>().unwrap_err().to_string();
        assert!(MemoryKind::ALL.iter().all(|kind| error.contains(&kind.to_string())), "{error}");
    }
}
