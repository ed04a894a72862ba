//! Random programs: calls that a number decides, of two processes with a session each.
//!
//! The generator knows the arguments of the commands (`ascend-ioctl`) and the objects that the
//! driver has given out: heaps, reservations, handles, mappings, shares and copies. It builds a
//! call that should be granted, and changes one field of every third. The answers are not judged:
//! `ascend-vmm trace` records them on any driver, and `emulate --replay` compares them with the
//! emulated one. What was granted decides the later calls, so a driver that answers differently
//! gets another program.
//!
//! What may crash a kernel, or cost it something until the driver is loaded anew, is a [`Hazard`]
//! and sent only if it is asked for by name. What may touch memory of others, or takes much, is
//! never sent.

use crate::host::Host;
use crate::manager::anonymous;
use crate::peer::{Link, Peer};
use crate::rule::{Answer, Failure, Judge, Verdict, errno_name};
use crate::session::{FIRST_HEAP, GIB, Handle, MIB2, Session, create_of, heap_address};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{self, Arg, DATA, HOST_ID, Op};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// What a program sends only if it is asked to: it can crash a kernel, or costs it something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hazard {
    /// A mapping that runs beyond its reservation into the next: pages with two owners.
    SpanningMap,
    /// MEM_SET_ACCESS with access 0: the next one for the host panics.
    AccessNone,
    /// MEM_EXPORT of host memory that was released in part: a NULL dereference at its release.
    HalfFreedExport,
    /// A copy or a fill over several mappings that begins in an import: the wrong device's engine.
    TwoExporters,
    /// A copy of host memory that was imported on a device: a reference is lost.
    HostImportCopy,
    /// An asynchronous copy over the end of a mapping: others stay busy.
    AsyncBorder,
    /// MEM_IMPORT in the name of another server: it is never forgotten.
    OtherServer,
}

impl Hazard {
    /// All of them.
    pub const ALL: [Hazard; 7] = [
        Hazard::SpanningMap,
        Hazard::AccessNone,
        Hazard::HalfFreedExport,
        Hazard::TwoExporters,
        Hazard::HostImportCopy,
        Hazard::AsyncBorder,
        Hazard::OtherServer,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Hazard::SpanningMap => "spanning-map",
            Hazard::AccessNone => "access-none",
            Hazard::HalfFreedExport => "half-freed-export",
            Hazard::TwoExporters => "two-exporters",
            Hazard::HostImportCopy => "host-import-copy",
            Hazard::AsyncBorder => "async-border",
            Hazard::OtherServer => "other-server",
        }
    }
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Hazard {
    type Err = String;

    fn from_str(text: &str) -> Result<Hazard, String> {
        let known = Hazard::ALL.into_iter().find(|hazard| hazard.name() == text);
        known.ok_or_else(|| format!("`{text}` is not one of {}", Hazard::ALL.map(Hazard::name).join(", ")))
    }
}

/// A random program.
#[derive(Debug, Clone)]
pub struct Program {
    /// The number that decides it.
    pub seed: u64,
    /// How many calls it makes.
    pub calls: u32,
    /// What it may send although a kernel may not survive it.
    pub hazards: Vec<Hazard>,
}

/// A program that was played.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Played {
    /// Generation of the driver.
    pub generation: Generation,
    /// How many calls were granted and refused, and what was left out.
    pub sentence: String,
}

impl Program {
    /// Plays it on this host, in processes of its own; `None` if there is no driver or no device.
    pub fn play(&self) -> Result<Option<Played>, String> {
        let patience = Duration::from_secs(120 + u64::from(self.calls) / 10);
        let text = |failure| match failure {
            Failure::Broken(text) | Failure::Skipped(text) => text,
        };
        let found = crate::run::isolated(patience, || {
            Host::find().map(|host| host.map_or_else(String::new, |host| host.to_line()))
        });
        let line = found.map_err(|failure| format!("cannot examine the driver: {}", text(failure)))?;
        let Some(host) = Host::from_line(&line) else { return Ok(None) };
        let sentence = crate::run::isolated(patience, || Player::start(self, &host)?.play()).map_err(text)?;
        Ok(Some(Played { generation: host.generation, sentence }))
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    /// A number below `end`, which is not 0.
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn pick<T: Clone>(&mut self, list: &[T]) -> Option<T> {
        if list.is_empty() { None } else { list.get(self.below(list.len() as u64) as usize).cloned() }
    }
}

/// How a handle came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Created,
    Exported,
    /// From a share of this device.
    Imported(u32),
}

