// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Parses URLs into a backend and a path.

use std::path::{Component, PathBuf};

use crate::error::{Error, Result};

/// Directory at which Databricks mounts DBFS.
const DBFS_MOUNT: &str = "/dbfs";
/// Variable with a directory that replaces `/dbfs`, for tests.
const DBFS_ROOT_VARIABLE: &str = "FARANDOLE_DBFS_ROOT";

/// Storage service of a URL scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StorageService {
    /// Amazon S3 and compatible services.
    S3,
    /// Google Cloud Storage.
    Gcs,
    /// Azure Blob Storage and Data Lake.
    Azure,
    /// HDFS.
    Hdfs,
}

impl StorageService {
    /// Returns the service of `scheme`.
    pub(crate) fn from_scheme(scheme: &str) -> Option<Self> {
        Some(match scheme {
            // `s3a` and `s3n` are the names of Hadoop, and so of Spark.
            "s3" | "s3a" | "s3n" => Self::S3,
            "gs" | "gcs" => Self::Gcs,
            "az" | "abfs" | "abfss" | "adl" | "azure" => Self::Azure,
            "hdfs" | "viewfs" => Self::Hdfs,
            _ => return None,
        })
    }
}

/// A parsed URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoreLocation {
    /// A local directory; absolute, without `.` and `..`.
    Local(PathBuf),
    /// An in-memory store of this process.
    Memory {
        /// Name of the store.
        name: String,
        /// Path, without a leading slash.
        path: String,
    },
    /// A location over the network.
    Remote {
        /// The service.
        service: StorageService,
        /// Scheme with bucket, container or name node: `s3://bucket`.
        root: String,
        /// Path, without a leading slash.
        path: String,
    },
}

impl StoreLocation {
    /// Parses `url`.
    pub(crate) fn parse(url: &str) -> Result<Self> {
        let refuse = |reason| Error::Url { url: url.to_owned(), reason };
        let Some((scheme, rest)) = split_scheme(url) else {
            return Ok(Self::Local(remap_dbfs_path(absolute_path(url)?)));
        };
        // Before all other checks, because their errors would show the URL.
        if let Some(url) = redact_secret(scheme, rest) {
            return Err(Error::Url { url, reason: "it carries a secret: pass storage options" });
        }
        match scheme {
            "file" => {
                let path = rest.strip_prefix("//").unwrap_or(rest);
                // RFC 8089 allows `localhost` as the host of a local file.
                let path =
                    path.strip_prefix("localhost").filter(|p| p.starts_with('/')).unwrap_or(path);
                if path.starts_with('/') {
                    Ok(Self::Local(remap_dbfs_path(absolute_path(path)?)))
                } else {
                    Err(refuse("a file URL needs an absolute path"))
                }
            }
            "dbfs" if rest.starts_with("//") => {
                Err(refuse("DBFS paths have one slash: dbfs:/path"))
            }
            // Unity Catalog volumes are mounted at the root.
            "dbfs" if rest == "/Volumes" || rest.starts_with("/Volumes/") => {
                Ok(Self::Local(remap_dbfs_path(absolute_path(rest)?)))
            }
            "dbfs" => {
                Ok(Self::Local(remap_dbfs_path(absolute_path(&format!("{DBFS_MOUNT}{rest}"))?)))
            }
            "memory" => {
                let rest = rest.trim_start_matches('/');
                let (name, path) = rest.split_once('/').unwrap_or((rest, ""));
                Ok(Self::Memory { name: name.to_owned(), path: path.trim_matches('/').to_owned() })
            }
            other => {
                let service = StorageService::from_scheme(other).ok_or_else(|| Error::Scheme {
                    scheme: other.to_owned(),
                    url: url.to_owned(),
                })?;
                let rest = rest
                    .strip_prefix("//")
                    .ok_or_else(|| refuse("two slashes come after the scheme"))?;
                let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
                // For HDFS, Hadoop's configuration names the default name node.
                if authority.is_empty() && service != StorageService::Hdfs {
                    return Err(refuse("a bucket or container is missing"));
                }
                let root = format!("{other}://{authority}");
                Ok(Self::Remote { service, root, path: path.trim_matches('/').to_owned() })
            }
        }
    }

