// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce of small tensors: the first member of each host collects; these members double and
//! distribute.
//!
//! `2 + log2 H` steps among `H` hosts, of `N` bytes each; accumulators (see `kernel`) between
//! hosts. In step `k` a host swaps the sum over its `2^k` hosts with the host `2^k` away; of what
//! exceeds a power of two, the first hosts are paired before and served after, which is the order
//! of `Order::pairs`. Both of a pair join the same two partials in the same order.
//!
//! **No deadlock.** Both ends of a link take the same sequence of steps. In a swap, a member reads
//! while it writes. Both ends are in the earliest unfinished step.

pub(super) mod program;

use std::collections::{BTreeSet, VecDeque};

use farandole_transport::Link;

use super::hosts::Hosts;
use super::message::Message;
use super::peers::{Job, Moved, Peers};
use crate::Result;
use crate::buffer::Flat;
use crate::kernel::Reducer;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// To the member that collects.
    Post { to: usize },
    /// From the others on this host.
    Collect,
    /// The own partial for another's; the own one is the earlier of the two.
    Swap { with: usize, earlier: bool },
    /// A partial one way.
    Give { to: usize },
    /// A partial one way; it is the later one.
    Take { from: usize },
    /// Makes the result.
    Finish,
    /// The result.
    Fetch { from: usize },
    /// The result, to the others on this host.
    Serve,
    /// The result, to one member.
    Hand { to: usize },
}

pub(super) struct Doubling {
    reducer: Reducer,
    outputs: Flat,
    steps: VecDeque<Step>,
    /// Messages of the present step.
    under_way: Option<Vec<(Message, Message)>>,
    /// The own input, later the result.
    values: Vec<u8>,
    /// The inputs of the others on this host.
    inputs: Vec<Vec<u8>>,
    partial: Vec<u8>,
    theirs: Vec<u8>,
}

impl Doubling {
    pub(super) fn new(peers: &Peers, reducer: Reducer, inputs: &Flat, outputs: Flat) -> Self {
        let mut values = vec![0; inputs.len()];
        inputs.read(0, &mut values);
        let leads = peers.hosts.members(peers.hosts.own()).start == peers.member;
        let partial = vec![0; if leads { values.len() * reducer.width() } else { 0 }];
        let others = if leads { peers.local_links().len() } else { 0 };
        Self {
            steps: plan(&peers.hosts, peers.member).into(),
            under_way: None,
            inputs: vec![vec![0; values.len()]; others],
            theirs: vec![0; partial.len()],
            partial,
            values,
            reducer,
            outputs,
        }
    }

    /// Returns the links of a step, and the bytes sent and received on each.
    fn traffic(&self, peers: &Peers, step: Step) -> (std::ops::Range<usize>, usize, usize) {
        let (values, partial) = (self.values.len(), self.partial.len());
        let one = |member| {
            let link = peers.link_to(member);
            link..link + 1
        };
        match step {
            Step::Post { to } | Step::Hand { to } => (one(to), values, 0),
            Step::Fetch { from } => (one(from), 0, values),
            Step::Collect => (peers.local_links(), 0, values),
            Step::Serve => (peers.local_links(), values, 0),
            Step::Swap { with, .. } => (one(with), partial, partial),
            Step::Give { to } => (one(to), partial, 0),
            Step::Take { from } => (one(from), 0, partial),
            Step::Finish => (0..0, 0, 0),
        }
    }

