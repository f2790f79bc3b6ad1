// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Credentials that are renewed while a process runs: before they expire, after the service has
//! refused them, and if the environment has changed when a store is opened.
//!
//! The chains of sources are our own code and not `aws-config`: that crate brings a second HTTP
//! client, about 3 MB in a wheel that is already at its limit, and covers only one of three
//! services. `object_store` implements machine and pod identities.

use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::io::Read as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwapOption;
use async_trait::async_trait;
use object_store::{CredentialProvider, ObjectStore};
use tokio::sync::Mutex;
use tokio::time::timeout;

mod aws_profiles;
mod aws_sources;
mod credential_functions;
mod google_azure_sources;
mod request_signing;
mod role_requests;
mod source_environment;

pub(crate) use aws_profiles::profile_region;
pub(crate) use aws_sources::choose_aws_source;
pub use credential_functions::{CredentialValues, register_credential_function};
pub(crate) use credential_functions::{FUNCTION_OPTION, find_credential_function};
pub(crate) use google_azure_sources::{choose_azure_source, choose_google_source};
pub(crate) use request_signing::{CredentialRefusal, CredentialSigner, RequestSigner};
pub(crate) use source_environment::SourceEnvironment;
pub use source_environment::set_environment_guard;

/// Longest time before the expiry at which a credential is renewed.
const MAX_RENEWAL_LEAD: Duration = Duration::from_secs(300);
/// Longest time for a renewal.
// Longer than the limit of a `credential_process`, whose error is more exact.
const MAX_RENEWAL_TIME: Duration = Duration::from_secs(90);
/// Shortest pause between two renewals before the expiry.
const MIN_RENEWAL_PAUSE: Duration = Duration::from_millis(50);
/// Shortest pause between two renewals after answers that do not say that the credential has
/// expired: most of them mean that a permission is missing.
const MIN_REFUSAL_PAUSE: Duration = Duration::from_secs(1);
/// Most bytes of a file with profiles or with a token.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Longest pause after a renewal that has failed while the earlier credential is still in use.
const MAX_FAILURE_PAUSE: Duration = Duration::from_secs(10);

/// A source that gave no credential.
#[derive(Debug, thiserror::Error)]
#[error("no credentials from {origin}: {reason}")]
pub(crate) struct CredentialError {
    pub(crate) origin: String,
    pub(crate) reason: String,
}

impl CredentialError {
    pub(crate) fn new(origin: impl Into<String>, reason: impl fmt::Display) -> Self {
        Self { origin: origin.into(), reason: reason.to_string() }
    }
}

impl From<CredentialError> for object_store::Error {
    fn from(error: CredentialError) -> Self {
        Self::Generic { store: "credential", source: Box::new(error) }
    }
}

/// A credential with its expiry, or a provider that renews by itself before the expiry.
pub(crate) enum FetchedCredential<C> {
    Value { credential: C, expires: Option<SystemTime> },
    Provider(Arc<dyn CredentialProvider<Credential = C>>),
}

/// A place that credentials come from.
#[async_trait]
pub(crate) trait CredentialSource<C>: Send + Sync {
    /// Returns the place, for messages, without any secret.
    fn origin(&self) -> String;

    /// Returns whether the source never has another credential.
    fn is_fixed(&self) -> bool {
        false
    }

    /// Gets a credential.
    async fn fetch(&self) -> Result<FetchedCredential<C>, CredentialError>;
}

/// A function that finds the source of credentials in the options and in the current environment.
pub(crate) type SourceChooser<C> = Box<
    dyn Fn(&SourceEnvironment) -> Result<Arc<dyn CredentialSource<C>>, CredentialError>
        + Send
        + Sync,
>;

/// A credential in use. Each different credential has another number.
pub(crate) struct NumberedCredential<C> {
    pub(crate) credential: Arc<C>,
    pub(crate) number: u64,
    /// Whether the source never has another credential.
    pub(crate) is_fixed: bool,
    pub(crate) origin: String,
}

