// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Tensors on devices, which are host memory whose copies are late.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use farandole_collectives::{Device as _, DeviceEvent, Result};
use farandole_engine::{CollectiveRequest, Engine, Error, RequestCompletion, RequestKind};
use farandole_kernels::{DeviceStream, HostMemory, ReduceOp};
use farandole_testkit::{HostDevice, contents, fill};
use farandole_world::{FaultOrigin, Rank};

use crate::cluster::{Cluster, LIMIT, bytes, call, call_sum, floats, request, sum, wait};

/// Ready after so many questions.
pub(crate) struct Later(pub(crate) AtomicU32);

impl DeviceEvent for Later {
    fn is_ready(&self) -> Result<bool> {
        Ok(self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .is_err())
    }

    fn device_ordinal(&self) -> u32 {
        0
    }

    fn make_stream_wait(&self, _: DeviceStream) -> Result<()> {
        Ok(())
    }
}

fn cluster(device: &HostDevice) -> Cluster {
    Cluster { devices: vec![Arc::new(device.clone())], ..Cluster::new(&[2]) }
}

/// Returns the output that an operation on device memory leaves for so many values.
fn on_device(
    engine: &Engine,
    device: &HostDevice,
    name: &str,
    kind: RequestKind,
    values: &[f32],
    room: usize,
) -> Vec<f32> {
    let (_input, from) = device.upload(&bytes(values));
    let (output, to) = device.upload(&bytes(&vec![-1.0; room]));
    let base = request(name, kind, &[values.len() as u64], values);
    call(engine, CollectiveRequest { input: from, output: Some(to), ..base }).unwrap();
    floats(&contents(&output))
}

#[test]
fn device_memory_is_staged_through_the_host_after_its_event() {
    let device = HostDevice::new(0, 3);
    cluster(&device).run(|rank, engine| {
        let (_input, from) = device.upload(&bytes(&[rank as f32; 100]));
        let (output, to) = device.upload(&bytes(&[0.0; 100]));
        let ready: Option<Arc<dyn DeviceEvent>> = Some(Arc::new(Later(AtomicU32::new(50))));
        let base = sum("t", &[0.0; 100]);
        let result = call(
            &engine,
            CollectiveRequest { input: from.clone(), output: Some(to), ready, ..base },
        )
        .unwrap();
        assert!(result.output.is_none());
        assert_eq!(contents(&output), bytes(&[1.0; 100]));
        let kind = RequestKind::Broadcast { root: Rank(1) };
        let base = request("b", kind, &[100], &[0.0; 100]);
        let result = call(&engine, CollectiveRequest { input: from, ..base }).unwrap();
        assert_eq!(floats(&contents(&result.output.unwrap())), [1.0; 100]);
    });
    assert_eq!(device.finished(), 6);
}

/// The framework's work on a tensor: its values are there after so many questions, and not before.
struct Work {
    left: AtomicU32,
    tensor: HostMemory,
    values: Vec<u8>,
}

impl DeviceEvent for Work {
    fn is_ready(&self) -> Result<bool> {
        let asked = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if asked == Ok(1) {
            fill(&self.tensor, 0, &self.values);
        }
        Ok(asked.is_err())
    }

    fn device_ordinal(&self) -> u32 {
        0
    }

    fn make_stream_wait(&self, _: DeviceStream) -> Result<()> {
        Ok(())
    }
}

#[test]
fn no_piece_of_a_long_tensor_is_copied_before_its_values_are_there() {
    let device = HostDevice::new(0, 1);
    let length = 4_000_000;
    cluster(&device).run(|rank, engine| {
        let (tensor, from) = device.upload(&bytes(&vec![-1.0; length]));
        let (output, to) = device.upload(&bytes(&vec![0.0; length]));
        let values = bytes(&vec![rank as f32 + 1.0; length]);
        let work = Work { left: AtomicU32::new(200), tensor: tensor.clone(), values };
        let ready: Option<Arc<dyn DeviceEvent>> = Some(Arc::new(work));
        let base = request("t", crate::cluster::SUM, &[length as u64], &[]);
        call(&engine, CollectiveRequest { input: from, output: Some(to), ready, ..base }).unwrap();
        let wrong = floats(&contents(&output)).into_iter().position(|value| value != 3.0);
        assert_eq!(wrong, None, "rank {rank}");
    });
}

