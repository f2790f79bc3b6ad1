// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Constants of the protocol besides the messages.

/// Compared on every registration and heartbeat.
pub const PROTOCOL_VERSION: u32 = 5;

/// Metadata: the job's token.
pub(crate) const TOKEN: &str = "farandole-token";
/// Metadata: the calling task.
pub(crate) const TASK: &str = "farandole-task";
/// Metadata: the generation that the caller is part of.
pub(crate) const GENERATION: &str = "farandole-generation";
/// Metadata of a refusal: the registrar's protocol version.
pub(crate) const PROTOCOL: &str = "farandole-protocol";

/// Metadata of the word that a generation is over: its tasks may form another.
pub(crate) const RETRY: &str = "farandole-retry";

/// Metadata of a dismissal of a worker of an elastic job: its host was removed, or it asked to
/// leave.
pub(crate) const DISMISSED: &str = "farandole-dismissed";

/// Largest result that passes through the registrar; larger ones go through a store.
pub const MAX_RESULT: usize = 16 << 20;
