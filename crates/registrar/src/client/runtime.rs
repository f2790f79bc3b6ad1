// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One thread that serves every client of this process. A fork starts its own thread, because
//! threads do not survive a fork.

use parking_lot::Mutex;
use tokio::runtime::{Handle, Runtime};

use crate::error::{Error, Result};

static CLIENT_RUNTIME: Mutex<Option<(u32, Runtime)>> = Mutex::new(None);

/// Returns the runtime of this process, started on first use.
pub(super) fn runtime_handle() -> Result<Handle> {
    let mut slot = CLIENT_RUNTIME.lock();
    let pid = std::process::id();
    if let Some((made_in, runtime)) = slot.take() {
        if made_in == pid {
            let handle = runtime.handle().clone();
            *slot = Some((made_in, runtime));
            return Ok(handle);
        }
        // The runtime's thread stayed in the parent process: a shutdown here would wait for that
        // thread.
        std::mem::forget(runtime);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // The calls only wait for the network, and every worker process has such a runtime.
        .worker_threads(1)
        .thread_name("farandole-client")
        .enable_all()
        .build()
        .map_err(|error| Error::Runtime { reason: error.to_string() })?;
    let handle = runtime.handle().clone();
    *slot = Some((pid, runtime));
    Ok(handle)
}
