// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The public engine: checks that need no other rank, then the desk.

mod helping;

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farandole_collectives::Device;
use farandole_world::{ProcessSetId, Rank, World};
use parking_lot::Mutex;

use self::helping::Zeal;
use crate::callbacks::Callback;
use crate::check::{self, Place};
use crate::desk::Submission;
use crate::devices::Devices;
use crate::hash::{Set, of_names};
use crate::progress::Inner;
use crate::registry::{Member, Registry};
use crate::set::{ProcessSet, Shared, share_of};
use crate::timeline::Tracer;
use crate::{
    Cause, Completion, EngineOptions, Error, Handle, Request, Result, SetOptions, background,
};

/// The work of an engine, over all process sets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Control messages sent.
    pub frames_sent: u64,
    /// Control messages received.
    pub frames_received: u64,
    /// Lists of operations executed.
    pub lists: u64,
    /// Operations handed to communicators.
    pub operations: u64,
    /// Tensors in them.
    pub tensors: u64,
    /// Requests of this rank that were announced by number.
    pub cache_hits: u64,
}

/// Time for which shutting down waits for peers to complete what this rank took part in, and to
/// read its farewell.
const FAREWELL: Duration = Duration::from_secs(2);

/// The engine of this process. Share it in an `Arc`; every method may be called from any thread.
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
    sets: Registry,
    shared: Shared,
    devices: Arc<Devices>,
    pub(crate) tracer: Arc<Tracer>,
    zeal: Zeal,
    pid: u32,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts the engine and its background thread.
    ///
    /// # Errors
    /// `Start` when the parts do not fit together or a thread cannot be made.
    pub fn start(options: EngineOptions) -> Result<Self> {
        let EngineOptions { world, settings, host, sets, foreign, devices, fabric, observer } =
            options;
        let world = Arc::new(world);
        let tracer = Arc::new(Tracer::new(settings.nvtx));
        let settings = Arc::new(settings);
        let devices = Arc::new(Devices::new(devices, fabric));
        let shared = Shared {
            world: Arc::clone(&world),
            settings: Arc::clone(&settings),
            devices: Arc::clone(&devices),
            observer,
            tracer: Arc::clone(&tracer),
        };
        let registry = Registry::default();
        let mut states = Vec::with_capacity(sets.len());
        for set in sets {
            let key = registry.add(set.id, set.members.as_slice().into())?;
            states.push(ProcessSet::new(key, set, shared.clone())?);
        }
        foreign.into_iter().try_for_each(|set| registry.add_foreign(set))?;
        if registry.member(ProcessSetId::GLOBAL, world.rank).is_err() {
            return Err(Error::Start { reason: "process set 0 is missing".to_owned() });
        }
        let inner = Arc::new(Inner::new(world, settings, host, states));
        let thread = background::spawn(Arc::clone(&inner))?;
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
            zeal: Zeal::default(),
            pid: std::process::id(),
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Returns this rank's place in the world.
    pub fn world(&self) -> &World {
        &self.inner.world
    }

    /// Takes up a device whose memory requests may name from now on, unless there is one of its
    /// ordinal.
    pub fn add_device(&self, device: Arc<dyn Device>) {
        self.devices.add(device);
    }

    /// Returns whether requests may name memory of the device with this ordinal.
    pub fn has_device(&self, ordinal: u32) -> bool {
        self.devices.knows(ordinal)
    }

    /// Members of a process set, ascending.
    ///
    /// # Errors
    /// `UnknownSet`, `NotAMember`.
    pub fn members(&self, set: ProcessSetId) -> Result<Arc<[Rank]>> {
        self.member(set).map(|member| member.ranks)
    }

    /// Takes up a process set that this rank is in; every member does, with a number that is free.
    /// Operations of other sets continue meanwhile.
    ///
    /// # Errors
    /// `Start` when the parts do not fit together or the number is taken; `Stopped`, `Forked`.
    pub fn add_set(&self, options: SetOptions) -> Result<()> {
        self.check_process()?;
        let (id, ranks) = (options.id, options.members.as_slice().into());
        tracing::debug!(process_set = id.0, ranks = ?options.members, "a process set is added");
        let key = self.sets.add(id, ranks)?;
        let added =
            ProcessSet::new(key, options, self.shared.clone()).and_then(|set| self.inner.add(set));
        if added.is_err() {
            drop(self.sets.remove(id));
        }
        added
    }

    /// Takes note of a process set that this rank is not in.
    ///
    /// # Errors
    /// `Start` when the number is taken.
    pub fn add_foreign_set(&self, set: ProcessSetId) -> Result<()> {
        self.sets.add_foreign(set)
    }

    /// Ends a process set; every member does, and its number is free then. What is in flight in it
    /// fails. Its links end when no member needs them any more, without anybody waiting for that.
    ///
    /// # Errors
    /// `UnknownSet`, `Forked`.
    pub fn remove_set(&self, set: ProcessSetId) -> Result<()> {
        self.check_process()?;
        if set == ProcessSetId::GLOBAL {
            return Err(Error::UnknownSet { set });
        }
        if let Some(member) = self.sets.remove(set)? {
            tracing::debug!(process_set = set.0, "a process set is removed");
            self.inner.remove(member.key, Cause::Removed { set }, Instant::now() + FAREWELL);
        }
        Ok(())
    }

    /// Rows that this rank gets when a reducescatter deals out `rows` in a process set.
    ///
    /// # Errors
    /// Like [`Engine::members`].
    pub fn own_rows(&self, rows: u64, set: ProcessSetId) -> Result<u64> {
        let ranks = &self.member(set)?.ranks;
        let member =
            ranks.iter().position(|rank| *rank == self.inner.world.rank).unwrap_or_default();
        Ok(share_of(rows, member, ranks.len()))
    }

    /// Submits a request and returns at once; the background thread sees to it.
    ///
    /// # Errors
    /// What can be told without other ranks: a wrong request, or an engine that has stopped.
    pub fn submit(&self, request: Request) -> Result<Handle> {
        let handle = self.admit(request, None)?;
        self.inner.announce();
        Ok(handle)
    }

    /// Like [`Engine::submit`], for a caller that calls [`Engine::wait`] next: no other thread is
    /// woken for it, and a small synchronous operation needs no system call. Without that `wait` it
    /// may be taken up only after a quarter second.
    ///
    /// # Errors
    /// Like [`Engine::submit`].
    pub fn submit_attended(&self, request: Request) -> Result<Handle> {
        let handle = self.admit(request, None)?;
        self.inner.announce_quietly();
        Ok(handle)
    }

    /// Submits requests that become ready together: none is executed before all ranks submitted all
    /// of them.
    ///
    /// # Errors
    /// Like [`Engine::submit`], and then none is submitted; `Group` when there is none, or they
    /// name several sets.
    pub fn submit_group(&self, requests: Vec<Request>) -> Result<Vec<Handle>> {
        let handles = self.admit_group(requests, Vec::new())?;
        self.inner.announce();
        Ok(handles)
    }

    /// Like [`Engine::submit_group`], for a caller that waits next; see
    /// [`Engine::submit_attended`].
    ///
    /// # Errors
    /// Like [`Engine::submit_group`].
    pub fn submit_group_attended(&self, requests: Vec<Request>) -> Result<Vec<Handle>> {
        let handles = self.admit_group(requests, Vec::new())?;
        self.inner.announce_quietly();
        Ok(handles)
    }

    /// Like [`Engine::submit_group`], with one callback for each request, in order, as in
    /// [`Engine::submit_with`].
    ///
    /// # Errors
    /// Like [`Engine::submit_group`]; the callbacks are dropped then. `Group` when there are fewer
    /// or more callbacks.
    pub fn submit_group_with(&self, requests: Vec<Request>, done: Vec<Callback>) -> Result<()> {
        self.check_process()?;
        if done.len() != requests.len() {
            return Err(Error::Group { members: requests.len(), sets: 1 });
        }
        self.inner.callbacks.start()?;
        self.admit_group(requests, done)?;
        self.inner.announce();
        Ok(())
    }

    /// With a callback for each request, or with none; no thread is woken yet.
    fn admit_group(&self, requests: Vec<Request>, callbacks: Vec<Callback>) -> Result<Vec<Handle>> {
        self.check_process()?;
        let members = requests.len();
        let mut sets: Vec<ProcessSetId> =
            requests.iter().map(|request| request.process_set).collect();
        sets.dedup();
        let (&[set], Ok(size)) = (&*sets, u32::try_from(members)) else {
            return Err(Error::Group { members, sets: sets.len() });
        };
        let group = (of_names(requests.iter().map(|request| &*request.name)), size);
        let now = Instant::now();
        let submissions: Vec<Submission> = requests
            .into_iter()
            .map(|request| self.check(request, group, now))
            .collect::<Result<_>>()?;
        let key = self.member(set)?.key;
        let mut names = Set::default();
        let again = submissions
            .iter()
            .map(|submission| &submission.entry.name)
            .find(|name| !names.insert(*name));
        let mut desk = self.inner.desk.lock();
        desk.open(key)?;
        if let Some(first) = submissions.first().filter(|_| desk.has_joined(key)) {
            return Err(Error::Joined { set, tensor: Arc::clone(&first.entry.name) });
        }
        let mut taken = submissions.iter().map(|submission| &submission.entry.name);
        if let Some(name) = again.or_else(|| taken.find(|name| desk.is_in_flight(key, name))) {
            return Err(Error::DuplicateName { set, tensor: Arc::clone(name) });
        }
        let mut callbacks = callbacks.into_iter();
        let handles = submissions
            .into_iter()
            .map(|submission| desk.admit(submission, callbacks.next()))
            .collect();
        drop(desk);
        Ok(handles)
    }

    /// Submits a request whose result goes to `done`, which runs on the completion thread, exactly
    /// once.
    ///
    /// # Errors
    /// Like [`Engine::submit`]; `done` is dropped then.
    pub fn submit_with(&self, request: Request, done: Callback) -> Result<()> {
        self.check_process()?;
        self.inner.callbacks.start()?;
        self.admit(request, Some(done))?;
        self.inner.announce();
        Ok(())
    }

    /// Returns whether `wait` would return at once. Quick: if no thread drives, the background
    /// thread is woken.
    ///
    /// # Errors
    /// `UnknownHandle`, `Forked`.
    pub fn poll(&self, handle: Handle) -> Result<bool> {
        self.check_process()?;
        if self.inner.desk.lock().is_done(handle)? {
            return Ok(true);
        }
        self.inner.see_that_somebody_drives();
        self.inner.desk.lock().is_done(handle)
    }

    /// Waits for a result, driving meanwhile. `None` after `timeout`: the handle stays valid.
    ///
    /// # Errors
    /// The failure of the request, after which the handle is gone too; `UnknownHandle`, `Forked`.
    pub fn wait(&self, handle: Handle, timeout: Duration) -> Result<Option<Completion>> {
        self.check_process()?;
        if let Some(completion) = self.inner.desk.lock().take(handle)? {
            return Ok(Some(completion));
        }
        let now = Instant::now();
        // What is too far away to be represented is as good as a year.
        let deadline = now.checked_add(timeout).unwrap_or(now + Duration::from_secs(31_536_000));
        self.inner.wait(handle, deadline)
    }

    /// Returns the reason why the engine takes no more requests, if so.
    pub fn stopped(&self) -> Option<Arc<Cause>> {
        self.inner.desk.lock().stopped().cloned()
    }

    /// The work of the engine.
    pub fn statistics(&self) -> Statistics {
        let driver = self.inner.summon();
        let total =
            driver.sets.iter().map(|set| set.statistics).fold(driver.past, Statistics::plus);
        self.inner.leave(driver);
        total
    }

    /// Leaves in good order: tells the peers, fails what is pending, ends the threads. Does nothing
    /// the second time, and in a forked child.
    pub fn shutdown(&self) {
        if self.check_process().is_err() {
            return;
        }
        let Some(thread) = self.thread.lock().take() else { return };
        let mut driver = self.inner.summon();
        self.inner.stop(&mut driver, Cause::ShutDown);
        self.inner.farewell(&mut driver, Instant::now() + FAREWELL);
        // Links and communicators end here, not with the last reference to the engine.
        driver.sets.clear();
        self.inner.leave(driver);
        self.inner.background.stop();
        self.inner.host.unpark();
        if thread.join().is_err() {
            // The panic hook has reported it; there is nothing left to end.
        }
        self.inner.callbacks.stop();
        tracing::info!(rank = self.inner.world.rank.0, "the engine has ended");
        // A file that cannot be completed is no reason not to leave.
        drop(self.tracer.timeline.stop());
    }

    pub(crate) fn check_process(&self) -> Result<()> {
        match std::process::id() {
            pid if pid == self.pid => Ok(()),
            pid => Err(Error::Forked { pid, parent: self.pid }),
        }
    }

    fn member(&self, set: ProcessSetId) -> Result<Member> {
        self.sets.member(set, self.inner.world.rank)
    }

    fn admit(&self, request: Request, callback: Option<Callback>) -> Result<Handle> {
        self.check_process()?;
        let set = request.process_set;
        let submission = self.check(request, (0, 0), Instant::now())?;
        let mut desk = self.inner.desk.lock();
        desk.open(submission.set)?;
        if desk.has_joined(submission.set) {
            return Err(Error::Joined { set, tensor: Arc::clone(&submission.entry.name) });
        }
        if desk.is_in_flight(submission.set, &submission.entry.name) {
            return Err(Error::DuplicateName { set, tensor: Arc::clone(&submission.entry.name) });
        }
        Ok(desk.admit(submission, callback))
    }

    /// Checks that need no other rank.
    fn check(&self, request: Request, group: (u64, u32), since: Instant) -> Result<Submission> {
        let Member { key, ranks } = self.member(request.process_set)?;
        let place = Place { ranks: &ranks, me: self.inner.world.rank, devices: &self.devices };
        let set = request.process_set;
        let (entry, signature) = check::check(request, &place, group, since)?;
        tracing::trace!(rank = place.me.0, tensor = &*entry.name, process_set = set.0, "submitted");
        Ok(Submission { set: key, entry, signature })
    }
}

impl Statistics {
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            frames_sent: self.frames_sent + other.frames_sent,
            frames_received: self.frames_received + other.frames_received,
            lists: self.lists + other.lists,
            operations: self.operations + other.operations,
            tensors: self.tensors + other.tensors,
            cache_hits: self.cache_hits + other.cache_hits,
        }
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
