// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Dials many peers concurrently, because each link takes several round trips, and one peer may
//! answer late.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use farandole_world::Rank;

use crate::Result;
use crate::dial::DialWait;

/// Number of peers for each concurrent dial.
const PEERS_PER_DIAL: usize = 4;
/// Largest number of concurrent dials.
const MAX_CONCURRENT_DIALS: usize = 16;
/// Interval at which the caller is asked whether to give up.
const GIVE_UP_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Returns the number of concurrent dials for this number of peers.
#[must_use]
pub fn max_concurrent_dials(peers: usize) -> usize {
    (peers / PEERS_PER_DIAL).clamp(1, MAX_CONCURRENT_DIALS)
}

/// Dials all peers, and returns the results with their indices. After the first error, no further
/// peer is dialled.
pub(super) fn dial_all_peers<T: Send>(
    peers: &[(usize, Rank)],
    wait: &mut DialWait<'_>,
    dial: impl Fn(Rank, &mut DialWait<'_>) -> Result<T> + Sync,
) -> Result<Vec<(usize, T)>> {
    let threads = max_concurrent_dials(peers.len());
    if threads == 1 {
        return peers.iter().map(|(place, rank)| Ok((*place, dial(*rank, wait)?))).collect();
    }
    let (next, is_over, deadline) = (AtomicUsize::new(0), AtomicBool::new(false), wait.deadline);
    let (dialled, outcomes) = mpsc::channel();
    let work = |dialled: mpsc::Sender<_>| {
        let mut wait = DialWait { deadline, give_up: &mut || is_over.load(Ordering::Relaxed) };
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
            // If the thread limit of the process is reached, the threads that were started dial all
            // peers.
            if builder.spawn_scoped(scope, move || work(dialled)).is_err() {
                break;
            }
        }
        // The receiver sees the end only after all senders are dropped, also this one.
        drop(dialled);
        let (mut links, mut failure) = (Vec::with_capacity(peers.len()), None);
        let mut asked = Instant::now();
        loop {
            let outcome = outcomes.recv_timeout(GIVE_UP_CHECK_INTERVAL);
            if failure.is_none() && asked.elapsed() >= GIVE_UP_CHECK_INTERVAL {
                failure = wait.check_give_up().err();
                asked = Instant::now();
            }
            match outcome {
                Ok((place, Ok(link))) => links.push((place, link)),
                // Only the first error counts: later ones may come from dials that were cancelled
                // because of it.
                Ok((_, Err(error))) => failure = failure.or(Some(error)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            // Relaxed is enough: a dial that sees the flag late does one unneeded handshake, and
            // the scope joins all threads before the result is returned.
            is_over.fetch_or(failure.is_some(), Ordering::Relaxed);
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        // If no thread could be started, this thread dials the remaining peers.
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
        dial: impl Fn(Rank, &mut DialWait<'_>) -> Result<u32> + Sync,
    ) -> Result<Vec<(usize, u32)>> {
        let mut wait = DialWait { deadline: Instant::now() + Duration::from_secs(60), give_up };
        dial_all_peers(&peers(count), &mut wait, dial)
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
                wait.check_give_up()?;
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
                wait.check_give_up()?;
                thread::yield_now();
            },
        );
        assert!(matches!(found, Err(Error::Interrupted)));
        assert_eq!(asked, 1);
    }
}
