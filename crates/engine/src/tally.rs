// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The ranks that have announced a tensor, and their requests.

use std::sync::Arc;
use std::time::Instant;

use farandole_world::Rank;

use crate::cache::{Agreed, CacheId};
use crate::set::what;
use crate::signature::{Call, Signature};
use crate::wire::{Malformed, Read, Reader, Writer};

/// A wish of some members, these members, and the row counts of each of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) signature: Signature,
    pub(crate) members: Vec<u32>,
    pub(crate) rows: Vec<u64>,
}

/// The wish of one source: this member, or all members below one child.
#[derive(Clone, Debug)]
pub(crate) enum Wish {
    /// Exactly what was agreed on before, by all but some that have joined.
    Known(CacheId, Arc<Agreed>, Vec<u32>),
    /// This; more than one entry when they disagree.
    Told(Vec<Variant>),
}

/// Announcements of one tensor until the whole subtree has announced it.
#[derive(Debug)]
pub(crate) struct Tally {
    pub(crate) since: Instant,
    /// Time of the last upward report of its absentees.
    pub(crate) reported: Option<Instant>,
    /// Sources that came: 0 is this member, `n + 1` its `n`th child.
    pub(crate) sources: Vec<u32>,
    wish: Option<Wish>,
}

impl Tally {
    pub(crate) fn new(since: Instant) -> Self {
        Self { since, reported: None, sources: Vec::new(), wish: None }
    }

    /// Adds what `source`, standing for `members`, wants; `others` gives the members of sources
    /// that came before.
    pub(crate) fn add(
        &mut self,
        source: u32,
        wish: Wish,
        members: &[u32],
        others: impl Fn(u32) -> Vec<u32>,
    ) {
        self.wish = Some(match (self.wish.take(), wish) {
            (None, wish) => wish,
            (Some(Wish::Known(id, entry, mut absent)), Wish::Known(other, _, more))
                if id == other =>
            {
                absent.extend(more);
                Wish::Known(id, entry, absent)
            }
            (Some(before), wish) => {
                let came: Vec<u32> =
                    self.sources.iter().flat_map(|source| others(*source)).collect();
                let mut variants = before.told(&came);
                for variant in wish.told(members) {
                    merge(&mut variants, variant);
                }
                Wish::Told(variants)
            }
        });
        self.sources.push(source);
    }

    pub(crate) fn wish(self) -> Wish {
        self.wish.unwrap_or(Wish::Told(Vec::new()))
    }

    /// Name of the collective, as far as anybody came.
    pub(crate) fn operation(&self) -> Option<&'static str> {
        self.wish.as_ref().and_then(Wish::call).map(|call| call.name())
    }

    /// Its name in reports, and whether it is a meeting; of the first rank's request if ranks
    /// differ.
    pub(crate) fn what(&self, name: &str) -> (String, bool) {
        let signature = self.wish.as_ref().and_then(Wish::signature);
        signature.map_or_else(
            || (what("collective", None, name), false),
            |signature| {
                let Signature { call, .. } = signature;
                (what(call.name(), signature.matter().as_deref(), name), call.is_meeting())
            },
        )
    }

    /// Returns whether anybody put this tensor into this group.
    pub(crate) fn is_in(&self, group: u64) -> bool {
        match &self.wish {
            Some(Wish::Known(_, entry, _)) => entry.signature.group == group,
            Some(Wish::Told(variants)) => {
                variants.iter().any(|variant| variant.signature.group == group)
            }
            None => false,
        }
    }
}

fn merge(variants: &mut Vec<Variant>, variant: Variant) {
    match variants.iter_mut().find(|known| known.signature.matches(&variant.signature)) {
        Some(known) => {
            // Tensors of some in host memory and of others on devices go through the host.
            known.signature.site = known.signature.site.with(variant.signature.site);
            known.members.extend(variant.members);
            known.rows.extend(variant.rows);
        }
        None => variants.push(variant),
    }
}

impl Wish {
    /// The collective; that of the first rank if ranks differ.
    pub(crate) fn call(&self) -> Option<Call> {
        self.signature().map(|signature| signature.call)
    }

