// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Ranks of a generation that ask for a world with each other. Each asks once, with its card, and
//! gets one answer: the cards of all ranks, or the reason why the world cannot form. So a world of
//! N costs N calls.
//!
//! A rank's worlds are counted here and not in its process, and all members of a world count it
//! together. Ranks whose `init` failed on some of them therefore meet again when they try again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use farandole_world::Generation;
use prost::Message as _;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::generated as wire;
use crate::kv::{Full, MAX_VALUE, text};

/// Ranks, ascending.
pub(crate) type Members = Arc<[u32]>;

/// One rank's question.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) rank: u32,
    /// Random; a call that is repeated carries the same.
    pub(crate) attempt: u64,
    /// Tells the asking process from all others.
    pub(crate) holder: String,
    /// The ranks of the world, the asking one among them.
    pub(crate) members: Members,
    pub(crate) card: Bytes,
}

/// A world whose ranks have all come.
#[derive(Debug, PartialEq)]
pub(crate) struct Met {
    members: Members,
    /// A `Cards` message.
    pub(crate) cards: Bytes,
}

/// The same, as a journal has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Formed {
    generation: Generation,
    members: Vec<Member>,
    #[serde(with = "text")]
    cards: Bytes,
}

/// A rank of it, the attempt by which it came, and the caller of that attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Member {
    rank: u32,
    attempt: u64,
    holder: String,
}

/// Hears of a world that has formed before its ranks do.
type Note = Box<dyn Fn(&Formed) + Send>;

/// The reason why a world cannot form.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Apart {
    /// Another process has the asking rank.
    Taken(String),
    /// A member asks, or asked in the same place of its sequence, for another world.
    Elsewhere { rank: u32, members: Members },
    /// A member's worker has ended.
    Ended { rank: u32, host: String },
}

/// The state of a world that ranks wait for.
pub(crate) type Outcome = Result<Arc<Met>, Apart>;

/// The answer to a rank.
#[derive(Debug)]
pub(crate) enum Answer {
    Known(Outcome),
    /// All that is to come: the outcome, or the end of the generation, which closes the channel.
    Wait(watch::Receiver<Option<Outcome>>),
}

#[derive(Default)]
struct Asker {
    holder: Option<String>,
    /// The members of each world that it has been in.
    worlds: Vec<Members>,
    /// Its latest question, which stands until it asks again or gives up, whatever the answer was.
    asks: Option<(u64, Members)>,
    /// The answer to its latest attempt that met all ranks: its call may be repeated.
    met: Option<(u64, Arc<Met>)>,
    /// The host on which its worker ended.
    ended: Option<String>,
}

struct Group {
    cards: BTreeMap<u32, Bytes>,
    outcome: watch::Sender<Option<Outcome>>,
}

impl Default for Group {
    fn default() -> Self {
        Self { cards: BTreeMap::new(), outcome: watch::Sender::new(None) }
    }
}

/// The questions of one generation.
#[derive(Default)]
pub(crate) struct Meetings {
    generation: Generation,
    ranks: HashMap<u32, Asker>,
    waiting: HashMap<Members, Group>,
    note: Option<Note>,
    /// The worlds that have formed, if there is a note.
    formed: Vec<Formed>,
}

impl Meetings {
    /// Forgets everything when `generation` is a new one, which ends the waits of older ones. False
    /// for an older one.
    fn enter(&mut self, generation: Generation) -> bool {
        if self.generation < generation {
            *self = Self { generation, note: self.note.take(), ..Self::default() };
        }
        self.generation == generation
    }

    /// Calls `note` with each world that forms, before its ranks get it.
    pub(crate) fn note_with(&mut self, note: impl Fn(&Formed) + Send + 'static) {
        self.note = Some(Box::new(note));
    }

    /// Returns the worlds that have formed since there is a note, in their order.
    pub(crate) fn formed(&self) -> &[Formed] {
        &self.formed
    }

    /// Takes in a world that formed before the registrar started again: ranks that have not heard
    /// of it ask again.
    pub(crate) fn restore(&mut self, formed: Formed) {
        if !self.enter(formed.generation) {
            return;
        }
        let members: Members = formed.members.iter().map(|member| member.rank).collect();
        let met = Arc::new(Met { members: Arc::clone(&members), cards: formed.cards.clone() });
        for Member { rank, attempt, holder } in &formed.members {
            let asker = self.ranks.entry(*rank).or_default();
            asker.holder = Some(holder.clone());
            asker.worlds.push(Arc::clone(&members));
            asker.met = Some((*attempt, Arc::clone(&met)));
        }
        self.formed.push(formed);
    }

