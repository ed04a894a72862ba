//! `/dev/hisi_hdc`: packets to daemons on the device.
//!
//! Every command takes the same 200-byte argument, [`Arg`], and uses its own view of it. Errors are
//! **private codes that come back as errno** and collide with the usual ones; [`error`] lists them.
//! CONNECT returns a session number and a reuse counter. SET_SESSION_OWNER binds the session to the
//! file that it is called on, and closing that file closes the session.

use crate::Generation;
use crate::command::{Command, Direction, Typed};
use crate::layout::{Layout, declare_constants, declare_layouts};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Path of the device.
pub const PATH: &str = "/dev/hisi_hdc";

/// The argument of every command: as large as the largest view.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Arg(pub [u8; 200]);

/// Size of the argument.
pub const ARG_SIZE: usize = 200;

const _: () = assert!(size_of::<Arg>() == ARG_SIZE);

/// The driver's union of all views; [`Arg`] has its bytes.
pub const UNION: &Layout = &Layout {
    name: "Arg",
    c_name: "hdcdrv_cmd",
    size: size_of::<Arg>(),
    align: align_of::<Arg>(),
    fields: &[],
    generations: &Generation::ALL,
};

/// A command's view of the argument.
pub trait View: FromBytes + IntoBytes + Immutable + KnownLayout + Copy {}

impl Arg {
    /// The argument that begins with `view`, the rest zero.
    pub fn new<V: View>(view: &V) -> Arg {
        let mut arg = Arg::new_zeroed();
        // A view is never longer than the argument, so this writes all of it.
        let _ = view.write_to_prefix(&mut arg.0);
        arg
    }

    /// The command's view of the argument.
    pub fn view<V: View>(&self) -> V {
        match V::read_from_prefix(&self.0) {
            Ok((view, _)) => view,
            Err(_) => V::new_zeroed(),
        }
    }
}

