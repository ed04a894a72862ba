//! Committed layouts in files, and back.
//!
//! A snapshot is a *manifest*, which holds the layout and a checksum for every shard, and shards of
//! at most 64 MiB, which hold the memory. The shards may lie in several directories; each of them
//! has a copy of the manifest. Until the manifests are written there is a *plan* in their place:
//! a save that was interrupted goes on where it stopped, and nobody takes it for a whole one.
//!
//! A shard begins with a block that names the snapshot, its place in it and its checksum. That
//! block is written when everything behind it is on the disk.

mod shard;

use crate::client::{self, Client, OpenOptions, Reader};
use crate::layout::Layout;
use crate::name::DomainName;
use crate::protocol::Mode;
use crate::sealed::{seal, unseal};
use ascend_vmm::{Bytes, Device};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use shard::{Buffer, Shards};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions as FileOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The first line of a manifest or plan.
const MAGIC: &[u8] = b"ascend-vmm snapshot 1\n";
const MANIFEST: &str = "manifest";
const PLAN: &str = "plan";
/// A file that is being written has this at the end of its name.
const UNFINISHED: &str = ".new";
/// Workers for each directory: one computes a checksum while the other one waits for the disk.
const WORKERS: usize = 2;

/// A snapshot that cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The service, or the driver.
    #[error(transparent)]
    Client(#[from] client::Error),
    /// A file or directory cannot be used.
    #[error("{}: {error}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The disk has not enough room.
    #[error("{} has {} free, and {} are needed; give more directories, or free some", path.display(), Bytes(*free),
            Bytes(*needed))]
    NoRoom {
        /// The directory.
        path: PathBuf,
        /// Bytes that are free.
        free: u64,
        /// Bytes that are needed.
        needed: u64,
    },
    /// Another process saves there.
    #[error("{} is used by another save; wait for it, or use another directory", .0.display())]
    InUse(PathBuf),
    /// A directory is named twice.
    #[error("{} is named twice", .0.display())]
    Twice(PathBuf),
    /// The directory has files that are not of a snapshot.
    #[error("{} is in the way; use an empty directory", .0.display())]
    NotEmpty(PathBuf),
    /// The directory has another snapshot.
    #[error("{} has {what}; use an empty directory", path.display())]
    Other {
        /// The directory.
        path: PathBuf,
        /// What is there.
        what: String,
    },
    /// There is no whole snapshot.
    #[error("{} {what}", path.display())]
    NotThere {
        /// The directory.
        path: PathBuf,
        /// What is there instead.
        what: &'static str,
    },
    /// A file is missing.
    #[error("{name} is in none of the directories; name all that it was saved to")]
    Missing {
        /// Its name.
        name: String,
    },
    /// A file is not what was written.
    #[error("{} is damaged: {what}; nothing of the snapshot was committed", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
}

type Result<T, E = SnapshotError> = std::result::Result<T, E>;

fn file_error(path: &Path) -> impl Fn(io::Error) -> SnapshotError {
    let path = path.to_owned();
    move |error| SnapshotError::File { path: path.clone(), error }
}

/// What is in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The domain that was saved.
    pub domain: DomainName,
    /// The version that was saved.
    pub version: u64,
    /// Bytes of the memory.
    pub bytes: u64,
    /// Keys.
    pub keys: usize,
    /// Files with memory.
    pub shards: usize,
    /// How many of them an earlier save had written.
    pub resumed: usize,
}

/// The contents of a manifest, or of a plan, which has no checksums.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Manifest {
    /// A random number: shards of two snapshots cannot be mixed.
    id: [u8; 16],
    /// The life of the service in which it was saved: versions of another one are others.
    instance: u64,
    domain: DomainName,
    version: u64,
    hash: [u8; 16],
    layout: Layout,
    /// Of all shards, or none.
    digests: Vec<[u8; 32]>,
}

impl Manifest {
    fn shards(&self) -> Shards {
        Shards { id: self.id, bytes: self.layout.bytes() }
    }

    fn is_same_version(&self, other: &Manifest) -> bool {
        (self.instance, &self.domain, self.version, self.hash)
            == (other.instance, &other.domain, other.version, other.hash)
    }

    fn encode(&self) -> Vec<u8> {
        seal(MAGIC, self)
    }

