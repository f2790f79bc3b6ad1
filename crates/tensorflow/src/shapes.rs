// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The shapes of outputs that are known before the computation.
#![expect(unsafe_code, reason = "calls TensorFlow's C API")]

use std::ffi::c_int;

use crate::api::{Api, Opaque, tensorflow_api};

/// TensorFlow's -1, an extent that is not known.
const UNKNOWN_EXTENT: usize = usize::MAX;

/// A handle to a shape, of ours.
struct ShapeHandle(&'static Api, Opaque);

impl ShapeHandle {
    fn new(api: &'static Api) -> Self {
        // SAFETY: no arguments.
        Self(api, unsafe { (api.new_shape)() })
    }
}

impl Drop for ShapeHandle {
    fn drop(&mut self) {
        // SAFETY: made by TensorFlow for us.
        unsafe { (self.0.delete_shape)(self.1) };
    }
}

/// Outputs have the shapes of the inputs.
pub(crate) unsafe extern "C" fn infer_same_shapes(context: Opaque, status: Opaque) {
    let Ok(api) = tensorflow_api() else { return };
    // SAFETY: context and status are TensorFlow's, for this call; indices are below the number of
    // inputs.
    unsafe {
        for index in 0..input_count(api, context) {
            let shape = ShapeHandle::new(api);
            (api.shape_input)(context, index, shape.1, status);
            (api.shape_output)(context, index, shape.1, status);
        }
    }
}

/// Outputs have the shapes of the inputs but for the first extent.
pub(crate) unsafe extern "C" fn infer_unknown_rows(context: Opaque, status: Opaque) {
    let Ok(api) = tensorflow_api() else { return };
    // SAFETY: as above.
    unsafe { set_unknown_rows(api, context, status, input_count(api, context)) };
}

/// Infers shapes like [`infer_unknown_rows`], then a matrix.
pub(crate) unsafe extern "C" fn infer_unknown_rows_and_matrix(context: Opaque, status: Opaque) {
    let Ok(api) = tensorflow_api() else { return };
    // SAFETY: as above; a shape function that sets nothing leaves an output unknown, so this comes
    // first.
    unsafe {
        let count = input_count(api, context);
        (api.shape_unknown)(context, status);
        set_unknown_rows(api, context, status, count);
        let row = ShapeHandle(api, (api.shape_vector)(context, UNKNOWN_EXTENT));
        let column = ShapeHandle(
            api,
            (api.shape_vector)(context, usize::try_from(count).unwrap_or(UNKNOWN_EXTENT)),
        );
        let matrix = ShapeHandle::new(api);
        (api.shape_concatenate)(context, column.1, row.1, matrix.1, status);
        (api.shape_output)(context, count, matrix.1, status);
    }
}

/// Infers a shape like [`infer_unknown_rows`] for the first input, then a vector.
pub(crate) unsafe extern "C" fn infer_unknown_rows_and_vector(context: Opaque, status: Opaque) {
    let Ok(api) = tensorflow_api() else { return };
    // SAFETY: as above.
    unsafe {
        set_unknown_rows(api, context, status, 1);
        let vector = ShapeHandle(api, (api.shape_vector)(context, UNKNOWN_EXTENT));
        (api.shape_output)(context, 1, vector.1, status);
    }
}

/// Infers the shape of one number.
pub(crate) unsafe extern "C" fn infer_scalar(context: Opaque, status: Opaque) {
    let Ok(api) = tensorflow_api() else { return };
    // SAFETY: as above.
    unsafe {
        let shape = ShapeHandle(api, (api.shape_scalar)(context));
        (api.shape_output)(context, 0, shape.1, status);
    }
}

/// # Safety
/// `context` is a shape inference's, of this call.
unsafe fn input_count(api: &'static Api, context: Opaque) -> c_int {
    // SAFETY: the caller's promise.
    let count = unsafe { (api.shape_inputs)(context) };
    c_int::try_from(count).unwrap_or(0)
}

/// # Safety
/// Like [`input_count`], `status` too; there are `count` inputs.
unsafe fn set_unknown_rows(api: &'static Api, context: Opaque, status: Opaque, count: c_int) {
    for index in 0..count {
        let (input, rest, result) =
            (ShapeHandle::new(api), ShapeHandle::new(api), ShapeHandle::new(api));
        // SAFETY: the caller's promise.
        unsafe {
            (api.shape_input)(context, index, input.1, status);
            // Without a rank, nothing is known of the output either.
            if (api.shape_rank_known)(context, input.1) == 0 {
                (api.shape_output)(context, index, input.1, status);
                continue;
            }
            // Says so where a scalar has no rows.
            (api.shape_at_least)(context, input.1, 1, input.1, status);
            if (api.get_code)(status) != 0 {
                return;
            }
            let rows = ShapeHandle(api, (api.shape_vector)(context, UNKNOWN_EXTENT));
            (api.shape_part)(context, input.1, 1, i64::MAX, rest.1, status);
            (api.shape_concatenate)(context, rows.1, rest.1, result.1, status);
            (api.shape_output)(context, index, result.1, status);
        }
    }
}
