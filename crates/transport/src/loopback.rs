// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links within one process, for tests and simulations. Each rank may have a thread, or all ranks
//! share one.

use std::sync::Arc;

use farandole_shm::create_private_ring;
use farandole_world::Rank;

use crate::peer_state::PeerState;
use crate::ring_link::{RingReceiver, RingSender};
use crate::{Link, LinkKind, Result};

/// Creates a link between `a` and `b`. The first end belongs to `a` (its peer is `b`). No thread is
/// woken, so callers must poll.
///
/// # Errors
/// `System`.
pub fn link_pair(a: Rank, b: Rank, capacity: usize) -> Result<(Link, Link)> {
    let (to_b, from_a) = create_private_ring(capacity)?;
    let (to_a, from_b) = create_private_ring(capacity)?;
    let capacity = to_b.capacity();
    let end = |peer, producer, consumer| {
        let state = PeerState::new(peer);
        // This cannot fail, because a new peer has no host yet.
        drop(state.host.set("loopback".to_owned()));
        let state = Arc::new(state);
        let sender = Box::new(RingSender::new(producer, Arc::clone(&state), None));
        let receiver = Box::new(RingReceiver::new(consumer, state, None));
        Link { peer, kind: LinkKind::Loopback, capacity, sender, receiver }
    };
    Ok((end(b, to_b, from_b), end(a, to_a, from_a)))
}

/// Creates links between all of `size` ranks. Element `r` has the links of rank `r` to all others,
/// in rank order.
///
/// # Errors
/// `System`.
pub fn link_mesh(size: usize, capacity: usize) -> Result<Vec<Vec<Link>>> {
    let rank = |index: usize| Rank(u32::try_from(index).unwrap_or(u32::MAX));
    let mut links: Vec<Vec<Link>> = (0..size).map(|_| Vec::new()).collect();
    for low in 0..size {
        for high in low + 1..size {
            let (of_low, of_high) = link_pair(rank(low), rank(high), capacity)?;
            links[low].push(of_low);
            links[high].push(of_high);
        }
    }
    Ok(links)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_a_link_to_every_other_in_rank_order() {
        let links = link_mesh(4, 4096).unwrap();
        for (rank, own) in links.iter().enumerate() {
            let peers: Vec<usize> = own.iter().map(|link| link.peer.index()).collect();
            assert_eq!(peers, (0..4).filter(|other| *other != rank).collect::<Vec<_>>());
        }
    }
}
