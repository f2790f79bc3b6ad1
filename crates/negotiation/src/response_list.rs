// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Response lists, downward: every member executes their operations in the same order and updates
//! its cache accordingly.
//!
//! Frame: number of the list, then items until the end. `0 count tensor...` executes one operation
//! on the tensors; each tensor is either `slot * 2` or `1 name signature rows`. `1 name group text`
//! refuses a name and its group. `2 member` ends a join.

use std::sync::Arc;

use crate::{
    CacheId, CachedResponse, FrameReader, FrameResult, FrameWriter, MalformedFrame,
    RequestSignature, ResponseCache,
};

/// A tensor that all ranks have announced.
#[derive(Debug)]
pub struct ReadyTensor {
    /// The request that all ranks agree on.
    pub agreed: Arc<CachedResponse>,
    /// Its id in the cache, if it is in the caches of all ranks.
    pub known: Option<CacheId>,
}

/// Refusal of a tensor because the requests of the ranks differ. All requests of this name fail,
/// and all members of its group.
#[derive(Debug)]
pub struct TensorRefusal {
    /// Name of the tensor.
    pub name: Arc<str>,
    /// Its group; 0 for none.
    pub group: u64,
    /// The error, with the request of every rank.
    pub text: String,
}

/// An item of the next list, as the coordinator plans it.
#[derive(Debug)]
pub enum PlannedListItem {
    /// One operation on these tensors.
    Run(Vec<ReadyTensor>),
    /// The ranks disagree about a tensor.
    Refuse(TensorRefusal),
    /// All members have joined; this one was the last.
    Joined(u32),
}

/// The operations that all ranks execute next.
#[derive(Debug)]
pub struct ResponseList {
    /// Number of the list, from 1.
    pub number: u64,
    /// The items, in the order of their execution.
    pub items: Vec<ResponseItem>,
}

/// An item of a list, with its cache entries resolved.
#[derive(Debug)]
pub enum ResponseItem {
    /// One operation on these tensors.
    Run(Vec<Arc<CachedResponse>>),
    /// The ranks disagree about a tensor.
    Refuse(TensorRefusal),
    /// All members have joined; this one was the last.
    Joined(u32),
}

/// Writes a list and updates the coordinator's cache item by item, exactly as the readers will.
pub fn encode_list_updating_cache(
    number: u64,
    plan: Vec<PlannedListItem>,
    cache: &mut ResponseCache,
    frame: &mut Vec<u8>,
) -> ResponseList {
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
    ResponseList { number, items }
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
) -> FrameResult<Arc<CachedResponse>> {
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
///
/// # Errors
/// The frame is not a list, or names an empty slot of the cache.
pub fn decode_list_updating_cache(
    frame: &[u8],
    cache: &mut ResponseCache,
) -> FrameResult<ResponseList> {
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
    Ok(ResponseList { number, items })
}
