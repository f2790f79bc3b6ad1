// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links between tasks that cannot be dialled, over real sockets: through the registrar and back.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use farandole_config::Config;
use farandole_registrar::{
    Registrar, RegistrarOptions, RelayedLinks, TaskClient, local_host_facts,
};
use farandole_world::TaskId;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const RELAY_WORLD: u64 = 3;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn registrar(tasks: u32, relays: bool) -> Registrar {
    let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
    Registrar::start_job(RegistrarOptions {
        relays,
        ..RegistrarOptions::from_config(tasks, &config)
    })
    .unwrap()
}

fn agents(registrar: &Registrar, tasks: u32) -> Vec<TaskClient> {
    let connect =
        |task| TaskClient::connect(registrar.ticket(), TaskId(task), None, soon()).unwrap();
    let agents: Vec<TaskClient> = (0..tasks).map(connect).collect();
    for agent in &agents {
        agent.register_task(0, &local_host_facts::host_facts(), soon()).unwrap();
    }
    for agent in &agents {
        agent.await_assignment(soon()).unwrap();
        agent.start_heartbeats(Duration::from_secs(60), |_| ());
    }
    agents
}

/// A task that takes calls, and where they come out.
fn called(agent: &TaskClient) -> (RelayedLinks, TcpListener) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let relay = agent.open_relay(RELAY_WORLD).unwrap();
    relay.accept_relay_calls(listener.local_addr().unwrap().port()).unwrap();
    (relay, listener)
}

fn dial(relay: &RelayedLinks, task: u32) -> TcpStream {
    let stream =
        TcpStream::connect(relay.open_listener_to_task(TaskId(task), RELAY_WORLD).unwrap())
            .unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

#[test]
fn bytes_and_the_end_of_one_side_arrive_in_order_on_the_other() {
    let registrar = registrar(2, true);
    let agents = agents(&registrar, 2);
    let (answering, listener) = called(&agents[0]);
    let calling = agents[1].open_relay(RELAY_WORLD).unwrap();
    let mut near = dial(&calling, 0);
    let (mut far, _) = listener.accept().unwrap();
    let sent: Vec<u8> = (0..8 << 20).map(|at: u32| at.to_le_bytes()[at as usize % 3]).collect();
    let echo = thread::spawn(move || {
        let mut heard = Vec::new();
        far.read_to_end(&mut heard).unwrap();
        far.write_all(&heard).unwrap();
    });
    near.write_all(&sent).unwrap();
    // Only this direction is over: the answer still comes.
    near.shutdown(Shutdown::Write).unwrap();
    let mut back = Vec::new();
    near.read_to_end(&mut back).unwrap();
    assert!(back == sent, "{} of {} bytes", back.len(), sent.len());
    echo.join().unwrap();
    drop((calling, answering));
}

#[test]
fn a_link_whose_reader_sleeps_does_not_hold_up_the_others() {
    let registrar = registrar(2, true);
    let agents = agents(&registrar, 2);
    let (_answering, listener) = called(&agents[0]);
    let calling = agents[1].open_relay(RELAY_WORLD).unwrap();
    let mut ends = Vec::new();
    for _ in 0..8 {
        let mut stuck = dial(&calling, 0);
        ends.push(listener.accept().unwrap().0);
        // Until nothing more fits on the way: far more in all than a connection takes by default.
        stuck.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
        let piece = vec![7; 1 << 20];
        while stuck.write_all(&piece).is_ok() {}
        ends.push(stuck);
    }
    let mut near = dial(&calling, 0);
    let (mut far, _) = listener.accept().unwrap();
    near.write_all(b"through").unwrap();
    let mut heard = [0; 7];
    far.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    far.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"through");
    // Both ways, and the registrar still answers on the same connection.
    far.write_all(b"returns").unwrap();
    near.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"returns");
    agents[1].put_value("key", b"value").unwrap();
}

