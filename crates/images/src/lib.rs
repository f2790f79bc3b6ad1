// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decodes PNG and JPEG files to pixels of one size, in the color mode and the order of a model's
//! input.
//!
//! Owns the steps from a file's bytes to an image in a batch. It has no threads: every thread has
//! an [`ImageDecoder`] with separate memory. Rare kinds of files are rejected with a reason, and
//! the caller decodes them with Pillow. So their results and errors are Pillow's.
//!
//! ```text
//! bytes --[header: format, size, orientation]--> size check --[png, jpeg]--> pixels, 8 bits a channel
//!       --[turn]--> upright --[resize]--> height x width --[write]--> bytes or floats of a batch
//! ```
//!
//! Invariants:
//! - `IM-1`: the size in a header is compared with [`MAX_PIXELS`] before memory for pixels is
//!   allocated.
//! - `IM-2`: a truncated file is an error; missing parts of an image are never made up.
//! - `IM-3`: no file ends the process: a panic of a library becomes an error.

#![forbid(unsafe_code)]

mod decoder;
mod error;
mod exif;
mod jpeg;
mod orientation;
mod pixels;
mod png;
mod transform;

pub use decoder::ImageDecoder;
pub use error::{Error, Result};
pub use pixels::{ColorMode, MAX_PIXELS};
pub use transform::{ChannelScale, ImageOutput, ImageTransform, ResizeMode};
