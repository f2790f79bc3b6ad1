// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! PNG and JPEG as pixels of one size, in the color mode and the order of a model's input.
//!
//! Owns the steps from a file's bytes to an image in a batch. It has no threads: every thread has a
//! [`Decoder`] with memory of its own. Rare kinds of files are refused with a reason, and the
//! caller decodes them with Pillow: rare files have the results and errors of Pillow.
//!
//! ```text
//! bytes --[header: format, size, orientation]--> its cost --[png, jpeg]--> pixels, 8 bits a channel
//!       --[turn]--> upright --[resize]--> height x width --[place]--> bytes or floats of a batch
//! ```
//!
//! Invariants:
//! - `IM-1`: the size in a header is compared with [`MOST_PIXELS`] before memory is taken for
//!   pixels.
//! - `IM-2`: a file that is cut is an error, and never an image with a part made up.
//! - `IM-3`: bytes never end the process: a panic of a library becomes an error.

#![forbid(unsafe_code)]

mod decoder;
mod error;
mod exif;
mod jpeg;
mod pixels;
mod png;
mod steps;
mod turn;

pub use decoder::{Decoder, MOST_PIXELS};
pub use error::{Error, Result};
pub use steps::{Fit, Mode, Scale, Slot, Steps};