    fn decode(path: &Path, bytes: &[u8]) -> Result<Manifest> {
        let damaged = |what| SnapshotError::Damaged { path: path.to_owned(), what };
        let manifest: Manifest = unseal(MAGIC, bytes).map_err(damaged)?;
        let total = manifest.layout.allocations.iter().try_fold(0u64, |sum, it| sum.checked_add(it.size));
        if total.is_none() || manifest.layout.hash() != manifest.hash {
            return Err(damaged("its layout is not the one that was saved"));
        }
        Ok(manifest)
    }

    fn describe(&self) -> String {
        format!("version {} of {}", self.version, self.domain)
    }
}

/// Reads a file that is no link; `None` if it is not there.
fn read_file(path: &Path) -> Result<Option<Vec<u8>>> {
    let failed = file_error(path);
    let mut file = match open(path, FileOptions::new().read(true)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(failed)?;
    Ok(Some(bytes))
}

/// Opens a regular file; a link, a pipe or a device is refused, and does not block.
fn open(path: &Path, options: &mut FileOptions) -> io::Result<File> {
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK | nix::libc::O_CLOEXEC;
    let file = match options.custom_flags(flags).open(path) {
        Err(error) if error.raw_os_error() == Some(nix::libc::ELOOP) => {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a symbolic link"));
        }
        opened => opened?,
    };
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")),
    }
}

/// A directory that this process saves to, locked until it is dropped.
struct Target {
    path: PathBuf,
    lock: Flock<File>,
    plan: Option<Manifest>,
    manifest: Option<Manifest>,
}

impl Target {
    fn open(path: &Path) -> Result<Target> {
        let failed = file_error(path);
        fs::create_dir_all(path).map_err(&failed)?;
        let directory = File::open(path).map_err(&failed)?;
        let lock = match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => return Err(SnapshotError::InUse(path.to_owned())),
            Err((_, error)) => return Err(failed(error.into())),
        };
        let mut target = Target { path: path.to_owned(), lock, plan: None, manifest: None };
        let mut shard = None;
        for entry in fs::read_dir(path).map_err(&failed)? {
            let name = entry.map_err(&failed)?.file_name();
            let file = path.join(&name);
            match name.to_str() {
                Some(MANIFEST) => target.manifest = target.decode(MANIFEST)?,
                Some(PLAN) => target.plan = target.decode(PLAN)?,
                Some(name) if shard::is_name(name) => shard = Some(file),
                // Only one who has the lock writes such a file, and that one is gone.
                Some(name) if [MANIFEST, PLAN].iter().any(|of| name == format!("{of}{UNFINISHED}")) => {
                    fs::remove_file(&file).map_err(file_error(&file))?;
                }
                Some("lost+found") => {}
                _ => return Err(SnapshotError::NotEmpty(file)),
            }
        }
        match (shard, target.known()) {
            (Some(file), None) => Err(SnapshotError::NotEmpty(file)),
            _ => Ok(target),
        }
    }

    fn decode(&self, name: &str) -> Result<Option<Manifest>> {
        let path = self.path.join(name);
        read_file(&path)?.map(|bytes| Manifest::decode(&path, &bytes)).transpose()
    }

    /// The snapshot that is there, whole or not.
    fn known(&self) -> Option<&Manifest> {
        self.manifest.as_ref().or(self.plan.as_ref())
    }

    /// Writes a file whole, or not at all.
    fn write(&self, name: &str, manifest: &Manifest) -> Result<()> {
        let (path, unfinished) = (self.path.join(name), self.path.join(format!("{name}{UNFINISHED}")));
        let failed = file_error(&path);
        let mut file = open(&unfinished, FileOptions::new().write(true).create_new(true)).map_err(&failed)?;
        file.write_all(&manifest.encode()).and_then(|()| file.sync_all()).map_err(&failed)?;
        fs::rename(&unfinished, &path).map_err(&failed)?;
        self.lock.sync_all().map_err(&failed)
    }
}