    /// Returns the URL in its full form.
    pub(crate) fn url(&self) -> String {
        match self {
            Self::Local(path) => format!("file://{}", path.display()),
            Self::Memory { name, path } if path.is_empty() => format!("memory://{name}"),
            Self::Memory { name, path } => format!("memory://{name}/{path}"),
            Self::Remote { root, path, .. } if path.is_empty() => root.clone(),
            Self::Remote { root, path, .. } => format!("{root}/{path}"),
        }
    }
}

/// Returns the path with its scheme: `/tmp/x` and `x` become `file:///...`, `dbfs:/x` becomes
/// `file:///dbfs/x`. Other URLs are returned unchanged.
///
/// # Errors
/// An empty path, or a relative one when the working directory is gone.
pub fn full_path(path: &str) -> Result<String> {
    match split_scheme(path) {
        Some(("dbfs", _)) => Ok(StoreLocation::parse(path)?.url()),
        Some(_) => Ok(path.to_owned()),
        None => Ok(format!("file://{}", absolute_path(path)?.display())),
    }
}

/// Returns the path without its scheme, as the service names it: with the bucket for object stores,
/// without the name node for HDFS.
///
/// # Errors
/// Like [`full_path`], or an unknown scheme.
pub fn localized_path(url: &str) -> Result<String> {
    Ok(match StoreLocation::parse(url)? {
        StoreLocation::Local(path) => path.display().to_string(),
        StoreLocation::Memory { name, path } => {
            format!("/{name}/{path}").trim_end_matches('/').to_owned()
        }
        StoreLocation::Remote { service: StorageService::Hdfs, path, .. } => format!("/{path}"),
        StoreLocation::Remote { root, path, .. } => {
            let (_, bucket) = root.split_once("://").unwrap_or(("", &root));
            format!("{bucket}/{path}").trim_end_matches('/').to_owned()
        }
    })
}

/// Returns scheme and rest of a URL; `None` for a path. A scheme has at least two characters:
/// letters, digits, `+`, `-`, `.`.
fn split_scheme(url: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = url.split_once(':')?;
    let named = scheme.len() > 1
        && scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    (named && rest.starts_with('/')).then_some((scheme, rest))
}

