// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.images`: PNG and JPEG as the arrays of a batch.

use farandole::images::{Decoder, Fit, Mode, Scale, Slot, Steps};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::arrow::Pixels;

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Pixels>()?;
    module.add_function(wrap_pyfunction!(decode, module)?)
}

/// Memory of `values` zeros, which is taken when it is written.
fn zeros<T: Clone + Default>(values: usize) -> PyResult<Vec<T>> {
    let mut memory: Vec<T> = Vec::new();
    let reserved = memory.try_reserve_exact(values);
    reserved.map_err(|_| {
        PyMemoryError::new_err(format!("no memory for the {values} values of a batch of images"))
    })?;
    drop(memory);
    Ok(vec![T::default(); values])
}

#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "fields of Image")]
fn decode(
    py: Python<'_>,
    files: Vec<PyBackedBytes>,
    height: u32,
    width: u32,
    mode: &str,
    fit: &str,
    channels_last: bool,
    scales: Option<Vec<(f32, f32)>>,
) -> PyResult<(Pixels, Vec<(usize, String)>)> {
    let mode = match mode {
        "RGB" => Mode::Rgb,
        "L" => Mode::Gray,
        other => return Err(PyValueError::new_err(format!("mode must be RGB or L: {other}"))),
    };
    let fit = match fit {
        "stretch" => Fit::Stretch,
        "crop" => Fit::Crop,
        "pad" => Fit::Pad,
        other => {
            return Err(PyValueError::new_err(format!(
                "fit must be stretch, crop or pad: {other}"
            )));
        }
    };
    let are_floats = scales.is_some();
    let scale = |(factor, shift)| Scale { factor, shift };
    let scales = scales.unwrap_or_default().into_iter().map(scale).collect();
    let steps = Steps { height, width, mode, fit, channels_last, scales };
    let each = steps.values().max(1);
    let values = each.saturating_mul(files.len());
    let mut decoder = Decoder::new(steps);
    let mut left = Vec::new();
    let mut note = |row: usize, done: farandole::images::Result<()>| {
        if let Err(error) = done {
            left.push((row, error.to_string()));
        }
    };
    let pixels = if are_floats {
        let mut out = zeros::<f32>(values)?;
        py.detach(|| {
            for ((row, file), slot) in files.iter().enumerate().zip(out.chunks_exact_mut(each)) {
                note(row, decoder.decode(file, Slot::Floats(slot)));
            }
        });
        Pixels::floats(out)
    } else {
        let mut out = zeros::<u8>(values)?;
        py.detach(|| {
            for ((row, file), slot) in files.iter().enumerate().zip(out.chunks_exact_mut(each)) {
                note(row, decoder.decode(file, Slot::Bytes(slot)));
            }
        });
        Pixels::bytes(out)
    };
    Ok((pixels, left))
}