#[test]
fn a_result_is_handed_over_while_it_is_copied_and_a_stream_waits_for_it() {
    let device = HostDevice::new(0, 1000);
    cluster(&device).run(|_, engine| {
        let (_input, from) = device.upload(&bytes(&[1.0]));
        let (output, to) = device.upload(&bytes(&[0.0]));
        let handle = engine
            .submit_before_wait(CollectiveRequest {
                input: from,
                output: Some(to),
                ..sum("t", &[1.0])
            })
            .unwrap();
        let RequestCompletion { reached, .. } = engine.wait(handle, LIMIT).unwrap().unwrap();
        let reached = reached.unwrap();
        assert_eq!(reached.device_ordinal(), 0);
        // SAFETY: this device knows no streams.
        #[expect(unsafe_code, reason = "a stream by its handle")]
        reached.make_stream_wait(unsafe { DeviceStream::from_raw(9) }).unwrap();
        while !reached.is_ready().unwrap() {}
        assert_eq!(floats(&contents(&output)), [2.0]);
    });
    assert_eq!(device.held().iter().map(|(stream, _)| *stream).collect::<Vec<_>>(), [9, 9]);
}

#[test]
fn every_operation_takes_device_memory() {
    let device = HostDevice::new(0, 2);
    cluster(&device).run(|rank, engine| {
        let mine = [rank as f32, 2.0, 3.0];
        let max = RequestKind::Allreduce { op: ReduceOp::Max, prescale: 2.0, postscale: 1.0 };
        assert_eq!(on_device(&engine, &device, "max", max, &mine, 3), [2.0, 4.0, 6.0]);
        let adasum = RequestKind::Allreduce { op: ReduceOp::Adasum, prescale: 1.0, postscale: 1.0 };
        assert_eq!(on_device(&engine, &device, "adasum", adasum, &[2.0, 2.0], 2), [2.0, 2.0]);
        let scatter =
            RequestKind::Reducescatter { op: ReduceOp::Sum, prescale: 1.0, postscale: 1.0 };
        let expected: &[f32] = if rank == 0 { &[1.0, 4.0] } else { &[6.0] };
        assert_eq!(
            on_device(&engine, &device, "scatter", scatter, &mine, expected.len()),
            expected
        );
        let from = |values: &[f32]| device.upload(&bytes(values));
        let (_input, input) = from(&mine[..=rank as usize]);
        let base = request(
            "gather",
            RequestKind::Allgather,
            &[u64::from(rank) + 1],
            &mine[..=rank as usize],
        );
        let result = call(&engine, CollectiveRequest { input, ..base }).unwrap();
        assert_eq!(result.rows, [1, 2]);
        assert_eq!(floats(&contents(&result.output.unwrap())), [0.0, 1.0, 2.0]);
        let splits = Some(vec![1, 2]);
        let (_input, input) = from(&mine);
        let base = request("exchange", RequestKind::Alltoall { splits }, &[3], &mine);
        let result = call(&engine, CollectiveRequest { input, ..base }).unwrap();
        let expected: &[f32] = if rank == 0 { &[0.0, 1.0] } else { &[2.0, 3.0, 2.0, 3.0] };
        assert_eq!(floats(&contents(&result.output.unwrap())), expected);
        for root in [0, 1] {
            let kind = RequestKind::Broadcast { root: Rank(root) };
            assert_eq!(on_device(&engine, &device, "b", kind, &mine, 3), [root as f32, 2.0, 3.0]);
        }
        assert_eq!(on_device(&engine, &device, "none", max_of_nothing(), &[], 0), [0.0; 0]);
    });
}

fn max_of_nothing() -> RequestKind {
    RequestKind::Allreduce { op: ReduceOp::Max, prescale: 1.0, postscale: 1.0 }
}

#[test]
fn tensors_longer_than_a_piece_go_in_several_and_come_out_whole() {
    let device = HostDevice::new(0, 1);
    // Three tensors that are fused: pieces begin and end inside them, and one is in all.
    let lengths = [700_001_usize, 1, 2_600_003];
    let cluster = cluster(&device).with(|settings| settings.fusion_threshold = 1 << 30);
    let copies = cluster.run(|rank, engine| {
        let value = |tensor: usize, at: usize| ((at * 7 + tensor) % 1000) as f32 + rank as f32;
        let mut kept = Vec::new();
        let requests = lengths.iter().enumerate().map(|(tensor, length)| {
            let values: Vec<f32> = (0..*length).map(|at| value(tensor, at)).collect();
            let (input, from) = device.upload(&bytes(&values));
            // One is reduced where it is.
            let (output, to) = if tensor == 0 {
                (input.clone(), from.clone())
            } else {
                device.upload(&bytes(&vec![0.0; *length]))
            };
            kept.push((input, output));
            CollectiveRequest {
                input: from,
                output: Some(to),
                ..request(&format!("t{tensor}"), crate::cluster::SUM, &[*length as u64], &values)
            }
        });
        let handles = engine.submit_group(requests.collect()).unwrap();
        for (tensor, (handle, length)) in handles.into_iter().zip(lengths).enumerate() {
            wait(&engine, handle).unwrap();
            let result = floats(&contents(&kept[tensor].1));
            let wrong = (0..length)
                .find(|at| result[*at] != 2.0 * value(tensor, *at) + 1.0 - 2.0 * rank as f32);
            assert_eq!(wrong, None, "tensor {tensor}");
        }
        let kind = RequestKind::Broadcast { root: Rank(1) };
        let values = vec![rank as f32; 2_100_000];
        assert!(
            on_device(&engine, &device, "b", kind, &values, values.len())
                .iter()
                .all(|value| *value == 1.0)
        );
        engine.statistics().operations
    });
    assert_eq!(copies, [2, 2], "fused, and each told as one operation");
    // 4 pieces of the sum with 3 + 1 + 1 + 1 tensors in and out on both ranks; 3 of the broadcast
    // in on one rank, out on two.
    assert_eq!(device.finished(), 2 * 2 * 6 + 3 * 3);
}

