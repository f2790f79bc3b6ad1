// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links that are opened at their first use: late, refused, given up, and many at once.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use farandole_transport::link_contract::{
    DivertingRendezvous, TEST_WAIT_LIMIT, join_meshes, rank_zero_address, run_link_contract,
    test_mesh_options,
};
use farandole_transport::{Error, Link, LinkKind, MemoryRendezvous, Mesh, MeshOptions, WakeReason};
use farandole_world::{Generation, HostHash, Rank};

const CHANNEL: u32 = 1;

/// Ranks of as many machines.
fn far(size: u32, adjust: impl Fn(&mut MeshOptions)) -> Vec<Mesh> {
    join_meshes(size, |options| {
        options.host = HostHash(format!("host-{}", options.rank));
        options.bind = vec![IpAddr::from(Ipv4Addr::LOCALHOST).into()];
        adjust(options);
    })
}

fn on_demand(mesh: &Mesh, channel: u32, peers: &[Rank]) -> Vec<Link> {
    let deadline = Instant::now() + TEST_WAIT_LIMIT;
    mesh.open_links_on_demand(channel, peers, 4096, deadline, &mut || false).unwrap()
}

/// Both ends of a link between the first two, which nobody has asked for.
fn pair(meshes: &[Mesh], channel: u32) -> (Link, Link) {
    let end = |own: usize, peer| on_demand(&meshes[own], channel, &[Rank(peer)]).remove(0);
    (end(0, 1), end(1, 0))
}

fn within<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let limit = Instant::now() + TEST_WAIT_LIMIT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < limit, "waited too long");
        thread::yield_now();
    }
}

/// Sends a byte.
fn give(link: &mut Link, byte: u8) {
    within(|| link.sender.window().unwrap().first_mut().map(|place| *place = byte));
    link.sender.commit(1).unwrap();
    within(|| link.sender.flush().unwrap().then_some(()));
}

fn take(link: &mut Link) -> u8 {
    let byte = within(|| link.receiver.window().unwrap().first().copied());
    link.receiver.release(1).unwrap();
    byte
}

/// The error of a link, of whichever half.
fn failure(link: &mut Link) -> Error {
    within(|| link.sender.window().map(drop).and(link.receiver.window().map(drop)).err())
}

#[test]
fn a_link_is_open_when_both_ends_have_asked_whoever_comes_first() {
    let meshes = far(2, |_| {});
    for (channel, late) in (1..).zip([0, 1, 0, 1]) {
        let (a, b) = pair(&meshes, channel);
        assert_eq!(
            (a.kind, b.kind, a.peer, b.peer),
            (LinkKind::Tcp, LinkKind::Tcp, Rank(1), Rank(0))
        );
        let (mut early, mut late) = if late == 1 { (a, b) } else { (b, a) };
        assert!(early.sender.is_on_demand() && late.sender.is_on_demand());
        // Asked for by one side alone: nothing to read, nothing lost.
        for _ in 0..100 {
            assert_eq!(early.receiver.window().unwrap(), []);
            early.receiver.check_not_ended(0).unwrap();
            thread::sleep(Duration::from_micros(100));
        }
        thread::scope(|scope| {
            scope.spawn(|| give(&mut late, 7));
            assert_eq!(take(&mut early), 7);
        });
        thread::scope(|scope| {
            scope.spawn(|| give(&mut early, 8));
            assert_eq!(take(&mut late), 8);
        });
        assert!(early.sender.is_on_demand());
    }
}

