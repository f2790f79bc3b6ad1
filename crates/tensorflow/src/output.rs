// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The engine's output, which is freed in every case.
#![expect(unsafe_code, reason = "takes memory that came through the door")]

use std::ffi::{c_int, c_void};

use farandole_door::{Door, Output};

use crate::context::{Context, Failure, Tensor};
use crate::exports::door;

/// One output of the door's: its memory is freed with it, unless a tensor took it.
pub(crate) struct Brought<'a> {
    door: &'static Door,
    output: &'a Output,
    taken: bool,
}

impl<'a> Brought<'a> {
    /// Returns all outputs of an outcome.
    ///
    /// # Safety
    /// `first` and `count` are the outcome's of a `done` that has not returned, and no other code
    /// frees them.
    pub(crate) unsafe fn all(
        door: &'static Door,
        first: *const Output,
        count: usize,
    ) -> Vec<Brought<'a>> {
        // SAFETY: the caller's promise.
        let outputs = unsafe { slice(first, count) };
        outputs.iter().map(|output| Brought { door, output, taken: false }).collect()
    }

    /// First dimension of each member's part.
    pub(crate) fn rows(&self) -> &[u64] {
        // SAFETY: as the outcome lives, so do they.
        unsafe { slice(self.output.rows, self.output.row_count) }
    }

    /// Returns the last rank to join.
    pub(crate) fn number(&self) -> i64 {
        self.output.number
    }

    /// Returns the engine's memory; none when the request brought its own.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: as the outcome lives, so does the memory.
        unsafe { slice(self.output.address.cast::<u8>().cast_const(), self.output.bytes) }
    }

    /// Makes a kernel's output of the memory; the tensor frees it at its end.
    pub(crate) fn give(
        mut self,
        context: Context,
        index: c_int,
        (dtype, dims): (c_int, &[i64]),
    ) -> Result<(), Failure> {
        if self.output.bytes == 0 || self.output.owner.is_null() {
            return context.allocate(index, dtype, dims, 0).map(drop);
        }
        let memory = (self.output.address, self.output.bytes);
        self.taken = true;
        // SAFETY: the memory is valid until its owner is freed, which `release` does.
        let tensor =
            unsafe { Tensor::over(context.api, dtype, dims, memory, (release, self.output.owner)) };
        context.set_output(index, &tensor)
    }
}

impl Drop for Brought<'_> {
    fn drop(&mut self) {
        if !self.taken {
            // SAFETY: ours to free, once.
            unsafe { (self.door.free)(self.output.owner) };
        }
    }
}

unsafe extern "C" fn release(_data: *mut c_void, _length: usize, owner: *mut c_void) {
    if let Ok(door) = door() {
        // SAFETY: the owner of one output, freed once, by its tensor.
        unsafe { (door.free)(owner) };
    }
}

/// # Safety
/// `length` elements are at `first`, for as long as `'a`.
unsafe fn slice<'a, T>(first: *const T, length: usize) -> &'a [T] {
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

    use farandole_door::{Call, Done, Place, Request, VERSION};

    use super::*;

    static FREED: AtomicUsize = AtomicUsize::new(0);

    unsafe extern "C" fn free(owner: *mut c_void) {
        FREED.fetch_add(owner.addr(), Ordering::SeqCst);
    }

    unsafe extern "C" fn submit(
        _: *const Call,
        _: *const Request,
        _: usize,
        _: Done,
        _: *mut c_void,
        _: *mut std::ffi::c_char,
        _: usize,
    ) -> u32 {
        0
    }

    unsafe extern "C" fn place(_: u32, _: *mut Place, _: *mut std::ffi::c_char, _: usize) -> u32 {
        0
    }

    static DOOR: Door = Door { version: VERSION, bytes: 0, submit, place, free };

    #[test]
    fn outputs_that_were_not_taken_are_freed_each_once() {
        let rows = [2u64, 3];
        let output = |owner: usize| Output {
            address: null_mut(),
            bytes: 0,
            owner: std::ptr::without_provenance_mut(owner),
            rows: rows.as_ptr(),
            row_count: rows.len(),
            number: 5,
        };
        let outputs = [output(1), output(10), output(100)];
        // SAFETY: the outputs outlive what is made of them.
        let mut brought =
            unsafe { Brought::all(&DOOR, outputs.as_ptr(), outputs.len()) }.into_iter();
        let first = brought.next().unwrap();
        assert_eq!((first.rows(), first.number(), first.bytes()), (&rows[..], 5, &[][..]));
        drop(first);
        assert_eq!(FREED.load(Ordering::SeqCst), 1);
        // As when making a tensor of the first fails.
        drop(brought);
        assert_eq!(FREED.load(Ordering::SeqCst), 111);
    }
}