#[test]
fn host_and_device_memory_meet_on_the_host() {
    let device = HostDevice::new(0, 2);
    cluster(&device).run(|rank, engine| {
        for round in 0..3 {
            // The second time all have host memory, then again not: what was agreed on holds for
            // both.
            let result = match rank == 0 && round != 1 {
                true => on_device(&engine, &device, "t", crate::cluster::SUM, &[1.0, 5.0], 2),
                false => call_sum(&engine, "t", &[1.0, 5.0]),
            };
            assert_eq!(result, [2.0, 10.0]);
        }
    });
}

#[test]
fn tensors_of_one_rank_on_two_devices_are_no_matter() {
    let (first, second) = (HostDevice::new(0, 1), HostDevice::new(1, 1));
    let devices = || -> Vec<Arc<dyn farandole_collectives::Device>> {
        vec![Arc::new(first.clone()), Arc::new(second.clone())]
    };
    Cluster { devices: devices(), ..Cluster::new(&[2]) }.run(|rank, engine| {
        for (name, device) in [("a", &first), ("b", &second), ("a", &second)] {
            assert_eq!(
                on_device(&engine, device, name, crate::cluster::SUM, &[rank as f32], 1),
                [1.0]
            );
        }
    });
}

#[test]
fn a_device_that_comes_later_is_taken_up_once() {
    let device = HostDevice::new(3, 1);
    Cluster::new(&[2]).run(|_, engine| {
        assert!(!engine.has_device(3));
        engine.add_device(Arc::new(device.clone()));
        engine.add_device(Arc::new(HostDevice::new(device.device_ordinal(), 0)));
        assert!(engine.has_device(3));
        assert_eq!(on_device(&engine, &device, "t", crate::cluster::SUM, &[1.0], 1), [2.0]);
    });
    assert_eq!(device.finished(), 4, "the first of an ordinal is used");
}

#[test]
fn a_joined_rank_takes_part_in_sums_of_device_memory() {
    let device = HostDevice::new(0, 2);
    cluster(&device).run(|rank, engine| {
        if rank == 0 {
            for round in 0..3 {
                let sum = on_device(&engine, &device, "t", crate::cluster::SUM, &[4.0; 9], 9);
                assert!(sum == [4.0; 9] || sum == [8.0; 9], "round {round}: {sum:?}");
            }
        } else {
            assert_eq!(
                on_device(&engine, &device, "t", crate::cluster::SUM, &[4.0; 9], 9),
                [8.0; 9]
            );
        }
        call(&engine, CollectiveRequest::join("join", false)).unwrap();
    });
}

#[test]
fn a_device_that_fails_stops_all_ranks_with_its_name() {
    let device = HostDevice::new(4, 0);
    device.fail_after(0);
    let faults = cluster(&device).run(|rank, engine| {
        let (_input, from) = device.upload(&bytes(&[1.0]));
        let error =
            call(&engine, CollectiveRequest { input: from, ..sum("t", &[1.0]) }).unwrap_err();
        assert!(error.to_string().contains("device 4 failed"), "rank {rank}: {error}");
        error.fault()
    });
    assert!(faults.contains(&FaultOrigin::Environment));
}

#[test]
fn an_unknown_device_is_refused() {
    Cluster::new(&[1]).run(|_, engine| {
        let (_input, from) = HostDevice::new(3, 0).upload(&bytes(&[1.0]));
        let error =
            engine.submit(CollectiveRequest { input: from, ..sum("t", &[1.0]) }).unwrap_err();
        assert!(matches!(error, Error::UnknownDevice { ordinal: 3, .. }));
    });
}
