// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Facts about this host: its identity and its addresses.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use farandole_world::HostFacts;

use crate::error::{Error, Result};

/// Returns the facts about this process's host.
pub fn host_facts() -> HostFacts {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let ipc = fs::read_link("/proc/self/ns/ipc").map(|link| link.to_string_lossy().into_owned());
    HostFacts {
        hostname: name.trim().split('.').next().unwrap_or_default().to_owned(),
        boot_id: boot_id(),
        ipc_namespace: ipc.unwrap_or_default(),
        container_id: farandole_config::environment_variable("CONTAINER_ID").unwrap_or_default(),
    }
}

/// Returns an identifier that is new after each start of this host.
pub(crate) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Returns this host's addresses: IPv4, then IPv6, then loopback. Link-local addresses are left
/// out: they need a scope that another host cannot know.
pub fn local_addresses() -> Vec<IpAddr> {
    let four = fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
    let six = fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    let mut found = local_ipv4(&four);
    // The kernel's table may be hidden, as in some sandboxes; jobs of one host still work.
    if found.is_empty() {
        found.push(Ipv4Addr::LOCALHOST);
    }
    let mut all: Vec<IpAddr> = found
        .into_iter()
        .map(IpAddr::V4)
        .chain(local_ipv6(&six).into_iter().map(IpAddr::V6))
        .collect();
    all.sort_by_key(|address| (address.is_loopback(), address.is_ipv6()));
    all
}

/// The addresses of this host that match a bind list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BindAddresses {
    /// Each address with the position, from 0, of its entry in the bind list.
    pub addresses: Vec<(u16, IpAddr)>,
    /// Entries that match no address of this host, except addresses that earlier entries have
    /// taken.
    pub missing: Vec<String>,
}

/// Returns the first address of [`resolve_bind_addresses`]; `None` for an empty list.
///
/// # Errors
/// Like [`resolve_bind_addresses`].
pub fn resolve_bind_address(bind_list: &str) -> Result<Option<IpAddr>> {
    Ok(resolve_bind_addresses(bind_list)?.addresses.first().map(|(_, address)| *address))
}

/// Returns the addresses of this host that match a bind list: entries between commas, each an
/// address or a network such as `10.0.0.0/8`, in which every host has a different address. An empty
/// list gives no addresses.
///
/// # Errors
/// `Options` if an entry is neither an address nor a network, or if this host has none of the
/// addresses.
pub fn resolve_bind_addresses(bind_list: &str) -> Result<BindAddresses> {
    match_bind_entries(bind_list, &local_addresses())
}

/// The networks of some interfaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InterfaceNetworks {
    /// A bind list for [`resolve_bind_addresses`], such as `10.0.0.0/8,10.1.0.0/16`.
    pub bind_list: String,
    /// Interfaces that have no network on this host.
    pub missing: Vec<String>,
}

impl InterfaceNetworks {
    /// Returns a sentence about the interfaces without a network, if there are any.
    pub fn missing_network_warning(&self) -> Option<String> {
        let names = self.missing.join(", ");
        let bind_list = &self.bind_list;
        (!names.is_empty()).then(|| {
            format!("no network on this host, so it is not used: {names} (used: {bind_list})")
        })
    }
}

/// Returns the networks of these interfaces, such as `10.0.0.0/8`, as a bind list. The list is
/// valid on every host of these networks, whatever the names of its interfaces. An interface
/// without IPv4 gives its IPv6 network.
///
/// # Errors
/// `Options`, with the names of the interfaces, if none has a network.
pub fn interface_networks(interfaces: &[String]) -> Result<InterfaceNetworks> {
    let four = fs::read_to_string("/proc/net/route").unwrap_or_default();
    let six = fs::read_to_string("/proc/net/ipv6_route").unwrap_or_default();
    networks_from_routes(&four, &six, interfaces)
}

