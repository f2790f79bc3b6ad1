// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The devices of an engine. They are added when the first tensor is on them.

use std::sync::{Arc, OnceLock};

use farandole_collectives::{Buffer, Device, Error, Fabric, Place};
use parking_lot::RwLock;

use crate::signature::Site;

/// The devices that all sets of an engine share.
#[derive(Default)]
pub(crate) struct Devices {
    known: RwLock<Vec<Arc<dyn Device>>>,
    /// The ordinal of the device that this rank works with: the first that a tensor was on.
    /// Collectives among devices are for tensors there.
    own: OnceLock<u32>,
    pub(crate) fabric: Option<Arc<dyn Fabric>>,
}

impl Devices {
    pub(crate) fn new(known: Vec<Arc<dyn Device>>, fabric: Option<Arc<dyn Fabric>>) -> Self {
        Self { known: RwLock::new(known), own: OnceLock::new(), fabric }
    }

    /// Takes up a device, unless there is one of its ordinal.
    pub(crate) fn add(&self, device: Arc<dyn Device>) {
        let mut known = self.known.write();
        if known.iter().all(|other| other.ordinal() != device.ordinal()) {
            known.push(device);
        }
    }

    pub(crate) fn knows(&self, ordinal: u32) -> bool {
        self.known.read().iter().any(|device| device.ordinal() == ordinal)
    }

    /// The device this rank works with, once it has used one.
    pub(crate) fn own(&self) -> Option<u32> {
        self.own.get().copied()
    }

    /// Returns the site of memory in this place.
    pub(crate) fn site(&self, place: Place) -> Site {
        match place {
            Place::Host => Site::Host,
            Place::Device(ordinal) if *self.own.get_or_init(|| ordinal) == ordinal => Site::Device,
            Place::Device(_) => Site::Mixed,
        }
    }

    /// The device a buffer is on, if it is on one.
    ///
    /// # Errors
    /// `Device` if it is unknown.
    pub(crate) fn of(&self, buffer: &Buffer) -> Result<Option<Arc<dyn Device>>, Error> {
        let Place::Device(ordinal) = buffer.place() else { return Ok(None) };
        let device = self.known.read().iter().find(|device| device.ordinal() == ordinal).cloned();
        let unknown =
            || Error::Device { ordinal, reason: "the engine was not given it".to_owned() };
        device.map(Some).ok_or_else(unknown)
    }
}
