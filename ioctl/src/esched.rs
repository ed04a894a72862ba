//! Module `ESCHED`: events between processes of the host and of a device.
//!
//! A file is bound to one device, by the *physical* id in [`crate::davinci::OpenArg`]. A process is
//! attached to the device, makes groups, and its threads subscribe to events of a group and wait
//! for them. A refusal is a *positive* number, a [`code`], and not an errno. The library does not
//! use this module.

use crate::command::{Command, Direction, Typed};
use crate::layout::{declare_constants, declare_layouts};

declare_layouts! {
    /// Argument of [`ADD_GROUP`].
    pub struct AddGroup = "sched_ioctl_para_add_grp", 32 {
        pub device: u32 = "dev_id" @ 0,
        pub group: u32 = "gid" @ 4,
        /// A `GROUP_*` value.
        pub mode: u32 = "sched_mode" @ 8,
        pub threads: u32 = "thread_num" @ 12,
        pub name: [u8; 16] = "grp_name" @ 16,
    }

    /// Argument of [`SET_EVENT_PRIORITY`].
    pub struct EventPriority = "sched_ioctl_para_set_event_pri", 12 {
        pub device: u32 = "dev_id" @ 0,
        pub event: u32 = "event_id" @ 4,
        pub priority: u32 = "pri" @ 8,
    }

    /// Argument of [`SUBSCRIBE`].
    pub struct Subscribe = "sched_ioctl_para_subscribe", 24 {
        pub device: u32 = "dev_id" @ 0,
        pub group: u32 = "gid" @ 4,
        pub thread: u32 = "tid" @ 8,
        pub padding: u32,
        /// A bit for each event.
        pub events: u64 = "event_bitmap" @ 16,
    }

    /// The first half of [`Wait`].
    pub struct WaitInput = "sched_wait_input", 32 {
        pub device: u32 = "dev_id" @ 0,
        pub group: u32 = "grp_id" @ 4,
        pub thread: u32 = "thread_id" @ 8,
        /// Milliseconds; 0 does not wait, -1 has no end.
        pub timeout: i32 = "timeout" @ 12,
        pub message_length: u32 = "msg_len" @ 16,
        pub padding: u32,
        pub message: u64 = "msg" @ 24,
    }

    /// An event that a thread got.
    pub struct GotEvent = "sched_subscribed_event", 72 {
        pub pid: i32 = "pid" @ 0,
        pub host_pid: i32 = "host_pid" @ 4,
        pub group: u32 = "gid" @ 8,
        pub event: u32 = "event_id" @ 12,
        pub sub_event: u32 = "subevent_id" @ 16,
        pub message_length: u32 = "msg_len" @ 20,
        pub message: u64 = "msg" @ 24,
        pub published_by_user: u64 = "publish_user_timestamp" @ 32,
        pub published_by_kernel: u64 = "publish_kernel_timestamp" @ 40,
        pub published: u64 = "publish_finish_timestamp" @ 48,
        pub woken: u64 = "publish_wakeup_timestamp" @ 56,
        pub subscribed: u64 = "subscribe_timestamp" @ 64,
    }

    /// Argument of [`WAIT`]: the event is written alone.
    pub struct Wait = "sched_ioctl_para_wait", 104 {
        pub input: WaitInput = "input" @ 0,
        pub event: GotEvent = "event" @ 32,
    }

    /// An event that is sent.
    pub struct EventInfo = "sched_published_event_info", 80 {
        /// An `ENGINE_*` value.
        pub engine: u32 = "dst_engine" @ 0,
        pub policy: u32 = "policy" @ 4,
        pub pid: i32 = "pid" @ 8,
        pub group: u32 = "gid" @ 12,
        pub thread: u32 = "tid" @ 16,
        pub event: u32 = "event_id" @ 20,
        pub sub_event: u32 = "subevent_id" @ 24,
        /// All bits set: the device of the file.
        pub device: u32 = "dst_devid" @ 28,
        pub message_length: u32 = "msg_len" @ 32,
        pub padding: u32,
        pub message: u64 = "msg" @ 40,
        pub count: u32 = "event_num" @ 48,
        pub padding_2: u32,
        pub timestamp: u64 = "publish_timestamp" @ 56,
        pub time_of_day: u64 = "publish_timestamp_of_day" @ 64,
        pub private: u64 = "priv" @ 72,
    }

    /// Argument of [`SUBMIT`].
    pub struct Submit = "sched_ioctl_para_submit", 88 {
        pub device: u32 = "dev_id" @ 0,
        pub padding: u32,
        pub event: EventInfo = "event_info" @ 8,
    }

    /// Argument of [`ATTACH`] before 26.1.
    pub struct Attach90 = "sched_ioctl_para_attach", 4, until V9_0_0 {
        pub device: u32 = "dev_id" @ 0,
    }

    /// Argument of [`ATTACH`].
    pub struct Attach = "sched_ioctl_para_attach", 16, since V26_1 {
        pub device: u32 = "dev_id" @ 0,
        pub padding: u32,
        pub time: u64 = "kernel_time" @ 8,
    }

    /// Argument of [`DETACH`].
    pub struct Detach = "sched_ioctl_para_detach", 4 {
        pub device: u32 = "dev_id" @ 0,
    }

    /// Argument of [`SET_MAX_EVENTS`].
    pub struct MaxEvents = "sched_ioctl_para_set_event_max_num", 16 {
        pub device: u32 = "dev_id" @ 0,
        pub group: u32 = "gid" @ 4,
        pub event: u32 = "event_id" @ 8,
        pub number: u32 = "max_num" @ 12,
    }

    /// Argument of [`QUERY_INFO`].
    pub struct QueryInfo = "sched_ioctl_para_query_info", 48 {
        pub device: u32 = "dev_id" @ 0,
        pub to_device: u32 = "dst_devid" @ 4,
        /// A `QUERY_*_GROUP` value.
        pub kind: u32 = "type" @ 8,
        pub padding: u32,
        /// Address and length of a [`GroupQuestion`].
        pub input: [u64; 2] = "input" @ 16,
        /// Address and length of a [`GroupAnswer`].
        pub output: [u64; 2] = "output" @ 32,
    }

    /// Which group of a process has a name.
    pub struct GroupQuestion = "esched_query_gid_input", 20 {
        pub pid: i32 = "pid" @ 0,
        pub name: [u8; 16] = "grp_name" @ 4,
    }

    /// The group.
    pub struct GroupAnswer = "esched_query_gid_output", 4 {
        pub group: u32 = "grp_id" @ 0,
    }
}

