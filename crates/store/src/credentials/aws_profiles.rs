// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Profiles of `~/.aws/config` and `~/.aws/credentials`.

use std::collections::BTreeMap;
use std::time::SystemTime;

use object_store::aws::AwsCredential;
use serde::Deserialize;

use super::{CredentialError, SourceEnvironment, parse_expiry, read_credential_file};

/// Longest chain of profiles that name each other as `source_profile`.
// Ends chains that lead back to themselves.
const MAX_PROFILE_CHAIN: usize = 8;

type ProfileSettings = BTreeMap<String, String>;

/// The sections of both files.
pub(super) struct ProfileFiles {
    profiles: BTreeMap<String, ProfileSettings>,
    sessions: BTreeMap<String, ProfileSettings>,
    places: String,
    home: SourceEnvironment,
}

/// A role to assume.
#[derive(Clone)]
pub(super) struct AssumedRole {
    pub(super) arn: String,
    pub(super) session_name: Option<String>,
    pub(super) external_id: Option<String>,
    pub(super) seconds: Option<String>,
}

/// A profile's way to credentials.
pub(super) enum ProfileCredentialMethod {
    Keys(AwsCredential),
    Process(String),
    WebIdentity {
        token_file: String,
        role: AssumedRole,
    },
    Role {
        base: Box<ProfileCredentialMethod>,
        role: AssumedRole,
    },
    SingleSignOn {
        token_file: String,
        region: String,
        account: String,
        role: String,
    },
    /// The identity of the machine or container.
    Machine,
    /// The keys in the environment.
    Environment,
}

impl ProfileFiles {
    /// Reads both files; a missing file is empty.
    ///
    /// # Errors
    /// A file that cannot be read, or is not text.
    pub(super) fn read(environment: &SourceEnvironment) -> Result<Self, CredentialError> {
        let path = |variable: &str, default: &str| {
            environment.expand_home(environment.get(variable).unwrap_or(default))
        };
        let config = path("AWS_CONFIG_FILE", "~/.aws/config");
        let keys = path("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials");
        let (mut profiles, mut sessions) = (BTreeMap::new(), BTreeMap::new());
        for (section, settings) in parse_sections(&read_if_present(&config)?) {
            if let Some(name) = section.strip_prefix("sso-session ") {
                sessions.insert(name.trim().to_owned(), settings);
            } else {
                // In the config file, only the default profile has no prefix.
                let name = section.strip_prefix("profile ").unwrap_or(&section).trim();
                profiles.insert(name.to_owned(), settings);
            }
        }
        for (name, settings) in parse_sections(&read_if_present(&keys)?) {
            // Like in the AWS command line, settings of the credentials file come first.
            profiles.entry(name).or_default().extend(settings);
        }
        let places = format!("{config} and {keys}");
        Ok(Self { profiles, sessions, places, home: environment.clone() })
    }

    /// Returns the setting of a profile.
    fn setting(&self, profile: &str, name: &str) -> Option<&str> {
        self.profiles.get(profile)?.get(name).map(String::as_str)
    }

    /// Returns the place of a profile, for messages.
    pub(super) fn origin(&self, profile: &str) -> String {
        format!("the profile {profile:?} in {}", self.places)
    }

    /// Returns whether a profile exists.
    pub(super) fn contains(&self, profile: &str) -> bool {
        self.profiles.contains_key(profile)
    }

    /// Returns the way to credentials; `None` for a profile with other settings only.
    ///
    /// # Errors
    /// A profile that names other profiles or sessions that do not exist, or is incomplete.
    pub(super) fn credentials(
        &self,
        profile: &str,
    ) -> Result<Option<ProfileCredentialMethod>, CredentialError> {
        self.resolve_profile_chain(profile, true, MAX_PROFILE_CHAIN)
    }

