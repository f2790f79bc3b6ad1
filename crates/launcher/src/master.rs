// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The meeting point of frameworks with their own rendezvous.

use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::time::Instant;

use farandole_registrar::{Client, host};
use farandole_world::{Rank, World};

use crate::environment::Master;

/// Key under which rank 0's agent publishes where frameworks with a rendezvous of their own meet.
const MASTER: &str = "launcher/master";

/// Returns the address at which frameworks with their own rendezvous meet: on rank 0's host, at a
/// port that its agent finds free.
pub(crate) fn master(
    client: &Client,
    world: &World,
    deadline: Instant,
) -> farandole_registrar::Result<Master> {
    if world.rank != Rank(0) {
        let text = client.get(MASTER, deadline)?;
        return Master::decode(&text).ok_or(farandole_registrar::Error::Malformed {
            job: client.job_id().0.clone(),
            call: "a get",
            reason: String::from_utf8_lossy(&text).into_owned(),
        });
    }
    let one_host = world.hosts().len() == 1;
    let address = if one_host { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { reachable(client) };
    let port = free_port(address).unwrap_or(0);
    let master = Master { address, port };
    client.put(MASTER, master.encode().as_bytes())?;
    Ok(master)
}

/// Returns the address of this host that the registrar sees, unless both are one host: then any
/// that others can reach.
fn reachable(client: &Client) -> IpAddr {
    client
        .local_address()
        .filter(|address| !address.is_loopback())
        .or_else(|| host::addresses().into_iter().next())
        .unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

fn free_port(address: IpAddr) -> io::Result<u16> {
    Ok(TcpListener::bind((address, 0))?.local_addr()?.port())
}
