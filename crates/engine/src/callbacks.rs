// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The thread that runs callbacks, which are foreign code that may be slow and may submit again.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use crate::{Completion, Error, Result};

/// Runs once with the result.
pub type Callback = Box<dyn FnOnce(Result<Completion>) + Send>;

/// A callback and what it is called with.
pub(crate) type Call = (Callback, Result<Completion>);

struct Running {
    sender: Sender<Call>,
    thread: JoinHandle<()>,
}

/// Starts its thread with the first callback. The queue is bounded by the requests in flight.
#[derive(Default)]
pub(crate) struct Callbacks(Mutex<Option<Running>>);

impl Callbacks {
    /// Makes sure that the thread runs.
    pub(crate) fn start(&self) -> Result<()> {
        let mut running = self.0.lock();
        if running.is_some() {
            return Ok(());
        }
        let (sender, calls) = channel::<Call>();
        let run = move || {
            for (callback, result) in calls {
                // A callback that panics must not take the others with it; the panic hook has
                // reported it.
                drop(catch_unwind(AssertUnwindSafe(|| callback(result))));
            }
        };
        let refused = |error: std::io::Error| Error::Start {
            reason: format!("no thread for callbacks: {error}"),
        };
        let thread =
            thread::Builder::new().name("farandole-done".to_owned()).spawn(run).map_err(refused)?;
        *running = Some(Running { sender, thread });
        Ok(())
    }

    /// Hands over callbacks that are due.
    pub(crate) fn send(&self, calls: &mut Vec<Call>) {
        if calls.is_empty() {
            return;
        }
        if let Some(running) = &*self.0.lock() {
            for call in calls.drain(..) {
                // The thread ends only after this sender.
                drop(running.sender.send(call));
            }
        }
    }

    /// Runs what is queued and ends the thread, unless it is the one that asks.
    pub(crate) fn stop(&self) {
        let Some(Running { sender, thread }) = self.0.lock().take() else { return };
        drop(sender);
        if thread.thread().id() != thread::current().id() {
            drop(thread.join());
        }
    }
}
