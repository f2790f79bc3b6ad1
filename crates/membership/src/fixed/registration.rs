// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Registrations of tasks, and the rules for their agents.

use std::time::Duration;

use farandole_world::HostHash;

use crate::inputs_and_decisions::{AgentPresence, LivenessLimits};

/// The rules of [`FixedMembership`](super::FixedMembership).
#[derive(Clone, Debug)]
pub struct MembershipOptions {
    /// Tasks in the job.
    pub tasks: u32,
    /// Limits after which an agent counts as gone.
    pub liveness: LivenessLimits,
    /// Time for which exits are collected after the first one, before the verdict names the first
    /// failure.
    pub failure_grace: Duration,
    /// Whether a task's number is its rank, whatever its host.
    pub in_order: bool,
}

/// The latest registration of a task.
#[derive(Clone, Debug)]
pub(super) struct TaskRegistration {
    pub(super) attempt: u64,
    pub(super) session: u64,
    pub(super) host: HostHash,
    pub(super) presence: AgentPresence,
}
