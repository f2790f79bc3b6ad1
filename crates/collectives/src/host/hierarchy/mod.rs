// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce in the host, across hosts and back.
//!
//! Elements are cut in chunks. In every host a chunk is carried by one member, in turns: the others
//! post it their inputs, and it joins them with its own to the host's partial. The `H` carriers of
//! a chunk are a pipeline of their own: each owns one part of the chunk, receives that part's
//! partials, makes the result, and sends it to the others. Then each hands the whole chunk out in
//! its host. 4 steps, all in progress at the same time for different chunks. With `L` members on
//! each of `H` hosts every member sends `2 * (H - 1) / H * N / L` bytes to other hosts (partials of
//! 16-bit floats take twice their bytes on the way to the owner, unless the reduction rounds them)
//! and `2 * (L - 1) / L * N` within its own.
//!
//! On the link from `r` to `q` goes a fixed sequence of messages: for `t = 0, 1, ...` first the
//! early message for chunk `t`, then the late one for chunk `t - A`; empty ones are left out. `A`
//! is smaller between hosts than within them ([`Schedule::ahead`]).
//!
//! ```text
//! same host:    early(t): r's input, if q carries t            late(t): the result, if r carries t
//! other host:   early(t): the partial of q's part, if both do  late(t): the result of r's part, if both do
//! ```
//!
//! So a result goes to other hosts after partials up to `A` (between) chunks later, which need
//! inputs that come after results of `A` (within) chunks before those. The difference of both is
//! how many chunks are between hosts at once.
//!
//! **No deadlock.** For each `t` in order, let there be these steps: the inputs, partials and
//! reduction of `t` in one; then the results of `t - A` (between) go between hosts; then the
//! results of `t - A` (within) go within hosts, after they went between them, as that `A` is not
//! smaller. Every link has its messages in the order of these steps. Suppose no member can move,
//! and consider the first step that is not over. All messages of earlier steps have been read, so
//! its messages are the first on their links, and the rings have room for some of them. If the step
//! sends results, they were made or have arrived, so the sender can write, and the receiver can
//! store what arrives. If it is a reduction, let `b` be the first byte of the chunk that is not
//! reduced. The bytes before it are reduced, hence joined by all carriers and no longer in rings.
//! All carriers come to `b` next, and have the inputs, as these are the first on their links. They
//! can write the partial: the ring to the owner has room, and of the own store at least one slot is
//! free. Then the owner has all partials of `b`. So some member can move, however small rings are.
//! [`Schedule`] cuts chunks so that they are large enough for partials of several chunks. Earlier
//! and later operations change nothing: see `pipeline`.

pub(super) mod program;
mod schedule;

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use farandole_transport::Link;

use super::UNIT;
use super::copies::Copies;
use super::message::Message;
use super::peers::{Job, Moved, Peers};
use super::position::Stream;
use crate::Result;
use crate::buffer::Flat;
use crate::kernel::Reducer;
use schedule::{Course, Schedule};

/// Progress of something through the chunks that this member carries.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    chunk: usize,
    /// Bytes of elements.
    at: usize,
}

/// A link over which something goes, in the course of hierarchies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    link: usize,
    host: usize,
    out: Course,
    back: Course,
}

/// Returns the links over which something goes: among equally full hosts those within the host, and
/// one to each other host.
fn routes(peers: &Peers) -> Arc<[Route]> {
    let route = |link: usize| {
        let (own, peer) = (peers.member, peers.member_of(link));
        let course = |from, to| Course::new(&peers.hosts, from, to);
        Route { link, host: peers.hosts.of(peer), out: course(own, peer), back: course(peer, own) }
    };
    (0..peers.links.len())
        .map(route)
        .filter(|route| !route.out.is_empty() || !route.back.is_empty())
        .collect()
}

/// Results of a chunk that were stored, by host; for handing them out.
struct Arrived {
    chunk: usize,
    bytes: Vec<usize>,
}

