// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Downward: lists of operations that every member executes in the same order, changing its cache
//! on the way.
//!
//! Frame: number, then items until the end. `0 count tensor...` executes one operation over the
//! tensors, each either `slot * 2` or `1 name signature rows`. `1 name group text` refuses a name
//! and its group. `2 member` ends a join.

use std::sync::Arc;

use super::decide::{Planned, Ready, Refusal};
use super::join::{JOIN, stand_in};
use super::{Finished, ProcessSet, Step, Stop, kind};
use crate::cache::{Agreed, Cache};
use crate::signature::Signature;
use crate::wire::{Malformed, Reader, Writer};
use crate::{Cause, Error};

/// One step of a list, resolved.
#[derive(Debug)]
pub(super) enum Item {
    Run(Vec<Arc<Agreed>>),
    Refuse(Refusal),
    /// All have joined; the last member was this.
    Joined(u32),
}

/// Writes a list and makes its changes to the coordinator's cache, item by item as the readers
/// will.
pub(super) fn encode(
    number: u64,
    plan: Vec<Planned>,
    cache: &mut Cache,
    frame: &mut Vec<u8>,
) -> Vec<Item> {
    let mut writer = Writer(frame);
    writer.number(number);
    let mut items = Vec::with_capacity(plan.len());
    for step in plan {
        match step {
            Planned::Run(operation) => {
                writer.byte(0);
                writer.number(operation.len() as u64);
                let tensors = operation.into_iter();
                let agreed = tensors.map(|ready| encode_tensor(ready, number, cache, &mut writer));
                items.push(Item::Run(agreed.collect()));
            }
            Planned::Refuse(refusal) => {
                writer.byte(1);
                writer.text(&refusal.name);
                writer.fixed(refusal.group);
                writer.text(&refusal.text);
                cache.remove(&refusal.name, number);
                items.push(Item::Refuse(refusal));
            }
            Planned::Joined(last) => {
                writer.byte(2);
                writer.number(last.into());
                items.push(Item::Joined(last));
            }
        }
    }
    items
}

fn encode_tensor(
    ready: Ready,
    number: u64,
    cache: &mut Cache,
    writer: &mut Writer<'_>,
) -> Arc<Agreed> {
    // An earlier tensor of this very list may have pushed the entry out.
    if let Some(id) = ready.known.filter(|id| cache.holds(*id)) {
        writer.number(u64::from(id.slot) * 2);
        cache.touch(id.slot);
        return ready.agreed;
    }
    // It is new to the readers, so it must be new here.
    let agreed = ready.agreed.anew();
    writer.number(1);
    writer.text(&agreed.name);
    agreed.signature.encode(writer);
    writer.numbers(agreed.rows.iter().copied());
    cache.put(Arc::clone(&agreed), number);
    agreed
}

fn decode_tensor(
    reader: &mut Reader<'_>,
    number: u64,
    cache: &mut Cache,
) -> Result<Arc<Agreed>, Malformed> {
    let head = reader.number()?;
    if head % 2 == 0 {
        let slot = u32::try_from(head / 2).map_err(|_| Malformed::Cache(head / 2))?;
        let agreed = cache.current(slot).map(Arc::clone).ok_or(Malformed::Cache(slot.into()))?;
        cache.touch(slot);
        return Ok(agreed);
    }
    let name = Arc::from(reader.text()?);
    let signature = Signature::decode(reader)?;
    let agreed = Arc::new(Agreed::new(name, signature, reader.numbers()?));
    cache.put(Arc::clone(&agreed), number);
    Ok(agreed)
}

/// Reads a list, making its changes to the cache.
pub(super) fn decode(frame: &[u8], cache: &mut Cache) -> Result<(u64, Vec<Item>), Malformed> {
    let mut reader = Reader(frame);
    let number = reader.number()?;
    let mut items = Vec::new();
    while !reader.is_empty() {
        items.push(match reader.byte()? {
            0 => {
                let tensors = reader.count()?;
                let tensors = (0..tensors).map(|_| decode_tensor(&mut reader, number, cache));
                Item::Run(tensors.collect::<Result<_, _>>()?)
            }
            1 => {
                let name: Arc<str> = Arc::from(reader.text()?);
                cache.remove(&name, number);
                let (group, text) = (reader.fixed()?, reader.text()?.to_owned());
                Item::Refuse(Refusal { name, group, text })
            }
            2 => Item::Joined(reader.small()?),
            other => return Err(Malformed::Tag(other)),
        });
    }
    Ok((number, items))
}

impl ProcessSet {
    pub(super) fn on_list(
        &mut self,
        frame: &[u8],
        finished: &mut Vec<Finished>,
    ) -> Result<(), Stop> {
        // Those below first: they are farther away.
        self.send_down(kind::LIST, frame)?;
        let (number, items) = decode(frame, &mut self.cache)?;
        if number != self.lists + 1 {
            return Err(Malformed::Order(number).into());
        }
        self.apply(number, items, finished)?;
        Ok(())
    }

    /// Starts what a list says.
    pub(super) fn apply(
        &mut self,
        number: u64,
        items: Vec<Item>,
        finished: &mut Vec<Finished>,
    ) -> Step {
        self.lists = number;
        self.joins.goes_on();
        self.inquiries.forget(JOIN);
        self.watch.forget(JOIN);
        self.options.tracer.timeline.cycle();
        self.statistics.lists += 1;
        if self.leaving.as_ref().is_some_and(|leaving| number > leaving.executed) {
            return Ok(());
        }
        for item in items {
            match item {
                Item::Run(tensors) => self.run(number, tensors)?,
                Item::Refuse(refusal) => self.refuse(refusal, finished),
                Item::Joined(last) => self.all_joined(last, finished),
            }
        }
        if self.tree.children.is_empty() {
            self.cache.forget_until(number);
        }
        Ok(())
    }

    fn run(&mut self, list: u64, tensors: Vec<Arc<Agreed>>) -> Step {
        let mut entries = Vec::with_capacity(tensors.len());
        let mut unknown = None;
        for agreed in tensors {
            match self.local.remove(&agreed.name) {
                Some(entry) => entries.push((entry, agreed)),
                None if self.joins.own().is_some() => entries.push((stand_in(&agreed), agreed)),
                None => unknown = Some(agreed),
            }
        }
        self.statistics.operations += 1;
        self.statistics.tensors += entries.len() as u64;
        let span =
            if self.options.tracer.is_on() { self.trace_batch(list, &entries) } else { None };
        self.execution.push(list, entries, span);
        match unknown {
            None => Ok(()),
            Some(agreed) => Err(Cause::Protocol {
                rank: self.members[0],
                reason: format!(
                    "a tensor that this rank did not announce is to be executed: {}",
                    agreed.name
                ),
            }),
        }
    }

    fn refuse(&mut self, refusal: Refusal, finished: &mut Vec<Finished>) {
        let Refusal { name, group, text } = refusal;
        self.forget_group(group);
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
                finished.push(Finished { handle: entry.handle, name, result: Err(error) });
            }
        }
    }
}
