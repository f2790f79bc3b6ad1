// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Joining, opening, refusing strangers, leaving, waking.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use farandole_transport::link_contract::{
    TEST_WAIT_LIMIT, join_meshes, open_link_pair, rank_zero_address, test_mesh_options,
};
use farandole_transport::{
    Error, Link, LinkKind, MemoryRendezvous, Mesh, MeshOptions, NumberedInterfaceAddress, Parker,
    Rendezvous, RendezvousParticipant, Result, WakeReason, into_frame_halves,
};
use farandole_world::{Generation, HostHash, Rank};

fn join_two(first: MeshOptions, second: MeshOptions) -> (MemoryRendezvous, Mesh, Mesh) {
    let rendezvous = MemoryRendezvous::default();
    let other = rendezvous.clone();
    let joining = thread::spawn(move || Mesh::join(second, &other).unwrap());
    let mesh = Mesh::join(first, &rendezvous).unwrap();
    (rendezvous, mesh, joining.join().unwrap())
}

/// The proof decides: containers are hosts of their own, and those of one machine may share memory
/// or not.
#[test]
fn containers_of_a_machine_share_memory_where_they_can() {
    let in_container = |rank: u32, container: &str| {
        let mut options = test_mesh_options(rank, 2);
        options.host = HostHash(container.to_owned());
        options
    };
    let kind_of = |first: MeshOptions, second: MeshOptions| {
        let (_, first, second) = join_two(first, second);
        let kinds = thread::scope(|scope| {
            let other = scope.spawn(|| second.open_links(1, &[Rank(0)], 4096).unwrap()[0].kind);
            [first.open_links(1, &[Rank(1)], 4096).unwrap()[0].kind, other.join().unwrap()]
        });
        assert_eq!(kinds[0], kinds[1]);
        (kinds[0], second.tcp_fallbacks().len())
    };
    assert_eq!(
        kind_of(in_container(0, "m/1"), in_container(1, "m/2")),
        (LinkKind::SharedMemory, 0)
    );
    assert_eq!(kind_of(in_container(0, "m/1"), in_container(1, "n/1")), (LinkKind::Tcp, 0));
    let mut poor = in_container(1, "m/2");
    poor.shared_memory_bytes = 0;
    assert_eq!(kind_of(in_container(0, "m/1"), poor), (LinkKind::Tcp, 1));
}

#[test]
fn eight_ranks_open_two_channels_and_all_hear_each_other() {
    let meshes = join_meshes(8, |options| options.use_shared_memory = options.rank.0 < 5);
    let ranks: Vec<Rank> = (0..8).map(Rank).collect();
    thread::scope(|scope| {
        for mesh in &meshes {
            let ranks = &ranks;
            scope.spawn(move || {
                for channel in [1, 2] {
                    let links = mesh.open_links(channel, ranks, 4096).unwrap();
                    assert_eq!(links.len(), 7);
                    let mut ends: Vec<_> = links.into_iter().map(into_frame_halves).collect();
                    for (sender, _) in &mut ends {
                        sender.queue_frame(9, &mesh.rank().0.to_le_bytes()).unwrap();
                    }
                    let limit = Instant::now() + TEST_WAIT_LIMIT;
                    for (_, receiver) in &mut ends {
                        let frame = loop {
                            if let Some(frame) = receiver.try_receive_frame().unwrap() {
                                break frame;
                            }
                            assert!(Instant::now() < limit);
                            thread::yield_now();
                        };
                        assert_eq!(frame.payload, receiver.peer_rank().0.to_le_bytes());
                    }
                    // Closed here although others may still read: an orderly close loses nothing.
                }
            });
        }
    });
    assert!(meshes.iter().all(|mesh| mesh.check_peers().is_ok()));
}

