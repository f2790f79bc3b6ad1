// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A member's work on its device: its window, views of the windows of others, and its stream.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::sync::Arc;
use std::thread::JoinHandle;

use farandole_collectives::{
    Buffer, DataType, Error as CollectiveError, Event, Result, Room, Segment, Stream as Theirs,
};

use super::pieces::Span;
use super::window::{View, Window};
use crate::kernels::Inputs;
use crate::{Cache, Error, GpuLane, Kernels, Lane as _, Nvrtc, Offer, Places};

/// Pieces that a window holds.
pub(crate) const SLOTS: u64 = 2;
/// Smallest and largest size of a piece, in MiB. Processes take turns on a GPU, which takes some
/// tenths of a millisecond, so pieces are large: on an H100, 64 MiB among two processes take 1.2 ms
/// in pieces of 16 MiB and 0.7 ms in one.
const PIECES: (u8, u8) = (16, 64);
/// A piece takes one in so many bytes of the GPU, and a window three pieces: the third is for
/// results on the way to many tensors.
const SHARE: u64 = 1024;

/// Returns the size of a piece on a GPU with so many bytes of memory, in MiB.
pub(crate) fn piece_of(memory: u64) -> u8 {
    let (least, most) = PIECES;
    u8::try_from((memory / SHARE) >> 20).unwrap_or(most).clamp(least, most)
}

/// The reduction of a piece.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct How {
    pub(crate) dtype: DataType,
    pub(crate) op: farandole_collectives::ReduceOp,
    pub(crate) prescale: f64,
    pub(crate) postscale: f64,
}

/// A member's side of a communicator. Work is put on one stream, in order.
pub(crate) trait Site: Send {
    /// Returns the device's number.
    fn ordinal(&self) -> u32;

    /// Returns the bytes of a piece.
    fn room_of_a_piece(&self) -> usize;

    /// Returns the handle of this member's window for others, once it exists; or the reason why
    /// there is none.
    fn offer(&mut self) -> Option<Result<Offer, String>>;

    /// Opens all windows but that of `member`, which is this one.
    fn open(&mut self, offers: &[Offer], member: usize) -> Result<(), String>;

    /// Work from now on comes after these.
    fn hold(&self, events: &[Arc<dyn Event>]) -> Result<()>;

    /// Returns a point after the work so far.
    fn mark(&self) -> Result<Arc<dyn Event>>;

    /// Returns memory for results.
    fn room(&self, bytes: usize) -> Result<Arc<dyn Room>>;

    /// Copies a piece of the segments' inputs into a slot of the own window.
    fn fill(&self, slot: u64, piece: &[Span], segments: &[Segment], dtype: DataType) -> Result<()>;

    /// Reduces that slot of all windows into that piece of the outputs.
    fn reduce(&self, slot: u64, piece: &[Span], segments: &[Segment], how: How) -> Result<()>;

    /// Closes opened memory: no work in progress reads it.
    fn close(&mut self);

    /// Keeps everything until the process ends, because it may still be in use.
    fn leave(&mut self);
}

/// Tools whose creation takes time.
struct Tools {
    window: Window,
    offer: Offer,
    kernels: Kernels,
}

enum Stage {
    Making(JoinHandle<Result<Tools, Error>>),
    Made(Tools),
    Over,
}

/// A GPU's.
pub(crate) struct GpuSite {
    lane: GpuLane,
    /// Bytes of a piece.
    piece: usize,
    stage: Stage,
    views: Vec<View>,
    /// Start of each member's window.
    starts: Vec<u64>,
}

impl GpuSite {
    /// Begins to compile the kernels, or to read them from the cache, and takes memory for the
    /// window, on a thread of its own: that may take seconds. `piece` is the size of a piece in
    /// MiB, the same for all members.
    ///
    /// # Errors
    /// `Device`.
    pub(crate) fn new(lane: GpuLane, piece: u8, places: Places, cache: Cache) -> Result<Self> {
        let context = lane.context();
        let piece = usize::from(piece) << 20;
        let make = move || -> Result<Tools, Error> {
            let kernels = Kernels::load(Arc::clone(&context), &Nvrtc::load(&places)?, &cache)?;
            let slots = usize::try_from(SLOTS).unwrap_or(1) + 1;
            let (window, offer) = Window::new(context, slots * piece)?;
            Ok(Tools { window, offer, kernels })
        };
        let thread = std::thread::Builder::new().name("farandole-ipc".to_owned()).spawn(make);
        let thread = thread.map_err(|error| CollectiveError::Device {
            ordinal: lane.ordinal(),
            reason: format!("no thread to prepare CUDA IPC: {error}"),
        })?;
        Ok(Self {
            lane,
            piece,
            stage: Stage::Making(thread),
            views: Vec::new(),
            starts: Vec::new(),
        })
    }

    fn tools(&self) -> Result<&Tools> {
        match &self.stage {
            Stage::Made(tools) => Ok(tools),
            Stage::Making(_) | Stage::Over => {
                Err(CollectiveError::Lost { reason: "there is no window for CUDA IPC".to_owned() })
            }
        }
    }

    fn stream(&self) -> usize {
        self.lane.stream().expose_provenance()
    }
}

/// Returns a buffer's address on its device.
fn address(buffer: &Buffer) -> u64 {
    buffer.address().expose_provenance() as u64
}

