// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Formation of worlds from the requests of a generation's ranks. Each rank asks once, with its
//! peer addresses, and gets one answer: the addresses of all ranks, or the reason why the world
//! cannot form. So a world of N ranks costs N calls.
//!
//! The registrar counts the worlds of a rank; the rank's process does not. A world counts for all
//! its members at once. If `init` failed on some ranks, the ranks therefore find each other when
//! they try again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use farandole_world::Generation;
use prost::Message as _;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::generated as wire;
use crate::generation_key_values::{KeyValueRefusal, MAX_VALUE_BYTES, base64_text};

/// Ranks, ascending.
pub(crate) type MemberRanks = Arc<[u32]>;

/// A rank's request for a world.
#[derive(Clone, Debug)]
pub(crate) struct FormationRequest {
    pub(crate) rank: u32,
    /// Random number of the attempt. A repeated call has the same number.
    pub(crate) attempt: u64,
    /// Unique name of the asking process.
    pub(crate) holder: String,
    /// The ranks of the world, with the asking rank.
    pub(crate) members: MemberRanks,
    pub(crate) encoded_addresses: Bytes,
}

/// A world whose ranks have all asked.
#[derive(Debug, PartialEq)]
pub(crate) struct FormedWorld {
    members: MemberRanks,
    /// An encoded `WorldAddresses` message.
    pub(crate) encoded_addresses: Bytes,
}

/// A formed world, as the journal records it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct FormedWorldRecord {
    generation: Generation,
    members: Vec<FormedWorldMember>,
    #[serde(rename = "cards", with = "base64_text")]
    encoded_addresses: Bytes,
}

/// A rank of a formed world, the attempt with which it asked, and the asking process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct FormedWorldMember {
    rank: u32,
    attempt: u64,
    holder: String,
}

/// A callback that gets each formed world before its ranks do.
type FormedWorldCallback = Box<dyn Fn(&FormedWorldRecord) + Send>;

/// The reason why a world cannot form.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum FormationRefusal {
    /// Another process holds the asking rank.
    RankTaken(String),
    /// A member asks for another world, or its world at the same position in its sequence was
    /// another one.
    MembersDiffer { rank: u32, members: MemberRanks },
    /// A member's worker has ended.
    WorkerEnded { rank: u32, host: String },
}

/// Outcome of a request: the formed world, or the reason why it cannot form.
pub(crate) type WorldOrRefusal = Result<Arc<FormedWorld>, FormationRefusal>;

/// The answer to a rank.
#[derive(Debug)]
pub(crate) enum FormationOutcomeOrReceiver {
    Known(WorldOrRefusal),
    /// Receiver of the outcome. The end of the generation closes the channel.
    Wait(watch::Receiver<Option<WorldOrRefusal>>),
}

#[derive(Default)]
struct RankRequests {
    holder: Option<String>,
    /// Members of each world that the rank has been in, in order.
    worlds: Vec<MemberRanks>,
    /// Latest request of the rank. It stands until the rank asks again or gives up, whatever the
    /// answer was.
    latest_request: Option<(u64, MemberRanks)>,
    /// Latest attempt that formed a world, and the world: the call may be repeated.
    last_formed: Option<(u64, Arc<FormedWorld>)>,
    /// The host on which its worker ended.
    ended: Option<String>,
}

struct PendingFormation {
    addresses_by_rank: BTreeMap<u32, Bytes>,
    outcome: watch::Sender<Option<WorldOrRefusal>>,
}

impl Default for PendingFormation {
    fn default() -> Self {
        Self { addresses_by_rank: BTreeMap::new(), outcome: watch::Sender::new(None) }
    }
}

/// Formation requests of one generation.
#[derive(Default)]
pub(crate) struct FormationTable {
    generation: Generation,
    ranks: HashMap<u32, RankRequests>,
    waiting: HashMap<MemberRanks, PendingFormation>,
    note: Option<FormedWorldCallback>,
    /// Worlds that have formed since `note` was set.
    formed: Vec<FormedWorldRecord>,
}

