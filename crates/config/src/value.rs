// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The types of values and their text forms.

use std::time::Duration;

/// A value that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} must be {expected}: {value}")]
pub struct KnobError {
    /// The variable or option.
    pub name: String,
    /// The accepted values.
    pub expected: &'static str,
    /// The given value.
    pub value: String,
}

/// An inclusive range of TCP ports; `0-0` lets the system choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    /// First port to try.
    pub first: u16,
    /// Last port to try.
    pub last: u16,
}

/// Time for which a host is not used after a failure: the first time, and the maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCooldownRange {
    /// After the first failure; each further one doubles it.
    pub least: Duration,
    /// The longest.
    pub most: Duration,
}

/// The owner of the gradients of collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientConvention {
    /// Gradients of the sum of all ranks' losses.
    Farandole,
    /// Gradients as in Horovod 0.28.
    Horovod,
}

/// Severity of an event. A less severe level is smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LogLevel {
    /// Every single operation.
    Trace,
    /// Details of the process's work, to find errors.
    Debug,
    /// Rare events that are no problem.
    Info,
    /// Possible problems that are no failures.
    Warning,
    /// A failure.
    Error,
    /// A failure that ends the process. The engine has no such events: it raises errors, and the
    /// script decides.
    Fatal,
}

impl LogLevel {
    /// All of them, ascending.
    pub const ALL_LEVELS: [Self; 6] =
        [Self::Trace, Self::Debug, Self::Info, Self::Warning, Self::Error, Self::Fatal];

    /// Returns the level as log lines show it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Trace => "TRACE",
            Self::Debug => "DEBUG",
            Self::Info => "INFO",
            Self::Warning => "WARNING",
            Self::Error => "ERROR",
            Self::Fatal => "FATAL",
        }
    }
}

/// The value of a knob of any type, for other languages.
#[derive(Clone, Debug, PartialEq)]
pub enum AnyKnobValue {
    /// No value was given, and the knob has no default.
    Unset,
    /// A boolean.
    Boolean(bool),
    /// A number, or a number of bytes.
    Integer(u64),
    /// A duration, in seconds.
    Seconds(f64),
    /// Text, and values that have their own form of text.
    Text(String),
}

/// A type that a knob can have.
pub trait KnobValue: Sized {
    /// The accepted values, for messages and the reference page.
    const EXPECTED_FORMAT: &'static str;
    /// Reads one value; `None` when the text is none.
    fn parse_text(text: &str) -> Option<Self>;
    /// Returns the value, if it is a duration: these have limits.
    fn as_duration(&self) -> Option<Duration> {
        None
    }
    /// Returns the value as one of any type.
    fn into_any_knob_value(self) -> AnyKnobValue;
}

impl KnobValue for bool {
    const EXPECTED_FORMAT: &'static str = "a boolean (1, 0, true, false, yes, no, on, off)";
    fn parse_text(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" | "on" => Some(true),
            "0" | "false" | "no" | "off" => Some(false),
            // Horovod reads any integer above zero as true.
            other => other.parse::<i64>().ok().map(|number| number > 0),
        }
    }
    fn into_any_knob_value(self) -> AnyKnobValue {
        AnyKnobValue::Boolean(self)
    }
}

impl KnobValue for Option<bool> {
    const EXPECTED_FORMAT: &'static str =
        "a boolean (1, 0, true, false, yes, no, on, off), or nothing";
    fn parse_text(text: &str) -> Option<Self> {
        if text.is_empty() { Some(None) } else { bool::parse_text(text).map(Some) }
    }
    fn into_any_knob_value(self) -> AnyKnobValue {
        self.map_or(AnyKnobValue::Unset, AnyKnobValue::Boolean)
    }
}

impl KnobValue for u64 {
    const EXPECTED_FORMAT: &'static str = "a whole number, optionally with KiB, MiB or GiB";
    fn parse_text(text: &str) -> Option<Self> {
        let (digits, unit) = match text.find(|c: char| !c.is_ascii_digit()) {
            Some(at) => text.split_at(at),
            None => (text, ""),
        };
        let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" => 1,
            "kib" | "k" => 1 << 10,
            "mib" | "m" => 1 << 20,
            "gib" | "g" => 1 << 30,
            _ => return None,
        };
        // None for too large a number, which is an error and no silent wrap.
        digits.parse::<u64>().ok()?.checked_mul(factor)
    }
    fn into_any_knob_value(self) -> AnyKnobValue {
        AnyKnobValue::Integer(self)
    }
}

impl KnobValue for Option<u32> {
    const EXPECTED_FORMAT: &'static str = "a whole number, or nothing";
    fn parse_text(text: &str) -> Option<Self> {
        if text.is_empty() { Some(None) } else { text.parse().ok().map(Some) }
    }
    fn into_any_knob_value(self) -> AnyKnobValue {
        self.map_or(AnyKnobValue::Unset, |number| AnyKnobValue::Integer(number.into()))
    }
}

impl KnobValue for HostCooldownRange {
    const EXPECTED_FORMAT: &'static str =
        "two whole numbers of seconds from 1 to 3600, such as 5 300, the smaller one first";
    fn parse_text(text: &str) -> Option<Self> {
        let (least, most) = text.split_once([' ', '-', ','])?;
        let (least, most): (u64, u64) = (least.trim().parse().ok()?, most.trim().parse().ok()?);
        let holds = (1..=most).contains(&least) && most <= 3600;
        holds.then(|| Self { least: Duration::from_secs(least), most: Duration::from_secs(most) })
    }
    fn into_any_knob_value(self) -> AnyKnobValue {
        AnyKnobValue::Text(format!("{} {}", self.least.as_secs(), self.most.as_secs()))
    }
}

