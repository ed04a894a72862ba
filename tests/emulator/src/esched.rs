//! Module `ESCHED`: events between processes of the host and of a device.
//!
//! A process is attached to a device once, and has up to 64 groups there; a thread of a group takes
//! the events that it has subscribed to, in the order of their priority and of their coming. A
//! refusal is a positive number. From the driver's `esched`. Nothing here depends on the memory
//! driver. What a device does with an event is not public: an event for a process of the device is
//! taken if there is one. Messages of the driver's user library are answered, since it waits for
//! them without end.

use crate::caller::{Caller, Outcome};
use crate::driver::FileId;
use crate::machine::Machine;
use ascend_ioctl::Generation;
use ascend_ioctl::command::number;
use ascend_ioctl::esched::{
    self as ioctl, AddGroup, Attach, Attach90, Detach, EventPriority, GotEvent, GroupAnswer, GroupQuestion, MaxEvents,
    QueryInfo, Submit, Subscribe, WaitInput, code,
};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Threads of a group.
const THREADS: u32 = 1024;
/// Priorities of events, and the one that they have at first.
const PRIORITIES: u32 = 3;
const PRIORITY: u32 = 1;
/// The longest message that can be sent. A thread of another process may have less room.
const SENT_LENGTH: u32 = 768;
/// Events that may be sent by one call.
const BATCH: u32 = 128 * 1024;
/// Events that a group keeps; the driver's own limit depends on its memory.
const KEPT: usize = 1024;
/// A time of WAIT that gives the thread's CPU away.
const SWAP_OUT: i32 = -2;
/// No certain thread, no certain device.
const ANY: u32 = u32::MAX;
/// How often a waiting call looks again.
const GLANCE: Duration = Duration::from_millis(2);
/// The event of messages between the driver's user library and device processes.
const DRIVER_MESSAGE: u32 = 24;
/// Messages about addresses that the device process maps.
const MAP_ADDRESSES: u32 = 141;
const UNMAP_ADDRESSES: u32 = 142;
/// Length of an answer (`event_proc_result`).
const REPLY: usize = 40;
/// There is no device.
const NO_DEVICE: i64 = 1;
/// The message is longer than the room for it.
const NOT_MATCHED: i64 = 70;
/// The group is full.
const FULL: i64 = 76;

/// The event of calls of host functions.
pub(crate) const HOST_FUNCTION: u32 = 26;

/// A message to a process of the host from the task scheduler of a device, or from the module
/// `TSDRV`.
#[derive(Debug)]
pub(crate) struct Notice {
    pub device: u32,
    pub pid: i32,
    pub from: i32,
    pub group: u32,
    /// Any, if there is none.
    pub thread: Option<u32>,
    pub event: u32,
    pub sub_event: u32,
    pub message: Vec<u8>,
}

/// An answer: a number other than 0 is a refusal.
type Answer = Result<(), i64>;

#[derive(Debug)]
struct Event {
    number: u32,
    sub: u32,
    thread: u32,
    from: i32,
    message: Vec<u8>,
    sent: u64,
}

#[derive(Debug)]
struct Group {
    name: [u8; 16],
    mode: u32,
    /// Events that each thread takes.
    threads: Vec<u64>,
    most: BTreeMap<u32, u32>,
    events: VecDeque<Event>,
}

/// A process that is attached to a device.
#[derive(Debug, Default)]
struct Process {
    groups: BTreeMap<u32, Group>,
    priorities: BTreeMap<u32, u32>,
}

/// State of the module.
#[derive(Debug, Default)]
pub(crate) struct Esched {
    /// Process and device of each file.
    files: BTreeMap<FileId, (i32, u32)>,
    /// By device and process.
    processes: BTreeMap<(u32, i32), Process>,
}

impl Esched {
    /// OPEN of the module; 0 or a refusal.
    pub fn open(&mut self, machine: &Machine, caller: &Caller, file: FileId, device: u32) -> i64 {
        if self.files.values().any(|it| *it == (caller.tgid, device)) {
            return code::OPEN_FAILED;
        }
        let up = machine.device(device).is_some_and(|it| it.answers());
        if !up || !machine.may_use(caller, device) {
            return code::INVALID_DEVICE;
        }
        self.files.insert(file, (caller.tgid, device));
        0
    }

    /// The last reference to a file is gone.
    pub fn release(&mut self, file: FileId) {
        if let Some((tgid, device)) = self.files.remove(&file) {
            self.processes.remove(&(device, tgid));
        }
    }

    /// How many groups there are.
    pub fn groups(&self) -> usize {
        self.processes.values().map(|process| process.groups.len()).sum()
    }

