// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors as a code and a line of text.

use std::error::Error as _;
use std::ffi::CString;

use farandole::engine::Error;
use farandole::world::Fault;
use farandole_door::Code;

/// The reason why a call failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: Code,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self { code: Code::Usage, text: text.into() }
    }

    /// Returns the text without the bytes that would end it early.
    pub(crate) fn terminated(&self) -> CString {
        let bytes: Vec<u8> = self.text.bytes().filter(|byte| *byte != 0).collect();
        CString::new(bytes).unwrap_or_default()
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::Mismatch { .. } => Code::Mismatch,
            Error::Unsupported { .. } => Code::Unsupported,
            other => of(other.fault()),
        };
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let more = cause.to_string();
            if !text.contains(&more) {
                text.push_str(": ");
                text.push_str(&more);
            }
            source = cause.source();
        }
        Self { code, text }
    }
}

impl From<farandole::session::Error> for Failure {
    fn from(error: farandole::session::Error) -> Self {
        let code = match &error {
            farandole::session::Error::NotInitialized => Code::Mismatch,
            other => of(other.fault()),
        };
        Self { code, text: error.to_string() }
    }
}

fn of(fault: Fault) -> Code {
    match fault {
        Fault::Usage => Code::Usage,
        Fault::Peer | Fault::Membership => Code::Peer,
        Fault::Environment => Code::Environment,
        Fault::Bug => Code::Bug,
    }
}
