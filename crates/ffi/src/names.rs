// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Numbers for operations without a name: they count from 0 in every session, so that ranks which begin anew together
//! agree again.

use std::sync::{Arc, Weak};

use farandole::session::Session;
use parking_lot::Mutex;

static COUNT: Mutex<(Weak<Session>, u64)> = Mutex::new((Weak::new(), 0));

/// The next number of this session.
pub(crate) fn next(session: &Arc<Session>) -> u64 {
    let mut count = COUNT.lock();
    if !std::ptr::eq(count.0.as_ptr(), Arc::as_ptr(session)) {
        *count = (Arc::downgrade(session), 0);
    }
    count.1 += 1;
    count.1 - 1
}
