// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The parts of an engine that its caller provides.

use std::sync::Arc;
use std::time::Duration;

use farandole_collectives::{Communicator, Device, DeviceCommunicatorFactory};
use farandole_config::Config;
use farandole_transport::Link;
use farandole_world::{ProcessSetId, Rank, World};

use crate::{AutotuneOptions, EngineObserver};

/// Sleep of the one driving thread until a peer or a local thread has work for it.
///
/// The order of calls is: `prepare_park`; check every source of work once more; then `park` or
/// `cancel_park`. Data that arrives after `prepare_park` ends the `park`, even if it arrives before
/// `park` is called.
pub trait DriverParkingAndLiveness: Send + Sync {
    /// Prepares a sleep: from now on a peer that commits to a link, and `unpark`, wake this
    /// process.
    fn prepare_park(&self);

    /// Sleeps until woken, for at most `limit`.
    fn park(&self, limit: Duration);

    /// Cancels `prepare_park`.
    fn cancel_park(&self);

    /// Ends the current `park`, or the next one if `prepare_park` was called. Any thread may call
    /// this.
    fn unpark(&self);

    /// Checks that every peer is alive.
    ///
    /// # Errors
    /// `PeerLost` with the first peer that is not alive.
    fn check_peers(&self) -> farandole_transport::Result<()>;

    /// Sends a heartbeat to the peers.
    fn send_heartbeat(&self);
}

/// The settings that the engine uses.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSettings {
    /// Longest time that one collective may take.
    pub collective_timeout: Duration,
    /// Largest number of bytes of a fused operation; 0 turns fusion off.
    pub fusion_threshold: u64,
    /// Whether tensors of a group may be fused with tensors outside of the group.
    pub group_fusion: bool,
    /// Number of cached tensors per process set; 0 turns the cache off.
    pub cache_capacity: usize,
    /// Longest time between the loss of a link and the message that explains it: the peer's
    /// departure, the peer's abort, or the report of the process that watches. The explanation is
    /// needed because a peer that closed a link is mostly not the cause of the failure.
    pub loss_report_allowance: Duration,
    /// Longest time that a waiting thread spins before it sleeps.
    pub spin: Duration,
    /// Time that a tensor waits for other ranks until it is reported; `None`: never.
    pub stall_check: Option<Duration>,
    /// Time that a tensor waits for other ranks until the engine stops; `None`: never. Not below
    /// `stall_check`.
    pub stall_shutdown: Option<Duration>,
    /// Time after which the engine stops if every rank waits in a barrier, a join or a change of
    /// process sets that other ranks have not entered; `None`: never. Checked with every stall
    /// report.
    pub barrier_deadlock_timeout: Option<Duration>,
    /// Whether to create NVTX ranges for NVIDIA's profilers, if their library can be loaded.
    pub nvtx: bool,
    /// Largest total size in bytes of the timelines of all ranks, if every rank writes its own; 0:
    /// no limit.
    pub timeline_limit: u64,
    /// Options of the search for the fusion threshold; `None`: no search.
    pub tune: Option<AutotuneOptions>,
}

impl From<&Config> for EngineSettings {
    fn from(config: &Config) -> Self {
        let check = Some(config.stall_check_time);
        let check = check.filter(|time| !time.is_zero() && !config.stall_check_disable);
        Self {
            collective_timeout: config.collective_timeout,
            fusion_threshold: config.fusion_threshold,
            group_fusion: !config.disable_group_fusion,
            cache_capacity: usize::try_from(config.cache_capacity).unwrap_or(usize::MAX),
            loss_report_allowance: farandole_transport::loss_report_allowance(config.peer_timeout),
            spin: config.spin,
            stall_check: check,
            stall_shutdown: check.and_then(|check| {
                let limit = config.stall_shutdown_time;
                // A smaller limit would stop the engine before the first report.
                (!limit.is_zero() && limit >= check).then_some(limit)
            }),
            barrier_deadlock_timeout: Some(config.meeting_timeout).filter(|time| !time.is_zero()),
            nvtx: !config.disable_nvtx_ranges,
            timeline_limit: config.timeline_limit,
            // A threshold that the user has set is kept.
            tune: (config.autotune && !config.given.contains(&"fusion_threshold")).then(|| {
                AutotuneOptions {
                    warmup_samples: u32::try_from(config.autotune_warmup_samples)
                        .unwrap_or(u32::MAX),
                    steps_per_score: u32::try_from(config.autotune_steps_per_sample)
                        .unwrap_or(u32::MAX),
                    max_samples: u32::try_from(config.autotune_samples).unwrap_or(u32::MAX),
                    log: config.autotune_log.clone(),
                }
            }),
        }
    }
}

/// Options of a process set with this rank in it.
pub struct ProcessSetOptions {
    /// Number of the set.
    pub id: ProcessSetId,
    /// Members of the set, ascending.
    pub members: Vec<Rank>,
    /// A link to each of [`crate::control_peers`], only for control messages.
    pub control: Vec<Link>,
    /// Communicator that moves the data; its members are `members`, in the same order.
    pub communicator: Box<dyn Communicator>,
}

/// The parts and settings of an engine.
pub struct EngineOptions {
    /// The world and this rank's place in it.
    pub world: World,
    /// Settings.
    pub settings: EngineSettings,
    /// Sleep, wake-up and liveness of this process.
    pub host: Arc<dyn DriverParkingAndLiveness>,
    /// Process sets with this rank in them; set 0 must be among them.
    pub sets: Vec<ProcessSetOptions>,
    /// Process sets without this rank. They make the error for such a set differ from the error for
    /// an unknown number.
    pub foreign: Vec<ProcessSetId>,
    /// Devices whose memory requests may name; see
    /// [`Engine::add_device`](crate::Engine::add_device).
    pub devices: Vec<Arc<dyn Device>>,
    /// Factory of communicators among devices; without one, tensors on devices go through host
    /// memory.
    pub fabric: Option<Arc<dyn DeviceCommunicatorFactory>>,
    /// Receiver of stall reports, which also describes the threads of this process.
    pub observer: Arc<dyn EngineObserver>,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn stalls(check: &str, shutdown: &str, off: &str) -> (Option<u64>, Option<u64>) {
        let of = |name: &str| match name {
            "FARANDOLE_STALL_CHECK_TIME_SECONDS" => Some(check.to_owned()),
            "FARANDOLE_STALL_SHUTDOWN_TIME_SECONDS" => Some(shutdown.to_owned()),
            "FARANDOLE_STALL_CHECK_DISABLE" => Some(off.to_owned()),
            _ => None,
        };
        let settings = EngineSettings::from(&Config::read(of, &BTreeMap::new()).unwrap());
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs());
        (seconds(settings.stall_check), seconds(settings.stall_shutdown))
    }

    #[test]
    fn nothing_is_reported_where_that_is_off_or_would_be_at_once_and_for_ever() {
        assert_eq!(stalls("60", "90", "0"), (Some(60), Some(90)));
        assert_eq!(stalls("60", "0", "0"), (Some(60), None));
        assert_eq!(stalls("60", "30", "0"), (Some(60), None), "a shutdown before the first report");
        assert_eq!(stalls("60", "90", "1"), (None, None));
        assert_eq!(stalls("0", "90", "0"), (None, None));
    }
}
