// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The numbers of operations and types in the engine table.

/// A collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum OperationCode {
    /// Combines element by element; see `SubmissionHeader::reduction_and_factors` and the factors.
    Allreduce = 0,
    /// The root's input becomes the output of all ranks.
    Broadcast = 1,
    /// Inputs concatenated along the first dimension.
    Allgather = 2,
    /// Rows dealt out by `TensorRequest::splits`.
    Alltoall = 3,
    /// Combines, and keeps each member's share of the rows.
    Reducescatter = 4,
    /// Waits until all members have submitted it; moves no data.
    Barrier = 5,
    /// Takes part neutrally until all ranks have joined; the output's `number` is the last to do
    /// so.
    Join = 6,
}

impl OperationCode {
    /// Returns the operation with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        // In the order of the numbers, which libraries of other releases know.
        const ALL_OPERATIONS: [OperationCode; 7] = [
            OperationCode::Allreduce,
            OperationCode::Broadcast,
            OperationCode::Allgather,
            OperationCode::Alltoall,
            OperationCode::Reducescatter,
            OperationCode::Barrier,
            OperationCode::Join,
        ];
        ALL_OPERATIONS.get(usize::try_from(number).ok()?).copied()
    }
}

/// The outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum EngineStatusCode {
    /// Well.
    Success = 0,
    /// The caller asked for something wrong: correct the call.
    Usage = 1,
    /// The ranks asked for different things, or there is no session.
    Mismatch = 2,
    /// The operation is not defined for these elements.
    Unsupported = 3,
    /// A peer failed mid-way, or the world changed.
    Peer = 4,
    /// The machine, the network or a file refused.
    Environment = 5,
    /// The project is wrong.
    Bug = 6,
}

impl EngineStatusCode {
    /// Returns the code with this number; a number from a newer table is taken for a bug.
    pub fn from_number(number: u32) -> Self {
        match number {
            0 => Self::Success,
            1 => Self::Usage,
            2 => Self::Mismatch,
            3 => Self::Unsupported,
            4 => Self::Peer,
            5 => Self::Environment,
            _ => Self::Bug,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lead_back_to_what_they_stand_for() {
        for number in 0..7 {
            assert_eq!(
                OperationCode::from_number(number).map(|operation| operation as u32),
                Some(number)
            );
            assert_eq!(EngineStatusCode::from_number(number) as u32, number);
        }
        assert_eq!(OperationCode::from_number(7), None);
        assert_eq!(EngineStatusCode::from_number(99), EngineStatusCode::Bug);
    }
}