    /// ioctl(2) on a file that is bound to the module.
    pub fn ioctl(&mut self, machine: &Machine, caller: &Caller, file: FileId, request: u32, arg: u64) -> Outcome {
        let refused = |code: i64| Outcome::Done(Ok(code));
        let Some(&(tgid, device)) = self.files.get(&file) else { return refused(code::FILE) };
        if tgid != caller.tgid {
            return refused(code::FILE);
        }
        if machine.device(device).is_none_or(|device| !device.answers()) {
            return refused(NO_DEVICE);
        }
        let answer = match number(request) {
            1 => read(caller, arg).and_then(|para| self.add_group(device, tgid, &para)),
            2 => read(caller, arg).and_then(|para| self.set_priority(device, tgid, &para)),
            4 => read(caller, arg).and_then(|para| self.subscribe(device, tgid, &para)),
            7 => return self.wait(caller, device, arg),
            8 => self.submit(machine, caller, device, arg),
            9 => self.attach(machine, caller, device, arg),
            10 => read(caller, arg)
                .and_then(|_: Detach| self.processes.remove(&(device, tgid)).map(drop).ok_or(code::NOT_EXIST)),
            11 => read(caller, arg).and_then(|para| self.set_most(device, tgid, &para)),
            12 => self.query(machine, caller, device, arg),
            // The host has no CPUs for it.
            0 => Err(code::INVALID_DEVICE),
            // Traces and the rest.
            3 | 5 | 6 | 13 | 14 | 20 => Err(code::NOT_SUPPORTED),
            _ => Err(code::INNER),
        };
        answer.map_or_else(refused, |()| refused(0))
    }

    fn process(&mut self, device: u32, tgid: i32) -> Result<&mut Process, i64> {
        self.processes.get_mut(&(device, tgid)).ok_or(code::NO_PROCESS)
    }

    fn attach(&mut self, machine: &Machine, caller: &Caller, device: u32, address: u64) -> Answer {
        let tells = machine.config.generation >= Generation::V26_1;
        let mut para = Attach::default();
        if tells {
            para = read(caller, address)?;
        } else {
            read::<Attach90>(caller, address)?;
        }
        let key = (device, caller.tgid);
        if self.processes.contains_key(&key) {
            return Err(code::REPEATED);
        }
        if tells {
            para.time = now();
            write(caller, address, &para)?;
        }
        self.processes.insert(key, Process::default());
        Ok(())
    }

    fn add_group(&mut self, device: u32, tgid: i32, para: &AddGroup) -> Answer {
        let modes = ioctl::GROUP_AI_CPU..=ioctl::GROUP_AI_CPU_EXCLUSIVE;
        let valid = para.group < ioctl::GROUPS && (1..=THREADS).contains(&para.threads);
        if !valid || !para.name.contains(&0) || !modes.contains(&para.mode) {
            return Err(code::PARAMETER);
        }
        let process = self.process(device, tgid)?;
        if process.groups.contains_key(&para.group) {
            return Err(code::GROUP_EXISTS);
        }
        let group = Group {
            name: until_nul(para.name),
            mode: para.mode,
            threads: vec![0; para.threads as usize],
            most: BTreeMap::new(),
            events: VecDeque::new(),
        };
        process.groups.insert(para.group, group);
        Ok(())
    }

    fn set_priority(&mut self, device: u32, tgid: i32, para: &EventPriority) -> Answer {
        if para.priority >= PRIORITIES || para.event >= ioctl::EVENTS {
            return Err(code::PARAMETER);
        }
        self.process(device, tgid)?.priorities.insert(para.event, para.priority);
        Ok(())
    }

    fn subscribe(&mut self, device: u32, tgid: i32, para: &Subscribe) -> Answer {
        if para.group >= ioctl::GROUPS || para.events == 0 {
            return Err(code::PARAMETER);
        }
        let group = self.process(device, tgid)?.groups.get_mut(&para.group).ok_or(code::NO_GROUP)?;
        *group.threads.get_mut(para.thread as usize).ok_or(code::PARAMETER)? = para.events;
        Ok(())
    }

    fn set_most(&mut self, device: u32, tgid: i32, para: &MaxEvents) -> Answer {
        if para.group >= ioctl::GROUPS || para.event >= ioctl::EVENTS || para.number == 0 {
            return Err(code::PARAMETER);
        }
        let group = self.process(device, tgid)?.groups.get_mut(&para.group).ok_or(code::NO_GROUP)?;
        group.most.insert(para.event, para.number);
        Ok(())
    }

