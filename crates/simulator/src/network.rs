// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Resources that are taken for a time, one after the other. Times are seconds.

use crate::SimulatedCluster;

/// The least time after which Linux sends an unacknowledged lone packet again.
const RETRANSMISSION_TIMEOUT_SECONDS: f64 = 0.2;
/// The time that Linux waits, besides two round trips, before it probes for the loss of the last of
/// several packets.
const LOSS_PROBE_SECONDS: f64 = 0.008;

/// Memory and interfaces. Callers must come in the order of time.
pub(crate) struct NetworkModel {
    cluster: SimulatedCluster,
    /// Time at which each becomes free, by host; interfaces in both directions.
    memory: Vec<f64>,
    outgoing: Vec<f64>,
    incoming: Vec<f64>,
}

/// The cost of a step on its host.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostStepCost {
    /// Seconds of a core.
    pub(crate) core: f64,
    /// Bytes of memory read and written.
    pub(crate) memory: f64,
}

impl NetworkModel {
    pub(crate) fn new(cluster: &SimulatedCluster, hosts: usize) -> Self {
        let free = || vec![0.0; hosts];
        Self { cluster: cluster.clone(), memory: free(), outgoing: free(), incoming: free() }
    }

    /// Returns the cost of copying so many bytes between a tensor and a ring, which is in the
    /// cache.
    pub(crate) fn copy_cost(&self, bytes: f64) -> HostStepCost {
        HostStepCost { core: bytes / self.cluster.copy_rate, memory: bytes }
    }

    /// Returns the cost of reading and writing so many bytes, half of them in the cache: a copy
    /// both reads and writes each byte.
    pub(crate) fn reduce_cost(&self, bytes: f64) -> HostStepCost {
        HostStepCost { core: bytes / 2.0 / self.cluster.copy_rate, memory: bytes / 2.0 }
    }

    /// Returns the cost of sending or receiving a message between hosts: the kernel copies, and the
    /// interface reads or writes memory.
    pub(crate) fn socket_cost(&self, bytes: f64) -> HostStepCost {
        let core = bytes / self.cluster.socket_rate + self.cluster.message_cpu_time.as_secs_f64();
        HostStepCost { core, memory: bytes }
    }

    /// Returns the time at which a core ends a task that it begins now.
    pub(crate) fn occupy_core(
        &mut self,
        now: f64,
        host: usize,
        slow: bool,
        cost: HostStepCost,
    ) -> f64 {
        let slowdown = if slow { self.cluster.slowdown } else { 1.0 };
        let memory = self.memory[host].max(now) + cost.memory / self.cluster.memory_rate;
        self.memory[host] = memory;
        // Core and memory work at the same time, so the slower of them decides.
        memory.max(now + cost.core * slowdown)
    }

    /// Sends a message, and returns the time at which its head is at the other host.
    pub(crate) fn send_message(&mut self, now: f64, host: usize, bytes: f64) -> f64 {
        let start = self.outgoing[host].max(now);
        self.outgoing[host] = start + self.transmission_seconds(bytes);
        start + self.cluster.latency.as_secs_f64()
    }

    /// Receives a message whose head has arrived, and returns the time at which all of it has
    /// arrived. Messages of several senders wait for each other.
    pub(crate) fn receive_message(&mut self, now: f64, host: usize, bytes: f64) -> f64 {
        let end = self.incoming[host].max(now) + self.transmission_seconds(bytes);
        self.incoming[host] = end;
        end
    }

    fn transmission_seconds(&self, bytes: f64) -> f64 {
        // Packets that were lost take the interface once more.
        bytes / self.cluster.payload_rate() / (1.0 - self.cluster.loss)
    }

    /// Returns the delay of a message whose packets were lost; `chance` is a random number from 0
    /// to 1 for the message.
    pub(crate) fn retransmission_delay(&self, bytes: f64, chance: f64) -> f64 {
        let arrives = 1.0 - self.cluster.loss;
        if arrives >= 1.0 {
            return 0.0;
        }
        let packets = (bytes / self.cluster.packet_payload_bytes()).ceil().max(1.0);
        if chance < 1.0 - arrives {
            // No packet after the last one would show its loss.
            if packets > 1.0 {
                LOSS_PROBE_SECONDS + 4.0 * self.cluster.latency.as_secs_f64()
            } else {
                RETRANSMISSION_TIMEOUT_SECONDS
            }
        } else if chance < 1.0 - arrives.powf(packets) {
            // Later packets show the loss, so the packet is sent again after one round trip.
            2.0 * self.cluster.latency.as_secs_f64()
        } else {
            0.0
        }
    }
}

/// Returns a number from 0 to 1 for each message: the same in every run.
pub(crate) fn message_loss_random(message: u64) -> f64 {
    // SplitMix64.
    let mut word = message.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    // A float64 holds 32 bits exactly. It would round 64 bits, in places to 1.
    let top = u32::try_from((word ^ (word >> 31)) >> 32).unwrap_or(u32::MAX);
    f64::from(top) / (f64::from(u32::MAX) + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_many_senders_wait_for_each_other_at_the_receiver() {
        let cluster = SimulatedCluster::new(4, 4).unwrap();
        let mut network = NetworkModel::new(&cluster, 4);
        let bytes = 1e6;
        let heads: Vec<f64> = (1..4).map(|host| network.send_message(0.0, host, bytes)).collect();
        assert!(heads.iter().all(|head| *head == cluster.latency.as_secs_f64()));
        let ends: Vec<f64> =
            heads.iter().map(|head| network.receive_message(*head, 0, bytes)).collect();
        let expected = heads[0] + 3.0 * bytes / cluster.payload_rate();
        assert!((ends[2] - expected).abs() < 1e-9, "{ends:?}, {expected}");
    }

    #[test]
    fn losses_are_as_frequent_as_they_should_be() {
        let cluster = SimulatedCluster { loss: 0.01, ..SimulatedCluster::new(2, 2).unwrap() };
        let network = NetworkModel::new(&cluster, 2);
        let late = |bytes: f64| {
            (0..20_000)
                .filter(|message| {
                    network.retransmission_delay(bytes, message_loss_random(*message)) > 0.0
                })
                .count()
        };
        assert!((150..250).contains(&late(100.0)), "{}", late(100.0));
        // 100 packets.
        let share = late(144_800.0) as f64 / 20_000.0;
        assert!((share - (1.0 - 0.99f64.powi(100))).abs() < 0.02, "{share}");
    }
}