#[test]
fn memory_beyond_the_budget_is_not_taken() {
    let (_, zero, one) = join_two(
        test_mesh_options(0, 2),
        MeshOptions { shared_memory_bytes: 70_000, ..test_mesh_options(1, 2) },
    );
    let meshes = [zero, one];
    let first = open_link_pair(&meshes, 1, 16384);
    assert_eq!(first.0.kind, LinkKind::SharedMemory);
    assert_eq!(meshes[1].tcp_fallbacks(), []);
    assert_eq!(open_link_pair(&meshes, 2, 65536).0.kind, LinkKind::Tcp);
    let reason = "65536 bytes more than this process may take of 70000".to_owned();
    assert_eq!(meshes[1].tcp_fallbacks(), [(Rank(0), reason)]);
}

#[test]
fn memory_of_links_that_were_dropped_may_be_taken_again() {
    let (_, zero, one) = join_two(
        test_mesh_options(0, 2),
        MeshOptions { shared_memory_bytes: 70_000, ..test_mesh_options(1, 2) },
    );
    let meshes = [zero, one];
    for channel in 0..20 {
        let (a, b) = open_link_pair(&meshes, channel, 65536);
        assert_eq!(
            (a.kind, b.kind),
            (LinkKind::SharedMemory, LinkKind::SharedMemory),
            "channel {channel}"
        );
    }
    let (_, mut held) = open_link_pair(&meshes, 20, 65536);
    held.sender = open_link_pair(&meshes, 21, 4096).1.sender;
    assert_eq!(
        open_link_pair(&meshes, 22, 65536).1.kind,
        LinkKind::Tcp,
        "one half of the last link is still there"
    );
    assert_eq!(meshes[1].tcp_fallbacks().len(), 1);
}

#[test]
fn ranks_of_different_hosts_use_tcp() {
    let meshes = join_meshes(2, |options| {
        options.host = HostHash(format!("host-{}", options.rank));
        options.bind = vec![IpAddr::from(Ipv4Addr::LOCALHOST).into()];
    });
    let (a, b) = open_link_pair(&meshes, 0, 4096);
    assert_eq!((a.kind, b.kind), (LinkKind::Tcp, LinkKind::Tcp));
    assert_eq!(meshes[0].peer_host(Rank(1)).unwrap().0, "host-1");
}

#[test]
fn tr_2_a_peer_with_another_key_is_refused_by_both_ends() {
    let short = Duration::from_millis(700);
    for use_shared_memory in [true, false] {
        let first =
            MeshOptions { setup_timeout: short, use_shared_memory, ..test_mesh_options(0, 2) };
        let second = MeshOptions { key: [8; 32], ..first.clone() };
        let (_, zero, one) = join_two(first, MeshOptions { rank: Rank(1), ..second });
        thread::scope(|scope| {
            let waiting = scope.spawn(|| zero.open_links(0, &[Rank(1)], 4096).unwrap_err());
            let error = one.open_links(0, &[Rank(0)], 4096).unwrap_err();
            assert!(
                matches!(&error, Error::Handshake { reason } if reason.contains("key")),
                "{error}"
            );
            let error = waiting.join().unwrap();
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
        });
        assert!(zero.refused_connection_count() > 0);
    }
}

#[test]
fn a_peer_of_another_generation_is_refused() {
    let rendezvous = MemoryRendezvous::default();
    let (old, new) = (rendezvous.clone(), rendezvous.clone());
    // Rank 1 of generation 1 is shown the way to rank 0 of generation 0.
    let zero = thread::spawn(move || Mesh::join(test_mesh_options(0, 2), &old).unwrap());
    let addresses = rendezvous.await_value("mesh/0/0", Instant::now() + TEST_WAIT_LIMIT).unwrap();
    rendezvous.publish_value("mesh/1/0", &addresses);
    let one =
        Mesh::join(MeshOptions { generation: Generation(1), ..test_mesh_options(1, 2) }, &new)
            .unwrap();
    rendezvous.publish_value(
        "mesh/0/1",
        &rendezvous.await_value("mesh/1/1", Instant::now() + TEST_WAIT_LIMIT).unwrap(),
    );
    let _zero = zero.join().unwrap();
    let error = one.open_links(0, &[Rank(0)], 4096).unwrap_err();
    assert!(
        matches!(&error, Error::Handshake { reason } if reason.contains("generation")),
        "{error}"
    );
}

