//! The driver's open files, and when the last reference to one is gone.
//!
//! Each open gets its own memfd. The client receives a newly opened description of it, so the
//! kernel counts descriptors, forks, dups and mappings of that description. An inotify watch
//! reports that *some* description of the memfd was closed. The client's description holds an
//! open-file-description lock; when the lock is gone, it was the client's. The kernel sends the
//! event before it releases the lock, so a suspect file is probed again until the answer is clear.
//! Both happen before close, munmap or waitpid returns to the program.
//!
//! inotify is a scarce resource (128 instances per user by default). Without it, files are probed
//! before each call, which is slower but otherwise the same.

use super::client_process::{Inode, ProcessKey};
use crate::driver::FileId;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, SealFlag, fcntl};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::{Mode, fstat};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Large enough for every mapping of a segment. The file is sparse.
const LENGTH: i64 = 64 << 40;

/// How long a suspect file is probed every millisecond. After that it is probed only with the next
/// call or order.
const SUSPICION: Duration = Duration::from_secs(1);

/// A memfd that is not a file of the driver yet.
pub struct Blank {
    memfd: File,
    inode: Inode,
}

impl Blank {
    /// A new memfd.
    pub fn new() -> Result<Self, Errno> {
        let create = |flags| memfd_create(c"davinci", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING | flags);
        // Kernels before 6.3 do not know the flag; later ones log a warning without it.
        let memfd = create(MFdFlags::from_bits_retain(libc::MFD_NOEXEC_SEAL)).or_else(|_| create(MFdFlags::empty()))?;
        let memfd = File::from(memfd);
        nix::unistd::ftruncate(&memfd, LENGTH)?;
        // The server maps parts of the file: a client that cut it off would kill the server.
        fcntl(&memfd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL))?;
        let stat = fstat(&memfd)?;
        Ok(Blank { memfd, inode: (stat.st_dev, stat.st_ino) })
    }

    /// Another descriptor of the memfd.
    pub fn backing(&self) -> Result<File, Errno> {
        self.memfd.try_clone().map_err(|_| Errno::ENFILE)
    }
}

/// An open file of the driver.
pub struct ClientFile {
    /// The model's id of it.
    pub id: FileId,
    /// The node that was opened.
    pub path: String,
    /// The processes that used it.
    pub users: Vec<ProcessKey>,
    access: OFlag,
    /// The server's description of the memfd. It holds no lock, so it can test for the client's.
    probe: File,
    watch: Option<WatchDescriptor>,
}

impl ClientFile {
    /// Whether the client's description still exists.
    fn is_held(&self) -> bool {
        let mut lock = libc::flock {
            l_type: libc::F_WRLCK as i16,
            l_whence: libc::SEEK_SET as i16,
            l_start: 0,
            l_len: 1,
            l_pid: 0,
        };
        // Treat an error as "held": a file that stays open is noticed, one that is closed too early
        // corrupts.
        match nix::fcntl::fcntl(&self.probe, FcntlArg::F_OFD_GETLK(&mut lock)) {
            Ok(_) => lock.l_type != libc::F_UNLCK as i16,
            Err(_) => true,
        }
    }

    /// Whether the access mode allows such a mapping, by the kernel's rules.
    pub fn may_map(&self, prot: i32, flags: i32) -> bool {
        let shared_write = flags & libc::MAP_SHARED != 0 && prot & libc::PROT_WRITE != 0;
        self.access != OFlag::O_WRONLY && (self.access == OFlag::O_RDWR || !shared_write)
    }

    /// Records that a process uses the file.
    pub fn used_by(&mut self, process: ProcessKey) {
        if !self.users.contains(&process) {
            self.users.push(process);
        }
    }
}

/// All open files.
pub struct Files {
    inotify: Option<Inotify>,
    files: BTreeMap<Inode, ClientFile>,
    watches: HashMap<WatchDescriptor, Inode>,
    /// Files without a watch.
    unwatched: HashSet<Inode>,
    /// Files of which some description was closed.
    suspects: HashMap<Inode, Instant>,
}

