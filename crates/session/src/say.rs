// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Lines on stderr.

use std::fmt::Display;
use std::io::{Write, stderr};

/// Writes a warning, if there is anybody to read it.
pub(crate) fn warn(text: impl Display) {
    say("warning", text);
}

/// Writes a line in one piece. That nobody reads it any more is no reason to fail: who drives the engine may say it.
pub(crate) fn say(level: &str, text: impl Display) {
    let line = format!("farandole: {level}: {text}\n");
    drop(stderr().write_all(line.as_bytes()));
}