    /// Moves what a step sends and receives. True when all of it has.
    fn exchange(
        &mut self,
        step: Step,
        links: &mut [Link],
        out: usize,
        incoming: usize,
        any: &mut bool,
    ) -> Result<bool> {
        let fresh = || vec![(Message::new(out), Message::new(incoming)); links.len()];
        let messages = self.under_way.get_or_insert_with(fresh);
        let mut over = true;
        for (k, (link, (out, incoming))) in links.iter_mut().zip(messages).enumerate() {
            let given = match step {
                Step::Swap { .. } | Step::Give { .. } => &self.partial,
                _ => &self.values,
            };
            *any |=
                out.put(&mut *link.sender, |at, to| to.copy_from_slice(&given[at..at + to.len()]))?;
            let taken = match step {
                Step::Collect => &mut self.inputs[k],
                Step::Fetch { .. } => &mut self.values,
                _ => &mut self.theirs,
            };
            *any |= incoming.take(&mut *link.receiver, |at, from| {
                taken[at..at + from.len()].copy_from_slice(from)
            })?;
            over &= out.is_finished() && incoming.is_finished();
        }
        Ok(over)
    }

    /// Computes the result of a step after its bytes have arrived.
    fn conclude(&mut self, step: Step) {
        match step {
            Step::Collect => {
                // The member that collects is the host's first.
                let own = std::iter::once(self.values.as_slice());
                let inputs: Vec<&[u8]> = own.chain(self.inputs.iter().map(Vec::as_slice)).collect();
                self.reducer.accumulate(&inputs, &mut self.partial);
            }
            Step::Swap { earlier: false, .. } => self.merge(false),
            Step::Swap { earlier: true, .. } | Step::Take { .. } => self.merge(true),
            Step::Finish => self.reducer.conclude(&self.partial, &mut self.values),
            Step::Post { .. }
            | Step::Give { .. }
            | Step::Fetch { .. }
            | Step::Serve
            | Step::Hand { .. } => {}
        }
    }

    fn merge(&mut self, own_is_earlier: bool) {
        let own = std::mem::take(&mut self.partial);
        let mut joined = vec![0; own.len()];
        let (earlier, later) =
            if own_is_earlier { (&own, &self.theirs) } else { (&self.theirs, &own) };
        self.reducer.merge(earlier, later, &mut joined);
        self.partial = joined;
    }
}

/// Returns the steps of this member.
fn plan(hosts: &Hosts, member: usize) -> Vec<Step> {
    let (host, count) = (hosts.of(member), hosts.count());
    let first = |host: usize| hosts.members(host).start;
    if member != first(host) {
        return vec![Step::Post { to: first(host) }, Step::Fetch { from: first(host) }];
    }
    let full = 1 << count.checked_ilog2().unwrap_or(0);
    let folded = 2 * (count - full);
    let mut steps = vec![Step::Collect];
    if host < folded && host % 2 == 1 {
        let with = first(host - 1);
        steps.extend([Step::Give { to: with }, Step::Fetch { from: with }, Step::Serve]);
        return steps;
    }
    if host < folded {
        steps.push(Step::Take { from: first(host + 1) });
    }
    let place = if host < folded { host / 2 } else { host - folded / 2 };
    let at = |place: usize| if place < folded / 2 { 2 * place } else { place + folded / 2 };
    for distance in std::iter::successors(Some(1), |d| Some(d * 2)).take_while(|d| *d < full) {
        steps
            .push(Step::Swap { with: first(at(place ^ distance)), earlier: place & distance == 0 });
    }
    steps.push(Step::Finish);
    if host < folded {
        steps.push(Step::Hand { to: first(host + 1) });
    }
    steps.push(Step::Serve);
    steps
}

impl Job for Doubling {
    fn poll(&mut self, peers: &mut Peers) -> Result<Moved> {
        let mut any = false;
        while let Some(step) = self.steps.front().copied() {
            let (links, out, incoming) = self.traffic(peers, step);
            if !self.exchange(step, &mut peers.links[links], out, incoming, &mut any)? {
                return Ok(Moved { any, done: false });
            }
            any = true;
            self.conclude(step);
            self.under_way = None;
            self.steps.pop_front();
        }
        self.outputs.write(0, &self.values);
        Ok(Moved { any: true, done: true })
    }

    fn links(&self, peers: &Peers) -> Vec<usize> {
        let links = self.steps.iter().flat_map(|step| self.traffic(peers, *step).0);
        links.collect::<BTreeSet<usize>>().into_iter().collect()
    }
}
