// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Our kernels: their source, their arguments, and their launch.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use farandole_kernels::{DataType, ReduceOp};

use crate::driver::{PrimaryContext, RawFunction, RawStream};
use crate::{Error, KernelCache, NvrtcCompiler, Result};

/// All kernels, one source.
pub const KERNEL_SOURCE: &str = concat!(
    include_str!("../kernels/types.cu"),
    include_str!("../kernels/pack.cu"),
    include_str!("../kernels/adasum.cu"),
    include_str!("../kernels/reduce.cu"),
);

/// Tensors of one launch.
// The arguments of a kernel have at most 4096 bytes on every device, and these take 3848.
pub const MAX_TENSORS_PER_LAUNCH: usize = 160;
/// Elements of a tensor that a block moves.
pub const ELEMENTS_PER_TILE: u64 = 4096;
/// Members of one launch.
pub const MAX_MEMBERS_PER_LAUNCH: usize = 64;
/// Threads of a block.
const THREADS_PER_BLOCK: u32 = 256;
/// Blocks of a launch that is not cut by tensors.
const MAX_BLOCKS_PER_LAUNCH: u64 = 1024;
/// Tensors lie in a buffer at multiples of this.
const TENSOR_ALIGNMENT_BYTES: u64 = 16;

/// Arguments of a launch that packs or unpacks; `PackLaunchArguments` in `pack.cu`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PackLaunchArguments {
    /// Addresses of the tensors.
    pub address: [u64; MAX_TENSORS_PER_LAUNCH],
    /// Their elements.
    pub count: [u64; MAX_TENSORS_PER_LAUNCH],
    /// Start of each tensor in the buffer, in units of 16 bytes.
    pub start: [u32; MAX_TENSORS_PER_LAUNCH],
    /// Tiles of this tensor and of those before it.
    pub tiles: [u32; MAX_TENSORS_PER_LAUNCH],
    /// Their number.
    pub tensors: u32,
}

impl PackLaunchArguments {
    /// Blocks of the launch.
    pub fn block_count(&self) -> u32 {
        let last = usize::try_from(self.tensors).unwrap_or_default().checked_sub(1);
        last.and_then(|last| self.tiles.get(last)).copied().unwrap_or_default()
    }
}

/// Returns the launches for tensors, given as address and number of elements, that lie one after
/// the other in a buffer whose elements have `element_bytes` bytes; and the bytes of that buffer.
///
/// # Errors
/// `Arguments` for more than a launch can number.
pub fn plan_pack_launches(
    tensors: &[(u64, u64)],
    element_bytes: u64,
) -> Result<(Vec<PackLaunchArguments>, u64)> {
    let too_many = || Error::Arguments {
        reason: "tensors have more bytes than a launch can number".to_owned(),
    };
    let mut at = 0_u64;
    let mut batches = Vec::new();
    for some in tensors.chunks(MAX_TENSORS_PER_LAUNCH) {
        let mut batch = PackLaunchArguments {
            address: [0; MAX_TENSORS_PER_LAUNCH],
            count: [0; MAX_TENSORS_PER_LAUNCH],
            start: [0; MAX_TENSORS_PER_LAUNCH],
            tiles: [0; MAX_TENSORS_PER_LAUNCH],
            tensors: u32::try_from(some.len()).map_err(|_| too_many())?,
        };
        let mut tiles = 0_u64;
        for (index, (address, count)) in some.iter().enumerate() {
            tiles += count.div_ceil(ELEMENTS_PER_TILE);
            batch.address[index] = *address;
            batch.count[index] = *count;
            // In units of 16 bytes, 32 bits reach 64 GiB.
            batch.start[index] =
                u32::try_from(at / TENSOR_ALIGNMENT_BYTES).map_err(|_| too_many())?;
            batch.tiles[index] = u32::try_from(tiles).map_err(|_| too_many())?;
            let bytes = count
                .checked_mul(element_bytes)
                .and_then(|bytes| bytes.checked_next_multiple_of(TENSOR_ALIGNMENT_BYTES));
            at = bytes.and_then(|bytes| at.checked_add(bytes)).ok_or_else(too_many)?;
        }
        batches.push(batch);
    }
    Ok((batches, at))
}

/// Arguments of a reduction; `ReductionInputs` in `reduce_buffers.cu`.
#[derive(Clone, Debug, PartialEq)]
#[repr(C)]
pub struct ReductionInputs {
    /// Every member's buffer, in member order.
    pub address: [u64; MAX_MEMBERS_PER_LAUNCH],
    /// Their number.
    pub members: u32,
    /// Number of the operation that combines elements.
    pub op: u32,
    /// Multiplies inputs.
    pub prescale: f64,
    /// Multiplies the result.
    pub postscale: f64,
}

