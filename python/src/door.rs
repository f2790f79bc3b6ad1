// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.door`: the table through which other libraries of this process reach its
//! engine.
#![expect(unsafe_code, reason = "a capsule holds an address")]

use std::ffi::c_void;
use std::ptr::NonNull;

use pyo3::ffi;
use pyo3::prelude::*;

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(capsule, module)?)?;
    module.add_function(wrap_pyfunction!(joined, module)?)?;
    module.add_function(wrap_pyfunction!(joins, module)?)
}

/// Takes note that all ranks have joined: the numbers of unnamed operations of the table begin
/// again.
#[pyfunction]
fn joined() {
    farandole_ffi::joined();
}

/// Returns the number of times that all ranks have joined in this session.
#[pyfunction]
fn joins() -> u64 {
    farandole_ffi::joins()
}

/// Returns a capsule named `farandole.door` with the table's address, which stays valid until the
/// process ends.
#[pyfunction]
fn capsule(py: Python<'_>) -> PyResult<Py<PyAny>> {
    let table: NonNull<c_void> = NonNull::from(farandole_ffi::door()).cast();
    // SAFETY: the name and the table are static; without a destructor Python only hands the address
    // back.
    let object =
        unsafe { ffi::PyCapsule_New(table.as_ptr(), farandole_ffi::CAPSULE.as_ptr(), None) };
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, object) }.map(Bound::unbind)
}
