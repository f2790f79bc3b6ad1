// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The one session of this process: the only global of the project.

use std::process;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use crate::{Error, InitOptions, Result, Session, rejoin, session_formation};

/// Held while a session starts or ends. Locked before `CURRENT_SESSION`.
static SESSION_CHANGE_LOCK: Mutex<()> = Mutex::new(());
/// Read by every operation; written only under `SESSION_CHANGE_LOCK`, and only briefly.
static CURRENT_SESSION: RwLock<Option<Arc<Session>>> = RwLock::new(None);

/// Like [`init_with_options`], with the default options.
///
/// # Errors
/// Like [`init_with_options`].
pub fn init(interrupted: &mut (dyn FnMut() -> bool + Send)) -> Result<bool> {
    init_with_options(&InitOptions::default(), interrupted)
}

/// Joins the world that this process was launched into, or a world of one. Returns true if this
/// call started the session.
///
/// While `init` waits for other ranks, it calls `interrupted` at least every quarter of a second;
/// if that returns true, `init` gives up.
///
/// # Errors
/// `Forked` in a child of a process with a session, `Interrupted`, and any error that keeps the
/// world from forming.
pub fn init_with_options(
    options: &InitOptions,
    interrupted: &mut (dyn FnMut() -> bool + Send),
) -> Result<bool> {
    if let Some(session) = CURRENT_SESSION.read().as_ref() {
        return session.check_not_forked().map(|()| false);
    }
    let _change = SESSION_CHANGE_LOCK.lock();
    // Another thread may have started a session while this one waited for the lock.
    if CURRENT_SESSION.read().is_some() {
        return Ok(false);
    }
    let session = Arc::new(session_formation::form_session(options, interrupted)?);
    *CURRENT_SESSION.write() = Some(session);
    Ok(true)
}

/// Leaves the world: operations in progress fail, here and at the peers. Does nothing without a
/// session. In a forked child, only drops the reference to the parent's session.
pub fn shutdown() {
    if let Some(session) = inherited_session() {
        // The threads and links belong to the parent: running their destructors here would end them
        // there.
        *CURRENT_SESSION.write() = None;
        std::mem::forget(session);
        return;
    }
    let _change = SESSION_CHANGE_LOCK.lock();
    // Taken before the shutdown: operations that begin now get `NotInitialized` and do not wait.
    let session = CURRENT_SESSION.write().take();
    if let Some(session) = session {
        // Before the shutdown, which makes the peers leave.
        rejoin::record_previous_world(&session);
        session.shutdown();
    }
}

/// Returns whether there is a session.
pub fn is_initialized() -> bool {
    CURRENT_SESSION.read().is_some()
}

/// Returns the session.
///
/// # Errors
/// `NotInitialized`.
pub fn current_session() -> Result<Arc<Session>> {
    CURRENT_SESSION.read().as_ref().map(Arc::clone).ok_or(Error::NotInitialized)
}

/// Returns the parent's session, in a forked child.
fn inherited_session() -> Option<Arc<Session>> {
    CURRENT_SESSION
        .read()
        .as_ref()
        .filter(|session| session.process_id() != process::id())
        .map(Arc::clone)
}
