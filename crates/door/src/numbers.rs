// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The numbers of operations and types in the door.

/// A collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Operation {
    /// Combines element by element; see `Call::reduction` and the factors.
    Allreduce = 0,
    /// The root's input becomes the output of all ranks.
    Broadcast = 1,
    /// Inputs concatenated along the first dimension.
    Allgather = 2,
    /// Rows dealt out by `Request::splits`.
    Alltoall = 3,
    /// Combines, and keeps each member's share of the rows.
    Reducescatter = 4,
    /// Nothing but the meeting.
    Barrier = 5,
    /// Takes part neutrally until all ranks have joined; the output's `number` is the last to do
    /// so.
    Join = 6,
}

impl Operation {
    /// Returns the operation with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        const ALL: [Operation; 7] = [
            Operation::Allreduce,
            Operation::Broadcast,
            Operation::Allgather,
            Operation::Alltoall,
            Operation::Reducescatter,
            Operation::Barrier,
            Operation::Join,
        ];
        ALL.get(usize::try_from(number).ok()?).copied()
    }
}

/// The outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Code {
    /// Well.
    Good = 0,
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

impl Code {
    /// Returns the code with this number; a number from a newer table is taken for a bug.
    pub fn from_number(number: u32) -> Self {
        match number {
            0 => Self::Good,
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
                Operation::from_number(number).map(|operation| operation as u32),
                Some(number)
            );
            assert_eq!(Code::from_number(number) as u32, number);
        }
        assert_eq!(Operation::from_number(7), None);
        assert_eq!(Code::from_number(99), Code::Bug);
    }
}
