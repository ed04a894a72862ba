//! Module `TSDRV`: ids of streams and events, queues, and the tasks that devices carry out.
//!
//! The rules ask for queues that are not mapped, so every driver takes their tasks by SQCQ_SEND.

use super::events::Events;
use crate::host::Host;
use crate::manager::{Manager, NOWHERE};
use crate::peer::Peer;
use crate::rule::{Answer, Failure, Judge, Need, Rule, Verdict, equal, holds, rule};
use crate::session::{ABSENT, MIB2, Session, eventually};
use ascend_ioctl::davinci::module;
use ascend_ioctl::tsdrv::{
    self, HardwareInfo, ID_EVENT, ID_MODEL, ID_NOTIFY, ID_STREAM, QUEUE_SUBMISSION, QueueAlloc, QueueConfig, QueueFree,
    QueueMap, QueueQuery, ReportReceive, ResourceId, TYPE_CALLBACK, TYPE_LOGICAL, TYPE_NORMAL, TaskSend,
};
use ascend_ioctl::{Command, Typed, esched};
use libc::{EEXIST, EFAULT, EINVAL, ENOSPC, EOPNOTSUPP, EPERM, ESHUTDOWN, ESRCH, ETIMEDOUT};

pub const RULES: &[Rule] = &[
    rule!(a_process_opens_the_tasks_of_a_device_once, Source).decided_by("trs_open, trs_fops.c"),
    rule!(an_absent_device_has_no_tasks, Source).decided_by("trs_open, trs_fops.c"),
    rule!(queues_are_mapped_by_a_process_that_has_tasks, Source).decided_by("trs_mmap_open, trs_fops.c"),
    rule!(unknown_commands_of_tasks_are_eopnotsupp, Source).decided_by("trs_ioctl, trs_fops.c"),
    rule!(an_id_is_given_back_once, Source).decided_by("trs_proc_del_res, trs_proc.c"),
    rule!(kinds_of_ids_are_checked, Source).decided_by("ioctl_trs_res_id_comm, trs_fops.c"),
    rule!(ids_in_use_are_counted, Source).decided_by("trs_res_id_used_query, trs_res_mng.c"),
    rule!(only_events_and_notifies_have_registers, Source).decided_by("trs_res_id_reg_offset_query, trs_res_mng.c"),
    rule!(the_scheduler_tells_how_it_is_connected, Source).decided_by("ioctl_trs_hw_info_query, trs_fops.c"),
    rule!(a_logical_queue_has_limits, Source).decided_by("trs_logic_cq_alloc_para_check, trs_logic_cq.c"),
    rule!(a_queue_belongs_to_a_stream_of_the_process, Source).decided_by("trs_hw_sqcq_alloc, trs_hw_sqcq.c"),
    rule!(a_queue_has_tasks_of_64_bytes, Source).decided_by("trs_pair_mode_alloc_para_check, trs_hw_sqcq.c"),
    rule!(a_queue_without_an_address_is_not_mapped, Source).decided_by("trs_sq_remap, trs_sqcq_map.c"),
    rule!(queues_are_freed_in_pairs, Source).decided_by("pair_mode_free_para_check, trs_hw_sqcq.c"),
    rule!(a_stream_is_bound_to_a_queue_of_its_process, Source).decided_by("trs_stream_bind_logic_cq, trs_res_mng.c"),
    rule!(only_queues_of_tasks_have_properties, Source).decided_by("trs_sqcq_query, trs_hw_sqcq.c"),
    rule!(a_paused_queue_is_eshutdown, Source).decided_by("trs_hw_sqcq_send, trs_hw_sqcq.c"),
    rule!(a_stopped_queue_is_eperm, Source).decided_by("trs_chan_send_ex, chan_rxtx.c"),
    rule!(reports_are_waited_for, Source).decided_by("trs_logic_cq_recv, trs_logic_cq.c"),
    rule!(a_copy_without_limit_is_einval, Source)
        .decided_by("tsagent_sqe_update_check_sqe_type, ts_agent_update_sqe.c"),
    rule!(tasks_are_sent_to_queues_of_streams_alone, Source).decided_by("trs_cb_sqcq_send, trs_cb_sqcq.c"),
    rule!(freeing_a_queue_of_host_functions_wakes_its_thread, Source)
        .decided_by("trs_cb_send_event_on_free, trs_cb_sqcq.c"),
    rule!(a_host_function_is_told_to_its_thread, Inferred).decided_by("esched_ccpu_sched_task, esched_drv.c"),
    rule!(a_message_of_a_task_may_name_its_receiver, Inferred)
        .decided_by("esched_restore_mb_user_data, topic_sched_drv.c"),
    rule!(a_host_function_without_a_listener_is_passed_over, Inferred)
        .decided_by("esched_ccpu_sched_task, esched_drv.c"),
    rule!(a_record_of_another_event_fails, Inferred).decided_by("sqe_proc_event, ts_agent_update_sqe.c"),
    rule!(a_reset_of_another_event_fails, Inferred)
        .decided_by("sqe_proc_write_value_check_event_addr, ts_agent_update_sqe.c"),
    rule!(a_copy_task_wants_addresses_of_the_process, Inferred).decided_by("sqe_proc_sdma, ts_agent_update_sqe.c"),
    rule!(a_question_of_the_old_version_gets_all_reports, Source)
        .decided_by("trs_logic_cq_non_match_copy, trs_logic_cq.c"),
    rule!(a_task_that_wants_it_is_reported, Inferred).decided_by("trs_hw_cq_recv, trs_hw_sqcq.c"),
    rule!(a_full_queue_is_enospc, Inferred).decided_by("trs_chan_submit, chan_rxtx.c"),
    rule!(a_stream_waits_for_an_event_of_another, Inferred).decided_by("trs_chan_submit, chan_rxtx.c"),
    rule!(a_notify_wakes_one_wait, Inferred).decided_by("trs_chan_submit, chan_rxtx.c"),
    rule!(a_task_copies_inside_of_a_device, Inferred).decided_by("sqe_proc_sdma, ts_agent_update_sqe.c"),
    rule!(a_task_copies_through_the_link, Inferred)
        .decided_by("sqe_proc_pciedma, ts_agent_update_sqe.c")
        .needs(&[Need::Pcie]),
    rule!(a_task_of_an_unknown_kind_fails, Inferred).decided_by("tsagent_sqe_update, ts_agent_update_sqe.c"),
    rule!(the_tasks_of_a_process_end_with_its_file, Source).decided_by("trs_release_prepare, trs_fops.c"),
    rule!(a_process_that_is_killed_in_a_wait_leaves_no_tasks, Source).decided_by("trs_proc_recycle, trs_proc.c"),
    rule!(an_extension_of_a_queue_that_is_not_there_is_answered_with_its_length, Source)
        .decided_by("trs_hw_sqcq_alloc, trs_hw_sqcq.c"),
];

