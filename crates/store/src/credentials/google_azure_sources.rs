// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Sources of credentials for Google Cloud Storage and Azure: a function, or the backend's own
//! chain over the options and the current environment, which is built again for each renewal.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use object_store::CredentialProvider;
use object_store::azure::{AzureConfigKey, AzureCredential, MicrosoftAzureBuilder};
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder, GoogleConfigKey};

use super::credential_functions::parse_sas_parameters;
use super::{
    CredentialError, CredentialSource, FUNCTION_OPTION, FetchedCredential, SourceEnvironment,
    find_credential_function, parse_expiry,
};
use crate::http_deadlines::DeadlineConnector;
use crate::retry_pauses::retry_config;

/// A provider of the backend with its place.
struct ProviderSource<C> {
    provider: Arc<dyn CredentialProvider<Credential = C>>,
    origin: String,
    is_fixed: bool,
}

#[async_trait]
impl CredentialSource<GcpCredential> for ProviderSource<GcpCredential> {
    fn origin(&self) -> String {
        self.origin.clone()
    }

    fn is_fixed(&self) -> bool {
        self.is_fixed
    }

    async fn fetch(&self) -> Result<FetchedCredential<GcpCredential>, CredentialError> {
        Ok(FetchedCredential::Provider(Arc::clone(&self.provider)))
    }
}

#[async_trait]
impl CredentialSource<AzureCredential> for ProviderSource<AzureCredential> {
    fn origin(&self) -> String {
        self.origin.clone()
    }

    fn is_fixed(&self) -> bool {
        self.is_fixed
    }

    async fn fetch(&self) -> Result<FetchedCredential<AzureCredential>, CredentialError> {
        // A signature says itself when it expires.
        let refuse = |error| CredentialError::new(self.origin.clone(), error);
        let credential = self.provider.get_credential().await.map_err(refuse)?;
        if let AzureCredential::SASToken(pairs) = &*credential {
            let expires = sas_expiry_time(pairs);
            let credential = AzureCredential::SASToken(pairs.clone());
            return Ok(FetchedCredential::Value { credential, expires });
        }
        Ok(FetchedCredential::Provider(Arc::clone(&self.provider)))
    }
}

/// Returns the expiry of a signature.
fn sas_expiry_time(pairs: &[(String, String)]) -> Option<SystemTime> {
    let (_, text) = pairs.iter().find(|(name, _)| name == "se")?;
    parse_expiry(text).ok()
}

/// Options and variables of a service by the backend's names, and the place of the credentials.
struct MergedSettings<K> {
    settings: Vec<(K, String)>,
    origin: String,
    is_fixed: bool,
    /// Values that no message may contain.
    secrets: Vec<String>,
}

impl<K> MergedSettings<K> {
    /// Returns an error of the backend about the settings. A secret where the name of a file was
    /// expected would be in its text.
    fn settings_error(&self, error: impl std::fmt::Display) -> CredentialError {
        let text = error.to_string();
        let text = self.secrets.iter().fold(text, |text, secret| text.replace(secret, "***"));
        CredentialError::new(self.origin.clone(), text)
    }
}

/// Merges the variables into the options. If any credential is an option, credentials of the
/// environment do not count: the backend would prefer some of them.
fn merge_settings<K: std::str::FromStr + AsRef<str>>(
    options: &BTreeMap<String, String>,
    environment: &SourceEnvironment,
    is_credential: fn(&K) -> bool,
    is_constant: fn(&K) -> bool,
) -> MergedSettings<K> {
    let typed = |(name, value): (&String, &String)| {
        let key = name.to_ascii_lowercase().parse::<K>().ok()?;
        Some((key, value.clone()))
    };
    let given = options.iter().filter_map(typed).collect::<Vec<_>>();
    let mut found = environment
        .0
        .iter()
        .filter(|(name, _)| *name != "HOME")
        .filter_map(typed)
        .collect::<Vec<_>>();
    let from_options = given.iter().any(|(key, _)| is_credential(key));
    if from_options {
        found.retain(|(key, _)| !is_credential(key));
    }
    let credentials = if from_options { &given } else { &found };
    let names = credentials.iter().map(|(key, _)| key).filter(|key| is_credential(key));
    let text = names.clone().map(AsRef::as_ref).collect::<Vec<_>>().join(", ");
    let origin = match (text.is_empty(), from_options) {
        (true, _) => "the identity of the machine or pod, or the provider's default file (there \
                      are no options or variables with credentials)"
            .to_owned(),
        (false, true) => format!("the options {text}"),
        (false, false) => format!("the environment variables for {text}"),
    };
    // Only an option with the credential itself stays as it is: variables and files may change.
    let is_fixed = from_options && names.clone().all(is_constant);
    // Options come last, because the builder takes the last value of a name.
    found.extend(given);
    let is_secret = |(key, value): &&(K, String)| {
        // Names of files are no secrets, and short values would hide parts of words.
        is_credential(key) && value.len() > 3 && std::fs::metadata(value).is_err()
    };
    let secrets = found.iter().filter(is_secret).map(|(_, value)| value.clone()).collect();
    MergedSettings { settings: found, origin, is_fixed, secrets }
}

