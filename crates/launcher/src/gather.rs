// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The timeline of a worker on its way to the driver.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use farandole_config::PREFIX;
use farandole_registrar::Client;
use farandole_telemetry::OLD;
use tempfile::TempDir;

/// Value of the variable that asks for it.
const ASKED: &str = "GATHER";
/// Kind of the records that carry pieces.
const KIND: &str = "timeline";
/// Bytes in a piece.
const PIECE: usize = 128 << 10;
/// Shortest limit for sending if the report of the worker's end has less time: the driver waits for
/// it.
const LEAST: Duration = Duration::from_secs(5);
/// Pieces after which the registrar is waited for: more would push each other out.
const UNCONFIRMED: usize = 16;

/// The folder that a worker writes its timeline to. It goes with this.
pub(crate) struct Gathered {
    folder: TempDir,
}

impl Gathered {
    /// Makes the folder if the worker's variables ask for a timeline, and names it to the worker.
    pub(crate) fn asked(environment: &mut BTreeMap<String, Option<String>>) -> Option<Self> {
        let name = format!("{PREFIX}TIMELINE");
        if environment.get(&name)?.as_deref() != Some(ASKED) {
            return None;
        }
        match tempfile::Builder::new().prefix("farandole-timeline-").tempdir() {
            Ok(folder) => {
                let path = folder.path().join("{rank}.json");
                environment.insert(name, Some(path.to_string_lossy().into_owned()));
                Some(Self { folder })
            }
            Err(error) => {
                tracing::warn!(%error, "no timeline is written: there is no room for it");
                environment.remove(&name);
                None
            }
        }
    }

    /// Sends what the worker has written in the world that it was in last, for at most `time`, or
    /// five seconds where that is less.
    pub(crate) fn send(self, client: &Client, time: Duration) {
        let deadline = Instant::now() + time.max(LEAST);
        let Some(path) = newest(self.folder.path()) else { return };
        if let Err(error) = send(client, &path, deadline) {
            tracing::warn!(%error, path = %path.display(), "a timeline did not reach the driver");
        }
    }
}

/// A worker of an elastic job may have had several ranks.
fn newest(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.filter_map(Result::ok);
    let files =
        entries.filter(|entry| entry.path().extension().is_some_and(|ending| ending == "json"));
    files
        .max_by_key(|entry| entry.metadata().and_then(|told| told.modified()).ok())
        .map(|entry| entry.path())
}

/// Errors of files and of the registrar.
type Failure = Box<dyn std::error::Error>;

/// Sends the file of a rank; an older file with earlier records comes first.
fn send(client: &Client, path: &Path, deadline: Instant) -> Result<(), Failure> {
    let mut old = path.as_os_str().to_owned();
    old.push(OLD);
    let mut parts = Vec::new();
    for path in [Path::new(&old), path].into_iter().filter(|path| path.exists()) {
        parts.push(File::open(path)?);
    }
    let mut size = 0;
    for part in &parts {
        size += part.metadata()?.len();
    }
    let mut file: Box<dyn Read> = Box::new(io::empty());
    for part in parts {
        file = Box::new(file.chain(part));
    }
    // A metric that finds the outbox full of lines is dropped, and without the first piece all
    // others are useless.
    client.flush(deadline)?;
    let (mut offset, mut sent) = (0, 0);
    while offset < size {
        let mut piece = format!("{{\"offset\":{offset},\"size\":{size}}}\n").into_bytes();
        let read = file.by_ref().take(PIECE as u64).read_to_end(&mut piece)?;
        if read == 0 {
            break;
        }
        offset += read as u64;
        client.metric(KIND, &piece)?;
        sent += 1;
        if sent % UNCONFIRMED == 0 {
            client.flush(deadline)?;
        }
    }
    Ok(client.flush(deadline)?)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn a_folder_is_made_on_request_and_removed_with_its_owner() {
        let name = "FARANDOLE_TIMELINE".to_owned();
        for given in [None, Some(None), Some(Some("/x.json".to_owned()))] {
            let mut environment: BTreeMap<_, _> =
                given.map(|value| (name.clone(), value)).into_iter().collect();
            let before = environment.clone();
            assert!(Gathered::asked(&mut environment).is_none());
            assert_eq!(environment, before);
        }
        let mut environment = BTreeMap::from([(name.clone(), Some(ASKED.to_owned()))]);
        let gathered = Gathered::asked(&mut environment).unwrap();
        let path = PathBuf::from(environment[&name].clone().unwrap());
        assert_eq!(path.file_name().unwrap(), "{rank}.json");
        let folder = path.parent().unwrap();
        assert!(folder.is_dir());
        assert_eq!(newest(folder), None);
        for (name, age) in [("12.json", 9), ("3.json", 5), ("3.json.old", 1)] {
            let file = File::create(folder.join(name)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
        }
        assert_eq!(newest(folder), Some(folder.join("3.json")));
        drop(gathered);
        assert!(!folder.exists());
    }
}
