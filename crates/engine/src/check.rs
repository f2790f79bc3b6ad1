// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Checks of a request without other ranks, then its part that all ranks must agree on, and its
//! local part.

use std::sync::Arc;
use std::time::Instant;

use farandole_collectives::{Buffer, DataType, Place as Where, ReduceOp};
use farandole_world::{ProcessSetId, Rank};

use crate::devices::Devices;
use crate::set::{Entry, share_of};
use crate::signature::{Call, Signature, Site};
use crate::{Error, Handle, Kind, Request, Result};

/// Scale factors that change nothing.
const PLAIN: (u64, u64) = (1f64.to_bits(), 1f64.to_bits());

/// The place of the calling rank.
pub(crate) struct Place<'a> {
    /// Members of the process set.
    pub(crate) ranks: &'a [Rank],
    /// This rank, one of them.
    pub(crate) me: Rank,
    /// Devices whose memory may be named.
    pub(crate) devices: &'a Devices,
}

/// Splits a request into this rank's part and the part that is equal on all ranks.
pub(crate) fn check(
    request: Request,
    place: &Place<'_>,
    (group, group_size): (u64, u32),
    since: Instant,
) -> Result<(Entry, Signature)> {
    let Request { name, kind, dtype, mut shape, input, output, process_set, ready } = request;
    let name: Arc<str> = name.into();
    let operation = kind.name();
    let site = place.site(&name, &kind, &input, output.as_ref())?;
    size("input", &name, &input, bytes(&shape, dtype))?;
    let (call, rows) = match kind {
        Kind::Allreduce { op, prescale, postscale } => {
            let call = Call::Allreduce {
                op,
                prescale: prescale.to_bits(),
                postscale: postscale.to_bits(),
            };
            (call, Vec::new())
        }
        Kind::Broadcast { root } => (place.broadcast(root, process_set)?, Vec::new()),
        Kind::Allgather => (Call::Allgather, vec![first(&mut shape, operation, &name)?]),
        Kind::Alltoall { splits } => {
            let members = u32::try_from(place.ranks.len()).unwrap_or(u32::MAX);
            let rows = first(&mut shape, operation, &name)?;
            (Call::Alltoall { members }, deal(splits, rows, place.ranks.len(), &name)?)
        }
        Kind::Reducescatter { op, prescale, postscale } => {
            if shape.is_empty() {
                return Err(Error::Scalar { operation, tensor: name });
            }
            if !matches!(op.exact(), ReduceOp::Average | ReduceOp::Sum) {
                return Err(Error::Reduction { operation, op, tensor: name });
            }
            let (prescale, postscale) = (prescale.to_bits(), postscale.to_bits());
            (Call::Reducescatter { op, prescale, postscale }, Vec::new())
        }
        Kind::Barrier => (Call::Barrier, Vec::new()),
        // Not in a group: it waits for the end of all others.
        Kind::Join { .. } if group_size > 0 => {
            return Err(Error::Group { members: group_size as usize, sets: 1 });
        }
        Kind::Join { allow_gather } => (Call::Join { gather: allow_gather }, Vec::new()),
        Kind::Change(change) => {
            let (topic, numbers) = change.spell();
            shape = numbers;
            (Call::Change(topic), Vec::new())
        }
    };
    if dtype == DataType::Bool
        && call.reduction().is_some_and(|(_, before, after)| (before, after) != PLAIN)
    {
        return Err(Error::Factors { operation, dtype, tensor: name });
    }
    let signature = Signature { call, dtype, shape, site, group, group_size };
    if let Some(output) = &output
        && let Some(expected) = place.output_bytes(&signature)
    {
        size("output", &name, output, expected)?;
    }
    let matter = signature.matter();
    let entry = Entry {
        handle: Handle(0),
        name,
        operation,
        matter,
        group,
        rows,
        input,
        output,
        ready,
        since,
        missing: None,
    };
    Ok((entry, signature))
}

impl Place<'_> {
    fn broadcast(&self, root: Rank, set: ProcessSetId) -> Result<Call> {
        match self.ranks.contains(&root) {
            true => Ok(Call::Broadcast { root: root.0 }),
            false => Err(Error::RootNotInSet { root, set }),
        }
    }

    /// The bytes of the output. If rows are counted, they are unknown until all ranks have
    /// submitted.
    fn output_bytes(&self, signature: &Signature) -> Option<u64> {
        match signature.call {
            Call::Allgather | Call::Alltoall { .. } => None,
            call if call.is_meeting() => Some(0),
            Call::Reducescatter { .. } => {
                let rows = signature.shape.first().copied().unwrap_or_default();
                let member =
                    self.ranks.iter().position(|rank| *rank == self.me).unwrap_or_default();
                Some(share_of(rows, member, self.ranks.len()).saturating_mul(signature.row_bytes()))
            }
            _ => Some(signature.unit_bytes()),
        }
    }

    /// Returns the memory of the tensors. An output that the engine brings is in host memory,
    /// unless its size is unknown yet.
    fn site(
        &self,
        name: &Arc<str>,
        kind: &Kind,
        input: &Buffer,
        output: Option<&Buffer>,
    ) -> Result<Site> {
        let of = |buffer: &Buffer| match buffer.place() {
            Where::Device(ordinal) if !self.devices.knows(ordinal) => {
                Err(Error::UnknownDevice { tensor: Arc::clone(name), ordinal })
            }
            place => Ok(self.devices.site(place)),
        };
        let own = of(input)?;
        match (output, kind) {
            (Some(output), _) => Ok(own.with(of(output)?)),
            (None, Kind::Allgather | Kind::Alltoall { .. }) => Ok(own),
            (None, _) => Ok(own.with(Site::Host)),
        }
    }
}

fn bytes(shape: &[u64], dtype: DataType) -> u64 {
    let elements = shape.iter().fold(1u64, |product, dim| product.saturating_mul(*dim));
    elements.saturating_mul(dtype.size() as u64)
}

fn size(which: &'static str, name: &Arc<str>, buffer: &Buffer, expected: u64) -> Result<()> {
    match buffer.len() as u64 {
        actual if actual == expected => Ok(()),
        actual => Err(Error::BufferSize { which, tensor: Arc::clone(name), expected, actual }),
    }
}

/// Takes the first dimension, which may differ between ranks, out of the shape.
fn first(shape: &mut [u64], operation: &'static str, name: &Arc<str>) -> Result<u64> {
    let rows =
        shape.first_mut().ok_or_else(|| Error::Scalar { operation, tensor: Arc::clone(name) })?;
    Ok(std::mem::take(rows))
}

/// Rows for each member.
fn deal(splits: Option<Vec<u64>>, rows: u64, members: usize, name: &Arc<str>) -> Result<Vec<u64>> {
    let refuse = |reason: String| Err(Error::Splits { tensor: Arc::clone(name), reason });
    let Some(splits) = splits else {
        return match rows % members as u64 {
            0 => Ok(vec![rows / members as u64; members]),
            _ => refuse(format!("{rows} rows cannot be split evenly among {members} ranks")),
        };
    };
    if splits.len() != members {
        return refuse(format!("one number for each of {members} ranks: {splits:?}"));
    }
    match splits.iter().try_fold(0u64, |sum, split| sum.checked_add(*split)) {
        Some(sum) if sum == rows => Ok(splits),
        _ => refuse(format!("they must add up to the {rows} rows of the tensor: {splits:?}")),
    }
}
