// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Tensors that some ranks put into a group that was refused, and others submitted singly.
//!
//! The group fails as a whole, so nobody will come for the single ones. They fail with it on every rank that has
//! submitted them when it reads the list that says so. What such a rank announced before it read that list is void.

use std::sync::Arc;

use crate::tally::Wish;

/// Names, by the list with their refusal.
#[derive(Debug, Default)]
pub(super) struct Refused(Vec<(u64, Vec<Arc<str>>)>);

impl Refused {
    /// List `list` refuses a group with these.
    pub(super) fn note(&mut self, list: u64, names: &[Arc<str>]) {
        if !names.is_empty() {
            self.0.push((list, names.to_vec()));
        }
    }

    /// Whether an announcement by somebody who had read `seen` lists came too late.
    pub(super) fn voids(&self, name: &str, wish: &Wish, seen: u64) -> bool {
        let refused =
            |(list, names): &(u64, Vec<Arc<str>>)| seen < *list && names.iter().any(|other| **other == *name);
        self.0.iter().any(refused) && wish.is_single()
    }

    /// Everybody has read so many lists.
    pub(super) fn forget_until(&mut self, seen: u64) {
        self.0.retain(|(list, _)| *list > seen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signature::Signature;
    use crate::signature::tests::plain;
    use crate::tally::Variant;

    #[test]
    fn single_announcements_made_before_the_refusal_was_read_are_void() {
        let told = |signature| Wish::Told(vec![Variant { signature, members: vec![1], rows: Vec::new() }]);
        let single = told(plain(&[2]));
        let grouped = told(Signature { group: 7, group_size: 2, ..plain(&[2]) });
        let mut refused = Refused::default();
        refused.note(5, &["b".into()]);
        assert!(refused.voids("b", &single, 4));
        assert!(!refused.voids("b", &single, 5));
        assert!(!refused.voids("c", &single, 4));
        assert!(!refused.voids("b", &grouped, 4));
        refused.forget_until(4);
        assert!(refused.voids("b", &single, 4));
        refused.forget_until(5);
        assert!(!refused.voids("b", &single, 4));
    }
}
