// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The gRPC service: an adapter from calls to [`RegistrarCore`].

use std::sync::Arc;
use std::time::Duration;

use farandole_membership::{ExitReport, GenerationVerdict, MembershipInput, RegistrationRefusal};
use farandole_world::{Generation, HostFacts, TaskId};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::announcements::{AnnouncedHostChange, WorldAnnouncements};
use super::auth::CallOrigin;
use super::formation::{self, FormationRequestGuard};
use super::registrar_core::RegistrarCore;
use super::relay::{RelayExchange, RelayPieceStream};
use crate::event::JobEvent;
use crate::formation::FormationOutcomeOrReceiver;
use crate::generated as wire;
use crate::generated::registrar_server::Registrar;
use crate::generation_key_values::{KeyValueRefusal, MAX_KEY_BYTES, ValueLookup};
use crate::wire::{
    DISMISSED_HEADER, MAX_RESULT_BYTES, PROTOCOL_HEADER, PROTOCOL_VERSION, RETRY_HEADER,
};
use crate::wire_conversions;

/// Bytes of a world in one piece of a reply.
// Small pieces, made as each connection takes them: thousands of replies at once need little
// memory.
const WORLD_PIECE_BYTES: usize = 8 << 10;

/// Longest time that a call waits here before its caller asks again.
// Bounded, so that a caller notices a lost answer, and a gone caller's call ends.
const MAX_CALL_WAIT: Duration = Duration::from_secs(60);

/// Longest wait of a call whose worker has ended successfully before the others.
const JOINT_EXIT_WAIT: Duration = Duration::from_secs(1);

/// The service of one registrar.
pub(super) struct RegistrarService {
    core: Arc<RegistrarCore>,
    /// The relay of links, if this registrar has one.
    exchange: Option<RelayExchange>,
}

type ServiceReply<T> = Result<Response<T>, Status>;

/// A reply whose pieces are made when the connection has space for them.
type AssignmentReplyPieces =
    Box<dyn Iterator<Item = Result<wire::AwaitAssignmentReply, Status>> + Send>;

impl RegistrarService {
    pub(super) fn new(core: Arc<RegistrarCore>, relays: bool) -> Self {
        Self { core, exchange: relays.then(RelayExchange::default) }
    }

    fn relay_exchange(&self) -> Result<&RelayExchange, Status> {
        let reason = "the driver relays no links: set FARANDOLE_DIAL_OUT where it runs, too";
        self.exchange.as_ref().ok_or_else(|| Status::failed_precondition(reason))
    }

    /// Checks that the caller's generation is at work, and returns a receiver of announcements.
    fn check_current_generation(
        &self,
        caller: CallOrigin,
    ) -> Result<watch::Receiver<WorldAnnouncements>, Status> {
        let board = self.core.subscribe_announcements();
        let (known, verdict) = {
            let board = board.borrow();
            let current = board.world.as_ref().map(|published| published.world.generation);
            (current == Some(caller.generation), board.generation_verdict(caller.generation))
        };
        match (verdict, known) {
            (Some(verdict), _) => Err(verdict_status(&verdict)),
            (None, true) => Ok(board),
            (None, false) => {
                let reason = format!("generation {} has not been assigned", caller.generation);
                Err(Status::failed_precondition(reason))
            }
        }
    }
}

#[tonic::async_trait]
impl Registrar for RegistrarService {
    async fn register(
        &self,
        request: Request<wire::RegisterRequest>,
    ) -> ServiceReply<wire::RegisterReply> {
        let caller = call_origin(&request)?;
        let message = request.into_inner();
        check_protocol_version(message.protocol_version)?;
        let facts = HostFacts::from(message.host.unwrap_or_default());
        let generation = self
            .core
            .register_task(caller.task, message.attempt, message.session, facts.host_hash())
            .map_err(|refusal| refusal_status(&refusal))?;
        Ok(Response::new(wire::RegisterReply { generation: generation.0 }))
    }

