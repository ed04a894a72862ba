//! What the types promise to users, whatever the calls do.

use ascend_vmm::copy::{Pending, Slice};
use ascend_vmm::discovery::{Finding, Npu, Survey};
use ascend_vmm::process::DeviceProcess;
use ascend_vmm::share::{Export, FabricHandle, ShareableHandle, Ticket};
use ascend_vmm::{
    Device, Error, Failed, Host, HostView, Mapping, PhysicalMemory, Reservation, Session, SessionBuilder,
};
use std::fmt::Debug;

/// Compiles only for types that can be given to other threads, used from several at once, and printed.
fn can_be_shared_by_threads<T: Send + Sync + Debug>() {}

#[test]
fn everything_can_be_used_from_any_thread_and_printed() {
    can_be_shared_by_threads::<Session>();
    can_be_shared_by_threads::<SessionBuilder>();
    can_be_shared_by_threads::<Device>();
    can_be_shared_by_threads::<Host>();
    can_be_shared_by_threads::<PhysicalMemory>();
    can_be_shared_by_threads::<Reservation>();
    can_be_shared_by_threads::<Mapping>();
    can_be_shared_by_threads::<HostView<'_>>();
    can_be_shared_by_threads::<Slice<'_>>();
    can_be_shared_by_threads::<Pending>();
    can_be_shared_by_threads::<Export>();
    can_be_shared_by_threads::<Ticket>();
    can_be_shared_by_threads::<ShareableHandle>();
    can_be_shared_by_threads::<FabricHandle>();
    can_be_shared_by_threads::<DeviceProcess>();
    can_be_shared_by_threads::<Survey>();
    can_be_shared_by_threads::<Npu>();
    can_be_shared_by_threads::<Finding>();
    can_be_shared_by_threads::<Error>();
    can_be_shared_by_threads::<Failed<Mapping>>();
}

#[test]
fn an_error_can_be_passed_on_by_the_question_mark() {
    fn passed_on(error: Error) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Err(error)?
    }
    assert_eq!(passed_on(Error::SessionOpen).unwrap_err().to_string(), Error::SessionOpen.to_string());
    // What a failed call hands back turns into the error alone where only that is wanted.
    let failed = Failed { error: Error::SessionOpen, object: () };
    assert!(matches!(Error::from(failed), Error::SessionOpen));
}
