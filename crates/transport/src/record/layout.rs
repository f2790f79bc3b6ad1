// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Sizes of the parts of a record.

/// Size of a header; the same as a tag, because the kernel copies bytes behind a header of 4 bytes
/// at half the speed.
pub(crate) const RECORD_HEADER_BYTES: usize = 16;
/// Size of the tag behind a payload.
pub(crate) const RECORD_TAG_BYTES: usize = 16;
