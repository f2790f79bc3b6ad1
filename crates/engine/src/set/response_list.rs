// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Response lists, downward: every member executes their operations in the same order and updates
//! its cache accordingly.
//!
//! Frame: number of the list, then items until the end. `0 count tensor...` executes one operation
//! on the tensors; each tensor is either `slot * 2` or `1 name signature rows`. `1 name group text`
//! refuses a name and its group. `2 member` ends a join.

use std::sync::Arc;

use farandole_negotiation::{
    CachedResponse, FrameReader, FrameWriter, MalformedFrame, RequestSignature, ResponseCache,
};

use super::coordinator_decisions::{PlannedListItem, ReadyTensor, TensorRefusal};
use super::join::{JOIN_TENSOR_NAME, substitute_entry};
use super::{FinishedRequest, FrameFailure, ProcessSet, StepResult, frame_kinds};
use crate::{Error, StopCause};

/// An item of a list, with its cache entries resolved.
#[derive(Debug)]
pub(super) enum ResponseItem {
    Run(Vec<Arc<CachedResponse>>),
    Refuse(TensorRefusal),
    /// All members have joined; this one was the last.
    Joined(u32),
}

/// Writes a list and updates the coordinator's cache item by item, exactly as the readers will.
pub(super) fn encode_list_updating_cache(
    number: u64,
    plan: Vec<PlannedListItem>,
    cache: &mut ResponseCache,
    frame: &mut Vec<u8>,
) -> Vec<ResponseItem> {
    let mut writer = FrameWriter(frame);
    writer.write_varint(number);
    let mut items = Vec::with_capacity(plan.len());
    for step in plan {
        match step {
            PlannedListItem::Run(operation) => {
                writer.write_byte(0);
                writer.write_varint(operation.len() as u64);
                let tensors = operation.into_iter();
                let agreed = tensors.map(|ready| encode_tensor(ready, number, cache, &mut writer));
                items.push(ResponseItem::Run(agreed.collect()));
            }
            PlannedListItem::Refuse(refusal) => {
                writer.write_byte(1);
                writer.write_text(&refusal.name);
                writer.write_u64(refusal.group);
                writer.write_text(&refusal.text);
                cache.remove_name(&refusal.name, number);
                items.push(ResponseItem::Refuse(refusal));
            }
            PlannedListItem::Joined(last) => {
                writer.write_byte(2);
                writer.write_varint(last.into());
                items.push(ResponseItem::Joined(last));
            }
        }
    }
    items
}

fn encode_tensor(
    ready: ReadyTensor,
    number: u64,
    cache: &mut ResponseCache,
    writer: &mut FrameWriter<'_>,
) -> Arc<CachedResponse> {
    // An earlier tensor of the same list may have evicted the entry.
    if let Some(id) = ready.known.filter(|id| cache.contains_id(*id)) {
        // Without the version: at this list, all caches are equal (NE-1).
        writer.write_varint(u64::from(id.slot) * 2);
        cache.mark_used(id.slot);
        return ready.agreed;
    }
    // The readers create a new entry, so the coordinator must do it too.
    let agreed = ready.agreed.without_splits();
    writer.write_varint(1);
    writer.write_text(&agreed.name);
    agreed.signature.encode_to(writer);
    writer.write_varints(agreed.rows.iter().copied());
    cache.insert_response(Arc::clone(&agreed), number);
    agreed
}

fn decode_tensor(
    reader: &mut FrameReader<'_>,
    number: u64,
    cache: &mut ResponseCache,
) -> Result<Arc<CachedResponse>, MalformedFrame> {
    let head = reader.read_varint()?;
    if head % 2 == 0 {
        let slot = u32::try_from(head / 2).map_err(|_| MalformedFrame::Cache(head / 2))?;
        let agreed = cache
            .response_in_slot(slot)
            .map(Arc::clone)
            .ok_or(MalformedFrame::Cache(slot.into()))?;
        cache.mark_used(slot);
        return Ok(agreed);
    }
    let name = Arc::from(reader.read_text()?);
    let signature = RequestSignature::decode_from(reader)?;
    let agreed = Arc::new(CachedResponse::new(name, signature, reader.read_varints()?));
    cache.insert_response(Arc::clone(&agreed), number);
    Ok(agreed)
}