    /// Takes a question in.
    ///
    /// # Errors
    /// `Over`, and `Value` for an oversized card.
    pub(crate) fn ask(&mut self, generation: Generation, ask: Ask) -> Result<Answer, Full> {
        if !self.enter(generation) {
            return Err(Full::Over);
        }
        if ask.card.len() > MAX_VALUE {
            return Err(Full::Value { length: ask.card.len() });
        }
        let own = self.ranks.entry(ask.rank).or_default();
        let holder = own.holder.get_or_insert_with(|| ask.holder.clone());
        if *holder != ask.holder {
            return Ok(Answer::Known(Err(Apart::Taken(holder.clone()))));
        }
        if let Some((attempt, met)) = &own.met
            && *attempt == ask.attempt
        {
            return Ok(Answer::Known(Ok(Arc::clone(met))));
        }
        if let Some((_, earlier)) = own.asks.replace((ask.attempt, Arc::clone(&ask.members)))
            && let Some(group) = self.waiting.get_mut(&earlier)
        {
            group.cards.remove(&ask.rank);
        }
        let first = own.worlds.len();
        self.turn_away_others(&ask, first);
        if let Some(apart) = self.obstacle(&ask, first) {
            self.part(&ask.members, &apart);
            self.settle(ask.rank, &apart);
            return Ok(Answer::Known(Err(apart)));
        }
        let group = self.waiting.entry(Arc::clone(&ask.members)).or_default();
        group.cards.insert(ask.rank, ask.card);
        if group.cards.len() < ask.members.len() {
            return Ok(Answer::Wait(group.outcome.subscribe()));
        }
        Ok(Answer::Known(Ok(self.form(&ask.members))))
    }

    /// All members have come.
    fn form(&mut self, members: &Members) -> Arc<Met> {
        let group = self.waiting.remove(members).unwrap_or_default();
        let cards = wire::Cards { cards: group.cards.into_values().collect() };
        let met =
            Arc::new(Met { members: Arc::clone(members), cards: cards.encode_to_vec().into() });
        let mut named = Vec::new();
        for rank in members.iter() {
            let asker = self.ranks.entry(*rank).or_default();
            asker.worlds.push(Arc::clone(members));
            if let Some((attempt, _)) = asker.asks.take() {
                asker.met = Some((attempt, Arc::clone(&met)));
                named.push(Member {
                    rank: *rank,
                    attempt,
                    holder: asker.holder.clone().unwrap_or_default(),
                });
            }
        }
        if let Some(note) = &self.note {
            let formed =
                Formed { generation: self.generation, members: named, cards: met.cards.clone() };
            note(&formed);
            self.formed.push(formed);
        }
        group.outcome.send_replace(Some(Ok(Arc::clone(&met))));
        met
    }

    /// Returns the reason why the `first`th world of the asking rank cannot be this one, if it
    /// cannot.
    fn obstacle(&self, ask: &Ask, first: usize) -> Option<Apart> {
        ask.members.iter().filter(|rank| **rank != ask.rank).find_map(|rank| {
            let other = self.ranks.get(rank)?;
            if let Some(host) = &other.ended {
                return Some(Apart::Ended { rank: *rank, host: host.clone() });
            }
            let asks = other.asks.as_ref().map(|(_, members)| members);
            if asks == Some(&ask.members) {
                return None;
            }
            let elsewhere =
                |members: &Members| Apart::Elsewhere { rank: *rank, members: Arc::clone(members) };
            if let Some(members) = other.worlds.get(first) {
                return (*members != ask.members).then(|| elsewhere(members));
            }
            let same_turn =
                |members: &Members| other.worlds.len() == first || members.contains(&ask.rank);
            asks.filter(|members| same_turn(members)).map(elsewhere)
        })
    }

