// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Sources of credentials for Amazon S3, in the order of the provider's own libraries.

use std::collections::BTreeMap;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use futures::future::BoxFuture;
use object_store::CredentialProvider;
use object_store::aws::{AmazonS3Builder, AwsCredential};
use serde::Deserialize;

use super::aws_profiles::{AssumedRole, ProfileCredentialMethod, ProfileFiles, read_sso_token};
use super::role_requests::TokenService;
use super::{
    CredentialError, CredentialSource, FUNCTION_OPTION, FetchedCredential, SourceEnvironment,
    find_credential_function, parse_expiry,
};
use crate::http_deadlines::DeadlineConnector;

/// Longest run of a `credential_process`.
const PROCESS_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval at which the end of such a process is noticed.
const PROCESS_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Largest output of such a process.
// A process that prints without end must not fill the memory.
const MAX_OUTPUT_BYTES: u64 = 64 << 10;

/// A source of keys.
enum AwsSource {
    Keys(AwsCredential),
    Process(String),
    WebIdentity {
        token_file: String,
        role: AssumedRole,
    },
    Role {
        base: Box<AwsSource>,
        role: AssumedRole,
    },
    SingleSignOn {
        token_file: String,
        account: String,
        role: String,
        portal: TokenService,
    },
    /// A provider of the backend, for machines and containers.
    Machine(Arc<dyn CredentialProvider<Credential = AwsCredential>>),
}

/// A source with its place.
struct AwsSourceWithOrigin {
    source: AwsSource,
    origin: String,
    is_fixed: bool,
    service: TokenService,
}

/// Finds the source of the keys of a bucket: the options, the environment's keys, its web
/// identity, the profile, or the identity of the container or machine. `options` have the
/// backend's names, in short form without `aws_`.
///
/// # Errors
/// Options, variables or profiles that are incomplete.
pub(crate) fn choose_aws_source(
    options: &BTreeMap<String, String>,
    environment: &SourceEnvironment,
    timeout: Duration,
) -> Result<Arc<dyn CredentialSource<AwsCredential>>, CredentialError> {
    let option = |name: &str| {
        let found = options.get(&format!("aws_{name}")).or_else(|| options.get(name));
        found.map(String::as_str)
    };
    if let Some(name) = options.get(FUNCTION_OPTION) {
        return Ok(Arc::new(find_credential_function(name)?));
    }
    let region = option("region").or_else(|| option("default_region"));
    let region = region.or_else(|| environment.get("AWS_REGION"));
    let region = region.or_else(|| environment.get("AWS_DEFAULT_REGION"));
    let region = region.map(str::to_owned);
    let region = region.or_else(|| super::profile_region(option("profile"), environment));
    // The default of the backend, which signs the other requests.
    let region = region.unwrap_or_else(|| "us-east-1".to_owned());
    let endpoint = option("endpoint_url_sts").or_else(|| environment.get("AWS_ENDPOINT_URL_STS"));
    let endpoint =
        endpoint.map_or_else(|| format!("https://sts.{region}.amazonaws.com"), str::to_owned);
    let service = TokenService { endpoint, region, timeout };
    let place = |source, origin: String, is_fixed| -> Arc<dyn CredentialSource<AwsCredential>> {
        Arc::new(AwsSourceWithOrigin { source, origin, is_fixed, service: service.clone() })
    };
    let token = option("session_token").or_else(|| option("token"));
    let given = (option("access_key_id"), option("secret_access_key"));
    if let Some(keys) = access_key_from_values(given, token, "the options key and secret")? {
        return Ok(place(AwsSource::Keys(keys), "the options key and secret".into(), true));
    }
    // As in boto3, a profile that the caller names comes before keys in the environment.
    if let Some(profile) = option("profile") {
        let (source, origin) = profile_source(profile, options, environment, &service)?
            .ok_or_else(|| missing_profile_error(profile, environment))?;
        return Ok(place(source, origin, false));
    }
    if let Some(keys) = environment_keys(environment)? {
        // Not fixed: a notebook may set other keys while this process runs.
        return Ok(place(AwsSource::Keys(keys), ENVIRONMENT_ORIGIN.into(), false));
    }
    let web = |name: &str, variable: &str| option(name).or_else(|| environment.get(variable));
    if let (Some(file), Some(arn)) = (
        web("web_identity_token_file", "AWS_WEB_IDENTITY_TOKEN_FILE"),
        web("role_arn", "AWS_ROLE_ARN"),
    ) {
        let session_name = web("role_session_name", "AWS_ROLE_SESSION_NAME").map(str::to_owned);
        let role =
            AssumedRole { arn: arn.to_owned(), session_name, external_id: None, seconds: None };
        let source = AwsSource::WebIdentity { token_file: file.to_owned(), role };
        return Ok(place(source, format!("the web identity token in {file}"), false));
    }
    let named = environment.get("AWS_PROFILE");
    let found = profile_source(named.unwrap_or("default"), options, environment, &service)?;
    match (found, named) {
        (Some((source, origin)), _) => Ok(place(source, origin, false)),
        // The identity of the machine would silently be another one than the named profile.
        (None, Some(profile)) => Err(missing_profile_error(profile, environment)),
        (None, None) => {
            let provider = machine_identity_provider(options, environment, timeout)?;
            Ok(place(AwsSource::Machine(provider), MACHINE_ORIGIN.into(), false))
        }
    }
}

