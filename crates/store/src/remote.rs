// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Backends over the network, built from the standard environment and the user's options.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use hdfs_native_object_store::HdfsObjectStoreBuilder;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::{BackoffConfig, ObjectStore, RetryConfig};

use crate::error::{Error, Result};
use crate::hadoop::{Patient, told};
use crate::location::{Location, Service};
use crate::options::{self, Options};
use crate::wait;

/// fsspec's names of options, for callers with `storage_options`. Ours on the right.
const S3_NAMES: &[(&str, &str)] = &[
    ("key", "aws_access_key_id"),
    ("secret", "aws_secret_access_key"),
    ("token", "aws_session_token"),
    ("endpoint_url", "aws_endpoint"),
    ("region_name", "aws_region"),
    ("anon", "aws_skip_signature"),
];
const GCS_NAMES: &[(&str, &str)] = &[
    ("token", "google_service_account"),
    ("endpoint_url", "google_base_url"),
    ("anon", "google_skip_signature"),
];
const AZURE_NAMES: &[(&str, &str)] = &[
    ("account_name", "azure_storage_account_name"),
    ("account_key", "azure_storage_account_key"),
    ("sas_token", "azure_storage_sas_token"),
    ("tenant_id", "azure_storage_tenant_id"),
    ("client_id", "azure_storage_client_id"),
    ("client_secret", "azure_storage_client_secret"),
    ("anon", "azure_skip_signature"),
];

/// Enough for a service that is busy for a moment; one that is gone is reported within a minute.
fn retry() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(5),
            base: 2.0,
        },
        max_retries: 8,
        retry_timeout: Duration::from_secs(60),
    }
}

/// Returns the backend of `root`, scheme and bucket.
pub(crate) fn open(
    service: Service,
    root: &str,
    options: &Options,
) -> Result<Arc<dyn ObjectStore>> {
    let refuse =
        |source: object_store::Error| Error::of("open", root.to_owned(), hiding(options, source));
    Ok(match service {
        Service::S3 => Arc::new(s3(root, options)?.build().map_err(refuse)?),
        Service::Gcs => Arc::new(gcs(root, options)?.build().map_err(refuse)?),
        Service::Azure => Arc::new(azure(root, options)?.build().map_err(refuse)?),
        Service::Hdfs => {
            let builder = HdfsObjectStoreBuilder::new()
                .with_url(root)
                .with_config(options.0.iter().map(|(key, value)| (key.clone(), value.clone())))
                .with_io_runtime(wait::runtime()?);
            Arc::new(Patient::new(builder.build().map_err(|source| refuse(told(source)))?, root))
        }
    })
}

/// Returns the error without what a user gave as an option: it may be a secret where a name of a
/// file was expected.
fn hiding(options: &Options, error: object_store::Error) -> object_store::Error {
    let text = error.to_string();
    let known = |value: &&String| value.starts_with("http") || std::path::Path::new(value).exists();
    let given = options
        .0
        .values()
        .filter(|value| value.len() > 3 && text.contains(*value) && !known(value));
    let hidden = given.fold(text.clone(), |text, value| text.replace(value, "***"));
    if hidden == text {
        error
    } else {
        object_store::Error::Generic { store: "store", source: hidden.into() }
    }
}

/// Options by the backend's own names.
fn named(service: Service, options: &Options) -> BTreeMap<String, String> {
    let names = match service {
        Service::S3 => S3_NAMES,
        Service::Gcs => GCS_NAMES,
        Service::Azure => AZURE_NAMES,
        Service::Hdfs => return options.0.clone(),
    };
    let mut options = options.clone();
    if service == Service::Azure
        && let Some(text) = options.0.remove("connection_string")
    {
        for (key, value) in connection(&text) {
            options.0.entry(key.to_owned()).or_insert_with(|| value.to_owned());
        }
    }
    let name = |(key, value): (String, String)| {
        let ours =
            names.iter().find(|(theirs, _)| *theirs == key).map_or(key.as_str(), |(_, ours)| ours);
        // Other libraries take a file's name where this option takes its content.
        let content = ours == "google_service_account" && value.trim_start().starts_with('{');
        let ours = if content { "google_service_account_key" } else { ours };
        (ours.to_ascii_lowercase(), value)
    };
    options.0.into_iter().map(name).collect()
}

/// Returns the options of `url`, by names that every reader over `object_store` knows.
///
/// # Errors
/// Like [`Location::parse`].
pub fn options_of(url: &str) -> Result<BTreeMap<String, String>> {
    let Location::Remote { service, .. } = Location::parse(url)? else {
        return Ok(BTreeMap::new());
    };
    let mut named = named(service, &options::of(url));
    if named.iter().any(|(key, value)| key.ends_with("endpoint") && is_plain(Some(value))) {
        named.entry("allow_http".to_owned()).or_insert_with(|| "true".to_owned());
    }
    Ok(named)
}