#[test]
fn links_that_are_asked_for_keep_the_contract() {
    for streams in [1, 3] {
        let meshes = far(2, |options| options.streams = streams);
        let mut channel = 0;
        run_link_contract(&mut |capacity| {
            channel += 1;
            let deadline = Instant::now() + TEST_WAIT_LIMIT;
            let end = |own: usize, peer| {
                let peers = [Rank(peer)];
                let mesh = &meshes[own];
                mesh.open_links_on_demand(channel, &peers, capacity, deadline, &mut || false)
                    .unwrap()
                    .remove(0)
            };
            let (mut a, mut b) = (end(0, 1), end(1, 0));
            // A peer that goes before it has asked says nothing.
            within(|| {
                let open = |link: &mut Link| !link.sender.window().unwrap().is_empty();
                (open(&mut a) & open(&mut b)).then_some(())
            });
            (a, b)
        });
    }
}

/// `TR-3`: both ends sleep until the link is open, and are woken.
#[test]
fn tr_3_a_thread_that_sleeps_is_woken_when_a_link_opens() {
    let meshes = far(2, |_| {});
    for channel in 1..20 {
        let (mut a, mut b) = pair(&meshes, channel);
        let sleep = |mesh: &Mesh, link: &mut Link| {
            let (parker, limit) = (mesh.parker(), Instant::now() + TEST_WAIT_LIMIT);
            loop {
                parker.prepare_park();
                if !link.sender.window().unwrap().is_empty() {
                    parker.cancel_park();
                    return;
                }
                assert_eq!(parker.park(limit).unwrap(), WakeReason::Woken, "lost a wake-up");
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| sleep(&meshes[0], &mut a));
            sleep(&meshes[1], &mut b);
        });
    }
}

#[test]
fn many_ranks_ask_for_links_in_two_channels_at_once_and_all_hear_each_other() {
    const SIZE: u32 = 24;
    // More threads than processors: a rank may not run for seconds.
    let meshes = far(SIZE, |options| options.peer_timeout = TEST_WAIT_LIMIT);
    let ranks: Vec<Rank> = (0..SIZE).map(Rank).collect();
    thread::scope(|scope| {
        for mesh in &meshes {
            for channel in [1, 2] {
                let ranks = &ranks;
                scope.spawn(move || {
                    let mut links = on_demand(mesh, channel, ranks);
                    assert_eq!(links.len() + 1, ranks.len());
                    let (mut sent, mut heard) =
                        (vec![false; links.len()], vec![false; links.len()]);
                    let byte = u8::try_from(mesh.rank().0 + 100 * channel).unwrap();
                    within(|| {
                        for ((link, sent), heard) in links.iter_mut().zip(&mut sent).zip(&mut heard)
                        {
                            if !*sent && let Some(place) = link.sender.window().unwrap().first_mut()
                            {
                                *place = byte;
                                link.sender.commit(1).unwrap();
                                *sent = true;
                            }
                            *heard |= match link.receiver.window().unwrap() {
                                [] => false,
                                window => {
                                    assert_eq!(u32::from(window[0]), link.peer.0 + 100 * channel);
                                    true
                                }
                            };
                            link.sender.flush().unwrap();
                        }
                        let all = sent.iter().chain(&heard).all(|done| *done);
                        let flushed = links.iter_mut().all(|link| link.sender.flush().unwrap());
                        (all && flushed).then_some(())
                    });
                });
            }
        }
    });
    assert!(meshes.iter().all(|mesh| mesh.check_peers().is_ok()));
}

#[test]
fn a_channel_is_opened_once_in_either_way() {
    let meshes = far(2, |_| {});
    let _link = on_demand(&meshes[1], CHANNEL, &[Rank(0)]);
    let error = meshes[1].open_links(CHANNEL, &[Rank(0)], 4096).unwrap_err();
    assert!(error.to_string().contains("channel 1 to rank 0 was opened before"), "{error}");
    let (now, never) = (Instant::now(), &mut || false);
    let error = meshes[1].open_links_on_demand(CHANNEL, &[Rank(0)], 4096, now, never).unwrap_err();
    assert!(error.to_string().contains("channel 1 to rank 0 was opened before"), "{error}");
}

