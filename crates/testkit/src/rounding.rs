// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Rounding of computed numbers to 32 bits.

#[expect(
    clippy::cast_possible_truncation,
    reason = "a float of another width is what is asked for"
)]
pub(crate) fn single(value: f64) -> f32 {
    value as f32
}
