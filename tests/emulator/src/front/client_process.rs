//! Client processes: their identity, and the end of their address space.
//!
//! The kernel identifies a caller by its thread id alone. Everything else comes from `/proc` and is
//! looked up once per thread and process. A descriptor of the thread's `/proc` directory is kept:
//! it goes stale with the thread, so a recycled id is never taken for the old thread. Where threads
//! have pidfds, their end is reported, too.

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::rc::Rc;

/// Identifies a process, also after its id was reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProcessKey {
    /// Process id.
    pub tgid: i32,
    /// Start time of its leader, in nanoseconds since boot.
    pub start_time: u64,
}

/// Identifies an address space by its stack and arguments, which exec moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct AddressSpace {
    stack: u64,
    arguments: u64,
    environment: u64,
}

/// The fields of `/proc/PID/stat` that matter here.
struct Stat {
    start_time: u64,
    /// `None` once the task has no address space any more.
    address_space: Option<AddressSpace>,
}

impl Stat {
    fn read(path: &str) -> io::Result<Stat> {
        let text = fs::read_to_string(path)?;
        // The second field is the command's name in parentheses, which may contain spaces and
        // parentheses.
        let rest = text.rfind(')').map_or("", |end| &text[end + 1..]);
        let field = |number: usize| rest.split_ascii_whitespace().nth(number - 3).and_then(|text| text.parse().ok());
        let (Some(start), Some(size)) = (field(22), field(23)) else { return Err(io::ErrorKind::InvalidData.into()) };
        let start: u64 = start;
        let address_space = (size != 0u64).then(|| AddressSpace {
            stack: field(28).unwrap_or(0),
            arguments: field(48).unwrap_or(0),
            environment: field(50).unwrap_or(0),
        });
        Ok(Stat { start_time: start * (1_000_000_000 / ticks_per_second()), address_space })
    }
}

/// A number of `/proc/PID/status`.
fn status(id: i32, name: &str, column: usize) -> io::Result<i32> {
    let text = fs::read_to_string(format!("/proc/{id}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|line| line.split_ascii_whitespace().nth(column)?.parse::<i64>().ok());
    number.map(|number| number as i32).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn ticks_per_second() -> u64 {
    // SAFETY: reads a constant of the system.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).unwrap_or(100).max(1)
}

pub fn open_pidfd(tgid: i32) -> Result<OwnedFd, Errno> {
    // SAFETY: takes two integers.
    let descriptor = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, tgid, 0) })?;
    // SAFETY: the call returned a new descriptor that this value owns.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as i32) })
}

/// What identifies the living process with this id; `None` if there is none. `/proc` reports start
/// times in hundredths of a second, in which an id can be reused. The number of a pidfd's inode is
/// unique since Linux 6.9; older kernels have one number for all processes.
pub fn identity(tgid: i32) -> Option<u64> {
    nix::sys::stat::fstat(open_pidfd(tgid).ok()?).ok().map(|stat| stat.st_ino)
}

/// A process that used the driver.
pub struct ClientProcess {
    /// Its identity.
    pub key: ProcessKey,
    /// Differs between processes that had the same id: see [`identity`].
    pub identity: u64,
    /// Inode of its mount namespace.
    pub mount_namespace: u64,
    /// Effective user id.
    pub uid: u32,
    /// Readable once all of its threads are gone.
    pub pidfd: OwnedFd,
    address_space: Option<AddressSpace>,
    /// The thread that called exec, after which the address space may be another one.
    execing: Option<i32>,
    /// Mappings of the driver that it may have inherited.
    pub inheritance: Inheritance,
}

/// The driver's mappings that a process has from its parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inheritance {
    /// It has not opened a node yet.
    Unknown,
    /// This thread unmaps them: see [`super::unmap_inherited`].
    Unmapping(i32),
    /// There are none, or they stay.
    Settled,
}

impl ClientProcess {
    fn look_up(tgid: i32) -> io::Result<ClientProcess> {
        let pidfd = open_pidfd(tgid)?;
        let stat = Stat::read(&format!("/proc/{tgid}/stat"))?;
        let mut process = ClientProcess {
            key: ProcessKey { tgid, start_time: stat.start_time },
            identity: nix::sys::stat::fstat(&pidfd)?.st_ino,
            mount_namespace: fs::metadata(format!("/proc/{tgid}/ns/mnt"))?.ino(),
            uid: status(tgid, "Uid:", 1)? as u32,
            pidfd,
            address_space: None,
            execing: None,
            inheritance: Inheritance::Unknown,
        };
        process.address_space = process.current_address_space();
        Ok(process)
    }

