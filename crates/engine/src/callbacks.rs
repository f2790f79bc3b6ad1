// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The thread that runs callbacks. They are foreign code, which may be slow and may submit
//! requests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use crate::{Error, RequestCompletion, Result};

/// Function that is called once with the result.
pub type CompletionCallback = Box<dyn FnOnce(Result<RequestCompletion>) + Send>;

/// A callback and its argument.
pub(crate) type DueCallback = (CompletionCallback, Result<RequestCompletion>);

struct CallbackThread {
    sender: Sender<DueCallback>,
    thread: JoinHandle<()>,
}

/// Queue of due callbacks. Its thread starts before the first callback. The requests in flight
/// bound its length.
#[derive(Default)]
pub(crate) struct CallbackQueue(Mutex<Option<CallbackThread>>);

impl CallbackQueue {
    /// Starts the thread unless it runs.
    pub(crate) fn start_callback_thread_if_needed(&self) -> Result<()> {
        let mut running = self.0.lock();
        if running.is_some() {
            return Ok(());
        }
        let (sender, calls) = channel::<DueCallback>();
        let run = move || {
            for (callback, result) in calls {
                // A panic of one callback must not end the thread; the panic hook has logged it.
                drop(catch_unwind(AssertUnwindSafe(|| callback(result))));
            }
        };
        let refused = |error: std::io::Error| Error::Start {
            reason: format!("no thread for callbacks: {error}"),
        };
        let thread =
            thread::Builder::new().name("farandole-done".to_owned()).spawn(run).map_err(refused)?;
        *running = Some(CallbackThread { sender, thread });
        Ok(())
    }

    /// Moves due callbacks into the queue.
    pub(crate) fn enqueue_calls(&self, calls: &mut Vec<DueCallback>) {
        if calls.is_empty() {
            return;
        }
        if let Some(running) = &*self.0.lock() {
            for call in calls.drain(..) {
                // Cannot fail: the thread ends only after this sender is dropped.
                drop(running.sender.send(call));
            }
        }
    }

    /// Runs the queued callbacks and ends the thread. If called from the thread itself, does not
    /// wait for its end.
    pub(crate) fn join_thread(&self) {
        let Some(CallbackThread { sender, thread }) = self.0.lock().take() else { return };
        drop(sender);
        // A callback may drop the last reference to the engine, and a thread cannot wait for
        // itself.
        if thread.thread().id() != thread::current().id() {
            drop(thread.join());
        }
    }
}