#[test]
fn rings_of_another_size_are_refused_by_the_end_that_is_dialled() {
    let meshes = far(2, |_| {});
    let mut a = on_demand(&meshes[0], CHANNEL, &[Rank(1)]).remove(0);
    let deadline = Instant::now() + TEST_WAIT_LIMIT;
    let b = meshes[1].open_links_on_demand(CHANNEL, &[Rank(0)], 8192, deadline, &mut || false);
    let mut b = b.unwrap().remove(0);
    b.sender.request_open();
    let error = failure(&mut a);
    assert!(
        error.to_string().contains("rank 1 opened channel 1 with 8192 bytes a ring, here: 4096"),
        "{error}"
    );
}

/// Rank 1 of two machines that exchange no heartbeats, and rank 0, which it looks for at this
/// address.
fn misled(to: SocketAddr, adjust: impl Fn(&mut MeshOptions) + Sync) -> (Mesh, Mesh) {
    let rendezvous = MemoryRendezvous::default();
    let of = |rank| {
        // One name of a machine, so that there are no heartbeats before the link, and no memory.
        let mut options = test_mesh_options(rank, 2);
        options.use_shared_memory = false;
        options.peer_timeout = Duration::from_secs(1);
        adjust(&mut options);
        options
    };
    thread::scope(|scope| {
        let first = scope.spawn(|| Mesh::join(of(0), &rendezvous).unwrap());
        let diverted = DivertingRendezvous { rendezvous: rendezvous.clone(), to };
        let second = Mesh::join(of(1), &diverted).unwrap();
        (first.join().unwrap(), second)
    })
}

#[test]
fn a_dial_that_is_refused_fails_both_halves_with_rank_and_host() {
    let gone = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let (_first, second) = misled(gone, |_| {});
    let mut link = on_demand(&second, CHANNEL, &[Rank(0)]).remove(0);
    let error = failure(&mut link);
    assert!(
        matches!(&error, Error::PeerLost { rank: Rank(0), host, .. } if host == "here"),
        "{error}"
    );
    assert!(error.to_string().contains("no link could be opened: cannot reach rank 0"), "{error}");
    // The peer may have left in order.
    second.check_peers().unwrap();
    assert_eq!(link.receiver.window().unwrap_err().to_string(), error.to_string());
}

