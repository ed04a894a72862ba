//! A connection to the service, and one that has a role.

use super::{Error, OpenOptions, Result};
use crate::layout::{Allocation, Entry};
use crate::name::DomainName;
use crate::protocol::{self, Answer, Code, Mode, Request, ServiceError, Share, VERSION};
use ascend_vmm::share::BareTgid;
use ascend_vmm::{Device, discovery};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long the front may take for an answer that waits for nobody.
pub(super) const ANSWER: Duration = Duration::from_secs(30);
/// How long a client tries to reach a front that is being replaced.
const REACH: Duration = Duration::from_secs(10);

/// A connection to the service.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) path: PathBuf,
    pub(super) socket: UnixStream,
    /// Bytes that arrived and were not looked at.
    pub(super) arrived: Vec<u8>,
    /// Requests of the service for memory.
    pub(super) reclaims: Vec<(u64, u64)>,
    pub(super) process: i32,
    pub(super) program: String,
    pub(super) instance: u64,
}

impl Line {
    pub(super) fn connect(path: &Path, process: i32, program: &str) -> Result<Line> {
        let unreachable = |error| Error::Unreachable { path: path.to_owned(), error };
        let socket = UnixStream::connect(path).map_err(unreachable)?;
        let mut line = Line {
            path: path.to_owned(),
            socket,
            arrived: Vec::new(),
            reclaims: Vec::new(),
            process,
            program: program.to_owned(),
            instance: 0,
        };
        let hello = Request::Hello { version: VERSION, process, program: program.to_owned() };
        match line.ask(&hello, ANSWER)? {
            Answer::Hello { instance, .. } => line.instance = instance,
            other => return Err(strange(&other)),
        }
        Ok(line)
    }

    pub(super) fn unreachable(&self, error: io::Error) -> Error {
        Error::Unreachable { path: self.path.clone(), error }
    }

    /// Sends a request and waits for its answer. `wait` is how long the service itself may wait.
    pub(super) fn ask(&mut self, request: &Request, wait: Duration) -> Result<Answer> {
        let frame = protocol::encode(request)?;
        // The service gives up by itself; this is for a service that does not answer at all.
        let deadline = Instant::now().checked_add(wait.saturating_add(ANSWER));
        self.socket.set_write_timeout(Some(ANSWER)).map_err(|error| self.unreachable(error))?;
        if let Err(error) = self.socket.write_all(&frame) {
            return Err(self.unreachable(error));
        }
        loop {
            match self.next(deadline)? {
                Some(Answer::Waiting { reason }) => tracing::debug!("{reason}"),
                Some(Answer::Error(error)) => return Err(error.into()),
                Some(answer) => return Ok(answer),
                None => return Err(self.unreachable(io::ErrorKind::TimedOut.into())),
            }
        }
    }

