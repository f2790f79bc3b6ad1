// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The meeting of the ranks: rank 0 admits the others, and they find it.

use std::path::PathBuf;
use std::process;
use std::thread;
use std::time::{Duration, Instant};

use farandole_config::{Config, PortRange, environment};
use farandole_registrar::{
    Client, Error as RegistrarError, Options, Registrar, Ticket, host as facts,
};
use farandole_world::{JobId, Rank, TaskId};
use parking_lot::Mutex;

use super::way::{Folders, Way, joined};
use super::{Found, Started, detect, file, identity};
use crate::meeting::{Interrupted, SLICE, identity as of_process};
use crate::{Error, Result, Told};

/// A rank's variable for processes that it starts: the job, the rank, and the process of the rank.
const HOLDER: &str = "FARANDOLE_RANK_HOLDER";
/// Longest attempt to reach the registrar before the caller is asked whether to give up.
const DIAL: Duration = Duration::from_secs(2);
/// Longest time for which the end of this process waits for the registrar.
const FAREWELL: Duration = Duration::from_secs(1);
/// After this long a line says what is waited for.
const SILENCE: Duration = Duration::from_secs(10);
/// Time between two looks for rank 0, at first and at most.
const PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// Interval at which an admitted rank checks whether it is in an earlier start's job.
const GLANCE: Duration = Duration::from_secs(1);

/// A place among ranks that others have started, kept for the life of the process.
struct Held {
    process: u32,
    job: String,
    client: Client,
    /// In rank 0.
    registrar: Option<Registrar>,
}

static HELD: Mutex<Option<Held>> = Mutex::new(None);
/// The registrar of the latest world that was formed by a foreign communicator.
static TOLD: Mutex<Option<(u32, Registrar)>> = Mutex::new(None);

/// A place in a world that a caller has told, kept as long as the caller tells the same one.
struct Entered {
    process: u32,
    ticket: String,
    rank: u32,
    client: Client,
}

static ENTERED: Mutex<Option<Entered>> = Mutex::new(None);

/// A search for the other ranks.
struct Search<'a> {
    config: &'a Config,
    started: &'a Started,
    job: &'a JobId,
    way: &'a Way,
    began: Instant,
    deadline: Instant,
}

/// The connection of the rank that a foreign starter has given this process; `None` in a process
/// without a starter, or that was started alone.
///
/// # Errors
/// What contradicts itself in the environment, what keeps the ranks from meeting, `Interrupted`,
/// `Held`.
pub(crate) fn client(
    config: &Config,
    deadline: Instant,
    interrupted: &mut Interrupted<'_>,
) -> Result<Option<Client>> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let started = match detect(&environment, &read).map_err(|reason| Error::Place { reason })? {
        Found::World(started) => started,
        Found::Alone(warning) => {
            if let Some(warning) = warning {
                tracing::warn!("{warning}");
            }
            return Ok(None);
        }
    };
    let astray = |reason| Error::NoWay { starter: started.starter, size: started.size, reason };
    let job =
        JobId(identity::job(&started, &config.rendezvous, &identity::starter).map_err(astray)?);
    if let Some(client) = held(&started, &job)? {
        return Ok(Some(client));
    }
    let way = Way::of(&started, &job, &config.job_secret, &config.rendezvous, &folders())
        .map_err(astray)?;
    match &way {
        Way::File { folder, private: true, .. } => file::private(folder).map_err(astray)?,
        Way::File { folder, private: false, .. } => file::existing(folder).map_err(astray)?,
        Way::Address { .. } => {}
    }
    let search =
        Search { config, started: &started, job: &job, way: &way, began: Instant::now(), deadline };
    let (client, registrar) = if started.rank == 0 {
        let (client, registrar) = search.take_in(interrupted)?;
        (client, Some(registrar))
    } else {
        (search.find(interrupted)?, None)
    };
    let held = Held { process: process::id(), job: job.0, client: client.clone(), registrar };
    // An earlier one is of another job: the environment has changed.
    let earlier = HELD.lock().replace(held);
    drop(earlier.map(|held| (held.client, held.registrar)));
    Ok(Some(client))
}

/// The connection that this process has for its rank already.
///
/// # Errors
/// `Held` when it is its parent that has the rank.
fn held(started: &Started, job: &JobId) -> Result<Option<Client>> {
    let taken = |holder: String| Error::Held {
        rank: Rank(started.rank),
        holder,
        variable: started.variable,
    };
    if let Some(held) = HELD.lock().as_ref()
        && held.job == job.0
    {
        if held.process != process::id() {
            return Err(taken(format!("process {}", held.process)));
        }
        return Ok(Some(held.client.clone()));
    }
    match environment(HOLDER).as_deref().and_then(|text| text.split_once('|')) {
        Some((theirs, holder)) if theirs == job.0 && holder != of_process() => {
            Err(taken(holder.to_owned()))
        }
        _ => Ok(None),
    }
}

