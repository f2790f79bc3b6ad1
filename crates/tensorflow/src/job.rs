// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One run of a kernel, from its inputs to its callback.
#![expect(unsafe_code, reason = "passes addresses through the door and takes them back")]

use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;

use farandole_door::{Door, Operation, Outcome, Request};

use crate::callback::Callback;
use crate::context::{Code, Context, Failure, Status, Tensor};
use crate::exports::{door, place, refused, translated};
use crate::kernel::Node;
use crate::output::Brought;
use crate::world::{INT32, scalar};

/// TensorFlow's number of 64-bit integers.
const INT64: c_int = 9;

/// The objects that are kept until the engine is done.
struct Job {
    door: &'static Door,
    node: Arc<Node>,
    context: Context,
    callback: Callback,
    tensors: Vec<Pair>,
}

/// One tensor of a run.
struct Pair {
    /// `None` if its memory became the output's.
    input: Option<Tensor>,
    /// `None` if its extents are known only to the engine.
    output: Option<Tensor>,
    shape: Vec<i64>,
    dtype: c_int,
    splits: Option<Vec<u64>>,
}

/// Hands the operation to the engine; failures go through the callback, too.
pub(crate) fn begin(node: &Arc<Node>, context: Context, callback: Callback) {
    match prepare(node, context) {
        Ok((door, tensors)) => {
            submit(Job { door, node: Arc::clone(node), context, callback, tensors })
        }
        Err(failure) => end(node.operation, context, callback, Err(failure)),
    }
}

fn end(operation: Operation, context: Context, callback: Callback, result: Result<(), Failure>) {
    if let Err(mut failure) = result {
        failure.text = format!("Farandole{operation:?}: {}", failure.text);
        context.fail(&failure);
    }
    callback.run();
}

fn prepare(node: &Node, context: Context) -> Result<(&'static Door, Vec<Pair>), Failure> {
    let door = door()?;
    let count = match node.operation {
        Operation::Alltoall => 1,
        _ => context.num_inputs(),
    };
    if node.operation == Operation::Join {
        let nothing =
            Pair { input: None, output: None, shape: vec![0], dtype: INT64, splits: None };
        return Ok((door, vec![nothing]));
    }
    let status = Status::new(context.api);
    let tensors =
        (0..count).map(|index| pair(node, context, index, &status)).collect::<Result<_, _>>()?;
    Ok((door, tensors))
}

fn pair(node: &Node, context: Context, index: c_int, status: &Status) -> Result<Pair, Failure> {
    let input = context.input(index, status)?;
    let (shape, dtype) = (input.dims(), input.dtype());
    let mut pair = Pair { input: None, output: None, shape, dtype, splits: None };
    match node.operation {
        Operation::Allreduce | Operation::Broadcast => {
            // A reference of ours would keep TensorFlow from giving the memory away.
            drop(input);
            let (output, forwarded) = context.forward(index, &pair.shape, status)?;
            pair.input = (!forwarded).then(|| context.input(index, status)).transpose()?;
            pair.output = Some(output);
        }
        Operation::Reducescatter => {
            let mut share = pair.shape.clone();
            let Some(rows) = share.first_mut() else {
                let text = "reducescatter needs at least one dimension".to_owned();
                return Err(Failure { code: Code::InvalidArgument, text });
            };
            let whole = usize::try_from(*rows).unwrap_or(0);
            *rows = part(node.call.process_set, *rows)?;
            let bytes =
                input.bytes().checked_div(whole).unwrap_or(0) * usize::try_from(*rows).unwrap_or(0);
            pair.output = Some(context.allocate(index, dtype, &share, bytes)?);
            pair.input = Some(input);
        }
        Operation::Alltoall => {
            let splits = context.input(1, status)?.integers();
            pair.splits = (!splits.is_empty()).then(|| non_negative(&splits)).transpose()?;
            pair.input = Some(input);
        }
        Operation::Allgather | Operation::Barrier | Operation::Join => pair.input = Some(input),
    }
    Ok(pair)
}