impl FormationTable {
    /// Clears the table if `generation` is newer, which ends the waits of older generations.
    /// Returns false if `generation` is older.
    fn clear_for_newer_generation(&mut self, generation: Generation) -> bool {
        if self.generation < generation {
            // Dropping the senders ends the waits of the older generation.
            *self = Self { generation, note: self.note.take(), ..Self::default() };
        }
        self.generation == generation
    }

    /// Makes the table call `note` with each world that forms, before the ranks of the world get
    /// it.
    pub(crate) fn set_world_formed_callback(
        &mut self,
        note: impl Fn(&FormedWorldRecord) + Send + 'static,
    ) {
        self.note = Some(Box::new(note));
    }

    /// Returns the worlds that have formed since `note` was set, in order.
    pub(crate) fn formed_worlds(&self) -> &[FormedWorldRecord] {
        &self.formed
    }

    /// Restores a world that formed before the registrar restarted. Ranks that did not get it ask
    /// again.
    pub(crate) fn restore_formed_world(&mut self, record: FormedWorldRecord) {
        if !self.clear_for_newer_generation(record.generation) {
            return;
        }
        let members: MemberRanks = record.members.iter().map(|member| member.rank).collect();
        let formed = Arc::new(FormedWorld {
            members: Arc::clone(&members),
            encoded_addresses: record.encoded_addresses.clone(),
        });
        for FormedWorldMember { rank, attempt, holder } in &record.members {
            let requests = self.ranks.entry(*rank).or_default();
            requests.holder = Some(holder.clone());
            requests.worlds.push(Arc::clone(&members));
            requests.last_formed = Some((*attempt, Arc::clone(&formed)));
        }
        self.formed.push(record);
    }

    /// Records a request, and returns the outcome or a receiver for it.
    ///
    /// # Errors
    /// `GenerationOver`, and `Value` for an oversized encoding of addresses.
    pub(crate) fn submit_request(
        &mut self,
        generation: Generation,
        request: FormationRequest,
    ) -> Result<FormationOutcomeOrReceiver, KeyValueRefusal> {
        if !self.clear_for_newer_generation(generation) {
            return Err(KeyValueRefusal::GenerationOver);
        }
        if request.encoded_addresses.len() > MAX_VALUE_BYTES {
            return Err(KeyValueRefusal::Value { length: request.encoded_addresses.len() });
        }
        let own = self.ranks.entry(request.rank).or_default();
        let holder = own.holder.get_or_insert_with(|| request.holder.clone());
        // A rank belongs to the first process that asks: a second one would split its peers' links.
        if *holder != request.holder {
            return Ok(FormationOutcomeOrReceiver::Known(Err(FormationRefusal::RankTaken(
                holder.clone(),
            ))));
        }
        if let Some((attempt, formed)) = &own.last_formed
            // The answer was lost with the connection. The world must not count twice.
            && *attempt == request.attempt
        {
            return Ok(FormationOutcomeOrReceiver::Known(Ok(Arc::clone(formed))));
        }
        if let Some((_, earlier)) =
            own.latest_request.replace((request.attempt, Arc::clone(&request.members)))
            && let Some(pending) = self.waiting.get_mut(&earlier)
        {
            pending.addresses_by_rank.remove(&request.rank);
        }
        let first = own.worlds.len();
        // Ranks that wait for this one in another world would wait until their deadline.
        self.refuse_conflicting_ranks(&request, first);
        if let Some(refusal) = self.find_refusal(&request, first) {
            self.refuse_pending_world(&request.members, &refusal);
            self.clear_ended_request(request.rank, &refusal);
            return Ok(FormationOutcomeOrReceiver::Known(Err(refusal)));
        }
        let pending = self.waiting.entry(Arc::clone(&request.members)).or_default();
        pending.addresses_by_rank.insert(request.rank, request.encoded_addresses);
        if pending.addresses_by_rank.len() < request.members.len() {
            return Ok(FormationOutcomeOrReceiver::Wait(pending.outcome.subscribe()));
        }
        Ok(FormationOutcomeOrReceiver::Known(Ok(self.form_world(&request.members))))
    }

