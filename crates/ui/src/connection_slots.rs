// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The limit of open connections: other users of the host cannot keep the owner of the token out.
//!
//! A connection is unproven until a request on it has the token. If all places are taken, the
//! oldest unproven connection is closed for the new one. A proven connection keeps its place.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// The places of a server.
#[derive(Debug)]
pub(crate) struct ViewerConnectionSlots {
    max_connections: usize,
    state: Mutex<ConnectionSlotsState>,
}

#[derive(Debug, Default)]
struct ConnectionSlotsState {
    last: u64,
    /// By age, the oldest first. Dropping a sender closes the connection.
    unproven: BTreeMap<u64, oneshot::Sender<()>>,
    proven: HashSet<u64>,
}

impl ViewerConnectionSlots {
    /// Returns slots for `max_connections` connections.
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { max_connections: most, state: Mutex::default() })
    }

    /// Returns a place, unless proven connections have all. The receiver gets a message if the
    /// connection is proven, and an error if it has to be closed.
    pub(crate) fn take_slot(
        self: &Arc<Self>,
    ) -> Option<(ViewerConnectionSlot, oneshot::Receiver<()>)> {
        let mut state = self.lock_state();
        if state.unproven.len() + state.proven.len() >= self.max_connections {
            state.unproven.pop_first()?;
        }
        state.last += 1;
        let number = state.last;
        let (seated, unseated) = oneshot::channel();
        state.unproven.insert(number, seated);
        drop(state);
        Some((ViewerConnectionSlot { number, slots: Arc::clone(self) }, unseated))
    }

    fn lock_state(&self) -> MutexGuard<'_, ConnectionSlotsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One place. Dropping it makes it free.
#[derive(Debug)]
pub(crate) struct ViewerConnectionSlot {
    number: u64,
    slots: Arc<ViewerConnectionSlots>,
}

impl ViewerConnectionSlot {
    /// Marks the connection as proven, after a request on it had the token.
    pub(crate) fn mark_token_proven(&self) {
        let mut state = self.slots.lock_state();
        // If it was unseated a moment ago, the connection is about to be closed.
        if let Some(seated) = state.unproven.remove(&self.number) {
            state.proven.insert(self.number);
            // There is no receiver if the connection ends at this moment.
            let _ = seated.send(());
        }
    }
}

impl Drop for ViewerConnectionSlot {
    fn drop(&mut self) {
        let mut state = self.slots.lock_state();
        state.unproven.remove(&self.number);
        state.proven.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot::error::TryRecvError;

    use super::*;

    #[test]
    fn the_oldest_unproven_makes_way_and_the_proven_never_do() {
        let places = ViewerConnectionSlots::new(3);
        let mut taken: Vec<_> = (0..3).map(|_| places.take_slot().unwrap()).collect();
        taken[0].0.mark_token_proven();
        let newcomer = places.take_slot().unwrap();
        let ends: Vec<_> = taken.iter_mut().map(|(_, unseated)| unseated.try_recv()).collect();
        assert_eq!(ends, [Ok(()), Err(TryRecvError::Closed), Err(TryRecvError::Empty)]);
        taken[2].0.mark_token_proven();
        newcomer.0.mark_token_proven();
        assert!(places.take_slot().is_none(), "a proven connection was closed");
        drop(newcomer);
        assert!(places.take_slot().is_some());
    }
}
