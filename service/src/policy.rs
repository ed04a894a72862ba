//! Who may do what: the configuration.

use crate::name::DomainName;
use crate::protocol::{Code, ServiceError};
use ascend_vmm::Bytes;
use nix::unistd::{Group, User};
use serde::Deserialize;
use std::time::Duration;
use toml::Spanned;

/// Who may use the service, and how much of it. Read from TOML:
///
/// ```
/// let text = r#"
///     mode = "0660"              # of the socket
///     clients = 256              # at a time
///
///     [[allow]]                  # without any, whoever can connect may do everything
///     users = ["root", 1000]
///     domains = ["llama-70b/*"]
///     write = true
///
///     [[quota]]
///     domain = "llama-70b/*"
///     bytes = "48 GiB"
/// "#;
/// let policy = ascend_vmm_service::Policy::from_toml(text)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Policy {
    pub(crate) mode: u32,
    pub(crate) group: Option<u32>,
    pub(crate) clients: usize,
    /// Physical ids of the NPUs that are served; none: all.
    pub(crate) devices: Vec<u32>,
    pub(crate) trust_everyone: bool,
    pub(crate) believe_processes: bool,
    /// How long roles wait for their clients after the front was replaced.
    pub(crate) resume: Duration,
    /// How long a client has to give memory back.
    pub(crate) reclaim: Duration,
    allow: Vec<Allow>,
    pub(crate) quotas: Vec<Quota>,
}

#[derive(Debug, Clone)]
struct Allow {
    users: Option<Vec<u32>>,
    groups: Option<Vec<u32>>,
    domains: Vec<String>,
    write: bool,
}

/// A limit in bytes for a user, for domains, or for a user in domains.
#[derive(Debug, Clone)]
pub(crate) struct Quota {
    user: Option<u32>,
    domain: Option<String>,
    pub(crate) bytes: u64,
}

impl Quota {
    /// True if memory of this user and domain counts.
    pub(crate) fn counts(&self, user: u32, domain: &DomainName) -> bool {
        self.user.is_none_or(|of| of == user) && self.domain.as_ref().is_none_or(|pattern| domain.matches(pattern))
    }

    pub(crate) fn describe(&self) -> String {
        match (&self.user, &self.domain) {
            (Some(user), None) => format!("the quota of user {user}"),
            (None, Some(domain)) => format!("the quota of domains {domain}"),
            (Some(user), Some(domain)) => format!("the quota of user {user} in domains {domain}"),
            (None, None) => "the quota of everything".into(),
        }
    }
}

/// A configuration that cannot be used: what is wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadPolicy(String);

