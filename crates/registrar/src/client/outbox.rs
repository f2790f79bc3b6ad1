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

use super::Caller;
use crate::generated as wire;

/// Bytes of records that wait.
const BUDGET: usize = 4 << 20;
/// Bytes in a batch.
const BATCH: usize = 256 << 10;
/// The longest a line waits for room before it is dropped: output must not stop a worker for good.
const PATIENCE: Duration = Duration::from_secs(10);
/// Failed streams in a row after which no confirmation is awaited any more, unless the driver may
/// come back.
const FAILURES: u32 = 5;
/// Time for which a stream stays open before the driver confirms its records.
const CONFIRM: Duration = Duration::from_secs(1);
/// Bytes that are kept until they are confirmed, about.
const KEPT: usize = 1 << 20;

#[derive(Default)]
struct State {
    lines: VecDeque<wire::LogLine>,
    metrics: VecDeque<wire::Metric>,
    bytes: usize,
    /// Batches that were sent, or begun to be, and may have to be sent again; and their bytes.
    unconfirmed: Vec<wire::RecordBatch>,
    kept: usize,
    number: u64,
    dropped: u64,
    flushes: u64,
    /// A line has waited until its limit: no other line waits until a record has left.
    stuck: bool,
}

/// The waiting records of one client.
pub(super) struct Outbox {
    state: Mutex<State>,
    room: Condvar,
    wake: Notify,
    flushed: watch::Sender<u64>,
    source: u64,
    /// Longest time in which a lost driver must return, in milliseconds.
    outage: AtomicU64,
}

impl Outbox {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::default(),
            room: Condvar::new(),
            wake: Notify::new(),
            flushed: watch::Sender::new(0),
            source: rand::random(),
            outage: AtomicU64::new(0),
        }
    }

    /// Flushes wait up to `outage` for a driver that is gone and may come back.
    pub(super) fn wait_out(&self, outage: u64) {
        self.outage.fetch_max(outage, Ordering::AcqRel);
    }

    /// Adds a line; blocks while there is no room, though not for long: where nothing leaves, lines
    /// are dropped at once.
    pub(super) fn push_line(&self, line: wire::LogLine) {
        let mut state = self.state.lock();
        let deadline = Instant::now() + PATIENCE;
        while state.bytes >= BUDGET && !state.stuck {
            if self.room.wait_until(&mut state, deadline).timed_out() {
                state.stuck = true;
            }
        }
        if state.bytes >= BUDGET {
            state.dropped += 1;
            return;
        }
        state.bytes += line.text.len() + 16;
        state.lines.push_back(line);
        self.wake.notify_one();
    }

    /// Adds a metric; drops the oldest ones rather than block.
    pub(super) fn push_metric(&self, metric: wire::Metric) {
        let mut state = self.state.lock();
        while state.bytes >= BUDGET {
            let Some(old) = state.metrics.pop_front() else { break };
            state.bytes -= weight(&old);
            state.dropped += 1;
        }
        if state.bytes >= BUDGET {
            state.dropped += 1;
            return;
        }
        state.bytes += weight(&metric);
        state.metrics.push_back(metric);
        self.wake.notify_one();
    }

    /// Asks for everything added so far to be confirmed. Wait for the receiver to reach the number.
    pub(super) fn flush(&self) -> (u64, watch::Receiver<u64>) {
        let mut state = self.state.lock();
        state.flushes += 1;
        self.wake.notify_one();
        (state.flushes, self.flushed.subscribe())
    }

    /// Returns the next batch, which is kept until it is confirmed.
    fn take(&self) -> Option<wire::RecordBatch> {
        let mut state = self.state.lock();
        if state.lines.is_empty() && state.metrics.is_empty() {
            return None;
        }
        state.number += 1;
        let mut batch = wire::RecordBatch {
            dropped: std::mem::take(&mut state.dropped),
            source: self.source,
            number: state.number,
            ..Default::default()
        };
        let mut size = 0;
        while size < BATCH
            && let Some(line) = state.lines.pop_front()
        {
            size += line.text.len() + 16;
            batch.lines.push(line);
        }
        while size < BATCH
            && let Some(metric) = state.metrics.pop_front()
        {
            size += weight(&metric);
            batch.metrics.push(metric);
        }
        state.bytes -= size;
        state.kept += size;
        state.unconfirmed.push(batch.clone());
        state.stuck = false;
        self.room.notify_all();
        Some(batch)
    }

    /// Returns the records that have to be sent again.
    fn unconfirmed(&self) -> Vec<wire::RecordBatch> {
        self.state.lock().unconfirmed.clone()
    }

    /// Everything that was taken has arrived.
    fn confirmed(&self) {
        let mut state = self.state.lock();
        state.unconfirmed.clear();
        state.kept = 0;
    }

    fn is_full(&self) -> bool {
        self.state.lock().kept >= KEPT
    }

    fn is_empty(&self) -> bool {
        let state = self.state.lock();
        state.lines.is_empty() && state.metrics.is_empty()
    }

    fn wanted(&self) -> u64 {
        self.state.lock().flushes
    }
}

