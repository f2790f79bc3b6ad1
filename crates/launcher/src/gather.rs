// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The timeline of a worker on its way to the driver.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use farandole_config::PREFIX;
use farandole_registrar::Client;
use tempfile::TempDir;

/// Value of the variable that asks for it.
const ASKED: &str = "GATHER";
/// Kind of the records that carry pieces.
const KIND: &str = "timeline";
/// Bytes in a piece.
const PIECE: usize = 128 << 10;
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

    /// Sends what the worker has written, for at most `time`.
    pub(crate) fn send(self, client: &Client, time: Duration) {
        let deadline = Instant::now() + time;
        let Ok(listing) = std::fs::read_dir(self.folder.path()) else { return };
        for path in listing.filter_map(|entry| Some(entry.ok()?.path())) {
            if let Err(error) = send(client, &path, deadline) {
                tracing::warn!(%error, path = %path.display(), "a timeline did not reach the driver");
                return;
            }
        }
    }
}

/// What can go wrong: files, and the registrar.
type Failure = Box<dyn std::error::Error>;

fn send(client: &Client, path: &Path, deadline: Instant) -> Result<(), Failure> {
    let Some(rank) = rank_of(path) else { return Ok(()) };
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    let (mut offset, mut sent) = (0, 0);
    while offset < size {
        let mut piece = format!("{{\"rank\":{rank},\"offset\":{offset},\"size\":{size}}}\n").into_bytes();
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

fn rank_of(path: &Path) -> Option<u32> {
    let stem = PathBuf::from(path.file_stem()?);
    stem.to_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_made_for_who_asks_and_removed_with_its_end() {
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
        drop(gathered);
        assert!(!folder.exists());
        assert_eq!(rank_of(Path::new("/a/12.json")), Some(12));
        assert_eq!(rank_of(Path::new("/a/x.json")), None);
    }
}
