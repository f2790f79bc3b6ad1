// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! When memory is registered, deregistered and given back.

use std::time::{Duration, Instant};

use farandole_collectives::{Communicator as _, Token};

use super::super::fake::{FakeLane, calls, fake, nccl};
use super::super::tests::{call, form, made, segment};
use super::super::{Nccl, NcclCommunicator, SUCCESS};
use super::*;

type Formed = (NcclCommunicator<FakeLane>, FakeLane);

/// One that registers memory, and memory of 1 KiB.
fn ready(library: &Nccl) -> (Formed, NcclMemory) {
    let (communicator, lane) = form(library, 1, 2).unwrap();
    let mut communicator = communicator.with_registration();
    made(&mut communicator, &mut Vec::new()).unwrap();
    let memory = library.memory(FakeLane::default(), 1024).unwrap();
    calls();
    ((communicator, lane), memory)
}

fn about(start: usize, bytes: usize) -> Operation {
    Operation::Broadcast { root: 0, segments: vec![segment(start, bytes, start, bytes)] }
}

/// Names of the calls until one that begins with this word.
fn until(word: &str) -> Vec<String> {
    let (began, mut all) = (Instant::now(), Vec::new());
    while !all.iter().any(|name| name == word) {
        assert!(began.elapsed() < Duration::from_secs(20), "no {word}: {all:?}");
        std::thread::sleep(Duration::from_millis(1));
        all.extend(names());
    }
    all
}

fn names() -> Vec<String> {
    calls().iter().filter_map(|call| call.split(' ').next()).map(str::to_owned).collect()
}

#[test]
fn memory_is_registered_when_first_used_and_deregistered_when_the_stream_is_done_with_it() {
    let library = nccl().unwrap();
    let ((mut communicator, lane), memory) = ready(&library);
    let start = memory.address();
    call(&mut communicator, 1, about(start + 64, 960));
    assert_eq!(calls()[0], format!("register 1024 at {start:#x}"));
    call(&mut communicator, 2, about(start, 1024));
    assert_eq!(names(), ["{", "broadcast", "}"], "once");
    drop(memory);
    // Operations go on, so that nobody waits a second for the thread to look.
    call(&mut communicator, 3, about(0x100, 8));
    call(&mut communicator, 4, about(0x100, 8));
    assert!(!names().contains(&"deregister".to_owned()), "the stream is at work on it");
    lane.finish(5);
    call(&mut communicator, 5, about(0x100, 8));
    assert_eq!(until("free"), ["deregister", "{", "broadcast", "}", "free"]);
}

#[test]
fn memory_that_was_let_go_is_given_back_though_nobody_submits_anything() {
    let library = nccl().unwrap();
    let ((mut communicator, lane), memory) = ready(&library);
    call(&mut communicator, 1, about(memory.address(), 1024));
    lane.finish(1);
    drop(memory);
    let (began, mut all) = (Instant::now(), Vec::new());
    while !all.contains(&"free".to_owned()) {
        assert!(began.elapsed() < Duration::from_secs(20), "{all:?}");
        lane.finish(1);
        std::thread::sleep(Duration::from_millis(1));
        all.extend(names());
    }
    assert_eq!(all, ["register", "{", "broadcast", "}", "deregister", "free"]);
}

#[test]
fn what_only_begins_in_the_memory_or_lies_elsewhere_is_not_registered() {
    let library = nccl().unwrap();
    let ((mut communicator, _lane), memory) = ready(&library);
    let end = memory.address() + memory.len();
    call(&mut communicator, 1, about(end - 8, 16));
    call(&mut communicator, 2, about(end, 8));
    call(&mut communicator, 3, about(0x100, 8));
    assert!(!names().contains(&"register".to_owned()));
}

#[test]
fn a_communicator_whose_members_do_not_all_register_registers_nothing() {
    let library = nccl().unwrap();
    let (mut communicator, _lane) = form(&library, 1, 2).unwrap();
    made(&mut communicator, &mut Vec::new()).unwrap();
    let memory = library.memory(FakeLane::default(), 1024).unwrap();
    calls();
    call(&mut communicator, 1, about(memory.address(), 1024));
    assert_eq!(names(), ["{", "broadcast", "}"]);
    drop(memory);
    assert_eq!(until("free"), ["free"]);
}

#[test]
fn memory_is_kept_until_the_communicator_that_registered_it_is_no_more() {
    let library = nccl().unwrap();
    let ((mut communicator, _lane), memory) = ready(&library);
    call(&mut communicator, 1, about(memory.address(), 1024));
    calls();
    drop(memory);
    drop(communicator);
    assert_eq!(until("free"), ["abort", "free"]);
}

#[test]
fn what_nccl_was_told_not_to_register_is_not_deregistered() {
    let library = nccl().unwrap();
    let ((mut communicator, lane), memory) = ready(&library);
    fake(|fake| fake.handle = 0);
    call(&mut communicator, 1, about(memory.address(), 1024));
    assert_eq!(names(), ["register", "{", "broadcast", "}"]);
    drop(memory);
    call(&mut communicator, 2, about(0x100, 8));
    lane.finish(3);
    call(&mut communicator, 3, about(0x100, 8));
    assert!(!until("free").contains(&"deregister".to_owned()));
}

#[test]
fn a_member_that_cannot_register_fails_as_the_others_would_use_its_memory() {
    let library = nccl().unwrap();
    let ((mut communicator, _lane), memory) = ready(&library);
    fake(|fake| fake.registering = 2);
    communicator.submit(Token(1), about(memory.address(), 1024)).unwrap();
    let error = made(&mut communicator, &mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("ncclCommRegister failed: unhandled system error"), "{error}");
    assert_eq!(names(), ["register", "abort"]);
}

#[test]
fn memory_that_is_not_there_is_an_error_in_the_librarys_words() {
    let library = nccl().unwrap();
    fake(|fake| fake.memory = 2);
    let error = library.memory(FakeLane::default(), 1024).map(drop).unwrap_err();
    assert!(error.to_string().contains("ncclMemAlloc failed: unhandled system error"), "{error}");
    fake(|fake| fake.memory = SUCCESS);
    assert!(library.memory(FakeLane::default(), 0).unwrap().is_empty());
}