impl Files {
    /// No files yet.
    pub fn new() -> Self {
        Files {
            inotify: Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).ok(),
            files: BTreeMap::new(),
            watches: HashMap::new(),
            unwatched: HashSet::new(),
            suspects: HashMap::new(),
        }
    }

    /// Readable when something was closed, if inotify is available.
    pub fn events(&self) -> Option<BorrowedFd<'_>> {
        self.inotify.as_ref().map(AsFd::as_fd)
    }

    /// Makes a memfd the file `id` and returns the description for the client.
    pub fn publish(
        &mut self,
        blank: Blank,
        id: FileId,
        path: &str,
        flags: i32,
        user: ProcessKey,
    ) -> Result<OwnedFd, Errno> {
        // This thread has its own descriptor table, which is not that of /proc/self.
        let name = format!("/proc/thread-self/fd/{}", blank.memfd.as_raw_fd());
        let shown = libc::O_ACCMODE | libc::O_NONBLOCK | libc::O_SYNC | libc::O_APPEND | libc::O_NOATIME;
        let flags = OFlag::from_bits_truncate(flags & shown) | OFlag::O_CLOEXEC;
        let client = nix::fcntl::open(name.as_str(), flags, Mode::empty())?;
        // From this position read and write are EINVAL, as on the real files. Elsewhere a read
        // would return zeros for terabytes.
        nix::unistd::lseek(&client, i64::MAX, nix::unistd::Whence::SeekSet)?;
        let kind = if flags & OFlag::O_ACCMODE == OFlag::O_WRONLY { libc::F_WRLCK } else { libc::F_RDLCK };
        let lock = libc::flock { l_type: kind as i16, l_whence: libc::SEEK_SET as i16, l_start: 0, l_len: 1, l_pid: 0 };
        nix::fcntl::fcntl(&client, FcntlArg::F_OFD_SETLK(&lock))?;
        let watch = self.inotify.as_ref().and_then(|it| it.add_watch(name.as_str(), AddWatchFlags::IN_CLOSE).ok());
        match watch {
            Some(watch) => drop(self.watches.insert(watch, blank.inode)),
            None => drop(self.unwatched.insert(blank.inode)),
        }
        let (path, access) = (path.to_owned(), flags & OFlag::O_ACCMODE);
        let file = ClientFile { id, path, users: vec![user], access, probe: blank.memfd, watch };
        self.files.insert(blank.inode, file);
        Ok(client)
    }

    /// The file with an inode, if it is a file of the driver.
    pub fn get_mut(&mut self, inode: Inode) -> Option<&mut ClientFile> {
        self.files.get_mut(&inode)
    }

    /// Reads the events that the kernel reported.
    pub fn read_events(&mut self) {
        let Some(inotify) = &self.inotify else { return };
        while let Ok(events) = inotify.read_events() {
            let now = Instant::now();
            for event in events {
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    // Events were lost: any file may have been closed.
                    self.suspects.extend(self.files.keys().map(|inode| (*inode, now)));
                } else if let Some(inode) = self.watches.get(&event.wd) {
                    self.suspects.insert(*inode, now);
                }
            }
        }
    }

    /// Whether any file may have been closed.
    pub fn has_suspects(&self) -> bool {
        !self.suspects.is_empty() || !self.unwatched.is_empty()
    }

    /// Removes and returns the files whose last reference is gone, oldest first, except those in
    /// `busy`.
    pub fn take_closed(&mut self, busy: &HashSet<Inode>) -> Vec<ClientFile> {
        let suspects: HashSet<Inode> = self.suspects.keys().chain(&self.unwatched).copied().collect();
        let closed: Vec<Inode> = suspects
            .iter()
            .filter(|inode| !busy.contains(inode))
            .filter(|inode| self.files.get(inode).is_some_and(|file| !file.is_held()))
            .copied()
            .collect();
        let mut files: Vec<ClientFile> = closed
            .iter()
            .filter_map(|inode| {
                self.suspects.remove(inode);
                self.unwatched.remove(inode);
                self.files.remove(inode)
            })
            .collect();
        files.sort_by_key(|file| file.id);
        for watch in files.iter().filter_map(|file| file.watch) {
            self.watches.remove(&watch);
            // An error means that the watch is gone already, with its inode.
            let _ = self.inotify.as_ref().map(|inotify| inotify.rm_watch(watch));
        }
        files
    }

    /// Whether a suspect file should be probed again soon.
    pub fn is_suspicious(&self) -> bool {
        self.suspects.values().any(|since| since.elapsed() < SUSPICION)
    }
}