    fn resolve_profile_chain(
        &self,
        profile: &str,
        follows_roles: bool,
        links_left: usize,
    ) -> Result<Option<ProfileCredentialMethod>, CredentialError> {
        let refuse = |reason: String| CredentialError::new(self.origin(profile), reason);
        let setting = |name: &str| self.setting(profile, name);
        let need = |name: &str| {
            setting(name).map(str::to_owned).ok_or_else(|| refuse(format!("it has no {name}")))
        };
        if let (Some(arn), true) = (setting("role_arn"), follows_roles) {
            let role = AssumedRole {
                arn: arn.to_owned(),
                session_name: setting("role_session_name").map(str::to_owned),
                external_id: setting("external_id").map(str::to_owned),
                seconds: setting("duration_seconds").map(str::to_owned),
            };
            if let Some(token_file) = setting("web_identity_token_file") {
                let token_file = self.home.expand_home(token_file);
                return Ok(Some(ProfileCredentialMethod::WebIdentity { token_file, role }));
            }
            if setting("mfa_serial").is_some() {
                return Err(refuse("a role with mfa_serial needs a person at each renewal".into()));
            }
            let base = match (setting("source_profile"), setting("credential_source")) {
                (Some(source), _) => {
                    if links_left == 0 {
                        return Err(refuse("its source_profile leads back to it".into()));
                    }
                    // A profile that names itself has keys besides the role.
                    self.resolve_profile_chain(source, source != profile, links_left - 1)?
                        .ok_or_else(|| {
                            refuse(format!("its source_profile {source:?} has no credentials"))
                        })?
                }
                (None, Some("Environment")) => ProfileCredentialMethod::Environment,
                (None, Some("EcsContainer" | "Ec2InstanceMetadata")) => {
                    ProfileCredentialMethod::Machine
                }
                (None, _) => {
                    return Err(refuse("its role_arn needs a source_profile".into()));
                }
            };
            return Ok(Some(ProfileCredentialMethod::Role { base: Box::new(base), role }));
        }
        if let Some(role) = setting("sso_role_name") {
            let (region, cached) = match setting("sso_session") {
                Some(name) => {
                    let session = self.sessions.get(name).ok_or_else(|| {
                        refuse(format!("its sso_session {name:?} does not exist"))
                    })?;
                    let region = session
                        .get("sso_region")
                        .ok_or_else(|| refuse("its sso-session has no sso_region".into()))?;
                    (region.clone(), name.to_owned())
                }
                None => (need("sso_region")?, need("sso_start_url")?),
            };
            let token_file = format!("~/.aws/sso/cache/{}.json", sso_cache_file_stem(&cached));
            return Ok(Some(ProfileCredentialMethod::SingleSignOn {
                token_file: self.home.expand_home(&token_file),
                region,
                account: need("sso_account_id")?,
                role: role.to_owned(),
            }));
        }
        if let Some(key_id) = setting("aws_access_key_id") {
            return Ok(Some(ProfileCredentialMethod::Keys(AwsCredential {
                key_id: key_id.to_owned(),
                secret_key: need("aws_secret_access_key")?,
                token: setting("aws_session_token").map(str::to_owned),
            })));
        }
        Ok(setting("credential_process")
            .map(|text| ProfileCredentialMethod::Process(text.to_owned())))
    }
}

/// Returns the region of the profile in use.
pub(crate) fn profile_region(
    profile: Option<&str>,
    environment: &SourceEnvironment,
) -> Option<String> {
    let profile = profile.or_else(|| environment.get("AWS_PROFILE")).unwrap_or("default");
    // Files that cannot be read are reported when credentials are sought in them.
    let files = ProfileFiles::read(environment).ok()?;
    files.setting(profile, "region").map(str::to_owned)
}

/// Reads a small file.
///
/// # Errors
/// A file that exists and cannot be read.
fn read_if_present(path: &str) -> Result<String, CredentialError> {
    match read_credential_file(path) {
        Ok(text) => Ok(text),
        Err(error)
            if matches!(
                error.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(String::new())
        }
        Err(error) => Err(CredentialError::new(path, error)),
    }
}

