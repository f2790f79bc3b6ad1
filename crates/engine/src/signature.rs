// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The part of a request that all ranks must agree on.

use std::fmt;

use farandole_collectives::{DataType, ReduceOp};

use crate::wire::{Malformed, Read, Reader, Writer};

/// A collective with its factors as bits, so that equality means agreement. The root is a rank of
/// the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Allreduce {
        op: ReduceOp,
        prescale: u64,
        postscale: u64,
    },
    Broadcast {
        root: u32,
    },
    Allgather,
    /// Among so many members.
    Alltoall {
        members: u32,
    },
    Reducescatter {
        op: ReduceOp,
        prescale: u64,
        postscale: u64,
    },
    Barrier,
    /// An agreement; the shape says on what.
    Change(Topic),
    /// Travels on a way of its own.
    Join {
        gather: bool,
    },
}

/// The kind of an agreement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Topic {
    /// A process set of the ranks in the shape.
    Add,
    /// The end of the process set in the shape.
    Remove,
    /// As many process sets, and whether there may be others later.
    Begin,
    /// Nothing when the change succeeded, else bytes of the reason.
    Outcome,
}

impl Topic {
    const ALL: [Self; 4] = [Self::Add, Self::Remove, Self::Begin, Self::Outcome];

    fn show(self, shape: &[u64], f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

impl Signature {
    /// The matter of a meeting, if the name of its kind does not state it.
    pub(crate) fn matter(&self) -> Option<Box<str>> {
        matches!(self.call, Call::Change(_)).then(|| self.to_string().into())
    }
}

impl Call {
    pub(crate) const fn name(&self) -> &'static str {
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

    /// Row counts that every member tells beside its signature.
    pub(crate) const fn counts(&self) -> usize {
        match self {
            Self::Allgather => 1,
            _ => 0,
        }
    }

    /// Returns whether members bring different numbers of rows: the first dimension of the shape is
    /// not agreed on.
    pub(crate) const fn is_by_rows(&self) -> bool {
        matches!(self, Self::Allgather | Self::Alltoall { .. })
    }

    /// Returns whether no data moves.
    pub(crate) const fn is_meeting(&self) -> bool {
        matches!(self, Self::Barrier | Self::Change(_) | Self::Join { .. })
    }

    /// Reduction and factors.
    pub(crate) const fn reduction(&self) -> Option<(ReduceOp, u64, u64)> {
        match *self {
            Self::Allreduce { op, prescale, postscale }
            | Self::Reducescatter { op, prescale, postscale } => Some((op, prescale, postscale)),
            _ => None,
        }
    }
}

/// The memory that holds the tensors of an operation. Ranks may differ; they agree on the union of
/// all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Site {
    /// In memory of the host.
    Host = 0,
    /// Here and there.
    Mixed = 1,
    /// On the device that the rank works with.
    Device = 2,
}

impl Site {
    const ALL: [Self; 3] = [Self::Host, Self::Mixed, Self::Device];

    /// Returns the site of tensors of both.
    pub(crate) const fn with(self, other: Self) -> Self {
        match (self, other) {
            (Self::Host, Self::Host) | (Self::Device, Self::Device) => self,
            _ => Self::Mixed,
        }
    }
}

/// The properties that must be equal on all ranks, except the site. The first dimension of an
/// allgather or alltoall counts as 0 here, because it may differ. Row counts of an allgather travel
/// as `rows` beside the signature; members of an alltoall tell each other theirs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    pub(crate) call: Call,
    pub(crate) dtype: DataType,
    pub(crate) shape: Vec<u64>,
    /// Memory of input and output.
    pub(crate) site: Site,
    /// Names the group's list of names; 0 outside a group.
    pub(crate) group: u64,
    /// Members of the group.
    pub(crate) group_size: u32,
}

impl Signature {
    /// Returns whether they are equal but for the site.
    pub(crate) fn matches(&self, other: &Self) -> bool {
        self.call == other.call
            && self.dtype == other.dtype
            && self.shape == other.shape
            && (self.group, self.group_size) == (other.group, other.group_size)
    }

