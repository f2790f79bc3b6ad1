// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Operations as NCCL calls. The calls of one operation form a group, which NCCL fuses.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::ffi::c_void;

use farandole_collectives::{Buffer, DataType, Operation, ReduceOp, Segment};

use super::{Comm, Nccl, Stream};
use crate::Result;

const BYTE: i32 = 1;
const SUM: i32 = 0;
const AVERAGE: i32 = 4;
/// A factor is read before the call returns.
const IMMEDIATE: i32 = 1;

/// NCCL's number of a type, and how many of it make one element: complex numbers are reduced by
/// parts.
fn kind(dtype: DataType) -> Option<(i32, usize)> {
    Some(match dtype {
        DataType::I8 => (0, 1),
        DataType::U8 => (1, 1),
        DataType::I32 => (2, 1),
        DataType::U32 => (3, 1),
        DataType::I64 => (4, 1),
        DataType::U64 => (5, 1),
        DataType::F16 => (6, 1),
        DataType::F32 => (7, 1),
        DataType::F64 => (8, 1),
        DataType::Bf16 => (9, 1),
        DataType::F8E4M3 => (10, 1),
        DataType::F8E5M2 => (11, 1),
        DataType::C64 => (7, 2),
        DataType::C128 => (8, 2),
        DataType::I16 | DataType::U16 | DataType::Bool => return None,
    })
}

fn is_float(dtype: DataType) -> bool {
    use DataType::{Bf16, C64, C128, F8E4M3, F8E5M2, F16, F32, F64};
    matches!(dtype, F8E4M3 | F8E5M2 | F16 | Bf16 | F32 | F64 | C64 | C128)
}

fn number(op: ReduceOp) -> Option<i32> {
    Some(match op.exact() {
        ReduceOp::Sum => SUM,
        ReduceOp::Product => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Average => AVERAGE,
        _ => return None,
    })
}

/// Returns whether NCCL does an operation as we define it; others go through the host. The same on
/// all members. Floats of eight bits are a communicator's own matter, too: not all members' GPUs
/// reduce them, nor averages of any number of members.
pub fn carries(operation: &Operation) -> bool {
    match operation {
        Operation::Allreduce { dtype, op, prescale, postscale, .. }
        | Operation::Reducescatter { dtype, op, prescale, postscale, .. } => {
            let scaled = *prescale != 1.0 || *postscale != 1.0;
            let op = op.exact();
            let linear = matches!(op, ReduceOp::Sum | ReduceOp::Average);
            let complex = matches!(dtype, DataType::C64 | DataType::C128);
            kind(*dtype).is_some()
                && number(op).is_some()
                // Averages of integers truncate here, whatever the version does.
                && (is_float(*dtype) || op != ReduceOp::Average)
                // A factor is part of a sum, of one type that has a factor of its own.
                && (!scaled || (linear && matches!(dtype, DataType::F32 | DataType::F64)))
                && (!complex || linear)
        }
        Operation::Broadcast { .. } | Operation::Allgather { .. } | Operation::Alltoall { .. } => {
            true
        }
        Operation::Barrier => false,
    }
}

/// The first version that has floats of eight bits: 2.24.
pub(crate) const LEAST_FOR_FLOAT8: i32 = 22_400;
/// The architecture from which on it reduces them, on all members' GPUs.
pub(crate) const ARCH_FOR_FLOAT8: u32 = 90;

/// Returns whether an operation is a reduction of floats of eight bits, and if so, whether NCCL
/// does it as we define it among so many members. It averages by multiplying with the inverse of
/// their number in the tensor's type, which is exact for powers of two whose inverse is not
/// subnormal.
pub(super) fn does_float8(operation: &Operation, size: usize) -> Option<bool> {
    let (Operation::Allreduce { dtype, op, .. } | Operation::Reducescatter { dtype, op, .. }) =
        operation
    else {
        return None;
    };
    let most = match dtype {
        DataType::F8E4M3 => 1 << 6,
        DataType::F8E5M2 => 1 << 14,
        _ => return None,
    };
    Some(op.exact() != ReduceOp::Average || (size.is_power_of_two() && size <= most))
}