/// A handle of a process.
#[derive(Debug, Clone, Copy)]
struct Memory {
    handle: Handle,
    left: u64,
    /// A release was granted and left some of it, or all.
    half_freed: bool,
    origin: Origin,
}

impl Memory {
    fn size(&self) -> u64 {
        self.handle.pages * if self.handle.page == svm::PAGE_NORMAL { PAGE } else { MIB2 }
    }
}

/// A mapping of a process.
#[derive(Debug, Clone, Copy)]
struct Mapped {
    size: u64,
    device: u32,
    origin: Origin,
}

impl Mapped {
    fn is_import(&self) -> bool {
        matches!(self.origin, Origin::Imported(_))
    }

    /// Whether it is host memory that was imported on a device.
    fn is_host_import(&self) -> bool {
        self.device != HOST_ID && self.origin == Origin::Imported(HOST_ID)
    }
}

#[derive(Debug, Clone, Copy)]
struct Heap {
    index: u32,
    size: u64,
    chunk: u64,
}

impl Heap {
    fn range(&self) -> Range<u64> {
        heap_address(self.index)..heap_address(self.index) + self.size
    }
}

/// What the driver gave to one process.
#[derive(Default)]
struct Objects {
    heaps: Vec<Heap>,
    reservations: BTreeMap<u64, u64>,
    memories: Vec<Memory>,
    mappings: BTreeMap<u64, Mapped>,
    /// Asynchronous copies that were not refreshed: id and the driver's side of it.
    tasks: Vec<(i32, u64)>,
}

impl Objects {
    fn memory(&self, device: u32, id: i32) -> Option<&Memory> {
        self.memories.iter().find(|memory| memory.handle.device == device && memory.handle.id == id)
    }

    fn reservation(&self, address: u64) -> Option<Range<u64>> {
        let (start, size) = self.reservations.range(..=address).next_back()?;
        (address < start + size).then_some(*start..start + size)
    }

    /// The mappings that a range touches.
    fn touched(&self, address: u64, size: u64) -> impl Iterator<Item = (u64, Mapped)> {
        let end = address.saturating_add(size);
        let touched = self.mappings.iter().filter(move |(start, it)| **start < end && **start + it.size > address);
        touched.map(|(start, it)| (*start, *it))
    }
}

/// A share, by its exporting device and its number.
type Share = (u32, i32);

/// Why a call is not sent.
enum Objection {
    Hazard(Hazard),
    /// It may touch what is not ours, or take much.
    Never,
}

/// A small page of both sides.
const PAGE: u64 = 4096;

/// The process's own memory that is copied: at the same address in both processes.
const BUFFER: u64 = 4 << 20;

/// Processes in the list that MEM_SET_PID reads.
const LISTED: usize = 4;

/// Most objects of a kind that one process has.
const MOST: usize = 12;

/// Words of an argument.
const WORDS: usize = svm::ARG_SIZE / 8;

/// The commands, as often as they are sent.
const COMMANDS: &[(Op, u64)] = &[
    (Op::UpdateHeap, 4),
    (Op::Alloc, 12),
    (Op::FreePages, 8),
    (Op::MemCreate, 14),
    (Op::MemRelease, 8),
    (Op::MemMap, 16),
    (Op::MemUnmap, 8),
    (Op::MemSetAccess, 6),
    (Op::MemGetAccess, 4),
    (Op::MemQueryOwner, 4),
    (Op::ReserveAddrInfoQuery, 4),
    (Op::MemExport, 5),
    (Op::MemSetPid, 6),
    (Op::MemSetAttr, 2),
    (Op::MemGetAttr, 2),
    (Op::MemGetInfo, 2),
    (Op::MemImport, 8),
    (Op::Memcpy, 12),
    (Op::Memset8, 5),
    (Op::AsyncMemcpy, 4),
    (Op::MemcpyResultRefresh, 4),
    (Op::Prefetch, 3),
    (Op::Advise, 2),
    (Op::DbgVaStatus, 1),
    (Op::MemMapCap, 1),
    (Op::MemHandleSetAttr, 1),
    (Op::MemHandleGetAttr, 1),
];

