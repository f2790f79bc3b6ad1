// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The agent of a whole host: receives its order from a launcher on another host, and owns the
//! workers of this host.

use std::io::{self, BufReader, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use farandole_registrar::Ticket;
use farandole_world::TaskId;
use parking_lot::Mutex;

use crate::agent::{Agent, AgentTask, OutputTarget};
use crate::agent_protocol::{
    AGENT_GREETING, AgentFrameKind, AgentHello, AgentLaunchRequest, TaskEndMessage, read_frame,
    write_frame, write_json_frame,
};
use crate::error::{Error, Result};

/// Longest single wait for an agent; its end is noticed at once.
const AGENT_WAIT_INTERVAL: Duration = Duration::from_secs(60);

/// Serves one launcher: sends its identity, reads an order from `input`, runs its workers, and
/// writes each outcome to `output`. Ends the workers when `input` asks for it. When `input` ends,
/// ends the workers, too, unless the registrar still answers or the launcher may be restarted: then
/// the workers end when the registrar asks for it, or after the registrar has been gone for too
/// long. Returns when all workers have ended.
///
/// # Errors
/// `System` when the launcher's messages cannot be parsed.
pub fn serve_one_launcher(
    hello: &AgentHello,
    input: impl Read + Send + 'static,
    mut output: impl Write + Send,
) -> Result<()> {
    let lost = |source| Error::System { what: "the conversation with the launcher", source };
    let mut input = BufReader::new(input);
    // Before the hello: the launcher skips the output of a login shell up to this line.
    writeln!(output, "{AGENT_GREETING}").map_err(lost)?;
    write_json_frame(&mut output, AgentFrameKind::Hello, hello).map_err(lost)?;
    let Some((order, payload)) = read_launch_request(&mut input).map_err(lost)? else {
        // The launcher ended before it sent an order.
        return Ok(());
    };
    if let Some(folder) = &order.folder
        && let Err(error) = std::env::set_current_dir(folder)
    {
        tracing::warn!(%error, folder, "the launcher's working directory cannot be used here, \
                                        workers start where the agent was started");
    }
    let agents = start_agents(&order, payload)?;
    let listening = Arc::clone(&agents);
    let lasting = order.outage_ms > 0;
    // Detached: the thread waits for a launcher that may outlive this host's workers.
    drop(
        std::thread::Builder::new()
            .name("farandole-orders".to_owned())
            .spawn(move || apply_launcher_frames(&mut input, &listening, lasting))
            .map_err(|source| Error::System { what: "starting a thread", source })?,
    );
    let output = Mutex::new(output);
    std::thread::scope(|scope| {
        for (task, agent) in agents.iter() {
            let output = &output;
            scope.spawn(move || {
                let outcome = loop {
                    if let Some(outcome) = agent.wait_for_outcome(AGENT_WAIT_INTERVAL) {
                        break outcome;
                    }
                };
                // A launcher that is gone receives no outcomes.
                drop(write_outcome(&mut *output.lock(), *task, outcome));
            });
        }
    });
    Ok(())
}

fn read_launch_request(
    input: &mut impl Read,
) -> io::Result<Option<(AgentLaunchRequest, Option<Vec<u8>>)>> {
    let unexpected = || io::Error::new(io::ErrorKind::InvalidData, "an order was expected");
    let order: AgentLaunchRequest = match read_frame(input)? {
        None => return Ok(None),
        Some((AgentFrameKind::Order, body)) => {
            serde_json::from_slice(&body).map_err(io::Error::other)?
        }
        Some(_) => return Err(unexpected()),
    };
    if !order.payload {
        return Ok(Some((order, None)));
    }
    match read_frame(input)? {
        None => Ok(None),
        Some((AgentFrameKind::Payload, payload)) => Ok(Some((order, Some(payload)))),
        Some(_) => Err(unexpected()),
    }
}

fn start_agents(
    order: &AgentLaunchRequest,
    payload: Option<Vec<u8>>,
) -> Result<Arc<Vec<(TaskId, Agent)>>> {
    let ticket: Ticket = order
        .ticket
        .parse()
        .map_err(|source| Error::Registrar { task: TaskId(0), source: Box::new(source) })?;
    let start = |number: &u32| {
        let agent = Agent::spawn_thread(AgentTask {
            ticket: ticket.clone(),
            task: TaskId(*number),
            host: None,
            attempt: 0,
            command: order.command.clone(),
            environment: order.environment.clone(),
            payload: payload.clone(),
            collect_result: order.collect_result,
            elastic: order.elastic,
            wait_for_peers: false,
            output: OutputTarget::Registrar,
            start_timeout: Duration::from_millis(order.start_timeout_ms),
            peer_timeout: Duration::from_millis(order.peer_timeout_ms),
            outage: Duration::from_millis(order.outage_ms),
        })?;
        Ok((TaskId(*number), agent))
    };
    order.tasks.iter().map(start).collect::<Result<Vec<_>>>().map(Arc::new)
}

/// Carries out the launcher's frames. The end of the stream ends the workers, too, unless the
/// registrar still answers or the launcher may be restarted.
fn apply_launcher_frames(input: &mut impl Read, agents: &[(TaskId, Agent)], lasting: bool) {
    let all = |act: &dyn Fn(&Agent)| agents.iter().for_each(|(_, agent)| act(agent));
    loop {
        match read_frame(input) {
            Ok(Some((AgentFrameKind::Interrupt, _))) => {
                all(&|agent| agent.interrupt_worker("interrupted"))
            }
            Ok(Some((AgentFrameKind::Terminate, _))) => {
                all(&|agent| agent.cancel_worker("interrupted"))
            }
            Ok(Some((AgentFrameKind::Kill, _))) => all(&|agent| agent.kill_worker("interrupted")),
            Ok(Some(_)) => {}
            Ok(None) | Err(_) if lasting => return,
            Ok(None) | Err(_) => return all(&Agent::end_worker_if_registrar_silent),
        }
    }
}

fn write_outcome(
    output: &mut (impl Write + ?Sized),
    task: TaskId,
    mut outcome: Result<crate::WorkerOutcome>,
) -> io::Result<()> {
    write_json_frame(output, AgentFrameKind::Ended, &TaskEndMessage::new(task, &outcome))?;
    if let Ok(outcome) = &mut outcome
        && let Some(result) = outcome.result.take()
    {
        write_frame(output, AgentFrameKind::Result, &result)?;
    }
    Ok(())
}
