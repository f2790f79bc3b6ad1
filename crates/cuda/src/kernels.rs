// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Our kernels: their source, their arguments, and their launch.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use farandole_collectives::{DataType, ReduceOp};

use crate::driver::{Context, Function, Stream};
use crate::{Cache, Error, Nvrtc, Result};

/// All kernels, one source.
pub const SOURCE: &str = concat!(
    include_str!("../kernels/types.cu"),
    include_str!("../kernels/pack.cu"),
    include_str!("../kernels/adasum.cu"),
    include_str!("../kernels/reduce.cu"),
);

/// Tensors of one launch.
pub const TENSORS: usize = 160;
/// Elements of a tensor that a block moves.
pub const TILE: u64 = 4096;
/// Members of one launch.
pub const MEMBERS: usize = 64;
/// Threads of a block.
const THREADS: u32 = 256;
/// Blocks of a launch that is not cut by tensors.
const BLOCKS: u64 = 1024;
/// Tensors lie in a buffer at multiples of this.
const ALIGNMENT: u64 = 16;

/// Arguments of a launch that packs or unpacks; `Batch` in `pack.cu`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Batch {
    /// Addresses of the tensors.
    pub address: [u64; TENSORS],
    /// Their elements.
    pub count: [u64; TENSORS],
    /// Start of each tensor in the buffer, in units of 16 bytes.
    pub start: [u32; TENSORS],
    /// Tiles of this tensor and of those before it.
    pub tiles: [u32; TENSORS],
    /// Their number.
    pub tensors: u32,
}

impl Batch {
    /// Blocks of the launch.
    pub fn blocks(&self) -> u32 {
        let last = usize::try_from(self.tensors).unwrap_or_default().checked_sub(1);
        last.and_then(|last| self.tiles.get(last)).copied().unwrap_or_default()
    }
}

/// Returns the launches for tensors, given as address and number of elements, that lie one after
/// the other in a buffer whose elements have `size` bytes; and the bytes of that buffer.
///
/// # Errors
/// `Arguments` for more than a launch can number.
pub fn plan(tensors: &[(u64, u64)], size: u64) -> Result<(Vec<Batch>, u64)> {
    let too_many = || Error::Arguments {
        reason: "tensors have more bytes than a launch can number".to_owned(),
    };
    let mut at = 0_u64;
    let mut batches = Vec::new();
    for some in tensors.chunks(TENSORS) {
        let mut batch = Batch {
            address: [0; TENSORS],
            count: [0; TENSORS],
            start: [0; TENSORS],
            tiles: [0; TENSORS],
            tensors: u32::try_from(some.len()).map_err(|_| too_many())?,
        };
        let mut tiles = 0_u64;
        for (index, (address, count)) in some.iter().enumerate() {
            tiles += count.div_ceil(TILE);
            batch.address[index] = *address;
            batch.count[index] = *count;
            batch.start[index] = u32::try_from(at / ALIGNMENT).map_err(|_| too_many())?;
            batch.tiles[index] = u32::try_from(tiles).map_err(|_| too_many())?;
            let bytes =
                count.checked_mul(size).and_then(|bytes| bytes.checked_next_multiple_of(ALIGNMENT));
            at = bytes.and_then(|bytes| at.checked_add(bytes)).ok_or_else(too_many)?;
        }
        batches.push(batch);
    }
    Ok((batches, at))
}

/// Arguments of a reduction; `Inputs` in `reduce.cu`.
#[derive(Clone, Debug, PartialEq)]
#[repr(C)]
pub struct Inputs {
    /// Every member's buffer, in member order.
    pub address: [u64; MEMBERS],
    /// Their number.
    pub members: u32,
    /// Number of the operation that combines elements.
    pub op: u32,
    /// Multiplies inputs.
    pub prescale: f64,
    /// Multiplies the result.
    pub postscale: f64,
}

