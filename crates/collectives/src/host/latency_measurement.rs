// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Measures the latency between hosts before the first allreduce whose algorithm depends on it.
//!
//! Members repeat an allreduce of one number by doubling, and each takes the shortest time of a
//! round. A member that waits for its processor can only measure too much, so the shortest round
//! counts. A member that is late in a round finds the bytes of the others there and measures too
//! little, so the members then agree on the longest of their times. All members begin the
//! measurement with the same operation, because they have agreed, or not, in the same operations.
//!
//! Where links open at their first use, the latency counts as zero: the algorithms for short
//! latencies need few links. Such a member sends an infinite time, so that all do the same.

use std::time::{Duration, Instant};

use farandole_kernels::{
    BlockReducer, DataType, GatherList, HostMemory, InstructionSet, ReduceOp, ReductionSpec,
};

use super::doubling_allreduce::DoublingAllreduceJob;
use super::peer_links::{CollectiveJob, PeerLinks, PollProgress};
use crate::Result;

/// Measured rounds, after one that may open links. The shortest counts.
const MEASURED_ROUNDS: u32 = 5;

/// Starts an allreduce by the algorithm that the measured latency decides.
type StartAllreduce = Box<dyn FnOnce(&mut PeerLinks) -> Result<Box<dyn CollectiveJob>> + Send>;

/// Allreduce that begins with the measurement.
pub(super) struct MeasuringAllreduceJob {
    /// Starts the allreduce when the latency is known.
    start: Option<StartAllreduce>,
    stage: MeasurementStage,
}

enum MeasurementStage {
    /// Rounds that are measured, with the number of finished rounds.
    Round {
        job: DoublingAllreduceJob,
        over: u32,
        began: Instant,
        shortest: Duration,
    },
    /// Members agree on the longest of their times.
    Agreement {
        job: DoublingAllreduceJob,
        seconds: HostMemory,
    },
    Allreduce(Box<dyn CollectiveJob>),
}

/// Returns an allreduce of the largest number, which replaces the number.
fn start_round(peers: &PeerLinks, number: &HostMemory) -> Result<DoublingAllreduceJob> {
    let reduction = ReductionSpec {
        dtype: DataType::F64,
        op: ReduceOp::Max,
        members: peers.member_count(),
        prescale: 1.0,
        postscale: 1.0,
    };
    let path = InstructionSet::best_available();
    let reducer = BlockReducer::with_order(reduction, path, peers.orders.clone())?;
    let list = || GatherList::new([number.as_buffer()]);
    Ok(DoublingAllreduceJob::new(peers, reducer, &list(), list()))
}

impl MeasuringAllreduceJob {
    pub(super) fn new(
        peers: &PeerLinks,
        start: impl FnOnce(&mut PeerLinks) -> Result<Box<dyn CollectiveJob>> + Send + 'static,
    ) -> Result<Self> {
        let stage = MeasurementStage::Round {
            job: start_round(peers, &HostMemory::new(size_of::<f64>()))?,
            over: 0,
            began: Instant::now(),
            shortest: Duration::MAX,
        };
        Ok(Self { start: Some(Box::new(start)), stage })
    }

    /// Begins the next stage after one that is over.
    fn advance_stage(&mut self, peers: &mut PeerLinks) -> Result<()> {
        match &mut self.stage {
            MeasurementStage::Round { over, began, shortest, .. } => {
                if *over > 0 {
                    *shortest = began.elapsed().min(*shortest);
                }
                let (over, shortest) = (*over + 1, *shortest);
                self.stage = if over <= MEASURED_ROUNDS {
                    let job = start_round(peers, &HostMemory::new(size_of::<f64>()))?;
                    MeasurementStage::Round { job, over, began: Instant::now(), shortest }
                } else {
                    let own = if peers.on_demand { f64::INFINITY } else { shortest.as_secs_f64() };
                    let own = own.to_ne_bytes();
                    let seconds = HostMemory::filled_with(own.len(), &own);
                    MeasurementStage::Agreement { job: start_round(peers, &seconds)?, seconds }
                };
            }
            MeasurementStage::Agreement { seconds, .. } => {
                let mut longest = [0; size_of::<f64>()];
                GatherList::new([seconds.as_buffer()]).read_at(0, &mut longest);
                let steps = network_steps_of_doubling(peers.shape.hosts);
                let step = f64::from_ne_bytes(longest) / f64::from(steps);
                // Infinity is no duration.
                peers.latency = Some(Duration::try_from_secs_f64(step).unwrap_or_default());
                let Some(start) = self.start.take() else { return Ok(()) };
                let job = start(peers)?;
                let links = job.used_links(peers);
                peers.request_links(&links);
                self.stage = MeasurementStage::Allreduce(job);
            }
            MeasurementStage::Allreduce(_) => {}
        }
        Ok(())
    }
}

