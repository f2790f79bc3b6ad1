// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Requests to the services of AWS that give out temporary keys.

use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use object_store::ClientOptions;
use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::client::{HttpClient, HttpConnector, HttpRequest, HttpRequestBody};
use serde::Deserialize;

use super::aws_profiles::AssumedRole;
use super::{parse_expiry, read_credential_file};
use crate::http_deadlines::DeadlineConnector;

/// First pause before a request is repeated.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Longest such pause.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// A service that gives out temporary keys.
#[derive(Clone, Debug)]
pub(super) struct TokenService {
    pub(super) endpoint: String,
    pub(super) region: String,
    /// Longest time for repetitions of a request.
    pub(super) timeout: Duration,
}

impl TokenService {
    fn connect(&self) -> Result<HttpClient, String> {
        // An endpoint with http:// is the user's own choice.
        let options = ClientOptions::new().with_allow_http(self.endpoint.starts_with("http://"));
        let connector = DeadlineConnector::new(self.timeout, false);
        connector.connect(&options).map_err(|error| error.to_string())
    }

    /// Sends a request until the service serves it; returns the answer.
    async fn send(&self, make: impl Fn() -> Result<HttpRequest, String>) -> Result<Bytes, String> {
        let client = self.connect()?;
        let (started, mut pause) = (Instant::now(), FIRST_PAUSE);
        loop {
            let failure = match client.execute(make()?).await {
                Ok(answer) => {
                    let status = answer.status();
                    let body = answer.into_body().bytes().await.map_err(|error| error.to_string());
                    if status.is_success() {
                        return body;
                    }
                    let text = body.unwrap_or_default();
                    let code = find_xml_element(&String::from_utf8_lossy(&text), "Code");
                    let code = code.map(|code| format!(": {code}")).unwrap_or_default();
                    let failure = format!("{} answered {status}{code}", self.endpoint);
                    // A refusal is final: only a service that is busy or broken is asked again.
                    if !status.is_server_error() && status.as_u16() != 429 {
                        return Err(failure);
                    }
                    failure
                }
                Err(error) => format!("{}: {error}", self.endpoint),
            };
            if started.elapsed() + pause > self.timeout {
                return Err(failure);
            }
            tokio::time::sleep(pause).await;
            pause = MAX_PAUSE.min(pause * 2);
        }
    }

    async fn ask_for_role(
        &self,
        action: &str,
        role: &AssumedRole,
        more: &[(&str, &str)],
        base: Option<&AwsCredential>,
    ) -> Result<(AwsCredential, Option<SystemTime>), String> {
        let form = Bytes::from(role_request_body(action, role, more));
        // Signed for each attempt, because a signature is valid for a few minutes only.
        let make = || {
            let body = HttpRequestBody::from(form.clone());
            let mut request = new_request("POST", &self.endpoint, body)?;
            let kind = "application/x-www-form-urlencoded";
            add_header(&mut request, "content-type", kind)?;
            if let Some(base) = base {
                AwsAuthorizer::new(base, "sts", &self.region).authorize(&mut request, None);
            }
            Ok(request)
        };
        let answer = self.send(make).await?;
        let text = String::from_utf8_lossy(&answer);
        let element = |name: &str| {
            find_xml_element(&text, name)
                .ok_or_else(|| format!("the answer of {} has no {name}", self.endpoint))
        };
        let credential = AwsCredential {
            key_id: element("AccessKeyId")?,
            secret_key: element("SecretAccessKey")?,
            token: Some(element("SessionToken")?),
        };
        Ok((credential, Some(parse_expiry(&element("Expiration")?)?)))
    }

    /// Exchanges the token in a file, which is read each time, for keys.
    pub(super) async fn exchange_token(
        &self,
        token_file: &str,
        role: &AssumedRole,
    ) -> Result<(AwsCredential, Option<SystemTime>), String> {
        let token =
            read_credential_file(token_file).map_err(|error| format!("{token_file}: {error}"))?;
        let more = [("WebIdentityToken", token.trim())];
        self.ask_for_role("AssumeRoleWithWebIdentity", role, &more, None).await
    }

    /// Gets keys of a role by other keys.
    pub(super) async fn assume_role(
        &self,
        role: &AssumedRole,
        base: &AwsCredential,
    ) -> Result<(AwsCredential, Option<SystemTime>), String> {
        self.ask_for_role("AssumeRole", role, &[], Some(base)).await
    }

    /// Gets keys of a role by a token of single sign-on.
    pub(super) async fn exchange_sso_token(
        &self,
        token: &str,
        account: &str,
        role: &str,
    ) -> Result<(AwsCredential, Option<SystemTime>), String> {
        let query = form_urlencoded::Serializer::new(String::new())
            .append_pair("role_name", role)
            .append_pair("account_id", account)
            .finish();
        let url = format!("{}/federation/credentials?{query}", self.endpoint.trim_end_matches('/'));
        let make = || {
            let mut request = new_request("GET", &url, HttpRequestBody::empty())?;
            add_header(&mut request, "x-amz-sso_bearer_token", token)?;
            Ok(request)
        };
        let answer = self.send(make).await?;
        let damaged = |_| format!("the answer of {} cannot be read", self.endpoint);
        let keys: SsoAnswer = serde_json::from_slice(&answer).map_err(damaged)?;
        let keys = keys.role_credentials;
        let expires = SystemTime::UNIX_EPOCH + Duration::from_millis(keys.expiration);
        let credential = AwsCredential {
            key_id: keys.access_key_id,
            secret_key: keys.secret_access_key,
            token: Some(keys.session_token),
        };
        Ok((credential, Some(expires)))
    }
}

/// Returns the body of a request for a role.
fn role_request_body(action: &str, role: &AssumedRole, more: &[(&str, &str)]) -> String {
    let name = role.session_name.as_deref().unwrap_or("farandole");
    // STS has only this version, and requires the name of a session, also where the user gives
    // none.
    let given = [("Action", action), ("Version", "2011-06-15"), ("RoleArn", role.arn.as_str())];
    let optional = [
        role.external_id.as_deref().map(|value| ("ExternalId", value)),
        role.seconds.as_deref().map(|value| ("DurationSeconds", value)),
        Some(("RoleSessionName", name)),
    ];
    let pairs = given.into_iter().chain(optional.into_iter().flatten());
    form_urlencoded::Serializer::new(String::new())
        .extend_pairs(pairs.chain(more.iter().copied()))
        .finish()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SsoAnswer {
    role_credentials: SsoKeys,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SsoKeys {
    access_key_id: String,
    secret_access_key: String,
    session_token: String,
    /// Milliseconds since the epoch.
    expiration: u64,
}

fn new_request(method: &str, url: &str, body: HttpRequestBody) -> Result<HttpRequest, String> {
    let mut request = HttpRequest::new(body);
    *request.method_mut() = method.parse().map_err(|_| format!("no method: {method}"))?;
    *request.uri_mut() = url.parse().map_err(|_| format!("not a URL: {url}"))?;
    Ok(request)
}

fn add_header(request: &mut HttpRequest, name: &'static str, value: &str) -> Result<(), String> {
    let value = value.parse().map_err(|_| format!("the header {name} cannot have this value"))?;
    request.headers_mut().insert(name, value);
    Ok(())
}

/// Returns the text of an element of XML without attributes.
fn find_xml_element(text: &str, name: &str) -> Option<String> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    let (content, _) = rest.split_once(&format!("</{name}>"))?;
    Some(content.trim().to_owned())
}