pub(super) struct Hierarchy {
    reducer: Reducer,
    inputs: Flat,
    outputs: Flat,
    schedule: Schedule,
    member: usize,
    host: usize,
    /// Members on this host: every so many chunks are carried by this one.
    stride: usize,
    /// Links within the host.
    local: Range<usize>,
    /// The same among the routes.
    near: Range<usize>,
    routes: Arc<[Route]>,
    /// By route.
    streams: Vec<Stream>,
    joining: Cursor,
    reducing: Cursor,
    /// Own parts' partials, by carried chunk.
    store: Vec<Vec<u8>>,
    arrived: VecDeque<Arrived>,
    /// The first of the chunks that this member carries and has not handed out.
    handed_out: usize,
    /// Routes to the other carriers of the chunk that is reduced.
    carriers: Vec<usize>,
}

impl Hierarchy {
    pub(super) fn new(
        peers: &mut Peers,
        reducer: Reducer,
        inputs: Flat,
        outputs: Flat,
    ) -> Result<Self> {
        let mut store = std::mem::take(&mut peers.scratch.store);
        let routes = match &peers.scratch.routes {
            Some(routes) => Arc::clone(routes),
            None => Arc::clone(peers.scratch.routes.insert(routes(peers))),
        };
        let (peers, hosts) = (&*peers, &peers.hosts);
        let expansion = reducer.expansion();
        let schedule = Schedule::new(inputs.len(), hosts, expansion, peers.capacity)
            .ok_or_else(|| peers.too_small())?;
        let (member, host) = (peers.member, hosts.own());
        let stream = |route: &Route| Stream {
            writing: schedule.seek(0, &route.out),
            reading: schedule.seek(0, &route.back),
        };
        let local = peers.local_links();
        let before = |link| routes.partition_point(|route| route.link < link);
        let first = Cursor { chunk: member - hosts.members(host).start, at: 0 };
        store.resize_with(schedule.begun(host), Vec::new);
        let slot = schedule.longest_part() * expansion;
        store.iter_mut().filter(|old| old.len() < slot).for_each(|old| old.resize(slot, 0));
        Ok(Self {
            streams: routes.iter().map(stream).collect(),
            near: before(local.start)..before(local.end),
            local,
            routes,
            store,
            stride: hosts.members(host).len(),
            joining: first,
            reducing: first,
            arrived: VecDeque::new(),
            handed_out: first.chunk,
            carriers: Vec::new(),
            reducer,
            inputs,
            outputs,
            schedule,
            member,
            host,
        })
    }

    /// Returns the route to the carrier of a chunk in another host.
    fn route_to(&self, peers: &Peers, host: usize, chunk: usize) -> usize {
        let link = peers.link_to(peers.hosts.carrier(host, chunk));
        self.routes.partition_point(|route| route.link < link)
    }

    fn slot(&self, chunk: usize) -> usize {
        chunk / self.stride % self.store.len()
    }

    /// Sends a carrier on this host what the link takes of this member's input.
    fn post(&mut self, index: usize, link: &mut Link, copies: &mut Copies) -> Result<bool> {
        let Stream { writing, .. } = &mut self.streams[index];
        let Some(chunk) = writing.early() else { return Ok(false) };
        let (start, inputs) = (self.schedule.chunk(chunk).0, &self.inputs);
        let put = |at, to: &mut [u8]| copies.read(inputs, start + at, to);
        let any = writing.message.put(&mut *link.sender, put)?;
        self.wrote(index);
        Ok(any)
    }

    fn wrote(&mut self, index: usize) {
        let Stream { writing, .. } = &mut self.streams[index];
        if writing.message.is_finished() {
            *writing = self.schedule.next(*writing, &self.routes[index].out);
        }
    }

    fn read(&mut self, index: usize) {
        let Stream { reading, .. } = &mut self.streams[index];
        if reading.message.is_finished() {
            *reading = self.schedule.next(*reading, &self.routes[index].back);
        }
    }

