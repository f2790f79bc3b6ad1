// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Records on their way to the driver: bounded memory, with backpressure to the writer.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::sync::{Notify, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;

use super::authenticated_channel::AuthenticatedChannel;
use crate::generated as wire;
use crate::wire_conversions::duration_millis;

/// Largest total of bytes in waiting records.
const MAX_PENDING_BYTES: usize = 4 << 20;
/// Largest number of bytes in a batch.
// Well below the registrar's limit of 2 MiB for a message.
const MAX_BATCH_BYTES: usize = 256 << 10;
/// Longest time that a line waits for space before it is dropped. Output must not block a worker
/// for ever.
const LINE_BLOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of consecutive failed streams after which flushes stop waiting for a confirmation, if the
/// streams have also failed for the tolerated outage.
const MAX_FAILED_STREAMS: u32 = 5;
/// Shortest tolerated outage. Attempts may fail at once, for example while the network of a host
/// comes back, so their number alone proves nothing.
const MIN_TOLERATED_OUTAGE: Duration = Duration::from_secs(10);
/// Time for which a stream stays open before the driver confirms its records.
const CONFIRMATION_INTERVAL: Duration = Duration::from_secs(1);
/// Approximate limit of bytes that are kept until they are confirmed.
// Unconfirmed records stay in memory until the driver confirms them.
const MAX_UNCONFIRMED_BYTES: usize = 1 << 20;

#[derive(Default)]
struct RecordOutboxState {
    lines: VecDeque<wire::LogLine>,
    metrics: VecDeque<wire::Metric>,
    bytes: usize,
    /// Batches that were sent, wholly or in part, and may have to be sent again.
    unconfirmed: Vec<wire::RecordBatch>,
    unconfirmed_bytes: usize,
    last_batch_number: u64,
    dropped: u64,
    flushes: u64,
    /// Whether a line has waited for `LINE_BLOCK_TIMEOUT`. Then no other line waits until a record
    /// is sent.
    is_stalled: bool,
}

/// The waiting records of one client.
pub(super) struct RecordOutbox {
    state: Mutex<RecordOutboxState>,
    room: Condvar,
    wake: Notify,
    flushed: watch::Sender<u64>,
    source: u64,
    /// Longest time for which the driver may be unreachable, in milliseconds.
    outage: AtomicU64,
}

impl RecordOutbox {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::default(),
            room: Condvar::new(),
            wake: Notify::new(),
            flushed: watch::Sender::new(0),
            // A task has an agent and a worker, and both count their batches from 1.
            source: rand::random(),
            outage: AtomicU64::new(duration_millis(MIN_TOLERATED_OUTAGE)),
        }
    }

    /// Makes flushes wait up to `outage` for a driver that is gone and may come back.
    pub(super) fn tolerate_outage(&self, outage: u64) {
        self.outage.fetch_max(outage, Ordering::AcqRel);
    }

    /// Adds a line. Blocks while the buffer is full, for at most `LINE_BLOCK_TIMEOUT`. As long as
    /// no record is sent after that, lines are dropped at once.
    pub(super) fn push_line(&self, line: wire::LogLine) {
        let mut state = self.state.lock();
        let deadline = Instant::now() + LINE_BLOCK_TIMEOUT;
        while state.bytes >= MAX_PENDING_BYTES && !state.is_stalled {
            if self.room.wait_until(&mut state, deadline).timed_out() {
                state.is_stalled = true;
            }
        }
        if state.bytes >= MAX_PENDING_BYTES {
            state.dropped += 1;
            return;
        }
        // The 16 bytes stand for the record itself: empty lines must not grow the queue without a
        // limit.
        state.bytes += line.text.len() + 16;
        state.lines.push_back(line);
        self.wake.notify_one();
    }

    /// Adds a metric. If the buffer is full, drops the oldest metrics instead of blocking.
    pub(super) fn push_metric(&self, metric: wire::Metric) {
        let mut state = self.state.lock();
        while state.bytes >= MAX_PENDING_BYTES {
            // New metrics are worth more than old ones, and a training step must not wait for them.
            let Some(old) = state.metrics.pop_front() else { break };
            state.bytes -= metric_bytes(&old);
            state.dropped += 1;
        }
        if state.bytes >= MAX_PENDING_BYTES {
            state.dropped += 1;
            return;
        }
        state.bytes += metric_bytes(&metric);
        state.metrics.push_back(metric);
        self.wake.notify_one();
    }

    /// Requests a confirmation of all records added so far. They are confirmed when the receiver's
    /// value reaches the returned number.
    pub(super) fn request_flush(&self) -> (u64, watch::Receiver<u64>) {
        let mut state = self.state.lock();
        state.flushes += 1;
        self.wake.notify_one();
        (state.flushes, self.flushed.subscribe())
    }

    /// Returns the next batch, and keeps a copy until it is confirmed.
    fn take_batch(&self) -> Option<wire::RecordBatch> {
        let mut state = self.state.lock();
        if state.lines.is_empty() && state.metrics.is_empty() {
            return None;
        }
        state.last_batch_number += 1;
        let mut batch = wire::RecordBatch {
            dropped: std::mem::take(&mut state.dropped),
            source: self.source,
            number: state.last_batch_number,
            ..Default::default()
        };
        let mut size = 0;
        while size < MAX_BATCH_BYTES
            && let Some(line) = state.lines.pop_front()
        {
            size += line.text.len() + 16;
            batch.lines.push(line);
        }
        while size < MAX_BATCH_BYTES
            && let Some(metric) = state.metrics.pop_front()
        {
            size += metric_bytes(&metric);
            batch.metrics.push(metric);
        }
        state.bytes -= size;
        state.unconfirmed_bytes += size;
        // Kept before it is sent: if the stream breaks, it is unknown which batches arrived.
        state.unconfirmed.push(batch.clone());
        state.is_stalled = false;
        self.room.notify_all();
        Some(batch)
    }

    /// Returns the records that have to be sent again.
    fn unconfirmed_batches(&self) -> Vec<wire::RecordBatch> {
        self.state.lock().unconfirmed.clone()
    }

    /// Forgets the batches that were sent, which have all arrived.
    fn drop_confirmed_batches(&self) {
        let mut state = self.state.lock();
        state.unconfirmed.clear();
        state.unconfirmed_bytes = 0;
    }

    fn needs_confirmation(&self) -> bool {
        self.state.lock().unconfirmed_bytes >= MAX_UNCONFIRMED_BYTES
    }

    fn is_empty(&self) -> bool {
        let state = self.state.lock();
        state.lines.is_empty() && state.metrics.is_empty()
    }

    fn requested_flushes(&self) -> u64 {
        self.state.lock().flushes
    }
}

