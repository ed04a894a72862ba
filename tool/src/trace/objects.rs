//! What a program holds in the driver: files, memory, mappings, shares, sessions. Each is made by
//! one call and released by another, or left to the driver when its file is closed.

use super::decode;
use super::field::fields;
use ascend_emulator::record::Record;
use ascend_ioctl::{Generation, svm};
use ascend_vmm::Bytes;
use std::collections::BTreeMap;
use std::fmt;

/// The kind of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ObjectKind {
    /// An open file of the driver.
    File,
    /// A device in use by a session.
    Device,
    /// A range of addresses with a purpose.
    Heap,
    /// Addresses, and in ordinary heaps the memory behind them.
    Addresses,
    /// Physical memory.
    Memory,
    /// Physical memory of another process.
    Import,
    /// Physical memory at an address.
    Mapping,
    /// Physical memory that others may import.
    Share,
    /// Host memory that devices may use.
    Registration,
    /// A name of memory.
    Name,
    /// A session with a daemon on a device.
    Session,
}

impl ObjectKind {
    fn noun(self) -> &'static str {
        match self {
            ObjectKind::File => "open file",
            ObjectKind::Device => "use of device",
            ObjectKind::Heap => "heap",
            ObjectKind::Addresses => "address range",
            ObjectKind::Memory => "physical memory",
            ObjectKind::Import => "imported memory",
            ObjectKind::Mapping => "mapping",
            ObjectKind::Share => "share",
            ObjectKind::Registration => "registered host memory",
            ObjectKind::Name => "name of memory",
            ObjectKind::Session => "HDC session",
        }
    }
}

/// Identifies a living object: the file that it belongs to, its kind, and its name there.
type Key = (u64, ObjectKind, String);

/// An object and its life.
#[derive(Debug, Clone)]
pub struct Object {
    /// Its kind.
    pub kind: ObjectKind,
    /// Its process.
    pub pid: i32,
    /// Its device by the number that the process uses, or 65 for the host.
    pub device: Option<u32>,
    /// Bytes.
    pub size: u64,
    /// Bytes of device or host memory that exist because of it.
    pub resident: u64,
    /// What it is called: a handle, an address, a path.
    pub name: String,
    /// When it was made, in microseconds.
    pub born: u64,
    /// The call that made it, counted from 1.
    pub line: u64,
    /// When it was released.
    pub died: Option<u64>,
    /// The driver released it, because its file was closed or its device was.
    pub left: bool,
    /// Another object that it does not outlive.
    parent: Option<String>,
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} {}", self.kind.noun(), self.name)?;
        if self.size != 0 {
            write!(f, ", {}", Bytes(self.size).rounded())?;
        }
        match self.device {
            Some(svm::HOST_ID) => f.write_str(" on the host")?,
            Some(device) if self.kind != ObjectKind::Device => write!(f, " on device {device}")?,
            _ => {}
        }
        write!(f, ", of process {}, from call {} at {:.6} s", self.pid, self.line, self.born as f64 / 1e6)
    }
}

/// All objects of a trace.
#[derive(Default)]
pub struct Objects {
    /// Every object that ever was, in the order of making.
    pub all: Vec<Object>,
    alive: BTreeMap<Key, usize>,
    line: u64,
    now: u64,
}

/// The command that populates addresses with memory.
const POPULATE: u32 = svm::Advice::POPULATE.bits();

impl Objects {
    /// Learns from a call. Must see every call, in order.
    pub fn observe(&mut self, record: &Record, module: &str, generation: Generation) {
        self.line += 1;
        self.now = record.at.map_or(self.now, |at| self.now.max(at.saturating_add(record.us)));
        if record.errno.is_some() || record.unfinished {
            return;
        }
        let Some(file) = record.file else { return };
        match record.call {
            "open" | "found" => {
                let name = format!("{file} ({})", super::name(record.path.as_deref().unwrap_or("?").as_bytes()));
                self.born(record, file, ObjectKind::File, name, None, 0);
            }
            "close" => self.closed(file),
            "ioctl" => self.command(record, module, generation, file),
            _ => {}
        }
    }

    fn closed(&mut self, file: u64) {
        // A file is closed by its program, or by its end; what it held is left to the driver.
        let held: Vec<Key> = self.alive.keys().filter(|(of, ..)| *of == file).cloned().collect();
        for key in held {
            let left = key.1 != ObjectKind::File;
            self.died(&key, left);
        }
    }