/// Returns a URL with its password or signature hidden; `None` for a URL without secrets.
fn redact_secret(scheme: &str, rest: &str) -> Option<String> {
    let rest = rest.strip_prefix("//").filter(|_| scheme != "file")?;
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    // A password may contain `@`.
    let (user, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    let (place, query) = path.split_once('?').unwrap_or((path, ""));
    let signed = query
        .split('&')
        .any(|part| part.starts_with("sig=") || part.starts_with("X-Amz-Signature="));
    match (user.split_once(':'), signed) {
        (Some((name, _)), _) => Some(format!("{scheme}://{name}:***@{host}/{place}")),
        (None, true) => Some(format!("{scheme}://{authority}/{place}?***")),
        (None, false) => None,
    }
}

/// Replaces `/dbfs` in a path by the directory of [`DBFS_ROOT_VARIABLE`], if it is set.
fn remap_dbfs_path(path: PathBuf) -> PathBuf {
    match (
        farandole_config::environment_variable(DBFS_ROOT_VARIABLE),
        path.strip_prefix(DBFS_MOUNT),
    ) {
        (Some(root), Ok(rest)) if !root.is_empty() => PathBuf::from(root).join(rest),
        _ => path,
    }
}

/// Returns the absolute path, with `.` and `..` resolved by name only, because the directory need
/// not exist.
fn absolute_path(path: &str) -> Result<PathBuf> {
    let refuse = |reason| Error::Url { url: path.to_owned(), reason };
    let whole = std::path::absolute(path)
        .map_err(|_| refuse("empty, or relative to a directory that is gone"))?;
    let mut clean = PathBuf::new();
    for part in whole.components() {
        match part {
            Component::ParentDir => {
                clean.pop();
            }
            Component::CurDir => {}
            other => clean.push(other),
        }
    }
    Ok(clean)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn st_3_full_and_localized_are_inverse_and_escape_nothing() {
        for path in ["/tmp/x", "/a b/c=d/ü%20#x"] {
            let whole = full_path(path).unwrap();
            assert_eq!(whole, format!("file://{path}"));
            assert_eq!(localized_path(&whole).unwrap(), path);
        }
        assert_eq!(full_path("s3://bucket/x").unwrap(), "s3://bucket/x");
        assert_eq!(localized_path("s3://bucket/x/").unwrap(), "bucket/x");
        assert_eq!(localized_path("hdfs://node:8020/user/x").unwrap(), "/user/x");
        assert_eq!(localized_path("hdfs:///user/x").unwrap(), "/user/x");
    }

    #[test]
    fn the_forms_of_a_local_path_are_one_place() {
        for form in [
            "/tmp/x",
            "file:/tmp/x",
            "file:///tmp/x",
            "file://localhost/tmp/x",
            "/tmp/y/../x/",
            "/tmp/./x",
        ] {
            assert_eq!(
                StoreLocation::parse(form).unwrap(),
                StoreLocation::Local(PathBuf::from("/tmp/x")),
                "{form}"
            );
        }
        assert_eq!(StoreLocation::parse("memory://a/b/c/").unwrap().url(), "memory://a/b/c");
    }

    #[test]
    fn the_forms_of_a_databricks_path_are_one_place() {
        for form in ["dbfs:/x/y", "/dbfs/x/y", "file:///dbfs/x/y", "file:/dbfs/x/y"] {
            assert_eq!(
                StoreLocation::parse(form).unwrap(),
                StoreLocation::Local(PathBuf::from("/dbfs/x/y")),
                "{form}"
            );
            assert_eq!(
                full_path(form).unwrap().replace("file:/dbfs", "file:///dbfs"),
                "file:///dbfs/x/y"
            );
        }
        assert_eq!(localized_path("dbfs:/Volumes/main/x").unwrap(), "/Volumes/main/x");
        assert!(StoreLocation::parse("dbfs://x").unwrap_err().to_string().contains("one slash"));
    }

    #[test]
    fn remote_urls_keep_their_scheme() {
        for url in [
            "s3://bucket/a/b",
            "gs://bucket",
            "abfss://data@account.dfs.core.windows.net/x",
            "hdfs://n:1/x",
        ] {
            let location = StoreLocation::parse(url).unwrap();
            assert_eq!(location.url(), url);
            assert!(matches!(location, StoreLocation::Remote { .. }), "{url}");
        }
        assert!(StoreLocation::parse("s3:///x").unwrap_err().to_string().contains("bucket"));
    }

    #[test]
    fn a_secret_in_a_url_is_refused_and_not_repeated() {
        for (url, shown) in [
            ("s3://key:hidden@bucket/x", "s3://key:***@bucket/x"),
            ("s3://key:hid@den@bucket", "s3://key:***@bucket/"),
            ("https://me:hidden@host/x", "https://me:***@host/x"),
            ("az://data/x?sv=1&sig=hidden", "az://data/x?***"),
        ] {
            let error = StoreLocation::parse(url).unwrap_err().to_string();
            assert!(error.ends_with(shown) && !error.contains("hid"), "{error}");
        }
        for fine in
            ["abfss://data@account.dfs.core.windows.net/x", "hdfs://n:1/x@y:z", "s3://bucket/a?b=c"]
        {
            assert_eq!(StoreLocation::parse(fine).unwrap().url(), fine);
        }
    }

    #[test]
    fn an_unknown_scheme_is_named() {
        let error = StoreLocation::parse("ftp://host/x").unwrap_err().to_string();
        assert!(
            error.contains("no store for the scheme ftp") && error.ends_with("ftp://host/x"),
            "{error}"
        );
        assert!(
            StoreLocation::parse("file:x").is_ok_and(|l| matches!(l, StoreLocation::Local(_))),
            "a relative name with a colon"
        );
        assert!(StoreLocation::parse("").is_err());
    }
}
