// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Converts C requests to requests of the engine.
#![expect(unsafe_code, reason = "addresses come from a C caller")]

use std::sync::Arc;

use farandole::engine::{CollectiveRequest, RequestKind};
use farandole::kernels::{Buffer, DataType, MemoryKind, ReduceOp};
use farandole::session::Session;
use farandole::world::{ProcessSetId, Rank};
use farandole_door::{OperationCode, SubmissionHeader};

use crate::operation_numbers;
use crate::submission_failure::SubmissionFailure;

/// Returns the engine's requests.
///
/// # Safety
/// What `requests` point at is valid as `farandole_door::Door::submit` demands.
pub(crate) unsafe fn convert_requests(
    session: &Arc<Session>,
    call: &SubmissionHeader,
    requests: &[farandole_door::TensorRequest],
) -> Result<Vec<CollectiveRequest>, SubmissionFailure> {
    // SAFETY: passed on from the caller.
    let requests = requests.iter().map(|request| unsafe { convert_request(call, request) });
    let mut requests = requests.collect::<Result<Vec<_>, _>>()?;
    // A refused operation uses up no number; one in a set that is not there is refused by the
    // engine.
    if call.numbered != 0
        && let Ok(members) = session.engine().process_set_members(ProcessSetId(call.process_set))
    {
        let number = operation_numbers::next_operation_suffix(
            session,
            ProcessSetId(call.process_set),
            members,
        );
        requests.iter_mut().for_each(|request| request.name.push_str(&number));
    }
    Ok(requests)
}

/// # Safety
/// Like [`convert_requests`].
unsafe fn convert_request(
    call: &SubmissionHeader,
    request: &farandole_door::TensorRequest,
) -> Result<CollectiveRequest, SubmissionFailure> {
    // SAFETY: `name_length` bytes are at `name`.
    let name = unsafe { slice_from_raw(request.name.cast::<u8>(), request.name_length) };
    let name = std::str::from_utf8(name)
        .map_err(|_| SubmissionFailure::usage_error("a tensor's name is not UTF-8"))?;
    // SAFETY: `rank` extents are at `shape`.
    let shape = unsafe { slice_from_raw(request.shape, request.rank as usize) };
    // SAFETY: `split_count` numbers are at `splits`.
    let splits = unsafe { slice_from_raw(request.splits, request.split_count) };
    // A null pointer means an even split; an empty list is a mistake that the engine reports.
    let splits = (!request.splits.is_null()).then_some(splits);
    let dtype =
        u8::try_from(request.dtype).ok().and_then(DataType::from_wire).ok_or_else(|| {
            SubmissionFailure::usage_error(format!("no such element type: {}", request.dtype))
        })?;
    let kind = request_kind(call, splits)?;
    let bytes = |shape: &[u64]| {
        // Checked, because the shape comes from C and a wrapped size would be read beyond its end.
        shape
            .iter()
            .try_fold(dtype.element_size() as u64, |bytes, extent| bytes.checked_mul(*extent))
            .and_then(|bytes| usize::try_from(bytes).ok())
            .ok_or_else(|| {
                SubmissionFailure::usage_error(format!(
                    "{name} is larger than any memory: {shape:?}"
                ))
            })
    };
    let length = bytes(shape)?;
    // SAFETY: the caller keeps `input` valid for its shape until `done` has run (DO-4); inputs are
    // only read.
    let input =
        unsafe { Buffer::from_raw(request.input.cast_mut().cast(), length, MemoryKind::Host) };
    // A barrier and a join read no memory of the caller.
    if matches!(kind, RequestKind::Barrier | RequestKind::Join { .. }) {
        return Ok(CollectiveRequest {
            kind,
            process_set: ProcessSetId(call.process_set),
            ..CollectiveRequest::barrier(name, ProcessSetId::GLOBAL)
        });
    }
    let output = (!request.output.is_null()).then(|| {
        // SAFETY: as for `input`, and no other code touches the output meanwhile.
        unsafe { Buffer::from_raw(request.output.cast(), request.output_bytes, MemoryKind::Host) }
    });
    Ok(CollectiveRequest {
        name: name.to_owned(),
        kind,
        dtype,
        shape: shape.to_vec(),
        input,
        output,
        process_set: ProcessSetId(call.process_set),
        ready: None,
        priority: 0,
    })
}

fn request_kind(
    call: &SubmissionHeader,
    splits: Option<&[u64]>,
) -> Result<RequestKind, SubmissionFailure> {
    let refused =
        || SubmissionFailure::usage_error(format!("no such operation: {}", call.operation));
    let reduction = || {
        u8::try_from(call.reduction).ok().and_then(ReduceOp::from_wire).ok_or_else(|| {
            SubmissionFailure::usage_error(format!("no such reduction: {}", call.reduction))
        })
    };
    let SubmissionHeader { prescale, postscale, .. } = *call;
    Ok(match OperationCode::from_number(call.operation).ok_or_else(refused)? {
        OperationCode::Allreduce => {
            RequestKind::Allreduce { op: reduction()?, prescale, postscale }
        }
        OperationCode::Broadcast => RequestKind::Broadcast { root: Rank(call.root) },
        OperationCode::Allgather => RequestKind::Allgather,
        OperationCode::Barrier => RequestKind::Barrier,
        OperationCode::Alltoall => RequestKind::Alltoall { splits: splits.map(<[u64]>::to_vec) },
        OperationCode::Reducescatter => {
            RequestKind::Reducescatter { op: reduction()?, prescale, postscale }
        }
        OperationCode::Join => RequestKind::Join { allow_gather: false },
    })
}

/// # Safety
/// `length` elements are at `first`, unless it is null.
unsafe fn slice_from_raw<'a, T>(first: *const T, length: usize) -> &'a [T] {
    if first.is_null() || length == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(first, length) }
}
