// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links within one process, for tests and simulations: every rank is a thread, or all share one.

use std::sync::Arc;

use farandole_shm::{Bell, private};
use farandole_world::Rank;

use crate::peer::Peer;
use crate::ring::{RingReceiver, RingSender};
use crate::{Link, LinkKind, Parker, Result};

/// A link between `a` and `b`: the first is `a`'s end (its peer is `b`). No thread is woken: poll.
///
/// # Errors
/// `System`.
pub fn pair(a: Rank, b: Rank, capacity: usize) -> Result<(Link, Link)> {
    pair_with(a, b, capacity, None, None)
}

fn pair_with(
    a: Rank,
    b: Rank,
    capacity: usize,
    bell_a: Option<Arc<Bell>>,
    bell_b: Option<Arc<Bell>>,
) -> Result<(Link, Link)> {
    let peer = |rank| {
        let peer = Peer::new(rank);
        // A new peer has no host yet.
        drop(peer.host.set("loopback".to_owned()));
        Arc::new(peer)
    };
    let (peer_a, peer_b) = (peer(a), peer(b));
    let (to_b, from_a) = private(capacity)?;
    let (to_a, from_b) = private(capacity)?;
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

/// Links between all of `size` ranks: element `r` holds rank `r`'s links to all others, in rank
/// order.
///
/// # Errors
/// `System`.
pub fn mesh(size: usize, capacity: usize) -> Result<Vec<Vec<Link>>> {
    mesh_with(size, capacity, &[])
}

/// As [`mesh`], every rank with a parker that its peers wake.
///
/// # Errors
/// `System`.
pub fn mesh_with_parkers(size: usize, capacity: usize) -> Result<Vec<(Vec<Link>, Parker)>> {
    let parkers = (0..size).map(|_| Parker::new()).collect::<Result<Vec<_>>>()?;
    let bells: Vec<_> = parkers.iter().map(|parker| Arc::clone(parker.bell())).collect();
    Ok(mesh_with(size, capacity, &bells)?.into_iter().zip(parkers).collect())
}

fn mesh_with(size: usize, capacity: usize, bells: &[Arc<Bell>]) -> Result<Vec<Vec<Link>>> {
    let rank = |index: usize| Rank(u32::try_from(index).unwrap_or(u32::MAX));
    let mut links: Vec<Vec<Link>> = (0..size).map(|_| Vec::new()).collect();
    for low in 0..size {
        for high in low + 1..size {
            let (bell_low, bell_high) = (bells.get(low).cloned(), bells.get(high).cloned());
            let (of_low, of_high) =
                pair_with(rank(low), rank(high), capacity, bell_low, bell_high)?;
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
        let links = mesh(4, 4096).unwrap();
        for (rank, own) in links.iter().enumerate() {
            let peers: Vec<usize> = own.iter().map(|link| link.peer.index()).collect();
            assert_eq!(peers, (0..4).filter(|other| *other != rank).collect::<Vec<_>>());
        }
    }
}
