// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Codec for prost messages whose buffers are small at first, because most of ten thousand streams
//! carry only heartbeats.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{self, BufferSettings};
use tonic_prost::ProstCodec;

/// Initial size of a stream's buffers.
const INITIAL_BUFFER_BYTES: usize = 256;
/// Written bytes after which a piece is sent.
const FLUSH_THRESHOLD_BYTES: usize = 8 << 10;

/// The codec with which the generated code writes and reads messages.
pub(crate) struct Codec<T, U> {
    messages: PhantomData<(T, U)>,
}

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Self { messages: PhantomData }
    }
}

impl<T, U> codec::Codec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as codec::Codec>::Encoder;
    type Decoder = <ProstCodec<T, U> as codec::Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::new(
            INITIAL_BUFFER_BYTES,
            FLUSH_THRESHOLD_BYTES,
        ))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::new(
            INITIAL_BUFFER_BYTES,
            FLUSH_THRESHOLD_BYTES,
        ))
    }
}