/// Kinds of tasks.
const TO_PROCESS: u8 = 1;
const PLACEHOLDER: u8 = 3;
const EVENT_RECORD: u8 = 4;
const EVENT_WAIT: u8 = 5;
const NOTIFY_RECORD: u8 = 6;
const NOTIFY_WAIT: u8 = 7;
const WRITE_VALUE: u8 = 8;
const SDMA: u8 = 11;
const PCIE_DMA: u8 = 17;

/// A file that is bound to the tasks of device 0.
struct Tasks(Manager);

impl Tasks {
    fn open(host: &Host) -> Result<Tasks, Failure> {
        let file = Manager::open()?;
        match file.bind_to(module::TSDRV, host.physical[0]) {
            Err(EINVAL) => Err(Failure::skipped("this host has no task scheduler")),
            answer => answer.granted().map(|_| Tasks(file)),
        }
    }

    fn ids(&self, command: &Command, para: &mut ResourceId) -> Answer<i32> {
        self.0.command(command, para)
    }

    fn new_id(&self, kind: i32) -> Result<u32, Failure> {
        let mut para = ResourceId { kind, ..Default::default() };
        self.ids(&tsdrv::RES_ID_ALLOC, &mut para).granted()?;
        Ok(std::hint::black_box(para).id)
    }

    fn ask(&self, command: &Typed<ResourceId>, kind: i32, id: u32) -> Answer<u32> {
        let mut para = ResourceId { kind, id, ..Default::default() };
        self.ids(command, &mut para)?;
        Ok(std::hint::black_box(para).para)
    }

    fn bind(&self, stream: u32, queue: u32) -> Answer<i32> {
        self.ids(&tsdrv::RES_ID_CFG, &mut ResourceId { id: stream, para: queue, ..Default::default() })
    }

    fn alloc(&self, para: QueueAlloc) -> Answer<(QueueAlloc, QueueMap)> {
        let mut map = QueueMap { soft: 7, mapped: 7, ..Default::default() };
        let mut para = para.with_map(std::ptr::from_mut(&mut map) as u64);
        self.0.command(&tsdrv::SQCQ_ALLOC, &mut para)?;
        Ok(std::hint::black_box((para, map)))
    }

    /// A logical CQ.
    fn logical(&self) -> Result<u32, Failure> {
        Ok(self.alloc(LOGICAL).granted()?.0.completion)
    }

    /// A stream with its queue, whose reports go to `logical`.
    fn stream(&self, logical: u32) -> Result<Stream<'_>, Failure> {
        let id = self.new_id(ID_STREAM)?;
        let (para, _) = self.alloc(normal(id)).granted()?;
        self.bind(id, logical).granted()?;
        Ok(Stream { tasks: self, id, queue: para.submission, completion: para.completion })
    }

    /// A report, as its 8 words.
    fn receive(&self, queue: u32, timeout: i32) -> Answer<Option<[u32; 8]>> {
        let mut report = [0u32; 8];
        let mut para = ReportReceive {
            kind: TYPE_LOGICAL,
            completion: queue,
            timeout,
            reports: report.as_mut_ptr() as u64,
            count: 1,
            received: 77,
            ..Default::default()
        };
        self.0.command(&tsdrv::SQCQ_RECV, &mut para)?;
        let (report, para) = std::hint::black_box((report, para));
        Ok((para.received == 1).then_some(report))
    }
}

