// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The ways by which the ranks of a job find rank 0.

use std::fmt;
use std::path::{Path, PathBuf};

use farandole_registrar::Secret;
use farandole_world::JobId;

use super::Started;

/// Ports of rank 0 where a secret is given and no port: below those that systems hand out by
/// themselves.
const FIRST_PORT: u16 = 20_000;
const PORTS: u16 = 8_000;

/// The place in which rank 0 leaves the data that the others need.
#[derive(Clone, Debug)]
pub(crate) enum Way {
    /// A file that rank 0 writes into a folder.
    File {
        /// The folder.
        folder: PathBuf,
        /// Whether it is the user's alone, made by us where it is missing.
        private: bool,
        /// The file's name.
        name: String,
    },
    /// An address, and a secret that all ranks have.
    Address {
        /// The secret.
        secret: Secret,
        /// A name or an address.
        host: String,
        /// The port.
        port: u16,
    },
}

/// Folders of this process.
#[derive(Clone, Debug)]
pub(crate) struct Folders {
    /// The user's own on this host: one of the session, or one in the folder for temporary files.
    pub(crate) local: PathBuf,
    /// The user's home, which hosts often share.
    pub(crate) home: Option<PathBuf>,
}

impl Way {
    /// The way of this job. Pure.
    ///
    /// # Errors
    /// What is missing or wrong.
    pub(crate) fn of(
        started: &Started,
        job: &JobId,
        secret: &str,
        rendezvous: &str,
        folders: &Folders,
    ) -> Result<Self, String> {
        let given = if secret.is_empty() {
            None
        } else {
            let short =
                || format!("FARANDOLE_JOB_SECRET has fewer than {} characters", Secret::SHORTEST);
            Some(Secret::new(secret, job).ok_or_else(short)?)
        };
        let name = format!("{job}.ticket");
        let path = rendezvous.strip_prefix("file://").unwrap_or(rendezvous);
        if path.starts_with('/') {
            return Ok(Self::File { folder: PathBuf::from(path), private: false, name });
        }
        if let Some(secret) = given {
            return Self::by_address(started, secret, rendezvous);
        }
        if !rendezvous.is_empty() {
            return Err(match address(rendezvous) {
                Some(_) => format!(
                    "FARANDOLE_RENDEZVOUS={rendezvous} takes a FARANDOLE_JOB_SECRET, and there is \
                     none"
                ),
                None => neither(rendezvous),
            });
        }
        if started.one_host {
            return Ok(Self::File { folder: folders.local.clone(), private: true, name });
        }
        let Some(home) = &folders.home else {
            return Err("there is no HOME to meet in".to_owned());
        };
        Ok(Self::File { folder: home.join(".farandole"), private: true, name })
    }

    fn by_address(started: &Started, secret: Secret, rendezvous: &str) -> Result<Self, String> {
        if !rendezvous.is_empty() {
            let (host, port) = address(rendezvous).ok_or_else(|| neither(rendezvous))?;
            return Ok(Self::Address { secret, host, port });
        }
        let port = secret.port(FIRST_PORT, PORTS);
        let host = if started.one_host {
            Some("127.0.0.1".to_owned())
        } else {
            started.first_host.clone()
        };
        let host =
            host.ok_or("nothing tells the host of rank 0: set FARANDOLE_RENDEZVOUS=host:port")?;
        Ok(Self::Address { secret, host, port })
    }

    /// Returns whether only this host is to reach the registrar.
    pub(crate) fn stays_here(&self, started: &Started) -> bool {
        match self {
            Self::File { .. } => started.one_host,
            Self::Address { host, .. } => is_loopback(host),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { folder, name, .. } => {
                write!(f, "the file {}", Path::new(folder).join(name).display())
            }
            Self::Address { host, port, .. } => write!(f, "the address {}", joined(host, *port)),
        }
    }
}

/// `host:port`, as a URL has it.
pub(crate) fn joined(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback())
}

fn address(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let port = port.parse().ok().filter(|port| *port > 0)?;
    let plain = !bare.is_empty()
        && !bare.contains(['/', ' ', '[', ']'])
        && (bare == host) != bare.contains(':');
    plain.then(|| (bare.to_owned(), port))
}

fn neither(rendezvous: &str) -> String {
    format!(
        "FARANDOLE_RENDEZVOUS must be host:port or a directory (/path or file:///path): \
         {rendezvous}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "sixteen letters.";

    fn started(one_host: bool, first_host: Option<&str>) -> Started {
        Started {
            starter: "srun",
            key: "slurm",
            rank: 1,
            size: 4,
            one_host,
            exact: Vec::new(),
            batch: Vec::new(),
            first_host: first_host.map(str::to_owned),
            variable: "SLURM_PROCID",
        }
    }

    fn way(started: &Started, secret: &str, rendezvous: &str) -> Result<String, String> {
        let folders = Folders { local: "/run/user/7".into(), home: Some("/home/u".into()) };
        Way::of(started, &JobId("j".to_owned()), secret, rendezvous, &folders)
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
        assert!((FIRST_PORT..FIRST_PORT + PORTS).contains(&port));
        assert_eq!(
            way(&started(true, Some("node1")), SECRET, "").unwrap(),
            format!("the address 127.0.0.1:{port}")
        );
        for (given, told) in
            [("n:7", "n:7"), ("[::1]:7", "[::1]:7"), ("10.0.0.1:65535", "10.0.0.1:65535")]
        {
            assert_eq!(
                way(&started(false, None), SECRET, given).unwrap(),
                format!("the address {told}")
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
            let folders = Folders { local: "/run/user/7".into(), home: Some("/home/u".into()) };
            let started = started(one_host, Some("a"));
            Way::of(&started, &JobId("j".to_owned()), secret, rendezvous, &folders)
                .unwrap()
                .stays_here(&started)
        };
        assert!(
            stays(true, "", "") && stays(true, SECRET, "") && stays(true, SECRET, "localhost:7")
        );
        assert!(!stays(false, "", "") && !stays(true, SECRET, "a:7") && !stays(false, SECRET, ""));
    }
}
