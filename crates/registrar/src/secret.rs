// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Derivation of a job's token and certificate from a secret that all its processes were given.
//! Each process derives the same ticket by itself, and only the registrar's address must be found.
//!
//! Every value is an HMAC-SHA256 of a label and the job's name under the secret, so jobs with one
//! secret have no value in common. The certificate contains nothing random: key, serial number and
//! dates are fixed, and an Ed25519 signature over the same bytes is always the same. A process that
//! can connect to the registrar can use the registrar's public key to test guesses of the secret.
//! So a secret must be random, not a password.

use std::fmt;

use farandole_world::JobId;
use hmac::{Hmac, Mac};
use rcgen::{CertificateParams, KeyPair, PKCS_ED25519, SerialNumber, date_time_ymd};
use rustls::pki_types::PrivatePkcs8KeyDer;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::ticket::{JobToken, Ticket};
use crate::tls::{CertificateIdentity, SERVER_NAME};

/// An Ed25519 private key in PKCS #8, up to its 32 bytes.
const PKCS8_ED25519_PREFIX: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];

/// The secret from which a job's token, certificate and port are derived. Never printed.
#[derive(Clone)]
pub struct JobSecret {
    text: String,
    job: JobId,
}

impl JobSecret {
    /// Smallest number of bytes of a secret.
    pub const MIN_SECRET_BYTES: usize = 16;

    /// Returns the secret of this job; `None` if the text is shorter than
    /// [`Self::MIN_SECRET_BYTES`].
    pub fn new(text: &str, job: &JobId) -> Option<Self> {
        (text.len() >= Self::MIN_SECRET_BYTES)
            .then(|| Self { text: text.to_owned(), job: job.clone() })
    }

    /// Returns the ticket of the job whose registrar is at these addresses.
    ///
    /// # Errors
    /// `Tls`.
    pub fn make_ticket(&self, addresses: Vec<String>) -> Result<Ticket> {
        Ok(Ticket::new(
            self.derive_token(),
            self.derive_identity()?.fingerprint,
            self.job.clone(),
            addresses,
        ))
    }

    /// Returns one of `count` ports starting at `first`, the same port for all holders of the
    /// secret.
    pub fn derive_port(&self, first: u16, count: u16) -> u16 {
        let [high, low, ..] = self.derive_bytes("port");
        first.saturating_add(u16::from_be_bytes([high, low]) % count.max(1))
    }

    pub(crate) fn job_id(&self) -> &JobId {
        &self.job
    }

    pub(crate) fn derive_token(&self) -> JobToken {
        JobToken::from_bytes(self.derive_bytes("token"))
    }

    /// Derives the certificate and its key; the bytes are the same in every process.
    pub(crate) fn derive_identity(&self) -> Result<CertificateIdentity> {
        let tls = |error: rcgen::Error| Error::Tls { reason: error.to_string() };
        let der = [&PKCS8_ED25519_PREFIX[..], &self.derive_bytes("certificate")].concat();
        let key =
            KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(der), &PKCS_ED25519);
        let key = key.map_err(tls)?;
        let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()]).map_err(tls)?;
        // Fixed, because every process must derive the same bytes, and so the same digest.
        params.serial_number = Some(SerialNumber::from(1u64));
        // Fixed for the same reason. Clients check only the digest, so no clock matters.
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(4000, 1, 1);
        let certificate = params.self_signed(&key).map_err(tls)?;
        Ok(CertificateIdentity {
            certificate_pem: certificate.pem(),
            key_pem: key.serialize_pem(),
            fingerprint: Sha256::digest(certificate.der()).into(),
        })
    }

    fn derive_bytes(&self, label: &str) -> [u8; 32] {
        // The number is the version of the derivation.
        let message = format!("farandole 1 {label} {}", self.job);
        match Hmac::<Sha256>::new_from_slice(self.text.as_bytes()) {
            Ok(mut mac) => {
                mac.update(message.as_bytes());
                mac.finalize().into_bytes().into()
            }
            // HMAC takes keys of any length, so this arm cannot be reached.
            Err(_) => Sha256::digest([self.text.as_bytes(), message.as_bytes()].concat()).into(),
        }
    }
}

impl fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A derived `Debug` would print the secret into a log.
        f.debug_struct("Secret").field("job", &self.job.0).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn secret(text: &str, job: &str) -> JobSecret {
        JobSecret::new(text, &JobId(job.to_owned())).unwrap()
    }

    #[test]
    fn a_certificate_is_the_same_bytes_wherever_it_is_made() {
        let one = secret("sixteen letters.", "slurm-7.0").derive_identity().unwrap();
        let other = secret("sixteen letters.", "slurm-7.0").derive_identity().unwrap();
        assert_eq!(one.certificate_pem, other.certificate_pem);
        assert_eq!(one.fingerprint, other.fingerprint);
        // A fixed value: if another release of `rcgen` made other bytes, hosts with different
        // releases could not form a job.
        let hex: String = one.fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "a85e46b0890d67b0e5e74b62013d8c57684b443097c8f2925133f43da4b21459");
    }

    #[test]
    fn a_secret_is_not_printed_and_not_short() {
        assert!(JobSecret::new("fifteen letters", &JobId("a".to_owned())).is_none());
        assert_eq!(format!("{:?}", secret("sixteen letters.", "a")), r#"Secret { job: "a", .. }"#);
    }

    proptest! {
        #[test]
        fn jobs_and_secrets_differ_in_everything(text in ".{16,40}", job in "[a-z0-9.]{1,20}") {
            let (one, job2) = (secret(&text, &job), format!("{job}0"));
            for other in [secret(&text, &job2), secret(&format!("{text}0"), &job)] {
                prop_assert_ne!(one.derive_token().to_hex(), other.derive_token().to_hex());
                prop_assert_ne!(one.derive_identity().unwrap().fingerprint, other.derive_identity().unwrap().fingerprint);
            }
            prop_assert!((20_000..28_000).contains(&one.derive_port(20_000, 8_000)));
            let ticket = one.make_ticket(vec!["a:1".to_owned()]).unwrap();
            prop_assert_eq!(ticket.encode_text(), secret(&text, &job).make_ticket(vec!["a:1".to_owned()]).unwrap().encode_text());
        }
    }
}
