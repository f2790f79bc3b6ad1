// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The end of communicators: they wait for a short time.

use std::time::{Duration, Instant};

use farandole_collectives::Communicator;

/// Pause between two looks at ending work.
const LOOK: Duration = Duration::from_micros(50);
/// The longest that work is waited for which was put on a stream or told to end, and peers that end
/// at the same time. It takes milliseconds, unless work of the framework that it comes after is not
/// done yet.
pub(crate) const ENDING: Duration = Duration::from_secs(1);

/// Looks now and then, for as long as an end may take; whether it came true.
pub(crate) fn wait_for(mut come: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while !come() {
        if began.elapsed() > ENDING {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
}

/// Waits for launched work, at most so long; failures in the meantime are reported elsewhere.
pub(crate) fn drain(communicator: &mut dyn Communicator, limit: Duration) {
    let (began, mut over) = (Instant::now(), Vec::new());
    while communicator.pending() > 0 && began.elapsed() < limit {
        match communicator.progress(&mut over) {
            Ok(true) => {}
            Ok(false) => std::thread::sleep(LOOK),
            Err(_) => return,
        }
    }
}
