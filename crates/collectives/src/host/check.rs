// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Checks of an operation's buffers.

use super::peers::Peers;
use crate::{Buffer, DataType, Error, Place, ReduceOp, Result, Segment};

pub(super) fn allreduce(dtype: DataType, segments: &[Segment]) -> Result<()> {
    for segment in segments {
        on_host(segment)?;
        let (input, output) = (segment.input.len(), segment.output.len());
        if input != output {
            return refuse(format!("an allreduce of {input} bytes writes to {output} bytes"));
        }
        if !input.is_multiple_of(dtype.size()) {
            return refuse(format!("{input} bytes are no whole number of {dtype} elements"));
        }
    }
    Ok(())
}

/// Adasum is for vectors of floats.
pub(super) fn adasum(dtype: DataType) -> Result<()> {
    match dtype {
        DataType::F16 | DataType::Bf16 | DataType::F32 | DataType::F64 => Ok(()),
        _ => Err(Error::Unsupported { op: ReduceOp::Adasum, dtype }),
    }
}

pub(super) fn broadcast(peers: &Peers, root: usize, segments: &[Segment]) -> Result<()> {
    if root >= peers.size() {
        return refuse(format!("the root of a broadcast among {} members is {root}", peers.size()));
    }
    for segment in segments {
        on_host(segment)?;
        let (input, output) = (segment.input.len(), segment.output.len());
        if root == peers.member && input != output {
            return refuse(format!("a broadcast of {input} bytes writes to {output} bytes"));
        }
    }
    Ok(())
}

pub(super) fn allgather(peers: &Peers, segments: &[Segment], bytes: &[Vec<usize>]) -> Result<()> {
    if segments.len() != bytes.len() {
        return refuse(format!(
            "an allgather of {} tensors has sizes for {}",
            segments.len(),
            bytes.len()
        ));
    }
    for (segment, counts) in segments.iter().zip(bytes) {
        on_host(segment)?;
        if counts.len() != peers.size() {
            return refuse(format!(
                "an allgather among {} members has sizes for {}",
                peers.size(),
                counts.len()
            ));
        }
        let (mine, total) = (counts[peers.member], counts.iter().sum::<usize>());
        let (input, output) = (segment.input.len(), segment.output.len());
        if input != mine || output != total {
            return refuse(format!(
                "an allgather of {mine} of {total} bytes has an input of {input} and an output of \
                 {output}"
            ));
        }
    }
    Ok(())
}

pub(super) fn alltoall(
    peers: &Peers,
    segment: &Segment,
    sends: &[usize],
    receives: &[usize],
) -> Result<()> {
    on_host(segment)?;
    let size = peers.size();
    if sends.len() != size || receives.len() != size {
        let (sends, receives) = (sends.len(), receives.len());
        return refuse(format!(
            "an alltoall among {size} members has sizes for {sends} and {receives}"
        ));
    }
    let (input, output) = (segment.input.len(), segment.output.len());
    let (sent, received) = (sends.iter().sum::<usize>(), receives.iter().sum::<usize>());
    if input != sent || output != received {
        return refuse(format!(
            "an alltoall of {sent} bytes for {received} has an input of {input} and an output of \
             {output}"
        ));
    }
    let (kept, taken) = (sends[peers.member], receives[peers.member]);
    if kept != taken {
        return refuse(format!("a member sends itself {kept} bytes and receives {taken}"));
    }
    if overlap(&segment.input, &segment.output) {
        return refuse("the output of an alltoall overlaps its input".to_owned());
    }
    Ok(())
}

pub(super) fn reducescatter(
    peers: &Peers,
    dtype: DataType,
    segments: &[Segment],
    bytes: &[Vec<usize>],
) -> Result<()> {
    if segments.len() != bytes.len() {
        let (tensors, sizes) = (segments.len(), bytes.len());
        return refuse(format!("a reducescatter of {tensors} tensors has sizes for {sizes}"));
    }
    for (segment, counts) in segments.iter().zip(bytes) {
        on_host(segment)?;
        if counts.len() != peers.size() {
            let (size, counts) = (peers.size(), counts.len());
            return refuse(format!("a reducescatter among {size} members has sizes for {counts}"));
        }
        if let Some(odd) = counts.iter().find(|bytes| !bytes.is_multiple_of(dtype.size())) {
            return refuse(format!("{odd} bytes are no whole number of {dtype} elements"));
        }
        let (mine, total) = (counts[peers.member], counts.iter().sum::<usize>());
        let (input, output) = (segment.input.len(), segment.output.len());
        if input != total || output != mine {
            return refuse(format!(
                "a reducescatter of {mine} of {total} bytes has an input of {input} and an output \
                 of {output}"
            ));
        }
        let own = segment.input.slice(counts[..peers.member].iter().sum(), mine);
        if overlap(&segment.input, &segment.output) && own.address() != segment.output.address() {
            return refuse(
                "the output of a reducescatter overlaps the part of another member".to_owned(),
            );
        }
    }
    Ok(())
}

fn overlap(a: &Buffer, b: &Buffer) -> bool {
    let (start, other) = (a.address().addr(), b.address().addr());
    !a.is_empty() && !b.is_empty() && start < other + b.len() && other < start + a.len()
}

fn on_host(segment: &Segment) -> Result<()> {
    let place = |buffer: &Buffer| match buffer.place() {
        Place::Host => Ok(()),
        Place::Device(ordinal) => {
            let reason = "its memory was given to the host communicator; stage it first".to_owned();
            Err(Error::Device { ordinal, reason })
        }
    };
    place(&segment.input).and_then(|()| place(&segment.output))
}

fn refuse(reason: String) -> Result<()> {
    Err(Error::Shape { reason })
}