/// The file.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct PolicyFile {
    mode: Option<Spanned<String>>,
    group: Option<Spanned<Name>>,
    clients: Option<Spanned<usize>>,
    devices: Option<Vec<u32>>,
    trust: Option<TrustWord>,
    processes: Option<ProcessesWord>,
    resume_seconds: Option<Spanned<u64>>,
    reclaim_seconds: Option<Spanned<u64>>,
    allow: Vec<AllowTable>,
    quota: Vec<QuotaTable>,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum TrustWord {
    List,
    Everyone,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum ProcessesWord {
    /// The process is the one that the kernel saw at the other end of the socket.
    Seen,
    /// A process of another pid namespace is believed its number.
    Claimed,
}

/// A user or group, by name or number.
#[derive(Deserialize, Clone)]
#[serde(untagged)]
enum Name {
    Number(u32),
    Name(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AllowTable {
    users: Option<Vec<Spanned<Name>>>,
    groups: Option<Vec<Spanned<Name>>>,
    domains: Option<Vec<Spanned<String>>>,
    #[serde(default)]
    write: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct QuotaTable {
    user: Option<Spanned<Name>>,
    domain: Option<Spanned<String>>,
    bytes: Spanned<String>,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            mode: 0o660,
            group: None,
            clients: 256,
            devices: Vec::new(),
            trust_everyone: false,
            believe_processes: false,
            resume: Duration::from_secs(30),
            reclaim: Duration::from_secs(2),
            allow: Vec::new(),
            quotas: Vec::new(),
        }
    }
}

impl Policy {
    /// Reads a configuration.
    ///
    /// # Errors
    ///
    /// [`BadPolicy`] names the line, the key and the rule.
    pub fn from_toml(text: &str) -> Result<Policy, BadPolicy> {
        let file: PolicyFile = toml::from_str(text).map_err(|error| BadPolicy(error.to_string()))?;
        let line = Lines(text);
        let mut policy = Policy::default();
        if let Some(mode) = &file.mode {
            let parsed = u32::from_str_radix(mode.get_ref(), 8).ok().filter(|mode| *mode <= 0o777);
            let problem = || format!("mode: {:?} is not a mode such as \"0660\"", mode.get_ref());
            policy.mode = parsed.ok_or_else(|| line.of(mode, problem()))?;
        }
        policy.group = file.group.as_ref().map(|name| line.check(name, "group", group)).transpose()?;
        if let Some(clients) = &file.clients {
            if !(1..=16_384).contains(clients.get_ref()) {
                return Err(line.of(clients, format!("clients: {} is not between 1 and 16384", clients.get_ref())));
            }
            policy.clients = *clients.get_ref();
        }
        policy.devices = file.devices.unwrap_or_default();
        policy.trust_everyone = file.trust == Some(TrustWord::Everyone);
        policy.believe_processes = file.processes == Some(ProcessesWord::Claimed);
        let seconds = |name: &str, seconds: &Option<Spanned<u64>>, default: Duration| match seconds {
            None => Ok(default),
            Some(seconds) if *seconds.get_ref() <= 86_400 => Ok(Duration::from_secs(*seconds.get_ref())),
            Some(seconds) => Err(line.of(seconds, format!("{name}: {} is more than a day", seconds.get_ref()))),
        };
        policy.resume = seconds("resume-seconds", &file.resume_seconds, policy.resume)?;
        policy.reclaim = seconds("reclaim-seconds", &file.reclaim_seconds, policy.reclaim)?;
        for table in &file.allow {
            let domains = match &table.domains {
                Some(all) => {
                    all.iter().map(|it| line.check(it, "domains", |it| pattern(it))).collect::<Result<_, _>>()?
                }
                None => vec!["*".into()],
            };
            policy.allow.push(Allow {
                users: line.check_all(&table.users, "users", user)?,
                groups: line.check_all(&table.groups, "groups", group)?,
                domains,
                write: table.write,
            });
        }
        for table in &file.quota {
            let bytes = |text: &String| text.parse::<Bytes>().map_err(|error| error.to_string());
            policy.quotas.push(Quota {
                user: table.user.as_ref().map(|name| line.check(name, "user", user)).transpose()?,
                domain: table.domain.as_ref().map(|it| line.check(it, "domain", |it| pattern(it))).transpose()?,
                bytes: line.check(&table.bytes, "bytes", bytes)?.0,
            });
        }
        Ok(policy)
    }

    /// Serves these NPUs alone, by their physical ids.
    #[must_use]
    pub fn devices(mut self, physical: &[u32]) -> Policy {
        self.devices = physical.to_vec();
        self
    }

    /// Any process may import the memory, and the driver keeps no list of trusted ones. Then even
    /// the keeper's death loses nothing while somebody maps the memory, and **every process of the
    /// host can import it by guessing a small number**.
    #[must_use]
    pub fn trust_everyone(mut self, everyone: bool) -> Policy {
        self.trust_everyone = everyone;
        self
    }

    /// Refuses what the configuration does not allow.
    pub(crate) fn check(&self, peer: &Peer, domain: &DomainName, write: bool) -> Result<(), ServiceError> {
        let named = |list: &Option<Vec<u32>>, of: &[u32]| {
            list.as_ref().is_none_or(|list| of.iter().any(|it| list.contains(it)))
        };
        let matching = |allow: &Allow| {
            named(&allow.users, &[peer.user])
                && named(&allow.groups, &peer.groups)
                && allow.domains.iter().any(|pattern| domain.matches(pattern))
                && (allow.write || !write)
        };
        if self.allow.is_empty() || self.allow.iter().any(matching) {
            return Ok(());
        }
        Err(ServiceError {
            code: Code::Forbidden,
            problem: format!("user {} may not {} {domain}", peer.user, if write { "write" } else { "read" }),
            remedy: "the administrator of the service can allow it with [[allow]] in its configuration".into(),
        })
    }
}

/// A process at the other end of a connection, as the kernel reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Peer {
    /// In this process's pid namespace; 0 if it has no number there.
    pub(crate) pid: i32,
    /// When it started, in the kernel's clock ticks.
    pub(crate) start: u64,
    pub(crate) user: u32,
    pub(crate) groups: Vec<u32>,
    /// The first characters of its container's id.
    pub(crate) container: String,
}

/// The text of a configuration, for the lines of mistakes.
struct Lines<'a>(&'a str);

impl Lines<'_> {
    fn of<T>(&self, place: &Spanned<T>, problem: String) -> BadPolicy {
        let before = self.0.get(..place.span().start).unwrap_or_default();
        BadPolicy(format!("line {}: {problem}", before.matches('\n').count() + 1))
    }

    fn check<T, U>(&self, place: &Spanned<T>, key: &str, check: fn(&T) -> Result<U, String>) -> Result<U, BadPolicy> {
        check(place.get_ref()).map_err(|problem| self.of(place, format!("{key}: {problem}")))
    }

    fn check_all<T, U>(
        &self,
        places: &Option<Vec<Spanned<T>>>,
        key: &str,
        check: fn(&T) -> Result<U, String>,
    ) -> Result<Option<Vec<U>>, BadPolicy> {
        places.as_ref().map(|all| all.iter().map(|it| self.check(it, key, check)).collect()).transpose()
    }
}

