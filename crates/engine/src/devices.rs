// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The devices of an engine. A device is added when the first tensor on it is submitted.

use std::sync::{Arc, OnceLock};

use farandole_collectives::{Device, DeviceCommunicatorFactory, Error};
use farandole_kernels::{Buffer, MemoryKind};
use farandole_negotiation::MemorySite;
use parking_lot::RwLock;

/// The devices that all sets of an engine share.
#[derive(Default)]
pub(crate) struct EngineDevices {
    known: RwLock<Vec<Arc<dyn Device>>>,
    /// Ordinal of the device that this rank works with: the device of its first device tensor. Only
    /// tensors on this device take part in collectives among devices.
    own: OnceLock<u32>,
    pub(crate) fabric: Option<Arc<dyn DeviceCommunicatorFactory>>,
}

impl EngineDevices {
    pub(crate) fn new(
        known: Vec<Arc<dyn Device>>,
        fabric: Option<Arc<dyn DeviceCommunicatorFactory>>,
    ) -> Self {
        Self { known: RwLock::new(known), own: OnceLock::new(), fabric }
    }

    /// Adds a device, unless there is one with the same ordinal.
    pub(crate) fn add_device(&self, device: Arc<dyn Device>) {
        let mut known = self.known.write();
        if known.iter().all(|other| other.device_ordinal() != device.device_ordinal()) {
            known.push(device);
        }
    }

    pub(crate) fn has_device(&self, ordinal: u32) -> bool {
        self.known.read().iter().any(|device| device.device_ordinal() == ordinal)
    }

    /// Returns the ordinal of the device that this rank works with, once it has used one.
    pub(crate) fn own_device_ordinal(&self) -> Option<u32> {
        self.own.get().copied()
    }

    /// Returns the site of this kind of memory.
    pub(crate) fn memory_site(&self, place: MemoryKind) -> MemorySite {
        match place {
            MemoryKind::Host => MemorySite::Host,
            MemoryKind::Device(ordinal) if *self.own.get_or_init(|| ordinal) == ordinal => {
                MemorySite::Device
            }
            MemoryKind::Device(_) => MemorySite::Mixed,
        }
    }

    /// Returns the device of a buffer, or `None` for host memory.
    ///
    /// # Errors
    /// `Device` if the engine does not know the device.
    pub(crate) fn device_of_buffer(
        &self,
        buffer: &Buffer,
    ) -> Result<Option<Arc<dyn Device>>, Error> {
        let MemoryKind::Device(ordinal) = buffer.memory_kind() else { return Ok(None) };
        let device =
            self.known.read().iter().find(|device| device.device_ordinal() == ordinal).cloned();
        let unknown =
            || Error::Device { ordinal, reason: "the engine was not given it".to_owned() };
        device.map(Some).ok_or_else(unknown)
    }
}
