//! Files that say what they are and whether they are whole: a line of text, a MessagePack body, and
//! a SHA-256 over both.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

const DIGEST: usize = 32;

/// The bytes of such a file. `magic` is its first line.
pub(crate) fn seal(magic: &[u8], body: &impl Serialize) -> Vec<u8> {
    let mut bytes = magic.to_vec();
    // Writing to memory cannot fail, and every field has a MessagePack form.
    let _ = rmp_serde::encode::write_named(&mut bytes, body);
    let digest = Sha256::digest(&bytes);
    bytes.extend_from_slice(&digest);
    bytes
}

/// Reads such a file. An error says what is wrong with it.
pub(crate) fn unseal<T: DeserializeOwned>(magic: &[u8], bytes: &[u8]) -> Result<T, &'static str> {
    let split = bytes.len().checked_sub(DIGEST).ok_or("it is too short")?;
    let (contents, digest) = bytes.split_at(split);
    let body = contents.strip_prefix(magic).ok_or("it is not of a kind and version that is known here")?;
    if Sha256::digest(contents)[..] != *digest {
        return Err("its checksum is wrong");
    }
    rmp_serde::from_slice(body).map_err(|_| "it cannot be decoded")
}
