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
struct OperationNumbers {
    session: Weak<Session>,
    completed_join_count: u64,
    /// The next number among all ranks.
    next_global: u64,
    /// The next number in sets of some ranks, which have no join.
    next_in_sets: HashMap<Arc<[Rank]>, u64>,
}

static OPERATION_NUMBERS: Mutex<Option<OperationNumbers>> = Mutex::new(None);

fn with_operation_numbers<T>(
    session: &Arc<Session>,
    look: impl FnOnce(&mut OperationNumbers) -> T,
) -> T {
    let mut counts = OPERATION_NUMBERS.lock();
    let known =
        // A new session starts its numbers again, like all other ranks.
        counts.take().filter(|counts| std::ptr::eq(counts.session.as_ptr(), Arc::as_ptr(session)));
    let known = known.unwrap_or_else(|| OperationNumbers {
        session: Arc::downgrade(session),
        ..OperationNumbers::default()
    });
    look(counts.insert(known))
}

/// Returns the suffix of a name in a set of this session, with a dot before it.
pub(crate) fn next_operation_suffix(
    session: &Arc<Session>,
    set: ProcessSetId,
    members: Arc<[Rank]>,
) -> String {
    with_operation_numbers(session, |counts| {
        let everybody = set == ProcessSetId::GLOBAL;
        let next = if everybody {
            &mut counts.next_global
        } else {
            counts.next_in_sets.entry(members).or_default()
        };
        *next += 1;
        let number = *next - 1;
        if everybody && counts.completed_join_count > 0 {
            format!(".{}.{number}", counts.completed_join_count)
        } else {
            format!(".{number}")
        }
    })
}

/// Takes note that all ranks of this process's session have joined: from here on they count again,
/// together.
pub fn restart_numbers_after_join() {
    if let Ok(session) = session::current_session() {
        with_operation_numbers(&session, |counts| {
            counts.completed_join_count += 1;
            counts.next_global = 0;
        });
    }
}

/// Returns the number of times that all ranks have joined in this process's session; 0 before there
/// is one.
pub fn completed_join_count() -> u64 {
    session::current_session()
        .map_or(0, |session| with_operation_numbers(&session, |counts| counts.completed_join_count))
}
