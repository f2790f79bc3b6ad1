// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Tallies of announcements: the ranks that have announced a tensor, and their requests.

use std::sync::Arc;
use std::time::Instant;

use farandole_world::Rank;

use crate::cache::{CacheId, CachedResponse};
use crate::signature::{CollectiveCall, RequestSignature, operation_text};
use crate::wire::{FrameReader, FrameResult, FrameWriter, MalformedFrame};

/// One variant of a request, the members that submitted it, and their row counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestVariant {
    /// The request.
    pub signature: RequestSignature,
    /// The members that submitted it.
    pub members: Vec<u32>,
    /// Row counts, member by member; see [`CollectiveCall::row_counts_per_member`].
    pub rows: Vec<u64>,
}

/// Announcement of one source: this member, or all members below one child.
#[derive(Clone, Debug)]
pub enum Announcement {
    /// The cached request, from all members except the listed ones, which have joined.
    Cached(CacheId, Arc<CachedResponse>, Vec<u32>),
    /// Full requests; more than one variant if the members disagree.
    Explicit(Vec<RequestVariant>),
}

/// Announcements of one tensor until the whole subtree has announced it.
#[derive(Debug)]
pub struct AnnouncementTally {
    /// Time of the first announcement.
    pub since: Instant,
    /// Time of the last stall report to the parent.
    pub reported: Option<Instant>,
    /// Sources that have announced: 0 is this member, `n + 1` its `n`th child.
    pub sources: Vec<u32>,
    announcement: Option<Announcement>,
}

impl AnnouncementTally {
    /// Returns a tally without announcements.
    pub fn new(since: Instant) -> Self {
        Self { since, reported: None, sources: Vec::new(), announcement: None }
    }

    /// Adds the announcement of `source`, which stands for `members`. `others` returns the members
    /// of earlier sources.
    pub fn add_announcement(
        &mut self,
        source: u32,
        announcement: Announcement,
        members: &[u32],
        others: impl Fn(u32) -> Vec<u32>,
    ) {
        // As long as all sources announce one number, it travels up unchanged: a few bytes for any
        // number of ranks.
        self.announcement = Some(match (self.announcement.take(), announcement) {
            (None, announcement) => announcement,
            (
                Some(Announcement::Cached(id, entry, mut absent)),
                Announcement::Cached(other, _, more),
            ) if id == other => {
                absent.extend(more);
                Announcement::Cached(id, entry, absent)
            }
            (Some(before), announcement) => {
                // A number cannot express a difference, so the earlier sources get their full
                // requests back.
                let earlier_members: Vec<u32> =
                    self.sources.iter().flat_map(|source| others(*source)).collect();
                let mut variants = before.into_variants(&earlier_members);
                for variant in announcement.into_variants(members) {
                    merge_variant(&mut variants, variant);
                }
                Announcement::Explicit(variants)
            }
        });
        self.sources.push(source);
    }

    /// Returns the announcement of all sources together.
    pub fn into_announcement(self) -> Announcement {
        self.announcement.unwrap_or(Announcement::Explicit(Vec::new()))
    }

    /// Returns the name of the collective, if any source has announced it.
    pub fn operation_name(&self) -> Option<&'static str> {
        self.announcement
            .as_ref()
            .and_then(Announcement::first_collective_call)
            .map(|call| call.operation_name())
    }

    /// Returns the name of the operation in reports, and whether it moves no data. If ranks differ,
    /// the first request counts.
    pub fn operation_text(&self, name: &str) -> (String, bool) {
        let signature = self.announcement.as_ref().and_then(Announcement::first_signature);
        signature.map_or_else(
            || (operation_text("collective", None, name), false),
            |signature| {
                let RequestSignature { call, .. } = signature;
                (
                    operation_text(
                        call.operation_name(),
                        signature.process_set_change_text().as_deref(),
                        name,
                    ),
                    call.moves_no_data(),
                )
            },
        )
    }

    /// Returns whether any announced request is in this group.
    pub fn is_in_group(&self, group: u64) -> bool {
        match &self.announcement {
            Some(Announcement::Cached(_, entry, _)) => entry.signature.group == group,
            Some(Announcement::Explicit(variants)) => {
                variants.iter().any(|variant| variant.signature.group == group)
            }
            None => false,
        }
    }
}

