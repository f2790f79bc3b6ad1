// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Messages between members: each has a slot in shared memory that only it writes.
#![expect(unsafe_code, reason = "looks at shared memory through atomics")]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use farandole_shm::Region;

use crate::Offer;

/// Progress of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Phase {
    /// It was not seen yet.
    Absent = 0,
    /// It has a window, which is offered.
    Offered = 1,
    /// It has opened the memory of all members.
    Opened = 2,
    /// It cannot take part. It says so for good.
    Refused = 3,
    /// It was here and is no more.
    Ended = 4,
}

/// The conclusion from the phases of all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Somebody is missing.
    Open,
    /// All windows are there.
    AllOffered,
    /// All are open: operations may begin.
    Formed,
    /// This member cannot take part, so no member does.
    Refused(usize),
    /// This member has ended, so nothing comes any more.
    Ended(usize),
}

/// Returns the outcome, which is the same for all members that find one: a refusal is never taken
/// back, and a member that has opened everything refuses nothing.
pub(crate) fn outcome(phases: &[Phase]) -> Outcome {
    let first = |wanted: Phase| phases.iter().position(|phase| *phase == wanted);
    if let Some(member) = first(Phase::Refused) {
        return Outcome::Refused(member);
    }
    if let Some(member) = first(Phase::Ended) {
        return Outcome::Ended(member);
    }
    if first(Phase::Absent).is_some() {
        return Outcome::Open;
    }
    if first(Phase::Offered).is_some() { Outcome::AllOffered } else { Outcome::Formed }
}

const REASON: usize = 24;

#[repr(C, align(64))]
struct Slot {
    phase: AtomicU32,
    /// 1: it has closed what it had opened.
    closed: AtomicU32,
    /// Pieces that are in its window, of all that ever were.
    filled: AtomicU64,
    /// Pieces that it has read from all members' windows.
    taken: AtomicU64,
    offer: [AtomicU64; 8],
    /// The reason for the refusal.
    reason: [AtomicU64; REASON],
}

/// The slots of all members.
pub(crate) struct Mailbox {
    region: Region,
    member: usize,
    size: usize,
}

impl Mailbox {
    /// Returns the bytes for so many members.
    pub(crate) fn bytes(size: usize) -> usize {
        size * size_of::<Slot>()
    }

