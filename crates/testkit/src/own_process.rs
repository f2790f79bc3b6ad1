// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Tests that measure their whole process.

use std::process::Command;

/// Runs the ignored test `name` of this test binary in its own process.
///
/// # Panics
/// The test failed. The message has its output.
pub fn run_in_own_process(name: &str) {
    let arguments = ["--ignored", "--exact", name, "--nocapture"];
    let start = |program| Command::new(program).args(arguments).output();
    let started = std::env::current_exe().and_then(start);
    assert!(started.is_ok(), "a test binary does not start itself: {started:?}");
    let Ok(child) = started else { return };
    let (output, errors) =
        (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success(), "{output}{errors}");
    assert!(output.contains("1 passed"), "no test is called {name}: {output}");
}
