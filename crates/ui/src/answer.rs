// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The answer of each address.
//!
//! ```text
//! TOKEN/                       the page
//! TOKEN/viewer.js, viewer.css  its script and style
//! TOKEN/api/runs               the list of runs
//! TOKEN/api/run?run=0/a        one run: its record, fingerprint and files
//! TOKEN/api/curves?run=..&run=..&x=epoch|seconds&pixels=..&from=..&to=..&smooth=..
//! TOKEN/api/history.csv?run=..&run=..
//! TOKEN/api/output?run=..&file=..   the end of a text that the run left
//! TOKEN/api/timeline?run=..    the merged timeline that the run left
//! TOKEN/metrics                the runs as metrics, for Prometheus
//! ```

use bytes::Bytes;
use farandole_telemetry::EXPOSITION_CONTENT_TYPE;
use hyper::http::StatusCode;
use serde_json::{Value, json};
use subtle::ConstantTimeEq as _;

use crate::catalog::{FoundRun, RunCatalog};
use crate::csv_table;
use crate::curves::{ChartWindow, SeriesCache};
use crate::error::{Error, Result};
use crate::explain::explain_record;
use crate::record;
use crate::reply::ViewerReply;
use crate::run_metrics::format_run_metrics;
use crate::source::HISTORY_FILE;

/// The page. It loads `viewer.js` and `viewer.css`.
const PAGE_HTML: &str = include_str!("../page/index.html");
/// Runs in one answer.
const MAX_RUNS_PER_ANSWER: usize = 64;
/// Bytes of a text that are shown: its end.
const OUTPUT_TAIL_BYTES: u64 = 256 << 10;
/// The file with the timeline of all ranks.
const TIMELINE_FILE: &str = "timeline.json";
/// Bytes of a timeline that a browser gets; larger ones are opened from the store.
const MAX_TIMELINE_BYTES: u64 = 512 << 20;
/// Names, or ends of names, of files with the output of a process.
const TEXT_FILE_ENDINGS: [&str; 4] = ["stdout", "stderr", ".log", ".txt"];

/// The content of the server.
#[derive(Debug)]
pub(crate) struct ViewerSite {
    pub(crate) token: String,
    pub(crate) script: Bytes,
    pub(crate) style: Bytes,
    pub(crate) catalog: RunCatalog,
    pub(crate) series_cache: SeriesCache,
}

impl ViewerSite {
    /// Returns the answer to a request for `path` with the parameters `query`.
    pub(crate) fn answer_request(&self, path: &str, query: &str) -> ViewerReply {
        let Some(place) = self.path_after_token(path) else {
            return ViewerReply::failure_reply(
                StatusCode::NOT_FOUND,
                "not found; the link of the viewer has a token",
            );
        };
        let answered = match place {
            // Relative, because a proxy may have removed a prefix of the path.
            None => Ok(ViewerReply::redirect(format!("{}/", self.token))),
            Some("") => Ok(ViewerReply::new("text/html; charset=utf-8", PAGE_HTML)),
            Some("viewer.js") => {
                Ok(ViewerReply::new("text/javascript; charset=utf-8", self.script.clone()))
            }
            Some("viewer.css") => {
                Ok(ViewerReply::new("text/css; charset=utf-8", self.style.clone()))
            }
            Some("api/runs") => Ok(ViewerReply::json(&self.catalog.list_runs())),
            Some("api/run") => self.answer_run(query),
            Some("api/curves") => self.answer_curves(query),
            Some("api/history.csv") => self.answer_csv(query),
            Some("api/output") => self.answer_output(query),
            Some("api/timeline") => self.answer_timeline(query),
            Some("metrics") => format_run_metrics(&self.catalog)
                .map(|text| ViewerReply::new(EXPOSITION_CONTENT_TYPE, text)),
            Some(other) => Err(Error::Missing { what: other.to_owned() }),
        };
        answered.unwrap_or_else(|error| {
            let status = match &error {
                Error::Missing { .. } => StatusCode::NOT_FOUND,
                Error::Parameter { .. } => StatusCode::BAD_REQUEST,
                // The viewer works; the store behind it does not.
                _ => StatusCode::BAD_GATEWAY,
            };
            ViewerReply::failure_reply(status, &error.to_string())
        })
    }