#[test]
fn tr_2_strangers_that_send_garbage_or_nothing_do_not_keep_a_peer_out() {
    let first = MeshOptions { use_shared_memory: false, ..test_mesh_options(0, 2) };
    let second = MeshOptions { rank: Rank(1), ..first.clone() };
    let (rendezvous, zero, one) = join_two(first, second);
    let address = rank_zero_address(&rendezvous, 0);
    // More than may be in progress: the oldest are dropped. Each sends a part of a hello and then
    // nothing.
    let slow: Vec<TcpStream> = (0..200)
        .map(|_| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"farandol").unwrap();
            stream
        })
        .collect();
    let mut garbage = TcpStream::connect(address).unwrap();
    garbage.write_all(&[0xa5; 4096]).unwrap();
    garbage.set_read_timeout(Some(TEST_WAIT_LIMIT)).unwrap();
    // Closed, perhaps with what was not read: either way nothing is answered.
    assert_eq!(garbage.read(&mut [0; 16]).unwrap_or(0), 0);
    let started = Instant::now();
    let (a, b) = open_link_pair(&[zero, one], 3, 4096);
    assert!(started.elapsed() < Duration::from_secs(3));
    drop((a, b, slow));
}

/// TR-2 under a flood: strangers that connect without end, all from the peer's host.
#[test]
fn tr_2_a_peer_gets_its_links_while_strangers_flood_the_door() {
    const CHANNELS: u32 = 20;
    let first = MeshOptions { use_shared_memory: false, ..test_mesh_options(0, 2) };
    let second = MeshOptions { rank: Rank(1), ..first.clone() };
    let (rendezvous, zero, one) = join_two(first, second);
    let (address, over) =
        (rank_zero_address(&rendezvous, 0), std::sync::atomic::AtomicBool::new(false));
    let meshes = [zero, one];
    let alone = Instant::now();
    (0..CHANNELS).for_each(|channel| drop(open_link_pair(&meshes, channel, 4096)));
    let alone = alone.elapsed();
    thread::scope(|scope| {
        let floods: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let (mut kept, mut made) = (std::collections::VecDeque::new(), 0_u64);
                    while !over.load(std::sync::atomic::Ordering::Relaxed) {
                        let Ok(mut stream) = TcpStream::connect(address) else { continue };
                        // The mesh may have closed the connection. A partial hello keeps it open
                        // longest.
                        drop(stream.write_all(b"farandol"));
                        kept.push_back(stream);
                        made += 1;
                        if kept.len() > 200 {
                            drop(kept.pop_front());
                        }
                    }
                    made
                })
            })
            .collect();
        let limit = Instant::now() + TEST_WAIT_LIMIT;
        while meshes[0].refused_connection_count() < 100 {
            assert!(Instant::now() < limit, "no flood");
            thread::yield_now();
        }
        let flooded = Instant::now();
        (CHANNELS..2 * CHANNELS).for_each(|channel| drop(open_link_pair(&meshes, channel, 4096)));
        let flooded = flooded.elapsed();
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        let made: u64 = floods.into_iter().map(|flood| flood.join().unwrap()).sum();
        println!("{CHANNELS} links: {alone:?} alone, {flooded:?} beside {made} strangers");
        assert!(
            flooded < TEST_WAIT_LIMIT / 2,
            "{alone:?} alone, {flooded:?} beside {made} strangers"
        );
    });
    meshes.iter().for_each(|mesh| mesh.check_peers().unwrap());
}

