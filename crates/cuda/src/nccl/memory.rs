// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory that NCCL gives and communicators register: the other members' kernels, and switches, may then work on it where
//! it lies, and NCCL copies it nowhere.
//!
//! Its owner lets go of it at any time. It is given back when no communicator has it registered, which each ends as soon as
//! what it has put on its stream is done, or when it ends itself.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::ffi::c_void;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use farandole_collectives::{Buffer, Event, Operation, Place, Result as Collected};
use parking_lot::Mutex;

use super::{Comm, Lane, Nccl};
use crate::{Error, Result};

/// Memory of a device, for as long as its owner wants it.
pub struct NcclMemory(Arc<Given>);

impl NcclMemory {
    /// Where it begins, in the device's addresses.
    pub fn address(&self) -> usize {
        self.0.start
    }

    /// In bytes.
    pub fn len(&self) -> usize {
        self.0.bytes
    }

    /// Whether there is none of it.
    pub fn is_empty(&self) -> bool {
        self.0.bytes == 0
    }
}

impl Drop for NcclMemory {
    fn drop(&mut self) {
        self.0.wanted.store(false, Ordering::Release);
    }
}

/// What NCCL has given.
pub(super) struct Given {
    nccl: Nccl,
    device: Arc<dyn Lane>,
    start: usize,
    bytes: usize,
    /// Its owner has not let go of it.
    wanted: AtomicBool,
}

impl Given {
    fn holds(&self, buffer: &Buffer) -> bool {
        let end = self.start.saturating_add(self.bytes);
        let first = buffer.address().addr();
        buffer.place() == Place::Device(self.device.ordinal())
            && (self.start..end).contains(&first)
            && buffer.len() <= end - first
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        let Some(free) = self.nccl.table().free else { return };
        let (device, start) = (Arc::clone(&self.device), self.start);
        // The framework's work on it may not be done, and may wait for peers: nobody else is to wait for that.
        let thread = std::thread::Builder::new().name("farandole-nccl-memory".to_owned());
        // Without a thread it is lost. There is nothing to do about other failures.
        drop(thread.spawn(move || {
            drop(device.settle());
            drop(device.with(&mut || {
                // SAFETY: it was given by the same library and goes back once; nobody knows of it any more, and the device
                // is done with it.
                unsafe { free(with_exposed_provenance_mut(start)) };
            }));
        }));
    }
}

/// What was given and may still be used. The process's, not a session's: gradients outlive sessions, and what one rank takes
/// from an old one must be registered as what another has from the new one.
static SHELF: Mutex<Vec<Weak<Given>>> = Mutex::new(Vec::new());

fn put(given: &Arc<Given>) {
    let mut all = SHELF.lock();
    all.retain(|other| other.strong_count() > 0);
    all.push(Arc::downgrade(given));
}

fn holding(buffer: &Buffer) -> Option<Arc<Given>> {
    // Given back outside of the lock, should it be the last to hold it.
    let all: Vec<_> = SHELF.lock().iter().filter_map(Weak::upgrade).collect();
    all.into_iter().find(|given| given.holds(buffer))
}

impl Nccl {
    /// Whether this version gives memory and registers it.
    pub fn registers(&self) -> bool {
        let table = self.table();
        table.allocate.is_some()
            && table.free.is_some()
            && table.register.is_some()
            && table.deregister.is_some()
    }

    /// Memory of a device, of at least one byte.
    ///
    /// # Errors
    /// `Nccl` when there is none left, or this version gives none.
    pub fn memory(&self, device: impl Lane, bytes: usize) -> Result<NcclMemory> {
        let function = "ncclMemAlloc";
        let (mut start, mut status) = (null_mut(), super::INVALID_USAGE);
        let asked = device.with(&mut || {
            if let Some(allocate) = self.table().allocate.filter(|_| self.registers()) {
                // SAFETY: the place lives across the call.
                status = unsafe { allocate(&raw mut start, bytes.max(1)) };
            }
        });
        asked.map_err(|error| Error::Nccl { function, reason: error.to_string() })?;
        self.check(function, status)?;
        let (nccl, device) = (self.clone(), Arc::new(device));
        let start = start.expose_provenance();
        let given = Arc::new(Given { nccl, device, start, bytes, wanted: AtomicBool::new(true) });
        put(&given);
        Ok(NcclMemory(given))
    }
}

/// Registered with one communicator.
struct Entry {
    given: Arc<Given>,
    /// The communicator's number for it; 0 where NCCL was told to register nothing.
    handle: usize,
    /// Behind what the communicator has done with it, once its owner has let go.
    last: Option<Arc<dyn Event>>,
}

/// What one communicator has registered.
#[derive(Default)]
pub(super) struct Registry(Vec<Entry>);

impl Registry {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Registers memory that an operation is about. All members have theirs registered, or none: NCCL wants it so, and to
    /// fail is to fail for all.
    pub(super) fn take_up(&mut self, nccl: &Nccl, comm: Comm, operation: &Operation) -> Result<()> {
        let Some(register) = nccl.table().register else { return Ok(()) };
        for buffer in buffers(operation) {
            if self.0.iter().any(|entry| entry.given.holds(buffer)) {
                continue;
            }
            let Some(given) = holding(buffer) else { continue };
            let mut handle = null_mut();
            let start = with_exposed_provenance_mut(given.start);
            // SAFETY: the memory is kept until it is deregistered, or the communicator is no more.
            let status = unsafe { register(comm, start, given.bytes, &raw mut handle) };
            nccl.check("ncclCommRegister", status)?;
            self.0.push(Entry { given, handle: handle.expose_provenance(), last: None });
        }
        Ok(())
    }

    /// Deregisters what its owner has let go of, once the stream is done with it; `mark` makes an event on the stream.
    pub(super) fn let_go(&mut self, nccl: &Nccl, comm: Comm, mark: impl Fn() -> Collected<Arc<dyn Event>>) {
        let Some(deregister) = nccl.table().deregister else { return };
        self.0.retain_mut(|entry| {
            if entry.given.wanted.load(Ordering::Acquire) {
                return true;
            }
            let Some(last) = &entry.last else {
                entry.last = mark().ok();
                return true;
            };
            // What failed touches nothing any more.
            if !last.is_ready().unwrap_or(true) {
                return true;
            }
            let handle: *mut c_void = with_exposed_provenance_mut(entry.handle);
            if !handle.is_null() {
                // SAFETY: registered with this communicator, and deregistered once. Nothing is to be done about a failure.
                unsafe { deregister(comm, handle) };
            }
            false
        });
    }
}

/// The buffers that an operation is about.
fn buffers(operation: &Operation) -> impl Iterator<Item = &Buffer> {
    let segments = match operation {
        Operation::Allreduce { segments, .. }
        | Operation::Broadcast { segments, .. }
        | Operation::Allgather { segments, .. }
        | Operation::Reducescatter { segments, .. } => segments.as_slice(),
        Operation::Alltoall { segment, .. } => std::slice::from_ref(segment),
        Operation::Barrier => &[],
    };
    segments.iter().flat_map(|segment| [&segment.input, &segment.output])
}

#[cfg(test)]
mod tests;
