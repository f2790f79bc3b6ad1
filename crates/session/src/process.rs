// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The one session of this process: the only global of the project.

use std::process;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use crate::{Error, Result, Session, Wishes, form, rejoin};

/// Held while a session comes up or goes down. Taken before `SESSION`.
static CHANGE: Mutex<()> = Mutex::new(());
/// Read by every operation; written only under `CHANGE`, for a moment.
static SESSION: RwLock<Option<Arc<Session>>> = RwLock::new(None);

/// As [`begin`], asking for nothing in particular.
///
/// # Errors
/// Those of [`begin`].
pub fn init(interrupted: &mut (dyn FnMut() -> bool + Send)) -> Result<bool> {
    begin(&Wishes::default(), interrupted)
}

/// Joins the world this process was launched into, or a world of one. True when this call began the
/// session.
///
/// `interrupted` is asked every quarter of a second at least while others are waited for; when it
/// says yes, `init` gives up.
///
/// # Errors
/// `Forked` in a child of a process with a session, `Interrupted`, and whatever keeps the world
/// from forming.
pub fn begin(wishes: &Wishes, interrupted: &mut (dyn FnMut() -> bool + Send)) -> Result<bool> {
    if let Some(session) = SESSION.read().as_ref() {
        return session.check_process().map(|()| false);
    }
    let _change = CHANGE.lock();
    if SESSION.read().is_some() {
        return Ok(false);
    }
    let session = Arc::new(form::form(wishes, interrupted)?);
    *SESSION.write() = Some(session);
    Ok(true)
}

/// Leaves the world: operations in progress fail, here and at the peers. Does nothing without a
/// session. In a forked child it only forgets the parent's session.
pub fn shutdown() {
    if let Some(session) = forked() {
        // Its threads and links are the parent's: running their destructors here would end them
        // there.
        *SESSION.write() = None;
        std::mem::forget(session);
        return;
    }
    let _change = CHANGE.lock();
    let session = SESSION.write().take();
    if let Some(session) = session {
        rejoin::left(&session);
        session.shutdown();
    }
}

/// Returns whether there is a session.
pub fn is_initialized() -> bool {
    SESSION.read().is_some()
}

/// The session.
///
/// # Errors
/// `NotInitialized`.
pub fn current() -> Result<Arc<Session>> {
    SESSION.read().as_ref().map(Arc::clone).ok_or(Error::NotInitialized)
}

/// The parent's session, in a forked child.
fn forked() -> Option<Arc<Session>> {
    SESSION.read().as_ref().filter(|session| session.process() != process::id()).map(Arc::clone)
}
