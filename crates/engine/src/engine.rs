// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The public engine: runs the checks that need no other rank, then enters the request in the
//! submission table.

mod inline_drive;
mod inline_drive_backoff;
mod timeline_calls;

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farandole_collectives::Device;
use farandole_negotiation::{FastHashSet, hash_names};
use farandole_telemetry::count_collective_wait;
use farandole_world::{ProcessSetId, Rank, World};
use parking_lot::Mutex;

use self::inline_drive_backoff::InlineDriveBackoff;
use crate::callbacks::CompletionCallback;
use crate::devices::EngineDevices;
use crate::process_set_registry::{ProcessSetRegistry, SetMembership};
use crate::progress::EngineShared;
use crate::request_checks::{self, RequestCheckScope};
use crate::set::{ProcessSet, ProcessSetContext, row_share};
use crate::submission_table::CheckedSubmission;
use crate::timeline::OperationTracer;
use crate::{
    CollectiveRequest, EngineOptions, EngineStatistics, Error, ProcessSetOptions,
    RequestCompletion, RequestHandle, Result, StopCause, background,
};

/// Longest time that a shutdown waits for peers to complete the operations of this rank and to read
/// its departure message.
const SHUTDOWN_GRACE_PERIOD: Duration = Duration::from_secs(2);