/// Returns the type whose elements are moved as they are in the place of others of their size.
fn plain(dtype: DataType) -> DataType {
    match dtype.size() {
        1 => DataType::U8,
        2 => DataType::U16,
        4 => DataType::U32,
        _ => DataType::U64,
    }
}

/// Parts of tensors as kernels take them: address and elements.
fn parts(piece: &[Span], dtype: DataType, of: impl Fn(&Span) -> u64) -> Vec<(u64, u64)> {
    piece.iter().map(|span| (of(span), (span.bytes / dtype.size()) as u64)).collect()
}

impl Site for GpuSite {
    fn ordinal(&self) -> u32 {
        self.lane.ordinal()
    }

    fn room_of_a_piece(&self) -> usize {
        self.piece
    }

    fn offer(&mut self) -> Option<Result<Offer, String>> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Making(thread) if !thread.is_finished() => {
                self.stage = Stage::Making(thread);
                None
            }
            Stage::Making(thread) => Some(match thread.join() {
                Ok(Ok(tools)) => {
                    let offer = tools.offer;
                    self.stage = Stage::Made(tools);
                    Ok(offer)
                }
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err("the thread that prepared it panicked".to_owned()),
            }),
            Stage::Made(tools) => {
                let offer = tools.offer;
                self.stage = Stage::Made(tools);
                Some(Ok(offer))
            }
            Stage::Over => Some(Err("it is over".to_owned())),
        }
    }

    fn open(&mut self, offers: &[Offer], member: usize) -> Result<(), String> {
        let own = self.tools().map_err(|error| error.to_string())?.window.start();
        let mut starts = Vec::new();
        for (other, offer) in offers.iter().enumerate() {
            if other == member {
                starts.push(own);
                continue;
            }
            let view =
                View::open(self.lane.context(), *offer).map_err(|error| error.to_string())?;
            starts.push(view.start());
            self.views.push(view);
        }
        self.starts = starts;
        Ok(())
    }

    fn hold(&self, events: &[Arc<dyn Event>]) -> Result<()> {
        // SAFETY: the lane's stream lives as long as the lane.
        let own = unsafe { Theirs::from_raw(self.stream()) };
        events.iter().try_for_each(|event| event.hold(own))
    }

    fn mark(&self) -> Result<Arc<dyn Event>> {
        self.lane.mark()
    }

    fn room(&self, bytes: usize) -> Result<Arc<dyn Room>> {
        self.lane.room(bytes)
    }

    fn fill(&self, slot: u64, piece: &[Span], segments: &[Segment], dtype: DataType) -> Result<()> {
        let tools = self.tools()?;
        let base = tools.window.start() + slot * self.piece as u64;
        let from = |span: &Span| address(&segments[span.segment].input) + span.at as u64;
        if let [span] = piece {
            return Ok(self.lane.copy(from(span), base, span.bytes)?);
        }
        let (plain, parts) = (plain(dtype), parts(piece, dtype, from));
        // SAFETY: the segments' owners keep them until the operation is over; the slot is free now,
        // as members have told each other, and has room for the piece.
        Ok(unsafe {
            tools.kernels.transfer(true, &parts, (plain, plain), base, 1.0, self.stream())
        }?)
    }

    fn reduce(&self, slot: u64, piece: &[Span], segments: &[Segment], how: How) -> Result<()> {
        let tools = self.tools()?;
        let How { dtype, op, prescale, postscale } = how;
        let addresses: Vec<u64> =
            self.starts.iter().map(|start| start + slot * self.piece as u64).collect();
        let inputs = Inputs::new(&addresses, dtype, op, (prescale, postscale))?;
        let bytes = piece.last().map_or(0, Span::end);
        let count = (bytes / dtype.size()) as u64;
        let to = |span: &Span| address(&segments[span.segment].output) + span.at as u64;
        let scratch = tools.window.start() + SLOTS * self.piece as u64;
        let out = if let [span] = piece { to(span) } else { scratch };
        // SAFETY: all members have filled the slot and leave it alone until this one says that it
        // has read it; the segments' owners keep them until the operation is over; the scratch
        // memory is used in the order of the stream alone.
        unsafe { tools.kernels.reduce(dtype, &inputs, out, count, self.stream()) }?;
        if out == scratch {
            let (plain, parts) = (plain(dtype), parts(piece, dtype, to));
            // SAFETY: as above.
            unsafe {
                tools.kernels.transfer(false, &parts, (plain, plain), scratch, 1.0, self.stream())
            }?;
        }
        Ok(())
    }

    fn close(&mut self) {
        self.views.clear();
    }

    fn leave(&mut self) {
        std::mem::forget(std::mem::take(&mut self.views));
        if let Stage::Made(tools) = std::mem::replace(&mut self.stage, Stage::Over) {
            std::mem::forget(tools);
        }
    }
}

impl Drop for GpuSite {
    fn drop(&mut self) {
        if let Stage::Making(thread) = std::mem::replace(&mut self.stage, Stage::Over) {
            // What it has made goes with its result.
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_grow_with_the_memory_of_the_gpu() {
        let pieces = [4 << 30, 16 << 30, 24 << 30, 40 << 30, 81_559 << 20, u64::MAX].map(piece_of);
        assert_eq!(pieces, [16, 16, 24, 40, 64, 64]);
    }
}
