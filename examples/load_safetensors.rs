//! Loads a safetensors file tensor by tensor into memory of an NPU.
//!
//! Such a file is a length, a JSON header with the place of each tensor, and the data. Each tensor
//! gets a block of its own; reading and copying overlap.
//!
//! Without an NPU: `cargo xtask emulate -- cargo run --quiet --example load_safetensors [FILE]`.
//! Without a file it makes a small one.

use ascend_vmm::pool::{self, PageCache, Pool, Tag};
use ascend_vmm::{LogicalId, Session};
use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;

const WEIGHTS: Tag = Tag(1);

fn main() -> Result<(), Box<dyn Error>> {
    let (file, made) = match std::env::args().nth(1) {
        Some(path) => (File::open(path)?, None),
        None => make_small_file()?,
    };
    let device = Session::open()?.device(LogicalId(0))?;
    let pool = Pool::new(&PageCache::new(&device));

    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0)?;
    let length = u64::from_le_bytes(length);
    if length > 100 << 20 {
        return Err("the header of a safetensors file is at most 100 MiB".into());
    }
    let mut header = vec![0; length as usize];
    file.read_exact_at(&mut header, 8)?;

    let mut tensors = BTreeMap::new();
    for (name, begin, end) in places(std::str::from_utf8(&header)?)? {
        let size = end.checked_sub(begin).ok_or("a tensor ends before it begins")?;
        let block = pool.allocate(size.max(1), 512, WEIGHTS)?;
        pool::load(&file, 8 + length + begin, &block.slice(0, size)?, |_| ())?;
        println!("{name}: {size} bytes at {:#x}", block.address());
        tensors.insert(name, block);
    }
    println!("{} tensors, {} bytes", tensors.len(), pool.statistics().in_use);
    if made.is_some() {
        let mut first = [0; 4];
        tensors["b"].read(0, &mut first)?;
        assert_eq!(f32::from_le_bytes(first), 2.0);
    }
    Ok(())
}

/// Name, begin and end of a tensor.
type Place = (String, u64, u64);

/// The places of all tensors. Enough JSON for the headers of such files; a program has a
/// parser.
fn places(header: &str) -> Result<Vec<Place>, Box<dyn Error>> {
    let mut places = Vec::new();
    for part in header.split("\"data_offsets\"").collect::<Vec<_>>().windows(2) {
        let object = part[0].rfind('{').ok_or("no object")?;
        let name = part[0][..object].trim_end().trim_end_matches(':').trim_end().trim_end_matches('"');
        let name = &name[name.rfind('"').map_or(0, |quote| quote + 1)..];
        let offsets = part[1].trim_start_matches([':', ' ', '[']);
        let offsets = &offsets[..offsets.find(']').ok_or("no end of the offsets")?];
        let (begin, end) = offsets.split_once(',').ok_or("no two offsets")?;
        places.push((name.to_owned(), begin.trim().parse()?, end.trim().parse()?));
    }
    Ok(places)
}

/// Two tensors of 32-bit numbers, in a file without a name.
fn make_small_file() -> Result<(File, Option<()>), Box<dyn Error>> {
    let header = r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},
        "b":{"dtype":"F32","shape":[2,2],"data_offsets":[16,32]}}"#;
    let path = std::env::temp_dir().join(format!("ascend-vmm-safetensors-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    let numbers = [1.0f32, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0];
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    file.write_all_at(&bytes, 0)?;
    Ok((file, Some(())))
}