    /// Joins inputs of this host that have arrived, into the window towards the owner of the part
    /// they are in, or into the own store.
    fn join(&mut self, peers: &mut Peers) -> Result<bool> {
        let Cursor { chunk, at } = self.joining;
        let (start, len) = self.schedule.chunk(chunk);
        if chunk >= self.schedule.chunks() {
            return Ok(false);
        }
        let Some((owner, part)) = self.schedule.owner(chunk, at) else { return Ok(false) };
        let expansion = self.reducer.expansion();
        let ready = |stream: &Stream| stream.reading.early() == Some(chunk);
        let near = self.near.clone().zip(self.local.clone());
        if !self.streams[self.near.clone()].iter().all(ready) {
            return Ok(false);
        }
        // Bytes of elements that can be joined; all are whole units, but for the chunk's end.
        let mut bytes = part.end - at;
        for (index, link) in near.clone() {
            bytes = bytes.min(
                arrived(&mut peers.links[link], &self.streams[index].reading.message, UNIT)?.0,
            );
        }
        let target = (owner != self.host).then(|| self.route_to(peers, owner, chunk));
        let target = target.map(|target| (target, self.routes[target].link));
        if let Some((target, link)) = target {
            if self.streams[target].writing.early() != Some(chunk) {
                return Ok(false);
            }
            let window = peers.links[link].sender.window()?.len();
            bytes = bytes.min(window / (UNIT * expansion) * UNIT);
        } else if chunk / self.stride >= self.reducing.chunk / self.stride + self.store.len() {
            return Ok(false);
        }
        if bytes == 0 {
            return Ok(false);
        }
        let slot = self.slot(chunk);
        let (before, rest) = peers.links.split_at_mut(self.local.start);
        let (local, after) = rest.split_at_mut(self.local.len());
        let out = match target {
            None => &mut self.store[slot][(at - part.start) * expansion..],
            Some((_, link)) if link < self.local.start => before[link].sender.window()?,
            Some((_, link)) => after[link - self.local.end].sender.window()?,
        };
        let windows = local.iter_mut().map(|link| link.receiver.window());
        let windows = windows.collect::<farandole_transport::Result<Vec<&[u8]>>>()?;
        // Links to earlier members come first.
        let place = self.member - self.local.start;
        join_blocks(&self.reducer, &windows, place, &self.inputs, start + at, bytes, out);
        if let Some((target, link)) = target {
            let message = &mut self.streams[target].writing.message;
            let wire = (bytes * expansion).next_multiple_of(UNIT);
            out[bytes * expansion..wire].fill(0);
            message.advance(wire);
            peers.links[link].sender.commit(wire)?;
            self.wrote(target);
        }
        let wire = bytes.next_multiple_of(UNIT);
        for (index, link) in near {
            peers.links[link].receiver.release(wire)?;
            self.streams[index].reading.message.advance(wire);
            self.read(index);
        }
        self.joining.at += bytes;
        if self.joining.at == len {
            self.joining = Cursor { chunk: chunk + self.stride, at: 0 };
        }
        Ok(true)
    }

    /// Makes results of the partials that have arrived of the own part.
    fn reduce(&mut self, peers: &mut Peers) -> Result<bool> {
        let Cursor { chunk, at } = self.reducing;
        if chunk >= self.schedule.chunks() {
            return Ok(false);
        }
        let (part, len) = self.schedule.part(chunk, self.host);
        // The own part may be reduced before the parts behind it are joined; then joining is still
        // at an earlier chunk.
        let joined = match self.joining.chunk.cmp(&chunk) {
            Ordering::Less => 0,
            Ordering::Equal => self.joining.at.saturating_sub(part).min(len),
            Ordering::Greater => len,
        };
        let mut bytes = joined.saturating_sub(at);
        if len == 0 && self.joining.chunk > chunk {
            self.reduced(chunk, 0, len);
            return Ok(true);
        }
        if bytes == 0 {
            return Ok(false);
        }
        let expansion = self.reducer.expansion();
        let others = (0..peers.hosts.count()).filter(|host| *host != self.host);
        let mut carriers = std::mem::take(&mut self.carriers);
        carriers.clear();
        carriers.extend(others.map(|host| self.route_to(peers, host, chunk)));
        for index in &carriers {
            let Stream { reading, .. } = &self.streams[*index];
            if reading.early() != Some(chunk) {
                bytes = 0;
                break;
            }
            let link = &mut peers.links[self.routes[*index].link];
            bytes = bytes.min(arrived(link, &reading.message, UNIT * expansion)?.0 / expansion);
        }
        if bytes == 0 {
            self.carriers = carriers;
            return Ok(false);
        }
        let own = &self.store[self.slot(chunk)][at * expansion..(at + bytes) * expansion];
        let mut partials = Vec::with_capacity(carriers.len() + 1);
        // Carriers and links are in the order of the hosts.
        let (mut rest, mut passed) = (&mut peers.links[..], 0);
        for index in &carriers {
            let link = self.routes[*index].link;
            let Some((carrier, after)) = rest.split_at_mut(link - passed).1.split_first_mut()
            else {
                break;
            };
            partials.push(carrier.receiver.window()?);
            (rest, passed) = (after, link + 1);
        }
        partials.insert(self.host, own);
        let start = self.schedule.chunk(chunk).0 + part + at;
        self.outputs.fill(start, bytes, |from, out| {
            let range = from * expansion..(from + out.len()) * expansion;
            let partials: Vec<&[u8]> =
                partials.iter().map(|partial| &partial[range.clone()]).collect();
            self.reducer.finish(&partials, out);
        });
        let wire = (bytes * expansion).next_multiple_of(UNIT);
        for index in &carriers {
            peers.links[self.routes[*index].link].receiver.release(wire)?;
            self.streams[*index].reading.message.advance(wire);
            self.read(*index);
        }
        self.carriers = carriers;
        self.reduced(chunk, bytes, len);
        Ok(true)
    }

