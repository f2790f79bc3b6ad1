// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Operations as NCCL calls. The calls of one operation form a group, which NCCL fuses.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::ffi::c_void;

use farandole_collectives::{CollectiveOperation, TensorSegment};
use farandole_kernels::{Buffer, DataType, ReduceOp};

use super::{Comm, NcclLibrary, RawStream};
use crate::Result;

const NCCL_BYTE: i32 = 1;
const NCCL_SUM: i32 = 0;
const NCCL_AVERAGE: i32 = 4;
/// A factor is read before the call returns.
const SCALAR_HOST_IMMEDIATE: i32 = 1;

/// Returns NCCL's number of a type, and the count of it in one element: complex numbers are reduced
/// by parts.
fn nccl_type(dtype: DataType) -> Option<(i32, usize)> {
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

fn nccl_operator(op: ReduceOp) -> Option<i32> {
    Some(match op.with_unrounded_partials() {
        ReduceOp::Sum => NCCL_SUM,
        ReduceOp::Product => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Average => NCCL_AVERAGE,
        _ => return None,
    })
}

/// Returns whether NCCL does an operation as we define it; others go through the host. The same on
/// all members. Floats of eight bits are a communicator's own matter, too: not all members' GPUs
/// reduce them, nor averages of any number of members.
pub fn is_nccl_operation(operation: &CollectiveOperation) -> bool {
    match operation {
        CollectiveOperation::Allreduce { dtype, op, prescale, postscale, .. }
        | CollectiveOperation::Reducescatter { dtype, op, prescale, postscale, .. } => {
            let scaled = *prescale != 1.0 || *postscale != 1.0;
            let op = op.with_unrounded_partials();
            let linear = matches!(op, ReduceOp::Sum | ReduceOp::Average);
            let complex = matches!(dtype, DataType::C64 | DataType::C128);
            nccl_type(*dtype).is_some()
                && nccl_operator(op).is_some()
                // Averages of integers truncate here, whatever the version does.
                && (is_float(*dtype) || op != ReduceOp::Average)
                // Only sums and averages of float32 and float64 take factors: NCCL reads a factor
                // in the type of the elements.
                && (!scaled || (linear && matches!(dtype, DataType::F32 | DataType::F64)))
                && (!complex || linear)
        }
        CollectiveOperation::Broadcast { .. }
        | CollectiveOperation::Allgather { .. }
        | CollectiveOperation::Alltoall { .. } => true,
        CollectiveOperation::Barrier => false,
    }
}

/// The first version that has floats of eight bits: 2.24.
pub(crate) const MIN_VERSION_FOR_FLOAT8: i32 = 22_400;
/// The architecture from which on it reduces them, on all members' GPUs.
pub(crate) const MIN_ARCH_FOR_FLOAT8: u32 = 90;

/// Returns whether an operation is a reduction of floats of eight bits, and if so, whether NCCL
/// does it as we define it among so many members. It averages by multiplying with the inverse of
/// their number in the tensor's type, which is exact for powers of two whose inverse is not
/// subnormal.
pub(super) fn float8_reduction_support(
    operation: &CollectiveOperation,
    size: usize,
) -> Option<bool> {
    let (CollectiveOperation::Allreduce { dtype, op, .. }
    | CollectiveOperation::Reducescatter { dtype, op, .. }) = operation
    else {
        return None;
    };
    // The inverse of the number of members must not be below the smallest normal number, 2^-6 and
    // 2^-14.
    let most = match dtype {
        DataType::F8E4M3 => 1 << 6,
        DataType::F8E5M2 => 1 << 14,
        _ => return None,
    };
    Some(
        op.with_unrounded_partials() != ReduceOp::Average
            || (size.is_power_of_two() && size <= most),
    )
}

/// A group of calls on a communicator.
pub(super) struct NcclCallGroup<'a> {
    pub(super) nccl: &'a NcclLibrary,
    pub(super) comm: Comm,
    pub(super) stream: RawStream,
    pub(super) size: usize,
    pub(super) member: usize,
}

fn input_pointer(buffer: &Buffer) -> *const c_void {
    buffer.address().cast_const().cast()
}

fn output_pointer(buffer: &Buffer) -> *mut c_void {
    buffer.address().cast()
}

/// Returns a member as the signed 32-bit number of NCCL.
fn nccl_rank(member: usize) -> i32 {
    i32::try_from(member).unwrap_or(i32::MAX)
}

