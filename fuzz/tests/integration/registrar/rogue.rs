// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A client that speaks gRPC, but sends anything.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::{Buf as _, BufMut as _};
use farandole_fuzz::Random;
use farandole_registrar::Ticket;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme, StreamOwned};
use tokio::runtime::Runtime;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status};

/// Methods of the registrar; a stranger may call them with any number of messages.
pub(crate) const METHODS: [&str; 16] = [
    "Register",
    "AwaitAssignment",
    "Join",
    "Changes",
    "Leave",
    "Heartbeat",
    "Put",
    "PutIfAbsent",
    "Get",
    "Meet",
    "Records",
    "Result",
    "Exit",
    "Calls",
    "Relay",
    "Nothing",
];
/// Time that the rogue waits for an answer; some calls wait for something that never comes.
const LISTENS: Duration = Duration::from_millis(30);
const NAME: &str = "registrar.farandole";

/// Messages as bytes.
#[derive(Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, message: Vec<u8>, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(&message);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining()).to_vec()))
    }
}

/// Takes any certificate: a stranger has no ticket to tell the right one.
#[derive(Debug)]
struct Trusting(CryptoProvider);

impl ServerCertVerifier for Trusting {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// A client that sends anything.
pub(crate) struct Rogue {
    address: String,
    token: String,
    runtime: Runtime,
    channel: Channel,
    tls: Arc<ClientConfig>,
}

impl Rogue {
    /// One that knows what a ticket says.
    pub(crate) fn new(ticket: &Ticket) -> Self {
        let text = ticket.encode_text();
        let bytes = URL_SAFE_NO_PAD.decode(text.split_once('.').unwrap().1).unwrap();
        let token = bytes[..32].iter().map(|byte| format!("{byte:02x}")).collect();
        let address = ticket
            .registrar_addresses()
            .iter()
            .find(|one| one.starts_with("127."))
            .unwrap()
            .clone();
        let trusting = Arc::new(Trusting(ring::default_provider()));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let tls = ClientTlsConfig::new().domain_name(NAME);
        let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap();
        let endpoint =
            endpoint.tls_config_with_verifier(tls, Arc::<Trusting>::clone(&trusting)).unwrap();
        let channel = runtime.block_on(async { endpoint.connect_lazy() });
        let mut tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(trusting)
            .with_no_client_auth();
        tls.alpn_protocols = vec![b"h2".to_vec()];
        Self { address, token, runtime, channel, tls: Arc::new(tls) }
    }

    /// Bytes that are no TLS, or the beginning of it.
    pub(crate) fn mutter(&self, random: &mut Random) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(LISTENS)).unwrap();
        let record = [&[22, 3, 1, 0, 60, 1, 0, 0, 56, 3, 3][..], &random.bytes(100)].concat();
        let words = if random.below(2) == 0 { record } else { random.bytes(300) };
        // The door may close in the middle of a word.
        drop(stream.write_all(&words));
        if random.below(2) == 0 {
            drop(stream.read(&mut [0; 100]));
        }
    }

    /// Bytes that are no HTTP/2, or nearly, within TLS.
    pub(crate) fn mutter_inside(&self, random: &mut Random) {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(LISTENS)).unwrap();
        let name = ServerName::try_from(NAME).unwrap();
        let session = ClientConnection::new(Arc::clone(&self.tls), name).unwrap();
        let mut stream = StreamOwned::new(session, stream);
        let mut words = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        if random.below(4) == 0 {
            words = random.mutated(&words);
        }
        for _ in 0..random.below(12) {
            let body = random.bytes(60);
            let told = if random.below(8) == 0 { random.below(1 << 24) } else { body.len() };
            let length = u32::try_from(told).unwrap().to_be_bytes();
            words.extend(&length[1..]);
            // Type, flags, stream.
            words.extend([random.byte() % 12, random.byte() & 0x2d, 0, 0, 0, random.byte() % 6]);
            words.extend(body);
        }
        if stream.write_all(&words).is_ok() && random.below(2) == 0 {
            drop(stream.read(&mut [0; 100]));
        }
    }

    /// A call of messages that are nearly right as `task`; its status, if one comes in time.
    pub(crate) fn call(&self, method: &str, task: usize, random: &mut Random) -> Option<Code> {
        let path =
            PathAndQuery::try_from(format!("/farandole.registrar.v1.Registrar/{method}")).unwrap();
        let messages: Vec<Vec<u8>> = (0..=random.below(4)).map(|_| message(random, 2)).collect();
        let mut request = Request::new(tokio_stream::iter(messages));
        let metadata = request.metadata_mut();
        metadata.insert("farandole-token", self.token.parse().unwrap());
        metadata.insert("farandole-task", task.to_string().parse().unwrap());
        let generation = if random.below(4) == 0 { random.word() } else { random.word() % 3 };
        metadata.insert("farandole-generation", generation.to_string().parse().unwrap());
        if random.below(8) == 0 {
            metadata.insert("farandole-task", random.word().to_string().parse().unwrap());
        }
        let mut client = Grpc::new(self.channel.clone());
        let answer = self.runtime.block_on(async {
            let asked = async {
                client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
                let mut heard = client.streaming(request, path, Raw).await?.into_inner();
                while heard.message().await?.is_some() {}
                Ok::<(), Status>(())
            };
            tokio::time::timeout(LISTENS, asked).await
        });
        answer.ok().map(|done| done.map_or_else(|status| status.code(), |()| Code::Ok))
    }
}

fn varint(mut value: u64, to: &mut Vec<u8>) {
    while value >= 0x80 {
        to.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    to.push(value.to_le_bytes()[0]);
}

/// A message with some of the fields that the protocol has, of any type and any value.
fn message(random: &mut Random, depth: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..random.below(6) {
        let field = 1 + random.word() % 7;
        match random.below(8) {
            0..=2 => {
                varint(field << 3, &mut bytes);
                let value = if random.below(2) == 0 {
                    random.word() % 5
                } else {
                    random.number(3).cast_unsigned()
                };
                varint(value, &mut bytes);
            }
            3 => {
                varint(field << 3 | 1, &mut bytes);
                bytes.extend(random.word().to_le_bytes());
            }
            4 => {
                varint(field << 3 | 5, &mut bytes);
                bytes.extend(&random.word().to_le_bytes()[..4]);
            }
            kind => {
                varint(field << 3 | 2, &mut bytes);
                let inner = match kind {
                    5 if depth > 0 => message(random, depth - 1),
                    6 => b"round/1"[..random.below(8)].to_vec(),
                    _ => random.bytes(300),
                };
                varint(inner.len() as u64, &mut bytes);
                bytes.extend(inner);
            }
        }
    }
    if random.below(6) == 0 { random.mutated(&bytes) } else { bytes }
}