declare_constants! {
    /// Numbers from here on are refused with [`code::INNER`].
    pub const NUMBERS: u8 = 30, "SCHED_CMD_MAX_NR";
    /// Groups of a process on a device.
    pub const GROUPS: u32 = 64, "SCHED_MAX_GRP_NUM";
    /// The first group that has a name.
    pub const FIRST_NAMED: u32 = 32, "SCHED_MAX_DEFAULT_GRP_NUM";
    /// Events.
    pub const EVENTS: u32 = 64, "EVENT_MAX_NUM";
    /// The longest message.
    pub const MESSAGE_LENGTH: u32 = 128, "EVENT_MAX_MSG_LEN";
    /// Events for the AI CPUs.
    pub const GROUP_AI_CPU: u32 = 1, "GRP_TYPE_BIND_DP_CPU";
    /// Events for ordinary threads.
    pub const GROUP_CONTROL_CPU: u32 = 2, "GRP_TYPE_BIND_CP_CPU";
    /// Events for an AI CPU of its own.
    pub const GROUP_AI_CPU_EXCLUSIVE: u32 = 3, "GRP_TYPE_BIND_DP_CPU_EXCLUSIVE";
    /// The AI CPUs of the device.
    pub const ENGINE_AI_CPU_DEVICE: u32 = 0, "ACPU_DEVICE";
    /// The AI CPUs of the host.
    pub const ENGINE_AI_CPU_HOST: u32 = 1, "ACPU_HOST";
    /// The control CPUs of the device.
    pub const ENGINE_DEVICE: u32 = 2, "CCPU_DEVICE";
    /// The control CPUs of the host.
    pub const ENGINE_HOST: u32 = 3, "CCPU_HOST";
    /// Groups of this host.
    pub const QUERY_LOCAL_GROUP: u32 = 0, "QUERY_TYPE_LOCAL_GRP_ID";
    /// Groups of the device's processes.
    pub const QUERY_REMOTE_GROUP: u32 = 1, "QUERY_TYPE_REMOTE_GRP_ID";
}

/// What a command returns in place of an errno.
pub mod code {
    use crate::layout::declare_constants;

