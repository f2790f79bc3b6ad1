// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Conversions of stored values to the numbers of batches: exact, or rounded as the pages say.
//!
//! The reader and the preparation use the same functions, so that both give the same numbers.

/// Days between the epoch of Julian days and 1970-01-01.
const JULIAN_DAY_OF_1970: i64 = 2_440_588;
const MICROSECONDS_PER_DAY: i64 = 86_400_000_000;
const MILLISECONDS_PER_DAY: i64 = 86_400_000;

/// The powers of ten that a float64 represents exactly.
// Ends at 10^22, because 5^23 has more than 53 bits.
const EXACT_POWERS_OF_TEN: [f64; 23] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16,
    1e17, 1e18, 1e19, 1e20, 1e21, 1e22,
];
/// Integers up to this number are exact in a float64.
const MAX_EXACT_INTEGER: u128 = 1 << 53;

/// The unit of a stored time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeUnit {
    /// Seconds.
    Second,
    /// Milliseconds.
    Millisecond,
    /// Microseconds.
    Microsecond,
    /// Nanoseconds.
    Nanosecond,
}

impl TimeUnit {
    /// Returns a time in microseconds, the unit of all batches; `None` if that needs more than 64
    /// bits. Nanoseconds are rounded down.
    pub const fn to_microseconds(self, value: i64) -> Option<i64> {
        match self {
            Self::Second => value.checked_mul(1_000_000),
            Self::Millisecond => value.checked_mul(1000),
            Self::Microsecond => Some(value),
            // `/` rounds towards 0: the microseconds before and after 1970 would be one.
            Self::Nanosecond => Some(value.div_euclid(1000)),
        }
    }

    /// Returns the unit in words.
    pub const fn plural_name(self) -> &'static str {
        match self {
            Self::Second => "seconds",
            Self::Millisecond => "milliseconds",
            Self::Microsecond => "microseconds",
            Self::Nanosecond => "nanoseconds",
        }
    }
}

/// Returns the microseconds since 1970 of Parquet's INT96: nanoseconds of a Julian day, rounded
/// down. Returns `None` if that needs more than 64 bits.
pub fn int96_microseconds(nanoseconds: u64, julian_day: u32) -> Option<i64> {
    // A damaged file may have any day: 2^32 days are more microseconds than an i64 can hold.
    let days = i64::from(julian_day) - JULIAN_DAY_OF_1970;
    let within = i64::try_from(nanoseconds / 1000).ok()?;
    days.checked_mul(MICROSECONDS_PER_DAY)?.checked_add(within)
}

/// Returns the day that contains a time in milliseconds since 1970.
pub const fn day_of_milliseconds(milliseconds: i64) -> i64 {
    // `/` rounds towards 0 and would move a time before 1970 to the next day.
    milliseconds.div_euclid(MILLISECONDS_PER_DAY)
}

/// Returns the float64 that is nearest to the decimal `unscaled / 10^scale`.
pub fn nearest_float64(unscaled: i128, scale: i32) -> f64 {
    let power = usize::try_from(scale).ok().and_then(|scale| EXACT_POWERS_OF_TEN.get(scale));
    match power {
        // Both numbers are exact, so the division rounds once.
        Some(power) if unscaled.unsigned_abs() <= MAX_EXACT_INTEGER => {
            #[expect(clippy::cast_precision_loss, reason = "at most 2^53")]
            let unscaled = unscaled as f64;
            unscaled / power
        }
        _ => parse_decimal_float64(&unscaled.to_string(), scale),
    }
}

/// Like [`nearest_float64`], for digits of any length.
pub fn parse_decimal_float64(unscaled: &str, scale: i32) -> f64 {
    // The parser of the standard library rounds correctly at any number of digits.
    format!("{unscaled}e{}", -i64::from(scale)).parse().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn times_are_microseconds_or_refused() {
        assert_eq!(TimeUnit::Second.to_microseconds(-2), Some(-2_000_000));
        assert_eq!(TimeUnit::Millisecond.to_microseconds(i64::MAX / 1000 + 1), None);
        assert_eq!(TimeUnit::Nanosecond.to_microseconds(-1), Some(-1));
        assert_eq!(TimeUnit::Nanosecond.to_microseconds(1999), Some(1));
        assert_eq!(int96_microseconds(1_500, 2_440_589), Some(MICROSECONDS_PER_DAY + 1));
        let noon = 12 * 3600 * 1_000_000_000_u64;
        assert_eq!(int96_microseconds(noon, 5_373_484), Some(253_402_257_600_000_000));
        assert_eq!(int96_microseconds(0, u32::MAX), None);
        assert_eq!(day_of_milliseconds(-1), -1);
        assert_eq!(day_of_milliseconds(MILLISECONDS_PER_DAY), 1);
    }

    proptest! {
        #[test]
        fn decimals_are_the_nearest_floats(unscaled: i128, small: i32, scale in -10_i32..40) {
            for unscaled in [unscaled, unscaled >> 70, i128::from(small)] {
                let expected = parse_decimal_float64(&unscaled.to_string(), scale);
                prop_assert_eq!(nearest_float64(unscaled, scale).to_bits(), expected.to_bits());
            }
        }
    }
}
