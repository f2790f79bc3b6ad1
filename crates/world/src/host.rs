// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Which tasks share memory: the host hash.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Facts about a host, gathered by whoever may do I/O. Two tasks with equal facts are taken to share memory;
/// transport still proves it before it uses a shared segment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostFacts {
    /// Host name up to the first dot.
    pub hostname: String,
    /// Kernel boot id: tells apart machines with one name.
    pub boot_id: String,
    /// Identity of the IPC namespace: tells apart containers of one machine.
    pub ipc_namespace: String,
    /// YARN's `CONTAINER_ID`, empty elsewhere: a container accounts memory by itself, so it is a host of its own.
    pub container_id: String,
}

/// Identity of a memory domain: `<hostname>-<first 16 hex digits of SHA-256 over the facts>`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HostHash(pub String);

impl HostFacts {
    /// Digests the facts. Fields are length-prefixed, so no two different sets of facts meet.
    pub fn hash(&self) -> HostHash {
        let mut digest = Sha256::new();
        for field in [&self.hostname, &self.boot_id, &self.ipc_namespace, &self.container_id] {
            digest.update((field.len() as u64).to_le_bytes());
            digest.update(field.as_bytes());
        }
        let hex: String = digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        HostHash(format!("{}-{hex}", self.hostname))
    }
}

impl fmt::Display for HostHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_yarn_container_is_a_host_of_its_own() {
        let host = HostFacts { hostname: "a".into(), ..HostFacts::default() };
        let container = HostFacts { container_id: "container_1".into(), ..host.clone() };
        assert_ne!(host.hash(), container.hash());
        assert!(host.hash().0.starts_with("a-"));
    }

    #[test]
    fn fields_do_not_run_into_each_other() {
        let one = HostFacts { hostname: "ab".into(), boot_id: "c".into(), ..HostFacts::default() };
        let two = HostFacts { hostname: "a".into(), boot_id: "bc".into(), ..HostFacts::default() };
        assert_ne!(one.hash().0.split_once('-').unwrap().1, two.hash().0.split_once('-').unwrap().1);
    }
}
