// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The links between ranks: the set that is opened when a world forms, and the sizes of their
//! rings.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use farandole_collectives::{CrossoverTable, HostCommunicator, Result};
use farandole_config::Config;
use farandole_transport::{Link, Mesh, heartbeat_peers};
use farandole_world::{Rank, World};

use crate::registrar_rendezvous::InterruptCheck;

/// Channel of the engine's negotiation.
pub(crate) const CONTROL_CHANNEL: u32 = 0;
/// Channel of the communicator's data.
pub(crate) const DATA_CHANNEL: u32 = 1;

/// Bytes of each ring of the control channel: many frames of negotiation.
pub(crate) const CONTROL_RING_BYTES: usize = 64 << 10;

/// Smaller rings make a transfer wait for every chunk; larger ones do not fit into the cache.
const MIN_DATA_RING_BYTES: u64 = 64 << 10;
const MAX_DATA_RING_BYTES: u64 = 4 << 20;
/// Bytes of all rings of a host that stay in the processor's cache: half the cache of a typical
/// server. With 4 ranks on 2 cores and 32 MiB of cache, 64 MiB took 79 ms of processor time with
/// rings of 4 MiB, and 48 ms with rings of 1 MiB.
const CACHED_RING_BYTES_PER_HOST: u64 = 16 << 20;
/// Rings of at most this size make ranks that share a core take turns too often. 2 ranks were
/// slower with them than with rings of 4 MiB, which still fit into the cache; 8 ranks were slower
/// than with rings of 2 MiB, which did not fit either.
const SHORT_RING_BYTES: u64 = 1 << 20;

/// Returns the number of ranks on the fullest machine.
fn max_ranks_per_machine(world: &World) -> u64 {
    let mut ranks = BTreeMap::<u32, u64>::new();
    world.machine_numbers().into_iter().for_each(|machine| *ranks.entry(machine).or_default() += 1);
    ranks.into_values().max().unwrap_or(1)
}

/// Returns the bytes of shared memory that a host's links may use: the configured value, or else
/// enough for the smallest rings of the world and of a set of all its ranks. Memory is allocated
/// when it is first touched.
pub(crate) fn shared_memory_budget(world: &World, config: &Config) -> u64 {
    if config.given.contains(&"shared_memory_bytes") {
        return config.shared_memory_bytes;
    }
    let local = max_ranks_per_machine(world);
    let least = local * ((local - 1) * MIN_DATA_RING_BYTES + CONTROL_RING_BYTES as u64);
    config.shared_memory_bytes.max(2 * least)
}

/// Returns the number of rings between the ranks of the fullest machine.
fn rings_per_machine(world: &World) -> u64 {
    let local = max_ranks_per_machine(world);
    (local * (local - 1)).max(1)
}

/// Returns the bytes of each ring if the world's rings share half of a host's `budget`; at most
/// `most` bytes.
fn fair_ring_bytes(world: &World, budget: u64, most: u64) -> usize {
    // The control links of a process are paid from the same share; without this term, the last data
    // link had no room.
    let controls = max_ranks_per_machine(world) * CONTROL_RING_BYTES as u64;
    let fair = ((budget / 2).saturating_sub(controls) / rings_per_machine(world))
        .clamp(MIN_DATA_RING_BYTES, most);
    usize::try_from(fair.next_power_of_two() >> u32::from(!fair.is_power_of_two()))
        .unwrap_or(1 << 20)
}

/// Returns the bytes of each ring between two ranks of the world, whose rings use half of a host's
/// `budget`. The value is equal on all ranks, because both ends of a link must agree. Transfers use
/// a ring from end to end, so the whole ring passes through the cache.
pub(crate) fn data_ring_bytes(world: &World, budget: u64) -> usize {
    let cached = CACHED_RING_BYTES_PER_HOST / rings_per_machine(world);
    fair_ring_bytes(
        world,
        budget,
        if cached >= SHORT_RING_BYTES {
            cached.min(MAX_DATA_RING_BYTES)
        } else {
            MAX_DATA_RING_BYTES
        },
    )
}

/// Returns the bytes of each ring between two ranks of a world with these settings.
pub fn world_ring_bytes(world: &World, config: &Config) -> usize {
    data_ring_bytes(world, shared_memory_budget(world, config))
}

