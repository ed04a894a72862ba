//! The vendor's functions, in the library that the process has loaded.
//!
//! Frameworks load it without making its names visible to others, so it is opened by its name
//! again: the loader hands out the one that is there.

use crate::error::{Error, Result};
use libc::{RTLD_LOCAL, RTLD_NOLOAD, RTLD_NOW, c_char, c_void};
use std::ffi::{CStr, CString};
use std::sync::OnceLock;

/// `ACL_ERROR_RT_CONTEXT_NULL`: the calling thread has no device.
const NO_CONTEXT: i32 = 107_002;

macro_rules! functions {
    ($($field:ident = $name:ident($($argument:ty),*);)* ; $($maybe:ident = $optional:ident($($other:ty),*);)*) => {
        /// The functions, by their own prototypes.
        pub(crate) struct Acl {
            $($field: unsafe extern "C" fn($($argument),*) -> i32,)*
            $($maybe: Option<unsafe extern "C" fn($($other),*) -> i32>,)*
            recent_message: Option<unsafe extern "C" fn() -> *const c_char>,
            library: String,
        }

        impl Acl {
            fn find(library: *mut c_void) -> Result<Acl> {
                let name = name_of(library);
                Ok(Acl {
                    $($field: {
                        let Some(address) = address(library, concat!(stringify!($name), "\0")) else {
                            return Err(Error::NoFunction { library: name, function: stringify!($name) });
                        };
                        // SAFETY: the library's function of this name has the vendor's prototype.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> i32>(address)
                        }
                    },)*
                    $($maybe: address(library, concat!(stringify!($optional), "\0")).map(|address| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($other),*) -> i32>(address) }
                    }),)*
                    recent_message: address(library, "aclGetRecentErrMsg\0").map(|address| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *const c_char>(address) }
                    }),
                    library: name,
                })
            }
        }
    };
}

functions! {
    bare_tgid = aclrtDeviceGetBareTgid(*mut i32);
    get_device = aclrtGetDevice(*mut i32);
    import = aclrtMemImportFromShareableHandle(u64, i32, *mut usize);
    free = aclrtFreePhysical(usize);
    reserve = aclrtReserveMemAddress(*mut usize, usize, usize, usize, u64);
    release = aclrtReleaseMemAddress(usize);
    map = aclrtMapMem(usize, usize, usize, usize, u64);
    unmap = aclrtUnmapMem(usize);
    synchronize = aclrtSynchronizeDevice();
    ;
    physical_by_user = aclrtGetPhyDevIdByUserDevId(i32, *mut i32);
    logical_by_user = aclrtGetLogicDevIdByUserDevId(i32, *mut i32);
    physical_by_logical = aclrtGetPhyDevIdByLogicDevId(i32, *mut i32);
}

