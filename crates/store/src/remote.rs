// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Backends over the network, built from the standard environment and the user's options.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use hdfs_native_object_store::HdfsObjectStoreBuilder;
use object_store::ObjectStore;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};

use crate::backend_wait;
use crate::credentials::{
    self, CredentialSigner, FUNCTION_OPTION, OpenedBackend, RenewingCredentials, RequestSigner,
    SourceEnvironment,
};
use crate::error::{Error, Result};
use crate::hdfs_failures::{RetryingHdfs, translate_error};
use crate::http_client::is_plain_http;
use crate::http_deadlines::DeadlineConnector;
use crate::location::{StorageService, StoreLocation};
use crate::options::{self, BackendOptions};
use crate::retry_pauses::retry_config;

/// Option names of fsspec (left) and of the backend (right), for callers with `storage_options`.
const S3_OPTION_NAMES: &[(&str, &str)] = &[
    ("key", "aws_access_key_id"),
    ("secret", "aws_secret_access_key"),
    ("token", "aws_session_token"),
    ("endpoint_url", "aws_endpoint"),
    ("region_name", "aws_region"),
    ("anon", "aws_skip_signature"),
];
const GCS_OPTION_NAMES: &[(&str, &str)] = &[
    ("token", "google_service_account"),
    ("endpoint_url", "google_base_url"),
    ("anon", "google_skip_signature"),
];
const AZURE_OPTION_NAMES: &[(&str, &str)] = &[
    ("account_name", "azure_storage_account_name"),
    ("account_key", "azure_storage_account_key"),
    ("sas_token", "azure_storage_sas_token"),
    ("tenant_id", "azure_storage_tenant_id"),
    ("client_id", "azure_storage_client_id"),
    ("client_secret", "azure_storage_client_secret"),
    ("anon", "azure_skip_signature"),
];

/// Opens the backend of `root`, which is scheme and bucket.
pub(crate) fn open_backend(
    service: StorageService,
    root: &str,
    options: &BackendOptions,
    timeout: Duration,
) -> Result<OpenedBackend> {
    let refuse = |source: object_store::Error| {
        Error::from_backend("open", root.to_owned(), redact_options(options, source))
    };
    let has_own_timeout = options.0.contains_key("timeout");
    let connector = DeadlineConnector::new(timeout, has_own_timeout);
    let named = options_with_backend_names(service, options);
    match service {
        StorageService::S3 => {
            let builder = s3_builder(root, options)?.with_retry(retry_config(timeout));
            // A search for credentials would ask the metadata service of the machine, and may wait
            // long.
            if is_anonymous(builder.get_config_value(&AmazonS3ConfigKey::SkipSignature)) {
                return unsigned_backend(builder.with_http_connector(connector).build(), refuse);
            }
            let choose = move |environment: &SourceEnvironment| {
                credentials::choose_aws_source(&named, environment, timeout)
            };
            let credentials = RenewingCredentials::new(AWS_VARIABLES, Box::new(choose));
            let credentials = Arc::new(credentials.map_err(|error| refuse(error.into()))?);
            let signer = signer_for_credentials(&credentials, String::new());
            let builder = builder.with_credentials(Arc::clone(&credentials) as _);
            let built = builder.with_http_connector(connector.with_signer(signer)).build();
            let backend = Arc::new(built.map_err(refuse)?);
            Ok(OpenedBackend { backend, credentials: Some(credentials) })
        }
        StorageService::Gcs => {
            let builder = gcs_builder(root, options)?.with_retry(retry_config(timeout));
            if is_anonymous(builder.get_config_value(&GoogleConfigKey::SkipSignature)) {
                return unsigned_backend(builder.with_http_connector(connector).build(), refuse);
            }
            let choose = move |environment: &SourceEnvironment| {
                credentials::choose_google_source(&named, environment, timeout)
            };
            let credentials = RenewingCredentials::new(GOOGLE_VARIABLES, Box::new(choose));
            let credentials = Arc::new(credentials.map_err(|error| refuse(error.into()))?);
            let signer = signer_for_credentials(&credentials, String::new());
            let builder = builder.with_credentials(Arc::clone(&credentials) as _);
            let built = builder.with_http_connector(connector.with_signer(signer)).build();
            let backend = Arc::new(built.map_err(refuse)?);
            Ok(OpenedBackend { backend, credentials: Some(credentials) })
        }
        StorageService::Azure => {
            let builder = azure_builder(root, options)?.with_retry(retry_config(timeout));
            if is_anonymous(builder.get_config_value(&AzureConfigKey::SkipSignature)) {
                return unsigned_backend(builder.with_http_connector(connector).build(), refuse);
            }
            let account = builder.get_config_value(&AzureConfigKey::AccountName);
            let url = root.to_owned();
            let choose = move |environment: &SourceEnvironment| {
                credentials::choose_azure_source(&url, &named, environment, timeout)
            };
            let credentials = RenewingCredentials::new(AZURE_VARIABLES, Box::new(choose));
            let credentials = Arc::new(credentials.map_err(|error| refuse(error.into()))?);
            let signer = signer_for_credentials(&credentials, account.unwrap_or_default());
            let builder = builder.with_credentials(Arc::clone(&credentials) as _);
            let built = builder.with_http_connector(connector.with_signer(signer)).build();
            let backend = Arc::new(built.map_err(refuse)?);
            Ok(OpenedBackend { backend, credentials: Some(credentials) })
        }
        StorageService::Hdfs => {
            let builder = HdfsObjectStoreBuilder::new()
                .with_url(root)
                .with_config(options.0.iter().map(|(key, value)| (key.clone(), value.clone())))
                .with_io_runtime(backend_wait::runtime_handle()?);
            let built = builder.build().map_err(|source| refuse(translate_error(source)))?;
            let backend = Arc::new(RetryingHdfs::new(built, timeout));
            Ok(OpenedBackend { backend, credentials: None })
        }
    }
}