impl ReductionInputs {
    /// Arguments for these members' buffers.
    ///
    /// # Errors
    /// `Arguments` for none or too many, and for what no kernel reduces.
    pub fn new(
        addresses: &[u64],
        dtype: DataType,
        op: ReduceOp,
        (prescale, postscale): (f64, f64),
    ) -> Result<Self> {
        let fail = |reason: String| Error::Arguments { reason };
        let op = op.with_unrounded_partials();
        let members = addresses.len();
        if members == 0 || members > MAX_MEMBERS_PER_LAUNCH {
            return Err(fail(format!(
                "1 to {MAX_MEMBERS_PER_LAUNCH} members are reduced at once: {members}"
            )));
        }
        let scaled = prescale != 1.0 || postscale != 1.0;
        if op == ReduceOp::Adasum
            || (dtype == DataType::Bool && (op == ReduceOp::Average || scaled))
        {
            return Err(fail(format!("{op:?} of {dtype} with factors {prescale} and {postscale}")));
        }
        let mut address = [0; MAX_MEMBERS_PER_LAUNCH];
        address[..members].copy_from_slice(addresses);
        Ok(Self {
            address,
            members: u32::try_from(members).unwrap_or_default(),
            op: u32::from(op as u8),
            prescale,
            postscale,
        })
    }
}

/// Returns a type's name in kernels.
fn kernel_type_name(dtype: DataType) -> Option<&'static str> {
    Some(match dtype {
        DataType::U8 => "u8",
        DataType::I8 => "i8",
        DataType::U16 => "u16",
        DataType::I16 => "i16",
        DataType::I32 => "i32",
        DataType::U32 => "u32",
        DataType::I64 => "i64",
        DataType::U64 => "u64",
        DataType::F16 => "f16",
        DataType::Bf16 => "bf16",
        DataType::F8E4M3 => "f8e4m3",
        DataType::F8E5M2 => "f8e5m2",
        DataType::F32 => "f32",
        DataType::F64 => "f64",
        DataType::Bool => "truth",
        DataType::C64 | DataType::C128 => return None,
    })
}

/// Returns the kernel that moves tensors of a type into a buffer of another, or back; without its
/// `pack_` or `unpack_`.
///
/// # Errors
/// `Arguments` where there is none: types that differ are `float32` and a half, and only floats are
/// multiplied.
pub fn pack_kernel_name(tensor: DataType, buffer: DataType, factor: f64) -> Result<String> {
    let floats = [DataType::F32, DataType::F16, DataType::Bf16, DataType::F64];
    let halves = [DataType::F16, DataType::Bf16];
    let known = tensor == buffer || (tensor == DataType::F32 && halves.contains(&buffer));
    match (kernel_type_name(tensor), kernel_type_name(buffer)) {
        (Some(from), Some(to)) if known && floats.contains(&tensor) => Ok(format!("{from}_{to}")),
        _ if tensor == buffer && factor == 1.0 && tensor.element_size() <= 8 => {
            Ok(format!("u{}", 8 * tensor.element_size()))
        }
        _ => Err(Error::Arguments {
            reason: format!("{tensor} into {buffer}, multiplied by {factor}"),
        }),
    }
}

/// Returns the kernel that reduces a type.
///
/// # Errors
/// `Arguments` where there is none.
pub fn reduction_kernel_name(dtype: DataType) -> Result<String> {
    let name = kernel_type_name(dtype).ok_or_else(|| Error::Arguments {
        reason: format!("reductions of {dtype} are not for kernels"),
    })?;
    Ok(format!("reduce_{name}"))
}

/// Blocks for a launch over so many elements.
pub fn block_count_for(count: u64) -> u32 {
    // A launch of 0 blocks is an error.
    u32::try_from(count.div_ceil(ELEMENTS_PER_TILE).clamp(1, MAX_BLOCKS_PER_LAUNCH)).unwrap_or(1)
}

