// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The arguments of a registrar.

use std::time::Duration;

use farandole_config::{Config, PortRange};

/// The arguments of a registrar.
#[derive(Clone, Debug)]
pub struct RegistrarOptions {
    /// Number of tasks that will register.
    pub tasks: u32,
    /// Name of the job; random if absent.
    pub job_id: Option<String>,
    /// Address to listen on and to offer; all own addresses if absent.
    pub host: Option<String>,
    /// Address of this host to listen on instead, or its network (`10.0.0.0/8`); empty for no
    /// preference.
    pub bind: String,
    /// Ports to try.
    pub port_range: PortRange,
    /// Longest time for all tasks to register.
    pub start_timeout: Duration,
    /// Silence after which an agent is lost.
    pub peer_timeout: Duration,
    /// Whether links to tasks that accept no connections may be relayed by this registrar.
    pub relays: bool,
}

impl RegistrarOptions {
    /// Returns the options for a job of `tasks`, with all other values from the configuration.
    pub fn from_config(tasks: u32, config: &Config) -> Self {
        Self {
            tasks,
            job_id: None,
            host: Some(config.driver_host.clone()).filter(|host| !host.is_empty()),
            bind: config.bind_address.clone(),
            port_range: config.port_range,
            start_timeout: config.start_timeout,
            peer_timeout: config.peer_timeout,
            relays: config.dial_out,
        }
    }
}

/// The settings of an elastic job.
#[derive(Clone, Debug)]
pub struct ElasticOptions {
    /// Number of workers that the first world waits for.
    pub first: u32,
    /// Fewest workers of a world.
    pub min_workers: u32,
    /// Most workers of a world.
    pub max_workers: u32,
    /// Workers beyond `max_workers` that are started, and wait to replace a member.
    pub spares: u32,
    /// Longest wait of the job for workers.
    pub timeout: Duration,
    /// Number of worlds after the first that may be formed; unlimited if absent.
    pub reset_limit: Option<u32>,
    /// Shortest and longest time without a new worker on a host where one has failed.
    pub cooldown: (Duration, Duration),
}
