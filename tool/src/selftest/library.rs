//! Every public operation of the library, on real or emulated devices.

use super::{Checked, Failure, Run, ensure, sharing};
use ascend_vmm::Bytes;
use ascend_vmm::LogicalId;
use ascend_vmm::copy::{self, Rows};
use ascend_vmm::discovery;
use ascend_vmm::{Device, Error, Kind, Mapping, MemoryKind, Page, ReserveOptions, Session};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The largest allocation, apart from the check of 1 GiB pages.
const SIZE: u64 = 16 * MIB;

/// The suite.
pub(super) fn run(run: &mut Run<'_>, devices: &[u32]) {
    let (survey, options) = (run.survey, run.session);
    for finding in &survey.findings {
        let remark = format!("{finding}. {}", finding.remedy());
        run.add("host", "nothing is wrong with the host", super::Outcome::Skipped(remark));
    }
    let mut session = None;
    run.check("host", "a session opens", || {
        let opened = options.open()?;
        let remark = format!("driver generation {}", opened.generation());
        session = Some(opened);
        Ok(Some(remark))
    });
    let Some(session) = session else {
        run.add("host", "all other checks", super::Outcome::Skipped("they need a session".into()));
        return;
    };
    run.report.driver = Some(session.generation().to_string());
    host(run, &session);
    let mut opened = Vec::new();
    for &device in devices {
        if let Some(device) = one_device(run, &session, LogicalId(device)) {
            opened.push(device);
        }
    }
    for (first, second) in opened.iter().zip(opened.iter().skip(1)) {
        two_devices(run, first, second);
    }
    for device in &opened {
        sharing::check(run, device);
    }
    let first = opened.first().map(Device::id);
    drop(opened);
    run.check("host", "the session closes and leaves nothing in the driver", || Ok(session.close().map(|()| None)?));
    run.check("host", "a session opens again in the same process", || {
        let session = options.open()?;
        let memory = first.map(|id| session.device(id)?.create(2 * MIB)).transpose()?;
        drop(memory);
        session.close()?;
        Ok(None)
    });
}

fn host(run: &mut Run<'_>, session: &Session) {
    run.check("host", "a second session in the process is refused with an explanation", || match Session::open() {
        Err(Error::SessionOpen) => Ok(None),
        Err(other) => Err(Failure::Failed(format!("refused, but with another error: {other}"))),
        Ok(_) => Err(Failure::Failed("it was opened".into())),
    });
    run.check("host", "host memory is created, mapped, and accessed by the CPU", || {
        let memory = session.host()?.create(2 * MIB)?;
        let mapping = session.reserve(2 * MIB)?.map(0, &memory)?;
        let view = mapping.host_view()?;
        view.write(4096, b"by the CPU")?;
        let mut text = [0; 10];
        mapping.read(4096, &mut text)?;
        ensure(&text == b"by the CPU", || format!("a copy read {text:?}"))?;
        view.store_u64(8, 42)?;
        ensure(view.load_u8(8)? == 42, || "the store is not visible".into())?;
        Ok(None)
    });
    run.check("host", "addresses are reserved with an alignment and at a given address, and freed", || {
        let aligned = session.reserve_with(2 * MIB, &ReserveOptions::default().alignment(GIB))?;
        let address = aligned.address();
        ensure(address % GIB == 0, || format!("{address:#x} is not aligned to 1 GiB"))?;
        aligned.free()?;
        let placed = session.reserve_with(4 * MIB, &ReserveOptions::default().address(address))?;
        ensure(placed.address() == address, || format!("{:#x} instead of {address:#x}", placed.address()))?;
        let taken = session.reserve_with(2 * MIB, &ReserveOptions::default().address(address));
        ensure(taken.is_err(), || "an address was reserved twice".into())?;
        placed.free()?;
        Ok(None)
    });
    run.check("host", "invalid sizes are refused before any system call", || {
        for size in [0, 1, 2 * MIB + 1, u64::MAX] {
            let refused = session.reserve(size);
            ensure(matches!(refused, Err(Error::Invalid(_))), || format!("reserve({size}): {refused:?}"))?;
        }
        Ok(None)
    });
}