#[test]
fn tr_2_a_handshake_that_takes_too_long_is_ended() {
    let first = MeshOptions { use_shared_memory: false, ..test_mesh_options(0, 1) };
    let rendezvous = MemoryRendezvous::default();
    let mesh = Mesh::join(first, &rendezvous).unwrap();
    let mut slow = TcpStream::connect(rank_zero_address(&rendezvous, 0)).unwrap();
    slow.write_all(b"farandol").unwrap();
    slow.set_read_timeout(Some(TEST_WAIT_LIMIT)).unwrap();
    assert_eq!(slow.read(&mut [0; 1]).unwrap_or(0), 0, "closed without an answer");
    assert_eq!(mesh.refused_connection_count(), 1);
}

#[test]
fn ends_that_disagree_on_the_capacity_get_an_error() {
    let meshes = join_meshes(2, |_| {});
    thread::scope(|scope| {
        let other = scope.spawn(|| meshes[1].open_links(5, &[Rank(0)], 4096));
        let error = meshes[0].open_links(5, &[Rank(1)], 8192).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("rank 1 opened channel 5 with 4096 bytes a ring, here: 8192"),
            "{error}"
        );
        drop(other.join().unwrap());
    });
}

#[test]
fn the_rank_that_does_not_come_is_named() {
    let error = Mesh::join(
        MeshOptions { setup_timeout: Duration::from_millis(50), ..test_mesh_options(0, 2) },
        &MemoryRendezvous::default(),
    )
    .unwrap_err();
    assert!(error.to_string().contains("rank 1 of 2 to join"), "{error}");
}

#[test]
fn a_peer_that_left_in_order_is_no_failure_but_ends_its_links() {
    for use_shared_memory in [true, false] {
        let mut meshes = join_meshes(2, |options| options.use_shared_memory = use_shared_memory);
        let (mut a, b) = open_link_pair(&meshes, 1, 4096);
        drop(b);
        drop(meshes.pop());
        let limit = Instant::now() + TEST_WAIT_LIMIT;
        let error = loop {
            match a.receiver.window() {
                Ok(_) => assert!(Instant::now() < limit),
                Err(error) => break error,
            }
            thread::yield_now();
        };
        assert!(matches!(error, Error::PeerLost { rank: Rank(1), .. }), "{error}");
        meshes[0].check_peers().unwrap();
    }
}

/// A process set that ends with a transfer in progress: one rank drops its links before it has read
/// everything.
#[test]
fn a_link_that_is_dropped_with_bytes_unread_does_not_make_its_rank_a_lost_one() {
    let meshes = join_meshes(2, |options| options.use_shared_memory = false);
    let (mut a, mut b) = open_link_pair(&meshes, 1, 1 << 20);
    // Both directions are full, up to the rings and buffers of both ends.
    let limit = Instant::now() + TEST_WAIT_LIMIT;
    let mut quiet = Instant::now();
    while quiet.elapsed() < Duration::from_millis(50) {
        for end in [&mut a, &mut b] {
            let bytes = end.sender.window().unwrap().len();
            end.sender.commit(bytes).unwrap();
            if bytes > 0 {
                quiet = Instant::now();
            }
        }
        assert!(Instant::now() < limit);
    }
    drop(a);
    let error = loop {
        match b.receiver.window().map(<[u8]>::len).and_then(|bytes| b.receiver.release(bytes)) {
            Ok(()) => assert!(Instant::now() < limit),
            Err(error) => break error,
        }
        thread::yield_now();
    };
    assert!(error.to_string().contains("it closed the connection"), "{error}");
    // What the kernel tells of the old link is known to the mesh before it has made a new one.
    let (mut a, mut b) = open_link_pair(&meshes, 2, 4096);
    give(&mut b, 7);
    assert_eq!(take(&mut a, &meshes[0].parker(), limit), 7);
    meshes[0].check_peers().unwrap();
    meshes[1].check_peers().unwrap();
}

