// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The ways in which the ranks of a job find rank 0.

use std::fmt;
use std::path::PathBuf;

use farandole_registrar::JobSecret;
use farandole_world::JobId;

use super::DetectedRank;

/// Ports of rank 0 if a secret is given, but no port: below the ports that systems assign by
/// themselves.
const FIRST_PORT: u16 = 20_000;
/// Folder for tickets in the user's home.
pub(super) const HOME_FOLDER: &str = ".farandole";
const PORT_COUNT: u16 = 8_000;

/// The way in which the other ranks get rank 0's address and token.
#[derive(Clone, Debug)]
pub(crate) enum RankZeroRendezvous {
    /// A file that rank 0 writes into a folder.
    File {
        /// The folders. Rank 0 writes into the first one that it can use, and the other ranks look
        /// into all.
        folders: Vec<PathBuf>,
        /// Whether the folders are private to the user; they are created if they do not exist.
        private: bool,
        /// The file's name.
        name: String,
    },
    /// An address of rank 0, and a secret that all ranks have.
    Address {
        /// The secret.
        secret: JobSecret,
        /// A name or an address.
        host: String,
        /// The port.
        port: u16,
    },
}

/// Folders in which ranks may exchange tickets.
#[derive(Clone, Debug)]
pub(crate) struct TicketFolders {
    /// Folders of this host that may be the user's own, by preference. Another user may have
    /// created one of the same name in a shared folder, so there are several.
    pub(crate) local: Vec<PathBuf>,
    /// The user's home, which hosts often share.
    pub(crate) home: Option<PathBuf>,
}

impl RankZeroRendezvous {
    /// Selects the rendezvous of this job. Pure.
    ///
    /// # Errors
    /// A setting is missing or invalid.
    pub(crate) fn select_rendezvous(
        started: &DetectedRank,
        job: &JobId,
        secret: &str,
        rendezvous: &str,
        folders: &TicketFolders,
    ) -> Result<Self, String> {
        let given = if secret.is_empty() {
            None
        } else {
            let short = || {
                format!(
                    "FARANDOLE_JOB_SECRET has fewer than {} characters",
                    JobSecret::MIN_SECRET_BYTES
                )
            };
            Some(JobSecret::new(secret, job).ok_or_else(short)?)
        };
        let name = format!("{job}.ticket");
        let path = rendezvous.strip_prefix("file://").unwrap_or(rendezvous);
        // A file needs no secret, so a directory that the user names comes first.
        if path.starts_with('/') {
            return Ok(Self::File { folders: vec![PathBuf::from(path)], private: false, name });
        }
        if let Some(secret) = given {
            return Self::at_address(started, secret, rendezvous);
        }
        if !rendezvous.is_empty() {
            return Err(match parse_host_port(rendezvous) {
                Some(_) => format!(
                    "FARANDOLE_RENDEZVOUS={rendezvous} takes a FARANDOLE_JOB_SECRET, and there is \
                     none"
                ),
                None => invalid_rendezvous_message(rendezvous),
            });
        }
        if started.one_host {
            return Ok(Self::File { folders: folders.local.clone(), private: true, name });
        }
        let Some(home) = &folders.home else {
            return Err("there is no HOME to meet in".to_owned());
        };
        Ok(Self::File { folders: vec![home.join(HOME_FOLDER)], private: true, name })
    }

    fn at_address(
        started: &DetectedRank,
        secret: JobSecret,
        rendezvous: &str,
    ) -> Result<Self, String> {
        if !rendezvous.is_empty() {
            let (host, port) = parse_host_port(rendezvous)
                .ok_or_else(|| invalid_rendezvous_message(rendezvous))?;
            return Ok(Self::Address { secret, host, port });
        }
        // All ranks derive the same port, so none has to be sent.
        let port = secret.derive_port(FIRST_PORT, PORT_COUNT);
        let host = if started.one_host {
            Some("127.0.0.1".to_owned())
        } else {
            started.first_host.clone()
        };
        let host =
            host.ok_or("nothing tells the host of rank 0: set FARANDOLE_RENDEZVOUS=host:port")?;
        Ok(Self::Address { secret, host, port })
    }

    /// Returns whether the registrar must only be reachable from this host.
    pub(crate) fn is_local_only(&self, started: &DetectedRank) -> bool {
        match self {
            // Ranks of other hosts read the same file, and must reach the address in it.
            Self::File { .. } => started.one_host,
            Self::Address { host, .. } => is_loopback_host(host),
        }
    }
}

impl fmt::Display for RankZeroRendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { folders, name, .. } => {
                let files: Vec<String> =
                    folders.iter().map(|folder| folder.join(name).display().to_string()).collect();
                write!(f, "the file {}", files.join(" or "))
            }
            Self::Address { host, port, .. } => {
                write!(f, "the address {}", join_host_port(host, *port))
            }
        }
    }
}