/// The checks of one device. Returns the device if it could be opened.
fn one_device(run: &mut Run<'_>, session: &Session, id: LogicalId) -> Option<Device> {
    let group = format!("device {id}");
    let mut opened = None;
    run.check(&group, "the device opens", || {
        let device = session.device(id)?;
        let process = if device.device_process().is_some() {
            "with a device process of ours"
        } else {
            "without a device process of ours"
        };
        let remark = format!("{process}; {:?}", device.capabilities());
        opened = Some(device);
        Ok(Some(remark))
    });
    let Some(device) = opened else {
        run.add(&group, "all other checks of it", super::Outcome::Skipped("they need the open device".into()));
        return None;
    };
    let free = device.memory_info(MemoryKind::Hbm).map(|info| info.huge_free);
    run.check(&group, "its memory sizes are reported", || {
        let info = device.memory_info(MemoryKind::Hbm)?;
        ensure(info.huge_free <= info.huge_total, || format!("{info:?}"))?;
        Ok(Some(format!(
            "{} of {} free in 2 MiB pages",
            Bytes(info.huge_free).rounded(),
            Bytes(info.huge_total).rounded()
        )))
    });
    // On a busy machine, the little memory that is left is for others.
    if free.is_ok_and(|free| free < 16 * SIZE) {
        run.check(&group, "memory can be used", || {
            Err(Failure::Skipped(format!("less than {} is free", Bytes(16 * SIZE).rounded())))
        });
        return Some(device);
    }
    memory(run, &group, &device);
    mappings(run, &group, &device);
    copies(run, &group, &device);
    Some(device)
}

fn memory(run: &mut Run<'_>, group: &str, device: &Device) {
    run.check(group, "memory in 2 MiB pages is created, accounted and released", || {
        let free = || device.memory_info(MemoryKind::Hbm).map(|info| info.huge_free);
        let before = free()?;
        let memory = device.create(SIZE)?;
        let during = free()?;
        memory.free()?;
        // Other processes may allocate at the same time, so the numbers are reported and not
        // compared.
        Ok(Some(format!(
            "free: {} before, {} while allocated, {} after",
            Bytes(before).rounded(),
            Bytes(during).rounded(),
            Bytes(free()?).rounded()
        )))
    });
    run.check(group, "memory in 1 GiB pages is created and released", || {
        if !device.capabilities().giant_pages {
            return Err(Failure::Skipped("the device has no 1 GiB pages".into()));
        }
        let info = device.memory_info(MemoryKind::Hbm)?;
        if info.giant_free < 4 * GIB {
            return Err(Failure::Skipped(format!("only {} is free in 1 GiB pages", Bytes(info.giant_free).rounded())));
        }
        let memory = device.create_with(GIB, Kind { page: Page::Giant, ..Kind::default() })?;
        let mapping = device.session().reserve_with(GIB, &ReserveOptions::default().alignment(GIB))?.map(0, &memory)?;
        mapping.write(GIB - 4, b"last")?;
        mapping.unmap()?;
        memory.free()?;
        Ok(None)
    });
    run.check(group, "a request for more memory than the device has is reported as out of memory", || {
        let total = device.memory_info(MemoryKind::Hbm)?.huge_total;
        let size = (total / (2 * MIB) + 1) * 2 * MIB;
        match device.create(size) {
            Err(Error::OutOfMemory(error)) => Ok(Some(error.to_string())),
            Err(other) => Err(Failure::Failed(format!("refused, but with another error: {other}"))),
            Ok(_) => Err(Failure::Failed(format!("{} were allocated", Bytes(size).rounded()))),
        }
    });
    run.check(group, "invalid sizes are refused before any system call", || {
        for size in [0, 1, 3 * MIB, u64::MAX] {
            let refused = device.create(size);
            ensure(matches!(refused, Err(Error::Invalid(_))), || format!("create({size}): {refused:?}"))?;
        }
        Ok(None)
    });
}

