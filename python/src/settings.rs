// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.settings`: the settings of the environment.

use farandole::config::{AnyKnobValue, Config, FARANDOLE_PREFIX, environment_variable};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(read_setting, module)?)
}

/// Returns the value of a setting by the name of its variable: a boolean, a number, seconds, or
/// text; nothing if it has no value.
#[pyfunction]
#[pyo3(signature = (variable, /))]
fn read_setting<'py>(py: Python<'py>, variable: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    let name = variable.strip_prefix(FARANDOLE_PREFIX).unwrap_or(variable);
    let value = Config::read_knob(name, environment_variable)
        .map_err(|error| PyValueError::new_err(error.to_string()))?
        .ok_or_else(|| PyValueError::new_err(format!("{variable} is no setting")))?;
    Ok(match value {
        AnyKnobValue::Unset => None,
        AnyKnobValue::Boolean(value) => Some(value.into_pyobject(py)?.to_owned().into_any()),
        AnyKnobValue::Integer(value) => Some(value.into_pyobject(py)?.into_any()),
        AnyKnobValue::Seconds(value) => Some(value.into_pyobject(py)?.into_any()),
        AnyKnobValue::Text(value) => Some(value.into_pyobject(py)?.into_any()),
    })
}
