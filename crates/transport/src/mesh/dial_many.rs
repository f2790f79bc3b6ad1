// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Many peers are dialled side by side: each link takes several round trips, and one peer may
//! answer late.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use farandole_world::Rank;

use crate::Result;
use crate::dial::Wait;

/// Peers for each dial that is under way.
const PEERS: usize = 4;
/// Dials under way at most.
const MOST: usize = 16;
/// Interval at which the caller is asked whether to give up.
const ASK: Duration = Duration::from_secs(1);

/// Dials under way at once, for so many peers.
#[must_use]
pub fn dials_at_once(peers: usize) -> usize {
    (peers / PEERS).clamp(1, MOST)
}

/// Dials all peers, and returns the results with their places. After the first error no further
/// peer is dialled.
pub(super) fn dial_all<T: Send>(
    peers: &[(usize, Rank)],
    wait: &mut Wait<'_>,
    dial: impl Fn(Rank, &mut Wait<'_>) -> Result<T> + Sync,
) -> Result<Vec<(usize, T)>> {
    let threads = dials_at_once(peers.len());
    if threads == 1 {
        return peers.iter().map(|(place, rank)| Ok((*place, dial(*rank, wait)?))).collect();
    }
    let (next, is_over, deadline) = (AtomicUsize::new(0), AtomicBool::new(false), wait.deadline);
    let (dialled, outcomes) = mpsc::channel();
    let work = |dialled: mpsc::Sender<_>| {
        let mut wait = Wait { deadline, give_up: &mut || is_over.load(Ordering::Relaxed) };
        while let Some((place, rank)) = peers.get(next.fetch_add(1, Ordering::Relaxed)) {
            if is_over.load(Ordering::Relaxed)
                || dialled.send((*place, dial(*rank, &mut wait))).is_err()
            {
                break;
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..threads {
            let dialled = dialled.clone();
            let builder = thread::Builder::new().name("farandole-dial".to_owned());
            // A process may have as few threads as its limit allows, and as many dials at once.
            if builder.spawn_scoped(scope, move || work(dialled)).is_err() {
                break;
            }
        }
        drop(dialled);
        let (mut links, mut failure) = (Vec::with_capacity(peers.len()), None);
        let mut asked = Instant::now();
        loop {
            let outcome = outcomes.recv_timeout(ASK);
            if failure.is_none() && asked.elapsed() >= ASK {
                failure = wait.ask().err();
                asked = Instant::now();
            }
            match outcome {
                Ok((place, Ok(link))) => links.push((place, link)),
                // Later ones may be of dials that were given up because of this one.
                Ok((_, Err(error))) => failure = failure.or(Some(error)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            is_over.fetch_or(failure.is_some(), Ordering::Relaxed);
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        // Those that no thread has dialled, if none could be started.
        while let Some((place, rank)) = peers.get(next.fetch_add(1, Ordering::Relaxed)) {
            links.push((*place, dial(*rank, wait)?));
        }
        Ok(links)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    fn peers(count: u32) -> Vec<(usize, Rank)> {
        (0..count).map(Rank).enumerate().collect()
    }

    fn all(
        count: u32,
        give_up: &mut dyn FnMut() -> bool,
        dial: impl Fn(Rank, &mut Wait<'_>) -> Result<u32> + Sync,
    ) -> Result<Vec<(usize, u32)>> {
        let mut wait = Wait { deadline: Instant::now() + Duration::from_secs(60), give_up };
        dial_all(&peers(count), &mut wait, dial)
    }

    #[test]
    fn each_peer_is_dialled_once() {
        for count in [0, 1, 3, 8, 100] {
            let mut found = all(count, &mut || false, |rank, _| Ok(rank.0)).unwrap();
            found.sort_unstable();
            assert_eq!(found, (0..count).map(|rank| (rank as usize, rank)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_peer_that_answers_late_does_not_hold_up_the_others() {
        let others = AtomicUsize::new(0);
        let found = all(20, &mut || false, |rank, _| {
            while rank.0 == 0 && others.load(Ordering::Relaxed) < 19 {
                thread::yield_now();
            }
            others.fetch_add(1, Ordering::Relaxed);
            Ok(rank.0)
        });
        assert_eq!(found.unwrap().len(), 20);
    }

    #[test]
    fn the_first_error_ends_the_other_dials_and_is_the_one_returned() {
        let lost = || Error::Handshake { reason: "another key".to_owned() };
        let found = all(100, &mut || false, |rank, wait| {
            if rank.0 == 3 {
                return Err(lost());
            }
            loop {
                wait.ask()?;
                thread::yield_now();
            }
        });
        assert_eq!(found.unwrap_err().to_string(), lost().to_string());
    }

    #[test]
    fn a_caller_that_gives_up_ends_all_dials_and_is_asked_no_more() {
        let mut asked = 0;
        let found = all(
            100,
            &mut || {
                asked += 1;
                true
            },
            |_, wait| loop {
                wait.ask()?;
                thread::yield_now();
            },
        );
        assert!(matches!(found, Err(Error::Interrupted)));
        assert_eq!(asked, 1);
    }
}
