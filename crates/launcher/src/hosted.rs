// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The agent of a whole host: takes its order from a launcher elsewhere and owns the host's
//! workers.

use std::io::{self, BufReader, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use farandole_registrar::Ticket;
use farandole_world::TaskId;
use parking_lot::Mutex;

use crate::agent::{Agent, Output, Task};
use crate::error::{Error, Result};
use crate::orders::{Ended, GREETING, Hello, Kind, Order, read, write, write_json};

/// Longest look at an agent; its end is noticed at once.
const SLICE: Duration = Duration::from_secs(60);

/// Serves one launcher: sends its identity, takes an order from `input`, runs its workers, and
/// writes each outcome to `output`. The workers are ended when `input` says so. They are also ended
/// when `input` ends, unless the launcher may be started again: then they end when the registrar
/// says so, or after it has been gone for too long. Returns when all have ended.
///
/// # Errors
/// `System` when the launcher says nothing that can be understood.
pub fn serve_host(
    hello: &Hello,
    input: impl Read + Send + 'static,
    mut output: impl Write + Send,
) -> Result<()> {
    let lost = |source| Error::System { what: "the conversation with the launcher", source };
    let mut input = BufReader::new(input);
    writeln!(output, "{GREETING}").map_err(lost)?;
    write_json(&mut output, Kind::Hello, hello).map_err(lost)?;
    let Some((order, payload)) = take_order(&mut input).map_err(lost)? else {
        // The launcher ended before it had anything for us.
        return Ok(());
    };
    if let Some(folder) = &order.folder
        && let Err(error) = std::env::set_current_dir(folder)
    {
        tracing::warn!(%error, folder, "the launcher's working directory cannot be used here, \
                                        workers start where the agent was started");
    }
    let agents = start(&order, payload)?;
    let listening = Arc::clone(&agents);
    let lasting = order.outage_ms > 0;
    // Detached: it waits for a launcher that may outlive this host's part.
    drop(
        std::thread::Builder::new()
            .name("farandole-orders".to_owned())
            .spawn(move || obey(&mut input, &listening, lasting))
            .map_err(|source| Error::System { what: "starting a thread", source })?,
    );
    let output = Mutex::new(output);
    std::thread::scope(|scope| {
        for (task, agent) in agents.iter() {
            let output = &output;
            scope.spawn(move || {
                let outcome = loop {
                    if let Some(outcome) = agent.wait(SLICE) {
                        break outcome;
                    }
                };
                // A launcher that is gone hears nothing.
                drop(tell(&mut *output.lock(), *task, outcome));
            });
        }
    });
    Ok(())
}

fn take_order(input: &mut impl Read) -> io::Result<Option<(Order, Option<Vec<u8>>)>> {
    let unexpected = || io::Error::new(io::ErrorKind::InvalidData, "an order was expected");
    let order: Order = match read(input)? {
        None => return Ok(None),
        Some((Kind::Order, body)) => serde_json::from_slice(&body).map_err(io::Error::other)?,
        Some(_) => return Err(unexpected()),
    };
    if !order.payload {
        return Ok(Some((order, None)));
    }
    match read(input)? {
        None => Ok(None),
        Some((Kind::Payload, payload)) => Ok(Some((order, Some(payload)))),
        Some(_) => Err(unexpected()),
    }
}

fn start(order: &Order, payload: Option<Vec<u8>>) -> Result<Arc<Vec<(TaskId, Agent)>>> {
    let ticket: Ticket = order
        .ticket
        .parse()
        .map_err(|source| Error::Registrar { task: TaskId(0), source: Box::new(source) })?;
    let start = |number: &u32| {
        let agent = Agent::start(Task {
            ticket: ticket.clone(),
            task: TaskId(*number),
            host: None,
            attempt: 0,
            command: order.command.clone(),
            environment: order.environment.clone(),
            payload: payload.clone(),
            collect_result: order.collect_result,
            elastic: order.elastic,
            together: false,
            output: Output::Registrar,
            start_timeout: Duration::from_millis(order.start_timeout_ms),
            peer_timeout: Duration::from_millis(order.peer_timeout_ms),
            outage: Duration::from_millis(order.outage_ms),
        })?;
        Ok((TaskId(*number), agent))
    };
    order.tasks.iter().map(start).collect::<Result<Vec<_>>>().map(Arc::new)
}

/// Does what the launcher says. The end of its words ends the workers, too, unless the launcher may
/// be started again.
fn obey(input: &mut impl Read, agents: &[(TaskId, Agent)], lasting: bool) {
    let all = |act: &dyn Fn(&Agent)| agents.iter().for_each(|(_, agent)| act(agent));
    loop {
        match read(input) {
            Ok(Some((Kind::Interrupt, _))) => all(&|agent| agent.interrupt("interrupted")),
            Ok(Some((Kind::Terminate, _))) => all(&|agent| agent.cancel("interrupted")),
            Ok(Some((Kind::Kill, _))) => all(&|agent| agent.kill("interrupted")),
            Ok(Some(_)) => {}
            Ok(None) | Err(_) if lasting => return,
            Ok(None) | Err(_) => return all(&|agent| agent.cancel("the launcher is gone")),
        }
    }
}

fn tell(
    output: &mut (impl Write + ?Sized),
    task: TaskId,
    mut outcome: Result<crate::Outcome>,
) -> io::Result<()> {
    write_json(output, Kind::Ended, &Ended::new(task, &outcome))?;
    if let Ok(outcome) = &mut outcome
        && let Some(result) = outcome.result.take()
    {
        write(output, Kind::Result, &result)?;
    }
    Ok(())
}
