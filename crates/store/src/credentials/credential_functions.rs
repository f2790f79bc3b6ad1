// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Functions of the user that return credentials.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use object_store::aws::AwsCredential;
use object_store::azure::{AzureAccessKey, AzureCredential};
use object_store::gcp::GcpCredential;

use super::{CredentialError, CredentialSource, FetchedCredential, parse_expiry};

/// Option whose value is the name of a registered function.
pub(crate) const FUNCTION_OPTION: &str = "credentials";

/// The values that a function returned, by name.
pub type CredentialValues = BTreeMap<String, String>;

/// A function that returns credentials, or the reason why there are none.
type CredentialFunction = Arc<dyn Fn() -> Result<CredentialValues, String> + Send + Sync>;

static CREDENTIAL_FUNCTIONS: LazyLock<ArcSwap<BTreeMap<String, CredentialFunction>>> =
    LazyLock::new(ArcSwap::default);

/// Registers a function under the name that the storage option `credentials` then has. A name keeps
/// its first function.
pub fn register_credential_function(
    name: &str,
    function: impl Fn() -> Result<CredentialValues, String> + Send + Sync + 'static,
) {
    let function: CredentialFunction = Arc::new(function);
    // Readers take no lock, which a forked child might find held.
    CREDENTIAL_FUNCTIONS.rcu(|functions| {
        let mut functions = BTreeMap::clone(functions);
        functions.entry(name.to_owned()).or_insert_with(|| Arc::clone(&function));
        functions
    });
}

/// Returns the source of the option's value.
///
/// # Errors
/// A name that is not registered in this process.
pub(crate) fn find_credential_function(
    name: &str,
) -> Result<CredentialFunctionSource, CredentialError> {
    let functions = CREDENTIAL_FUNCTIONS.load();
    let function = functions.get(name).cloned().ok_or_else(|| {
        CredentialError::new(FUNCTION_ORIGIN, "the option must be a Python function")
    })?;
    Ok(CredentialFunctionSource { function })
}

const FUNCTION_ORIGIN: &str = "the function in the storage option credentials";

/// A function as a source.
pub(crate) struct CredentialFunctionSource {
    function: CredentialFunction,
}

/// A credential that a function can return.
trait FunctionCredential: Sized {
    /// Reads the credential, without its expiry.
    fn from_values(values: &mut CredentialValues) -> Result<Self, String>;
}

#[async_trait]
impl<C: FunctionCredential + Send + Sync + 'static> CredentialSource<C>
    for CredentialFunctionSource
{
    fn origin(&self) -> String {
        FUNCTION_ORIGIN.to_owned()
    }

    async fn fetch(&self) -> Result<FetchedCredential<C>, CredentialError> {
        let refuse = |reason: String| CredentialError::new(FUNCTION_ORIGIN, reason);
        let function = Arc::clone(&self.function);
        // The function is Python code: it may wait for the interpreter or for a network.
        let values = tokio::task::spawn_blocking(move || function());
        let values = values.await.map_err(|error| refuse(error.to_string()))?.map_err(refuse)?;
        let (credential, expires) = credential_from_values(values).map_err(refuse)?;
        Ok(FetchedCredential::Value { credential, expires })
    }
}

fn credential_from_values<C: FunctionCredential>(
    mut values: CredentialValues,
) -> Result<(C, Option<SystemTime>), String> {
    // The second name is the one in answers of AWS, which functions pass on.
    let expires = values.remove("expires").or_else(|| values.remove("Expiration"));
    let expires = expires.map(|text| parse_expiry(&text)).transpose()?;
    let credential = C::from_values(&mut values)?;
    // A misspelled `expires` would otherwise be a credential that never expires.
    match values.keys().next() {
        Some(name) => Err(format!("it returned a value with an unknown name: {name}")),
        None => Ok((credential, expires)),
    }
}

/// Takes the value that has one of these names.
fn take_value(values: &mut CredentialValues, names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| values.remove(*name)).filter(|value| !value.is_empty())
}

impl FunctionCredential for AwsCredential {
    fn from_values(values: &mut CredentialValues) -> Result<Self, String> {
        let missing = |name: &str| format!("it returned no {name} (expected: key, secret, token)");
        Ok(Self {
            key_id: take_value(values, &["key", "AccessKeyId"]).ok_or_else(|| missing("key"))?,
            secret_key: take_value(values, &["secret", "SecretAccessKey"])
                .ok_or_else(|| missing("secret"))?,
            token: take_value(values, &["token", "SessionToken"]),
        })
    }
}

impl FunctionCredential for GcpCredential {
    fn from_values(values: &mut CredentialValues) -> Result<Self, String> {
        let bearer = take_value(values, &["token"]).ok_or("it returned no token")?;
        Ok(Self { bearer })
    }
}

impl FunctionCredential for AzureCredential {
    fn from_values(values: &mut CredentialValues) -> Result<Self, String> {
        let found = ["sas_token", "account_key", "token"]
            .into_iter()
            .filter_map(|name| Some((name, take_value(values, &[name])?)))
            .collect::<Vec<_>>();
        match found.as_slice() {
            [("sas_token", text)] => Ok(Self::SASToken(parse_sas_parameters(text)?)),
            [("account_key", key)] => AzureAccessKey::try_new(key)
                .map(Self::AccessKey)
                .map_err(|_| "the account_key is not in base64".to_owned()),
            [(_, token)] => Ok(Self::BearerToken(token.clone())),
            _ => Err("it must return one of sas_token, account_key and token".to_owned()),
        }
    }
}

/// Returns the parameters of a shared access signature.
///
/// # Errors
/// Text that is no such signature.
pub(super) fn parse_sas_parameters(text: &str) -> Result<Vec<(String, String)>, String> {
    // Here a plus sign is itself, and not a space.
    let text = text.trim().trim_start_matches('?').replace('+', "%2B");
    let pairs = form_urlencoded::parse(text.as_bytes()).into_owned().collect::<Vec<_>>();
    if pairs.iter().any(|(name, value)| name == "sig" && !value.is_empty()) {
        Ok(pairs)
    } else {
        Err("the sas_token has no parameter sig".to_owned())
    }
}