declare_layouts! {
    /// CONFIG.
    pub struct Config = "hdcdrv_cmd_config", 48 {
        pub ret: i32 = "ret" @ 0,
        pub device: i32 = "dev_id" @ 4,
        pub pid: u64 = "pid" @ 8,
        pub _reserve_comm: u64 = "reserve_comm" @ 16,
        /// In: wanted, out: granted size of a packet.
        pub segment: i32 = "segment" @ 24,
        pub _reserved: [u32; 4] = "reserved" @ 28,
        pub _pad0: [u8; 4],
    }

    /// CONNECT. On success all 200 bytes come back, with the *physical* id in [`Connect::device`]:
    /// do not reuse the argument.
    pub struct Connect = "hdcdrv_cmd_connect", 88 {
        /// -1: any; 0 means a server with pid 0.
        pub peer_pid: i32 = "peer_pid" @ 0,
        /// Logical id.
        pub device: i32 = "dev_id" @ 4,
        pub pid: u64 = "pid" @ 8,
        pub _reserve_comm: u64 = "reserve_comm" @ 16,
        /// [`SERVICE_TSD`].
        pub service: i32 = "service_type" @ 24,
        /// Out: session number; may be 0.
        pub session: i32 = "session" @ 28,
        /// Seconds, 1 to 30.
        pub timeout: u32 = "timeout" @ 32,
        /// Out: reuse counter.
        pub alloc_index: u32 = "session_cur_alloc_idx" @ 36,
        pub ret: i32 = "ret" @ 40,
        pub unique: u32 = "unique_val" @ 44,
        pub user_va: u64 = "user_va" @ 48,
        pub _reserved: [u32; 8] = "reserved" @ 56,
    }

    /// CLOSE. With a wrong reuse counter it returns 0 and closes nothing.
    pub struct Close = "hdcdrv_cmd_close", 88 {
        pub ret: i32 = "ret" @ 0,
        pub device: i32 = "dev_id" @ 4,
        pub pid: u64 = "pid" @ 8,
        pub _reserve_comm: u64 = "reserve_comm" @ 16,
        pub session: i32 = "session" @ 24,
        pub unique: u32 = "unique_val" @ 28,
        pub task_start_time: u64 = "task_start_time" @ 32,
        pub remote_session: u32 = "remote_session" @ 40,
        pub local_close_state: i32 = "local_close_state" @ 44,
        pub remote_close_state: i32 = "remote_local_state" @ 48,
        pub alloc_index: u32 = "session_cur_alloc_idx" @ 52,
        pub _reserved: [u32; 8] = "reserved" @ 56,
    }

    /// SEND: queues one packet.
    pub struct Send = "hdcdrv_cmd_send", 104 {
        pub ret: i32 = "ret" @ 0,
        pub device: i32 = "dev_id" @ 4,
        pub pid: u64 = "pid" @ 8,
        pub _reserve_comm: u64 = "reserve_comm" @ 16,
        pub session: i32 = "session" @ 24,
        pub _pad0: [u8; 4],
        pub source: u64 = "src_buf" @ 32,
        pub length: i32 = "len" @ 40,
        pub _pad1: [u8; 4],
        pub pool_buffer: u64 = "pool_buf" @ 48,
        pub pool_address: u64 = "pool_addr" @ 56,
        /// [`WAIT_TIMEOUT`].
        pub wait: i32 = "wait_flag" @ 64,
        /// Milliseconds.
        pub timeout: u32 = "timeout" @ 68,
        pub _reserved: [u32; 8] = "reserved" @ 72,
    }

    /// RECV_PEEK: waits for a packet and returns its length.
    pub struct RecvPeek = "hdcdrv_cmd_recv_peek", 88 {
        pub ret: i32 = "ret" @ 0,
        pub device: i32 = "dev_id" @ 4,
        pub pid: u64 = "pid" @ 8,
        pub _reserve_comm: u64 = "reserve_comm" @ 16,
        pub session: i32 = "session" @ 24,
        /// Out: length of the packet; 0 means that the session was closed.
        pub length: i32 = "len" @ 28,
        /// [`WAIT_TIMEOUT`].
        pub wait: i32 = "wait_flag" @ 32,
        /// Milliseconds; 0 means 3000.
        pub timeout: u32 = "timeout" @ 36,
        pub group: i32 = "group_flag" @ 40,
        /// Out: packets queued.
        pub count: i32 = "count" @ 44,
        pub alloc_index: u32 = "session_cur_alloc_idx" @ 48,
        pub _reserved: [u32; 8] = "reserved" @ 52,
        pub _pad0: [u8; 4],
    }

    /// RECV: receives the packet. Never waits.
    pub struct Recv = "hdcdrv_cmd_recv", 200 {
        pub ret: i32 = "ret" @ 0,
        pub device: i32 = "dev_id" @ 4,
        pub pid: u64 = "pid" @ 8,
        pub _reserve_comm: u64 = "reserve_comm" @ 16,
        pub session: i32 = "session" @ 24,
        pub _pad0: [u8; 4],
        pub destination: u64 = "dst_buf" @ 32,
        pub length: i32 = "len" @ 40,
        pub _pad1: [u8; 4],
        pub pool_buffer: u64 = "pool_buf" @ 48,
        /// Out.
        pub received: i32 = "out_len" @ 56,
        /// 1.
        pub buffers: i32 = "buf_count" @ 60,
        pub group: i32 = "group_flag" @ 64,
        pub _pad2: [u8; 4],
        pub buffer_list: [u64; 8] = "buf_list" @ 72,
        pub buffer_lengths: [u32; 8] = "buf_len" @ 136,
        pub _reserved: [u32; 8] = "reserved" @ 168,
    }

    /// SET_SESSION_OWNER: binds the session to the file. Due within 60 s of CONNECT.
    pub struct SetSessionOwner = "hdcdrv_cmd_set_session_owner", 56 {
        pub ret: i32 = "ret" @ 0,
        pub device: i32 = "dev_id" @ 4,
        pub pid: u64 = "pid" @ 8,
        pub _reserve_comm: u64 = "reserve_comm" @ 16,
        pub parent_pid: u64 = "ppid" @ 24,
        pub session: i32 = "session" @ 32,
        pub _reserved: [u32; 4] = "reserved" @ 36,
        pub _pad0: [u8; 4],
    }

    /// GET_SESSION_ATTR.
    pub struct GetSessionAttr = "hdcdrv_cmd_get_session_attr", 56 {
        pub ret: i32 = "ret" @ 0,
        pub device: i32 = "dev_id" @ 4,
        pub pid: u64 = "pid" @ 8,
        pub _reserve_comm: u64 = "reserve_comm" @ 16,
        /// [`ATTR_STATUS`].
        pub kind: i32 = "cmd_type" @ 24,
        pub session: i32 = "session" @ 28,
        /// Out: 0 connected.
        pub output: i32 = "output" @ 32,
        pub alloc_index: u32 = "session_cur_alloc_idx" @ 36,
        pub _reserved: [u32; 4] = "reserved" @ 40,
    }
}

