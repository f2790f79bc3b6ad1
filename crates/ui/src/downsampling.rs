// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Fewer points of a curve, so that it looks the same on a given number of pixels.

/// Points that one pixel may have: its first, its lowest, its highest and its last.
pub(crate) const MAX_POINTS_PER_PIXEL: usize = 4;

/// A part of a curve; `None` is a gap.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CurvePoints {
    pub(crate) x: Vec<f64>,
    pub(crate) y: Vec<Option<f64>>,
}

impl CurvePoints {
    fn push_point(&mut self, x: f64, y: f64) {
        self.x.push(x);
        self.y.push(y.is_finite().then_some(y));
    }
}

/// Returns the points between `from` and `to`, and one on each side, reduced to
/// [`MAX_POINTS_PER_PIXEL`] for each of `pixels`.
///
/// `x` must not fall. Values that are not finite are gaps.
pub(crate) fn downsample_curve(
    x: &[f64],
    y: &[f64],
    from: f64,
    to: f64,
    pixels: usize,
) -> CurvePoints {
    // With a point on each side, the line reaches the edges of the chart.
    let begin = x.partition_point(|&at| at < from).saturating_sub(1);
    let end = (x.partition_point(|&at| at <= to) + 1).min(x.len()).min(y.len());
    let mut curve = CurvePoints::default();
    let Some((x, y)) = x.get(begin..end).zip(y.get(begin..end)) else { return curve };
    if x.len() <= pixels.saturating_mul(MAX_POINTS_PER_PIXEL) {
        x.iter().zip(y).for_each(|(&x, &y)| curve.push_point(x, y));
        return curve;
    }
    let (Some(&first), Some(&last)) = (x.first(), x.last()) else { return curve };
    let width = (last - first) / f64::from(u32::try_from(pixels).unwrap_or(u32::MAX));
    let mut start = 0;
    let mut right = first;
    for number in 1..=pixels {
        right += width;
        let rest = x.len() - start;
        // The last pixel takes what rounding would leave over.
        let count =
            if number == pixels { rest } else { x[start..].partition_point(|&at| at < right) };
        append_pixel_points(&mut curve, &x[start..start + count], &y[start..start + count]);
        start += count;
    }
    curve
}

/// Adds the points that one pixel needs.
fn append_pixel_points(curve: &mut CurvePoints, x: &[f64], y: &[f64]) {
    if x.is_empty() {
        return;
    }
    let finite = || y.iter().enumerate().filter(|(_, value)| value.is_finite());
    let Some((first, _)) = finite().next() else {
        curve.push_point(x[0], f64::NAN);
        return;
    };
    let (mut low, mut high, mut last) = (first, first, first);
    for (index, &value) in finite() {
        if value < y[low] {
            low = index;
        }
        if value > y[high] {
            high = index;
        }
        last = index;
    }
    let mut chosen = [first, low, high, last];
    // In the order of `x`, because the line must not run backwards.
    chosen.sort_unstable();
    let mut before = None;
    for index in chosen {
        if before != Some(index) {
            curve.push_point(x[index], y[index]);
        }
        before = Some(index);
    }
}

/// Averages each value with the values before it, whose weights fall by `weight` a point; gaps
/// stay.
pub(crate) fn smooth_values(y: &[f64], weight: f64) -> Vec<f64> {
    let (mut sum, mut total) = (0.0, 0.0);
    y.iter()
        .map(|&value| {
            if !value.is_finite() {
                return value;
            }
            sum = sum * weight + value;
            total = total * weight + 1.0;
            // Divided by the sum of the weights, so that the first values are not drawn to 0.
            sum / total
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn ramp(count: u32) -> Vec<f64> {
        (0..count).map(f64::from).collect()
    }

    #[test]
    fn a_short_curve_is_left_as_it_is() {
        let curve = downsample_curve(&[0.0, 1.0, 2.0], &[1.0, f64::NAN, 3.0], 0.0, 2.0, 100);
        assert_eq!(curve.x, [0.0, 1.0, 2.0]);
        assert_eq!(curve.y, [Some(1.0), None, Some(3.0)]);
    }

    #[test]
    fn a_part_has_one_point_more_on_each_side() {
        let x = ramp(10);
        let curve = downsample_curve(&x, &x, 3.5, 5.5, 100);
        assert_eq!(curve.x, [3.0, 4.0, 5.0, 6.0]);
        assert_eq!(downsample_curve(&x, &x, 20.0, 30.0, 100).x, [9.0]);
        assert_eq!(downsample_curve(&[], &[], 0.0, 1.0, 100), CurvePoints::default());
    }

    #[test]
    fn a_peak_of_one_point_in_a_million_is_kept() {
        let x = ramp(1_000_000);
        let mut y: Vec<f64> = x.iter().map(|x| (x / 1000.0).sin()).collect();
        (y[123_457], y[700_001]) = (50.0, -50.0);
        // Other tests run on the same cores: the best of some tries counts.
        let one = |_| {
            let began = Instant::now();
            assert!(downsample_curve(&x, &smooth_values(&y, 0.0), 0.0, 1e6, 800).x.len() > 800);
            began.elapsed()
        };
        let took = (0..8).map(one).min().unwrap();
        let curve = downsample_curve(&x, &smooth_values(&y, 0.0), 0.0, 1e6, 800);
        assert!(curve.x.len() <= 800 * MAX_POINTS_PER_PIXEL, "{}", curve.x.len());
        assert!(curve.x.len() > 800);
        assert!(curve.y.contains(&Some(50.0)) && curve.y.contains(&Some(-50.0)));
        assert_eq!((curve.x[0], curve.x[curve.x.len() - 1]), (0.0, 999_999.0));
        assert!(curve.x.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(took < Duration::from_millis(100), "{took:?}");
    }

    #[test]
    fn a_long_gap_stays_a_gap() {
        let x = ramp(10_000);
        let y: Vec<f64> =
            x.iter().map(|&x| if (2000.0..8000.0).contains(&x) { f64::NAN } else { x }).collect();
        let curve = downsample_curve(&x, &y, 0.0, 1e4, 100);
        assert!(curve.y.iter().filter(|value| value.is_none()).count() > 50);
    }

    #[test]
    fn equal_positions_do_not_divide_by_zero() {
        let curve = downsample_curve(&[1.0; 1000], &ramp(1000), 0.0, 2.0, 10);
        assert!(curve.x.len() <= 40);
        assert_eq!(curve.y.last(), Some(&Some(999.0)));
    }

    #[test]
    fn smoothing_starts_at_the_first_value_and_skips_gaps() {
        assert_eq!(smooth_values(&[4.0, 0.0, f64::NAN, 1.0], 0.0)[..2], [4.0, 0.0]);
        let smoothed = smooth_values(&[4.0, 4.0, f64::NAN, 4.0], 0.9);
        assert!(
            (smoothed[0] - 4.0).abs() < 1e-12
                && smoothed[2].is_nan()
                && (smoothed[3] - 4.0).abs() < 1e-12
        );
    }
}