    /// Returns whether what was agreed on is also right with a member that wants `own`.
    pub(crate) fn covers(&self, own: &Self) -> bool {
        self.matches(own) && self.site.with(own.site) == self.site
    }

    /// Bytes of one row where rows are counted beside the signature, of the whole tensor otherwise.
    /// Saturates.
    pub(crate) fn unit_bytes(&self) -> u64 {
        self.bytes_beyond(usize::from(self.call.is_by_rows()))
    }

    /// Bytes of one row. Saturates.
    pub(crate) fn row_bytes(&self) -> u64 {
        self.bytes_beyond(1)
    }

    fn bytes_beyond(&self, dimensions: usize) -> u64 {
        let elements = self
            .shape
            .iter()
            .skip(dimensions)
            .fold(1u64, |product, dim| product.saturating_mul(*dim));
        elements.saturating_mul(self.dtype.size() as u64)
    }

    pub(crate) fn encode(&self, writer: &mut Writer<'_>) {
        match self.call {
            Call::Allreduce { op, prescale, postscale } => {
                writer.byte(0);
                writer.byte(op as u8);
                writer.fixed(prescale);
                writer.fixed(postscale);
            }
            Call::Broadcast { root } => {
                writer.byte(1);
                writer.number(root.into());
            }
            Call::Allgather => writer.byte(2),
            Call::Barrier => writer.byte(3),
            Call::Join { gather } => {
                writer.byte(7);
                writer.byte(gather.into());
            }
            Call::Change(topic) => {
                writer.byte(6);
                writer.byte(topic as u8);
            }
            Call::Alltoall { members } => {
                writer.byte(4);
                writer.number(members.into());
            }
            Call::Reducescatter { op, prescale, postscale } => {
                writer.byte(5);
                writer.byte(op as u8);
                writer.fixed(prescale);
                writer.fixed(postscale);
            }
        }
        writer.byte(self.dtype as u8);
        writer.numbers(self.shape.iter().copied());
        writer.byte(self.site as u8);
        writer.number(self.group_size.into());
        if self.group_size > 0 {
            writer.fixed(self.group);
        }
    }

    pub(crate) fn decode(reader: &mut Reader<'_>) -> Read<Self> {
        let call = match reader.byte()? {
            0 => {
                let op = reduce_op(reader)?;
                Call::Allreduce { op, prescale: reader.fixed()?, postscale: reader.fixed()? }
            }
            1 => Call::Broadcast { root: reader.small()? },
            2 => Call::Allgather,
            3 => Call::Barrier,
            4 => Call::Alltoall { members: reader.small()? },
            5 => {
                let op = reduce_op(reader)?;
                Call::Reducescatter { op, prescale: reader.fixed()?, postscale: reader.fixed()? }
            }
            6 => {
                let topic = reader.byte()?;
                Call::Change(*Topic::ALL.get(usize::from(topic)).ok_or(Malformed::Tag(topic))?)
            }
            7 => Call::Join { gather: reader.byte()? != 0 },
            other => return Err(Malformed::Tag(other)),
        };
        let dtype = reader.byte()?;
        let dtype = DataType::from_wire(dtype).ok_or(Malformed::Tag(dtype))?;
        let shape = reader.numbers()?;
        let site = reader.byte()?;
        let site = *Site::ALL.get(usize::from(site)).ok_or(Malformed::Tag(site))?;
        let group_size = reader.small()?;
        let group = if group_size > 0 { reader.fixed()? } else { 0 };
        Ok(Self { call, dtype, shape, site, group, group_size })
    }
}

fn reduce_op(reader: &mut Reader<'_>) -> Read<ReduceOp> {
    let op = reader.byte()?;
    ReduceOp::from_wire(op).ok_or(Malformed::Tag(op))
}

