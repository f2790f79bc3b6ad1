// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! URLs: which backend, and which path within it.

use std::path::{Component, PathBuf};

use crate::error::{Error, Result};

/// A parsed URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// A directory of this machine; absolute, without `.` and `..`.
    Local(PathBuf),
    /// A store of this process, by name, and the path within it.
    Memory {
        /// Which one.
        name: String,
        /// Path, without a leading slash.
        path: String,
    },
}

impl Location {
    /// Reads `url`.
    pub(crate) fn parse(url: &str) -> Result<Self> {
        let Some((scheme, rest)) = split(url) else {
            return Ok(Self::Local(absolute(url)?));
        };
        match scheme {
            "file" => {
                let path = rest.strip_prefix("//").unwrap_or(rest);
                let path = path.strip_prefix("localhost").filter(|p| p.starts_with('/')).unwrap_or(path);
                if path.starts_with('/') {
                    Ok(Self::Local(absolute(path)?))
                } else {
                    Err(Error::Url { url: url.to_owned(), reason: "a file URL needs an absolute path" })
                }
            }
            "memory" => {
                let rest = rest.trim_start_matches('/');
                let (name, path) = rest.split_once('/').unwrap_or((rest, ""));
                Ok(Self::Memory { name: name.to_owned(), path: path.trim_matches('/').to_owned() })
            }
            other => Err(Error::Scheme { scheme: other.to_owned(), url: url.to_owned() }),
        }
    }

    /// The URL in its full form.
    pub(crate) fn url(&self) -> String {
        match self {
            Self::Local(path) => format!("file://{}", path.display()),
            Self::Memory { name, path } if path.is_empty() => format!("memory://{name}"),
            Self::Memory { name, path } => format!("memory://{name}/{path}"),
        }
    }
}

/// The path with its scheme: `/tmp/x` and `x` become `file:///...`; what has a scheme stays as it is.
///
/// # Errors
/// An empty path, or a relative one when the working directory is gone.
pub fn full(path: &str) -> Result<String> {
    match split(path) {
        Some(_) => Ok(path.to_owned()),
        None => Ok(Location::Local(absolute(path)?).url()),
    }
}

/// The path without its scheme, as the file system behind it knows it.
///
/// # Errors
/// As [`full`], or an unknown scheme.
pub fn localized(url: &str) -> Result<String> {
    Ok(match Location::parse(url)? {
        Location::Local(path) => path.display().to_string(),
        Location::Memory { name, path } => format!("/{name}/{path}").trim_end_matches('/').to_owned(),
    })
}

/// Scheme and rest of a URL; `None` for a path. A scheme has letters, digits, `+`, `-`, `.`, and two at least.
fn split(url: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = url.split_once(':')?;
    let named = scheme.len() > 1
        && scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    (named && rest.starts_with('/')).then_some((scheme, rest))
}

/// Absolute, with `.` and `..` resolved by name alone: the directory need not exist.
fn absolute(path: &str) -> Result<PathBuf> {
    let refuse = |reason| Error::Url { url: path.to_owned(), reason };
    let whole =
        std::path::absolute(path).map_err(|_| refuse("empty, or relative to a directory that is gone"))?;
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
            let whole = full(path).unwrap();
            assert_eq!(whole, format!("file://{path}"));
            assert_eq!(localized(&whole).unwrap(), path);
        }
        assert_eq!(full("s3://bucket/x").unwrap(), "s3://bucket/x");
    }

    #[test]
    fn the_forms_of_a_local_path_are_one_place() {
        for form in
            ["/tmp/x", "file:/tmp/x", "file:///tmp/x", "file://localhost/tmp/x", "/tmp/y/../x/", "/tmp/./x"]
        {
            assert_eq!(Location::parse(form).unwrap(), Location::Local(PathBuf::from("/tmp/x")), "{form}");
        }
        assert_eq!(Location::parse("memory://a/b/c/").unwrap().url(), "memory://a/b/c");
    }

    #[test]
    fn an_unknown_scheme_is_named() {
        let error = Location::parse("s3://bucket/x").unwrap_err().to_string();
        assert_eq!(error, "no store for the scheme s3, known are file and memory: s3://bucket/x");
        assert!(
            Location::parse("file:x").is_ok_and(|l| matches!(l, Location::Local(_))),
            "a relative name with a colon"
        );
        assert!(Location::parse("").is_err());
    }
}
