// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The numbers of dates and times in batches: days, and microseconds.

use arrow::datatypes::{DataType, TimeUnit as ArrowUnit};
use farandole_dataset::TimeUnit;
use parquet::basic::Type as Physical;
use parquet::file::metadata::FileMetaData;

/// First day of the Gregorian calendar, 1582-10-15. Spark's old calendar has other numbers before.
const FIRST_GREGORIAN_DAY: i64 = -141_427;
/// 1900-01-01 in UTC. Before this moment, Spark's old calendar also has other offsets of time
/// zones.
const FIRST_COMMON_MICROSECOND: i64 = -2_208_988_800_000_000;

/// Microseconds of a day.
const MICROSECONDS_PER_DAY: i64 = 86_400_000_000;

/// Rule by which the stored number of a date or time becomes a number in batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimeRule {
    /// Unit of the stored number; `None` for dates, which are days.
    unit: Option<TimeUnit>,
    /// Smallest number that has the same meaning in the calendar of the file's writer.
    earliest: i64,
    /// Whether stored days become the microseconds of their midnights, because the table has made
    /// times of its dates.
    midnights: bool,
}

/// Returns a unit of Arrow.
pub(crate) fn time_unit(unit: ArrowUnit) -> TimeUnit {
    match unit {
        ArrowUnit::Second => TimeUnit::Second,
        ArrowUnit::Millisecond => TimeUnit::Millisecond,
        ArrowUnit::Microsecond => TimeUnit::Microsecond,
        ArrowUnit::Nanosecond => TimeUnit::Nanosecond,
    }
}

impl TimeRule {
    /// Returns the rule of a type; `None` for a type that is not a date or a time.
    pub(crate) fn of_column(
        kind: &DataType,
        stored: Physical,
        calendar: LegacySparkCalendar,
    ) -> Option<Self> {
        let old_times = match (stored, kind) {
            (Physical::INT96, _) => calendar.has_old_int96,
            // Spark does not use the old calendar for times without a time zone.
            (_, DataType::Timestamp(_, Some(_))) => calendar.has_old_dates,
            _ => false,
        };
        let earliest = if old_times { FIRST_COMMON_MICROSECOND } else { i64::MIN };
        match kind {
            DataType::Date32 if calendar.has_old_dates => {
                Some(Self { unit: None, earliest: FIRST_GREGORIAN_DAY, midnights: false })
            }
            DataType::Date32 | DataType::Date64 => {
                Some(Self { unit: None, earliest: i64::MIN, midnights: false })
            }
            DataType::Timestamp(unit, _)
            | DataType::Time32(unit)
            | DataType::Time64(unit)
            | DataType::Duration(unit) => {
                Some(Self { unit: Some(time_unit(*unit)), earliest, midnights: false })
            }
            _ => None,
        }
    }

    /// Returns the rule for a column of microseconds: dates become their midnights.
    pub(crate) fn into_microseconds(self) -> Self {
        Self { midnights: self.unit.is_none(), ..self }
    }

    /// Returns whether every stored number is the number in batches.
    pub(crate) fn needs_no_time_conversion(self) -> bool {
        !self.midnights
            && self.earliest == i64::MIN
            && matches!(self.unit, None | Some(TimeUnit::Microsecond))
    }

    /// Returns the number in batches.
    ///
    /// # Errors
    /// The reason why there is none.
    pub(crate) fn convert(self, stored: i64) -> Result<i64, String> {
        let Some(value) = self.unit.map_or(Some(stored), |unit| unit.to_microseconds(stored))
        else {
            let unit = self.unit.map_or("days", TimeUnit::plural_name);
            return Err(format!("{stored} {unit} are more microseconds than an int64 can hold"));
        };
        let value = self.check_calendar_independent(value)?;
        if !self.midnights {
            return Ok(value);
        }
        let midnight = value.checked_mul(MICROSECONDS_PER_DAY);
        midnight.ok_or_else(|| format!("{value} days are more microseconds than an int64 can hold"))
    }

    /// Checks that a number in batches does not depend on the calendar of the file's writer.
    ///
    /// # Errors
    /// It does.
    pub(crate) fn check_calendar_independent(self, value: i64) -> Result<i64, String> {
        if value >= self.earliest {
            return Ok(value);
        }
        let (unit, first) = match self.unit {
            None => ("days", "1582-10-15"),
            Some(_) => ("microseconds", "1900-01-01"),
        };
        Err(format!(
            "{value} {unit} are before {first}, where Spark's calendar before version 3 \
             (spark.sql.parquet.datetimeRebaseModeInWrite=LEGACY) has other dates: write the \
             file again with CORRECTED"
        ))
    }
}

/// Columns of a file that Spark wrote in its calendar before version 3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LegacySparkCalendar {
    has_old_dates: bool,
    has_old_int96: bool,
}

impl LegacySparkCalendar {
    /// Reads the entries that Spark writes to footers.
    pub(crate) fn from_footer(file: &FileMetaData) -> Self {
        let entries = file.key_value_metadata().map_or(&[][..], Vec::as_slice);
        let find = |key: &str| entries.iter().find(|entry| entry.key == key);
        let Some(version) =
            find("org.apache.spark.version").and_then(|entry| entry.value.as_deref())
        else {
            return Self::default();
        };
        let mut numbers = version.split('.').map(|part| part.parse::<u32>().unwrap_or_default());
        let version = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
        Self {
            has_old_dates: version < (3, 0) || find("org.apache.spark.legacyDateTime").is_some(),
            has_old_int96: version < (3, 1) || find("org.apache.spark.legacyINT96").is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_old_dates_and_long_times_are_refused() {
        let old = LegacySparkCalendar { has_old_dates: true, has_old_int96: false };
        let dates = TimeRule::of_column(&DataType::Date32, Physical::INT32, old).unwrap();
        assert_eq!(dates.convert(FIRST_GREGORIAN_DAY), Ok(FIRST_GREGORIAN_DAY));
        assert!(dates.convert(FIRST_GREGORIAN_DAY - 1).unwrap_err().contains("1582-10-15"));
        let local = DataType::Timestamp(ArrowUnit::Millisecond, None);
        let local = TimeRule::of_column(&local, Physical::INT64, old).unwrap();
        assert_eq!(local.convert(-1 << 50), Ok((-1 << 50) * 1000));
        assert!(local.convert(i64::MIN).unwrap_err().contains("milliseconds"));
        assert!(!local.needs_no_time_conversion());
        let micros = DataType::Timestamp(ArrowUnit::Microsecond, Some("UTC".into()));
        let micros = TimeRule::of_column(&micros, Physical::INT64, LegacySparkCalendar::default());
        assert!(micros.unwrap().needs_no_time_conversion());
        assert_eq!(TimeRule::of_column(&DataType::Int64, Physical::INT64, old), None);
        let midnights = dates.into_microseconds();
        assert_eq!(midnights.convert(-2), Ok(-172_800_000_000));
        assert!(midnights.convert(1 << 40).unwrap_err().contains("days are more microseconds"));
        assert!(midnights.convert(FIRST_GREGORIAN_DAY - 1).unwrap_err().contains("1582-10-15"));
        assert!(
            !midnights.needs_no_time_conversion()
                && micros.unwrap().into_microseconds().needs_no_time_conversion()
        );
    }
}
