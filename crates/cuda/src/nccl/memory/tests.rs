// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory that is given, registered and given again.

use farandole_collectives::{Communicator as _, OperationToken};

use super::super::fake::{FakeCommunicatorStream, fake_nccl, take_calls, with_fake};
use super::super::tests::{call, form, made, segment};
use super::super::{NcclCommunicator, NcclLibrary};
use super::*;

const STREAM: usize = 0x66;

type Formed = (NcclCommunicator<FakeCommunicatorStream>, FakeCommunicatorStream);

/// One that registers memory, and memory of 1 KiB.
fn ready(library: &NcclLibrary) -> (Formed, NcclMemory) {
    with_memory(library, 1024)
}

/// The same with memory of another size: what one test gives back must not go to another test
/// beside it.
fn with_memory(library: &NcclLibrary, bytes: usize) -> (Formed, NcclMemory) {
    let (communicator, stream) = form(library, 1, 2).unwrap();
    let mut communicator = communicator.with_memory_registration_enabled();
    made(&mut communicator, &mut Vec::new()).unwrap();
    let memory =
        library.allocate_memory(&FakeCommunicatorStream::default(), STREAM, bytes).unwrap();
    take_calls();
    ((communicator, stream), memory)
}

fn about(start: usize, bytes: usize) -> CollectiveOperation {
    CollectiveOperation::Broadcast { root: 0, segments: vec![segment(start, bytes, start, bytes)] }
}

fn names() -> Vec<String> {
    take_calls().iter().filter_map(|call| call.split(' ').next()).map(str::to_owned).collect()
}

#[test]
fn memory_is_registered_with_each_communicator_when_it_is_first_used_there() {
    let library = fake_nccl().unwrap();
    let ((mut communicator, _lane), memory) = with_memory(&library, 1536);
    let start = memory.start_address();
    call(&mut communicator, 1, about(start + 64, 1472));
    assert_eq!(take_calls()[0], format!("register 1536 at {start:#x}"));
    call(&mut communicator, 2, about(start, 1536));
    assert_eq!(names(), ["{", "broadcast", "}"], "once");
    // What the memory was, it is for the next owner.
    drop(memory);
    let next = library.allocate_memory(&FakeCommunicatorStream::default(), STREAM, 1536).unwrap();
    assert_eq!(next.start_address(), start);
    call(&mut communicator, 3, about(start, 1536));
    assert_eq!(names(), ["{", "broadcast", "}"]);
    let ((mut another, _lane), _memory) = with_memory(&library, 1536);
    call(&mut another, 1, about(start, 1536));
    assert_eq!(names(), ["register", "{", "broadcast", "}"]);
}

#[test]
fn memory_goes_to_the_next_request_of_that_size_on_that_device_and_stream() {
    let (library, device) = (fake_nccl().unwrap(), FakeCommunicatorStream::default());
    let memory =
        |stream: usize, bytes: usize| library.allocate_memory(&device, stream, bytes).unwrap();
    let first = memory(1, 512);
    let start = first.start_address();
    assert_ne!(memory(1, 512).start_address(), start, "somebody has it");
    drop(first);
    for (stream, bytes) in [(2, 512), (1, 511), (1, 513)] {
        assert_ne!(memory(stream, bytes).start_address(), start);
    }
    let addresses = [memory(1, 512), memory(1, 512)].map(|memory| memory.start_address());
    assert!(addresses.contains(&start) && addresses[0] != addresses[1]);
}

#[test]
fn buffers_that_are_not_inside_the_memory_are_not_registered() {
    let library = fake_nccl().unwrap();
    let ((mut communicator, _lane), memory) = ready(&library);
    let end = memory.start_address() + memory.len();
    for (token, (start, bytes)) in (0..).zip([(end - 8, 16), (end, 8), (0x100, 8)]) {
        call(&mut communicator, token, about(start, bytes));
    }
    assert!(!names().contains(&"register".to_owned()));
}

#[test]
fn a_communicator_whose_members_do_not_all_register_registers_nothing() {
    let library = fake_nccl().unwrap();
    let (mut communicator, _lane) = form(&library, 1, 2).unwrap();
    made(&mut communicator, &mut Vec::new()).unwrap();
    let memory = library.allocate_memory(&FakeCommunicatorStream::default(), STREAM, 1024).unwrap();
    take_calls();
    call(&mut communicator, 1, about(memory.start_address(), 1024));
    assert_eq!(names(), ["{", "broadcast", "}"]);
}

#[test]
fn a_member_that_cannot_register_fails_as_the_others_would_use_its_memory() {
    let library = fake_nccl().unwrap();
    let ((mut communicator, _lane), memory) = ready(&library);
    with_fake(|fake| fake.registering = 2);
    communicator.submit_operation(OperationToken(1), about(memory.start_address(), 1024)).unwrap();
    let error = made(&mut communicator, &mut Vec::new()).unwrap_err();
    assert!(
        error.to_string().contains("ncclCommRegister failed: unhandled system error"),
        "{error}"
    );
    assert_eq!(names(), ["register", "abort"]);
}

#[test]
fn an_abandoned_registration_makes_no_further_calls() {
    let (library, mut registry) = (fake_nccl().unwrap(), RegisteredBlocks::default());
    let device = FakeCommunicatorStream::default();
    let [first, second] =
        [7, 8].map(|stream| library.allocate_memory(&device, stream, 64).unwrap());
    take_calls();
    let segments = vec![segment(first.start_address(), 8, second.start_address(), 8)];
    let operation = CollectiveOperation::Broadcast { root: 0, segments };
    let looks = std::cell::Cell::new(0);
    let goes_on = || looks.replace(looks.get() + 1) == 0;
    assert!(
        !registry.register_operation_buffers(&library, null_mut(), &operation, goes_on).unwrap()
    );
    assert_eq!(names(), ["register"]);
}

#[test]
fn memory_that_is_not_there_is_an_error_in_the_librarys_words() {
    let library = fake_nccl().unwrap();
    with_fake(|fake| fake.memory = 2);
    let error = library
        .allocate_memory(&FakeCommunicatorStream::default(), STREAM, 2048)
        .map(drop)
        .unwrap_err();
    assert!(error.to_string().contains("ncclMemAlloc failed: unhandled system error"), "{error}");
}
