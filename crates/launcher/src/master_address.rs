// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The address of rank 0 for frameworks with their own rendezvous.

use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::time::Instant;

use farandole_registrar::{TaskClient, local_host_facts};
use farandole_world::{Rank, World};

use crate::environment::MasterAddress;

/// Key under which rank 0's agent publishes the master address.
const MASTER_ADDRESS_KEY: &str = "launcher/master";

/// Returns the address for frameworks with their own rendezvous: a free port on rank 0's host,
/// which rank 0's agent chooses and publishes.
pub(crate) fn share_master_address(
    client: &TaskClient,
    world: &World,
    deadline: Instant,
) -> farandole_registrar::Result<MasterAddress> {
    if world.rank != Rank(0) {
        let text = client.await_value(MASTER_ADDRESS_KEY, deadline)?;
        return MasterAddress::from_text(&text).ok_or(farandole_registrar::Error::Malformed {
            job: client.job_id().0.clone(),
            call: "a get",
            reason: String::from_utf8_lossy(&text).into_owned(),
        });
    }
    let one_host = world.host_hashes().len() == 1;
    let address =
        if one_host { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { reachable_address(client) };
    // The port is only a proposal: it is free again until the framework of rank 0 listens on it.
    let port = find_free_port(address).unwrap_or(0);
    let master = MasterAddress { address, port };
    client.put_value(MASTER_ADDRESS_KEY, master.to_text().as_bytes())?;
    Ok(master)
}

/// Returns the address of this host from which it is connected to the registrar. If the registrar
/// is on this host, returns any address that other hosts can reach.
fn reachable_address(client: &TaskClient) -> IpAddr {
    client
        .local_address()
        .filter(|address| !address.is_loopback())
        .or_else(|| local_host_facts::local_addresses().into_iter().next())
        .unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

fn find_free_port(address: IpAddr) -> io::Result<u16> {
    Ok(TcpListener::bind((address, 0))?.local_addr()?.port())
}