    /// Answers ranks that wait for the asking rank in another world than it asks for.
    fn turn_away_others(&mut self, ask: &Ask, first: usize) {
        let apart = Apart::Elsewhere { rank: ask.rank, members: Arc::clone(&ask.members) };
        let waits = |members: &Members, group: &Group| {
            *members != ask.members
                && members.contains(&ask.rank)
                && group.cards.keys().any(|rank| {
                    ask.members.contains(rank)
                        || self.ranks.get(rank).is_some_and(|waiter| waiter.worlds.len() == first)
                })
        };
        let others: Vec<Members> = self
            .waiting
            .iter()
            .filter(|(members, group)| waits(members, group))
            .map(|(members, _)| Arc::clone(members))
            .collect();
        for members in others {
            self.part(&members, &apart);
        }
    }

    /// Tells the ranks that wait for this world why it cannot form.
    fn part(&mut self, members: &Members, apart: &Apart) {
        if let Some(group) = self.waiting.remove(members) {
            for rank in group.cards.keys() {
                self.settle(*rank, apart);
            }
            group.outcome.send_replace(Some(Err(apart.clone())));
        }
    }

    /// A question for a rank that has ended is over: it says nothing of what its asker wants next.
    fn settle(&mut self, rank: u32, apart: &Apart) {
        if let (Apart::Ended { .. }, Some(asker)) = (apart, self.ranks.get_mut(&rank)) {
            asker.asks = None;
        }
    }

    /// A rank no longer waits for the answer to this attempt.
    pub(crate) fn give_up(&mut self, generation: Generation, rank: u32, attempt: u64) {
        if self.generation != generation {
            return;
        }
        let Some(asker) = self.ranks.get_mut(&rank) else { return };
        if asker.asks.as_ref().is_none_or(|(present, _)| *present != attempt) {
            return;
        }
        let Some((_, members)) = asker.asks.take() else { return };
        if let Some(group) = self.waiting.get_mut(&members) {
            group.cards.remove(&rank);
            if group.cards.is_empty() {
                self.waiting.remove(&members);
            }
        }
    }

    /// A rank's worker has ended well: no rank waits for it any more.
    pub(crate) fn ended(&mut self, generation: Generation, rank: u32, host: String) {
        if !self.enter(generation) {
            return;
        }
        self.ranks.entry(rank).or_default().ended = Some(host.clone());
        let with: Vec<Members> =
            self.waiting.keys().filter(|members| members.contains(&rank)).map(Arc::clone).collect();
        for members in with {
            self.part(&members, &Apart::Ended { rank, host: host.clone() });
        }
    }