fn weight(metric: &wire::Metric) -> usize {
    metric.kind.len() + metric.data.len() + 16
}

/// Sends what waits, for as long as the client lives.
pub(super) async fn pump(outbox: Arc<Outbox>, caller: Caller) {
    let mut failures = 0;
    let mut first = Instant::now();
    loop {
        match stream(&outbox, &caller).await {
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
        if failures >= FAILURES && first.elapsed() >= outage {
            outbox.flushed.send_replace(outbox.wanted());
        }
        if failures > 0 {
            tokio::time::sleep(Duration::from_millis(100) * failures.min(10)).await;
        }
    }
}

/// One stream of batches: opened by the first record, closed by a flush, or when it is time for a
/// confirmation.
async fn stream(outbox: &Outbox, caller: &Caller) -> Result<(), tonic::Status> {
    let mut batches: VecDeque<wire::RecordBatch> = outbox.unconfirmed().into();
    while batches.is_empty() {
        let wanted = outbox.wanted();
        if let Some(batch) = outbox.take() {
            batches.push_back(batch);
        } else {
            outbox.flushed.send_replace(wanted);
            outbox.wake.notified().await;
        }
    }
    let until = tokio::time::Instant::now() + CONFIRM;
    let (sender, receiver) = mpsc::channel(2);
    let request = caller.request(ReceiverStream::new(receiver));
    let mut stub = caller.stub();
    let mut call = tokio::spawn(async move { stub.records(request).await.map(drop) });
    loop {
        while let Some(batch) = batches.pop_front() {
            tokio::select! {
                sent = sender.send(batch) => if sent.is_err() { return broken(call.await) },
                ended = &mut call => return broken(ended),
            }
        }
        if outbox.is_full() || tokio::time::Instant::now() >= until {
            break;
        }
        let next = loop {
            let wanted = outbox.wanted();
            match outbox.take() {
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
    let wanted = outbox.wanted();
    drop(sender);
    call.await.unwrap_or_else(|error| Err(tonic::Status::internal(error.to_string())))?;
    outbox.confirmed();
    // A record that came since is confirmed by a later flush, so only flushes asked for before
    // count.
    outbox.flushed.send_if_modified(|flushed| {
        let newer = wanted > *flushed && outbox.is_empty();
        if newer {
            *flushed = wanted;
        }
        newer
    });
    Ok(())
}

/// Returns the error of a call that should not have ended.
fn broken(
    ended: Result<Result<(), tonic::Status>, tokio::task::JoinError>,
) -> Result<(), tonic::Status> {
    ended.unwrap_or_else(|error| Err(tonic::Status::internal(error.to_string())))?;
    Err(tonic::Status::aborted("the driver confirmed records before they were sent"))
}
