// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One custom call, from XLA's addresses to its status.
#![expect(unsafe_code, reason = "reads and writes at the addresses that XLA passes")]

use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use farandole_door::{EngineTable, OperationCode, SubmissionOutcome, TensorRequest};

use super::call_status::{XlaCallStatus, write_failure};
use super::plan::{self, PlannedCollective, XlaCallPlan};
use crate::collective_node::group_tensor_name;
use crate::collective_run::{EMPTY_OUTPUT, engine_dtype_number};
use crate::connection::{check_status, connected_engine_table, query_placement, tensorflow_code};
use crate::context::{KernelFailure, TensorflowCode};
use crate::output::EngineOutput;
use crate::world;

/// Storage of results: each tensor's, then the token's, which orders calls and carries nothing.
type XlaOutputAddresses = *const *mut c_void;

/// Runs a collective for XLA, which calls this function by its registered name.
///
/// # Safety
/// XLA calls it with the addresses of inputs and outputs, the text, its length and a status.
pub(super) unsafe extern "C" fn run_custom_call(
    outputs: XlaOutputAddresses,
    inputs: *const *const c_void,
    text: *const c_char,
    length: usize,
    status: *mut XlaCallStatus,
) {
    // A panic must not unwind into XLA.
    let ran = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: XLA's text, of this length.
        let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
        let text =
            std::str::from_utf8(text).map_err(|_| "the call's text is not UTF-8".to_owned())?;
        // SAFETY: XLA's addresses fit the program in which the text stands.
        unsafe { execute_plan(&plan::parse_call_plan(text)?, outputs, inputs) }
    }));
    if let Err(text) = ran.unwrap_or_else(|_| Err("the custom call panicked".to_owned())) {
        // SAFETY: of this call.
        unsafe { write_failure(status, &text) };
    }
}

/// # Safety
/// Like [`run_custom_call`]; the plan fits the addresses.
unsafe fn execute_plan(
    plan: &XlaCallPlan,
    outputs: XlaOutputAddresses,
    inputs: *const *const c_void,
) -> Result<(), String> {
    // SAFETY: the caller's promise, for all of these; every call has a token, which is written for
    // order's sake.
    unsafe {
        let token = match plan {
            XlaCallPlan::Probe => {
                let number = (*inputs).cast::<i32>().read_unaligned();
                (*outputs).cast::<i32>().write_unaligned(2 * number);
                1
            }
            XlaCallPlan::WorldQuery { question, process_set } => {
                let number = world::answer_world_query(*question, *process_set)
                    .map_err(|failure| failure.text)?;
                (*outputs).cast::<i32>().write_unaligned(number);
                1
            }
            XlaCallPlan::Collective(operation, collective) => {
                run_collective(*operation, collective, outputs, inputs)
                    .map_err(|text| format!("Farandole{operation:?}: {text}"))?;
                collective.tensors.len()
            }
        };
        (*outputs.add(token)).cast::<i32>().write_unaligned(0);
    }
    Ok(())
}

/// One collective in progress; lives on the stack of the thread that drives it.
struct PendingXlaCollective<'a> {
    table: &'static EngineTable,
    operation: OperationCode,
    collective: &'a PlannedCollective,
    outputs: XlaOutputAddresses,
    result: Result<(), String>,
}

