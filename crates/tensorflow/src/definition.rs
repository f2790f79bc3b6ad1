// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The ops: their signatures, and how they are registered.
#![expect(unsafe_code, reason = "calls TensorFlow's C API, from an ELF constructor")]

use std::ffi::CStr;
use std::sync::OnceLock;

use farandole_door::Operation as O;

use crate::api::{Api, Compute, ComputeAsync, Create, Infer, api};
use crate::context::Status;
use crate::{kernel, probe, shapes, world};

/// Every element type that crosses the door, but floats of eight bits: in lists of types, names
/// have letters and digits only, and theirs an underscore.
macro_rules! types {
    ($prefix:literal) => {
        concat!(
            $prefix,
            "({uint8, int8, uint16, int16, uint32, int32, uint64, int64, half, bfloat16, float, double, bool, ",
            "complex64, complex128}) >= 1"
        )
    };
}

const ONE: &str = "T: \
                   {uint8, int8, uint16, int16, uint32, int32, uint64, int64, half, bfloat16, float, double, bool, complex64, complex128}";
const MANY: &str = types!("Ts: list");
/// The arguments of every collective.
const COMMON: [&str; 3] =
    ["tensor_name: string = ''", "process_set: int = 0", "attended: bool = false"];
/// Factors are doubles by their bits, for attributes are singles: 1.0.
const REDUCTION: [&str; 3] = [
    "reduce_op: int = 0",
    "prescale: int = 4607182418800017408",
    "postscale: int = 4607182418800017408",
];

enum Body {
    Asynchronous(Create, ComputeAsync),
    Immediate(Create, Compute),
}

struct Definition {
    name: &'static str,
    inputs: &'static [&'static str],
    outputs: &'static [&'static str],
    attributes: &'static [&'static [&'static str]],
    shapes: Infer,
    body: Body,
}

/// A collective on one tensor, and on several.
macro_rules! collective {
    ($name:literal, $operation:path, $one:expr, $many:expr, $attributes:expr) => {
        [
            Definition {
                name: concat!("Farandole", $name),
                inputs: &["tensor: T"],
                outputs: $one.0,
                attributes: &[&[ONE], &COMMON, $attributes],
                shapes: $one.1,
                body: Body::Asynchronous(kernel::create::<{ $operation as u32 }>, kernel::compute),
            },
            Definition {
                name: concat!("FarandoleGrouped", $name),
                inputs: &["tensors: Ts"],
                outputs: $many.0,
                attributes: &[&[MANY], &COMMON, $attributes],
                shapes: $many.1,
                body: Body::Asynchronous(kernel::create::<{ $operation as u32 }>, kernel::compute),
            },
        ]
    };
}

/// A number of this rank, known when the graph runs.
macro_rules! number {
    ($name:literal, $question:path) => {
        Definition {
            name: concat!("Farandole", $name),
            inputs: &[],
            outputs: &["number: int32"],
            attributes: &[&["process_set: int = 0"]],
            shapes: shapes::scalar,
            body: Body::Immediate(world::create::<{ $question }>, world::compute),
        }
    };
}

