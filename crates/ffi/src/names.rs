// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Numbers for operations without a name: they count from 0 in every session and among every list
//! of ranks, so that ranks which begin again together agree again, and what some do among
//! themselves does not mix up the others.
//!
//! A rank that ran out of data gave out fewer numbers than the others did. When all ranks have
//! joined, they count again, and the number of that join comes before each: no number of before is
//! given out twice.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use farandole::session::{self, Session};
use farandole::world::{ProcessSetId, Rank};
use parking_lot::Mutex;

/// The numbers that one session has given out.
#[derive(Default)]
struct Counts {
    of: Weak<Session>,
    joins: u64,
    /// The next number among all ranks.
    next: u64,
    /// The next number in sets of some ranks, which have no join.
    among: HashMap<Arc<[Rank]>, u64>,
}

static COUNTS: Mutex<Option<Counts>> = Mutex::new(None);

fn counted<T>(session: &Arc<Session>, look: impl FnOnce(&mut Counts) -> T) -> T {
    let mut counts = COUNTS.lock();
    let known =
        counts.take().filter(|counts| std::ptr::eq(counts.of.as_ptr(), Arc::as_ptr(session)));
    let known =
        known.unwrap_or_else(|| Counts { of: Arc::downgrade(session), ..Counts::default() });
    look(counts.insert(known))
}

/// Returns the suffix of a name in a set of this session, with a dot before it.
pub(crate) fn next(session: &Arc<Session>, set: ProcessSetId, members: Arc<[Rank]>) -> String {
    counted(session, |counts| {
        let everybody = set == ProcessSetId::GLOBAL;
        let next =
            if everybody { &mut counts.next } else { counts.among.entry(members).or_default() };
        *next += 1;
        let number = *next - 1;
        if everybody && counts.joins > 0 {
            format!(".{}.{number}", counts.joins)
        } else {
            format!(".{number}")
        }
    })
}

/// Takes note that all ranks of this process's session have joined: from here on they count again,
/// together.
pub fn joined() {
    if let Ok(session) = session::current() {
        counted(&session, |counts| {
            counts.joins += 1;
            counts.next = 0;
        });
    }
}

/// Returns the number of times that all ranks have joined in this process's session; 0 before there
/// is one.
pub fn joins() -> u64 {
    session::current().map_or(0, |session| counted(&session, |counts| counts.joins))
}
