//! Module `TSDRV`: the task scheduler of a device: ids of streams and events, and queues of tasks.
//!
//! A file is bound to one device, by the *physical* id in [`crate::davinci::OpenArg`]; a process
//! opens each device once. A *submission queue* (SQ) takes tasks of 64 bytes and belongs to a
//! stream, its *completion queue* (CQ) tells their ends. What a client reads is a *logical* CQ,
//! which the driver fills from the others. The library does not use this module.

use crate::command::{Command, Direction, Typed};
use crate::layout::{declare_constants, declare_layouts};

declare_layouts! {
    /// Argument of the commands on ids.
    pub struct ResourceId = "trs_res_id_para", 44 {
        pub scheduler: u32 = "tsid" @ 0,
        /// An `ID_*` or `QUEUE_*` kind.
        pub kind: i32 = "res_type" @ 4,
        pub id: u32 = "id" @ 8,
        pub user: [u32; 3] = "usr_para" @ 12,
        /// The answer of queries.
        pub para: u32 = "para" @ 24,
        pub flag: u32 = "flag" @ 28,
        pub property: i32 = "prop" @ 32,
        /// Address of the id's register, low and high half.
        pub value: [u32; 2] = "value" @ 36,
    }

    /// Answer of [`SSID_QUERY`].
    pub struct SsidQuery = "trs_ssid_query_para", 4 {
        pub ssid: i32 = "ssid" @ 0,
    }

    /// Answer of [`HW_INFO_QUERY`].
    pub struct HardwareInfo = "trs_hw_info_query_para", 32 {
        pub kind: i32 = "hw_type" @ 0,
        pub schedulers: i32 = "tsnum" @ 4,
        /// A `CONNECTION_*` value.
        pub connection: i32 = "connection_type" @ 8,
        pub send_mode: i32 = "sq_send_mode" @ 12,
        pub reserved: [u32; 4] = "rsv" @ 16,
    }

    /// Argument of [`SQCQ_ALLOC`] and of SQCQ_GET and SQCQ_RESTORE, which nothing here uses.
    pub struct QueueAlloc = "halSqCqInputInfo", 96 {
        /// A `TYPE_*` value.
        pub kind: u32 = "type" @ 0,
        pub scheduler: u32 = "tsId" @ 4,
        pub task_size: u32 = "sqeSize" @ 8,
        pub report_size: u32 = "cqeSize" @ 12,
        pub task_depth: u32 = "sqeDepth" @ 16,
        pub report_depth: u32 = "cqeDepth" @ 20,
        pub group: u32 = "grpId" @ 24,
        pub flag: u32 = "flag" @ 28,
        pub completion: u32 = "cqId" @ 32,
        pub submission: u32 = "sqId" @ 36,
        /// Of a submission queue: its stream, and the stream's logical CQ.
        pub info: [u32; 5] = "info" @ 40,
        pub extension_length: u32 = "ext_info_len" @ 60,
        pub extension: u64 = "ext_info" @ 64,
        /// Address of a [`QueueMap`], in the first 8 of the reserved bytes.
        pub map: [u32; 5] = "res" @ 72,
        pub padding: u32,
    }

    /// Where a client wants to see a queue, and whether it does.
    pub struct QueueMap = "trs_uio_info", 64 {
        pub queue: u64 = "sq_que_addr" @ 0,
        pub control: [u64; 6] = "sq_ctrl_addr" @ 8,
        pub local: u8 = "sq_mem_local_flag" @ 56,
        pub soft: u8 = "soft_que_flag" @ 57,
        /// 0: tasks are sent by [`SQCQ_SEND`].
        pub mapped: u8 = "uio_flag" @ 58,
        pub padding: [u8; 5],
    }

    /// Argument of [`SQCQ_FREE`].
    pub struct QueueFree = "halSqCqFreeInfo", 52 {
        pub kind: u32 = "type" @ 0,
        pub scheduler: u32 = "tsId" @ 4,
        pub submission: u32 = "sqId" @ 8,
        pub completion: u32 = "cqId" @ 12,
        pub flag: u32 = "flag" @ 16,
        pub reserved: [u32; 8] = "res" @ 20,
    }

    /// Argument of [`SQCQ_CONFIG`].
    pub struct QueueConfig = "halSqCqConfigInfo", 52 {
        pub kind: u32 = "type" @ 0,
        pub scheduler: u32 = "tsId" @ 4,
        pub submission: u32 = "sqId" @ 8,
        pub completion: u32 = "cqId" @ 12,
        /// A `PROPERTY_*` value.
        pub property: u32 = "prop" @ 16,
        pub value: [u32; 8] = "value" @ 20,
    }

    /// Argument of [`SQCQ_QUERY`].
    pub struct QueueQuery = "halSqCqQueryInfo", 52 {
        pub kind: u32 = "type" @ 0,
        pub scheduler: u32 = "tsId" @ 4,
        pub submission: u32 = "sqId" @ 8,
        pub completion: u32 = "cqId" @ 12,
        /// A `PROPERTY_*` value.
        pub property: u32 = "prop" @ 16,
        pub value: [u32; 8] = "value" @ 20,
    }

    /// Argument of [`SQCQ_SEND`].
    pub struct TaskSend = "halTaskSendInfo", 64 {
        pub kind: u32 = "type" @ 0,
        pub scheduler: u32 = "tsId" @ 4,
        pub submission: u32 = "sqId" @ 8,
        /// Milliseconds to wait for room.
        pub timeout: i32 = "timeout" @ 12,
        pub tasks: u64 = "sqe_addr" @ 16,
        pub count: u32 = "sqe_num" @ 24,
        /// Out: the place of the first.
        pub position: u32 = "pos" @ 28,
        pub reserved: [u32; 8] = "res" @ 32,
    }

    /// Argument of [`SQCQ_RECV`].
    pub struct ReportReceive = "halReportRecvInfo", 72 {
        pub kind: u32 = "type" @ 0,
        pub scheduler: u32 = "tsId" @ 4,
        pub completion: u32 = "cqId" @ 8,
        /// Milliseconds; -1 has no end.
        pub timeout: i32 = "timeout" @ 12,
        pub reports: u64 = "cqe_addr" @ 16,
        pub count: u32 = "cqe_num" @ 24,
        /// Out: how many there were.
        pub received: u32 = "report_cqe_num" @ 28,
        pub stream: u32 = "stream_id" @ 32,
        pub task: u32 = "task_id" @ 36,
        pub reserved: [u32; 8] = "res" @ 40,
    }

    /// Argument of [`SET_CLOSE_TYPE`].
    pub struct CloseType = "trs_set_close_para", 24 {
        pub scheduler: u32 = "tsid" @ 0,
        pub kind: u32 = "close_type" @ 4,
        pub reserved: [u32; 4] = "rsv" @ 8,
    }
}

