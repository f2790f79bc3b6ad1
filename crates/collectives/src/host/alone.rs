// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce of one member: nothing moves, factors still apply.

use super::peers::{Job, Moved, Peers};
use crate::buffer::Flat;
use crate::kernel::Reducer;
use crate::{DataType, Result};

/// Bytes worked on at a time, a whole number of elements of any type.
const BLOCK: usize = 32 << 10;

pub(super) struct Alone {
    reducer: Reducer,
    inputs: Flat,
    outputs: Flat,
}

impl Alone {
    pub(super) fn new(reducer: Reducer, inputs: Flat, outputs: Flat) -> Self {
        Self { reducer, inputs, outputs }
    }
}

impl Job for Alone {
    fn poll(&mut self, peers: &mut Peers) -> Result<Moved> {
        let reduction = self.reducer.reduction();
        let plain = reduction.prescale == 1.0 && reduction.postscale == 1.0;
        if plain && reduction.dtype != DataType::Bool {
            self.inputs.copy_to(&self.outputs);
        } else {
            let bytes = self.inputs.len();
            let scratch = &mut peers.scratch;
            scratch.packed.resize(BLOCK.min(bytes), 0);
            scratch.result.resize(BLOCK.min(bytes), 0);
            for at in (0..bytes).step_by(BLOCK) {
                let count = BLOCK.min(bytes - at);
                let (packed, result) = (&mut scratch.packed[..count], &mut scratch.result[..count]);
                self.inputs.read(at, packed);
                self.reducer.run(&[packed], result);
                self.outputs.write(at, result);
            }
        }
        Ok(Moved { any: true, done: true })
    }
}
