// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The host hash, which is equal for tasks of one host.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Facts about a host, collected by code that may do I/O. Two tasks whose facts are equal except
/// for the container may share memory. Transport checks that they can before it uses a shared
/// segment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostFacts {
    /// Host name up to the first dot.
    pub hostname: String,
    /// Kernel boot id: distinguishes machines with the same name.
    pub boot_id: String,
    /// Identity of the IPC namespace: distinguishes containers of one machine.
    pub ipc_namespace: String,
    /// YARN's `CONTAINER_ID`, empty elsewhere. A container has separate GPUs, so it is a separate
    /// host, on a machine that it shares.
    pub container_id: String,
}

/// Identity of a host: `<hostname>-<first 16 hex digits of SHA-256 over the facts>`, followed for a
/// container by `/<first 16 hex digits of SHA-256 over its name>`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HostHash(pub String);

impl HostFacts {
    /// Digests the facts. Fields are length-prefixed, so different facts never give the same input.
    pub fn host_hash(&self) -> HostHash {
        let machine = digest_fields(&[&self.hostname, &self.boot_id, &self.ipc_namespace]);
        let container = match self.container_id.as_str() {
            "" => String::new(),
            container => format!("/{}", digest_fields(&[container])),
        };
        HostHash(format!("{}-{machine}{container}", self.hostname))
    }
}

fn digest_fields(fields: &[&str]) -> String {
    let mut digest = Sha256::new();
    for field in fields {
        digest.update((field.len() as u64).to_le_bytes());
        digest.update(field.as_bytes());
    }
    // Eight bytes distinguish the hosts of any cluster, and each task gets the name of each host.
    digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

impl HostHash {
    /// Returns the machine of the host: containers of one machine may share memory.
    pub fn machine_name(&self) -> &str {
        self.0.split_once('/').map_or(&self.0, |(machine, _)| machine)
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
    fn a_yarn_container_is_a_host_of_its_own_on_its_machine() {
        let host = HostFacts { hostname: "a".into(), ..HostFacts::default() };
        let container = HostFacts { container_id: "container_1".into(), ..host.clone() };
        assert_ne!(host.host_hash(), container.host_hash());
        assert!(host.host_hash().0.starts_with("a-"));
        assert_eq!(container.host_hash().machine_name(), host.host_hash().0);
        let elsewhere = HostFacts { boot_id: "other".into(), ..container.clone() };
        assert_ne!(elsewhere.host_hash().machine_name(), container.host_hash().machine_name());
    }

    #[test]
    fn fields_do_not_run_into_each_other() {
        let one = HostFacts { hostname: "ab".into(), boot_id: "c".into(), ..HostFacts::default() };
        let two = HostFacts { hostname: "a".into(), boot_id: "bc".into(), ..HostFacts::default() };
        assert_ne!(
            one.host_hash().0.split_once('-').unwrap().1,
            two.host_hash().0.split_once('-').unwrap().1
        );
    }
}