struct Player<'a> {
    program: &'a Program,
    random: Random,
    /// Logical ids that the host has.
    visible: u32,
    /// Those that are set up, and the host.
    devices: Vec<u32>,
    session: Session,
    peer: Peer,
    objects: [Objects; 2],
    shares: Vec<Share>,
    buffer: u64,
    /// The list of processes, which both have at the same address.
    list: u64,
    answers: BTreeMap<String, u32>,
    left_out: BTreeMap<&'static str, u32>,
}

impl<'a> Player<'a> {
    fn start(program: &'a Program, host: &'a Host) -> Result<Self, Failure> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let (buffer, list) = (anonymous(0, BUFFER, access).granted()?, anonymous(0, PAGE, access).granted()?);
        let used = host.physical.len().min(2) as u32;
        let mut peer = Peer::start(|link| follow(host, used, link))?;
        // One after the other, so that the same number gives the same trace.
        let theirs = peer.link.receive()? as i32;
        let session = open(host, used)?;
        let pids = [session.identity()?.tgid, theirs];
        // SAFETY: the page is this process's own, aligned, and larger than the list.
        let entries = unsafe { std::slice::from_raw_parts_mut(list as *mut i32, LISTED) };
        entries.copy_from_slice(&[pids[1], pids[0], 0, pids[1]]);
        peer.link.send(list)?;
        for pid in entries.iter() {
            peer.link.send(*pid as u64)?;
        }
        Ok(Player {
            program,
            random: Random(program.seed),
            visible: host.physical.len() as u32,
            devices: (0..used).chain([HOST_ID]).collect(),
            session,
            peer,
            objects: Default::default(),
            shares: Vec::new(),
            buffer,
            list,
            answers: BTreeMap::new(),
            left_out: BTreeMap::new(),
        })
    }

    /// Makes the calls. Returns what became of them.
    fn play(mut self) -> Result<String, Failure> {
        let mut made = 0;
        while made < self.program.calls {
            let who = self.random.below(2) as usize;
            let Some((op, arg)) = self.call(who) else { continue };
            match self.objection(who, op, &arg) {
                Some(Objection::Never) => continue,
                Some(Objection::Hazard(hazard)) if !self.program.hazards.contains(&hazard) => {
                    *self.left_out.entry(hazard.name()).or_default() += 1;
                    continue;
                }
                _ => {}
            }
            let answer = self.issue(who, op, arg)?;
            made += 1;
            let name = answer.as_ref().map_or_else(|code| errno_name(*code), |_| "granted".into());
            *self.answers.entry(name).or_default() += 1;
            if let Ok(answer) = answer {
                self.granted(who, op, &arg, &answer);
            }
        }
        self.peer.link.send(u64::MAX)?;
        self.peer.finish()?;
        self.session.shut_down()?;
        let list = |counts: Vec<(&str, u32)>| {
            let texts: Vec<String> = counts.iter().map(|(name, count)| format!("{count} {name}")).collect();
            if texts.is_empty() { "nothing".to_owned() } else { texts.join(", ") }
        };
        let answers = self.answers.iter().map(|(name, count)| (name.as_str(), *count)).collect();
        let left_out = self.left_out.into_iter().collect();
        Ok(format!("{}; not sent: {}", list(answers), list(left_out)))
    }

    /// Issues a command in one of the processes.
    fn issue(&mut self, who: usize, op: Op, mut arg: Arg) -> Result<Answer<Arg>, Failure> {
        if who == 0 {
            return Ok(self.session.svm.raw(op, &mut arg).map(|_| arg));
        }
        let index = Op::ALL.iter().position(|known| *known == op).unwrap_or_default();
        self.peer.link.send(index as u64)?;
        send(&mut self.peer.link, &arg)?;
        let code = self.peer.link.receive()? as i32;
        let after = receive(&mut self.peer.link)?;
        Ok(if code == 0 { Ok(after) } else { Err(code) })
    }

    /// A call: one that should be granted as far as there are objects for it, or a bent one.
    fn call(&mut self, who: usize) -> Option<(Op, Arg)> {
        let all: u64 = COMMANDS.iter().map(|(_, weight)| weight).sum();
        let mut number = self.random.below(all);
        let op = COMMANDS.iter().find_map(|(op, weight)| match number.checked_sub(*weight) {
            Some(left) => {
                number = left;
                None
            }
            None => Some(*op),
        })?;
        self.session.svm.generation.svm(op)?;
        let mut arg = self.straight(who, op)?;
        if self.random.below(3) == 0 {
            self.bend(who, op, &mut arg);
        }
        Some((op, arg))
    }

    /// A call that should be granted.
    fn straight(&mut self, who: usize, op: Op) -> Option<Arg> {
        let (objects, random) = (&self.objects[who], &mut self.random);
        let memory = random.pick(&objects.memories);
        let reservations: Vec<(u64, u64)> = objects.reservations.iter().map(|(start, size)| (*start, *size)).collect();
        let reservation = random.pick(&reservations);
        let mappings: Vec<(u64, Mapped)> = objects.mappings.iter().map(|(start, it)| (*start, *it)).collect();
        let mapping = random.pick(&mappings);
        let device = random.pick(&self.devices)?;
        let share = random.pick(&self.shares).unwrap_or((device, -1));
        Some(match op {
            Op::UpdateHeap => {
                let heap = random.pick(&objects.heaps).filter(|_| objects.heaps.len() > 2);
                let size = heap.map_or(GIB * (1 + random.below(2)), |heap| heap.size);
                let operation = if heap.is_some() { svm::HEAP_DISABLE } else { svm::HEAP_ENABLE };
                let kind = random.pick(&[svm::HEAP_HUGE, svm::HEAP_HUGE, svm::HEAP_CHUNK])?;
                let index = heap.map_or(FIRST_HEAP + random.below(6) as u32, |heap| heap.index);
                Arg::new(0, &svm::UpdateHeap { operation, kind, sub_kind: svm::SUB_RESERVE, index, size })
            }
            Op::Alloc => {
                let heap = random.pick(&objects.heaps).filter(|_| reservations.len() < MOST)?;
                let chunks = 1 + random.below(4);
                // Neighbours are likely: half of the places are at the beginning.
                let places = if random.below(2) == 0 { 8 } else { GIB / heap.chunk - chunks };
                let place = random.below(places);
                let (address, size) = (heap.range().start + place * heap.chunk, chunks * heap.chunk);
                Arg::new(0, &svm::Alloc { address, size })
            }
            Op::FreePages => Arg::new(0, &svm::FreePages { address: reservation?.0 }),
            Op::MemCreate => {
                let side = if device == HOST_ID { svm::SIDE_HOST } else { svm::SIDE_DEVICE };
                let page = random.pick(&[svm::PAGE_HUGE, svm::PAGE_HUGE, svm::PAGE_NORMAL])?;
                let size = (1 + random.below(3)) * if page == svm::PAGE_HUGE { MIB2 } else { PAGE };
                if objects.memories.len() >= MOST {
                    return None;
                }
                Arg::new(device, &create_of(side, page, size))
            }
            Op::MemRelease => {
                let Memory { handle, left, .. } = memory?;
                let para = svm::MemRelease { id: handle.id, side: handle.side, pages: left, ..Default::default() };
                Arg::new(handle.device, &para)
            }
            Op::MemMap => {
                let (memory, (start, size)) = (memory?, reservation?);
                let unit = if memory.handle.page == svm::PAGE_NORMAL { PAGE } else { MIB2 };
                let room = size.min(memory.size()) / unit;
                let length = unit * (1 + random.below(room.max(1)));
                let address = start + unit * random.below((size.saturating_sub(length) / unit).max(1));
                Arg::new(memory.handle.device, &Session::map_para(&memory.handle, address, length))
            }
            Op::MemUnmap => Arg::new(HOST_ID, &svm::MemUnmap { address: mapping?.0, ..Default::default() }),
            Op::MemSetAccess | Op::MemGetAccess => {
                let (address, Mapped { size, .. }) = mapping?;
                let access = if op == Op::MemGetAccess { 0 } else { svm::ACCESS_READ_WRITE };
                Arg::new(HOST_ID, &svm::MemAccess { address, size, device, access })
            }
            Op::MemQueryOwner => {
                let (address, Mapped { size, .. }) = mapping?;
                Arg::new(HOST_ID, &svm::MemQueryOwner { address, size, ..Default::default() })
            }
            Op::ReserveAddrInfoQuery => {
                let address = mapping.map_or(reservation?.0, |(start, it)| start + random.below(it.size));
                Arg::new(0, &svm::ReserveAddressInfo { address, ..Default::default() })
            }
            Op::DbgVaStatus => Arg::new(0, &svm::DebugVaStatus { address: reservation?.0, ..Default::default() }),
            Op::MemExport => {
                let Memory { handle, .. } = memory?;
                Arg::new(handle.device, &svm::MemExport { side: handle.side as i32, id: handle.id, share: 0 })
            }
            Op::MemSetPid => {
                let count = 1 + random.below(LISTED as u64) as u32;
                Arg::new(share.0, &svm::MemSetPid { share: share.1, count, pids: self.list })
            }
            Op::MemSetAttr => {
                let value = svm::ShareAttr { no_trust_list: random.below(2) as u32, ..Default::default() };
                Arg::new(share.0, &svm::MemSetAttr { share: share.1, kind: 0, value })
            }
            Op::MemGetAttr => Arg::new(0, &svm::MemGetAttr { share: share.1, exporter: share.0, ..Default::default() }),
            Op::MemGetInfo => Arg::new(0, &svm::MemGetInfo { share: share.1, exporter: share.0, ..Default::default() }),
            Op::MemImport => {
                let (exporter, share) = share;
                if objects.memories.len() >= MOST {
                    return None;
                }
                let sdid = self.session.svm.sdid;
                Arg::new(device, &svm::MemImport { share, exporter, sdid, ..Default::default() })
            }
            Op::Memcpy | Op::AsyncMemcpy => {
                let own = (self.buffer, BUFFER);
                let place = |mapping: Option<(u64, Mapped)>| mapping.map_or(own, |(start, it)| (start, it.size));
                let other = random.pick(&mappings).filter(|_| op == Op::Memcpy && random.below(2) == 0);
                let mut ends = [place(mapping), place(other)];
                if random.below(2) == 0 {
                    ends.reverse();
                }
                let room = ends[0].1.min(ends[1].1);
                let some = 1 + random.below(room);
                let size = random.pick(&[1, PAGE, room, some])?.min(room);
                let [destination, source] = ends.map(|(start, length)| start + random.below(length - size + 1));
                match op {
                    Op::Memcpy => {
                        let direction = svm::COPY_DETECT;
                        Arg::new(0, &svm::Memcpy { destination, source, size, direction, ..Default::default() })
                    }
                    _ => Arg::new(0, &svm::AsyncMemcpy { destination, source, size, ..Default::default() }),
                }
            }
            Op::MemcpyResultRefresh => {
                let (task, _) = random.pick(&objects.tasks)?;
                Arg::new(0, &svm::AsyncMemcpy { task, ..Default::default() })
            }
            Op::Memset8 => {
                let (destination, Mapped { size, .. }) = mapping?;
                let (value, size) = (random.below(256), 1 + random.below(size));
                Arg::new(0, &svm::Memset { destination, value, size, ..Default::default() })
            }
            Op::Prefetch => {
                let (address, Mapped { size, .. }) = mapping?;
                Arg::new(device, &svm::Advise { address, size, ..Default::default() })
            }
            Op::Advise => {
                let (address, size) = reservation?;
                let advice = random.pick(&[svm::Advice::HBM, svm::Advice::HUGE, svm::Advice::PERSISTENT])?.bits();
                Arg::new(device, &svm::Advise { address, size, advice, ..Default::default() })
            }
            Op::MemMapCap => Arg::new(device, &svm::MapCapability::default()),
            Op::MemHandleSetAttr | Op::MemHandleGetAttr => {
                let Memory { handle, .. } = memory?;
                let para = svm::MemHandleAttr { id: handle.id, side: handle.side, ..Default::default() };
                Arg::new(handle.device, &para)
            }
            _ => return None,
        })
    }

    /// Changes one field of an argument, or the device that it is for.
    fn bend(&mut self, who: usize, op: Op, arg: &mut Arg) {
        let layout = svm::LAYOUTS.iter().find(|layout| layout.name == op.argument());
        let fields: Vec<(usize, usize)> = layout.map_or(&[][..], |layout| layout.fields).iter().map(place).collect();
        let fields: Vec<(usize, usize)> = fields.into_iter().filter(|(_, size)| matches!(size, 1..=8)).collect();
        let objects = &self.objects[who];
        let random = &mut self.random;
        let field = random.pick(&fields).filter(|_| random.below(6) != 0);
        let Some((offset, size)) = field else {
            arg.head.device = random.pick(&[0, 1, 2, 63, 64, 65, 66, 1123, 1124, u32::MAX]).unwrap_or(0);
            return;
        };
        let bytes = &mut arg.as_mut_bytes()[DATA + offset..][..size];
        let mut word = [0; 8];
        word[..size].copy_from_slice(bytes);
        let old = u64::from_le_bytes(word);
        let others: Vec<u64> = objects
            .reservations
            .keys()
            .chain(objects.mappings.keys())
            .copied()
            .chain(objects.memories.iter().map(|memory| memory.handle.id as u64))
            .collect();
        let near = [1, 2, PAGE, MIB2, MIB2 / 2, GIB];
        let new = match random.below(8) {
            0 => 0,
            1 => u64::MAX,
            2 | 3 => old.wrapping_add(random.pick(&near).unwrap_or(1)),
            4 | 5 => old.wrapping_sub(random.pick(&near).unwrap_or(1)),
            6 => random.pick(&others).unwrap_or(old ^ 1),
            _ => random.below(8),
        };
        bytes.copy_from_slice(&new.to_le_bytes()[..size]);
    }

    /// Whether a share is one of ours, or surely none.
    fn is_ours(&self, share: Share) -> bool {
        let (device, number) = share;
        self.shares.contains(&share) || number < 0 || (device >= self.visible && device != HOST_ID)
    }

    /// Why a call must not be sent, if there is a reason.
    fn objection(&self, who: usize, op: Op, arg: &Arg) -> Option<Objection> {
        let objects = &self.objects[who];
        let never = |is: bool| is.then_some(Objection::Never);
        let hazard = |hazard: Hazard, is: bool| is.then_some(Objection::Hazard(hazard));
        match op {
            Op::UpdateHeap => {
                let para: svm::UpdateHeap = arg.para();
                let heap = objects.heaps.iter().find(|heap| heap.index == para.index);
                let busy = |heap: &Heap| objects.tasks.iter().any(|(_, address)| heap.range().contains(address));
                let large = para.size > 8 * GIB;
                let plain = para.sub_kind != svm::SUB_RESERVE && para.sub_kind <= svm::SUB_DEVICE_READ_ONLY;
                let disable = para.operation == svm::HEAP_DISABLE;
                let pinned = para.kind == svm::HEAP_PINNED_HOST;
                let dynamic = para.index >= svm::STATIC_HEAPS;
                never(dynamic || (!disable && (large || plain || pinned)) || (disable && heap.is_some_and(busy)))
            }
            Op::Alloc => {
                let para: svm::Alloc = arg.para();
                never(!is_static(para.address) || para.size > GIB && para.size < 8 << 40)
            }
            Op::MemCreate => {
                let para: svm::MemCreate = arg.para();
                never(para.page == svm::PAGE_GIANT || para.size > 4 * MIB2 && para.size % PAGE == 0)
            }
            Op::MemRelease => {
                let para: svm::MemRelease = arg.para();
                never(para.pages > 2048)
            }
            Op::MemMap => {
                let para: svm::MemMap = arg.para();
                let (start, size) = (para.address, para.size);
                let spans = |it: Range<u64>| size <= it.end - it.start && start.saturating_add(size) > it.end;
                hazard(Hazard::SpanningMap, objects.reservation(start).is_some_and(spans))
            }
            Op::MemSetAccess => {
                let para: svm::MemAccess = arg.para();
                hazard(Hazard::AccessNone, para.access == svm::ACCESS_NONE)
            }
            Op::MemExport => {
                let para: svm::MemExport = arg.para();
                let memory = objects.memory(arg.head.device, para.id);
                let half = |it: &Memory| it.handle.device == HOST_ID && it.half_freed;
                hazard(Hazard::HalfFreedExport, memory.is_some_and(half))
            }
            Op::MemSetPid => {
                let para: svm::MemSetPid = arg.para();
                let readable = para.pids == 0
                    || para.count > svm::TRUST_LIST
                    || para.pids == self.list && para.count as usize <= LISTED;
                never(!readable || !self.is_ours((arg.head.device, para.share)))
            }
            Op::MemSetAttr => {
                let para: svm::MemSetAttr = arg.para();
                never(!self.is_ours((arg.head.device, para.share)))
            }
            Op::MemGetAttr => {
                let para: svm::MemGetAttr = arg.para();
                never(!self.is_ours((para.exporter, para.share)))
            }
            Op::MemGetInfo => {
                let para: svm::MemGetInfo = arg.para();
                never(!self.is_ours((para.exporter, para.share)))
            }
            Op::MemImport => {
                let para: svm::MemImport = arg.para();
                let foreign = para.sdid != self.session.svm.sdid;
                never(!self.is_ours((para.exporter, para.share))).or(hazard(Hazard::OtherServer, foreign))
            }
            Op::Memcpy => {
                let para: svm::Memcpy = arg.para();
                let never = never(para.device_local != 0);
                never.or_else(|| self.copied(who, [para.destination, para.source], para.size, false))
            }
            Op::AsyncMemcpy => {
                let para: svm::AsyncMemcpy = arg.para();
                self.copied(who, [para.destination, para.source], para.size, true)
            }
            Op::Memset8 => {
                let para: svm::Memset = arg.para();
                let touched: Vec<_> = objects.touched(para.destination, para.size).collect();
                let mixed = touched.len() > 1 && touched.iter().any(|(_, it)| it.is_import());
                never(!is_static(para.destination)).or(hazard(Hazard::TwoExporters, mixed))
            }
            Op::Prefetch | Op::Advise => {
                let para: svm::Advise = arg.para();
                never(!is_static(para.address))
            }
            _ => None,
        }
    }

    /// Why a copy must not be made.
    fn copied(&self, who: usize, ends: [u64; 2], size: u64, in_background: bool) -> Option<Objection> {
        let own = self.buffer..self.buffer + BUFFER;
        for address in ends {
            if own.contains(&address) && size <= own.end - address {
                continue;
            }
            if !is_static(address) {
                return Some(Objection::Never);
            }
            let touched: Vec<(u64, Mapped)> = self.objects[who].touched(address, size).collect();
            let imports = touched.iter().filter(|(_, it)| it.is_import()).count();
            let beyond = |(start, it): &(u64, Mapped)| address.saturating_add(size) > start + it.size;
            if touched.iter().any(|(_, it)| it.is_host_import()) {
                return Some(Objection::Hazard(Hazard::HostImportCopy));
            } else if imports > 0 && touched.len() > 1 {
                return Some(Objection::Hazard(Hazard::TwoExporters));
            } else if in_background && touched.first().is_some_and(beyond) {
                return Some(Objection::Hazard(Hazard::AsyncBorder));
            }
        }
        None
    }

    /// Notes what a granted call changed.
    fn granted(&mut self, who: usize, op: Op, sent: &Arg, answer: &Arg) {
        let objects = &mut self.objects[who];
        let device = sent.head.device;
        match op {
            Op::UpdateHeap => {
                let para: svm::UpdateHeap = sent.para();
                let chunk = if para.kind == svm::HEAP_CHUNK { PAGE } else { MIB2 };
                let heap = Heap { index: para.index, size: para.size, chunk };
                if para.operation == svm::HEAP_ENABLE {
                    return objects.heaps.push(heap);
                }
                objects.heaps.retain(|known| known.index != para.index);
                objects.reservations.retain(|start, _| !heap.range().contains(start));
                objects.mappings.retain(|start, _| !heap.range().contains(start));
            }
            Op::Alloc => {
                let para: svm::Alloc = sent.para();
                let heap = objects.heaps.iter().find(|heap| heap.range().contains(&para.address));
                let chunk = heap.map_or(MIB2, |heap| heap.chunk);
                let start = para.address / chunk * chunk;
                let end = (para.address.saturating_add(para.size)).next_multiple_of(chunk);
                objects.reservations.insert(start, end - start);
            }
            Op::FreePages => {
                let para: svm::FreePages = sent.para();
                objects.reservations.remove(&para.address);
            }
            Op::MemCreate => {
                let (para, made): (svm::MemCreate, svm::MemCreate) = (sent.para(), answer.para());
                let side = if para.side == svm::SIDE_DEVICE { svm::SIDE_DEVICE } else { svm::SIDE_HOST };
                let (id, pages) = (made.id, made.pages);
                let handle = Handle { device, id, side, page: para.page, pages, module: para.module };
                objects.memories.push(Memory { handle, left: pages, half_freed: false, origin: Origin::Created });
            }
            Op::MemRelease => {
                let para: svm::MemRelease = sent.para();
                objects.memories.retain_mut(|memory| {
                    if memory.handle.device != device || memory.handle.id != para.id {
                        return true;
                    }
                    memory.left = memory.left.saturating_sub(para.pages);
                    memory.half_freed = true;
                    memory.left > 0 && memory.origin == Origin::Created
                });
            }
            Op::MemMap => {
                let para: svm::MemMap = sent.para();
                let origin = objects.memory(device, para.id).map_or(Origin::Created, |memory| memory.origin);
                objects.mappings.insert(para.address, Mapped { size: para.size, device, origin });
            }
            Op::MemUnmap => {
                let para: svm::MemUnmap = sent.para();
                objects.mappings.remove(&para.address);
            }
            Op::MemExport => {
                let (para, made): (svm::MemExport, svm::MemExport) = (sent.para(), answer.para());
                let named = |it: &&mut Memory| it.handle.device == device && it.handle.id == para.id;
                if let Some(memory) = objects.memories.iter_mut().find(named) {
                    memory.origin = Origin::Exported;
                }
                self.shares.push((device, made.share));
            }
            Op::MemImport => {
                let (para, made): (svm::MemImport, svm::MemImport) = (sent.para(), answer.para());
                let svm::MemImport { id, side, page, pages, module, .. } = made;
                let handle = Handle { device, id, side, page, pages, module };
                let origin = Origin::Imported(para.exporter);
                objects.memories.push(Memory { handle, left: pages, half_freed: false, origin });
            }
            Op::AsyncMemcpy => {
                let (para, made): (svm::AsyncMemcpy, svm::AsyncMemcpy) = (sent.para(), answer.para());
                let address = if is_static(para.destination) { para.destination } else { para.source };
                objects.tasks.push((made.task, address));
            }
            Op::MemcpyResultRefresh => {
                let para: svm::AsyncMemcpy = sent.para();
                objects.tasks.retain(|(task, _)| *task != para.task);
            }
            _ => {}
        }
    }
}

