//! A super pod: emulated servers on one machine that import each other's device memory.
//!
//! A server listens on a socket in the pod's directory. To import a share (`DEVMM_GET_SHARE_INFO`
//! between real servers), another server connects, names it, and gets its size and kind and where
//! its bytes are: a range of the file of that device's memory. It holds the share as long as the
//! connection lasts. There is no trust list between servers; the driver has none there either.
//!
//! What the CPU of the exporting server sees of its device memory (MEM_SET_ACCESS for the host) is
//! not the file's range, so that other servers see such bytes late. Host memory is not offered to
//! other servers.

use nix::sys::signal::SigSet;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a server waits for another's answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Words of a question: device and share.
const QUESTION: usize = 2;
/// Words of an answer: thread, descriptor, and the fields of [`OfferedMemory`]. An answer without
/// bytes says that there is no such share.
const ANSWER: usize = 8;

/// What another server has to know of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OfferedMemory {
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Pages.
    pub pages: u64,
    /// Kind of the pages.
    pub page: u32,
    /// The module that the memory is accounted to.
    pub module: u32,
    /// Kind of the memory.
    pub memory: u32,
}

#[derive(Debug)]
struct Offer {
    /// The thread of the model, which has descriptors of its own, and the descriptor there.
    thread: i32,
    descriptor: RawFd,
    memory: OfferedMemory,
    /// Connections of other servers that hold it.
    holders: u32,
}

type Offers = Arc<Mutex<BTreeMap<(u32, i32), Offer>>>;

/// A server's place in a super pod.
#[derive(Debug, Clone)]
pub struct Pod {
    directory: PathBuf,
    offers: Offers,
}

/// A share of another server. Dropping it gives the share back.
#[derive(Debug)]
pub(crate) struct ForeignShare {
    pub memory: OfferedMemory,
    pub file: Arc<File>,
    _connection: UnixStream,
}

/// Why a share of another server cannot be imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unreachable {
    /// No server of that number answers.
    NoAnswer,
    /// It has no such share.
    NoShare,
}

fn locked(offers: &Offers) -> MutexGuard<'_, BTreeMap<(u32, i32), Offer>> {
    // The map is never left half changed.
    offers.lock().unwrap_or_else(PoisonError::into_inner)
}

fn socket(directory: &Path, server: u32) -> PathBuf {
    directory.join(format!("server-{server}"))
}

impl Pod {
    /// Joins the pod of a directory under a number that no running server of it has.
    pub fn join(directory: &Path, server: u32) -> io::Result<Pod> {
        std::fs::create_dir_all(directory)?;
        let path = socket(directory, server);
        if UnixStream::connect(&path).is_ok() {
            let taken = format!("the pod in {} has a server {server} already", directory.display());
            return Err(io::Error::new(io::ErrorKind::AddrInUse, taken));
        }
        // What a server left that was killed.
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        let pod = Pod { directory: directory.to_owned(), offers: Offers::default() };
        let offers = pod.offers.clone();
        std::thread::Builder::new().name("ascend-pod".into()).spawn(move || {
            // Signals are for the program's own threads.
            let _ = SigSet::all().thread_block();
            for connection in listener.incoming().flatten() {
                let offers = offers.clone();
                // Without a thread for it, a connection is closed, which is no answer.
                let _ = std::thread::Builder::new().spawn(move || serve(&offers, connection));
            }
        })?;
        Ok(pod)
    }

    /// Offers a share of a device to the other servers.
    pub(crate) fn offer(&self, device: u32, share: i32, file: &File, memory: OfferedMemory) {
        let (thread, descriptor) = (nix::unistd::gettid().as_raw(), file.as_raw_fd());
        locked(&self.offers).insert((device, share), Offer { thread, descriptor, memory, holders: 0 });
    }

    /// True while other servers hold a share that ended here. A share that nobody holds is
    /// forgotten.
    pub(crate) fn is_held(&self, device: u32, share: i32) -> bool {
        let mut offers = locked(&self.offers);
        let held = offers.get(&(device, share)).is_some_and(|offer| offer.holders != 0);
        if !held {
            offers.remove(&(device, share));
        }
        held
    }

    /// Imports a share of another server.
    pub(crate) fn fetch(&self, server: u32, device: u32, share: i32) -> Result<ForeignShare, Unreachable> {
        let question = [device, share as u32];
        let ask = || -> io::Result<Option<(UnixStream, [u64; ANSWER])>> {
            let mut connection = UnixStream::connect(socket(&self.directory, server))?;
            connection.set_read_timeout(Some(PATIENCE))?;
            connection.set_write_timeout(Some(PATIENCE))?;
            connection.write_all(&question.map(u32::to_ne_bytes).concat())?;
            let mut bytes = [0; 8 * ANSWER];
            match connection.read(&mut bytes[..1])? {
                0 => return Ok(None),
                _ => connection.read_exact(&mut bytes[1..])?,
            }
            let mut words = [0; ANSWER];
            for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
                *word = u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
            }
            Ok(Some((connection, words)))
        };
        let (connection, words) = ask().map_err(|_| Unreachable::NoAnswer)?.ok_or(Unreachable::NoShare)?;
        let [tid, fd, offset, length, pages, page, module, memory] = words;
        // The descriptor of the other server's thread, which has it while the connection lasts.
        let path = format!("/proc/{tid}/fd/{fd}");
        let file = File::options().read(true).write(true).open(path).map_err(|_| Unreachable::NoAnswer)?;
        let [page, module, memory] = [page, module, memory].map(|word| word as u32);
        let memory = OfferedMemory { offset, length, pages, page, module, memory };
        Ok(ForeignShare { memory, file: Arc::new(file), _connection: connection })
    }
}

/// Answers another server, and counts it as a holder until it closes the connection.
fn serve(offers: &Offers, mut connection: UnixStream) {
    let mut bytes = [0; 4 * QUESTION];
    let _ = connection.set_read_timeout(Some(PATIENCE));
    if connection.read_exact(&mut bytes).is_err() {
        return;
    }
    let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let key = (word(0), word(4) as i32);
    let (thread, descriptor, memory) = {
        let mut offers = locked(offers);
        let Some(offer) = offers.get_mut(&key) else { return };
        offer.holders += 1;
        (offer.thread, offer.descriptor, offer.memory)
    };
    let OfferedMemory { offset, length, pages, page, module, memory } = memory;
    let [thread, descriptor] = [thread, descriptor].map(|number| number as u64);
    let words = [thread, descriptor, offset, length, pages, page.into(), module.into(), memory.into()];
    let answered = connection.write_all(&words.map(u64::to_ne_bytes).concat());
    // Until the end of the connection; nothing else is sent.
    let _ = connection.set_read_timeout(None);
    if answered.is_ok() {
        let _ = connection.read(&mut [0]);
    }
    if let Some(offer) = locked(offers).get_mut(&key) {
        offer.holders -= 1;
    }
}
