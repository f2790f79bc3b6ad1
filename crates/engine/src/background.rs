// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The thread that drives the engine while no thread waits, and otherwise sleeps. It also sends
//! heartbeats to peers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};

use crate::progress::EngineShared;
use crate::{Error, Result, StopCause};

/// Starts the thread of an engine.
pub(crate) fn spawn_background_thread(inner: Arc<EngineShared>) -> Result<JoinHandle<()>> {
    let refused =
        |error: std::io::Error| Error::Start { reason: format!("no background thread: {error}") };
    let body = move || {
        if catch_unwind(AssertUnwindSafe(|| run_background_loop(&inner))).is_err() {
            // Without this thread, operations without a waiter would not be driven, and a caller
            // that polls would poll for ever.
            let mut driver = inner.preempt_driver();
            inner.stop_engine(&mut driver, StopCause::Panicked);
            inner.release_driver(driver);
        }
    };
    thread::Builder::new().name("farandole-progress".to_owned()).spawn(body).map_err(refused)
}

fn run_background_loop(inner: &EngineShared) {
    let background = &inner.background;
    // No count of drives has this value, so the first interval only records the count.
    let (mut seen, mut listening) = (u64::MAX, false);
    while !background.is_stopping() {
        inner.host.send_heartbeat();
        let called = if listening {
            background.take_background_drive_request()
        } else {
            background.sleep_until_drive_requested()
        };
        if called {
            listening = false;
            inner.drive_in_background(false);
            continue;
        }
        // If no thread drove for a whole heartbeat interval, listen: peers may then wake this
        // process. While operations run in a loop, do not listen: each wake-up would cost a peer
        // time, and this thread would have nothing to do.
        let drives = inner.drives.load(Ordering::Relaxed);
        listening = (listening || drives == seen) && inner.drive_in_background(true);
        seen = drives;
    }
}