    type AwaitAssignmentStream = tokio_stream::Iter<AssignmentReplyPieces>;

    async fn await_assignment(
        &self,
        request: Request<wire::AwaitAssignmentRequest>,
    ) -> ServiceReply<Self::AwaitAssignmentStream> {
        let caller = call_origin(&request)?;
        let wait = Duration::from_millis(request.get_ref().timeout_ms).min(MAX_CALL_WAIT);
        let session = request.get_ref().session;
        let mut board = self.core.subscribe_announcements();
        let replaced = |board: &WorldAnnouncements| {
            session.is_some_and(|session| board.is_session_replaced(caller.task, session))
        };
        let ready = |board: &WorldAnnouncements| {
            let assigned = board
                .world
                .as_ref()
                .is_some_and(|published| published.world.generation >= caller.generation);
            assigned || board.generation_verdict(caller.generation).is_some() || replaced(board)
        };
        if let Ok(Ok(board)) = timeout(wait, board.wait_for(ready)).await {
            if replaced(&board) {
                let reason = format!(
                    "task {} was started again, and this start of it has no rank",
                    caller.task
                );
                return Err(Status::aborted(reason));
            }
            if let Some(verdict) = board.generation_verdict(caller.generation) {
                return Err(verdict_status(&verdict));
            }
            return Ok(Response::new(tokio_stream::iter(world_pieces(&board))));
        }
        let (missing, missing_count) = self.core.missing_tasks();
        let alone = wire::AwaitAssignmentReply { world: None, missing, missing_count };
        let pieces: AssignmentReplyPieces = Box::new(std::iter::once(Ok(alone)));
        Ok(Response::new(tokio_stream::iter(pieces)))
    }

    type JoinStream = tokio_stream::Iter<AssignmentReplyPieces>;

    async fn join(&self, request: Request<wire::JoinRequest>) -> ServiceReply<Self::JoinStream> {
        let caller = call_origin(&request)?;
        let message = request.into_inner();
        let wait = Duration::from_millis(message.timeout_ms).min(MAX_CALL_WAIT);
        let (task, after) = (caller.task, Generation(message.after));
        let suspects = message.suspects.into_iter().map(TaskId).collect();
        self.core
            .request_world(task, after, suspects)
            .map_err(|refusal| refusal_status(&refusal))?;
        let mut board = self.core.subscribe_announcements();
        let answered = |board: &WorldAnnouncements| {
            board.has_rank_after(task, after)
                || board.dismissal_reason(task).is_some()
                || board.worker_end_verdict(task).is_some()
                || board.abort_verdict().is_some()
        };
        let Ok(Ok(board)) = timeout(wait, board.wait_for(answered)).await else {
            let none = wire::AwaitAssignmentReply::default();
            let pieces: AssignmentReplyPieces = Box::new(std::iter::once(Ok(none)));
            return Ok(Response::new(tokio_stream::iter(pieces)));
        };
        // Before the verdicts: a worker that may go has not failed, even if the job ends at this
        // moment.
        if let Some(reason) = board.dismissal_reason(task) {
            return Err(dismissal_status(&reason));
        }
        if let Some(verdict) = board.worker_end_verdict(task).or_else(|| board.abort_verdict()) {
            return Err(verdict_status(&verdict));
        }
        Ok(Response::new(tokio_stream::iter(world_pieces(&board))))
    }

    async fn changes(
        &self,
        request: Request<wire::ChangesRequest>,
    ) -> ServiceReply<wire::ChangesReply> {
        let caller = call_origin(&request)?;
        let wire::ChangesRequest { timeout_ms, known } = request.into_inner();
        let wait = Duration::from_millis(timeout_ms).min(MAX_CALL_WAIT);
        let is_newer = |change: &AnnouncedHostChange| {
            change.generation == caller.generation && change.at > known
        };
        let mut board = self.core.subscribe_announcements();
        let changed_board =
            timeout(wait, board.wait_for(|board| board.change.as_ref().is_some_and(is_newer)))
                .await;
        let change = changed_board.ok().and_then(Result::ok).and_then(|board| board.change);
        Ok(Response::new(match change {
            Some(AnnouncedHostChange { removed, added, at, .. }) => {
                wire::ChangesReply { at: Some(at), removed, added }
            }
            None => wire::ChangesReply::default(),
        }))
    }

