// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The description of a cluster.

use std::time::Duration;

use farandole_registrar::formation_model;
use farandole_world::{HostHash, TaskId, World};

use crate::{Error, Result};

/// The most ranks that are simulated.
const MAX_RANKS: u32 = 4096;
/// The most ranks of a host: schedules within a host have a message for each pair of ranks.
const MAX_RANKS_PER_HOST: u32 = 128;
/// Bytes per second: times of lower rates may be longer than a duration can be.
const MIN_BYTES_PER_SECOND: f64 = 1000.0;
const MAX_SLOWDOWN: f64 = 1e6;
/// Bytes of a packet's headers: IP and TCP with timestamps, within the MTU.
const PACKET_HEADER_BYTES: f64 = 52.0;
/// Bytes around a packet: Ethernet's header, checksum, preamble and gap.
const FRAME_OVERHEAD_BYTES: f64 = 38.0;

/// Equal hosts on one switch that never blocks. Rates are bytes per second.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedCluster {
    /// Hosts.
    pub hosts: u32,
    /// Ranks, the same number on each host.
    pub ranks: u32,
    /// Time from one host to another, one way.
    pub latency: Duration,
    /// Bandwidth of each interface in each direction, headers included.
    pub bandwidth: f64,
    /// Interfaces of a host that carry data side by side.
    pub interfaces: u32,
    /// Largest packet, without Ethernet's header.
    pub mtu: u32,
    /// Share of packets that are lost.
    pub loss: f64,
    /// Hosts that are slower than the others.
    pub stragglers: u32,
    /// Factor by which all work of its processors takes longer on a slow host.
    pub slowdown: f64,
    /// The rate at which one core copies.
    pub copy_rate: f64,
    /// The rate at which all cores of a host together read and write.
    pub memory_rate: f64,
    /// The rate at which one core sends, or receives, through sealed TCP connections.
    pub socket_rate: f64,
    /// Processor time of each message to or from another host.
    pub message_cpu_time: Duration,
    /// Time from one process of a host to another.
    pub local_latency: Duration,
    /// Processor time of a call at the registrar.
    pub registrar_call_time: Duration,
    /// Processor time of a TLS handshake at the registrar, and of a link's at each end.
    pub handshake_time: Duration,
}

impl SimulatedCluster {
    /// Returns a cluster of 25 Gbit/s with a latency of 20 us. The rates of cores come from
    /// `docs/performance.md` and `docs/developer-guide/network-security.md`; the other values are
    /// assumptions.
    ///
    /// # Errors
    /// `Cluster` when ranks cannot be distributed evenly over hosts, or there are too many or none.
    pub fn new(hosts: u32, ranks: u32) -> Result<Self> {
        let cluster = Self {
            hosts,
            ranks,
            latency: Duration::from_micros(20),
            bandwidth: gigabits_to_bytes(25.0),
            interfaces: 1,
            mtu: 1500,
            loss: 0.0,
            stragglers: 0,
            slowdown: 1.0,
            copy_rate: 6e9,
            memory_rate: 100e9,
            // 7 GB/s through the kernel, and half of 0.06 s for each gigabyte that is sealed and
            // opened.
            socket_rate: 1.0 / (1.0 / 7e9 + 0.03e-9),
            message_cpu_time: Duration::from_micros(2),
            local_latency: Duration::from_nanos(1500),
            registrar_call_time: Duration::from_micros(50),
            handshake_time: Duration::from_micros(500),
        };
        cluster.check_parameters()?;
        Ok(cluster)
    }