/// The engine of this process. Share it in an `Arc`; any thread may call every method.
pub struct Engine {
    pub(crate) inner: Arc<EngineShared>,
    sets: ProcessSetRegistry,
    shared: ProcessSetContext,
    devices: Arc<EngineDevices>,
    pub(crate) tracer: Arc<OperationTracer>,
    help_backoff: InlineDriveBackoff,
    pid: u32,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts the engine and its background thread.
    ///
    /// # Errors
    /// `Start` if the options do not fit together or a thread cannot be created.
    pub fn start(options: EngineOptions) -> Result<Self> {
        let EngineOptions { world, settings, host, sets, foreign, devices, fabric, observer } =
            options;
        let world = Arc::new(world);
        let tracer = Arc::new(OperationTracer::new(settings.nvtx));
        let settings = Arc::new(settings);
        let devices = Arc::new(EngineDevices::new(devices, fabric));
        let shared = ProcessSetContext {
            world: Arc::clone(&world),
            settings: Arc::clone(&settings),
            devices: Arc::clone(&devices),
            observer,
            tracer: Arc::clone(&tracer),
        };
        let registry = ProcessSetRegistry::default();
        let mut states = Vec::with_capacity(sets.len());
        for set in sets {
            let key = registry.add_set(set.id, set.members.as_slice().into())?;
            states.push(ProcessSet::new(key, set, shared.clone())?);
        }
        foreign.into_iter().try_for_each(|set| registry.reserve_nonmember_set(set))?;
        if registry.find_membership(ProcessSetId::GLOBAL, world.rank).is_err() {
            return Err(Error::Start { reason: "process set 0 is missing".to_owned() });
        }
        let inner = Arc::new(EngineShared::new(world, settings, host, states));
        let thread = background::spawn_background_thread(Arc::clone(&inner))?;
        let World { generation, rank, seats } = &*inner.world;
        tracing::info!(
            rank = rank.0,
            size = seats.len(),
            generation = generation.0,
            "the engine runs"
        );
        Ok(Self {
            inner,
            sets: registry,
            shared,
            devices,
            tracer,
            help_backoff: InlineDriveBackoff::default(),
            pid: std::process::id(),
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Returns the world and this rank's place in it.
    pub fn world(&self) -> &World {
        &self.inner.world
    }

    /// Adds a device. From now on, requests may name its memory. Does nothing if a device with the
    /// same ordinal exists.
    pub fn add_device(&self, device: Arc<dyn Device>) {
        self.devices.add_device(device);
    }

    /// Returns whether requests may name memory of the device with this ordinal.
    pub fn has_device(&self, ordinal: u32) -> bool {
        self.devices.has_device(ordinal)
    }

    /// Returns the members of a process set, ascending.
    ///
    /// # Errors
    /// `UnknownSet`, `NotAMember`.
    pub fn process_set_members(&self, set: ProcessSetId) -> Result<Arc<[Rank]>> {
        self.process_set_membership(set).map(|member| member.ranks)
    }

    /// Adds a process set with this rank in it. Every member must call this, with the same unused
    /// number. Operations of other sets continue meanwhile.
    ///
    /// # Errors
    /// `Start` if the options do not fit together or the number is in use; `Stopped`, `Forked`.
    pub fn add_set(&self, options: ProcessSetOptions) -> Result<()> {
        self.check_original_process()?;
        let (id, ranks) = (options.id, options.members.as_slice().into());
        tracing::debug!(process_set = id.0, ranks = ?options.members, "a process set is added");
        // Registered first, so that no other call can take the number meanwhile.
        let key = self.sets.add_set(id, ranks)?;
        let added = ProcessSet::new(key, options, self.shared.clone())
            .and_then(|set| self.inner.add_set(set));
        if added.is_err() {
            drop(self.sets.remove_set(id));
        }
        added
    }

    /// Registers a process set without this rank, so that its number is in use.
    ///
    /// # Errors
    /// `Start` if the number is in use.
    pub fn reserve_nonmember_set(&self, set: ProcessSetId) -> Result<()> {
        self.sets.reserve_nonmember_set(set)
    }

    /// Removes a process set. Every member must call this; afterwards the number is free.
    /// Operations in progress in the set fail. The links of the set close when no member needs them
    /// any more; no caller waits for this.
    ///
    /// # Errors
    /// `UnknownSet`, `Forked`.
    pub fn remove_set(&self, set: ProcessSetId) -> Result<()> {
        self.check_original_process()?;
        // The world itself cannot be removed: changes of process sets are agreed on in it.
        if set == ProcessSetId::GLOBAL {
            return Err(Error::UnknownSet { set });
        }
        if let Some(member) = self.sets.remove_set(set)? {
            tracing::debug!(process_set = set.0, "a process set is removed");
            self.inner.remove_set(
                member.key,
                StopCause::Removed { set },
                Instant::now() + SHUTDOWN_GRACE_PERIOD,
            );
        }
        Ok(())
    }

    /// Returns the number of rows that this rank gets when a reducescatter splits `rows` among the
    /// members of a process set.
    ///
    /// # Errors
    /// Like [`Engine::process_set_members`].
    pub fn own_reducescatter_rows(&self, rows: u64, set: ProcessSetId) -> Result<u64> {
        let ranks = &self.process_set_membership(set)?.ranks;
        let member =
            ranks.iter().position(|rank| *rank == self.inner.world.rank).unwrap_or_default();
        Ok(row_share(rows, member, ranks.len()))
    }

    /// Submits a request and returns at once; the background thread drives it.
    ///
    /// # Errors
    /// Only errors that are found without other ranks: a wrong request, or a stopped engine.
    pub fn submit(&self, request: CollectiveRequest) -> Result<RequestHandle> {
        let handle = self.admit_request(request, None)?;
        self.inner.announce_submission();
        Ok(handle)
    }

    /// Like [`Engine::submit`], for a caller that calls [`Engine::wait`] next. No other thread is
    /// woken, so a small synchronous operation needs no system call. If the caller does not call
    /// `wait`, the request may start only after 250 ms, with the next heartbeat.
    ///
    /// # Errors
    /// Like [`Engine::submit`].
    pub fn submit_before_wait(&self, request: CollectiveRequest) -> Result<RequestHandle> {
        let handle = self.admit_request(request, None)?;
        self.inner.announce_before_wait();
        Ok(handle)
    }

    /// Submits requests that become ready together: none is executed before all ranks have
    /// submitted all of them. A single request is no group.
    ///
    /// # Errors
    /// Like [`Engine::submit`]; after an error, no request of the group is submitted. `Group` if
    /// the group is empty or names several process sets.
    pub fn submit_group(&self, requests: Vec<CollectiveRequest>) -> Result<Vec<RequestHandle>> {
        let handles = self.admit_group(requests, Vec::new())?;
        self.inner.announce_submission();
        Ok(handles)
    }

    /// Like [`Engine::submit_group`], for a caller that waits next; see
    /// [`Engine::submit_before_wait`].
    ///
    /// # Errors
    /// Like [`Engine::submit_group`].
    pub fn submit_group_before_wait(
        &self,
        requests: Vec<CollectiveRequest>,
    ) -> Result<Vec<RequestHandle>> {
        let handles = self.admit_group(requests, Vec::new())?;
        self.inner.announce_before_wait();
        Ok(handles)
    }

    /// Like [`Engine::submit_group`], with one callback for each request, in order. The completion
    /// thread calls each exactly once.
    ///
    /// # Errors
    /// Like [`Engine::submit_group`]; the callbacks are dropped then. `Group` if the numbers of
    /// callbacks and requests differ.
    pub fn submit_group_with_callbacks(
        &self,
        requests: Vec<CollectiveRequest>,
        done: Vec<CompletionCallback>,
    ) -> Result<()> {
        self.check_original_process()?;
        if done.len() != requests.len() {
            return Err(Error::Group { members: requests.len(), sets: 1 });
        }
        // Before the submission: after it, a failure to start the thread would leave requests
        // without callbacks.
        self.inner.callbacks.start_callback_thread_if_needed()?;
        self.admit_group(requests, done)?;
        self.inner.announce_submission();
        Ok(())
    }

    /// Admits a group with one callback for each request, or without callbacks. Wakes no thread.
    fn admit_group(
        &self,
        mut requests: Vec<CollectiveRequest>,
        mut callbacks: Vec<CompletionCallback>,
    ) -> Result<Vec<RequestHandle>> {
        // A group of one would have another signature than the request alone, and so no common
        // cache entry.
        if requests.len() == 1
            && let Some(request) = requests.pop()
        {
            return Ok(vec![self.admit_request(request, callbacks.pop())?]);
        }
        self.check_original_process()?;
        let members = requests.len();
        let mut sets: Vec<ProcessSetId> =
            requests.iter().map(|request| request.process_set).collect();
        // Equal neighbours are enough: if there are two sets, they meet somewhere in the list.
        sets.dedup();
        let (&[set], Ok(size)) = (&*sets, u32::try_from(members)) else {
            return Err(Error::Group { members, sets: sets.len() });
        };
        let group = (hash_names(requests.iter().map(|request| &*request.name)), size);
        let now = Instant::now();
        let checked: Vec<CheckedSubmission> = requests
            .into_iter()
            .map(|request| self.check_request(request, group, now))
            .collect::<Result<_>>()?;
        let mut names = FastHashSet::default();
        if let Some(twice) = checked.iter().find(|member| !names.insert(&member.entry.name)) {
            return Err(Error::DuplicateName { set, tensor: Arc::clone(&twice.entry.name) });
        }
        // One lock for the checks and the admission: a group is admitted as a whole or not at all.
        let mut submissions = self.inner.submissions.lock();
        checked.iter().try_for_each(|member| submissions.check_admission(set, member))?;
        let mut callbacks = callbacks.into_iter();
        let handles = checked
            .into_iter()
            .map(|submission| submissions.admit_submission(submission, callbacks.next()))
            .collect();
        drop(submissions);
        Ok(handles)
    }

    /// Returns whether `wait` would return at once. Does not drive: if no thread drives, it wakes
    /// the background thread.
    ///
    /// # Errors
    /// `UnknownHandle`, `Forked`.
    pub fn poll(&self, handle: RequestHandle) -> Result<bool> {
        self.check_original_process()?;
        if self.inner.submissions.lock().is_done(handle)? {
            return Ok(true);
        }
        self.inner.ensure_driven();
        self.inner.submissions.lock().is_done(handle)
    }

    /// Waits for a result and drives the engine meanwhile. Returns `None` after `timeout`; the
    /// handle then stays valid.
    ///
    /// # Errors
    /// The failure of the request; the handle is invalid afterwards. `UnknownHandle`, `Forked`.
    pub fn wait(
        &self,
        handle: RequestHandle,
        timeout: Duration,
    ) -> Result<Option<RequestCompletion>> {
        self.check_original_process()?;
        if let Some(completion) = self.inner.submissions.lock().take_result(handle)? {
            return Ok(Some(completion));
        }
        let now = Instant::now();
        // If the deadline cannot be represented, use one year.
        let deadline = now.checked_add(timeout).unwrap_or(now + Duration::from_secs(31_536_000));
        let waited = self.inner.wait(handle, deadline);
        count_collective_wait(now.elapsed());
        waited
    }

    /// Returns the reason why the engine has stopped, or `None` while it accepts requests.
    pub fn stop_cause(&self) -> Option<Arc<StopCause>> {
        self.inner.submissions.lock().stop_cause().cloned()
    }

    /// Returns the counters of the engine's work.
    pub fn statistics(&self) -> EngineStatistics {
        let driver = self.inner.preempt_driver();
        let total = driver
            .sets
            .iter()
            .map(ProcessSet::statistics)
            .fold(driver.removed_set_statistics, EngineStatistics::sum_with);
        self.inner.release_driver(driver);
        total
    }

    /// Shuts down in order: notifies the peers, fails pending requests and ends the threads. Does
    /// nothing in a second call and in a forked child.
    pub fn shutdown(&self) {
        if self.check_original_process().is_err() {
            return;
        }
        let Some(thread) = self.thread.lock().take() else { return };
        let mut driver = self.inner.preempt_driver();
        self.inner.stop_engine(&mut driver, StopCause::ShutDown);
        self.inner.wait_for_links_to_drain(&mut driver, Instant::now() + SHUTDOWN_GRACE_PERIOD);
        // Close links and communicators here, not with the last reference to the engine.
        driver.sets.clear();
        self.inner.release_driver(driver);
        self.inner.background.request_stop();
        // The thread may sleep in the parker, where it does not see the flag.
        self.inner.host.unpark();
        if thread.join().is_err() {
            // The panic hook has logged the panic; there is nothing left to end.
        }
        self.inner.callbacks.join_thread();
        tracing::info!(rank = self.inner.world.rank.0, "the engine has ended");
        // If the timeline file cannot be completed, the shutdown continues.
        drop(self.tracer.timeline.stop_writing());
    }

    pub(crate) fn check_original_process(&self) -> Result<()> {
        match std::process::id() {
            pid if pid == self.pid => Ok(()),
            pid => Err(Error::Forked { pid, parent: self.pid }),
        }
    }

    fn process_set_membership(&self, set: ProcessSetId) -> Result<SetMembership> {
        self.sets.find_membership(set, self.inner.world.rank)
    }

    fn admit_request(
        &self,
        request: CollectiveRequest,
        callback: Option<CompletionCallback>,
    ) -> Result<RequestHandle> {
        self.check_original_process()?;
        let set = request.process_set;
        let submission = self.check_request(request, (0, 0), Instant::now())?;
        let mut submissions = self.inner.submissions.lock();
        submissions.check_admission(set, &submission)?;
        Ok(submissions.admit_submission(submission, callback))
    }

    /// Runs the checks that need no other rank.
    fn check_request(
        &self,
        request: CollectiveRequest,
        group: (u64, u32),
        since: Instant,
    ) -> Result<CheckedSubmission> {
        let SetMembership { key, ranks } = self.process_set_membership(request.process_set)?;
        let place =
            RequestCheckScope { ranks: &ranks, me: self.inner.world.rank, devices: &self.devices };
        let set = request.process_set;
        let (entry, signature) = request_checks::check_request(request, &place, group, since)?;
        tracing::trace!(rank = place.me.0, tensor = &*entry.name, process_set = set.0, "submitted");
        Ok(CheckedSubmission { set: key, entry, signature })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("rank", &self.inner.world.rank).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
