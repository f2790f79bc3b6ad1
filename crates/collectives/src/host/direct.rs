// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce in one hop: every member sends its tensor to all others, and each reduces in rank
//! order.
//!
//! 1 step, `(P - 1) * N` bytes sent by each member. Tensors are packed once: small ones cost more
//! to walk than to copy.

use super::message::{Message, padded};
use super::peers::{Job, Moved, Peers, reduce_in_order, whole_units, with_incoming};
use crate::Result;
use crate::buffer::Flat;
use crate::kernel::Reducer;

pub(super) struct Direct {
    reducer: Reducer,
    outputs: Flat,
    out: Vec<Message>,
    /// All links at once.
    incoming: Message,
    unsent: bool,
}

impl Direct {
    pub(super) fn new(peers: &mut Peers, reducer: Reducer, inputs: Flat, outputs: Flat) -> Self {
        let bytes = inputs.len();
        let scratch = &mut peers.scratch;
        scratch.packed.resize(padded(bytes), 0);
        scratch.result.resize(padded(bytes), 0);
        inputs.read(0, &mut scratch.packed[..bytes]);
        let out = vec![Message::new(bytes); peers.links.len()];
        Self { reducer, outputs, out, incoming: Message::new(bytes), unsent: true }
    }
}

impl Job for Direct {
    fn poll(&mut self, peers: &mut Peers) -> Result<Moved> {
        let mut any = false;
        let Peers { links, scratch, member, .. } = peers;
        if self.unsent {
            let mut unsent = false;
            for (link, message) in links.iter_mut().zip(&mut self.out) {
                let packed = &scratch.packed;
                any |= message.put(&mut *link.sender, |at, to| {
                    to.copy_from_slice(&packed[at..at + to.len()])
                })?;
                unsent |= !message.is_finished();
            }
            self.unsent = unsent;
        }
        let mut ready = self.incoming.left();
        for link in &mut *links {
            if ready == 0 {
                break;
            }
            // No element is cut.
            ready = ready.min(whole_units(link)?);
        }
        if ready > 0 {
            let (at, payload) = (self.incoming.done(), self.incoming.payload(ready));
            let (packed, result) =
                (&scratch.packed[at..at + payload], &mut scratch.result[at..at + payload]);
            let (reducer, member) = (&self.reducer, *member);
            with_incoming(links, |windows| {
                reduce_in_order(reducer, member, windows, 0..payload, packed, result)
            })?;
            for link in &mut *links {
                link.receiver.release(ready)?;
            }
            self.incoming.advance(ready);
            any = true;
        }
        let done = !self.unsent && self.incoming.is_finished();
        if done {
            let bytes = self.outputs.len();
            self.outputs.write(0, &scratch.result[..bytes]);
        }
        Ok(Moved { any, done })
    }
}