/// Names of the variables that contain keys, in lower case.
const KEY_VARIABLES: &[&str] = &[
    "aws_access_key_id",
    "aws_secret_access_key",
    "aws_session_token",
    "aws_web_identity_token_file",
];
const ENVIRONMENT_ORIGIN: &str =
    "the environment variables AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN";
const MACHINE_ORIGIN: &str = "the identity of the container or machine (there are no options, \
                              variables or profiles with credentials)";

fn missing_profile_error(profile: &str, environment: &SourceEnvironment) -> CredentialError {
    let reason = match ProfileFiles::read(environment) {
        Ok(files) if files.contains(profile) => "it has no credentials".to_owned(),
        Ok(_) => "it does not exist".to_owned(),
        Err(error) => return error,
    };
    let files = ProfileFiles::read(environment);
    let origin = files.map_or_else(|_| format!("the profile {profile:?}"), |f| f.origin(profile));
    CredentialError::new(origin, reason)
}

/// Returns an access key; `None` if there is none.
fn access_key_from_values(
    given: (Option<&str>, Option<&str>),
    token: Option<&str>,
    origin: &str,
) -> Result<Option<AwsCredential>, CredentialError> {
    match given {
        (Some(key_id), Some(secret)) => Ok(Some(AwsCredential {
            key_id: key_id.to_owned(),
            secret_key: secret.to_owned(),
            token: token.map(str::to_owned),
        })),
        (None, None) => Ok(None),
        (Some(_), None) => Err(CredentialError::new(origin, "the secret of the key is missing")),
        (None, Some(_)) => Err(CredentialError::new(origin, "the key of the secret is missing")),
    }
}