/// A group of calls on a communicator.
pub(super) struct Calls<'a> {
    pub(super) nccl: &'a Nccl,
    pub(super) comm: Comm,
    pub(super) stream: Stream,
    pub(super) size: usize,
    pub(super) member: usize,
}

fn from(buffer: &Buffer) -> *const c_void {
    buffer.address().cast_const().cast()
}

fn to(buffer: &Buffer) -> *mut c_void {
    buffer.address().cast()
}

/// NCCL counts members in 32 bits with sign.
fn root(member: usize) -> i32 {
    i32::try_from(member).unwrap_or(i32::MAX)
}

impl Calls<'_> {
    /// Hands over an operation; true when the calls are still in progress.
    ///
    /// # Errors
    /// `Nccl`.
    ///
    /// # Safety
    /// Buffers are on the communicator's device and valid until the stream is done with them.
    pub(super) unsafe fn start(&self, operation: &Operation) -> Result<bool> {
        let table = self.nccl.table();
        let (dtype, op, made) = self.reduction(operation)?;
        // SAFETY: groups are started and ended on this thread.
        self.nccl.check("ncclGroupStart", unsafe { (table.group_start)() })?;
        // SAFETY: the caller's promise.
        let called = unsafe { self.call(operation, dtype, op) };
        // SAFETY: as above; a group that was started must be ended.
        let status = unsafe { (table.group_end)() };
        if made {
            // SAFETY: made below for this communicator, and used by nothing that is not enqueued
            // yet.
            unsafe { (table.scaled_sum_destroy)(op, self.comm) };
        }
        called?;
        self.nccl.check("ncclGroupEnd", status)?;
        Ok(status == super::IN_PROGRESS)
    }

    /// Returns the type and the operator of a reduction, and whether the operator was made for it.
    fn reduction(&self, operation: &Operation) -> Result<((i32, usize), i32, bool)> {
        let (Operation::Allreduce { dtype, op, prescale, postscale, .. }
        | Operation::Reducescatter { dtype, op, prescale, postscale, .. }) = operation
        else {
            return Ok(((BYTE, 1), SUM, false));
        };
        let (kind, parts) = kind(*dtype).unwrap_or((BYTE, 1));
        let op_number = number(*op).unwrap_or(SUM);
        let mut factor = prescale * postscale;
        if factor == 1.0 {
            return Ok(((kind, parts), op_number, false));
        }
        if op.exact() == ReduceOp::Average {
            factor /= self.size as f64;
        }
        let mut made = 0;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a factor takes the type of the tensor it scales"
        )]
        let mut single = factor as f32;
        let scalar: *mut c_void = match dtype {
            DataType::F64 => (&raw mut factor).cast(),
            _ => (&raw mut single).cast(),
        };
        let create = self.nccl.table().scaled_sum;
        // SAFETY: the factor has the type that is named and is read before the call returns.
        let status = unsafe { create(&raw mut made, scalar, kind, IMMEDIATE, self.comm) };
        self.nccl.check("ncclRedOpCreatePreMulSum", status)?;
        Ok(((kind, parts), made, true))
    }

    unsafe fn call(
        &self,
        operation: &Operation,
        (kind, parts): (i32, usize),
        op: i32,
    ) -> Result<()> {
        let table = self.nccl.table();
        let (comm, stream) = (self.comm, self.stream);
        match operation {
            Operation::Allreduce { dtype, segments, .. } => {
                segments.iter().try_for_each(|segment| {
                    let count = segment.input.len() / dtype.size() * parts;
                    // SAFETY: the caller's promise.
                    let status = unsafe {
                        (table.allreduce)(
                            from(&segment.input),
                            to(&segment.output),
                            count,
                            kind,
                            op,
                            comm,
                            stream,
                        )
                    };
                    self.nccl.check("ncclAllReduce", status)
                })
            }
            Operation::Broadcast { root: sender, segments } => segments
                .iter()
                // SAFETY: the caller's promise.
                .try_for_each(|segment| unsafe {
                    self.spread(&segment.input, &segment.output, *sender)
                }),
            Operation::Allgather { segments, bytes } => segments
                .iter()
                .zip(bytes)
                // SAFETY: the caller's promise.
                .try_for_each(|(segment, bytes)| unsafe { self.gather(segment, bytes) }),
            Operation::Alltoall { segment, sends, receives } => {
                // SAFETY: the caller's promise.
                unsafe { self.exchange(segment, sends, receives) }
            }
            Operation::Reducescatter { dtype, segments, bytes, .. } => {
                segments.iter().zip(bytes).try_for_each(|(segment, bytes)| {
                    let count = |bytes: usize| bytes / dtype.size() * parts;
                    // SAFETY: the caller's promise.
                    unsafe { self.scatter(segment, bytes, count, kind, op) }
                })
            }
            Operation::Barrier => Ok(()),
        }
    }

    unsafe fn spread(&self, input: &Buffer, output: &Buffer, sender: usize) -> Result<()> {
        let (bytes, sender) = (output.len(), root(sender));
        let spread = self.nccl.table().broadcast;
        // SAFETY: the caller's promise.
        let status =
            unsafe { spread(from(input), to(output), bytes, BYTE, sender, self.comm, self.stream) };
        self.nccl.check("ncclBroadcast", status)
    }

    unsafe fn gather(&self, segment: &Segment, bytes: &[usize]) -> Result<()> {
        if bytes.iter().all(|member| *member == 0) {
            return Ok(());
        }
        if bytes.iter().all(|member| *member == bytes[0]) {
            let gather = self.nccl.table().allgather;
            let (input, output) = (from(&segment.input), to(&segment.output));
            // SAFETY: the caller's promise.
            let status = unsafe { gather(input, output, bytes[0], BYTE, self.comm, self.stream) };
            return self.nccl.check("ncclAllGather", status);
        }
        let mut at = 0;
        for (member, bytes) in bytes.iter().enumerate() {
            let part = segment.output.slice(at, *bytes);
            if *bytes > 0 {
                // SAFETY: the caller's promise; only the sender's input is read.
                unsafe { self.spread(&segment.input, &part, member)? }
            }
            at += bytes;
        }
        Ok(())
    }

    unsafe fn exchange(
        &self,
        segment: &Segment,
        sends: &[usize],
        receives: &[usize],
    ) -> Result<()> {
        let table = self.nccl.table();
        let (mut sent, mut received) = (0, 0);
        for (member, (send, receive)) in sends.iter().zip(receives).enumerate() {
            let (input, output) =
                (segment.input.slice(sent, *send), segment.output.slice(received, *receive));
            (sent, received) = (sent + send, received + receive);
            if *send > 0 {
                // SAFETY: the caller's promise.
                let status = unsafe {
                    (table.send)(from(&input), *send, BYTE, root(member), self.comm, self.stream)
                };
                self.nccl.check("ncclSend", status)?;
            }
            if *receive > 0 {
                // SAFETY: the caller's promise.
                let status = unsafe {
                    (table.receive)(
                        to(&output),
                        *receive,
                        BYTE,
                        root(member),
                        self.comm,
                        self.stream,
                    )
                };
                self.nccl.check("ncclRecv", status)?;
            }
        }
        Ok(())
    }

    unsafe fn scatter(
        &self,
        segment: &Segment,
        bytes: &[usize],
        count: impl Fn(usize) -> usize,
        kind: i32,
        op: i32,
    ) -> Result<()> {
        let table = self.nccl.table();
        if bytes.iter().all(|member| *member == bytes[0]) {
            let (input, output) = (from(&segment.input), to(&segment.output));
            // SAFETY: the caller's promise.
            let status = unsafe {
                (table.reducescatter)(
                    input,
                    output,
                    count(bytes[0]),
                    kind,
                    op,
                    self.comm,
                    self.stream,
                )
            };
            return self.nccl.check("ncclReduceScatter", status);
        }
        let mut at = 0;
        for (member, bytes) in bytes.iter().enumerate() {
            let part = segment.input.slice(at, *bytes);
            at += bytes;
            if *bytes == 0 {
                continue;
            }
            // Only the member itself has room for its part; the others' output is not looked at.
            let output =
                if member == self.member { to(&segment.output) } else { std::ptr::null_mut() };
            // SAFETY: the caller's promise.
            let status = unsafe {
                let (input, count) = (from(&part), count(*bytes));
                (table.reduce)(input, output, count, kind, op, root(member), self.comm, self.stream)
            };
            self.nccl.check("ncclReduce", status)?;
        }
        Ok(())
    }
}
