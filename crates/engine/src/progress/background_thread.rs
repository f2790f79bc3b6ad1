// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Requests to the background thread: other threads wake it to drive, or to end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Interval at which this process sends heartbeats and checks its peers.
// The default peer timeout of 5 s has room for 20 heartbeats, so a late one is not a loss.
pub(super) const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(250);

/// Access to the background thread.
#[derive(Default)]
pub(crate) struct BackgroundThread {
    drive_requested: AtomicBool,
    stopping: AtomicBool,
    lock: Mutex<()>,
    wakeup: Condvar,
}

impl BackgroundThread {
    /// Requests a drive. Costs nothing while the last request has not been taken.
    pub(crate) fn request_drive(&self) {
        if !self.drive_requested.swap(true, Ordering::SeqCst) {
            self.notify_thread();
        }
    }

    pub(crate) fn request_stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.notify_thread();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn notify_thread(&self) {
        // Notify under the lock: the thread is then either asleep or has not checked yet.
        let guard = self.lock.lock();
        self.wakeup.notify_one();
        drop(guard);
    }

    /// Sleeps until a drive is requested, at most for one heartbeat interval. Returns whether a
    /// drive was requested.
    pub(crate) fn sleep_until_drive_requested(&self) -> bool {
        let until = Instant::now() + HEARTBEAT_INTERVAL;
        let mut guard = self.lock.lock();
        while !self.drive_requested.load(Ordering::SeqCst) && !self.is_stopping() {
            if self.wakeup.wait_until(&mut guard, until).timed_out() {
                break;
            }
        }
        drop(guard);
        self.take_background_drive_request()
    }

    /// Returns whether a drive was requested since the last call of this function.
    pub(crate) fn take_background_drive_request(&self) -> bool {
        self.drive_requested.swap(false, Ordering::SeqCst)
    }
}
