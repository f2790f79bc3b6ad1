// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors as a code and a line of text.

use std::error::Error as _;
use std::ffi::CString;

use farandole::engine::Error;
use farandole::world::FaultOrigin;
use farandole_door::EngineStatusCode;

/// The reason why a call failed.
#[derive(Debug)]
pub(crate) struct SubmissionFailure {
    pub(crate) code: EngineStatusCode,
    pub(crate) text: String,
}

impl SubmissionFailure {
    pub(crate) fn usage_error(text: impl Into<String>) -> Self {
        Self { code: EngineStatusCode::Usage, text: text.into() }
    }

    /// Returns the text without the bytes that would end it early.
    pub(crate) fn to_c_string(&self) -> CString {
        // C would end the text at the first zero.
        let bytes: Vec<u8> = self.text.bytes().filter(|byte| *byte != 0).collect();
        CString::new(bytes).unwrap_or_default()
    }
}

impl From<Error> for SubmissionFailure {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::Mismatch { .. } => EngineStatusCode::Mismatch,
            Error::Unsupported { .. } => EngineStatusCode::Unsupported,
            other => code_for_fault(other.fault()),
        };
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let more = cause.to_string();
            // Many messages contain the text of their cause already.
            if !text.contains(&more) {
                text.push_str(": ");
                text.push_str(&more);
            }
            source = cause.source();
        }
        Self { code, text }
    }
}

impl From<farandole::session::Error> for SubmissionFailure {
    fn from(error: farandole::session::Error) -> Self {
        let code = match &error {
            // The framework reports both as a failed precondition.
            farandole::session::Error::NotInitialized => EngineStatusCode::Mismatch,
            other => code_for_fault(other.fault()),
        };
        Self { code, text: error.to_string() }
    }
}

fn code_for_fault(fault: FaultOrigin) -> EngineStatusCode {
    match fault {
        FaultOrigin::Usage => EngineStatusCode::Usage,
        FaultOrigin::Peer | FaultOrigin::Membership => EngineStatusCode::Peer,
        FaultOrigin::Environment => EngineStatusCode::Environment,
        FaultOrigin::Bug => EngineStatusCode::Bug,
    }
}
