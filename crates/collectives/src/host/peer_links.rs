// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links to all other members, and the state that all operations share.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use farandole_kernels::{BlockReducer, HierarchicalOrder};
use farandole_transport::{Link, LinkKind};
use farandole_world::Rank;

use super::chunk_sizes::UNIT_BYTES;
use super::copy_path::RingCopier;
use super::members_by_host::MembersByHost;
use crate::crossover::GroupHostLayout;
use crate::{Error, Result};

/// Links of a member. Members are numbered in rank order. Link `k` leads to member `k` if `k` is
/// less than the number of this member, and to member `k + 1` otherwise.
pub(super) struct PeerLinks {
    pub(super) member: usize,
    pub(super) rank: Rank,
    /// Links in rank order.
    pub(super) links: Vec<Link>,
    /// Copiers by link.
    pub(super) copies: Vec<RingCopier>,
    pub(super) hosts: MembersByHost,
    /// Shape of the group, for the choice of algorithms.
    pub(super) shape: GroupHostLayout,
    /// Parentheses of sums; `None` on one host.
    pub(super) orders: Option<Arc<HierarchicalOrder>>,
    /// Size of the smallest ring of this member. After the greeting: of the whole communicator,
    /// equal on all members.
    pub(super) capacity: usize,
    /// Latency between hosts, once the members have measured it and agreed on it.
    pub(super) latency: Option<Duration>,
    /// Blocks that jobs reuse.
    pub(super) scratch: ReusedBlocksAndCaches,
    /// Whether some links open only at their first use.
    pub(super) on_demand: bool,
    pub(super) reductions: ReductionRecorder,
}

/// Recorder of the reductions in a simulation, where links carry no bytes.
#[derive(Default)]
pub(super) struct ReductionRecorder(Option<Box<dyn FnMut(usize) + Send>>);

impl ReductionRecorder {
    /// `record` receives the number of bytes that each reduction would read and write.
    pub(super) fn new(record: impl FnMut(usize) + Send + 'static) -> Self {
        Self(Some(Box::new(record)))
    }

    /// Returns whether this is a simulation, which needs no memory for partials.
    pub(super) fn is_recording(&self) -> bool {
        self.0.is_some()
    }

    /// Called before a reduction that reads and writes this number of bytes. Returns true in a
    /// simulation: the reduction is recorded, and its result is not needed.
    pub(super) fn record_if_simulating(&mut self, bytes: usize) -> bool {
        self.0.as_mut().map(|record| record(bytes)).is_some()
    }
}

/// State that operations reuse: blocks for packed tensors, results and partials, and caches.
#[derive(Default)]
pub(super) struct ReusedBlocksAndCaches {
    pub(super) packed: Vec<u8>,
    pub(super) result: Vec<u8>,
    /// Partials of the next hierarchy or halving.
    pub(super) store: Vec<Vec<u8>>,
    pub(super) caches: AlgorithmCaches,
}

/// Caches that algorithms keep for their next operations, each in a type of this algorithm.
#[derive(Default)]
pub(super) struct AlgorithmCaches(HashMap<TypeId, Box<dyn Any + Send>>);

impl AlgorithmCaches {
    /// Returns what the last operation of an algorithm has kept, or a new cache.
    pub(super) fn take_cache<C: Any + Send + Default>(&mut self) -> C {
        let kept = self.0.remove(&TypeId::of::<C>()).and_then(|kept| kept.downcast().ok());
        kept.map_or_else(C::default, |kept| *kept)
    }

    /// Keeps a cache for the next operation of its algorithm.
    pub(super) fn keep_cache<C: Any + Send>(&mut self, cache: C) {
        self.0.insert(TypeId::of::<C>(), Box::new(cache));
    }
}

/// Result of a poll.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PollProgress {
    /// Whether there was any progress.
    pub(super) any: bool,
    /// Whether the job is finished.
    pub(super) done: bool,
}

/// State machine that runs one operation.
pub(super) trait CollectiveJob: Send {
    /// Moves all bytes that can move.
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress>;

