// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Shapes of outputs, as far as they are known before the computation.
#![expect(unsafe_code, reason = "calls TensorFlow's C API")]

use std::ffi::c_int;

use crate::api::{Api, Opaque, api};

/// TensorFlow's -1, an extent that is not known.
const UNKNOWN: usize = usize::MAX;

/// A handle to a shape, of ours.
struct Shape(&'static Api, Opaque);

impl Shape {
    fn new(api: &'static Api) -> Self {
        // SAFETY: no arguments.
        Self(api, unsafe { (api.new_shape)() })
    }
}

impl Drop for Shape {
    fn drop(&mut self) {
        // SAFETY: made by TensorFlow for us.
        unsafe { (self.0.delete_shape)(self.1) };
    }
}

/// Outputs have the shapes of the inputs.
pub(crate) unsafe extern "C" fn same(context: Opaque, status: Opaque) {
    let Ok(api) = api() else { return };
    // SAFETY: context and status are TensorFlow's, for this call; indices are below the number of
    // inputs.
    unsafe {
        for index in 0..inputs(api, context) {
            let shape = Shape::new(api);
            (api.shape_input)(context, index, shape.1, status);
            (api.shape_output)(context, index, shape.1, status);
        }
    }
}

/// Outputs have the shapes of the inputs but for the first extent.
pub(crate) unsafe extern "C" fn other_rows(context: Opaque, status: Opaque) {
    let Ok(api) = api() else { return };
    // SAFETY: as above.
    unsafe { other_rows_of(api, context, status, inputs(api, context)) };
}

/// Like [`other_rows`], then a matrix.
pub(crate) unsafe extern "C" fn other_rows_and_matrix(context: Opaque, status: Opaque) {
    let Ok(api) = api() else { return };
    // SAFETY: as above; a shape function that sets nothing leaves an output unknown, so this comes
    // first.
    unsafe {
        let count = inputs(api, context);
        (api.shape_unknown)(context, status);
        other_rows_of(api, context, status, count);
        let row = Shape(api, (api.shape_vector)(context, UNKNOWN));
        let column =
            Shape(api, (api.shape_vector)(context, usize::try_from(count).unwrap_or(UNKNOWN)));
        let matrix = Shape::new(api);
        (api.shape_concatenate)(context, column.1, row.1, matrix.1, status);
        (api.shape_output)(context, count, matrix.1, status);
    }
}

/// Like [`other_rows`] for the first input, then a vector.
pub(crate) unsafe extern "C" fn other_rows_and_vector(context: Opaque, status: Opaque) {
    let Ok(api) = api() else { return };
    // SAFETY: as above.
    unsafe {
        other_rows_of(api, context, status, 1);
        let vector = Shape(api, (api.shape_vector)(context, UNKNOWN));
        (api.shape_output)(context, 1, vector.1, status);
    }
}

/// One number.
pub(crate) unsafe extern "C" fn scalar(context: Opaque, status: Opaque) {
    let Ok(api) = api() else { return };
    // SAFETY: as above.
    unsafe {
        let shape = Shape(api, (api.shape_scalar)(context));
        (api.shape_output)(context, 0, shape.1, status);
    }
}

/// # Safety
/// `context` is a shape inference's, of this call.
unsafe fn inputs(api: &'static Api, context: Opaque) -> c_int {
    // SAFETY: the caller's promise.
    let count = unsafe { (api.shape_inputs)(context) };
    c_int::try_from(count).unwrap_or(0)
}

/// # Safety
/// Like [`inputs`], `status` too; there are `count` inputs.
unsafe fn other_rows_of(api: &'static Api, context: Opaque, status: Opaque, count: c_int) {
    for index in 0..count {
        let (input, rest, result) = (Shape::new(api), Shape::new(api), Shape::new(api));
        // SAFETY: the caller's promise.
        unsafe {
            (api.shape_input)(context, index, input.1, status);
            if (api.shape_rank_known)(context, input.1) == 0 {
                (api.shape_output)(context, index, input.1, status);
                continue;
            }
            // Says so where a scalar has no rows.
            (api.shape_at_least)(context, input.1, 1, input.1, status);
            if (api.get_code)(status) != 0 {
                return;
            }
            let rows = Shape(api, (api.shape_vector)(context, UNKNOWN));
            (api.shape_part)(context, input.1, 1, i64::MAX, rest.1, status);
            (api.shape_concatenate)(context, rows.1, rest.1, result.1, status);
            (api.shape_output)(context, index, result.1, status);
        }
    }
}