declare_constants! {
    /// Numbers from here on are EOPNOTSUPP.
    pub const NUMBERS: u8 = 33, "TRS_MAX_CMD";
    /// Id of a stream.
    pub const ID_STREAM: i32 = 0, "TRS_STREAM";
    /// Id of an event.
    pub const ID_EVENT: i32 = 1, "TRS_EVENT";
    /// Id of a notify.
    pub const ID_NOTIFY: i32 = 2, "TRS_NOTIFY";
    /// Id of a model.
    pub const ID_MODEL: i32 = 3, "TRS_MODEL";
    /// Id of a cache operation.
    pub const ID_CMO: i32 = 4, "TRS_CMO";
    /// The first kind that only queries take: submission queues of the hardware.
    pub const QUEUE_SUBMISSION: i32 = 6, "TRS_HW_SQ";
    /// Completion queues of the hardware.
    pub const QUEUE_COMPLETION: i32 = 7, "TRS_HW_CQ";
    /// Logical completion queues.
    pub const QUEUE_LOGICAL: i32 = 12, "TRS_LOGIC_CQ";
    /// Kinds from here on are EINVAL.
    pub const KINDS: i32 = 16, "TRS_MAX_ID_TYPE";
    /// A queue of tasks and its completion queue.
    pub const TYPE_NORMAL: u32 = 0, "DRV_NORMAL_TYPE";
    /// Calls of host functions.
    pub const TYPE_CALLBACK: u32 = 1, "DRV_CALLBACK_TYPE";
    /// A logical completion queue.
    pub const TYPE_LOGICAL: u32 = 2, "DRV_LOGIC_TYPE";
    /// Types from here on are EINVAL.
    pub const TYPES: u32 = 6, "DRV_INVALID_TYPE";
    /// Whether the queue runs.
    pub const PROPERTY_STATUS: u32 = 0, "DRV_SQCQ_PROP_SQ_STATUS";
    /// The place of the next task that the device takes.
    pub const PROPERTY_HEAD: u32 = 1, "DRV_SQCQ_PROP_SQ_HEAD";
    /// The place of the next task that a client sends.
    pub const PROPERTY_TAIL: u32 = 2, "DRV_SQCQ_PROP_SQ_TAIL";
    /// Runs a queue that was stopped.
    pub const PROPERTY_ENABLE: u32 = 3, "DRV_SQCQ_PROP_SQ_DISABLE_TO_ENABLE";
    /// Whether there was a report since the last question.
    pub const PROPERTY_REPORTED: u32 = 4, "DRV_SQCQ_PROP_SQ_CQE_STATUS";
    /// Address of the queue's registers.
    pub const PROPERTY_REGISTERS: u32 = 5, "DRV_SQCQ_PROP_SQ_REG_BASE";
    /// The driver takes no more tasks.
    pub const PROPERTY_PAUSE: u32 = 8, "DRV_SQCQ_PROP_SQ_PAUSE";
    /// The driver takes tasks again.
    pub const PROPERTY_RESUME: u32 = 10, "DRV_SQCQ_PROP_SQ_RESUME";
    /// Both queues as they were when they were new.
    pub const PROPERTY_RESET: u32 = 11, "DRV_SQCQ_PROP_SQCQ_RESET";
    /// The completion queue exists already, or stays.
    pub const FLAG_REUSE_COMPLETION: u32 = 1, "TSDRV_FLAG_REUSE_CQ";
    /// The submission queue exists already.
    pub const FLAG_REUSE_SUBMISSION: u32 = 2, "TSDRV_FLAG_REUSE_SQ";
    /// PCI Express.
    pub const CONNECTION_PCIE: i32 = 0, "TRS_CONNECT_PROTOCOL_PCIE";
    /// HCCS.
    pub const CONNECTION_HCCS: i32 = 1, "TRS_CONNECT_PROTOCOL_HCCS";
    /// A scheduler that runs queues without a CPU.
    pub const HARDWARE_STARS: i32 = 1, "TRS_HW_TYPE_STARS";
}

