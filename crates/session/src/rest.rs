// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Lets the engine sleep on a parker, and watches its peers through the mesh if it has peers.

use std::time::{Duration, Instant};

use farandole_engine::ProgressHost;
use farandole_transport::{Mesh, Parker, Result, Unparker};

/// A parker, and the mesh it belongs to.
pub(crate) struct Rest {
    parker: Parker,
    unparker: Unparker,
    mesh: Option<Mesh>,
}

impl Rest {
    /// For a world with peers.
    pub(crate) fn among(mesh: Mesh) -> Self {
        let parker = mesh.parker();
        Self { unparker: parker.unparker(), parker, mesh: Some(mesh) }
    }

    /// The mesh that connects this process with its peers; `None` in a world of one.
    pub(crate) fn mesh(&self) -> Option<&Mesh> {
        self.mesh.as_ref()
    }

    /// For a world of one.
    pub(crate) fn alone() -> Result<Self> {
        let parker = Parker::new()?;
        Ok(Self { unparker: parker.unparker(), parker, mesh: None })
    }
}

impl ProgressHost for Rest {
    fn prepare(&self) {
        self.parker.prepare();
    }

    fn park(&self, limit: Duration) {
        // A parker that cannot sleep makes the engine spin; its failure ends the links, too, which
        // report it.
        drop(self.parker.park(Instant::now() + limit));
    }

    fn cancel(&self) {
        self.parker.cancel();
    }

    fn unpark(&self) {
        self.unparker.wake();
    }

    fn check(&self) -> Result<()> {
        self.mesh.as_ref().map_or(Ok(()), |mesh| mesh.check())
    }

    fn beat(&self) {
        if let Some(mesh) = &self.mesh {
            mesh.beat();
        }
    }
}
