// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! TLS with one certificate per job, which clients identify by its digest alone.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error as TlsError, SignatureScheme};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::error::{Error, Result};
use crate::ticket::CertificateFingerprint;

/// The name in the certificate. Clients check the digest, not the name.
pub(crate) const SERVER_NAME: &str = "registrar.farandole";

/// A certificate, its key, and its digest.
pub(crate) struct CertificateIdentity {
    pub(crate) certificate_pem: String,
    pub(crate) key_pem: String,
    pub(crate) fingerprint: CertificateFingerprint,
}

/// Makes a self-signed certificate with a new key.
pub(crate) fn generate_certificate_identity() -> Result<CertificateIdentity> {
    let made = rcgen::generate_simple_self_signed(vec![SERVER_NAME.to_owned()])
        .map_err(|error| Error::Tls { reason: error.to_string() })?;
    Ok(CertificateIdentity {
        certificate_pem: made.cert.pem(),
        key_pem: made.signing_key.serialize_pem(),
        fingerprint: Sha256::digest(made.cert.der()).into(),
    })
}

/// A verifier that accepts only the certificate with the digest from the ticket, and only from a
/// peer that holds its key.
pub(crate) struct PinnedCertVerifier {
    fingerprint: CertificateFingerprint,
    algorithms: WebPkiSupportedAlgorithms,
}

impl PinnedCertVerifier {
    pub(crate) fn new(fingerprint: CertificateFingerprint) -> Self {
        // The process may have installed another provider, for example for its own use of TLS.
        let provider = CryptoProvider::get_default().map_or_else(
            || rustls::crypto::ring::default_provider().signature_verification_algorithms,
            |provider: &Arc<CryptoProvider>| provider.signature_verification_algorithms,
        );
        Self { fingerprint, algorithms: provider }
    }
}

impl fmt::Debug for PinnedCertVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").finish_non_exhaustive()
    }
}

impl ServerCertVerifier for PinnedCertVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, TlsError> {
        let found: CertificateFingerprint = Sha256::digest(end_entity).into();
        // Name, dates and issuer do not matter: the digest comes from the ticket, which is trusted.
        if bool::from(found.ct_eq(&self.fingerprint)) {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(TlsError::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        // The certificate alone is public. The signature proves that the peer has its key.
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