fn metric_bytes(metric: &wire::Metric) -> usize {
    metric.kind.len() + metric.data.len() + 16
}

/// Sends waiting records while the client lives.
pub(super) async fn run_outbox(outbox: Arc<RecordOutbox>, caller: AuthenticatedChannel) {
    let mut failures = 0;
    let mut first = Instant::now();
    loop {
        match stream_batches(&outbox, &caller).await {
            Ok(()) => failures = 0,
            Err(status) => {
                if failures == 0 {
                    first = Instant::now();
                }
                failures += 1;
                tracing::debug!(%status, failures, "records did not reach the driver, and are sent \
                                                    again");
            }
        }
        let outage = Duration::from_millis(outbox.outage.load(Ordering::Acquire));
        if failures >= MAX_FAILED_STREAMS && first.elapsed() >= outage {
            // A worker that ends waits for its flush, and must not wait for ever for a driver that
            // is gone.
            outbox.flushed.send_replace(outbox.requested_flushes());
        }
        if failures > 0 {
            tokio::time::sleep(Duration::from_millis(100) * failures.min(10)).await;
        }
    }
}

/// Sends one stream of batches. The first record opens the stream. A flush closes it, or the end of
/// `CONFIRMATION_INTERVAL`.
async fn stream_batches(
    outbox: &RecordOutbox,
    caller: &AuthenticatedChannel,
) -> Result<(), tonic::Status> {
    let mut batches: VecDeque<wire::RecordBatch> = outbox.unconfirmed_batches().into();
    while batches.is_empty() {
        let wanted = outbox.requested_flushes();
        if let Some(batch) = outbox.take_batch() {
            batches.push_back(batch);
        } else {
            outbox.flushed.send_replace(wanted);
            outbox.wake.notified().await;
        }
    }
    let until = tokio::time::Instant::now() + CONFIRMATION_INTERVAL;
    let (sender, receiver) = mpsc::channel(2);
    let request = caller.build_request(ReceiverStream::new(receiver));
    let mut stub = caller.grpc_stub();
    let mut call = tokio::spawn(async move { stub.records(request).await.map(drop) });
    loop {
        while let Some(batch) = batches.pop_front() {
            tokio::select! {
                sent = sender.send(batch) => if sent.is_err() { return early_end_status(call.await) },
                ended = &mut call => return early_end_status(ended),
            }
        }
        if outbox.needs_confirmation() || tokio::time::Instant::now() >= until {
            break;
        }
        let next = loop {
            let wanted = outbox.requested_flushes();
            match outbox.take_batch() {
                Some(batch) => break Some(batch),
                None if wanted > *outbox.flushed.borrow() => break None,
                None => {
                    if tokio::time::timeout_at(until, outbox.wake.notified()).await.is_err() {
                        break None;
                    }
                }
            }
        };
        let Some(next) = next else { break };
        batches.push_back(next);
    }
    let wanted = outbox.requested_flushes();
    // The end of the stream asks the registrar for its reply, which confirms all batches.
    drop(sender);
    call.await.unwrap_or_else(|error| Err(tonic::Status::internal(error.to_string())))?;
    outbox.drop_confirmed_batches();
    // A record added since then is confirmed by a later flush, so only earlier flushes count.
    outbox.flushed.send_if_modified(|flushed| {
        let newer = wanted > *flushed && outbox.is_empty();
        if newer {
            *flushed = wanted;
        }
        newer
    });
    Ok(())
}

/// Returns the error of a call that ended too early.
fn early_end_status(
    ended: Result<Result<(), tonic::Status>, tokio::task::JoinError>,
) -> Result<(), tonic::Status> {
    ended.unwrap_or_else(|error| Err(tonic::Status::internal(error.to_string())))?;
    Err(tonic::Status::aborted("the driver confirmed records before they were sent"))
}
