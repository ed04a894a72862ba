//! The host that the suite runs on, found by the queries that any client must make.

use crate::manager::Manager;
use crate::rule::{Failure, Judge};
use crate::session::Svm;
use ascend_ioctl::svm;
use ascend_ioctl::{Generation, davinci, devmng, hdc, uda, urd};
use std::fmt::Write;

/// The host and its driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Generation of the driver.
    pub generation: Generation,
    /// Physical id of each logical device.
    pub physical: Vec<u32>,
    /// Whether the devices are attached by HCCS; if not, by PCI Express.
    pub hccs: bool,
    /// Whether the caller sees the host's device table.
    pub admin: bool,
    /// Whether the driver's files are character devices, as those of a kernel driver are.
    pub own_files: bool,
    /// Whether `/dev/hisi_hdc` can be opened.
    pub hdc: bool,
    /// Whether firmware keeps the state of device 0.
    pub firmware: bool,
    /// Super-pod id of device 0.
    pub sdid: Option<u32>,
    /// Whether rules may use up a whole resource.
    pub exhaustion: bool,
    /// Whether rules may make very many calls.
    pub patience: bool,
}

impl Host {
    /// Examines the host; `None` if it has no driver or no device.
    pub fn find() -> Result<Option<Host>, Failure> {
        if crate::manager::open(davinci::PATH, libc::O_RDWR | libc::O_CLOEXEC).map(crate::manager::close).is_err() {
            return Ok(None);
        }
        let table = Manager::open()?;
        match table.bind(davinci::module::UDA) {
            // There is a file of that name, but no driver.
            Err(libc::ENOTTY) => return Ok(None),
            answer => answer.granted()?,
        };
        let mut user = uda::UserInfo::default();
        table.command(&uda::GET_USER_INFO, &mut user).granted()?;
        if user.admin == 0 {
            // A container's table has the nodes that were opened before it was made; listing the
            // devices first would drop them.
            let nodes = (0..user.max_physical).filter(|&id| opens(id)).count() as u32;
            table.command(&uda::SETUP_DEV_TABLE, &mut uda::SetupTable { devices: nodes }).granted()?;
        } else {
            let _ = table.command(&uda::SETUP_DEV_TABLE, &mut uda::SetupTable { devices: user.max_devices });
        }
        let physical: Vec<u32> = list(&table)?.iter().map(|device| u32::from(device.physical)).collect();
        let file = Manager::open()?;
        if physical.is_empty() || file.bind(davinci::module::SVM).is_err() {
            return Ok(None);
        }
        let mut svm = Svm { file, generation: Generation::NEWEST, sdid: 0 };
        let segments = recognise(&mut svm)?;
        let generation = svm.generation;
        let hccs = match segments.last() {
            Some(last) if generation.delta().host_pin => last.start == svm::HOST_PIN_START_HCCS,
            _ => connected_by_hccs(),
        };
        Ok(Some(Host {
            generation,
            physical,
            hccs,
            admin: user.admin == 1,
            own_files: is_character_device(),
            hdc: crate::manager::open(hdc::PATH, libc::O_RDWR | libc::O_CLOEXEC).map(crate::manager::close).is_ok(),
            firmware: firmware(),
            sdid: sdid(),
            exhaustion: false,
            patience: false,
        }))
    }

    /// A description for people.
    pub fn describe(&self) -> String {
        format!(
            "driver generation {}, {} device{} on {}",
            self.generation,
            self.physical.len(),
            if self.physical.len() == 1 { "" } else { "s" },
            if self.hccs { "HCCS" } else { "PCI Express" },
        )
    }

    /// As one line of text, to return it from the process that examined the host.
    pub(crate) fn to_line(&self) -> String {
        let mut line = format!(
            "{} {} {} {} {} {} {}",
            self.generation,
            self.hccs,
            self.admin,
            self.own_files,
            self.hdc,
            self.firmware,
            self.sdid.map_or("-".to_string(), |sdid| sdid.to_string()),
        );
        for id in &self.physical {
            let _ = write!(line, " {id}");
        }
        line
    }

    pub(crate) fn from_line(line: &str) -> Option<Host> {
        let mut words = line.split(' ');
        Some(Host {
            generation: words.next()?.parse().ok()?,
            hccs: words.next()?.parse().ok()?,
            admin: words.next()?.parse().ok()?,
            own_files: words.next()?.parse().ok()?,
            hdc: words.next()?.parse().ok()?,
            firmware: words.next()?.parse().ok()?,
            sdid: words.next()?.parse().ok(),
            physical: words.map(|word| word.parse().ok()).collect::<Option<_>>()?,
            exhaustion: false,
            patience: false,
        })
    }
}