    /// Returns the members of a world that have not come, ascending.
    pub(crate) fn missing(&self, generation: Generation, members: &Members) -> Vec<u32> {
        let group = (self.generation == generation).then(|| self.waiting.get(members)).flatten();
        let here = |rank: &u32| group.is_some_and(|group| group.cards.contains_key(rank));
        members.iter().copied().filter(|rank| !here(rank)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Generation = Generation(1);

    fn ask(rank: u32, attempt: u64, members: &[u32]) -> Ask {
        let card = Bytes::from(format!("{rank}.{attempt}"));
        Ask { rank, attempt, holder: format!("process {rank}"), members: members.into(), card }
    }

    fn cards(outcome: &Outcome) -> Vec<String> {
        let cards = wire::Cards::decode(outcome.as_ref().unwrap().cards.clone()).unwrap().cards;
        cards.into_iter().map(|card| String::from_utf8(card.into()).unwrap()).collect()
    }

    fn waits(answer: Answer) -> watch::Receiver<Option<Outcome>> {
        match answer {
            Answer::Wait(outcome) => outcome,
            Answer::Known(outcome) => panic!("it does not wait: {outcome:?}"),
        }
    }

    fn known(answer: Answer) -> Outcome {
        match answer {
            Answer::Known(outcome) => outcome,
            Answer::Wait(_) => panic!("it waits"),
        }
    }

    fn told(outcome: &watch::Receiver<Option<Outcome>>) -> Option<Outcome> {
        outcome.borrow().clone()
    }

    fn elsewhere(rank: u32, members: &[u32]) -> Apart {
        Apart::Elsewhere { rank, members: members.into() }
    }

    #[test]
    fn the_last_rank_and_the_waiting_ones_get_all_cards_in_order() {
        let mut meetings = Meetings::default();
        let second = waits(meetings.ask(ONE, ask(1, 7, &[0, 1])).unwrap());
        assert_eq!(meetings.missing(ONE, &[0, 1].into()), [0]);
        let met = known(meetings.ask(ONE, ask(0, 3, &[0, 1])).unwrap());
        assert_eq!(cards(&met), ["0.3", "1.7"]);
        assert_eq!(told(&second), Some(met.clone()));
        // A repeated call has the same answer; a new one waits for a new world.
        assert_eq!(known(meetings.ask(ONE, ask(1, 7, &[0, 1])).unwrap()), met);
        drop(waits(meetings.ask(ONE, ask(1, 8, &[0, 1])).unwrap()));
    }

    #[test]
    fn ranks_meet_again_after_an_attempt_that_failed_on_some_of_them() {
        let mut meetings = Meetings::default();
        let first = waits(meetings.ask(ONE, ask(0, 1, &[0, 1])).unwrap());
        // Rank 1 has given up twice before rank 0 hears of anything.
        drop(waits(meetings.ask(ONE, ask(0, 2, &[0, 1])).unwrap()));
        drop(first);
        meetings.give_up(ONE, 0, 2);
        drop(waits(meetings.ask(ONE, ask(1, 1, &[0, 1])).unwrap()));
        let met = known(meetings.ask(ONE, ask(0, 3, &[0, 1])).unwrap());
        assert_eq!(cards(&met), ["0.3", "1.1"]);
        // Both met; rank 0 could not use that world, and rank 1 lost it.
        drop(waits(meetings.ask(ONE, ask(0, 4, &[0, 1])).unwrap()));
        assert_eq!(cards(&known(meetings.ask(ONE, ask(1, 2, &[0, 1])).unwrap())), ["0.4", "1.2"]);
    }

    #[test]
    fn a_rank_that_gives_up_is_awaited_again() {
        let mut meetings = Meetings::default();
        drop(waits(meetings.ask(ONE, ask(0, 1, &[0, 1])).unwrap()));
        meetings.give_up(ONE, 0, 9);
        assert_eq!(meetings.missing(ONE, &[0, 1].into()), [1]);
        meetings.give_up(ONE, 0, 1);
        drop(waits(meetings.ask(ONE, ask(1, 1, &[0, 1])).unwrap()));
        assert_eq!(meetings.missing(ONE, &[0, 1].into()), [0]);
    }

    #[test]
    fn ranks_that_ask_for_different_worlds_get_an_error_in_any_order() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1], [1, 2, 0], [2, 0, 1]] {
            let mut meetings = Meetings::default();
            let mut outcomes = HashMap::new();
            for rank in order {
                let members: &[u32] = if rank == 0 { &[0, 1] } else { &[0, 1, 2] };
                outcomes.insert(rank, meetings.ask(ONE, ask(rank, 1, members)).unwrap());
            }
            for (rank, answer) in outcomes {
                let outcome = match answer {
                    Answer::Known(outcome) => outcome,
                    Answer::Wait(outcome) => told(&outcome).unwrap(),
                };
                let expected =
                    if rank == 0 { elsewhere(1, &[0, 1, 2]) } else { elsewhere(0, &[0, 1]) };
                assert_eq!(outcome, Err(expected), "rank {rank} in {order:?}");
            }
        }
    }

    #[test]
    fn parts_form_side_by_side_and_all_ranks_after_them() {
        let mut meetings = Meetings::default();
        drop(waits(meetings.ask(ONE, ask(0, 1, &[0, 2])).unwrap()));
        drop(waits(meetings.ask(ONE, ask(1, 1, &[1, 3])).unwrap()));
        known(meetings.ask(ONE, ask(2, 1, &[0, 2])).unwrap()).unwrap();
        // Ranks 0 and 2 ask for the next world while 3 has not come to its first.
        drop(waits(meetings.ask(ONE, ask(0, 2, &[0, 1, 2, 3])).unwrap()));
        drop(waits(meetings.ask(ONE, ask(2, 2, &[0, 1, 2, 3])).unwrap()));
        known(meetings.ask(ONE, ask(3, 1, &[1, 3])).unwrap()).unwrap();
        drop(waits(meetings.ask(ONE, ask(1, 2, &[0, 1, 2, 3])).unwrap()));
        known(meetings.ask(ONE, ask(3, 2, &[0, 1, 2, 3])).unwrap()).unwrap();
    }

    #[test]
    fn a_rank_that_waits_for_one_which_has_formed_another_world_hears_of_it() {
        let mut meetings = Meetings::default();
        drop(waits(meetings.ask(ONE, ask(0, 1, &[0, 1])).unwrap()));
        known(meetings.ask(ONE, ask(1, 1, &[0, 1])).unwrap()).unwrap();
        let apart = known(meetings.ask(ONE, ask(2, 1, &[0, 1, 2])).unwrap());
        assert_eq!(apart, Err(elsewhere(0, &[0, 1])));
    }

    #[test]
    fn a_withdrawn_request_conflicts_with_no_other() {
        let mut meetings = Meetings::default();
        drop(waits(meetings.ask(ONE, ask(0, 1, &[0, 1])).unwrap()));
        let apart = known(meetings.ask(ONE, ask(2, 1, &[0, 1, 2])).unwrap());
        assert_eq!(apart, Err(elsewhere(0, &[0, 1])));
        drop(waits(meetings.ask(ONE, ask(0, 2, &[0, 1, 2])).unwrap()));
        drop(waits(meetings.ask(ONE, ask(2, 2, &[0, 1, 2])).unwrap()));
    }

    #[test]
    fn no_rank_waits_for_a_rank_that_has_ended() {
        let mut meetings = Meetings::default();
        let outcome = waits(meetings.ask(ONE, ask(0, 1, &[0, 1])).unwrap());
        meetings.ended(ONE, 1, "box".to_owned());
        let apart = Apart::Ended { rank: 1, host: "box".to_owned() };
        assert_eq!(told(&outcome), Some(Err(apart.clone())));
        assert_eq!(known(meetings.ask(ONE, ask(2, 1, &[1, 2])).unwrap()), Err(apart));
        drop(waits(meetings.ask(ONE, ask(2, 2, &[0, 2])).unwrap()));
    }

    #[test]
    fn one_process_has_a_rank_until_the_generation_is_over() {
        let mut meetings = Meetings::default();
        drop(waits(meetings.ask(ONE, ask(0, 1, &[0, 1])).unwrap()));
        let child = Ask { holder: "child".to_owned(), ..ask(0, 2, &[0, 1]) };
        let taken = known(meetings.ask(ONE, child.clone()).unwrap());
        assert_eq!(taken, Err(Apart::Taken("process 0".to_owned())));
        drop(waits(meetings.ask(Generation(2), child).unwrap()));
    }

    #[test]
    fn a_world_that_formed_before_an_outage_is_the_answer_after_it() {
        let mut before = Meetings::default();
        before.note_with(|_| {});
        drop(waits(before.ask(ONE, ask(1, 7, &[0, 1])).unwrap()));
        let met = known(before.ask(ONE, ask(0, 3, &[0, 1])).unwrap());
        let text = serde_json::to_string(before.formed()).unwrap();
        let mut after = Meetings::default();
        for formed in serde_json::from_str::<Vec<Formed>>(&text).unwrap() {
            after.restore(formed);
        }
        assert_eq!(
            known(after.ask(ONE, ask(1, 7, &[0, 1])).unwrap()),
            met,
            "rank 1 had not heard of it"
        );
        let stranger = Ask { holder: "child".to_owned(), ..ask(0, 9, &[0, 1]) };
        assert_eq!(
            known(after.ask(ONE, stranger).unwrap()),
            Err(Apart::Taken("process 0".to_owned()))
        );
        drop(waits(after.ask(ONE, ask(0, 4, &[0, 1])).unwrap()));
        assert_eq!(cards(&known(after.ask(ONE, ask(1, 8, &[0, 1])).unwrap())), ["0.4", "1.8"]);
    }

    #[test]
    fn a_new_generation_ends_the_waits_of_the_old() {
        let mut meetings = Meetings::default();
        let outcome = waits(meetings.ask(ONE, ask(0, 1, &[0, 1])).unwrap());
        drop(waits(meetings.ask(Generation(2), ask(1, 1, &[0, 1])).unwrap()));
        assert!(outcome.has_changed().is_err(), "its sender lives");
        assert!(matches!(meetings.ask(ONE, ask(0, 1, &[0, 1])), Err(Full::Over)));
    }
}