/// Like [`data_ring_bytes`], in a process set besides the world: several sets share the other half
/// of the budget.
pub(crate) fn process_set_ring_bytes(world: &World, budget: u64) -> usize {
    // The number of process sets is unknown, so each takes a quarter of the other half.
    (fair_ring_bytes(world, budget, MAX_DATA_RING_BYTES) / 4)
        .max(usize::try_from(MIN_DATA_RING_BYTES).unwrap_or(1 << 16))
}

/// Partitions the other ranks among the members, each part ascending: the ranks whose data links
/// are opened at the start, and the ranks whose data links are opened at their first use. If
/// members of the fullest machine have at most `most` members on other machines, all are opened at
/// the start. Otherwise, the first part has the ranks on this rank's machine, and those with which
/// it would exchange heartbeats in a world of the members. These links connect all members, so that
/// their communicators can greet each other.
pub fn partition_eager_peers(world: &World, members: &[Rank], most: u64) -> (Vec<Rank>, Vec<Rank>) {
    let others = members.iter().copied().filter(|rank| *rank != world.rank);
    let machine =
        |rank: &Rank| world.seats.get(rank.index()).map_or("", |seat| seat.host.machine_name());
    let machines: Vec<&str> = members.iter().map(machine).collect();
    let mut ranks = BTreeMap::<&str, usize>::new();
    machines.iter().for_each(|machine| *ranks.entry(machine).or_default() += 1);
    let fullest = ranks.into_values().max().unwrap_or(0);
    let Some(own) = members.iter().position(|rank| *rank == world.rank) else {
        return Default::default();
    };
    if (members.len() - fullest) as u64 <= most {
        return (others.collect(), Vec::new());
    }
    let places = heartbeat_peers(&machines, Rank(u32::try_from(own).unwrap_or(u32::MAX)));
    let first: BTreeSet<Rank> =
        places.iter().filter_map(|place| members.get(place.index()).copied()).collect();
    others.partition(|rank| first.contains(rank))
}

/// The data links of a communicator that is formed.
pub(crate) struct DataLinks<'a> {
    pub(crate) world: &'a World,
    pub(crate) members: &'a [Rank],
    pub(crate) channel: u32,
    pub(crate) capacity: usize,
    /// See [`partition_eager_peers`].
    pub(crate) max_eager_peers: u64,
    pub(crate) deadline: Instant,
}

impl DataLinks<'_> {
    /// Opens the links that are opened at the start. The mesh opens the others later.
    pub(crate) fn open_links(
        &self,
        mesh: &Mesh,
        interrupted: &mut InterruptCheck<'_>,
    ) -> Result<Vec<Link>, farandole_transport::Error> {
        let Self { channel, capacity, deadline, .. } = *self;
        let (first, later) = partition_eager_peers(self.world, self.members, self.max_eager_peers);
        let mut links = mesh.open_links_until(channel, &first, capacity, deadline, interrupted)?;
        if !later.is_empty() {
            links.extend(mesh.open_links_on_demand(
                channel,
                &later,
                capacity,
                deadline,
                interrupted,
            )?);
        }
        Ok(links)
    }
}

/// Returns the rules for the algorithms of allreduces.
///
/// # Errors
/// The knob's value is invalid, or names a file that is unreadable or invalid.
pub fn read_crossover_rules(
    config: &Config,
) -> Result<CrossoverTable, farandole_config::KnobError> {
    let value = config.allreduce_algorithm.trim();
    let read = match value.strip_prefix('@') {
        Some(path) => std::fs::read_to_string(path).map_err(|error| error.to_string()),
        None => Ok(value.to_owned()),
    };
    read.and_then(|text| text.parse()).map_err(|reason: String| farandole_config::KnobError {
        name: "FARANDOLE_ALLREDUCE_ALGORITHM".to_owned(),
        expected: "auto, rules such as direct:4096,doubling:65536,hierarchy, or @ and a file of \
                   them",
        value: if value.starts_with('@') { format!("{value}: {reason}") } else { value.to_owned() },
    })
}

/// Builds a communicator of some ranks that knows which of them share a machine.
pub(crate) fn build_communicator(
    world: &World,
    members: &[Rank],
    data: Vec<Link>,
    crossover: CrossoverTable,
) -> Result<HostCommunicator> {
    let machines = world.machine_numbers();
    let machine = |rank: &Rank| machines.get(rank.index()).copied().unwrap_or_default();
    let machines: Vec<u32> = members.iter().map(machine).collect();
    Ok(HostCommunicator::across_hosts(world.rank, data, &machines)?.with_crossover(crossover))
}

