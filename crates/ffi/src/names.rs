// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Numbers for operations without a name: they count from 0 in every session and among every list of ranks, so that
//! ranks which begin anew together agree again, and what some do among themselves does not mix up the others.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use farandole::session::Session;
use farandole::world::Rank;
use parking_lot::Mutex;

/// The session, and the next number among each list of ranks.
type Counts = (Weak<Session>, HashMap<Arc<[Rank]>, u64>);

static COUNTS: Mutex<Option<Counts>> = Mutex::new(None);

/// The next number among `members` in this session.
pub(crate) fn next(session: &Arc<Session>, members: Arc<[Rank]>) -> u64 {
    let mut counts = COUNTS.lock();
    let known = counts.take().filter(|(of, _)| std::ptr::eq(of.as_ptr(), Arc::as_ptr(session)));
    let (_, counts) = counts.insert(known.unwrap_or_else(|| (Arc::downgrade(session), HashMap::new())));
    let next = counts.entry(members).or_default();
    *next += 1;
    *next - 1
}
