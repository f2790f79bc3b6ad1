// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One run of a kernel, from its inputs to its callback.
#![expect(unsafe_code, reason = "passes addresses through the engine table and takes them back")]

use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;

use farandole_door::{EngineTable, OperationCode, SubmissionOutcome, TensorRequest};

use crate::callback::DoneCallback;
use crate::collective_node::CollectiveNode;
use crate::connection::{check_status, connected_engine_table, query_placement, tensorflow_code};
use crate::context::{
    KernelContext, KernelFailure, TensorflowCode, TensorflowStatus, TensorflowTensor,
};
use crate::output::EngineOutput;
use crate::world::{DT_INT32, set_scalar_output};

/// TensorFlow's number of 64-bit integers.
const DT_INT64: c_int = 9;

/// The objects that are kept until the engine is done.
struct CollectiveRun {
    table: &'static EngineTable,
    node: Arc<CollectiveNode>,
    context: KernelContext,
    callback: DoneCallback,
    tensors: Vec<TensorPair>,
}

/// One tensor of a run.
struct TensorPair {
    /// `None` if its memory became the output's.
    input: Option<TensorflowTensor>,
    /// `None` if its extents are known only to the engine.
    output: Option<TensorflowTensor>,
    shape: Vec<i64>,
    dtype: c_int,
    splits: Option<Vec<u64>>,
}

/// Hands the operation to the engine; failures go through the callback, too.
pub(crate) fn begin_run(
    node: &Arc<CollectiveNode>,
    context: KernelContext,
    callback: DoneCallback,
) {
    match prepare_run(node, context) {
        Ok((table, tensors)) => {
            submit_run(CollectiveRun { table, node: Arc::clone(node), context, callback, tensors })
        }
        Err(failure) => end_run(node.operation, context, callback, Err(failure)),
    }
}

fn end_run(
    operation: OperationCode,
    context: KernelContext,
    callback: DoneCallback,
    result: Result<(), KernelFailure>,
) {
    if let Err(mut failure) = result {
        failure.text = format!("Farandole{operation:?}: {}", failure.text);
        context.report_failure(&failure);
    }
    // After the report: TensorFlow may destroy the context as soon as the callback has run.
    callback.run();
}

fn prepare_run(
    node: &CollectiveNode,
    context: KernelContext,
) -> Result<(&'static EngineTable, Vec<TensorPair>), KernelFailure> {
    let table = connected_engine_table()?;
    let count = match node.operation {
        OperationCode::Alltoall => 1,
        _ => context.num_inputs(),
    };
    // A join has no tensors, but a submission needs at least one request.
    if node.operation == OperationCode::Join {
        let nothing =
            TensorPair { input: None, output: None, shape: vec![0], dtype: DT_INT64, splits: None };
        return Ok((table, vec![nothing]));
    }
    let status = TensorflowStatus::new(context.api);
    let tensors = (0..count)
        .map(|index| prepare_tensor_pair(node, context, index, &status))
        .collect::<Result<_, _>>()?;
    Ok((table, tensors))
}

fn prepare_tensor_pair(
    node: &CollectiveNode,
    context: KernelContext,
    index: c_int,
    status: &TensorflowStatus,
) -> Result<TensorPair, KernelFailure> {
    let input = context.get_input(index, status)?;
    let (shape, dtype) = (input.dims(), input.element_type());
    let mut pair = TensorPair { input: None, output: None, shape, dtype, splits: None };
    match node.operation {
        OperationCode::Allreduce | OperationCode::Broadcast => {
            // A reference of ours would keep TensorFlow from giving the memory away.
            drop(input);
            let (output, forwarded) = context.forward_or_allocate(index, &pair.shape, status)?;
            pair.input = (!forwarded).then(|| context.get_input(index, status)).transpose()?;
            pair.output = Some(output);
        }
        OperationCode::Reducescatter => {
            let mut share = pair.shape.clone();
            let Some(rows) = share.first_mut() else {
                let text = "reducescatter needs at least one dimension".to_owned();
                return Err(KernelFailure { code: TensorflowCode::InvalidArgument, text });
            };
            let whole = usize::try_from(*rows).unwrap_or(0);
            *rows = own_share_of_rows(node.call.process_set, *rows)?;
            let bytes = input.byte_size().checked_div(whole).unwrap_or(0)
                * usize::try_from(*rows).unwrap_or(0);
            pair.output = Some(context.allocate_output(index, dtype, &share, bytes)?);
            pair.input = Some(input);
        }
        OperationCode::Alltoall => {
            let splits = context.get_input(1, status)?.to_integers();
            pair.splits = (!splits.is_empty()).then(|| to_unsigned_splits(&splits)).transpose()?;
            pair.input = Some(input);
        }
        OperationCode::Allgather | OperationCode::Barrier | OperationCode::Join => {
            pair.input = Some(input)
        }
    }
    Ok(pair)
}

