// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Submission, and a short time of help: an operation that completes in that time needs no other
//! thread.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::Engine;
use crate::callbacks::Callback;
use crate::{Completion, Handle, Request, Result};

/// Longest help: several times what small operations take, and too short to matter to the owner of
/// the thread.
const MOMENT: Duration = Duration::from_micros(150);
/// After so many useless attempts in a row, help is given only now and then.
const VAIN: u32 = 3;
/// One call in so many is then helped.
const SOMETIMES: u32 = 16;

/// Whether help has been worth it.
#[derive(Debug, Default)]
pub(super) struct Zeal {
    vain: AtomicU32,
}

impl Zeal {
    /// Returns the time to help this time.
    fn moment(&self) -> Duration {
        let vain = self.vain.load(Ordering::Relaxed);
        if vain < VAIN || vain.is_multiple_of(SOMETIMES) { MOMENT } else { Duration::ZERO }
    }

    fn learn(&self, over: bool) {
        if over {
            self.vain.store(0, Ordering::Relaxed);
        } else {
            self.vain.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Engine {
    /// Submits requests, several as one group, and drives on this thread for a moment. Results that
    /// came by then are returned. Longer operations are left to the engine's own threads, and to
    /// the callbacks that `later` makes, one for each request. After several useless attempts, help
    /// is given less often.
    ///
    /// # Errors
    /// Like [`Engine::submit_group`]; `later` is not called then.
    pub fn submit_helping(
        &self,
        mut requests: Vec<Request>,
        later: impl FnOnce() -> Vec<Callback>,
    ) -> Result<Option<Vec<Result<Completion>>>> {
        self.check_process()?;
        self.inner.callbacks.start()?;
        let handles = match requests.pop() {
            Some(request) if requests.is_empty() => vec![self.admit(request, None)?],
            last => {
                requests.extend(last);
                self.admit_group(requests, Vec::new())?
            }
        };
        let moment = self.zeal.moment();
        let results = if moment.is_zero() {
            self.inner.announce();
            self.zeal.learn(false);
            Vec::new()
        } else {
            self.inner.announce_quietly();
            let results = self.results_by(&handles, Instant::now() + moment);
            self.zeal.learn(results.len() == handles.len());
            results
        };
        if results.len() == handles.len() {
            return Ok(Some(results));
        }
        self.hand_over(&handles, results, later());
        Ok(None)
    }

    /// Results in order, until the first that has not come by `end`.
    fn results_by(&self, handles: &[Handle], end: Instant) -> Vec<Result<Completion>> {
        let mut results = Vec::with_capacity(handles.len());
        for handle in handles {
            match self.wait(*handle, end.saturating_duration_since(Instant::now())).transpose() {
                Some(result) => results.push(result),
                None => break,
            }
        }
        results
    }

    /// Results go to the first callbacks; the others get what comes.
    pub(super) fn hand_over(
        &self,
        handles: &[Handle],
        results: Vec<Result<Completion>>,
        callbacks: Vec<Callback>,
    ) {
        let mut callbacks = callbacks.into_iter();
        let left = &handles[results.len()..];
        // Results first: they are fewer, and no callback is taken that has none.
        let paired = results.into_iter().zip(callbacks.by_ref());
        let mut calls: Vec<_> = paired.map(|(result, callback)| (callback, result)).collect();
        let mut desk = self.inner.desk.lock();
        for (handle, callback) in left.iter().zip(callbacks) {
            desk.hand_over(*handle, callback, &mut calls);
        }
        drop(desk);
        self.inner.callbacks.send(&mut calls);
        // Left where the engine has ended meanwhile, and its thread for callbacks with it.
        calls.into_iter().for_each(|(callback, result)| callback(result));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn useless_help_becomes_rare_and_is_complete_again_once_it_pays() {
        let zeal = Zeal::default();
        let given = || {
            let moment = zeal.moment();
            zeal.learn(false);
            !moment.is_zero()
        };
        assert_eq!((0..32).filter(|_| given()).count(), 4, "the first three, and the sixteenth");
        zeal.learn(true);
        assert_eq!(zeal.moment(), MOMENT);
    }
}
