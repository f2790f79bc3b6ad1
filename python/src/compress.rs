// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.compress`: lossy forms of vectors given by address.

use farandole::collectives::compress::{Bf16, Compressor, Fp16, Int8, TopK, encode_with_residual};
use pyo3::prelude::*;

use crate::error::raise;
use crate::tensor::{slice, slice_mut};

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Codec>()
}

/// A compressor.
#[pyclass(frozen, module = "farandole._native.compress")]
struct Codec(Box<dyn Compressor>);

#[pymethods]
impl Codec {
    #[staticmethod]
    fn fp16() -> Self {
        Self(Box::new(Fp16))
    }

    #[staticmethod]
    fn bf16() -> Self {
        Self(Box::new(Bf16))
    }

    #[staticmethod]
    #[pyo3(signature = (block, /))]
    fn int8(block: usize) -> Self {
        Self(Box::new(Int8::new(block)))
    }

    #[staticmethod]
    #[pyo3(signature = (share, /))]
    fn top_k(share: f64) -> Self {
        Self(Box::new(TopK::new(share)))
    }

    #[pyo3(signature = (values, /))]
    fn payload_bytes(&self, values: usize) -> usize {
        self.0.payload_bytes(values)
    }

    /// Encodes `count` numbers, with error feedback if there is a residual.
    #[pyo3(signature = (values, count, residual, payload, /))]
    fn encode(
        &self,
        py: Python<'_>,
        values: usize,
        count: usize,
        residual: Option<usize>,
        payload: usize,
    ) -> PyResult<()> {
        let values = slice(values, count)?;
        let residual = residual.map(|residual| slice_mut(residual, count)).transpose()?;
        let payload = slice_mut(payload, self.0.payload_bytes(count))?;
        py.detach(|| match residual {
            Some(residual) => encode_with_residual(&*self.0, values, residual, payload),
            None => self.0.encode(values, payload),
        })
        .map_err(|error| raise(error.fault(), &error))
    }

    /// Adds what a payload says to `count` numbers.
    #[pyo3(signature = (payload, length, into, count, /))]
    fn accumulate(
        &self,
        py: Python<'_>,
        payload: usize,
        length: usize,
        into: usize,
        count: usize,
    ) -> PyResult<()> {
        let (payload, into) = (slice(payload, length)?, slice_mut(into, count)?);
        py.detach(|| self.0.accumulate(payload, into)).map_err(|error| raise(error.fault(), &error))
    }
}