    fn query(&mut self, machine: &Machine, caller: &Caller, device: u32, address: u64) -> Answer {
        let para: QueryInfo = read(caller, address)?;
        if para.input[0] == 0 || para.output[0] == 0 {
            return Err(code::PARAMETER);
        }
        if para.kind > ioctl::QUERY_REMOTE_GROUP {
            return Err(code::NOT_SUPPORTED);
        }
        let lengths = [para.input[1] as u32 as usize, para.output[1] as u32 as usize];
        if lengths != [size_of::<GroupQuestion>(), size_of::<GroupAnswer>()] {
            return Err(code::PARAMETER);
        }
        let question: GroupQuestion = read(caller, para.input[0])?;
        if para.kind == ioctl::QUERY_REMOTE_GROUP {
            return Err(if on_device(machine, caller, device, question.pid) { code::UNINIT } else { code::NO_PROCESS });
        }
        if !question.name.contains(&0) {
            return Err(code::PARAMETER);
        }
        let name = until_nul(question.name);
        let groups = &self.process(device, question.pid)?.groups;
        // It stops at the first number without a group.
        let named = (ioctl::FIRST_NAMED..ioctl::GROUPS).map_while(|id| groups.get(&id).map(|group| (id, group)));
        let group = named.into_iter().find(|(_, group)| group.name == name).map(|(id, _)| id);
        write(caller, para.output[0], &GroupAnswer { group: group.ok_or(code::UNINIT)? })
    }

    fn submit(&mut self, machine: &Machine, caller: &Caller, device: u32, address: u64) -> Answer {
        let event = read::<Submit>(caller, address)?.event;
        let length = event.message_length;
        let matching = if event.message == 0 { length == 0 } else { (1..=SENT_LENGTH).contains(&length) };
        if event.group >= ioctl::GROUPS || event.event >= ioctl::EVENTS || !matching {
            return Err(code::PARAMETER);
        }
        let mut message = vec![0; length as usize];
        if length > 0 && caller.memory.read(event.message, &mut message).is_err() {
            return Err(code::COPY);
        }
        if event.engine != ioctl::ENGINE_HOST && event.engine != ioctl::ENGINE_AI_CPU_HOST {
            if !on_device(machine, caller, device, event.pid) {
                return Err(code::NO_PROCESS);
            }
            if event.event == DRIVER_MESSAGE {
                self.answer(device, event.sub_event, event.pid, &message);
            }
            return Ok(());
        }
        if event.count > BATCH {
            return Err(code::PARAMETER);
        }
        let to = if event.device == ANY { device } else { event.device };
        for sent in 0..event.count {
            let one = Event {
                number: event.event,
                sub: event.sub_event,
                thread: event.thread,
                from: caller.tgid,
                message: message.clone(),
                sent: now(),
            };
            if let Err(refused) = self.publish(to, event.pid, event.group, one) {
                if sent == 0 {
                    return Err(refused);
                }
                // Some were sent: it says how many, and succeeds.
                let count = std::mem::offset_of!(Submit, event) + std::mem::offset_of!(ioctl::EventInfo, count);
                return write(caller, address + count as u64, &sent);
            }
        }
        Ok(())
    }

    /// The device process's answer to a message of the driver's user library. The message begins
    /// with the process, group, thread and event that the answer is for (`event_sync_msg`). A
    /// process of the device grants mappings of its addresses, and knows nothing else.
    fn answer(&mut self, device: u32, sub: u32, from: i32, message: &[u8]) {
        let Some((&[a, b, c, d, e, f, g, h], body)) = message.split_first_chunk() else { return };
        let (first, second) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        let known = sub == MAP_ADDRESSES || sub == UNMAP_ADDRESSES;
        let result = if known { 0 } else { code::NOT_SUPPORTED as u32 };
        let mut reply = result.to_le_bytes().to_vec();
        // The address comes back.
        reply.extend(body.iter().take(8));
        reply.resize(REPLY, 0);
        let event = Event {
            number: second >> 14 & 0x3F,
            sub: second >> 20,
            thread: second >> 6 & 0xFF,
            from,
            message: reply,
            sent: now(),
        };
        // Nobody is told if nobody waits.
        let _ = self.publish(device, (first >> 6 & 0x3F_FFFF) as i32, second & 0x3F, event);
    }

    /// Gives a message to the group that it is for. Nobody is told if there is none.
    pub fn deliver(&mut self, notice: Notice) {
        let event = Event {
            number: notice.event,
            sub: notice.sub_event,
            thread: notice.thread.unwrap_or(ANY),
            from: notice.from,
            message: notice.message,
            sent: now(),
        };
        let _ = self.publish(notice.device, notice.pid, notice.group, event);
    }