    /// The current address space. The leader may have ended before the other threads.
    fn current_address_space(&self) -> Option<AddressSpace> {
        let tgid = self.key.tgid;
        let leader = Stat::read(&format!("/proc/{tgid}/stat")).ok()?;
        if leader.start_time != self.key.start_time {
            return None;
        }
        leader.address_space.or_else(|| {
            fs::read_dir(format!("/proc/{tgid}/task"))
                .ok()?
                .flatten()
                .find_map(|task| Stat::read(&format!("{}/stat", task.path().display())).ok()?.address_space)
        })
    }

    /// Whether the address space in which it used the driver still exists.
    pub fn has_address_space(&self) -> bool {
        self.address_space.is_some() && self.current_address_space() == self.address_space
    }

    /// Records that the address space is gone; true the first time.
    pub fn end_address_space(&mut self) -> bool {
        self.address_space.take().is_some()
    }

    /// A thread of the process calls the driver, in the current address space.
    pub fn calls(&mut self, tid: i32) {
        if self.execing == Some(tid) && self.has_address_space() {
            // The exec failed.
            self.execing = None;
        }
        if self.address_space.is_none() {
            self.address_space = self.current_address_space();
            self.execing = None;
        }
    }
}

struct Thread {
    tgid: i32,
    /// `/proc/TGID/task/TID`.
    directory: OwnedFd,
    /// A pidfd of the thread itself, if the kernel has such (Linux 6.9).
    pidfd: Option<OwnedFd>,
    /// Descriptors that were the driver's when they were used last.
    used: Vec<i32>,
}

impl Thread {
    /// The file of a descriptor, by a duplicate of it. This takes half the time of a look-up in
    /// `/proc`. It is not done for a file that may be foreign, since closing the duplicate might
    /// be noticed there.
    fn fetch(&self, tid: i32, descriptor: i32) -> Option<LastUsed> {
        let pidfd = self.pidfd.as_ref().filter(|_| self.used.contains(&descriptor))?;
        // SAFETY: takes three integers.
        let fetched = unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), descriptor, 0) };
        let fetched = Errno::result(fetched).ok()?;
        // SAFETY: the call returned a new descriptor that this value owns.
        let file = unsafe { OwnedFd::from_raw_fd(fetched as i32) };
        let stat = nix::sys::stat::fstat(&file).ok()?;
        Some(LastUsed { tid, descriptor, inode: (stat.st_dev, stat.st_ino), file })
    }
}

/// The file that was used last, by a duplicate of the client's descriptor.
///
/// While the server has it, the kernel does not report the close of this one file. So it is given
/// up before reports are read, unless a client has just been seen to have the file open itself.
struct LastUsed {
    tid: i32,
    descriptor: i32,
    inode: Inode,
    file: OwnedFd,
}

impl LastUsed {
    /// Whether the descriptor is this file in a thread. `own` is the calling thread.
    fn is_file_of(&self, tid: i32, own: i32) -> bool {
        const KCMP_FILE: i32 = 0;
        // SAFETY: takes five integers.
        unsafe { libc::syscall(libc::SYS_kcmp, tid, own, KCMP_FILE, self.descriptor, self.file.as_raw_fd()) == 0 }
    }
}

/// Clients by thread and by process.
pub struct Processes {
    /// Reports the end of threads and processes by their tokens.
    reports: Rc<Epoll>,
    threads: BTreeMap<i32, Thread>,
    processes: BTreeMap<i32, ClientProcess>,
    last_used: Option<LastUsed>,
    /// The server's thread.
    own: i32,
}

/// The bit that tells the token of a thread from that of a process.
pub const THREAD: u64 = 1 << 32;

/// Limit of remembered threads, each of which costs two descriptors. Beyond it all are forgotten
/// and looked up again.
const REMEMBERED_THREADS: usize = 128;

/// Limit of remembered descriptors of a thread.
const REMEMBERED_DESCRIPTORS: usize = 16;

/// Device and inode of an open file.
pub type Inode = (u64, u64);

impl Processes {
    /// No clients yet. The token of a process is its id, and that of a thread has [`THREAD`].
    pub fn new(reports: Rc<Epoll>) -> Self {
        let own = nix::unistd::gettid().as_raw();
        Processes { reports, threads: BTreeMap::new(), processes: BTreeMap::new(), last_used: None, own }
    }

    /// The file of a descriptor of a known thread; `None` if the thread is unknown or gone, or the
    /// descriptor is closed.
    pub fn file_of_known(&mut self, tid: i32, descriptor: i32) -> Option<Inode> {
        let thread = self.threads.get(&tid)?;
        if let Some(last) = self.last_used.as_ref().filter(|last| (last.tid, last.descriptor) == (tid, descriptor)) {
            return Some(last.inode);
        }
        if let Some(last) = thread.fetch(tid, descriptor) {
            return Some(self.last_used.insert(last).inode);
        }
        let mut name = [0u8; 16];
        io::Write::write_fmt(&mut &mut name[..], format_args!("fd/{descriptor}\0")).ok()?;
        let name = CStr::from_bytes_until_nul(&name).ok()?;
        let stat = nix::sys::stat::fstatat(&thread.directory, name, nix::fcntl::AtFlags::empty()).ok()?;
        Some((stat.st_dev, stat.st_ino))
    }

