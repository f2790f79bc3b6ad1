// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Every operation in one process, one element at a time, as its documentation says it.

use std::convert::identity;

use farandole_kernels::{DataType, ReduceOp};
use half::{bf16, f16};

use crate::float8;
use crate::rounding::single;

/// The parameters of an allreduce.
#[derive(Clone, Copy, Debug)]
pub struct Allreduce {
    /// Element type.
    pub dtype: DataType,
    /// The operation that combines elements.
    pub op: ReduceOp,
    /// Multiplies inputs.
    pub prescale: f64,
    /// Multiplies the result.
    pub postscale: f64,
}

impl Allreduce {
    /// An allreduce without factors.
    pub fn new(dtype: DataType, op: ReduceOp) -> Self {
        Self { dtype, op, prescale: 1.0, postscale: 1.0 }
    }
}

/// Returns whether an operation is defined for a type.
pub fn is_defined(dtype: DataType, op: ReduceOp) -> bool {
    match (dtype, op.with_unrounded_partials()) {
        (_, ReduceOp::Adasum) | (DataType::Bool, ReduceOp::Average) => false,
        (DataType::C64 | DataType::C128, op) => matches!(op, ReduceOp::Sum | ReduceOp::Average),
        _ => true,
    }
}

/// The expected result of an allreduce of these inputs, in rank order.
pub fn allreduce(call: Allreduce, inputs: &[Vec<u8>]) -> Vec<u8> {
    allreduce_on(&[inputs.len()], call, inputs)
}

/// Like [`allreduce`], where the ranks live on hosts of these many.
pub fn allreduce_on(hosts: &[usize], call: Allreduce, inputs: &[Vec<u8>]) -> Vec<u8> {
    let Allreduce { dtype, .. } = call;
    // Complex numbers act by parts.
    let size = match dtype {
        DataType::C64 => 4,
        DataType::C128 => 8,
        _ => dtype.element_size(),
    };
    let count = inputs.first().map_or(0, |input| input.len() / size);
    let mut out = Vec::new();
    for k in 0..count {
        let element: Vec<&[u8]> =
            inputs.iter().map(|input| &input[k * size..(k + 1) * size]).collect();
        out.extend(reduce_element(call, hosts, &element));
    }
    out
}

/// Joins each host's values one after the other, then hosts in pairs, of which those that exceed a
/// power of two are paired first. What a host has is rounded before it goes to others.
fn join_on<T: Copy>(
    hosts: &[usize],
    values: &[T],
    join: impl Fn(T, T) -> T,
    round: impl Fn(T) -> T,
) -> Option<T> {
    let mut rest = values;
    let mut level: Vec<T> = Vec::new();
    for members in hosts {
        let (own, others) = rest.split_at(*members);
        level.extend(
            own.iter()
                .copied()
                .reduce(&join)
                .map(|value| if hosts.len() > 1 { round(value) } else { value }),
        );
        rest = others;
    }
    let excess = level.len() - (1 << level.len().checked_ilog2()?);
    let joined = |pair: &[T]| pair.iter().copied().reduce(&join);
    let (first, second) = level.split_at(2 * excess);
    level = first.chunks(2).filter_map(joined).chain(second.iter().copied()).collect();
    while level.len() > 1 {
        level = level.chunks(2).filter_map(joined).collect();
    }
    level.first().copied()
}

macro_rules! integer {
    ($type:ty, $call:expr, $element:expr) => {{
        let Allreduce { op, prescale, postscale, .. } = $call;
        let scale = |value: $type, factor: f64| {
            if factor == 1.0 { value } else { cast!($type, value, factor) }
        };
        let values: Vec<$type> = $element
            .iter()
            .map(|bytes| <$type>::from_ne_bytes(array(bytes)))
            .map(|value| scale(value, prescale))
            .collect();
        let total: i128 = values.iter().map(|value| i128::from(*value)).sum();
        let result = match op {
            ReduceOp::Average => wrap!($type, total / values.len() as i128),
            ReduceOp::Product => values.iter().fold(1, |a: $type, b| a.wrapping_mul(*b)),
            ReduceOp::Min => values.iter().copied().min().unwrap_or_default(),
            ReduceOp::Max => values.iter().copied().max().unwrap_or_default(),
            _ => wrap!($type, total),
        };
        scale(result, postscale).to_ne_bytes().to_vec()
    }};
}

macro_rules! wrap {
    ($type:ty, $value:expr) => {{
        #[expect(clippy::cast_possible_truncation, reason = "sums wrap")]
        let value = $value as $type;
        value
    }};
}

macro_rules! cast {
    ($type:ty, $value:expr, $factor:expr) => {{
        #[expect(clippy::cast_possible_truncation, reason = "scaling truncates")]
        let value = ($value as f64 * $factor) as $type;
        value
    }};
}