fn networks_from_routes(four: &str, six: &str, interfaces: &[String]) -> Result<InterfaceNetworks> {
    let network = |name: &str| match name {
        // The kernel's main table of routes does not list the loopback.
        "lo" => Some("127.0.0.0/8".to_owned()),
        name => ipv4_link_network(four, name).or_else(|| ipv6_link_network(six, name)),
    };
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for name in interfaces {
        match network(name) {
            Some(network) => found.push(network),
            None => missing.push(name.clone()),
        }
    }
    if !found.is_empty() {
        return Ok(InterfaceNetworks { bind_list: found.join(","), missing });
    }
    let names = |routes: &str, field: usize| -> Vec<String> {
        routes
            .lines()
            .filter_map(|line| line.split_whitespace().nth(field).map(str::to_owned))
            .collect()
    };
    let mut known = names(four, 0);
    known.extend(names(six, 9));
    known.sort();
    known.dedup();
    known.retain(|name| {
        ipv4_link_network(four, name).or_else(|| ipv6_link_network(six, name)).is_some()
    });
    let reason = format!(
        "none of these network interfaces has a network on this host: {} (those with one: {})",
        interfaces.join(", "),
        if known.is_empty() { "none".to_owned() } else { known.join(", ") }
    );
    Err(Error::Options { reason })
}

/// Returns the network that an interface reaches without a gateway, from the kernel's table of
/// routes.
fn ipv4_link_network(routes: &str, name: &str) -> Option<String> {
    // The kernel prints addresses in network order as if they were numbers of this machine.
    let number = |text: &str| u32::from_str_radix(text, 16).ok().map(u32::swap_bytes);
    routes.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [interface, destination, gateway, _, _, _, _, mask, ..] = fields[..] else {
            return None;
        };
        let (network, mask) = (number(destination)?, number(mask)?);
        let own = interface == name && number(gateway)? == 0 && mask != 0;
        own.then(|| format!("{}/{}", Ipv4Addr::from(network), mask.count_ones()))
    })
}

/// Like [`ipv4_link_network`], from the IPv6 table. Link-local and multicast networks are left out,
/// and so are single addresses.
fn ipv6_link_network(routes: &str, name: &str) -> Option<String> {
    routes.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [destination, bits, _, _, gateway, _, _, _, _, interface] = fields[..] else {
            return None;
        };
        let network = Ipv6Addr::from(u128::from_str_radix(destination, 16).ok()?);
        let bits = u32::from_str_radix(bits, 16).ok()?;
        let is_single = bits == 0 || bits == 128;
        let is_local = network.is_unicast_link_local() || network.is_multicast();
        let own = interface == name && u128::from_str_radix(gateway, 16).ok()? == 0;
        (own && !is_single && !is_local).then(|| format!("{network}/{bits}"))
    })
}

fn match_bind_entries(bind_list: &str, own: &[IpAddr]) -> Result<BindAddresses> {
    let mut bound = BindAddresses::default();
    let entries = bind_list.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    for (place, entry) in (0u16..).zip(entries) {
        // Two entries may be networks that overlap; each needs an address of its interface.
        let is_free = |address: &IpAddr| bound.addresses.iter().all(|(_, one)| one != address);
        let free: Vec<IpAddr> = own.iter().copied().filter(is_free).collect();
        match match_bind_entry(entry, &free)? {
            Some(address) => bound.addresses.push((place, address)),
            None => bound.missing.push(entry.to_owned()),
        }
    }
    if bound.addresses.is_empty() && !bound.missing.is_empty() {
        let reason = format!("no address of this host is in {bind_list}: it has {own:?}");
        return Err(Error::Options { reason });
    }
    Ok(bound)
}

/// Returns the first address that matches an entry of a bind list.
fn match_bind_entry(entry: &str, own: &[IpAddr]) -> Result<Option<IpAddr>> {
    let (text, bits) =
        entry.split_once('/').map_or((entry, None), |(text, bits)| (text, Some(bits)));
    let network: Option<IpAddr> = text.trim_matches(['[', ']']).parse().ok();
    let address_bits = network.map_or(0, |address| if address.is_ipv4() { 32 } else { 128 });
    let bits = bits.map_or(Some(address_bits), |bits| {
        bits.parse().ok().filter(|bits: &u32| *bits <= address_bits)
    });
    let (Some(network), Some(bits)) = (network, bits) else {
        let reason =
            format!("a bind address is an address or a network such as 10.0.0.0/8: {entry}");
        return Err(Error::Options { reason });
    };
    let head = |address: IpAddr| {
        let number = match address {
            IpAddr::V4(four) => u128::from(u32::from(four)),
            IpAddr::V6(six) => u128::from(six),
        };
        // A shift by all 128 bits, of the network `::/0`, would overflow.
        number.checked_shr(address_bits - bits).unwrap_or(0)
    };
    // Every address of 127.0.0.0/8 belongs to this host, but the kernel lists only one.
    if bits == address_bits && network.is_loopback() {
        return Ok(Some(network));
    }
    let fits = |address: &&IpAddr| {
        address.is_ipv4() == network.is_ipv4() && head(**address) == head(network)
    };
    Ok(own.iter().find(fits).copied())
}

