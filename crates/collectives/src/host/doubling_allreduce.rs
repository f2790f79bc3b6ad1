// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce of small tensors: the first member of each host collects the inputs of its host,
//! combines them with the other hosts by recursive doubling, and distributes the result.
//!
//! `2 + log2 H` steps among `H` hosts, of `N` bytes each; accumulators (see `kernels`) between
//! hosts. In step `k`, a host swaps the sum over its `2^k` hosts with the host `2^k` away. If `H`
//! is no power of two, the first hosts form pairs: one host of a pair sends its partial to the
//! other before the swaps and receives the result after them. This is the order of
//! `ReductionOrder::pairwise_order`. Both hosts of a swap join the same two partials in the same
//! order.
//!
//! **No deadlock.** Both ends of a link take the same sequence of steps. In a swap, a member reads
//! while it writes. Both ends are in the earliest unfinished step.

use std::collections::{BTreeSet, VecDeque};

use farandole_kernels::{BlockReducer, GatherList};
use farandole_transport::Link;

use super::members_by_host::MembersByHost;
use super::message::MessageProgress;
use super::peer_links::{CollectiveJob, PeerLinks, PollProgress, ReductionRecorder};
use crate::Result;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DoublingAllreduceStep {
    /// Sends the input to the member that collects.
    SendInput { to: usize },
    /// Receives the inputs of the other members on this host.
    CollectInputs,
    /// Swaps partials with another host. `earlier`: whether the own partial is the earlier one in
    /// the order of sums.
    SwapPartials { with: usize, earlier: bool },
    /// Sends the partial without receiving one.
    SendPartial { to: usize },
    /// Receives a partial without sending one. The received partial is the later one.
    ReceivePartial { from: usize },
    /// Computes the result.
    ComputeResult,
    /// Receives the result.
    ReceiveResult { from: usize },
    /// Sends the result to the other members on this host.
    DistributeResult,
    /// Sends the result to one member.
    SendResult { to: usize },
}

pub(super) struct DoublingAllreduceJob {
    reducer: BlockReducer,
    outputs: GatherList,
    steps: VecDeque<DoublingAllreduceStep>,
    /// Messages of the current step, sent and received.
    under_way: Option<Vec<(MessageProgress, MessageProgress)>>,
    /// Input of this member, later the result.
    values: Vec<u8>,
    /// Inputs of the other members on this host.
    inputs: Vec<Vec<u8>>,
    partial: Vec<u8>,
    theirs: Vec<u8>,
}