macro_rules! float {
    ($type:ty, $factor:path, $call:expr, $hosts:expr, $element:expr, $read:expr, $write:expr) => {
        float!($type, $factor, $call, $hosts, $element, $read, $write, identity)
    };
    ($type:ty, $factor:path, $call:expr, $hosts:expr, $element:expr, $read:expr, $write:expr, $round:expr) => {{
        let Allreduce { op, prescale, postscale, .. } = $call;
        let (pre, post): ($type, $type) = ($factor(prescale), $factor(postscale));
        let values: Vec<$type> = $element
            .iter()
            .map(|bytes| $read(array(bytes)))
            .map(|value: $type| value * pre)
            .collect();
        let count = $element.len() as $type;
        let joined = join_on(
            $hosts,
            &values,
            |a, b| match op {
                ReduceOp::Product => a * b,
                ReduceOp::Min if a.is_nan() || b.is_nan() => <$type>::NAN,
                ReduceOp::Max if a.is_nan() || b.is_nan() => <$type>::NAN,
                ReduceOp::Min => {
                    if a < b {
                        a
                    } else {
                        b
                    }
                }
                ReduceOp::Max => {
                    if a > b {
                        a
                    } else {
                        b
                    }
                }
                _ => a + b,
            },
            $round,
        );
        let joined = joined.unwrap_or_default();
        let mean = if op == ReduceOp::Average { joined / count } else { joined };
        $write(mean * post).to_vec()
    }};
}

fn reduce_element(call: Allreduce, hosts: &[usize], element: &[&[u8]]) -> Vec<u8> {
    let rounds = call.op.rounds_between_hosts();
    let call = Allreduce { op: call.op.with_unrounded_partials(), ..call };
    match call.dtype {
        DataType::U8 => integer!(u8, call, element),
        DataType::I8 => integer!(i8, call, element),
        DataType::U16 => integer!(u16, call, element),
        DataType::I16 => integer!(i16, call, element),
        DataType::U32 => integer!(u32, call, element),
        DataType::I32 => integer!(i32, call, element),
        DataType::U64 => integer!(u64, call, element),
        DataType::I64 => integer!(i64, call, element),
        DataType::F16 => {
            let round = |value| if rounds { f16::from_f32(value).to_f32() } else { value };
            let read = |bytes| f16::from_ne_bytes(bytes).to_f32();
            float!(
                f32,
                single,
                call,
                hosts,
                element,
                read,
                |value| f16::from_f32(value).to_ne_bytes(),
                round
            )
        }
        DataType::Bf16 => {
            let round = |value| if rounds { bf16::from_f32(value).to_f32() } else { value };
            let read = |bytes| bf16::from_ne_bytes(bytes).to_f32();
            float!(
                f32,
                single,
                call,
                hosts,
                element,
                read,
                |value| bf16::from_f32(value).to_ne_bytes(),
                round
            )
        }
        DataType::F8E4M3 | DataType::F8E5M2 => {
            let read = |bytes: [u8; 1]| float8::decode(call.dtype, bytes[0]);
            float!(f32, single, call, hosts, element, read, |value| [float8::encode(
                call.dtype, value
            )])
        }
        DataType::F32 | DataType::C64 => {
            float!(f32, single, call, hosts, element, f32::from_ne_bytes, f32::to_ne_bytes)
        }
        DataType::F64 | DataType::C128 => {
            float!(f64, identity, call, hosts, element, f64::from_ne_bytes, f64::to_ne_bytes)
        }
        DataType::Bool => {
            let or = matches!(call.op, ReduceOp::Sum | ReduceOp::Max);
            let any = element.iter().any(|bytes| bytes[0] != 0);
            let all = element.iter().all(|bytes| bytes[0] != 0);
            vec![u8::from(if or { any } else { all })]
        }
    }
}

/// The bytes of one element.
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}

/// Returns the result of an Adasum of these inputs on every rank, in `float64`. Neighbours are
/// combined until one vector is left; of a number that is no power of two, the first ones are
/// combined before that.
pub fn adasum(inputs: &[Vec<f64>]) -> Vec<f64> {
    let combine = |pair: &[Vec<f64>]| match pair {
        [a, b] => {
            let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
            let dot = product(a, b);
            let factor =
                |length: f64| if length < 1e-154 { 1.0 } else { 1.0 - dot / (2.0 * length) };
            let (first, second) = (factor(product(a, a)), factor(product(b, b)));
            a.iter().zip(b).map(|(a, b)| first * a + second * b).collect()
        }
        _ => pair.concat(),
    };
    let mut level = inputs.to_vec();
    let excess = level.len() - (1 << level.len().checked_ilog2().unwrap_or(0));
    let (first, second) = level.split_at(2 * excess);
    level = first.chunks(2).map(combine).chain(second.iter().cloned()).collect();
    while level.len() > 1 {
        level = level.chunks(2).map(combine).collect();
    }
    level.concat()
}