/// Saves the layout that a reader has to files. `progress` is called with bytes, from several
/// threads.
///
/// A save that was interrupted goes on if the service still has the same version; one that is
/// finished is left as it is. Other commits meanwhile do not disturb it.
///
/// # Errors
///
/// [`SnapshotError`]. What was written stays, for the next attempt.
pub fn save(
    reader: &mut Reader,
    directories: &[PathBuf],
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Snapshot, SnapshotError> {
    let mut targets: Vec<Target> = Vec::new();
    let mut seen = Vec::new();
    for path in directories {
        fs::create_dir_all(path).map_err(file_error(path))?;
        let found = fs::metadata(path).map_err(file_error(path))?;
        if seen.contains(&(found.dev(), found.ino())) {
            return Err(SnapshotError::Twice(path.clone()));
        }
        seen.push((found.dev(), found.ino()));
        targets.push(Target::open(path)?);
    }
    let layout = Layout { allocations: reader.allocations().cloned().collect(), entries: reader.entries().clone() };
    let mut manifest = Manifest {
        id: crate::front::random(),
        instance: reader.instance(),
        domain: reader.domain().clone(),
        version: reader.version(),
        hash: layout.hash(),
        layout,
        digests: Vec::new(),
    };
    if let Some(known) = targets.iter().find_map(Target::known) {
        manifest.id = known.id;
    }
    for target in &targets {
        let Some(known) = target.known() else { continue };
        let whole = if target.manifest.is_some() { "" } else { "an unfinished save of " };
        if known.id != manifest.id || !known.is_same_version(&manifest) {
            let what = format!("{whole}{}", known.describe());
            return Err(SnapshotError::Other { path: target.path.clone(), what });
        }
    }
    let shards = manifest.shards();
    let found = shards.find(directories)?;
    shards.remove_unfinished(directories, &found)?;
    room_for(&shards, &found, &targets)?;
    for target in targets.iter().filter(|target| target.known().is_none()) {
        target.write(PLAN, &manifest)?;
    }
    let resumed = found.iter().flatten().count();
    found.iter().zip(0..).filter(|(found, _)| found.is_some()).for_each(|(_, number)| progress(shards.size(number)));
    let missing = (0..shards.count()).filter(|number| found[*number as usize].is_none());
    let digests = Mutex::new(found.iter().map(|found| found.as_ref().map(|it| it.digest)).collect::<Vec<_>>());
    in_parallel(missing, &targets, |target, number, buffer| {
        let digest = shards.write(reader, number, &target.path, buffer, progress)?;
        if let Ok(mut digests) = digests.lock() {
            digests[number as usize] = Some(digest);
        }
        Ok(())
    })?;
    // Whoever lost its role in between may have read memory that a writer was changing.
    reader.check()?;
    manifest.digests = digests.into_inner().unwrap_or_default().into_iter().flatten().collect();
    for target in targets.iter().filter(|target| target.manifest.is_none()) {
        target.write(MANIFEST, &manifest)?;
    }
    for target in &targets {
        let plan = target.path.join(PLAN);
        if plan.exists() {
            fs::remove_file(&plan).map_err(file_error(&plan))?;
        }
    }
    Ok(manifest.snapshot(resumed))
}

impl Manifest {
    fn snapshot(&self, resumed: usize) -> Snapshot {
        Snapshot {
            domain: self.domain.clone(),
            version: self.version,
            bytes: self.layout.bytes(),
            keys: self.layout.entries.len(),
            shards: self.digests.len(),
            resumed,
        }
    }
}

/// Says early that a disk is too small. Directories of one disk count once.
fn room_for(shards: &Shards, found: &[Option<shard::Found>], targets: &[Target]) -> Result<()> {
    let needed: u64 =
        found.iter().zip(0..).filter(|(found, _)| found.is_none()).map(|(_, number)| shards.size(number)).sum();
    let mut disks = BTreeMap::new();
    for target in targets {
        let failed = |error: nix::errno::Errno| file_error(&target.path)(error.into());
        let found = nix::sys::statvfs::statvfs(&target.path).map_err(failed)?;
        let device = target.lock.metadata().map_err(file_error(&target.path))?.dev();
        disks.insert(device, found.blocks_available().saturating_mul(found.fragment_size()));
    }
    let free = disks.values().fold(0u64, |sum, free| sum.saturating_add(*free));
    match targets.first() {
        Some(target) if free < needed => Err(SnapshotError::NoRoom { path: target.path.clone(), free, needed }),
        _ => Ok(()),
    }
}

/// Does something for every number, with [`WORKERS`] threads for each place. The first error ends
/// all of them.
fn in_parallel<P: Sync>(
    numbers: impl Iterator<Item = u64> + Send,
    places: &[P],
    work: impl Fn(&P, u64, &mut Buffer) -> Result<()> + Sync,
) -> Result<()> {
    let numbers = Mutex::new(numbers);
    let failed = AtomicBool::new(false);
    let (numbers, failed, work) = (&numbers, &failed, &work);
    std::thread::scope(|scope| {
        let mut workers = Vec::new();
        for place in places.iter().flat_map(|place| std::iter::repeat_n(place, WORKERS)) {
            workers.push(scope.spawn(move || {
                let mut buffer = Buffer::new();
                while !failed.load(Ordering::Relaxed) {
                    let next = numbers.lock().ok().and_then(|mut numbers| numbers.next());
                    let Some(number) = next else { break };
                    if let Err(error) = work(place, number, &mut buffer) {
                        failed.store(true, Ordering::Relaxed);
                        return Err(error);
                    }
                }
                Ok(())
            }));
        }
        let ended =
            workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        ended.collect::<Vec<_>>().into_iter().collect()
    })
}

/// A whole snapshot in files.
#[derive(Debug)]
pub struct SavedSnapshot {
    manifest: Manifest,
    directories: Vec<PathBuf>,
    found: Vec<shard::Found>,
}

impl SavedSnapshot {
    /// Looks whether all files are there and belong together; their contents are checked when they
    /// are loaded.
    ///
    /// # Errors
    ///
    /// [`SnapshotError::NotThere`], [`SnapshotError::Missing`], [`SnapshotError::Damaged`].
    pub fn open(directories: &[PathBuf]) -> Result<SavedSnapshot, SnapshotError> {
        let mut manifest: Option<Manifest> = None;
        let mut unfinished = false;
        for directory in directories {
            let path = directory.join(MANIFEST);
            let Some(bytes) = read_file(&path)? else {
                fs::read_dir(directory).map_err(file_error(directory))?;
                unfinished |= directory.join(PLAN).exists();
                continue;
            };
            let here = Manifest::decode(&path, &bytes)?;
            match &manifest {
                Some(other) if *other != here => {
                    return Err(SnapshotError::Other { path: directory.clone(), what: "another snapshot".into() });
                }
                _ => manifest = Some(here),
            }
        }
        let Some(manifest) = manifest else {
            let what = match unfinished {
                true => "has an unfinished save; save again to finish it",
                false => "has no snapshot",
            };
            return Err(SnapshotError::NotThere { path: directories.first().cloned().unwrap_or_default(), what });
        };
        let shards = manifest.shards();
        if manifest.digests.len() as u64 != shards.count() {
            let path = directories.first().cloned().unwrap_or_default().join(MANIFEST);
            return Err(SnapshotError::Damaged { path, what: "it has not one checksum for each shard" });
        }
        let found =
            shards.find(directories)?.into_iter().zip(&manifest.digests).zip(0..).map(|((found, digest), number)| {
                match found {
                    None => Err(shards.explain_missing(number, directories)),
                    Some(found) if found.digest != *digest => Err(SnapshotError::Damaged {
                        path: found.path,
                        what: "its checksum is not that of the manifest",
                    }),
                    Some(found) => Ok(found),
                }
            });
        let found = found.collect::<Result<_>>()?;
        Ok(SavedSnapshot { manifest, directories: directories.to_vec(), found })
    }

    /// What it has.
    pub fn contents(&self) -> Snapshot {
        self.manifest.snapshot(0)
    }

    /// Loads it into new memory of a domain and commits it. What the domain serves is served until
    /// then, or given up first with [`Mode::Discard`]. Every byte is checked before the commit.
    ///
    /// # Errors
    ///
    /// [`SnapshotError`]; then nothing was committed.
    pub fn load(
        &self,
        client: &Client,
        device: &Device,
        domain: &DomainName,
        mode: Mode,
        options: &OpenOptions,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Reader, SnapshotError> {
        let layout = &self.manifest.layout;
        let mut writer = client.write(device, domain, mode, layout.bytes(), options)?;
        writer.restore(layout)?;
        let shards = self.manifest.shards();
        in_parallel(0..shards.count(), &self.directories, |_, number, buffer| {
            shards.read(&writer, number, &self.found[number as usize], buffer, progress)
        })?;
        Ok(writer.commit()?)
    }
}