/// Size of a task in a submission queue.
pub const TASK_SIZE: usize = 64;

/// Magic of the module's commands. It is not checked.
pub const MAGIC: u8 = b'X';

const fn command<A>(
    name: &'static str,
    c_name: &'static str,
    number: u8,
    direction: Direction,
    argument: &'static str,
) -> Typed<A> {
    Typed::new(name, c_name, MAGIC, number, direction, size_of::<A>() as u16, Some(argument))
}

/// A command on ids.
const fn on_ids(name: &'static str, c_name: &'static str, number: u8, direction: Direction) -> Typed<ResourceId> {
    command(name, c_name, number, direction, "ResourceId")
}

/// A new id.
pub const RES_ID_ALLOC: Typed<ResourceId> = on_ids("RES_ID_ALLOC", "TRS_RES_ID_ALLOC", 0, Direction::ReadWrite);
/// Gives an id back.
pub const RES_ID_FREE: Typed<ResourceId> = on_ids("RES_ID_FREE", "TRS_RES_ID_FREE", 1, Direction::Write);
/// Lets the scheduler use an id.
pub const RES_ID_ENABLE: Typed<ResourceId> = on_ids("RES_ID_ENABLE", "TRS_RES_ID_ENABLE", 2, Direction::Write);
/// Stops the scheduler's use of an id.
pub const RES_ID_DISABLE: Typed<ResourceId> = on_ids("RES_ID_DISABLE", "TRS_RES_ID_DISABLE", 3, Direction::Write);
/// How many ids of a kind there are.
pub const RES_ID_NUM_QUERY: Typed<ResourceId> =
    on_ids("RES_ID_NUM_QUERY", "TRS_RES_ID_NUM_QUERY", 4, Direction::ReadWrite);
/// Ids of a kind are below this.
pub const RES_ID_MAX_QUERY: Typed<ResourceId> =
    on_ids("RES_ID_MAX_QUERY", "TRS_RES_ID_MAX_QUERY", 5, Direction::ReadWrite);
/// How many ids of a kind the process has.
pub const RES_ID_USED_NUM_QUERY: Typed<ResourceId> =
    on_ids("RES_ID_USED_NUM_QUERY", "TRS_RES_ID_USED_NUM_QUERY", 6, Direction::ReadWrite);