/// Returns the share of one process in its machine's shared memory `budget`.
pub(crate) fn per_process_memory_share(world: &World, budget: u64) -> u64 {
    // The machine, not the host: containers of one machine share its memory.
    budget / (world.machine_rank_count() as u64).max(1)
}

/// Returns a warning about links that should use shared memory but use TCP; `None` if there are
/// none.
pub(crate) fn tcp_fallback_warning(links: &[(Rank, String)]) -> Option<String> {
    let (rank, reason) = links.first()?;
    let others = match links.len() {
        1 => String::new(),
        links => format!("; so do {} more", links - 1),
    };
    Some(format!("a link to rank {rank} goes over TCP instead of shared memory: {reason}{others}"))
}

#[cfg(test)]
mod tests {
    use farandole_collectives::simulation::{AllreducePlan, MemberAction};
    use farandole_world::{Generation, HostHash, TaskId, TaskPlacement, assign_ranks};

    use super::*;

    fn world(hosts: &[&str]) -> World {
        let places: Vec<TaskPlacement> = (0u32..)
            .zip(hosts)
            .map(|(task, host)| TaskPlacement {
                task: TaskId(task),
                host: HostHash((*host).to_owned()),
            })
            .collect();
        assign_ranks(Generation(0), &places).unwrap()
    }

    #[test]
    fn the_fullest_host_decides_for_all() {
        let uneven = world(&["a", "a", "a", "a", "b"]);
        let seen_from_b = uneven.seen_from(Rank(4)).unwrap();
        assert_eq!(data_ring_bytes(&uneven, 14 << 20), 512 << 10);
        assert_eq!(data_ring_bytes(&seen_from_b, 14 << 20), 512 << 10);
    }

    #[test]
    fn containers_of_a_machine_share_its_budget() {
        let (containers, host) =
            (world(&["m/1", "m/2", "m/3", "n/4"]), world(&["m", "m", "m", "n"]));
        for budget in [14 << 20, 256 << 20] {
            assert_eq!(data_ring_bytes(&containers, budget), data_ring_bytes(&host, budget));
            assert_eq!(
                per_process_memory_share(&containers, budget),
                per_process_memory_share(&host, budget)
            );
        }
        assert_eq!(containers.machine_numbers(), host.machine_numbers());
    }

    #[test]
    fn rings_are_neither_tiny_nor_huge() {
        assert_eq!(data_ring_bytes(&world(&["a", "a"]), 0), 64 << 10);
        assert_eq!(data_ring_bytes(&world(&["a", "a"]), 1 << 40), 4 << 20);
        assert_eq!(data_ring_bytes(&world(&["a"]), 4 << 20), 1 << 20);
    }

    #[test]
    fn rings_stay_in_the_cache_together_where_they_need_not_be_short_for_that() {
        let ring = |ranks| data_ring_bytes(&world(&vec!["a"; ranks]), 256 << 20);
        assert_eq!([2, 3, 4, 5, 8].map(ring), [4 << 20, 2 << 20, 1 << 20, 4 << 20, 2 << 20]);
        assert_eq!(
            process_set_ring_bytes(&world(&["a"; 4]), 256 << 20),
            1 << 20,
            "sets do not all work at once"
        );
    }

    #[test]
    fn capacities_are_powers_of_two_within_the_budget() {
        assert_eq!(data_ring_bytes(&world(&["a", "a", "a"]), 20 << 20), 1 << 20);
    }

    #[test]
    fn rules_of_algorithms_are_read_from_a_file() {
        let path = std::env::temp_dir().join(format!("farandole-rules-{}", std::process::id()));
        let read = || {
            let allreduce_algorithm = format!("@{}", path.display());
            let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
            read_crossover_rules(&Config { allreduce_algorithm, ..config })
        };
        let missing = read().unwrap_err().to_string();
        assert!(missing.contains("No such file"), "{missing}");
        std::fs::write(&path, "# two hosts\n2x4=doubling:100,hierarchy\n").unwrap();
        let rules = read();
        std::fs::write(&path, "2x4=ring\n").unwrap();
        let wrong = read();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(rules.unwrap().to_string(), "2x4=doubling:100,hierarchy;auto");
        let wrong = wrong.unwrap_err().to_string();
        assert!(wrong.contains("no rule of algorithms: ring"), "{wrong}");
    }

