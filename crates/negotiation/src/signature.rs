// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The part of a request that all ranks must agree on.

use std::fmt;

use farandole_kernels::{DataType, ReduceOp};

use crate::wire::{FrameReader, FrameResult, FrameWriter, MalformedFrame};

/// A collective, with its factors as bits, so that equal values mean agreement. The root is a rank
/// of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveCall {
    /// Allreduce.
    Allreduce {
        /// The reduction.
        op: ReduceOp,
        /// Bits of the factor of every input.
        prescale: u64,
        /// Bits of the factor of the result.
        postscale: u64,
    },
    /// Broadcast.
    Broadcast {
        /// The sending rank.
        root: u32,
    },
    /// Allgather.
    Allgather,
    /// Alltoall.
    Alltoall {
        /// Number of members.
        members: u32,
    },
    /// Reducescatter.
    Reducescatter {
        /// The reduction.
        op: ReduceOp,
        /// Bits of the factor of every input.
        prescale: u64,
        /// Bits of the factor of the result.
        postscale: u64,
    },
    /// Barrier.
    Barrier,
    /// Agreement on a change of process sets; the shape encodes the change.
    Change(ChangeTopic),
    /// Join; it travels in its own kind of item.
    Join {
        /// Whether the rank also takes part in gathers, with no rows, and in broadcasts from
        /// ranks that have not joined.
        gather: bool,
    },
}

/// Kind of a change of process sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeTopic {
    /// Addition of a process set; the shape has its ranks.
    Add,
    /// Removal of a process set; the shape has its number.
    Remove,
    /// Process sets at the start; the shape has their number and whether sets may be added later.
    Begin,
    /// Outcome of a change; the shape is empty after a success, else it has the bytes of the
    /// reason.
    Outcome,
}

impl ChangeTopic {
    const ALL: [Self; 4] = [Self::Add, Self::Remove, Self::Begin, Self::Outcome];

    fn write_description(self, shape: &[u64], f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |at: usize| shape.get(at).copied().unwrap_or_default();
        match self {
            Self::Add => write!(f, "an addition of process set {shape:?}"),
            Self::Remove => write!(f, "a removal of process set {}", number(0)),
            Self::Begin => {
                let how = if number(1) == 0 { "fixed" } else { "dynamic" };
                write!(f, "{} process sets, {how}", number(0))
            }
            Self::Outcome if shape.is_empty() => f.write_str("a success"),
            Self::Outcome => {
                let bytes: Vec<u8> =
                    shape.iter().filter_map(|byte| u8::try_from(*byte).ok()).collect();
                write!(f, "a failure ({})", String::from_utf8_lossy(&bytes))
            }
        }
    }
}

impl RequestSignature {
    /// Returns the full text of a change of process sets; `None` for other operations.
    pub fn process_set_change_text(&self) -> Option<Box<str>> {
        matches!(self.call, CollectiveCall::Change(_)).then(|| self.to_string().into())
    }
}

impl CollectiveCall {
    /// Returns the name of the operation in errors and timelines.
    pub const fn operation_name(&self) -> &'static str {
        match self {
            Self::Allreduce { .. } => "allreduce",
            Self::Broadcast { .. } => "broadcast",
            Self::Allgather => "allgather",
            Self::Alltoall { .. } => "alltoall",
            Self::Reducescatter { .. } => "reducescatter",
            Self::Barrier => "barrier",
            Self::Change(_) => "process set change",
            Self::Join { .. } => "join",
        }
    }

    /// Returns the number of row counts that every member sends beside its signature.
    pub const fn row_counts_per_member(&self) -> usize {
        match self {
            // Only an allgather: each rank needs the rows of all others to place them. In an
            // alltoall, the two members of a pair exchange their counts directly.
            Self::Allgather => 1,
            _ => 0,
        }
    }

    /// Returns whether members may have different numbers of rows, so that the first dimension is
    /// not part of the agreement.
    pub const fn has_variable_rows(&self) -> bool {
        matches!(self, Self::Allgather | Self::Alltoall { .. })
    }

    /// Returns whether the operation moves no data.
    pub const fn moves_no_data(&self) -> bool {
        matches!(self, Self::Barrier | Self::Change(_) | Self::Join { .. })
    }

    /// Returns the reduction and its factors.
    pub const fn reduction_and_factors(&self) -> Option<(ReduceOp, u64, u64)> {
        match *self {
            Self::Allreduce { op, prescale, postscale }
            | Self::Reducescatter { op, prescale, postscale } => Some((op, prescale, postscale)),
            _ => None,
        }
    }
}