/// This rank's share of rows: the first members take the remainder.
fn part(process_set: u32, rows: i64) -> Result<i64, Failure> {
    let place = place(process_set)?;
    let (size, rank) = (i64::from(place.set_size.max(1)), i64::from(place.set_rank));
    Ok(rows / size + i64::from(rank < rows % size))
}

fn non_negative(splits: &[i64]) -> Result<Vec<u64>, Failure> {
    splits.iter().map(|split| u64::try_from(*split)).collect::<Result<_, _>>().map_err(|_| {
        Failure {
            code: Code::InvalidArgument,
            text: format!("splits must not be negative: {splits:?}"),
        }
    })
}

fn submit(job: Job) {
    let node = Arc::clone(&job.node);
    let names = node.names(job.tensors.len());
    let requests: Vec<Request> =
        names.iter().zip(&job.tensors).map(|(name, pair)| request(name, pair)).collect();
    let (submit, call) = (job.door.submit, job.node.call);
    let context = Box::into_raw(Box::new(job));
    let mut message = [0u8; 1024];
    // SAFETY: names outlive the call, as do shapes until the engine has read them; the tensors live
    // in the job until `done` has taken it.
    let code = unsafe {
        let message: *mut [u8; 1024] = &raw mut message;
        submit(
            &raw const call,
            requests.as_ptr(),
            requests.len(),
            done,
            context.cast(),
            message.cast(),
            1024,
        )
    };
    if let Err(failure) = refused(code, &message) {
        // SAFETY: `done` does not run for what was refused (DO-2).
        let Job { node, context, callback, tensors, .. } = *unsafe { Box::from_raw(context) };
        drop(tensors);
        end(node.operation, context, callback, Err(failure));
    }
}

fn request(name: &str, pair: &Pair) -> Request {
    let output = pair.output.as_ref().map_or(std::ptr::null_mut(), Tensor::data);
    let input = pair.input.as_ref().map_or(output, Tensor::data);
    let output_bytes = pair.output.as_ref().map_or(0, Tensor::bytes);
    Request {
        name: name.as_ptr().cast(),
        name_length: name.len(),
        dtype: wire(pair.dtype),
        rank: u32::try_from(pair.shape.len()).unwrap_or(u32::MAX),
        // None is negative.
        shape: pair.shape.as_ptr().cast(),
        input,
        // Tensors without elements have no memory, but they do have an output.
        output: if pair.output.is_some() && output.is_null() { EMPTY.get() } else { output },
        output_bytes,
        splits: pair.splits.as_ref().map_or(std::ptr::null(), Vec::as_ptr),
        split_count: pair.splits.as_ref().map_or(0, Vec::len),
    }
}

/// An address for outputs of no bytes.
pub(crate) struct Empty(std::cell::UnsafeCell<[u8; 64]>);

impl Empty {
    pub(crate) fn get(&self) -> *mut c_void {
        self.0.get().cast()
    }
}

// SAFETY: nothing is ever read from or written to it.
unsafe impl Sync for Empty {}

pub(crate) static EMPTY: Empty = Empty(std::cell::UnsafeCell::new([0; 64]));

/// Runs on the engine's completion thread, or on the thread that attended.
///
/// # Safety
/// The door calls it once with the job of `submit`.
unsafe extern "C" fn done(context: *mut c_void, outcome: *const Outcome) {
    // SAFETY: boxed by `submit`, and given up to this one call.
    let Job { door, node, context, callback, tensors } =
        *unsafe { Box::from_raw(context.cast::<Job>()) };
    // SAFETY: the outcome and what it points at live for this call.
    let result = unsafe {
        let outcome = &*outcome;
        match translated(outcome.code) {
            Some(code) => {
                let text = CStr::from_ptr(outcome.message).to_string_lossy().into_owned();
                Err(Failure { code, text })
            }
            None => {
                let outputs = Brought::all(door, outcome.outputs, outcome.output_count);
                finish(node.operation, context, &tensors, outputs)
            }
        }
    };
    drop(tensors);
    end(node.operation, context, callback, result);
}

