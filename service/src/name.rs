//! Names of domains.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The name of a domain, such as `llama-70b/tp0/weights`.
///
/// One or more parts separated by `/`. A part consists of ASCII letters, digits, `.`, `_` and `-`,
/// and is neither `.` nor `..`, so that a name is also a safe relative path. At most 255 bytes.
///
/// ```
/// use ascend_vmm_service::DomainName;
///
/// assert!("llama-70b/tp0/weights".parse::<DomainName>().is_ok());
/// assert!("../weights".parse::<DomainName>().is_err());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DomainName(Arc<str>);

/// The error for a text that is not the name of a domain.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a domain: {problem}")]
pub struct NotADomain {
    name: String,
    problem: &'static str,
}

impl DomainName {
    /// Most bytes of a name.
    pub const MAX: usize = 255;

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// True if the name matches a pattern of the configuration: the name itself, or a prefix
    /// followed by `*`.
    pub fn matches(&self, pattern: &str) -> bool {
        match pattern.strip_suffix('*') {
            Some(prefix) => self.0.starts_with(prefix),
            None => *self.0 == *pattern,
        }
    }
}

impl FromStr for DomainName {
    type Err = NotADomain;

    fn from_str(text: &str) -> Result<DomainName, NotADomain> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let problem = if text.len() > DomainName::MAX {
            "it is longer than 255 bytes"
        } else if text.split('/').any(|part| part.is_empty()) {
            "a part between slashes is empty"
        } else if text.split('/').any(|part| matches!(part, "." | "..")) {
            "a part is `.` or `..`"
        } else if !text.chars().all(|c| c == '/' || allowed(c)) {
            "only ASCII letters, digits, `.`, `_`, `-` and `/` are allowed"
        } else {
            return Ok(DomainName(text.into()));
        };
        // What a client sends may be long, and is printed.
        Err(NotADomain { name: text.chars().take(64).collect(), problem })
    }
}

impl TryFrom<String> for DomainName {
    type Error = NotADomain;

    fn try_from(text: String) -> Result<DomainName, NotADomain> {
        text.parse()
    }
}

impl From<DomainName> for String {
    fn from(name: DomainName) -> String {
        name.0.to_string()
    }
}

impl fmt::Display for DomainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_safe_relative_path() {
        for good in ["a", "llama-70b/tp0/weights", "a.b_c-d/0", "...", &"x".repeat(255)] {
            assert_eq!(good.parse::<DomainName>().map(String::from).as_deref(), Ok(good));
        }
        for bad in ["", "/", "a/", "/a", "a//b", "..", "a/../b", "./a", "a b", "a\n", "ä", "a\0", &"x".repeat(256)] {
            assert!(bad.parse::<DomainName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_pattern_is_a_name_or_a_prefix() {
        let name: DomainName = "llama/tp0/kv".parse().unwrap();
        for pattern in ["*", "llama/*", "llama/tp0/kv", "llama/tp0/kv*"] {
            assert!(name.matches(pattern), "{pattern}");
        }
        for pattern in ["", "llama", "llama/tp1/*", "qwen*", "*/kv"] {
            assert!(!name.matches(pattern), "{pattern}");
        }
    }
}