/// Returns the name of an operation in reports: `allreduce of gradient.3`, `an addition of process
/// set [0, 1]`.
pub fn operation_text(operation: &str, matter: Option<&str>, name: &str) -> String {
    match matter {
        Some(matter) => matter.to_owned(),
        None if operation == "join" => "join".to_owned(),
        None => format!("{operation} of {name}"),
    }
}

/// Kind of memory that holds the tensors of an operation. Ranks may differ; they agree on the union
/// of their sites.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MemorySite {
    /// Host memory.
    Host = 0,
    /// Host memory and device memory.
    Mixed = 1,
    /// Memory of the device that the rank works with.
    Device = 2,
}

impl MemorySite {
    const ALL: [Self; 3] = [Self::Host, Self::Mixed, Self::Device];

    /// Returns the site of an operation on tensors in both sites.
    pub const fn union_with(self, other: Self) -> Self {
        match (self, other) {
            (Self::Host, Self::Host) | (Self::Device, Self::Device) => self,
            // One member on the host is enough: host memory serves both kinds.
            _ => Self::Mixed,
        }
    }
}

/// The properties that must be equal on all ranks, except the site. The first dimension of an
/// allgather or alltoall is 0 here, because it may differ. Row counts of an allgather travel as
/// `rows` beside the signature. The members of an alltoall exchange theirs directly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestSignature {
    /// The collective.
    pub call: CollectiveCall,
    /// Element type.
    pub dtype: DataType,
    /// Dimensions of the tensor.
    pub shape: Vec<u64>,
    /// Memory of input and output.
    pub site: MemorySite,
    /// Hash of the names in the group; 0 outside of a group.
    pub group: u64,
    /// Number of members of the group.
    pub group_size: u32,
}

impl RequestSignature {
    /// Returns whether the signatures are equal except for the site.
    pub fn matches_except_site(&self, other: &Self) -> bool {
        self.call == other.call
            && self.dtype == other.dtype
            && self.shape == other.shape
            && (self.group, self.group_size) == (other.group, other.group_size)
    }

    /// Returns whether this agreement also covers the request `own` of a member.
    pub fn covers_request(&self, own: &Self) -> bool {
        // A cached agreement on devices does not fit a tensor on the host: it needs a new
        // agreement.
        self.matches_except_site(own) && self.site.union_with(own.site) == self.site
    }

    /// Returns the bytes of one row if rows are counted beside the signature, else of the whole
    /// tensor. Saturates.
    pub fn row_or_tensor_bytes(&self) -> u64 {
        self.bytes_after_dimensions(usize::from(self.call.has_variable_rows()))
    }

    /// Returns the bytes of one row. Saturates.
    pub fn row_bytes(&self) -> u64 {
        self.bytes_after_dimensions(1)
    }

    fn bytes_after_dimensions(&self, dimensions: usize) -> u64 {
        let elements = self
            .shape
            .iter()
            .skip(dimensions)
            .fold(1u64, |product, dim| product.saturating_mul(*dim));
        elements.saturating_mul(self.dtype.element_size() as u64)
    }

