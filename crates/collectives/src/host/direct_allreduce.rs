// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce in one hop: every member sends its tensor to all others, and each reduces in rank
//! order.
//!
//! 1 step; each member sends `(P - 1) * N` bytes. Tensors are packed once, because visiting a list
//! of small tensors several times costs more than a copy.

use farandole_kernels::{BlockReducer, GatherList};

use super::message::{MessageProgress, padded_bytes};
use super::peer_links::{
    CollectiveJob, PeerLinks, PollProgress, reduce_in_member_order, whole_unit_bytes,
    with_incoming_windows,
};
use crate::Result;

pub(super) struct DirectAllreduceJob {
    reducer: BlockReducer,
    outputs: GatherList,
    out: Vec<MessageProgress>,
    /// Progress of reading, in step on all links.
    incoming: MessageProgress,
    unsent: bool,
}

impl DirectAllreduceJob {
    pub(super) fn new(
        peers: &mut PeerLinks,
        reducer: BlockReducer,
        inputs: GatherList,
        outputs: GatherList,
    ) -> Self {
        let bytes = inputs.len();
        let scratch = &mut peers.scratch;
        // Padded, because windows hold whole units.
        scratch.packed.resize(padded_bytes(bytes), 0);
        scratch.result.resize(padded_bytes(bytes), 0);
        inputs.read_at(0, &mut scratch.packed[..bytes]);
        let out = vec![MessageProgress::new(bytes); peers.links.len()];
        Self { reducer, outputs, out, incoming: MessageProgress::new(bytes), unsent: true }
    }
}

impl CollectiveJob for DirectAllreduceJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let mut any = false;
        let PeerLinks { links, scratch, member, reductions, .. } = peers;
        if self.unsent {
            let mut unsent = false;
            for (link, message) in links.iter_mut().zip(&mut self.out) {
                let packed = &scratch.packed;
                any |= message.send_window(&mut *link.sender, |at, to| {
                    to.copy_from_slice(&packed[at..at + to.len()])
                })?;
                unsent |= !message.is_finished();
            }
            self.unsent = unsent;
        }
        let mut ready = self.incoming.remaining_bytes();
        for link in &mut *links {
            if ready == 0 {
                break;
            }
            // Only whole units, so that no element is cut.
            ready = ready.min(whole_unit_bytes(link)?);
        }
        if ready > 0 {
            let (at, payload) =
                (self.incoming.moved_bytes(), self.incoming.unpadded_bytes_of(ready));
            let (packed, result) =
                (&scratch.packed[at..at + payload], &mut scratch.result[at..at + payload]);
            let (reducer, member) = (&self.reducer, *member);
            // Reads the inputs of all members and writes the result, which is copied to the output
            // at the end.
            let touched = (links.len() + 1 + 3) * payload;
            with_incoming_windows(links, |windows| {
                if !reductions.record_if_simulating(touched) {
                    reduce_in_member_order(reducer, member, windows, 0..payload, packed, result);
                }
            })?;
            for link in &mut *links {
                link.receiver.release(ready)?;
            }
            self.incoming.advance_by(ready);
            any = true;
        }
        let done = !self.unsent && self.incoming.is_finished();
        if done {
            // Once for all results, because each visit of a list of small tensors costs more than a
            // copy.
            let bytes = self.outputs.len();
            self.outputs.write_at(0, &scratch.result[..bytes]);
        }
        Ok(PollProgress { any, done })
    }
}
