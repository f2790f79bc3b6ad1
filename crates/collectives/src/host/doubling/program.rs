// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The steps of a doubling, written down.

use super::super::hosts::Hosts;
use super::super::program::{Builder, Load, Program};
use super::{Step, plan};

/// Returns the steps of a member. One step of the plan begins when the one before is over.
pub(in super::super) fn program(
    hosts: &Hosts,
    member: usize,
    bytes: usize,
    width: usize,
) -> Program {
    let mut builder = Builder::new(hosts.sizes().iter().sum());
    let host = hosts.of(member);
    let others = || hosts.members(host).filter(move |other| *other != member);
    let (values, partial) = (Load::one(bytes, true), Load::one(bytes * width, true));
    let partials = bytes * width;
    let mut before: Vec<u32> = Vec::new();
    for step in plan(hosts, member) {
        let after = std::mem::take(&mut before);
        before = match step {
            Step::Post { to } | Step::Hand { to } => vec![builder.send(to, values, &after)],
            Step::Fetch { from } => vec![builder.receive(from, values, &after)],
            Step::Collect => {
                let mut arrived: Vec<u32> =
                    others().map(|from| builder.receive(from, values, &after)).collect();
                arrived.extend(after);
                vec![builder.reduce((arrived.len() + 1) * bytes + partials, &arrived)]
            }
            Step::Serve => others().map(|to| builder.send(to, values, &after)).collect(),
            Step::Swap { with, .. } => {
                let sent = builder.send(with, partial, &after);
                let arrived = builder.receive(with, partial, &after);
                vec![builder.reduce(3 * partials, &[sent, arrived])]
            }
            Step::Give { to } => vec![builder.send(to, partial, &after)],
            Step::Take { from } => {
                let arrived = builder.receive(from, partial, &after);
                vec![builder.reduce(3 * partials, &[arrived])]
            }
            Step::Finish => vec![builder.reduce(partials + bytes, &after)],
        };
    }
    builder.finish()
}