impl<C> Clone for NumberedCredential<C> {
    fn clone(&self) -> Self {
        let credential = Arc::clone(&self.credential);
        Self { credential, origin: self.origin.clone(), ..*self }
    }
}

struct CredentialState<C> {
    source: Arc<dyn CredentialSource<C>>,
    provider: Option<Arc<dyn CredentialProvider<Credential = C>>>,
    current: Option<NumberedCredential<C>>,
    /// Time at which the source is asked for the next credential.
    renew_at: Option<SystemTime>,
    /// Time of the last renewal after a refusal.
    refused_at: Option<Instant>,
    environment: SourceEnvironment,
}

/// The credentials of a backend.
pub(crate) struct RenewingCredentials<C> {
    chooser: Arc<SourceChooser<C>>,
    prefixes: &'static [&'static str],
    state: Mutex<CredentialState<C>>,
    /// The credential of the last request, for requests during a renewal.
    latest: ArcSwapOption<NumberedCredential<C>>,
    /// Whether the source must be chosen again.
    is_stale: AtomicBool,
}

impl<C> Debug for RenewingCredentials<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RenewingCredentials").finish_non_exhaustive()
    }
}

impl<C: PartialEq + Send + Sync + 'static> RenewingCredentials<C> {
    /// Chooses the source, without a request.
    ///
    /// # Errors
    /// Options or files that name a source which cannot be used.
    pub(crate) fn new(
        prefixes: &'static [&'static str],
        chooser: SourceChooser<C>,
    ) -> Result<Self, CredentialError> {
        let environment = SourceEnvironment::read(prefixes);
        let source = chooser(&environment)?;
        let state = CredentialState {
            source,
            provider: None,
            current: None,
            renew_at: None,
            refused_at: None,
            environment,
        };
        let (chooser, state) = (Arc::new(chooser), Mutex::new(state));
        let (latest, is_stale) = (ArcSwapOption::empty(), AtomicBool::new(false));
        Ok(Self { chooser, prefixes, state, latest, is_stale })
    }

    /// Returns the credential for the next request.
    ///
    /// # Errors
    /// A source without a credential.
    pub(crate) async fn current(&self) -> Result<NumberedCredential<C>, CredentialError> {
        // While another request renews the credential before its end, the present one is good.
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(_) => match self.latest.load_full() {
                Some(latest) => return Ok(NumberedCredential::clone(&latest)),
                None => self.state.lock().await,
            },
        };
        let is_due = state.renew_at.is_some_and(|time| time <= SystemTime::now());
        // Relaxed: the flag guards no other data, because the environment is read again.
        let is_stale = self.is_stale.swap(false, Ordering::Relaxed);
        if state.current.is_none() || is_due || is_stale {
            if let Err(error) = self.renew(&mut state, is_due || is_stale).await {
                // The service decides whether the earlier credential is still good.
                let Some(current) = &state.current else { return Err(error) };
                tracing::warn!("{error}. The credentials from {} stay in use", current.origin);
                // Without a pause, every request would wait for the failing source.
                state.renew_at = Some(SystemTime::now() + MAX_FAILURE_PAUSE);
            }
        } else if let Some(provider) = state.provider.clone() {
            // Providers cache their credential and renew it themselves.
            let credential = ask_provider(provider.as_ref(), &state.source.origin()).await?;
            accept_credential(&mut state, credential);
        }
        let origin = state.source.origin();
        let current = state.current.clone();
        let current = current.ok_or_else(|| CredentialError::new(origin, "it gave none"))?;
        self.latest.store(Some(Arc::new(current.clone())));
        Ok(current)
    }

    /// Gets the next credential. If `choose` is set, the source is chosen again first.
    async fn renew(
        &self,
        state: &mut CredentialState<C>,
        choose: bool,
    ) -> Result<(), CredentialError> {
        let origin = state.source.origin();
        let renewal = async {
            if choose {
                self.choose_source_again(state).await?;
            }
            fetch_next(state).await
        };
        // A function of the user may never return.
        timeout(MAX_RENEWAL_TIME, renewal).await.unwrap_or_else(|_| {
            let reason = format!("no answer within {MAX_RENEWAL_TIME:?}");
            Err(CredentialError::new(origin, reason))
        })
    }

    /// Returns another credential after the service has refused the one with this number; `None`
    /// if there is no other one. Requests that were refused together share a renewal. Answers that
    /// do not say that the credential has expired cause few renewals.
    ///
    /// # Errors
    /// A source without a credential.
    pub(crate) async fn replace_refused(
        &self,
        number: u64,
        says_expired: bool,
    ) -> Result<Option<NumberedCredential<C>>, CredentialError> {
        // Waits, unlike `current`: the present credential is the refused one.
        let mut state = self.state.lock().await;
        let was_just_renewed = state.refused_at.is_some_and(|t| t.elapsed() < MIN_REFUSAL_PAUSE);
        if state.current.as_ref().is_none_or(|current| current.number == number)
            && (says_expired || !was_just_renewed)
        {
            // Set before the renewal, so that failing renewals are limited, too.
            state.refused_at = Some(Instant::now());
            self.renew(&mut state, true).await?;
            self.latest.store(state.current.clone().map(Arc::new));
        }
        Ok(state.current.clone().filter(|current| current.number != number))
    }

    /// Chooses the source by the environment as it is now.
    async fn choose_source_again(
        &self,
        state: &mut CredentialState<C>,
    ) -> Result<(), CredentialError> {
        // Keys from options do not change with the environment.
        if state.source.is_fixed() {
            return Ok(());
        }
        let (chooser, prefixes) = (Arc::clone(&self.chooser), self.prefixes);
        // Blocks: it reads files, and the guard of the environment may wait for the interpreter.
        let chosen = tokio::task::spawn_blocking(move || {
            let environment = SourceEnvironment::read(prefixes);
            chooser(&environment).map(|source| (source, environment))
        });
        let (source, environment) =
            // The provider belongs to the earlier source.
            chosen.await.map_err(|error| CredentialError::new(state.source.origin(), error))??;
        (state.source, state.environment, state.provider) = (source, environment, None);
        Ok(())
    }
}