    /// Returns whether it can be simulated.
    ///
    /// # Errors
    /// `Cluster` naming the fact that is wrong.
    pub fn check_parameters(&self) -> Result<()> {
        let wrong = |what, expected, value: String| Err(Error::Cluster { what, expected, value });
        if self.ranks == 0 || self.ranks > MAX_RANKS {
            return wrong("the number of ranks", "1 to 4096", self.ranks.to_string());
        }
        if self.hosts == 0 || !self.ranks.is_multiple_of(self.hosts) {
            return wrong(
                "the number of hosts",
                "a divisor of the number of ranks",
                self.hosts.to_string(),
            );
        }
        if self.ranks_per_host() > MAX_RANKS_PER_HOST {
            return wrong(
                "the number of ranks of a host",
                "at most 128",
                self.ranks_per_host().to_string(),
            );
        }
        if self.stragglers > self.hosts {
            return wrong(
                "the number of stragglers",
                "at most that of hosts",
                self.stragglers.to_string(),
            );
        }
        if !(0.0..=0.5).contains(&self.loss) {
            return wrong("the share of lost packets", "from 0 to 0.5", self.loss.to_string());
        }
        if !(1.0..=MAX_SLOWDOWN).contains(&self.slowdown) {
            return wrong("the slowdown", "from 1 to 1000000", self.slowdown.to_string());
        }
        if self.interfaces == 0 {
            return wrong("the number of interfaces", "at least 1", self.interfaces.to_string());
        }
        // Every host accepts packets of 576 bytes (RFC 791), so no network has less.
        if self.mtu < 576 {
            return wrong("the MTU", "at least 576", self.mtu.to_string());
        }
        for (what, rate) in [
            ("the bandwidth", self.bandwidth),
            ("the copy rate", self.copy_rate),
            ("the memory rate", self.memory_rate),
            ("the socket rate", self.socket_rate),
        ] {
            // Comparisons with NaN are false, so it would pass.
            if rate.is_nan() || rate < MIN_BYTES_PER_SECOND {
                return wrong(what, "at least 1000 bytes per second", rate.to_string());
            }
        }
        Ok(())
    }

    /// Returns the ranks of a host.
    pub fn ranks_per_host(&self) -> u32 {
        self.ranks / self.hosts.max(1)
    }

    /// Returns the host of every rank.
    pub fn rank_hosts(&self) -> Vec<u32> {
        (0..self.ranks).map(|rank| rank / self.ranks_per_host().max(1)).collect()
    }

    /// Returns the payload per second of all interfaces of a host in one direction.
    pub fn payload_rate(&self) -> f64 {
        let mtu = f64::from(self.mtu);
        self.bandwidth * f64::from(self.interfaces) * (mtu - PACKET_HEADER_BYTES)
            / (mtu + FRAME_OVERHEAD_BYTES)
    }

    /// Returns the payload of a packet.
    pub(crate) fn packet_payload_bytes(&self) -> f64 {
        f64::from(self.mtu) - PACKET_HEADER_BYTES
    }

    /// Returns the world that forms on it, seen from rank 0; nothing when there is no rank.
    pub(crate) fn model_formation(
        &self,
        arrival: impl Fn(u32) -> Duration,
    ) -> Option<formation_model::ModeledFormation> {
        let host = |task: u32| {
            HostHash(format!(
                "node-{:04}-{:016x}",
                task / self.ranks_per_host(),
                task / self.ranks_per_host()
            ))
        };
        formation_model::model_formation(
            self.ranks,
            (0..self.ranks).map(|task| (arrival(task), TaskId(task), host(task))),
        )
    }

    /// Returns the world of `model_formation` if all tasks arrive at once.
    pub(crate) fn formed_world(&self) -> Result<World> {
        self.check_parameters()?;
        let formed = self.model_formation(|_| Duration::ZERO);
        formed.map(|formed| formed.world).ok_or(Error::Stuck { left: self.ranks as usize })
    }
}

/// Returns the bytes per second of so many Gbit/s.
fn gigabits_to_bytes(number: f64) -> f64 {
    number * 1e9 / 8.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_that_cannot_be_are_refused() {
        assert!(SimulatedCluster::new(3, 8).is_err());
        assert!(SimulatedCluster::new(0, 8).is_err());
        assert!(SimulatedCluster::new(512, 4096).is_ok());
        assert!(SimulatedCluster::new(512, 8192).is_err());
        assert!(SimulatedCluster::new(1, 256).is_err());
        let cluster = SimulatedCluster::new(2, 4).unwrap();
        assert!(
            SimulatedCluster { bandwidth: f64::NAN, ..cluster.clone() }.check_parameters().is_err()
        );
        assert!(SimulatedCluster { loss: 0.9, ..cluster.clone() }.check_parameters().is_err());
        assert!(SimulatedCluster { slowdown: 0.5, ..cluster }.check_parameters().is_err());
    }

    #[test]
    fn ranks_follow_each_other_on_hosts() {
        let cluster = SimulatedCluster::new(2, 4).unwrap();
        assert_eq!(cluster.rank_hosts(), [0, 0, 1, 1]);
        let world = cluster.formed_world().unwrap();
        assert_eq!(world.machine_numbers(), [0, 0, 1, 1]);
    }
}
