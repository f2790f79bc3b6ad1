// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The protocol between a launcher and the agent of another host, through the program that connects
//! them.
//!
//! The agent's standard output begins with the line [`AGENT_GREETING`]; earlier output of a login
//! shell is skipped. Then both directions carry frames: one byte of kind, eight bytes of length
//! (big endian), the body.
//!
//! | direction | kind | body |
//! | --- | --- | --- |
//! | agent to launcher | `H` | [`AgentHello`], JSON |
//! | launcher to agent | `O` | [`AgentLaunchRequest`], JSON |
//! | launcher to agent | `P` | the payload of each worker, right after an order with `payload` |
//! | launcher to agent | `I` | ask the workers to end: SIGINT |
//! | launcher to agent | `E` | tell the workers to end: SIGTERM |
//! | launcher to agent | `K` | end the workers at once: SIGKILL |
//! | agent to launcher | `T` | [`TaskEndMessage`], JSON |
//! | agent to launcher | `R` | the result of the task just ended, if it has one |
//!
//! If the stream ends, the connection or the other side is gone. An agent then ends its workers,
//! unless the registrar, which is in the launcher's process, still answers, or its order says that
//! the launcher may be restarted. A launcher that closes the stream on purpose sends `E` first.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use farandole_registrar::ExitKind;
use farandole_world::{Rank, TaskId};
use serde::{Deserialize, Serialize};

use crate::agent::WorkerOutcome;
use crate::error::{Error, Result};

/// Version of this protocol; both sides must have the same.
pub(crate) const AGENT_PROTOCOL_VERSION: u32 = 3;
/// First line of an agent.
// The number is the version of the greeting; versions of messages are in the hello.
pub(crate) const AGENT_GREETING: &str = "farandole agent 1";
/// Longest body that is kept in memory as a whole, except for payloads and results.
const MAX_FRAME_BYTES: u64 = 64 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AgentFrameKind {
    Hello,
    Order,
    Payload,
    Interrupt,
    Terminate,
    Kill,
    Ended,
    Result,
}

const FRAME_KIND_BYTES: [(AgentFrameKind, u8); 8] = [
    (AgentFrameKind::Hello, b'H'),
    (AgentFrameKind::Order, b'O'),
    (AgentFrameKind::Payload, b'P'),
    (AgentFrameKind::Interrupt, b'I'),
    (AgentFrameKind::Terminate, b'E'),
    (AgentFrameKind::Kill, b'K'),
    (AgentFrameKind::Ended, b'T'),
    (AgentFrameKind::Result, b'R'),
];

/// The identity of the answering process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentHello {
    /// Version of the protocol.
    pub version: u32,
    /// Version of the package.
    pub farandole: String,
    /// Version of the interpreter.
    pub python: String,
    /// The interpreter's program.
    pub executable: String,
    /// The host's own name.
    pub host: String,
}

impl AgentHello {
    /// Returns the identity of this process.
    pub fn new(python: String, executable: String) -> Self {
        let farandole = env!("CARGO_PKG_VERSION").to_owned();
        let host = farandole_registrar::local_host_facts::host_facts().hostname;
        Self { version: AGENT_PROTOCOL_VERSION, farandole, python, executable, host }
    }
}

/// The order for an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AgentLaunchRequest {
    pub(crate) ticket: String,
    pub(crate) tasks: Vec<u32>,
    pub(crate) command: Vec<String>,
    pub(crate) environment: BTreeMap<String, Option<String>>,
    pub(crate) folder: Option<String>,
    pub(crate) payload: bool,
    pub(crate) collect_result: bool,
    pub(crate) elastic: bool,
    pub(crate) start_timeout_ms: u64,
    pub(crate) peer_timeout_ms: u64,
    pub(crate) outage_ms: u64,
}

/// The outcome of a task, or the reason why it had no worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TaskEndMessage {
    task: u32,
    rank: Option<u32>,
    size: Option<usize>,
    code: Option<i32>,
    signal: Option<i32>,
    not_started: Option<String>,
    stderr_tail: Vec<String>,
    aborted: bool,
    reason: Option<String>,
    retry: bool,
    refused: Option<String>,
    /// Whether a result follows.
    pub(crate) result: bool,
}

impl TaskEndMessage {
    pub(crate) fn new(task: TaskId, outcome: &Result<WorkerOutcome>) -> Self {
        let nothing = Self {
            task: task.0,
            rank: None,
            size: None,
            code: None,
            signal: None,
            not_started: None,
            stderr_tail: Vec::new(),
            aborted: false,
            reason: None,
            retry: false,
            refused: None,
            result: false,
        };
        match outcome {
            Err(error) => Self { refused: Some(error.message_with_causes()), ..nothing },
            Ok(outcome) => {
                let (code, signal, not_started) = match &outcome.exit_kind {
                    Some(ExitKind::Code(code)) => (Some(*code), None, None),
                    Some(ExitKind::Signal(signal)) => (None, Some(*signal), None),
                    Some(ExitKind::NotStarted(reason)) => (None, None, Some(reason.clone())),
                    None => (None, None, None),
                };
                Self {
                    rank: outcome.rank.map(|rank| rank.0),
                    size: outcome.size,
                    code,
                    signal,
                    not_started,
                    stderr_tail: outcome.stderr_tail.clone(),
                    aborted: outcome.aborted,
                    reason: outcome.reason.clone(),
                    retry: outcome.retry,
                    result: outcome.result.is_some(),
                    ..nothing
                }
            }
        }
    }

