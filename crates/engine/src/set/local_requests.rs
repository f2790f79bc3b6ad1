// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Requests of this rank that are announced and in no response list yet.

use std::sync::Arc;
use std::time::Instant;

use farandole_collectives::DeviceEvent;
use farandole_kernels::{Buffer, DataType, HostMemory, ReduceOp, neutral_element};
use farandole_negotiation::{
    CachedResponse, CollectiveCall, FastHashMap, TensorRefusal, operation_text,
};
use farandole_world::Rank;

use super::join::JOIN_TENSOR_NAME;
use super::operation_trace::trace_refusal;
use super::set_scope::SetScope;
use crate::{Error, RequestCompletion, RequestHandle, Result, StopCause};

/// Handle of an operation that this rank did not submit.
pub(super) const NO_HANDLE: RequestHandle = RequestHandle(0);
/// Names of the operations that move no data, so that their submitters only wait.
const DATALESS_OPERATIONS: [&str; 3] = ["barrier", "process set change", "join"];

/// A request of this rank, from its submission to its batch.
pub(crate) struct PendingEntry {
    pub(crate) handle: RequestHandle,
    pub(crate) name: Arc<str>,
    pub(crate) operation: &'static str,
    /// Full text of a change of process sets; `None` for operations whose kind says enough.
    pub(crate) change_text: Option<Box<str>>,
    pub(crate) group: u64,
    /// Row counts of this member: of its input, or of each block of the input.
    pub(crate) rows: Vec<u64>,
    pub(crate) input: Buffer,
    pub(crate) output: Option<Buffer>,
    pub(crate) ready: Option<Arc<dyn DeviceEvent>>,
    pub(crate) priority: i32,
    pub(crate) since: Instant,
    /// Missing ranks, once the coordinator has reported them.
    pub(crate) missing: Option<Vec<Rank>>,
}

impl PendingEntry {
    /// Returns the part of a joined rank in an operation of other ranks: memory that does not
    /// change any result.
    pub(super) fn substitute(agreed: &CachedResponse) -> Self {
        let signature = &agreed.signature;
        let bytes = usize::try_from(signature.row_or_tensor_bytes()).unwrap_or(usize::MAX);
        let (input, output) = match signature.call {
            // It contributes no rows and receives the rows of all others.
            CollectiveCall::Allgather => (HostMemory::new(0), None),
            CollectiveCall::Allreduce { op, prescale, .. } => {
                let element = neutral_after_prescale(signature.dtype, op, f64::from_bits(prescale));
                let memory =
                    HostMemory::filled_with(bytes, &element[..signature.dtype.element_size()]);
                (memory.clone(), Some(memory))
            }
            _ => {
                let memory = HostMemory::new(bytes);
                (memory.clone(), Some(memory))
            }
        };
        Self {
            handle: NO_HANDLE,
            name: Arc::clone(&agreed.name),
            operation: signature.call.operation_name(),
            change_text: None,
            group: signature.group,
            rows: Vec::new(),
            input: input.as_buffer(),
            output: output.map(|memory| memory.as_buffer()),
            ready: None,
            priority: 0,
            since: Instant::now(),
            missing: None,
        }
    }

    pub(super) fn operation_text(&self) -> String {
        operation_text(self.operation, self.change_text.as_deref(), &self.name)
    }

    pub(super) fn moves_no_data(&self) -> bool {
        DATALESS_OPERATIONS.contains(&self.operation)
    }

    pub(super) fn into_finished(self, result: Result<RequestCompletion>) -> FinishedRequest {
        FinishedRequest { handle: self.handle, name: self.name, result }
    }

    /// Returns the request as failed because the engine or its set stops.
    pub(crate) fn into_failed(self, cause: &Arc<StopCause>) -> FinishedRequest {
        let error = Error::Failed {
            operation: self.operation,
            tensor: Arc::clone(&self.name),
            cause: Arc::clone(cause),
        };
        self.into_finished(Err(error))
    }
}

/// A request with its result.
pub(crate) struct FinishedRequest {
    pub(crate) handle: RequestHandle,
    pub(crate) name: Arc<str>,
    pub(crate) result: Result<RequestCompletion>,
}

#[derive(Default)]
pub(super) struct LocalRequests {
    entries: FastHashMap<Arc<str>, PendingEntry>,
    /// This rank's join.
    join: Option<PendingEntry>,
}