/// Asks the source for a credential and takes it into use.
async fn fetch_next<C: PartialEq>(state: &mut CredentialState<C>) -> Result<(), CredentialError> {
    match state.source.fetch().await? {
        FetchedCredential::Value { credential, expires } => {
            state.provider = None;
            state.renew_at = expires.map(renewal_time);
            accept_credential(state, Arc::new(credential));
        }
        FetchedCredential::Provider(provider) => {
            let credential = ask_provider(provider.as_ref(), &state.source.origin()).await?;
            (state.provider, state.renew_at) = (Some(provider), None);
            accept_credential(state, credential);
        }
    }
    Ok(())
}

async fn ask_provider<C>(
    provider: &dyn CredentialProvider<Credential = C>,
    origin: &str,
) -> Result<Arc<C>, CredentialError> {
    provider.get_credential().await.map_err(|error| CredentialError::new(origin, error))
}

fn accept_credential<C: PartialEq>(state: &mut CredentialState<C>, credential: Arc<C>) {
    let origin = state.source.origin();
    let number = match &state.current {
        // The same credential keeps its number: after a refusal, it must not be tried again.
        Some(current) if *current.credential == *credential => current.number,
        Some(current) => current.number + 1,
        None => 0,
    };
    let is_fixed = state.source.is_fixed();
    state.current = Some(NumberedCredential { credential, number, is_fixed, origin });
}

/// Returns the time to renew a credential: after four fifths of the rest of its life, or 5 minutes
/// before its end if that is later. The last renewals are close together but never immediate.
fn renewal_time(expires: SystemTime) -> SystemTime {
    let now = SystemTime::now();
    let left = expires.duration_since(now).unwrap_or_default();
    now + (left - MAX_RENEWAL_LEAD.min(left / 5)).max(MIN_RENEWAL_PAUSE)
}