    /// The next message that is no request for memory; `None` if none comes in time.
    pub(super) fn next(&mut self, deadline: Option<Instant>) -> Result<Option<Answer>> {
        loop {
            if let Some((length, answer)) = protocol::decode::<Answer>(&self.arrived)? {
                self.arrived.drain(..length);
                match answer {
                    Answer::Reclaim { reclaim, bytes, .. } => self.reclaims.push((reclaim, bytes)),
                    answer => return Ok(Some(answer)),
                }
                continue;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            self.socket.set_read_timeout(left).map_err(|error| self.unreachable(error))?;
            let mut part = [0; 64 << 10];
            match self.socket.read(&mut part) {
                Ok(0) => return Err(self.unreachable(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.arrived.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(self.unreachable(error)),
            }
        }
    }
}

pub(super) fn strange(answer: &Answer) -> Error {
    let problem = format!("the service answered {answer:?}").chars().take(200).collect();
    ServiceError { code: Code::Protocol, problem, remedy: "is it a memory service at this socket?".into() }.into()
}

pub(super) fn done(answer: Answer) -> Result<()> {
    match answer {
        Answer::Done {} => Ok(()),
        other => Err(strange(&other)),
    }
}

/// A connection with a role, which comes back when the front is replaced.
#[derive(Debug)]
pub(super) struct Role {
    pub(super) line: Line,
    pub(super) domain: DomainName,
    pub(super) token: Vec<u8>,
    pub(super) version: u64,
    pub(super) hash: Vec<u8>,
    pub(super) allocations: u64,
    pub(super) entries: u64,
    pub(super) bytes: u64,
    pub(super) writes: bool,
    /// The connection failed, and the role was not taken back yet.
    pub(super) broken: bool,
}

impl Drop for Role {
    fn drop(&mut self) {
        // A front that was replaced keeps the role for a while: this one will not come back for it.
        if self.broken && self.come_back().is_err() {
            tracing::debug!("the service keeps a role of {} until its time is over", self.domain);
        }
    }
}

impl Role {
    pub(super) fn open(
        path: &Path,
        device: &Device,
        domain: &DomainName,
        mode: Mode,
        options: &OpenOptions,
    ) -> Result<Role> {
        let process = BareTgid::of_this_process(&device.session())?.as_raw();
        let line = Line::connect(path, process, &options.program)?;
        let npus = discovery::list()?;
        let physical = npus.iter().find(|npu| npu.logical == device.id()).map(|npu| npu.physical.0);
        let mut role = Role {
            line,
            domain: domain.clone(),
            token: Vec::new(),
            version: 0,
            hash: Vec::new(),
            allocations: 0,
            entries: 0,
            bytes: 0,
            writes: false,
            broken: false,
        };
        let request = Request::Open {
            domain: domain.clone(),
            mode,
            device: physical.unwrap_or(u32::MAX),
            wait_ms: milliseconds(options.wait),
            allow_update: options.allow_update,
            lends: options.lends,
        };
        let answer = role.line.ask(&request, options.wait)?;
        role.opened(answer)?;
        Ok(role)
    }

    pub(super) fn opened(&mut self, answer: Answer) -> Result<()> {
        match answer {
            Answer::Opened { writes, version, hash, allocations, entries, bytes, token } => {
                (self.writes, self.version, self.hash, self.token) = (writes, version, hash, token);
                (self.allocations, self.entries, self.bytes) = (allocations, entries, bytes);
                Ok(())
            }
            other => Err(strange(&other)),
        }
    }

    /// Asks, again on a new connection if the front is replaced meanwhile. Only for requests that
    /// may be carried out twice.
    pub(super) fn ask(&mut self, request: &Request, wait: Duration) -> Result<Answer> {
        self.persist(|role| role.line.ask(request, wait))
    }

    /// Tries until the service can be reached, and takes the role back in between.
    pub(super) fn persist<T>(&mut self, mut step: impl FnMut(&mut Role) -> Result<T>) -> Result<T> {
        let deadline = Instant::now() + REACH;
        loop {
            let tried = match self.broken {
                true => self.come_back().and_then(|()| step(self)),
                false => step(self),
            };
            match tried {
                Err(Error::Unreachable { .. }) if Instant::now() < deadline => {
                    self.broken = true;
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error @ Error::Unreachable { .. }) => {
                    self.broken = true;
                    return Err(error);
                }
                tried => return tried,
            }
        }
    }

    /// Takes the role back on a new connection.
    pub(super) fn come_back(&mut self) -> Result<()> {
        let mut line = Line::connect(&self.line.path, self.line.process, &self.line.program)?;
        let answer = line.ask(&Request::Resume { token: self.token.clone() }, ANSWER)?;
        line.reclaims = std::mem::take(&mut self.line.reclaims);
        (self.line, self.broken) = (line, false);
        self.opened(answer)
    }

    pub(super) fn all_allocations(&mut self) -> Result<Vec<Allocation>> {
        let mut all: Vec<Allocation> = Vec::new();
        while (all.len() as u64) < self.allocations {
            match self.ask(&Request::Allocations { from: all.len() as u64 }, ANSWER)? {
                Answer::Allocations { allocations } if !allocations.is_empty() => all.extend(allocations),
                other => return Err(strange(&other)),
            }
        }
        Ok(all)
    }

    pub(super) fn all_entries(&mut self) -> Result<BTreeMap<String, Entry>> {
        let mut all = BTreeMap::new();
        while (all.len() as u64) < self.entries {
            let after = all.last_key_value().map(|(key, _): (&String, &Entry)| key.clone());
            match self.ask(&Request::Entries { after }, ANSWER)? {
                Answer::Entries { entries } if !entries.is_empty() => all.extend(entries),
                other => return Err(strange(&other)),
            }
        }
        Ok(all)
    }

    pub(super) fn shares(&mut self, ids: &[u64]) -> Result<Vec<Share>> {
        let mut all = Vec::new();
        for part in ids.chunks(protocol::PAGE_MAX) {
            match self.ask(&Request::Shares { allocations: part.to_vec() }, ANSWER)? {
                Answer::Shares { shares } if shares.len() == part.len() => all.extend(shares),
                other => return Err(strange(&other)),
            }
        }
        Ok(all)
    }
}

pub(super) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
