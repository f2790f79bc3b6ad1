// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Checks of a request that need no other rank. They split it into the part that all ranks must
//! agree on and the local part.

use std::sync::Arc;
use std::time::Instant;

use farandole_kernels::{Buffer, DataType, MemoryKind, ReduceOp};
use farandole_negotiation::{CollectiveCall, MemorySite, RequestSignature};
use farandole_world::{ProcessSetId, Rank, format_counted_noun};

use crate::devices::EngineDevices;
use crate::set::{PendingEntry, row_share};
use crate::{CollectiveRequest, Error, RequestHandle, RequestKind, Result};

/// Scale factors that do not change values.
const NEUTRAL_FACTORS: (u64, u64) = (1f64.to_bits(), 1f64.to_bits());

/// The process set and the devices of the calling rank.
pub(crate) struct RequestCheckScope<'a> {
    /// Members of the process set.
    pub(crate) ranks: &'a [Rank],
    /// This rank, one of them.
    pub(crate) me: Rank,
    /// Devices whose memory requests may use.
    pub(crate) devices: &'a EngineDevices,
}

/// Checks a request. Splits it into this rank's part and the part that must be equal on all ranks.
pub(crate) fn check_request(
    request: CollectiveRequest,
    place: &RequestCheckScope<'_>,
    (group, group_size): (u64, u32),
    since: Instant,
) -> Result<(PendingEntry, RequestSignature)> {
    let CollectiveRequest { name, kind, dtype, mut shape, input, output, process_set, .. } =
        request;
    let (ready, priority) = (request.ready, request.priority);
    let name: Arc<str> = name.into();
    let operation = kind.operation_name();
    let site = place.memory_site(&name, &kind, &input, output.as_ref())?;
    check_buffer_size("input", &name, &input, shape_bytes(&shape, dtype))?;
    let (call, rows) = match kind {
        RequestKind::Allreduce { op, prescale, postscale } => {
            let call = CollectiveCall::Allreduce {
                op,
                prescale: prescale.to_bits(),
                postscale: postscale.to_bits(),
            };
            (call, Vec::new())
        }
        RequestKind::Broadcast { root } => {
            (place.checked_broadcast_call(root, process_set)?, Vec::new())
        }
        RequestKind::Allgather => {
            (CollectiveCall::Allgather, vec![zero_first_dimension(&mut shape, operation, &name)?])
        }
        RequestKind::Alltoall { splits } => {
            let members = u32::try_from(place.ranks.len()).unwrap_or(u32::MAX);
            let rows = zero_first_dimension(&mut shape, operation, &name)?;
            (
                CollectiveCall::Alltoall { members },
                resolve_splits(splits, rows, place.ranks.len(), &name)?,
            )
        }
        RequestKind::Reducescatter { op, prescale, postscale } => {
            if shape.is_empty() {
                return Err(Error::Scalar { operation, tensor: name });
            }
            if !matches!(op.with_unrounded_partials(), ReduceOp::Average | ReduceOp::Sum) {
                return Err(Error::Reduction { operation, op, tensor: name });
            }
            let (prescale, postscale) = (prescale.to_bits(), postscale.to_bits());
            (CollectiveCall::Reducescatter { op, prescale, postscale }, Vec::new())
        }
        RequestKind::Barrier => (CollectiveCall::Barrier, Vec::new()),
        // A join cannot be in a group, because it waits for all other operations.
        RequestKind::Join { .. } if group_size > 0 => {
            return Err(Error::Group { members: group_size as usize, sets: 1 });
        }
        RequestKind::Join { allow_gather } => {
            (CollectiveCall::Join { gather: allow_gather }, Vec::new())
        }
        RequestKind::Change(change) => {
            let (topic, numbers) = change.encode_topic_and_numbers();
            shape = numbers;
            (CollectiveCall::Change(topic), Vec::new())
        }
    };
    if dtype == DataType::Bool
        && call
            .reduction_and_factors()
            .is_some_and(|(_, before, after)| (before, after) != NEUTRAL_FACTORS)
    {
        return Err(Error::Factors { operation, dtype, tensor: name });
    }
    let signature = RequestSignature { call, dtype, shape, site, group, group_size };
    if let Some(output) = &output
        && let Some(expected) = place.output_bytes(&signature)
    {
        check_buffer_size("output", &name, output, expected)?;
    }
    let matter = signature.process_set_change_text();
    let entry = PendingEntry {
        handle: RequestHandle(0),
        name,
        operation,
        change_text: matter,
        group,
        rows,
        input,
        output,
        ready,
        priority,
        since,
        missing: None,
    };
    Ok((entry, signature))
}