impl DoublingAllreduceJob {
    pub(super) fn new(
        peers: &PeerLinks,
        reducer: BlockReducer,
        inputs: &GatherList,
        outputs: GatherList,
    ) -> Self {
        let mut values = vec![0; inputs.len()];
        inputs.read_at(0, &mut values);
        // Other members only send their input and receive the result, so they need no partials.
        let leads = peers.hosts.host_members(peers.hosts.own_host()).start == peers.member;
        let partial =
            vec![0; if leads { values.len() * reducer.accumulator_expansion() } else { 0 }];
        let others = if leads { peers.local_links().len() } else { 0 };
        Self {
            steps: plan_steps(&peers.hosts, peers.member).into(),
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
    fn step_traffic(
        &self,
        peers: &PeerLinks,
        step: DoublingAllreduceStep,
    ) -> (std::ops::Range<usize>, usize, usize) {
        let (values, partial) = (self.values.len(), self.partial.len());
        let one = |member| {
            let link = peers.link_to(member);
            link..link + 1
        };
        match step {
            DoublingAllreduceStep::SendInput { to } | DoublingAllreduceStep::SendResult { to } => {
                (one(to), values, 0)
            }
            DoublingAllreduceStep::ReceiveResult { from } => (one(from), 0, values),
            DoublingAllreduceStep::CollectInputs => (peers.local_links(), 0, values),
            DoublingAllreduceStep::DistributeResult => (peers.local_links(), values, 0),
            DoublingAllreduceStep::SwapPartials { with, .. } => (one(with), partial, partial),
            DoublingAllreduceStep::SendPartial { to } => (one(to), partial, 0),
            DoublingAllreduceStep::ReceivePartial { from } => (one(from), 0, partial),
            DoublingAllreduceStep::ComputeResult => (0..0, 0, 0),
        }
    }

    /// Moves the bytes that a step sends and receives. Returns true when all of them have moved.
    fn exchange_step(
        &mut self,
        step: DoublingAllreduceStep,
        links: &mut [Link],
        out: usize,
        incoming: usize,
        any: &mut bool,
    ) -> Result<bool> {
        let fresh =
            || vec![(MessageProgress::new(out), MessageProgress::new(incoming)); links.len()];
        let messages = self.under_way.get_or_insert_with(fresh);
        let mut over = true;
        for (k, (link, (out, incoming))) in links.iter_mut().zip(messages).enumerate() {
            let given = match step {
                DoublingAllreduceStep::SwapPartials { .. }
                | DoublingAllreduceStep::SendPartial { .. } => &self.partial,
                _ => &self.values,
            };
            *any |= out.send_window(&mut *link.sender, |at, to| {
                to.copy_from_slice(&given[at..at + to.len()])
            })?;
            let taken = match step {
                DoublingAllreduceStep::CollectInputs => &mut self.inputs[k],
                DoublingAllreduceStep::ReceiveResult { .. } => &mut self.values,
                _ => &mut self.theirs,
            };
            *any |= incoming.receive_window(&mut *link.receiver, |at, from| {
                taken[at..at + from.len()].copy_from_slice(from)
            })?;
            over &= out.is_finished() && incoming.is_finished();
        }
        Ok(over)
    }

    /// Computes the result of a step after its bytes have arrived.
    fn finish_step(&mut self, step: DoublingAllreduceStep, reductions: &mut ReductionRecorder) {
        let (values, partial) = (self.values.len(), self.partial.len());
        let touched = match step {
            DoublingAllreduceStep::CollectInputs => (self.inputs.len() + 1) * values + partial,
            DoublingAllreduceStep::SwapPartials { .. }
            | DoublingAllreduceStep::ReceivePartial { .. } => 3 * partial,
            DoublingAllreduceStep::ComputeResult => partial + values,
            _ => return,
        };
        if reductions.record_if_simulating(touched) {
            return;
        }
        match step {
            DoublingAllreduceStep::CollectInputs => {
                // The collecting member is the first member of its host.
                let own = std::iter::once(self.values.as_slice());
                let inputs: Vec<&[u8]> = own.chain(self.inputs.iter().map(Vec::as_slice)).collect();
                self.reducer.accumulate_inputs(&inputs, &mut self.partial);
            }
            DoublingAllreduceStep::SwapPartials { earlier: false, .. } => {
                self.merge_partials(false)
            }
            DoublingAllreduceStep::SwapPartials { earlier: true, .. }
            | DoublingAllreduceStep::ReceivePartial { .. } => self.merge_partials(true),
            _ => self.reducer.finish_accumulators(&self.partial, &mut self.values),
        }
    }

    fn merge_partials(&mut self, own_is_earlier: bool) {
        let own = std::mem::take(&mut self.partial);
        let mut joined = vec![0; own.len()];
        let (earlier, later) =
            if own_is_earlier { (&own, &self.theirs) } else { (&self.theirs, &own) };
        self.reducer.merge_accumulators(earlier, later, &mut joined);
        self.partial = joined;
    }
}

/// Returns the steps of this member.
fn plan_steps(hosts: &MembersByHost, member: usize) -> Vec<DoublingAllreduceStep> {
    let (host, count) = (hosts.host_of(member), hosts.host_count());
    let first = |host: usize| hosts.host_members(host).start;
    if member != first(host) {
        return vec![
            DoublingAllreduceStep::SendInput { to: first(host) },
            DoublingAllreduceStep::ReceiveResult { from: first(host) },
        ];
    }
    let full = 1 << count.checked_ilog2().unwrap_or(0);
    let folded = 2 * (count - full);
    let mut steps = vec![DoublingAllreduceStep::CollectInputs];
    if host < folded && host % 2 == 1 {
        let with = first(host - 1);
        steps.extend([
            DoublingAllreduceStep::SendPartial { to: with },
            DoublingAllreduceStep::ReceiveResult { from: with },
            DoublingAllreduceStep::DistributeResult,
        ]);
        return steps;
    }
    if host < folded {
        steps.push(DoublingAllreduceStep::ReceivePartial { from: first(host + 1) });
    }
    // Places count the hosts that swap, and a pair is one place.
    let place = if host < folded { host / 2 } else { host - folded / 2 };
    let at = |place: usize| if place < folded / 2 { 2 * place } else { place + folded / 2 };
    for distance in std::iter::successors(Some(1), |d| Some(d * 2)).take_while(|d| *d < full) {
        steps.push(DoublingAllreduceStep::SwapPartials {
            with: first(at(place ^ distance)),
            // The sums of lower places come first on both sides, so both get the same bits.
            earlier: place & distance == 0,
        });
    }
    steps.push(DoublingAllreduceStep::ComputeResult);
    if host < folded {
        steps.push(DoublingAllreduceStep::SendResult { to: first(host + 1) });
    }
    steps.push(DoublingAllreduceStep::DistributeResult);
    steps
}

impl CollectiveJob for DoublingAllreduceJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let mut any = false;
        while let Some(step) = self.steps.front().copied() {
            let (links, out, incoming) = self.step_traffic(peers, step);
            if !self.exchange_step(step, &mut peers.links[links], out, incoming, &mut any)? {
                return Ok(PollProgress { any, done: false });
            }
            any = true;
            self.finish_step(step, &mut peers.reductions);
            self.under_way = None;
            self.steps.pop_front();
        }
        self.outputs.write_at(0, &self.values);
        Ok(PollProgress { any: true, done: true })
    }

    fn used_links(&self, peers: &PeerLinks) -> Vec<usize> {
        let links = self.steps.iter().flat_map(|step| self.step_traffic(peers, *step).0);
        links.collect::<BTreeSet<usize>>().into_iter().collect()
    }
}
