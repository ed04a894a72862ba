//! The kernel-log page: messages about a failed command, which the kernel writes into the calling
//! process's memory.

use crate::host::Host;
use crate::manager::{anonymous, mprotect, page_size};
use crate::peer::check_in_child;
use crate::rule::{Failure, Judge, Rule, Verdict, equal, holds, rule};
use crate::session::{MIB2, Session, create_of};
use ascend_ioctl::klog::{self, Page};
use ascend_ioctl::svm::{self, HOST_ID};
use libc::{EINVAL, PROT_READ, PROT_WRITE};

pub const RULES: &[Rule] = &[
    rule!(an_error_leaves_sentences, Ran).decided_by("share_log_update_write, dmc_share_log.h"),
    rule!(the_pages_own_address_is_not_looked_at, Ran).decided_by("share_log_record_sub, dmc_share_log.h"),
    rule!(a_page_without_its_magic_is_left_alone, Ran).decided_by("share_log_record_sub, dmc_share_log.h"),
    rule!(a_page_of_another_size_is_left_alone, Ran).decided_by("share_log_record_sub, dmc_share_log.h"),
    rule!(unread_sentences_stay, Ran).decided_by("share_log_formatting, dmc_share_log.h"),
    rule!(read_sentences_are_written_over, Ran).decided_by("share_log_formatting, dmc_share_log.h"),
    rule!(an_impossible_position_silences_the_page, Ran).decided_by("share_log_record_sub, dmc_share_log.h"),
    rule!(a_sentence_that_does_not_fit_starts_the_page_over, Ran).decided_by("share_log_update_write, dmc_share_log.h"),
    rule!(a_read_only_page_is_left_alone, Ran)
        .decided_by("_share_log_no_kthread_or_no_interrupt_record, dmc_share_log.h"),
    rule!(errors_of_the_dispatcher_leave_sentences, Ran).decided_by("devmm_svm_ioctl, svm_module_ops.c"),
    rule!(errors_of_mappings_leave_none, Ran)
        .decided_by("_share_log_no_kthread_or_no_interrupt_record, dmc_share_log.h"),
    rule!(a_child_has_its_own_sentences, Ran)
        .decided_by("_share_log_no_kthread_or_no_interrupt_record, dmc_share_log.h"),
    rule!(a_page_that_claims_more_room_is_left_alone, Ran).decided_by("share_log_record_sub, dmc_share_log.h"),
    rule!(an_empty_page_may_claim_no_room, Ran).decided_by("share_log_formatting, dmc_share_log.h"),
    rule!(a_page_that_claims_less_room_gets_no_more, Ran).decided_by("share_log_record_sub, dmc_share_log.h"),
    rule!(a_page_that_was_written_beyond_its_room_is_left_alone, Ran)
        .decided_by("share_log_record_sub, dmc_share_log.h"),
    rule!(refusing_a_type_of_import_leaves_no_error, Ran).decided_by("devmm_import_para_check, svm_master_mem_share.c"),
    rule!(a_shared_page_collects_a_childs_sentences_too, Ran)
        .decided_by("_share_log_no_kthread_or_no_interrupt_record, dmc_share_log.h"),
];

/// Maps the page and empties it.
fn page() -> Result<&'static mut Page, Failure> {
    let size = page_size();
    let address = anonymous(klog::SVM_ERRORS, size, PROT_READ | PROT_WRITE).granted()?;
    equal("address of the page", address, klog::SVM_ERRORS)?;
    // SAFETY: the mapping was just made at this address, is at least as large as the page, lives as
    // long as the process, and this is the only reference to it.
    let page = unsafe { &mut *(address as *mut Page) };
    *page = Page::empty(address);
    Ok(page)
}

/// The page as the kernel left it.
fn look(page: &Page) -> Page {
    // SAFETY: a reference is valid for reads; volatile, because the kernel changes the page.
    unsafe { std::ptr::read_volatile(page) }
}

/// Issues a command that is refused.
#[track_caller]
fn fail(session: &Session) -> Verdict {
    session.create(HOST_ID, create_of(svm::SIDE_HOST, svm::PAGE_HUGE, MIB2 + 5)).refused(EINVAL)
}

/// The text up to the write position.
fn text(page: &Page) -> Vec<u8> {
    page.text[..(page.write.max(0) as usize).min(page.text.len())].to_vec()
}

fn an_error_leaves_sentences(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page()?;
    fail(&session)?;
    let left = look(page);
    let text = text(&left);
    holds("there is text", !text.is_empty())?;
    equal("last byte", text[text.len() - 1], b'\n')?;
    equal("byte after the text", left.text[text.len()], 0)?;
    holds("the text has no NUL", !text.contains(&0))?;
    equal("read position", left.read, 0)
}

fn the_pages_own_address_is_not_looked_at(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page()?;
    page.base = 0;
    fail(&session)?;
    holds("there is text", look(page).write > 0)
}