    fn signature(&self) -> Option<&Signature> {
        match self {
            Self::Known(_, agreed, _) => Some(&agreed.signature),
            Self::Told(variants) => variants.first().map(|variant| &variant.signature),
        }
    }

    /// Spelled out for these members.
    pub(crate) fn told(self, members: &[u32]) -> Vec<Variant> {
        match self {
            Self::Told(variants) => variants,
            Self::Known(_, entry, absent) => {
                let members: Vec<u32> =
                    members.iter().copied().filter(|member| !absent.contains(member)).collect();
                let rows =
                    members.iter().flat_map(|member| entry.counts_of(*member)).copied().collect();
                vec![Variant { signature: entry.signature.clone(), members, rows }]
            }
        }
    }

    /// Writes it on behalf of `subtree`.
    pub(crate) fn encode(&self, name: &str, subtree: &[u32], writer: &mut Writer<'_>) {
        match self {
            Self::Known(id, _, absent) => {
                writer.byte(if absent.is_empty() { 0 } else { 3 });
                writer.number(id.slot.into());
                writer.number(id.version.into());
                if !absent.is_empty() {
                    writer.numbers(absent.iter().map(|member| u64::from(*member)));
                }
            }
            Self::Told(variants) => {
                writer.byte(1);
                writer.text(name);
                writer.number(variants.len() as u64);
                for variant in variants {
                    variant.encode(subtree, writer);
                }
            }
        }
    }
}

impl Variant {
    /// "All ranks below the sender" is written as an empty list.
    fn encode(&self, subtree: &[u32], writer: &mut Writer<'_>) {
        self.signature.encode(writer);
        let mut order: Vec<usize> = (0..self.members.len()).collect();
        order.sort_unstable_by_key(|at| self.members[*at]);
        let all = self.members.len() == subtree.len();
        let listed = if all { &[][..] } else { &order[..] };
        writer.numbers(listed.iter().map(|at| u64::from(self.members[*at])));
        let counts = self.signature.call.counts();
        if counts > 0 {
            writer.number((order.len() * counts) as u64);
            for at in order {
                let rows = self.rows.get(at * counts..(at + 1) * counts).unwrap_or_default();
                rows.iter().for_each(|rows| writer.number(*rows));
            }
        }
    }

    pub(crate) fn decode(reader: &mut Reader<'_>, below: &[u32]) -> Read<Self> {
        let signature = Signature::decode(reader)?;
        let listed = reader.numbers()?;
        let members = if listed.is_empty() {
            below.to_vec()
        } else {
            let known =
                |number: u64| u32::try_from(number).ok().filter(|member| below.contains(member));
            listed
                .into_iter()
                .map(|number| known(number).ok_or(Malformed::Member(number)))
                .collect::<Read<_>>()?
        };
        let counts = signature.call.counts();
        let rows = if counts > 0 { reader.numbers()? } else { Vec::new() };
        if Some(rows.len()) != members.len().checked_mul(counts) {
            return Err(Malformed::Rows(rows.len()));
        }
        Ok(Self { signature, members, rows })
    }
}

/// One agreement, or the text of the disagreement: the first rule that does not hold, then what
/// every rank submitted.
pub(crate) fn verdict(
    name: &Arc<str>,
    mut variants: Vec<Variant>,
    ranks: &[Rank],
) -> Result<Agreed, String> {
    if variants.len() == 1
        && let Some(variant) = variants.pop()
    {
        let counts = variant.signature.call.counts();
        let mut rows = vec![0; counts * ranks.len()];
        for (member, given) in variant.members.iter().zip(variant.rows.chunks_exact(counts.max(1)))
        {
            let first = *member as usize * counts;
            if let Some(place) = rows.get_mut(first..first + counts) {
                place.copy_from_slice(given);
            }
        }
        return Ok(Agreed::new(Arc::clone(name), variant.signature, rows));
    }
    let differs = |part: fn(&Signature) -> Part| {
        variants.windows(2).any(|pair| part(&pair[0].signature) != part(&pair[1].signature))
    };
    let call = variants.first().map_or("", |variant| variant.signature.call.name()).to_uppercase();
    let rule = RULES.iter().find(|(_, part)| differs(*part)).map_or("requests", |(text, _)| text);
    let mut text = format!("Mismatched {}: tensor {name}: ", rule.replace("{}", &call));
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
        text.push_str(&format!("{} submitted {}", spans(&global), variant.signature));
        if variant.signature.call == Call::Allgather {
            let rows: Vec<u64> =
                order.iter().filter_map(|at| variant.rows.get(*at)).copied().collect();
            text.push_str(&first_dimensions(&rows));
        }
    }
    let size = variants.first().map_or(0, |variant| variant.signature.group_size);
    if rule == "groups" && variants.iter().all(|variant| variant.signature.group_size == size) {
        text.push_str("; the other tensors in these groups differ");
    }
    Err(text)
}