/// This rank's share of rows: the first members take the remainder.
fn own_share_of_rows(process_set: u32, rows: i64) -> Result<i64, KernelFailure> {
    let place = query_placement(process_set)?;
    let (size, rank) = (i64::from(place.set_size.max(1)), i64::from(place.set_rank));
    Ok(rows / size + i64::from(rank < rows % size))
}

fn to_unsigned_splits(splits: &[i64]) -> Result<Vec<u64>, KernelFailure> {
    splits.iter().map(|split| u64::try_from(*split)).collect::<Result<_, _>>().map_err(|_| {
        KernelFailure {
            code: TensorflowCode::InvalidArgument,
            text: format!("splits must not be negative: {splits:?}"),
        }
    })
}

fn submit_run(job: CollectiveRun) {
    let node = Arc::clone(&job.node);
    let names = node.tensor_names(job.tensors.len());
    let requests: Vec<TensorRequest> =
        names.iter().zip(&job.tensors).map(|(name, pair)| to_request(name, pair)).collect();
    let (submit, call) = (job.table.submit, job.node.call);
    let context = Box::into_raw(Box::new(job));
    let mut message = [0u8; 1024];
    // SAFETY: names outlive the call, as do shapes until the engine has read them; the tensors live
    // in the job until `receive_outcome` has taken it.
    let code = unsafe {
        let message: *mut [u8; 1024] = &raw mut message;
        submit(
            &raw const call,
            requests.as_ptr(),
            requests.len(),
            receive_outcome,
            context.cast(),
            message.cast(),
            1024,
        )
    };
    if let Err(failure) = check_status(code, &message) {
        // SAFETY: `receive_outcome` does not run for a refused submission (DO-2).
        let CollectiveRun { node, context, callback, tensors, .. } =
            *unsafe { Box::from_raw(context) };
        // As after a success: no reference of ours is left when the callback runs.
        drop(tensors);
        end_run(node.operation, context, callback, Err(failure));
    }
}

fn to_request(name: &str, pair: &TensorPair) -> TensorRequest {
    let output = pair.output.as_ref().map_or(std::ptr::null_mut(), TensorflowTensor::data_address);
    let input = pair.input.as_ref().map_or(output, TensorflowTensor::data_address);
    let output_bytes = pair.output.as_ref().map_or(0, TensorflowTensor::byte_size);
    TensorRequest {
        name: name.as_ptr().cast(),
        name_length: name.len(),
        dtype: engine_dtype_number(pair.dtype),
        rank: u32::try_from(pair.shape.len()).unwrap_or(u32::MAX),
        // None is negative.
        shape: pair.shape.as_ptr().cast(),
        input,
        // Tensors without elements have no memory, but they do have an output.
        output: if pair.output.is_some() && output.is_null() { EMPTY_OUTPUT.get() } else { output },
        output_bytes,
        splits: pair.splits.as_ref().map_or(std::ptr::null(), Vec::as_ptr),
        split_count: pair.splits.as_ref().map_or(0, Vec::len),
    }
}

/// An address for outputs of no bytes.
pub(crate) struct EmptyOutput(std::cell::UnsafeCell<[u8; 64]>);

impl EmptyOutput {
    pub(crate) fn get(&self) -> *mut c_void {
        self.0.get().cast()
    }
}

// SAFETY: nothing is ever read from or written to it.
unsafe impl Sync for EmptyOutput {}

pub(crate) static EMPTY_OUTPUT: EmptyOutput = EmptyOutput(std::cell::UnsafeCell::new([0; 64]));

