// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce of a single member: no bytes move over links, but scale factors apply.

use farandole_kernels::{BlockReducer, DataType, GatherList};

use super::peer_links::{CollectiveJob, PeerLinks, PollProgress};
use crate::Result;

/// Bytes that are reduced at a time: a whole number of elements of any type.
const SINGLE_MEMBER_BLOCK_BYTES: usize = 32 << 10;

pub(super) struct SingleMemberAllreduceJob {
    reducer: BlockReducer,
    inputs: GatherList,
    outputs: GatherList,
}

impl SingleMemberAllreduceJob {
    pub(super) fn new(reducer: BlockReducer, inputs: GatherList, outputs: GatherList) -> Self {
        Self { reducer, inputs, outputs }
    }
}

impl CollectiveJob for SingleMemberAllreduceJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let reduction = self.reducer.reduction_spec();
        let plain = reduction.prescale == 1.0 && reduction.postscale == 1.0;
        // Booleans are never copied: the result has 0 and 1 only.
        if plain && reduction.dtype != DataType::Bool {
            self.inputs.copy_into(&self.outputs);
        } else {
            let bytes = self.inputs.len();
            let scratch = &mut peers.scratch;
            scratch.packed.resize(SINGLE_MEMBER_BLOCK_BYTES.min(bytes), 0);
            scratch.result.resize(SINGLE_MEMBER_BLOCK_BYTES.min(bytes), 0);
            for at in (0..bytes).step_by(SINGLE_MEMBER_BLOCK_BYTES) {
                let count = SINGLE_MEMBER_BLOCK_BYTES.min(bytes - at);
                let (packed, result) = (&mut scratch.packed[..count], &mut scratch.result[..count]);
                self.inputs.read_at(at, packed);
                self.reducer.reduce_blocks(&[packed], result);
                self.outputs.write_at(at, result);
            }
        }
        Ok(PollProgress { any: true, done: true })
    }
}
