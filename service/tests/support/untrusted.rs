//! What must hold for any bytes that a client or a service could send. Used by the tests and by the
//! targets in `tests/fuzz`.

use ascend_vmm_service::Policy;
use ascend_vmm_service::protocol::{self, Answer, Request};

/// Frames: whatever can be read can be written, and is read the same again.
pub fn frames(bytes: &[u8]) {
    if let Ok(Some((length, request))) = protocol::decode::<Request>(bytes) {
        assert!(length <= bytes.len());
        let frame = protocol::encode(&request).expect("what was read can be written");
        assert_eq!(protocol::decode(&frame), Ok(Some((frame.len(), request))));
    }
    if let Ok(Some((length, answer))) = protocol::decode::<Answer>(bytes) {
        assert!(length <= bytes.len());
        let frame = protocol::encode(&answer).expect("what was read can be written");
        assert_eq!(protocol::decode(&frame), Ok(Some((frame.len(), answer))));
    }
}

/// Configurations: read, or refused with a sentence.
pub fn policies(bytes: &[u8]) {
    if let Err(refused) = Policy::from_toml(&String::from_utf8_lossy(bytes)) {
        assert!(!refused.to_string().is_empty());
    }
}
