// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The parts of an engine, which its caller provides.

use std::sync::Arc;
use std::time::Duration;

use farandole_collectives::{Communicator, Device, Fabric};
use farandole_config::Config;
use farandole_transport::Link;
use farandole_world::{ProcessSetId, Rank, World};

use crate::{Observer, Tune};

/// Sleep of the one driving thread until a peer or a local thread has work for it.
///
/// The order is `prepare`, look once more at everything that could have come, then `park` or
/// `cancel`: anything delivered after `prepare` ends the `park`, also if it comes first.
pub trait ProgressHost: Send + Sync {
    /// Announces sleep: from here on a peer that commits to a link, and `unpark`, will wake this
    /// process.
    fn prepare(&self);

    /// Sleeps until woken, for at most `limit`.
    fn park(&self, limit: Duration);

    /// Takes `prepare` back.
    fn cancel(&self);

    /// Ends the current `park`, or the next one if `prepare` was called; any thread may call it.
    fn unpark(&self);

    /// Returns whether every peer is alive.
    ///
    /// # Errors
    /// `PeerLost` naming the first that is not.
    fn check(&self) -> farandole_transport::Result<()>;

    /// Tells the peers that this process is alive.
    fn beat(&self);
}

/// The knobs that matter here.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The longest one collective may take.
    pub collective_timeout: Duration,
    /// Bytes up to which tensors are fused; 0 turns fusion off.
    pub fusion_threshold: u64,
    /// Whether tensors of a group may be fused with others.
    pub group_fusion: bool,
    /// Tensors remembered per process set; 0 turns the cache off.
    pub cache_capacity: usize,
    /// Longest time between a lost link and the reason for it: its peer's farewell, its report of
    /// what it stopped for, or a report of the process that watches. A peer that closed a link is
    /// most often not the one to blame.
    pub hearsay: Duration,
    /// Busy-waiting before a waiting thread sleeps.
    pub spin: Duration,
    /// A tensor waiting this long for other ranks is reported; `None`: never.
    pub stall_check: Option<Duration>,
    /// A tensor waiting this long for other ranks stops the engine; `None`: never. Not below
    /// `stall_check`.
    pub stall_shutdown: Option<Duration>,
    /// The engine stops when every rank has waited this long in a barrier, a join or a change of
    /// process sets that not all came to; looked at with every report, `None`: never.
    pub meeting_timeout: Option<Duration>,
    /// Ranges for NVIDIA's profilers, where their library can be loaded.
    pub nvtx: bool,
    /// Bytes that the timelines of all ranks may take together, where each has its own; 0: no
    /// limit.
    pub timeline_limit: u64,
    /// Searches for the fusion threshold.
    pub tune: Option<Tune>,
}

impl From<&Config> for Settings {
    fn from(config: &Config) -> Self {
        let check = Some(config.stall_check_time);
        let check = check.filter(|time| !time.is_zero() && !config.stall_check_disable);
        Self {
            collective_timeout: config.collective_timeout,
            fusion_threshold: config.fusion_threshold,
            group_fusion: !config.disable_group_fusion,
            cache_capacity: usize::try_from(config.cache_capacity).unwrap_or(usize::MAX),
            hearsay: farandole_transport::hearsay(config.peer_timeout),
            spin: config.spin,
            stall_check: check,
            stall_shutdown: check.and_then(|check| {
                let limit = config.stall_shutdown_time;
                (!limit.is_zero() && limit >= check).then_some(limit)
            }),
            meeting_timeout: Some(config.meeting_timeout).filter(|time| !time.is_zero()),
            nvtx: !config.disable_nvtx_ranges,
            timeline_limit: config.timeline_limit,
            tune: (config.autotune && !config.given.contains(&"fusion_threshold")).then(|| Tune {
                warmup_samples: u32::try_from(config.autotune_warmup_samples).unwrap_or(u32::MAX),
                steps_per_score: u32::try_from(config.autotune_steps_per_sample)
                    .unwrap_or(u32::MAX),
                most_samples: u32::try_from(config.autotune_samples).unwrap_or(u32::MAX),
                log: config.autotune_log.clone(),
            }),
        }
    }
}

/// One process set this rank is a member of.
pub struct SetOptions {
    /// Its number.
    pub id: ProcessSetId,
    /// Its members, ascending.
    pub members: Vec<Rank>,
    /// A link to each of [`crate::control_peers`], used for nothing else.
    pub control: Vec<Link>,
    /// Moves the data; its members are `members`, in that order.
    pub communicator: Box<dyn Communicator>,
}

/// Everything an engine is made of.
pub struct EngineOptions {
    /// This rank's place in the world.
    pub world: World,
    /// Knobs.
    pub settings: Settings,
    /// Sleep, wake-up and liveness of this process.
    pub host: Arc<dyn ProgressHost>,
    /// Process sets this rank is in; set 0 must be among them.
    pub sets: Vec<SetOptions>,
    /// Process sets without this rank, so that the error for them differs from that for a wrong
    /// number.
    pub foreign: Vec<ProcessSetId>,
    /// Devices whose memory requests may name; see
    /// [`Engine::add_device`](crate::Engine::add_device).
    pub devices: Vec<Arc<dyn Device>>,
    /// Makes communicators among devices; without one, what is on devices goes through the host.
    pub fabric: Option<Arc<dyn Fabric>>,
    /// Hears of stalls, and is asked what this process does.
    pub observer: Arc<dyn Observer>,
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
        let settings = Settings::from(&Config::read(of, &BTreeMap::new()).unwrap());
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
