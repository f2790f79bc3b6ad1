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
//! ```

use bytes::Bytes;
use hyper::http::StatusCode;
use serde_json::{Value, json};
use subtle::ConstantTimeEq as _;

use crate::catalog::{Catalog, Found};
use crate::curves::{Shelf, Window};
use crate::error::{Error, Result};
use crate::explain::judge;
use crate::record;
use crate::reply::Reply;
use crate::source::HISTORY;
use crate::table;

/// The page. It loads `viewer.js` and `viewer.css`.
const PAGE: &str = include_str!("../page/index.html");
/// Runs in one answer.
const RUNS: usize = 64;
/// Bytes of a text that are shown: its end.
const TAIL: u64 = 256 << 10;
/// The file with the timeline of all ranks.
const TIMELINE: &str = "timeline.json";
/// Bytes of a timeline that a browser gets; larger ones are opened from the store.
const LARGEST: u64 = 512 << 20;
/// Names of files with what a process printed, or their ends.
const TEXTS: [&str; 4] = ["stdout", "stderr", ".log", ".txt"];

/// The content of the server.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) token: String,
    pub(crate) script: Bytes,
    pub(crate) style: Bytes,
    pub(crate) catalog: Catalog,
    pub(crate) shelf: Shelf,
}

impl Site {
    /// Returns the answer to a request for `path` with the parameters `query`.
    pub(crate) fn answer(&self, path: &str, query: &str) -> Reply {
        let Some(place) = self.place(path) else {
            return Reply::failure(
                StatusCode::NOT_FOUND,
                "not found; the link of the viewer has a token",
            );
        };
        let answered = match place {
            // Relative, because a proxy may have removed a prefix of the path.
            None => Ok(Reply::elsewhere(format!("{}/", self.token))),
            Some("") => Ok(Reply::new("text/html; charset=utf-8", PAGE)),
            Some("viewer.js") => {
                Ok(Reply::new("text/javascript; charset=utf-8", self.script.clone()))
            }
            Some("viewer.css") => Ok(Reply::new("text/css; charset=utf-8", self.style.clone())),
            Some("api/runs") => Ok(Reply::json(&self.catalog.list())),
            Some("api/run") => self.run(query),
            Some("api/curves") => self.curves(query),
            Some("api/history.csv") => self.csv(query),
            Some("api/output") => self.output(query),
            Some("api/timeline") => self.timeline(query),
            Some(other) => Err(Error::Missing { what: other.to_owned() }),
        };
        answered.unwrap_or_else(|error| {
            let status = match &error {
                Error::Missing { .. } => StatusCode::NOT_FOUND,
                Error::Parameter { .. } => StatusCode::BAD_REQUEST,
                _ => StatusCode::BAD_GATEWAY,
            };
            Reply::failure(status, &error.to_string())
        })
    }

    /// Returns the part of the path after the token: `None` without the token, `Some(None)` for a
    /// path that ends with it.
    ///
    /// Some proxies keep their prefix in the path, so the token may come after other parts.
    pub(crate) fn place<'a>(&self, path: &'a str) -> Option<Option<&'a str>> {
        let mut rest = path.strip_prefix('/')?;
        loop {
            let (part, behind) = match rest.split_once('/') {
                Some((part, behind)) => (part, Some(behind)),
                None => (rest, None),
            };
            if bool::from(part.as_bytes().ct_eq(self.token.as_bytes())) {
                return Some(behind);
            }
            rest = behind?;
        }
    }

    fn run(&self, query: &str) -> Result<Reply> {
        let found = self.one(query)?;
        let files: Vec<Value> = found
            .files
            .iter()
            .map(|(path, (bytes, _))| json!({"path": path, "bytes": bytes, "text": is_text(path)}))
            .collect();
        let record = record::read(&found.directory, &found.files);
        Ok(Reply::json(&json!({
            "summary": found.summary,
            "url": found.directory.url(),
            "explanation": judge(&record, &found.files),
            "record": record,
            "fingerprint": record::fingerprint(&found.directory, &found.files),
            "files": files,
        })))
    }

    fn curves(&self, query: &str) -> Result<Reply> {
        let window = Window::of(|name| parameter(query, name))?;
        let runs = self.several(query)?;
        let curves = runs
            .iter()
            .map(|found| self.shelf.curves(found, window))
            .collect::<Result<Vec<_>>>()?;
        Ok(Reply::json(&json!({ "runs": curves })))
    }

    fn csv(&self, query: &str) -> Result<Reply> {
        let runs = self.several(query)?;
        let series =
            |found: &Found| Ok((found.summary.name.clone(), self.shelf.series(found, HISTORY)?));
        let table = table::csv(&runs.iter().map(series).collect::<Result<Vec<_>>>()?);
        Ok(Reply::file("text/csv; charset=utf-8", "history.csv", table))
    }

    fn output(&self, query: &str) -> Result<Reply> {
        let found = self.one(query)?;
        let file = parameter(query, "file").unwrap_or_default();
        let known = found.files.get(&file).filter(|_| is_text(&file));
        let Some(&(bytes, _)) = known else { return Err(Error::Missing { what: file }) };
        if bytes == 0 {
            return Ok(Reply::text(""));
        }
        let tail = bytes.saturating_sub(TAIL)..bytes;
        let end = found.directory.read_ranges(&file, std::slice::from_ref(&tail))?;
        Ok(Reply::text(end.into_iter().next().unwrap_or_default()))
    }

    fn timeline(&self, query: &str) -> Result<Reply> {
        let found = self.one(query)?;
        let known = found.files.get(TIMELINE).filter(|(bytes, _)| (1..=LARGEST).contains(bytes));
        let Some(&(bytes, _)) = known else {
            return Err(Error::Missing { what: TIMELINE.to_owned() });
        };
        let read = found.directory.read_ranges(TIMELINE, std::slice::from_ref(&(0..bytes)))?;
        Ok(Reply::file("application/json", TIMELINE, read.into_iter().next().unwrap_or_default()))
    }

    fn one(&self, query: &str) -> Result<Found> {
        self.catalog.find(&parameter(query, "run").unwrap_or_default())
    }

    fn several(&self, query: &str) -> Result<Vec<Found>> {
        let names = form_urlencoded::parse(query.as_bytes()).filter(|(key, _)| key == "run");
        names.take(RUNS).map(|(_, run)| self.catalog.find(&run)).collect()
    }
}

fn parameter(query: &str, name: &str) -> Option<String> {
    form_urlencoded::parse(query.as_bytes())
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.into_owned())
}

fn is_text(path: &str) -> bool {
    TEXTS.iter().any(|end| path.ends_with(end))
}

#[cfg(test)]
mod tests;