    pub(crate) fn task_id(&self) -> TaskId {
        TaskId(self.task)
    }

    /// Returns the outcome for the launcher. If the agent could not run its worker, returns an
    /// error that names `host`.
    pub(crate) fn into_outcome(self, host: &str, result: Option<Vec<u8>>) -> Result<WorkerOutcome> {
        if let Some(reason) = self.refused {
            return Err(Error::Host { host: host.to_owned(), reason });
        }
        let how = match (self.code, self.signal, self.not_started) {
            (Some(code), ..) => Some(ExitKind::Code(code)),
            (None, Some(signal), _) => Some(ExitKind::Signal(signal)),
            (None, None, reason) => reason.map(ExitKind::NotStarted),
        };
        Ok(WorkerOutcome {
            rank: self.rank.map(Rank),
            size: self.size,
            exit_kind: how,
            stderr_tail: self.stderr_tail,
            result,
            aborted: self.aborted,
            reason: self.reason,
            retry: self.retry,
        })
    }
}

/// Writes one frame and flushes the stream.
pub(crate) fn write_frame(
    out: &mut (impl Write + ?Sized),
    kind: AgentFrameKind,
    body: &[u8],
) -> io::Result<()> {
    let byte =
        FRAME_KIND_BYTES.iter().find(|(known, _)| *known == kind).map_or(0, |(_, byte)| *byte);
    let mut head = [byte; 9];
    head[1..].copy_from_slice(&(body.len() as u64).to_be_bytes());
    out.write_all(&head)?;
    out.write_all(body)?;
    // The other side waits for this frame, and the writer may be buffered.
    out.flush()
}

/// Like [`write_frame`], for values with a JSON form.
pub(crate) fn write_json_frame(
    out: &mut (impl Write + ?Sized),
    kind: AgentFrameKind,
    body: &impl Serialize,
) -> io::Result<()> {
    write_frame(out, kind, &serde_json::to_vec(body).map_err(io::Error::other)?)
}

/// Reads one frame; `None` at the end of the stream.
pub(crate) fn read_frame(input: &mut impl Read) -> io::Result<Option<(AgentFrameKind, Vec<u8>)>> {
    let mut head = [0; 9];
    if input.read(&mut head[..1])? == 0 {
        return Ok(None);
    }
    input.read_exact(&mut head[1..])?;
    let [byte, length @ ..] = head;
    let length = u64::from_be_bytes(length);
    let kind = FRAME_KIND_BYTES.iter().find(|(_, known)| *known == byte).map(|(kind, _)| *kind);
    let kind = kind.filter(|kind| {
        // A pickled function or its result may be larger than any control message.
        matches!(kind, AgentFrameKind::Payload | AgentFrameKind::Result)
            || length <= MAX_FRAME_BYTES
    });
    let Some(kind) = kind else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "what came is no frame of an agent",
        ));
    };
    // Memory grows with the received bytes: the announced length is not trusted.
    let mut body = Vec::new();
    if input.take(length).read_to_end(&mut body)? as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some((kind, body)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_outcome_and_a_refusal_survive_the_way() {
        let outcome = WorkerOutcome {
            rank: Some(Rank(3)),
            size: Some(4),
            exit_kind: Some(ExitKind::Signal(9)),
            stderr_tail: vec!["last".into()],
            result: Some(vec![1, 2]),
            aborted: true,
            reason: Some("why".into()),
            retry: true,
        };
        let ended = TaskEndMessage::new(TaskId(7), &Ok(outcome.clone()));
        let text = serde_json::to_string(&ended).unwrap();
        let back: TaskEndMessage = serde_json::from_str(&text).unwrap();
        assert_eq!((back.task_id(), back.result), (TaskId(7), true));
        assert_eq!(back.into_outcome("a", Some(vec![1, 2])).unwrap(), outcome);
        let refused =
            TaskEndMessage::new(TaskId(1), &Err(Error::Cancelled { reason: "why".into() }));
        let error = refused.into_outcome("node1", None).unwrap_err().to_string();
        assert_eq!(error, "node1: cancelled: why");
    }

    #[test]
    fn a_frame_that_is_cut_off_or_too_long_is_refused() {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, AgentFrameKind::Order, b"{}").unwrap();
        assert_eq!(
            read_frame(&mut &bytes[..]).unwrap(),
            Some((AgentFrameKind::Order, b"{}".to_vec()))
        );
        assert!(read_frame(&mut &bytes[..10]).is_err());
        bytes[1] = 0xff;
        assert!(read_frame(&mut &bytes[..]).unwrap_err().to_string().contains("no frame"));
        assert!(read_frame(&mut &b""[..]).unwrap().is_none());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ignored = read_frame(&mut &bytes[..]).is_ok();
        }
    }
}