/// Returns the settings of each section. Indented lines belong to settings that are not used here.
fn parse_sections(text: &str) -> BTreeMap<String, ProfileSettings> {
    let mut sections: BTreeMap<String, ProfileSettings> = BTreeMap::new();
    let mut name = None;
    for line in text.lines().filter(|line| !line.starts_with([' ', '\t', '#', ';'])) {
        let line = line.split_once(" #").map_or(line, |(line, _)| line).trim();
        if let Some(section) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            let words = section.split_whitespace().collect::<Vec<_>>().join(" ").replace('"', "");
            sections.entry(words.clone()).or_default();
            name = Some(words);
        } else if let (Some(name), Some((key, value))) = (&name, line.split_once('=')) {
            let settings = sections.entry(name.clone()).or_default();
            // The AWS command line ignores the case of keys, too.
            settings.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    sections
}

/// Returns the name under which the AWS command line caches the token of a session.
fn sso_cache_file_stem(text: &str) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CachedToken {
    access_token: String,
    expires_at: String,
}

/// Returns the token of single sign-on that the AWS command line has cached.
///
/// # Errors
/// A missing, damaged or expired token.
pub(super) fn read_sso_token(path: &str) -> Result<String, String> {
    let advice = "run `aws sso login`";
    let text = read_credential_file(path).map_err(|error| format!("{path}: {error}: {advice}"))?;
    let token: CachedToken =
        serde_json::from_str(&text).map_err(|_| format!("{path} is damaged: {advice}"))?;
    // Earlier versions of the command line wrote `2030-01-31T12:00:00UTC`.
    let expires = parse_expiry(&token.expires_at.replace("UTC", "Z"))
        .map_err(|error| format!("{path}: {error}"))?;
    if expires <= SystemTime::now() {
        return Err(format!("the token in {path} has expired: {advice}"));
    }
    Ok(token.access_token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(config: &str, keys: &str) -> ProfileFiles {
        let directory = tempfile::tempdir().unwrap();
        let place = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        let variables = [
            ("AWS_CONFIG_FILE".to_owned(), place("config", config)),
            ("AWS_SHARED_CREDENTIALS_FILE".to_owned(), place("credentials", keys)),
            ("HOME".to_owned(), "/home/someone".to_owned()),
        ];
        ProfileFiles::read(&SourceEnvironment(variables.into())).unwrap()
    }

    #[test]
    fn sections_comments_and_nested_settings_are_read_as_the_command_line_does() {
        let text = "\
# comment
[default]
region = here # there
s3 =
  max_concurrent_requests = 20
[profile  \"a b\"]
role_arn=x=y
[sso-session corp]
sso_region = far
";
        let sections = parse_sections(text);
        assert_eq!(sections["default"]["region"], "here");
        assert!(!sections["default"].contains_key("max_concurrent_requests"));
        assert_eq!(sections["profile a b"]["role_arn"], "x=y");
        assert_eq!(sections["sso-session corp"]["sso_region"], "far");
    }

    #[test]
    fn a_file_larger_than_any_file_of_credentials_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 40).unwrap();
        let path = file.path().display().to_string();
        for error in
            [read_if_present(&path).unwrap_err().to_string(), read_sso_token(&path).unwrap_err()]
        {
            assert!(error.contains(&path) && error.contains("has more than"), "{error}");
        }
    }

    #[test]
    fn the_file_of_keys_has_priority_and_roles_follow_their_source() {
        let files = files(
            "[default]\naws_access_key_id=old\naws_secret_access_key=s\n\
             [profile role]\nrole_arn=arn\nsource_profile=default\nexternal_id=e\n",
            "[default]\naws_access_key_id=new\n",
        );
        let Some(ProfileCredentialMethod::Role { base, role }) = files.credentials("role").unwrap()
        else {
            panic!("no role")
        };
        assert_eq!((role.arn.as_str(), role.external_id.as_deref()), ("arn", Some("e")));
        let ProfileCredentialMethod::Keys(key) = *base else { panic!("no keys") };
        assert_eq!((key.key_id.as_str(), key.secret_key.as_str()), ("new", "s"));
    }

    #[test]
    fn the_cache_of_single_sign_on_is_found_by_session_or_by_start_page() {
        let files = files(
            "[profile a]\nsso_session=corp\nsso_account_id=1\nsso_role_name=r\n\
             [sso-session corp]\nsso_region=far\n\
             [profile b]\nsso_start_url=https://x\nsso_region=near\nsso_account_id=1\n\
             sso_role_name=r\n",
            "",
        );
        let mut found = Vec::new();
        for profile in ["a", "b"] {
            let Some(ProfileCredentialMethod::SingleSignOn { token_file, region, .. }) =
                files.credentials(profile).unwrap()
            else {
                panic!("no single sign-on")
            };
            assert!(token_file.starts_with("/home/someone/.aws/sso/cache/"), "{token_file}");
            found.push((token_file, region));
        }
        assert!(found[0].0.ends_with("/ee0bfd2552fbd840c02cc48b6e823320543c450f.json"));
        assert_eq!((found[0].1.as_str(), found[1].1.as_str()), ("far", "near"));
    }

    #[test]
    fn a_profile_that_cannot_be_used_says_why() {
        let files = files(
            "[profile loop]\nrole_arn=a\nsource_profile=pool\n\
             [profile pool]\nrole_arn=a\nsource_profile=loop\n\
             [profile alone]\nrole_arn=a\n\
             [profile half]\naws_access_key_id=k\n\
             [profile mfa]\nrole_arn=a\nsource_profile=half\nmfa_serial=m\n\
             [profile sso]\nsso_role_name=r\nsso_session=none\n",
            "",
        );
        for (profile, word) in [
            ("loop", "leads back"),
            ("alone", "source_profile"),
            ("half", "aws_secret_access_key"),
            ("mfa", "mfa_serial"),
            ("sso", "does not exist"),
        ] {
            let error = files.credentials(profile).err().unwrap().to_string();
            assert!(error.contains(word), "{error}");
        }
        assert!(files.credentials("missing").unwrap().is_none());
    }
}