    declare_constants! {
        /// There is no such device.
        pub const INVALID_DEVICE: i64 = 2, "DRV_ERROR_INVALID_DEVICE";
        /// An unknown command.
        pub const INNER: i64 = 7, "DRV_ERROR_INNER_ERR";
        /// A wrong argument.
        pub const PARAMETER: i64 = 8, "DRV_ERROR_PARA_ERROR";
        /// There is no group of that number or name.
        pub const UNINIT: i64 = 9, "DRV_ERROR_UNINIT";
        /// The process is not attached.
        pub const NOT_EXIST: i64 = 11, "DRV_ERROR_NOT_EXIST";
        /// The time is over.
        pub const WAIT_TIMEOUT: i64 = 16, "DRV_ERROR_WAIT_TIMEOUT";
        /// A signal came.
        pub const WAIT_INTERRUPT: i64 = 32, "DRV_ERROR_WAIT_INTERRUPT";
        /// The file is another process's.
        pub const FILE: i64 = 38, "DRV_ERROR_FILE_OPS";
        /// The process was detached.
        pub const PROCESS_EXIT: i64 = 42, "DRV_ERROR_PROCESS_EXIT";
        /// The process has the device open already.
        pub const OPEN_FAILED: i64 = 53, "DRV_ERROR_OPEN_FAILED";
        /// The process is not attached.
        pub const NO_PROCESS: i64 = 62, "DRV_ERROR_NO_PROCESS";
        /// No thread of the group has subscribed to the event.
        pub const NO_SUBSCRIBER: i64 = 63, "DRV_ERROR_NO_SUBSCRIBE_THREAD";
        /// There is no such group.
        pub const NO_GROUP: i64 = 65, "DRV_ERROR_NO_GROUP";
        /// The group exists.
        pub const GROUP_EXISTS: i64 = 66, "DRV_ERROR_GROUP_EXIST";
        /// Another thread waits under this number.
        pub const THREAD_EXCEEDS: i64 = 67, "DRV_ERROR_THREAD_EXCEEDS_SPEC";
        /// The process is attached already.
        pub const REPEATED: i64 = 71, "DRV_ERROR_PROCESS_REPEAT_ADD";
        /// There is no event, and nobody wanted to wait.
        pub const NO_EVENT: i64 = 73, "DRV_ERROR_NO_EVENT";
        /// The caller's memory cannot be read or written.
        pub const COPY: i64 = 74, "DRV_ERROR_COPY_USER_FAIL";
        /// The host does not do that.
        pub const NOT_SUPPORTED: i64 = 0xFFFE, "DRV_ERROR_NOT_SUPPORT";
    }
}

/// Magic of the module's commands. It is not checked.
pub const MAGIC: u8 = b'W';

const fn command<A>(name: &'static str, c_name: &'static str, number: u8, argument: &'static str) -> Typed<A> {
    // The size bits are those of a size, not of the argument.
    Typed::new(name, c_name, MAGIC, number, Direction::ReadWrite, 8, Some(argument))
}

/// Makes a group of threads.
pub const ADD_GROUP: Typed<AddGroup> = command("ADD_GROUP", "SCHED_PROC_ADD_GRP_ID", 1, "AddGroup");
/// How urgent an event is.
pub const SET_EVENT_PRIORITY: Typed<EventPriority> =
    command("SET_EVENT_PRIORITY", "SCHED_SET_EVENT_PRIORITY_ID", 2, "EventPriority");
/// Which events a thread takes.
pub const SUBSCRIBE: Typed<Subscribe> = command("SUBSCRIBE", "SCHED_THREAD_SUBSCRIBE_EVENT_ID", 4, "Subscribe");
/// Waits for an event.
pub const WAIT: Typed<Wait> = command("WAIT", "SCHED_WAIT_EVENT_ID", 7, "Wait");
/// Sends an event.
pub const SUBMIT: Typed<Submit> = command("SUBMIT", "SCHED_SUBMIT_EVENT_ID", 8, "Submit");
/// Attaches the process to the device.
pub const ATTACH: Typed<Attach> = command("ATTACH", "SCHED_ATTACH_PROCESS_TO_CHIP_ID", 9, "Attach");
/// Ends that, with all groups and events.
pub const DETACH: Typed<Detach> = command("DETACH", "SCHED_DETTACH_PROCESS_FROM_CHIP_ID", 10, "Detach");
/// How many events of a kind a group keeps.
pub const SET_MAX_EVENTS: Typed<MaxEvents> = command("SET_MAX_EVENTS", "SCHED_GRP_SET_EVENT_MAX_NUM", 11, "MaxEvents");
/// The group with a name.
pub const QUERY_INFO: Typed<QueryInfo> = command("QUERY_INFO", "SCHED_QUERY_INFO", 12, "QueryInfo");

/// The module's commands whose arguments this crate knows.
pub const COMMANDS: &[Command] = &[
    ADD_GROUP.command,
    SET_EVENT_PRIORITY.command,
    SUBSCRIBE.command,
    WAIT.command,
    SUBMIT.command,
    ATTACH.command,
    DETACH.command,
    SET_MAX_EVENTS.command,
    QUERY_INFO.command,
];
