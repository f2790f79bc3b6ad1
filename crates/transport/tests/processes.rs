// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Two real processes: streams between them, and one of them dying or stopping.
//!
//! The second rank is this test program again, told its role by an environment variable. The two cards travel over
//! its standard streams.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use farandole_transport::contract::PATIENCE;
use farandole_transport::{
    Error, FrameReceiver, FrameSender, Link, LinkKind, MemoryRendezvous, Mesh, MeshOptions, Parker,
    Rendezvous, Result, frames,
};
use farandole_world::{HostHash, Rank};
use rustix::process::{Pid, Signal, kill_process};

const ROLE: &str = "FARANDOLE_TEST_ROLE";
const CARD: &str = "card of rank 1: ";
const TIMEOUT: Duration = Duration::from_millis(600);

fn options(rank: u32, use_shared_memory: bool) -> MeshOptions {
    let mut options = MeshOptions::new(Rank(rank), 2, HostHash("here".to_owned()), [9; 32]);
    options.patience = PATIENCE;
    options.peer_timeout = TIMEOUT;
    options.use_shared_memory = use_shared_memory;
    options
}

/// Lines of text between the two processes; cards have several lines, so `|` stands for their ends.
struct Streams;

impl Rendezvous for Streams {
    fn put(&self, _key: &str, value: &[u8]) -> Result<()> {
        let card = String::from_utf8(value.to_owned()).unwrap().replace('\n', "|");
        let mut out = std::io::stdout().lock();
        writeln!(out, "\n{CARD}{card}").unwrap();
        out.flush().unwrap();
        Ok(())
    }

    fn get(&self, _key: &str, _deadline: Instant) -> Result<Vec<u8>> {
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).unwrap();
        Ok(line.trim_end().replace('|', "\n").into_bytes())
    }
}

fn next(receiver: &mut FrameReceiver, sender: &mut FrameSender, parker: &Parker) -> Result<Vec<u8>> {
    let limit = Instant::now() + PATIENCE;
    loop {
        parker.prepare();
        sender.flush()?;
        if let Some(frame) = receiver.try_receive()? {
            parker.cancel();
            return Ok(frame.payload);
        }
        parker.park(limit)?;
        assert!(Instant::now() < limit, "waited too long for a frame");
    }
}

/// The second rank: sends back every frame until its peer is gone. Does nothing when run as a test.
#[test]
fn second_rank() {
    let Some(role) = farandole_config::environment(ROLE) else { return };
    let mesh = Mesh::join(options(1, role == "shared memory"), &Streams).unwrap();
    let parker = mesh.parker();
    let (mut sender, mut receiver) = frames(mesh.open(1, &[Rank(0)], 65536).unwrap().remove(0));
    while let Ok(payload) = next(&mut receiver, &mut sender, &parker) {
        if sender.queue(0, &payload).is_err() {
            break;
        }
    }
}

struct Peer {
    process: Child,
    _stdin: ChildStdin,
    mesh: Mesh,
    link: Option<Link>,
    reader: Option<JoinHandle<()>>,
}

impl Peer {
    fn start(kind: LinkKind) -> Self {
        let use_shared_memory = kind == LinkKind::SharedMemory;
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["second_rank", "--exact", "--nocapture"])
            .env(ROLE, if use_shared_memory { "shared memory" } else { "tcp" })
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let meeting = MemoryRendezvous::default();
        let (lines, told) = (BufReader::new(process.stdout.take().unwrap()), meeting.clone());
        let (sender, ready) = mpsc::channel();
        // Reads to the end, so that the child never blocks; ends with it.
        let reader = thread::spawn(move || {
            for line in lines.lines().map_while(std::result::Result::ok) {
                if let Some(card) = line.strip_prefix(CARD) {
                    told.put("mesh/0/1", card.replace('|', "\n").as_bytes()).unwrap();
                    sender.send(()).unwrap();
                }
            }
        });
        let mut stdin = process.stdin.take().unwrap();
        ready.recv_timeout(PATIENCE).unwrap();
        let mesh = Mesh::join(options(0, use_shared_memory), &meeting).unwrap();
        let own = String::from_utf8(meeting.get("mesh/0/0", Instant::now() + PATIENCE).unwrap()).unwrap();
        writeln!(stdin, "{}", own.replace('\n', "|")).unwrap();
        let link = mesh.open(1, &[Rank(1)], 65536).unwrap().remove(0);
        assert_eq!(link.kind, kind);
        Self { process, _stdin: stdin, mesh, link: Some(link), reader: Some(reader) }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.process.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// How long it takes, and what is told, until the link of a sleeping rank fails after `signal`.
    fn lost_after(&mut self, signal: Signal) -> (Duration, String) {
        let (mut sender, mut receiver) = frames(self.link.take().unwrap());
        let parker = self.mesh.parker();
        sender.queue(0, b"are you there").unwrap();
        assert_eq!(next(&mut receiver, &mut sender, &parker).unwrap(), b"are you there");
        self.mesh.check().unwrap();
        let started = Instant::now();
        self.signal(signal);
        let error = next(&mut receiver, &mut sender, &parker).unwrap_err();
        let elapsed = started.elapsed();
        assert!(matches!(error, Error::PeerLost { rank: Rank(1), .. }), "{error}");
        (elapsed, error.to_string())
    }
}

impl Drop for Peer {
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
        let (mut sender, mut receiver) = frames(peer.link.take().unwrap());
        let parker = peer.mesh.parker();
        for bytes in [0_usize, 1, 65531, 65532, 5_000_001] {
            let payload: Vec<u8> = (0..bytes).map(|at| (at % 251).to_le_bytes()[0]).collect();
            sender.queue(0, &payload).unwrap();
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
        assert!(elapsed > TIMEOUT / 2 && elapsed < TIMEOUT * 3, "{elapsed:?}: {error}");
        assert!(error.contains("it stopped answering"), "{error}");
        assert!(peer.mesh.check().is_err());
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
            parker.prepare();
            parker.park(end).unwrap();
        }
        peer.mesh.check().unwrap_or_else(|error| unreachable!("{error} over {kind:?}"));
    }
}
