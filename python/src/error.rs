// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Converts errors for Python, once: the fault selects the class, and the message carries the chain
//! of sources.

use std::error::Error;

use farandole::world::FaultOrigin;
use pyo3::import_exception;
use pyo3::prelude::*;

import_exception!(farandole.common.exceptions, FarandoleBugError);
import_exception!(farandole.common.exceptions, FarandoleEnvironmentError);
import_exception!(farandole.common.exceptions, FarandoleInternalError);
import_exception!(farandole.common.exceptions, FarandoleUsageError);
import_exception!(farandole.common.exceptions, WorkerDismissed);

/// Returns the exception for `error`.
pub(crate) fn to_exception(fault: FaultOrigin, error: &dyn Error) -> PyErr {
    let message = error_chain_message(error);
    match fault {
        FaultOrigin::Usage => FarandoleUsageError::new_err(message),
        // Elastic training of Horovod catches this class and forms another world.
        FaultOrigin::Peer | FaultOrigin::Membership => FarandoleInternalError::new_err(message),
        FaultOrigin::Environment => FarandoleEnvironmentError::new_err(message),
        FaultOrigin::Bug => FarandoleBugError::new_err(message),
    }
}

/// Returns the message of `error` followed by the messages of its sources, without the parts that a
/// wrapper already contains.
pub(crate) fn error_chain_message(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let text = cause.to_string();
        // Some wrappers have the text of their source in their own message.
        if !message.contains(&text) {
            message.push_str(": ");
            message.push_str(&text);
        }
        source = cause.source();
    }
    message
}
