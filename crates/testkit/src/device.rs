// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A device whose memory is the host's and whose work is late.
#![expect(unsafe_code, reason = "copies between buffers said to be on a device")]

use std::collections::VecDeque;
use std::sync::Arc;

use farandole_collectives::{Device, DeviceEvent, Error, Result};
use farandole_kernels::{Buffer, DeviceStream, HostMemory, MemoryKind};
use parking_lot::Mutex;

/// A device over host memory. Copies are queued; each is carried out only in its turn and after a
/// number of queries, so that code that does not wait for its event reads stale bytes.
#[derive(Clone)]
pub struct HostDevice {
    ordinal: u32,
    polls: usize,
    queue: Arc<Mutex<Queue>>,
}

#[derive(Default)]
struct Queue {
    /// Copies ever queued and carried out.
    queued: u64,
    finished: u64,
    waiting: VecDeque<Copy>,
    /// Copies that still succeed, if a failure is planned.
    healthy: Option<u64>,
    /// Streams that were told to wait, and for how many copies.
    held: Vec<(usize, u64)>,
}

struct Copy {
    from: Buffer,
    to: Buffer,
    polls: usize,
}

impl HostDevice {
    /// A device whose every copy takes `polls` questions.
    pub fn new(ordinal: u32, polls: usize) -> Self {
        Self { ordinal, polls, queue: Arc::default() }
    }

    /// Fails every copy after the first `copies`.
    pub fn fail_after(&self, copies: u64) {
        self.queue.lock().healthy = Some(copies);
    }

    /// Copies carried out so far.
    pub fn finished(&self) -> u64 {
        self.queue.lock().finished
    }

    /// The streams that were told to wait, by handle, and for how many copies each.
    pub fn held(&self) -> Vec<(usize, u64)> {
        self.queue.lock().held.clone()
    }

    /// A buffer on this device that holds these bytes, and the memory behind it.
    pub fn upload(&self, bytes: &[u8]) -> (HostMemory, Buffer) {
        let memory = crate::filled(bytes);
        // SAFETY: the memory is returned with the buffer; tests keep it for as long as they use the
        // buffer.
        let buffer = unsafe {
            Buffer::from_raw(memory.address(), memory.len(), MemoryKind::Device(self.ordinal))
        };
        (memory, buffer)
    }

    fn failure(&self) -> Error {
        Error::Device { ordinal: self.ordinal, reason: "it was told to".to_owned() }
    }
}

impl Device for HostDevice {
    fn device_ordinal(&self) -> u32 {
        self.ordinal
    }

    fn allocate_staging(&self, bytes: usize) -> Result<HostMemory> {
        // More than requested, as real devices give.
        Ok(HostMemory::new(bytes + 64))
    }

    fn copy_async(&self, from: &Buffer, to: &Buffer) -> Result<Arc<dyn DeviceEvent>> {
        if from.len() != to.len() {
            let reason = format!("{} bytes are copied to {}", from.len(), to.len());
            return Err(Error::Shape { reason });
        }
        let mut queue = self.queue.lock();
        queue.waiting.push_back(Copy { from: from.clone(), to: to.clone(), polls: self.polls });
        queue.queued += 1;
        Ok(Arc::new(Late { device: self.clone(), number: queue.queued }))
    }
}

struct Late {
    device: HostDevice,
    number: u64,
}

impl DeviceEvent for Late {
    fn is_ready(&self) -> Result<bool> {
        let mut queue = self.device.queue.lock();
        while queue.finished < self.number {
            let (finished, healthy) = (queue.finished, queue.healthy);
            let Some(copy) = queue.waiting.front_mut() else { break };
            if copy.polls > 0 {
                copy.polls -= 1;
                return Ok(false);
            }
            if healthy.is_some_and(|copies| finished >= copies) {
                return Err(self.device.failure());
            }
            // SAFETY: both buffers are valid for their equal length until this event is ready, by
            // the promise of `Buffer::from_raw` or because they own their memory; they may overlap.
            unsafe { std::ptr::copy(copy.from.address(), copy.to.address(), copy.from.len()) }
            queue.waiting.pop_front();
            queue.finished += 1;
        }
        Ok(true)
    }

    fn device_ordinal(&self) -> u32 {
        self.device.ordinal
    }

    fn make_stream_wait(&self, stream: DeviceStream) -> Result<()> {
        self.device.queue.lock().held.push((stream.raw_handle(), self.number));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contents;

    #[test]
    fn a_copy_happens_late_and_after_those_before_it() {
        let device = HostDevice::new(3, 2);
        let (_source, from) = device.upload(&[1, 2, 3]);
        let (staging, back) = (device.allocate_staging(3).unwrap(), HostMemory::new(3));
        let first = device.copy_async(&from, &staging.as_buffer().slice(0, 3)).unwrap();
        let second =
            device.copy_async(&staging.as_buffer().slice(0, 3), &back.as_buffer()).unwrap();
        assert!(!second.is_ready().unwrap());
        assert_eq!(contents(&staging)[..3], [0, 0, 0]);
        let polls = std::iter::repeat_with(|| second.is_ready().unwrap())
            .take_while(|ready| !ready)
            .count();
        assert_eq!(polls, 3);
        assert!(first.is_ready().unwrap());
        assert_eq!(contents(&back), [1, 2, 3]);
    }

    #[test]
    fn a_device_told_to_fail_names_itself() {
        let device = HostDevice::new(3, 0);
        device.fail_after(0);
        let (_source, from) = device.upload(&[1]);
        let event = device
            .copy_async(&from, &device.allocate_staging(1).unwrap().as_buffer().slice(0, 1))
            .unwrap();
        assert!(matches!(event.is_ready(), Err(Error::Device { ordinal: 3, .. })));
    }
}
