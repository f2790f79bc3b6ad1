// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The ops: their signatures, and how they are registered.
#![expect(unsafe_code, reason = "calls TensorFlow's C API, from an ELF constructor")]

use std::ffi::CStr;
use std::sync::OnceLock;

use farandole_door::OperationCode as O;

use crate::api::{
    Api, AsyncComputeKernelFn, ComputeKernelFn, CreateKernelFn, InferShapeFn, tensorflow_api,
};
use crate::context::TensorflowStatus;
use crate::kernel_state::delete_kernel;
use crate::{kernel, probe, shapes, world};

/// Every element type that the engine table has, but floats of eight bits: in lists of types, names
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

const SINGLE_TYPE: &str = "T: \
                   {uint8, int8, uint16, int16, uint32, int32, uint64, int64, half, bfloat16, float, double, bool, complex64, complex128}";
const TYPE_LIST: &str = types!("Ts: list");
/// The arguments of every collective.
const COMMON_ATTRIBUTES: [&str; 3] =
    ["tensor_name: string = ''", "process_set: int = 0", "attended: bool = false"];
/// Factors are doubles by their bits, for attributes are singles: 1.0.
const REDUCTION_ATTRIBUTES: [&str; 3] = [
    "reduce_op: int = 0",
    "prescale: int = 4607182418800017408",
    "postscale: int = 4607182418800017408",
];

enum KernelBody {
    Asynchronous(CreateKernelFn, AsyncComputeKernelFn),
    Immediate(CreateKernelFn, ComputeKernelFn),
}

struct OpDefinition {
    name: &'static str,
    inputs: &'static [&'static str],
    outputs: &'static [&'static str],
    attributes: &'static [&'static [&'static str]],
    shapes: InferShapeFn,
    body: KernelBody,
}

/// A collective on one tensor, and on several.
macro_rules! collective {
    ($name:literal, $operation:path, $one:expr, $many:expr, $attributes:expr) => {
        [
            OpDefinition {
                name: concat!("Farandole", $name),
                inputs: &["tensor: T"],
                outputs: $one.0,
                attributes: &[&[SINGLE_TYPE], &COMMON_ATTRIBUTES, $attributes],
                shapes: $one.1,
                body: KernelBody::Asynchronous(
                    kernel::create_collective::<{ $operation as u32 }>,
                    kernel::compute_collective,
                ),
            },
            OpDefinition {
                name: concat!("FarandoleGrouped", $name),
                inputs: &["tensors: Ts"],
                outputs: $many.0,
                attributes: &[&[TYPE_LIST], &COMMON_ATTRIBUTES, $attributes],
                shapes: $many.1,
                body: KernelBody::Asynchronous(
                    kernel::create_collective::<{ $operation as u32 }>,
                    kernel::compute_collective,
                ),
            },
        ]
    };
}

/// A number of this rank, known when the graph runs.
macro_rules! number {
    ($name:literal, $question:path) => {
        OpDefinition {
            name: concat!("Farandole", $name),
            inputs: &[],
            outputs: &["number: int32"],
            attributes: &[&["process_set: int = 0"]],
            shapes: shapes::infer_scalar,
            body: KernelBody::Immediate(
                world::create_world_query::<{ $question }>,
                world::compute_world_query,
            ),
        }
    };
}

