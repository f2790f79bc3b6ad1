// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Messages of the command, on stderr.

use std::io::Write as _;

/// Prints a message to stderr.
pub(crate) fn print_message(called: &str, message: &str) {
    // If stderr is closed, the message is lost.
    drop(writeln!(std::io::stderr(), "{called}: {message}"));
}
