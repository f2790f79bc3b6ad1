// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Signs requests again: the backend signs a request once, and repeats it for minutes.

use std::sync::Arc;

use async_trait::async_trait;
use object_store::HeaderMap;
use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::azure::{AzureAuthorizer, AzureCredential};
use object_store::client::HttpRequest;
use object_store::gcp::GcpCredential;

use super::{CredentialError, NumberedCredential, RenewingCredentials};

/// Header of sessions of S3 Express, which have keys of their own.
const EXPRESS_TOKEN_HEADER: &str = "x-amz-s3session-token";
const UNSIGNED_PAYLOAD: &str = "UNSIGNED-PAYLOAD";
/// Parameters of a URL that belong to a shared access signature.
const SIGNATURE_PARAMETERS: &[&str] = &[
    "sv", "ss", "srt", "sr", "st", "se", "sp", "sip", "spr", "sig", "si", "skoid", "sktid", "skt",
    "ske", "sks", "skv", "saoid", "suoid", "scid", "sdd", "ses", "rscc", "rscd", "rsce", "rscl",
    "rsct",
];

/// The signature of a request by a credential with a number.
#[derive(Clone, Debug)]
pub(crate) struct RequestSignature {
    pub(crate) number: u64,
    /// Whether the source never has another credential.
    pub(crate) is_fixed: bool,
    /// Place of the credential, for messages.
    pub(crate) origin: String,
}

/// An answer by which a service refuses a credential.
pub(crate) struct CredentialRefusal {
    /// Whether the service says that the credential has expired, in contrast to missing permission.
    pub(crate) says_expired: bool,
}

/// Signs requests with the credentials in use.
#[async_trait]
pub(crate) trait CredentialSigner: std::fmt::Debug + Send + Sync {
    /// Signs a request that the backend has signed before; `None` for a request without signature.
    ///
    /// # Errors
    /// A source without a credential.
    async fn sign(
        &self,
        request: &mut HttpRequest,
    ) -> Result<Option<RequestSignature>, CredentialError>;

    /// Signs a request with another credential after the service has refused one; `None` if there
    /// is no other one.
    ///
    /// # Errors
    /// A source without a credential.
    async fn sign_after_refusal(
        &self,
        request: &mut HttpRequest,
        refused: &RequestSignature,
        refusal: &CredentialRefusal,
    ) -> Result<Option<RequestSignature>, CredentialError>;
}

/// A credential that signs requests.
pub(crate) trait SigningCredential:
    std::fmt::Debug + PartialEq + Send + Sync + 'static
{
    /// Returns whether the backend has signed a request. Public buckets need no signature.
    fn carries_signature(request: &HttpRequest) -> bool;

    /// Replaces the signature of a request; returns whether the request had one.
    fn replace_signature(&self, request: &mut HttpRequest, account: &str) -> bool;
}

/// The signer of a backend.
#[derive(Debug)]
pub(crate) struct RequestSigner<C> {
    pub(crate) credentials: Arc<RenewingCredentials<C>>,
    /// Account of Azure; empty for other services.
    pub(crate) account: String,
}

impl<C: SigningCredential> RequestSigner<C> {
    fn apply_credential(
        &self,
        request: &mut HttpRequest,
        found: NumberedCredential<C>,
    ) -> Option<RequestSignature> {
        let had_one = found.credential.replace_signature(request, &self.account);
        let NumberedCredential { number, is_fixed, origin, .. } = found;
        had_one.then_some(RequestSignature { number, is_fixed, origin })
    }
}

#[async_trait]
impl<C: SigningCredential> CredentialSigner for RequestSigner<C> {
    async fn sign(
        &self,
        request: &mut HttpRequest,
    ) -> Result<Option<RequestSignature>, CredentialError> {
        if !C::carries_signature(request) {
            return Ok(None);
        }
        Ok(self.apply_credential(request, self.credentials.current().await?))
    }

    async fn sign_after_refusal(
        &self,
        request: &mut HttpRequest,
        refused: &RequestSignature,
        refusal: &CredentialRefusal,
    ) -> Result<Option<RequestSignature>, CredentialError> {
        let found = self.credentials.replace_refused(refused.number, refusal.says_expired).await?;
        Ok(found.and_then(|found| self.apply_credential(request, found)))
    }
}

fn header_text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn decode_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |at: usize| text.get(at..at + 2).and_then(|two| u8::from_str_radix(two, 16).ok());
    (0..text.len()).step_by(2).map(digit).collect()
}

impl SigningCredential for AwsCredential {
    fn carries_signature(request: &HttpRequest) -> bool {
        let headers = request.headers();
        headers.contains_key("authorization") && !headers.contains_key(EXPRESS_TOKEN_HEADER)
    }

    fn replace_signature(&self, request: &mut HttpRequest, _account: &str) -> bool {
        if !Self::carries_signature(request) {
            return false;
        }
        let headers = request.headers();
        // The region and the service of the first signature stay right for other keys.
        let Some(scope) = header_text(headers, "authorization") else { return false };
        // "AWS4-HMAC-SHA256 Credential=KEY/DATE/REGION/SERVICE/aws4_request, ..."
        let scope = scope.split([',', ' ']).find_map(|part| part.strip_prefix("Credential="));
        let parts = scope.unwrap_or_default().rsplit('/').map(str::to_owned).collect::<Vec<_>>();
        let [_, service, region, ..] = parts.as_slice() else { return false };
        // The backend has computed the digest of the content.
        let digest = header_text(headers, "x-amz-content-sha256").unwrap_or_default().to_owned();
        let headers = request.headers_mut();
        headers.remove("authorization");
        // The next key may have no token, and the service refuses a key with a foreign one.
        headers.remove("x-amz-security-token");
        let signs_content = digest != UNSIGNED_PAYLOAD;
        let content = decode_hex(&digest).filter(|_| signs_content);
        AwsAuthorizer::new(self, service, region)
            .with_sign_payload(signs_content)
            .authorize(request, content.as_deref());
        true
    }
}

