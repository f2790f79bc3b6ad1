// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The search for rank 0: rank 0 admits the other ranks, and they find it.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process;
use std::thread;
use std::time::{Duration, Instant};

use farandole_config::{Config, PortRange, environment_variable};
use farandole_registrar::{
    Error as RegistrarError, Registrar, RegistrarOptions, TaskClient, Ticket,
    local_host_facts as facts,
};
use farandole_world::{JobId, Rank, TaskId};
use parking_lot::Mutex;

use super::rank_zero_rendezvous::{HOME_FOLDER, RankZeroRendezvous, TicketFolders, join_host_port};
use super::{DetectedRank, LaunchDetection, detect_launch, job_identity, ticket_file};
use crate::registrar_rendezvous::{
    INTERRUPT_POLL_INTERVAL, InterruptCheck, process_identity as of_process,
};
use crate::{AssignedRank, Error, Result};

/// A rank's variable for processes that it starts: the job, the rank, and the rank's process.
const RANK_HOLDER_VARIABLE: &str = "FARANDOLE_RANK_HOLDER";
/// Longest attempt to reach the registrar before the caller is asked whether to give up.
// An attempt cannot be interrupted, and Ctrl-C must work within seconds (SE-3).
const REGISTRAR_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time for which the end of this process waits for the registrar.
const LEAVE_REPORT_TIMEOUT: Duration = Duration::from_secs(1);
/// Waiting time after which a warning names the reason for the wait.
const WAIT_WARNING_DELAY: Duration = Duration::from_secs(10);
/// Shortest and longest time between two searches for rank 0.
// Short at first, because ranks usually start together; later searches spare a shared file system.
const MIN_SEARCH_INTERVAL: Duration = Duration::from_millis(10);
const MAX_SEARCH_INTERVAL: Duration = Duration::from_millis(500);
/// Interval at which an admitted rank checks whether it is in an earlier start's job.
// Only a ticket of an earlier start is ever replaced, so this need not be fast.
const TICKET_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A rank that another launcher gave to this process, held until the process ends.
struct HeldRank {
    process: u32,
    job: String,
    client: TaskClient,
    /// The registrar, in rank 0.
    registrar: Option<Registrar>,
}

static HELD_RANK: Mutex<Option<HeldRank>> = Mutex::new(None);
/// The registrar of the latest world whose ranks an MPI communicator assigned.
static HOSTED_REGISTRAR: Mutex<Option<(u32, Registrar)>> = Mutex::new(None);

/// A connection for a rank that the caller assigned, kept as long as the caller assigns the same
/// one.
struct AssignedConnection {
    process: u32,
    ticket: String,
    rank: u32,
    client: TaskClient,
}

static ASSIGNED_CONNECTION: Mutex<Option<AssignedConnection>> = Mutex::new(None);

/// One rank's search for the other ranks.
struct RankZeroSearch<'a> {
    config: &'a Config,
    detected: &'a DetectedRank,
    job: &'a JobId,
    rendezvous: &'a RankZeroRendezvous,
    started_at: Instant,
    deadline: Instant,
}

