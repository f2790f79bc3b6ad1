// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Says which ranks are waited for.

use farandole_engine::{Observer, Stall};

/// Writes stalls to stderr, which launchers carry to the driver under this rank's number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stderr;

impl Observer for Stderr {
    fn stalled(&self, stall: &Stall) {
        let consequence = if stall.fatal { "; giving up" } else { "" };
        eprintln!("farandole: warning: {stall}{consequence}");
    }
}
