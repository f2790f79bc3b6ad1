// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The exchange of the numbers of rows in an alltoall.
//!
//! Each member tells every other one the rows that are for it, in an alltoall of numbers just
//! before that of the tensor: `P` numbers go and `P` come, where lists would have to carry `P * P`.
//! The numbers are kept beside the cache entry. As long as all members announce the tensor by its
//! number in the cache, their rows are those of the time before, and nothing is exchanged.

use std::sync::Arc;

use farandole_collectives::{Communicator, Memory, Operation, Segment, Token};

use super::Step;
use crate::cache::{Agreed, Deal};

/// Names the alltoall of numbers.
pub(super) const DEAL: Token = Token(u64::MAX - 1);

/// Bytes of a number.
const NUMBER: usize = size_of::<u64>();

/// Numbers in progress.
pub(super) struct Dealing {
    agreed: Arc<Agreed>,
    sends: Vec<u64>,
    receives: Memory,
}

impl Dealing {
    /// Tells the other members the rows that this one sends them.
    pub(super) fn begin(
        agreed: Arc<Agreed>,
        sends: Vec<u64>,
        communicator: &mut dyn Communicator,
    ) -> Step<Self> {
        let members = communicator.size();
        let numbers: Vec<u8> = sends.iter().flat_map(|rows| rows.to_le_bytes()).collect();
        let receives = Memory::new(numbers.len());
        let input = Memory::repeating(numbers.len(), &numbers).buffer();
        let segment = Segment { input, output: receives.buffer() };
        let blocks = vec![NUMBER; members];
        communicator.submit(
            DEAL,
            Operation::Alltoall { segment, sends: blocks.clone(), receives: blocks },
        )?;
        Ok(Self { agreed, sends, receives })
    }

    /// All numbers are here.
    pub(super) fn end(self) {
        let bytes = self.receives.to_vec().unwrap_or_default();
        let (numbers, _) = bytes.as_chunks::<NUMBER>();
        let receives = numbers.iter().map(|number| u64::from_le_bytes(*number)).collect();
        self.agreed.deal(Deal { sends: self.sends, receives });
    }
}