/// Returns the number of messages to other hosts that follow each other in an allreduce by
/// doubling.
fn network_steps_of_doubling(hosts: usize) -> u32 {
    let paired = if hosts.is_power_of_two() { 0 } else { 2 };
    (hosts.ilog2() + paired).max(1)
}

impl CollectiveJob for MeasuringAllreduceJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let moved = match &mut self.stage {
            MeasurementStage::Round { job, .. } | MeasurementStage::Agreement { job, .. } => {
                job.poll(peers)?
            }
            MeasurementStage::Allreduce(job) => return job.poll(peers),
        };
        if moved.done {
            self.advance_stage(peers)?;
        }
        Ok(PollProgress { any: moved.any, done: false })
    }

    fn used_links(&self, peers: &PeerLinks) -> Vec<usize> {
        match &self.stage {
            MeasurementStage::Round { job, .. } | MeasurementStage::Agreement { job, .. } => {
                job.used_links(peers)
            }
            MeasurementStage::Allreduce(job) => job.used_links(peers),
        }
    }
}

#[cfg(test)]
mod tests {
    use farandole_transport::{Link, loopback};
    use farandole_world::Rank;

    use super::super::start_chosen_allreduce;
    use super::*;
    use crate::CrossoverTable;

    /// Two ranks on each of 9 hosts, one of which is paired.
    const HOSTS: usize = 9;
    const TENSOR_BYTES: usize = 256 << 10;

    #[test]
    fn members_agree_on_the_latency_and_then_reduce() {
        let numbers: Vec<u32> = (0..2 * u32::try_from(HOSTS).unwrap()).map(|k| k / 2).collect();
        let start = |(rank, links): (u32, Vec<Link>)| {
            let mut peers = PeerLinks::new(Rank(rank), links, Some(&numbers)).unwrap();
            let tensor = HostMemory::filled_with(TENSOR_BYTES, &1f32.to_ne_bytes());
            let list = || GatherList::new([tensor.as_buffer()]);
            let reduction = ReductionSpec {
                dtype: DataType::F32,
                op: ReduceOp::Sum,
                members: numbers.len(),
                prescale: 1.0,
                postscale: 1.0,
            };
            let path = InstructionSet::best_available();
            let reducer = BlockReducer::with_order(reduction, path, peers.orders.clone()).unwrap();
            let auto = CrossoverTable::default();
            let job = start_chosen_allreduce(&mut peers, &auto, reducer, list(), list()).unwrap();
            assert!(peers.latency.is_none());
            (peers, job, tensor)
        };
        let links = loopback::link_mesh(numbers.len(), 64 << 10).unwrap();
        let mut members: Vec<_> = (0..).zip(links).map(start).collect();
        let mut pending: Vec<usize> = (0..members.len()).collect();
        while !pending.is_empty() {
            pending.retain(|member| {
                let (peers, job, _) = &mut members[*member];
                !job.poll(peers).unwrap().done
            });
        }
        let agreed = members[0].0.latency.unwrap();
        assert!(agreed > Duration::ZERO);
        for (peers, _, tensor) in &members {
            assert_eq!(peers.latency, Some(agreed));
            let mut sum = vec![0; TENSOR_BYTES];
            GatherList::new([tensor.as_buffer()]).read_at(0, &mut sum);
            assert!(sum.chunks_exact(4).all(|value| value == 18f32.to_ne_bytes()));
        }
    }
}
