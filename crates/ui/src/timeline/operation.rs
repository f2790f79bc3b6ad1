// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Operations as the ranks' timelines show them.

use std::collections::HashMap;

/// One rank's part in an operation, in microseconds of its host's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OperationPart {
    pub(super) rank: u32,
    pub(super) begun: i64,
    pub(super) ended: i64,
}

/// An operation: its tensor and its list.
pub(super) type OperationKey = (String, u64);

/// The parts of ranks in operations.
pub(super) type PartsByOperation = HashMap<OperationKey, Vec<OperationPart>>;