/// Runs on the engine's completion thread, or on the thread that attended.
///
/// # Safety
/// The engine calls it once, with the run that `submit` was given.
unsafe extern "C" fn receive_outcome(context: *mut c_void, outcome: *const SubmissionOutcome) {
    // SAFETY: boxed by `submit`, and given up to this one call.
    let CollectiveRun { table, node, context, callback, tensors } =
        *unsafe { Box::from_raw(context.cast::<CollectiveRun>()) };
    // SAFETY: the outcome and all memory that it points at live for this call.
    let result = unsafe {
        let outcome = &*outcome;
        match tensorflow_code(outcome.code) {
            Some(code) => {
                let text = CStr::from_ptr(outcome.message).to_string_lossy().into_owned();
                Err(KernelFailure { code, text })
            }
            None => {
                let outputs =
                    EngineOutput::from_outcome(table, outcome.outputs, outcome.output_count);
                set_outputs(node.operation, context, &tensors, outputs)
            }
        }
    };
    // The inputs are released before the next nodes run, so that TensorFlow can forward their
    // memory.
    drop(tensors);
    end_run(node.operation, context, callback, result);
}

/// Sets the kernel's outputs from the outputs of the engine.
fn set_outputs(
    operation: OperationCode,
    context: KernelContext,
    tensors: &[TensorPair],
    outputs: Vec<EngineOutput<'_>>,
) -> Result<(), KernelFailure> {
    let mut all_rows = Vec::new();
    for (index, (pair, output)) in (0..).zip(tensors.iter().zip(outputs)) {
        match operation {
            OperationCode::Join => {
                return set_scalar_output(
                    context,
                    0,
                    i32::try_from(output.last_joined_rank()).unwrap_or(-1),
                );
            }
            OperationCode::Allgather | OperationCode::Alltoall => {
                let mut dims = pair.shape.clone();
                if let Some(first) = dims.first_mut() {
                    *first = output.member_rows().iter().map(|rows| rows.cast_signed()).sum();
                }
                all_rows.extend_from_slice(output.member_rows());
                output.move_to_output(context, index, (pair.dtype, &dims))?;
            }
            // The request had an output.
            _ => {}
        }
    }
    match operation {
        OperationCode::Allgather => set_rows_matrix_output(context, tensors.len(), &all_rows),
        OperationCode::Alltoall => set_rows_vector_output(context, &all_rows),
        _ => Ok(()),
    }
}

/// Rows by tensor and rank.
fn set_rows_matrix_output(
    context: KernelContext,
    tensors: usize,
    rows: &[u64],
) -> Result<(), KernelFailure> {
    let index = c_int::try_from(tensors).unwrap_or(c_int::MAX);
    let width = rows.len() / tensors.max(1);
    let dims = [tensors, width].map(|extent| i64::try_from(extent).unwrap_or(i64::MAX));
    let tensor = context.allocate_output(index, DT_INT64, &dims, size_of_val(rows))?;
    // SAFETY: allocated with room for all of them.
    unsafe {
        std::ptr::copy_nonoverlapping(
            rows.as_ptr().cast::<u8>(),
            tensor.data_address().cast(),
            size_of_val(rows),
        )
    };
    Ok(())
}

/// Rows by rank.
fn set_rows_vector_output(context: KernelContext, rows: &[u64]) -> Result<(), KernelFailure> {
    let count = i64::try_from(rows.len()).unwrap_or(i64::MAX);
    let tensor = context.allocate_output(1, DT_INT32, &[count], rows.len() * size_of::<i32>())?;
    for (index, rows) in to_int32_rows(rows)?.into_iter().enumerate() {
        // SAFETY: allocated with room for all of them.
        unsafe { tensor.data_address().cast::<i32>().add(index).write_unaligned(rows) };
    }
    Ok(())
}

/// Returns the rows as the op's output type has them.
///
/// # Errors
/// `InvalidArgument` naming the rank whose rows are too many for it.
fn to_int32_rows(rows: &[u64]) -> Result<Vec<i32>, KernelFailure> {
    let number = |(rank, rows): (usize, &u64)| {
        i32::try_from(*rows).map_err(|_| KernelFailure {
            code: TensorflowCode::InvalidArgument,
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
pub(crate) fn engine_dtype_number(dtype: c_int) -> u32 {
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
        assert_eq!(to_int32_rows(&[0, 7, 2_147_483_647]).unwrap(), [0, 7, i32::MAX]);
        let failure = to_int32_rows(&[1, 2_147_483_648]).unwrap_err();
        assert!(failure.text.contains("2147483648 rows from rank 1"), "{}", failure.text);
    }
}
