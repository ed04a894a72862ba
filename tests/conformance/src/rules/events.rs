//! Module `ESCHED`: groups of threads, and the events that they wait for. A refusal is a positive
//! number.

use crate::host::Host;
use crate::manager::{Manager, NOWHERE};
use crate::rule::{Answer, Failure, Judge, Rule, Verdict, equal, rule};
use crate::session::ABSENT;
use ascend_ioctl::Command;
use ascend_ioctl::davinci::module;
use ascend_ioctl::esched::{
    self, AddGroup, Attach, Detach, EventInfo, EventPriority, GroupAnswer, GroupQuestion, QueryInfo, Submit, Subscribe,
    Wait, WaitInput, code,
};

pub const RULES: &[Rule] = &[
    rule!(a_process_opens_the_events_of_a_device_once, Source).decided_by("sched_fop_open, esched_fops.c"),
    rule!(an_absent_device_has_no_events, Source).decided_by("sched_fop_open, esched_fops.c"),
    rule!(unknown_commands_of_events_are_answered_with_7, Source).decided_by("_sched_fop_ioctl, esched_fops.c"),
    rule!(an_argument_that_cannot_be_read_is_answered_with_74, Source).decided_by("copy_from_user_safe, esched_fops.c"),
    rule!(a_process_is_attached_once, Source).decided_by("sched_add_process, esched.c"),
    rule!(a_group_is_made_once, Source).decided_by("sched_proc_add_grp, esched.c"),
    rule!(groups_have_limits, Source).decided_by("sched_proc_add_grp, esched.c"),
    rule!(a_thread_subscribes_in_a_group, Source).decided_by("sched_thread_subscribe_event, esched.c"),
    rule!(a_wait_for_an_event_ends, Source).decided_by("sched_wait_for_publish_event, esched.c"),
    rule!(a_wait_for_an_event_wants_room, Source).decided_by("sched_fop_wait_event, esched_fops.c"),
    rule!(an_event_reaches_its_group, Source).decided_by("sched_publish_event, esched.c"),
    rule!(an_event_without_a_subscriber_is_answered_with_63, Source)
        .decided_by("sched_publish_event_to_non_sched_grp, esched.c"),
    rule!(events_come_by_their_priority, Source).decided_by("sched_get_next_non_sched_event, esched.c"),
    rule!(a_message_that_has_no_room_is_answered_with_70, Source).decided_by("sched_fill_subcribed_event, esched.c"),
    rule!(a_group_is_found_by_its_name, Source).decided_by("sched_query_local_task_gid, esched.c"),
    rule!(groups_end_with_the_file, Source).decided_by("sched_fop_release, esched_fops.c"),
];

/// A file that is bound to the events of device 0.
pub(super) struct Events(Manager);

impl Events {
    fn open(host: &Host) -> Result<Events, Failure> {
        let file = Manager::open()?;
        match file.bind_to(module::ESCHED, host.physical[0]) {
            Err(libc::EINVAL) => Err(Failure::skipped("this host has no events")),
            answer => equal("answer", answer.granted()?, 0).map(|()| Events(file)),
        }
    }

    /// A file of an attached process.
    pub(super) fn attached(host: &Host) -> Result<Events, Failure> {
        let events = Events::open(host)?;
        events.gives(&esched::ATTACH, &mut Attach::default(), 0)?;
        Ok(events)
    }

    /// A command whose answer is known.
    #[track_caller]
    fn gives<T>(&self, command: &Command, argument: &mut T, answer: i64) -> Verdict {
        equal(command.name, i64::from(self.0.command(command, argument).granted()?), answer)
    }

    #[track_caller]
    pub(super) fn group(&self, group: u32, name: &[u8], answer: i64) -> Verdict {
        let mut para = AddGroup { group, mode: esched::GROUP_CONTROL_CPU, threads: 2, ..Default::default() };
        para.name[..name.len()].copy_from_slice(name);
        self.gives(&esched::ADD_GROUP, &mut para, answer)
    }

    #[track_caller]
    pub(super) fn subscribe(&self, group: u32, thread: u32, events: u64, answer: i64) -> Verdict {
        let mut para = Subscribe { group, thread, events, ..Default::default() };
        self.gives(&esched::SUBSCRIBE, &mut para, answer)
    }

    /// Sends an event with a message to a group of this process.
    #[track_caller]
    fn send(&self, group: u32, event: u32, message: &[u8], answer: i64) -> Verdict {
        let event = EventInfo {
            engine: esched::ENGINE_HOST,
            pid: std::process::id() as i32,
            group,
            thread: u32::MAX,
            event,
            sub_event: 5,
            device: u32::MAX,
            message_length: message.len() as u32,
            message: if message.is_empty() { 0 } else { message.as_ptr() as u64 },
            count: 1,
            ..Default::default()
        };
        self.gives(&esched::SUBMIT, &mut Submit { event, ..Default::default() }, answer)
    }

