// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Waits for a backend on the calling thread.

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use tokio::runtime::{Builder, Handle, Runtime};

use crate::error::{Error, Result};

/// Threads that drive connections; requests themselves wait on the threads that ask.
const THREADS: usize = 2;

/// The runtime of this process, made when a store over the network is first used. A forked child
/// has none of its parent's threads and makes its own; the parent's is never dropped there, since
/// dropping would wait for them.
static RUNTIME: Mutex<Option<(u32, std::mem::ManuallyDrop<Runtime>)>> = Mutex::new(None);

/// A way to wait for a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// It is ready at once: on this thread, without a runtime.
    Here,
    /// It talks to the network.
    Runtime,
}

impl Waiter {
    /// Runs `future` to its end.
    ///
    /// # Errors
    /// When threads cannot be had.
    pub(crate) fn wait<T>(self, future: impl Future<Output = T>) -> Result<T> {
        match self {
            Self::Here => Ok(here(future)),
            Self::Runtime => Ok(runtime()?.block_on(future)),
        }
    }
}

/// Returns the runtime of this process.
///
/// # Errors
/// When threads cannot be had.
pub(crate) fn runtime() -> Result<Handle> {
    let mut runtime = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    let pid = std::process::id();
    if let Some((owner, runtime)) = &*runtime
        && *owner == pid
    {
        return Ok(runtime.handle().clone());
    }
    let fresh = Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("farandole-store")
        .enable_all()
        .build()
        .map_err(|source| Error::Runtime { source })?;
    let handle = fresh.handle().clone();
    *runtime = Some((pid, std::mem::ManuallyDrop::new(fresh)));
    Ok(handle)
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs `future` to its end without a runtime. The backends here are ready at once, unless the
/// caller is itself a runtime's thread: then their work runs on that runtime's blocking pool, and
/// this thread is parked meanwhile.
fn here<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}
