// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A running session.

use std::process;
use std::sync::Arc;

use farandole_config::Config;
use farandole_cuda::Gpus;
use farandole_engine::Engine;
use farandole_registrar::Client;
use farandole_world::World;

use crate::devices::GpuTensors;
use crate::rest::Rest;
use crate::sets::Sets;
use crate::stalls::Stacks;
use crate::{Error, Result};

/// This process's membership in a world. The engine owns the links and the mesh, and takes them
/// down with itself.
pub struct Session {
    engine: Engine,
    client: Option<Client>,
    world: Arc<World>,
    process: u32,
    stacks: Arc<Stacks>,
    pub(crate) gpus: Arc<Gpus>,
    pub(crate) gpu_tensors: GpuTensors,
    /// Whether processes of one host may share memory.
    pub(crate) shares_memory: bool,
    pub(crate) rest: Arc<Rest>,
    pub(crate) sets: Sets,
}

impl Session {
    pub(crate) fn new(
        (engine, stacks, gpus): (Engine, Arc<Stacks>, Arc<Gpus>),
        client: Option<Client>,
        world: Arc<World>,
        rest: Arc<Rest>,
        config: &Config,
    ) -> Self {
        let sets = Sets::new(&world, config);
        let shares_memory = config.shared_memory;
        // A value that is none was refused before.
        let gpu_tensors = GpuTensors::of(config).unwrap_or(GpuTensors::Auto);
        let process = process::id();
        Self {
            engine,
            client,
            world,
            process,
            stacks,
            gpus,
            gpu_tensors,
            shares_memory,
            rest,
            sets,
        }
    }

    /// Returns this process's place in the world.
    pub fn world(&self) -> &Arc<World> {
        &self.world
    }

    /// The engine that runs the operations.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The connection to the registrar; none in a process without a launcher.
    pub fn client(&self) -> Option<&Client> {
        self.client.as_ref()
    }

    /// Returns the desk for requests of the interpreter's stacks.
    pub fn stacks(&self) -> &Stacks {
        &self.stacks
    }

    pub(crate) fn process(&self) -> u32 {
        self.process
    }

    /// # Errors
    /// `Forked` in a child of the process that began the session.
    pub(crate) fn check_process(&self) -> Result<()> {
        let pid = process::id();
        if pid == self.process { Ok(()) } else { Err(Error::Forked { pid, parent: self.process }) }
    }

    /// Ends the session. Later calls through other references get errors.
    pub(crate) fn shutdown(&self) {
        self.engine.shutdown();
        self.stacks.close();
    }
}