    /// Waits as a thread of a group; the answer, the event and the message.
    pub(super) fn wait(&self, group: u32, thread: u32, timeout: i32, room: u32) -> Answer<(i64, Wait, [u8; 128])> {
        let mut message = [0u8; 128];
        let address = message.as_mut_ptr() as u64;
        let input = WaitInput { group, thread, timeout, message_length: room, message: address, ..Default::default() };
        let mut para = Wait { input, ..Default::default() };
        let answer = self.0.command(&esched::WAIT, &mut para)?;
        let (para, message) = std::hint::black_box((para, message));
        Ok((answer.into(), para, message))
    }

    #[track_caller]
    pub(super) fn waits(&self, group: u32, thread: u32, timeout: i32, answer: i64) -> Verdict {
        equal("WAIT", self.wait(group, thread, timeout, 128).granted()?.0, answer)
    }
}

fn a_process_opens_the_events_of_a_device_once(host: &Host) -> Verdict {
    let events = Events::open(host)?;
    let second = Manager::open()?;
    let open = || second.bind_to(module::ESCHED, host.physical[0]).granted();
    equal("answer", open()?.into(), code::OPEN_FAILED)?;
    drop(events);
    equal("answer", open()?, 0)
}

fn an_absent_device_has_no_events(host: &Host) -> Verdict {
    drop(Events::open(host)?);
    let file = Manager::open()?;
    equal("answer", file.bind_to(module::ESCHED, ABSENT).granted()?.into(), code::INVALID_DEVICE)
}

fn unknown_commands_of_events_are_answered_with_7(host: &Host) -> Verdict {
    let events = Events::open(host)?;
    let arg = [0u64; 64];
    for number in [15, 29, 30, 255] {
        let answer = events.0.request(0xC008_5700 | number, arg.as_ptr() as u64).granted()?;
        equal("answer", answer.into(), code::INNER)?;
    }
    Ok(())
}

fn an_argument_that_cannot_be_read_is_answered_with_74(host: &Host) -> Verdict {
    let events = Events::open(host)?;
    for address in [0, NOWHERE] {
        equal("answer", events.0.command_at(&esched::ADD_GROUP, address).granted()?.into(), code::COPY)?;
    }
    Ok(())
}

fn a_process_is_attached_once(host: &Host) -> Verdict {
    let events = Events::open(host)?;
    events.group(3, b"", code::NO_PROCESS)?;
    events.gives(&esched::DETACH, &mut Detach::default(), code::NOT_EXIST)?;
    events.gives(&esched::ATTACH, &mut Attach::default(), 0)?;
    events.gives(&esched::ATTACH, &mut Attach::default(), code::REPEATED)?;
    events.group(3, b"", 0)?;
    events.gives(&esched::DETACH, &mut Detach::default(), 0)?;
    events.group(3, b"", code::NO_PROCESS)
}

fn a_group_is_made_once(host: &Host) -> Verdict {
    let events = Events::attached(host)?;
    events.group(3, b"", 0)?;
    events.group(3, b"", code::GROUP_EXISTS)?;
    events.group(4, b"", 0)
}

fn groups_have_limits(host: &Host) -> Verdict {
    let events = Events::attached(host)?;
    let good = AddGroup { group: 3, mode: esched::GROUP_CONTROL_CPU, threads: 1, ..Default::default() };
    let wrong = [
        AddGroup { group: 64, ..good },
        AddGroup { threads: 0, ..good },
        AddGroup { threads: 1025, ..good },
        AddGroup { mode: 0, ..good },
        AddGroup { mode: 4, ..good },
        AddGroup { name: [b'x'; 16], ..good },
    ];
    for mut para in wrong {
        events.gives(&esched::ADD_GROUP, &mut para, code::PARAMETER)?;
    }
    let mut good = good;
    events.gives(&esched::ADD_GROUP, &mut good, 0)
}

fn a_thread_subscribes_in_a_group(host: &Host) -> Verdict {
    let events = Events::attached(host)?;
    events.subscribe(3, 0, 1, code::NO_GROUP)?;
    events.group(3, b"", 0)?;
    events.subscribe(64, 0, 1, code::PARAMETER)?;
    events.subscribe(3, 0, 0, code::PARAMETER)?;
    events.subscribe(3, 2, 1, code::PARAMETER)?;
    events.subscribe(3, 1, u64::MAX, 0)
}

fn a_wait_for_an_event_ends(host: &Host) -> Verdict {
    let events = Events::open(host)?;
    events.waits(3, 0, 0, code::NO_PROCESS)?;
    events.gives(&esched::ATTACH, &mut Attach::default(), 0)?;
    events.waits(3, 0, 0, code::NO_GROUP)?;
    events.group(3, b"", 0)?;
    events.subscribe(3, 0, 1 << 24, 0)?;
    events.waits(3, 0, 0, code::NO_EVENT)?;
    events.waits(3, 0, 20, code::WAIT_TIMEOUT)?;
    events.waits(3, 2, 20, code::PARAMETER)?;
    events.waits(3, 0, -2, code::NOT_SUPPORTED)
}