    /// Gives up the file that was used last, unless a thread is about to use it by the same number.
    pub fn release_unless_used(&mut self, tid: i32, descriptor: Option<i32>) {
        let own = self.own;
        let is_used = |last: &LastUsed| descriptor == Some(last.descriptor) && last.is_file_of(tid, own);
        match self.last_used.as_mut().filter(|last| is_used(last)) {
            Some(last) => last.tid = tid,
            None => self.release(),
        }
    }

    /// Gives up the file that was used last.
    pub fn release(&mut self) {
        self.last_used = None;
    }

    /// Whether the server has a client's file open.
    pub fn has_last_used(&self) -> bool {
        self.last_used.is_some()
    }

    /// Records that a descriptor of a thread is no longer a file of the driver.
    pub fn uses_no_longer(&mut self, tid: i32, descriptor: i32) {
        self.release();
        if let Some(thread) = self.threads.get_mut(&tid) {
            thread.used.retain(|used| *used != descriptor);
        }
    }

    /// Records that a descriptor of a thread is a file of the driver.
    pub fn uses(&mut self, tid: i32, descriptor: i32) {
        if let Some(thread) = self.threads.get_mut(&tid).filter(|thread| !thread.used.contains(&descriptor)) {
            if thread.used.len() == REMEMBERED_DESCRIPTORS {
                thread.used.clear();
            }
            thread.used.push(descriptor);
        }
    }

    /// The process of a thread, looked up if needed.
    pub fn of(&mut self, tid: i32) -> io::Result<&mut ClientProcess> {
        if let Some(thread) = self.threads.get(&tid) {
            // The directory of a dead thread cannot be read.
            let alive = nix::sys::stat::fstatat(&thread.directory, c"fd", nix::fcntl::AtFlags::empty()).is_ok();
            if !alive {
                self.threads.remove(&tid);
            }
        }
        let tgid = match self.threads.get(&tid) {
            Some(thread) => thread.tgid,
            None => self.remember(tid)?,
        };
        match self.processes.entry(tgid) {
            std::collections::btree_map::Entry::Occupied(entry) => Ok(entry.into_mut()),
            std::collections::btree_map::Entry::Vacant(entry) => {
                let process = ClientProcess::look_up(tgid)?;
                self.reports.add(&process.pidfd, EpollEvent::new(EpollFlags::EPOLLIN, tgid as u64))?;
                Ok(entry.insert(process))
            }
        }
    }

    fn remember(&mut self, tid: i32) -> io::Result<i32> {
        let tgid = status(tid, "Tgid:", 0)?;
        let directory = File::open(format!("/proc/{tgid}/task/{tid}"))?.into();
        if self.threads.len() >= REMEMBERED_THREADS {
            self.threads.clear();
        }
        // SAFETY: takes two integers.
        let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, tid, libc::PIDFD_THREAD) };
        // SAFETY: the call returned a new descriptor that this value owns.
        let pidfd = Errno::result(pidfd).ok().map(|pidfd| unsafe { OwnedFd::from_raw_fd(pidfd as i32) });
        // What is known of a thread must not be taken for what is known of its id's next one.
        let end = EpollEvent::new(EpollFlags::EPOLLIN, THREAD | tid as u64);
        let pidfd = pidfd.filter(|pidfd| self.reports.add(pidfd, end).is_ok());
        self.threads.insert(tid, Thread { tgid, directory, pidfd, used: Vec::new() });
        Ok(tgid)
    }

    /// The process with this id, if it used the driver.
    pub fn get_mut(&mut self, tgid: i32) -> Option<&mut ClientProcess> {
        self.processes.get_mut(&tgid)
    }

    /// The process of a thread, if both are known.
    pub fn known(&mut self, tid: i32) -> Option<&mut ClientProcess> {
        self.processes.get_mut(&self.threads.get(&tid)?.tgid)
    }

    /// Whether the thread belongs to a process that used the driver.
    pub fn is_client(&mut self, tid: i32) -> bool {
        if self.processes.is_empty() {
            return false;
        }
        let known = self.threads.get(&tid).map(|thread| thread.tgid);
        known.or_else(|| self.remember(tid).ok()).is_some_and(|tgid| self.processes.contains_key(&tgid))
    }

    /// A thread calls exec.
    pub fn will_exec(&mut self, tid: i32) {
        if !self.is_client(tid) {
            return;
        }
        let process = self.threads.get(&tid).and_then(|thread| self.processes.get_mut(&thread.tgid));
        if let Some(process) = process {
            process.execing = Some(tid);
        }
    }

    /// The processes that called exec and may have a new address space.
    pub fn execing(&mut self) -> impl Iterator<Item = &mut ClientProcess> {
        self.processes.values_mut().filter(|process| process.execing.is_some() && process.address_space.is_some())
    }

    /// Forgets a thread that ended.
    pub fn forget_thread(&mut self, tid: i32) {
        self.threads.remove(&tid);
    }

    /// Forgets a process that ended.
    pub fn forget(&mut self, tgid: i32) {
        self.threads.retain(|_, thread| thread.tgid != tgid);
        self.processes.remove(&tgid);
    }
}