    /// Forms the world of `members`, who have all asked.
    fn form_world(&mut self, members: &MemberRanks) -> Arc<FormedWorld> {
        let pending = self.waiting.remove(members).unwrap_or_default();
        let world_addresses =
            wire::WorldAddresses { by_rank: pending.addresses_by_rank.into_values().collect() };
        let formed = Arc::new(FormedWorld {
            members: Arc::clone(members),
            encoded_addresses: world_addresses.encode_to_vec().into(),
        });
        let mut named = Vec::new();
        for rank in members.iter() {
            let requests = self.ranks.entry(*rank).or_default();
            requests.worlds.push(Arc::clone(members));
            if let Some((attempt, _)) = requests.latest_request.take() {
                requests.last_formed = Some((attempt, Arc::clone(&formed)));
                named.push(FormedWorldMember {
                    rank: *rank,
                    attempt,
                    holder: requests.holder.clone().unwrap_or_default(),
                });
            }
        }
        if let Some(note) = &self.note {
            let record = FormedWorldRecord {
                generation: self.generation,
                members: named,
                encoded_addresses: formed.encoded_addresses.clone(),
            };
            // Before the answer: a registrar that restarts must give the same answer to the other
            // members.
            note(&record);
            self.formed.push(record);
        }
        pending.outcome.send_replace(Some(Ok(Arc::clone(&formed))));
        formed
    }

    /// Returns the reason why this cannot be world number `first` of the asking rank, if there is
    /// one.
    fn find_refusal(&self, request: &FormationRequest, first: usize) -> Option<FormationRefusal> {
        request.members.iter().filter(|rank| **rank != request.rank).find_map(|rank| {
            let other = self.ranks.get(rank)?;
            if let Some(host) = &other.ended {
                return Some(FormationRefusal::WorkerEnded { rank: *rank, host: host.clone() });
            }
            let requested = other.latest_request.as_ref().map(|(_, members)| members);
            if requested == Some(&request.members) {
                return None;
            }
            let members_differ = |members: &MemberRanks| FormationRefusal::MembersDiffer {
                rank: *rank,
                members: Arc::clone(members),
            };
            if let Some(members) = other.worlds.get(first) {
                return (*members != request.members).then(|| members_differ(members));
            }
            let same_turn = |members: &MemberRanks| {
                other.worlds.len() == first || members.contains(&request.rank)
            };
            requested.filter(|members| same_turn(members)).map(members_differ)
        })
    }

    /// Refuses the pending worlds in which ranks wait for the asking rank, if it asks for another
    /// one.
    fn refuse_conflicting_ranks(&mut self, request: &FormationRequest, first: usize) {
        let refusal = FormationRefusal::MembersDiffer {
            rank: request.rank,
            members: Arc::clone(&request.members),
        };
        let waits = |members: &MemberRanks, pending: &PendingFormation| {
            *members != request.members
                && members.contains(&request.rank)
                && pending.addresses_by_rank.keys().any(|rank| {
                    request.members.contains(rank)
                        || self.ranks.get(rank).is_some_and(|waiter| waiter.worlds.len() == first)
                })
        };
        let others: Vec<MemberRanks> = self
            .waiting
            .iter()
            .filter(|(members, pending)| waits(members, pending))
            .map(|(members, _)| Arc::clone(members))
            .collect();
        for members in others {
            self.refuse_pending_world(&members, &refusal);
        }
    }

    /// Refuses a pending world, and sends the reason to the ranks that wait for it.
    fn refuse_pending_world(&mut self, members: &MemberRanks, refusal: &FormationRefusal) {
        if let Some(pending) = self.waiting.remove(members) {
            for rank in pending.addresses_by_rank.keys() {
                self.clear_ended_request(*rank, refusal);
            }
            pending.outcome.send_replace(Some(Err(refusal.clone())));
        }
    }

    /// Clears the rank's latest request if it was refused because a member's worker has ended. That
    /// request must not conflict with later requests for other worlds.
    fn clear_ended_request(&mut self, rank: u32, refusal: &FormationRefusal) {
        if let (FormationRefusal::WorkerEnded { .. }, Some(requests)) =
            (refusal, self.ranks.get_mut(&rank))
        {
            requests.latest_request = None;
        }
    }