/// # Safety
/// Like [`execute_plan`].
unsafe fn run_collective(
    operation: OperationCode,
    collective: &PlannedCollective,
    outputs: XlaOutputAddresses,
    inputs: *const *const c_void,
) -> Result<(), String> {
    let table = connected_engine_table().map_err(|failure| failure.text)?;
    if collective.ranks != 0 {
        // A compiled function has fixed shapes, and with other ranks the results would have other
        // ones.
        let now = query_placement(collective.call.process_set).map_err(failure_text)?.set_size;
        if now != collective.ranks {
            return Err(format!(
                "the function was compiled for another number of ranks, trace it again: {} then, \
                 {now} now",
                collective.ranks
            ));
        }
    }
    let count = collective.tensors.len();
    let names: Vec<String> =
        (0..count).map(|index| group_tensor_name(&collective.name, index, count)).collect();
    // Only the members' rows tell how large these become.
    let brings = matches!(operation, OperationCode::Allgather | OperationCode::Alltoall);
    let request = |(index, name): (usize, &String)| {
        let tensor = &collective.tensors[index];
        // SAFETY: XLA passes one address for each tensor.
        let (input, output) = unsafe { (*inputs.add(index), *outputs.add(index)) };
        let output = if output.is_null() { EMPTY_OUTPUT.get() } else { output };
        TensorRequest {
            name: name.as_ptr().cast(),
            name_length: name.len(),
            dtype: engine_dtype_number(tensor.dtype),
            rank: u32::try_from(tensor.shape.len()).unwrap_or(u32::MAX),
            shape: tensor.shape.as_ptr(),
            input: if input.is_null() { EMPTY_OUTPUT.get() } else { input },
            output: if brings { std::ptr::null_mut() } else { output },
            output_bytes: if brings { 0 } else { tensor.output_bytes },
            splits: std::ptr::null(),
            split_count: 0,
        }
    };
    let requests: Vec<TensorRequest> = names.iter().enumerate().map(request).collect();
    let mut waiting =
        PendingXlaCollective { table, operation, collective, outputs, result: Ok(()) };
    let mut message = [0u8; 1024];
    // SAFETY: an attended call has run `receive_outcome` when it returns; until then all objects
    // live.
    let code = unsafe {
        let (context, message): (*mut PendingXlaCollective, *mut [u8; 1024]) =
            (&raw mut waiting, &raw mut message);
        (table.submit)(
            &raw const collective.call,
            requests.as_ptr(),
            count,
            receive_outcome,
            context.cast(),
            message.cast(),
            1024,
        )
    };
    check_status(code, &message).map_err(failure_text)?;
    waiting.result
}

/// # Safety
/// The engine calls it once, with the `PendingXlaCollective` that `collect` waits for.
unsafe extern "C" fn receive_outcome(context: *mut c_void, outcome: *const SubmissionOutcome) {
    // SAFETY: `collect` waits, and looks at it afterwards; the outcome lives for this call.
    let (waiting, outcome) = unsafe { (&mut *context.cast::<PendingXlaCollective>(), &*outcome) };
    waiting.result = if let Some(code) = tensorflow_code(outcome.code) {
        // SAFETY: terminated.
        let text = unsafe { CStr::from_ptr(outcome.message) }.to_string_lossy().into_owned();
        Err(failure_text(KernelFailure { code, text }))
    } else {
        // SAFETY: of this call.
        let brought = unsafe {
            EngineOutput::from_outcome(waiting.table, outcome.outputs, outcome.output_count)
        };
        waiting.copy_outputs(&brought)
    };
}

/// Returns the text of a failure. XLA has one code for all failures, so the prefix of the text
/// marks the failures that elastic training can recover from.
fn failure_text(failure: KernelFailure) -> String {
    let lost =
        if failure.code == TensorflowCode::Unknown { "FarandoleInternalError: " } else { "" };
    format!("{lost}{}", failure.text)
}

impl PendingXlaCollective<'_> {
    /// Copies the outputs of the engine to XLA's output buffers.
    fn copy_outputs(&self, brought: &[EngineOutput<'_>]) -> Result<(), String> {
        if !matches!(self.operation, OperationCode::Allgather | OperationCode::Alltoall) {
            return Ok(());
        }
        for (index, (tensor, output)) in self.collective.tensors.iter().zip(brought).enumerate() {
            let (rows, bytes) = (output.member_rows(), output.memory_bytes());
            // The shapes of the outputs are part of the compiled program.
            if rows.iter().any(|other| *other != rows[0]) || bytes.len() != tensor.output_bytes {
                return Err(format!(
                    "compiled functions need the same number of rows from every rank: {rows:?}"
                ));
            }
            // SAFETY: XLA has room for so many bytes there, for the program says so.
            unsafe {
                let room = (*self.outputs.add(index)).cast::<u8>();
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), room, bytes.len());
            }
        }
        Ok(())
    }
}
