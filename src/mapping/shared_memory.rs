//! Accesses of memory that others write at any time: the device, other processes, other threads.
//!
//! Rust's memory model does not cover this memory. No reference to it exists and no Rust load,
//! store or atomic touches it. Every access is one machine instruction inside an `asm!` block,
//! which takes the address as a pointer and moves one value between memory and a register. So no
//! data race of the language is possible, and accesses of different sizes to the same bytes are
//! what the processor makes of them:
//!
//! * an aligned access of 1, 4 or 8 bytes is single: it is not torn and not repeated;
//! * a copy is a sequence of such accesses in no promised order, and may be torn between any two;
//! * [`load_acquire`](Access::load_acquire) and [`store_release`](Access::store_release) order the
//!   accesses around them, as the C++ model defines it for one size.
//!
//! The compiler takes each block for code that may read and write any memory it knows an address
//! of, and does not move other accesses across it.
//!
//! Only the shared side of a copy is accessed like this, and it is always aligned to the access.
//! That matters for memory behind a PCI window on aarch64, which Linux maps as Device or Normal
//! Non-cacheable memory: unaligned accesses to the former fault, and exclusive ones
//! (compare-and-swap) are not supported on either. Here are plain and acquire/release accesses
//! only.
//!
//! Miri does not run assembly. For Miri each access is made of atomic bytes, so that accesses of
//! any size are accesses of one size.

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("accesses of shared memory are written for x86-64 and aarch64");

/// A number that one instruction loads or stores.
pub(crate) trait Access: Copy {
    /// Loads from an aligned address.
    ///
    /// # Safety
    ///
    /// The address must be aligned and mapped. No reference may cover it.
    unsafe fn load(from: *const Self) -> Self;

    /// Stores to an aligned address.
    ///
    /// # Safety
    ///
    /// As for [`Access::load`], and mapped for writing.
    unsafe fn store(to: *mut Self, value: Self);

    /// Loads, before all accesses that follow.
    ///
    /// # Safety
    ///
    /// As for [`Access::load`].
    unsafe fn load_acquire(from: *const Self) -> Self;

    /// Stores, after all accesses that precede it.
    ///
    /// # Safety
    ///
    /// As for [`Access::store`].
    unsafe fn store_release(to: *mut Self, value: Self);
}