impl KnobValue for Duration {
    const EXPECTED_FORMAT: &'static str = "a duration: seconds, or a number with ms, s, m or h";
    fn parse_text(text: &str) -> Option<Self> {
        let (digits, unit) = match text.find(|c: char| !c.is_ascii_digit() && c != '.') {
            Some(at) => text.split_at(at),
            None => (text, "s"),
        };
        let factor = match unit.trim() {
            "ms" => 0.001,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        Duration::try_from_secs_f64(digits.parse::<f64>().ok()? * factor).ok()
    }
    fn as_duration(&self) -> Option<Duration> {
        Some(*self)
    }
    fn into_any_knob_value(self) -> AnyKnobValue {
        AnyKnobValue::Seconds(self.as_secs_f64())
    }
}

impl KnobValue for Option<Duration> {
    const EXPECTED_FORMAT: &'static str = Duration::EXPECTED_FORMAT;
    fn parse_text(text: &str) -> Option<Self> {
        if text.is_empty() { Some(None) } else { Duration::parse_text(text).map(Some) }
    }
    fn as_duration(&self) -> Option<Duration> {
        *self
    }
    fn into_any_knob_value(self) -> AnyKnobValue {
        self.map_or(AnyKnobValue::Unset, KnobValue::into_any_knob_value)
    }
}

impl KnobValue for String {
    const EXPECTED_FORMAT: &'static str = "text";
    fn parse_text(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }
    fn into_any_knob_value(self) -> AnyKnobValue {
        AnyKnobValue::Text(self)
    }
}

impl KnobValue for GradientConvention {
    const EXPECTED_FORMAT: &'static str = "farandole or horovod";
    fn parse_text(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "farandole" => Some(Self::Farandole),
            "horovod" => Some(Self::Horovod),
            _ => None,
        }
    }
    fn into_any_knob_value(self) -> AnyKnobValue {
        let text = match self {
            Self::Farandole => "farandole",
            Self::Horovod => "horovod",
        };
        AnyKnobValue::Text(text.to_owned())
    }
}

impl KnobValue for LogLevel {
    const EXPECTED_FORMAT: &'static str = "trace, debug, info, warning, error or fatal";
    fn parse_text(text: &str) -> Option<Self> {
        Self::ALL_LEVELS.into_iter().find(|level| level.as_str().eq_ignore_ascii_case(text))
    }
    fn into_any_knob_value(self) -> AnyKnobValue {
        AnyKnobValue::Text(self.as_str().to_ascii_lowercase())
    }
}

impl KnobValue for PortRange {
    const EXPECTED_FORMAT: &'static str = "a port or a range of ports such as 40000-40100";
    fn parse_text(text: &str) -> Option<Self> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let range = Self { first: first.trim().parse().ok()?, last: last.trim().parse().ok()? };
        // Port 0 lets the system choose, so a range that begins with it would mean two things.
        (range.first <= range.last && (range.first != 0 || range.last == 0)).then_some(range)
    }
    fn into_any_knob_value(self) -> AnyKnobValue {
        AnyKnobValue::Text(format!("{}-{}", self.first, self.last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn booleans_take_words_and_horovods_integers() {
        assert_eq!(bool::parse_text("TRUE"), Some(true));
        assert_eq!(bool::parse_text("2"), Some(true));
        assert_eq!(bool::parse_text("-1"), Some(false));
        assert_eq!(bool::parse_text("maybe"), None);
    }

    #[test]
    fn sizes_and_durations_carry_units() {
        assert_eq!(u64::parse_text("128MiB"), Some(128 << 20));
        assert_eq!(Duration::parse_text("250ms"), Some(Duration::from_millis(250)));
        assert_eq!(Duration::parse_text("2m"), Some(Duration::from_secs(120)));
        assert_eq!(Duration::parse_text("-1"), None);
    }

    #[test]
    fn a_cooldown_has_horovods_limits() {
        let seconds = |least, most| HostCooldownRange {
            least: Duration::from_secs(least),
            most: Duration::from_secs(most),
        };
        assert_eq!(HostCooldownRange::parse_text("1 3600"), Some(seconds(1, 3600)));
        assert_eq!(HostCooldownRange::parse_text("7-7"), Some(seconds(7, 7)));
        for wrong in ["0 5", "5 3601", "9 5", "5", "a b", ""] {
            assert_eq!(HostCooldownRange::parse_text(wrong), None, "{wrong}");
        }
        assert_eq!(
            (Option::<u32>::parse_text(""), Option::<u32>::parse_text("0")),
            (Some(None), Some(Some(0)))
        );
        assert_eq!(Option::<u32>::parse_text("-1"), None);
    }

    #[test]
    fn a_log_level_may_be_written_in_any_case() {
        assert_eq!(LogLevel::parse_text("Warning"), Some(LogLevel::Warning));
        assert_eq!(LogLevel::parse_text("TRACE"), Some(LogLevel::Trace));
        assert_eq!(LogLevel::parse_text("loud"), None);
        assert!(LogLevel::ALL_LEVELS.is_sorted());
    }

    #[test]
    fn a_port_range_may_not_run_backwards() {
        assert_eq!(PortRange::parse_text("7-5"), None);
        assert_eq!(PortRange::parse_text("0"), Some(PortRange { first: 0, last: 0 }));
        assert_eq!(PortRange::parse_text("5-7"), Some(PortRange { first: 5, last: 7 }));
    }
}
