// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The engine's output, which is freed in every case.
#![expect(unsafe_code, reason = "takes memory that came from the engine table")]

use std::ffi::{c_int, c_void};

use farandole_door::{EngineTable, TensorOutput};

use crate::connection::connected_engine_table;
use crate::context::{KernelContext, KernelFailure, TensorflowTensor};

/// One output of an outcome. Dropping it frees its memory, unless a tensor has taken the memory.
pub(crate) struct EngineOutput<'a> {
    table: &'static EngineTable,
    output: &'a TensorOutput,
    taken: bool,
}

impl<'a> EngineOutput<'a> {
    /// Returns all outputs of an outcome.
    ///
    /// # Safety
    /// `first` and `count` are the outcome's of a `done` that has not returned, and no other code
    /// frees them.
    pub(crate) unsafe fn from_outcome(
        table: &'static EngineTable,
        first: *const TensorOutput,
        count: usize,
    ) -> Vec<EngineOutput<'a>> {
        // SAFETY: the caller's promise.
        let outputs = unsafe { slice_from_raw(first, count) };
        outputs.iter().map(|output| EngineOutput { table, output, taken: false }).collect()
    }

    /// Returns the first dimension of each member's part.
    pub(crate) fn member_rows(&self) -> &[u64] {
        // SAFETY: as the outcome lives, so do they.
        unsafe { slice_from_raw(self.output.rows, self.output.row_count) }
    }

    /// Returns the last rank to join.
    pub(crate) fn last_joined_rank(&self) -> i64 {
        self.output.number
    }

    /// Returns the engine's memory; none when the request brought its own.
    pub(crate) fn memory_bytes(&self) -> &[u8] {
        // SAFETY: as the outcome lives, so does the memory.
        unsafe { slice_from_raw(self.output.address.cast::<u8>().cast_const(), self.output.bytes) }
    }

    /// Makes a kernel's output of the memory; the tensor frees it at its end.
    pub(crate) fn move_to_output(
        mut self,
        context: KernelContext,
        index: c_int,
        (dtype, dims): (c_int, &[i64]),
    ) -> Result<(), KernelFailure> {
        // Without bytes there is nothing to pass on, and the drop frees the owner.
        if self.output.bytes == 0 || self.output.owner.is_null() {
            return context.allocate_output(index, dtype, dims, 0).map(drop);
        }
        let memory = (self.output.address, self.output.bytes);
        // From here on the tensor frees the memory, also if setting the output fails.
        self.taken = true;
        // SAFETY: the memory is valid until its owner is freed, which `release_engine_memory` does.
        let tensor = unsafe {
            TensorflowTensor::from_memory(
                context.api,
                dtype,
                dims,
                memory,
                (release_engine_memory, self.output.owner),
            )
        };
        context.set_output(index, &tensor)
    }
}

impl Drop for EngineOutput<'_> {
    fn drop(&mut self) {
        if !self.taken {
            // SAFETY: ours to free, once.
            unsafe { (self.table.free)(self.output.owner) };
        }
    }
}

unsafe extern "C" fn release_engine_memory(_data: *mut c_void, _length: usize, owner: *mut c_void) {
    if let Ok(table) = connected_engine_table() {
        // SAFETY: the owner of one output, freed once, by its tensor.
        unsafe { (table.free)(owner) };
    }
}

/// # Safety
/// `length` elements are at `first`, for as long as `'a`.
unsafe fn slice_from_raw<'a, T>(first: *const T, length: usize) -> &'a [T] {
    if first.is_null() || length == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(first, length) }
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use farandole_door::{
        OutcomeCallback, ProcessSetPlacement, SubmissionHeader, TABLE_VERSION, TensorRequest,
    };

    use super::*;

    static FREED: AtomicUsize = AtomicUsize::new(0);

    unsafe extern "C" fn free(owner: *mut c_void) {
        FREED.fetch_add(owner.addr(), Ordering::SeqCst);
    }

    unsafe extern "C" fn submit(
        _: *const SubmissionHeader,
        _: *const TensorRequest,
        _: usize,
        _: OutcomeCallback,
        _: *mut c_void,
        _: *mut std::ffi::c_char,
        _: usize,
    ) -> u32 {
        0
    }

    unsafe extern "C" fn place(
        _: u32,
        _: *mut ProcessSetPlacement,
        _: *mut std::ffi::c_char,
        _: usize,
    ) -> u32 {
        0
    }

    static DOOR: EngineTable =
        EngineTable { version: TABLE_VERSION, bytes: 0, submit, place, free };

    #[test]
    fn outputs_that_were_not_taken_are_freed_each_once() {
        let rows = [2u64, 3];
        let output = |owner: usize| TensorOutput {
            address: null_mut(),
            bytes: 0,
            owner: std::ptr::without_provenance_mut(owner),
            rows: rows.as_ptr(),
            row_count: rows.len(),
            number: 5,
        };
        let outputs = [output(1), output(10), output(100)];
        // SAFETY: `outputs` outlives the values that are made from it.
        let mut brought =
            unsafe { EngineOutput::from_outcome(&DOOR, outputs.as_ptr(), outputs.len()) }
                .into_iter();
        let first = brought.next().unwrap();
        assert_eq!(
            (first.member_rows(), first.last_joined_rank(), first.memory_bytes()),
            (&rows[..], 5, &[][..])
        );
        drop(first);
        assert_eq!(FREED.load(Ordering::SeqCst), 1);
        // As when making a tensor of the first fails.
        drop(brought);
        assert_eq!(FREED.load(Ordering::SeqCst), 111);
    }
}