fn op_definitions() -> Vec<OpDefinition> {
    let same: (&[&str], InferShapeFn) = (&["output: T"], shapes::infer_same_shapes);
    let all_same: (&[&str], InferShapeFn) = (&["outputs: Ts"], shapes::infer_same_shapes);
    let part: (&[&str], InferShapeFn) = (&["output: T"], shapes::infer_unknown_rows);
    let all_part: (&[&str], InferShapeFn) = (&["outputs: Ts"], shapes::infer_unknown_rows);
    let gathered: (&[&str], InferShapeFn) =
        (&["output: T", "rows: int64"], shapes::infer_unknown_rows_and_matrix);
    let all_gathered: (&[&str], InferShapeFn) =
        (&["outputs: Ts", "rows: int64"], shapes::infer_unknown_rows_and_matrix);
    let mut all = Vec::new();
    all.extend(collective!("Allreduce", O::Allreduce, same, all_same, &REDUCTION_ATTRIBUTES));
    all.extend(collective!("Broadcast", O::Broadcast, same, all_same, &["root_rank: int = 0"]));
    all.extend(collective!("Allgather", O::Allgather, gathered, all_gathered, &[]));
    all.extend(collective!(
        "Reducescatter",
        O::Reducescatter,
        part,
        all_part,
        &REDUCTION_ATTRIBUTES
    ));
    all.push(OpDefinition {
        name: "FarandoleAlltoall",
        inputs: &["tensor: T", "splits: int64"],
        outputs: &["output: T", "received_splits: int32"],
        attributes: &[&[SINGLE_TYPE], &COMMON_ATTRIBUTES],
        shapes: shapes::infer_unknown_rows_and_vector,
        body: KernelBody::Asynchronous(
            kernel::create_collective::<{ O::Alltoall as u32 }>,
            kernel::compute_collective,
        ),
    });
    all.push(OpDefinition {
        name: "FarandoleJoin",
        inputs: &[],
        outputs: &["last: int32"],
        attributes: &[&COMMON_ATTRIBUTES],
        shapes: shapes::infer_scalar,
        body: KernelBody::Asynchronous(
            kernel::create_collective::<{ O::Join as u32 }>,
            kernel::compute_collective,
        ),
    });
    all.push(number!("Size", world::QUERY_SIZE));
    all.push(number!("Rank", world::QUERY_RANK));
    all.push(number!("LocalSize", world::QUERY_LOCAL_SIZE));
    all.push(number!("LocalRank", world::QUERY_LOCAL_RANK));
    all.push(number!("Included", world::QUERY_INCLUDED));
    all.push(OpDefinition {
        name: "FarandoleProbe",
        inputs: &["tensor: int64"],
        outputs: &["output: int64"],
        attributes: &[&["delay: int = 2000"]],
        shapes: shapes::infer_same_shapes,
        body: KernelBody::Asynchronous(probe::create_callback_probe, probe::compute_callback_probe),
    });
    all
}

static OPS_REGISTERED: OnceLock<Result<(), String>> = OnceLock::new();

/// Checks that the ops are registered.
pub(crate) fn check_ops_registered() -> Result<(), &'static str> {
    OPS_REGISTERED.get_or_init(register_ops).as_ref().copied().map_err(String::as_str)
}

/// Runs while `tf.load_op_library` opens the file, so that it finds the ops.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = {
    extern "C" fn register_ops_at_load() {
        if check_ops_registered().is_err() {
            // Python asks for the reason, by `farandole_tensorflow_problem`.
        }
    }
    register_ops_at_load
};

fn register_ops() -> Result<(), String> {
    let api = tensorflow_api()?;
    op_definitions().iter().try_for_each(|definition| register_op(api, definition))
}

fn register_op(api: &'static Api, definition: &OpDefinition) -> Result<(), String> {
    let status = TensorflowStatus::new(api);
    let name = nul_terminated_bytes(definition.name);
    // SAFETY: strings are terminated and copied; the builder is consumed by the registration.
    unsafe {
        let op = (api.new_op)(name.as_ptr().cast());
        for input in definition.inputs {
            (api.add_input)(op, nul_terminated_bytes(input).as_ptr().cast());
        }
        for output in definition.outputs {
            (api.add_output)(op, nul_terminated_bytes(output).as_ptr().cast());
        }
        for attribute in definition.attributes.iter().copied().flatten() {
            (api.add_attr)(op, nul_terminated_bytes(attribute).as_ptr().cast());
        }
        // Not folded, not merged, not pruned, and run in the order of the program: as on every
        // other rank.
        (api.set_stateful)(op, true);
        (api.set_shapes)(op, definition.shapes);
        (api.register_op)(op, status.raw);
    }
    status.check_ok().map_err(|failure| failure.text)?;
    // The same kernel for both devices: all arguments are in host memory, because the C API has no
    // stream of a built-in GPU.
    for device in [c"CPU", c"GPU"] {
        register_kernel(api, definition, &name, device, &status)?;
    }
    Ok(())
}

fn register_kernel(
    api: &'static Api,
    definition: &OpDefinition,
    name: &[u8],
    device: &CStr,
    status: &TensorflowStatus,
) -> Result<(), String> {
    // SAFETY: as in `register_op`.
    unsafe {
        let (name, device) = (name.as_ptr().cast(), device.as_ptr());
        let builder = match definition.body {
            KernelBody::Asynchronous(create, compute) => {
                (api.new_async_kernel)(name, device, Some(create), compute, Some(delete_kernel))
            }
            KernelBody::Immediate(create, compute) => {
                (api.new_kernel)(name, device, Some(create), compute, Some(delete_kernel))
            }
        };
        // TensorFlow then copies tensors from and to the GPU itself.
        for argument in definition.inputs.iter().chain(definition.outputs) {
            let argument = argument.split(':').next().unwrap_or_default();
            (api.host_memory)(builder, nul_terminated_bytes(argument).as_ptr().cast());
        }
        (api.register_kernel)(name, builder, status.raw);
    }
    status.check_ok().map_err(|failure| failure.text)
}

fn nul_terminated_bytes(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.push(0);
    bytes
}