#[test]
fn an_end_that_is_lost_resets_the_other_and_one_that_takes_no_calls_is_said() {
    let registrar = registrar(2, true);
    let agents = agents(&registrar, 2);
    let calling = agents[1].open_relay(RELAY_WORLD).unwrap();
    let mut nobody = dial(&calling, 0);
    assert_eq!(nobody.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);

    let (_answering, listener) = called(&agents[0]);
    let mut near = dial(&calling, 0);
    let (far, _) = listener.accept().unwrap();
    near.write_all(b"x").unwrap();
    far.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    far.peek(&mut [0]).unwrap();
    // What was not read makes the kernel reset the connection.
    drop(far);
    assert_eq!(near.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_process_that_ends_takes_its_ends_of_links_along() {
    let registrar = registrar(2, true);
    let agents = agents(&registrar, 2);
    let (_answering, listener) = called(&agents[0]);
    let calling = agents[1].open_relay(RELAY_WORLD).unwrap();
    let near = dial(&calling, 0);
    let (mut far, _) = listener.accept().unwrap();
    far.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    registrar.close();
    assert_eq!(far.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    drop(near);
}

#[test]
fn a_driver_that_does_not_relay_says_which_setting_it_lacks() {
    let registrar = registrar(1, false);
    let agent = agents(&registrar, 1).remove(0);
    let error =
        agent.open_relay(RELAY_WORLD).unwrap().accept_relay_calls(1).unwrap_err().to_string();
    assert!(error.contains("set FARANDOLE_DIAL_OUT where it runs"), "{error}");
}

/// Another user's process: a shell that dials `port` of the loopback again and again, and says so
/// once it has.
fn stranger(port: u16) -> Child {
    const NOBODY: u32 = 65_534;
    let dials = format!(
        "trap '' PIPE; exec 2>/dev/null; exec 3<>/dev/tcp/127.0.0.1/{port} && echo dialed; \
         while exec 4<>/dev/tcp/127.0.0.1/{port}; do echo stolen >&4; exec 4>&-; done"
    );
    let mut shell = Command::new("bash");
    shell.args(["-c", &dials]).current_dir("/").uid(NOBODY).gid(NOBODY).stdout(Stdio::piped());
    let mut child = shell.spawn().unwrap();
    let mut word = [0; 7];
    child.stdout.as_mut().unwrap().read_exact(&mut word).unwrap();
    assert_eq!(&word, b"dialed\n");
    child
}

#[test]
fn another_user_who_floods_a_door_gets_no_link_and_keeps_none_from_its_owner() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not root: there is no other user to be");
        return;
    }
    let registrar = registrar(2, true);
    let agents = agents(&registrar, 2);
    let (_answering, listener) = called(&agents[0]);
    let calling = agents[1].open_relay(RELAY_WORLD).unwrap();
    let address = calling.open_listener_to_task(TaskId(0), RELAY_WORLD).unwrap();
    let mut strangers: Vec<Child> = (0..4).map(|_| stranger(address.port())).collect();
    for round in 0..20_u8 {
        let mut near = TcpStream::connect(address).unwrap();
        near.write_all(&[round]).unwrap();
        // A stranger's link would come out here, too, and say something else.
        let (mut far, _) = listener.accept().unwrap();
        far.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut heard = [0xff];
        far.read_exact(&mut heard).unwrap();
        assert_eq!(heard, [round]);
    }
    for one in &mut strangers {
        assert!(one.try_wait().unwrap().is_none(), "the flood has not ended before");
        one.kill().unwrap();
        one.wait().unwrap();
    }
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

/// Alone in its process, because it takes all descriptors there are.
#[test]
#[ignore = "started by the next test"]
fn starved_child() {
    let registrar = registrar(2, true);
    let agents = agents(&registrar, 2);
    let (_answering, listener) = called(&agents[0]);
    let calling = agents[1].open_relay(RELAY_WORLD).unwrap();
    let addresses =
        [0, 0].map(|task| calling.open_listener_to_task(TaskId(task), RELAY_WORLD).unwrap());
    let limits = getrlimit(Resource::Nofile);
    let max_files = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64 + 16;
    setrlimit(Resource::Nofile, Rlimit { current: Some(max_files), ..limits }).unwrap();
    let mut taken: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    // One for the caller's end; none is left to accept the other.
    taken.pop();
    let mut near = TcpStream::connect(addresses[0]).unwrap();
    assert!(File::open("/dev/null").is_err(), "descriptors were left");
    thread::sleep(Duration::from_millis(300));
    drop(taken);
    for address in [None, Some(addresses[0]), Some(addresses[1])] {
        if let Some(address) = address {
            near = TcpStream::connect(address).unwrap();
        }
        let (mut far, _) = listener.accept().unwrap();
        far.write_all(b"through").unwrap();
        near.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut heard = [0; 7];
        near.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"through");
    }
}

#[test]
fn doors_stay_open_when_a_connection_cannot_be_accepted() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "relay::starved_child", "--nocapture"])
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
}