/// Options in the backend's own terms.
fn keys<K: FromStr>(service: Service, root: &str, options: &Options) -> Result<Vec<(K, String)>> {
    let read = |(name, value): (String, String)| match name.parse() {
        Ok(key) => Ok((key, value)),
        Err(_) => Err(Error::Option { key: name, url: root.to_owned() }),
    };
    named(service, options).into_iter().map(read).collect()
}

/// Returns whether an endpoint is plain HTTP: `http://` is taken as the user's decision.
fn is_plain(endpoint: Option<&String>) -> bool {
    endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"))
}

fn s3(root: &str, options: &Options) -> Result<AmazonS3Builder> {
    let url = root.replacen("s3n://", "s3://", 1);
    let mut builder = AmazonS3Builder::from_env().with_url(url).with_retry(retry());
    for (key, value) in keys(Service::S3, root, options)? {
        builder = builder.with_config(key, value);
    }
    let plain = is_plain(builder.get_config_value(&AmazonS3ConfigKey::Endpoint).as_ref());
    Ok(if plain { builder.with_allow_http(true) } else { builder })
}

fn gcs(root: &str, options: &Options) -> Result<GoogleCloudStorageBuilder> {
    let url = root.replacen("gcs://", "gs://", 1);
    let mut builder = GoogleCloudStorageBuilder::from_env().with_url(url).with_retry(retry());
    for (key, value) in keys(Service::Gcs, root, options)? {
        builder = builder.with_config(key, value);
    }
    let plain = is_plain(builder.get_config_value(&GoogleConfigKey::BaseUrl).as_ref());
    let http = object_store::ClientConfigKey::AllowHttp;
    Ok(if plain { builder.with_config(GoogleConfigKey::Client(http), "true") } else { builder })
}

fn azure(root: &str, options: &Options) -> Result<MicrosoftAzureBuilder> {
    let mut builder = MicrosoftAzureBuilder::from_env().with_url(root).with_retry(retry());
    for (key, value) in keys(Service::Azure, root, options)? {
        builder = builder.with_config(key, value);
    }
    let plain = is_plain(builder.get_config_value(&AzureConfigKey::Endpoint).as_ref());
    Ok(if plain { builder.with_allow_http(true) } else { builder })
}

/// Returns the parts of Azure's connection string with the account and the address.
fn connection(text: &str) -> impl Iterator<Item = (&'static str, &str)> {
    text.split(';').filter_map(|part| {
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

    fn options(pairs: &[(&str, &str)]) -> Options {
        Options(pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn an_unknown_option_is_named_and_its_value_is_not() {
        let error = s3("s3://bucket", &options(&[("sekret", "hidden")])).unwrap_err().to_string();
        assert!(
            error.contains("sekret") && error.ends_with("s3://bucket") && !error.contains("hidden"),
            "{error}"
        );
    }

    #[test]
    fn a_value_that_was_parsed_as_a_file_name_is_not_in_the_message() {
        for secret in ["ya29.hidden-token", r#"{"private_key": "hidden-token"}"#] {
            let error =
                open(Service::Gcs, "gs://data", &options(&[("token", secret)])).unwrap_err();
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
        options::configure(
            "s3://told",
            options(&[("key", "id"), ("endpoint_url", "http://host:1")]),
        );
        let told = options_of("s3://told/x").unwrap();
        let expected = [
            ("allow_http", "true"),
            ("aws_access_key_id", "id"),
            ("aws_endpoint", "http://host:1"),
        ];
        assert_eq!(told, options(&expected).0);
        assert!(options_of("/tmp/x").unwrap().is_empty());
    }

    #[test]
    fn fsspecs_names_are_understood() {
        let given =
            options(&[("key", "id"), ("endpoint_url", "http://host:1"), ("aws_region", "here")]);
        let builder = s3("s3://bucket", &given).unwrap();
        assert_eq!(builder.get_config_value(&AmazonS3ConfigKey::AccessKeyId).unwrap(), "id");
        assert_eq!(
            builder.get_config_value(&AmazonS3ConfigKey::Endpoint).unwrap(),
            "http://host:1"
        );
        let given = options(&[(
            "connection_string",
            "AccountName=a;AccountKey=b==;BlobEndpoint=http://h:1/a",
        )]);
        let builder = azure("az://data", &given).unwrap();
        assert_eq!(builder.get_config_value(&AzureConfigKey::AccountName).unwrap(), "a");
        assert_eq!(builder.get_config_value(&AzureConfigKey::AccessKey).unwrap(), "b==");
    }
}
