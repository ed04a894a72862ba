//! Served tensors against the files that they came from.
//!
//! A safetensors file is the length of its header, the header as JSON with the place of each
//! tensor, and the data.

use crate::client::Reader;
use crate::snapshot::SnapshotError;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The most that the format allows.
const HEADER_MAX: u64 = 100 << 20;
/// Bytes that are compared at once.
const PART: u64 = 4 << 20;

/// How a tensor differs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Difference {
    /// A file has it, and the service does not.
    NotServed {
        /// The file.
        file: PathBuf,
    },
    /// The service has it, and no file does.
    NoFile,
    /// It has another size.
    Size {
        /// The file.
        file: PathBuf,
        /// Bytes in the file.
        saved: u64,
        /// Bytes in the service.
        served: u64,
    },
    /// It has other bytes.
    Bytes {
        /// The file.
        file: PathBuf,
        /// The first byte that differs, counted from the start of the tensor.
        at: u64,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::NotServed { file } => write!(f, "is in {} and not served", file.display()),
            Difference::NoFile => f.write_str("is served and in no file"),
            Difference::Size { file, saved, served } => {
                write!(f, "has {saved} bytes in {} and {served} bytes where it is served", file.display())
            }
            Difference::Bytes { file, at } => write!(f, "differs from {} from its byte {at} on", file.display()),
        }
    }
}

/// The result of [`compare`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Comparison {
    /// Tensors that are equal.
    pub equal: usize,
    /// Bytes of these.
    pub bytes: u64,
    /// All others, by name.
    pub differences: BTreeMap<String, Difference>,
}

#[derive(Deserialize)]
struct Tensor {
    data_offsets: [u64; 2],
}

/// A tensor in a file.
struct Place {
    file: usize,
    offset: u64,
    size: u64,
}

/// Compares what is served with all `*.safetensors` files of a directory, by name and bytes. Names
/// of tensors are keys of the layout.
///
/// # Errors
///
/// A file that cannot be read or is not in this format; memory that cannot be read.
pub fn compare(reader: &Reader, directory: &Path, progress: &dyn Fn(u64)) -> Result<Comparison, SnapshotError> {
    let failed = |error| SnapshotError::File { path: directory.to_owned(), error };
    let mut paths: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            paths.push(path);
        }
    }
    paths.sort();
    if paths.is_empty() {
        return Err(failed(io::Error::new(io::ErrorKind::NotFound, "there are no *.safetensors files")));
    }
    let (mut files, mut places) = (Vec::new(), BTreeMap::new());
    for (number, path) in paths.iter().enumerate() {
        let wrong = |error| SnapshotError::File { path: path.clone(), error };
        let file = File::open(path).map_err(wrong)?;
        for (name, offset, size) in tensors(&file).map_err(wrong)? {
            if places.insert(name.clone(), Place { file: number, offset, size }).is_some() {
                let problem = format!("the tensor {name:?} is in another file too");
                return Err(wrong(io::Error::new(io::ErrorKind::InvalidData, problem)));
            }
        }
        files.push(file);
    }
    let mut result = Comparison::default();
    let names: BTreeSet<&String> = places.keys().chain(reader.entries().keys()).collect();
    for name in names {
        let difference = match (places.get(name), reader.entries().get(name)) {
            (Some(place), None) => Some(Difference::NotServed { file: paths[place.file].clone() }),
            (None, _) => Some(Difference::NoFile),
            (Some(place), Some(entry)) if place.size != entry.size => {
                Some(Difference::Size { file: paths[place.file].clone(), saved: place.size, served: entry.size })
            }
            (Some(place), Some(_)) => {
                let path = &paths[place.file];
                let at = first_difference(reader, name, place, path, &files[place.file], progress)?;
                (result.bytes, result.equal) = match at {
                    None => (result.bytes + place.size, result.equal + 1),
                    Some(_) => (result.bytes, result.equal),
                };
                at.map(|at| Difference::Bytes { file: path.clone(), at })
            }
        };
        if let Some(difference) = difference {
            result.differences.insert(name.clone(), difference);
        }
    }
    Ok(result)
}

fn first_difference(
    reader: &Reader,
    name: &str,
    place: &Place,
    path: &Path,
    file: &File,
    progress: &dyn Fn(u64),
) -> Result<Option<u64>, SnapshotError> {
    let mut offset = 0;
    while offset < place.size {
        let size = PART.min(place.size - offset);
        let (mut saved, mut served) = (vec![0; size as usize], vec![0; size as usize]);
        file.read_exact_at(&mut saved, place.offset + offset)
            .map_err(|error| SnapshotError::File { path: path.to_owned(), error })?;
        let tensor = reader.get(name)?;
        tensor.part(offset, size).and_then(|part| part.read(&mut served)).map_err(crate::Error::from)?;
        if let Some(at) = saved.iter().zip(&served).position(|(one, other)| one != other) {
            return Ok(Some(offset + at as u64));
        }
        progress(size);
        offset += size;
    }
    Ok(None)
}

/// Name, offset in the file and size of each tensor.
fn tensors(file: &File) -> io::Result<Vec<(String, u64, u64)>> {
    let wrong = |problem: String| io::Error::new(io::ErrorKind::InvalidData, problem);
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0)?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_MAX {
        return Err(wrong(format!("a header of {length} bytes; at most {HEADER_MAX} are allowed")));
    }
    let mut header = vec![0; length as usize];
    file.read_exact_at(&mut header, 8)?;
    let header: BTreeMap<String, serde_json::Value> = serde_json::from_slice(&header)?;
    let end = file.metadata()?.len();
    let mut tensors = Vec::new();
    for (name, value) in header {
        // Words about the whole file.
        if name == "__metadata__" {
            continue;
        }
        let Tensor { data_offsets: [from, to] } = serde_json::from_value(value)?;
        let place = from.checked_add(8 + length).zip(to.checked_sub(from));
        match place.filter(|(start, size)| start.checked_add(*size).is_some_and(|last| last <= end)) {
            Some((start, size)) => tensors.push((name, start, size)),
            None => return Err(wrong(format!("the bytes {from} to {to} of {name:?} are not in the file"))),
        }
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> File {
        let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
        let file = File::from(nix::sys::memfd::memfd_create("tensors", flags).unwrap());
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; data]].concat();
        file.write_all_at(&bytes, 0).unwrap();
        file
    }

    #[test]
    fn tensors_outside_of_their_file_are_refused() {
        let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
        let start = 8 + header.len() as u64;
        assert_eq!(tensors(&file(header, 6)).unwrap(), [("a".to_owned(), start + 2, 4)]);
        assert!(tensors(&file(header, 5)).unwrap_err().to_string().contains("are not in the file"));
        for offsets in ["[6,2]", "[0,18446744073709551615]", "[18446744073709551615,18446744073709551615]", "[0]", "7"]
        {
            let header = format!(r#"{{"a":{{"data_offsets":{offsets}}}}}"#);
            assert!(tensors(&file(&header, 10)).is_err(), "{offsets}");
        }
        assert!(tensors(&file("{", 0)).is_err());
        let long = file("{}", 0);
        long.write_all_at(&u64::MAX.to_le_bytes(), 0).unwrap();
        assert!(tensors(&long).unwrap_err().to_string().contains("at most"));
    }
}
