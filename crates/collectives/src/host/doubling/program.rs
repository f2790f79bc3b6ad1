// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Steps of a doubling as a program.

use super::super::hosts::MembersByHost;
use super::super::program::{CollectiveProgram, ProgramBuilder, TransferLoad};
use super::{DoublingStep, plan_steps};

/// Returns the steps of a member. A step of the plan begins when the previous step is finished.
pub(in super::super) fn member_program(
    hosts: &MembersByHost,
    member: usize,
    bytes: usize,
    width: usize,
) -> CollectiveProgram {
    let mut builder = ProgramBuilder::new(hosts.host_sizes().iter().sum());
    let host = hosts.host_of(member);
    let others = || hosts.host_members(host).filter(move |other| *other != member);
    let (values, partial) = (
        TransferLoad::load_of_one_message(bytes, true),
        TransferLoad::load_of_one_message(bytes * width, true),
    );
    let partials = bytes * width;
    let mut before: Vec<u32> = Vec::new();
    for step in plan_steps(hosts, member) {
        let after = std::mem::take(&mut before);
        before = match step {
            DoublingStep::SendInput { to } | DoublingStep::SendResult { to } => {
                vec![builder.add_send(to, values, &after)]
            }
            DoublingStep::ReceiveResult { from } => vec![builder.add_receive(from, values, &after)],
            DoublingStep::CollectInputs => {
                let mut arrived: Vec<u32> =
                    others().map(|from| builder.add_receive(from, values, &after)).collect();
                arrived.extend(after);
                vec![builder.add_reduction((arrived.len() + 1) * bytes + partials, &arrived)]
            }
            DoublingStep::DistributeResult => {
                others().map(|to| builder.add_send(to, values, &after)).collect()
            }
            DoublingStep::SwapPartials { with, .. } => {
                let sent = builder.add_send(with, partial, &after);
                let arrived = builder.add_receive(with, partial, &after);
                vec![builder.add_reduction(3 * partials, &[sent, arrived])]
            }
            DoublingStep::SendPartial { to } => vec![builder.add_send(to, partial, &after)],
            DoublingStep::ReceivePartial { from } => {
                let arrived = builder.add_receive(from, partial, &after);
                vec![builder.add_reduction(3 * partials, &[arrived])]
            }
            DoublingStep::ComputeResult => vec![builder.add_reduction(partials + bytes, &after)],
        };
    }
    builder.into_program()
}