    /// Returns the links that the job uses; called before any bytes have moved. Links that open at
    /// their first use are requested at once, so that they open in parallel. If the job polls
    /// another link, that link opens then.
    fn used_links(&self, peers: &PeerLinks) -> Vec<usize> {
        (0..peers.links.len()).collect()
    }
}

impl PeerLinks {
    /// # Errors
    /// `Shape` when two links lead to one rank, a link leads to this rank, the size of a ring is
    /// not a multiple of the alignment, or `hosts` does not have one number per member.
    pub(super) fn new(rank: Rank, mut links: Vec<Link>, hosts: Option<&[u32]>) -> Result<Self> {
        links.sort_by_key(|link| link.peer);
        let refuse = |reason: String| Err(Error::Shape { reason });
        if let Some(pair) = links.windows(2).find(|pair| pair[0].peer == pair[1].peer) {
            return refuse(format!("two links lead to rank {}", pair[0].peer));
        }
        if links.iter().any(|link| link.peer == rank) {
            return refuse(format!("rank {rank} has a link to itself"));
        }
        // Rings of whole units: a window then ends inside a unit only until the rest has arrived.
        if let Some(link) =
            links.iter().find(|link| link.capacity == 0 || link.capacity % UNIT_BYTES != 0)
        {
            return refuse(format!("the ring to rank {} holds {} bytes", link.peer, link.capacity));
        }
        let member = links.iter().filter(|link| link.peer < rank).count();
        // The smallest ring decides, because chunks have one size on all links.
        let capacity = links.iter().map(|link| link.capacity).min().unwrap_or(usize::MAX);
        let size = links.len() + 1;
        let together = vec![0; size];
        let numbers = hosts.unwrap_or(&together);
        if numbers.len() != size {
            return refuse(format!("{size} members live on the hosts of {}", numbers.len()));
        }
        let hosts = MembersByHost::new(numbers, member);
        let orders =
            (hosts.host_count() > 1).then(|| Arc::new(HierarchicalOrder::new(&hosts.host_sizes())));
        let shape = GroupHostLayout {
            members: size,
            hosts: hosts.host_count(),
            largest_host_size: hosts.largest_host_size(),
        };
        let on_demand = links.iter().any(|link| link.sender.is_on_demand());
        Ok(Self {
            member,
            rank,
            copies: links.iter().map(|link| RingCopier::new(link.kind)).collect(),
            links,
            hosts,
            shape,
            orders,
            capacity,
            latency: None,
            scratch: ReusedBlocksAndCaches::default(),
            on_demand,
            reductions: ReductionRecorder::default(),
        })
    }

    pub(super) fn member_count(&self) -> usize {
        self.links.len() + 1
    }

    /// Returns the member to which a link leads.
    pub(super) fn member_of_link(&self, link: usize) -> usize {
        if link < self.member { link } else { link + 1 }
    }

    /// Returns the link to a member. The result for this member itself has no meaning.
    pub(super) fn link_to(&self, member: usize) -> usize {
        if member < self.member { member } else { member.saturating_sub(1) }
    }

    /// Returns the error of an allreduce whose messages do not fit the smallest ring.
    pub(super) fn ring_too_small_error(&self) -> Error {
        let reason = format!("a ring of {} bytes is too small for an allreduce", self.capacity);
        Error::Shape { reason }
    }

    /// Returns the links to the other members on this host.
    pub(super) fn local_links(&self) -> Range<usize> {
        let members = self.hosts.host_members(self.hosts.own_host());
        members.start..members.end - 1
    }

    /// Requests links that are not open, those to the nearest lower members first. When all members
    /// request links at the same time, their requests then go to different members.
    pub(super) fn request_links(&mut self, links: &[usize]) {
        for link in links.iter().rev() {
            if let Some(link) = self.links.get_mut(*link) {
                link.sender.request_open();
            }
        }
    }

