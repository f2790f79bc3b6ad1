// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Tests that measure their whole process.

use std::process::Command;

/// Runs the ignored test `name` of this test binary in its own process.
///
/// # Panics
/// The test failed. The message has its output.
pub fn run_in_own_process(name: &str) {
    let program = std::env::current_exe().expect("a test binary has a path");
    let arguments = ["--ignored", "--exact", name, "--nocapture"];
    let child = Command::new(program).args(arguments).output().expect("a test binary starts");
    let (output, errors) =
        (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success(), "{output}{errors}");
    assert!(output.contains("1 passed"), "no test is called {name}: {output}");
}