    #[test]
    fn links_without_shared_memory_are_reported_in_one_line() {
        let links = |ranks: &[u32]| -> Vec<(Rank, String)> {
            ranks.iter().map(|rank| (Rank(*rank), "no room".to_owned())).collect()
        };
        assert_eq!(tcp_fallback_warning(&links(&[])), None);
        let one = "a link to rank 3 goes over TCP instead of shared memory: no room";
        assert_eq!(tcp_fallback_warning(&links(&[3])).unwrap(), one);
        assert_eq!(
            tcp_fallback_warning(&links(&[3, 1, 2])).unwrap(),
            format!("{one}; so do 2 more")
        );
    }

    #[test]
    fn a_process_that_dials_all_others_stays_within_its_share() {
        let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
        for ranks in [2, 3, 4, 8, 16, 33, 64, 65, 128, 200] {
            let world = world(&vec!["a"; ranks]);
            let budget = shared_memory_budget(&world, &config);
            let dialled = (ranks - 1) * data_ring_bytes(&world, budget) + CONTROL_RING_BYTES;
            let set = (ranks - 1) * process_set_ring_bytes(&world, budget) + CONTROL_RING_BYTES;
            assert!(
                (dialled + set) as u64 <= per_process_memory_share(&world, budget),
                "{ranks} ranks: {dialled}, {set} bytes"
            );
        }
    }

    #[test]
    fn a_configured_budget_is_kept() {
        let given = BTreeMap::from([("shared_memory_bytes".to_owned(), "8MiB".to_owned())]);
        let config = Config::read(|_| None, &given).unwrap();
        assert_eq!(shared_memory_budget(&world(&["a"; 100]), &config), 8 << 20);
    }

    fn hosts(ranks: &[usize]) -> World {
        let names: Vec<String> = (0..ranks.len()).map(|host| format!("host{host:03}")).collect();
        let places: Vec<&str> = names
            .iter()
            .zip(ranks)
            .flat_map(|(name, count)| std::iter::repeat_n(name.as_str(), *count))
            .collect();
        world(&places)
    }

    fn first(world: &World, members: &[Rank], own: Rank, most: u64) -> Vec<Rank> {
        let (first, later) = partition_eager_peers(&world.seen_from(own).unwrap(), members, most);
        let mut all = [&first[..], &later].concat();
        all.sort_unstable();
        assert!(all.iter().eq(members.iter().filter(|rank| **rank != own)), "each once");
        first
    }

    #[test]
    fn few_links_are_opened_at_the_start_of_a_large_world_and_all_of_a_small_one() {
        let count = |ranks: &[usize], own| {
            let (world, size) = (hosts(ranks), ranks.iter().sum::<usize>());
            let members: Vec<Rank> = (0..).take(size).map(Rank).collect();
            first(&world, &members, Rank(own), 16).len()
        };
        assert_eq!(
            (count(&[8], 3), count(&[8, 8], 3), count(&[2, 16], 1), count(&[4; 5], 0)),
            (7, 15, 17, 19)
        );
        // At most 16 other machines, then one more.
        assert_eq!((count(&[1; 17], 3), count(&[1; 18], 3)), (16, 8));
        // 7 ranks on the same machine, and the ranks that exchange heartbeats.
        assert_eq!(count(&[8; 64], 77), 7 + 11);
        assert_eq!(count(&[8; 512], 77), 7 + 17);
    }

    /// Otherwise, one end would wait for the other, or the greetings of the communicators would not
    /// reach all members.
    #[test]
    fn links_that_are_opened_at_the_start_are_so_for_both_ends_and_connect_all_members() {
        for ranks in [&[2, 2][..], &[1; 9], &[3, 1, 2, 5, 1, 1, 4], &[8; 12], &[1, 20, 1]] {
            let world = hosts(ranks);
            let size: usize = ranks.iter().sum();
            for step in [1, 2, 3] {
                let members: Vec<Rank> =
                    (0..).step_by(step).take(size.div_ceil(step)).map(Rank).collect();
                for most in [0, 3, 16, 1000] {
                    let first = |own| first(&world, &members, own, most);
                    let (mut seen, mut next) = (BTreeSet::from([members[0]]), vec![members[0]]);
                    while let Some(rank) = next.pop() {
                        for peer in first(rank) {
                            assert!(first(peer).contains(&rank), "{ranks:?}: {rank} and {peer}");
                            if seen.insert(peer) {
                                next.push(peer);
                            }
                        }
                    }
                    assert_eq!(seen.len(), members.len(), "{ranks:?} by {step}");
                }
            }
        }
    }