fn a_wait_for_an_event_wants_room(host: &Host) -> Verdict {
    let events = Events::attached(host)?;
    events.group(3, b"", 0)?;
    equal("answer", events.wait(3, 0, 0, 0).granted()?.0, code::PARAMETER)?;
    let mut nowhere =
        Wait { input: WaitInput { group: 3, message_length: 8, ..Default::default() }, ..Default::default() };
    events.gives(&esched::WAIT, &mut nowhere, code::PARAMETER)
}

fn an_event_reaches_its_group(host: &Host) -> Verdict {
    let events = Events::attached(host)?;
    events.group(3, b"", 0)?;
    events.subscribe(3, 1, 1 << 24, 0)?;
    events.send(3, 24, b"hello", 0)?;
    // The other thread has not subscribed.
    events.waits(3, 0, 0, code::NO_EVENT)?;
    let (answer, para, message) = events.wait(3, 1, 1000, 128).granted()?;
    equal("answer", answer, 0)?;
    let pid = std::process::id() as i32;
    equal("pids", (para.event.pid, para.event.host_pid), (pid, pid))?;
    equal("group and event", (para.event.group, para.event.event, para.event.sub_event), (3, 24, 5))?;
    equal("message", &message[..para.event.message_length as usize], b"hello")?;
    events.waits(3, 1, 0, code::NO_EVENT)
}

fn an_event_without_a_subscriber_is_answered_with_63(host: &Host) -> Verdict {
    let events = Events::open(host)?;
    events.send(3, 24, b"", code::NO_PROCESS)?;
    events.gives(&esched::ATTACH, &mut Attach::default(), 0)?;
    events.send(3, 24, b"", code::UNINIT)?;
    events.group(3, b"", 0)?;
    events.send(3, 24, b"", code::NO_SUBSCRIBER)?;
    events.send(64, 24, b"", code::PARAMETER)?;
    events.send(3, 64, b"", code::PARAMETER)?;
    events.send(3, 24, &[0; 769], code::PARAMETER)
}

fn events_come_by_their_priority(host: &Host) -> Verdict {
    let events = Events::attached(host)?;
    events.group(3, b"", 0)?;
    events.subscribe(3, 0, 0b111 << 48, 0)?;
    let priority = |event, priority| EventPriority { event, priority, ..Default::default() };
    events.gives(&esched::SET_EVENT_PRIORITY, &mut priority(50, 0), 0)?;
    events.gives(&esched::SET_EVENT_PRIORITY, &mut priority(48, 2), 0)?;
    events.gives(&esched::SET_EVENT_PRIORITY, &mut priority(48, 3), code::PARAMETER)?;
    events.gives(&esched::SET_EVENT_PRIORITY, &mut priority(64, 0), code::PARAMETER)?;
    for event in [48, 49, 50, 50] {
        events.send(3, event, b"", 0)?;
    }
    for event in [50, 50, 49, 48] {
        equal("event", events.wait(3, 0, 1000, 128).granted()?.1.event.event, event)?;
    }
    Ok(())
}

fn a_message_that_has_no_room_is_answered_with_70(host: &Host) -> Verdict {
    let events = Events::attached(host)?;
    events.group(3, b"", 0)?;
    events.subscribe(3, 0, 1 << 48, 0)?;
    events.send(3, 48, b"longer than 8", 0)?;
    equal("answer", events.wait(3, 0, 1000, 8).granted()?.0, 70)?;
    // The event is gone.
    events.waits(3, 0, 0, code::NO_EVENT)
}

fn a_group_is_found_by_its_name(host: &Host) -> Verdict {
    let events = Events::attached(host)?;
    let find = |name: &[u8], kind: u32| -> Result<(i64, u32), Failure> {
        let mut question = GroupQuestion { pid: std::process::id() as i32, ..Default::default() };
        question.name[..name.len()].copy_from_slice(name);
        let mut found = GroupAnswer { group: 77 };
        let input = [std::ptr::from_ref(&question) as u64, size_of::<GroupQuestion>() as u64];
        let output = [std::ptr::from_mut(&mut found) as u64, size_of::<GroupAnswer>() as u64];
        let mut para = QueryInfo { kind, input, output, ..Default::default() };
        let answer = events.0.command(&esched::QUERY_INFO, &mut para).granted()?;
        Ok((answer.into(), std::hint::black_box(found).group))
    };
    events.group(32, b"one", 0)?;
    events.group(33, b"two", 0)?;
    events.group(35, b"four", 0)?;
    equal("group", find(b"two", esched::QUERY_LOCAL_GROUP)?, (0, 33))?;
    equal("no such name", find(b"three", esched::QUERY_LOCAL_GROUP)?, (code::UNINIT, 77))?;
    // It stops at the first number without a group.
    equal("after a hole", find(b"four", esched::QUERY_LOCAL_GROUP)?, (code::UNINIT, 77))?;
    equal("an unknown question", find(b"two", 2)?, (code::NOT_SUPPORTED, 77))
}

fn groups_end_with_the_file(host: &Host) -> Verdict {
    let events = Events::attached(host)?;
    events.group(3, b"", 0)?;
    drop(events);
    let again = Events::open(host)?;
    again.group(3, b"", code::NO_PROCESS)?;
    again.gives(&esched::ATTACH, &mut Attach::default(), 0)?;
    again.group(3, b"", 0)
}
