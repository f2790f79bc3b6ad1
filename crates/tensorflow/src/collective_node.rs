// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The attributes of a collective's node in the graph.

use std::sync::OnceLock;

use farandole_door::{OperationCode, SubmissionHeader};

/// The attributes of a node of the graph, independent of its tensors.
#[derive(Debug)]
pub(crate) struct CollectiveNode {
    pub(crate) operation: OperationCode,
    /// The name across ranks, or the prefix to which the engine appends a number.
    base: String,
    /// Names of its tensors, made with the first run.
    names: OnceLock<Vec<String>>,
    pub(crate) call: SubmissionHeader,
}

/// Returns the name of a tensor of a group. The first name has no size, so ranks with groups of
/// different sizes match on it and report the mismatch.
pub(crate) fn group_tensor_name(base: &str, index: usize, count: usize) -> String {
    match index {
        0 => base.to_owned(),
        _ => format!("{base}_{}of{count}", index + 1),
    }
}

impl CollectiveNode {
    pub(crate) fn new(operation: OperationCode, base: String, call: SubmissionHeader) -> Self {
        Self { operation, base, names: OnceLock::new(), call }
    }

    /// Names of so many tensors, which are as many in every run.
    pub(crate) fn tensor_names(&self, count: usize) -> &[String] {
        self.names.get_or_init(|| {
            (0..count).map(|index| group_tensor_name(&self.base, index, count)).collect()
        })
    }
}
