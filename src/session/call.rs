//! The single place from which commands go to the memory module.
//!
//! All commands share one argument struct. The kernel ignores the size in the request, copies *its own* size in and out, and rewrites
//! the head; so the argument is built anew for every call in a zeroed buffer that is larger than any known kernel's. A command whose
//! answer cannot be written back is executed all the same, which is why the buffer is always our own writable memory.

use super::fork::ForkGuard;
use super::klog::LogPage;
use crate::davinci::DavinciFile;
use crate::error::{Errno, Error, Refused, Result};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{self, Arg, Op, Para};
use std::time::Instant;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// A command of the memory module: what it means and its number in the driver at hand.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    op: Op,
    word: u32,
}

impl Request {
    /// A command that has the same number in every generation.
    const fn stable(op: Op) -> Request {
        match svm::stable(op) {
            Some(word) => Request { op, word },
            None => Request { op, word: 0 },
        }
    }

    /// A command whose number depends on the generation; `None` if it does not have it.
    pub(crate) fn of(generation: Generation, op: Op) -> Option<Request> {
        let command = generation.svm(op)?;
        Some(Request { op, word: command.command.request() })
    }

    /// The command's name.
    pub(crate) const fn name(self) -> &'static str {
        self.op.name()
    }
}

macro_rules! requests {
    ($($name:ident = $op:ident,)*) => {
        $( pub(crate) const $name: Request = Request::stable(Op::$op); )*
        // All of them have a fixed number: checked when this is compiled.
        const _: () = { $( assert!($name.word != 0, stringify!($name)); )* };
    };
}

requests! {
    SET_ACCESS = MemSetAccess,
    GET_ACCESS = MemGetAccess,
    ALLOC = Alloc,
    FREE_PAGES = FreePages,
    MEMCPY = Memcpy,
    MEMCPY_2D = Memcpy2d,
    ASYNC_MEMCPY = AsyncMemcpy,
    REFRESH = MemcpyResultRefresh,
    PREFETCH = Prefetch,
    MEMSET = Memset8,
    SETUP_DEVICE = SetupDevice,
    INIT_PROCESS = InitProcess,
    UPDATE_HEAP = UpdateHeap,
    CLOSE_DEVICE = CloseDevice,
    QUERY_MEM_USED_INFO = QueryMemUsedInfo,
    CREATE = MemCreate,
    RELEASE = MemRelease,
    MAP = MemMap,
    UNMAP = MemUnmap,
    EXPORT = MemExport,
    IMPORT = MemImport,
    SET_PID = MemSetPid,
    SET_ATTR = MemSetAttr,
    GET_ATTR = MemGetAttr,
    PREPARE_CLOSE_DEVICE = PrepareCloseDevice,
    MEMCPY_BATCH = MemcpyBatch,
}

/// No known kernel copies more than 344 bytes; a newer one may.
const ROOM: usize = 512;

#[repr(C)]
#[derive(FromBytes)]
struct Buffer {
    arg: Arg,
    room: [u64; (ROOM - svm::ARG_SIZE) / 8],
    #[cfg(debug_assertions)]
    canary: [u64; 2],
}

#[cfg(debug_assertions)]
const CANARY: [u64; 2] = [0x5EED_CA9A_5EED_CA9A, 0x0DD5_0F5A_0DD5_0F5A];

/// The file of the memory module, with what is needed to speak to it and to explain its answers.
#[derive(Debug)]
pub(crate) struct Svm {
    // The log page is dropped last, so that nothing that happens at the end goes unexplained.
    pub(crate) file: DavinciFile,
    pub(crate) guard: ForkGuard,
    pub(crate) log: Option<LogPage>,
}

impl Svm {
    /// One command: its argument in, its answer out. `size` is for the trace only.
    #[inline]
    pub(crate) fn call<P: Para>(
        &self,
        request: Request,
        device: u32,
        size: u64,
        para: &P,
    ) -> std::result::Result<P, Errno> {
        let mut buffer = Buffer::new_zeroed();
        buffer.arg.head.device = device;
        // A member is never longer than the union, so this writes all of it.
        let _ = para.write_to_prefix(buffer.arg.data.as_mut_bytes());
        #[cfg(debug_assertions)]
        {
            buffer.canary = CANARY;
        }
        if let Some(log) = &self.log {
            log.empty();
        }
        let answer = if tracing::enabled!(tracing::Level::TRACE) {
            self.traced(request, device, size, &mut buffer)
        } else {
            self.ioctl(request, &mut buffer)
        };
        #[cfg(debug_assertions)]
        debug_assert_eq!(buffer.canary, CANARY, "the kernel wrote more than {ROOM} bytes for {}", request.name());
        answer?;
        Ok(buffer.arg.para())
    }

    #[inline]
    fn ioctl(&self, request: Request, buffer: &mut Buffer) -> std::result::Result<i32, Errno> {
        // SAFETY: the buffer is writable, lives through the call and is larger than the argument of any known kernel. What addresses
        // inside it point to is vouched for by those who build them: reservations, mappings and copies.
        unsafe { self.file.raw(request.word, (&raw mut *buffer).cast()) }
    }

    #[cold]
    fn traced(&self, request: Request, device: u32, size: u64, buffer: &mut Buffer) -> std::result::Result<i32, Errno> {
        let command = request.name();
        let span = tracing::trace_span!("system call", module = "SVM", command, device, size);
        let _entered = span.enter();
        let start = Instant::now();
        let answer = self.ioctl(request, buffer);
        let duration = start.elapsed();
        match &answer {
            Ok(_) => tracing::trace!(command, device, size, ?duration, result = "ok"),
            Err(errno) => tracing::trace!(command, device, size, ?duration, result = ?errno),
        }
        answer
    }

    /// Refuses to go on in a child of the process that opened the session.
    #[inline]
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.guard.in_child() { Err(other_process()) } else { Ok(()) }
    }

    /// The kernel's sentences about the command that just failed.
    pub(crate) fn sentences(&self) -> String {
        self.log.as_ref().map(LogPage::take).unwrap_or_default()
    }

    /// The explanation of a command that just failed.
    #[cold]
    pub(crate) fn refused(&self, operation: &'static str, request: Request, errno: Errno) -> Refused {
        Refused::named(operation, request.name(), errno).kernel_log(self.sentences())
    }
}

#[cold]
fn other_process() -> Error {
    Error::OtherProcess { process: std::process::id() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_has_room_for_more_than_any_known_argument() {
        assert!(std::mem::offset_of!(Buffer, room) + size_of::<[u64; (ROOM - svm::ARG_SIZE) / 8]>() == ROOM);
        const { assert!(ROOM > svm::ARG_SIZE) };
    }

    #[test]
    fn commands_that_moved_are_found_by_generation_only() {
        assert_eq!(Request::stable(Op::AllocProcStruct).word, 0);
        let word = |generation| Request::of(generation, Op::AllocProcStruct).map(|request| request.word);
        assert_eq!(word(Generation::V8_5_0), Some(0x4158_4D43));
        assert_eq!(word(Generation::V26_1), Some(0x4158_4D65));
        assert!(Request::of(Generation::V9_0_0, Op::MemHandleSetAttr).is_none());
    }
}
