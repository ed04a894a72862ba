//! Each model in many orders of its threads.

#[test]
fn threads_that_want_one_object_never_make_two_and_always_get_it() {
    ascend_models::slots_make_one_object();
}

#[test]
fn a_process_never_has_two_sessions_and_every_thread_gets_its_turn() {
    ascend_models::the_seat_holds_one_session();
}

#[test]
fn addresses_never_overlap_and_no_heap_is_enabled_twice_or_disabled_in_use() {
    ascend_models::addresses_do_not_overlap();
}
