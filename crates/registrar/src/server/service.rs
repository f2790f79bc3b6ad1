// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The gRPC service: an adapter from calls to [`Core`].

use std::sync::Arc;
use std::time::Duration;

use farandole_world::{Generation, HostFacts, TaskId};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::auth::Caller;
use super::board::{Board, Change};
use super::core::Core;
use super::meet::{self, Asked};
use super::relay::{Exchange, Heard};
use crate::convert;
use crate::event::Event;
use crate::exit::{Exit, Verdict};
use crate::generated as wire;
use crate::generated::registrar_server::Registrar;
use crate::kv::{Full, Lookup, MAX_KEY};
use crate::meetings::Answer;
use crate::membership::{Input, Refusal};
use crate::wire::{DISMISSED, MAX_RESULT, PROTOCOL, PROTOCOL_VERSION, RETRY};

/// Bytes of a world in one piece of a reply.
const PIECE: usize = 8 << 10;

/// The longest a call waits here before its caller asks again.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The same for one whose worker has ended well before the others.
const TOGETHER: Duration = Duration::from_secs(1);

/// The service.
pub(super) struct Service {
    core: Arc<Core>,
    /// The relay of links, if this registrar has one.
    exchange: Option<Exchange>,
}

type Reply<T> = Result<Response<T>, Status>;

/// A reply whose pieces are made when there is room for them on their way.
type Pieces = Box<dyn Iterator<Item = Result<wire::AwaitAssignmentReply, Status>> + Send>;

impl Service {
    pub(super) fn new(core: Arc<Core>, relays: bool) -> Self {
        Self { core, exchange: relays.then(Exchange::default) }
    }

    fn exchange(&self) -> Result<&Exchange, Status> {
        let reason = "the driver relays no links: set FARANDOLE_DIAL_OUT where it runs, too";
        self.exchange.as_ref().ok_or_else(|| Status::failed_precondition(reason))
    }

    /// Returns the caller's generation, if it is the one at work.
    fn current(&self, caller: Caller) -> Result<watch::Receiver<Board>, Status> {
        let board = self.core.board();
        let (known, verdict) = {
            let board = board.borrow();
            let current = board.world.as_ref().map(|published| published.world.generation);
            (current == Some(caller.generation), board.verdict(caller.generation))
        };
        match (verdict, known) {
            (Some(verdict), _) => Err(over(&verdict)),
            (None, true) => Ok(board),
            (None, false) => {
                let reason = format!("generation {} has not been assigned", caller.generation);
                Err(Status::failed_precondition(reason))
            }
        }
    }
}

#[tonic::async_trait]
impl Registrar for Service {
    async fn register(
        &self,
        request: Request<wire::RegisterRequest>,
    ) -> Reply<wire::RegisterReply> {
        let caller = caller(&request)?;
        let message = request.into_inner();
        same_version(message.protocol_version)?;
        let facts = HostFacts::from(message.host.unwrap_or_default());
        let generation = self
            .core
            .register(caller.task, message.attempt, message.session, facts.hash())
            .map_err(|refusal| refused(&refusal))?;
        Ok(Response::new(wire::RegisterReply { generation: generation.0 }))
    }

    type AwaitAssignmentStream = tokio_stream::Iter<Pieces>;