/// The elements of a tensor of floats.
pub fn floats(dtype: DataType, bytes: &[u8]) -> Vec<f64> {
    let of = |bytes: &[u8]| match dtype {
        DataType::F16 => f16::from_ne_bytes(array(bytes)).to_f64(),
        DataType::Bf16 => bf16::from_ne_bytes(array(bytes)).to_f64(),
        DataType::F8E4M3 | DataType::F8E5M2 => float8::decode(dtype, bytes[0]).into(),
        DataType::F32 => f64::from(f32::from_ne_bytes(array(bytes))),
        _ => f64::from_ne_bytes(array(bytes)),
    };
    bytes.chunks_exact(dtype.element_size()).map(of).collect()
}

/// The root mean square of what differs between a sum and that of `inputs` in `float64`, in parts
/// of the sum's own root mean square.
pub fn relative_error(dtype: DataType, sum: &[u8], inputs: &[Vec<u8>]) -> f64 {
    let inputs: Vec<Vec<f64>> = inputs.iter().map(|input| floats(dtype, input)).collect();
    let square = |value: f64| value * value;
    let (mut wrong, mut right) = (0.0, 0.0);
    for (k, got) in floats(dtype, sum).into_iter().enumerate() {
        let exact: f64 = inputs.iter().map(|input| input[k]).sum();
        wrong += square(got - exact);
        right += square(exact);
    }
    (wrong / right).sqrt()
}

/// The expected result of an allgather: one member after the other.
pub fn allgather(inputs: &[Vec<u8>]) -> Vec<u8> {
    inputs.concat()
}

/// The expected result of `member` after an alltoall, with `blocks[from][to]` from one member to
/// another.
pub fn alltoall(blocks: &[Vec<Vec<u8>>], member: usize) -> Vec<u8> {
    blocks.iter().flat_map(|sent| sent[member].iter().copied()).collect()
}

/// The expected result of `member` after a reduce-scatter of these inputs, cut into parts of these
/// bytes.
pub fn reducescatter(
    call: Allreduce,
    inputs: &[Vec<u8>],
    bytes: &[usize],
    member: usize,
) -> Vec<u8> {
    let start: usize = bytes[..member].iter().sum();
    allreduce(call, inputs)[start..start + bytes[member]].to_vec()
}

/// Describes the first difference of two tensors; NaNs are equal to NaNs.
///
/// # Errors
/// The element and its bytes on both sides.
pub fn compare(dtype: DataType, got: &[u8], expected: &[u8]) -> Result<(), String> {
    if got.len() != expected.len() {
        return Err(format!("{} bytes instead of {}", got.len(), expected.len()));
    }
    let size = match dtype {
        DataType::C64 => 4,
        DataType::C128 => 8,
        _ => dtype.element_size(),
    };
    let pairs = got.chunks_exact(size).zip(expected.chunks_exact(size));
    match pairs.enumerate().find(|(_, (a, b))| a != b && !(is_nan(dtype, a) && is_nan(dtype, b))) {
        Some((k, (a, b))) => {
            Err(format!("element {k} of {} is {a:02x?} instead of {b:02x?}", got.len() / size))
        }
        None => Ok(()),
    }
}

fn is_nan(dtype: DataType, bytes: &[u8]) -> bool {
    match dtype {
        DataType::F16 => f16::from_ne_bytes(array(bytes)).is_nan(),
        DataType::Bf16 => bf16::from_ne_bytes(array(bytes)).is_nan(),
        DataType::F8E4M3 | DataType::F8E5M2 => float8::decode(dtype, bytes[0]).is_nan(),
        DataType::F32 | DataType::C64 => f32::from_ne_bytes(array(bytes)).is_nan(),
        DataType::F64 | DataType::C128 => f64::from_ne_bytes(array(bytes)).is_nan(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oracle_itself_is_right_on_numbers_done_by_hand() {
        let call = |dtype, op| Allreduce { dtype, op, prescale: 1.0, postscale: 1.0 };
        let of = |values: [i8; 3]| values.map(|value| value.to_ne_bytes().to_vec());
        assert_eq!(allreduce(call(DataType::I8, ReduceOp::Average), &of([100, 100, 101])), [100]);
        assert_eq!(allreduce(call(DataType::I8, ReduceOp::Average), &of([-1, -1, 0])), [0]);
        assert_eq!(allreduce(call(DataType::I8, ReduceOp::Sum), &of([100, 100, 0])), [200]);
        let floats = [1.5_f32, -4.0, 0.25].map(|value| value.to_ne_bytes().to_vec());
        let scaled =
            Allreduce { dtype: DataType::F32, op: ReduceOp::Min, prescale: 2.0, postscale: 0.5 };
        assert_eq!(allreduce(scaled, &floats), (-4.0_f32).to_ne_bytes());
        assert!(
            compare(DataType::F32, &f32::NAN.to_ne_bytes(), &(-f32::NAN).to_ne_bytes()).is_ok()
        );
        assert!(compare(DataType::I32, &1_i32.to_ne_bytes(), &2_i32.to_ne_bytes()).is_err());
    }
}
