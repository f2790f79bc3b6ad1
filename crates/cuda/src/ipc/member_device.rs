// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A member's work on its device: its window, views of the windows of others, and its stream.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::sync::Arc;
use std::thread::JoinHandle;

use farandole_collectives::{
    DeviceEvent, Error as CollectiveError, Result, ResultMemory, TensorSegment,
};
use farandole_kernels::{Buffer, DataType, DeviceStream as FrameworkStream};

use super::pieces::PieceSpan;
use super::window::{IpcWindow, PeerWindow};
use crate::kernels::ReductionInputs;
use crate::{
    CommunicatorStream as _, Error, GpuStream, IpcMemoryHandle, KernelCache, KernelModule,
    LibrarySearchPath, NvrtcCompiler,
};

/// Pieces that a window holds.
// While one piece is reduced, the next one is copied in.
pub(crate) const SLOTS_PER_WINDOW: u64 = 2;
/// Smallest and largest size of a piece, in MiB. Processes take turns on a GPU, which takes some
/// tenths of a millisecond, so pieces are large: on an H100, 64 MiB among two processes take 1.2 ms
/// in pieces of 16 MiB and 0.7 ms in one.
const PIECE_MIB_RANGE: (u8, u8) = (16, 64);
/// A piece takes one in so many bytes of the GPU, and a window three pieces: the third is for
/// results on the way to many tensors.
const GPU_MEMORY_PER_PIECE: u64 = 1024;

/// Returns the size of a piece on a GPU with so many bytes of memory, in MiB.
pub(crate) fn piece_size_mib(memory: u64) -> u8 {
    let (least, most) = PIECE_MIB_RANGE;
    u8::try_from((memory / GPU_MEMORY_PER_PIECE) >> 20).unwrap_or(most).clamp(least, most)
}

/// The reduction of a piece.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PieceReduction {
    pub(crate) dtype: DataType,
    pub(crate) op: farandole_kernels::ReduceOp,
    pub(crate) prescale: f64,
    pub(crate) postscale: f64,
}

/// A member's side of a communicator. Work is put on one stream, in order.
pub(crate) trait IpcDevice: Send {
    /// Returns the device's number.
    fn device_ordinal(&self) -> u32;

    /// Returns the bytes of a piece.
    fn piece_bytes(&self) -> usize;

    /// Returns the handle of this member's window for others, once it exists; or the reason why
    /// there is none.
    fn poll_window_handle(&mut self) -> Option<Result<IpcMemoryHandle, String>>;

    /// Opens the windows of all members except `member`, which is this one.
    fn open_windows(&mut self, handles: &[IpcMemoryHandle], member: usize) -> Result<(), String>;

    /// Makes later work on the stream wait for these events.
    fn wait_for_events(&self, events: &[Arc<dyn DeviceEvent>]) -> Result<()>;

    /// Returns a point after the work so far.
    fn record_event(&self) -> Result<Arc<dyn DeviceEvent>>;

    /// Returns memory for results.
    fn allocate_result(&self, bytes: usize) -> Result<Arc<dyn ResultMemory>>;

    /// Copies a piece of the segments' inputs into a slot of the own window.
    fn fill_slot(
        &self,
        slot: u64,
        piece: &[PieceSpan],
        segments: &[TensorSegment],
        dtype: DataType,
    ) -> Result<()>;

    /// Reduces slot `slot` of every window into `piece` of the outputs.
    fn reduce_slot(
        &self,
        slot: u64,
        piece: &[PieceSpan],
        segments: &[TensorSegment],
        reduction: PieceReduction,
    ) -> Result<()>;

    /// Closes opened memory: no work in progress reads it.
    fn close_windows(&mut self);

    /// Keeps everything until the process ends, because it may still be in use.
    fn leak_resources(&mut self);
}

/// Resources that a thread prepares, because compiling the kernels can take seconds.
struct IpcResources {
    window: IpcWindow,
    handle: IpcMemoryHandle,
    kernels: KernelModule,
}

enum IpcSetupStage {
    Preparing(JoinHandle<Result<IpcResources, Error>>),
    Prepared(IpcResources),
    Ended,
}

/// An [`IpcDevice`] on a GPU of this process.
pub(crate) struct GpuIpcDevice {
    stream: GpuStream,
    /// Bytes of a piece.
    piece_bytes: usize,
    stage: IpcSetupStage,
    peer_windows: Vec<PeerWindow>,
    /// Start of each member's window.
    window_addresses: Vec<u64>,
}