fn user(name: &Name) -> Result<u32, String> {
    match name {
        Name::Number(number) => Ok(*number),
        Name::Name(name) => match User::from_name(name) {
            Ok(Some(user)) => Ok(user.uid.as_raw()),
            _ => Err(format!("there is no user {name:?}")),
        },
    }
}

fn group(name: &Name) -> Result<u32, String> {
    match name {
        Name::Number(number) => Ok(*number),
        Name::Name(name) => match Group::from_name(name) {
            Ok(Some(group)) => Ok(group.gid.as_raw()),
            _ => Err(format!("there is no group {name:?}")),
        },
    }
}

/// Refuses a pattern that no name can match.
fn pattern(pattern: &str) -> Result<String, String> {
    let name = pattern.strip_suffix('*').unwrap_or(pattern);
    // A prefix may end in the middle of a part.
    let whole = if name.is_empty() || name.ends_with('/') { format!("{name}x") } else { name.to_owned() };
    match whole.parse::<DomainName>() {
        Ok(_) if !pattern.is_empty() => Ok(pattern.to_owned()),
        Ok(_) => Err("an empty pattern matches nothing".into()),
        Err(error) => Err(format!("pattern {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> DomainName {
        text.parse().unwrap()
    }

    #[test]
    fn without_rules_everybody_may_do_everything() {
        let policy = Policy::from_toml("").unwrap();
        let peer = Peer { user: 4711, ..Peer::default() };
        assert_eq!(policy.check(&peer, &name("a"), true), Ok(()));
        assert_eq!(policy.mode, 0o660);
    }

    #[test]
    fn a_rule_allows_users_groups_and_domains_and_writing_apart() {
        let text = r#"
            [[allow]]
            users = ["root", 1000]
            domains = ["llama/*"]
            write = true
            [[allow]]
            groups = [7]
            domains = ["llama/tp0/weights"]
        "#;
        let policy = Policy::from_toml(text).unwrap();
        let user = Peer { user: 1000, ..Peer::default() };
        let reader = Peer { user: 1001, groups: vec![6, 7], ..Peer::default() };
        assert!(policy.check(&user, &name("llama/tp0/kv"), true).is_ok());
        assert!(policy.check(&Peer::default(), &name("llama/tp0/kv"), true).is_ok());
        assert_eq!(policy.check(&user, &name("qwen"), false).unwrap_err().code, Code::Forbidden);
        assert!(policy.check(&reader, &name("llama/tp0/weights"), false).is_ok());
        assert!(policy.check(&reader, &name("llama/tp0/weights"), true).is_err());
        assert!(policy.check(&reader, &name("llama/tp0/kv"), false).is_err());
    }

    #[test]
    fn a_mistake_is_named_with_its_line_its_key_and_the_rule() {
        let wrong = |text: &str| Policy::from_toml(&format!("\n\n{text}")).unwrap_err().to_string();
        for (text, line, parts) in [
            ("mode = \"0999\"", 3, &["mode", "\"0660\""][..]),
            ("client = 3", 3, &["client"]),
            ("clients = 0", 3, &["clients", "between 1 and 16384"]),
            ("clients = \"many\"", 3, &["clients"]),
            ("trust = \"nobody\"", 3, &["everyone"]),
            ("resume-seconds = 100000", 3, &["resume-seconds", "more than a day"]),
            ("group = \"no-such-group\"", 3, &["group", "there is no group"]),
            ("[[quota]]\nuser = 5\nbytes = \"48 parsecs\"", 5, &["bytes"]),
            ("[[quota]]\nbytes = \"1GiB\"\ndomain = \"a//b\"", 5, &["domain", "empty"]),
            ("[[allow]]\nwrite = true\nusers = [0,\n\"nobody-of-that-name\"]", 6, &["users", "there is no user"]),
            ("[[allow]]\ndomains = [\"a\"]\n[[allow]]\ndomains = [\"../x\"]", 6, &["domains", ".."]),
            ("[[allow]]\ndomains = [\"\"]", 4, &["domains", "empty"]),
            ("[[allow]]\nuser = [1]", 4, &["user"]),
        ] {
            let message = wrong(text);
            assert!(message.contains(&format!("line {line}")), "{text}: {message}");
            assert!(parts.iter().all(|part| message.contains(part)), "{text}: {message}");
        }
    }

    #[test]
    fn a_quota_counts_what_its_user_and_domains_have() {
        let policy =
            Policy::from_toml("[[quota]]\nuser = 5\nbytes = \"1GiB\"\n[[quota]]\ndomain = \"a/*\"\nbytes = \"2MiB\"")
                .unwrap();
        assert!(policy.quotas[0].counts(5, &name("b")) && !policy.quotas[0].counts(6, &name("a/b")));
        assert!(policy.quotas[1].counts(6, &name("a/b")) && !policy.quotas[1].counts(6, &name("b")));
        assert_eq!(policy.quotas[1].bytes, 2 << 20);
    }
}