    fn born(&mut self, record: &Record, file: u64, kind: ObjectKind, name: String, device: Option<u32>, size: u64) {
        let resident = if matches!(kind, ObjectKind::Memory) { size } else { 0 };
        let object = Object {
            kind,
            pid: record.pid,
            device,
            size,
            resident,
            name: name.clone(),
            born: self.now,
            line: self.line,
            died: None,
            left: false,
            parent: None,
        };
        let key = (file, kind, name);
        self.died(&key, false);
        self.alive.insert(key, self.all.len());
        self.all.push(object);
    }

    fn died(&mut self, key: &Key, left: bool) {
        let Some(index) = self.alive.remove(key) else { return };
        let object = &mut self.all[index];
        (object.died, object.left) = (Some(self.now), left);
        let is_child = |index: &usize| self.all[*index].parent.as_deref() == Some(&key.2);
        let children: Vec<Key> = self
            .alive
            .iter()
            .filter(|(it, index)| it.0 == key.0 && is_child(index))
            .map(|(it, _)| it.clone())
            .collect();
        for child in children {
            self.died(&child, left);
        }
    }

    fn command(&mut self, record: &Record, module: &str, generation: Generation, file: u64) {
        let (before, after) = decode::argument(record, module, generation);
        let fields = fields(generation, module, decode::request(record));
        let get = |bytes: &[u8], name: &str| {
            fields.iter().find(|field| field.name == name).and_then(|field| field.number(bytes)).unwrap_or(0)
        };
        let (given, answered) = (|name: &str| get(&before, name), |name: &str| get(&after, name));
        let device = given("head.device") as u32;
        let address = |name: &str| format!("{:#x}", get(&before, name));
        // Handles are numbered for each device, and for the host.
        let handle = |side: u64, id: u64| {
            if side == u64::from(svm::SIDE_DEVICE) {
                format!("{id} of device {device}")
            } else {
                format!("{id} of the host")
            }
        };
        let place = |side: u64| Some(if side == u64::from(svm::SIDE_DEVICE) { device } else { svm::HOST_ID });
        let text = |name: &str| {
            let field = fields.iter().find(|field| field.name == name);
            let bytes = field.map_or(&[][..], |field| field.bytes(&after));
            super::name(bytes)
        };
        match (module, record.cmd.unwrap_or_default()) {
            ("SVM", "SETUP_DEVICE") => {
                self.born(record, file, ObjectKind::Device, device.to_string(), Some(device), 0);
            }
            ("SVM", "CLOSE_DEVICE") => {
                let on_device: Vec<Key> = self
                    .alive
                    .iter()
                    .filter_map(|(key, index)| {
                        let object = &self.all[*index];
                        let held = key.0 == file && object.device == Some(device) && object.kind != ObjectKind::Device;
                        held.then(|| key.clone())
                    })
                    .collect();
                for key in on_device {
                    self.died(&key, true);
                }
                self.died(&(file, ObjectKind::Device, device.to_string()), false);
            }
            ("SVM", "UPDATE_HEAP") => {
                let name = given("index").to_string();
                if given("operation") == u64::from(svm::HEAP_ENABLE) {
                    self.born(record, file, ObjectKind::Heap, name, None, given("size"));
                } else {
                    self.died(&(file, ObjectKind::Heap, name), false);
                }
            }
            ("SVM", "ALLOC" | "UVM_ALLOC") => {
                self.born(record, file, ObjectKind::Addresses, address("address"), None, given("size"));
            }
            ("SVM", "FREE_PAGES") => self.died(&(file, ObjectKind::Addresses, address("address")), false),
            ("SVM", "PREFETCH") => self.populate(file, &address("address"), device),
            ("SVM", "ADVISE") if given("advice") as u32 & POPULATE != 0 => {
                self.populate(file, &address("address"), device);
            }
            ("SVM", "MEM_CREATE") => {
                let side = given("side");
                self.born(record, file, ObjectKind::Memory, handle(side, answered("id")), place(side), given("size"));
            }
            ("SVM", "MEM_IMPORT") => {
                let side = answered("side");
                let of_host = given("exporter") == u64::from(svm::HOST_ID);
                let page: u64 = match answered("page") as u32 {
                    svm::PAGE_NORMAL => 4096,
                    // A device counts the 2 MiB pages that its 1 GiB pages consist of.
                    svm::PAGE_GIANT if of_host => svm::GIANT_PAGE,
                    _ => svm::HUGE_PAGE,
                };
                let size = answered("pages").saturating_mul(page);
                self.born(record, file, ObjectKind::Import, handle(side, answered("id")), place(side), size);
            }
            ("SVM", "MEM_RELEASE") => {
                let side = given("side");
                // A device handle is not freed without its number of pages.
                if given("pages") != 0 || side != u64::from(svm::SIDE_DEVICE) {
                    let name = handle(side, given("id"));
                    self.died(&(file, ObjectKind::Memory, name.clone()), false);
                    self.died(&(file, ObjectKind::Import, name), false);
                }
            }
            ("SVM", "MEM_MAP") => {
                self.born(record, file, ObjectKind::Mapping, address("address"), place(given("side")), given("size"));
            }
            ("SVM", "MEM_UNMAP") => self.died(&(file, ObjectKind::Mapping, address("address")), false),
            ("SVM", "MEM_EXPORT") => {
                let memory = handle(given("side"), given("id"));
                self.born(record, file, ObjectKind::Share, answered("share").to_string(), place(given("side")), 0);
                if let Some(share) = self.all.last_mut() {
                    share.parent = Some(memory);
                }
            }
            ("SVM", "REGISTER_DMA") => {
                self.born(record, file, ObjectKind::Registration, address("address"), Some(device), given("size"));
            }
            ("SVM", "UNREGISTER_DMA") => self.died(&(file, ObjectKind::Registration, address("address")), false),
            ("SVM", "MEM_REMOTE_MAP") => {
                self.born(record, file, ObjectKind::Registration, address("src_va"), Some(device), given("size"));
            }
            ("SVM", "MEM_REMOTE_UNMAP") => self.died(&(file, ObjectKind::Registration, address("src_va")), false),
            ("SVM", "IPC_MEM_CREATE") => self.born(record, file, ObjectKind::Name, text("name"), None, given("len")),
            ("SVM", "IPC_MEM_DESTROY") => self.died(&(file, ObjectKind::Name, text("name")), false),
            ("hdc", "CONNECT") => {
                self.born(
                    record,
                    file,
                    ObjectKind::Session,
                    answered("session").to_string(),
                    Some(given("device") as u32),
                    0,
                );
            }
            ("hdc", "CLOSE") => self.died(&(file, ObjectKind::Session, given("session").to_string()), false),
            _ => {}
        }
    }