/// The kernels, loaded on a device.
pub struct KernelModule {
    context: Arc<PrimaryContext>,
    module: *mut c_void,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for KernelModule {}
// SAFETY: as above.
unsafe impl Sync for KernelModule {}

impl Drop for KernelModule {
    fn drop(&mut self) {
        let module = self.module;
        // SAFETY: loaded once and unloaded once; there is nothing to do about a failure.
        drop(
            self.context
                .call_driver("cuModuleUnload", |table| unsafe { (table.module_unload)(module) }),
        );
    }
}

/// Arguments of a launch, by address.
macro_rules! kernel_arguments {
    ($($argument:expr),* $(,)?) => { [$((&raw const $argument).cast_mut().cast::<c_void>()),*] };
}

impl KernelModule {
    /// Compiles them for the context's device, or takes them from the cache, and loads them.
    ///
    /// # Errors
    /// `Compile`, `CudaDriver`.
    pub fn compile_and_load(
        context: Arc<PrimaryContext>,
        compiler: &NvrtcCompiler,
        cache: &KernelCache,
    ) -> Result<Self> {
        let arch = context.cuda_driver().device_properties(context.device_ordinal())?.arch;
        let code = cache.get_or_compile(compiler, KERNEL_SOURCE, arch)?;
        let mut module = null_mut();
        // SAFETY: the code is machine code with its length in the header; the place lives across
        // the call.
        context.call_driver("cuModuleLoadData", |table| unsafe {
            (table.module_load)(&raw mut module, code.as_ptr().cast())
        })?;
        Ok(Self { context, module })
    }

    fn kernel_function(&self, name: &str) -> Result<RawFunction> {
        let fail = || Error::Arguments { reason: format!("there is no kernel {name}") };
        let text = CString::new(name).map_err(|_| fail())?;
        let mut function = null_mut();
        // SAFETY: the module is loaded; the name ends with a zero; the place lives across the call.
        self.context.call_driver("cuModuleGetFunction", |table| unsafe {
            (table.function)(&raw mut function, self.module, text.as_ptr())
        })?;
        Ok(function)
    }

    /// # Safety
    /// The arguments match the parameters of the kernel.
    unsafe fn launch_kernel(
        &self,
        name: &str,
        blocks: u32,
        stream: RawStream,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let function = self.kernel_function(name)?;
        let arguments = arguments.as_mut_ptr();
        // SAFETY: the function is the module's, and the driver copies the arguments before it
        // returns.
        self.context.call_driver("cuLaunchKernel", |table| unsafe {
            (table.launch)(
                function,
                blocks,
                1,
                1,
                THREADS_PER_BLOCK,
                1,
                1,
                0,
                stream,
                arguments,
                null_mut(),
            )
        })
    }

    /// Moves tensors, given as address and number of elements, into a buffer (`pack`) or out of it,
    /// multiplied and converted; each lies at the next multiple of 16 bytes.
    ///
    /// # Errors
    /// `Arguments`, `CudaDriver`.
    ///
    /// # Safety
    /// Until the stream is done with the work, tensors have their elements at their addresses on
    /// the context's device, the buffer has the size that [`plan_pack_launches`] returns, and no
    /// other work writes to them.
    pub unsafe fn pack_or_unpack_tensors(
        &self,
        pack: bool,
        tensors: &[(u64, u64)],
        (tensor, buffer): (DataType, DataType),
        base: u64,
        factor: f64,
        stream: usize,
    ) -> Result<()> {
        let name = pack_kernel_name(tensor, buffer, factor)?;
        let name = if pack { format!("pack_{name}") } else { format!("unpack_{name}") };
        if !base.is_multiple_of(TENSOR_ALIGNMENT_BYTES) {
            return Err(Error::Arguments {
                reason: format!("a buffer that is not aligned: {base:#x}"),
            });
        }
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        let (batches, _) = plan_pack_launches(tensors, buffer.element_size() as u64)?;
        for batch in batches.iter().filter(|batch| batch.block_count() > 0) {
            let mut arguments = kernel_arguments![*batch, base, factor];
            // SAFETY: these are the arguments of all kernels of this kind; the rest is the caller's
            // promise.
            unsafe { self.launch_kernel(&name, batch.block_count(), stream, &mut arguments)? }
        }
        Ok(())
    }

    /// Reduces the members' buffers of `count` elements into `out`, which may be one of them.
    ///
    /// # Errors
    /// `Arguments`, `CudaDriver`.
    ///
    /// # Safety
    /// Until the stream is done with it: all buffers are readable, `out` writable, on the context's
    /// device, and nothing else writes to them.
    pub unsafe fn reduce_buffers(
        &self,
        dtype: DataType,
        inputs: &ReductionInputs,
        out: u64,
        count: u64,
        stream: usize,
    ) -> Result<()> {
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        let mut arguments = kernel_arguments![*inputs, out, count];
        // SAFETY: these are the arguments of all kernels of this kind; the rest is the caller's
        // promise.
        unsafe {
            self.launch_kernel(
                &reduction_kernel_name(dtype)?,
                block_count_for(count),
                stream,
                &mut arguments,
            )
        }
    }