    async fn leave(&self, request: Request<wire::LeaveRequest>) -> ServiceReply<wire::LeaveReply> {
        let task = call_origin(&request)?.task;
        self.core.apply_membership_input(MembershipInput::Leaves {
            task,
            reason: request.into_inner().reason,
        });
        Ok(Response::new(wire::LeaveReply {}))
    }

    type HeartbeatStream = ReceiverStream<Result<wire::Directive, Status>>;

    async fn heartbeat(
        &self,
        request: Request<Streaming<wire::Beat>>,
    ) -> ServiceReply<Self::HeartbeatStream> {
        let caller = call_origin(&request)?;
        let (sender, receiver) = mpsc::channel(1);
        let core = Arc::clone(&self.core);
        tokio::spawn(async move {
            serve_heartbeats(&core, caller, request.into_inner(), sender).await;
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn put(&self, request: Request<wire::PutRequest>) -> ServiceReply<wire::PutReply> {
        drop(self.check_current_generation(call_origin(&request)?)?);
        let caller = call_origin(&request)?;
        let message = request.into_inner();
        self.core
            .run_blocking(|| self.core.put_value(caller.generation, message.key, message.value))
            .map_err(|refused| key_value_status(&refused))?;
        Ok(Response::new(wire::PutReply {}))
    }

    async fn put_if_absent(
        &self,
        request: Request<wire::PutIfAbsentRequest>,
    ) -> ServiceReply<wire::PutIfAbsentReply> {
        let caller = call_origin(&request)?;
        drop(self.check_current_generation(caller)?);
        let message = request.into_inner();
        let value = self
            .core
            .run_blocking(|| self.core.put_if_absent(caller.generation, message.key, message.value))
            .map_err(|refused| key_value_status(&refused))?;
        Ok(Response::new(wire::PutIfAbsentReply { value }))
    }

    async fn get(&self, request: Request<wire::GetRequest>) -> ServiceReply<wire::GetReply> {
        let caller = call_origin(&request)?;
        let mut board = self.check_current_generation(caller)?;
        let message = request.into_inner();
        if message.key.len() > MAX_KEY_BYTES {
            return Err(Status::invalid_argument(format!(
                "a key has at most {MAX_KEY_BYTES} bytes"
            )));
        }
        let wait = Duration::from_millis(message.timeout_ms).min(MAX_CALL_WAIT);
        let lookup = self.core.run_blocking(|| {
            self.core.key_value_store().lock().value_or_receiver(caller.generation, message.key)
        });
        let value = match lookup {
            ValueLookup::Found(value) => Some(value),
            ValueLookup::Wait(arrival) => tokio::select! {
                arrived = timeout(wait, arrival) => match arrived {
                    Ok(Ok(value)) => Some(value),
                    Ok(Err(_)) => return Err(Status::aborted("the generation is over")),
                    Err(_) => None,
                },
                verdict = wait_for_verdict(&mut board, caller.generation) => return Err(verdict_status(&verdict)),
            },
        };
        Ok(Response::new(wire::GetReply { value }))
    }

    type MeetStream = tokio_stream::Iter<formation::FormationReplyPieces>;

    async fn meet(&self, request: Request<wire::MeetRequest>) -> ServiceReply<Self::MeetStream> {
        let caller = call_origin(&request)?;
        let mut board = self.check_current_generation(caller)?;
        let generation = caller.generation;
        let unseated = || Status::failed_precondition(format!("task {} has no rank", caller.task));
        let (rank, size) = self.core.rank_and_size(caller.task).ok_or_else(unseated)?;
        let wait = Duration::from_millis(request.get_ref().timeout_ms).min(MAX_CALL_WAIT);
        let ask = formation::parse_formation_request(rank, size, request.into_inner())?;
        let mut asked =
            FormationRequestGuard { core: &self.core, generation, ask: &ask, answered: false };
        let first = self
            .core
            .run_blocking(|| {
                self.core.formation_table().lock().submit_request(generation, ask.clone())
            })
            .map_err(|refused| key_value_status(&refused))?;
        let known = match first {
            FormationOutcomeOrReceiver::Known(outcome) => outcome,
            FormationOutcomeOrReceiver::Wait(mut outcome) => tokio::select! {
                answer = timeout(wait, outcome.wait_for(Option::is_some)) => {
                    match answer.map(|answer| answer.ok().and_then(|outcome| outcome.clone())) {
                        Ok(Some(outcome)) => outcome,
                        Ok(None) => return Err(Status::aborted("the generation is over")),
                        Err(_) => return Ok(Response::new(tokio_stream::iter(formation::timeout_reply(&asked)))),
                    }
                }
                verdict = wait_for_verdict(&mut board, generation) => return Err(verdict_status(&verdict)),
            },
        };
        asked.answered = true;
        Ok(Response::new(tokio_stream::iter(formation::outcome_reply(&known, size))))
    }

    async fn records(
        &self,
        request: Request<Streaming<wire::RecordBatch>>,
    ) -> ServiceReply<wire::RecordsReply> {
        let caller = call_origin(&request)?;
        let mut batches = request.into_inner();
        while let Some(batch) = batches.message().await? {
            if !self.core.record_batch_if_new(caller.task, batch.source, batch.number) {
                continue;
            }
            let rank = self.core.task_rank(caller.task).map(|rank| rank.0);
            if batch.dropped > 0 {
                tracing::warn!(
                    task = caller.task.0,
                    dropped = batch.dropped,
                    "a worker dropped records"
                );
            }
            for record in wire_conversions::telemetry_records(batch, caller.task.0, rank) {
                self.core.push_event(JobEvent::Record(record));
            }
            // While this call waits, HTTP/2 holds its sender back.
            self.core.wait_for_event_room().await;
        }
        Ok(Response::new(wire::RecordsReply {}))
    }

    async fn result(
        &self,
        request: Request<Streaming<wire::ResultChunk>>,
    ) -> ServiceReply<wire::ResultReply> {
        let caller = call_origin(&request)?;
        if !self.core.is_elastic {
            drop(self.check_current_generation(caller)?);
        }
        let mut chunks = request.into_inner();
        let mut data = Vec::new();
        while let Some(chunk) = chunks.message().await? {
            // Checked for each chunk, before its bytes are kept.
            if data.len() + chunk.data.len() > MAX_RESULT_BYTES {
                return Err(Status::out_of_range(format!(
                    "a result has at most {MAX_RESULT_BYTES} bytes"
                )));
            }
            data.extend_from_slice(&chunk.data);
        }
        self.core.record_result(caller.task, caller.generation, data);
        Ok(Response::new(wire::ResultReply {}))
    }

    type CallsStream = ReceiverStream<Result<wire::Call, Status>>;

    async fn calls(&self, request: Request<wire::CallsRequest>) -> ServiceReply<Self::CallsStream> {
        let caller = call_origin(&request)?;
        drop(self.check_current_generation(caller)?);
        Ok(Response::new(
            self.relay_exchange()?.open_call_stream(caller, request.get_ref().relay_world),
        ))
    }

    type RelayStream = RelayPieceStream;

    async fn relay(
        &self,
        request: Request<Streaming<wire::RelayPiece>>,
    ) -> ServiceReply<Self::RelayStream> {
        let caller = call_origin(&request)?;
        drop(self.check_current_generation(caller)?);
        Ok(Response::new(self.relay_exchange()?.join_link(caller, request.into_inner()).await?))
    }

    async fn exit(&self, request: Request<wire::ExitRequest>) -> ServiceReply<wire::ExitReply> {
        let caller = call_origin(&request)?;
        let together = request.get_ref().together;
        let exit = ExitReport::try_from(request.into_inner()).map_err(Status::invalid_argument)?;
        let success = exit.kind.is_success() && !exit.stopped;
        self.core.record_exit(caller.task, caller.generation, exit);
        let mut board = self.core.subscribe_announcements();
        if success && together {
            let over = |board: &WorldAnnouncements| {
                board.is_finished(caller.generation)
                    || board.generation_verdict(caller.generation).is_some()
            };
            let (verdict, pending) = match timeout(JOINT_EXIT_WAIT, board.wait_for(over)).await {
                Ok(Ok(board)) if board.is_finished(caller.generation) => (None, false),
                Ok(Ok(board)) => (board.generation_verdict(caller.generation), false),
                Ok(Err(_)) => (None, false),
                Err(_) => (None, true),
            };
            return Ok(Response::new(wire::ExitReply {
                verdict: verdict.map(Into::into),
                pending,
            }));
        }
        // Only a failure has a verdict to wait for.
        if success || self.core.is_elastic {
            return Ok(Response::new(wire::ExitReply { verdict: None, pending: false }));
        }
        let verdict =
            timeout(MAX_CALL_WAIT, wait_for_verdict(&mut board, caller.generation)).await.ok();
        Ok(Response::new(wire::ExitReply { verdict: verdict.map(Into::into), pending: false }))
    }
}

/// Returns the present world in pieces.
fn world_pieces(board: &WorldAnnouncements) -> AssignmentReplyPieces {
    let world = board.world.as_ref().map(|published| published.encoded.clone()).unwrap_or_default();
    Box::new((0..world.len()).step_by(WORLD_PIECE_BYTES).map(move |at| {
        let world = Some(world.slice(at..world.len().min(at + WORLD_PIECE_BYTES)));
        Ok(wire::AwaitAssignmentReply { world, missing: Vec::new(), missing_count: 0 })
    }))
}

/// Receives an agent's heartbeats until its connection ends, and sends it its orders.
async fn serve_heartbeats(
    core: &RegistrarCore,
    caller: CallOrigin,
    mut heartbeats: Streaming<wire::Beat>,
    directives: mpsc::Sender<Result<wire::Directive, Status>>,
) {
    let mut board = core.subscribe_announcements();
    let mut closing = core.subscribe_announcements();
    let mut interrupts = core.subscribe_announcements();
    let mut session = None;
    let (mut is_stop_sent, mut interrupted) = (false, false);
    loop {
        tokio::select! {
            // Heartbeats first: a board that changes all the time must not make an agent look
            // silent.
            biased;
            beat = heartbeats.message() => match beat {
                Ok(Some(beat)) => {
                    if let Err(status) = check_protocol_version(beat.protocol_version) {
                        drop(directives.send(Err(status)).await);
                        break;
                    }
                    // Numbered at the first heartbeat: the end of an older connection must not
                    // count any more.
                    session.get_or_insert_with(|| (beat.session, core.next_heartbeat_stream(caller.task)));
                    if !core.record_heartbeat(caller.task, beat.session) {
                        // The end of the stream makes the agent register again.
                        break;
                    }
                }
                Ok(None) | Err(_) => break,
            },
            // Before the verdict: a worker that is interrupted first has time for a checkpoint, even
            // if a faster worker's end has ended the job.
            () = wait_until_job_interrupted(&mut interrupts), if !interrupted => {
                interrupted = true;
                let directive = wire::Directive { stop: None, interrupt: true };
                if directives.send(Ok(directive)).await.is_err() {
                    break;
                }
            }
            verdict = wait_for_worker_end(&mut board, caller), if !is_stop_sent => {
                is_stop_sent = true;
                let directive = wire::Directive { stop: Some(verdict.into()), interrupt: false };
                if directives.send(Ok(directive)).await.is_err() {
                    break;
                }
            }
            // This branch comes after the verdict, so that all tasks get the verdict before the
            // end.
            () = wait_until_closed(&mut closing) => break,
        }
    }
    if let Some((session, stream)) = session {
        core.record_disconnect(caller.task, session, stream);
    }
}

/// Waits for the registrar to close.
async fn wait_until_closed(board: &mut watch::Receiver<WorldAnnouncements>) {
    drop(board.wait_for(|board| board.closed).await);
}

/// Waits until the user interrupts the job.
async fn wait_until_job_interrupted(board: &mut watch::Receiver<WorldAnnouncements>) {
    drop(board.wait_for(|board| board.interrupted).await);
}

/// Waits for the verdict on a generation.
async fn wait_for_verdict(
    board: &mut watch::Receiver<WorldAnnouncements>,
    generation: Generation,
) -> GenerationVerdict {
    match board.wait_for(|board| board.generation_verdict(generation).is_some()).await {
        Ok(board) => board.generation_verdict(generation),
        Err(_) => None,
    }
    .unwrap_or_else(|| GenerationVerdict {
        reason: "the driver is gone".to_owned(),
        cause: None,
        retry: false,
    })
}

/// Waits for the end of a worker, or the verdict on its generation.
async fn wait_for_worker_end(
    board: &mut watch::Receiver<WorldAnnouncements>,
    caller: CallOrigin,
) -> GenerationVerdict {
    let end = |board: &WorldAnnouncements| {
        board
            .worker_end_verdict(caller.task)
            .or_else(|| board.generation_verdict(caller.generation))
    };
    match board.wait_for(|board| end(board).is_some()).await {
        Ok(board) => end(&board),
        Err(_) => None,
    }
    .unwrap_or_else(|| GenerationVerdict {
        reason: "the driver is gone".to_owned(),
        cause: None,
        retry: false,
    })
}

fn call_origin<T>(request: &Request<T>) -> Result<CallOrigin, Status> {
    request.extensions().get().copied().ok_or_else(|| Status::internal("a call came past the gate"))
}

fn check_protocol_version(theirs: u32) -> Result<(), Status> {
    if theirs == PROTOCOL_VERSION {
        return Ok(());
    }
    let reason = format!("this registrar speaks protocol {PROTOCOL_VERSION}, the caller {theirs}");
    let mut status = Status::failed_precondition(reason);
    status.metadata_mut().insert(PROTOCOL_HEADER, PROTOCOL_VERSION.into());
    Err(status)
}

fn refusal_status(refusal: &RegistrationRefusal) -> Status {
    let reason = refusal.to_string();
    match refusal {
        RegistrationRefusal::UnknownTask { .. } => Status::not_found(reason),
        RegistrationRefusal::Duplicate { .. } => Status::already_exists(reason),
        RegistrationRefusal::Stale { .. } | RegistrationRefusal::NotWanted { .. } => {
            Status::failed_precondition(reason)
        }
        RegistrationRefusal::Dismissed { .. } => dismissal_status(&reason),
        RegistrationRefusal::Aborted { .. } | RegistrationRefusal::Finished { .. } => {
            Status::aborted(reason)
        }
    }
}

fn key_value_status(refused: &KeyValueRefusal) -> Status {
    match refused {
        KeyValueRefusal::GenerationOver => Status::aborted(refused.to_string()),
        _ => Status::resource_exhausted(refused.to_string()),
    }
}

fn dismissal_status(reason: &str) -> Status {
    let mut status = Status::aborted(reason);
    status.metadata_mut().insert(DISMISSED_HEADER, 1.into());
    status
}

fn verdict_status(verdict: &GenerationVerdict) -> Status {
    let cause = verdict.cause.map_or_else(String::new, |TaskId(task)| format!(" (task {task})"));
    let mut status = Status::aborted(format!("{}{cause}", verdict.reason));
    if verdict.retry {
        status.metadata_mut().insert(RETRY_HEADER, 1.into());
    }
    status
}
