// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Detects that a peer died, stopped or left.
//!
//! The pidfd of a local peer shows the death of its process at once. The heartbeat of a local peer
//! is a counter in the page of its doorbell. If the kernel has no pidfds (before 5.3, some
//! sandboxes), both ranks keep the Unix socket of their handshake. The end of its stream shows the
//! death too, unless a forked child of the peer still has the socket open; then only the heartbeat
//! shows it. A remote peer sends heartbeats on a separate connection, which also ends when the
//! process ends. On this connection, the peer also reports the ranks that it has lost, because a
//! rank has such connections with few ranks ([`heartbeat_topology`](crate::heartbeat_topology)).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use farandole_shm::ProcessDoorbell;
use farandole_world::Rank;
use rustix::net::sockopt;

use crate::heartbeat_channel::{ControlMessage, HeartbeatChannel, ReceiveOutcome};
use crate::peer_state::PeerState;
use crate::secured_connection::SecuredConnection;

/// Returns the part of the peer timeout that is reserved for reports of a loss. It is also the
/// longest wait for the reason after a peer ended its links.
#[must_use]
pub fn loss_report_allowance(peer_timeout: Duration) -> Duration {
    // A report takes at most a few hops, so long timeouts need no larger part.
    (peer_timeout / 5).min(Duration::from_millis(500))
}

/// The result of a liveness check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeerLiveness {
    Alive,
    Lost { reason: String, orderly: bool },
}

/// A watched peer.
#[derive(Debug)]
pub(crate) struct PeerWatch {
    pub(crate) peer: Arc<PeerState>,
    liveness_source: LivenessSource,
    /// Time since the last sign of life, without the time this process was itself stopped.
    silent: Duration,
}

#[derive(Debug)]
enum LivenessSource {
    Local {
        bell: Arc<ProcessDoorbell>,
        last_heartbeat_count: u64,
        end: Option<ProcessEndDescriptor>,
        pid: Option<u32>,
    },
    Remote {
        channel: Box<HeartbeatChannel>,
        has_said_farewell: bool,
        /// The reason why the peer counts this rank as lost.
        given_up: Option<String>,
    },
}

/// A descriptor that becomes readable when a process of this host ends.
#[derive(Debug)]
pub(crate) enum ProcessEndDescriptor {
    Pidfd(OwnedFd),
    Socket(OwnedFd),
}

impl ProcessEndDescriptor {
    fn process_id(&self) -> Option<u32> {
        match self {
            Self::Pidfd(pidfd) => pidfd_process_id(pidfd.as_fd()),
            Self::Socket(socket) => {
                let pid = sockopt::socket_peercred(socket).ok()?.pid;
                u32::try_from(pid.as_raw_nonzero().get()).ok()
            }
        }
    }
}

impl PeerWatch {
    /// Watches a process of this host. Without `end`, only its heartbeat is checked.
    pub(crate) fn watch_local(
        peer: Arc<PeerState>,
        bell: Arc<ProcessDoorbell>,
        end: Option<ProcessEndDescriptor>,
    ) -> Self {
        let pid = end.as_ref().and_then(ProcessEndDescriptor::process_id);
        Self {
            peer,
            liveness_source: LivenessSource::Local {
                last_heartbeat_count: bell.heartbeat_count(),
                bell,
                end,
                pid,
            },
            silent: Duration::ZERO,
        }
    }

    /// Watches a process of another host through a connection, whose socket must be non-blocking.
    pub(crate) fn watch_remote(peer: Arc<PeerState>, secured: SecuredConnection) -> Self {
        let channel = Box::new(HeartbeatChannel::new(secured));
        Self {
            peer,
            liveness_source: LivenessSource::Remote {
                channel,
                has_said_farewell: false,
                given_up: None,
            },
            silent: Duration::ZERO,
        }
    }