/// On x86-64 every load acquires and every store releases.
#[cfg(all(target_arch = "x86_64", not(miri)))]
macro_rules! access {
    ($number:ty, $class:ident, $load:literal, $store:literal) => {
        impl Access for $number {
            #[inline]
            unsafe fn load(from: *const Self) -> Self {
                let value;
                // SAFETY: one load, for whose address the caller vouches.
                unsafe {
                    std::arch::asm!($load, value = out($class) value, from = in(reg) from,
                        options(nostack, preserves_flags))
                };
                value
            }

            #[inline]
            unsafe fn store(to: *mut Self, value: Self) {
                // SAFETY: one store, for whose address the caller vouches.
                unsafe {
                    std::arch::asm!($store, to = in(reg) to, value = in($class) value,
                        options(nostack, preserves_flags))
                };
            }

            #[inline]
            unsafe fn load_acquire(from: *const Self) -> Self {
                // SAFETY: the caller vouches for the address.
                unsafe { Self::load(from) }
            }

            #[inline]
            unsafe fn store_release(to: *mut Self, value: Self) {
                // SAFETY: the caller vouches for the address.
                unsafe { Self::store(to, value) }
            }
        }
    };
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86_64 {
    use super::Access;

    access!(u8, reg_byte, "mov {value}, byte ptr [{from}]", "mov byte ptr [{to}], {value}");
    access!(u32, reg, "mov {value:e}, dword ptr [{from}]", "mov dword ptr [{to}], {value:e}");
    access!(u64, reg, "mov {value}, qword ptr [{from}]", "mov qword ptr [{to}], {value}");
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
macro_rules! access {
    ($number:ty, $load:literal, $store:literal, $acquire:literal, $release:literal) => {
        impl Access for $number {
            #[inline]
            unsafe fn load(from: *const Self) -> Self {
                let value;
                // SAFETY: one load, for whose address the caller vouches.
                unsafe {
                    std::arch::asm!($load, value = out(reg) value, at = in(reg) from,
                        options(nostack, preserves_flags))
                };
                value
            }

            #[inline]
            unsafe fn store(to: *mut Self, value: Self) {
                // SAFETY: one store, for whose address the caller vouches.
                unsafe {
                    std::arch::asm!($store, at = in(reg) to, value = in(reg) value,
                        options(nostack, preserves_flags))
                };
            }

            #[inline]
            unsafe fn load_acquire(from: *const Self) -> Self {
                let value;
                // SAFETY: one load, for whose address the caller vouches.
                unsafe {
                    std::arch::asm!($acquire, value = out(reg) value, at = in(reg) from,
                        options(nostack, preserves_flags))
                };
                value
            }

            #[inline]
            unsafe fn store_release(to: *mut Self, value: Self) {
                // SAFETY: one store, for whose address the caller vouches.
                unsafe {
                    std::arch::asm!($release, at = in(reg) to, value = in(reg) value,
                        options(nostack, preserves_flags))
                };
            }
        }
    };
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod aarch64 {
    use super::Access;

    access!(
        u8,
        "ldrb {value:w}, [{at}]",
        "strb {value:w}, [{at}]",
        "ldarb {value:w}, [{at}]",
        "stlrb {value:w}, [{at}]"
    );
    access!(u32, "ldr {value:w}, [{at}]", "str {value:w}, [{at}]", "ldar {value:w}, [{at}]", "stlr {value:w}, [{at}]");
    access!(u64, "ldr {value:x}, [{at}]", "str {value:x}, [{at}]", "ldar {value:x}, [{at}]", "stlr {value:x}, [{at}]");
}

#[cfg(miri)]
mod bytes {
    use super::Access;
    use std::sync::atomic::{AtomicU8, Ordering};

    fn load<const N: usize>(from: *const u8, order: Ordering) -> [u8; N] {
        // SAFETY: bytes of a number for which the caller of an access vouches.
        std::array::from_fn(|index| unsafe { AtomicU8::from_ptr(from.add(index).cast_mut()) }.load(order))
    }

    fn store<const N: usize>(to: *mut u8, bytes: [u8; N], order: Ordering) {
        for (index, byte) in bytes.into_iter().enumerate() {
            // SAFETY: as for loads.
            unsafe { AtomicU8::from_ptr(to.add(index)) }.store(byte, order);
        }
    }

    macro_rules! access {
        ($number:ty) => {
            impl Access for $number {
                unsafe fn load(from: *const Self) -> Self {
                    Self::from_ne_bytes(load(from.cast(), Ordering::Relaxed))
                }

                unsafe fn store(to: *mut Self, value: Self) {
                    store(to.cast(), value.to_ne_bytes(), Ordering::Relaxed);
                }

                unsafe fn load_acquire(from: *const Self) -> Self {
                    Self::from_ne_bytes(load(from.cast(), Ordering::Acquire))
                }

                unsafe fn store_release(to: *mut Self, value: Self) {
                    store(to.cast(), value.to_ne_bytes(), Ordering::Release);
                }
            }
        };
    }
    access!(u8);
    access!(u32);
    access!(u64);
}

const WORD: usize = size_of::<u64>();

/// Copies `to.len()` bytes out of shared memory.
///
/// # Safety
///
/// The bytes from `from` on must be mapped. No reference may cover them.
pub(crate) unsafe fn copy_out(from: *const u8, to: &mut [u8]) {
    let (head, body) = split(from, to.len());
    let (first, rest) = to.split_at_mut(head);
    let (words, last) = rest.split_at_mut(body);
    let mut at = from;
    let bytes = |at: &mut *const u8, to: &mut [u8]| {
        for to in to {
            // SAFETY: one byte of the range for which the caller vouches.
            *to = unsafe { u8::load(*at) };
            *at = at.wrapping_add(1);
        }
    };
    bytes(&mut at, first);
    for to in words.chunks_exact_mut(WORD) {
        // SAFETY: aligned by `split`; the caller vouches for the range.
        to.copy_from_slice(&unsafe { u64::load(at.cast()) }.to_ne_bytes());
        at = at.wrapping_add(WORD);
    }
    bytes(&mut at, last);
}

/// Copies `from` into shared memory.
///
/// # Safety
///
/// The bytes from `to` on must be mapped for writing. No reference may cover them.
pub(crate) unsafe fn copy_in(to: *mut u8, from: &[u8]) {
    let (head, body) = split(to, from.len());
    let (first, rest) = from.split_at(head);
    let (words, last) = rest.split_at(body);
    let mut at = to;
    let bytes = |at: &mut *mut u8, from: &[u8]| {
        for &byte in from {
            // SAFETY: one byte of the range for which the caller vouches.
            unsafe { u8::store(*at, byte) };
            *at = at.wrapping_add(1);
        }
    };
    bytes(&mut at, first);
    for from in words.chunks_exact(WORD) {
        let mut word = [0; WORD];
        word.copy_from_slice(from);
        // SAFETY: aligned by `split`; the caller vouches for the range.
        unsafe { u64::store(at.cast(), u64::from_ne_bytes(word)) };
        at = at.wrapping_add(WORD);
    }
    bytes(&mut at, last);
}

/// Sets `length` bytes of shared memory.
///
/// # Safety
///
/// As for [`copy_in`].
pub(crate) unsafe fn fill(to: *mut u8, length: usize, value: u8) {
    const PIECE: usize = 4096;
    let bytes = [value; PIECE];
    let mut done = 0;
    while done < length {
        let count = PIECE.min(length - done);
        // SAFETY: the caller vouches for the range, of which this is a part.
        unsafe { copy_in(to.wrapping_add(done), &bytes[..count]) };
        done += count;
    }
}

/// How many bytes lie before the first word, and how many in whole words.
fn split(address: *const u8, length: usize) -> (usize, usize) {
    let head = (address.addr().wrapping_neg() % WORD).min(length);
    (head, (length - head) / WORD * WORD)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that is only touched through its address, aligned to a word.
    struct SharedWords(*mut u64, usize);

    // SAFETY: a plain address.
    unsafe impl Sync for SharedWords {}

    impl SharedWords {
        fn new(bytes: impl IntoIterator<Item = u8>) -> SharedWords {
            let bytes: Vec<u8> = bytes.into_iter().collect();
            let shared = SharedWords(
                Box::leak(vec![0u64; bytes.len().div_ceil(WORD)].into_boxed_slice()).as_mut_ptr(),
                bytes.len(),
            );
            // SAFETY: inside the slice, to which no reference is left.
            unsafe { copy_in(shared.at(0), &bytes) };
            shared
        }

        fn at(&self, offset: usize) -> *mut u8 {
            assert!(offset <= self.1);
            self.0.cast::<u8>().wrapping_add(offset)
        }

        fn bytes(&self) -> Vec<u8> {
            let mut bytes = vec![0; self.1];
            // SAFETY: inside the slice, to which no reference is left.
            unsafe { copy_out(self.at(0), &mut bytes) };
            bytes
        }
    }

    impl Drop for SharedWords {
        fn drop(&mut self) {
            // SAFETY: the slice that `new` leaked.
            drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.0, self.1.div_ceil(WORD))) });
        }
    }

    #[test]
    fn copies_of_any_alignment_move_exactly_their_bytes() {
        for offset in 0..9 {
            // Miri takes a second for each.
            for length in (0..26).step_by(if cfg!(miri) { 5 } else { 1 }) {
                let shared = SharedWords::new(0..40);
                let mut out = vec![0xEE; length];
                // SAFETY: inside the memory.
                unsafe { copy_out(shared.at(offset), &mut out) };
                assert!(out.iter().enumerate().all(|(index, &byte)| usize::from(byte) == offset + index));
                // SAFETY: inside the memory.
                unsafe { copy_in(shared.at(offset), &vec![0xAA; length]) };
                for (index, &byte) in shared.bytes().iter().enumerate() {
                    let inside = (offset..offset + length).contains(&index);
                    assert_eq!(byte, if inside { 0xAA } else { index as u8 });
                }
            }
        }
    }

    /// The processor at hand may forgive unaligned accesses; memory behind a PCI window does not.
    #[test]
    fn words_are_aligned_and_as_many_as_possible() {
        for address in 64..80usize {
            for length in 0..40 {
                let (head, body) = split(std::ptr::without_provenance(address), length);
                let tail = length - head - body;
                assert!(body % WORD == 0 && head < WORD && tail < WORD, "{address} {length}");
                assert!(body == 0 || (address + head) % WORD == 0, "{address} {length}");
                let aligned = (address..address + length).filter(|at| at % WORD == 0 && at + WORD <= address + length);
                assert_eq!(body / WORD, aligned.count(), "{address} {length}");
            }
        }
    }

    #[test]
    fn fills_set_exactly_their_bytes() {
        // More than one piece, which is slow under Miri.
        let length = if cfg!(miri) { 100 } else { 4_500 };
        let shared = SharedWords::new(std::iter::repeat_n(1, length + 20));
        // SAFETY: inside the memory.
        unsafe { fill(shared.at(3), length, 7) };
        let bytes = shared.bytes();
        assert!(bytes[..3].iter().chain(&bytes[length + 3..]).all(|&byte| byte == 1));
        assert!(bytes[3..length + 3].iter().all(|&byte| byte == 7));
    }

    #[test]
    fn numbers_are_loaded_and_stored_where_they_are() {
        let shared = SharedWords::new(0..32);
        // SAFETY: inside the memory, and aligned.
        unsafe {
            assert_eq!(u8::load(shared.at(3)), 3);
            assert_eq!(u8::load_acquire(shared.at(4)), 4);
            assert_eq!(u32::load_acquire(shared.at(4).cast()), u32::from_ne_bytes([4, 5, 6, 7]));
            assert_eq!(u64::load_acquire(shared.at(8).cast()), u64::from_ne_bytes([8, 9, 10, 11, 12, 13, 14, 15]));
            u8::store_release(shared.at(1), 0xF1);
            u32::store_release(shared.at(4).cast(), 0xF1F2_F3F4);
            u64::store_release(shared.at(16).cast(), 0xA1A2_A3A4_A5A6_A7A8);
            u32::store(shared.at(28).cast(), 0x0102_0304);
            assert_eq!(u32::load(shared.at(28).cast()), 0x0102_0304);
        }
        let mut expected: Vec<u8> = (0..32).collect();
        expected[1] = 0xF1;
        expected[4..8].copy_from_slice(&0xF1F2_F3F4u32.to_ne_bytes());
        expected[16..24].copy_from_slice(&0xA1A2_A3A4_A5A6_A7A8u64.to_ne_bytes());
        expected[28..32].copy_from_slice(&0x0102_0304u32.to_ne_bytes());
        assert_eq!(shared.bytes(), expected);
    }

    /// What the library allows at once on the same bytes. Miri refuses this test when the accesses
    /// are atomics of different sizes.
    #[test]
    fn threads_mix_copies_fills_and_numbers_of_all_sizes_on_the_same_bytes() {
        let rounds = if cfg!(miri) { 8 } else { 2_000 };
        let shared = SharedWords::new(std::iter::repeat_n(0, 64));
        let shared = &shared;
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                scope.spawn(move || {
                    for round in 0..rounds {
                        let offset = (round + usize::from(thread)) % 8;
                        // SAFETY: inside the memory; numbers are aligned.
                        unsafe {
                            match thread {
                                0 => copy_in(shared.at(offset), &[0x11; 41]),
                                1 => copy_out(shared.at(offset), &mut [0; 41]),
                                2 => {
                                    u32::store_release(shared.at(offset / 4 * 4).cast(), 0x2222_2222);
                                    u64::load_acquire(shared.at(offset * 4 / 8 * 8).cast());
                                    fill(shared.at(offset), 9, 0x33);
                                }
                                _ => {
                                    u64::store_release(shared.at(offset / 2 * 8).cast(), 0x4444_4444_4444_4444);
                                    u8::load(shared.at(offset));
                                    u32::load_acquire(shared.at(offset * 4).cast());
                                }
                            }
                        }
                    }
                });
            }
        });
        assert!(shared.bytes().iter().all(|byte| [0, 0x11, 0x22, 0x33, 0x44].contains(byte)));
    }

    #[test]
    fn what_was_written_before_a_release_is_seen_after_its_acquire() {
        let rounds = if cfg!(miri) { 4 } else { 2_000 };
        let shared = SharedWords::new(std::iter::repeat_n(0, 64));
        let shared = &shared;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for round in 1..=rounds {
                    // SAFETY: inside the memory, and aligned.
                    unsafe {
                        while u32::load_acquire(shared.at(4).cast()) != round - 1 {
                            std::thread::yield_now();
                        }
                        copy_in(shared.at(9), &[round as u8; 20]);
                        u32::store_release(shared.at(0).cast(), round);
                    }
                }
            });
            for round in 1..=rounds {
                // SAFETY: inside the memory, and aligned.
                unsafe {
                    while u32::load_acquire(shared.at(0).cast()) != round {
                        std::thread::yield_now();
                    }
                    let mut seen = [0; 20];
                    copy_out(shared.at(9), &mut seen);
                    assert_eq!(seen, [round as u8; 20]);
                    u32::store_release(shared.at(4).cast(), round);
                }
            }
        });
    }
}
