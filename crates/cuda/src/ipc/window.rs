// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Device memory that several processes map.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::sync::Arc;

use crate::driver::{NOT_SUPPORTED, PrimaryContext};
use crate::{IpcMemoryHandle, Result};

/// The driver maps a peer's memory of another device when it is first used; the only way there is.
const LAZY_PEER_ACCESS: u32 = 1;

/// This process's, which others may open. They must have closed it before it is dropped.
pub(crate) struct IpcWindow {
    context: Arc<PrimaryContext>,
    start: u64,
}

impl IpcWindow {
    /// Returns memory with anything in it, and what opens it elsewhere.
    ///
    /// # Errors
    /// `CudaDriver` when there is none left, or the driver does not share it.
    pub(crate) fn new(
        context: Arc<PrimaryContext>,
        bytes: usize,
    ) -> Result<(Self, IpcMemoryHandle)> {
        let mut start = 0;
        context.call_driver("cuMemAlloc", |table| match table.window {
            // SAFETY: the place lives across the call.
            Some(take) => unsafe { take(&raw mut start, bytes) },
            None => NOT_SUPPORTED,
        })?;
        let window = Self { context, start };
        let mut handle = IpcMemoryHandle([0; 64]);
        window.context.call_driver("cuIpcGetMemHandle", |table| match table.window_offer {
            // SAFETY: the place lives across the call, and the memory is ours.
            Some(export_handle) => unsafe { export_handle(&raw mut handle, start) },
            None => NOT_SUPPORTED,
        })?;
        Ok((window, handle))
    }

    pub(crate) fn base_address(&self) -> u64 {
        self.start
    }
}

impl Drop for IpcWindow {
    fn drop(&mut self) {
        let start = self.start;
        // There is nothing to do about a failure.
        drop(self.context.call_driver("cuMemFree", |table| match table.window_free {
            // SAFETY: the memory is ours and is given back once.
            Some(free) => unsafe { free(start) },
            None => NOT_SUPPORTED,
        }));
    }
}

/// Another process's window. Nothing on the device uses it when it is dropped.
pub(crate) struct PeerWindow {
    context: Arc<PrimaryContext>,
    start: u64,
}

impl PeerWindow {
    /// # Errors
    /// `CudaDriver` when it is this process's own, or this one may not see it.
    pub(crate) fn open_handle(
        context: Arc<PrimaryContext>,
        handle: IpcMemoryHandle,
    ) -> Result<Self> {
        let mut start = 0;
        context.call_driver("cuIpcOpenMemHandle", |table| match table.window_open {
            // SAFETY: the place lives across the call.
            Some(open) => unsafe { open(&raw mut start, handle, LAZY_PEER_ACCESS) },
            None => NOT_SUPPORTED,
        })?;
        Ok(Self { context, start })
    }

    pub(crate) fn base_address(&self) -> u64 {
        self.start
    }
}

impl Drop for PeerWindow {
    fn drop(&mut self) {
        let start = self.start;
        // There is nothing to do about a failure.
        drop(self.context.call_driver("cuIpcCloseMemHandle", |table| match table.window_close {
            // SAFETY: opened once and closed once.
            Some(close) => unsafe { close(start) },
            None => NOT_SUPPORTED,
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::tests::{break_one, driver, log};

    fn context() -> Arc<PrimaryContext> {
        let context = Arc::new(driver().retain_primary_context(1).unwrap());
        log();
        context
    }

    #[test]
    fn a_window_is_offered_opened_closed_and_given_back() {
        let context = context();
        let (window, handle) = IpcWindow::new(Arc::clone(&context), 100).unwrap();
        assert_eq!((window.base_address(), handle), (0x5000, IpcMemoryHandle([0x50; 64])));
        let view = PeerWindow::open_handle(context, handle).unwrap();
        assert_eq!(view.base_address(), 0x50_000);
        drop(view);
        drop(window);
        let steps =
            ["window of 100 bytes", "window", "window_offer", "window_open", "window_close"];
        assert_eq!(log()[..5], steps);
    }

    #[test]
    fn memory_that_cannot_be_shared_is_freed_and_the_function_is_named() {
        let context = context();
        break_one("window_offer");
        let error = IpcWindow::new(Arc::clone(&context), 100).map(drop).unwrap_err();
        assert!(error.to_string().starts_with("cuIpcGetMemHandle failed on device 1: "), "{error}");
        assert_eq!(log().last().map(String::as_str), Some("window_free"));
        break_one("window_open");
        let error =
            PeerWindow::open_handle(context, IpcMemoryHandle([1; 64])).map(drop).unwrap_err();
        assert!(
            error.to_string().starts_with("cuIpcOpenMemHandle failed on device 1: "),
            "{error}"
        );
        assert!(!log().contains(&"window_close".to_owned()), "nothing was opened");
    }
}
