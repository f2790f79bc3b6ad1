// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Two real processes: streams between them, and one of them dying or stopping.
//!
//! The second rank is this test program again, told its role by an environment variable. The two
//! addresses travel over its standard streams.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use farandole_transport::link_contract::{self, TEST_WAIT_LIMIT};
use farandole_transport::{
    Error, FrameReceiver, FrameSender, Link, LinkKind, MemoryRendezvous, Mesh, MeshOptions, Parker,
    Rendezvous, RendezvousParticipant, Result, into_frame_halves,
};
use farandole_world::{HostHash, Rank};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitOptions, getrlimit, kill_process, setrlimit, waitpid,
};

const ROLE: &str = "FARANDOLE_TEST_ROLE";
const ADDRESSES_PREFIX: &str = "addresses of the other rank: ";
const STARVED: &str = "starved";
/// Both processes do without pidfds.
const NO_PIDFD: &str = "FARANDOLE_TEST_NO_PIDFD";
/// Channels of links besides the first, where there are no pidfds.
const LATER: std::ops::Range<u32> = 2..10;
const TIMEOUT: Duration = Duration::from_millis(600);
/// Longest time for which threads wait for a core on a busy machine.
const LATE: Duration = Duration::from_millis(250);
/// As in the mesh.
const PROBE: Duration = Duration::from_secs(1);

fn options(rank: u32, use_shared_memory: bool) -> MeshOptions {
    let mut options = MeshOptions::new(Rank(rank), 2, HostHash("here".to_owned()), [9; 32]);
    options.setup_timeout = TEST_WAIT_LIMIT;
    options.peer_timeout = TIMEOUT;
    options.use_shared_memory = use_shared_memory;
    options.use_pidfd = farandole_config::environment_variable(NO_PIDFD).is_none();
    options
}

/// Lines of text between the two processes; addresses have several lines, so `|` stands for their
/// ends.
struct Streams;

impl Rendezvous for Streams {
    fn exchange_addresses(
        &self,
        point: RendezvousParticipant,
        addresses: &[u8],
        _deadline: Instant,
    ) -> Result<Vec<Vec<u8>>> {
        let own = String::from_utf8(addresses.to_owned()).unwrap().replace('\n', "|");
        let mut out = std::io::stdout().lock();
        writeln!(out, "\n{ADDRESSES_PREFIX}{own}").unwrap();
        out.flush().unwrap();
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).unwrap();
        let mut all_addresses =
            vec![line.trim_end().replace('|', "\n").into_bytes(), addresses.to_owned()];
        if point.rank == Rank(0) {
            all_addresses.reverse();
        }
        Ok(all_addresses)
    }
}

fn next(
    receiver: &mut FrameReceiver,
    sender: &mut FrameSender,
    parker: &Parker,
) -> Result<Vec<u8>> {
    let limit = Instant::now() + TEST_WAIT_LIMIT;
    loop {
        parker.prepare_park();
        sender.flush()?;
        if let Some(frame) = receiver.try_receive_frame()? {
            parker.cancel_park();
            return Ok(frame.payload);
        }
        parker.park(limit)?;
        assert!(Instant::now() < limit, "waited too long for a frame");
    }
}

/// The other rank; one that opens no link waits for addresses that never come. Does nothing when
/// run as a test.
#[test]
fn other_rank() {
    let Some(role) = farandole_config::environment_variable(ROLE) else { return };
    let Some((rank, kind)) = role.split_once(' ') else { return };
    let mesh =
        Mesh::join(options(rank.parse().unwrap(), kind == "shared memory"), &Streams).unwrap();
    let parker = mesh.parker();
    let (mut sender, mut receiver) =
        into_frame_halves(mesh.open_links(1, &[Rank(0)], 65536).unwrap().remove(0));
    if farandole_config::environment_variable(NO_PIDFD).is_some() {
        for channel in LATER {
            drop(mesh.open_links(channel, &[Rank(0)], 4096).unwrap());
        }
    }
    while let Ok(payload) = next(&mut receiver, &mut sender, &parker) {
        if sender.queue_frame(0, &payload).is_err() {
            break;
        }
    }
}

/// A process with the other rank, which has published its addresses and waits for ours.
struct Other {
    process: Child,
    stdin: ChildStdin,
    rendezvous: MemoryRendezvous,
    reader: Option<JoinHandle<()>>,
}

