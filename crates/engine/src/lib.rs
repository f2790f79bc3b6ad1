// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Queue, negotiation, fusion and completion: one engine per process.
//!
//! The door, for bindings (all of it callable from any thread; nothing here takes Python's lock):
//!
//! ```text
//! Engine::start(EngineOptions) -> Result<Engine>
//! engine.world() -> &World
//! engine.submit(Request) -> Result<Handle>            // asynchronous: the background thread sees to it
//! engine.submit_attended(Request) -> Result<Handle>   // the caller calls `wait` next: wakes nobody
//! engine.submit_group(Vec<Request>) -> Result<Vec<Handle>>
//! engine.submit_with(Request, Box<dyn FnOnce(Result<Completion>) + Send>) -> Result<()>
//! engine.poll(Handle) -> Result<bool>                 // drives one step
//! engine.wait(Handle, Duration) -> Result<Option<Completion>>   // None: timed out, the handle stays valid
//! engine.shutdown()                                   // idempotent
//! engine.statistics() -> Statistics
//! ```

#![forbid(unsafe_code)]

mod error;
mod options;
mod request;

pub use error::{Cause, Error, Result};
pub use options::{EngineOptions, Observer, ProgressHost, SetOptions, Settings, Silent, Stall};
pub use request::{Completion, Handle, Kind, Request};
