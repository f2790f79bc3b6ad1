// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Token and certificate of a job from a secret that all its processes were given: each makes the
//! same ticket by itself, and only the registrar's address is left to find.
//!
//! Everything is HMAC-SHA256 of a label and the job's name under the secret, so jobs with one
//! secret have nothing in common. The certificate holds nothing of its own: key, serial number and
//! dates are fixed, and an Ed25519 signature over the same bytes is the same signature. Whoever can
//! connect to the registrar can use its public key to try secrets, so a secret must be random, not
//! a password.

use std::fmt;

use farandole_world::JobId;
use hmac::{Hmac, Mac};
use rcgen::{CertificateParams, KeyPair, PKCS_ED25519, SerialNumber, date_time_ymd};
use rustls::pki_types::PrivatePkcs8KeyDer;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::ticket::{Ticket, Token};
use crate::tls::{Identity, SERVER_NAME};

/// A private key of Ed25519 in PKCS #8, up to its 32 bytes.
const PKCS8: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];

/// The secret from which a job's token, certificate and port are made. Never printed.
#[derive(Clone)]
pub struct Secret {
    text: String,
    job: JobId,
}

impl Secret {
    /// Fewest bytes of a secret.
    pub const SHORTEST: usize = 16;

    /// Returns the secret of this job; `None` when the text is shorter than [`Self::SHORTEST`].
    pub fn new(text: &str, job: &JobId) -> Option<Self> {
        (text.len() >= Self::SHORTEST).then(|| Self { text: text.to_owned(), job: job.clone() })
    }

    /// Returns the ticket of the job whose registrar is at these addresses.
    ///
    /// # Errors
    /// `Tls`.
    pub fn ticket(&self, addresses: Vec<String>) -> Result<Ticket> {
        Ok(Ticket::new(self.token(), self.identity()?.fingerprint, self.job.clone(), addresses))
    }

    /// Returns one of `count` ports from `first` on, the same for all that have the secret.
    pub fn port(&self, first: u16, count: u16) -> u16 {
        let [high, low, ..] = self.derive("port");
        first.saturating_add(u16::from_be_bytes([high, low]) % count.max(1))
    }

    pub(crate) fn job(&self) -> &JobId {
        &self.job
    }

    pub(crate) fn token(&self) -> Token {
        Token::of(self.derive("token"))
    }

    /// Returns the same bytes wherever it is called.
    pub(crate) fn identity(&self) -> Result<Identity> {
        let tls = |error: rcgen::Error| Error::Tls { reason: error.to_string() };
        let der = [&PKCS8[..], &self.derive("certificate")].concat();
        let key =
            KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(der), &PKCS_ED25519);
        let key = key.map_err(tls)?;
        let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()]).map_err(tls)?;
        params.serial_number = Some(SerialNumber::from(1u64));
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(4000, 1, 1);
        let certificate = params.self_signed(&key).map_err(tls)?;
        Ok(Identity {
            certificate_pem: certificate.pem(),
            key_pem: key.serialize_pem(),
            fingerprint: Sha256::digest(certificate.der()).into(),
        })
    }

    fn derive(&self, label: &str) -> [u8; 32] {
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

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret").field("job", &self.job.0).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn secret(text: &str, job: &str) -> Secret {
        Secret::new(text, &JobId(job.to_owned())).unwrap()
    }

    #[test]
    fn a_certificate_is_the_same_bytes_wherever_it_is_made() {
        let one = secret("sixteen letters.", "slurm-7.0").identity().unwrap();
        let other = secret("sixteen letters.", "slurm-7.0").identity().unwrap();
        assert_eq!(one.certificate_pem, other.certificate_pem);
        assert_eq!(one.fingerprint, other.fingerprint);
        // Written down once: another release of the certificate's maker must not part hosts that
        // differ in it.
        let hex: String = one.fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "a85e46b0890d67b0e5e74b62013d8c57684b443097c8f2925133f43da4b21459");
    }

    #[test]
    fn a_secret_is_not_printed_and_not_short() {
        assert!(Secret::new("fifteen letters", &JobId("a".to_owned())).is_none());
        assert_eq!(format!("{:?}", secret("sixteen letters.", "a")), r#"Secret { job: "a", .. }"#);
    }

    proptest! {
        #[test]
        fn jobs_and_secrets_differ_in_everything(text in ".{16,40}", job in "[a-z0-9.]{1,20}") {
            let (one, job2) = (secret(&text, &job), format!("{job}0"));
            for other in [secret(&text, &job2), secret(&format!("{text}0"), &job)] {
                prop_assert_ne!(one.token().hex(), other.token().hex());
                prop_assert_ne!(one.identity().unwrap().fingerprint, other.identity().unwrap().fingerprint);
            }
            prop_assert!((20_000..28_000).contains(&one.port(20_000, 8_000)));
            let ticket = one.ticket(vec!["a:1".to_owned()]).unwrap();
            prop_assert_eq!(ticket.encode(), secret(&text, &job).ticket(vec!["a:1".to_owned()]).unwrap().encode());
        }
    }
}