/// Reads a list and applies its changes to the cache.
pub(super) fn decode_list_updating_cache(
    frame: &[u8],
    cache: &mut ResponseCache,
) -> Result<(u64, Vec<ResponseItem>), MalformedFrame> {
    let mut reader = FrameReader(frame);
    let number = reader.read_varint()?;
    let mut items = Vec::new();
    while !reader.is_empty() {
        items.push(match reader.read_byte()? {
            0 => {
                let tensors = reader.read_count()?;
                let tensors = (0..tensors).map(|_| decode_tensor(&mut reader, number, cache));
                ResponseItem::Run(tensors.collect::<Result<_, _>>()?)
            }
            1 => {
                let name: Arc<str> = Arc::from(reader.read_text()?);
                cache.remove_name(&name, number);
                let (group, text) = (reader.read_u64()?, reader.read_text()?.to_owned());
                ResponseItem::Refuse(TensorRefusal { name, group, text })
            }
            2 => ResponseItem::Joined(reader.read_u32()?),
            other => return Err(MalformedFrame::Tag(other)),
        });
    }
    Ok((number, items))
}

impl ProcessSet {
    pub(super) fn on_response_list(
        &mut self,
        frame: &[u8],
        finished: &mut Vec<FinishedRequest>,
    ) -> Result<(), FrameFailure> {
        // Forward the list to the children first, because they have the longer way.
        self.send_to_children(frame_kinds::RESPONSE_LIST, frame)?;
        let (number, items) = decode_list_updating_cache(frame, &mut self.cache)?;
        if number != self.lists + 1 {
            return Err(MalformedFrame::ListOutOfOrder(number).into());
        }
        self.apply_list(number, items, finished)?;
        Ok(())
    }

    /// Applies the items of a list.
    pub(super) fn apply_list(
        &mut self,
        number: u64,
        items: Vec<ResponseItem>,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult {
        self.lists = number;
        self.joins.restart_join_wait();
        self.inquiries.forget_tensor(JOIN_TENSOR_NAME);
        self.watch.forget_tensor(JOIN_TENSOR_NAME);
        self.options.tracer.timeline.mark_cycle();
        self.statistics.lists += 1;
        if self.departure.as_ref().is_some_and(|leaving| number > leaving.executed) {
            // The departing rank does not execute this list, so it cannot be completed.
            return Ok(());
        }
        for item in items {
            match item {
                ResponseItem::Run(tensors) => self.queue_operation(number, tensors)?,
                ResponseItem::Refuse(refusal) => self.refuse_entries(refusal, finished),
                ResponseItem::Joined(last) => self.complete_join(last, finished),
            }
        }
        // No member below can announce an entry that this list has dropped.
        if self.tree.children.is_empty() {
            self.cache.forget_dropped_entries_until(number);
        }
        Ok(())
    }

    fn queue_operation(&mut self, list: u64, tensors: Vec<Arc<CachedResponse>>) -> StepResult {
        let mut entries = Vec::with_capacity(tensors.len());
        let mut unknown = None;
        for agreed in tensors {
            match self.local.remove(&agreed.name) {
                Some(entry) => entries.push((entry, agreed)),
                None if self.joins.own_join().is_some() => {
                    entries.push((substitute_entry(&agreed), agreed))
                }
                None => unknown = Some(agreed),
            }
        }
        self.statistics.operations += 1;
        self.statistics.tensors += entries.len() as u64;
        let span = if self.options.tracer.is_enabled() {
            self.begin_batch_span(list, &entries)
        } else {
            None
        };
        // Queued even if a tensor is unknown: its entries then fail with the engine, and none is
        // lost.
        self.execution.push_batch(list, entries, span);
        match unknown {
            None => Ok(()),
            Some(agreed) => Err(StopCause::Protocol {
                rank: self.members[0],
                reason: format!(
                    "a tensor that this rank did not announce is to be executed: {}",
                    agreed.name
                ),
            }),
        }
    }

    fn refuse_entries(&mut self, refusal: TensorRefusal, finished: &mut Vec<FinishedRequest>) {
        let TensorRefusal { name, group, text } = refusal;
        self.drop_refused_group(group);
        let mut refused = vec![name];
        if group != 0 {
            let grouped = self.local.values().filter(|entry| entry.group == group);
            refused.extend(grouped.map(|entry| Arc::clone(&entry.name)));
        }
        let text: Arc<str> = text.into();
        for name in refused {
            if let Some(entry) = self.local.remove(&name) {
                self.trace_refusal(&name);
                let error = Error::Mismatch { tensor: Arc::clone(&name), text: Arc::clone(&text) };
                finished.push(FinishedRequest { handle: entry.handle, name, result: Err(error) });
            }
        }
    }
}