/// Finds the source of the credentials of a bucket of Google Cloud Storage.
///
/// # Errors
/// Options, variables or files that cannot be used.
pub(crate) fn choose_google_source(
    options: &BTreeMap<String, String>,
    environment: &SourceEnvironment,
    timeout: Duration,
) -> Result<Arc<dyn CredentialSource<GcpCredential>>, CredentialError> {
    if let Some(name) = options.get(FUNCTION_OPTION) {
        return Ok(Arc::new(find_credential_function(name)?));
    }
    // The tokens of every key expire.
    let is_constant = |_: &GoogleConfigKey| false;
    let is_credential = |key: &GoogleConfigKey| {
        matches!(
            key,
            GoogleConfigKey::ServiceAccount
                | GoogleConfigKey::ApplicationCredentials
                | GoogleConfigKey::ServiceAccountKey
        )
    };
    let mut merged = merge_settings(options, environment, is_credential, is_constant);
    // The builder needs a bucket, and only its provider of credentials is used.
    let mut builder = GoogleCloudStorageBuilder::new().with_bucket_name("any");
    for (key, value) in std::mem::take(&mut merged.settings) {
        builder = builder.with_config(key, value);
    }
    let built = builder
        .with_http_connector(DeadlineConnector::new(timeout, false))
        .with_retry(retry_config(timeout))
        .build()
        .map_err(|error| merged.settings_error(error))?;
    let provider = Arc::clone(built.credentials());
    Ok(Arc::new(ProviderSource { provider, origin: merged.origin, is_fixed: merged.is_fixed }))
}

/// Finds the source of the credentials of a container of Azure.
///
/// # Errors
/// Options, variables or files that cannot be used.
pub(crate) fn choose_azure_source(
    root: &str,
    options: &BTreeMap<String, String>,
    environment: &SourceEnvironment,
    timeout: Duration,
) -> Result<Arc<dyn CredentialSource<AzureCredential>>, CredentialError> {
    if let Some(name) = options.get(FUNCTION_OPTION) {
        return Ok(Arc::new(find_credential_function(name)?));
    }
    let is_constant = |key: &AzureConfigKey| {
        matches!(key, AzureConfigKey::AccessKey | AzureConfigKey::SasKey | AzureConfigKey::Token)
    };
    let is_credential = |key: &AzureConfigKey| {
        matches!(
            key,
            AzureConfigKey::AccessKey
                | AzureConfigKey::ClientSecret
                | AzureConfigKey::SasKey
                | AzureConfigKey::Token
                | AzureConfigKey::FederatedTokenFile
        )
    };
    let mut merged = merge_settings(options, environment, is_credential, is_constant);
    let mut builder = MicrosoftAzureBuilder::new().with_url(root);
    for (key, value) in std::mem::take(&mut merged.settings) {
        if matches!(key, AzureConfigKey::SasKey) {
            let checked = parse_sas_parameters(&value);
            checked.map_err(|reason| CredentialError::new(merged.origin.clone(), reason))?;
        }
        builder = builder.with_config(key, value);
    }
    let plain = crate::http_client::is_plain_http(
        builder.get_config_value(&AzureConfigKey::Endpoint).as_ref(),
    );
    if plain {
        builder = builder.with_allow_http(true);
    }
    let built = builder
        .with_http_connector(DeadlineConnector::new(timeout, false))
        .with_retry(retry_config(timeout))
        .build()
        .map_err(|error| merged.settings_error(error))?;
    let provider = Arc::clone(built.credentials());
    Ok(Arc::new(ProviderSource { provider, origin: merged.origin, is_fixed: merged.is_fixed }))
}