impl SigningCredential for GcpCredential {
    fn carries_signature(request: &HttpRequest) -> bool {
        request.headers().contains_key("authorization")
    }

    fn replace_signature(&self, request: &mut HttpRequest, _account: &str) -> bool {
        let Ok(value) = format!("Bearer {}", self.bearer).parse() else { return false };
        request.headers_mut().insert("authorization", value).is_some()
    }
}

impl SigningCredential for AzureCredential {
    fn carries_signature(request: &HttpRequest) -> bool {
        let query = request.uri().query().unwrap_or_default();
        request.headers().contains_key("authorization") || remove_signature(query).1
    }

    fn replace_signature(&self, request: &mut HttpRequest, account: &str) -> bool {
        // The next credential may be of another kind: a token in a header, or a signature in the
        // URL.
        let had_header = request.headers_mut().remove("authorization").is_some();
        let (query, had_pairs) = remove_signature(request.uri().query().unwrap_or_default());
        if !had_header && !had_pairs {
            return false;
        }
        if had_pairs {
            let address = request.uri().to_string();
            let address = address.split('?').next().unwrap_or_default();
            let Ok(uri) = format!("{address}?{query}").trim_end_matches('?').parse() else {
                return false;
            };
            *request.uri_mut() = uri;
        }
        AzureAuthorizer::new(self, account).authorize(request);
        true
    }
}

/// Returns a query without the parameters of a signature, and whether there was one.
fn remove_signature(query: &str) -> (String, bool) {
    let name = |pair: &str| pair.split('=').next().unwrap_or_default().to_owned();
    let pairs = || query.split('&').filter(|pair| !pair.is_empty());
    // Other parameters may have names this short: only with `sig` is there a signature.
    if !pairs().any(|pair| name(pair) == "sig") {
        return (query.to_owned(), false);
    }
    let kept = pairs().filter(|pair| !SIGNATURE_PARAMETERS.contains(&name(pair).as_str()));
    (kept.collect::<Vec<_>>().join("&"), true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::client::HttpRequestBody;

    fn request(url: &str) -> HttpRequest {
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.uri_mut() = url.parse().unwrap();
        request
    }

    fn key(name: &str, token: Option<&str>) -> AwsCredential {
        let token = token.map(str::to_owned);
        AwsCredential { key_id: name.to_owned(), secret_key: "s".to_owned(), token }
    }

    #[test]
    fn a_request_of_s3_gets_another_key_and_keeps_region_and_digest() {
        let mut signed = request("http://host/bucket/x?y=1");
        assert!(!key("a", None).replace_signature(&mut signed, ""), "no signature, none added");
        AwsAuthorizer::new(&key("old", Some("token")), "s3", "far")
            .authorize(&mut signed, Some(&[7; 32]));
        let mut other = request("http://host/bucket/x?y=1");
        AwsAuthorizer::new(&key("new", None), "s3", "far").authorize(&mut other, Some(&[7; 32]));
        assert!(key("new", None).replace_signature(&mut signed, ""));
        assert!(!signed.headers().contains_key("x-amz-security-token"));
        for name in ["x-amz-content-sha256", "authorization"] {
            let text = |request: &HttpRequest| {
                let value = request.headers()[name].to_str().unwrap().to_owned();
                // The time of the two signatures may differ.
                value.split(", Signature").next().unwrap().to_owned()
            };
            assert_eq!(text(&signed), text(&other));
        }
    }

    #[test]
    fn an_unsigned_content_stays_unsigned() {
        let mut signed = request("http://host/bucket/x");
        AwsAuthorizer::new(&key("old", None), "s3", "far")
            .with_sign_payload(false)
            .authorize(&mut signed, None);
        assert!(key("new", None).replace_signature(&mut signed, ""));
        assert_eq!(signed.headers()["x-amz-content-sha256"], UNSIGNED_PAYLOAD);
    }

    #[test]
    fn a_signature_in_a_url_is_replaced_and_other_parameters_stay() {
        let pairs = |sig: &str| {
            let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
            AzureCredential::SASToken(vec![pair("sv", "1"), pair("sig", sig)])
        };
        let mut signed = request("http://host/a/x?comp=block&blockid=b%3D");
        assert!(!pairs("no").replace_signature(&mut signed, "a"));
        AzureAuthorizer::new(&pairs("old"), "a").authorize(&mut signed);
        assert!(pairs("new").replace_signature(&mut signed, "a"));
        assert_eq!(signed.uri().query(), Some("comp=block&blockid=b%3D&sv=1&sig=new"));
        let token = AzureCredential::BearerToken("t".to_owned());
        assert!(token.replace_signature(&mut signed, "a"));
        assert_eq!(signed.uri().query(), Some("comp=block&blockid=b%3D"));
        assert_eq!(signed.headers()["authorization"], "Bearer t");
        let another = AzureCredential::BearerToken("u".to_owned());
        assert!(another.replace_signature(&mut signed, "a"));
        assert_eq!(signed.headers().get_all("authorization").iter().count(), 1);
    }
}