/// How many ids of a kind are free.
pub const RES_ID_AVAIL_NUM_QUERY: Typed<ResourceId> =
    on_ids("RES_ID_AVAIL_NUM_QUERY", "TRS_RES_ID_AVAIL_NUM_QUERY", 7, Direction::ReadWrite);
/// Where an id's register is.
pub const RES_ID_REG_OFFSET_QUERY: Typed<ResourceId> =
    on_ids("RES_ID_REG_OFFSET_QUERY", "TRS_RES_ID_REG_OFFSET_QUERY", 8, Direction::ReadWrite);
/// How large an id's register is.
pub const RES_ID_REG_SIZE_QUERY: Typed<ResourceId> =
    on_ids("RES_ID_REG_SIZE_QUERY", "TRS_RES_ID_REG_SIZE_QUERY", 9, Direction::ReadWrite);
/// Changes a property of an id.
pub const RES_ID_CFG: Typed<ResourceId> = on_ids("RES_ID_CFG", "TRS_RES_ID_CFG", 10, Direction::Write);
/// The number of the process's address space on the device.
pub const SSID_QUERY: Typed<SsidQuery> = command("SSID_QUERY", "TRS_SSID_QUERY", 11, Direction::ReadWrite, "SsidQuery");
/// What kind of scheduler the device has, and how it is connected.
pub const HW_INFO_QUERY: Typed<HardwareInfo> =
    command("HW_INFO_QUERY", "TRS_HW_INFO_QUERY", 12, Direction::ReadWrite, "HardwareInfo");
/// New queues.
pub const SQCQ_ALLOC: Typed<QueueAlloc> =
    command("SQCQ_ALLOC", "TRS_SQCQ_ALLOC", 15, Direction::ReadWrite, "QueueAlloc");
/// Gives queues back.
pub const SQCQ_FREE: Typed<QueueFree> = command("SQCQ_FREE", "TRS_SQCQ_FREE", 16, Direction::Write, "QueueFree");
/// Changes a property of a queue.
pub const SQCQ_CONFIG: Typed<QueueConfig> =
    command("SQCQ_CONFIG", "TRS_SQCQ_CONFIG", 17, Direction::Write, "QueueConfig");
/// A property of a queue.
pub const SQCQ_QUERY: Typed<QueueQuery> =
    command("SQCQ_QUERY", "TRS_SQCQ_QUERY", 18, Direction::ReadWrite, "QueueQuery");
/// Sends tasks.
pub const SQCQ_SEND: Typed<TaskSend> = command("SQCQ_SEND", "TRS_SQCQ_SEND", 19, Direction::Write, "TaskSend");
/// Takes reports.
pub const SQCQ_RECV: Typed<ReportReceive> =
    command("SQCQ_RECV", "TRS_SQCQ_RECV", 20, Direction::ReadWrite, "ReportReceive");
/// Whether the device keeps what the process has at a close.
pub const SET_CLOSE_TYPE: Typed<CloseType> =
    command("SET_CLOSE_TYPE", "TRS_SET_CLOSE_TYPE", 26, Direction::Read, "CloseType");

/// The module's commands whose arguments this crate knows.
pub const COMMANDS: &[Command] = &[
    RES_ID_ALLOC.command,
    RES_ID_FREE.command,
    RES_ID_ENABLE.command,
    RES_ID_DISABLE.command,
    RES_ID_NUM_QUERY.command,
    RES_ID_MAX_QUERY.command,
    RES_ID_USED_NUM_QUERY.command,
    RES_ID_AVAIL_NUM_QUERY.command,
    RES_ID_REG_OFFSET_QUERY.command,
    RES_ID_REG_SIZE_QUERY.command,
    RES_ID_CFG.command,
    SSID_QUERY.command,
    HW_INFO_QUERY.command,
    SQCQ_ALLOC.command,
    SQCQ_FREE.command,
    SQCQ_CONFIG.command,
    SQCQ_QUERY.command,
    SQCQ_SEND.command,
    SQCQ_RECV.command,
    SET_CLOSE_TYPE.command,
];

impl QueueAlloc {
    /// The address of the [`QueueMap`].
    pub const fn map_address(&self) -> u64 {
        self.map[0] as u64 | (self.map[1] as u64) << 32
    }

    /// The same argument with this address of a [`QueueMap`].
    pub const fn with_map(mut self, address: u64) -> QueueAlloc {
        self.map[0] = address as u32;
        self.map[1] = (address >> 32) as u32;
        self
    }
}