/// Connects with the rank that another launcher gave to this process; `None` if no launcher started
/// it, or if it was started alone.
///
/// # Errors
/// `InvalidPlacement` if the environment contradicts itself, `NoRendezvous`, `RendezvousTimeout`,
/// `Interrupted`, `RankHeldByParent`; the errors of the registrar.
/// `Held`.
pub(crate) fn connect_detected_rank(
    config: &Config,
    deadline: Instant,
    interrupted: &mut InterruptCheck<'_>,
) -> Result<Option<TaskClient>> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let started = match detect_launch(&environment_variable, &read)
        .map_err(|reason| Error::InvalidPlacement { reason })?
    {
        LaunchDetection::World(started) => started,
        LaunchDetection::Alone(warning) => {
            if let Some(warning) = warning {
                tracing::warn!("{warning}");
            }
            return Ok(None);
        }
    };
    let astray =
        |reason| Error::NoRendezvous { starter: started.launcher, size: started.size, reason };
    let job = JobId(
        job_identity::job_name(&started, &config.rendezvous, &job_identity::launcher_process)
            .map_err(astray)?,
    );
    if let Some(client) = client_of_held_rank(&started, &job)? {
        return Ok(Some(client));
    }
    let way = RankZeroRendezvous::select_rendezvous(
        &started,
        &job,
        &config.job_secret,
        &config.rendezvous,
        &ticket_folders(),
    )
    .map_err(astray)?;
    match &way {
        RankZeroRendezvous::File { folders, private: true, .. } if started.rank == 0 => {
            // Checked before the registrar starts, so that a wrong setting fails at once on rank 0.
            ticket_file::first_private_folder(folders).map(drop).map_err(astray)?
        }
        RankZeroRendezvous::File { folders, private: false, .. } => {
            let check = |folder: &PathBuf| ticket_file::check_existing_folder(folder);
            folders.iter().try_for_each(check).map_err(astray)?
        }
        RankZeroRendezvous::File { .. } | RankZeroRendezvous::Address { .. } => {}
    }
    let search = RankZeroSearch {
        config,
        detected: &started,
        job: &job,
        rendezvous: &way,
        started_at: Instant::now(),
        deadline,
    };
    let (client, registrar) = if started.rank == 0 {
        let (client, registrar) = search.admit_ranks(interrupted)?;
        (client, Some(registrar))
    } else {
        (search.find_rank_zero(interrupted)?, None)
    };
    let held = HeldRank { process: process::id(), job: job.0, client: client.clone(), registrar };
    // The earlier one belongs to another job: the environment has changed.
    // The old value is dropped after the lock: closing a registrar takes up to seconds.
    let earlier = HELD_RANK.lock().replace(held);
    drop(earlier.map(|held| (held.client, held.registrar)));
    Ok(Some(client))
}

/// Returns the connection that this process already has for its rank.
///
/// # Errors
/// `RankHeldByParent` when another process, such as the parent, has the rank.
fn client_of_held_rank(started: &DetectedRank, job: &JobId) -> Result<Option<TaskClient>> {
    let taken = |holder: String| Error::RankHeldByParent {
        rank: Rank(started.rank),
        holder,
        variable: started.rank_variable,
    };
    if let Some(held) = HELD_RANK.lock().as_ref()
        && held.job == job.0
    {
        if held.process != process::id() {
            return Err(taken(format!("process {}", held.process)));
        }
        return Ok(Some(held.client.clone()));
    }
    match environment_variable(RANK_HOLDER_VARIABLE)
        .as_deref()
        .and_then(|text| text.split_once('|'))
    {
        Some((theirs, holder)) if theirs == job.0 && holder != of_process() => {
            Err(taken(holder.to_owned()))
        }
        _ => Ok(None),
    }
}

/// Returns a variable to set in this process, by name and value, so that its child processes do not
/// take the same rank; `None` if no other launcher started this process.
pub fn rank_not_inherited_variable() -> Option<(&'static str, String)> {
    // The registrar of our own launcher refuses a second process for a rank.
    if environment_variable("FARANDOLE_JOB").is_some() {
        return None;
    }
    let Ok(LaunchDetection::World(started)) =
        detect_launch(&environment_variable, &|path| std::fs::read_to_string(path).ok())
    else {
        return None;
    };
    let rendezvous = Config::from_env().ok()?.rendezvous;
    let job =
        job_identity::job_name(&started, &rendezvous, &job_identity::launcher_process).ok()?;
    Some((RANK_HOLDER_VARIABLE, format!("{job}|{}", of_process())))
}

/// Reports to the registrar that this process ends without an error, if another launcher started
/// it: there is no agent to report it, and the other ranks may continue and form worlds without it.
pub fn report_orderly_exit() {
    let client = match HELD_RANK.lock().as_ref() {
        Some(held) if held.process == process::id() => held.client.clone(),
        _ => return,
    };
    if let Err(error) = client.report_own_success(Instant::now() + LEAVE_REPORT_TIMEOUT) {
        // Rank 0, which holds the registrar, may have ended first.
        tracing::debug!(%error, "the end of this rank was not reported");
    }
}