#[test]
fn a_dial_that_is_accepted_and_not_answered_ends_within_the_peer_timeout() {
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (_first, second) = misled(silent.local_addr().unwrap(), |_| {});
    let mut link = on_demand(&second, CHANNEL, &[Rank(0)]).remove(0);
    let began = Instant::now();
    let error = failure(&mut link);
    assert!(error.to_string().contains("it accepts connections but does not answer"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

/// Signals do not make a wait longer: each stop interrupts what the process waits for.
#[test]
fn a_dial_ends_in_time_in_a_process_that_is_stopped_again_and_again() {
    let name = "a_dial_that_is_accepted_and_not_answered_ends_within_the_peer_timeout";
    let mut command = std::process::Command::new("/proc/self/exe");
    let mut child =
        command.args(["--exact", name]).stdout(std::process::Stdio::null()).spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let status = within(|| {
        for signal in [rustix::process::Signal::STOP, rustix::process::Signal::CONT] {
            // It may have ended, and is not waited for before the next turn.
            rustix::process::kill_process(pid, signal).unwrap();
            thread::sleep(Duration::from_millis(30));
        }
        child.try_wait().unwrap()
    });
    assert!(status.success(), "{status}");
}

/// A rank of an elastic job has gone to the next world and listens at the same port.
#[test]
fn a_peer_that_is_in_another_world_fails_the_link() {
    let rendezvous = MemoryRendezvous::default();
    let next = thread::scope(|scope| {
        let of = |rank| {
            let mut options = MeshOptions::new(Rank(rank), 2, HostHash("next".to_owned()), [7; 32]);
            options.generation = Generation(9);
            options
        };
        let rendezvous = &rendezvous;
        let joining: Vec<_> = (0..2)
            .map(|rank| scope.spawn(move || Mesh::join(of(rank), rendezvous).unwrap()))
            .collect();
        joining.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    let (_first, second) = misled(rank_zero_address(&rendezvous, 9), |_| {});
    let mut link = on_demand(&second, CHANNEL, &[Rank(0)]).remove(0);
    let error = failure(&mut link);
    assert!(matches!(error, Error::PeerLost { rank: Rank(0), .. }), "{error}");
    assert!(error.to_string().contains("turned us away"), "{error}");
    drop(next);
}

#[test]
fn a_rank_that_leaves_before_it_dials_is_not_waited_for() {
    let mut meshes = far(2, |_| {});
    let (mut a, b) = pair(&meshes, CHANNEL);
    assert_eq!(a.receiver.window().unwrap(), []);
    let began = Instant::now();
    drop((b, meshes.pop()));
    let error = failure(&mut a);
    assert!(matches!(error, Error::PeerLost { rank: Rank(1), .. }), "{error}");
    assert!(began.elapsed() < TEST_WAIT_LIMIT / 2);
}

/// `TR-5`.
#[test]
fn tr_5_what_was_sent_before_an_orderly_end_is_read_by_an_end_that_asks_later() {
    let mut meshes = far(2, |_| {});
    let (mut a, mut b) = pair(&meshes, CHANNEL);
    give(&mut b, 9);
    drop((b, meshes.pop()));
    // Until the goodbye is here.
    let mut other = on_demand(&meshes[0], 2, &[Rank(1)]).remove(0);
    failure(&mut other);
    assert_eq!(take(&mut a), 9);
    assert!(matches!(failure(&mut a), Error::PeerLost { rank: Rank(1), .. }));
}

#[test]
fn links_outlive_the_mesh_only_as_failures() {
    let mut meshes = far(2, |_| {});
    let (mut a, mut b) = pair(&meshes, CHANNEL);
    meshes.clear();
    for link in [&mut a, &mut b] {
        assert!(matches!(failure(link), Error::PeerLost { .. }));
    }
}

#[test]
fn heartbeats_are_exchanged_before_any_link_is_asked_for() {
    let mut meshes = far(3, |options| options.peer_timeout = Duration::from_secs(1));
    let ranks = [0, 1, 2].map(Rank);
    let mut links: Vec<Vec<Link>> =
        meshes.iter().map(|mesh| on_demand(mesh, CHANNEL, &ranks)).collect();
    // Leaves in order: all hear of it on the connection of heartbeats.
    drop((links.remove(0), meshes.remove(0)));
    for links in &mut links {
        let error = failure(&mut links[0]);
        assert!(matches!(error, Error::PeerLost { rank: Rank(0), .. }), "{error}");
    }
}

#[test]
fn a_forked_child_cannot_use_a_link_that_is_not_open() {
    use std::os::unix::process::CommandExt;
    const REFUSED: i32 = 200;
    let meshes = far(2, |_| {});
    let (mut a, b) = pair(&meshes, CHANNEL);
    let mut link = Mutex::new(Some(b));
    let mut command = std::process::Command::new("/proc/self/exe");
    let probe = move || {
        let Some(mut link) = link.get_mut().unwrap().take() else { return Ok(()) };
        let refused = matches!(link.sender.window(), Err(Error::Forked))
            && matches!(link.receiver.window(), Err(Error::Forked));
        Err(std::io::Error::from_raw_os_error(if refused { REFUSED } else { 0 }))
    };
    // SAFETY: the closure runs in the forked child before exec, where only this thread exists; the
    // C library keeps its allocator usable across a fork.
    unsafe { command.pre_exec(probe) };
    assert_eq!(command.spawn().unwrap_err().raw_os_error(), Some(REFUSED));
    assert_eq!(a.receiver.window().unwrap(), []);
    meshes[0].check_peers().unwrap();
}
