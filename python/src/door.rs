// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.engine_table`: the table through which other libraries of this process reach
//! its engine.
#![expect(unsafe_code, reason = "a capsule holds an address")]

use std::ffi::c_void;
use std::ptr::NonNull;

use pyo3::ffi;
use pyo3::prelude::*;

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(engine_table_capsule, module)?)?;
    module.add_function(wrap_pyfunction!(note_all_joined, module)?)?;
    module.add_function(wrap_pyfunction!(completed_join_count, module)?)
}

/// Takes note that all ranks have joined: the numbers of unnamed operations of the table begin
/// again.
#[pyfunction]
fn note_all_joined() {
    farandole_ffi::restart_numbers_after_join();
}

/// Returns the number of times that all ranks have joined in this session.
#[pyfunction]
fn completed_join_count() -> u64 {
    farandole_ffi::completed_join_count()
}

/// Returns a capsule named `farandole.engine_table` with the table's address, which stays valid
/// until the process ends.
#[pyfunction]
fn engine_table_capsule(py: Python<'_>) -> PyResult<Py<PyAny>> {
    let table: NonNull<c_void> = NonNull::from(farandole_ffi::engine_table()).cast();
    // SAFETY: the name and the table are static; without a destructor Python only hands the address
    // back.
    let object =
        unsafe { ffi::PyCapsule_New(table.as_ptr(), farandole_ffi::CAPSULE_NAME.as_ptr(), None) };
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, object) }.map(Bound::unbind)
}