/// Whether an address is one of the range that heaps without an mmap of their own lie in.
fn is_static(address: u64) -> bool {
    (svm::SVM_START..svm::DYNAMIC_START).contains(&address)
}

fn place(field: &ascend_ioctl::layout::Field) -> (usize, usize) {
    (field.offset, field.size)
}

/// A session with the first devices.
fn open(host: &Host, devices: u32) -> Result<Session, Failure> {
    let session = Session::host(host)?;
    for device in 0..devices {
        session.setup(device)?;
    }
    Ok(session)
}

/// The other process: makes the calls that it is told to make.
fn follow(host: &Host, devices: u32, link: &mut Link) -> Verdict {
    let session = open(host, devices)?;
    link.send(session.identity()?.tgid as u64)?;
    let list = link.receive()?;
    for index in 0..LISTED {
        let pid = link.receive()? as i32;
        // SAFETY: the page was mapped before the fork, and is larger than the list.
        unsafe { (list as *mut i32).add(index).write(pid) };
    }
    while let Some(op) = Op::ALL.get(link.receive()? as usize) {
        let mut arg = receive(link)?;
        let code = session.svm.raw(*op, &mut arg).err().unwrap_or(0);
        link.send(code as u64)?;
        send(link, &arg)?;
    }
    session.shut_down()
}

fn send(link: &mut Link, arg: &Arg) -> Verdict {
    let words = <[u64; WORDS]>::read_from_bytes(arg.as_bytes()).map_err(|_| Failure::broken("an argument is whole"))?;
    words.iter().try_for_each(|word| link.send(*word))
}

fn receive(link: &mut Link) -> Result<Arg, Failure> {
    let mut words = [0; WORDS];
    for word in &mut words {
        *word = link.receive()?;
    }
    Arg::read_from_bytes(words.as_bytes()).map_err(|_| Failure::broken("an argument is whole"))
}