/// Returns a variable to set in this process, by name and value, so that a process that it starts
/// does not take itself for the same rank; nothing if no starter has started this one.
pub fn holder() -> Option<(&'static str, String)> {
    if environment("FARANDOLE_JOB").is_some() {
        return None;
    }
    let Ok(Found::World(started)) =
        detect(&environment, &|path| std::fs::read_to_string(path).ok())
    else {
        return None;
    };
    let rendezvous = Config::from_env().ok()?.rendezvous;
    let job = identity::job(&started, &rendezvous, &identity::starter).ok()?;
    Some((HOLDER, format!("{job}|{}", of_process())))
}

/// Tells the registrar that this process ends well, if a foreign starter has started it: no agent
/// does so, and the others may continue, and form worlds, without it.
pub fn leave() {
    let client = match HELD.lock().as_ref() {
        Some(held) if held.process == process::id() => held.client.clone(),
        _ => return,
    };
    if let Err(error) = client.leave(Instant::now() + FAREWELL) {
        // Rank 0, which holds the registrar, may have ended first.
        tracing::debug!(%error, "the end of this rank was not reported");
    }
}

/// Returns the folders of this user's files on this host.
fn folders() -> Folders {
    let own = rustix::process::geteuid().as_raw();
    let of_session = environment("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|folder| folder.is_dir() && file::private(folder).is_ok());
    let local = of_session.unwrap_or_else(|| std::env::temp_dir().join(format!("farandole-{own}")));
    Folders { local, home: environment("HOME").map(PathBuf::from) }
}

impl Search<'_> {
    /// Rank 0: holds the registrar, and publishes its address until all ranks have come.
    fn take_in(&self, interrupted: &mut Interrupted<'_>) -> Result<(Client, Registrar)> {
        let mut options = Options::from_config(self.started.size, self.config);
        options.job_id = Some(self.job.0.clone());
        let mut secret = None;
        if let Way::Address { secret: given, port, .. } = self.way {
            options.port_range = PortRange { first: *port, last: *port };
            secret = Some(given);
        }
        if self.way.stays_here(self.started) && options.host.is_none() && options.bind.is_empty() {
            options.host = Some("127.0.0.1".to_owned());
        }
        let registrar = Registrar::start_in_order(options, secret)?;
        let written = match self.way {
            Way::File { folder, name, .. } => {
                let text = registrar.ticket().encode();
                Some(file::write(folder, name, &text).map_err(|reason| self.astray(reason))?)
            }
            Way::Address { .. } => None,
        };
        let client = enter(registrar.ticket(), self.started.rank, self.config, self.deadline)?;
        let mut said = false;
        loop {
            match client.await_ranks(self.deadline.min(Instant::now() + SLICE)) {
                Err(RegistrarError::Timeout { what, .. }) if Instant::now() < self.deadline => {
                    self.say_once(&mut said, || format!("{what}; they look for {}", self.way));
                }
                Err(RegistrarError::Timeout { what, .. }) => {
                    // The ranks that have come get the reason, and not only the loss of the
                    // registrar.
                    drop(registrar.abort(&format!("it has waited for {what}")));
                    return Err(self.missed(format!("{what}; they look for {}", self.way)));
                }
                other => {
                    other?;
                    break;
                }
            }
            give_up_if(interrupted)?;
        }
        drop(written);
        Ok((client, registrar))
    }

    /// The others: look for rank 0 until it lets them in, and wait for the rest.
    fn find(&self, interrupted: &mut Interrupted<'_>) -> Result<Client> {
        let (mut pause, mut said) = (PAUSE, false);
        loop {
            let reason = match self.ticket() {
                Ok(Some(ticket)) => {
                    match enter(&ticket, self.started.rank, self.config, self.soon()) {
                        Ok(client) => match self.wait(&client, &ticket, interrupted)? {
                            true => return Ok(client),
                            false => "it was an earlier start's".to_owned(),
                        },
                        Err(
                            error @ (RegistrarError::Version { .. }
                            | RegistrarError::Runtime { .. }),
                        ) => {
                            return Err(error.into());
                        }
                        Err(error) => error.to_string(),
                    }
                }
                Ok(None) => "it is not there".to_owned(),
                Err(reason) => reason,
            };
            give_up_if(interrupted)?;
            let waited = || {
                let at = match (&self.started.first_host, self.started.one_host) {
                    (Some(host), false) => format!(", most likely on {host}"),
                    _ => String::new(),
                };
                format!("rank 0{at}, which was to be found by {}: {reason}", self.way)
            };
            if Instant::now() + pause >= self.deadline {
                return Err(self.missed(waited()));
            }
            self.say_once(&mut said, waited);
            thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// The file of rank 0, if it is this job's.
    ///
    /// # Errors
    /// Why it is not to be believed.
    fn ticket(&self) -> Result<Option<Ticket>, String> {
        let (folder, name) = match self.way {
            Way::File { folder, name, .. } => (folder, name),
            Way::Address { secret, host, port } => {
                return secret
                    .ticket(vec![joined(host, *port)])
                    .map(Some)
                    .map_err(|error| error.to_string());
            }
        };
        let Some(text) = file::read(folder, name)? else { return Ok(None) };
        let ticket: Ticket = text.parse().map_err(|error: RegistrarError| error.to_string())?;
        if ticket.job_id() != self.job {
            return Err(format!("it is of job {}", ticket.job_id()));
        }
        Ok(Some(ticket))
    }

    /// Waits for the other ranks; false when the ticket has been replaced meanwhile, as an earlier
    /// start's is.
    fn wait(
        &self,
        client: &Client,
        ticket: &Ticket,
        interrupted: &mut Interrupted<'_>,
    ) -> Result<bool> {
        let (mut looked, mut said) = (Instant::now(), false);
        loop {
            match client.await_ranks(self.deadline.min(Instant::now() + SLICE)) {
                Err(RegistrarError::Timeout { what, .. }) if Instant::now() < self.deadline => {
                    self.say_once(&mut said, || what);
                }
                Err(RegistrarError::Timeout { what, .. }) => return Err(self.missed(what)),
                Err(
                    RegistrarError::Aborted { reason, .. } | RegistrarError::Lost { reason, .. },
                ) => {
                    return Err(self
                        .missed(format!("all ranks to come, and rank 0 has given up: {reason}")));
                }
                other => return Ok(other.map(|_| true)?),
            }
            give_up_if(interrupted)?;
            if looked.elapsed() >= GLANCE {
                looked = Instant::now();
                let replaced = |now: Ticket| now.encode() != ticket.encode();
                if self.ticket().ok().flatten().is_some_and(replaced) {
                    return Ok(false);
                }
            }
        }
    }

    fn soon(&self) -> Instant {
        self.deadline.min(Instant::now() + DIAL)
    }

    fn say_once(&self, said: &mut bool, what: impl FnOnce() -> String) {
        if !*said && self.began.elapsed() >= SILENCE {
            *said = true;
            let Started { rank, size, starter, .. } = self.started;
            tracing::warn!("rank {rank} of {size}, started by {starter}, waits for {}", what());
        }
    }

    fn astray(&self, reason: String) -> Error {
        Error::NoWay { starter: self.started.starter, size: self.started.size, reason }
    }

    fn missed(&self, what: String) -> Error {
        Error::Missed {
            rank: Rank(self.started.rank),
            size: self.started.size,
            starter: self.started.starter,
            what,
            elapsed: self.began.elapsed(),
        }
    }
}

/// Connects as a rank, registers, and shows from then on that it lives.
fn enter(
    ticket: &Ticket,
    rank: u32,
    config: &Config,
    deadline: Instant,
) -> Result<Client, RegistrarError> {
    let client = Client::connect(ticket, TaskId(rank), None, deadline)?;
    client.register(0, &facts::facts(), deadline)?;
    // No agent can end this process: its links see a lost peer, and calls of the registrar return
    // the reason.
    client.watch(2 * config.peer_timeout, drop);
    Ok(client)
}

/// Holds the registrar of a world whose ranks an MPI communicator has given out, and returns its
/// ticket, which the communicator can distribute. It lives until this process holds the next one.
///
/// # Errors
/// Those of [`Registrar::start`].
pub fn host(size: u32, one_host: bool) -> Result<String> {
    let config = Config::from_env()?;
    let mut options = Options::from_config(size, &config);
    if one_host && options.host.is_none() && options.bind.is_empty() {
        options.host = Some("127.0.0.1".to_owned());
    }
    let registrar = Registrar::start_in_order(options, None)?;
    let ticket = registrar.ticket().encode();
    let earlier = TOLD.lock().replace((process::id(), registrar));
    drop(earlier);
    Ok(ticket)
}

/// The connection of the rank that a ticket's job has for this process.
///
/// # Errors
/// What keeps it out, `Interrupted`.
pub(crate) fn as_told(
    told: &Told,
    config: &Config,
    deadline: Instant,
    interrupted: &mut Interrupted<'_>,
) -> Result<Client> {
    let Told { ticket: text, rank } = told;
    if let Some(entered) = ENTERED.lock().as_ref().filter(|entered| entered.is(told)) {
        return Ok(entered.client.clone());
    }
    let ticket: Ticket = text.parse()?;
    let client = loop {
        match enter(&ticket, *rank, config, deadline.min(Instant::now() + DIAL)) {
            Err(RegistrarError::Unreachable { .. }) if Instant::now() < deadline => {}
            other => break other?,
        }
        give_up_if(interrupted)?;
    };
    let entered = Entered {
        process: process::id(),
        ticket: text.clone(),
        rank: *rank,
        client: client.clone(),
    };
    // Dropped behind the lock: the end of a connection may take a moment.
    let earlier = ENTERED.lock().replace(entered);
    drop(earlier.map(|entered| entered.client));
    Ok(client)
}

impl Entered {
    fn is(&self, told: &Told) -> bool {
        self.process == process::id() && self.ticket == told.ticket && self.rank == told.rank
    }
}

fn give_up_if(interrupted: &mut Interrupted<'_>) -> Result<()> {
    if interrupted() { Err(Error::Interrupted) } else { Ok(()) }
}
