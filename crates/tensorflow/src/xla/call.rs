// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One custom call, from XLA's addresses to its status.
#![expect(unsafe_code, reason = "reads and writes at the addresses that XLA passes")]

use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use farandole_door::{Door, Operation, Outcome, Request};

use super::plan::{self, Collective, Plan};
use super::registry::{Status, fail};
use crate::context::{Code, Failure};
use crate::exports::{door, place, refused, translated};
use crate::job::{EMPTY, wire};
use crate::kernel::member;
use crate::output::Brought;
use crate::world;

/// Storage of results: each tensor's, then the token's, which orders calls and carries nothing.
type Outputs = *const *mut c_void;

/// The function that XLA calls.
///
/// # Safety
/// XLA calls it with the addresses of inputs and outputs, the text, its length and a status.
pub(super) unsafe extern "C" fn run(
    outputs: Outputs,
    inputs: *const *const c_void,
    text: *const c_char,
    length: usize,
    status: *mut Status,
) {
    let ran = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: XLA's text, of this length.
        let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
        let text =
            std::str::from_utf8(text).map_err(|_| "the call's text is not UTF-8".to_owned())?;
        // SAFETY: XLA's addresses fit the program in which the text stands.
        unsafe { perform(&plan::read(text)?, outputs, inputs) }
    }));
    if let Err(text) = ran.unwrap_or_else(|_| Err("the custom call panicked".to_owned())) {
        // SAFETY: of this call.
        unsafe { fail(status, &text) };
    }
}

/// # Safety
/// Like [`run`]; the plan fits the addresses.
unsafe fn perform(
    plan: &Plan,
    outputs: Outputs,
    inputs: *const *const c_void,
) -> Result<(), String> {
    // SAFETY: the caller's promise, for all of these; every call has a token, which is written for
    // order's sake.
    unsafe {
        let token = match plan {
            Plan::Probe => {
                let number = (*inputs).cast::<i32>().read_unaligned();
                (*outputs).cast::<i32>().write_unaligned(2 * number);
                1
            }
            Plan::Question { question, process_set } => {
                let number =
                    world::answer(*question, *process_set).map_err(|failure| failure.text)?;
                (*outputs).cast::<i32>().write_unaligned(number);
                1
            }
            Plan::Collective(operation, collective) => {
                collect(*operation, collective, outputs, inputs)
                    .map_err(|text| format!("Farandole{operation:?}: {text}"))?;
                collective.tensors.len()
            }
        };
        (*outputs.add(token)).cast::<i32>().write_unaligned(0);
    }
    Ok(())
}

/// One collective in progress; lives on the stack of the thread that drives it.
struct Waiting<'a> {
    door: &'static Door,
    operation: Operation,
    collective: &'a Collective,
    outputs: Outputs,
    result: Result<(), String>,
}

/// # Safety
/// Like [`perform`].
unsafe fn collect(
    operation: Operation,
    collective: &Collective,
    outputs: Outputs,
    inputs: *const *const c_void,
) -> Result<(), String> {
    let door = door().map_err(|failure| failure.text)?;
    if collective.ranks != 0 {
        let now = place(collective.call.process_set).map_err(told)?.set_size;
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
        (0..count).map(|index| member(&collective.name, index, count)).collect();
    // Only the members' rows tell how large these become.
    let brings = matches!(operation, Operation::Allgather | Operation::Alltoall);
    let request = |(index, name): (usize, &String)| {
        let tensor = &collective.tensors[index];
        // SAFETY: XLA passes one address for each tensor.
        let (input, output) = unsafe { (*inputs.add(index), *outputs.add(index)) };
        let output = if output.is_null() { EMPTY.get() } else { output };
        Request {
            name: name.as_ptr().cast(),
            name_length: name.len(),
            dtype: wire(tensor.dtype),
            rank: u32::try_from(tensor.shape.len()).unwrap_or(u32::MAX),
            shape: tensor.shape.as_ptr(),
            input: if input.is_null() { EMPTY.get() } else { input },
            output: if brings { std::ptr::null_mut() } else { output },
            output_bytes: if brings { 0 } else { tensor.output_bytes },
            splits: std::ptr::null(),
            split_count: 0,
        }
    };
    let requests: Vec<Request> = names.iter().enumerate().map(request).collect();
    let mut waiting = Waiting { door, operation, collective, outputs, result: Ok(()) };
    let mut message = [0u8; 1024];
    // SAFETY: an attended call has run `done` when it returns; until then all of this stands.
    let code = unsafe {
        let (context, message): (*mut Waiting, *mut [u8; 1024]) =
            (&raw mut waiting, &raw mut message);
        (door.submit)(
            &raw const collective.call,
            requests.as_ptr(),
            count,
            done,
            context.cast(),
            message.cast(),
            1024,
        )
    };
    refused(code, &message).map_err(told)?;
    waiting.result
}

/// # Safety
/// The door calls it once, with what `collect` waits for.
unsafe extern "C" fn done(context: *mut c_void, outcome: *const Outcome) {
    // SAFETY: `collect` waits, and looks at it afterwards; the outcome lives for this call.
    let (waiting, outcome) = unsafe { (&mut *context.cast::<Waiting>(), &*outcome) };
    waiting.result = if let Some(code) = translated(outcome.code) {
        // SAFETY: terminated.
        let text = unsafe { CStr::from_ptr(outcome.message) }.to_string_lossy().into_owned();
        Err(told(Failure { code, text }))
    } else {
        // SAFETY: of this call.
        let brought = unsafe { Brought::all(waiting.door, outcome.outputs, outcome.output_count) };
        waiting.take(&brought)
    };
}

/// XLA has one code for all failures; elastic training must tell those apart that it can recover
/// from.
fn told(failure: Failure) -> String {
    let lost = if failure.code == Code::Unknown { "FarandoleInternalError: " } else { "" };
    format!("{lost}{}", failure.text)
}

impl Waiting<'_> {
    /// Copies what the engine brought to where XLA wants it.
    fn take(&self, brought: &[Brought<'_>]) -> Result<(), String> {
        if !matches!(self.operation, Operation::Allgather | Operation::Alltoall) {
            return Ok(());
        }
        for (index, (tensor, output)) in self.collective.tensors.iter().zip(brought).enumerate() {
            let (rows, bytes) = (output.rows(), output.bytes());
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
