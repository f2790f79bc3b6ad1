// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Noticing that a peer died, stopped or left.
//!
//! A local peer's death is told by its pidfd at once, and its heartbeat is a counter in its bell's
//! page. Where the kernel has no pidfds (before 5.3, some sandboxes) both keep the Unix socket of
//! their handshake, whose end tells the same, unless a forked child of the peer still holds it:
//! then the heartbeat tells. A remote peer says a word now and then on a connection of its own,
//! which also ends when the process does. It also tells there which ranks it has lost, because a
//! rank has such connections with few others ([`circle`](crate::circle)).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use farandole_shm::Bell;
use farandole_world::Rank;
use rustix::net::sockopt;

use crate::beat::{Beats, Heard, Word};
use crate::peer::Peer;
use crate::shared::Secured;

/// Returns the longest wait for the reason after a peer ended its links: the part of the peer
/// timeout that is left for news of a loss.
#[must_use]
pub fn hearsay(peer_timeout: Duration) -> Duration {
    (peer_timeout / 5).min(Duration::from_millis(500))
}

/// The result of a look at a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Alive,
    Lost { reason: String, orderly: bool },
}

/// A watched peer.
#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) peer: Arc<Peer>,
    life: Life,
    /// Time of our own life, not of the clock, since the last sign.
    silent: Duration,
}

#[derive(Debug)]
enum Life {
    Local {
        bell: Arc<Bell>,
        beats: u64,
        end: Option<End>,
        pid: Option<u32>,
    },
    Remote {
        beats: Box<Beats>,
        left: bool,
        /// The reason why the peer counts this rank as lost.
        given_up: Option<String>,
    },
}

/// A descriptor that becomes readable when a process of this host ends.
#[derive(Debug)]
pub(crate) enum End {
    Pidfd(OwnedFd),
    Socket(OwnedFd),
}

impl End {
    fn process(&self) -> Option<u32> {
        match self {
            Self::Pidfd(pidfd) => process(pidfd.as_fd()),
            Self::Socket(socket) => {
                let pid = sockopt::socket_peercred(socket).ok()?.pid;
                u32::try_from(pid.as_raw_nonzero().get()).ok()
            }
        }
    }
}

impl Watch {
    /// Watches a process of this host; by its heartbeat only where nothing tells its end.
    pub(crate) fn local(peer: Arc<Peer>, bell: Arc<Bell>, end: Option<End>) -> Self {
        let pid = end.as_ref().and_then(End::process);
        Self {
            peer,
            life: Life::Local { beats: bell.heartbeat(), bell, end, pid },
            silent: Duration::ZERO,
        }
    }

    /// Watches through a connection; it must not block.
    pub(crate) fn remote(peer: Arc<Peer>, secured: Secured) -> Self {
        let beats = Box::new(Beats::new(secured));
        Self {
            peer,
            life: Life::Remote { beats, left: false, given_up: None },
            silent: Duration::ZERO,
        }
    }

