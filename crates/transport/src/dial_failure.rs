// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The reasons why an attempt to reach a peer failed.

use rustix::io::Errno;

use crate::Error;

pub(crate) const NO_ANSWER_REASON: &str = "no answer in time";

/// The reason why one attempt failed.
#[derive(Debug)]
pub(crate) enum DialFailure {
    /// No process listens there.
    Refused(String),
    /// No answer came; a later attempt may succeed.
    Unanswered(String),
    /// The connection was made, but no bytes came. The kernel accepts connections even for a
    /// stopped process.
    Silent(String),
    /// The peer closed the connection, so it has not accepted its end.
    Closed(String),
    /// The exchange broke after the peer's welcome, so the peer may have accepted its end.
    Broken(String),
    /// A failure of this process, not of the peer.
    LocalError(Error),
    /// A process without the key answered.
    Unauthenticated(String),
    /// The peer answered and refused the request.
    Declined(String),
}

impl DialFailure {
    /// Classifies a failed system call. A lack of free descriptors is a local error, which says
    /// nothing about the peer.
    pub(crate) fn from_failed_call(
        what: &'static str,
        errno: Option<Errno>,
        reason: String,
    ) -> Self {
        match errno {
            Some(Errno::MFILE | Errno::NFILE) => Self::LocalError(Error::System { what, reason }),
            // Only this error proves that no process listens. A timeout or a missing route may
            // pass.
            Some(Errno::CONNREFUSED) => Self::Refused(reason),
            _ => Self::Unanswered(reason),
        }
    }

    pub(crate) fn is_peer_answer(&self) -> bool {
        matches!(self, Self::Unauthenticated(_) | Self::Declined(_))
    }
}

impl std::fmt::Display for DialFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(reason)
            | Self::Unanswered(reason)
            | Self::Silent(reason)
            | Self::Closed(reason)
            | Self::Broken(reason)
            | Self::Unauthenticated(reason)
            | Self::Declined(reason) => f.write_str(reason),
            Self::LocalError(error) => error.fmt(f),
        }
    }
}

pub(crate) type DialResult<T> = std::result::Result<T, DialFailure>;
