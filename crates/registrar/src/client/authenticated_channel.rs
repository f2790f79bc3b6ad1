// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The connection to the registrar, with the credentials that every call carries.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farandole_world::TaskId;
use tonic::Request;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;

use crate::generated::registrar_client::RegistrarClient;
use crate::wire::{GENERATION_HEADER, TASK_HEADER, TOKEN_HEADER};

/// The connection to the registrar, and the credentials of the calling task.
#[derive(Clone)]
pub(super) struct AuthenticatedChannel {
    pub(super) channel: Channel,
    pub(super) token: MetadataValue<Ascii>,
    pub(super) task: TaskId,
    pub(super) generation: Arc<AtomicU64>,
}

impl AuthenticatedChannel {
    pub(super) fn grpc_stub(&self) -> RegistrarClient<Channel> {
        // The client trusts its registrar, whose certificate is pinned, and a world may be large.
        RegistrarClient::new(self.channel.clone()).max_decoding_message_size(usize::MAX)
    }

    pub(super) fn build_request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let metadata = request.metadata_mut();
        metadata.insert(TOKEN_HEADER, self.token.clone());
        metadata.insert(TASK_HEADER, self.task.0.into());
        // Read for each call: a registration or a world may change the generation in between.
        metadata.insert(GENERATION_HEADER, self.generation.load(Ordering::Acquire).into());
        request
    }
}