/// `allreduce Sum of float32 [2, 3] on the host`; a first dimension that may differ is shown as
/// `..`.
impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Call::Change(topic) = self.call {
            return topic.show(&self.shape, f);
        }
        f.write_str(self.call.name())?;
        if let Some((op, ..)) = self.call.reduction() {
            write!(f, " {op:?}")?;
        }
        write!(f, " of {} [", self.dtype)?;
        for (index, dim) in self.shape.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            match index {
                0 if self.call.is_by_rows() => f.write_str("..")?,
                _ => write!(f, "{comma}{dim}")?,
            }
        }
        f.write_str(match self.site {
            Site::Host => "] on the host",
            Site::Mixed => "] on host and device",
            Site::Device => "] on a device",
        })?;
        if let Some((_, prescale, postscale)) = self.call.reduction() {
            let (prescale, postscale) = (f64::from_bits(prescale), f64::from_bits(postscale));
            if (prescale, postscale) != (1.0, 1.0) {
                write!(f, ", factors {prescale} and {postscale}")?;
            }
        }
        if let Call::Broadcast { root } = self.call {
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

    pub(crate) fn plain(shape: &[u64]) -> Signature {
        let one = 1f64.to_bits();
        let call = Call::Allreduce { op: ReduceOp::Sum, prescale: one, postscale: one };
        Signature {
            call,
            dtype: DataType::F32,
            shape: shape.to_vec(),
            site: Site::Host,
            group: 0,
            group_size: 0,
        }
    }

    proptest! {
        #[test]
        fn signatures_survive_the_wire(shape in prop::collection::vec(any::<u64>(), 0..6), root: u32, gather: bool, site in 0usize..3,
            group: u64, group_size in 0u32..3, dtype in 0usize..15, which in 0u8..9, factor: u64) {
            let call = match which {
                0 => Call::Allreduce { op: ReduceOp::Max, prescale: factor, postscale: !factor },
                1 => Call::Broadcast { root },
                2 => Call::Allgather,
                3 => Call::Alltoall { members: root },
                5 => Call::Change(Topic::Remove),
                6 => Call::Change(Topic::Outcome),
                7 => Call::Join { gather },
                4 => Call::Reducescatter { op: ReduceOp::Sum, prescale: !factor, postscale: factor },
                _ => Call::Barrier,
            };
            let group = if group_size > 0 { group } else { 0 };
            let site = Site::ALL[site];
            let signature = Signature { call, dtype: DataType::ALL[dtype], shape, site, group, group_size };
            let mut frame = Vec::new();
            signature.encode(&mut Writer(&mut frame));
            prop_assert_eq!(Signature::decode(&mut Reader(&frame)), Ok(signature));
        }
    }

    #[test]
    fn an_agreement_for_mixed_memory_is_right_for_any_memory() {
        let at = |site| Signature { site, ..plain(&[2]) };
        for (agreed, own, covers) in [
            (Site::Host, Site::Host, true),
            (Site::Device, Site::Device, true),
            (Site::Mixed, Site::Device, true),
            (Site::Mixed, Site::Host, true),
            (Site::Device, Site::Host, false),
            (Site::Host, Site::Device, false),
            (Site::Device, Site::Mixed, false),
        ] {
            assert_eq!(at(agreed).covers(&at(own)), covers, "{agreed:?} {own:?}");
        }
        assert!(!at(Site::Mixed).covers(&plain(&[3])));
    }

    #[test]
    fn a_signature_reads_like_a_call() {
        assert_eq!(plain(&[2, 3]).to_string(), "allreduce Sum of float32 [2, 3] on the host");
        let gathered = Signature { call: Call::Allgather, shape: vec![0, 4], ..plain(&[]) };
        assert_eq!(gathered.to_string(), "allgather of float32 [.., 4] on the host");
        let change = |topic, shape: &[u64]| Signature { call: Call::Change(topic), ..plain(shape) };
        assert_eq!(change(Topic::Add, &[0, 4]).to_string(), "an addition of process set [0, 4]");
        assert_eq!(change(Topic::Begin, &[2, 1]).to_string(), "2 process sets, dynamic");
        assert_eq!(change(Topic::Outcome, &[]).to_string(), "a success");
        assert_eq!(change(Topic::Outcome, &[110, 111]).to_string(), "a failure (no)");
    }
}
