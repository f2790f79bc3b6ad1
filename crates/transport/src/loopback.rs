// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links within one process, for tests and simulations. Each rank may have a thread, or all ranks
//! share one.

use std::sync::Arc;

use farandole_shm::{ProcessDoorbell, create_private_ring};
use farandole_world::Rank;

use crate::peer_state::PeerState;
use crate::ring_link::{RingReceiver, RingSender};
use crate::{Link, LinkKind, Parker, Result};

/// Creates a link between `a` and `b`. The first end belongs to `a` (its peer is `b`). No thread is
/// woken, so callers must poll.
///
/// # Errors
/// `System`.
pub fn link_pair(a: Rank, b: Rank, capacity: usize) -> Result<(Link, Link)> {
    link_pair_with_bells(a, b, capacity, None, None)
}

fn link_pair_with_bells(
    a: Rank,
    b: Rank,
    capacity: usize,
    bell_a: Option<Arc<ProcessDoorbell>>,
    bell_b: Option<Arc<ProcessDoorbell>>,
) -> Result<(Link, Link)> {
    let peer = |rank| {
        let peer = PeerState::new(rank);
        // This cannot fail, because a new peer has no host yet.
        drop(peer.host.set("loopback".to_owned()));
        Arc::new(peer)
    };
    let (peer_a, peer_b) = (peer(a), peer(b));
    let (to_b, from_a) = create_private_ring(capacity)?;
    let (to_a, from_b) = create_private_ring(capacity)?;
    let capacity = to_b.capacity();
    let link = |peer, sender, receiver| Link {
        peer,
        kind: LinkKind::Loopback,
        capacity,
        sender: Box::new(sender),
        receiver: Box::new(receiver),
    };
    let of_a = link(
        b,
        RingSender::new(to_b, Arc::clone(&peer_b), bell_b.clone()),
        RingReceiver::new(from_b, peer_b, bell_b),
    );
    let of_b = link(
        a,
        RingSender::new(to_a, Arc::clone(&peer_a), bell_a.clone()),
        RingReceiver::new(from_a, peer_a, bell_a),
    );
    Ok((of_a, of_b))
}

/// Creates links between all of `size` ranks. Element `r` has the links of rank `r` to all others,
/// in rank order.
///
/// # Errors
/// `System`.
pub fn link_mesh(size: usize, capacity: usize) -> Result<Vec<Vec<Link>>> {
    link_mesh_with_bells(size, capacity, &[])
}

/// Like [`link_mesh`], but every rank has a parker that its peers wake.
///
/// # Errors
/// `System`.
pub fn link_mesh_with_parkers(size: usize, capacity: usize) -> Result<Vec<(Vec<Link>, Parker)>> {
    let parkers = (0..size).map(|_| Parker::new()).collect::<Result<Vec<_>>>()?;
    let bells: Vec<_> = parkers.iter().map(|parker| Arc::clone(parker.own_doorbell())).collect();
    Ok(link_mesh_with_bells(size, capacity, &bells)?.into_iter().zip(parkers).collect())
}

fn link_mesh_with_bells(
    size: usize,
    capacity: usize,
    bells: &[Arc<ProcessDoorbell>],
) -> Result<Vec<Vec<Link>>> {
    let rank = |index: usize| Rank(u32::try_from(index).unwrap_or(u32::MAX));
    let mut links: Vec<Vec<Link>> = (0..size).map(|_| Vec::new()).collect();
    for low in 0..size {
        for high in low + 1..size {
            let (bell_low, bell_high) = (bells.get(low).cloned(), bells.get(high).cloned());
            let (of_low, of_high) =
                link_pair_with_bells(rank(low), rank(high), capacity, bell_low, bell_high)?;
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