fn merge_variant(variants: &mut Vec<RequestVariant>, variant: RequestVariant) {
    // The site is no disagreement: a rank may hold a tensor on the host and its peers on devices.
    match variants.iter_mut().find(|known| known.signature.matches_except_site(&variant.signature))
    {
        Some(known) => {
            // If some ranks have the tensor in host memory and others on devices, it goes through
            // host memory.
            known.signature.site = known.signature.site.union_with(variant.signature.site);
            known.members.extend(variant.members);
            known.rows.extend(variant.rows);
        }
        None => variants.push(variant),
    }
}

impl Announcement {
    /// Returns the collective; of the first request if ranks differ.
    pub fn first_collective_call(&self) -> Option<CollectiveCall> {
        self.first_signature().map(|signature| signature.call)
    }

    fn first_signature(&self) -> Option<&RequestSignature> {
        match self {
            Self::Cached(_, agreed, _) => Some(&agreed.signature),
            Self::Explicit(variants) => variants.first().map(|variant| &variant.signature),
        }
    }

    /// Converts the announcement of these members to full requests.
    pub fn into_variants(self, members: &[u32]) -> Vec<RequestVariant> {
        match self {
            Self::Explicit(variants) => variants,
            Self::Cached(_, entry, absent) => {
                let members: Vec<u32> =
                    // Members that have joined submitted nothing, so they have no rows.
                    members.iter().copied().filter(|member| !absent.contains(member)).collect();
                let rows = members
                    .iter()
                    .flat_map(|member| entry.member_row_counts(*member))
                    .copied()
                    .collect();
                vec![RequestVariant { signature: entry.signature.clone(), members, rows }]
            }
        }
    }

    /// Writes the announcement on behalf of `subtree`.
    pub fn encode_to(&self, name: &str, subtree: &[u32], writer: &mut FrameWriter<'_>) {
        match self {
            Self::Cached(id, _, absent) => {
                // Joined members are rare. A tag of their own saves the empty list in every other
                // announcement.
                writer.write_byte(if absent.is_empty() { 0 } else { 3 });
                writer.write_varint(id.slot.into());
                writer.write_varint(id.version.into());
                if !absent.is_empty() {
                    writer.write_varints(absent.iter().map(|member| u64::from(*member)));
                }
            }
            Self::Explicit(variants) => {
                writer.write_byte(1);
                writer.write_text(name);
                writer.write_varint(variants.len() as u64);
                for variant in variants {
                    variant.encode_to(subtree, writer);
                }
            }
        }
    }
}

impl RequestVariant {
    /// Writes the variant. An empty list stands for all ranks below the sender.
    fn encode_to(&self, subtree: &[u32], writer: &mut FrameWriter<'_>) {
        self.signature.encode_to(writer);
        let mut order: Vec<usize> = (0..self.members.len()).collect();
        // The reader takes row counts in ascending order of members, which is the order of `below`.
        order.sort_unstable_by_key(|at| self.members[*at]);
        let all = self.members.len() == subtree.len();
        // Usually the whole subtree has announced. The empty list keeps the frame independent of
        // its size.
        let listed = if all { &[][..] } else { &order[..] };
        writer.write_varints(listed.iter().map(|at| u64::from(self.members[*at])));
        let counts = self.signature.call.row_counts_per_member();
        if counts > 0 {
            writer.write_varint((order.len() * counts) as u64);
            for at in order {
                let rows = self.rows.get(at * counts..(at + 1) * counts).unwrap_or_default();
                rows.iter().for_each(|rows| writer.write_varint(*rows));
            }
        }
    }

    /// Reads a variant. An empty list of members stands for all members `below` the sender.
    ///
    /// # Errors
    /// The frame is malformed, or names a member that is not below the sender.
    pub fn decode_from(reader: &mut FrameReader<'_>, below: &[u32]) -> FrameResult<Self> {
        let signature = RequestSignature::decode_from(reader)?;
        let listed = reader.read_varints()?;
        let members = if listed.is_empty() {
            below.to_vec()
        } else {
            let known =
                // A number from the wire is an index later, so it must be one of the sender's
                // subtree.
                |number: u64| u32::try_from(number).ok().filter(|member| below.contains(member));
            listed
                .into_iter()
                .map(|number| known(number).ok_or(MalformedFrame::Member(number)))
                .collect::<FrameResult<_>>()?
        };
        let counts = signature.call.row_counts_per_member();
        let rows = if counts > 0 { reader.read_varints()? } else { Vec::new() };
        if Some(rows.len()) != members.len().checked_mul(counts) {
            return Err(MalformedFrame::Rows(rows.len()));
        }
        Ok(Self { signature, members, rows })
    }
}