#[async_trait]
impl<C: PartialEq + Send + Sync + 'static> CredentialProvider for RenewingCredentials<C> {
    type Credential = C;

    async fn get_credential(&self) -> object_store::Result<Arc<C>> {
        Ok(self.current().await?.credential)
    }
}

/// A backend's credentials, for `Store::open`.
pub(crate) trait EnvironmentChangeObserver: Send + Sync {
    /// Has the next request choose the source of credentials again, if the environment has changed
    /// since the last choice.
    fn notice_environment_change(&self);
}

impl<C: PartialEq + Send + Sync + 'static> EnvironmentChangeObserver for RenewingCredentials<C> {
    fn notice_environment_change(&self) {
        // A held lock means that a request is renewing the credential at this moment.
        let Ok(state) = self.state.try_lock() else { return };
        if !state.source.is_fixed() && state.environment != SourceEnvironment::read(self.prefixes) {
            self.is_stale.store(true, Ordering::Relaxed);
        }
    }
}

/// A backend with its credentials.
#[derive(Clone)]
pub(crate) struct OpenedBackend {
    pub(crate) backend: Arc<dyn ObjectStore>,
    /// Missing for services with an identity of their own, such as HDFS.
    pub(crate) credentials: Option<Arc<dyn EnvironmentChangeObserver>>,
}

/// Reads a file of profiles or with a token, on each call.
///
/// # Errors
/// A file that cannot be read, is no text, or is larger than any such file.
pub(crate) fn read_credential_file(path: &str) -> std::io::Result<String> {
    let mut text = String::new();
    // The path may be a device without end; one byte more shows that the file is too large.
    std::fs::File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        let reason = format!("it has more than {MAX_FILE_BYTES} bytes");
        return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, reason));
    }
    Ok(text)
}

/// Reads the expiry of a credential.
///
/// # Errors
/// Text that is no time with a zone.
pub(crate) fn parse_expiry(text: &str) -> Result<SystemTime, String> {
    chrono::DateTime::parse_from_rfc3339(text.trim())
        .map(SystemTime::from)
        .map_err(|_| "the expiry is not a time of the form 2030-01-31T12:00:00Z".to_owned())
}

/// Returns the options without those with these names, and those with these names.
pub(crate) fn split_options(
    options: &BTreeMap<String, String>,
    names: &[&str],
) -> (BTreeMap<String, String>, BTreeMap<String, String>) {
    options
        .iter()
        .map(|(name, value)| (name.clone(), value.clone()))
        .partition(|(name, _)| !names.contains(&name.as_str()))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// A source that never answers a second time.
    #[derive(Default)]
    struct HangingSource(AtomicUsize);

    #[async_trait]
    impl CredentialSource<u32> for Arc<HangingSource> {
        fn origin(&self) -> String {
            "a vault".to_owned()
        }

        async fn fetch(&self) -> Result<FetchedCredential<u32>, CredentialError> {
            if self.0.fetch_add(1, Ordering::Relaxed) > 0 {
                std::future::pending::<()>().await;
            }
            Ok(FetchedCredential::Value { credential: 7, expires: Some(SystemTime::now()) })
        }
    }

    #[tokio::test]
    async fn a_source_that_hangs_stops_no_request_while_the_credential_is_good() {
        let source = Arc::new(HangingSource::default());
        let chosen = Arc::clone(&source);
        let chooser: SourceChooser<u32> = Box::new(move |_| Ok(Arc::new(Arc::clone(&chosen))));
        let credentials = Arc::new(RenewingCredentials::new(&[], chooser).unwrap());
        assert_eq!(*credentials.current().await.unwrap().credential, 7);
        tokio::time::sleep(MIN_RENEWAL_PAUSE * 2).await;
        let renewing = Arc::clone(&credentials);
        let renewal = tokio::spawn(async move { renewing.current().await.is_ok() });
        while source.0.load(Ordering::Relaxed) < 2 {
            tokio::time::sleep(MIN_RENEWAL_PAUSE / 10).await;
        }
        assert_eq!(*credentials.current().await.unwrap().credential, 7);
        assert!(!renewal.is_finished());
        renewal.abort();
    }
}