impl View for Config {}
impl View for Connect {}
impl View for Close {}
impl View for Send {}
impl View for RecvPeek {}
impl View for Recv {}
impl View for SetSessionOwner {}
impl View for GetSessionAttr {}

declare_constants! {
    /// The service of the daemon that starts device processes.
    pub const SERVICE_TSD: i32 = 9, "HDCDRV_SERVICE_TYPE_TSD";
    /// Number of service types.
    pub const SERVICES: i32 = 128, "HDCDRV_SUPPORT_MAX_SERVICE";
    /// Magic.
    pub const MAGIC: u8 = b'H', "HDCDRV_CMD_MAGIC";
    /// `wait`: without limit.
    pub const WAIT_FOREVER: i32 = 0, "HDCDRV_WAIT_ALWAYS";
    /// `wait`: none for SEND; about 3 s for RECV_PEEK on a TSD session.
    pub const WAIT_NOT: i32 = 1, "HDCDRV_NOWAIT";
    /// `wait`: up to the timeout.
    pub const WAIT_TIMEOUT: i32 = 2, "HDCDRV_WAIT_TIMEOUT";
    /// [`GetSessionAttr::kind`]: connected or not.
    pub const ATTR_STATUS: i32 = 4, "HDCDRV_SESSION_ATTR_STATUS";
}

/// Largest packet.
pub const MAX_PACKET: usize = 512 * 1024;

/// The private error codes, as errno shows them.
pub mod error {
    use crate::layout::Constant;

