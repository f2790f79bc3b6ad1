// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Waits for a backend on the calling thread.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use tokio::runtime::{Builder, Handle, Runtime};

use crate::error::{Error, Result};
use crate::fork_reset_value::ForkResetValue;

/// Threads that drive connections; the requests themselves wait on the callers' threads.
const RUNTIME_THREADS: usize = 2;

/// The runtime of this process, created when a store over the network is first used. A forked child
/// has none of its parent's threads, so it creates another runtime.
static PROCESS_RUNTIME: ForkResetValue<Option<Runtime>> = ForkResetValue::new();

/// A way to wait for a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BackendWaiter {
    /// The backend is ready at once: wait on the calling thread without a runtime.
    CallingThread,
    /// The backend uses the network: wait with the runtime.
    Runtime,
}

impl BackendWaiter {
    /// Runs `future` to completion.
    ///
    /// # Errors
    /// Threads that cannot be started.
    pub(crate) fn wait<T>(self, future: impl Future<Output = T>) -> Result<T> {
        match self {
            Self::CallingThread => Ok(block_on_thread(future)),
            Self::Runtime => Ok(runtime_handle()?.block_on(future)),
        }
    }
}

/// Returns the runtime of this process.
///
/// # Errors
/// Threads that cannot be started.
pub(crate) fn runtime_handle() -> Result<Handle> {
    PROCESS_RUNTIME.with(|runtime| {
        if let Some(runtime) = runtime {
            return Ok(runtime.handle().clone());
        }
        // Separate threads, because parts of uploads advance while their caller makes the next
        // piece.
        let fresh = Builder::new_multi_thread()
            .worker_threads(RUNTIME_THREADS)
            .thread_name("farandole-store")
            .enable_all()
            .build()
            .map_err(|source| Error::Runtime { source })?;
        Ok(runtime.insert(fresh).handle().clone())
    })
}

struct ThreadUnparker(Thread);

impl Wake for ThreadUnparker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs `future` to completion without a runtime. The backends here are ready at once, unless the
/// caller is a thread of another runtime. Then their work runs in that runtime's blocking pool, and
/// this thread is parked.
fn block_on_thread<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(ThreadUnparker(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            // `park` may return early; the loop then polls once more.
            Poll::Pending => std::thread::park(),
        }
    }
}