impl Other {
    fn start(rank: u32, kind: LinkKind) -> Self {
        let kind = if kind == LinkKind::SharedMemory { "shared memory" } else { "tcp" };
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["processes::other_rank", "--exact", "--nocapture"])
            .env(ROLE, format!("{rank} {kind}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let rendezvous = MemoryRendezvous::default();
        let (lines, told) = (BufReader::new(process.stdout.take().unwrap()), rendezvous.clone());
        let (sender, ready) = mpsc::channel();
        // Reads to the end, so that the child never blocks; ends with it.
        let reader = thread::spawn(move || {
            for line in lines.lines().map_while(std::result::Result::ok) {
                if let Some(addresses) = line.strip_prefix(ADDRESSES_PREFIX) {
                    told.publish_value(
                        &format!("mesh/0/{rank}"),
                        addresses.replace('|', "\n").as_bytes(),
                    );
                    sender.send(()).unwrap();
                }
            }
        });
        let stdin = process.stdin.take().unwrap();
        ready.recv_timeout(TEST_WAIT_LIMIT).unwrap();
        Self { process, stdin, rendezvous, reader: Some(reader) }
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.process.id()).unwrap()).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Returns when all its threads are stopped.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let (_, status) = waitpid(Some(self.pid()), WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped());
    }
}

struct Peer {
    other: Other,
    mesh: Mesh,
    link: Option<Link>,
}

impl Peer {
    fn start(kind: LinkKind) -> Self {
        let mut other = Other::start(1, kind);
        let mesh =
            Mesh::join(options(0, kind == LinkKind::SharedMemory), &other.rendezvous).unwrap();
        let own =
            other.rendezvous.await_value("mesh/0/0", Instant::now() + TEST_WAIT_LIMIT).unwrap();
        writeln!(other.stdin, "{}", String::from_utf8(own).unwrap().replace('\n', "|")).unwrap();
        let link = mesh.open_links(1, &[Rank(1)], 65536).unwrap().remove(0);
        assert_eq!(link.kind, kind);
        Self { other, mesh, link: Some(link) }
    }

    /// Measures the time until the link of a sleeping rank fails after `signal`, and returns the
    /// error, too.
    fn lost_after(&mut self, signal: Signal) -> (Duration, String) {
        let (mut sender, mut receiver) = into_frame_halves(self.link.take().unwrap());
        let parker = self.mesh.parker();
        sender.queue_frame(0, b"are you there").unwrap();
        assert_eq!(next(&mut receiver, &mut sender, &parker).unwrap(), b"are you there");
        self.mesh.check_peers().unwrap();
        let started = Instant::now();
        self.other.signal(signal);
        let error = next(&mut receiver, &mut sender, &parker).unwrap_err();
        let elapsed = started.elapsed();
        assert!(matches!(error, Error::PeerLost { rank: Rank(1), .. }), "{error}");
        (elapsed, error.to_string())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.process.kill());
        self.process.wait().unwrap();
        if let Some(reader) = self.reader.take() {
            drop(reader.join());
        }
    }
}

const KINDS: [LinkKind; 2] = [LinkKind::SharedMemory, LinkKind::Tcp];

#[test]
fn large_frames_come_back_from_another_process() {
    for kind in KINDS {
        let mut peer = Peer::start(kind);
        let (mut sender, mut receiver) = into_frame_halves(peer.link.take().unwrap());
        let parker = peer.mesh.parker();
        for bytes in [0_usize, 1, 65531, 65532, 5_000_001] {
            let payload: Vec<u8> = (0..bytes).map(|at| (at % 251).to_le_bytes()[0]).collect();
            sender.queue_frame(0, &payload).unwrap();
            assert!(
                next(&mut receiver, &mut sender, &parker).unwrap() == payload,
                "{bytes} bytes over {kind:?}"
            );
        }
    }
}

#[test]
fn tr_4_a_killed_process_is_noticed_within_100_ms() {
    for kind in KINDS {
        let (elapsed, error) = Peer::start(kind).lost_after(Signal::KILL);
        assert!(elapsed < Duration::from_millis(100), "{elapsed:?}: {error}");
        if kind == LinkKind::SharedMemory {
            assert!(error.contains("was killed by signal 9"), "{error}");
        }
    }
}

