//! The vendor's stack in an engine of these tests: this project's libascendcl.so, or a stand-in.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// The directory of cargo's libraries.
pub fn built() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// Where this test puts what it compiles.
pub fn place() -> PathBuf {
    let name = std::env::current_exe().unwrap().file_name().unwrap().to_owned();
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&place).unwrap();
    place
}

/// Loads a library as frameworks do: its names are visible to nobody else.
fn load(path: &Path) -> *mut c_void {
    let name = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a library of this project.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "{} is not loaded", path.display());
    library
}

/// A function of a library.
///
/// # Safety
///
/// `F` is the function's type.
unsafe fn function<F: Copy>(library: *mut c_void, name: &CStr) -> F {
    // SAFETY: a library that is never closed.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!address.is_null(), "{name:?}");
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
    // SAFETY: the caller vouches for the type.
    unsafe { std::mem::transmute_copy(&address) }
}

/// This project's libascendcl.so, loaded as a framework loads the vendor's.
pub struct Stack(*mut c_void);

impl Stack {
    pub fn load() -> Stack {
        Stack(load(&built().join("libascendcl.so")))
    }

    /// The same, with a device.
    pub fn with_device(device: i32) -> Stack {
        let stack = Stack::load();
        stack.set_device(device);
        stack
    }

    pub fn set_device(&self, device: i32) {
        // SAFETY: the vendor's prototypes.
        let (init, set) = unsafe {
            (
                function::<unsafe extern "C" fn(*const c_char) -> i32>(self.0, c"aclInit"),
                function::<unsafe extern "C" fn(i32) -> i32>(self.0, c"aclrtSetDevice"),
            )
        };
        // SAFETY: NULL is allowed. A second call is refused, which does no harm.
        unsafe { init(std::ptr::null()) };
        // SAFETY: it takes a number.
        assert_eq!(unsafe { set(device) }, 0);
    }

    fn copy(&self, to: u64, from: u64, size: usize, kind: i32) -> i32 {
        type Copy = unsafe extern "C" fn(u64, usize, u64, usize, i32) -> i32;
        // SAFETY: the vendor's prototype: addresses are as wide as u64.
        let copy = unsafe { function::<Copy>(self.0, c"aclrtMemcpy") };
        // SAFETY: the library checks device addresses; the host's are of slices.
        unsafe { copy(to, size, from, size, kind) }
    }

    pub fn write(&self, address: u64, bytes: &[u8]) {
        assert_eq!(self.copy(address, bytes.as_ptr().expose_provenance() as u64, bytes.len(), 1), 0);
    }

    /// `None` if nothing is mapped there.
    pub fn read(&self, address: u64, size: u64) -> Option<Vec<u8>> {
        let mut bytes = vec![0u8; size as usize];
        let to = bytes.as_mut_ptr().expose_provenance() as u64;
        (self.copy(to, address, bytes.len(), 2) == 0).then_some(bytes)
    }
}

/// A libascendcl.so of host memory, which fails on demand.
pub struct StandIn(*mut c_void);

/// Compiles it. Once, before processes are forked that load it.
pub fn stand_in(options: &[&str]) -> PathBuf {
    let directory = place().join(format!("stand-in{}", options.concat()));
    std::fs::create_dir_all(&directory).unwrap();
    let library = directory.join("libascendcl.so");
    // Another test may compile the same file, or have it loaded.
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let new = directory.join(format!("new-{}-{number}", std::process::id()));
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-Wl,-soname,libascendcl.so"]);
    command.args(options).arg("-o").arg(&new);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/stand_in.c"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&new, &library).unwrap();
    library
}

impl StandIn {
    pub fn load(library: &Path) -> StandIn {
        StandIn(load(library))
    }

    pub fn set_device(&self, device: i32) {
        // SAFETY: its prototype.
        unsafe { function::<unsafe extern "C" fn(i32)>(self.0, c"stand_in_set_device")(device) };
    }

    /// The function fails after so many calls.
    pub fn fail(&self, name: &str, after: i32) {
        let name = CString::new(name).unwrap();
        // SAFETY: its prototype; the text lives during the call.
        unsafe { function::<unsafe extern "C" fn(*const c_char, i32)>(self.0, c"stand_in_fail")(name.as_ptr(), after) };
    }

    /// How many mappings, imports and reservations there are.
    pub fn held(&self) -> [i32; 3] {
        [c"stand_in_mapped", c"stand_in_imported", c"stand_in_reserved"].map(|name| {
            // SAFETY: its prototype.
            unsafe { function::<unsafe extern "C" fn() -> i32>(self.0, name)() }
        })
    }
}

/// The tree with headers and libraries that C programs are built against.
pub fn tree() -> &'static Path {
    static TREE: OnceLock<PathBuf> = OnceLock::new();
    TREE.get_or_init(|| {
        let tree = place().join(format!("tree-{}", std::process::id()));
        ascendcl::toolkit::write(&tree, &built().join("libascendcl.so"), None).unwrap();
        let engine = tree.join("lib64/libascend_vmm_service.so");
        std::fs::copy(built().join("libascend_vmm_engine.so"), engine).unwrap();
        tree
    })
}
