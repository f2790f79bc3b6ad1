// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One process, one rank: what a worker starts inherits its variables, and must not take its place. And what each rank
//! asks for, so that ranks that ask for different worlds hear of it instead of waiting for each other.

use std::fs;
use std::process;
use std::time::Instant;

use farandole_registrar::{Client, Error as RegistrarError};
use farandole_world::{Rank, World};

use crate::meeting::{Interrupted, SLICE};
use crate::{Error, Result};

/// What a rank that asks for no part asks for.
const ALL: &str = "all ranks";

/// Takes the rank for this process, and says which world it asks for.
///
/// # Errors
/// `Taken` when another process came first; what the registrar says.
pub(crate) fn take(client: &Client, session: u64, whole: &World, part: Option<&[Rank]>) -> Result<()> {
    let (key, holder) = (key(session, whole.rank), identity());
    let own = format!("{holder}\n{}", asked(part));
    let held = client.put_if_absent(&key, own.as_bytes())?;
    let (theirs, wish) = read(&held);
    if theirs != holder {
        return Err(Error::Taken { rank: whole.rank, holder: theirs });
    }
    if wish != asked(part) {
        // This process tried before, with other wishes.
        client.put(&key, own.as_bytes())?;
    }
    if part.is_some() {
        let own = format!("{}\n{}", whole.rank, asked(part));
        let held = client.put_if_absent(&parted(session), own.as_bytes())?;
        if held != own.as_bytes() && !stands(client, session, &held)? {
            client.put(&parted(session), own.as_bytes())?;
        }
    }
    Ok(())
}

/// Whether a rank still asks for the part that it was noted for: it may have tried again with other wishes.
fn stands(client: &Client, session: u64, noted: &[u8]) -> Result<bool> {
    let (rank, wish) = read(noted);
    let rank = Rank(rank.parse().unwrap_or_default());
    match client.get(&key(session, rank), Instant::now()) {
        Err(RegistrarError::Timeout { .. }) => Ok(false),
        other => Ok(read(&other?).1 == wish),
    }
}

/// Waits for what every rank of the part asks for.
///
/// # Errors
/// `Worlds` when one asks for something else; `Interrupted`; what the registrar says.
pub(crate) fn compare(
    client: &Client,
    session: u64,
    whole: &World,
    part: &[Rank],
    deadline: Instant,
    interrupted: &mut Interrupted<'_>,
) -> Result<()> {
    for rank in part {
        let theirs = loop {
            match client.get(&key(session, *rank), deadline.min(Instant::now() + SLICE)) {
                Err(RegistrarError::Timeout { .. }) if Instant::now() < deadline => {
                    hopeless(client, session, whole.rank, Some(part))?;
                }
                other => break read(&other?).1,
            }
            if interrupted() {
                return Err(Error::Interrupted);
            }
        };
        same(*rank, theirs, whole.rank, &asked(Some(part)))?;
    }
    Ok(())
}

/// Looks whether there is a reason for which a rank waits in vain, for all or for the ranks of its part.
///
/// # Errors
/// `Ended`, `Worlds`; what the registrar says.
pub(crate) fn hopeless(client: &Client, session: u64, own: Rank, part: Option<&[Rank]>) -> Result<()> {
    if part.is_none() {
        contradiction(client, session, own)?;
    }
    match client.ended(part)? {
        None => Ok(()),
        Some((rank, host)) => Err(Error::Ended { rank, host }),
    }
}

/// Looks whether some rank asks for a part, on behalf of one that waits for all.
///
/// # Errors
/// `Worlds` when one does; what the registrar says.
fn contradiction(client: &Client, session: u64, own: Rank) -> Result<()> {
    match client.get(&parted(session), Instant::now()) {
        Err(RegistrarError::Timeout { .. }) => Ok(()),
        other => {
            let noted = other?;
            if !stands(client, session, &noted)? {
                return Ok(());
            }
            let (rank, theirs) = read(&noted);
            same(Rank(rank.parse().unwrap_or_default()), theirs, own, ALL)
        }
    }
}

fn same(rank: Rank, theirs: String, own: Rank, ours: &str) -> Result<()> {
    if theirs == ours {
        return Ok(());
    }
    Err(Error::Worlds { rank, theirs, own, ours: ours.to_owned() })
}

fn key(session: u64, rank: Rank) -> String {
    format!("session/{session}/rank/{rank}")
}

fn parted(session: u64) -> String {
    format!("session/{session}/part")
}

fn asked(part: Option<&[Rank]>) -> String {
    let Some(part) = part else { return ALL.to_owned() };
    let ranks: Vec<String> = part.iter().map(ToString::to_string).collect();
    format!("ranks {}", ranks.join(", "))
}

fn read(value: &[u8]) -> (String, String) {
    let text = String::from_utf8_lossy(value);
    let (head, tail) = text.split_once('\n').unwrap_or((&text, ""));
    (head.to_owned(), tail.to_owned())
}

/// Tells this process from every other of its host: a number is used again one day, but not at the same tick. A program
/// that replaces itself (`exec`) stays the same process.
pub(crate) fn identity() -> String {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Counting starts behind the name, which may hold anything: field 3 is the state, field 22 the start.
    let started = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(19));
    format!("process {} (started at tick {})", process::id(), started.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_stays_the_same() {
        assert_eq!(identity(), identity());
        assert!(identity().starts_with(&format!("process {} (started at tick ", process::id())));
    }

    #[test]
    fn what_was_asked_for_survives_its_text() {
        let wish = asked(Some(&[Rank(0), Rank(2)]));
        assert_eq!(wish, "ranks 0, 2");
        assert_eq!(read(format!("process 7\n{wish}").as_bytes()), ("process 7".to_owned(), wish));
        assert!(same(Rank(1), ALL.to_owned(), Rank(0), &asked(None)).is_ok());
        assert!(same(Rank(1), ALL.to_owned(), Rank(0), &asked(Some(&[Rank(0)]))).is_err());
    }
}