/// A stream and its queue.
struct Stream<'a> {
    tasks: &'a Tasks,
    id: u32,
    queue: u32,
    completion: u32,
}

impl Stream<'_> {
    fn free(&self, completion: u32, flag: u32) -> Answer<i32> {
        let mut para = QueueFree { submission: self.queue, completion, flag, ..Default::default() };
        self.tasks.0.command(&tsdrv::SQCQ_FREE, &mut para)
    }

    fn query(&self, property: u32) -> Answer<u32> {
        let mut para = QueueQuery { submission: self.queue, property, ..Default::default() };
        self.tasks.0.command(&tsdrv::SQCQ_QUERY, &mut para)?;
        Ok(std::hint::black_box(para).value[0])
    }

    fn set(&self, property: u32, value: u32) -> Answer<i32> {
        let mut para = QueueConfig { submission: self.queue, property, ..Default::default() };
        para.value[0] = value;
        self.tasks.0.command(&tsdrv::SQCQ_CONFIG, &mut para)
    }

    /// Sends copies of a task; the place of the first.
    fn send(&self, task: &Task, count: u32) -> Answer<u32> {
        let mut task = task.0;
        task[4..6].copy_from_slice(&(self.id as u16).to_le_bytes());
        let tasks = vec![task; count as usize];
        let address = tasks.as_ptr() as u64;
        let mut para = TaskSend { submission: self.queue, tasks: address, count, ..Default::default() };
        self.tasks.0.command(&tsdrv::SQCQ_SEND, &mut para)?;
        std::hint::black_box(&tasks);
        Ok(std::hint::black_box(para).position)
    }

    /// Waits until the device has come to a place.
    fn reaches(&self, place: u32) -> Verdict {
        for _ in 0..500 {
            if self.query(tsdrv::PROPERTY_HEAD).granted()? == place {
                return Ok(());
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        equal("head", self.query(tsdrv::PROPERTY_HEAD).granted()?, place)
    }
}

/// A task.
#[derive(Clone, Copy)]
struct Task([u8; 64]);

impl Task {
    /// A task of a kind, with a time limit and without a report.
    fn new(kind: u8) -> Task {
        let mut task = [0; 64];
        (task[0], task[14]) = (kind, 254);
        Task(task)
    }

    fn reported(mut self, number: u16) -> Task {
        self.0[1] |= 0x40;
        self.0[6..8].copy_from_slice(&number.to_le_bytes());
        self
    }

    fn word(mut self, at: usize, word: u32) -> Task {
        self.0[at..at + 4].copy_from_slice(&word.to_le_bytes());
        self
    }

    fn long(self, at: usize, long: u64) -> Task {
        self.word(at, long as u32).word(at + 4, (long >> 32) as u32)
    }

    /// A copy inside of a device, with addresses of the process.
    fn copy(destination: u64, source: u64, size: u32) -> Task {
        Task::new(SDMA).word(16, 0b110 << 8).word(28, size).long(32, source).long(40, destination)
    }

    /// A message of 24 bytes to a group of a process of the host.
    fn message(process: u32, group: u32, event: u32, flags: u32) -> Task {
        let mut task =
            Task::new(TO_PROCESS).word(56, 9 | event << 12 | group << 18 | 24 << 24 | flags).word(60, process);
        task.0[11] = 4;
        task
    }

    /// A call of a host function by a thread of the group for them.
    fn host_function(thread: u16) -> Task {
        let mut task = Task::message(std::process::id(), GROUP, HOST_FUNCTION, 0).long(32, 0x1234_5678_9ABC);
        task.0[18..20].copy_from_slice(&thread.to_le_bytes());
        task
    }

    /// A copy through PCI Express; the driver converts its addresses.
    fn transfer(destination: u64, source: u64, size: u64) -> Task {
        Task::new(PCIE_DMA).long(32, source).long(40, destination).long(48, size)
    }
}

const LOGICAL: QueueAlloc = QueueAlloc { kind: TYPE_LOGICAL, report_size: 32, report_depth: 1024, ..EMPTY };

/// Group and event of host functions.
const GROUP: u32 = 11;
const HOST_FUNCTION: u32 = 26;

/// A queue of host functions, for thread 1 of their group.
const CALLBACK: QueueAlloc = QueueAlloc {
    kind: TYPE_CALLBACK,
    task_size: 64,
    report_size: 32,
    task_depth: 1024,
    report_depth: 1024,
    group: 1,
    ..EMPTY
};

/// A process whose thread 1 waits for calls of host functions.
fn listening(host: &Host) -> Result<Events, Failure> {
    let events = Events::attached(host)?;
    events.group(GROUP, b"", 0)?;
    events.subscribe(GROUP, 1, 1 << HOST_FUNCTION, 0)?;
    Ok(events)
}

/// The queue of a stream.
fn normal(stream: u32) -> QueueAlloc {
    QueueAlloc {
        task_size: 64,
        report_size: 16,
        task_depth: 1024,
        report_depth: 1024,
        info: [stream, 0, 0, 0, 0],
        ..EMPTY
    }
}

const EMPTY: QueueAlloc = QueueAlloc {
    kind: TYPE_NORMAL,
    scheduler: 0,
    task_size: 0,
    report_size: 0,
    task_depth: 0,
    report_depth: 0,
    group: 0,
    flag: 0,
    completion: 0,
    submission: 0,
    info: [0; 5],
    extension_length: 0,
    extension: 0,
    map: [0; 5],
    padding: 0,
};

fn a_process_opens_the_tasks_of_a_device_once(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let second = Manager::open()?;
    second.bind_to(module::TSDRV, host.physical[0]).refused(EEXIST)?;
    drop(tasks);
    // The file can still be bound.
    second.bind_to(module::TSDRV, host.physical[0]).granted().map(drop)
}

fn an_absent_device_has_no_tasks(host: &Host) -> Verdict {
    drop(Tasks::open(host)?);
    let file = Manager::open()?;
    for device in [ABSENT, 1124, u32::MAX] {
        file.bind_to(module::TSDRV, device).refused(EINVAL)?;
    }
    Ok(())
}

fn queues_are_mapped_by_a_process_that_has_tasks(host: &Host) -> Verdict {
    drop(Tasks::open(host)?);
    let file = Manager::open()?;
    file.bind_to(module::TSDRV_MMAP, host.physical[0]).refused(ESRCH)?;
    let tasks = Tasks::open(host)?;
    file.bind_to(module::TSDRV_MMAP, host.physical[0]).granted()?;
    drop(tasks);
    Ok(())
}

fn unknown_commands_of_tasks_are_eopnotsupp(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let arg = [0u64; 64];
    for number in [14, 33, 255] {
        tasks.0.request(0x5800 | number, arg.as_ptr() as u64).refused(EOPNOTSUPP)?;
    }
    tasks.0.command_at(&tsdrv::RES_ID_ALLOC, 0).refused(EINVAL)?;
    tasks.0.command_at(&tsdrv::RES_ID_ALLOC, NOWHERE).refused(EFAULT)
}

fn an_id_is_given_back_once(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    for kind in [ID_STREAM, ID_EVENT, ID_NOTIFY, ID_MODEL] {
        let id = tasks.new_id(kind)?;
        holds("another id", tasks.new_id(kind)? != id)?;
        tasks.ask(&tsdrv::RES_ID_FREE, kind, id).granted()?;
        tasks.ask(&tsdrv::RES_ID_FREE, kind, id).refused(EINVAL)?;
    }
    Ok(())
}

fn kinds_of_ids_are_checked(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    for kind in [-1, QUEUE_SUBMISSION, 16, i32::MAX] {
        tasks.ask(&tsdrv::RES_ID_ALLOC, kind, 0).refused(EINVAL)?;
        tasks.ask(&tsdrv::RES_ID_FREE, kind, 0).refused(EINVAL)?;
    }
    // Queries know queues, too.
    holds("there are queues", tasks.ask(&tsdrv::RES_ID_MAX_QUERY, QUEUE_SUBMISSION, 0).granted()? > 0)?;
    tasks.ask(&tsdrv::RES_ID_MAX_QUERY, 16, 0).refused(EINVAL)?;
    let mut other = ResourceId { scheduler: 2, ..Default::default() };
    tasks.ids(&tsdrv::RES_ID_ALLOC, &mut other).refused(EINVAL)?;
    tasks.ask(&tsdrv::RES_ID_ENABLE, ID_EVENT, 0).refused(EOPNOTSUPP)
}

fn ids_in_use_are_counted(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let used = |kind| tasks.ask(&tsdrv::RES_ID_USED_NUM_QUERY, kind, 0).granted();
    equal("streams at first", used(ID_STREAM)?, 0)?;
    let stream = tasks.new_id(ID_STREAM)?;
    tasks.new_id(ID_STREAM)?;
    equal("two streams", used(ID_STREAM)?, 2)?;
    equal("no event", used(ID_EVENT)?, 0)?;
    tasks.ask(&tsdrv::RES_ID_FREE, ID_STREAM, stream).granted()?;
    equal("one stream", used(ID_STREAM)?, 1)
}

fn only_events_and_notifies_have_registers(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let register = |kind, id| tasks.ask(&tsdrv::RES_ID_REG_OFFSET_QUERY, kind, id);
    register(ID_STREAM, 0).refused(EINVAL)?;
    register(ID_NOTIFY, u32::MAX).refused(EINVAL)?;
    equal("notify 1", register(ID_NOTIFY, 1).granted()?, 4)?;
    equal("notify 513", register(ID_NOTIFY, 513).granted()?, 0x1_0004)?;
    equal("event 4097", register(ID_EVENT, 4097).granted()?, 0x1_0004)
}

fn the_scheduler_tells_how_it_is_connected(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let mut info = HardwareInfo { reserved: [77; 4], ..Default::default() };
    tasks.0.command(&tsdrv::HW_INFO_QUERY, &mut info).granted()?;
    let info = std::hint::black_box(info);
    equal("kind", info.kind, tsdrv::HARDWARE_STARS)?;
    holds("schedulers", info.schedulers >= 1)?;
    let connection = if host.hccs { tsdrv::CONNECTION_HCCS } else { tsdrv::CONNECTION_PCIE };
    equal("connection", info.connection, connection)?;
    equal("reserved fields are left", info.reserved, [77; 4])
}

fn a_logical_queue_has_limits(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    for (depth, size) in [(0, 32), (65_537, 32), (1024, 0), (1024, 33)] {
        let para = QueueAlloc { report_depth: depth, report_size: size, ..LOGICAL };
        tasks.alloc(para).map(drop).refused(EINVAL)?;
    }
    tasks.alloc(QueueAlloc { kind: tsdrv::TYPES, ..LOGICAL }).map(drop).refused(EINVAL)?;
    tasks.alloc(LOGICAL).granted().map(drop)
}

fn a_queue_belongs_to_a_stream_of_the_process(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let stream = tasks.new_id(ID_STREAM)?;
    tasks.alloc(normal(stream + 1)).map(drop).refused(EINVAL)?;
    let mut unmapped = normal(stream).with_map(NOWHERE);
    tasks.0.command(&tsdrv::SQCQ_ALLOC, &mut unmapped).refused(EFAULT)?;
    tasks.alloc(normal(stream)).granted().map(drop)
}

fn a_queue_has_tasks_of_64_bytes(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let stream = tasks.new_id(ID_STREAM)?;
    tasks.alloc(QueueAlloc { task_size: 32, ..normal(stream) }).map(drop).refused(EINVAL)?;
    for flag in [tsdrv::FLAG_REUSE_COMPLETION, tsdrv::FLAG_REUSE_SUBMISSION] {
        tasks.alloc(QueueAlloc { flag, ..normal(stream) }).map(drop).refused(EINVAL)?;
    }
    Ok(())
}

fn a_queue_without_an_address_is_not_mapped(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let stream = tasks.new_id(ID_STREAM)?;
    let (_, map) = tasks.alloc(normal(stream)).granted()?;
    equal("mapped, soft", (map.mapped, map.soft), (0, 0))
}

fn queues_are_freed_in_pairs(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let logical = tasks.logical()?;
    let (one, other) = (tasks.stream(logical)?, tasks.stream(logical)?);
    one.free(other.completion, 0).refused(EINVAL)?;
    one.free(u32::MAX, 0).refused(EINVAL)?;
    one.free(one.completion, tsdrv::FLAG_REUSE_COMPLETION).refused(EINVAL)?;
    one.free(one.completion, 0).granted()?;
    one.free(one.completion, 0).refused(EINVAL)
}

fn a_stream_is_bound_to_a_queue_of_its_process(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let (stream, logical) = (tasks.new_id(ID_STREAM)?, tasks.logical()?);
    tasks.bind(stream, logical + 1).refused(EINVAL)?;
    tasks.bind(stream + 1, logical).refused(EINVAL)?;
    tasks.bind(stream, logical).granted()?;
    let mut unknown = ResourceId { id: stream, property: 99, ..Default::default() };
    tasks.ids(&tsdrv::RES_ID_CFG, &mut unknown).refused(EOPNOTSUPP)?;
    let model = tasks.new_id(ID_MODEL)?;
    tasks.ask(&tsdrv::RES_ID_CFG, ID_MODEL, model).refused(EOPNOTSUPP)
}

fn only_queues_of_tasks_have_properties(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let stream = tasks.stream(tasks.logical()?)?;
    equal("head", stream.query(tsdrv::PROPERTY_HEAD).granted()?, 0)?;
    equal("tail", stream.query(tsdrv::PROPERTY_TAIL).granted()?, 0)?;
    stream.query(tsdrv::PROPERTY_PAUSE).map(drop).refused(EINVAL)?;
    let mut logical = QueueQuery { kind: TYPE_LOGICAL, ..Default::default() };
    tasks.0.command(&tsdrv::SQCQ_QUERY, &mut logical).refused(EINVAL)?;
    let mut foreign = QueueQuery { submission: u32::MAX, ..Default::default() };
    tasks.0.command(&tsdrv::SQCQ_QUERY, &mut foreign).refused(EINVAL)?;
    // An argument that cannot be read is answered with its length.
    equal("bytes", tasks.0.command_at(&tsdrv::SQCQ_QUERY, NOWHERE).granted()?, 52)
}

fn a_paused_queue_is_eshutdown(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let stream = tasks.stream(tasks.logical()?)?;
    let task = Task::new(PLACEHOLDER);
    stream.set(tsdrv::PROPERTY_PAUSE, 0).granted()?;
    stream.send(&task, 1).map(drop).refused(ESHUTDOWN)?;
    stream.set(tsdrv::PROPERTY_RESUME, 0).granted()?;
    stream.send(&task, 1).granted().map(drop)
}

fn a_stopped_queue_is_eperm(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let stream = tasks.stream(tasks.logical()?)?;
    stream.set(tsdrv::PROPERTY_STATUS, 0).granted()?;
    stream.send(&Task::new(PLACEHOLDER), 1).map(drop).refused(EPERM)
}

fn reports_are_waited_for(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let logical = tasks.logical()?;
    equal("no report", tasks.receive(logical, 0).granted()?, None)?;
    tasks.receive(logical, 20).map(drop).refused(ETIMEDOUT)?;
    tasks.receive(logical, -2).map(drop).refused(EINVAL)?;
    tasks.receive(logical + 1, 0).map(drop).refused(EINVAL)
}

fn a_copy_without_limit_is_einval(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let stream = tasks.stream(tasks.logical()?)?;
    let mut task = Task::new(PLACEHOLDER);
    task.0[14] = 0xFF;
    stream.send(&task, 1).map(drop).refused(EINVAL)
}

fn tasks_are_sent_to_queues_of_streams_alone(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let (queue, _) = tasks.alloc(CALLBACK).granted()?;
    let task = Task::new(PLACEHOLDER).0;
    for kind in [TYPE_CALLBACK, tsdrv::TYPES - 1] {
        let address = task.as_ptr() as u64;
        let para = TaskSend { kind, submission: queue.submission, tasks: address, count: 1, ..Default::default() };
        tasks.0.command(&tsdrv::SQCQ_SEND, &mut { para }).refused(EINVAL)?;
    }
    Ok(())
}

fn freeing_a_queue_of_host_functions_wakes_its_thread(host: &Host) -> Verdict {
    let events = listening(host)?;
    let tasks = Tasks::open(host)?;
    let (queue, _) = tasks.alloc(CALLBACK).granted()?;
    let (submission, completion) = (queue.submission, queue.completion);
    let mut para = QueueFree { kind: TYPE_CALLBACK, submission, completion, ..Default::default() };
    tasks.0.command(&tsdrv::SQCQ_FREE, &mut para).granted()?;
    let (answer, told, _) = events.wait(GROUP, 1, 1000, 128).granted()?;
    equal("answer", answer, 0)?;
    equal("event", (told.event.event, told.event.sub_event), (HOST_FUNCTION, 0xFEE))?;
    equal("length", told.event.message_length, 0)
}

fn a_host_function_is_told_to_its_thread(host: &Host) -> Verdict {
    let events = listening(host)?;
    let tasks = Tasks::open(host)?;
    let logical = tasks.logical()?;
    let stream = tasks.stream(logical)?;
    let event = tasks.new_id(ID_EVENT)?;
    stream.send(&Task::host_function(1), 1).granted()?;
    // The stream waits until the function has returned.
    stream.send(&Task::new(EVENT_WAIT).word(8, event), 1).granted()?;
    stream.send(&Task::new(PLACEHOLDER).reported(7), 1).granted()?;
    let (answer, told, message) = events.wait(GROUP, 1, 1000, 128).granted()?;
    equal("answer", answer, 0)?;
    equal("event", (told.event.event, told.event.sub_event), (HOST_FUNCTION, 9))?;
    equal("length", told.event.message_length, 24)?;
    equal("the function", message[16..22].to_vec(), vec![0xBC, 0x9A, 0x78, 0x56, 0x34, 0x12])?;
    equal("it waits", stream.query(tsdrv::PROPERTY_HEAD).granted()?, 1)?;
    let record = ResourceId { kind: ID_EVENT, id: event, property: 2, ..Default::default() };
    tasks.ids(&tsdrv::RES_ID_CFG, &mut { record }).granted()?;
    let report = tasks.receive(logical, 1000).granted()?.ok_or_else(|| Failure::broken("no report"))?;
    equal("task", report[0] >> 16, 7)
}

fn a_message_of_a_task_may_name_its_receiver(host: &Host) -> Verdict {
    let events = Events::attached(host)?;
    events.group(3, b"", 0)?;
    for thread in [0, 1] {
        events.subscribe(3, thread, 1 << 50, 0)?;
    }
    let tasks = Tasks::open(host)?;
    let stream = tasks.stream(tasks.logical()?)?;
    // Behind the message: 2 bytes of thread, 4 of process.
    let mut task = Task::message(1, 3, 50, 1 << 31).word(36, std::process::id());
    task.0[34..36].copy_from_slice(&1u16.to_le_bytes());
    task.0[11] |= 0x80;
    stream.send(&task, 1).granted()?;
    events.waits(3, 0, 50, esched::code::WAIT_TIMEOUT)?;
    let (answer, told, _) = events.wait(3, 1, 1000, 128).granted()?;
    equal("answer", answer, 0)?;
    equal("what is left of 24 bytes", told.event.message_length, 18)
}

fn a_host_function_without_a_listener_is_passed_over(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let logical = tasks.logical()?;
    let stream = tasks.stream(logical)?;
    stream.send(&Task::host_function(1), 1).granted()?;
    // A length of 24 bytes that is too short for its flags.
    stream.send(&Task::message(1, GROUP, HOST_FUNCTION, 3 << 30).word(56, 3 << 30), 1).granted()?;
    stream.send(&Task::new(PLACEHOLDER).reported(8), 1).granted()?;
    let report = tasks.receive(logical, 1000).granted()?.ok_or_else(|| Failure::broken("no report"))?;
    equal("task", report[0] >> 16, 8)
}

/// A task that the driver sends, and the device refuses.
fn fails(tasks: &Tasks, task: Task) -> Verdict {
    let logical = tasks.logical()?;
    let stream = tasks.stream(logical)?;
    stream.send(&task.reported(6), 1).granted()?;
    let report = tasks.receive(logical, 1000).granted()?.ok_or_else(|| Failure::broken("no report"))?;
    equal("task", report[0] >> 16, 6)?;
    holds("the error bit", report[3] >> 18 & 1 == 1)
}

fn a_record_of_another_event_fails(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let stream = tasks.stream(tasks.logical()?)?;
    let event = tasks.new_id(ID_EVENT)?;
    stream.send(&Task::new(EVENT_RECORD).word(8, event), 1).granted()?;
    stream.reaches(1)?;
    fails(&tasks, Task::new(EVENT_RECORD).word(8, event + 1))
}

fn a_reset_of_another_event_fails(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let event = tasks.new_id(ID_EVENT)?;
    // The register that it would write is none of an event.
    fails(&tasks, Task::new(WRITE_VALUE).word(24, event + 1).word(28, 1))
}

fn a_copy_task_wants_addresses_of_the_process(host: &Host) -> Verdict {
    fails(&Tasks::open(host)?, Task::new(SDMA))
}

fn a_question_of_the_old_version_gets_all_reports(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let logical = tasks.logical()?;
    let stream = tasks.stream(logical)?;
    stream.send(&Task::new(PLACEHOLDER).reported(1), 3).granted()?;
    stream.reaches(3)?;
    let mut reports = [[0u32; 8]; 4];
    let address = reports.as_mut_ptr() as u64;
    let para =
        ReportReceive { kind: TYPE_LOGICAL, completion: logical, reports: address, count: 1, ..Default::default() };
    let mut para = para;
    tasks.0.command(&tsdrv::SQCQ_RECV, &mut para).granted()?;
    equal("reports", std::hint::black_box(para).received, 3)?;
    equal("the third", std::hint::black_box(reports)[2][0] >> 16, 1)
}

fn a_task_that_wants_it_is_reported(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let logical = tasks.logical()?;
    let stream = tasks.stream(logical)?;
    equal("place", stream.send(&Task::new(PLACEHOLDER), 2).granted()?, 0)?;
    equal("place", stream.send(&Task::new(PLACEHOLDER).reported(9), 1).granted()?, 2)?;
    let report = tasks.receive(logical, 1000).granted()?.ok_or_else(|| Failure::broken("no report"))?;
    equal("stream and task", report[0], stream.id & 0xFFFF | 9 << 16)?;
    equal("error", (report[1], report[2] & 0xFF), (0, 0))?;
    equal("kind and queue", report[2] >> 8, u32::from(PLACEHOLDER) | stream.queue << 8)?;
    equal("head", report[3] & 0xFFFF, 3)?;
    equal("no other report", tasks.receive(logical, 0).granted()?, None)?;
    equal("it was reported", stream.query(tsdrv::PROPERTY_REPORTED).granted()?, 1)?;
    equal("that is told once", stream.query(tsdrv::PROPERTY_REPORTED).granted()?, 0)
}

fn a_full_queue_is_enospc(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let stream = tasks.stream(tasks.logical()?)?;
    let event = tasks.new_id(ID_EVENT)?;
    // Nobody records the event.
    let wait = Task::new(EVENT_WAIT).word(8, event);
    stream.send(&wait, 1023).granted()?;
    stream.send(&wait, 1).map(drop).refused(ENOSPC)
}

fn a_stream_waits_for_an_event_of_another(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let logical = tasks.logical()?;
    let (one, other) = (tasks.stream(logical)?, tasks.stream(logical)?);
    let event = tasks.new_id(ID_EVENT)?;
    one.send(&Task::new(EVENT_WAIT).word(8, event), 1).granted()?;
    one.send(&Task::new(PLACEHOLDER).reported(5), 1).granted()?;
    tasks.receive(logical, 50).map(drop).refused(ETIMEDOUT)?;
    equal("head", one.query(tsdrv::PROPERTY_HEAD).granted()?, 0)?;
    other.send(&Task::new(EVENT_RECORD).word(8, event), 1).granted()?;
    let report = tasks.receive(logical, 1000).granted()?.ok_or_else(|| Failure::broken("no report"))?;
    equal("stream and task", report[0], one.id & 0xFFFF | 5 << 16)?;
    one.reaches(2)
}

fn a_notify_wakes_one_wait(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let logical = tasks.logical()?;
    let (one, other) = (tasks.stream(logical)?, tasks.stream(logical)?);
    let notify = tasks.new_id(ID_NOTIFY)?;
    one.send(&Task::new(NOTIFY_WAIT).word(8, notify), 2).granted()?;
    other.send(&Task::new(NOTIFY_RECORD).word(8, notify), 1).granted()?;
    one.reaches(1)?;
    tasks.receive(logical, 50).map(drop).refused(ETIMEDOUT)?;
    equal("one is left", one.query(tsdrv::PROPERTY_HEAD).granted()?, 1)?;
    other.send(&Task::new(NOTIFY_RECORD).word(8, notify), 1).granted()?;
    one.reaches(2)
}

fn a_task_copies_inside_of_a_device(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, from) = session.device_mapping(0, MIB2)?;
    let (_, to) = session.device_mapping(0, MIB2)?;
    session.write(from + 4096, &[0x5A; 300]).granted()?;
    let tasks = Tasks::open(host)?;
    let stream = tasks.stream(tasks.logical()?)?;
    stream.send(&Task::copy(to + 100, from + 4096, 300), 1).granted()?;
    stream.reaches(1)?;
    equal("bytes", session.read(to + 100, 300).granted()?, vec![0x5A; 300])
}