    /// Returns the bytes on the device that [`KernelModule::adasum_vectors`] needs for itself.
    pub fn adasum_scratch_bytes(count: u64) -> u64 {
        u64::from(block_count_for(count)) * 24
    }

    /// Writes the Adasum of two vectors of `count` elements to `out`, which may be one of them.
    ///
    /// # Errors
    /// `Arguments`, `CudaDriver`.
    ///
    /// # Safety
    /// As for [`KernelModule::reduce_buffers`]; `scratch` has
    /// [`KernelModule::adasum_scratch_bytes`] bytes.
    pub unsafe fn adasum_vectors(
        &self,
        dtype: DataType,
        (a, b, out): (u64, u64, u64),
        count: u64,
        scratch: u64,
        stream: usize,
    ) -> Result<()> {
        let name = match dtype {
            DataType::F32 | DataType::F64 | DataType::F16 | DataType::Bf16 => {
                kernel_type_name(dtype).unwrap_or_default()
            }
            other => return Err(Error::Arguments { reason: format!("Adasum of {other}") }),
        };
        let (stream, blocks) =
            (std::ptr::with_exposed_provenance_mut(stream), block_count_for(count));
        // SAFETY: these are the arguments of the three kernels; the rest is the caller's promise.
        unsafe {
            let mut products = kernel_arguments![a, b, count, scratch];
            self.launch_kernel(&format!("adasum_products_{name}"), blocks, stream, &mut products)?;
            let mut total = kernel_arguments![scratch, blocks];
            self.launch_kernel("adasum_total", 1, stream, &mut total)?;
            let mut combine = kernel_arguments![a, b, out, count, scratch];
            self.launch_kernel(&format!("adasum_combine_{name}"), blocks, stream, &mut combine)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_lie_one_after_the_other_and_aligned() {
        let (batches, bytes) = plan_pack_launches(&[(100, 3), (200, 0), (300, 5000)], 4).unwrap();
        let [batch] = &batches[..] else { panic!("{} launches", batches.len()) };
        assert_eq!((batch.start[0], batch.start[1], batch.start[2]), (0, 1, 1));
        assert_eq!((batch.tiles[0], batch.tiles[1], batch.tiles[2]), (1, 1, 3));
        assert_eq!((batch.block_count(), bytes), (3, 16 + 20_000));
    }

    #[test]
    fn more_tensors_than_a_launch_takes_are_several_launches() {
        let tensors = vec![(0, 4); MAX_TENSORS_PER_LAUNCH + 1];
        let (batches, bytes) = plan_pack_launches(&tensors, 4).unwrap();
        assert_eq!(batches.iter().map(|batch| batch.tensors).collect::<Vec<_>>(), [160, 1]);
        assert_eq!(batches[1].start[0], 160);
        assert_eq!(bytes, 161 * 16);
        assert!(plan_pack_launches(&[(0, u64::MAX)], 4).is_err());
    }

    #[test]
    fn arguments_fit_into_what_every_device_takes() {
        assert!(
            size_of::<PackLaunchArguments>() + 16 <= 4096
                && size_of::<ReductionInputs>() + 16 <= 4096
        );
        assert_eq!((size_of::<PackLaunchArguments>(), size_of::<ReductionInputs>()), (3848, 536));
    }

    #[test]
    fn operations_that_no_kernel_does_are_refused_by_name() {
        assert_eq!(pack_kernel_name(DataType::F32, DataType::Bf16, 0.5).unwrap(), "f32_bf16");
        assert_eq!(pack_kernel_name(DataType::C64, DataType::C64, 1.0).unwrap(), "u64");
        assert_eq!(pack_kernel_name(DataType::F8E4M3, DataType::F8E4M3, 1.0).unwrap(), "u8");
        for (tensor, buffer, factor) in [
            (DataType::I32, DataType::I32, 0.5),
            (DataType::F16, DataType::F32, 1.0),
            (DataType::C128, DataType::C128, 1.0),
            (DataType::F8E5M2, DataType::F8E5M2, 0.5),
            (DataType::F32, DataType::F8E4M3, 1.0),
        ] {
            assert!(
                pack_kernel_name(tensor, buffer, factor).is_err(),
                "{tensor} {buffer} {factor}"
            );
        }
        assert!(ReductionInputs::new(&[], DataType::F32, ReduceOp::Sum, (1.0, 1.0)).is_err());
        assert!(ReductionInputs::new(&[0], DataType::Bool, ReduceOp::Sum, (0.5, 1.0)).is_err());
    }
}