    /// Withdraws a request: the rank no longer waits for the outcome of this attempt.
    pub(crate) fn withdraw_request(&mut self, generation: Generation, rank: u32, attempt: u64) {
        if self.generation != generation {
            return;
        }
        let Some(requests) = self.ranks.get_mut(&rank) else { return };
        // A late withdrawal of an earlier call must not remove the request of a newer attempt.
        if requests.latest_request.as_ref().is_none_or(|(present, _)| *present != attempt) {
            return;
        }
        let Some((_, members)) = requests.latest_request.take() else { return };
        if let Some(pending) = self.waiting.get_mut(&members) {
            pending.addresses_by_rank.remove(&rank);
            if pending.addresses_by_rank.is_empty() {
                self.waiting.remove(&members);
            }
        }
    }

    /// Records that a rank's worker has ended successfully: no rank waits for that rank any more.
    pub(crate) fn record_worker_end(&mut self, generation: Generation, rank: u32, host: String) {
        if !self.clear_for_newer_generation(generation) {
            return;
        }
        self.ranks.entry(rank).or_default().ended = Some(host.clone());
        let with: Vec<MemberRanks> =
            self.waiting.keys().filter(|members| members.contains(&rank)).map(Arc::clone).collect();
        for members in with {
            self.refuse_pending_world(
                &members,
                &FormationRefusal::WorkerEnded { rank, host: host.clone() },
            );
        }
    }

