//! What the public types promise: threads may share them, and they can be printed.

use ascend_vmm::copy::{Pending, Slice};
use ascend_vmm::device_process::DeviceProcess;
use ascend_vmm::discovery::{Finding, Npu, Survey};
use ascend_vmm::share::{Export, FabricHandle, ShareableHandle, Ticket};
use ascend_vmm::{
    Device, Error, Failed, Host, HostView, Mapping, PhysicalMemory, Reservation, Session, SessionBuilder,
};
use std::fmt::Debug;

/// Compiles only for types that several threads can use at once, and that can be printed.
fn shared_and_printed<T: Send + Sync + Debug>() {}

#[test]
fn everything_can_be_used_from_any_thread_and_printed() {
    shared_and_printed::<Session>();
    shared_and_printed::<SessionBuilder>();
    shared_and_printed::<Device>();
    shared_and_printed::<Host>();
    shared_and_printed::<PhysicalMemory>();
    shared_and_printed::<Reservation>();
    shared_and_printed::<Mapping>();
    shared_and_printed::<HostView<'_>>();
    shared_and_printed::<Slice<'_>>();
    shared_and_printed::<Pending>();
    shared_and_printed::<Export>();
    shared_and_printed::<Ticket>();
    shared_and_printed::<ShareableHandle>();
    shared_and_printed::<FabricHandle>();
    shared_and_printed::<DeviceProcess>();
    shared_and_printed::<Survey>();
    shared_and_printed::<Npu>();
    shared_and_printed::<Finding>();
    shared_and_printed::<Error>();
    shared_and_printed::<Failed<Mapping>>();
}

#[test]
fn an_error_can_be_passed_on_by_the_question_mark() {
    fn passed_on(error: Error) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Err(error)?
    }
    assert_eq!(passed_on(Error::SessionOpen).unwrap_err().to_string(), Error::SessionOpen.to_string());
    // The object that a failed call returns can be dropped where only the error is wanted.
    let failed = Failed { error: Error::SessionOpen, object: () };
    assert!(matches!(Error::from(failed), Error::SessionOpen));
}
