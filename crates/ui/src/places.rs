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
pub(crate) struct Places {
    most: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    /// By age, the oldest first. Dropping a sender closes the connection.
    unproven: BTreeMap<u64, oneshot::Sender<()>>,
    proven: HashSet<u64>,
}

impl Places {
    /// Room for `most` connections.
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, state: Mutex::default() })
    }

    /// Returns a place, unless proven connections have all. The receiver gets a message if the
    /// connection is proven, and an error if it has to be closed.
    pub(crate) fn take(self: &Arc<Self>) -> Option<(Place, oneshot::Receiver<()>)> {
        let mut state = self.state();
        if state.unproven.len() + state.proven.len() >= self.most {
            state.unproven.pop_first()?;
        }
        state.last += 1;
        let number = state.last;
        let (seated, unseated) = oneshot::channel();
        state.unproven.insert(number, seated);
        drop(state);
        Some((Place { number, places: Arc::clone(self) }, unseated))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One place. Dropping it makes it free.
#[derive(Debug)]
pub(crate) struct Place {
    number: u64,
    places: Arc<Places>,
}

impl Place {
    /// A request of this connection has the token.
    pub(crate) fn prove(&self) {
        let mut state = self.places.state();
        // If it was unseated a moment ago, the connection is about to be closed.
        if let Some(seated) = state.unproven.remove(&self.number) {
            state.proven.insert(self.number);
            // There is no receiver if the connection ends at this moment.
            let _ = seated.send(());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.places.state();
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
        let places = Places::new(3);
        let mut taken: Vec<_> = (0..3).map(|_| places.take().unwrap()).collect();
        taken[0].0.prove();
        let newcomer = places.take().unwrap();
        let ends: Vec<_> = taken.iter_mut().map(|(_, unseated)| unseated.try_recv()).collect();
        assert_eq!(ends, [Ok(()), Err(TryRecvError::Closed), Err(TryRecvError::Empty)]);
        taken[2].0.prove();
        newcomer.0.prove();
        assert!(places.take().is_none(), "a proven connection was closed");
        drop(newcomer);
        assert!(places.take().is_some());
    }
}
