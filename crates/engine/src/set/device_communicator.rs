// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Negotiation of a communicator among the devices of a set's members.
//!
//! Before the first operation whose tensors are on devices on every member, the members exchange
//! the capabilities of their devices. They use an allgather of the communicator of hosts, at the
//! same position in all members' lists. The capabilities decide whether a communicator is possible.
//! If it is, the first member creates its name and broadcasts it, and all members begin to form the
//! communicator. The name is created only then, because an unused name would leave a port open.

use farandole_collectives::{
    CollectiveOperation, Communicator, DeviceCommunicatorFactory, MAX_CAPABILITIES_BYTES,
    OperationToken, TensorSegment,
};
use farandole_kernels::HostMemory;

use super::set_scope::SetScope;
use crate::error::StepResult;

/// Token of the allgather of capabilities and of the broadcast of the name.
// Tokens of batches count up from 0 and never reach this number.
pub(super) const NEGOTIATION_TOKEN: OperationToken = OperationToken(u64::MAX);

pub(super) enum DeviceCommunicator {
    /// No operation has needed it yet.
    NotNegotiated,
    /// The allgather of capabilities is in progress.
    ExchangingCapabilities(HostMemory),
    /// The broadcast of the name is in progress.
    ExchangingId(HostMemory),
    /// The communicator exists; it may still be forming.
    Ready(Box<dyn Communicator>),
    /// Closed for new work. Kept until the process set ends, because peers' devices may still be
    /// receiving data from this device.
    Draining(Box<dyn Communicator>),
    /// No communicator is possible.
    Unavailable,
}

impl DeviceCommunicator {
    /// Begins the negotiation. Returns the first operation, to be submitted as
    /// [`NEGOTIATION_TOKEN`].
    pub(super) fn begin_negotiation(&mut self, scope: &SetScope) -> CollectiveOperation {
        let (devices, members) = (&scope.context.devices, scope.members.len());
        let own = devices.fabric.as_ref().zip(devices.own_device_ordinal());
        let mut own_capabilities =
            own.map(|(fabric, own)| fabric.device_capabilities(own)).unwrap_or_default();
        // A member without a device takes part with zeros, because an allgather needs all members.
        own_capabilities.resize(MAX_CAPABILITIES_BYTES, 0);
        let all_capabilities = HostMemory::new(MAX_CAPABILITIES_BYTES * members);
        let segment = TensorSegment {
            input: HostMemory::filled_with(MAX_CAPABILITIES_BYTES, &own_capabilities).as_buffer(),
            output: all_capabilities.as_buffer(),
        };
        *self = Self::ExchangingCapabilities(all_capabilities);
        CollectiveOperation::Allgather {
            segments: vec![segment],
            bytes: vec![vec![MAX_CAPABILITIES_BYTES; members]],
        }
    }

    /// Takes the result of the step in progress. Returns the operation of the next step, to be
    /// submitted as [`NEGOTIATION_TOKEN`].
    ///
    /// # Errors
    /// If a communicator is possible and cannot be formed.
    pub(super) fn advance_negotiation(
        &mut self,
        scope: &SetScope,
    ) -> StepResult<Option<CollectiveOperation>> {
        let before = std::mem::replace(self, Self::Unavailable);
        let devices = &scope.context.devices;
        let Some((fabric, own)) = devices.fabric.as_ref().zip(devices.own_device_ordinal()) else {
            return Ok(None);
        };
        match before {
            Self::ExchangingCapabilities(all_capabilities) => {
                let all_capabilities = all_capabilities.to_vec().unwrap_or_default();
                let all_capabilities: Vec<&[u8]> =
                    all_capabilities.chunks_exact(MAX_CAPABILITIES_BYTES).collect();
                Ok(self.begin_id_exchange(scope, &**fabric, &all_capabilities))
            }
            Self::ExchangingId(name) => {
                let name = name.to_vec().unwrap_or_default();
                if let Some((&ID_PRESENT, name)) = name.split_first() {
                    let position = (scope.own_index(), scope.members.len());
                    let timeout = scope.context.settings.collective_timeout;
                    *self = Self::Ready(fabric.form_communicator(own, name, position, timeout)?);
                }
                Ok(None)
            }
            Self::NotNegotiated | Self::Ready(_) | Self::Draining(_) | Self::Unavailable => {
                Ok(None)
            }
        }
    }

