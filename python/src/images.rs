// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.images`: PNG and JPEG as the arrays of a batch.

use farandole::images::{
    ChannelScale, ColorMode, ImageDecoder, ImageOutput, ImageTransform, ResizeMode,
};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::arrow::DecodedPixels;

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<DecodedPixels>()?;
    module.add_function(wrap_pyfunction!(decode_images, module)?)
}

/// Allocates memory of zeros, which the system provides when it is written.
fn zeroed_values<T: Clone + Default>(values: usize) -> PyResult<Vec<T>> {
    let mut memory: Vec<T> = Vec::new();
    // A trial, because `vec!` aborts the process if there is no memory. The reserved memory is not
    // touched, so the trial costs almost nothing.
    let reserved = memory.try_reserve_exact(values);
    reserved.map_err(|_| {
        PyMemoryError::new_err(format!("no memory for the {values} values of a batch of images"))
    })?;
    drop(memory);
    Ok(vec![T::default(); values])
}

#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "fields of Image")]
fn decode_images(
    py: Python<'_>,
    files: Vec<PyBackedBytes>,
    height: u32,
    width: u32,
    mode: &str,
    fit: &str,
    channels_last: bool,
    scales: Option<Vec<(f32, f32)>>,
) -> PyResult<(DecodedPixels, Vec<(usize, String)>)> {
    let mode = match mode {
        "RGB" => ColorMode::Rgb,
        "L" => ColorMode::Gray,
        other => return Err(PyValueError::new_err(format!("mode must be RGB or L: {other}"))),
    };
    let fit = match fit {
        "stretch" => ResizeMode::Stretch,
        "crop" => ResizeMode::Crop,
        "pad" => ResizeMode::Pad,
        other => {
            return Err(PyValueError::new_err(format!(
                "fit must be stretch, crop or pad: {other}"
            )));
        }
    };
    let are_floats = scales.is_some();
    let scale = |(factor, shift)| ChannelScale { factor, shift };
    let scales = scales.unwrap_or_default().into_iter().map(scale).collect();
    let steps = ImageTransform { height, width, mode, fit, channels_last, scales };
    // `chunks_exact_mut` panics for chunks of no values.
    let each = steps.value_count().max(1);
    let values = each.saturating_mul(files.len());
    let mut decoder = ImageDecoder::new(steps);
    let mut left = Vec::new();
    let mut note = |row: usize, done: farandole::images::Result<()>| {
        if let Err(error) = done {
            // Python decodes these rows with Pillow, which knows more kinds of files.
            left.push((row, error.to_string()));
        }
    };
    let pixels = if are_floats {
        let mut out = zeroed_values::<f32>(values)?;
        py.detach(|| {
            for ((row, file), slot) in files.iter().enumerate().zip(out.chunks_exact_mut(each)) {
                note(row, decoder.decode_file(file, ImageOutput::Floats(slot)));
            }
        });
        DecodedPixels::from_floats(out)
    } else {
        let mut out = zeroed_values::<u8>(values)?;
        py.detach(|| {
            for ((row, file), slot) in files.iter().enumerate().zip(out.chunks_exact_mut(each)) {
                note(row, decoder.decode_file(file, ImageOutput::Bytes(slot)));
            }
        });
        DecodedPixels::from_bytes(out)
    };
    Ok((pixels, left))
}