fn a_task_copies_through_the_link(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, far) = session.device_mapping(0, MIB2)?;
    let tasks = Tasks::open(host)?;
    let logical = tasks.logical()?;
    let stream = tasks.stream(logical)?;
    let (sent, mut received) = (vec![0xA5u8; 5000], vec![0u8; 5000]);
    stream.send(&Task::transfer(far, sent.as_ptr() as u64, 5000), 1).granted()?;
    // The report of a copy that did not fail is not passed on.
    stream.send(&Task::transfer(received.as_mut_ptr() as u64, far, 5000).reported(3), 1).granted()?;
    stream.send(&Task::new(PLACEHOLDER).reported(4), 1).granted()?;
    let report = tasks.receive(logical, 1000).granted()?.ok_or_else(|| Failure::broken("no report"))?;
    equal("the report of the third task", report[0] >> 16, 4)?;
    holds("the bytes came back", std::hint::black_box(received) == sent)
}

fn a_task_of_an_unknown_kind_fails(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let logical = tasks.logical()?;
    let stream = tasks.stream(logical)?;
    stream.send(&Task::new(21).reported(6), 1).granted()?;
    let report = tasks.receive(logical, 1000).granted()?.ok_or_else(|| Failure::broken("no report"))?;
    equal("task", report[0] >> 16, 6)?;
    holds("a kind of error", report[2] & 0x3F != 0)?;
    holds("the error bit", report[3] >> 18 & 1 == 1)?;
    // A client waits for that.
    equal("the queue is stopped", stream.query(tsdrv::PROPERTY_STATUS).granted()?, 0)
}