/// Merges the variants into one response. If they differ, returns the text of the mismatch: the
/// first violated rule, then the request of every rank.
pub fn resolve_variants(
    name: &Arc<str>,
    mut variants: Vec<RequestVariant>,
    ranks: &[Rank],
) -> Result<CachedResponse, String> {
    if variants.len() == 1
        && let Some(variant) = variants.pop()
    {
        let counts = variant.signature.call.row_counts_per_member();
        let mut rows = vec![0; counts * ranks.len()];
        // `chunks_exact` panics at 0. Without counts there are no rows, and the loop does nothing.
        for (member, given) in variant.members.iter().zip(variant.rows.chunks_exact(counts.max(1)))
        {
            let first = *member as usize * counts;
            if let Some(place) = rows.get_mut(first..first + counts) {
                place.copy_from_slice(given);
            }
        }
        return Ok(CachedResponse::new(Arc::clone(name), variant.signature, rows));
    }
    let differs = |part: fn(&RequestSignature) -> SignaturePart| {
        variants.windows(2).any(|pair| part(&pair[0].signature) != part(&pair[1].signature))
    };
    let call = variants
        .first()
        .map_or("", |variant| variant.signature.call.operation_name())
        .to_uppercase();
    let rule = AGREEMENT_RULES
        .iter()
        .find(|(_, part)| differs(*part))
        .map_or("requests", |(text, _)| text);
    let mut text = format!("Mismatched {}: tensor {name}: ", rule.replace("{}", &call));
    // Announcements arrive in any order. The text must not depend on it (NE-3).
    variants.sort_by_key(|variant| variant.members.iter().min().copied());
    for (index, variant) in variants.iter().enumerate() {
        let mut order: Vec<usize> = (0..variant.members.len()).collect();
        order.sort_unstable_by_key(|at| variant.members[*at]);
        let global: Vec<Rank> = order
            .iter()
            .filter_map(|at| ranks.get(variant.members[*at] as usize))
            .copied()
            .collect();
        text.push_str(if index > 0 { "; " } else { "" });
        text.push_str(&format!("{} submitted {}", rank_ranges_text(&global), variant.signature));
        if variant.signature.call == CollectiveCall::Allgather {
            let rows: Vec<u64> =
                order.iter().filter_map(|at| variant.rows.get(*at)).copied().collect();
            text.push_str(&first_dimensions_text(&rows));
        }
    }
    let size = variants.first().map_or(0, |variant| variant.signature.group_size);
    if rule == "groups" && variants.iter().all(|variant| variant.signature.group_size == size) {
        text.push_str("; the other tensors in these groups differ");
    }
    Err(text)
}

/// Returns `, first dimension 3`, or a list of first dimensions if they differ.
fn first_dimensions_text(rows: &[u64]) -> String {
    let mut distinct = rows.to_vec();
    distinct.dedup();
    let shown: Vec<String> = match &*distinct {
        [all] => vec![all.to_string()],
        _ => rows.iter().take(MAX_SHOWN_DIMENSIONS).map(u64::to_string).collect(),
    };
    let more = if distinct.len() > 1 && rows.len() > MAX_SHOWN_DIMENSIONS { ", ..." } else { "" };
    format!(", first dimension {}{more}", shown.join(", "))
}

/// Largest number of first dimensions in a message.
// A world has up to thousands of members, and the message has a list for each variant.
const MAX_SHOWN_DIMENSIONS: usize = 16;

/// A comparable part of a signature.
#[derive(PartialEq)]
enum SignaturePart {
    Number(u64),
    Pair(u64, u64),
    List(Vec<u64>),
}