/// TR-4: its kernel answers for a rank that is busy with other things, and says that it has no
/// room.
#[test]
fn tr_4_a_peer_that_reads_nothing_for_longer_than_its_timeout_is_not_lost() {
    let timeout = Duration::from_millis(300);
    let meshes = join_meshes(2, |options| {
        options.use_shared_memory = false;
        options.peer_timeout = timeout;
    });
    let (mut a, mut b) = open_link_pair(&meshes, 1, 1 << 20);
    let (end, mut sent) = (Instant::now() + 5 * timeout, 0);
    while Instant::now() < end {
        let bytes = a.sender.window().unwrap().len();
        a.sender.commit(bytes).unwrap();
        sent += bytes;
        meshes[0].parker().park(Instant::now() + Duration::from_millis(5)).unwrap();
    }
    let (limit, mut received) = (Instant::now() + TEST_WAIT_LIMIT, 0);
    while received < sent {
        a.sender.flush().unwrap();
        let bytes = b.receiver.window().unwrap().len();
        b.receiver.release(bytes).unwrap();
        received += bytes;
        assert!(Instant::now() < limit, "{received} of {sent} bytes arrived");
    }
    meshes.iter().for_each(|mesh| mesh.check_peers().unwrap());
}

/// Polls until a byte is there, sleeping in between, and takes it.
fn take(link: &mut Link, parker: &Parker, limit: Instant) -> u8 {
    loop {
        parker.prepare_park();
        let flushed = link.sender.flush().unwrap();
        let window = link.receiver.window().unwrap();
        if let Some(byte) = window.first().copied() {
            parker.cancel_park();
            link.receiver.release(1).unwrap();
            return byte;
        }
        if parker.park(limit).unwrap() == WakeReason::TimedOut {
            panic!("lost a wake-up; flushed: {flushed}");
        }
    }
}

fn give(link: &mut Link, byte: u8) {
    link.sender.window().unwrap()[0] = byte;
    link.sender.commit(1).unwrap();
}

#[test]
fn tr_3_no_wake_up_is_lost_between_ranks_that_sleep() {
    for use_shared_memory in [true, false] {
        let meshes = join_meshes(2, |options| options.use_shared_memory = use_shared_memory);
        let (mut a, mut b) = open_link_pair(&meshes, 1, 4096);
        let (park_a, park_b) = (meshes[0].parker(), meshes[1].parker());
        let end = Instant::now() + Duration::from_secs(2);
        let limit = Instant::now() + TEST_WAIT_LIMIT;
        let echo = thread::spawn(move || {
            loop {
                let byte = take(&mut b, &park_b, limit);
                give(&mut b, byte);
                if byte == 0 {
                    return b;
                }
            }
        });
        let mut rounds = 0_u64;
        loop {
            let last = Instant::now() > end;
            give(&mut a, u8::from(!last));
            take(&mut a, &park_a, limit);
            rounds += 1;
            if last {
                break;
            }
        }
        assert!(rounds > 1000, "{rounds}");
        drop(echo.join().unwrap());
    }
}

#[test]
fn tr_3_a_sender_that_sleeps_for_space_is_woken_by_a_release() {
    for use_shared_memory in [true, false] {
        let meshes = join_meshes(2, |options| options.use_shared_memory = use_shared_memory);
        let (mut a, mut b) = open_link_pair(&meshes, 1, 4096);
        let parker = meshes[0].parker();
        let total: usize = 32 << 20;
        let reader = thread::spawn(move || {
            let limit = Instant::now() + TEST_WAIT_LIMIT;
            let mut seen = 0;
            while seen < total {
                let bytes = b.receiver.window().unwrap().len();
                b.receiver.release(bytes).unwrap();
                seen += bytes;
                assert!(Instant::now() < limit);
                if bytes == 0 {
                    thread::yield_now();
                }
            }
            b
        });
        let limit = Instant::now() + TEST_WAIT_LIMIT;
        let mut sent = 0;
        while sent < total {
            parker.prepare_park();
            let bytes = a.sender.window().unwrap().len().min(total - sent);
            if bytes == 0 {
                assert_eq!(
                    parker.park(limit).unwrap(),
                    WakeReason::Woken,
                    "lost a wake-up after {sent} bytes"
                );
                continue;
            }
            parker.cancel_park();
            a.sender.commit(bytes).unwrap();
            sent += bytes;
        }
        while !a.sender.flush().unwrap() {
            parker.prepare_park();
            if !a.sender.flush().unwrap() {
                assert_eq!(parker.park(limit).unwrap(), WakeReason::Woken);
            }
        }
        drop(reader.join().unwrap());
    }
}