    /// Writes the signature.
    pub fn encode_to(&self, writer: &mut FrameWriter<'_>) {
        match self.call {
            CollectiveCall::Allreduce { op, prescale, postscale } => {
                writer.write_byte(0);
                writer.write_byte(op as u8);
                // In full: the bits of a float as a varint take up to ten bytes.
                writer.write_u64(prescale);
                writer.write_u64(postscale);
            }
            CollectiveCall::Broadcast { root } => {
                writer.write_byte(1);
                writer.write_varint(root.into());
            }
            CollectiveCall::Allgather => writer.write_byte(2),
            CollectiveCall::Barrier => writer.write_byte(3),
            CollectiveCall::Join { gather } => {
                writer.write_byte(7);
                writer.write_byte(gather.into());
            }
            CollectiveCall::Change(topic) => {
                writer.write_byte(6);
                writer.write_byte(topic as u8);
            }
            CollectiveCall::Alltoall { members } => {
                writer.write_byte(4);
                writer.write_varint(members.into());
            }
            CollectiveCall::Reducescatter { op, prescale, postscale } => {
                writer.write_byte(5);
                writer.write_byte(op as u8);
                writer.write_u64(prescale);
                writer.write_u64(postscale);
            }
        }
        writer.write_byte(self.dtype as u8);
        writer.write_varints(self.shape.iter().copied());
        writer.write_byte(self.site as u8);
        writer.write_varint(self.group_size.into());
        if self.group_size > 0 {
            // In full, because a hash has no small values.
            writer.write_u64(self.group);
        }
    }

    /// Reads a signature.
    ///
    /// # Errors
    /// The frame is malformed.
    pub fn decode_from(reader: &mut FrameReader<'_>) -> FrameResult<Self> {
        let call = match reader.read_byte()? {
            0 => {
                let op = read_reduce_op(reader)?;
                CollectiveCall::Allreduce {
                    op,
                    prescale: reader.read_u64()?,
                    postscale: reader.read_u64()?,
                }
            }
            1 => CollectiveCall::Broadcast { root: reader.read_u32()? },
            2 => CollectiveCall::Allgather,
            3 => CollectiveCall::Barrier,
            4 => CollectiveCall::Alltoall { members: reader.read_u32()? },
            5 => {
                let op = read_reduce_op(reader)?;
                CollectiveCall::Reducescatter {
                    op,
                    prescale: reader.read_u64()?,
                    postscale: reader.read_u64()?,
                }
            }
            6 => {
                let topic = reader.read_byte()?;
                // The bytes come from a peer: an unknown number is an error of the frame and never
                // a panic (NE-2).
                CollectiveCall::Change(
                    *ChangeTopic::ALL.get(usize::from(topic)).ok_or(MalformedFrame::Tag(topic))?,
                )
            }
            7 => CollectiveCall::Join { gather: reader.read_byte()? != 0 },
            other => return Err(MalformedFrame::Tag(other)),
        };
        let dtype = reader.read_byte()?;
        let dtype = DataType::from_wire(dtype).ok_or(MalformedFrame::Tag(dtype))?;
        let shape = reader.read_varints()?;
        let site = reader.read_byte()?;
        let site = *MemorySite::ALL.get(usize::from(site)).ok_or(MalformedFrame::Tag(site))?;
        let group_size = reader.read_u32()?;
        let group = if group_size > 0 { reader.read_u64()? } else { 0 };
        Ok(Self { call, dtype, shape, site, group, group_size })
    }
}

fn read_reduce_op(reader: &mut FrameReader<'_>) -> FrameResult<ReduceOp> {
    let op = reader.read_byte()?;
    ReduceOp::from_wire(op).ok_or(MalformedFrame::Tag(op))
}