impl RequestCheckScope<'_> {
    fn checked_broadcast_call(&self, root: Rank, set: ProcessSetId) -> Result<CollectiveCall> {
        match self.ranks.contains(&root) {
            true => Ok(CollectiveCall::Broadcast { root: root.0 }),
            false => Err(Error::RootNotInSet { root, set }),
        }
    }

    /// Returns the bytes of the output. `None` if members have different numbers of rows: the size
    /// is unknown until all ranks have submitted.
    fn output_bytes(&self, signature: &RequestSignature) -> Option<u64> {
        match signature.call {
            CollectiveCall::Allgather | CollectiveCall::Alltoall { .. } => None,
            call if call.moves_no_data() => Some(0),
            CollectiveCall::Reducescatter { .. } => {
                let rows = signature.shape.first().copied().unwrap_or_default();
                let member =
                    self.ranks.iter().position(|rank| *rank == self.me).unwrap_or_default();
                Some(
                    row_share(rows, member, self.ranks.len()).saturating_mul(signature.row_bytes()),
                )
            }
            _ => Some(signature.row_or_tensor_bytes()),
        }
    }

    /// Returns the site of the input and the output. An output that the engine allocates is in host
    /// memory, or like the input if its size is not known yet.
    fn memory_site(
        &self,
        name: &Arc<str>,
        kind: &RequestKind,
        input: &Buffer,
        output: Option<&Buffer>,
    ) -> Result<MemorySite> {
        let of = |buffer: &Buffer| match buffer.memory_kind() {
            MemoryKind::Device(ordinal) if !self.devices.has_device(ordinal) => {
                Err(Error::UnknownDevice { tensor: Arc::clone(name), ordinal })
            }
            place => Ok(self.devices.memory_site(place)),
        };
        let own = of(input)?;
        match (output, kind) {
            (Some(output), _) => Ok(own.union_with(of(output)?)),
            (None, RequestKind::Allgather | RequestKind::Alltoall { .. }) => Ok(own),
            (None, _) => Ok(own.union_with(MemorySite::Host)),
        }
    }
}

fn shape_bytes(shape: &[u64], dtype: DataType) -> u64 {
    let elements = shape.iter().fold(1u64, |product, dim| product.saturating_mul(*dim));
    elements.saturating_mul(dtype.element_size() as u64)
}

fn check_buffer_size(
    which: &'static str,
    name: &Arc<str>,
    buffer: &Buffer,
    expected: u64,
) -> Result<()> {
    match buffer.len() as u64 {
        actual if actual == expected => Ok(()),
        actual => Err(Error::BufferSize { which, tensor: Arc::clone(name), expected, actual }),
    }
}

/// Takes the first dimension out of the shape, because it may differ between ranks.
fn zero_first_dimension(
    shape: &mut [u64],
    operation: &'static str,
    name: &Arc<str>,
) -> Result<u64> {
    let rows =
        shape.first_mut().ok_or_else(|| Error::Scalar { operation, tensor: Arc::clone(name) })?;
    Ok(std::mem::take(rows))
}

/// Returns the number of rows for each member.
fn resolve_splits(
    splits: Option<Vec<u64>>,
    rows: u64,
    members: usize,
    name: &Arc<str>,
) -> Result<Vec<u64>> {
    let refuse = |reason: String| Err(Error::Splits { tensor: Arc::clone(name), reason });
    let Some(splits) = splits else {
        return match rows % members as u64 {
            0 => Ok(vec![rows / members as u64; members]),
            _ => {
                let ranks = format_counted_noun(members as u64, "rank");
                refuse(format!("{rows} rows cannot be split evenly among {ranks}"))
            }
        };
    };
    if splits.len() != members {
        return refuse(format!("one number for each of {members} ranks: {splits:?}"));
    }
    // The numbers come from the caller, and a sum that wraps could equal the rows.
    match splits.iter().try_fold(0u64, |sum, split| sum.checked_add(*split)) {
        Some(sum) if sum == rows => Ok(splits),
        _ => refuse(format!("they must add up to the {rows} rows of the tensor: {splits:?}")),
    }
}