/// `, first dimension 3`, or of every rank where they are not the same.
fn first_dimensions(rows: &[u64]) -> String {
    let mut distinct = rows.to_vec();
    distinct.dedup();
    let shown: Vec<String> = match &*distinct {
        [all] => vec![all.to_string()],
        _ => rows.iter().take(SHOWN).map(u64::to_string).collect(),
    };
    let more = if distinct.len() > 1 && rows.len() > SHOWN { ", ..." } else { "" };
    format!(", first dimension {}{more}", shown.join(", "))
}

/// First dimensions that a message lists.
const SHOWN: usize = 16;

/// A comparable part of a signature.
#[derive(PartialEq)]
enum Part {
    Number(u64),
    Pair(u64, u64),
    List(Vec<u64>),
}

/// The values that must not differ, and the way to compare them.
type Rule = (&'static str, fn(&Signature) -> Part);

/// In the order in which they are looked at; `{}` stands for the operation.
const RULES: [Rule; 8] = [
    ("changes of process sets", |signature| match signature.call {
        Call::Change(topic) => {
            Part::List([topic as u64].into_iter().chain(signature.shape.iter().copied()).collect())
        }
        _ => Part::Number(0),
    }),
    ("data types", |signature| Part::Number(signature.dtype as u64)),
    ("operations", |signature| Part::List(signature.call.name().bytes().map(u64::from).collect())),
    ("{} tensor shapes", |signature| Part::List(signature.shape.clone())),
    ("prescale and/or postscale factors", |signature| match signature.call.reduction() {
        Some((_, prescale, postscale)) => Part::Pair(prescale, postscale),
        None => Part::Number(0),
    }),
    ("reduction operation", |signature| match signature.call.reduction() {
        Some((op, ..)) => Part::Number(op as u64),
        None => Part::Number(0),
    }),
    ("{} root ranks", |signature| match signature.call {
        Call::Broadcast { root } => Part::Number(root.into()),
        _ => Part::Number(0),
    }),
    ("groups", |signature| Part::Pair(signature.group, signature.group_size.into())),
];

/// `rank 3`, `ranks 0-2, 5`.
pub(crate) fn spans(ranks: &[Rank]) -> String {
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
    use farandole_collectives::DataType;

    use super::*;
    use crate::signature::tests::plain;
    use crate::signature::{Site, Topic};

    fn variant(signature: Signature, members: &[u32]) -> Variant {
        Variant { signature, members: members.to_vec(), rows: Vec::new() }
    }

    fn text(variants: Vec<Variant>) -> String {
        let ranks: Vec<Rank> = (0..8).map(Rank).collect();
        verdict(&"t".into(), variants, &ranks).unwrap_err()
    }

    #[test]
    fn the_first_rule_that_fails_is_named_with_what_every_rank_submitted() {
        let other = Signature { dtype: DataType::F64, ..plain(&[3]) };
        let text = text(vec![variant(plain(&[2]), &[3, 0, 1, 2]), variant(other, &[5])]);
        assert_eq!(
            text,
            "Mismatched data types: tensor t: ranks 0-3 submitted allreduce Sum of float32 [2] on \
             the host; rank 5 submitted allreduce Sum of float64 [3] on the host"
        );
    }

    #[test]
    fn shapes_roots_groups_and_changes_have_rules_of_their_own() {
        let change = |call, shape| Signature { call, ..plain(shape) };
        let broadcast = |root| Signature { call: Call::Broadcast { root }, ..plain(&[2]) };
        let grouped = Signature { group: 7, group_size: 2, ..plain(&[2]) };
        let of =
            |one: Signature, two: Signature| text(vec![variant(one, &[0]), variant(two, &[1])]);
        assert!(of(plain(&[2]), plain(&[3])).starts_with("Mismatched ALLREDUCE tensor shapes: "));
        assert!(of(broadcast(0), broadcast(1)).starts_with("Mismatched BROADCAST root ranks: "));
        assert!(of(plain(&[2]), broadcast(1)).starts_with("Mismatched operations: "));
        let rows = |dim, members: &[u32], rows: &[u64]| Variant {
            rows: rows.to_vec(),
            ..variant(Signature { call: Call::Allgather, ..plain(&[0, dim]) }, members)
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
                change(Call::Change(Topic::Add), &[0, 2]),
                change(Call::Change(Topic::Remove), &[2])
            ),
            "Mismatched changes of process sets: tensor t: rank 0 submitted an addition of process \
             set [0, 2]; rank 1 submitted a removal of process set 2"
        );
    }

    #[test]
    fn tensors_on_hosts_and_devices_are_one_wish() {
        let at = |site| Signature { site, ..plain(&[2]) };
        let mut tally = Tally::new(Instant::now());
        for (member, site) in [(0, Site::Device), (1, Site::Device), (2, Site::Host)] {
            tally.add(
                member,
                Wish::Told(vec![variant(at(site), &[member])]),
                &[member],
                |source| vec![source],
            );
        }
        let variants = tally.wish().told(&[]);
        assert_eq!(
            variants,
            [Variant { rows: Vec::new(), ..variant(at(Site::Mixed), &[0, 1, 2]) }]
        );
    }

    #[test]
    fn rows_are_put_in_member_order() {
        let call = Signature { call: Call::Allgather, ..plain(&[0, 4]) };
        let variants =
            vec![Variant { signature: call, members: vec![2, 0, 1], rows: vec![30, 10, 20] }];
        assert_eq!(
            verdict(&"t".into(), variants, &[Rank(0), Rank(1), Rank(2)]).unwrap().rows,
            [10, 20, 30]
        );
    }

    #[test]
    fn a_known_wish_meeting_another_is_spelled_out_for_the_ranks_that_came() {
        let call = Signature { call: Call::Allgather, ..plain(&[0]) };
        let entry = Arc::new(Agreed::new("t".into(), call.clone(), vec![5, 6, 7]));
        let mut tally = Tally::new(Instant::now());
        let of = |source: u32| vec![source];
        let known = Wish::Known(CacheId { slot: 0, version: 0 }, entry, Vec::new());
        tally.add(2, known.clone(), &[2], of);
        tally.add(0, known, &[0], of);
        let told = Wish::Told(vec![Variant { signature: call, members: vec![1], rows: vec![9] }]);
        tally.add(1, told, &[1], of);
        let variants = tally.wish().told(&[]);
        assert_eq!(
            verdict(&"t".into(), variants, &[Rank(0), Rank(1), Rank(2)]).unwrap().rows,
            [5, 9, 7]
        );
    }

    #[test]
    fn variants_survive_the_wire_for_all_and_for_some_below_the_sender() {
        let call = Signature { call: Call::Allgather, ..plain(&[0, 4]) };
        for members in [vec![4, 6], vec![6, 4, 5]] {
            let variant = Variant {
                signature: call.clone(),
                rows: members.iter().map(|m| u64::from(*m)).collect(),
                members,
            };
            let mut frame = Vec::new();
            variant.encode(&[4, 5, 6], &mut Writer(&mut frame));
            let read = Variant::decode(&mut Reader(&frame), &[4, 5, 6]).unwrap();
            assert_eq!(read.rows, read.members.iter().map(|m| u64::from(*m)).collect::<Vec<_>>());
            assert_eq!(read.members.len(), variant.members.len());
        }
    }
}