    /// Returns the broadcast of the name, or `None` if no communicator is possible.
    fn begin_id_exchange(
        &mut self,
        scope: &SetScope,
        fabric: &dyn DeviceCommunicatorFactory,
        all_capabilities: &[&[u8]],
    ) -> Option<CollectiveOperation> {
        let (members, me, observer) = (&scope.members, scope.own_index(), &scope.context.observer);
        if let Some(reason) = fabric.formation_obstacle(all_capabilities, members, me) {
            // One notice for the set, not one for each member.
            if me == 0 {
                observer.on_notice(&reason);
            }
            return None;
        }
        let mut frame = Vec::new();
        if me == 0 {
            match fabric.create_communicator_id(all_capabilities) {
                Ok(name) => {
                    frame = [&[ID_PRESENT], &name[..]].concat();
                    if let Some(remark) = fabric.formation_notice(all_capabilities, members, me) {
                        observer.on_notice(&remark);
                    }
                }
                // The other members then receive an empty name.
                Err(reason) => observer.on_notice(&reason),
            }
        }
        // All members of a broadcast must have buffers of one size.
        frame.resize(MAX_CAPABILITIES_BYTES, 0);
        let name = HostMemory::filled_with(MAX_CAPABILITIES_BYTES, &frame);
        let segment = TensorSegment { input: name.as_buffer(), output: name.as_buffer() };
        *self = Self::ExchangingId(name);
        Some(CollectiveOperation::Broadcast { root: 0, segments: vec![segment] })
    }

    pub(super) fn ready_communicator(&mut self) -> Option<&mut Box<dyn Communicator>> {
        match self {
            Self::Ready(communicator) => Some(communicator),
            _ => None,
        }
    }

    /// Returns whether the members are forming the communicator; its completion wakes no thread.
    pub(super) fn is_forming(&self) -> bool {
        matches!(self, Self::Ready(communicator) if communicator.is_forming())
    }

    /// Returns whether the device has work in progress that a thread must poll.
    pub(super) fn has_pending_work(&self) -> bool {
        matches!(self, Self::Ready(communicator) if communicator.pending_count() > 0)
    }

    /// Returns whether peers wait for progress of this rank's device.
    pub(super) fn has_waiting_peers(&self) -> bool {
        matches!(self, Self::Ready(communicator) if communicator.has_waiting_peers())
    }

    /// Closes the communicator for new work. If the departure is `orderly` and nothing is `broken`,
    /// waits for the launched work; otherwise abandons it.
    pub(super) fn drain_or_abandon_device_work(&mut self, orderly: bool, broken: bool) {
        match std::mem::replace(self, Self::Unavailable) {
            Self::Draining(communicator) if orderly => *self = Self::Draining(communicator),
            Self::Ready(mut communicator) => {
                if orderly && !broken {
                    communicator.wait_for_launched_operations(DRAIN_TIMEOUT);
                    if communicator.pending_count() == 0 {
                        *self = Self::Draining(communicator);
                        return;
                    }
                }
                communicator.abandon_operations();
            }
            Self::Draining(mut communicator) => communicator.abandon_operations(),
            Self::NotNegotiated
            | Self::ExchangingCapabilities(_)
            | Self::ExchangingId(_)
            | Self::Unavailable => {}
        }
    }
}

/// First byte of the broadcast if it contains a name.
const ID_PRESENT: u8 = 1;

/// Longest time that an orderly departure waits for launched work.
const DRAIN_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(2);