    async fn await_assignment(
        &self,
        request: Request<wire::AwaitAssignmentRequest>,
    ) -> Reply<Self::AwaitAssignmentStream> {
        let caller = caller(&request)?;
        let wait = Duration::from_millis(request.get_ref().timeout_ms).min(LONGEST_WAIT);
        let session = request.get_ref().session;
        let mut board = self.core.board();
        let replaced =
            |board: &Board| session.is_some_and(|session| board.is_replaced(caller.task, session));
        let ready = |board: &Board| {
            let assigned = board
                .world
                .as_ref()
                .is_some_and(|published| published.world.generation >= caller.generation);
            assigned || board.verdict(caller.generation).is_some() || replaced(board)
        };
        if let Ok(Ok(board)) = timeout(wait, board.wait_for(ready)).await {
            if replaced(&board) {
                let reason = format!(
                    "task {} was started again, and this start of it has no rank",
                    caller.task
                );
                return Err(Status::aborted(reason));
            }
            if let Some(verdict) = board.verdict(caller.generation) {
                return Err(over(&verdict));
            }
            return Ok(Response::new(tokio_stream::iter(pieces(&board))));
        }
        let (missing, missing_count) = self.core.missing();
        let alone = wire::AwaitAssignmentReply { world: None, missing, missing_count };
        let pieces: Pieces = Box::new(std::iter::once(Ok(alone)));
        Ok(Response::new(tokio_stream::iter(pieces)))
    }

    type JoinStream = tokio_stream::Iter<Pieces>;

    async fn join(&self, request: Request<wire::JoinRequest>) -> Reply<Self::JoinStream> {
        let caller = caller(&request)?;
        let message = request.into_inner();
        let wait = Duration::from_millis(message.timeout_ms).min(LONGEST_WAIT);
        let (task, after) = (caller.task, Generation(message.after));
        let suspects = message.suspects.into_iter().map(TaskId).collect();
        self.core.ready(task, after, suspects).map_err(|refusal| refused(&refusal))?;
        let mut board = self.core.board();
        let answered = |board: &Board| {
            board.is_seated(task, after)
                || board.dismissal(task).is_some()
                || board.end(task).is_some()
                || board.aborted().is_some()
        };
        let Ok(Ok(board)) = timeout(wait, board.wait_for(answered)).await else {
            let none = wire::AwaitAssignmentReply::default();
            let pieces: Pieces = Box::new(std::iter::once(Ok(none)));
            return Ok(Response::new(tokio_stream::iter(pieces)));
        };
        if let Some(reason) = board.dismissal(task) {
            return Err(dismissed(&reason));
        }
        if let Some(verdict) = board.end(task).or_else(|| board.aborted()) {
            return Err(over(&verdict));
        }
        Ok(Response::new(tokio_stream::iter(pieces(&board))))
    }

    async fn changes(&self, request: Request<wire::ChangesRequest>) -> Reply<wire::ChangesReply> {
        let caller = caller(&request)?;
        let wire::ChangesRequest { timeout_ms, known } = request.into_inner();
        let wait = Duration::from_millis(timeout_ms).min(LONGEST_WAIT);
        let news = |change: &Change| change.generation == caller.generation && change.at > known;
        let mut board = self.core.board();
        let told =
            timeout(wait, board.wait_for(|board| board.change.as_ref().is_some_and(news))).await;
        let change = told.ok().and_then(Result::ok).and_then(|board| board.change);
        Ok(Response::new(match change {
            Some(Change { removed, added, at, .. }) => {
                wire::ChangesReply { at: Some(at), removed, added }
            }
            None => wire::ChangesReply::default(),
        }))
    }

    async fn leave(&self, request: Request<wire::LeaveRequest>) -> Reply<wire::LeaveReply> {
        let task = caller(&request)?.task;
        self.core.observe(Input::Leaves { task, reason: request.into_inner().reason });
        Ok(Response::new(wire::LeaveReply {}))
    }

    type HeartbeatStream = ReceiverStream<Result<wire::Directive, Status>>;

