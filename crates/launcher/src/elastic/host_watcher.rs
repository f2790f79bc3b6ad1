// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The thread of host discovery.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::discovery::{DiscoverySource, DiscoveryStopFlag};
use crate::error::{Error, Result};
use crate::hosts::HostSlots;
use crate::local_hosts::which_hosts_are_local;

/// Interval between two discoveries.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(1);
/// Longest time to wait for a discovery that is no longer needed.
const DISCOVERY_END_TIMEOUT: Duration = Duration::from_secs(2);

/// The result of a discovery.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiscoveredHosts {
    /// Hosts with slots, in the order of ranks.
    pub(crate) hosts: Vec<HostSlots>,
    /// Whether a name means this host, for every name that was ever found.
    pub(crate) is_local_by_name: BTreeMap<String, bool>,
}

impl DiscoveredHosts {
    /// Returns whether this host is the only one.
    pub(crate) fn are_all_hosts_local(&self) -> bool {
        self.hosts.iter().all(|host| self.is_local_host(&host.host))
    }

    pub(crate) fn is_local_host(&self, host: &str) -> bool {
        self.is_local_by_name.get(host).copied().unwrap_or(false)
    }
}

/// Discovers hosts in a thread until it is dropped.
pub(crate) struct HostWatcher {
    stop: DiscoveryStopFlag,
    wake: mpsc::Sender<()>,
    found: mpsc::Receiver<std::result::Result<DiscoveredHosts, String>>,
}

impl HostWatcher {
    /// Starts the thread.
    ///
    /// # Errors
    /// `System` when no thread can be started.
    pub(crate) fn spawn_thread(discovery: Box<dyn DiscoverySource>) -> Result<Self> {
        let (sender, found) = mpsc::channel();
        let (wake, woken) = mpsc::channel();
        let stop = DiscoveryStopFlag::default();
        let looking = DiscoveryLoop {
            discovery,
            stop: stop.clone(),
            last_found: DiscoveredHosts::default(),
            last_failure: None,
        };
        thread::Builder::new()
            .name("farandole-discovery".to_owned())
            .spawn(move || looking.run_discovery_loop(&sender, &woken))
            .map_err(|source| Error::System { what: "starting a thread", source })?;
        Ok(Self { stop, wake, found })
    }

    /// Returns the next change, or the error of the first discovery; `None` when `timeout` passes.
    pub(crate) fn wait_for_host_change(
        &self,
        timeout: Duration,
    ) -> Option<std::result::Result<DiscoveredHosts, String>> {
        self.found.recv_timeout(timeout).ok()
    }
}

impl Drop for HostWatcher {
    fn drop(&mut self) {
        // The flag before the wake-up, so that the thread finds it set.
        self.stop.request_stop();
        // A thread that has ended needs no wake-up.
        let _gone = self.wake.send(());
        // The channel closes when the thread ends. A discovery that runs foreign code may never
        // end.
        while let Ok(_late) = self.found.recv_timeout(DISCOVERY_END_TIMEOUT) {}
    }
}

struct DiscoveryLoop {
    discovery: Box<dyn DiscoverySource>,
    stop: DiscoveryStopFlag,
    last_found: DiscoveredHosts,
    /// The message of the last failure.
    last_failure: Option<String>,
}

impl DiscoveryLoop {
    fn run_discovery_loop(
        mut self,
        sender: &mpsc::Sender<std::result::Result<DiscoveredHosts, String>>,
        woken: &mpsc::Receiver<()>,
    ) {
        let first = self
            .discovery
            .find_hosts(&self.stop)
            .map(|hosts| self.hosts_if_changed(hosts).unwrap_or_default());
        let failed = first.is_err();
        // A first failure is most likely a mistake of the user. Later failures may pass, and the
        // job continues.
        if sender.send(first).is_err() || failed || self.discovery.is_fixed() {
            return;
        }
        while let Err(mpsc::RecvTimeoutError::Timeout) = woken.recv_timeout(DISCOVERY_INTERVAL) {
            let found = self.discovery.find_hosts(&self.stop);
            if self.stop.is_stopped() {
                return;
            }
            // A program such as `kubectl get nodes | awk ...` succeeds without output if the
            // cluster does not answer.
            let lost_all = |hosts: &[HostSlots]| {
                !self.last_found.hosts.is_empty() && hosts.iter().all(|host| host.slots == 0)
            };
            match found {
                Ok(hosts) if lost_all(&hosts) => {
                    self.warn_once("the host discovery found no host with a slot".to_owned());
                }
                Ok(hosts) => {
                    if self.last_failure.take().is_some() {
                        tracing::info!("hosts were found again");
                    }
                    if let Some(found) = self.hosts_if_changed(hosts)
                        && sender.send(Ok(found)).is_err()
                    {
                        return;
                    }
                }
                Err(error) => self.warn_once(error),
            }
        }
    }

    /// Returns the present hosts, if they have changed.
    fn hosts_if_changed(&mut self, mut hosts: Vec<HostSlots>) -> Option<DiscoveredHosts> {
        hosts.retain(|host| host.slots > 0);
        if hosts == self.last_found.hosts {
            return None;
        }
        let new: Vec<&str> = hosts
            .iter()
            .map(|host| host.host.as_str())
            // Names are resolved once: a resolver that does not answer takes seconds for each.
            .filter(|name| !self.last_found.is_local_by_name.contains_key(*name))
            .collect();
        let here: Vec<(String, bool)> =
            new.iter().map(|name| (*name).to_owned()).zip(which_hosts_are_local(&new)).collect();
        self.last_found.is_local_by_name.extend(here);
        self.last_found.hosts = hosts;
        Some(self.last_found.clone())
    }

    /// Logs a failure that may repeat every second only once.
    fn warn_once(&mut self, error: String) {
        if self.last_failure.as_ref() != Some(&error) {
            tracing::warn!(
                "{error}; the hosts that were found last are kept, and it is tried again"
            );
            self.last_failure = Some(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers, in this order; the last one is repeated.
    struct Played(Vec<std::result::Result<Vec<HostSlots>, String>>);

    impl DiscoverySource for Played {
        fn find_hosts(
            &mut self,
            _: &DiscoveryStopFlag,
        ) -> std::result::Result<Vec<HostSlots>, String> {
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
        let watch = HostWatcher::spawn_thread(Box::new(Played(vec![
            Ok(one.clone()),
            Ok(one.clone()),
            Err("the cluster is busy".to_owned()),
            Ok(two.clone()),
            Ok(vec![]),
            Ok(vec![HostSlots::new("localhost", 0)]),
            Ok(one.clone()),
        ])))
        .unwrap();
        let found = watch.wait_for_host_change(LONG).unwrap().unwrap();
        assert_eq!(found.hosts, one);
        assert!(
            found.are_all_hosts_local()
                && found.is_local_host("localhost")
                && !found.is_local_host("elsewhere")
        );
        assert_eq!(watch.wait_for_host_change(LONG).unwrap().unwrap().hosts, two);
        assert_eq!(
            watch.wait_for_host_change(LONG).unwrap().unwrap().hosts,
            one,
            "not an empty list"
        );
    }

    #[test]
    fn a_first_failure_is_reported() {
        let watch =
            HostWatcher::spawn_thread(Box::new(Played(vec![Err("no".to_owned())]))).unwrap();
        assert_eq!(watch.wait_for_host_change(LONG).unwrap().unwrap_err(), "no");
    }
}