impl Inputs {
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
        let op = op.exact();
        let members = addresses.len();
        if members == 0 || members > MEMBERS {
            return Err(fail(format!("1 to {MEMBERS} members are reduced at once: {members}")));
        }
        let scaled = prescale != 1.0 || postscale != 1.0;
        if op == ReduceOp::Adasum
            || (dtype == DataType::Bool && (op == ReduceOp::Average || scaled))
        {
            return Err(fail(format!("{op:?} of {dtype} with factors {prescale} and {postscale}")));
        }
        let mut address = [0; MEMBERS];
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
fn name_of(dtype: DataType) -> Option<&'static str> {
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
pub fn move_name(tensor: DataType, buffer: DataType, factor: f64) -> Result<String> {
    let floats = [DataType::F32, DataType::F16, DataType::Bf16, DataType::F64];
    let halves = [DataType::F16, DataType::Bf16];
    let known = tensor == buffer || (tensor == DataType::F32 && halves.contains(&buffer));
    match (name_of(tensor), name_of(buffer)) {
        (Some(from), Some(to)) if known && floats.contains(&tensor) => Ok(format!("{from}_{to}")),
        _ if tensor == buffer && factor == 1.0 && tensor.size() <= 8 => {
            Ok(format!("u{}", 8 * tensor.size()))
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
pub fn reduce_name(dtype: DataType) -> Result<String> {
    let name = name_of(dtype).ok_or_else(|| Error::Arguments {
        reason: format!("reductions of {dtype} are not for kernels"),
    })?;
    Ok(format!("reduce_{name}"))
}

/// Blocks for a launch over so many elements.
pub fn blocks_for(count: u64) -> u32 {
    u32::try_from(count.div_ceil(TILE).clamp(1, BLOCKS)).unwrap_or(1)
}

/// The kernels, loaded on a device.
pub struct Kernels {
    context: Arc<Context>,
    module: *mut c_void,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Drop for Kernels {
    fn drop(&mut self) {
        let module = self.module;
        // SAFETY: loaded once and unloaded once; there is nothing to do about a failure.
        drop(self.context.call("cuModuleUnload", |table| unsafe { (table.module_unload)(module) }));
    }
}

/// Arguments of a launch, by address.
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => { [$((&raw const $argument).cast_mut().cast::<c_void>()),*] };
}

impl Kernels {
    /// Compiles them for the context's device, or takes them from the cache, and loads them.
    ///
    /// # Errors
    /// `Compile`, `Driver`.
    pub fn load(context: Arc<Context>, compiler: &Nvrtc, cache: &Cache) -> Result<Self> {
        let arch = context.driver().facts(context.ordinal())?.arch;
        let code = cache.get(compiler, SOURCE, arch)?;
        let mut module = null_mut();
        // SAFETY: the code is machine code with a header that tells its length; the place lives
        // across the call.
        context.call("cuModuleLoadData", |table| unsafe {
            (table.module_load)(&raw mut module, code.as_ptr().cast())
        })?;
        Ok(Self { context, module })
    }

    fn function(&self, name: &str) -> Result<Function> {
        let fail = || Error::Arguments { reason: format!("there is no kernel {name}") };
        let text = CString::new(name).map_err(|_| fail())?;
        let mut function = null_mut();
        // SAFETY: the module is loaded; the name ends with a zero; the place lives across the call.
        self.context.call("cuModuleGetFunction", |table| unsafe {
            (table.function)(&raw mut function, self.module, text.as_ptr())
        })?;
        Ok(function)
    }

    /// # Safety
    /// The arguments are those of the kernel.
    unsafe fn launch(
        &self,
        name: &str,
        blocks: u32,
        stream: Stream,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let function = self.function(name)?;
        let arguments = arguments.as_mut_ptr();
        // SAFETY: the function is the module's, and the driver copies the arguments before it
        // returns.
        self.context.call("cuLaunchKernel", |table| unsafe {
            (table.launch)(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, null_mut())
        })
    }

    /// Moves tensors, given as address and number of elements, into a buffer (`pack`) or out of it,
    /// multiplied and converted; each lies at the next multiple of 16 bytes.
    ///
    /// # Errors
    /// `Arguments`, `Driver`.
    ///
    /// # Safety
    /// Until the stream is done with it: tensors have their elements at their addresses on the
    /// context's device, the buffer has the bytes that [`plan`] says, and nothing else writes to
    /// them.
    pub unsafe fn transfer(
        &self,
        pack: bool,
        tensors: &[(u64, u64)],
        (tensor, buffer): (DataType, DataType),
        base: u64,
        factor: f64,
        stream: usize,
    ) -> Result<()> {
        let name = move_name(tensor, buffer, factor)?;
        let name = if pack { format!("pack_{name}") } else { format!("unpack_{name}") };
        if !base.is_multiple_of(ALIGNMENT) {
            return Err(Error::Arguments {
                reason: format!("a buffer that is not aligned: {base:#x}"),
            });
        }
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        let (batches, _) = plan(tensors, buffer.size() as u64)?;
        for batch in batches.iter().filter(|batch| batch.blocks() > 0) {
            let mut arguments = arguments![*batch, base, factor];
            // SAFETY: these are the arguments of all kernels of this kind; the rest is the caller's
            // promise.
            unsafe { self.launch(&name, batch.blocks(), stream, &mut arguments)? }
        }
        Ok(())
    }

    /// Reduces the members' buffers of `count` elements into `out`, which may be one of them.
    ///
    /// # Errors
    /// `Arguments`, `Driver`.
    ///
    /// # Safety
    /// Until the stream is done with it: all buffers are readable, `out` writable, on the context's
    /// device, and nothing else writes to them.
    pub unsafe fn reduce(
        &self,
        dtype: DataType,
        inputs: &Inputs,
        out: u64,
        count: u64,
        stream: usize,
    ) -> Result<()> {
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        let mut arguments = arguments![*inputs, out, count];
        // SAFETY: these are the arguments of all kernels of this kind; the rest is the caller's
        // promise.
        unsafe { self.launch(&reduce_name(dtype)?, blocks_for(count), stream, &mut arguments) }
    }

    /// Returns the bytes on the device that [`Kernels::adasum`] needs for itself.
    pub fn adasum_scratch(count: u64) -> u64 {
        u64::from(blocks_for(count)) * 24
    }

    /// The Adasum of two vectors of `count` elements, into `out`, which may be one of them.
    ///
    /// # Errors
    /// `Arguments`, `Driver`.
    ///
    /// # Safety
    /// As for [`Kernels::reduce`]; `scratch` has [`Kernels::adasum_scratch`] bytes.
    pub unsafe fn adasum(
        &self,
        dtype: DataType,
        (a, b, out): (u64, u64, u64),
        count: u64,
        scratch: u64,
        stream: usize,
    ) -> Result<()> {
        let name = match dtype {
            DataType::F32 | DataType::F64 | DataType::F16 | DataType::Bf16 => {
                name_of(dtype).unwrap_or_default()
            }
            other => return Err(Error::Arguments { reason: format!("Adasum of {other}") }),
        };
        let (stream, blocks) = (std::ptr::with_exposed_provenance_mut(stream), blocks_for(count));
        // SAFETY: these are the arguments of the three kernels; the rest is the caller's promise.
        unsafe {
            let mut products = arguments![a, b, count, scratch];
            self.launch(&format!("adasum_products_{name}"), blocks, stream, &mut products)?;
            let mut total = arguments![scratch, blocks];
            self.launch("adasum_total", 1, stream, &mut total)?;
            let mut combine = arguments![a, b, out, count, scratch];
            self.launch(&format!("adasum_combine_{name}"), blocks, stream, &mut combine)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_lie_one_after_the_other_and_aligned() {
        let (batches, bytes) = plan(&[(100, 3), (200, 0), (300, 5000)], 4).unwrap();
        let [batch] = &batches[..] else { panic!("{} launches", batches.len()) };
        assert_eq!((batch.start[0], batch.start[1], batch.start[2]), (0, 1, 1));
        assert_eq!((batch.tiles[0], batch.tiles[1], batch.tiles[2]), (1, 1, 3));
        assert_eq!((batch.blocks(), bytes), (3, 16 + 20_000));
    }

    #[test]
    fn more_tensors_than_a_launch_takes_are_several_launches() {
        let tensors = vec![(0, 4); TENSORS + 1];
        let (batches, bytes) = plan(&tensors, 4).unwrap();
        assert_eq!(batches.iter().map(|batch| batch.tensors).collect::<Vec<_>>(), [160, 1]);
        assert_eq!(batches[1].start[0], 160);
        assert_eq!(bytes, 161 * 16);
        assert!(plan(&[(0, u64::MAX)], 4).is_err());
    }

    #[test]
    fn arguments_fit_into_what_every_device_takes() {
        assert!(size_of::<Batch>() + 16 <= 4096 && size_of::<Inputs>() + 16 <= 4096);
        assert_eq!((size_of::<Batch>(), size_of::<Inputs>()), (3848, 536));
    }

    #[test]
    fn operations_that_no_kernel_does_are_refused_by_name() {
        assert_eq!(move_name(DataType::F32, DataType::Bf16, 0.5).unwrap(), "f32_bf16");
        assert_eq!(move_name(DataType::C64, DataType::C64, 1.0).unwrap(), "u64");
        assert_eq!(move_name(DataType::F8E4M3, DataType::F8E4M3, 1.0).unwrap(), "u8");
        for (tensor, buffer, factor) in [
            (DataType::I32, DataType::I32, 0.5),
            (DataType::F16, DataType::F32, 1.0),
            (DataType::C128, DataType::C128, 1.0),
            (DataType::F8E5M2, DataType::F8E5M2, 0.5),
            (DataType::F32, DataType::F8E4M3, 1.0),
        ] {
            assert!(move_name(tensor, buffer, factor).is_err(), "{tensor} {buffer} {factor}");
        }
        assert!(Inputs::new(&[], DataType::F32, ReduceOp::Sum, (1.0, 1.0)).is_err());
        assert!(Inputs::new(&[0], DataType::Bool, ReduceOp::Sum, (0.5, 1.0)).is_err());
    }
}
