// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.compress`: lossy forms of vectors given by address.

use farandole::kernels::compress::{
    Bf16Compressor, Compressor, Fp16Compressor, Int8Compressor, TopKCompressor,
    encode_with_residual,
};
use pyo3::prelude::*;

use crate::error::to_exception;
use crate::tensor::{slice_at, slice_at_mut};

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<VectorCodec>()
}

/// A compressor.
#[pyclass(frozen, module = "farandole._native.compress")]
struct VectorCodec(Box<dyn Compressor>);

#[pymethods]
impl VectorCodec {
    #[staticmethod]
    fn fp16() -> Self {
        Self(Box::new(Fp16Compressor))
    }

    #[staticmethod]
    fn bf16() -> Self {
        Self(Box::new(Bf16Compressor))
    }

    #[staticmethod]
    #[pyo3(signature = (block, /))]
    fn int8(block: usize) -> Self {
        Self(Box::new(Int8Compressor::new(block)))
    }

    #[staticmethod]
    #[pyo3(signature = (share, /))]
    fn top_k(share: f64) -> Self {
        Self(Box::new(TopKCompressor::new(share)))
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
        let values = slice_at(values, count)?;
        let residual = residual.map(|residual| slice_at_mut(residual, count)).transpose()?;
        let payload = slice_at_mut(payload, self.0.payload_bytes(count))?;
        // The work may take milliseconds, and the addresses stay valid without the GIL.
        py.detach(|| match residual {
            Some(residual) => encode_with_residual(&*self.0, values, residual, payload),
            None => self.0.encode(values, payload),
        })
        .map_err(|error| to_exception(error.fault(), &error))
    }

    /// Adds the decoded payload to `count` numbers.
    #[pyo3(signature = (payload, length, into, count, /))]
    fn accumulate(
        &self,
        py: Python<'_>,
        payload: usize,
        length: usize,
        into: usize,
        count: usize,
    ) -> PyResult<()> {
        let (payload, into) = (slice_at(payload, length)?, slice_at_mut(into, count)?);
        py.detach(|| self.0.accumulate(payload, into))
            .map_err(|error| to_exception(error.fault(), &error))
    }
}
