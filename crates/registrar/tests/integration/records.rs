// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Records whose connections break on their way: each reaches the driver once, in order.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use farandole_config::Config;
use farandole_registrar::{JobEvent, Registrar, RegistrarOptions, TaskClient};
use farandole_telemetry::{OutputStream, WorkerRecord};
use farandole_world::TaskId;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Between a task and its registrar: forwards, until its connections are cut; one way is cut before
/// the other.
struct Cable {
    address: SocketAddr,
    connections: Arc<Mutex<Vec<TcpStream>>>,
    is_cut: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
}

impl Cable {
    fn new(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let cable = Self {
            address: listener.local_addr().unwrap(),
            connections: Arc::default(),
            is_cut: Arc::default(),
            over: Arc::default(),
        };
        let (connections, is_cut, over) =
            (Arc::clone(&cable.connections), Arc::clone(&cable.is_cut), Arc::clone(&cable.over));
        thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                if over.load(Ordering::Acquire) {
                    return;
                }
                if is_cut.load(Ordering::Acquire) {
                    continue;
                }
                let far = TcpStream::connect(&target).unwrap();
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    thread::spawn(move || {
                        io::copy(&mut from, &mut to).map(|_| to.shutdown(Shutdown::Write))
                    });
                }
                connections.lock().unwrap().extend([near, far]);
            }
        });
        cable
    }

    /// Loses the driver's messages first, so that received records are not confirmed.
    fn cut(&self) {
        self.is_cut.store(true, Ordering::Release);
        for connection in self.connections.lock().unwrap().drain(..) {
            drop(connection.shutdown(Shutdown::Both));
        }
    }

    fn mend(&self) {
        self.is_cut.store(false, Ordering::Release);
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        self.cut();
        drop(TcpStream::connect(self.address));
    }
}

/// A registrar, a cable to it, and a task on that.
fn connected() -> (Registrar, Cable, TaskClient) {
    let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
    let registrar = Registrar::start_job(RegistrarOptions::from_config(1, &config)).unwrap();
    let target = registrar
        .ticket()
        .registrar_addresses()
        .iter()
        .find(|one| one.starts_with("127."))
        .unwrap()
        .clone();
    let cable = Cable::new(target);
    let ticket = registrar.ticket().with_addresses(&[cable.address.to_string()]);
    let client = TaskClient::connect(&ticket, TaskId(0), None, soon()).unwrap();
    (registrar, cable, client)
}

#[test]
fn a_flush_waits_for_a_driver_that_may_come_back_and_gives_up_one_that_may_not() {
    let (registrar, cable, client) = connected();
    cable.cut();
    client.send_log_line(OutputStream::Stdout, "kept").unwrap();
    let began = Instant::now();
    client.flush_records(soon()).unwrap();
    assert!(began.elapsed() > Duration::from_secs(9), "failures at once prove no long outage");
    client.tolerate_outage(Duration::from_secs(60));
    let mended = thread::scope(|scope| {
        let mended = scope.spawn(|| {
            thread::sleep(Duration::from_secs(4));
            cable.mend();
            Instant::now()
        });
        client.flush_records(soon()).unwrap();
        assert!(mended.is_finished(), "the flush ended while the driver was gone");
        mended.join().unwrap()
    });
    assert!(mended.elapsed() < Duration::from_secs(10), "{:?}", mended.elapsed());
    let records = registrar.drain_events(Instant::now()).unwrap().records;
    let kept = |event: &JobEvent| matches!(event, JobEvent::Record(WorkerRecord::Log(line)) if line.text == "kept");
    assert!(records.iter().any(kept), "what is flushed has arrived");
}

#[test]
fn records_arrive_once_and_in_order_although_the_connection_breaks_repeatedly() {
    let (registrar, cable, client) = connected();
    let mut said = Vec::new();
    for round in 0..6 {
        for line in 0..200 {
            let text = format!("round {round} line {line}");
            client.send_log_line(OutputStream::Stdout, &text).unwrap();
            said.push(text);
            if line == 20 * round {
                cable.cut();
            }
        }
        client.send_metric("round", round.to_string().as_bytes()).unwrap();
        cable.mend();
        if round % 2 == 1 {
            client.flush_records(soon()).unwrap();
        }
    }
    client.flush_records(soon()).unwrap();
    let (mut lines, mut metrics) = (Vec::new(), Vec::new());
    while lines.len() < said.len() || metrics.len() < 6 {
        for event in registrar.drain_events(soon()).unwrap().records {
            match event {
                JobEvent::Record(WorkerRecord::Log(line)) => lines.push(line.text),
                JobEvent::Record(WorkerRecord::Metric(metric)) => {
                    metrics.push(String::from_utf8(metric.data.to_vec()).unwrap())
                }
                _ => {}
            }
        }
    }
    assert_eq!(lines, said);
    assert_eq!(metrics, ["0", "1", "2", "3", "4", "5"]);
}
