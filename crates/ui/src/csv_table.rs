// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Histories of runs as CSV.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::series::RunSeries;

/// Most fields of a table.
const MAX_FIELDS: usize = 64 << 20;

/// Returns a line an epoch: the run's name, the epoch, the seconds, and every number that one of
/// the runs has.
///
/// # Errors
/// [`Error::TooLarge`], because a row has a field for every name of every run.
pub(crate) fn format_csv(runs: &[(String, Arc<RunSeries>)]) -> Result<String> {
    // Sorted, so that the columns do not depend on the order of the runs.
    let names: BTreeSet<&str> =
        runs.iter().flat_map(|(_, series)| series.columns.keys().map(String::as_str)).collect();
    let rows: usize = runs.iter().map(|(_, series)| series.len()).sum();
    if rows.saturating_mul(names.len()) > MAX_FIELDS {
        return Err(Error::TooLarge {
            what: format!("a table of {rows} rows with {} names", names.len()),
        });
    }
    // The column that the history has as `seconds` is the time of one epoch.
    let mut table = String::from("run,epoch,time");
    for name in &names {
        table.push(',');
        table.push_str(&quote_csv_field(name));
    }
    // The line end of CSV (RFC 4180), which Excel expects.
    table.push_str("\r\n");
    for (run, series) in runs {
        let run = quote_csv_field(run);
        for row in 0..series.len() {
            table.push_str(&run);
            append_number(&mut table, series.epoch[row]);
            append_number(&mut table, series.seconds[row]);
            for name in &names {
                append_number(
                    &mut table,
                    series.columns.get(*name).map_or(f64::NAN, |column| column.value_at(row)),
                );
            }
            table.push_str("\r\n");
        }
    }
    Ok(table)
}

fn append_number(table: &mut String, value: f64) {
    table.push(',');
    // A spreadsheet takes `NaN` for text, and an empty field for a missing number.
    if value.is_finite() {
        table.push_str(&value.to_string());
    }
}

/// Returns a text as a field. One that a spreadsheet would take for a formula begins with an
/// apostrophe.
fn quote_csv_field(text: &str) -> String {
    // The characters of OWASP's page on CSV injection.
    let formula = text.starts_with(['=', '+', '-', '@', '\t', '\r']);
    let text = format!("{}{text}", if formula { "'" } else { "" });
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::parse_history;

    #[test]
    fn runs_stand_below_each_other_with_all_columns() {
        let first = parse_history(
            br#"{"epoch": 0, "train": {"loss": 0.5, "all_metrics": []}, "seconds": 2.0}"#,
        )
        .unwrap();
        let second =
            parse_history(br#"{"epoch": 0, "train": {"loss": NaN, "all_metrics": [{"a,b": 1}]}}"#)
                .unwrap();
        let table =
            format_csv(&[("x".to_owned(), Arc::new(first)), ("=y\"".to_owned(), Arc::new(second))])
                .unwrap();
        assert_eq!(
            table,
            "run,epoch,time,\"a,b\",loss,seconds\r\nx,1,2,,0.5,2\r\n\"'=y\"\"\",1,0,1,,\r\n"
        );
    }
}
