// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Checks of an operation's buffers.

use farandole_kernels::{Buffer, DataType, MemoryKind, ReduceOp};

use super::peer_links::PeerLinks;
use crate::{Error, Result, TensorSegment};

pub(super) fn check_allreduce(dtype: DataType, segments: &[TensorSegment]) -> Result<()> {
    for segment in segments {
        require_host_memory(segment)?;
        let (input, output) = (segment.input.len(), segment.output.len());
        if input != output {
            return shape_error(format!("an allreduce of {input} bytes writes to {output} bytes"));
        }
        if !input.is_multiple_of(dtype.element_size()) {
            return shape_error(format!("{input} bytes are no whole number of {dtype} elements"));
        }
    }
    Ok(())
}

/// Checks that the type is a float, because Adasum is only defined for vectors of floats.
pub(super) fn check_adasum(dtype: DataType) -> Result<()> {
    match dtype {
        DataType::F16 | DataType::Bf16 | DataType::F32 | DataType::F64 => Ok(()),
        _ => Err(Error::Unsupported { op: ReduceOp::Adasum, dtype }),
    }
}

pub(super) fn check_broadcast(
    peers: &PeerLinks,
    root: usize,
    segments: &[TensorSegment],
) -> Result<()> {
    if root >= peers.member_count() {
        return shape_error(format!(
            "the root of a broadcast among {} members is {root}",
            peers.member_count()
        ));
    }
    for segment in segments {
        require_host_memory(segment)?;
        let (input, output) = (segment.input.len(), segment.output.len());
        // Only the input of the root is read.
        if root == peers.member && input != output {
            return shape_error(format!("a broadcast of {input} bytes writes to {output} bytes"));
        }
    }
    Ok(())
}

pub(super) fn check_allgather(
    peers: &PeerLinks,
    segments: &[TensorSegment],
    bytes: &[Vec<usize>],
) -> Result<()> {
    if segments.len() != bytes.len() {
        return shape_error(format!(
            "an allgather of {} tensors has sizes for {}",
            segments.len(),
            bytes.len()
        ));
    }
    for (segment, counts) in segments.iter().zip(bytes) {
        require_host_memory(segment)?;
        if counts.len() != peers.member_count() {
            return shape_error(format!(
                "an allgather among {} members has sizes for {}",
                peers.member_count(),
                counts.len()
            ));
        }
        let (mine, total) = (counts[peers.member], counts.iter().sum::<usize>());
        let (input, output) = (segment.input.len(), segment.output.len());
        if input != mine || output != total {
            return shape_error(format!(
                "an allgather of {mine} of {total} bytes has an input of {input} and an output of \
                 {output}"
            ));
        }
    }
    Ok(())
}

pub(super) fn check_alltoall(
    peers: &PeerLinks,
    segment: &TensorSegment,
    sends: &[usize],
    receives: &[usize],
) -> Result<()> {
    require_host_memory(segment)?;
    let size = peers.member_count();
    if sends.len() != size || receives.len() != size {
        let (sends, receives) = (sends.len(), receives.len());
        return shape_error(format!(
            "an alltoall among {size} members has sizes for {sends} and {receives}"
        ));
    }
    let (input, output) = (segment.input.len(), segment.output.len());
    let (sent, received) = (sends.iter().sum::<usize>(), receives.iter().sum::<usize>());
    if input != sent || output != received {
        return shape_error(format!(
            "an alltoall of {sent} bytes for {received} has an input of {input} and an output of \
             {output}"
        ));
    }
    let (kept, taken) = (sends[peers.member], receives[peers.member]);
    if kept != taken {
        return shape_error(format!("a member sends itself {kept} bytes and receives {taken}"));
    }
    if buffers_overlap(&segment.input, &segment.output) {
        return shape_error("the output of an alltoall overlaps its input".to_owned());
    }
    Ok(())
}

pub(super) fn check_reducescatter(
    peers: &PeerLinks,
    dtype: DataType,
    segments: &[TensorSegment],
    bytes: &[Vec<usize>],
) -> Result<()> {
    if segments.len() != bytes.len() {
        let (tensors, sizes) = (segments.len(), bytes.len());
        return shape_error(format!("a reducescatter of {tensors} tensors has sizes for {sizes}"));
    }
    for (segment, counts) in segments.iter().zip(bytes) {
        require_host_memory(segment)?;
        if counts.len() != peers.member_count() {
            let (size, counts) = (peers.member_count(), counts.len());
            return shape_error(format!(
                "a reducescatter among {size} members has sizes for {counts}"
            ));
        }
        if let Some(odd) = counts.iter().find(|bytes| !bytes.is_multiple_of(dtype.element_size())) {
            return shape_error(format!("{odd} bytes are no whole number of {dtype} elements"));
        }
        let (mine, total) = (counts[peers.member], counts.iter().sum::<usize>());
        let (input, output) = (segment.input.len(), segment.output.len());
        if input != total || output != mine {
            return shape_error(format!(
                "a reducescatter of {mine} of {total} bytes has an input of {input} and an output \
                 of {output}"
            ));
        }
        let own = segment.input.slice(counts[..peers.member].iter().sum(), mine);
        if buffers_overlap(&segment.input, &segment.output)
            && own.address() != segment.output.address()
        {
            return shape_error(
                "the output of a reducescatter overlaps the part of another member".to_owned(),
            );
        }
    }
    Ok(())
}

fn buffers_overlap(a: &Buffer, b: &Buffer) -> bool {
    let (start, other) = (a.address().addr(), b.address().addr());
    !a.is_empty() && !b.is_empty() && start < other + b.len() && other < start + a.len()
}

fn require_host_memory(segment: &TensorSegment) -> Result<()> {
    let place = |buffer: &Buffer| match buffer.memory_kind() {
        MemoryKind::Host => Ok(()),
        MemoryKind::Device(ordinal) => {
            let reason = "its memory was given to the host communicator; stage it first".to_owned();
            Err(Error::Device { ordinal, reason })
        }
    };
    place(&segment.input).and_then(|()| place(&segment.output))
}

fn shape_error(reason: String) -> Result<()> {
    Err(Error::Shape { reason })
}
