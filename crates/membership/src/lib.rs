// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Membership of a job: which tasks are in it. Two pure state machines decide it, one for a fixed
//! number of tasks and one for workers that come and go.
//!
//! This crate owns the decisions of the registrar: who gets a rank, which world forms next, who is
//! lost, which failure came first, and when the job is over. It has no clock, I/O, lock, thread or
//! async. The registrar supplies the inputs, carries out the decisions, and writes the steps to its
//! journal. Time is a `Duration` since the job began. Every decision carries its reason.
//!
//! ```text
//! FixedMembership     register_task ──────────────────────┐
//! ElasticMembership   register_worker, request_world ─────┼──> MembershipDecision: Assigned, Lost, Stop, Start, ...
//! both                apply_membership_input(MembershipInput) ─────┘    or RegistrationRefusal
//!                     take_journaled_step ──> JournalStep ── replay_step ──> the same machine, after a restart
//! ```
//!
//! Simulations of whole jobs hold the invariants of both machines: each seed is one history of
//! agents that crash over a network that loses messages.
//!
//! Invariants of [`FixedMembership`]. The module `elastic` has the invariants of
//! [`ElasticMembership`].
//!
//! - `MB-1`: a generation is assigned when every task waits exactly once, and it contains every
//!   task exactly once.
//! - `MB-2`: generations grow by one and are assigned at most once.
//! - `MB-3`: an attempt is replaced only by a higher one, even after it was lost; a repeated
//!   registration of one session changes nothing.
//! - `MB-4`: a generation gets at most one verdict. If a task's own failure was seen in time, the
//!   verdict names it rather than a peer's error or a stopped worker.
//! - `MB-5`: after an abort or a finish, nothing is assigned.

#![forbid(unsafe_code)]

mod elastic;
mod exit;
mod fixed;
mod inputs_and_decisions;

pub use elastic::{ElasticMembership, ElasticRules, ElasticStepInput, JournalStep};
pub use exit::{ExitKind, ExitReport, GenerationVerdict, signal_name};
pub use fixed::{FixedMembership, MembershipOptions};
pub use inputs_and_decisions::{
    LivenessLimits, MembershipDecision, MembershipInput, RegistrationRefusal,
};
