// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Strangers at the doors of a mesh, on real sockets: whatever they send they are turned away, and
//! the ranks that belong together neither notice nor wait.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use farandole_fuzz::{Random, cases};
use farandole_transport::{Link, LinkKind, MemoryRendezvous, Mesh, MeshOptions};
use farandole_world::{HostHash, Rank};

const PATIENCE: Duration = Duration::from_secs(20);
/// Time that a stranger waits for an answer.
const LISTENS: Duration = Duration::from_millis(20);
const KEY: [u8; 32] = [5; 32];

fn options(rank: u32, key: [u8; 32], shared: bool) -> MeshOptions {
    let mut options = MeshOptions::new(Rank(rank), 2, HostHash("here".to_owned()), key);
    options.setup_timeout = PATIENCE;
    options.use_shared_memory = shared;
    options
}

fn published_addresses(rendezvous: &MemoryRendezvous, rank: u32) -> String {
    let bytes =
        rendezvous.await_value(&format!("mesh/0/{rank}"), Instant::now() + PATIENCE).unwrap();
    String::from_utf8(bytes).unwrap()
}

fn fact<'a>(addresses: &'a str, name: &str) -> Vec<&'a str> {
    addresses.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).collect()
}

/// The first message of a rank that belongs to a job of this key, as it dials rank 0.
fn hello(key: [u8; 32]) -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let rendezvous = MemoryRendezvous::default();
    let version = {
        let sample = MemoryRendezvous::default();
        sample.publish_value("mesh/0/1", b"");
        drop(Mesh::join(MeshOptions { size: 1, ..options(0, key, false) }, &sample).unwrap());
        published_addresses(&sample, 0).lines().next().unwrap().to_owned()
    };
    let fake = format!(
        "{version}\nhost elsewhere\npid 1\nlocal \naddress {}\n",
        listener.local_addr().unwrap()
    );
    rendezvous.publish_value("mesh/0/0", fake.as_bytes());
    let mesh = Mesh::join(options(1, key, false), &rendezvous).unwrap();
    let mut hello = vec![0; 144];
    let heard = AtomicBool::new(false);
    thread::scope(|scope| {
        let (mesh, heard) = (&mesh, &heard);
        scope.spawn(move || {
            let limit = Instant::now() + PATIENCE;
            let mut enough = || heard.load(Ordering::Acquire);
            drop(mesh.open_links_until(1, &[Rank(0)], 4096, limit, &mut enough).unwrap_err());
        });
        let read = listener.accept().unwrap().0.read_exact(&mut hello);
        // Set before the test can fail: the dialing thread waits for it.
        heard.store(true, Ordering::Release);
        read.unwrap();
        drop(listener);
    });
    hello
}

trait Stream: Read + Write {
    fn limit(&self);
}

impl Stream for TcpStream {
    fn limit(&self) {
        self.set_read_timeout(Some(LISTENS)).unwrap();
    }
}

impl Stream for UnixStream {
    fn limit(&self) {
        self.set_read_timeout(Some(LISTENS)).unwrap();
    }
}

/// Sends a stranger's bytes, and waits perhaps until the door closes.
fn bother(stream: &mut dyn Stream, random: &mut Random, hello: &[u8]) {
    stream.limit();
    let words = match random.below(4) {
        0 => random.bytes(300),
        1 => random.mutated(hello),
        2 => hello.to_vec(),
        _ => [hello, &random.bytes(200)[..]].concat(),
    };
    // The door may close in the middle of a word.
    if stream.write_all(&words).is_ok() && random.below(2) == 0 {
        let mut heard = [0; 200];
        if stream.read(&mut heard).is_ok_and(|bytes| bytes > 0) {
            drop(stream.write_all(&random.bytes(64)));
        }
    }
}

fn echo(here: &mut Link, there: &mut Link, random: &mut Random) {
    let limit = Instant::now() + PATIENCE;
    let sent = random.bytes(1000);
    here.sender.window().unwrap()[..sent.len()].copy_from_slice(&sent);
    here.sender.commit(sent.len()).unwrap();
    while there.receiver.window().unwrap().len() < sent.len() {
        here.sender.flush().unwrap();
        assert!(Instant::now() < limit, "a stranger held up a peer");
        thread::yield_now();
    }
    assert_eq!(there.receiver.window().unwrap(), sent);
    there.receiver.release(sent.len()).unwrap();
}

/// Two ranks of one key, and whatever strangers say to the first of them.
fn besieged(kind: LinkKind, strange: [u8; 32]) {
    let shared = kind == LinkKind::SharedMemory;
    let words = hello(strange);
    let rendezvous = MemoryRendezvous::default();
    let (zero, one) = thread::scope(|scope| {
        let zero = scope.spawn(|| Mesh::join(options(0, KEY, shared), &rendezvous).unwrap());
        let one = Mesh::join(options(1, KEY, shared), &rendezvous).unwrap();
        (zero.join().unwrap(), one)
    });
    let addresses = published_addresses(&rendezvous, 0);
    let address: SocketAddr = fact(&addresses, "address")
        .iter()
        .map(|text| text.parse().unwrap())
        .find(|one: &SocketAddr| one.ip().is_loopback())
        .unwrap();
    let name = fact(&addresses, "local").first().map_or(String::new(), |name| (*name).to_owned());
    let mut links: Vec<(Link, Link)> = Vec::new();
    let mut channel = 0;
    cases(|random| {
        let before = zero.refused_connection_count();
        for _ in 0..random.below(5) {
            if shared && random.below(2) == 0 {
                let address = UnixAddr::from_abstract_name(&name).unwrap();
                bother(&mut UnixStream::connect_addr(&address).unwrap(), random, &words);
            } else {
                bother(&mut TcpStream::connect(address).unwrap(), random, &words);
            }
        }
        // New links form, old ones continue.
        if links.len() < 8 {
            channel += 1;
            let open = |mesh: &Mesh, peer| {
                mesh.open_links(channel, &[Rank(peer)], 4096).unwrap().remove(0)
            };
            links.push(thread::scope(|scope| {
                let there = scope.spawn(|| open(&zero, 1));
                (open(&one, 0), there.join().unwrap())
            }));
        }
        let at = random.below(links.len());
        let (here, there) = &mut links[at];
        assert_eq!((here.kind, there.kind), (kind, kind));
        echo(here, there, random);
        echo(there, here, random);
        assert!(zero.refused_connection_count() >= before);
        zero.check_peers().unwrap();
        one.check_peers().unwrap();
    });
    assert!(zero.refused_connection_count() > 0, "no stranger was turned away");
}

#[test]
fn strangers_with_garbage_or_another_key_change_nothing_over_tcp() {
    besieged(LinkKind::Tcp, [6; 32]);
}

#[test]
fn strangers_with_garbage_or_another_key_change_nothing_over_shared_memory() {
    besieged(LinkKind::SharedMemory, [6; 32]);
}

#[test]
fn replayed_words_of_the_right_key_change_nothing() {
    besieged(LinkKind::Tcp, KEY);
}