impl GpuIpcDevice {
    /// Starts a thread that compiles the kernels, or reads them from the cache, and allocates the
    /// window; that may take seconds. `piece` is the size of a piece in MiB, the same for all
    /// members.
    ///
    /// # Errors
    /// `Device`.
    pub(crate) fn new(
        stream: GpuStream,
        piece: u8,
        search_path: LibrarySearchPath,
        cache: KernelCache,
    ) -> Result<Self> {
        let context = stream.primary_context();
        let piece = usize::from(piece) << 20;
        let make = move || -> Result<IpcResources, Error> {
            let kernels = KernelModule::compile_and_load(
                Arc::clone(&context),
                &NvrtcCompiler::load_from(&search_path)?,
                &cache,
            )?;
            let slots = usize::try_from(SLOTS_PER_WINDOW).unwrap_or(1) + 1;
            let (window, handle) = IpcWindow::new(context, slots * piece)?;
            Ok(IpcResources { window, handle, kernels })
        };
        let thread = std::thread::Builder::new().name("farandole-ipc".to_owned()).spawn(make);
        let thread = thread.map_err(|error| CollectiveError::Device {
            ordinal: stream.device_ordinal(),
            reason: format!("no thread to prepare CUDA IPC: {error}"),
        })?;
        Ok(Self {
            stream,
            piece_bytes: piece,
            stage: IpcSetupStage::Preparing(thread),
            peer_windows: Vec::new(),
            window_addresses: Vec::new(),
        })
    }

    fn ipc_resources(&self) -> Result<&IpcResources> {
        match &self.stage {
            IpcSetupStage::Prepared(resources) => Ok(resources),
            IpcSetupStage::Preparing(_) | IpcSetupStage::Ended => {
                Err(CollectiveError::Lost { reason: "there is no window for CUDA IPC".to_owned() })
            }
        }
    }

    fn stream_handle(&self) -> usize {
        self.stream.raw_stream().expose_provenance()
    }
}

/// Returns a buffer's address on its device.
fn device_address(buffer: &Buffer) -> u64 {
    buffer.address().expose_provenance() as u64
}

/// Returns the integer type with the same element size: copies move bits and ignore the type.
fn same_size_integer(dtype: DataType) -> DataType {
    match dtype.element_size() {
        1 => DataType::U8,
        2 => DataType::U16,
        4 => DataType::U32,
        _ => DataType::U64,
    }
}

/// Returns address and number of elements of each span, which is the form that kernels take.
fn kernel_tensor_arguments(
    piece: &[PieceSpan],
    dtype: DataType,
    of: impl Fn(&PieceSpan) -> u64,
) -> Vec<(u64, u64)> {
    piece.iter().map(|span| (of(span), (span.bytes / dtype.element_size()) as u64)).collect()
}

impl IpcDevice for GpuIpcDevice {
    fn device_ordinal(&self) -> u32 {
        self.stream.device_ordinal()
    }

    fn piece_bytes(&self) -> usize {
        self.piece_bytes
    }

    fn poll_window_handle(&mut self) -> Option<Result<IpcMemoryHandle, String>> {
        match std::mem::replace(&mut self.stage, IpcSetupStage::Ended) {
            IpcSetupStage::Preparing(thread) if !thread.is_finished() => {
                self.stage = IpcSetupStage::Preparing(thread);
                None
            }
            IpcSetupStage::Preparing(thread) => Some(match thread.join() {
                Ok(Ok(resources)) => {
                    let handle = resources.handle;
                    self.stage = IpcSetupStage::Prepared(resources);
                    Ok(handle)
                }
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err("the thread that prepared it panicked".to_owned()),
            }),
            IpcSetupStage::Prepared(resources) => {
                let handle = resources.handle;
                self.stage = IpcSetupStage::Prepared(resources);
                Some(Ok(handle))
            }
            IpcSetupStage::Ended => Some(Err("it is over".to_owned())),
        }
    }

    fn open_windows(&mut self, handles: &[IpcMemoryHandle], member: usize) -> Result<(), String> {
        let own = self.ipc_resources().map_err(|error| error.to_string())?.window.base_address();
        let mut starts = Vec::new();
        for (other, handle) in handles.iter().enumerate() {
            if other == member {
                starts.push(own);
                continue;
            }
            let view = PeerWindow::open_handle(self.stream.primary_context(), *handle)
                .map_err(|error| error.to_string())?;
            starts.push(view.base_address());
            self.peer_windows.push(view);
        }
        self.window_addresses = starts;
        Ok(())
    }