    /// Returns the descriptor that becomes readable when the state of the peer changes; `None` if
    /// only the heartbeat shows that.
    pub(crate) fn poll_descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.liveness_source {
            LivenessSource::Local { end, .. } => end.as_ref().map(|end| match end {
                ProcessEndDescriptor::Pidfd(descriptor)
                | ProcessEndDescriptor::Socket(descriptor) => descriptor.as_fd(),
            }),
            LivenessSource::Remote { channel, .. } => Some(channel.socket().as_fd()),
        }
    }

    /// Reads news after the descriptor became readable, and adds the losses that the peer reports.
    /// `own` is the rank of this process: a peer that counts `own` as lost closes the connection
    /// next, and its reason then replaces the general one.
    pub(crate) fn read_liveness_updates(
        &mut self,
        own: Rank,
        losses: &mut Vec<(Rank, String)>,
    ) -> PeerLiveness {
        match &mut self.liveness_source {
            // The pidfd says only that the process ended; the mark in its doorbell says that it
            // left first.
            LivenessSource::Local { bell, pid, .. } if bell.is_closed() => PeerLiveness::Lost {
                reason: format!("it left the job and {} ended", describe_process(*pid)),
                orderly: true,
            },
            LivenessSource::Local { pid, .. } => {
                PeerLiveness::Lost { reason: describe_death(*pid), orderly: false }
            }
            LivenessSource::Remote { channel, has_said_farewell, given_up } => {
                let reason = loop {
                    match channel.receive_message() {
                        ReceiveOutcome::Message(word) => {
                            self.silent = Duration::ZERO;
                            match word {
                                // A peer that gives this rank up closes the connection at once.
                                // This peer is still there, so it only forwarded the report of
                                // another rank.
                                ControlMessage::Heartbeat => *given_up = None,
                                ControlMessage::Goodbye => *has_said_farewell = true,
                                ControlMessage::RankLost { rank, reason } => {
                                    if rank == own {
                                        *given_up =
                                            Some(format!("it counts this rank as lost: {reason}"));
                                    }
                                    losses.push((rank, reason));
                                }
                            }
                        }
                        ReceiveOutcome::Nothing => return PeerLiveness::Alive,
                        ReceiveOutcome::End => {
                            break "its process ended: its connection was closed without a goodbye"
                                .to_owned();
                        }
                        ReceiveOutcome::Broken(reason) => break reason,
                    }
                };
                let reason = if *has_said_farewell {
                    "it left the job".to_owned()
                } else {
                    given_up.take().unwrap_or(reason)
                };
                PeerLiveness::Lost { reason, orderly: *has_said_farewell }
            }
        }
    }

    /// Sends a heartbeat to the peer, and checks the last one of the peer. `lived` is the time
    /// since the last check that this process ran.
    pub(crate) fn send_and_check_heartbeat(
        &mut self,
        lived: Duration,
        timeout: Duration,
    ) -> PeerLiveness {
        self.silent += lived;
        let pid = match &mut self.liveness_source {
            LivenessSource::Local { bell, last_heartbeat_count, pid, .. } => {
                let now = bell.heartbeat_count();
                // A peer that has left sends no heartbeats. Its pidfd shows the end of its process.
                if bell.is_closed() {
                    self.silent = Duration::ZERO;
                } else if now != *last_heartbeat_count {
                    *last_heartbeat_count = now;
                    // The heartbeat may have come right after the last check.
                    self.silent = lived;
                }
                *pid
            }
            LivenessSource::Remote { channel, .. } => {
                // A heartbeat that cannot be sent now is replaced by the next one.
                // `read_liveness_updates` detects the end.
                channel.send_heartbeat();
                None
            }
        };
        // At the next check the timeout would have passed.
        if self.silent + lived < timeout {
            return PeerLiveness::Alive;
        }
        // A stopped process (Ctrl-Z, a debugger) is a cause that the user can remove.
        let state =
            pid.and_then(read_process_stat).filter(|stat| stat.state == "T" || stat.state == "t");
        let state =
            state.map_or(String::new(), |_| format!(": {} is stopped", describe_process(pid)));
        PeerLiveness::Lost {
            reason: format!("it stopped answering {:.1?} ago{state}", self.silent),
            orderly: false,
        }
    }

    /// Sends a remote peer that this process leaves in order. A local peer sees it in the doorbell.
    pub(crate) fn send_goodbye(&mut self) {
        if let LivenessSource::Remote { channel, .. } = &mut self.liveness_source {
            // If the peer does not read the message, it sees the end of the connection.
            channel.queue_message(ControlMessage::Goodbye);
        }
    }

    /// Reports a lost rank to a remote peer. Local peers detect the loss themselves or get it from
    /// other ranks.
    pub(crate) fn report_rank_loss(&mut self, rank: Rank, reason: &str) {
        if let LivenessSource::Remote { channel, .. } = &mut self.liveness_source {
            channel.queue_message(ControlMessage::RankLost { rank, reason: reason.to_owned() });
        }
    }
}

fn describe_process(pid: Option<u32>) -> String {
    pid.map_or("its process".to_owned(), |pid| format!("its process {pid}"))
}

/// Returns the process id in this process's namespace, from the kernel's `fdinfo` of the pidfd.
fn pidfd_process_id(pidfd: BorrowedFd<'_>) -> Option<u32> {
    use std::os::fd::AsRawFd;
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    // The kernel shows 0 for a process of another namespace, and -1 for one that has ended.
    line.trim().parse().ok().filter(|pid| *pid > 0)
}

struct ProcessStat {
    state: String,
    exit_code: u32,
}

/// Reads the state and the exit code. A process still has both until its parent has collected it.
fn read_process_stat(pid: u32) -> Option<ProcessStat> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Fields are counted behind the name, which may contain any character. Field 3 is the state,
    // field 52 the exit code.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    Some(ProcessStat {
        state: (*fields.first()?).to_owned(),
        exit_code: fields.get(49)?.parse().ok()?,
    })
}

/// Describes how a process died, with the details that are known.
fn describe_death(pid: Option<u32>) -> String {
    let process = describe_process(pid);
    match pid.and_then(read_process_stat).filter(|stat| stat.state == "Z") {
        Some(stat) if stat.exit_code & 0x7f != 0 => {
            format!("{process} was killed by signal {}", stat.exit_code & 0x7f)
        }
        Some(stat) => format!("{process} exited with status {}", stat.exit_code >> 8),
        // Its parent has collected it, or `/proc` hides it; then the exit code is unknown.
        None => format!("{process} ended"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_to_hearsay_is_a_part_of_the_time_and_never_long() {
        let milliseconds =
            |timeout| loss_report_allowance(Duration::from_millis(timeout)).as_millis();
        assert_eq!([0, 200, 1000, 5000, 60_000].map(milliseconds), [0, 40, 200, 500, 500]);
    }
}