#[test]
fn tr_4_a_stopped_process_is_noticed_after_the_peer_timeout() {
    for kind in KINDS {
        let mut peer = Peer::start(kind);
        let (elapsed, error) = peer.lost_after(Signal::STOP);
        assert!(elapsed > TIMEOUT / 2 && elapsed < TIMEOUT + LATE, "{elapsed:?}: {error}");
        assert!(error.contains("it stopped answering"), "{error}");
        assert!(peer.mesh.check_peers().is_err());
    }
}

#[test]
fn tr_4_a_process_that_computes_and_does_not_read_is_not_taken_for_dead() {
    for kind in KINDS {
        let peer = Peer::start(kind);
        let parker = peer.mesh.parker();
        // Nothing is read here either: only the threads of the meshes show life.
        let end = Instant::now() + TIMEOUT * 3;
        while Instant::now() < end {
            parker.prepare_park();
            parker.park(end).unwrap();
        }
        peer.mesh.check_peers().unwrap_or_else(|error| unreachable!("{error} over {kind:?}"));
    }
}

/// TR-4 before there is a link: the kernel still accepts connections for a stopped process.
#[test]
fn tr_4_a_process_stopped_before_its_first_handshake_is_noticed_after_the_peer_timeout() {
    // A rank calls lower ones, and is called by higher ones.
    for (other, own) in [(0, 1), (1, 0)] {
        for kind in KINDS {
            let other = (Rank(other), Other::start(other, kind));
            let mesh =
                Mesh::join(options(own, kind == LinkKind::SharedMemory), &other.1.rendezvous)
                    .unwrap();
            other.1.stop();
            let started = Instant::now();
            let error = mesh.open_links(1, &[other.0], 65536).unwrap_err();
            let elapsed = started.elapsed();
            assert!(matches!(&error, Error::PeerLost { rank, .. } if *rank == other.0), "{error}");
            // The acceptor asks only now and then whether the other side listens.
            assert!(
                elapsed > TIMEOUT / 2 && elapsed < TIMEOUT * 3 + 2 * PROBE,
                "{elapsed:?}: {error}"
            );
            assert!(mesh.tcp_fallbacks().is_empty());
        }
    }
}

/// A process of its own, since all its threads are left without descriptors. Does nothing when run
/// as a test.
#[test]
fn two_starved_ranks() {
    if farandole_config::environment_variable(ROLE).as_deref() != Some(STARVED) {
        return;
    }
    for kind in KINDS {
        let limits = getrlimit(Resource::Nofile);
        let meshes = link_contract::join_meshes(2, |options| {
            options.use_shared_memory = kind == LinkKind::SharedMemory;
            options.peer_timeout = TIMEOUT;
        });
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limits }).unwrap();
        let called = meshes[0].open_links(1, &[Rank(1)], 65536).unwrap_err();
        let calling = meshes[1].open_links(1, &[Rank(0)], 65536).unwrap_err();
        setrlimit(Resource::Nofile, limits).unwrap();
        for error in [called, calling] {
            assert!(matches!(error, Error::System { .. }), "{error} over {kind:?}");
        }
    }
}

#[test]
fn a_process_without_descriptors_does_not_blame_its_peer() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["processes::two_starved_ranks", "--exact", "--nocapture"])
        .env(ROLE, STARVED)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A process of its own, as its variable is for all its threads. Does nothing when run as a test.
#[test]
fn a_rank_without_pidfds() {
    if farandole_config::environment_variable(NO_PIDFD).is_none() {
        return;
    }
    let mut peer = Peer::start(LinkKind::SharedMemory);
    // A later link's socket is another one: its end must not be taken for a death, and it is not
    // kept.
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    for channel in LATER {
        drop(peer.mesh.open_links(channel, &[Rank(1)], 4096).unwrap());
    }
    // The thread of the mesh closes a socket a moment after the link exists.
    let limit = Instant::now() + TEST_WAIT_LIMIT;
    while open() > before {
        assert!(Instant::now() < limit, "{} descriptors, no more than {before} before", open());
        thread::yield_now();
    }
    let (elapsed, error) = peer.lost_after(Signal::KILL);
    assert!(elapsed < Duration::from_millis(100), "{elapsed:?}: {error}");
    // Its sockets close a moment before how it ended is known.
    assert!(error.contains("its process"), "{error}");
}

#[test]
fn tr_4_a_killed_process_is_noticed_within_100_ms_without_pidfds() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["processes::a_rank_without_pidfds", "--exact", "--nocapture"])
        .env(NO_PIDFD, "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
