// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Damaged or invented peer addresses at the rendezvous, and tickets: their reader continues or
//! reports the problem.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use farandole_config::Config;
use farandole_fuzz::{Limit, Random, cases};
use farandole_registrar::{Registrar, RegistrarOptions, Ticket};
use farandole_transport::{Error, MemoryRendezvous, Mesh, MeshOptions};
use farandole_world::{HostHash, Rank};

const PATIENCE: Duration = Duration::from_secs(60);
/// No case may take longer.
const LONGEST: Duration = Duration::from_secs(5);

fn options(rank: u32, size: u32) -> MeshOptions {
    MeshOptions {
        setup_timeout: PATIENCE,
        bind: vec![IpAddr::from([127, 0, 0, 1]).into()],
        ..MeshOptions::new(Rank(rank), size, HostHash("here".to_owned()), [5; 32])
    }
}

/// The addresses that the only rank of a world publishes.
fn sound() -> Vec<u8> {
    let rendezvous = MemoryRendezvous::default();
    drop(Mesh::join(options(0, 1), &rendezvous).unwrap());
    rendezvous.await_value("mesh/0/0", Instant::now() + PATIENCE).unwrap()
}

fn hostile(sound: &[u8], random: &mut Random) -> Vec<u8> {
    let lines: Vec<&[u8]> = sound.split_inclusive(|byte| *byte == b'\n').collect();
    match random.below(4) {
        0 => random.mutated(sound),
        1 => random.bytes(400),
        // Its lines in another order, some of them many times.
        2 => {
            (0..random.below(600)).flat_map(|_| lines[random.below(lines.len())].to_vec()).collect()
        }
        _ => {
            let mut bytes = lines[0].to_vec();
            for _ in 0..random.below(8) {
                let names = ["host", "pid", "local", "address", "", "more"];
                bytes.extend(names[random.below(names.len())].as_bytes());
                bytes.push(b' ');
                bytes.extend(random.bytes(60));
                bytes.push(b'\n');
            }
            bytes
        }
    }
}

#[test]
fn damaged_addresses_are_an_error_that_names_them() {
    let sound = sound();
    let (mut joined, mut refused) = (0, 0);
    cases(|random| {
        let rendezvous = MemoryRendezvous::default();
        let addresses = if random.below(8) == 0 { sound.clone() } else { hostile(&sound, random) };
        rendezvous.publish_value("mesh/0/1", &addresses);
        let limit = Limit::of(LONGEST);
        match Mesh::join(options(0, 2), &rendezvous) {
            Ok(mesh) => {
                joined += 1;
                drop(mesh);
            }
            Err(Error::Rendezvous { what, .. }) => {
                assert_eq!(what, "the addresses of rank 1");
                refused += 1;
            }
            Err(other) => unreachable!("{other}"),
        }
        limit.check();
    });
    assert!(joined > 0 && refused > 0, "{joined} joined, {refused} were refused");
}

#[test]
fn a_damaged_ticket_is_an_error() {
    let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
    let registrar = Registrar::start_job(RegistrarOptions::from_config(1, &config)).unwrap();
    let sound = registrar.ticket().encode_text();
    assert_eq!(sound.parse::<Ticket>().unwrap().encode_text(), sound);
    cases(|random| {
        let damaged = random.mutated(sound.as_bytes());
        let text = String::from_utf8_lossy(&damaged);
        if let Ok(ticket) = text.parse::<Ticket>() {
            assert_eq!(ticket.encode_text(), sound, "blanks around it are allowed");
        }
    });
}