    fn wait_for_events(&self, events: &[Arc<dyn DeviceEvent>]) -> Result<()> {
        // SAFETY: `self.stream` owns the CUDA stream and outlives this call.
        let own = unsafe { FrameworkStream::from_raw(self.stream_handle()) };
        events.iter().try_for_each(|event| event.make_stream_wait(own))
    }

    fn record_event(&self) -> Result<Arc<dyn DeviceEvent>> {
        self.stream.record_event()
    }

    fn allocate_result(&self, bytes: usize) -> Result<Arc<dyn ResultMemory>> {
        self.stream.allocate_result(bytes)
    }

    fn fill_slot(
        &self,
        slot: u64,
        piece: &[PieceSpan],
        segments: &[TensorSegment],
        dtype: DataType,
    ) -> Result<()> {
        let resources = self.ipc_resources()?;
        let base = resources.window.base_address() + slot * self.piece_bytes as u64;
        let from = |span: &PieceSpan| {
            device_address(&segments[span.segment].input) + span.segment_offset as u64
        };
        // A single span is a plain copy and needs no kernel.
        if let [span] = piece {
            return Ok(self.stream.copy_within_device(from(span), base, span.bytes)?);
        }
        let (plain, parts) =
            (same_size_integer(dtype), kernel_tensor_arguments(piece, dtype, from));
        // SAFETY: the segments' owners keep them until the operation is over. The members' counters
        // show that the slot is free, and it has room for the piece.
        Ok(unsafe {
            resources.kernels.pack_or_unpack_tensors(
                true,
                &parts,
                (plain, plain),
                base,
                1.0,
                self.stream_handle(),
            )
        }?)
    }

    fn reduce_slot(
        &self,
        slot: u64,
        piece: &[PieceSpan],
        segments: &[TensorSegment],
        reduction: PieceReduction,
    ) -> Result<()> {
        let resources = self.ipc_resources()?;
        let PieceReduction { dtype, op, prescale, postscale } = reduction;
        let addresses: Vec<u64> = self
            .window_addresses
            .iter()
            .map(|start| start + slot * self.piece_bytes as u64)
            .collect();
        let inputs = ReductionInputs::new(&addresses, dtype, op, (prescale, postscale))?;
        let bytes = piece.last().map_or(0, PieceSpan::end_offset);
        let count = (bytes / dtype.element_size()) as u64;
        let to = |span: &PieceSpan| {
            device_address(&segments[span.segment].output) + span.segment_offset as u64
        };
        let scratch = resources.window.base_address() + SLOTS_PER_WINDOW * self.piece_bytes as u64;
        // One span is written directly; several take one more copy, because a kernel writes one
        // range.
        let out = if let [span] = piece { to(span) } else { scratch };
        // SAFETY: all members have filled the slot and leave it alone until this one says that it
        // has read it; the segments' owners keep them until the operation is over; the scratch
        // memory is used in the order of the stream alone.
        unsafe {
            resources.kernels.reduce_buffers(dtype, &inputs, out, count, self.stream_handle())
        }?;
        if out == scratch {
            let (plain, parts) =
                (same_size_integer(dtype), kernel_tensor_arguments(piece, dtype, to));
            // SAFETY: as above.
            unsafe {
                resources.kernels.pack_or_unpack_tensors(
                    false,
                    &parts,
                    (plain, plain),
                    scratch,
                    1.0,
                    self.stream_handle(),
                )
            }?;
        }
        Ok(())
    }

    fn close_windows(&mut self) {
        self.peer_windows.clear();
    }

    fn leak_resources(&mut self) {
        // A kernel of a peer may still read the window, so it is not freed.
        std::mem::forget(std::mem::take(&mut self.peer_windows));
        if let IpcSetupStage::Prepared(resources) =
            std::mem::replace(&mut self.stage, IpcSetupStage::Ended)
        {
            std::mem::forget(resources);
        }
    }
}

impl Drop for GpuIpcDevice {
    fn drop(&mut self) {
        if let IpcSetupStage::Preparing(thread) =
            std::mem::replace(&mut self.stage, IpcSetupStage::Ended)
        {
            // The memory and kernels of the thread are dropped with its result.
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_grow_with_the_memory_of_the_gpu() {
        let pieces =
            [4 << 30, 16 << 30, 24 << 30, 40 << 30, 81_559 << 20, u64::MAX].map(piece_size_mib);
        assert_eq!(pieces, [16, 16, 24, 40, 64, 64]);
    }
}
