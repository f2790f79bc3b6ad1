// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Lets the engine sleep on a parker, and watches its peers through the mesh if it has peers.

use std::time::{Duration, Instant};

use farandole_engine::DriverParkingAndLiveness;
use farandole_transport::{Mesh, Parker, Result, Unparker};

/// A parker, and the mesh that it belongs to.
pub(crate) struct MeshParker {
    parker: Parker,
    unparker: Unparker,
    mesh: Option<Mesh>,
}

impl MeshParker {
    /// Returns the parker of a world with peers.
    pub(crate) fn with_mesh(mesh: Mesh) -> Self {
        let parker = mesh.parker();
        Self { unparker: parker.unparker(), parker, mesh: Some(mesh) }
    }

    /// Returns the mesh that connects this process with its peers; `None` in a world of one.
    pub(crate) fn mesh(&self) -> Option<&Mesh> {
        self.mesh.as_ref()
    }

    /// Returns the parker of a world of one.
    pub(crate) fn without_mesh() -> Result<Self> {
        let parker = Parker::new()?;
        Ok(Self { unparker: parker.unparker(), parker, mesh: None })
    }
}

impl DriverParkingAndLiveness for MeshParker {
    fn prepare_park(&self) {
        self.parker.prepare_park();
    }

    fn park(&self, limit: Duration) {
        // If the parker cannot sleep, the engine spins. The same failure ends the links, which
        // report it.
        drop(self.parker.park(Instant::now() + limit));
    }

    fn cancel_park(&self) {
        self.parker.cancel_park();
    }

    fn unpark(&self) {
        self.unparker.wake_all();
    }

    fn check_peers(&self) -> Result<()> {
        self.mesh.as_ref().map_or(Ok(()), |mesh| mesh.check_peers())
    }

    fn send_heartbeat(&self) {
        if let Some(mesh) = &self.mesh {
            mesh.increment_own_heartbeat();
        }
    }
}