/// Joins host and port as in a URL.
pub(crate) fn join_host_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn is_loopback_host(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback())
}

fn parse_host_port(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let port = port.parse().ok().filter(|port| *port > 0)?;
    let plain = !bare.is_empty()
        && !bare.contains(['/', ' ', '[', ']'])
        && (bare == host) != bare.contains(':');
    plain.then(|| (bare.to_owned(), port))
}

fn invalid_rendezvous_message(rendezvous: &str) -> String {
    format!(
        "FARANDOLE_RENDEZVOUS must be host:port or a directory (/path or file:///path): \
         {rendezvous}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "sixteen letters.";

    fn started(one_host: bool, first_host: Option<&str>) -> DetectedRank {
        DetectedRank {
            launcher: "srun",
            launcher_key: "slurm",
            rank: 1,
            size: 4,
            one_host,
            start_variables: Vec::new(),
            batch_variables: Vec::new(),
            first_host: first_host.map(str::to_owned),
            rank_variable: "SLURM_PROCID",
        }
    }

    fn way(started: &DetectedRank, secret: &str, rendezvous: &str) -> Result<String, String> {
        let folders =
            TicketFolders { local: vec!["/run/user/7".into()], home: Some("/home/u".into()) };
        RankZeroRendezvous::select_rendezvous(
            started,
            &JobId("j".to_owned()),
            secret,
            rendezvous,
            &folders,
        )
        .map(|way| way.to_string())
    }

    #[test]
    fn without_a_word_ranks_meet_in_a_file_of_the_host_or_of_the_home() {
        assert_eq!(way(&started(true, None), "", "").unwrap(), "the file /run/user/7/j.ticket");
        assert_eq!(
            way(&started(false, Some("a")), "", "").unwrap(),
            "the file /home/u/.farandole/j.ticket"
        );
    }

    #[test]
    fn a_directory_is_taken_with_and_without_a_scheme() {
        for rendezvous in ["/shared", "file:///shared"] {
            for secret in ["", SECRET] {
                assert_eq!(
                    way(&started(false, None), secret, rendezvous).unwrap(),
                    "the file /shared/j.ticket"
                );
            }
        }
    }

    #[test]
    fn a_secret_takes_an_address_and_makes_up_a_port() {
        let made_up = way(&started(false, Some("node1")), SECRET, "").unwrap();
        let port: u16 = made_up.strip_prefix("the address node1:").unwrap().parse().unwrap();
        assert!((FIRST_PORT..FIRST_PORT + PORT_COUNT).contains(&port));
        assert_eq!(
            way(&started(true, Some("node1")), SECRET, "").unwrap(),
            format!("the address 127.0.0.1:{port}")
        );
        for (given, expected) in
            [("n:7", "n:7"), ("[::1]:7", "[::1]:7"), ("10.0.0.1:65535", "10.0.0.1:65535")]
        {
            assert_eq!(
                way(&started(false, None), SECRET, given).unwrap(),
                format!("the address {expected}")
            );
        }
    }

    #[test]
    fn a_missing_or_invalid_variable_is_named() {
        let error =
            |secret, rendezvous| way(&started(false, None), secret, rendezvous).unwrap_err();
        assert!(error(SECRET, "").contains("FARANDOLE_RENDEZVOUS=host:port"));
        assert!(error("short", "").contains("FARANDOLE_JOB_SECRET has fewer than 16 characters"));
        assert!(error("", "n:7").contains("takes a FARANDOLE_JOB_SECRET"));
        for rendezvous in ["n", "n:0", "n:x", ":7", "::1:7", "a/b:7", "s3://a", "n:70000"] {
            for secret in ["", SECRET] {
                assert!(error(secret, rendezvous).ends_with(rendezvous), "{rendezvous}");
            }
        }
    }

    #[test]
    fn only_what_stays_on_this_host_listens_on_loopback() {
        let stays = |one_host, secret, rendezvous| {
            let folders =
                TicketFolders { local: vec!["/run/user/7".into()], home: Some("/home/u".into()) };
            let started = started(one_host, Some("a"));
            RankZeroRendezvous::select_rendezvous(
                &started,
                &JobId("j".to_owned()),
                secret,
                rendezvous,
                &folders,
            )
            .unwrap()
            .is_local_only(&started)
        };
        assert!(
            stays(true, "", "") && stays(true, SECRET, "") && stays(true, SECRET, "localhost:7")
        );
        assert!(!stays(false, "", "") && !stays(true, SECRET, "a:7") && !stays(false, SECRET, ""));
    }
}