impl LocalRequests {
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.join.is_none()
    }

    pub(super) fn has_joined(&self) -> bool {
        self.join.is_some()
    }

    /// Returns all requests, the join too.
    pub(super) fn iter(&self) -> impl Iterator<Item = &PendingEntry> {
        self.entries.values().chain(&self.join)
    }

    pub(super) fn insert_entry(&mut self, entry: PendingEntry) {
        self.entries.insert(Arc::clone(&entry.name), entry);
    }

    pub(super) fn insert_join(&mut self, entry: PendingEntry) {
        self.join = Some(entry);
    }

    /// Returns the priority of a request; 0 if this rank did not submit it.
    pub(super) fn priority_of(&self, name: &str) -> i32 {
        self.entries.get(name).map_or(0, |entry| entry.priority)
    }

    /// Takes the request of a tensor in a list.
    pub(super) fn take_entry(&mut self, name: &str) -> Option<PendingEntry> {
        self.entries.remove(name)
    }

    /// Completes this rank's join; `last` is the rank that joined last.
    pub(super) fn complete_join(
        &mut self,
        last: Option<Rank>,
        finished: &mut Vec<FinishedRequest>,
    ) {
        let completion = RequestCompletion { last, ..RequestCompletion::default() };
        finished.extend(self.join.take().map(|entry| entry.into_finished(Ok(completion))));
    }

    /// Restarts the time of this rank's join, because other ranks still execute operations.
    pub(super) fn restart_join_wait(&mut self, now: Instant) {
        if let Some(join) = &mut self.join {
            (join.since, join.missing) = (now, None);
        }
    }

    /// Stores the ranks that are missing according to the coordinator.
    pub(super) fn note_missing_ranks(&mut self, name: &str, missing: Vec<Rank>) {
        let join = self.join.as_mut().filter(|_| name == JOIN_TENSOR_NAME);
        if let Some(entry) = self.entries.get_mut(name).or(join) {
            entry.missing = Some(missing);
        }
    }

    /// Fails the request of a refused name, and the requests of its group.
    pub(super) fn refuse_entries(
        &mut self,
        scope: &SetScope,
        refusal: TensorRefusal,
        finished: &mut Vec<FinishedRequest>,
    ) {
        let TensorRefusal { name, group, text } = refusal;
        let mut refused = vec![name];
        if group != 0 {
            let grouped = self.entries.values().filter(|entry| entry.group == group);
            refused.extend(grouped.map(|entry| Arc::clone(&entry.name)));
        }
        let text: Arc<str> = text.into();
        for tensor in refused {
            if let Some(entry) = self.entries.remove(&tensor) {
                trace_refusal(scope, &tensor);
                let error = Error::Mismatch { tensor, text: Arc::clone(&text) };
                finished.push(entry.into_finished(Err(error)));
            }
        }
    }

    /// Fails all requests.
    pub(super) fn fail_entries(
        &mut self,
        cause: &Arc<StopCause>,
        finished: &mut Vec<FinishedRequest>,
    ) {
        let entries = self.entries.drain().map(|(_, entry)| entry).chain(self.join.take());
        finished.extend(entries.map(|entry| entry.into_failed(cause)));
    }
}

/// Returns an element that is neutral after a multiplication by `prescale`. Returns zero if the
/// reduction is not defined; all members get an error then.
fn neutral_after_prescale(dtype: DataType, op: ReduceOp, prescale: f64) -> [u8; 16] {
    let op = match op {
        ReduceOp::Product => op,
        _ if prescale > 0.0 => op,
        // A negative factor turns the smallest element into the largest.
        ReduceOp::Min if prescale < 0.0 => ReduceOp::Max,
        ReduceOp::Max if prescale < 0.0 => ReduceOp::Min,
        // A factor of 0 turns every input into 0.
        _ => return [0; 16],
    };
    neutral_element(dtype, op).unwrap_or([0; 16])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_substitute_of_a_joined_rank_has_no_effect_after_scaling() {
        let float = |op, prescale: f64| {
            let bytes = neutral_after_prescale(DataType::F64, op, prescale);
            f64::from_ne_bytes(bytes[..8].try_into().unwrap()) * prescale
        };
        for prescale in [2.0, 0.5, -3.0] {
            assert_eq!(float(ReduceOp::Sum, prescale), 0.0);
            assert_eq!(float(ReduceOp::Min, prescale), f64::INFINITY);
            assert_eq!(float(ReduceOp::Max, prescale), f64::NEG_INFINITY);
        }
        assert_eq!(float(ReduceOp::Min, 0.0), 0.0, "as everybody's is");
        assert_eq!(float(ReduceOp::Product, 1.0), 1.0);
        assert_eq!(float(ReduceOp::Adasum, 1.0), 0.0);
        let whole = neutral_after_prescale(DataType::I32, ReduceOp::Max, -1.0);
        assert_eq!(i32::from_ne_bytes(whole[..4].try_into().unwrap()), i32::MAX);
    }
}