/// Returns the addresses that are followed by `/32 host LOCAL` in the kernel's routing trie.
fn local_ipv4(trie: &str) -> Vec<Ipv4Addr> {
    let mut found: Vec<Ipv4Addr> = Vec::new();
    let mut last = None;
    for line in trie.lines() {
        if let Some(text) = line.trim_start().strip_prefix("|-- ") {
            last = text.trim().parse().ok();
        } else if line.trim() == "/32 host LOCAL"
            && let Some(address) = last.take()
            && !found.contains(&address)
            && !address.is_link_local()
        {
            found.push(address);
        }
    }
    found
}

/// Returns the addresses of global (`00`) and loopback (`10`) scope.
fn local_ipv6(table: &str) -> Vec<Ipv6Addr> {
    table
        .lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace();
            let address = u128::from_str_radix(fields.next()?, 16).ok()?;
            let scope = fields.nth(2)?;
            matches!(scope, "00" | "10").then(|| Ipv6Addr::from(address))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_a_name_a_boot_and_a_loopback() {
        let facts = host_facts();
        assert!(!facts.hostname.is_empty() && !facts.hostname.contains('.'));
        assert_eq!(facts.boot_id.len(), 36);
        assert!(facts.ipc_namespace.starts_with("ipc:["));
        assert!(local_addresses().iter().any(IpAddr::is_loopback));
    }

    #[test]
    fn a_network_means_the_address_that_this_host_has_in_it() {
        let own: Vec<IpAddr> = ["10.1.2.3", "192.168.0.7", "2001:db8::2", "127.0.0.1"]
            .map(|text| text.parse().unwrap())
            .into();
        for (bind_list, found) in [
            ("192.168.0.0/16", "192.168.0.7"),
            ("10.1.2.3", "10.1.2.3"),
            ("2001:db8::/32", "2001:db8::2"),
            ("0.0.0.0/0", "10.1.2.3"),
            ("127.0.0.5", "127.0.0.5"),
        ] {
            let found = vec![(0, found.parse::<IpAddr>().unwrap())];
            assert_eq!(
                match_bind_entries(bind_list, &own).unwrap().addresses,
                found,
                "{bind_list}"
            );
        }
        let foreign = match_bind_entries("172.16.0.0/12", &own).unwrap_err().to_string();
        assert!(
            foreign.contains("no address of this host is in 172.16.0.0/12: it has [10.1.2.3"),
            "{foreign}"
        );
        for bind_list in ["eth0", "10.0.0.0/40", "10.0.0.0/x"] {
            let error =
                match_bind_entries(&format!("10.1.2.3,{bind_list}"), &own).unwrap_err().to_string();
            assert!(error.ends_with(bind_list), "{error}");
        }
        assert!(resolve_bind_address("").unwrap().is_none());
    }

    #[test]
    fn several_networks_mean_an_address_in_each_and_those_without_one_are_named() {
        let own: Vec<IpAddr> =
            ["10.1.2.3", "10.2.2.3", "10.2.2.4"].map(|text| text.parse().unwrap()).into();
        let found = |bind_list: &str| {
            let bound = match_bind_entries(bind_list, &own).unwrap();
            let of = |(place, address): &(u16, IpAddr)| format!("{place} {address}");
            (bound.addresses.iter().map(of).collect::<Vec<_>>(), bound.missing)
        };
        let words = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        assert_eq!(
            found("10.1.0.0/16, 10.9.0.0/16,10.2.0.0/16,"),
            (words(&["0 10.1.2.3", "2 10.2.2.3"]), words(&["10.9.0.0/16"]))
        );
        // Each entry takes an address that is left.
        assert_eq!(
            found("10.2.0.0/16,10.2.0.0/16,10.0.0.0/8,10.2.2.4"),
            (words(&["0 10.2.2.3", "1 10.2.2.4", "2 10.1.2.3"]), words(&["10.2.2.4"]))
        );
        let error = match_bind_entries("10.8.0.0/16,10.9.0.0/16", &own).unwrap_err().to_string();
        assert!(error.contains("is in 10.8.0.0/16,10.9.0.0/16: it has [10.1.2.3"), "{error}");
    }

    #[test]
    fn an_interface_means_the_network_it_reaches_by_itself() {
        let routes = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
                      eth0\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                      eth0\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
                      ib0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n";
        assert_eq!(ipv4_link_network(routes, "eth0").as_deref(), Some("192.168.1.0/24"));
        assert_eq!(ipv4_link_network(routes, "ib0").as_deref(), Some("10.0.0.0/8"));
        assert_eq!(ipv4_link_network(routes, "eth1"), None);
        let of = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            networks_from_routes(routes, "", &names)
        };
        let some = of(&["ib0", "none0", "eth0", "lo"]).unwrap();
        assert_eq!(some.bind_list, "10.0.0.0/8,192.168.1.0/24,127.0.0.0/8");
        assert!(some.missing_network_warning().unwrap().contains("none0"));
        assert_eq!(of(&["eth0"]).unwrap().missing_network_warning(), None);
        let error = of(&["none0"]).unwrap_err().to_string();
        assert!(
            error.ends_with("has a network on this host: none0 (those with one: eth0, ib0)"),
            "{error}"
        );
    }

    #[test]
    fn an_interface_without_ipv4_means_its_network_of_ipv6() {
        let nothing = "00000000000000000000000000000000";
        let line = |network: &str, bits: &str, gateway: &str, interface: &str| {
            format!(
                "{network} {bits} {nothing} 00 {gateway} 00000100 00000001 00000000 00000001 \
                 {interface}\n"
            )
        };
        let gateway = "fd000000000000000000000000000001";
        let routes = [
            line("fe800000000000000000000000000000", "40", nothing, "eth0"),
            line(nothing, "00", gateway, "eth0"),
            line("fd000000000000000000000000000002", "80", nothing, "eth0"),
            line("ff000000000000000000000000000000", "08", nothing, "eth0"),
            line("20010db8000100000000000000000000", "30", gateway, "eth0"),
            line("20010db8000000000000000000000000", "40", nothing, "ib0"),
            line("fd000000000000000000000000000000", "40", nothing, "eth0"),
        ]
        .concat();
        let of = |name: &str| networks_from_routes("", &routes, &["x".to_owned(), name.to_owned()]);
        assert_eq!(of("eth0").unwrap().bind_list, "fd00::/64");
        assert_eq!(of("ib0").unwrap().bind_list, "2001:db8::/64");
        let error = of("y").unwrap_err().to_string();
        assert!(error.ends_with("(those with one: eth0, ib0)"), "{error}");
    }

    #[test]
    fn only_local_addresses_are_taken_from_the_routing_trie() {
        let trie = "Main:\n  |-- 127.0.0.0\n   /8 host LOCAL\n  |-- 127.0.0.1\n   /32 host \
                    LOCAL\n  |-- 10.0.0.7\n   /32 host LOCAL\n  |-- 10.0.0.255\n   /32 link \
                    BROADCAST\n";
        assert_eq!(local_ipv4(trie), [Ipv4Addr::LOCALHOST, Ipv4Addr::new(10, 0, 0, 7)]);
    }

    #[test]
    fn link_local_addresses_are_left_out() {
        let table = "00000000000000000000000000000001 01 80 10 80       lo\n\
                     fe80000000000000000000000000abcd 02 40 20 80     eth0\n\
                     20010db8000000000000000000000002 02 40 00 80     eth0\n";
        let found = local_ipv6(table);
        assert_eq!(found, [Ipv6Addr::LOCALHOST, "2001:db8::2".parse::<Ipv6Addr>().unwrap()]);
    }
}