/// Makes outputs of what the engine brought.
fn finish(
    operation: Operation,
    context: Context,
    tensors: &[Pair],
    outputs: Vec<Brought<'_>>,
) -> Result<(), Failure> {
    let mut all_rows = Vec::new();
    for (index, (pair, output)) in (0..).zip(tensors.iter().zip(outputs)) {
        match operation {
            Operation::Join => {
                return scalar(context, 0, i32::try_from(output.number()).unwrap_or(-1));
            }
            Operation::Allgather | Operation::Alltoall => {
                let mut dims = pair.shape.clone();
                if let Some(first) = dims.first_mut() {
                    *first = output.rows().iter().map(|rows| rows.cast_signed()).sum();
                }
                all_rows.extend_from_slice(output.rows());
                output.give(context, index, (pair.dtype, &dims))?;
            }
            // The request had an output.
            _ => {}
        }
    }
    match operation {
        Operation::Allgather => matrix(context, tensors.len(), &all_rows),
        Operation::Alltoall => vector(context, &all_rows),
        _ => Ok(()),
    }
}

/// Rows by tensor and rank.
fn matrix(context: Context, tensors: usize, rows: &[u64]) -> Result<(), Failure> {
    let index = c_int::try_from(tensors).unwrap_or(c_int::MAX);
    let width = rows.len() / tensors.max(1);
    let dims = [tensors, width].map(|extent| i64::try_from(extent).unwrap_or(i64::MAX));
    let tensor = context.allocate(index, INT64, &dims, size_of_val(rows))?;
    // SAFETY: allocated with room for all of them.
    unsafe {
        std::ptr::copy_nonoverlapping(
            rows.as_ptr().cast::<u8>(),
            tensor.data().cast(),
            size_of_val(rows),
        )
    };
    Ok(())
}

/// Rows by rank.
fn vector(context: Context, rows: &[u64]) -> Result<(), Failure> {
    let count = i64::try_from(rows.len()).unwrap_or(i64::MAX);
    let tensor = context.allocate(1, INT32, &[count], rows.len() * size_of::<i32>())?;
    for (index, rows) in numbered(rows)?.into_iter().enumerate() {
        // SAFETY: allocated with room for all of them.
        unsafe { tensor.data().cast::<i32>().add(index).write_unaligned(rows) };
    }
    Ok(())
}

/// Returns the rows as the op's output type has them.
///
/// # Errors
/// `InvalidArgument` naming the rank whose rows are too many for it.
fn numbered(rows: &[u64]) -> Result<Vec<i32>, Failure> {
    let number = |(rank, rows): (usize, &u64)| {
        i32::try_from(*rows).map_err(|_| Failure {
            code: Code::InvalidArgument,
            text: format!(
                "alltoall received {rows} rows from rank {rank}; received_splits holds \
                           int32: send at most {} rows to a rank",
                i32::MAX
            ),
        })
    };
    rows.iter().enumerate().map(number).collect()
}

/// Returns the number on the wire of a TensorFlow element type. A type that the ops do not take
/// gets an unused number.
pub(crate) fn wire(dtype: c_int) -> u32 {
    match dtype {
        1 => 7,
        2 => 8,
        3 => 4,
        4 => 0,
        5 => 3,
        6 => 1,
        8 => 13,
        9 => 5,
        10 => 9,
        14 => 10,
        17 => 2,
        18 => 14,
        19 => 6,
        22 => 11,
        23 => 12,
        _ => u32::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_beyond_the_output_type_are_an_error_and_not_fewer_rows() {
        assert_eq!(numbered(&[0, 7, 2_147_483_647]).unwrap(), [0, 7, i32::MAX]);
        let failure = numbered(&[1, 2_147_483_648]).unwrap_err();
        assert!(failure.text.contains("2147483648 rows from rank 1"), "{}", failure.text);
    }
}
