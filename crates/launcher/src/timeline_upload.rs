// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Sends the timeline of a worker to the driver.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use farandole_config::FARANDOLE_PREFIX;
use farandole_registrar::TaskClient;
use farandole_telemetry::OLD_FILE_SUFFIX;
use tempfile::TempDir;

/// Value of the variable that requests a timeline.
const GATHER_VALUE: &str = "GATHER";
/// Kind of the records that carry pieces of a timeline.
const TIMELINE_RECORD_KIND: &str = "timeline";
/// Bytes of a timeline in one piece.
const PIECE_BYTES: usize = 128 << 10;
/// Shortest limit for sending, even if the report of the worker's end has less time: the driver
/// waits for the timeline.
const MIN_SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Pieces after which the sender waits for the registrar: more would push each other out of the
/// outbox.
const MAX_UNCONFIRMED_PIECES: usize = 16;

/// The folder to which a worker writes its timeline. Dropping it removes the folder.
pub(crate) struct WorkerTimelineFolder {
    folder: TempDir,
}

impl WorkerTimelineFolder {
    /// Creates the folder if the worker's variables request a timeline, and sets the variable to
    /// it.
    pub(crate) fn create_folder_if_requested(
        environment: &mut BTreeMap<String, Option<String>>,
    ) -> Option<Self> {
        let name = format!("{FARANDOLE_PREFIX}TIMELINE");
        if environment.get(&name)?.as_deref() != Some(GATHER_VALUE) {
            return None;
        }
        match tempfile::Builder::new()
            .prefix("farandole-timeline-")
            // Other users of the host must not read it, whatever the umask.
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .tempdir()
        {
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

    /// Sends the timeline of the worker's last world, for at most `time`, or five seconds if `time`
    /// is shorter.
    pub(crate) fn send_to_driver(self, client: &TaskClient, time: Duration) {
        let deadline = Instant::now() + time.max(MIN_SEND_TIMEOUT);
        let Some(path) = newest_timeline(self.folder.path()) else { return };
        if let Err(error) = send_timeline_file(client, &path, deadline) {
            tracing::warn!(%error, path = %path.display(), "a timeline did not reach the driver");
        }
    }
}

/// Returns the newest timeline: a worker of an elastic job may have had several ranks.
fn newest_timeline(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.filter_map(Result::ok);
    let files =
        entries.filter(|entry| entry.path().extension().is_some_and(|ending| ending == "json"));
    files
        .max_by_key(|entry| entry.metadata().and_then(|found| found.modified()).ok())
        .map(|entry| entry.path())
}

/// An error of a file or of the registrar.
type UploadFailure = Box<dyn std::error::Error>;

/// Sends the timeline of one rank; an older file with earlier records comes first.
fn send_timeline_file(
    client: &TaskClient,
    path: &Path,
    deadline: Instant,
) -> Result<(), UploadFailure> {
    let mut old = path.as_os_str().to_owned();
    old.push(OLD_FILE_SUFFIX);
    let mut parts = Vec::new();
    for path in [Path::new(&old), path] {
        match File::open(path) {
            Ok(file) => parts.push(file),
            // A short timeline has no older part.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    let mut size = 0;
    for part in &parts {
        size += part.metadata()?.len();
    }
    let mut file: Box<dyn Read> = Box::new(io::empty());
    for part in parts {
        file = Box::new(file.chain(part));
    }
    // A piece that finds the outbox full of lines is dropped, and without the first piece the
    // others are useless.
    client.flush_records(deadline)?;
    let (mut offset, mut sent) = (0, 0);
    while offset < size {
        let mut piece = format!("{{\"offset\":{offset},\"size\":{size}}}\n").into_bytes();
        let read = file.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut piece)?;
        if read == 0 {
            break;
        }
        offset += read as u64;
        client.send_metric(TIMELINE_RECORD_KIND, &piece)?;
        sent += 1;
        if sent % MAX_UNCONFIRMED_PIECES == 0 {
            client.flush_records(deadline)?;
        }
    }
    Ok(client.flush_records(deadline)?)
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
            assert!(WorkerTimelineFolder::create_folder_if_requested(&mut environment).is_none());
            assert_eq!(environment, before);
        }
        let mut environment = BTreeMap::from([(name.clone(), Some(GATHER_VALUE.to_owned()))]);
        let gathered = WorkerTimelineFolder::create_folder_if_requested(&mut environment).unwrap();
        let path = PathBuf::from(environment[&name].clone().unwrap());
        assert_eq!(path.file_name().unwrap(), "{rank}.json");
        let folder = path.parent().unwrap();
        assert!(folder.is_dir());
        assert_eq!(newest_timeline(folder), None);
        for (name, age) in [("12.json", 9), ("3.json", 5), ("3.json.old", 1)] {
            let file = File::create(folder.join(name)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
        }
        assert_eq!(newest_timeline(folder), Some(folder.join("3.json")));
        drop(gathered);
        assert!(!folder.exists());
    }
}
