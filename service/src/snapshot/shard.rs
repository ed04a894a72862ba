//! The files that hold the memory of a snapshot.

use super::{Result, SnapshotError, file_error, open};
use crate::client::{Reader, Writer};
use sha2::{Digest, Sha256};
use std::fs::{File, OpenOptions as FileOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes of memory in a shard; the last one may have less.
const SHARD: u64 = 64 << 20;
/// What a disk writes at once: the block at the start of a shard has this size, and the memory
/// behind it is a multiple.
const BLOCK: usize = 4096;
/// Bytes that are copied at once.
const PART: usize = 4 << 20;
const MAGIC: &[u8; 16] = b"ascend-vmm shard";

/// Memory for direct reads and writes, which begins at a multiple of [`BLOCK`].
pub(super) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    pub(super) fn new() -> Buffer {
        let bytes = vec![0; PART + BLOCK];
        let start = bytes.as_ptr().align_offset(BLOCK);
        Buffer { bytes, start }
    }

    fn part(&mut self, size: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + size]
    }
}

/// All shards of a snapshot.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shards {
    pub(super) id: [u8; 16],
    pub(super) bytes: u64,
}

/// A shard whose first block is as it was written.
#[derive(Debug, Clone)]
pub(super) struct Found {
    pub(super) path: PathBuf,
    pub(super) digest: [u8; 32],
}

fn name(number: u64) -> String {
    format!("shard-{number:08}")
}

/// True for the name of a shard.
pub(super) fn is_name(text: &str) -> bool {
    text.strip_prefix("shard-").is_some_and(|number| number.len() >= 8 && number.bytes().all(|it| it.is_ascii_digit()))
}

impl Shards {
    pub(super) fn count(&self) -> u64 {
        self.bytes.div_ceil(SHARD)
    }

    /// Bytes of memory in a shard.
    pub(super) fn size(&self, number: u64) -> u64 {
        SHARD.min(self.bytes - number * SHARD)
    }

    /// The first block of a shard.
    fn head(&self, number: u64, digest: &[u8]) -> [u8; BLOCK] {
        let mut fields = MAGIC.to_vec();
        fields.extend_from_slice(&self.id);
        fields.extend_from_slice(digest);
        for value in [number, number * SHARD, self.size(number)] {
            fields.extend_from_slice(&value.to_le_bytes());
        }
        fields.extend_from_slice(&Sha256::digest(&fields)[..]);
        let mut block = [0; BLOCK];
        block[..fields.len()].copy_from_slice(&fields);
        block
    }

    /// The whole shards in some directories, by number.
    pub(super) fn find(&self, directories: &[PathBuf]) -> Result<Vec<Option<Found>>> {
        (0..self.count())
            .map(|number| {
                for directory in directories {
                    let path = directory.join(name(number));
                    if let Ok(digest) = self.digest_of(&path, number)? {
                        return Ok(Some(Found { path, digest }));
                    }
                }
                Ok(None)
            })
            .collect()
    }