    /// Returns the mailbox of so many members in this region, if it is large enough.
    pub(crate) fn over(region: Region, (member, size): (usize, usize)) -> Option<Self> {
        let room = usize::try_from(region.card().bytes).unwrap_or_default();
        (member < size && room >= Self::bytes(size)).then_some(Self { region, member, size })
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn member(&self) -> usize {
        self.member
    }

    fn slot(&self, member: usize) -> &Slot {
        let member = member.min(self.size - 1);
        // SAFETY: the region begins on a page and has so many slots, which `over` has checked; they
        // are made of atomics, for which every bit pattern is valid, and the reference lives no
        // longer than the mapping.
        unsafe { &*self.region.address().cast::<Slot>().add(member) }
    }

    fn own(&self) -> &Slot {
        self.slot(self.member)
    }

    fn enter(&self, phase: Phase) {
        self.own().phase.store(phase as u32, Ordering::Release);
    }

    pub(crate) fn phase(&self, member: usize) -> Phase {
        match self.slot(member).phase.load(Ordering::Acquire) {
            0 => Phase::Absent,
            1 => Phase::Offered,
            2 => Phase::Opened,
            3 => Phase::Refused,
            _ => Phase::Ended,
        }
    }

    pub(crate) fn outcome(&self) -> Outcome {
        let phases: Vec<Phase> = (0..self.size).map(|member| self.phase(member)).collect();
        outcome(&phases)
    }

    /// Shows this member's window to the others.
    pub(crate) fn offer(&self, offer: &Offer) {
        for (word, bytes) in self.own().offer.iter().zip(offer.0.as_chunks::<8>().0) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        self.enter(Phase::Offered);
    }

    /// Returns a member's window, once it has offered it.
    pub(crate) fn offered(&self, member: usize) -> Offer {
        let mut offer = Offer([0; 64]);
        for (word, bytes) in self.slot(member).offer.iter().zip(offer.0.as_chunks_mut::<8>().0) {
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        offer
    }

    /// This member has opened all windows.
    pub(crate) fn opened(&self) {
        self.enter(Phase::Opened);
    }

    /// This member cannot take part.
    pub(crate) fn refuse(&self, reason: &str) {
        let end = reason.floor_char_boundary(REASON * 8);
        let mut text = reason.as_bytes()[..end].to_vec();
        text.resize(REASON * 8, 0);
        for (word, bytes) in self.own().reason.iter().zip(text.as_chunks::<8>().0) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        self.enter(Phase::Refused);
    }

    /// Returns the reason why a member refused.
    pub(crate) fn reason(&self, member: usize) -> String {
        let words = self.slot(member).reason.iter();
        let bytes: Vec<u8> =
            words.flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
        String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned()
    }

    /// This member does nothing any more. A refusal stays visible, because others may not have seen
    /// it.
    pub(crate) fn end(&self) {
        if self.phase(self.member) != Phase::Refused {
            self.enter(Phase::Ended);
        }
    }

    /// This member reads no other's window any more.
    pub(crate) fn close(&self) {
        self.own().closed.store(1, Ordering::Release);
    }

    /// Returns whether only this member can read its window.
    pub(crate) fn is_alone(&self) -> bool {
        let mut others = (0..self.size).filter(|member| *member != self.member);
        others.all(|member| self.slot(member).closed.load(Ordering::Acquire) != 0)
    }

    /// So many pieces are, or were, in this member's window.
    pub(crate) fn fill(&self, pieces: u64) {
        self.own().filled.store(pieces, Ordering::Release);
    }

    pub(crate) fn filled(&self, member: usize) -> u64 {
        self.slot(member).filled.load(Ordering::Acquire)
    }

    /// This member has read so many pieces from all windows.
    pub(crate) fn take(&self, pieces: u64) {
        self.own().taken.store(pieces, Ordering::Release);
    }

    pub(crate) fn taken(&self, member: usize) -> u64 {
        self.slot(member).taken.load(Ordering::Acquire)
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        // The others continue with it: what its owner said last stays. What fails leaves them
        // without, as a dead owner does.
        let _ = self.region.detach();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_begin_when_all_have_opened_everything() {
        use Phase::{Absent, Offered, Opened};
        assert_eq!(outcome(&[Absent, Offered]), Outcome::Open);
        assert_eq!(outcome(&[Opened, Absent]), Outcome::Open);
        assert_eq!(outcome(&[Offered, Opened]), Outcome::AllOffered);
        assert_eq!(outcome(&[Opened, Opened]), Outcome::Formed);
    }

    #[test]
    fn a_refusal_is_reported_before_ended_and_missing_members() {
        use Phase::{Absent, Ended, Opened, Refused};
        assert_eq!(outcome(&[Ended, Absent, Refused]), Outcome::Refused(2));
        assert_eq!(outcome(&[Opened, Ended, Absent]), Outcome::Ended(1));
    }

    fn pair() -> (Mailbox, Mailbox) {
        let region = Region::create(Mailbox::bytes(2)).unwrap();
        let other = Region::open(region.card()).unwrap();
        (Mailbox::over(region, (0, 2)).unwrap(), Mailbox::over(other, (1, 2)).unwrap())
    }

    #[test]
    fn one_member_reads_what_the_other_writes() {
        let (first, second) = pair();
        let mut offer = Offer([7; 64]);
        offer.0[63] = 9;
        first.offer(&offer);
        assert_eq!((second.phase(0), second.offered(0)), (Phase::Offered, offer));
        second.fill(3);
        second.take(2);
        assert_eq!((first.filled(1), first.taken(1), first.filled(0)), (3, 2, 0));
        assert!(!first.is_alone());
        second.close();
        assert!(first.is_alone() && !second.is_alone());
    }

    #[test]
    fn a_refusal_stays_and_says_why() {
        let (first, second) = pair();
        let long = "ä".repeat(1000);
        first.refuse(&long);
        first.end();
        assert_eq!(second.outcome(), Outcome::Refused(0));
        assert!(long.starts_with(&second.reason(0)) && second.reason(0).len() > 100);
        second.end();
        assert_eq!(first.phase(1), Phase::Ended);
        first.close();
        drop(first);
        assert!(
            second.is_alone() && second.outcome() == Outcome::Refused(0),
            "it outlives its owner"
        );
    }

    #[test]
    fn a_region_that_is_too_small_is_no_mailbox() {
        let small = || Region::create(Mailbox::bytes(1)).unwrap();
        assert!(Mailbox::over(small(), (1, 2)).is_none());
        assert!(Mailbox::over(small(), (1, 1)).is_none());
    }
}
