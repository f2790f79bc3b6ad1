// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The curves of runs, as many points as a chart has room for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

use crate::catalog::FoundRun;
use crate::downsampling::{downsample_curve, smooth_values};
use crate::error::{Error, Result};
use crate::series::{self, MAX_SERIES_BYTES, RunSeries};
use crate::source::{FileStamp, HISTORY_FILE, STEPS_FILE};

/// Most numbers in the cache, 8 bytes each.
const MAX_CACHED_NUMBERS: usize = 64 << 20;
/// Pixels of the widest chart.
const MAX_CHART_PIXELS: usize = 8192;

/// The request of a chart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ChartWindow {
    /// Whether the axis is seconds and not epochs.
    pub(crate) by_seconds: bool,
    pub(crate) from: f64,
    pub(crate) to: f64,
    pub(crate) pixels: usize,
    /// From 0, no smoothing, up to 1.
    pub(crate) weight: f64,
}

impl ChartWindow {
    /// Reads it from a request's parameters.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    pub(crate) fn from_parameters(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let number = |name: &'static str, default: f64| match get(name) {
            None => Ok(default),
            Some(value) => match value.parse::<f64>() {
                Ok(number) if number.is_finite() => Ok(number),
                _ => Err(Error::Parameter { name, value }),
            },
        };
        let pixels = get("pixels").unwrap_or_else(|| "1000".to_owned());
        let Ok(wide) = pixels.parse::<usize>() else {
            return Err(Error::Parameter { name: "pixels", value: pixels });
        };
        Ok(Self {
            by_seconds: get("x").as_deref() == Some("seconds"),
            from: number("from", f64::MIN)?,
            to: number("to", f64::MAX)?,
            pixels: wide.clamp(1, MAX_CHART_PIXELS),
            // At 1, old values would never fade.
            weight: number("smooth", 0.0)?.clamp(0.0, 0.9999),
        })
    }
}

/// The curves of one run.
#[derive(Debug, Serialize)]
pub(crate) struct RunCurves {
    run: String,
    name: String,
    curves: Vec<MetricCurve>,
}

#[derive(Debug, Serialize)]
struct MetricCurve {
    /// Such as `val_loss`.
    name: String,
    /// The kind of the points: `epoch` or `step`.
    of: &'static str,
    /// Points that the run has.
    points: usize,
    x: Vec<f64>,
    y: Vec<Option<f64>>,
}

/// A cache of the numbers of runs, valid while the files do not change.
#[derive(Debug, Default)]
pub(crate) struct SeriesCache(Mutex<HashMap<SeriesFileKey, (FileStamp, Arc<RunSeries>)>>);

/// URL of the directory of a run, and a file in it.
type SeriesFileKey = (String, &'static str);

impl SeriesCache {
    /// Returns the numbers of one file of a run; empty where it has no such file.
    ///
    /// # Errors
    /// A store that cannot be asked; [`Error::Damaged`].
    pub(crate) fn load_series(
        &self,
        found: &FoundRun,
        file: &'static str,
    ) -> Result<Arc<RunSeries>> {
        // A run may lack a file, such as the one of its steps.
        let Some(&stamp) = found.files.get(file) else { return Ok(Arc::default()) };
        let key = (found.directory.url(), file);
        if let Some((known, series)) =
            self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key)
            && *known == stamp
        {
            return Ok(Arc::clone(series));
        }
        let damaged = |reason| Error::Damaged { file: format!("{}/{file}", key.0), reason };
        // By the size in the listing, before the file is in memory.
        if stamp.0 > MAX_SERIES_BYTES {
            return Err(damaged(format!("it has more than {} MiB", MAX_SERIES_BYTES >> 20)));
        }
        // Without the lock, because a large file takes seconds.
        let text = found.directory.read(file)?;
        let parse = if file == STEPS_FILE { series::parse_steps } else { series::parse_history };
        let series = Arc::new(parse(&text).map_err(|error| damaged(error.to_string()))?);
        let mut shelf = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let held: usize = shelf.values().map(|(_, series)| series.number_count()).sum();
        if held + series.number_count() > MAX_CACHED_NUMBERS {
            shelf.clear();
        }
        shelf.insert(key, (stamp, Arc::clone(&series)));
        Ok(series)
    }

    /// Returns the curves of a run in a window.
    ///
    /// # Errors
    /// A store that cannot be asked; [`Error::Damaged`].
    pub(crate) fn run_curves(&self, found: &FoundRun, window: ChartWindow) -> Result<RunCurves> {
        let mut curves = Vec::new();
        for (file, of) in [(HISTORY_FILE, "epoch"), (STEPS_FILE, "step")] {
            let series = self.load_series(found, file)?;
            let x = if window.by_seconds { &series.seconds } else { &series.epoch };
            for (name, column) in &series.columns {
                let (x, y) = column.curve_with_gap_marks(x);
                let smoothed = (window.weight > 0.0).then(|| smooth_values(&y, window.weight));
                let y = smoothed.as_deref().unwrap_or(&y);
                let curve = downsample_curve(&x, y, window.from, window.to, window.pixels);
                curves.push(MetricCurve {
                    name: name.clone(),
                    of,
                    points: x.len(),
                    x: curve.x,
                    y: curve.y,
                });
            }
        }
        Ok(RunCurves { run: found.summary.run.clone(), name: found.summary.name.clone(), curves })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(pairs: &[(&str, &str)]) -> Result<ChartWindow> {
        ChartWindow::from_parameters(|name| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn a_window_has_defaults_and_bounds() {
        let plain = window(&[]).unwrap();
        assert_eq!((plain.by_seconds, plain.pixels, plain.weight), (false, 1000, 0.0));
        let given =
            window(&[("x", "seconds"), ("pixels", "99999999"), ("smooth", "7"), ("from", "-1")])
                .unwrap();
        assert_eq!((given.by_seconds, given.pixels, given.from), (true, MAX_CHART_PIXELS, -1.0));
        assert!(given.weight < 1.0);
        for wrong in [("pixels", "-1"), ("from", "NaN"), ("to", "x"), ("smooth", "")] {
            assert!(matches!(window(&[wrong]), Err(Error::Parameter { .. })), "{wrong:?}");
        }
    }
}