#[test]
fn a_channel_is_opened_once() {
    let meshes = join_meshes(2, |_| {});
    let _links = open_link_pair(&meshes, 1, 4096);
    let error = meshes[1].open_links(1, &[Rank(0)], 4096).unwrap_err();
    assert!(error.to_string().contains("channel 1 to rank 0 was opened before"), "{error}");
}

#[test]
fn a_rank_that_left_before_it_opened_its_end_is_not_waited_for() {
    for use_shared_memory in [true, false] {
        let mut meshes = join_meshes(2, |options| options.use_shared_memory = use_shared_memory);
        drop(meshes.pop());
        let started = Instant::now();
        let error = meshes[0].open_links(1, &[Rank(1)], 4096).unwrap_err();
        assert!(error.to_string().contains("it no longer listens"), "{error}");
        assert!(started.elapsed() < TEST_WAIT_LIMIT / 2);
    }
}

#[test]
fn a_rank_that_left_cannot_be_dialled() {
    let mut meshes = join_meshes(2, |_| {});
    drop(meshes.remove(0));
    let error = meshes[0].open_links(1, &[Rank(0)], 4096).unwrap_err();
    assert!(matches!(error, Error::Unreachable { rank: Rank(0), .. }), "{error}");
}

#[test]
fn a_wait_for_a_link_ends_when_it_is_cancelled() {
    for use_shared_memory in [true, false] {
        let meshes = join_meshes(2, |options| options.use_shared_memory = use_shared_memory);
        let started = Instant::now();
        let deadline = started + TEST_WAIT_LIMIT;
        // The one that waits for the call of a peer which lives and does not open its end.
        let error =
            meshes[0].open_links_until(1, &[Rank(1)], 4096, deadline, &mut || true).unwrap_err();
        assert!(matches!(error, Error::Interrupted), "{error}");
        // The one that calls.
        let error =
            meshes[1].open_links_until(1, &[Rank(0)], 4096, deadline, &mut || true).unwrap_err();
        assert!(matches!(error, Error::Interrupted), "{error}");
        assert!(started.elapsed() < TEST_WAIT_LIMIT / 2);
    }
}

#[test]
fn tr_6_a_forked_child_can_neither_use_nor_harm_the_mesh() {
    const REFUSED: i32 = 200;
    let mut meshes = join_meshes(2, |options| options.use_shared_memory = options.rank.0 == 9);
    let (mut a, mut b) = open_link_pair(&meshes, 1, 4096);
    let mut mesh = meshes.pop();
    let mut command = Command::new("/proc/self/exe");
    let probe = move || {
        let Some(mesh) = mesh.take() else { return Ok(()) };
        let refused = matches!(mesh.check_peers(), Err(Error::Forked))
            && matches!(mesh.open_links(2, &[Rank(0)], 4096), Err(Error::Forked))
            && matches!(mesh.parker().park(Instant::now()), Err(Error::Forked));
        drop(mesh);
        Err(std::io::Error::from_raw_os_error(if refused { REFUSED } else { 0 }))
    };
    // SAFETY: the closure runs in the forked child before exec, where only this thread exists; the
    // C library keeps its allocator usable across a fork.
    unsafe { command.pre_exec(probe) };
    assert_eq!(command.spawn().unwrap_err().raw_os_error(), Some(REFUSED));
    // The parent's mesh is alive in the closure, and so is its link.
    give(&mut b, 5);
    assert_eq!(take(&mut a, &meshes[0].parker(), Instant::now() + TEST_WAIT_LIMIT), 5);
    meshes[0].check_peers().unwrap();
}

