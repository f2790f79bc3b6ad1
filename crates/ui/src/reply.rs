// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! An answer, before it is HTTP.

use bytes::Bytes;
use http_body_util::Full;
use hyper::Response;
use hyper::header::{
    CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, HeaderValue,
    LOCATION, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use hyper::http::StatusCode;
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

/// The page's permissions in the browser: to run its own script, to ask this server, to draw, to
/// embed Perfetto.
pub(crate) const CONTENT_SECURITY_POLICY_VALUE: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src \
                                 'self' data: blob:; connect-src 'self'; frame-src \
                                 https://ui.perfetto.dev; base-uri 'none'; form-action 'none'; \
                                 frame-ancestors 'self'";

/// Status, content and what kind it is of.
#[derive(Clone, Debug)]
pub(crate) struct ViewerReply {
    pub(crate) status: StatusCode,
    kind: &'static str,
    body: Bytes,
    /// Name that the browser saves it by.
    save_as: Option<&'static str>,
    location: Option<String>,
}

impl ViewerReply {
    pub(crate) fn new(kind: &'static str, body: impl Into<Bytes>) -> Self {
        Self { status: StatusCode::OK, kind, body: body.into(), save_as: None, location: None }
    }

    pub(crate) fn json(value: &impl Serialize) -> Self {
        match serde_json::to_vec(value) {
            Ok(body) => Self::new("application/json", body),
            Err(error) => {
                Self::failure_reply(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string())
            }
        }
    }

    pub(crate) fn text(body: impl Into<Bytes>) -> Self {
        Self::new("text/plain; charset=utf-8", body)
    }

    pub(crate) fn file(kind: &'static str, name: &'static str, body: impl Into<Bytes>) -> Self {
        Self { save_as: Some(name), ..Self::new(kind, body) }
    }

    pub(crate) fn failure_reply(status: StatusCode, message: &str) -> Self {
        Self { status, ..Self::text(message.to_owned()) }
    }

    pub(crate) fn redirect(location: String) -> Self {
        // Not permanent: a browser would keep the redirect when the token is gone.
        Self { status: StatusCode::FOUND, location: Some(location), ..Self::text("") }
    }

    /// Converts the reply to HTTP; `seen` is the tag of the content that the browser has already.
    pub(crate) fn into_response(self, seen: Option<&str>) -> Response<Full<Bytes>> {
        let tag = format!("\"{:016x}\"", xxh3_64(&self.body));
        let known = self.status == StatusCode::OK && seen == Some(tag.as_str());
        let mut response = Response::new(Full::new(if known { Bytes::new() } else { self.body }));
        *response.status_mut() = if known { StatusCode::NOT_MODIFIED } else { self.status };
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(self.kind));
        headers.insert(
            CONTENT_SECURITY_POLICY,
            HeaderValue::from_static(CONTENT_SECURITY_POLICY_VALUE),
        );
        // Otherwise a browser may take the output of a rank for HTML and run its scripts.
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        // The address has the token, which no other site may get.
        headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Ok(tag) = HeaderValue::try_from(tag) {
            headers.insert(ETAG, tag);
        }
        if let Some(Ok(location)) = self.location.map(HeaderValue::try_from) {
            headers.insert(LOCATION, location);
        }
        if let Some(name) = self.save_as
            && let Ok(value) = HeaderValue::try_from(format!("attachment; filename=\"{name}\""))
        {
            headers.insert(CONTENT_DISPOSITION, value);
        }
        response
    }
}