fn mappings(run: &mut Run<'_>, group: &str, device: &Device) {
    let session = device.session();
    run.check(group, "data that is written is read back", || {
        let mapping = mapped(device, SIZE)?;
        let data = pattern(SIZE as usize, 1);
        mapping.write(0, &data)?;
        let mut back = vec![0; data.len()];
        mapping.read(0, &mut back)?;
        same(&back, &data)?;
        mapping.read(4097, &mut back[..1000])?;
        same(&back[..1000], &data[4097..5097])?;
        Ok(Some(Bytes(SIZE).rounded()))
    });
    run.check(group, "several memories are mapped next to each other in one reservation", || {
        let reservation = session.reserve(8 * MIB)?;
        let mappings = (0..4)
            .map(|index| reservation.map(index * 2 * MIB, &device.create(2 * MIB)?))
            .collect::<ascend_vmm::Result<Vec<_>>>()?;
        let data = pattern(8 * MIB as usize, 2);
        reservation.slice(0, 8 * MIB)?.write(&data)?;
        for (index, mapping) in mappings.iter().enumerate() {
            let mut back = vec![0; 2 * MIB as usize];
            mapping.read(0, &mut back)?;
            same(&back, &data[index * back.len()..][..back.len()])?;
        }
        Ok(None)
    });
    run.check(group, "memory that is mapped twice has the same contents at both addresses", || {
        let memory = device.create(2 * MIB)?;
        let reservation = session.reserve(4 * MIB)?;
        let (one, other) = (reservation.map(0, &memory)?, reservation.map(2 * MIB, &memory)?);
        one.write(77, b"same")?;
        let mut text = [0; 4];
        other.read(77, &mut text)?;
        same(&text, b"same")?;
        Ok(None)
    });
    run.check(group, "memory that is mapped again at the same address keeps its contents", || {
        let memory = device.create(2 * MIB)?;
        let reservation = session.reserve(2 * MIB)?;
        let mapping = reservation.map(0, &memory)?;
        let address = mapping.address();
        mapping.write(0, b"kept")?;
        mapping.unmap()?;
        let again = reservation.map(0, &memory)?;
        ensure(again.address() == address, || format!("{:#x} instead of {address:#x}", again.address()))?;
        let mut text = [0; 4];
        again.read(0, &mut text)?;
        same(&text, b"kept")?;
        Ok(None)
    });
    run.check(group, "memory is found by an address inside its mapping", || {
        let mapping = mapped(device, 4 * MIB)?;
        let inside = mapping.address() + 3 * MIB;
        let found = session.memory_at(inside).ok_or_else(|| Failure::Failed("nothing was found".into()))?;
        ensure(found.is_same(&mapping.memory()), || "other memory was found".into())?;
        ensure(session.mapping_at(inside) == Some((mapping.address(), 4 * MIB)), || "another range was found".into())?;
        drop(found);
        mapping.unmap()?;
        ensure(session.memory_at(inside).is_none(), || "it is still found after unmapping".into())?;
        Ok(None)
    });
    run.check(group, "a mapping outside its reservation or over another mapping is refused", || {
        let reservation = session.reserve(4 * MIB)?;
        let memory = device.create(4 * MIB)?;
        for offset in [2 * MIB, 4 * MIB, 1, u64::MAX] {
            ensure(reservation.map(offset, &memory).is_err(), || format!("it was mapped at offset {offset:#x}"))?;
        }
        let _mapping = reservation.map(0, &memory)?;
        ensure(reservation.map(2 * MIB, &device.create(2 * MIB)?).is_err(), || {
            "it was mapped over another mapping".into()
        })?;
        Ok(None)
    });
    run.check(group, "the CPU accesses device memory", || {
        if !device.capabilities().cpu_access_huge {
            return Err(Failure::Skipped("the device does not offer it".into()));
        }
        let mapping = mapped(device, 2 * MIB)?;
        let view = mapping.host_view()?;
        mapping.write(0, b"by a copy")?;
        let mut text = [0; 9];
        view.read(0, &mut text)?;
        same(&text, b"by a copy")?;
        view.write(4096, b"by the CPU")?;
        let mut text = [0; 10];
        mapping.read(4096, &mut text)?;
        same(&text, b"by the CPU")?;
        Ok(None)
    });
}

