// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Exchange of the row counts of an alltoall.
//!
//! Each member sends every other member the number of rows for it, in an alltoall of counts just
//! before the alltoall of the tensor. So each member sends `P` counts and receives `P`; in a
//! response list there would be `P * P`. The counts are kept beside the cache entry. While all
//! members announce the tensor by its cache number, their rows are the same as before, and no
//! exchange is needed.

use std::sync::Arc;

use farandole_collectives::{CollectiveOperation, Communicator, OperationToken, TensorSegment};
use farandole_kernels::HostMemory;
use farandole_negotiation::{AlltoallSplits, CachedResponse};

use crate::error::StepResult;

/// Token of the alltoall of counts.
pub(super) const SPLITS_TOKEN: OperationToken = OperationToken(u64::MAX - 1);

/// Bytes of a count.
const BYTES_PER_COUNT: usize = size_of::<u64>();

/// An exchange of counts in progress.
pub(super) struct SplitsExchange {
    agreed: Arc<CachedResponse>,
    sends: Vec<u64>,
    receives: HostMemory,
}

impl SplitsExchange {
    /// Sends the other members the numbers of rows that this member has for them.
    pub(super) fn begin_exchange(
        agreed: Arc<CachedResponse>,
        sends: Vec<u64>,
        communicator: &mut dyn Communicator,
    ) -> StepResult<Self> {
        let members = communicator.member_count();
        let numbers: Vec<u8> = sends.iter().flat_map(|rows| rows.to_le_bytes()).collect();
        let receives = HostMemory::new(numbers.len());
        let input = HostMemory::filled_with(numbers.len(), &numbers).as_buffer();
        let segment = TensorSegment { input, output: receives.as_buffer() };
        let blocks = vec![BYTES_PER_COUNT; members];
        communicator.submit_operation(
            SPLITS_TOKEN,
            CollectiveOperation::Alltoall { segment, sends: blocks.clone(), receives: blocks },
        )?;
        Ok(Self { agreed, sends, receives })
    }

    /// Stores the counts after all have arrived.
    pub(super) fn finish_exchange(self) {
        let bytes = self.receives.to_vec().unwrap_or_default();
        let (numbers, _) = bytes.as_chunks::<BYTES_PER_COUNT>();
        let receives = numbers.iter().map(|number| u64::from_le_bytes(*number)).collect();
        self.agreed.set_splits(AlltoallSplits { sends: self.sends, receives });
    }
}