/// Prefixes of the variables by which credentials are found.
const AWS_VARIABLES: &[&str] = &["AWS_"];
const GOOGLE_VARIABLES: &[&str] = &["GOOGLE_", "SERVICE_ACCOUNT"];
const AZURE_VARIABLES: &[&str] = &["AZURE_", "IDENTITY_", "MSI_"];
/// Options that are not the backend's.
const OWN_OPTION_NAMES: &[&str] = &[FUNCTION_OPTION, "profile"];

/// Returns whether requests are sent without a signature.
fn is_anonymous(skips_signature: Option<String>) -> bool {
    skips_signature.is_some_and(|value| matches!(value.as_str(), "true" | "1" | "yes" | "on"))
}

/// Returns the backend of a public bucket.
fn unsigned_backend<S: ObjectStore>(
    built: object_store::Result<S>,
    refuse: impl FnOnce(object_store::Error) -> Error,
) -> Result<OpenedBackend> {
    Ok(OpenedBackend { backend: Arc::new(built.map_err(refuse)?), credentials: None })
}

fn signer_for_credentials<C>(
    credentials: &Arc<RenewingCredentials<C>>,
    account: String,
) -> Arc<dyn CredentialSigner>
where
    RequestSigner<C>: CredentialSigner + 'static,
{
    Arc::new(RequestSigner { credentials: Arc::clone(credentials), account })
}

/// Removes the values of the user's options from an error: a value may be a secret, given where a
/// file name was expected.
fn redact_options(options: &BackendOptions, error: object_store::Error) -> object_store::Error {
    let text = error.to_string();
    // Addresses and names of files are no secrets, and the message needs them.
    let known = |value: &&String| value.starts_with("http") || std::path::Path::new(value).exists();
    let given = options
        .0
        .values()
        // Short values such as `yes` would hide parts of words.
        .filter(|value| value.len() > 3 && text.contains(*value) && !known(value));
    let hidden = given.fold(text.clone(), |text, value| text.replace(value, "***"));
    if hidden == text {
        error
    } else {
        object_store::Error::Generic { store: "store", source: hidden.into() }
    }
}