    /// The headers define the codes as negative numbers, as the kernel's functions return them.
    macro_rules! codes {
        ($( $(#[$meta:meta])* pub const $name:ident: i32 = $value:literal, $c_name:literal; )*) => {
            $( $(#[$meta])* pub const $name: i32 = $value; )*

            /// The codes as the driver's headers define them.
            pub const CONSTANTS: &[Constant] = &[$(
                Constant {
                    name: stringify!($name),
                    c_name: $c_name,
                    value: -$value,
                    generations: &crate::Generation::ALL,
                },
            )*];
        };
    }

    codes! {
        /// No specific reason; also "owner already set".
        pub const FAILED: i32 = 1, "HDCDRV_ERR";
        /// Bad parameter; also a wrong session number, another container, or a close by a process
        /// that is not the owner.
        pub const PARAMETER: i32 = 2, "HDCDRV_PARA_ERR";
        /// Argument or buffer not readable.
        pub const COPY_IN: i32 = 3, "HDCDRV_COPY_FROM_USER_FAIL";
        /// Argument not writable; or a signal.
        pub const COPY_OUT: i32 = 4, "HDCDRV_COPY_TO_USER_FAIL";
        /// No DMA buffer.
        pub const NO_BUFFER: i32 = 8, "HDCDRV_DMA_MEM_ALLOC_FAIL";
        /// No session left.
        pub const NO_SESSION: i32 = 9, "HDCDRV_NO_SESSION";
        /// The control message failed.
        pub const CONTROL: i32 = 10, "HDCDRV_SEND_CTRL_MSG_FAIL";
        /// The peer refused.
        pub const REFUSED: i32 = 11, "HDCDRV_REMOTE_REFUSED_CONNECT";
        /// Connecting took too long.
        pub const CONNECT_TIMEOUT: i32 = 12, "HDCDRV_CONNECT_TIMEOUT";
        /// Length 0 or too large.
        pub const LENGTH: i32 = 14, "HDCDRV_TX_LEN_ERR";
        /// The peer has closed.
        pub const PEER_CLOSED: i32 = 15, "HDCDRV_TX_REMOTE_CLOSE";
        /// The receive buffer is too small; the packet stays queued.
        pub const BUFFER_SMALL: i32 = 16, "HDCDRV_RX_BUF_SMALL";
        /// The device is not ready.
        pub const NOT_READY: i32 = 17, "HDCDRV_DEVICE_NOT_READY";
        /// The device was reset.
        pub const RESET: i32 = 18, "HDCDRV_DEVICE_RESET";
        /// Not supported; also a UB link from 9.0.0 on.
        pub const NOT_SUPPORTED: i32 = 19, "HDCDRV_NOT_SUPPORT";
        /// The service has no listener on the device.
        pub const NOBODY_LISTENS: i32 = 20, "HDCDRV_REMOTE_SERVICE_NO_LISTENING";
        /// No packet is queued.
        pub const NOTHING: i32 = 21, "HDCDRV_NO_BLOCK";
        /// The session is closed.
        pub const CLOSED: i32 = 22, "HDCDRV_SESSION_HAS_CLOSED";
        /// The device id could not be translated.
        pub const TRANSLATION: i32 = 24, "HDCDRV_CONV_FAILED";
        /// No packet came in time.
        pub const RECEIVE_TIMEOUT: i32 = 27, "HDCDRV_RX_TIMEOUT";
        /// The packet could not be sent in time.
        pub const SEND_TIMEOUT: i32 = 28, "HDCDRV_TX_TIMEOUT";
        /// Not the owner.
        pub const PERMISSION: i32 = 41, "HDCDRV_NO_PERMISSION";
        /// The channel is invalid.
        pub const CHANNEL: i32 = 43, "HDCDRV_SESSION_CHAN_INVALID";
        /// The peer rebooted.
        pub const PEER_REBOOT: i32 = 49, "HDCDRV_PEER_REBOOT";
    }
}

const fn command<A>(name: &'static str, c_name: &'static str, number: u8, argument: Option<&'static str>) -> Typed<A> {
    Typed::new(name, c_name, MAGIC, number, Direction::None, 0, argument)
}

/// Queries the peer's device number (used for file transfer only).
pub const GET_PEER_DEV_ID: Typed<Arg> = command("GET_PEER_DEV_ID", "HDCDRV_CMD_GET_PEER_DEV_ID", 0x07, None);
/// Negotiates the packet size. Optional.
pub const CONFIG: Typed<Config> = command("CONFIG", "HDCDRV_CMD_CONFIG", 0x08, Some("Config"));
/// Opens a session.
pub const CONNECT: Typed<Connect> = command("CONNECT", "HDCDRV_CMD_CONNECT", 0x13, Some("Connect"));
/// Closes a session.
pub const CLOSE: Typed<Close> = command("CLOSE", "HDCDRV_CMD_CLOSE", 0x14, Some("Close"));
/// Sends a packet.
pub const SEND: Typed<Send> = command("SEND", "HDCDRV_CMD_SEND", 0x15, Some("Send"));
/// Waits for a packet.
pub const RECV_PEEK: Typed<RecvPeek> = command("RECV_PEEK", "HDCDRV_CMD_RECV_PEEK", 0x16, Some("RecvPeek"));
/// Receives a packet.
pub const RECV: Typed<Recv> = command("RECV", "HDCDRV_CMD_RECV", 0x17, Some("Recv"));
/// Binds a session to the file.
pub const SET_SESSION_OWNER: Typed<SetSessionOwner> =
    command("SET_SESSION_OWNER", "HDCDRV_CMD_SET_SESSION_OWNER", 0x18, Some("SetSessionOwner"));
/// Queries a session.
pub const GET_SESSION_ATTR: Typed<GetSessionAttr> =
    command("GET_SESSION_ATTR", "HDCDRV_CMD_GET_SESSION_ATTR", 0x1A, Some("GetSessionAttr"));
/// Queries the page size, as the vendor's start-up does.
pub const GET_PAGE_SIZE: Typed<Arg> = command("GET_PAGE_SIZE", "HDCDRV_CMD_GET_PAGE_SIZE", 0x1D, None);

/// The device's commands that this project knows.
pub const COMMANDS: &[Command] = &[
    GET_PEER_DEV_ID.command,
    CONFIG.command,
    CONNECT.command,
    CLOSE.command,
    SEND.command,
    RECV_PEEK.command,
    RECV.command,
    SET_SESSION_OWNER.command,
    GET_SESSION_ATTR.command,
    GET_PAGE_SIZE.command,
];