    /// Gives an event to a group of the host.
    fn publish(&mut self, device: u32, pid: i32, group: u32, event: Event) -> Answer {
        let group = self.process(device, pid)?.groups.get_mut(&group).ok_or(code::UNINIT)?;
        if event.thread != ANY && event.thread as usize >= group.threads.len() {
            return Err(code::PARAMETER);
        }
        if group.mode != ioctl::GROUP_CONTROL_CPU {
            return Err(code::NOT_SUPPORTED);
        }
        if !group.threads.iter().any(|events| events >> event.number & 1 != 0) {
            return Err(code::NO_SUBSCRIBER);
        }
        // More than the group wants of this event are dropped.
        let waiting = group.events.iter().filter(|other| other.number == event.number).count();
        if group.most.get(&event.number).is_some_and(|most| waiting >= *most as usize) {
            return Ok(());
        }
        if group.events.len() >= KEPT {
            return Err(FULL);
        }
        group.events.push_back(event);
        Ok(())
    }

    fn wait(&mut self, caller: &Caller, device: u32, address: u64) -> Outcome {
        let input: WaitInput = match read(caller, address) {
            Ok(input) => input,
            Err(refused) => return Outcome::Done(Ok(refused)),
        };
        let next = self.next(caller.tgid, device, &input);
        let event = match next {
            Ok(Some(event)) => event,
            Err(refused) => return Outcome::Done(Ok(refused)),
            Ok(None) => {
                let until = caller.arrived + Duration::from_millis(input.timeout.max(0) as u64);
                return match input.timeout {
                    0 => Outcome::Done(Ok(code::NO_EVENT)),
                    1.. if until <= Instant::now() => Outcome::Done(Ok(code::WAIT_TIMEOUT)),
                    1.. => Outcome::Wait(until.min(Instant::now() + GLANCE)),
                    _ => Outcome::Wait(Instant::now() + GLANCE),
                };
            }
        };
        let mut got = GotEvent {
            pid: caller.tgid,
            host_pid: event.from,
            group: input.group,
            event: event.number,
            sub_event: event.sub,
            message: input.message,
            published_by_user: event.sent,
            published_by_kernel: event.sent,
            published: event.sent,
            woken: event.sent,
            subscribed: now(),
            ..Default::default()
        };
        if event.message.len() > input.message_length as usize {
            return Outcome::Done(Ok(NOT_MATCHED));
        }
        got.message_length = event.message.len() as u32;
        if caller.memory.write(input.message, &event.message).is_err() {
            return Outcome::Done(Ok(code::INNER));
        }
        let to = address + size_of::<WaitInput>() as u64;
        Outcome::Done(Ok(write(caller, to, &got).err().unwrap_or(0)))
    }

    /// Takes the next event for a thread.
    fn next(&mut self, tgid: i32, device: u32, input: &WaitInput) -> Result<Option<Event>, i64> {
        if (input.message == 0 || input.message_length == 0) && input.timeout != SWAP_OUT
            || input.group >= ioctl::GROUPS
        {
            return Err(code::PARAMETER);
        }
        if input.timeout == SWAP_OUT {
            return Err(code::NOT_SUPPORTED);
        }
        let process = self.process(device, tgid)?;
        let group = process.groups.get_mut(&input.group).ok_or(code::NO_GROUP)?;
        if group.mode != ioctl::GROUP_CONTROL_CPU {
            return Err(code::NOT_SUPPORTED);
        }
        let events = *group.threads.get(input.thread as usize).ok_or(code::PARAMETER)?;
        let is_for =
            |event: &Event| events >> event.number & 1 != 0 && (event.thread == ANY || event.thread == input.thread);
        let urgency = |event: &Event| process.priorities.get(&event.number).copied().unwrap_or(PRIORITY);
        let found = group.events.iter().enumerate().filter(|(_, event)| is_for(event));
        let first = found.min_by_key(|(place, event)| (urgency(event), *place)).map(|(place, _)| place);
        Ok(first.and_then(|place| group.events.remove(place)))
    }
}

/// Whether a process of the device runs for the caller.
fn on_device(machine: &Machine, caller: &Caller, device: u32, pid: i32) -> bool {
    machine.device_process(caller.tgid, device) == Some(pid)
}

/// The name, with nothing after its NUL.
fn until_nul(mut name: [u8; 16]) -> [u8; 16] {
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    name[end..].fill(0);
    name
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
}

fn read<T: FromBytes + IntoBytes>(caller: &Caller, address: u64) -> Result<T, i64> {
    let mut value = T::new_zeroed();
    if address == 0 || caller.memory.read(address, value.as_mut_bytes()).is_err() {
        return Err(code::COPY);
    }
    Ok(value)
}

fn write<T: IntoBytes + Immutable>(caller: &Caller, address: u64, value: &T) -> Answer {
    caller.memory.write(address, value.as_bytes()).map_err(|_| code::COPY)
}
