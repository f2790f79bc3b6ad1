// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The job's meeting point: registration, assignment, key-value, logs, metrics, results.
//!
//! What `session` sees (blocking, callable from any thread, `Clone`):
//!
//! ```text
//! // client::Client: this process's connection, one per process, shared with `report`.
//! Client::of_process(&Config, deadline: Instant) -> Result<Option<Client>>    // None without FARANDOLE_JOB
//! Client::connect(&Ticket, TaskId, Option<Generation>, deadline: Instant) -> Result<Client>
//! client.ticket() -> &Ticket            // .job_id() -> &JobId, .link_key() -> [u8; 32]
//! client.task() -> TaskId
//! client.await_assignment(deadline: Instant) -> Result<World>                 // seen from this task's rank
//! client.put(key: &str, value: &[u8]) -> Result<()>                           // keys are per generation
//! client.get(key: &str, deadline: Instant) -> Result<Vec<u8>>                 // waits for the key
//! client.metric(kind: &str, data: &[u8]) -> Result<()>                        // bounded, never blocks
//! host::facts() -> HostFacts;  host::addresses() -> Vec<IpAddr>               // loopback last
//! // Error: Timeout | Refused | Unreachable | Aborted { reason } | Forked | ... ; .fault() -> Fault
//! ```