    /// Returns the descriptor that becomes readable when there is news; `None` if only the
    /// heartbeat shows it.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.life {
            Life::Local { end, .. } => end.as_ref().map(|end| match end {
                End::Pidfd(descriptor) | End::Socket(descriptor) => descriptor.as_fd(),
            }),
            Life::Remote { beats, .. } => Some(beats.socket().as_fd()),
        }
    }

    /// The descriptor is readable. Adds the losses that the peer reports. `own` is the rank of this
    /// process: a peer that counts it as lost closes the connection next, and that end has the
    /// peer's reason.
    pub(crate) fn news(&mut self, own: Rank, losses: &mut Vec<(Rank, String)>) -> Verdict {
        match &mut self.life {
            Life::Local { bell, pid, .. } if bell.closed() => Verdict::Lost {
                reason: format!("it left the job and {} ended", named(*pid)),
                orderly: true,
            },
            Life::Local { pid, .. } => Verdict::Lost { reason: death(*pid), orderly: false },
            Life::Remote { beats, left, given_up } => {
                let reason = loop {
                    match beats.hear() {
                        Heard::Word(word) => {
                            self.silent = Duration::ZERO;
                            match word {
                                // The end would have followed at once. The peer only passed on what
                                // others said.
                                Word::Beat => *given_up = None,
                                Word::Goodbye => *left = true,
                                Word::Lost { rank, reason } => {
                                    if rank == own {
                                        *given_up =
                                            Some(format!("it counts this rank as lost: {reason}"));
                                    }
                                    losses.push((rank, reason));
                                }
                            }
                        }
                        Heard::Nothing => return Verdict::Alive,
                        Heard::End => {
                            break "its process ended: its connection was closed without a goodbye"
                                .to_owned();
                        }
                        Heard::Broken(reason) => break reason,
                    }
                };
                let reason = if *left {
                    "it left the job".to_owned()
                } else {
                    given_up.take().unwrap_or(reason)
                };
                Verdict::Lost { reason, orderly: *left }
            }
        }
    }

    /// `lived` of our own life has passed: shows the peer that we live, and looks whether it does.
    pub(crate) fn tick(&mut self, lived: Duration, timeout: Duration) -> Verdict {
        self.silent += lived;
        let pid = match &mut self.life {
            Life::Local { bell, beats, pid, .. } => {
                let now = bell.heartbeat();
                if bell.closed() {
                    self.silent = Duration::ZERO;
                } else if now != *beats {
                    *beats = now;
                    // The last beat may have come right after our last look.
                    self.silent = lived;
                }
                *pid
            }
            Life::Remote { beats, .. } => {
                // What cannot be sent now is made up for by the next beat; an end is read by
                // `news`.
                beats.beat();
                None
            }
        };
        // By the next look it would be too late.
        if self.silent + lived < timeout {
            return Verdict::Alive;
        }
        let state = pid.and_then(stat).filter(|stat| stat.state == "T" || stat.state == "t");
        let state = state.map_or(String::new(), |_| format!(": {} is stopped", named(pid)));
        Verdict::Lost {
            reason: format!("it stopped answering {:.1?} ago{state}", self.silent),
            orderly: false,
        }
    }

    /// Tells the peer that we leave in order; the bell says it to local ones.
    pub(crate) fn goodbye(&mut self) {
        if let Life::Remote { beats, .. } = &mut self.life {
            // A peer that does not read will see the end of the connection.
            beats.say(Word::Goodbye);
        }
    }

    /// Tells the peer that a rank was lost; local ones find out by themselves or hear it from
    /// others.
    pub(crate) fn tell(&mut self, rank: Rank, reason: &str) {
        if let Life::Remote { beats, .. } = &mut self.life {
            beats.say(Word::Lost { rank, reason: reason.to_owned() });
        }
    }
}

fn named(pid: Option<u32>) -> String {
    pid.map_or("its process".to_owned(), |pid| format!("its process {pid}"))
}

/// The process id in our namespace, as the kernel shows it for the descriptor.
fn process(pidfd: BorrowedFd<'_>) -> Option<u32> {
    use std::os::fd::AsRawFd;
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    line.trim().parse().ok().filter(|pid| *pid > 0)
}

struct Stat {
    state: String,
    exit_code: u32,
}

/// State and exit code; a process that its parent did not collect yet still has both.
fn stat(pid: u32) -> Option<Stat> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Counting starts behind the name, which may hold anything: field 3 is the state, field 52 the
    // exit code.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    Some(Stat { state: (*fields.first()?).to_owned(), exit_code: fields.get(49)?.parse().ok()? })
}

/// Describes how a process died, as far as it is known.
fn death(pid: Option<u32>) -> String {
    let process = named(pid);
    match pid.and_then(stat).filter(|stat| stat.state == "Z") {
        Some(stat) if stat.exit_code & 0x7f != 0 => {
            format!("{process} was killed by signal {}", stat.exit_code & 0x7f)
        }
        Some(stat) => format!("{process} exited with status {}", stat.exit_code >> 8),
        None => format!("{process} ended"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_to_hearsay_is_a_part_of_the_time_and_never_long() {
        let milliseconds = |timeout| hearsay(Duration::from_millis(timeout)).as_millis();
        assert_eq!([0, 200, 1000, 5000, 60_000].map(milliseconds), [0, 40, 200, 500, 500]);
    }
}
