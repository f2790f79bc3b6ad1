// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The negotiation of a process set, as types and pure functions: how its members agree on a
//! request.
//!
//! This crate owns the part of a request on which all ranks must agree, the tally of announcements,
//! the cache of agreed requests, the fusion and order of tensors, the shape of the control tree,
//! response lists, and the encoding of control frames. It has no thread, lock, link, buffer or
//! communicator, and reads no clock. The engine moves the frames, decides the next response list,
//! and executes it.
//!
//! ```text
//!  ControlTree: a member, its parent, the members below each child
//!
//!  RequestSignature ── Announcement ── AnnouncementTally ── up the tree, as a frame, when the subtree is complete
//!                          ^                                     │ at member 0
//!                          │ CacheId                             v
//!                     ResponseCache <── CachedResponse ── resolve_variants ──> error text: who submitted what
//! ```
//!
//! Invariants:
//! - `NE-1`: caches to which the same steps were applied are equal, so a number stands for the same
//!   request on every rank.
//! - `NE-2`: no frame makes a reader panic, or allocate more than the frame is long.
//! - `NE-3`: requests that differ give one error text, which names the first rule that fails and
//!   the request of every rank.
//! - `NE-4`: if a member has a control link to a peer, the peer has one to this member.

#![forbid(unsafe_code)]

mod announcement_tally;
mod cache;
mod fusion;
mod hash;
mod response_list;
mod signature;
mod tree;
mod wire;

pub use announcement_tally::{
    Announcement, AnnouncementTally, RequestVariant, rank_ranges_text, resolve_variants,
};
pub use cache::{AlltoallSplits, CacheId, CachedResponse, ResponseCache};
pub use fusion::{
    PRIORITIZED_LIST_BYTES, PrioritizedTensor, plan_fused_allreduces, plan_fused_operations,
    plan_prioritized_list,
};
pub use hash::{FastHashMap, FastHashSet, FastHasher, hash_names};
pub use response_list::{
    PlannedListItem, ReadyTensor, ResponseItem, ResponseList, TensorRefusal,
    decode_list_updating_cache, encode_list_updating_cache,
};
pub use signature::{ChangeTopic, CollectiveCall, MemorySite, RequestSignature, operation_text};
pub use tree::{ControlTree, control_parents, control_peers};
pub use wire::{FrameReader, FrameResult, FrameWriter, MalformedFrame};