impl NcclCallGroup<'_> {
    /// Hands over an operation; true when the calls are still in progress.
    ///
    /// # Errors
    /// `NcclLibrary`.
    ///
    /// # Safety
    /// Buffers are on the communicator's device and valid until the stream is done with them.
    pub(super) unsafe fn issue_group(&self, operation: &CollectiveOperation) -> Result<bool> {
        let table = self.nccl.function_table();
        let (dtype, op, made) = self.reduction_arguments(operation)?;
        // SAFETY: groups are started and ended on this thread.
        self.nccl.check_status("ncclGroupStart", unsafe { (table.group_start)() })?;
        // SAFETY: the caller's promise.
        let called = unsafe { self.issue_calls(operation, dtype, op) };
        // SAFETY: as above; a group that was started must be ended.
        let status = unsafe { (table.group_end)() };
        // Also after a failed call, because each operator takes memory in the communicator.
        if made {
            // SAFETY: made below for this communicator, and used by nothing that is not enqueued
            // yet.
            unsafe { (table.destroy_premul_sum)(op, self.comm) };
        }
        called?;
        self.nccl.check_status("ncclGroupEnd", status)?;
        Ok(status == super::NCCL_IN_PROGRESS)
    }

    /// Returns the type and the operator of a reduction, and whether the operator was made for it.
    fn reduction_arguments(
        &self,
        operation: &CollectiveOperation,
    ) -> Result<((i32, usize), i32, bool)> {
        let (CollectiveOperation::Allreduce { dtype, op, prescale, postscale, .. }
        | CollectiveOperation::Reducescatter { dtype, op, prescale, postscale, .. }) = operation
        else {
            return Ok(((NCCL_BYTE, 1), NCCL_SUM, false));
        };
        let (kind, parts) = nccl_type(*dtype).unwrap_or((NCCL_BYTE, 1));
        let op_number = nccl_operator(*op).unwrap_or(NCCL_SUM);
        // Sum and Average are linear, so both factors can be applied to the inputs.
        let mut factor = prescale * postscale;
        if factor == 1.0 {
            return Ok(((kind, parts), op_number, false));
        }
        // PreMulSum has no average, so its factor divides by the members.
        if op.with_unrounded_partials() == ReduceOp::Average {
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
        let create = self.nccl.function_table().create_premul_sum;
        // SAFETY: the factor has the type that is named and is read before the call returns.
        let status =
            unsafe { create(&raw mut made, scalar, kind, SCALAR_HOST_IMMEDIATE, self.comm) };
        self.nccl.check_status("ncclRedOpCreatePreMulSum", status)?;
        Ok(((kind, parts), made, true))
    }

    unsafe fn issue_calls(
        &self,
        operation: &CollectiveOperation,
        (kind, parts): (i32, usize),
        op: i32,
    ) -> Result<()> {
        let table = self.nccl.function_table();
        let (comm, stream) = (self.comm, self.stream);
        match operation {
            CollectiveOperation::Allreduce { dtype, segments, .. } => {
                segments.iter().try_for_each(|segment| {
                    let count = segment.input.len() / dtype.element_size() * parts;
                    // SAFETY: the caller's promise.
                    let status = unsafe {
                        (table.allreduce)(
                            input_pointer(&segment.input),
                            output_pointer(&segment.output),
                            count,
                            kind,
                            op,
                            comm,
                            stream,
                        )
                    };
                    self.nccl.check_status("ncclAllReduce", status)
                })
            }
            CollectiveOperation::Broadcast { root: sender, segments } => segments
                .iter()
                // SAFETY: the caller's promise.
                .try_for_each(|segment| unsafe {
                    self.broadcast_buffer(&segment.input, &segment.output, *sender)
                }),
            CollectiveOperation::Allgather { segments, bytes } => segments
                .iter()
                .zip(bytes)
                // SAFETY: the caller's promise.
                .try_for_each(|(segment, bytes)| unsafe { self.allgather_segment(segment, bytes) }),
            CollectiveOperation::Alltoall { segment, sends, receives } => {
                // SAFETY: the caller's promise.
                unsafe { self.alltoall_segment(segment, sends, receives) }
            }
            CollectiveOperation::Reducescatter { dtype, segments, bytes, .. } => {
                segments.iter().zip(bytes).try_for_each(|(segment, bytes)| {
                    let count = |bytes: usize| bytes / dtype.element_size() * parts;
                    // SAFETY: the caller's promise.
                    unsafe { self.reduce_scatter_segment(segment, bytes, count, kind, op) }
                })
            }
            CollectiveOperation::Barrier => Ok(()),
        }
    }

    unsafe fn broadcast_buffer(
        &self,
        input: &Buffer,
        output: &Buffer,
        sender: usize,
    ) -> Result<()> {
        let (bytes, sender) = (output.len(), nccl_rank(sender));
        let spread = self.nccl.function_table().broadcast;
        // SAFETY: the caller's promise.
        let status = unsafe {
            spread(
                input_pointer(input),
                output_pointer(output),
                bytes,
                NCCL_BYTE,
                sender,
                self.comm,
                self.stream,
            )
        };
        self.nccl.check_status("ncclBroadcast", status)
    }

    unsafe fn allgather_segment(&self, segment: &TensorSegment, bytes: &[usize]) -> Result<()> {
        if bytes.iter().all(|member| *member == 0) {
            return Ok(());
        }
        if bytes.iter().all(|member| *member == bytes[0]) {
            let gather = self.nccl.function_table().allgather;
            let (input, output) = (input_pointer(&segment.input), output_pointer(&segment.output));
            // SAFETY: the caller's promise.
            let status =
                unsafe { gather(input, output, bytes[0], NCCL_BYTE, self.comm, self.stream) };
            return self.nccl.check_status("ncclAllGather", status);
        }
        // ncclAllGather needs equal sizes. In a group, these broadcasts are one operation.
        let mut at = 0;
        for (member, bytes) in bytes.iter().enumerate() {
            let part = segment.output.slice(at, *bytes);
            if *bytes > 0 {
                // SAFETY: the caller's promise; only the sender's input is read.
                unsafe { self.broadcast_buffer(&segment.input, &part, member)? }
            }
            at += bytes;
        }
        Ok(())
    }

    unsafe fn alltoall_segment(
        &self,
        segment: &TensorSegment,
        sends: &[usize],
        receives: &[usize],
    ) -> Result<()> {
        let table = self.nccl.function_table();
        let (mut sent, mut received) = (0, 0);
        for (member, (send, receive)) in sends.iter().zip(receives).enumerate() {
            let (input, output) =
                (segment.input.slice(sent, *send), segment.output.slice(received, *receive));
            (sent, received) = (sent + send, received + receive);
            if *send > 0 {
                // SAFETY: the caller's promise.
                let status = unsafe {
                    (table.send)(
                        input_pointer(&input),
                        *send,
                        NCCL_BYTE,
                        nccl_rank(member),
                        self.comm,
                        self.stream,
                    )
                };
                self.nccl.check_status("ncclSend", status)?;
            }
            if *receive > 0 {
                // SAFETY: the caller's promise.
                let status = unsafe {
                    (table.receive)(
                        output_pointer(&output),
                        *receive,
                        NCCL_BYTE,
                        nccl_rank(member),
                        self.comm,
                        self.stream,
                    )
                };
                self.nccl.check_status("ncclRecv", status)?;
            }
        }
        Ok(())
    }

    unsafe fn reduce_scatter_segment(
        &self,
        segment: &TensorSegment,
        bytes: &[usize],
        count: impl Fn(usize) -> usize,
        kind: i32,
        op: i32,
    ) -> Result<()> {
        let table = self.nccl.function_table();
        if bytes.iter().all(|member| *member == bytes[0]) {
            let (input, output) = (input_pointer(&segment.input), output_pointer(&segment.output));
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
            return self.nccl.check_status("ncclReduceScatter", status);
        }
        // ncclReduceScatter needs equal sizes. In a group, these reductions are one operation.
        let mut at = 0;
        for (member, bytes) in bytes.iter().enumerate() {
            let part = segment.input.slice(at, *bytes);
            at += bytes;
            if *bytes == 0 {
                continue;
            }
            // Only the member itself has room for its part; the others' output is not looked at.
            let output = if member == self.member {
                output_pointer(&segment.output)
            } else {
                std::ptr::null_mut()
            };
            // SAFETY: the caller's promise.
            let status = unsafe {
                let (input, count) = (input_pointer(&part), count(*bytes));
                (table.reduce)(
                    input,
                    output,
                    count,
                    kind,
                    op,
                    nccl_rank(member),
                    self.comm,
                    self.stream,
                )
            };
            self.nccl.check_status("ncclReduce", status)?;
        }
        Ok(())
    }
}