    /// Returns the part of the path after the token: `None` without the token, `Some(None)` for a
    /// path that ends with it.
    ///
    /// Some proxies keep their prefix in the path, so the token may come after other parts.
    pub(crate) fn path_after_token<'a>(&self, path: &'a str) -> Option<Option<&'a str>> {
        let mut rest = path.strip_prefix('/')?;
        loop {
            let (part, behind) = match rest.split_once('/') {
                Some((part, behind)) => (part, Some(behind)),
                None => (rest, None),
            };
            // In constant time, so that the time of an answer does not show how much of a token is
            // right.
            if bool::from(part.as_bytes().ct_eq(self.token.as_bytes())) {
                return Some(behind);
            }
            rest = behind?;
        }
    }

    fn answer_run(&self, query: &str) -> Result<ViewerReply> {
        let found = self.find_run(query)?;
        let files: Vec<Value> = found
            .files
            .iter()
            .map(|(path, (bytes, _))| json!({"path": path, "bytes": bytes, "text": is_text_file(path)}))
            .collect();
        // The reason in the summary names a damaged record.
        let record = record::read_record(&found.directory, &found.files).unwrap_or_default();
        Ok(ViewerReply::json(&json!({
            "summary": found.summary,
            "url": found.directory.url(),
            "explanation": explain_record(&record, &found.files),
            "record": record,
            "fingerprint": record::read_run_arguments(&found.directory, &found.files),
            "files": files,
        })))
    }

    fn answer_curves(&self, query: &str) -> Result<ViewerReply> {
        let window = ChartWindow::from_parameters(|name| query_parameter(query, name))?;
        let runs = self.find_runs(query)?;
        let curves = runs
            .iter()
            .map(|found| self.series_cache.run_curves(found, window))
            .collect::<Result<Vec<_>>>()?;
        Ok(ViewerReply::json(&json!({ "runs": curves })))
    }

    fn answer_csv(&self, query: &str) -> Result<ViewerReply> {
        let runs = self.find_runs(query)?;
        let series = |found: &FoundRun| {
            Ok((found.summary.name.clone(), self.series_cache.load_series(found, HISTORY_FILE)?))
        };
        let table = csv_table::format_csv(&runs.iter().map(series).collect::<Result<Vec<_>>>()?)?;
        Ok(ViewerReply::file("text/csv; charset=utf-8", "history.csv", table))
    }

    fn answer_output(&self, query: &str) -> Result<ViewerReply> {
        let found = self.find_run(query)?;
        let file = query_parameter(query, "file").unwrap_or_default();
        // Only files that a listing has found (`UI-2`): a parameter with `..` finds nothing.
        let known = found.files.get(&file).filter(|_| is_text_file(&file));
        let Some(&(bytes, _)) = known else { return Err(Error::Missing { what: file }) };
        // Services refuse a range without bytes.
        if bytes == 0 {
            return Ok(ViewerReply::text(""));
        }
        let tail = bytes.saturating_sub(OUTPUT_TAIL_BYTES)..bytes;
        let end = found.directory.read_ranges(&file, std::slice::from_ref(&tail))?;
        Ok(ViewerReply::text(end.into_iter().next().unwrap_or_default()))
    }

    fn answer_timeline(&self, query: &str) -> Result<ViewerReply> {
        let found = self.find_run(query)?;
        let known = found
            .files
            .get(TIMELINE_FILE)
            .filter(|(bytes, _)| (1..=MAX_TIMELINE_BYTES).contains(bytes));
        let Some(&(bytes, _)) = known else {
            return Err(Error::Missing { what: TIMELINE_FILE.to_owned() });
        };
        let read = found.directory.read_ranges(TIMELINE_FILE, std::slice::from_ref(&(0..bytes)))?;
        Ok(ViewerReply::file(
            "application/json",
            TIMELINE_FILE,
            read.into_iter().next().unwrap_or_default(),
        ))
    }

    fn find_run(&self, query: &str) -> Result<FoundRun> {
        self.catalog.find_run(&query_parameter(query, "run").unwrap_or_default())
    }

    fn find_runs(&self, query: &str) -> Result<Vec<FoundRun>> {
        let names = form_urlencoded::parse(query.as_bytes()).filter(|(key, _)| key == "run");
        names.take(MAX_RUNS_PER_ANSWER).map(|(_, run)| self.catalog.find_run(&run)).collect()
    }
}

fn query_parameter(query: &str, name: &str) -> Option<String> {
    form_urlencoded::parse(query.as_bytes())
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.into_owned())
}

fn is_text_file(path: &str) -> bool {
    TEXT_FILE_ENDINGS.iter().any(|end| path.ends_with(end))
}

#[cfg(test)]
mod tests;