/// Description of values that must be equal, and the function that returns them.
type AgreementRule = (&'static str, fn(&RequestSignature) -> SignaturePart);

/// Rules in the order in which they are checked; `{}` stands for the operation.
const AGREEMENT_RULES: [AgreementRule; 8] = [
    ("changes of process sets", |signature| match signature.call {
        CollectiveCall::Change(topic) => SignaturePart::List(
            [topic as u64].into_iter().chain(signature.shape.iter().copied()).collect(),
        ),
        _ => SignaturePart::Number(0),
    }),
    ("data types", |signature| SignaturePart::Number(signature.dtype as u64)),
    ("operations", |signature| {
        SignaturePart::List(signature.call.operation_name().bytes().map(u64::from).collect())
    }),
    ("{} tensor shapes", |signature| SignaturePart::List(signature.shape.clone())),
    ("prescale and/or postscale factors", |signature| {
        match signature.call.reduction_and_factors() {
            Some((_, prescale, postscale)) => SignaturePart::Pair(prescale, postscale),
            None => SignaturePart::Number(0),
        }
    }),
    ("reduction operation", |signature| match signature.call.reduction_and_factors() {
        Some((op, ..)) => SignaturePart::Number(op as u64),
        None => SignaturePart::Number(0),
    }),
    ("{} root ranks", |signature| match signature.call {
        CollectiveCall::Broadcast { root } => SignaturePart::Number(root.into()),
        _ => SignaturePart::Number(0),
    }),
    ("groups", |signature| SignaturePart::Pair(signature.group, signature.group_size.into())),
];

/// Formats ranks as `rank 3` or `ranks 0-2, 5`.
pub fn rank_ranges_text(ranks: &[Rank]) -> String {
    let mut text = String::from(if ranks.len() == 1 { "rank " } else { "ranks " });
    let mut at = 0;
    while at < ranks.len() {
        let start = at;
        while at + 1 < ranks.len() && ranks[at + 1].0 == ranks[at].0 + 1 {
            at += 1;
        }
        text.push_str(if start > 0 { ", " } else { "" });
        text.push_str(&ranks[start].to_string());
        if at > start {
            text.push_str(&format!("-{}", ranks[at]));
        }
        at += 1;
    }
    text
}

#[cfg(test)]
mod tests {

    use farandole_kernels::DataType;

    use super::*;
    use crate::signature::tests::plain;
    use crate::signature::{ChangeTopic, MemorySite};

    fn variant(signature: RequestSignature, members: &[u32]) -> RequestVariant {
        RequestVariant { signature, members: members.to_vec(), rows: Vec::new() }
    }

    fn text(variants: Vec<RequestVariant>) -> String {
        let ranks: Vec<Rank> = (0..8).map(Rank).collect();
        resolve_variants(&"t".into(), variants, &ranks).unwrap_err()
    }

    #[test]
    fn the_first_rule_that_fails_is_named_with_what_every_rank_submitted() {
        let other = RequestSignature { dtype: DataType::F64, ..plain(&[3]) };
        let text = text(vec![variant(plain(&[2]), &[3, 0, 1, 2]), variant(other, &[5])]);
        assert_eq!(
            text,
            "Mismatched data types: tensor t: ranks 0-3 submitted allreduce Sum of float32 [2] on \
             the host; rank 5 submitted allreduce Sum of float64 [3] on the host"
        );
    }

    #[test]
    fn shapes_roots_groups_and_changes_have_rules_of_their_own() {
        let change = |call, shape| RequestSignature { call, ..plain(shape) };
        let broadcast =
            |root| RequestSignature { call: CollectiveCall::Broadcast { root }, ..plain(&[2]) };
        let grouped = RequestSignature { group: 7, group_size: 2, ..plain(&[2]) };
        let of = |one: RequestSignature, two: RequestSignature| {
            text(vec![variant(one, &[0]), variant(two, &[1])])
        };
        assert!(of(plain(&[2]), plain(&[3])).starts_with("Mismatched ALLREDUCE tensor shapes: "));
        assert!(of(broadcast(0), broadcast(1)).starts_with("Mismatched BROADCAST root ranks: "));
        assert!(of(plain(&[2]), broadcast(1)).starts_with("Mismatched operations: "));
        let rows = |dim, members: &[u32], rows: &[u64]| RequestVariant {
            rows: rows.to_vec(),
            ..variant(
                RequestSignature { call: CollectiveCall::Allgather, ..plain(&[0, dim]) },
                members,
            )
        };
        let text = text(vec![rows(4, &[2], &[7]), rows(3, &[1, 0], &[6, 5])]);
        assert_eq!(
            text,
            "Mismatched ALLGATHER tensor shapes: tensor t: ranks 0-1 submitted allgather of \
             float32 [.., 3] on the host, first dimension 5, 6; rank 2 submitted allgather of \
             float32 [.., 4] on the host, first dimension 7"
        );
        assert!(of(plain(&[2]), grouped).starts_with("Mismatched groups: "));
        assert_eq!(
            of(
                change(CollectiveCall::Change(ChangeTopic::Add), &[0, 2]),
                change(CollectiveCall::Change(ChangeTopic::Remove), &[2])
            ),
            "Mismatched changes of process sets: tensor t: rank 0 submitted an addition of process \
             set [0, 2]; rank 1 submitted a removal of process set 2"
        );
    }

    #[test]
    fn tensors_on_hosts_and_devices_match() {
        let at = |site| RequestSignature { site, ..plain(&[2]) };
        let mut tally = AnnouncementTally::new(Instant::now());
        for (member, site) in
            [(0, MemorySite::Device), (1, MemorySite::Device), (2, MemorySite::Host)]
        {
            tally.add_announcement(
                member,
                Announcement::Explicit(vec![variant(at(site), &[member])]),
                &[member],
                |source| vec![source],
            );
        }
        let variants = tally.into_announcement().into_variants(&[]);
        assert_eq!(
            variants,
            [RequestVariant { rows: Vec::new(), ..variant(at(MemorySite::Mixed), &[0, 1, 2]) }]
        );
    }

    #[test]
    fn rows_are_put_in_member_order() {
        let call = RequestSignature { call: CollectiveCall::Allgather, ..plain(&[0, 4]) };
        let variants = vec![RequestVariant {
            signature: call,
            members: vec![2, 0, 1],
            rows: vec![30, 10, 20],
        }];
        assert_eq!(
            resolve_variants(&"t".into(), variants, &[Rank(0), Rank(1), Rank(2)]).unwrap().rows,
            [10, 20, 30]
        );
    }

    #[test]
    fn a_cached_announcement_that_meets_another_is_expanded_for_the_earlier_ranks() {
        let call = RequestSignature { call: CollectiveCall::Allgather, ..plain(&[0]) };
        let entry = Arc::new(CachedResponse::new("t".into(), call.clone(), vec![5, 6, 7]));
        let mut tally = AnnouncementTally::new(Instant::now());
        let of = |source: u32| vec![source];
        let known = Announcement::Cached(CacheId { slot: 0, version: 0 }, entry, Vec::new());
        tally.add_announcement(2, known.clone(), &[2], of);
        tally.add_announcement(0, known, &[0], of);
        let announced = Announcement::Explicit(vec![RequestVariant {
            signature: call,
            members: vec![1],
            rows: vec![9],
        }]);
        tally.add_announcement(1, announced, &[1], of);
        let variants = tally.into_announcement().into_variants(&[]);
        assert_eq!(
            resolve_variants(&"t".into(), variants, &[Rank(0), Rank(1), Rank(2)]).unwrap().rows,
            [5, 9, 7]
        );
    }

    #[test]
    fn variants_survive_the_wire_for_all_and_for_some_below_the_sender() {
        let call = RequestSignature { call: CollectiveCall::Allgather, ..plain(&[0, 4]) };
        for members in [vec![4, 6], vec![6, 4, 5]] {
            let variant = RequestVariant {
                signature: call.clone(),
                rows: members.iter().map(|m| u64::from(*m)).collect(),
                members,
            };
            let mut frame = Vec::new();
            variant.encode_to(&[4, 5, 6], &mut FrameWriter(&mut frame));
            let read = RequestVariant::decode_from(&mut FrameReader(&frame), &[4, 5, 6]).unwrap();
            assert_eq!(read.rows, read.members.iter().map(|m| u64::from(*m)).collect::<Vec<_>>());
            assert_eq!(read.members.len(), variant.members.len());
        }
    }
}
