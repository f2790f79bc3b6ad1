// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The thread of host discovery.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::discovery::{Discovery, Stop};
use crate::error::{Error, Result};
use crate::hosts::HostSlots;
use crate::near::are_here;

/// Interval of the search for hosts.
const PERIOD: Duration = Duration::from_secs(1);
/// Longest time to wait for a search that is no longer needed.
const ENDING: Duration = Duration::from_secs(2);

/// Hosts that were found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// Hosts with slots, in the order of ranks.
    pub(super) hosts: Vec<HostSlots>,
    /// For every name that was ever found, whether it means this host.
    pub(super) here: BTreeMap<String, bool>,
}

impl Found {
    /// Returns whether all hosts are this one.
    pub(super) fn only_here(&self) -> bool {
        self.hosts.iter().all(|host| self.is_here(&host.host))
    }

    pub(super) fn is_here(&self, host: &str) -> bool {
        self.here.get(host).copied().unwrap_or(false)
    }
}

/// Looks for hosts until it is dropped.
pub(super) struct Watch {
    stop: Stop,
    wake: mpsc::Sender<()>,
    found: mpsc::Receiver<std::result::Result<Found, String>>,
}

impl Watch {
    /// Starts to look.
    ///
    /// # Errors
    /// `System` when there is no thread.
    pub(super) fn start(discovery: Box<dyn Discovery>) -> Result<Self> {
        let (sender, found) = mpsc::channel();
        let (wake, woken) = mpsc::channel();
        let stop = Stop::default();
        let looking =
            Looking { discovery, stop: stop.clone(), last: Found::default(), failure: None };
        thread::Builder::new()
            .name("farandole-discovery".to_owned())
            .spawn(move || looking.look(&sender, &woken))
            .map_err(|source| Error::System { what: "starting a thread", source })?;
        Ok(Self { stop, wake, found })
    }

    /// Returns the next change, or why there was none at first; `None` when `timeout` passes.
    pub(super) fn next(&self, timeout: Duration) -> Option<std::result::Result<Found, String>> {
        self.found.recv_timeout(timeout).ok()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.stop();
        // A thread that is gone needs no waking.
        let _gone = self.wake.send(());
        // The thread's end closes the channel. A search that runs foreign code may not end.
        while let Ok(_late) = self.found.recv_timeout(ENDING) {}
    }
}

struct Looking {
    discovery: Box<dyn Discovery>,
    stop: Stop,
    last: Found,
    /// The message about the last failure.
    failure: Option<String>,
}

impl Looking {
    fn look(
        mut self,
        sender: &mpsc::Sender<std::result::Result<Found, String>>,
        woken: &mpsc::Receiver<()>,
    ) {
        let first =
            self.discovery.find(&self.stop).map(|hosts| self.changed(hosts).unwrap_or_default());
        let failed = first.is_err();
        if sender.send(first).is_err() || failed || self.discovery.is_fixed() {
            return;
        }
        while let Err(mpsc::RecvTimeoutError::Timeout) = woken.recv_timeout(PERIOD) {
            let found = self.discovery.find(&self.stop);
            if self.stop.is_stopped() {
                return;
            }
            match found {
                Ok(hosts) => {
                    if self.failure.take().is_some() {
                        tracing::info!("hosts were found again");
                    }
                    if let Some(found) = self.changed(hosts)
                        && sender.send(Ok(found)).is_err()
                    {
                        return;
                    }
                }
                Err(error) => self.failed(error),
            }
        }
    }

    /// Returns the present hosts, if they have changed.
    fn changed(&mut self, mut hosts: Vec<HostSlots>) -> Option<Found> {
        hosts.retain(|host| host.slots > 0);
        if hosts == self.last.hosts {
            return None;
        }
        let new: Vec<&str> = hosts
            .iter()
            .map(|host| host.host.as_str())
            .filter(|name| !self.last.here.contains_key(*name))
            .collect();
        let here: Vec<(String, bool)> =
            new.iter().map(|name| (*name).to_owned()).zip(are_here(&new)).collect();
        self.last.here.extend(here);
        self.last.hosts = hosts;
        Some(self.last.clone())
    }

    /// Says of a failure once that it is one: it may repeat itself every second.
    fn failed(&mut self, error: String) {
        if self.failure.as_ref() != Some(&error) {
            tracing::warn!(
                "{error}; the hosts that were found last are kept, and it is tried again"
            );
            self.failure = Some(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers in this order; the last one for ever.
    struct Played(Vec<std::result::Result<Vec<HostSlots>, String>>);

    impl Discovery for Played {
        fn find(&mut self, _: &Stop) -> std::result::Result<Vec<HostSlots>, String> {
            if self.0.len() > 1 { self.0.remove(0) } else { self.0[0].clone() }
        }
    }

    const LONG: Duration = Duration::from_secs(30);

    fn hosts(names: &[&str]) -> Vec<HostSlots> {
        names.iter().map(|name| HostSlots::new(*name, 1)).collect()
    }

    #[test]
    fn only_changes_are_reported_and_a_failure_is_none() {
        // EL-1.
        let one = hosts(&["localhost"]);
        let two = hosts(&["localhost", "127.0.0.1"]);
        let watch = Watch::start(Box::new(Played(vec![
            Ok(one.clone()),
            Ok(one.clone()),
            Err("the cluster is busy".to_owned()),
            Ok(two.clone()),
            Ok(vec![HostSlots::new("localhost", 0)]),
        ])))
        .unwrap();
        let found = watch.next(LONG).unwrap().unwrap();
        assert_eq!(found.hosts, one);
        assert!(found.only_here() && found.is_here("localhost") && !found.is_here("elsewhere"));
        assert_eq!(watch.next(LONG).unwrap().unwrap().hosts, two);
        assert_eq!(watch.next(LONG).unwrap().unwrap().hosts, []);
    }

    #[test]
    fn a_first_failure_is_reported() {
        let watch = Watch::start(Box::new(Played(vec![Err("no".to_owned())]))).unwrap();
        assert_eq!(watch.next(LONG).unwrap().unwrap_err(), "no");
    }
}