/// A failed command must not change the page.
fn left_alone(host: &Host, change: impl FnOnce(&mut Page)) -> Verdict {
    let session = Session::host(host)?;
    let page = page()?;
    change(page);
    let before = look(page);
    fail(&session)?;
    holds("the page is as before", look(page) == before)
}

fn a_page_without_its_magic_is_left_alone(host: &Host) -> Verdict {
    left_alone(host, |page| page.magic[3] ^= 1)
}

fn a_page_of_another_size_is_left_alone(host: &Host) -> Verdict {
    left_alone(host, |page| page.total = 8192)
}

fn unread_sentences_stay(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page()?;
    fail(&session)?;
    let first = look(page);
    fail(&session)?;
    let second = look(page);
    holds("text was appended", second.write > first.write)?;
    equal("first messages", &text(&second)[..first.write as usize], &text(&first)[..])
}

fn read_sentences_are_written_over(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page()?;
    fail(&session)?;
    let first = look(page);
    page.read = page.write;
    fail(&session)?;
    let second = look(page);
    equal("read position", second.read, 0)?;
    equal("write position", second.write, first.write)?;
    page.read = 4000;
    fail(&session)?;
    equal("write position after reading past it", look(page).write, first.write)
}

fn an_impossible_position_silences_the_page(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page()?;
    for write in [klog::CAPACITY as i32 + 1, -1] {
        (page.write, page.read) = (write, -5);
        let before = look(page);
        fail(&session)?;
        holds("the page is as before", look(page) == before)?;
    }
    (page.write, page.read) = (0, 0);
    fail(&session)?;
    holds("there is text after the positions were reset", look(page).write > 0)
}

fn a_sentence_that_does_not_fit_starts_the_page_over(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page()?;
    let end = klog::CAPACITY as i32 - 6;
    (page.write, page.read) = (end, 0);
    fail(&session)?;
    let left = look(page);
    equal("read position", left.read, 0)?;
    // Only later messages of the same command follow the truncated one.
    holds("the write position was reset", left.write < end)?;
    holds("the truncated message is at the end", left.text[end as usize..].iter().any(|&byte| byte != 0))
}

fn a_read_only_page_is_left_alone(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page()?;
    mprotect(klog::SVM_ERRORS, page_size(), PROT_READ).granted()?;
    fail(&session)?;
    equal("write position", look(page).write, 0)
}

fn errors_of_the_dispatcher_leave_sentences(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page()?;
    let request = session.svm.request_of(svm::Op::MemCreate);
    session.svm.file.request(request, 0).refused(EINVAL)?;
    let first = look(page).write;
    holds("there is text for a null argument", first > 0)?;
    session.svm.file.request(request | 0xFF, std::ptr::from_ref(&session) as u64).refused(EINVAL)?;
    holds("there is text for an unknown number", look(page).write > first)
}

fn errors_of_mappings_leave_none(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page()?;
    let below = svm::Segment { start: svm::SVM_START - (64 << 30), size: 1 << 30 };
    session.svm.map_segment(&below).refused(EINVAL)?;
    equal("write position", look(page).write, 0)
}

fn a_child_has_its_own_sentences(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page()?;
    check_in_child(|| {
        fail(&session)?;
        holds("there is text in the child", look(page).write > 0)
    })?;
    equal("write position in the parent", look(page).write, 0)
}

fn a_page_that_claims_more_room_is_left_alone(host: &Host) -> Verdict {
    left_alone(host, |page| page.record_size = klog::CAPACITY as i32 + 1)
}

fn an_empty_page_may_claim_no_room(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page()?;
    page.record_size = 0;
    fail(&session)?;
    holds("there is text", look(page).write > 0)
}

fn refusing_a_type_of_import_leaves_no_error(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page()?;
    let para = svm::MemImport { exporter: HOST_ID, kind: 9, ..Default::default() };
    session.import_raw(HOST_ID, para).refused(libc::EOPNOTSUPP)?;
    equal("write position", look(page).write, 0)
}

fn a_shared_page_collects_a_childs_sentences_too(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (prot, flags) = (PROT_READ | PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    let address = crate::manager::mmap(klog::SVM_ERRORS, page_size(), prot, flags, -1).granted()?;
    equal("address of the page", address, klog::SVM_ERRORS)?;
    // SAFETY: the mapping was just made, is large enough and aligned, and has no other reference.
    let page = unsafe { &mut *(address as *mut Page) };
    *page = Page::empty(address);
    check_in_child(|| fail(&session))?;
    holds("there is text", look(page).write > 0)
}

fn a_page_that_claims_less_room_gets_no_more(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let page = page()?;
    (page.record_size, page.write) = (200, 190);
    page.text[512..].fill(b'x');
    fail(&session)?;
    let left = look(page);
    holds("nothing is written far beyond the room", left.text[512..].iter().all(|byte| *byte == b'x'))?;
    holds("the cut sentence starts the page over", left.write < 190)
}

fn a_page_that_was_written_beyond_its_room_is_left_alone(host: &Host) -> Verdict {
    left_alone(host, |page| (page.record_size, page.write, page.read) = (200, 300, 300))
}
