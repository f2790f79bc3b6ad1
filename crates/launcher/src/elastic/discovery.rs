// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Host discovery.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::hosts::{HostSlots, parse_hostfile};

/// Tells a search that its result is not needed any more.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Ends the search that looks at it.
    pub(crate) fn stop(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Returns whether the search may end without an answer.
    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Finds the present hosts. It is called every second, on its own thread.
pub trait Discovery: Send {
    /// Returns the hosts there are now with their slots, in the order of ranks.
    ///
    /// # Errors
    /// The reason why they could not be found, in a sentence that names the source. The first time
    /// this ends the job, later the hosts found last stay.
    fn find(&mut self, stop: &Stop) -> Result<Vec<HostSlots>, String>;

    /// Returns whether the answer never changes.
    fn is_fixed(&self) -> bool {
        false
    }
}

/// Hosts that are known and do not change.
#[derive(Clone, Debug)]
pub struct Fixed(pub Vec<HostSlots>);

impl Discovery for Fixed {
    fn find(&mut self, _: &Stop) -> Result<Vec<HostSlots>, String> {
        Ok(self.0.clone())
    }

    fn is_fixed(&self) -> bool {
        true
    }
}

/// A file of hosts that something else rewrites, as Kubernetes does for an MPIJob.
#[derive(Clone, Debug)]
pub struct HostFile(pub PathBuf);

impl Discovery for HostFile {
    fn find(&mut self, _: &Stop) -> Result<Vec<HostSlots>, String> {
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
        assert_eq!(discovery.find(&Stop::default()).unwrap(), [HostSlots::new("a", 2)]);
        std::fs::write(file.path(), "a slots=2\nb slots=1\n").unwrap();
        assert_eq!(discovery.find(&Stop::default()).unwrap().len(), 2);
        std::fs::write(file.path(), "").unwrap();
        let error = discovery.find(&Stop::default()).unwrap_err();
        assert!(error.ends_with("names no host") && !discovery.is_fixed(), "{error}");
    }
}