/// The file of a descriptor of any thread.
pub fn file_of(tid: i32, descriptor: i32) -> Option<Inode> {
    let metadata = fs::metadata(format!("/proc/{tid}/fd/{descriptor}")).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// The mappings of the files that are wanted, in a thread's process.
pub fn mappings(tid: i32, mut is_wanted: impl FnMut(Inode) -> bool) -> Vec<Range<u64>> {
    let Ok(maps) = fs::read_to_string(format!("/proc/{tid}/maps")) else { return Vec::new() };
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let mapping = |line: &str| -> Option<Range<u64>> {
        let mut fields = line.split_ascii_whitespace();
        let (low, high) = fields.next()?.split_once('-')?;
        let (major, minor) = fields.nth(2)?.split_once(':')?;
        let inode = fields.next()?.parse().ok()?;
        let device = libc::makedev(number(major)? as u32, number(minor)? as u32);
        is_wanted((device, inode)).then_some(number(low)?..number(high)?)
    };
    maps.lines().filter_map(mapping).collect()
}

/// Whether two tasks have one address space, as after vfork.
pub fn share_memory(one: i32, other: i32) -> bool {
    const KCMP_VM: i32 = 1;
    // SAFETY: takes five integers.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0, 0) == 0 }
}

/// The parent of a process.
pub fn parent(tgid: i32) -> Option<i32> {
    status(tgid, "PPid:", 0).ok()
}

/// Keeps shared memory without a name out of a process's core dumps. It would be read from the
/// first byte of each segment to the last, and every page allocated. The real driver's mappings are
/// never dumped.
pub fn dump_no_shared_memory(tgid: i32) {
    const ANONYMOUS_SHARED: u32 = 1 << 1;
    let path = format!("/proc/{tgid}/coredump_filter");
    let filter = fs::read_to_string(&path).ok().and_then(|text| u32::from_str_radix(text.trim(), 16).ok());
    if let Some(filter) = filter.filter(|filter| filter & ANONYMOUS_SHARED != 0) {
        // Without permission there are no dumps of this process either.
        let _ = fs::write(&path, format!("{:#x}", filter & !ANONYMOUS_SHARED));
    }
}

/// Kills a child of a client.
pub fn kill_child(pid: i32) {
    if let Ok(pidfd) = open_pidfd(pid) {
        send_kill(&pidfd);
    }
}

/// Whether no mapping of the thread's process touches the range.
pub fn range_is_free(tid: i32, start: u64, length: u64) -> bool {
    let Some(end) = start.checked_add(length) else { return false };
    let Ok(maps) = fs::read_to_string(format!("/proc/{tid}/maps")) else { return false };
    maps.lines().all(|line| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        match range.and_then(|(low, high)| Some((number(low)?, number(high)?))) {
            Some((low, high)) => high <= start || low >= end,
            None => true,
        }
    })
}

/// Whether a sleeping thread has a signal to handle. A signal to the whole process counts for its
/// leader only: the kernel chooses the leader if it can, and another thread may not notice.
pub fn has_signal(tid: i32) -> bool {
    let Ok(text) = fs::read_to_string(format!("/proc/{tid}/status")) else { return false };
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map_or("", str::trim);
    let mask = |name: &str| u64::from_str_radix(field(name), 16).unwrap_or(0);
    let shared = if field("Tgid:") == field("Pid:") { mask("ShdPnd:") } else { 0 };
    (mask("SigPnd:") | shared) & !mask("SigBlk:") & !mask("SigIgn:") != 0
}

/// Kills a process.
pub fn kill(process: &ClientProcess) {
    send_kill(&process.pidfd);
}

fn send_kill(pidfd: &OwnedFd) {
    // SAFETY: the descriptor identifies the process even if its id was reused; the other arguments
    // are integers and a null pointer.
    unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            libc::SIGKILL,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
}