/// A rank of a host of its own, whose interfaces are addresses of the loopback: their numbers and
/// last bytes.
fn on_interfaces(rank: u32, own: &[(u16, u8)]) -> MeshOptions {
    let interface = |(number, last): &(u16, u8)| NumberedInterfaceAddress {
        number: *number,
        address: [127, 0, 0, *last].into(),
    };
    MeshOptions {
        host: HostHash(format!("host-{rank}")),
        bind: own.iter().map(interface).collect(),
        ..test_mesh_options(rank, 2)
    }
}

/// Returns the connections that a rank with these addresses has dialled from them: the last bytes
/// of both ends.
fn dialled_from(own: &[u8]) -> Vec<(u8, u8)> {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let last = |field: &str| u8::from_str_radix(&field[..2], 16).unwrap();
    let lines = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let established = lines.filter(|fields| fields[3] == "01");
    let ends = established.map(|fields| (last(fields[1]), last(fields[2])));
    let mut found: Vec<(u8, u8)> = ends.filter(|(from, _)| own.contains(from)).collect();
    found.sort_unstable();
    found
}

/// Sends more than a block of each connection.
fn carries(from: &mut Link, to: &mut Link) {
    let bytes: Vec<u8> = (0..1_u32 << 20).map(|number| (number % 251) as u8).collect();
    let (mut sent, mut received, limit) = (0, Vec::new(), Instant::now() + TEST_WAIT_LIMIT);
    while received.len() < bytes.len() {
        let window = from.sender.window().unwrap();
        let part = window.len().min(bytes.len() - sent);
        window[..part].copy_from_slice(&bytes[sent..sent + part]);
        from.sender.commit(part).unwrap();
        sent += part;
        let window = to.receiver.window().unwrap();
        received.extend_from_slice(window);
        let part = window.len();
        to.receiver.release(part).unwrap();
        assert!(Instant::now() < limit);
    }
    assert!(received == bytes);
}

#[test]
fn connections_of_a_link_take_turns_with_the_interfaces_that_both_hosts_have() {
    let (_, zero, one) = join_two(
        on_interfaces(0, &[(0, 41), (1, 42), (2, 43)]),
        on_interfaces(1, &[(0, 51), (1, 52)]),
    );
    let meshes = [zero, one];
    let (mut a, mut b) = open_link_pair(&meshes, 1, 4 << 20);
    // Heartbeats come from the address that the kernel chooses.
    assert_eq!(dialled_from(&[51, 52]), [(51, 41), (52, 42)]);
    carries(&mut b, &mut a);
}

/// Adds a line to the addresses of rank 0.
struct Also(MemoryRendezvous, String);

impl Rendezvous for Also {
    fn exchange_addresses(
        &self,
        point: RendezvousParticipant,
        addresses: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>> {
        let mut all_addresses = self.0.exchange_addresses(point, addresses, deadline)?;
        all_addresses[0].extend_from_slice(self.1.as_bytes());
        Ok(all_addresses)
    }
}

#[test]
fn an_interface_without_a_way_is_left_out_and_the_link_has_all_its_connections() {
    let rendezvous = MemoryRendezvous::default();
    let other = rendezvous.clone();
    let zero = thread::spawn(move || Mesh::join(on_interfaces(0, &[(0, 44)]), &other).unwrap());
    // Nothing listens there.
    let also = Also(rendezvous, "address 127.0.0.46:9 1\n".to_owned());
    let one = Mesh::join(on_interfaces(1, &[(0, 54), (1, 55)]), &also).unwrap();
    let meshes = [zero.join().unwrap(), one];
    let (mut a, mut b) = open_link_pair(&meshes, 1, 4 << 20);
    assert_eq!(dialled_from(&[54, 55]), [(54, 44), (54, 44)]);
    carries(&mut b, &mut a);
    let (_c, _d) = open_link_pair(&meshes, 2, 4 << 20);
    assert_eq!(dialled_from(&[54, 55]), [(54, 44); 4]);
}
