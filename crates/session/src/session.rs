// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A running session.

use std::process;
use std::sync::Arc;

use farandole_config::Config;
use farandole_cuda::ProcessGpus;
use farandole_engine::Engine;
use farandole_registrar::TaskClient;
use farandole_world::World;

use crate::gpu_policy::GpuTensorPolicy;
use crate::mesh_parker::MeshParker;
use crate::set_table::SessionProcessSets;
use crate::stalls::StackRequests;
use crate::{Error, Result};

/// This process's membership in a world. The engine owns the links and the mesh, and closes them
/// when it ends.
pub struct Session {
    engine: Engine,
    client: Option<TaskClient>,
    world: Arc<World>,
    process_id: u32,
    stack_requests: Arc<StackRequests>,
    pub(crate) gpus: Arc<ProcessGpus>,
    pub(crate) gpu_tensors: GpuTensorPolicy,
    /// Whether processes of one host may share memory.
    pub(crate) shares_memory: bool,
    pub(crate) mesh_parker: Arc<MeshParker>,
    pub(crate) sets: SessionProcessSets,
}

impl Session {
    pub(crate) fn new(
        (engine, stacks, gpus): (Engine, Arc<StackRequests>, Arc<ProcessGpus>),
        client: Option<TaskClient>,
        world: Arc<World>,
        mesh_parker: Arc<MeshParker>,
        config: &Config,
    ) -> Self {
        let sets = SessionProcessSets::new(&world, config);
        let shares_memory = config.shared_memory;
        // An invalid value was rejected before.
        let gpu_tensors = GpuTensorPolicy::from_config(config).unwrap_or(GpuTensorPolicy::Auto);
        let process = process::id();
        Self {
            engine,
            client,
            world,
            process_id: process,
            stack_requests: stacks,
            gpus,
            gpu_tensors,
            shares_memory,
            mesh_parker,
            sets,
        }
    }

    /// Returns the world, and with it the rank of this process.
    pub fn world(&self) -> &Arc<World> {
        &self.world
    }

    /// Returns the engine that runs the operations.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the connection to the registrar; `None` in a process without one.
    pub fn client(&self) -> Option<&TaskClient> {
        self.client.as_ref()
    }

    /// Returns the requests for the interpreter's stacks.
    pub fn stack_requests(&self) -> &StackRequests {
        &self.stack_requests
    }

    pub(crate) fn process_id(&self) -> u32 {
        self.process_id
    }

    /// # Errors
    /// `Forked` in a child of the process that started the session.
    pub(crate) fn check_not_forked(&self) -> Result<()> {
        let pid = process::id();
        if pid == self.process_id {
            Ok(())
        } else {
            Err(Error::Forked { pid, parent: self.process_id })
        }
    }

    /// Ends the session. Later calls through other references get errors.
    pub(crate) fn shutdown(&self) {
        self.engine.shutdown();
        self.stack_requests.close();
    }
}