    /// Removes what an interrupted save has left of shards that are not whole.
    pub(super) fn remove_unfinished(&self, directories: &[PathBuf], found: &[Option<Found>]) -> Result<()> {
        let missing = found.iter().zip(0..).filter(|(found, _)| found.is_none()).map(|(_, number)| name(number));
        for path in missing.flat_map(|name| directories.iter().map(move |directory| directory.join(&name))) {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(file_error(&path)(error)),
                _ => {}
            }
        }
        Ok(())
    }

    /// The checksum that the first block of a shard names, or what is wrong with the file: not
    /// there, or not whole.
    fn digest_of(&self, path: &Path, number: u64) -> Result<Result<[u8; 32], Option<&'static str>>> {
        let failed = file_error(path);
        let file = match open(path, FileOptions::new().read(true)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Err(None)),
            Err(error) => return Err(failed(error)),
        };
        let length = file.metadata().map_err(&failed)?.len();
        if length != BLOCK as u64 + self.size(number) {
            return Ok(Err(Some("it has not the size that was written")));
        }
        let mut block = [0; BLOCK];
        file.read_exact_at(&mut block, 0).map_err(&failed)?;
        let mut digest = [0; 32];
        digest.copy_from_slice(&block[32..64]);
        match block == self.head(number, &digest) {
            true => Ok(Ok(digest)),
            false => Ok(Err(Some("its first block is not that of this snapshot"))),
        }
    }

    /// Why a shard was not found.
    pub(super) fn explain_missing(&self, number: u64, directories: &[PathBuf]) -> SnapshotError {
        for directory in directories {
            let path = directory.join(name(number));
            match self.digest_of(&path, number) {
                Ok(Err(Some(what))) => return SnapshotError::Damaged { path, what },
                Err(error) => return error,
                _ => {}
            }
        }
        SnapshotError::Missing { name: name(number) }
    }

    /// Writes a shard: the memory, and when that is on the disk the first block.
    pub(super) fn write(
        &self,
        reader: &Reader,
        number: u64,
        directory: &Path,
        buffer: &mut Buffer,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<[u8; 32]> {
        let path = directory.join(name(number));
        let failed = file_error(&path);
        let file = open(&path, FileOptions::new().write(true).create(true).truncate(true)).map_err(&failed)?;
        direct(&file);
        let mut hasher = Sha256::new();
        for (offset, size) in self.parts(number) {
            let part = buffer.part(size);
            reader.slice(number * SHARD + offset, size as u64)?.read(part).map_err(crate::Error::from)?;
            hasher.update(&*part);
            write_at(&file, part, BLOCK as u64 + offset).map_err(&failed)?;
            progress(size as u64);
        }
        file.sync_data().map_err(&failed)?;
        let mut digest = [0; 32];
        digest.copy_from_slice(&hasher.finalize());
        let block = buffer.part(BLOCK);
        block.copy_from_slice(&self.head(number, &digest));
        write_at(&file, block, 0).and_then(|()| file.sync_all()).map_err(&failed)?;
        Ok(digest)
    }

    /// Reads a shard into the memory of a writer, and checks it.
    pub(super) fn read(
        &self,
        writer: &Writer,
        number: u64,
        found: &Found,
        buffer: &mut Buffer,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<()> {
        let failed = file_error(&found.path);
        let file = open(&found.path, FileOptions::new().read(true)).map_err(&failed)?;
        direct(&file);
        let mut hasher = Sha256::new();
        for (offset, size) in self.parts(number) {
            let part = buffer.part(size);
            read_at(&file, part, BLOCK as u64 + offset).map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => {
                    SnapshotError::Damaged { path: found.path.clone(), what: "it became shorter while it was read" }
                }
                _ => failed(error),
            })?;
            hasher.update(&*part);
            writer.slice(number * SHARD + offset, size as u64)?.write(part).map_err(crate::Error::from)?;
            progress(size as u64);
        }
        match hasher.finalize()[..] == found.digest {
            true => Ok(()),
            false => Err(SnapshotError::Damaged {
                path: found.path.clone(),
                what: "its contents are not those that were written",
            }),
        }
    }

    /// Offset and size of the parts of a shard.
    fn parts(&self, number: u64) -> impl Iterator<Item = (u64, usize)> + use<> {
        let size = self.size(number);
        (0..size).step_by(PART).map(move |offset| (offset, (size - offset).min(PART as u64) as usize))
    }
}

/// Lets reads and writes go past the page cache, which weights would only fill once. Not every file
/// system can do it.
fn direct(file: &File) {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let _ = fcntl(file.as_fd(), FcntlArg::F_SETFL(OFlag::O_DIRECT));
}

/// Writes all bytes. A file system may take direct writes only of sizes that it does not name.
fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    match file.write_all_at(bytes, offset) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            indirect(file)?;
            file.write_all_at(bytes, offset)
        }
        written => written,
    }
}

fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    match file.read_exact_at(bytes, offset) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            indirect(file)?;
            file.read_exact_at(bytes, offset)
        }
        read => read,
    }
}

fn indirect(file: &File) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    fcntl(file.as_fd(), FcntlArg::F_SETFL(OFlag::empty()))?;
    Ok(())
}