    fn reduced(&mut self, chunk: usize, bytes: usize, len: usize) {
        self.stored(chunk, self.host, bytes);
        self.reducing.at += bytes;
        if self.reducing.at == len {
            self.reducing = Cursor { chunk: chunk + self.stride, at: 0 };
        }
    }

    /// Notes results of a chunk that this member carries.
    fn stored(&mut self, chunk: usize, host: usize, bytes: usize) {
        if self.local.is_empty() {
            return;
        }
        while self.handed_out + self.arrived.len() * self.stride <= chunk {
            let next = self.handed_out + self.arrived.len() * self.stride;
            let bytes = vec![0; self.schedule.hosts().count()];
            self.arrived.push_back(Arrived { chunk: next, bytes });
        }
        if let Some(arrived) = self.arrived.iter_mut().find(|arrived| arrived.chunk == chunk) {
            arrived.bytes[host] += bytes;
        }
    }

    /// Results at the beginning of a carried chunk, up to the first that is missing.
    fn complete(&self, chunk: usize) -> usize {
        let Some(arrived) = self.arrived.iter().find(|arrived| arrived.chunk == chunk) else {
            return 0;
        };
        let mut complete = 0;
        for (host, bytes) in arrived.bytes.iter().enumerate() {
            complete += bytes;
            if *bytes < self.schedule.part(chunk, host).1 {
                break;
            }
        }
        complete
    }

    /// Sends results: the own parts to the other hosts' carriers, whole chunks within the host.
    fn send(&mut self, index: usize, link: &mut Link, copies: &mut Copies) -> Result<bool> {
        let ahead = self.routes[index].out.ahead;
        let Some(chunk) = self.streams[index].writing.late(ahead) else { return Ok(false) };
        let start = self.schedule.chunk(chunk).0;
        let (start, len, ready) = if self.near.contains(&index) {
            (start, self.schedule.chunk(chunk).1, self.complete(chunk))
        } else {
            let (part, len) = self.schedule.part(chunk, self.host);
            let done = if self.reducing.chunk > chunk { len } else { self.reducing.at };
            (start + part, len, if self.reducing.chunk < chunk { 0 } else { done })
        };
        let Stream { writing, .. } = &mut self.streams[index];
        let most = if ready == len {
            usize::MAX
        } else {
            (ready / UNIT * UNIT).saturating_sub(writing.message.done())
        };
        let outputs = &self.outputs;
        let put = |at, to: &mut [u8]| copies.read(outputs, start + at, to);
        let any = writing.message.put_some(most, &mut *link.sender, put)?;
        self.wrote(index);
        Ok(any)
    }

    /// Stores results.
    fn fetch(&mut self, index: usize, link: &mut Link) -> Result<bool> {
        let Stream { reading, .. } = &mut self.streams[index];
        let Some(chunk) = reading.late(self.routes[index].back.ahead) else { return Ok(false) };
        let start = self.schedule.chunk(chunk).0;
        let (host, local) = (self.routes[index].host, self.near.contains(&index));
        let start = if local { start } else { start + self.schedule.part(chunk, host).0 };
        let outputs = &self.outputs;
        let mut bytes = 0;
        let any = reading.message.take(&mut *link.receiver, |at, from| {
            bytes = from.len();
            outputs.write(start + at, from);
        })?;
        self.read(index);
        if !local {
            self.stored(chunk, host, bytes);
        }
        Ok(any)
    }