    /// Sends the bytes that links have buffered locally. Returns true if no buffered bytes are left
    /// that a peer could still receive.
    pub(super) fn flush_links(&mut self) -> bool {
        // Rings in memory buffer nothing locally. A lost peer receives nothing any more. If its
        // loss is a failure and not an orderly end, the next operation with this peer reports it.
        let mut flushed = true;
        for link in self.links.iter_mut().filter(|link| link.kind == LinkKind::Tcp) {
            flushed &= link.sender.flush().unwrap_or(true);
        }
        flushed
    }
}

/// Returns the number of bytes of the window in whole units. The rest of a unit is still on its
/// way, unless the link ended inside the unit.
pub(super) fn whole_unit_bytes(link: &mut Link) -> Result<usize> {
    let bytes = link.receiver.window()?.len();
    if bytes == 0 || bytes >= UNIT_BYTES {
        return Ok(bytes / UNIT_BYTES * UNIT_BYTES);
    }
    link.receiver.check_not_ended(bytes)?;
    Ok(0)
}

/// Most members for which the list of inputs is on the stack.
// A list on the heap would cost an allocation for each block.
const MAX_STACK_INPUTS: usize = 16;

/// Reduces blocks of equal length in member order; `own` takes this member's position among the
/// blocks in `others`.
pub(super) fn reduce_in_member_order(
    reducer: &BlockReducer,
    member: usize,
    others: &[&[u8]],
    range: std::ops::Range<usize>,
    own: &[u8],
    out: &mut [u8],
) {
    let block = |k: usize| match k.cmp(&member) {
        std::cmp::Ordering::Less => &others[k][range.clone()],
        std::cmp::Ordering::Equal => own,
        std::cmp::Ordering::Greater => &others[k - 1][range.clone()],
    };
    let size = others.len() + 1;
    if size <= MAX_STACK_INPUTS {
        let mut inputs: [&[u8]; MAX_STACK_INPUTS] = [&[]; MAX_STACK_INPUTS];
        for (k, input) in inputs[..size].iter_mut().enumerate() {
            *input = block(k);
        }
        reducer.reduce_blocks(&inputs[..size], out);
    } else {
        let inputs: Vec<&[u8]> = (0..size).map(block).collect();
        reducer.reduce_blocks(&inputs, out);
    }
}

/// Calls `work` with all incoming windows, in link order.
pub(super) fn with_incoming_windows<T>(
    links: &mut [Link],
    work: impl FnOnce(&[&[u8]]) -> T,
) -> Result<T> {
    let count = links.len();
    if count <= MAX_STACK_INPUTS {
        let mut incoming: [&[u8]; MAX_STACK_INPUTS] = [&[]; MAX_STACK_INPUTS];
        for (link, input) in links.iter_mut().zip(&mut incoming) {
            *input = link.receiver.window()?;
        }
        Ok(work(&incoming[..count]))
    } else {
        let windows: Result<Vec<&[u8]>> =
            links.iter_mut().map(|link| Ok(link.receiver.window()?)).collect();
        Ok(work(&windows?))
    }
}

/// Calls `work` with all incoming and all outgoing windows, in link order.
pub(super) fn with_all_windows<T>(
    links: &mut [Link],
    work: impl FnOnce(&[&[u8]], &mut [&mut [u8]]) -> T,
) -> Result<T> {
    let count = links.len();
    if count <= MAX_STACK_INPUTS {
        let mut incoming: [&[u8]; MAX_STACK_INPUTS] = [&[]; MAX_STACK_INPUTS];
        let mut outgoing: [&mut [u8]; MAX_STACK_INPUTS] =
            std::array::from_fn(|_| Default::default());
        for ((link, input), output) in links.iter_mut().zip(&mut incoming).zip(&mut outgoing) {
            *input = link.receiver.window()?;
            *output = link.sender.window()?;
        }
        Ok(work(&incoming[..count], &mut outgoing[..count]))
    } else {
        let (mut incoming, mut outgoing) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for link in links {
            incoming.push(link.receiver.window()?);
            outgoing.push(link.sender.window()?);
        }
        Ok(work(&incoming, &mut outgoing))
    }
}