fn environment_keys(
    environment: &SourceEnvironment,
) -> Result<Option<AwsCredential>, CredentialError> {
    let given = (environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY"));
    access_key_from_values(given, environment.get("AWS_SESSION_TOKEN"), ENVIRONMENT_ORIGIN)
}

/// Returns the source of a profile with its place; `None` for a profile without credentials.
fn profile_source(
    profile: &str,
    options: &BTreeMap<String, String>,
    environment: &SourceEnvironment,
    service: &TokenService,
) -> Result<Option<(AwsSource, String)>, CredentialError> {
    let files = ProfileFiles::read(environment)?;
    let Some(found) = files.credentials(profile)? else { return Ok(None) };
    let source = aws_source_of_profile(found, options, environment, service)?;
    Ok(Some((source, files.origin(profile))))
}

fn aws_source_of_profile(
    found: ProfileCredentialMethod,
    options: &BTreeMap<String, String>,
    environment: &SourceEnvironment,
    service: &TokenService,
) -> Result<AwsSource, CredentialError> {
    Ok(match found {
        ProfileCredentialMethod::Keys(keys) => AwsSource::Keys(keys),
        ProfileCredentialMethod::Process(command) => AwsSource::Process(command),
        ProfileCredentialMethod::WebIdentity { token_file, role } => {
            AwsSource::WebIdentity { token_file, role }
        }
        ProfileCredentialMethod::Role { base, role } => {
            let base = Box::new(aws_source_of_profile(*base, options, environment, service)?);
            AwsSource::Role { base, role }
        }
        ProfileCredentialMethod::SingleSignOn { token_file, region, account, role } => {
            let endpoint = environment.get("AWS_ENDPOINT_URL_SSO").map_or_else(
                || format!("https://portal.sso.{region}.amazonaws.com"),
                str::to_owned,
            );
            let portal = TokenService { endpoint, region, timeout: service.timeout };
            AwsSource::SingleSignOn { token_file, account, role, portal }
        }
        ProfileCredentialMethod::Machine => {
            AwsSource::Machine(machine_identity_provider(options, environment, service.timeout)?)
        }
        ProfileCredentialMethod::Environment => AwsSource::Keys(
            environment_keys(environment)?
                .ok_or_else(|| CredentialError::new(ENVIRONMENT_ORIGIN, "they are not set"))?,
        ),
    })
}

/// Returns the backend's own provider for the identity of a container or machine.
fn machine_identity_provider(
    options: &BTreeMap<String, String>,
    environment: &SourceEnvironment,
    timeout: Duration,
) -> Result<Arc<dyn CredentialProvider<Credential = AwsCredential>>, CredentialError> {
    // A profile may ask for the machine's identity although the environment has keys.
    let variables = environment
        .0
        .iter()
        .map(|(name, value)| (name.to_ascii_lowercase(), value))
        .filter(|(name, _)| !KEY_VARIABLES.contains(&name.as_str()));
    let given = options.iter().map(|(name, value)| (name.clone(), value));
    // The builder needs a bucket, and only its provider of credentials is used.
    let mut builder = AmazonS3Builder::new().with_bucket_name("any");
    for (name, value) in variables.chain(given) {
        if let Ok(key) = name.parse() {
            builder = builder.with_config(key, value);
        }
    }
    let built = builder
        .with_http_connector(DeadlineConnector::new(timeout, false))
        .with_retry(crate::retry_pauses::retry_config(timeout))
        .build()
        .map_err(|error| CredentialError::new(MACHINE_ORIGIN, error))?;
    Ok(Arc::clone(built.credentials()))
}

#[async_trait]
impl CredentialSource<AwsCredential> for AwsSourceWithOrigin {
    fn origin(&self) -> String {
        self.origin.clone()
    }

    fn is_fixed(&self) -> bool {
        self.is_fixed
    }

    async fn fetch(&self) -> Result<FetchedCredential<AwsCredential>, CredentialError> {
        if let AwsSource::Machine(provider) = &self.source {
            return Ok(FetchedCredential::Provider(Arc::clone(provider)));
        }
        let fetched = fetch_keys(&self.source, &self.service).await;
        let (credential, expires) =
            fetched.map_err(|reason| CredentialError::new(self.origin.clone(), reason))?;
        Ok(FetchedCredential::Value { credential, expires })
    }
}

type ExpiringKeys = (AwsCredential, Option<SystemTime>);

fn copy_credential(keys: &AwsCredential) -> AwsCredential {
    AwsCredential {
        key_id: keys.key_id.clone(),
        secret_key: keys.secret_key.clone(),
        token: keys.token.clone(),
    }
}

fn fetch_keys<'a>(
    source: &'a AwsSource,
    service: &'a TokenService,
) -> BoxFuture<'a, Result<ExpiringKeys, String>> {
    Box::pin(async move {
        match source {
            AwsSource::Keys(keys) => Ok((copy_credential(keys), None)),
            AwsSource::Process(command) => {
                let command = command.clone();
                // The process may run for a minute, and the runtime has two threads.
                let done = tokio::task::spawn_blocking(move || run_credential_process(&command));
                done.await.map_err(|error| error.to_string())?
            }
            AwsSource::WebIdentity { token_file, role } => {
                service.exchange_token(token_file, role).await
            }
            AwsSource::Role { base, role } => {
                let (base, _) = fetch_keys(base, service).await?;
                service.assume_role(role, &base).await
            }
            AwsSource::SingleSignOn { token_file, account, role, portal } => {
                let token = read_sso_token(token_file)?;
                portal.exchange_sso_token(&token, account, role).await
            }
            AwsSource::Machine(provider) => {
                let keys = provider.get_credential().await.map_err(|error| error.to_string())?;
                Ok((copy_credential(&keys), None))
            }
        }
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CredentialProcessOutput {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<String>,
}

/// Runs the command of a profile, which prints keys. Its output is never shown.
fn run_credential_process(command: &str) -> Result<ExpiringKeys, String> {
    // Without a shell, like the AWS command line: no part of it is expanded.
    let words = shlex::split(command).filter(|words| !words.is_empty());
    let words = words.ok_or("its credential_process is not a command line")?;
    let program = words.first().cloned().unwrap_or_default();
    let failed = |reason: String| format!("its credential_process {program}: {reason}");
    let mut child = Command::new(&program)
        .args(words.iter().skip(1))
        // A process that asks for a password would wait for ever.
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(|error| failed(error.to_string()))?;
    let deadline = Instant::now() + PROCESS_TIMEOUT;
    // A process that it leaves behind may keep the pipe open, so a thread reads.
    let (sender, output) = mpsc::channel();
    let stdout = child.stdout.take();
    std::thread::spawn(move || {
        let mut output = String::new();
        let mut reader = stdout.into_iter().map(|stdout| stdout.take(MAX_OUTPUT_BYTES));
        let read = reader.try_for_each(|mut stdout| stdout.read_to_string(&mut output).map(drop));
        // The send fails after the deadline, when its receiver is gone.
        drop(sender.send(read.map(|()| output)));
    });
    // `wait` has no deadline.
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => std::thread::sleep(PROCESS_POLL_INTERVAL),
            other => {
                let reason = other.err().map_or_else(
                    || format!("it did not end within {PROCESS_TIMEOUT:?}"),
                    |error| error.to_string(),
                );
                // Both fail only for a process that has ended.
                drop(child.kill());
                drop(child.wait());
                return Err(failed(reason));
            }
        }
    };
    if !status.success() {
        return Err(failed(format!("it ended with {status}")));
    }
    let left = deadline.saturating_duration_since(Instant::now());
    let output = output
        .recv_timeout(left)
        .map_err(|_| failed(format!("its output did not end within {PROCESS_TIMEOUT:?}")))?
        .map_err(|error| failed(error.to_string()))?;
    let keys: CredentialProcessOutput = serde_json::from_str(&output)
        .map_err(|_| failed("its output is not the JSON of credentials".to_owned()))?;
    if keys.version != 1 {
        return Err(failed(format!("its output has version {}, expected 1", keys.version)));
    }
    let expires = keys.expiration.map(|text| parse_expiry(&text)).transpose().map_err(failed)?;
    let credential = AwsCredential {
        key_id: keys.access_key_id,
        secret_key: keys.secret_access_key,
        token: keys.session_token,
    };
    Ok((credential, expires))
}