fn definitions() -> Vec<Definition> {
    let same: (&[&str], Infer) = (&["output: T"], shapes::same);
    let all_same: (&[&str], Infer) = (&["outputs: Ts"], shapes::same);
    let part: (&[&str], Infer) = (&["output: T"], shapes::other_rows);
    let all_part: (&[&str], Infer) = (&["outputs: Ts"], shapes::other_rows);
    let gathered: (&[&str], Infer) = (&["output: T", "rows: int64"], shapes::other_rows_and_matrix);
    let all_gathered: (&[&str], Infer) =
        (&["outputs: Ts", "rows: int64"], shapes::other_rows_and_matrix);
    let mut all = Vec::new();
    all.extend(collective!("Allreduce", O::Allreduce, same, all_same, &REDUCTION));
    all.extend(collective!("Broadcast", O::Broadcast, same, all_same, &["root_rank: int = 0"]));
    all.extend(collective!("Allgather", O::Allgather, gathered, all_gathered, &[]));
    all.extend(collective!("Reducescatter", O::Reducescatter, part, all_part, &REDUCTION));
    all.push(Definition {
        name: "FarandoleAlltoall",
        inputs: &["tensor: T", "splits: int64"],
        outputs: &["output: T", "received_splits: int32"],
        attributes: &[&[ONE], &COMMON],
        shapes: shapes::other_rows_and_vector,
        body: Body::Asynchronous(kernel::create::<{ O::Alltoall as u32 }>, kernel::compute),
    });
    all.push(Definition {
        name: "FarandoleJoin",
        inputs: &[],
        outputs: &["last: int32"],
        attributes: &[&COMMON],
        shapes: shapes::scalar,
        body: Body::Asynchronous(kernel::create::<{ O::Join as u32 }>, kernel::compute),
    });
    all.push(number!("Size", world::SIZE));
    all.push(number!("Rank", world::RANK));
    all.push(number!("LocalSize", world::LOCAL_SIZE));
    all.push(number!("LocalRank", world::LOCAL_RANK));
    all.push(number!("Included", world::INCLUDED));
    all.push(Definition {
        name: "FarandoleProbe",
        inputs: &["tensor: int64"],
        outputs: &["output: int64"],
        attributes: &[&["delay: int = 2000"]],
        shapes: shapes::same,
        body: Body::Asynchronous(probe::create, probe::compute),
    });
    all
}

static REGISTERED: OnceLock<Result<(), String>> = OnceLock::new();

/// Checks that the ops are registered.
pub(crate) fn state() -> Result<(), &'static str> {
    REGISTERED.get_or_init(register).as_ref().copied().map_err(String::as_str)
}

/// Runs while `tf.load_op_library` opens the file, so that it finds the ops.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = {
    extern "C" fn at_load() {
        if state().is_err() {
            // Python asks for the reason, by `farandole_tensorflow_problem`.
        }
    }
    at_load
};

fn register() -> Result<(), String> {
    let api = api()?;
    definitions().iter().try_for_each(|definition| one(api, definition))
}

fn one(api: &'static Api, definition: &Definition) -> Result<(), String> {
    let status = Status::new(api);
    let name = terminated(definition.name);
    // SAFETY: strings are terminated and copied; the builder is consumed by the registration.
    unsafe {
        let op = (api.new_op)(name.as_ptr().cast());
        for input in definition.inputs {
            (api.add_input)(op, terminated(input).as_ptr().cast());
        }
        for output in definition.outputs {
            (api.add_output)(op, terminated(output).as_ptr().cast());
        }
        for attribute in definition.attributes.iter().copied().flatten() {
            (api.add_attr)(op, terminated(attribute).as_ptr().cast());
        }
        // Not folded, not merged, not pruned, and run in the order of the program: as on every
        // other rank.
        (api.set_stateful)(op, true);
        (api.set_shapes)(op, definition.shapes);
        (api.register_op)(op, status.raw);
    }
    status.check().map_err(|failure| failure.text)?;
    for device in [c"CPU", c"GPU"] {
        kernel(api, definition, &name, device, &status)?;
    }
    Ok(())
}

fn kernel(
    api: &'static Api,
    definition: &Definition,
    name: &[u8],
    device: &CStr,
    status: &Status,
) -> Result<(), String> {
    // SAFETY: as in `one`.
    unsafe {
        let (name, device) = (name.as_ptr().cast(), device.as_ptr());
        let builder = match definition.body {
            Body::Asynchronous(create, compute) => {
                (api.new_async_kernel)(name, device, Some(create), compute, Some(kernel::delete))
            }
            Body::Immediate(create, compute) => {
                (api.new_kernel)(name, device, Some(create), compute, Some(kernel::delete))
            }
        };
        for argument in definition.inputs.iter().chain(definition.outputs) {
            let argument = argument.split(':').next().unwrap_or_default();
            (api.host_memory)(builder, terminated(argument).as_ptr().cast());
        }
        (api.register_kernel)(name, builder, status.raw);
    }
    status.check().map_err(|failure| failure.text)
}

fn terminated(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.push(0);
    bytes
}