/// The address of a function, whose name ends with a zero.
fn address(library: *mut c_void, name: &str) -> Option<*mut c_void> {
    let name = CStr::from_bytes_with_nul(name.as_bytes()).ok()?;
    // SAFETY: a library that is never closed, and a text that ends with a zero.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// The file of a library.
fn name_of(library: *mut c_void) -> String {
    let known = address(library, "aclrtGetDevice\0");
    let file = known.and_then(|address| {
        // SAFETY: plain data, which zeroes are a value of.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: room for the answer; the address is only compared.
        let found = unsafe { libc::dladdr(address, &mut info) };
        // SAFETY: the loader's text, which lives as long as the library.
        (found != 0 && !info.dli_fname.is_null()).then(|| unsafe { text(info.dli_fname) })
    });
    file.unwrap_or_else(|| "libascendcl.so".to_owned())
}

/// # Safety
///
/// A text that ends with a zero.
unsafe fn text(address: *const c_char) -> String {
    // SAFETY: the caller vouches for it.
    unsafe { CStr::from_ptr(address) }.to_string_lossy().into_owned()
}

fn open() -> Result<*mut c_void> {
    let name = CString::from(c"libascendcl.so");
    for flags in [RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL] {
        // SAFETY: the library's own initialisers run, as in every program that links it.
        let library = unsafe { libc::dlopen(name.as_ptr(), flags) };
        if !library.is_null() {
            return Ok(library);
        }
    }
    // SAFETY: it returns NULL, or a text that is good until the next call of this thread.
    let said = unsafe { libc::dlerror() };
    // SAFETY: not NULL, and as above.
    let said = if said.is_null() { "it is not found".to_owned() } else { unsafe { text(said) } };
    Err(Error::NoLibrary(said))
}

impl Acl {
    /// The functions of the library that this process has, or that the loader finds.
    pub(crate) fn of_this_process() -> Result<&'static Acl> {
        static FOUND: OnceLock<Acl> = OnceLock::new();
        if let Some(found) = FOUND.get() {
            return Ok(found);
        }
        let found = Acl::find(open()?)?;
        Ok(FOUND.get_or_init(|| found))
    }

    fn check(&self, function: &'static str, code: i32, object: impl FnOnce() -> String) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let said = self.recent_message.map(|recent| {
            // SAFETY: it takes nothing, and returns NULL or a text of this thread.
            let said = unsafe { recent() };
            // SAFETY: not NULL, and as above.
            if said.is_null() { String::new() } else { unsafe { text(said) } }
        });
        // In one line, and not endless.
        let said: String = said.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ");
        let said = said.chars().take(400).collect();
        Err(Error::Refused { function, object: object(), code, said })
    }

    /// This process as the driver's lists of trusted processes know it. Needs no device.
    pub(crate) fn process(&self) -> Result<i32> {
        let mut process = 0;
        // SAFETY: room for the answer.
        let code = unsafe { (self.bare_tgid)(&mut process) };
        self.check("aclrtDeviceGetBareTgid", code, || "this process".into())?;
        Ok(process)
    }

    /// The calling thread's device, as the program numbers it.
    pub(crate) fn device(&self) -> Result<i32> {
        let (mut device, function) = (0, "aclrtGetDevice");
        // SAFETY: room for the answer.
        match unsafe { (self.get_device)(&mut device) } {
            NO_CONTEXT => Err(Error::NoDevice { function, code: NO_CONTEXT }),
            code => self.check(function, code, || "this thread".into()).map(|()| device),
        }
    }

    /// The physical id of a device that the program has by a number of its own.
    pub(crate) fn physical(&self, device: i32) -> Result<u32> {
        let (mut physical, object) = (0, || format!("device {device}"));
        match (self.physical_by_user, self.logical_by_user, self.physical_by_logical) {
            (Some(by_user), ..) => {
                // SAFETY: room for the answer.
                let code = unsafe { by_user(device, &mut physical) };
                self.check("aclrtGetPhyDevIdByUserDevId", code, object)?;
            }
            (None, Some(logical_by_user), Some(by_logical)) => {
                let mut logical = 0;
                // SAFETY: room for the answer.
                let code = unsafe { logical_by_user(device, &mut logical) };
                self.check("aclrtGetLogicDevIdByUserDevId", code, object)?;
                // SAFETY: room for the answer.
                let code = unsafe { by_logical(logical, &mut physical) };
                self.check("aclrtGetPhyDevIdByLogicDevId", code, object)?;
            }
            _ => {
                let function = "aclrtGetPhyDevIdByUserDevId";
                return Err(Error::NoFunction { library: self.library.clone(), function });
            }
        }
        Ok(physical as u32)
    }

    /// Imports memory on a device. The handle may be 0.
    pub(crate) fn import(&self, shareable: u64, device: i32) -> Result<usize> {
        let mut handle = 0;
        // SAFETY: room for the answer.
        let code = unsafe { (self.import)(shareable, device, &mut handle) };
        let function = "aclrtMemImportFromShareableHandle";
        self.check(function, code, || format!("{shareable:#x} on device {device}"))?;
        Ok(handle)
    }

    pub(crate) fn free(&self, handle: usize) -> Result<()> {
        // SAFETY: a handle that was imported here, and is given back once.
        let code = unsafe { (self.free)(handle) };
        self.check("aclrtFreePhysical", code, || format!("handle {handle:#x}"))
    }

    pub(crate) fn reserve(&self, size: u64) -> Result<u64> {
        let mut address = 0;
        // SAFETY: room for the answer; any address.
        let code = unsafe { (self.reserve)(&mut address, size as usize, 0, 0, 1) };
        self.check("aclrtReserveMemAddress", code, || format!("{size} bytes"))?;
        Ok(address as u64)
    }

    pub(crate) fn release(&self, address: u64) -> Result<()> {
        // SAFETY: a reservation of our own, in which nothing is mapped.
        let code = unsafe { (self.release)(address as usize) };
        self.check("aclrtReleaseMemAddress", code, || format!("{address:#x}"))
    }

    pub(crate) fn map(&self, address: u64, size: u64, handle: usize) -> Result<()> {
        // SAFETY: addresses in a reservation of our own, and a handle of our own.
        let code = unsafe { (self.map)(address as usize, size as usize, 0, handle, 0) };
        self.check("aclrtMapMem", code, || format!("{size} bytes at {address:#x}"))
    }

    pub(crate) fn unmap(&self, address: u64) -> Result<()> {
        // SAFETY: addresses that were mapped here. Whoever computes on them was waited for, or was
        // told that they go away.
        let code = unsafe { (self.unmap)(address as usize) };
        self.check("aclrtUnmapMem", code, || format!("{address:#x}"))
    }

    /// Waits for all work on the calling thread's device.
    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: it takes nothing.
        let code = unsafe { (self.synchronize)() };
        self.check("aclrtSynchronizeDevice", code, || "the device".into())
    }
}