/// Returns the options with the backend's names.
fn options_with_backend_names(
    service: StorageService,
    options: &BackendOptions,
) -> BTreeMap<String, String> {
    let names = match service {
        StorageService::S3 => S3_OPTION_NAMES,
        StorageService::Gcs => GCS_OPTION_NAMES,
        StorageService::Azure => AZURE_OPTION_NAMES,
        StorageService::Hdfs => return options.0.clone(),
    };
    let mut options = options.clone();
    if service == StorageService::Azure
        && let Some(text) = options.0.remove("connection_string")
    {
        for (key, value) in parse_connection_string(&text) {
            // An option that is given by its name comes before the connection string.
            options.0.entry(key.to_owned()).or_insert_with(|| value.to_owned());
        }
    }
    let name = |(key, value): (String, String)| {
        let ours =
            names.iter().find(|(theirs, _)| *theirs == key).map_or(key.as_str(), |(_, ours)| ours);
        // Other libraries use this option for a file name or for the file's content.
        let content = ours == "google_service_account" && value.trim_start().starts_with('{');
        let ours = if content { "google_service_account_key" } else { ours };
        (ours.to_ascii_lowercase(), value)
    };
    options.0.into_iter().map(name).collect()
}

/// Returns the options of `url`, with names that every reader based on `object_store` knows.
///
/// # Errors
/// Like [`StoreLocation::parse`].
pub fn object_store_options(url: &str) -> Result<BTreeMap<String, String>> {
    let StoreLocation::Remote { service, .. } = StoreLocation::parse(url)? else {
        return Ok(BTreeMap::new());
    };
    let mut named = options_with_backend_names(service, &options::options_for_url(url));
    if named.iter().any(|(key, value)| key.ends_with("endpoint") && is_plain_http(Some(value))) {
        named.entry("allow_http".to_owned()).or_insert_with(|| "true".to_owned());
    }
    Ok(named)
}

/// Returns the options as the backend's typed keys.
fn typed_options<K: FromStr>(
    service: StorageService,
    root: &str,
    options: &BackendOptions,
) -> Result<Vec<(K, String)>> {
    let read = |(name, value): (String, String)| match name.parse() {
        Ok(key) => Ok((key, value)),
        Err(_) => Err(Error::Option { key: name, url: root.to_owned() }),
    };
    let (theirs, _) =
        credentials::split_options(&options_with_backend_names(service, options), OWN_OPTION_NAMES);
    theirs.into_iter().map(read).collect()
}

fn s3_builder(root: &str, options: &BackendOptions) -> Result<AmazonS3Builder> {
    // The backend does not know the scheme `s3n`.
    let url = root.replacen("s3n://", "s3://", 1);
    let mut builder = AmazonS3Builder::from_env().with_url(url);
    for (key, value) in typed_options(StorageService::S3, root, options)? {
        builder = builder.with_config(key, value);
    }
    // The builder does not read the files of profiles.
    if builder.get_config_value(&AmazonS3ConfigKey::Region).is_none() {
        let environment = SourceEnvironment::read(AWS_VARIABLES);
        let profile = options.0.get("profile").map(String::as_str);
        if let Some(region) = credentials::profile_region(profile, &environment) {
            builder = builder.with_region(region);
        }
    }
    let plain = is_plain_http(builder.get_config_value(&AmazonS3ConfigKey::Endpoint).as_ref());
    Ok(if plain { builder.with_allow_http(true) } else { builder })
}

fn gcs_builder(root: &str, options: &BackendOptions) -> Result<GoogleCloudStorageBuilder> {
    // The backend does not know the scheme `gcs`.
    let url = root.replacen("gcs://", "gs://", 1);
    let mut builder = GoogleCloudStorageBuilder::from_env().with_url(url);
    for (key, value) in typed_options(StorageService::Gcs, root, options)? {
        builder = builder.with_config(key, value);
    }
    let plain = is_plain_http(builder.get_config_value(&GoogleConfigKey::BaseUrl).as_ref());
    let http = object_store::ClientConfigKey::AllowHttp;
    Ok(if plain { builder.with_config(GoogleConfigKey::Client(http), "true") } else { builder })
}

