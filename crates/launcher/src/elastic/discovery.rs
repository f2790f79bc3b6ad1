// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Host discovery.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::hosts::{HostSlots, parse_hostfile};

/// A flag that asks a running discovery to stop, because its result is not needed any more.
#[derive(Clone, Debug, Default)]
pub struct DiscoveryStopFlag(Arc<AtomicBool>);

impl DiscoveryStopFlag {
    /// Stops the discovery that checks this flag.
    pub(crate) fn request_stop(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Returns whether the discovery may end without an answer.
    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A source of the present hosts. It is called every second, on a separate thread.
pub trait DiscoverySource: Send {
    /// Returns the present hosts with their slots, in the order of ranks.
    ///
    /// # Errors
    /// The reason why the hosts could not be found, in a sentence that names the source. The first
    /// failed call ends the job; after later failures, the hosts found last remain in use.
    fn find_hosts(&mut self, stop: &DiscoveryStopFlag) -> Result<Vec<HostSlots>, String>;

    /// Returns whether the answer never changes.
    fn is_fixed(&self) -> bool {
        false
    }
}

/// Hosts that are known and do not change.
#[derive(Clone, Debug)]
pub struct StaticHostList(pub Vec<HostSlots>);

impl DiscoverySource for StaticHostList {
    fn find_hosts(&mut self, _: &DiscoveryStopFlag) -> Result<Vec<HostSlots>, String> {
        Ok(self.0.clone())
    }

    fn is_fixed(&self) -> bool {
        true
    }
}

/// A host file that another program rewrites, such as Kubernetes for an MPIJob.
#[derive(Clone, Debug)]
pub struct HostFile(pub PathBuf);

impl DiscoverySource for HostFile {
    fn find_hosts(&mut self, _: &DiscoveryStopFlag) -> Result<Vec<HostSlots>, String> {
        let name = self.0.display().to_string();
        let text = std::fs::read_to_string(&self.0)
            .map_err(|error| format!("cannot read the host file {name}: {error}"))?;
        parse_hostfile(&name, &text).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_file_is_read_again_each_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut discovery = HostFile(file.path().to_owned());
        std::fs::write(file.path(), "a slots=2\n").unwrap();
        assert_eq!(
            discovery.find_hosts(&DiscoveryStopFlag::default()).unwrap(),
            [HostSlots::new("a", 2)]
        );
        std::fs::write(file.path(), "a slots=2\nb slots=1\n").unwrap();
        assert_eq!(discovery.find_hosts(&DiscoveryStopFlag::default()).unwrap().len(), 2);
        std::fs::write(file.path(), "").unwrap();
        let error = discovery.find_hosts(&DiscoveryStopFlag::default()).unwrap_err();
        assert!(error.ends_with("names no host") && !discovery.is_fixed(), "{error}");
    }
}
