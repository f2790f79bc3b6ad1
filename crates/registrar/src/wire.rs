// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Constants of the protocol, in addition to the messages.

/// Version of the protocol, compared on every registration and heartbeat.
pub const PROTOCOL_VERSION: u32 = 5;

/// Metadata: the job's token.
pub(crate) const TOKEN_HEADER: &str = "farandole-token";
/// Metadata: the calling task.
pub(crate) const TASK_HEADER: &str = "farandole-task";
/// Metadata: the generation that the caller is part of.
pub(crate) const GENERATION_HEADER: &str = "farandole-generation";
/// Metadata of a refusal: the registrar's protocol version.
pub(crate) const PROTOCOL_HEADER: &str = "farandole-protocol";

/// Metadata of the message that a generation is over: its tasks may form another.
pub(crate) const RETRY_HEADER: &str = "farandole-retry";

/// Metadata of a dismissal of a worker of an elastic job: its host was removed, or it asked to
/// leave.
pub(crate) const DISMISSED_HEADER: &str = "farandole-dismissed";

/// Largest result that passes through the registrar; larger ones go through a store.
pub const MAX_RESULT_BYTES: usize = 16 << 20;