fn azure_builder(root: &str, options: &BackendOptions) -> Result<MicrosoftAzureBuilder> {
    let mut builder = MicrosoftAzureBuilder::from_env().with_url(root);
    for (key, value) in typed_options(StorageService::Azure, root, options)? {
        builder = builder.with_config(key, value);
    }
    let plain = is_plain_http(builder.get_config_value(&AzureConfigKey::Endpoint).as_ref());
    Ok(if plain { builder.with_allow_http(true) } else { builder })
}

/// Returns account, keys and endpoint of an Azure connection string.
fn parse_connection_string(text: &str) -> impl Iterator<Item = (&'static str, &str)> {
    text.split(';').filter_map(|part| {
        // A key in base64 may end in `=`, so the first one separates.
        let (key, value) = part.split_once('=')?;
        let name = match key {
            "AccountName" => "account_name",
            "AccountKey" => "account_key",
            "BlobEndpoint" => "azure_storage_endpoint",
            "SharedAccessSignature" => "sas_token",
            _ => return None,
        };
        Some((name, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(pairs: &[(&str, &str)]) -> BackendOptions {
        BackendOptions(
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        )
    }

    #[test]
    fn an_unknown_option_is_named_and_its_value_is_not() {
        let error =
            s3_builder("s3://bucket", &options(&[("sekret", "hidden")])).unwrap_err().to_string();
        assert!(
            error.contains("sekret") && error.ends_with("s3://bucket") && !error.contains("hidden"),
            "{error}"
        );
    }

    #[test]
    fn a_value_that_was_parsed_as_a_file_name_is_not_in_the_message() {
        for secret in ["ya29.hidden-token", r#"{"private_key": "hidden-token"}"#] {
            let error = open_backend(
                StorageService::Gcs,
                "gs://data",
                &options(&[("token", secret)]),
                Duration::from_secs(1),
            )
            .err()
            .unwrap();
            let mut shown = format!("{error} {error:?}");
            let mut source = std::error::Error::source(&error);
            while let Some(error) = source {
                shown += &format!(" {error} {error:?}");
                source = error.source();
            }
            assert!(!shown.contains("hidden-token"), "{shown}");
        }
    }

    #[test]
    fn other_readers_get_options_by_names_they_know() {
        options::configure_options(
            "s3://told",
            options(&[("key", "id"), ("endpoint_url", "http://host:1")]),
        );
        let found = object_store_options("s3://told/x").unwrap();
        let expected = [
            ("allow_http", "true"),
            ("aws_access_key_id", "id"),
            ("aws_endpoint", "http://host:1"),
        ];
        assert_eq!(found, options(&expected).0);
        assert!(object_store_options("/tmp/x").unwrap().is_empty());
    }

    #[test]
    fn fsspecs_names_are_understood() {
        let given =
            options(&[("key", "id"), ("endpoint_url", "http://host:1"), ("aws_region", "here")]);
        let builder = s3_builder("s3://bucket", &given).unwrap();
        assert_eq!(builder.get_config_value(&AmazonS3ConfigKey::AccessKeyId).unwrap(), "id");
        assert_eq!(
            builder.get_config_value(&AmazonS3ConfigKey::Endpoint).unwrap(),
            "http://host:1"
        );
        let given = options(&[(
            "connection_string",
            "AccountName=a;AccountKey=b==;BlobEndpoint=http://h:1/a",
        )]);
        let builder = azure_builder("az://data", &given).unwrap();
        assert_eq!(builder.get_config_value(&AzureConfigKey::AccountName).unwrap(), "a");
        assert_eq!(builder.get_config_value(&AzureConfigKey::AccessKey).unwrap(), "b==");
    }
}
