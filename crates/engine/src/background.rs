// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The thread that drives the engine if no thread waits, and otherwise sleeps. It also sends
//! heartbeats to peers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::progress::{BEAT, Inner};
use crate::{Cause, Error, Result};

/// Access to the background thread.
#[derive(Default)]
pub(crate) struct Background {
    called: AtomicBool,
    stopping: AtomicBool,
    lock: Mutex<()>,
    bell: Condvar,
}

impl Background {
    /// There is something to drive. Costs nothing while the last call has not been answered.
    pub(crate) fn call(&self) {
        if !self.called.swap(true, Ordering::SeqCst) {
            self.ring();
        }
    }

    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.ring();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn ring(&self) {
        // Under the lock, so that the thread is either asleep or has not looked yet.
        let guard = self.lock.lock();
        self.bell.notify_one();
        drop(guard);
    }

    /// Sleeps until called or for one beat; whether it was called.
    fn sleep(&self) -> bool {
        let until = Instant::now() + BEAT;
        let mut guard = self.lock.lock();
        while !self.called.load(Ordering::SeqCst) && !self.is_stopping() {
            if self.bell.wait_until(&mut guard, until).timed_out() {
                break;
            }
        }
        drop(guard);
        self.answer()
    }

    /// Returns whether it was called since the last answer.
    fn answer(&self) -> bool {
        self.called.swap(false, Ordering::SeqCst)
    }
}

/// Starts the thread of an engine.
pub(crate) fn spawn(inner: Arc<Inner>) -> Result<JoinHandle<()>> {
    let refused =
        |error: std::io::Error| Error::Start { reason: format!("no background thread: {error}") };
    let body = move || {
        if catch_unwind(AssertUnwindSafe(|| run(&inner))).is_err() {
            // Operations without a waiter would not be driven, and a caller that polls would poll
            // for ever.
            let mut driver = inner.summon();
            inner.stop(&mut driver, Cause::Panicked);
            inner.leave(driver);
        }
    };
    thread::Builder::new().name("farandole-progress".to_owned()).spawn(body).map_err(refused)
}

fn run(inner: &Inner) {
    let background = &inner.background;
    let (mut seen, mut listening) = (u64::MAX, false);
    while !background.is_stopping() {
        inner.host.beat();
        let called = if listening { background.answer() } else { background.sleep() };
        if called {
            listening = false;
            inner.drive_in_background(false);
            continue;
        }
        // If no thread drove for a whole beat, peers may wake this process. While a loop of
        // operations runs that is not so, and no peer pays for waking a thread that has nothing to
        // do.
        let drives = inner.drives.load(Ordering::Relaxed);
        listening = (listening || drives == seen) && inner.drive_in_background(true);
        seen = drives;
    }
}