/// Like `allreduce Sum of float32 [2, 3] on the host`; a first dimension that may differ is shown
/// as `..`.
impl fmt::Display for RequestSignature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let CollectiveCall::Change(topic) = self.call {
            return topic.write_description(&self.shape, f);
        }
        f.write_str(self.call.operation_name())?;
        if let Some((op, ..)) = self.call.reduction_and_factors() {
            write!(f, " {op:?}")?;
        }
        write!(f, " of {} [", self.dtype)?;
        for (index, dim) in self.shape.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            match index {
                0 if self.call.has_variable_rows() => f.write_str("..")?,
                _ => write!(f, "{comma}{dim}")?,
            }
        }
        f.write_str(match self.site {
            MemorySite::Host => "] on the host",
            MemorySite::Mixed => "] on host and device",
            MemorySite::Device => "] on a device",
        })?;
        if let Some((_, prescale, postscale)) = self.call.reduction_and_factors() {
            let (prescale, postscale) = (f64::from_bits(prescale), f64::from_bits(postscale));
            if (prescale, postscale) != (1.0, 1.0) {
                write!(f, ", factors {prescale} and {postscale}")?;
            }
        }
        if let CollectiveCall::Broadcast { root } = self.call {
            write!(f, " from rank {root}")?;
        }
        if self.group_size > 0 {
            write!(f, ", in a group of {}", self.group_size)?;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn plain(shape: &[u64]) -> RequestSignature {
        let one = 1f64.to_bits();
        let call = CollectiveCall::Allreduce { op: ReduceOp::Sum, prescale: one, postscale: one };
        RequestSignature {
            call,
            dtype: DataType::F32,
            shape: shape.to_vec(),
            site: MemorySite::Host,
            group: 0,
            group_size: 0,
        }
    }

    proptest! {
        #[test]
        fn signatures_survive_the_wire(shape in prop::collection::vec(any::<u64>(), 0..6), root: u32, gather: bool, site in 0usize..3,
            group: u64, group_size in 0u32..3, dtype in 0usize..15, which in 0u8..9, factor: u64) {
            let call = match which {
                0 => CollectiveCall::Allreduce { op: ReduceOp::Max, prescale: factor, postscale: !factor },
                1 => CollectiveCall::Broadcast { root },
                2 => CollectiveCall::Allgather,
                3 => CollectiveCall::Alltoall { members: root },
                5 => CollectiveCall::Change(ChangeTopic::Remove),
                6 => CollectiveCall::Change(ChangeTopic::Outcome),
                7 => CollectiveCall::Join { gather },
                4 => CollectiveCall::Reducescatter { op: ReduceOp::Sum, prescale: !factor, postscale: factor },
                _ => CollectiveCall::Barrier,
            };
            let group = if group_size > 0 { group } else { 0 };
            let site = MemorySite::ALL[site];
            let signature = RequestSignature { call, dtype: DataType::ALL[dtype], shape, site, group, group_size };
            let mut frame = Vec::new();
            signature.encode_to(&mut FrameWriter(&mut frame));
            prop_assert_eq!(RequestSignature::decode_from(&mut FrameReader(&frame)), Ok(signature));
        }
    }

    #[test]
    fn an_agreement_for_mixed_memory_is_right_for_any_memory() {
        let at = |site| RequestSignature { site, ..plain(&[2]) };
        for (agreed, own, covers) in [
            (MemorySite::Host, MemorySite::Host, true),
            (MemorySite::Device, MemorySite::Device, true),
            (MemorySite::Mixed, MemorySite::Device, true),
            (MemorySite::Mixed, MemorySite::Host, true),
            (MemorySite::Device, MemorySite::Host, false),
            (MemorySite::Host, MemorySite::Device, false),
            (MemorySite::Device, MemorySite::Mixed, false),
        ] {
            assert_eq!(at(agreed).covers_request(&at(own)), covers, "{agreed:?} {own:?}");
        }
        assert!(!at(MemorySite::Mixed).covers_request(&plain(&[3])));
    }

    #[test]
    fn a_signature_reads_like_a_call() {
        assert_eq!(plain(&[2, 3]).to_string(), "allreduce Sum of float32 [2, 3] on the host");
        let gathered =
            RequestSignature { call: CollectiveCall::Allgather, shape: vec![0, 4], ..plain(&[]) };
        assert_eq!(gathered.to_string(), "allgather of float32 [.., 4] on the host");
        let change = |topic, shape: &[u64]| RequestSignature {
            call: CollectiveCall::Change(topic),
            ..plain(shape)
        };
        assert_eq!(
            change(ChangeTopic::Add, &[0, 4]).to_string(),
            "an addition of process set [0, 4]"
        );
        assert_eq!(change(ChangeTopic::Begin, &[2, 1]).to_string(), "2 process sets, dynamic");
        assert_eq!(change(ChangeTopic::Outcome, &[]).to_string(), "a success");
        assert_eq!(change(ChangeTopic::Outcome, &[110, 111]).to_string(), "a failure (no)");
    }
}