    /// Addresses of an ordinary heap get memory.
    fn populate(&mut self, file: u64, address: &str, device: u32) {
        let key = (file, ObjectKind::Addresses, address.to_owned());
        if let Some(object) = self.alive.get(&key).map(|index| &mut self.all[*index]) {
            (object.device, object.resident) = (Some(device), object.size);
        }
    }

    /// The objects that no call released: alive now, or left to the driver.
    pub fn unreleased(&self) -> impl Iterator<Item = &Object> {
        self.all.iter().filter(|object| object.died.is_none() || object.left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    fn call<A: svm::Para>(name: &'static str, op: svm::Op, given: &A, answered: &A) -> Record {
        let hex = |para: &A| Some(ascend_emulator::record::hex(svm::Arg::new(1, para).as_bytes()));
        let command = Generation::V26_1.svm(op).unwrap().command;
        Record {
            call: "ioctl",
            file: Some(1),
            pid: 10,
            cmd: Some(name),
            value: Some(format!("{:#x}", command.request())),
            in_hex: hex(given),
            out_hex: hex(answered),
            ..Record::default()
        }
    }

    #[test]
    fn memory_lives_from_its_creation_to_its_release() {
        let given = svm::MemCreate { size: 2 << 20, side: svm::SIDE_DEVICE, ..Default::default() };
        let create = call("MEM_CREATE", svm::Op::MemCreate, &given, &svm::MemCreate { id: 4, ..given });
        let gone = svm::MemRelease { id: 4, side: svm::SIDE_DEVICE, pages: 1, ..Default::default() };
        let release = call("MEM_RELEASE", svm::Op::MemRelease, &gone, &gone);
        let mut objects = Objects::default();
        objects.observe(&create, "SVM", Generation::V26_1);
        assert_eq!(objects.unreleased().count(), 1);
        // With no pages the driver frees nothing.
        let nothing = svm::MemRelease { pages: 0, ..gone };
        let nothing = call("MEM_RELEASE", svm::Op::MemRelease, &nothing, &nothing);
        objects.observe(&nothing, "SVM", Generation::V26_1);
        assert_eq!(objects.unreleased().count(), 1);
        objects.observe(&release, "SVM", Generation::V26_1);
        assert_eq!(objects.unreleased().count(), 0);
        // A release that was refused releases nothing, and a closed file leaves the rest.
        objects.observe(&create, "SVM", Generation::V26_1);
        objects.observe(&Record { errno: Some("EBUSY".into()), ..release }, "SVM", Generation::V26_1);
        objects.observe(&Record { call: "close", file: Some(1), ..Record::default() }, "SVM", Generation::V26_1);
        let left: Vec<String> = objects.unreleased().map(ToString::to_string).collect();
        assert_eq!(
            left,
            ["physical memory 4 of device 1, 2 MiB on device 1, of process 10, from call 4 at 0.000000 s"]
        );
    }
}
