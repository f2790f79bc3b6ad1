// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use std::ffi::{CStr, CString};
use std::sync::mpsc::{Receiver as Results, Sender, channel};
use std::time::Duration;

use farandole_door::{OperationCode, SubmissionOutcome};

use super::*;
use crate::operation_numbers;

type RecordedOutcome = (EngineStatusCode, String, Vec<f32>);

/// Sends code, message and the first output through the channel in `context`.
unsafe extern "C" fn tell(context: *mut c_void, outcome: *const SubmissionOutcome) {
    // SAFETY: the context is the boxed sender of `call`, the outcome comes from the table.
    let (sender, outcome) =
        unsafe { (Box::from_raw(context.cast::<Sender<RecordedOutcome>>()), &*outcome) };
    // SAFETY: the table terminates its texts.
    let message = unsafe { CStr::from_ptr(outcome.message) }.to_string_lossy().into_owned();
    let mut values = Vec::new();
    if outcome.output_count > 0 {
        // SAFETY: there is one output for each request.
        let output = unsafe { *outcome.outputs };
        if !output.owner.is_null() {
            // SAFETY: the engine's memory holds whole numbers of floats here.
            values = unsafe {
                std::slice::from_raw_parts(output.address.cast::<f32>(), output.bytes / 4)
            }
            .to_vec();
        }
        // SAFETY: once for every output.
        unsafe { (engine_table().free)(output.owner) };
    }
    sender.send((EngineStatusCode::from_number(outcome.code), message, values)).unwrap();
}

fn a_call(operation: OperationCode) -> SubmissionHeader {
    SubmissionHeader {
        operation: operation as u32,
        reduction: 1,
        prescale: 2.0,
        postscale: 1.0,
        root: 0,
        process_set: 0,
        numbered: 0,
        attended: 0,
    }
}

/// Submits one float tensor under each name; refusals come back at once.
fn call(
    call: &SubmissionHeader,
    names: &[&str],
    input: &[f32],
    output: Option<&mut [f32]>,
) -> Result<Results<RecordedOutcome>, (u32, String)> {
    let (sender, results) = channel::<RecordedOutcome>();
    let shape = [input.len() as u64];
    let output_bytes = output.as_ref().map_or(0, |output| size_of_val(&**output));
    let output = output.map_or(std::ptr::null_mut(), |output| output.as_mut_ptr().cast());
    let requests: Vec<_> = names
        .iter()
        .map(|name| farandole_door::TensorRequest {
            name: name.as_ptr().cast(),
            name_length: name.len(),
            dtype: 7,
            rank: 1,
            shape: shape.as_ptr(),
            input: input.as_ptr().cast(),
            output,
            output_bytes,
            splits: std::ptr::null(),
            split_count: 0,
        })
        .collect();
    let context = Box::into_raw(Box::new(sender));
    let mut message = [0u8; 256];
    // SAFETY: everything outlives the results, which every caller waits for.
    let code = unsafe {
        (engine_table().submit)(
            call,
            requests.as_ptr(),
            requests.len(),
            tell,
            context.cast(),
            message.as_mut_ptr().cast(),
            message.len(),
        )
    };
    if code == 0 {
        return Ok(results);
    }
    // SAFETY: `done` does not run for what was refused.
    drop(unsafe { Box::from_raw(context) });
    let text = CStr::from_bytes_until_nul(&message).map(CString::from).unwrap();
    Err((code, text.into_string().unwrap()))
}

fn outcome(results: Results<RecordedOutcome>) -> RecordedOutcome {
    results.recv_timeout(Duration::from_secs(20)).unwrap()
}

/// One test, for the session is the process's only global.
#[test]
fn operations_go_through_the_door_and_refusals_come_back() {
    assert_eq!(engine_table().bytes as usize, size_of::<EngineTable>());
    let mut message = [0u8; 20];
    let mut found = ProcessSetPlacement::default();
    // SAFETY: both point at room enough.
    let code = unsafe {
        (engine_table().place)(0, &raw mut found, message.as_mut_ptr().cast(), message.len())
    };
    assert_eq!(
        EngineStatusCode::from_number(code),
        EngineStatusCode::Mismatch,
        "there is no session yet"
    );
    assert_eq!(
        message.iter().position(|byte| *byte == 0),
        Some(19),
        "messages are cut to the room there is"
    );

    session::init(&mut || false).unwrap();
    // SAFETY: as above.
    unsafe {
        (engine_table().place)(0, &raw mut found, message.as_mut_ptr().cast(), message.len())
    };
    assert_eq!(
        found,
        ProcessSetPlacement { set_size: 1, set_rank: 0, rank: 0, local_size: 1, local_rank: 0 }
    );

    let input = [1.0, 2.5];
    for attended in [0, 1, 2] {
        let mut output = [0.0; 2];
        let sum = SubmissionHeader { attended, ..a_call(OperationCode::Allreduce) };
        let (code, message, _) = outcome(call(&sum, &["a"], &input, Some(&mut output)).unwrap());
        assert_eq!((code, &*message, output), (EngineStatusCode::Success, "", [2.0, 5.0]));
        let gather = SubmissionHeader { attended, ..a_call(OperationCode::Allgather) };
        assert_eq!(outcome(call(&gather, &["a", "b"], &input, None).unwrap()).2, input);
    }
    let numbered = SubmissionHeader { numbered: 1, ..a_call(OperationCode::Broadcast) };
    let first = call(&numbered, &["same"], &input, None).unwrap();
    let second = call(&numbered, &["same"], &input, None).unwrap();
    assert_eq!((outcome(first).0, outcome(second).2), (EngineStatusCode::Success, input.to_vec()));

    // All ranks have joined: they count again, by other names than before.
    let named = || {
        operation_numbers::next_operation_suffix(
            &session::current_session().unwrap(),
            ProcessSetId::GLOBAL,
            Arc::new([]),
        )
    };
    assert_eq!(
        (crate::completed_join_count(), named(), named()),
        (0, ".2".to_owned(), ".3".to_owned())
    );
    assert_eq!(
        outcome(call(&a_call(OperationCode::Join), &["j"], &input, None).unwrap()).0,
        EngineStatusCode::Success
    );
    assert_eq!(
        (crate::completed_join_count(), named(), named()),
        (1, ".1.0".to_owned(), ".1.1".to_owned())
    );
    crate::restart_numbers_after_join();
    assert_eq!((crate::completed_join_count(), named()), (2, ".2.0".to_owned()));

    let unknown = SubmissionHeader { process_set: 9, ..a_call(OperationCode::Allreduce) };
    let (code, text) = call(&unknown, &["a"], &input, None).unwrap_err();
    assert_eq!((code, &*text), (EngineStatusCode::Usage as u32, "no such process set: 9"));
    let (code, text) =
        call(&a_call(OperationCode::Allreduce), &["a", "a"], &input, None).unwrap_err();
    assert_eq!(code, EngineStatusCode::Usage as u32);
    assert!(text.contains("still in flight"), "{text}");
    assert!(call(&SubmissionHeader { operation: 77, ..unknown }, &["a"], &input, None).is_err());
    session::shutdown();
    assert_eq!(crate::completed_join_count(), 0);
}