fn copies(run: &mut Run<'_>, group: &str, device: &Device) {
    run.check(group, "memory is filled", || {
        let mapping = mapped(device, 2 * MIB)?;
        mapping.fill(0, 2 * MIB, 0x5a)?;
        mapping.fill(100, 10, 0xa5)?;
        let mut back = vec![0; 2 * MIB as usize];
        mapping.read(0, &mut back)?;
        let mut wanted = vec![0x5a; back.len()];
        wanted[100..110].fill(0xa5);
        same(&back, &wanted)?;
        Ok(None)
    });
    run.check(group, "memory is copied to other memory of the device", || copy_between(device, device, 3));
    run.check(group, "rows are copied in and out", || {
        let mapping = mapped(device, 2 * MIB)?;
        mapping.fill(0, 2 * MIB, 0)?;
        let rows = Rows { width: 100, height: 50, pitch: 512, buffer_pitch: 128 };
        let data = pattern(50 * 128, 4);
        let slice = mapping.slice(0, 50 * 512)?;
        slice.write_rows(&rows, &data)?;
        let mut back = vec![0; data.len()];
        slice.read_rows(&rows, &mut back)?;
        for row in 0..50 {
            same(&back[row * 128..][..100], &data[row * 128..][..100])?;
        }
        let mut between = [1; 412];
        mapping.read(100, &mut between)?;
        ensure(between == [0; 412], || "bytes between the rows were changed".into())?;
        Ok(None)
    });
    run.check(group, "many pieces are copied with one call", || {
        let mapping = mapped(device, 2 * MIB)?;
        let data = pattern(64 * 1000, 5);
        let writes = data
            .chunks(1000)
            .enumerate()
            .map(|(index, chunk)| Ok((mapping.slice(index as u64 * 4096, 1000)?, chunk)))
            .collect::<ascend_vmm::Result<Vec<_>>>()?;
        copy::write_batch(&writes)?;
        let mut back = vec![0; data.len()];
        let mut reads = back
            .chunks_mut(1000)
            .enumerate()
            .map(|(index, chunk)| Ok((mapping.slice(index as u64 * 4096, 1000)?, chunk)))
            .collect::<ascend_vmm::Result<Vec<_>>>()?;
        copy::read_batch(&mut reads)?;
        drop(reads);
        same(&back, &data)?;
        Ok(None)
    });
    run.check(group, "memory is copied asynchronously", || {
        let mapping = mapped(device, SIZE)?;
        let data = pattern(SIZE as usize, 6);
        let written = mapping.write_async(0, data.clone())?.wait()?;
        same(&written, &data)?;
        let back = mapping.read_async(0, vec![0; data.len()])?.wait()?;
        same(&back, &data)?;
        Ok(None)
    });
    run.check(group, "copies beyond the end are refused before any system call", || {
        let mapping = mapped(device, 2 * MIB)?;
        for (offset, size) in [(2 * MIB, 1), (2 * MIB - 1, 2), (u64::MAX, 1)] {
            let refused = mapping.write(offset, &vec![0; size]);
            ensure(matches!(refused, Err(Error::Invalid(_))), || format!("{size} bytes at {offset:#x}: {refused:?}"))?;
        }
        Ok(None)
    });
}

fn two_devices(run: &mut Run<'_>, first: &Device, second: &Device) {
    let group = format!("devices {} and {}", first.id(), second.id());
    run.check(&group, "memory is copied from one device to the other", || copy_between(first, second, 7));
    run.check(&group, "the second device gets access to memory of the first", || {
        if !discovery::can_access(second.id(), first.id())? {
            return Err(Failure::Skipped("the topology does not allow it".into()));
        }
        let mapping = mapped(first, 2 * MIB)?;
        second.enable_peer_access(first)?;
        mapping.grant(second)?;
        ensure(mapping.is_granted(second)?, || "the kernel has no record of the access".into())?;
        Ok(None)
    });
    run.check(&group, "memory of both devices in one reservation is refused", || {
        let reservation = first.session().reserve(4 * MIB)?;
        let _mapping = reservation.map(0, &first.create(2 * MIB)?)?;
        ensure(reservation.map(2 * MIB, &second.create(2 * MIB)?).is_err(), || "it was mapped".into())?;
        Ok(None)
    });
}

/// Copies from new memory of one device to new memory of another, or of the same.
fn copy_between(source: &Device, target: &Device, seed: u64) -> Checked {
    let (from, to) = (mapped(source, SIZE)?, mapped(target, SIZE)?);
    let data = pattern(SIZE as usize, seed);
    from.write(0, &data)?;
    to.slice(0, SIZE)?.copy_from(&from.slice(0, SIZE)?)?;
    let mut back = vec![0; data.len()];
    to.read(0, &mut back)?;
    same(&back, &data)?;
    Ok(None)
}

/// New memory, mapped at new addresses.
pub(super) fn mapped(device: &Device, size: u64) -> ascend_vmm::Result<Mapping> {
    let memory = device.create(size)?;
    device.session().reserve(size)?.map(0, &memory)
}

/// Random bytes, the same in each page except for the page's number at its start. A swapped page or
/// a shift by some bytes gives other contents.
pub(super) fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut page = Vec::with_capacity(4096);
    while page.len() < 4096 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        page.extend_from_slice(&state.to_le_bytes());
    }
    let mut bytes = Vec::with_capacity(length + page.len());
    while bytes.len() < length {
        page[..8].copy_from_slice(&bytes.len().to_le_bytes());
        bytes.extend_from_slice(&page);
    }
    bytes.truncate(length);
    bytes
}

/// Fails with the first difference, if there is one.
pub(super) fn same(got: &[u8], wanted: &[u8]) -> Result<(), Failure> {
    if got == wanted {
        return Ok(());
    }
    ensure(got.len() == wanted.len(), || format!("{} bytes instead of {}", got.len(), wanted.len()))?;
    match got.iter().zip(wanted).position(|(got, wanted)| got != wanted) {
        None => Ok(()),
        Some(at) => Err(Failure::Failed(format!("byte {at:#x} is {:#04x} and should be {:#04x}", got[at], wanted[at]))),
    }
}