/// The devices in the caller's table, without a host's virtual devices.
pub fn list(table: &Manager) -> Result<Vec<uda::LogicalDevice>, Failure> {
    let mut array = vec![uda::LogicalDevice::default(); 100];
    let mut arg = uda::DeviceList { start: 0, end: 100, array: array.as_mut_ptr() as u64 };
    table.command(&uda::GET_DEV_LIST, &mut arg).granted()?;
    array.retain(uda::LogicalDevice::valid);
    Ok(array)
}

fn opens(id: u32) -> bool {
    let node = format!("/dev/davinci{id}");
    crate::manager::open(&node, libc::O_RDONLY | libc::O_CLOEXEC).map(crate::manager::close).is_ok()
}

/// Finds the generation and sets it in `svm`; returns the driver's segments. GET_MMAP_INFO needs no
/// session, and its number and its segments together differ between generations.
fn recognise(svm: &mut Svm) -> Result<Vec<svm::Segment>, Failure> {
    let mut seen = Vec::new();
    for generation in Generation::ALL.into_iter().rev() {
        svm.generation = generation;
        let answer = svm.segments(16);
        if let Ok(segments) = &answer {
            let delta = generation.delta();
            // The host-pin segment is added when the first device comes up.
            match segments.strip_prefix(delta.segments) {
                Some([]) => return answer.granted(),
                Some([_]) if delta.host_pin => return answer.granted(),
                _ => {}
            }
        }
        seen.push(match answer {
            Ok(segments) => format!("{} segments with the number of {generation}", segments.len()),
            Err(code) => format!("{} with the number of {generation}", crate::rule::errno_name(code)),
        });
    }
    Err(Failure::broken(format!("unknown driver generation: GET_MMAP_INFO gives {}", seen.join(", "))))
}

/// Whether the driver's files are devices. Those of the emulated driver are files in memory, which
/// have seals.
fn is_character_device() -> bool {
    let Ok(file) = Manager::open() else { return false };
    // SAFETY: takes integers.
    unsafe { libc::fcntl(file.fd(), libc::F_GET_SEALS) < 0 }
}

/// The attachment as GET_DEVINFO reports it: 8.5.0 has no other command for it.
fn connected_by_hccs() -> bool {
    let Ok(file) = Manager::bound(davinci::module::DEVMNG) else { return false };
    let mut info = devmng::DevInfo::default();
    let answer = file.command(&devmng::GET_DEVINFO, &mut info);
    let old: devmng::DevInfo85 = zerocopy::FromBytes::read_from_prefix(zerocopy::IntoBytes::as_bytes(&info))
        .map_or_else(|_| devmng::DevInfo85::default(), |(old, _)| old);
    answer == Ok(0) && old.connect_type == 1
}

/// Whether the memory that firmware shares with the host holds state and health of device 0. The
/// driver reports health only if the memory's magic number and version are right, too.
fn firmware() -> bool {
    let Ok(file) = Manager::bound(davinci::module::DEVMNG) else { return false };
    let mut words = [0u32; 64];
    let mut health = devmng::Health::default();
    file.command(&devmng::DEVICE_STATUS, &mut words).is_ok()
        && file.command(&devmng::GET_DEVICE_HEALTH_STATUS, &mut health).is_ok()
}

/// The super-pod id of device 0.
fn sdid() -> Option<u32> {
    let file = Manager::bound(davinci::module::URD).ok()?;
    let mut spod = urd::SpodInfo::default();
    let mut input = urd::DeviceInfoIn {
        device: 0,
        sub_command: 1,
        buffer: std::ptr::from_mut(&mut spod) as u64,
        buffer_size: size_of::<urd::SpodInfo>() as u32,
        ..Default::default()
    };
    let mut output = urd::DeviceInfoOut::default();
    let mut arg = urd::CallArg {
        key: urd::CallKey {
            main: urd::SPOD_INFO.main,
            sub: urd::SPOD_INFO.sub,
            filter: urd::SPOD_INFO.filter.as_ptr() as u64,
            filter_length: urd::SPOD_INFO.filter.len() as u32,
            ..Default::default()
        },
        buffers: urd::CallBuffers {
            input: std::ptr::from_mut(&mut input) as u64,
            input_length: size_of_val(&input) as u32,
            output: std::ptr::from_mut(&mut output) as u64,
            output_length: size_of_val(&output) as u32,
            ..Default::default()
        },
        ..Default::default()
    };
    (file.command(&urd::CALL, &mut arg) == Ok(0)).then_some(spod.sdid)
}