fn the_tasks_of_a_process_end_with_its_file(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    tasks.stream(tasks.logical()?)?;
    tasks.new_id(ID_EVENT)?;
    drop(tasks);
    let again = Tasks::open(host)?;
    for kind in [ID_STREAM, ID_EVENT, QUEUE_SUBMISSION, tsdrv::QUEUE_LOGICAL] {
        equal("ids of a new file", again.ask(&tsdrv::RES_ID_USED_NUM_QUERY, kind, 0).granted()?, 0)?;
    }
    Ok(())
}

fn a_process_that_is_killed_in_a_wait_leaves_no_tasks(host: &Host) -> Verdict {
    let mut peer = Peer::start(|link| {
        link.receive()?;
        let tasks = Tasks::open(host)?;
        let logical = tasks.logical()?;
        tasks.stream(logical)?;
        link.send(0)?;
        // Nothing is sent, so no report comes.
        tasks.receive(logical, -1).map(drop).granted()
    })?;
    let tasks = Tasks::open(host)?;
    let free = || tasks.ask(&tsdrv::RES_ID_AVAIL_NUM_QUERY, ID_STREAM, 0).granted();
    let before = free()?;
    peer.link.send(0)?;
    peer.link.receive()?;
    equal("with the other's stream", free()?, before - 1)?;
    std::thread::sleep(std::time::Duration::from_millis(20));
    peer.kill();
    eventually("the stream is free", || free().is_ok_and(|now| now == before))
}

fn an_extension_of_a_queue_that_is_not_there_is_answered_with_its_length(host: &Host) -> Verdict {
    let tasks = Tasks::open(host)?;
    let stream = tasks.new_id(ID_STREAM)?;
    let mut map = QueueMap::default();
    let para = QueueAlloc { extension: NOWHERE, extension_length: 40, ..normal(stream) };
    let mut para = para.with_map(std::ptr::from_mut(&mut map) as u64);
    equal("answer", tasks.0.command(&tsdrv::SQCQ_ALLOC, &mut para).granted()?, 40)?;
    tasks.stream(tasks.logical()?).map(drop)
}
