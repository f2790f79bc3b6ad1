// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The ticket that admits a task.
//!
//! Text form: `frn1.`, then in unpadded URL-safe base64: the token (32 bytes), the SHA-256 of the
//! certificate (32), and the job id and the addresses with their lengths (u16, big endian). The
//! last four bytes are the first four of the SHA-256 of all bytes before them: they detect a
//! truncated ticket.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use farandole_world::JobId;
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::error::{Error, Result};

// The number is the version of the format.
const TICKET_PREFIX: &str = "frn1.";
const TOKEN_LEN: usize = 32;
const CHECK_LEN: usize = 4;

/// A job's token. Never printed.
#[derive(Clone)]
pub(crate) struct JobToken([u8; TOKEN_LEN]);

impl JobToken {
    pub(crate) fn random() -> Self {
        Self(rand::random())
    }

    pub(crate) fn from_bytes(bytes: [u8; TOKEN_LEN]) -> Self {
        Self(bytes)
    }

    /// Returns the token as 64 hex digits, the form in calls.
    pub(crate) fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Returns whether `hex` is this token's text. The comparison takes constant time, so that the
    /// time does not show the position of the first difference.
    pub(crate) fn matches_hex(&self, hex: &[u8]) -> bool {
        self.to_hex().as_bytes().ct_eq(hex).into()
    }
}

/// SHA-256 of a certificate.
pub(crate) type CertificateFingerprint = [u8; 32];

/// The address of a job's registrar, its identity, and the secret that it requires. Every holder of
/// a ticket may join the job.
#[derive(Clone)]
pub struct Ticket {
    pub(crate) token: JobToken,
    pub(crate) fingerprint: CertificateFingerprint,
    job_id: JobId,
    addresses: Vec<String>,
}

impl Ticket {
    pub(crate) fn new(
        token: JobToken,
        fingerprint: CertificateFingerprint,
        job_id: JobId,
        addresses: Vec<String>,
    ) -> Self {
        Self { token, fingerprint, job_id, addresses }
    }

    /// Returns the job's identifier.
    pub fn job_id(&self) -> &JobId {
        &self.job_id
    }

    /// Returns the addresses of its registrar, `host:port`, the most likely first.
    pub fn registrar_addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Returns the key that ranks of this job prove to each other: HMAC-SHA256 of `links` under the
    /// token.
    pub fn link_key(&self) -> [u8; 32] {
        // HMAC takes keys of any length, so the error arm cannot be reached.
        match Hmac::<Sha256>::new_from_slice(&self.token.0) {
            Ok(mut mac) => {
                mac.update(b"links");
                mac.finalize().into_bytes().into()
            }
            Err(_) => self.token.0,
        }
    }

    /// Returns the same ticket with another token, like a guess. For tests.
    #[doc(hidden)]
    pub fn with_forged_token(&self) -> Self {
        Self { token: JobToken::random(), ..self.clone() }
    }

    /// Returns the same ticket with other addresses. For tests.
    #[doc(hidden)]
    pub fn with_addresses(&self, addresses: &[String]) -> Self {
        Self { addresses: addresses.to_vec(), ..self.clone() }
    }

    /// Returns the secret text. `Display` is left out on purpose: a ticket in a log would admit
    /// every reader of the log.
    pub fn encode_text(&self) -> String {
        let mut bytes = Vec::with_capacity(256);
        bytes.extend_from_slice(&self.token.0);
        bytes.extend_from_slice(&self.fingerprint);
        for text in std::iter::once(&self.job_id.0).chain(&self.addresses) {
            let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
            bytes.extend_from_slice(&length.to_be_bytes());
            bytes.extend_from_slice(&text.as_bytes()[..usize::from(length)]);
        }
        let check = Sha256::digest(&bytes);
        bytes.extend_from_slice(&check[..CHECK_LEN]);
        format!("{TICKET_PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl FromStr for Ticket {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |reason| Error::Ticket { reason };
        let body =
            text.trim().strip_prefix(TICKET_PREFIX).ok_or(bad("it does not start with frn1."))?;
        let bytes = URL_SAFE_NO_PAD.decode(body).map_err(|_| bad("it is not base64"))?;
        let (bytes, check) = bytes.split_last_chunk::<CHECK_LEN>().ok_or(bad("it is too short"))?;
        // A ticket that was cut off would otherwise fail later, as a wrong token or an unknown
        // address.
        if Sha256::digest(bytes)[..CHECK_LEN] != check[..] {
            return Err(bad("it is damaged or cut off"));
        }
        let (token, rest) = bytes.split_first_chunk::<TOKEN_LEN>().ok_or(bad("it has no token"))?;
        let (fingerprint, mut rest) =
            rest.split_first_chunk::<32>().ok_or(bad("it has no fingerprint"))?;
        let mut texts = Vec::new();
        while !rest.is_empty() {
            let (length, tail) =
                rest.split_first_chunk::<2>().ok_or(bad("it ends within a length"))?;
            let (text, tail) = tail
                .split_at_checked(usize::from(u16::from_be_bytes(*length)))
                .ok_or(bad("it ends within an address"))?;
            texts
                .push(String::from_utf8(text.to_vec()).map_err(|_| bad("an address is not text"))?);
            rest = tail;
        }
        let mut texts = texts.into_iter();
        let job_id = JobId(texts.next().ok_or(bad("it has no job id"))?);
        Ok(Self {
            token: JobToken(*token),
            fingerprint: *fingerprint,
            job_id,
            addresses: texts.collect(),
        })
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("job_id", &self.job_id.0)
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ticket(job: &str, addresses: &[String]) -> Ticket {
        Ticket::new(JobToken([7; 32]), [9; 32], JobId(job.into()), addresses.to_vec())
    }

    #[test]
    fn a_ticket_prints_no_secret() {
        let shown = format!("{:?}", ticket("job", &["a:1".into()]));
        assert_eq!(shown, r#"Ticket { job_id: "job", addresses: ["a:1"], .. }"#);
    }

    #[test]
    fn a_cut_off_ticket_is_refused_without_repeating_it() {
        let text = ticket("job", &["a:1".into()]).encode_text();
        let error = text[..text.len() - 3].parse::<Ticket>().unwrap_err().to_string();
        assert!(!error.contains(&text[5..20]), "{error}");
        assert!("".parse::<Ticket>().is_err());
    }

    #[test]
    fn the_link_key_is_not_the_token() {
        let ticket = ticket("job", &[]);
        assert_ne!(ticket.link_key(), [7; 32]);
        assert_eq!(ticket.link_key(), ticket.clone().link_key());
    }

    proptest! {
        #[test]
        fn encode_and_parse_are_inverse(job in ".{0,40}", addresses in prop::collection::vec(".{0,60}", 0..9)) {
            let text = ticket(&job, &addresses).encode_text();
            let back: Ticket = text.parse().unwrap();
            prop_assert_eq!(&back.job_id.0, &job);
            prop_assert_eq!(&back.addresses, &addresses);
            prop_assert_eq!(back.encode_text(), text);
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in ".*") {
            let ticket = ["frn1.", &text].concat();
            prop_assert!(ticket.parse::<Ticket>().is_err());
        }
    }
}
