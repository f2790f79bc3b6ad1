// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use farandole_collectives::{Event, Result};
use farandole_engine::{Error, Kind, Request};
use farandole_testkit::{HostDevice, contents};
use farandole_world::{Fault, Rank};

use crate::cluster::{Cluster, bytes, call, call_sum, floats, request, sum};

/// Ready after so many questions.
struct Later(AtomicU32);

impl Event for Later {
    fn is_ready(&self) -> Result<bool> {
        Ok(self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err())
    }
}

fn cluster(device: &HostDevice) -> Cluster {
    Cluster { devices: vec![Arc::new(device.clone())], ..Cluster::new(&[2]) }
}

#[test]
fn device_memory_is_staged_through_the_host_after_its_event() {
    let device = HostDevice::new(0, 3);
    cluster(&device).run(|rank, engine| {
        let (_input, from) = device.upload(&bytes(&[rank as f32; 100]));
        let (output, to) = device.upload(&bytes(&[0.0; 100]));
        let ready: Option<Box<dyn Event>> = Some(Box::new(Later(AtomicU32::new(50))));
        let base = sum("t", &[0.0; 100]);
        let result = call(&engine, Request { input: from.clone(), output: Some(to), ready, ..base }).unwrap();
        assert!(result.output.is_none());
        assert_eq!(contents(&output), bytes(&[1.0; 100]));
        let kind = Kind::Broadcast { root: Rank(1) };
        let base = request("b", kind, &[100], &[0.0; 100]);
        let result = call(&engine, Request { input: from, ..base }).unwrap();
        assert_eq!(floats(&contents(&result.output.unwrap())), [1.0; 100]);
    });
    assert_eq!(device.finished(), 6);
}

#[test]
fn host_and_device_memory_do_not_mix() {
    let device = HostDevice::new(0, 0);
    cluster(&device).run(|rank, engine| {
        let (_input, from) = device.upload(&bytes(&[1.0]));
        let base = sum("t", &[1.0]);
        let request = if rank == 0 { Request { input: from, ..base } } else { base };
        let error = call(&engine, request).unwrap_err();
        assert!(error.to_string().starts_with("Mismatched ALLREDUCE CPU/GPU device selection: "), "{error}");
        assert_eq!(call_sum(&engine, "t", &[1.0]), [2.0]);
    });
}

#[test]
fn a_device_that_fails_stops_all_ranks_with_its_name() {
    let device = HostDevice::new(4, 0);
    device.fail_after(0);
    let faults = cluster(&device).run(|rank, engine| {
        let (_input, from) = device.upload(&bytes(&[1.0]));
        let error = call(&engine, Request { input: from, ..sum("t", &[1.0]) }).unwrap_err();
        assert!(error.to_string().contains("device 4 failed"), "rank {rank}: {error}");
        error.fault()
    });
    assert!(faults.contains(&Fault::Environment));
}

#[test]
fn a_device_nobody_knows_is_refused() {
    Cluster::new(&[1]).run(|_, engine| {
        let (_input, from) = HostDevice::new(3, 0).upload(&bytes(&[1.0]));
        let error = engine.submit(Request { input: from, ..sum("t", &[1.0]) }).unwrap_err();
        assert!(matches!(error, Error::UnknownDevice { ordinal: 3, .. }));
    });
}