    /// Forgets chunks that were handed out.
    fn forget(&mut self) {
        while let Some(front) = self.arrived.front() {
            let waits = |index: usize| {
                let ahead = self.routes[index].out.ahead;
                !self.streams[index].writing.is_past_late(ahead, front.chunk)
            };
            if self.near.clone().any(waits) {
                return;
            }
            self.handed_out = front.chunk + self.stride;
            self.arrived.pop_front();
        }
    }
}

/// Returns the bytes of the window that belong to this message and are whole units, or its end.
/// Twice: without padding and with it.
pub(super) fn arrived(link: &mut Link, message: &Message, unit: usize) -> Result<(usize, usize)> {
    let left = message.left();
    let whole = |bytes: usize| if bytes >= left { left } else { bytes / unit * unit };
    let window = link.receiver.window()?.len();
    let mut wire = whole(window);
    if wire == 0
        && window > 0
        && let Err(end) = link.receiver.awaits()
    {
        // The rest may have come together with the end.
        wire = whole(link.receiver.window()?.len());
        if wire == 0 {
            return Err(end.into());
        }
    }
    Ok((message.payload(wire), wire))
}

/// Joins the inputs of a host in member order, `place` being this member's among them.
pub(super) fn join_blocks(
    reducer: &Reducer,
    windows: &[&[u8]],
    place: usize,
    own: &Flat,
    start: usize,
    bytes: usize,
    out: &mut [u8],
) {
    let begin = |inputs: &[&[u8]], out: &mut [u8]| reducer.begin(inputs, out);
    let from = Inputs { windows, place, own, start, bytes };
    from.join(reducer.expansion(), begin, out);
}

/// Inputs of a host in member order, `place` being this member's among them.
pub(super) struct Inputs<'a> {
    pub(super) windows: &'a [&'a [u8]],
    pub(super) place: usize,
    pub(super) own: &'a Flat,
    pub(super) start: usize,
    pub(super) bytes: usize,
}

impl Inputs<'_> {
    /// Joins them to partials that take `width` times the bytes.
    pub(super) fn join(&self, width: usize, join: impl Fn(&[&[u8]], &mut [u8]), out: &mut [u8]) {
        self.own.visit(self.start, self.bytes, |offset, mine| {
            let here = offset..offset + mine.len();
            let out = &mut out[here.start * width..here.end * width];
            let (before, after) = self.windows.split_at(self.place);
            let mut inputs: Vec<&[u8]> =
                before.iter().map(|window| &window[here.clone()]).collect();
            inputs.push(mine);
            inputs.extend(after.iter().map(|window| &window[here.clone()]));
            join(&inputs, out);
        });
    }
}

impl Job for Hierarchy {
    fn poll(&mut self, peers: &mut Peers) -> Result<Moved> {
        let mut any = false;
        // Every member begins with its successor, so that members do not all start with the same
        // ring.
        let first = self.routes.partition_point(|route| route.link < self.member);
        for index in (first..self.near.end).chain(self.near.start..first) {
            let link = self.routes[index].link;
            any |= self.post(index, &mut peers.links[link], &mut peers.copies[link])?;
        }
        for _ in 0..self.schedule.hosts().count() {
            if !self.join(peers)? {
                break;
            }
            any = true;
        }
        any |= self.reduce(peers)?;
        for index in (first..self.routes.len()).chain(0..first) {
            let link = self.routes[index].link;
            any |= self.fetch(index, &mut peers.links[link])?;
            any |= self.send(index, &mut peers.links[link], &mut peers.copies[link])?;
        }
        self.forget();
        let done = self.reducing.chunk >= self.schedule.chunks()
            && self.streams.iter().all(Stream::is_over);
        if done {
            peers.scratch.store = std::mem::take(&mut self.store);
        }
        Ok(Moved { any, done })
    }

    fn links(&self, _peers: &Peers) -> Vec<usize> {
        self.routes.iter().map(|route| route.link).collect()
    }
}

#[cfg(test)]
mod tests;