    async fn heartbeat(
        &self,
        request: Request<Streaming<wire::Beat>>,
    ) -> Reply<Self::HeartbeatStream> {
        let caller = caller(&request)?;
        let (sender, receiver) = mpsc::channel(1);
        let core = Arc::clone(&self.core);
        tokio::spawn(async move {
            listen(&core, caller, request.into_inner(), sender).await;
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn put(&self, request: Request<wire::PutRequest>) -> Reply<wire::PutReply> {
        drop(self.current(caller(&request)?)?);
        let caller = caller(&request)?;
        let message = request.into_inner();
        self.core
            .apart(|| self.core.put(caller.generation, message.key, message.value))
            .map_err(|refused| full(&refused))?;
        Ok(Response::new(wire::PutReply {}))
    }

    async fn put_if_absent(
        &self,
        request: Request<wire::PutIfAbsentRequest>,
    ) -> Reply<wire::PutIfAbsentReply> {
        let caller = caller(&request)?;
        drop(self.current(caller)?);
        let message = request.into_inner();
        let value = self
            .core
            .apart(|| self.core.put_if_absent(caller.generation, message.key, message.value))
            .map_err(|refused| full(&refused))?;
        Ok(Response::new(wire::PutIfAbsentReply { value }))
    }

    async fn get(&self, request: Request<wire::GetRequest>) -> Reply<wire::GetReply> {
        let caller = caller(&request)?;
        let mut board = self.current(caller)?;
        let message = request.into_inner();
        if message.key.len() > MAX_KEY {
            return Err(Status::invalid_argument(format!("a key has at most {MAX_KEY} bytes")));
        }
        let wait = Duration::from_millis(message.timeout_ms).min(LONGEST_WAIT);
        let lookup = self.core.apart(|| self.core.kv().lock().get(caller.generation, message.key));
        let value = match lookup {
            Lookup::Found(value) => Some(value),
            Lookup::Wait(arrival) => tokio::select! {
                arrived = timeout(wait, arrival) => match arrived {
                    Ok(Ok(value)) => Some(value),
                    Ok(Err(_)) => return Err(Status::aborted("the generation is over")),
                    Err(_) => None,
                },
                verdict = verdict(&mut board, caller.generation) => return Err(over(&verdict)),
            },
        };
        Ok(Response::new(wire::GetReply { value }))
    }

    type MeetStream = tokio_stream::Iter<meet::Pieces>;

    async fn meet(&self, request: Request<wire::MeetRequest>) -> Reply<Self::MeetStream> {
        let caller = caller(&request)?;
        let mut board = self.current(caller)?;
        let generation = caller.generation;
        let unseated = || Status::failed_precondition(format!("task {} has no rank", caller.task));
        let (rank, size) = self.core.place(caller.task).ok_or_else(unseated)?;
        let wait = Duration::from_millis(request.get_ref().timeout_ms).min(LONGEST_WAIT);
        let ask = meet::question(rank, size, request.into_inner())?;
        let mut asked = Asked { core: &self.core, generation, ask: &ask, answered: false };
        let first = self
            .core
            .apart(|| self.core.meetings().lock().ask(generation, ask.clone()))
            .map_err(|refused| full(&refused))?;
        let known = match first {
            Answer::Known(outcome) => outcome,
            Answer::Wait(mut outcome) => tokio::select! {
                told = timeout(wait, outcome.wait_for(Option::is_some)) => {
                    match told.map(|told| told.ok().and_then(|outcome| outcome.clone())) {
                        Ok(Some(outcome)) => outcome,
                        Ok(None) => return Err(Status::aborted("the generation is over")),
                        Err(_) => return Ok(Response::new(tokio_stream::iter(meet::late(&asked)))),
                    }
                }
                verdict = verdict(&mut board, generation) => return Err(over(&verdict)),
            },
        };
        asked.answered = true;
        Ok(Response::new(tokio_stream::iter(meet::answer(&known, size))))
    }

    async fn records(
        &self,
        request: Request<Streaming<wire::RecordBatch>>,
    ) -> Reply<wire::RecordsReply> {
        let caller = caller(&request)?;
        let mut batches = request.into_inner();
        while let Some(batch) = batches.message().await? {
            if !self.core.is_new_batch(caller.task, batch.source, batch.number) {
                continue;
            }
            let rank = self.core.rank(caller.task).map(|rank| rank.0);
            if batch.dropped > 0 {
                tracing::warn!(
                    task = caller.task.0,
                    dropped = batch.dropped,
                    "a worker dropped records"
                );
            }
            for record in convert::records(batch, caller.task.0, rank) {
                self.core.push(Event::Record(record));
            }
            self.core.room().await;
        }
        Ok(Response::new(wire::RecordsReply {}))
    }

    async fn result(
        &self,
        request: Request<Streaming<wire::ResultChunk>>,
    ) -> Reply<wire::ResultReply> {
        let caller = caller(&request)?;
        if !self.core.is_elastic {
            drop(self.current(caller)?);
        }
        let mut chunks = request.into_inner();
        let mut data = Vec::new();
        while let Some(chunk) = chunks.message().await? {
            if data.len() + chunk.data.len() > MAX_RESULT {
                return Err(Status::out_of_range(format!(
                    "a result has at most {MAX_RESULT} bytes"
                )));
            }
            data.extend_from_slice(&chunk.data);
        }
        self.core.returned(caller.task, caller.generation, data);
        Ok(Response::new(wire::ResultReply {}))
    }

    type CallsStream = ReceiverStream<Result<wire::Call, Status>>;

    async fn calls(&self, request: Request<wire::CallsRequest>) -> Reply<Self::CallsStream> {
        let caller = caller(&request)?;
        drop(self.current(caller)?);
        Ok(Response::new(self.exchange()?.open(caller, request.get_ref().door)))
    }

    type RelayStream = Heard;

    async fn relay(
        &self,
        request: Request<Streaming<wire::RelayPiece>>,
    ) -> Reply<Self::RelayStream> {
        let caller = caller(&request)?;
        drop(self.current(caller)?);
        Ok(Response::new(self.exchange()?.join(caller, request.into_inner()).await?))
    }

    async fn exit(&self, request: Request<wire::ExitRequest>) -> Reply<wire::ExitReply> {
        let caller = caller(&request)?;
        let together = request.get_ref().together;
        let exit = Exit::try_from(request.into_inner()).map_err(Status::invalid_argument)?;
        let success = exit.how.is_success() && !exit.stopped;
        self.core.exited(caller.task, caller.generation, exit);
        let mut board = self.core.board();
        if success && together {
            let over = |board: &Board| {
                board.is_finished(caller.generation) || board.verdict(caller.generation).is_some()
            };
            let (verdict, pending) = match timeout(TOGETHER, board.wait_for(over)).await {
                Ok(Ok(board)) if board.is_finished(caller.generation) => (None, false),
                Ok(Ok(board)) => (board.verdict(caller.generation), false),
                Ok(Err(_)) => (None, false),
                Err(_) => (None, true),
            };
            return Ok(Response::new(wire::ExitReply {
                verdict: verdict.map(Into::into),
                pending,
            }));
        }
        if success || self.core.is_elastic {
            return Ok(Response::new(wire::ExitReply { verdict: None, pending: false }));
        }
        let verdict = timeout(LONGEST_WAIT, verdict(&mut board, caller.generation)).await.ok();
        Ok(Response::new(wire::ExitReply { verdict: verdict.map(Into::into), pending: false }))
    }
}

/// Returns the present world in pieces.
fn pieces(board: &Board) -> Pieces {
    let world = board.world.as_ref().map(|published| published.encoded.clone()).unwrap_or_default();
    Box::new((0..world.len()).step_by(PIECE).map(move |at| {
        let world = Some(world.slice(at..world.len().min(at + PIECE)));
        Ok(wire::AwaitAssignmentReply { world, missing: Vec::new(), missing_count: 0 })
    }))
}

/// Hears an agent's beats until its connection ends, and tells it when to stop.
async fn listen(
    core: &Core,
    caller: Caller,
    mut beats: Streaming<wire::Beat>,
    directives: mpsc::Sender<Result<wire::Directive, Status>>,
) {
    let mut board = core.board();
    let mut closing = core.board();
    let mut session = None;
    let mut told = false;
    loop {
        tokio::select! {
            biased;
            beat = beats.message() => match beat {
                Ok(Some(beat)) => {
                    if let Err(status) = same_version(beat.protocol_version) {
                        drop(directives.send(Err(status)).await);
                        break;
                    }
                    session.get_or_insert_with(|| (beat.session, core.stream(caller.task)));
                    if !core.beat(caller.task, beat.session) {
                        // The end of the stream has it register again.
                        break;
                    }
                }
                Ok(None) | Err(_) => break,
            },
            verdict = end(&mut board, caller), if !told => {
                told = true;
                let directive = wire::Directive { stop: Some(verdict.into()) };
                if directives.send(Ok(directive)).await.is_err() {
                    break;
                }
            }
            // After the verdict, so that all tasks get it before the end.
            () = closed(&mut closing) => break,
        }
    }
    if let Some((session, stream)) = session {
        core.disconnected(caller.task, session, stream);
    }
}

/// Waits for the registrar to close.
async fn closed(board: &mut watch::Receiver<Board>) {
    drop(board.wait_for(|board| board.closed).await);
}

/// Waits for the verdict on a generation.
async fn verdict(board: &mut watch::Receiver<Board>, generation: Generation) -> Verdict {
    match board.wait_for(|board| board.verdict(generation).is_some()).await {
        Ok(board) => board.verdict(generation),
        Err(_) => None,
    }
    .unwrap_or_else(|| Verdict {
        reason: "the driver is gone".to_owned(),
        cause: None,
        retry: false,
    })
}

/// Waits for the end of a worker, or the verdict on its generation.
async fn end(board: &mut watch::Receiver<Board>, caller: Caller) -> Verdict {
    let end = |board: &Board| board.end(caller.task).or_else(|| board.verdict(caller.generation));
    match board.wait_for(|board| end(board).is_some()).await {
        Ok(board) => end(&board),
        Err(_) => None,
    }
    .unwrap_or_else(|| Verdict {
        reason: "the driver is gone".to_owned(),
        cause: None,
        retry: false,
    })
}

fn caller<T>(request: &Request<T>) -> Result<Caller, Status> {
    request.extensions().get().copied().ok_or_else(|| Status::internal("a call came past the gate"))
}

fn same_version(theirs: u32) -> Result<(), Status> {
    if theirs == PROTOCOL_VERSION {
        return Ok(());
    }
    let reason = format!("this registrar speaks protocol {PROTOCOL_VERSION}, the caller {theirs}");
    let mut status = Status::failed_precondition(reason);
    status.metadata_mut().insert(PROTOCOL, PROTOCOL_VERSION.into());
    Err(status)
}

fn refused(refusal: &Refusal) -> Status {
    let reason = refusal.to_string();
    match refusal {
        Refusal::UnknownTask { .. } => Status::not_found(reason),
        Refusal::Duplicate { .. } => Status::already_exists(reason),
        Refusal::Stale { .. } | Refusal::NotWanted { .. } => Status::failed_precondition(reason),
        Refusal::Dismissed { .. } => dismissed(&reason),
        Refusal::Aborted { .. } | Refusal::Finished { .. } => Status::aborted(reason),
    }
}

fn full(refused: &Full) -> Status {
    match refused {
        Full::Over => Status::aborted(refused.to_string()),
        _ => Status::resource_exhausted(refused.to_string()),
    }
}

fn dismissed(reason: &str) -> Status {
    let mut status = Status::aborted(reason);
    status.metadata_mut().insert(DISMISSED, 1.into());
    status
}

fn over(verdict: &Verdict) -> Status {
    let cause = verdict.cause.map_or_else(String::new, |TaskId(task)| format!(" (task {task})"));
    let mut status = Status::aborted(format!("{}{cause}", verdict.reason));
    if verdict.retry {
        status.metadata_mut().insert(RETRY, 1.into());
    }
    status
}