    /// Returns the members of a world that have not asked, ascending.
    pub(crate) fn missing_ranks(&self, generation: Generation, members: &MemberRanks) -> Vec<u32> {
        let pending = (self.generation == generation).then(|| self.waiting.get(members)).flatten();
        let here = |rank: &u32| {
            pending.is_some_and(|pending| pending.addresses_by_rank.contains_key(rank))
        };
        members.iter().copied().filter(|rank| !here(rank)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Generation = Generation(1);

    fn request(rank: u32, attempt: u64, members: &[u32]) -> FormationRequest {
        let encoded_addresses = Bytes::from(format!("{rank}.{attempt}"));
        FormationRequest {
            rank,
            attempt,
            holder: format!("process {rank}"),
            members: members.into(),
            encoded_addresses,
        }
    }

    fn encoded_addresses(outcome: &WorldOrRefusal) -> Vec<String> {
        let encoded = outcome.as_ref().unwrap().encoded_addresses.clone();
        let by_rank = wire::WorldAddresses::decode(encoded).unwrap().by_rank;
        by_rank.into_iter().map(|bytes| String::from_utf8(bytes.into()).unwrap()).collect()
    }

    fn waits(answer: FormationOutcomeOrReceiver) -> watch::Receiver<Option<WorldOrRefusal>> {
        match answer {
            FormationOutcomeOrReceiver::Wait(outcome) => outcome,
            FormationOutcomeOrReceiver::Known(outcome) => panic!("it does not wait: {outcome:?}"),
        }
    }

    fn known(answer: FormationOutcomeOrReceiver) -> WorldOrRefusal {
        match answer {
            FormationOutcomeOrReceiver::Known(outcome) => outcome,
            FormationOutcomeOrReceiver::Wait(_) => panic!("it waits"),
        }
    }

    fn current_outcome(
        outcome: &watch::Receiver<Option<WorldOrRefusal>>,
    ) -> Option<WorldOrRefusal> {
        outcome.borrow().clone()
    }

    fn members_differ(rank: u32, members: &[u32]) -> FormationRefusal {
        FormationRefusal::MembersDiffer { rank, members: members.into() }
    }

    #[test]
    fn the_last_rank_and_the_waiting_ones_get_all_addresses_in_order() {
        let mut table = FormationTable::default();
        let second = waits(table.submit_request(ONE, request(1, 7, &[0, 1])).unwrap());
        assert_eq!(table.missing_ranks(ONE, &[0, 1].into()), [0]);
        let formed = known(table.submit_request(ONE, request(0, 3, &[0, 1])).unwrap());
        assert_eq!(encoded_addresses(&formed), ["0.3", "1.7"]);
        assert_eq!(current_outcome(&second), Some(formed.clone()));
        // A repeated call has the same answer; a new attempt waits for a new world.
        assert_eq!(known(table.submit_request(ONE, request(1, 7, &[0, 1])).unwrap()), formed);
        drop(waits(table.submit_request(ONE, request(1, 8, &[0, 1])).unwrap()));
    }

    #[test]
    fn ranks_meet_again_after_an_attempt_that_failed_on_some_of_them() {
        let mut table = FormationTable::default();
        let first = waits(table.submit_request(ONE, request(0, 1, &[0, 1])).unwrap());
        // Rank 0 asks and gives up twice before rank 1 asks.
        drop(waits(table.submit_request(ONE, request(0, 2, &[0, 1])).unwrap()));
        drop(first);
        table.withdraw_request(ONE, 0, 2);
        drop(waits(table.submit_request(ONE, request(1, 1, &[0, 1])).unwrap()));
        let formed = known(table.submit_request(ONE, request(0, 3, &[0, 1])).unwrap());
        assert_eq!(encoded_addresses(&formed), ["0.3", "1.1"]);
        // A world formed, but rank 0 could not use it and asks again; so does rank 1.
        drop(waits(table.submit_request(ONE, request(0, 4, &[0, 1])).unwrap()));
        assert_eq!(
            encoded_addresses(&known(table.submit_request(ONE, request(1, 2, &[0, 1])).unwrap())),
            ["0.4", "1.2"]
        );
    }

    #[test]
    fn a_rank_that_gives_up_is_awaited_again() {
        let mut table = FormationTable::default();
        drop(waits(table.submit_request(ONE, request(0, 1, &[0, 1])).unwrap()));
        table.withdraw_request(ONE, 0, 9);
        assert_eq!(table.missing_ranks(ONE, &[0, 1].into()), [1]);
        table.withdraw_request(ONE, 0, 1);
        drop(waits(table.submit_request(ONE, request(1, 1, &[0, 1])).unwrap()));
        assert_eq!(table.missing_ranks(ONE, &[0, 1].into()), [0]);
    }

    #[test]
    fn ranks_that_ask_for_different_worlds_get_an_error_in_any_order() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1], [1, 2, 0], [2, 0, 1]] {
            let mut table = FormationTable::default();
            let mut outcomes = HashMap::new();
            for rank in order {
                let members: &[u32] = if rank == 0 { &[0, 1] } else { &[0, 1, 2] };
                outcomes
                    .insert(rank, table.submit_request(ONE, request(rank, 1, members)).unwrap());
            }
            for (rank, answer) in outcomes {
                let outcome = match answer {
                    FormationOutcomeOrReceiver::Known(outcome) => outcome,
                    FormationOutcomeOrReceiver::Wait(outcome) => current_outcome(&outcome).unwrap(),
                };
                let expected = if rank == 0 {
                    members_differ(1, &[0, 1, 2])
                } else {
                    members_differ(0, &[0, 1])
                };
                assert_eq!(outcome, Err(expected), "rank {rank} in {order:?}");
            }
        }
    }

    #[test]
    fn parts_form_side_by_side_and_all_ranks_after_them() {
        let mut table = FormationTable::default();
        drop(waits(table.submit_request(ONE, request(0, 1, &[0, 2])).unwrap()));
        drop(waits(table.submit_request(ONE, request(1, 1, &[1, 3])).unwrap()));
        known(table.submit_request(ONE, request(2, 1, &[0, 2])).unwrap()).unwrap();
        // Ranks 0 and 2 ask for the next world while 3 has not come to its first.
        drop(waits(table.submit_request(ONE, request(0, 2, &[0, 1, 2, 3])).unwrap()));
        drop(waits(table.submit_request(ONE, request(2, 2, &[0, 1, 2, 3])).unwrap()));
        known(table.submit_request(ONE, request(3, 1, &[1, 3])).unwrap()).unwrap();
        drop(waits(table.submit_request(ONE, request(1, 2, &[0, 1, 2, 3])).unwrap()));
        known(table.submit_request(ONE, request(3, 2, &[0, 1, 2, 3])).unwrap()).unwrap();
    }

    #[test]
    fn a_rank_that_waits_for_one_which_has_formed_another_world_hears_of_it() {
        let mut table = FormationTable::default();
        drop(waits(table.submit_request(ONE, request(0, 1, &[0, 1])).unwrap()));
        known(table.submit_request(ONE, request(1, 1, &[0, 1])).unwrap()).unwrap();
        let refusal = known(table.submit_request(ONE, request(2, 1, &[0, 1, 2])).unwrap());
        assert_eq!(refusal, Err(members_differ(0, &[0, 1])));
    }

    #[test]
    fn a_withdrawn_request_conflicts_with_no_other() {
        let mut table = FormationTable::default();
        drop(waits(table.submit_request(ONE, request(0, 1, &[0, 1])).unwrap()));
        let refusal = known(table.submit_request(ONE, request(2, 1, &[0, 1, 2])).unwrap());
        assert_eq!(refusal, Err(members_differ(0, &[0, 1])));
        drop(waits(table.submit_request(ONE, request(0, 2, &[0, 1, 2])).unwrap()));
        drop(waits(table.submit_request(ONE, request(2, 2, &[0, 1, 2])).unwrap()));
    }

    #[test]
    fn no_rank_waits_for_a_rank_that_has_ended() {
        let mut table = FormationTable::default();
        let outcome = waits(table.submit_request(ONE, request(0, 1, &[0, 1])).unwrap());
        table.record_worker_end(ONE, 1, "box".to_owned());
        let refusal = FormationRefusal::WorkerEnded { rank: 1, host: "box".to_owned() };
        assert_eq!(current_outcome(&outcome), Some(Err(refusal.clone())));
        assert_eq!(known(table.submit_request(ONE, request(2, 1, &[1, 2])).unwrap()), Err(refusal));
        drop(waits(table.submit_request(ONE, request(2, 2, &[0, 2])).unwrap()));
    }

    #[test]
    fn one_process_has_a_rank_until_the_generation_is_over() {
        let mut table = FormationTable::default();
        drop(waits(table.submit_request(ONE, request(0, 1, &[0, 1])).unwrap()));
        let child = FormationRequest { holder: "child".to_owned(), ..request(0, 2, &[0, 1]) };
        let taken = known(table.submit_request(ONE, child.clone()).unwrap());
        assert_eq!(taken, Err(FormationRefusal::RankTaken("process 0".to_owned())));
        drop(waits(table.submit_request(Generation(2), child).unwrap()));
    }

    #[test]
    fn a_world_that_formed_before_an_outage_is_the_answer_after_it() {
        let mut before = FormationTable::default();
        before.set_world_formed_callback(|_| {});
        drop(waits(before.submit_request(ONE, request(1, 7, &[0, 1])).unwrap()));
        let formed = known(before.submit_request(ONE, request(0, 3, &[0, 1])).unwrap());
        let text = serde_json::to_string(before.formed_worlds()).unwrap();
        let mut after = FormationTable::default();
        for record in serde_json::from_str::<Vec<FormedWorldRecord>>(&text).unwrap() {
            after.restore_formed_world(record);
        }
        assert_eq!(
            known(after.submit_request(ONE, request(1, 7, &[0, 1])).unwrap()),
            formed,
            "rank 1 had not heard of it"
        );
        let stranger = FormationRequest { holder: "child".to_owned(), ..request(0, 9, &[0, 1]) };
        assert_eq!(
            known(after.submit_request(ONE, stranger).unwrap()),
            Err(FormationRefusal::RankTaken("process 0".to_owned()))
        );
        drop(waits(after.submit_request(ONE, request(0, 4, &[0, 1])).unwrap()));
        assert_eq!(
            encoded_addresses(&known(after.submit_request(ONE, request(1, 8, &[0, 1])).unwrap())),
            ["0.4", "1.8"]
        );
    }

    #[test]
    fn a_new_generation_ends_the_waits_of_the_old() {
        let mut table = FormationTable::default();
        let outcome = waits(table.submit_request(ONE, request(0, 1, &[0, 1])).unwrap());
        drop(waits(table.submit_request(Generation(2), request(1, 1, &[0, 1])).unwrap()));
        assert!(outcome.has_changed().is_err(), "its sender lives");
        assert!(matches!(
            table.submit_request(ONE, request(0, 1, &[0, 1])),
            Err(KeyValueRefusal::GenerationOver)
        ));
    }
}