/// Returns whether a path is a folder, or cannot be looked up now: such a folder may exist.
fn may_be_folder(path: &Path) -> bool {
    match std::fs::metadata(path) {
        Ok(found) => found.is_dir(),
        Err(error) => !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
    }
}

/// Returns the folders in which this user's ranks exchange tickets.
fn ticket_folders() -> TicketFolders {
    let own = rustix::process::geteuid().as_raw();
    let home = environment_variable("HOME").map(PathBuf::from).filter(|home| home.is_absolute());
    // The session's folders are not created here.
    let session = environment_variable("XDG_RUNTIME_DIR").map(PathBuf::from);
    let sessions = session.into_iter().chain([PathBuf::from(format!("/run/user/{own}"))]);
    let mut local: Vec<PathBuf> = sessions.filter(|folder| may_be_folder(folder)).collect();
    local.push(std::env::temp_dir().join(format!("farandole-{own}")));
    local.extend(home.as_ref().map(|home| home.join(HOME_FOLDER)));
    local.dedup();
    TicketFolders { local, home }
}

impl RankZeroSearch<'_> {
    /// Runs as rank 0: starts the registrar, and publishes its address until all ranks have
    /// registered.
    fn admit_ranks(&self, interrupted: &mut InterruptCheck<'_>) -> Result<(TaskClient, Registrar)> {
        let mut options = RegistrarOptions::from_config(self.detected.size, self.config);
        options.job_id = Some(self.job.0.clone());
        let mut secret = None;
        if let RankZeroRendezvous::Address { secret: given, port, .. } = self.rendezvous {
            options.port_range = PortRange { first: *port, last: *port };
            secret = Some(given);
        }
        if self.rendezvous.is_local_only(self.detected)
            && options.host.is_none()
            && options.bind.is_empty()
        {
            options.host = Some("127.0.0.1".to_owned());
        }
        let registrar = Registrar::start_with_ranked_tasks(options, secret)?;
        let written = match self.rendezvous {
            RankZeroRendezvous::File { folders, private, name } => {
                let text = registrar.ticket().encode_text();
                let written = if *private {
                    ticket_file::write_private_ticket(folders, name, &text)
                } else {
                    folders.first().map_or_else(
                        || Err("there is no folder for it".to_owned()),
                        |folder| ticket_file::write_ticket(folder, name, &text),
                    )
                };
                Some(written.map_err(|reason| self.no_rendezvous_error(reason))?)
            }
            RankZeroRendezvous::Address { .. } => None,
        };
        let client = connect_and_register(
            registrar.ticket(),
            self.detected.rank,
            self.config,
            self.deadline,
        )?;
        let mut said = false;
        loop {
            match client.await_ranked_assignment(
                self.deadline.min(Instant::now() + INTERRUPT_POLL_INTERVAL),
            ) {
                Err(RegistrarError::Timeout { what, .. }) if Instant::now() < self.deadline => {
                    self.warn_once(&mut said, || {
                        format!("{what}; they look for {}", self.rendezvous)
                    });
                }
                Err(RegistrarError::Timeout { what, .. }) => {
                    // Report the reason to the registered ranks: otherwise they would only see that
                    // the registrar is gone.
                    drop(registrar.abort_job(&format!("it has waited for {what}")));
                    return Err(
                        self.timeout_error(format!("{what}; they look for {}", self.rendezvous))
                    );
                }
                other => {
                    other?;
                    break;
                }
            }
            check_interrupted(interrupted)?;
        }
        // All ranks have the ticket, so the file, which is a secret, is removed.
        drop(written);
        Ok((client, registrar))
    }

    /// Runs as another rank: looks for rank 0 until it admits this rank, and waits for the others.
    fn find_rank_zero(&self, interrupted: &mut InterruptCheck<'_>) -> Result<TaskClient> {
        let (mut pause, mut said) = (MIN_SEARCH_INTERVAL, false);
        loop {
            let reason = match self.rank_zero_ticket() {
                Ok(Some(ticket)) => {
                    match connect_and_register(
                        &ticket,
                        self.detected.rank,
                        self.config,
                        self.connect_deadline(),
                    ) {
                        Ok(client) => match self.wait_for_ranks(&client, &ticket, interrupted)? {
                            true => return Ok(client),
                            false => "it was an earlier start's".to_owned(),
                        },
                        Err(
                            // Waiting does not change the installed version.
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
            check_interrupted(interrupted)?;
            let waited = || {
                let at = match (&self.detected.first_host, self.detected.one_host) {
                    (Some(host), false) => format!(", most likely on {host}"),
                    _ => String::new(),
                };
                format!("rank 0{at}, which was to be found by {}: {reason}", self.rendezvous)
            };
            if Instant::now() + pause >= self.deadline {
                return Err(self.timeout_error(waited()));
            }
            self.warn_once(&mut said, waited);
            thread::sleep(pause);
            pause = (pause * 2).min(MAX_SEARCH_INTERVAL);
        }
    }

    /// Returns the ticket of rank 0, if it is this job's.
    ///
    /// # Errors
    /// The reason why the file cannot be trusted.
    fn rank_zero_ticket(&self) -> Result<Option<Ticket>, String> {
        let text = match self.rendezvous {
            RankZeroRendezvous::File { folders, private, name } => {
                ticket_file::read_newest_ticket(folders, *private, name)?
            }
            RankZeroRendezvous::Address { secret, host, port } => {
                return secret
                    .make_ticket(vec![join_host_port(host, *port)])
                    .map(Some)
                    .map_err(|error| error.to_string());
            }
        };
        let Some(text) = text else { return Ok(None) };
        let ticket: Ticket = text.parse().map_err(|error: RegistrarError| error.to_string())?;
        // A shared folder may have files of other jobs.
        if ticket.job_id() != self.job {
            return Err(format!("it is of job {}", ticket.job_id()));
        }
        Ok(Some(ticket))
    }

    /// Waits for the other ranks. Returns false if the ticket was replaced meanwhile: it was left
    /// by an earlier start.
    fn wait_for_ranks(
        &self,
        client: &TaskClient,
        ticket: &Ticket,
        interrupted: &mut InterruptCheck<'_>,
    ) -> Result<bool> {
        let (mut looked, mut said) = (Instant::now(), false);
        loop {
            match client.await_ranked_assignment(
                self.deadline.min(Instant::now() + INTERRUPT_POLL_INTERVAL),
            ) {
                Err(RegistrarError::Timeout { what, .. }) if Instant::now() < self.deadline => {
                    self.warn_once(&mut said, || what);
                }
                Err(RegistrarError::Timeout { what, .. }) => return Err(self.timeout_error(what)),
                Err(
                    RegistrarError::Aborted { reason, .. } | RegistrarError::Lost { reason, .. },
                ) => {
                    return Err(self.timeout_error(format!(
                        "all ranks to come, and rank 0 has given up: {reason}"
                    )));
                }
                other => return Ok(other.map(|_| true)?),
            }
            check_interrupted(interrupted)?;
            if looked.elapsed() >= TICKET_CHECK_INTERVAL {
                looked = Instant::now();
                let replaced = |now: Ticket| now.encode_text() != ticket.encode_text();
                if self.rank_zero_ticket().ok().flatten().is_some_and(replaced) {
                    return Ok(false);
                }
            }
        }
    }

    fn connect_deadline(&self) -> Instant {
        self.deadline.min(Instant::now() + REGISTRAR_CONNECT_TIMEOUT)
    }

    fn warn_once(&self, said: &mut bool, what: impl FnOnce() -> String) {
        if !*said && self.started_at.elapsed() >= WAIT_WARNING_DELAY {
            *said = true;
            let DetectedRank { rank, size, launcher: starter, .. } = self.detected;
            tracing::warn!("rank {rank} of {size}, started by {starter}, waits for {}", what());
        }
    }

    fn no_rendezvous_error(&self, reason: String) -> Error {
        Error::NoRendezvous { starter: self.detected.launcher, size: self.detected.size, reason }
    }

    fn timeout_error(&self, what: String) -> Error {
        Error::RendezvousTimeout {
            rank: Rank(self.detected.rank),
            size: self.detected.size,
            starter: self.detected.launcher,
            what,
            elapsed: self.started_at.elapsed(),
        }
    }
}

/// Connects as a rank, registers, and sends heartbeats from then on.
fn connect_and_register(
    ticket: &Ticket,
    rank: u32,
    config: &Config,
    deadline: Instant,
) -> Result<TaskClient, RegistrarError> {
    let client = TaskClient::connect(ticket, TaskId(rank), None, deadline)?;
    client.register_task(0, &facts::host_facts(), deadline)?;
    // No agent can end this process: its links notice a lost peer, and calls of the registrar
    // return the reason.
    client.start_heartbeats(2 * config.peer_timeout, drop);
    Ok(client)
}

/// Starts the registrar of a world whose ranks an MPI communicator assigns, and returns its ticket,
/// which the communicator can distribute. The registrar runs until this process starts the next
/// one.
///
/// # Errors
/// Like [`Registrar::start_job`].
pub fn host_registrar(size: u32, one_host: bool) -> Result<String> {
    let config = Config::from_env()?;
    let mut options = RegistrarOptions::from_config(size, &config);
    if one_host && options.host.is_none() && options.bind.is_empty() {
        options.host = Some("127.0.0.1".to_owned());
    }
    let registrar = Registrar::start_with_ranked_tasks(options, None)?;
    let ticket = registrar.ticket().encode_text();
    let earlier = HOSTED_REGISTRAR.lock().replace((process::id(), registrar));
    drop(earlier);
    Ok(ticket)
}

/// Connects with the rank that the caller assigned in the job of the ticket.
///
/// # Errors
/// The reason why the registrar refuses the rank; `Interrupted`.
pub(crate) fn connect_assigned_rank(
    assigned_rank: &AssignedRank,
    config: &Config,
    deadline: Instant,
    interrupted: &mut InterruptCheck<'_>,
) -> Result<TaskClient> {
    let AssignedRank { ticket: text, rank } = assigned_rank;
    if let Some(entered) = ASSIGNED_CONNECTION
        .lock()
        .as_ref()
        .filter(|entered| entered.matches_assignment(assigned_rank))
    {
        return Ok(entered.client.clone());
    }
    let ticket: Ticket = text.parse()?;
    let client = loop {
        match connect_and_register(
            &ticket,
            *rank,
            config,
            deadline.min(Instant::now() + REGISTRAR_CONNECT_TIMEOUT),
        ) {
            Err(RegistrarError::Unreachable { .. }) if Instant::now() < deadline => {}
            other => break other?,
        }
        check_interrupted(interrupted)?;
    };
    let entered = AssignedConnection {
        process: process::id(),
        ticket: text.clone(),
        rank: *rank,
        client: client.clone(),
    };
    // Dropped after the lock is released: closing a connection may take a moment.
    let earlier = ASSIGNED_CONNECTION.lock().replace(entered);
    drop(earlier.map(|entered| entered.client));
    Ok(client)
}

impl AssignedConnection {
    fn matches_assignment(&self, assigned_rank: &AssignedRank) -> bool {
        self.process == process::id()
            && self.ticket == assigned_rank.ticket
            && self.rank == assigned_rank.rank
    }
}

fn check_interrupted(interrupted: &mut InterruptCheck<'_>) -> Result<()> {
    if interrupted() { Err(Error::Interrupted) } else { Ok(()) }
}
