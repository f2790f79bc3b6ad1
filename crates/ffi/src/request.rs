// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Converts C requests to requests of the engine.
#![expect(unsafe_code, reason = "addresses come from the other side of the door")]

use std::sync::Arc;

use farandole::collectives::{Buffer, DataType, Place, ReduceOp};
use farandole::engine::{Kind, Request};
use farandole::session::Session;
use farandole::world::{ProcessSetId, Rank};
use farandole_door::{Call, Operation};

use crate::message::Failure;
use crate::names;

/// Returns the engine's requests.
///
/// # Safety
/// What `requests` point at is valid as `farandole_door::Door::submit` demands.
pub(crate) unsafe fn all(
    session: &Arc<Session>,
    call: &Call,
    requests: &[farandole_door::Request],
) -> Result<Vec<Request>, Failure> {
    // SAFETY: passed on from the caller.
    let requests = requests.iter().map(|request| unsafe { one(call, request) });
    let mut requests = requests.collect::<Result<Vec<_>, _>>()?;
    // A refused operation uses up no number; one in a set that is not there is refused by the
    // engine.
    if call.numbered != 0
        && let Ok(members) = session.engine().members(ProcessSetId(call.process_set))
    {
        let number = names::next(session, ProcessSetId(call.process_set), members);
        requests.iter_mut().for_each(|request| request.name.push_str(&number));
    }
    Ok(requests)
}

/// # Safety
/// Like [`all`].
unsafe fn one(call: &Call, request: &farandole_door::Request) -> Result<Request, Failure> {
    // SAFETY: `name_length` bytes are at `name`.
    let name = unsafe { slice(request.name.cast::<u8>(), request.name_length) };
    let name =
        std::str::from_utf8(name).map_err(|_| Failure::usage("a tensor's name is not UTF-8"))?;
    // SAFETY: `rank` extents are at `shape`.
    let shape = unsafe { slice(request.shape, request.rank as usize) };
    // SAFETY: `split_count` numbers are at `splits`.
    let splits = unsafe { slice(request.splits, request.split_count) };
    let splits = (!request.splits.is_null()).then_some(splits);
    let dtype = u8::try_from(request.dtype)
        .ok()
        .and_then(DataType::from_wire)
        .ok_or_else(|| Failure::usage(format!("no such element type: {}", request.dtype)))?;
    let kind = kind(call, splits)?;
    let bytes = |shape: &[u64]| {
        shape
            .iter()
            .try_fold(dtype.size() as u64, |bytes, extent| bytes.checked_mul(*extent))
            .and_then(|bytes| usize::try_from(bytes).ok())
            .ok_or_else(|| Failure::usage(format!("{name} is larger than any memory: {shape:?}")))
    };
    let length = bytes(shape)?;
    // SAFETY: the caller keeps `input` valid for its shape until `done` has run (DO-4); inputs are
    // only read.
    let input = unsafe { Buffer::from_raw(request.input.cast_mut().cast(), length, Place::Host) };
    if matches!(kind, Kind::Barrier | Kind::Join { .. }) {
        return Ok(Request {
            kind,
            process_set: ProcessSetId(call.process_set),
            ..Request::barrier(name, ProcessSetId::GLOBAL)
        });
    }
    let output = (!request.output.is_null()).then(|| {
        // SAFETY: as for `input`, and no other code touches the output meanwhile.
        unsafe { Buffer::from_raw(request.output.cast(), request.output_bytes, Place::Host) }
    });
    Ok(Request {
        name: name.to_owned(),
        kind,
        dtype,
        shape: shape.to_vec(),
        input,
        output,
        process_set: ProcessSetId(call.process_set),
        ready: None,
    })
}

fn kind(call: &Call, splits: Option<&[u64]>) -> Result<Kind, Failure> {
    let refused = || Failure::usage(format!("no such operation: {}", call.operation));
    let reduction = || {
        u8::try_from(call.reduction)
            .ok()
            .and_then(ReduceOp::from_wire)
            .ok_or_else(|| Failure::usage(format!("no such reduction: {}", call.reduction)))
    };
    let Call { prescale, postscale, .. } = *call;
    Ok(match Operation::from_number(call.operation).ok_or_else(refused)? {
        Operation::Allreduce => Kind::Allreduce { op: reduction()?, prescale, postscale },
        Operation::Broadcast => Kind::Broadcast { root: Rank(call.root) },
        Operation::Allgather => Kind::Allgather,
        Operation::Barrier => Kind::Barrier,
        Operation::Alltoall => Kind::Alltoall { splits: splits.map(<[u64]>::to_vec) },
        Operation::Reducescatter => Kind::Reducescatter { op: reduction()?, prescale, postscale },
        Operation::Join => Kind::Join { allow_gather: false },
    })
}

/// # Safety
/// `length` elements are at `first`, unless it is null.
unsafe fn slice<'a, T>(first: *const T, length: usize) -> &'a [T] {
    if first.is_null() || length == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(first, length) }
}