    /// Connections of each rank to other hosts: heartbeats, negotiation, and links for data that
    /// were open at the start or that the barrier at the end of `init` and allreduces of these
    /// bytes have opened.
    fn sockets(ranks: &[usize], rules: &str, bytes: &[usize]) -> Vec<usize> {
        let (world, size) = (hosts(ranks), ranks.iter().sum::<usize>());
        let members: Vec<Rank> = (0..).take(size).map(Rank).collect();
        let places = world.machine_numbers();
        let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
        let (rules, ring) = (rules.parse().unwrap(), world_ring_bytes(&world, &config));
        let latency = std::time::Duration::from_micros(20);
        let mut partners = vec![BTreeSet::new(); size];
        for bytes in bytes {
            let plan = AllreducePlan::new(&places, *bytes, ring, &rules, latency).unwrap();
            let mut allreduce = plan.start_on_all_members().unwrap();
            while allreduce.pending_count() > 0 {
                for from in 0..size {
                    for action in allreduce.poll_member(from).unwrap() {
                        if let MemberAction::Send(transfer) = action {
                            let to = transfer.member as usize;
                            allreduce.deliver_bytes(from, to, transfer.bytes);
                            partners[from].insert(to);
                            partners[to].insert(from);
                        }
                    }
                }
            }
        }
        let parents = farandole_engine::control_plane_model::control_parents(&world, &members).0;
        let machines: Vec<&str> = world.seats.iter().map(|seat| seat.host.machine_name()).collect();
        let sockets = |own: &Rank| {
            let is_far = |peer: &usize| places[*peer] != places[own.index()];
            let mut data: BTreeSet<usize> = first(&world, &members, *own, 16)
                .into_iter()
                .map(Rank::index)
                .filter(is_far)
                .collect();
            data.extend(partners[own.index()].iter().copied().filter(is_far));
            let distances = std::iter::successors(Some(1), |distance| Some(distance * 2));
            let barrier = distances.take_while(|distance| *distance < size);
            let tokens = barrier.flat_map(|distance| [distance, size - distance]);
            data.extend(tokens.map(|distance| (own.index() + distance) % size).filter(is_far));
            let beats = heartbeat_peers(&machines, *own);
            let beats = beats.into_iter().map(Rank::index).filter(is_far).count();
            let is_edge = |(member, parent): (usize, &Option<u32>)| {
                let up = parent.map(|parent| parent as usize);
                is_far(&member) && up == Some(own.index())
                    || member == own.index() && up.is_some_and(|parent| is_far(&parent))
            };
            let control = parents.iter().enumerate().filter(|edge| is_edge(*edge)).count();
            data.len() + beats + control
        };
        members.iter().map(sockets).collect()
    }

    #[test]
    fn a_rank_of_64_hosts_with_8_ranks_has_at_most_40_sockets_to_other_hosts_after_allreduces() {
        let most = |ranks: &[usize], rules: &str| {
            sockets(ranks, rules, &[4, 64 << 10, 1 << 20, 64 << 20]).into_iter().max().unwrap()
        };
        // The first and the last rank of a host exchange tokens of the barrier with three more
        // ranks.
        assert_eq!(most(&[8; 64], "doubling:65536,hierarchy"), 63 + 3 + 11 + 6);
        assert_eq!(most(&[8; 64], "auto"), 11 + 3 + 11 + 6);
        assert_eq!(most(&[8; 64], "doubling:65536,halving"), 11 + 3 + 11 + 6);
        // The number of hosts is no power of two, so allreduces use links between other hosts than
        // heartbeats do.
        for hosts in [33, 48, 63] {
            let found = most(&vec![8; hosts], "auto");
            assert!(found <= 40, "{hosts} hosts: {found}");
        }
    }
}
