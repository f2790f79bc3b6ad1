// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Messages between members: each has a slot in shared memory that only it writes.
#![expect(unsafe_code, reason = "looks at shared memory through atomics")]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use farandole_shm::SharedRegion;

use crate::IpcMemoryHandle;

/// Progress of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum MemberPhase {
    /// It was not seen yet.
    Absent = 0,
    /// It has a window, which is offered.
    Offered = 1,
    /// It has opened the memory of all members.
    Opened = 2,
    /// It cannot take part. This phase is final.
    Refused = 3,
    /// It was here and is no more.
    Ended = 4,
}

/// The conclusion from the phases of all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IpcFormationOutcome {
    /// At least one member is absent.
    Incomplete,
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
pub(crate) fn formation_outcome(phases: &[MemberPhase]) -> IpcFormationOutcome {
    let first = |wanted: MemberPhase| phases.iter().position(|phase| *phase == wanted);
    if let Some(member) = first(MemberPhase::Refused) {
        return IpcFormationOutcome::Refused(member);
    }
    if let Some(member) = first(MemberPhase::Ended) {
        return IpcFormationOutcome::Ended(member);
    }
    if first(MemberPhase::Absent).is_some() {
        return IpcFormationOutcome::Incomplete;
    }
    if first(MemberPhase::Offered).is_some() {
        IpcFormationOutcome::AllOffered
    } else {
        IpcFormationOutcome::Formed
    }
}

const REASON_WORDS: usize = 24;

// Aligned to cache lines, because each member polls the slots of others and writes only its own.
#[repr(C, align(64))]
struct IpcMailboxSlot {
    phase: AtomicU32,
    /// 1: the member has closed the windows that it had opened.
    closed: AtomicU32,
    /// Pieces that are in its window, of all that ever were.
    pieces_filled: AtomicU64,
    /// Pieces that it has read from all members' windows.
    pieces_read: AtomicU64,
    handle: [AtomicU64; 8],
    /// The reason for the refusal.
    reason: [AtomicU64; REASON_WORDS],
}

/// The slots of all members.
pub(crate) struct IpcMailbox {
    region: SharedRegion,
    member: usize,
    size: usize,
}

impl IpcMailbox {
    /// Returns the bytes for so many members.
    pub(crate) fn bytes_for_members(size: usize) -> usize {
        size * size_of::<IpcMailboxSlot>()
    }

    /// Returns the mailbox of so many members in this region, if it is large enough.
    pub(crate) fn from_region(
        region: SharedRegion,
        (member, size): (usize, usize),
    ) -> Option<Self> {
        let room = usize::try_from(region.region_handle().bytes).unwrap_or_default();
        (member < size && room >= Self::bytes_for_members(size)).then_some(Self {
            region,
            member,
            size,
        })
    }

    pub(crate) fn member_count(&self) -> usize {
        self.size
    }

    pub(crate) fn own_member(&self) -> usize {
        self.member
    }

    fn member_slot(&self, member: usize) -> &IpcMailboxSlot {
        // An index beyond the end must not lead out of the region.
        let member = member.min(self.size - 1);
        // SAFETY: the region begins on a page and has so many slots, which `from_region` has
        // checked; they are made of atomics, for which every bit pattern is valid, and the
        // reference lives no longer than the mapping.
        unsafe { &*self.region.data_address().cast::<IpcMailboxSlot>().add(member) }
    }

    fn own_slot(&self) -> &IpcMailboxSlot {
        self.member_slot(self.member)
    }

    fn set_phase(&self, phase: MemberPhase) {
        // Pairs with the load in `member_phase`: handle and reason are written before it.
        self.own_slot().phase.store(phase as u32, Ordering::Release);
    }

    pub(crate) fn member_phase(&self, member: usize) -> MemberPhase {
        match self.member_slot(member).phase.load(Ordering::Acquire) {
            0 => MemberPhase::Absent,
            1 => MemberPhase::Offered,
            2 => MemberPhase::Opened,
            3 => MemberPhase::Refused,
            _ => MemberPhase::Ended,
        }
    }

    pub(crate) fn formation_outcome(&self) -> IpcFormationOutcome {
        let phases: Vec<MemberPhase> =
            (0..self.size).map(|member| self.member_phase(member)).collect();
        formation_outcome(&phases)
    }

    /// Shows this member's window to the others.
    pub(crate) fn publish_window_handle(&self, handle: &IpcMemoryHandle) {
        for (word, bytes) in self.own_slot().handle.iter().zip(handle.0.as_chunks::<8>().0) {
            // Relaxed: the phase publishes all words together.
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        self.set_phase(MemberPhase::Offered);
    }

    /// Returns a member's window, once it has offered it.
    pub(crate) fn member_window_handle(&self, member: usize) -> IpcMemoryHandle {
        let mut handle = IpcMemoryHandle([0; 64]);
        for (word, bytes) in
            self.member_slot(member).handle.iter().zip(handle.0.as_chunks_mut::<8>().0)
        {
            // Relaxed: the caller has seen the phase, whose load orders these.
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        handle
    }

    /// This member has opened all windows.
    pub(crate) fn mark_windows_opened(&self) {
        self.set_phase(MemberPhase::Opened);
    }

    /// This member cannot take part.
    pub(crate) fn publish_refusal(&self, reason: &str) {
        let end = reason.floor_char_boundary(REASON_WORDS * 8);
        let mut text = reason.as_bytes()[..end].to_vec();
        text.resize(REASON_WORDS * 8, 0);
        for (word, bytes) in self.own_slot().reason.iter().zip(text.as_chunks::<8>().0) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        self.set_phase(MemberPhase::Refused);
    }

    /// Returns the reason why a member refused.
    pub(crate) fn refusal_reason(&self, member: usize) -> String {
        let words = self.member_slot(member).reason.iter();
        let bytes: Vec<u8> =
            words.flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
        String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned()
    }

    /// This member does nothing any more. A refusal stays visible, because others may not have seen
    /// it.
    pub(crate) fn mark_member_ended(&self) {
        if self.member_phase(self.member) != MemberPhase::Refused {
            self.set_phase(MemberPhase::Ended);
        }
    }

    /// This member reads no other's window any more.
    pub(crate) fn mark_windows_closed(&self) {
        self.own_slot().closed.store(1, Ordering::Release);
    }

    /// Returns whether only this member can read its window.
    pub(crate) fn all_peers_closed_windows(&self) -> bool {
        let mut others = (0..self.size).filter(|member| *member != self.member);
        others.all(|member| self.member_slot(member).closed.load(Ordering::Acquire) != 0)
    }

    /// Publishes the number of pieces that this member has copied into its window so far.
    pub(crate) fn publish_pieces_filled(&self, pieces: u64) {
        // Pairs with the load in `pieces_filled`. Called after the event behind the copy was found
        // complete.
        self.own_slot().pieces_filled.store(pieces, Ordering::Release);
    }

    pub(crate) fn pieces_filled(&self, member: usize) -> u64 {
        self.member_slot(member).pieces_filled.load(Ordering::Acquire)
    }

    /// This member has read so many pieces from all windows.
    pub(crate) fn publish_pieces_read(&self, pieces: u64) {
        // After this, the others may overwrite the slot.
        self.own_slot().pieces_read.store(pieces, Ordering::Release);
    }

    pub(crate) fn pieces_read(&self, member: usize) -> u64 {
        self.member_slot(member).pieces_read.load(Ordering::Acquire)
    }
}

impl Drop for IpcMailbox {
    fn drop(&mut self) {
        // The other members keep the region with the last phase of this member. If detaching fails,
        // they lose the region, as after the death of its owner.
        let _ = self.region.detach_from_peers();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_begin_when_all_have_opened_everything() {
        use MemberPhase::{Absent, Offered, Opened};
        assert_eq!(formation_outcome(&[Absent, Offered]), IpcFormationOutcome::Incomplete);
        assert_eq!(formation_outcome(&[Opened, Absent]), IpcFormationOutcome::Incomplete);
        assert_eq!(formation_outcome(&[Offered, Opened]), IpcFormationOutcome::AllOffered);
        assert_eq!(formation_outcome(&[Opened, Opened]), IpcFormationOutcome::Formed);
    }

    #[test]
    fn a_refusal_is_reported_before_ended_and_missing_members() {
        use MemberPhase::{Absent, Ended, Opened, Refused};
        assert_eq!(formation_outcome(&[Ended, Absent, Refused]), IpcFormationOutcome::Refused(2));
        assert_eq!(formation_outcome(&[Opened, Ended, Absent]), IpcFormationOutcome::Ended(1));
    }

    fn pair() -> (IpcMailbox, IpcMailbox) {
        let region = SharedRegion::create(IpcMailbox::bytes_for_members(2)).unwrap();
        let other = SharedRegion::open_peer_region(region.region_handle()).unwrap();
        (
            IpcMailbox::from_region(region, (0, 2)).unwrap(),
            IpcMailbox::from_region(other, (1, 2)).unwrap(),
        )
    }

    #[test]
    fn one_member_reads_what_the_other_writes() {
        let (first, second) = pair();
        let mut handle = IpcMemoryHandle([7; 64]);
        handle.0[63] = 9;
        first.publish_window_handle(&handle);
        assert_eq!(
            (second.member_phase(0), second.member_window_handle(0)),
            (MemberPhase::Offered, handle)
        );
        second.publish_pieces_filled(3);
        second.publish_pieces_read(2);
        assert_eq!(
            (first.pieces_filled(1), first.pieces_read(1), first.pieces_filled(0)),
            (3, 2, 0)
        );
        assert!(!first.all_peers_closed_windows());
        second.mark_windows_closed();
        assert!(first.all_peers_closed_windows() && !second.all_peers_closed_windows());
    }

    #[test]
    fn a_refusal_stays_and_says_why() {
        let (first, second) = pair();
        let long = "ä".repeat(1000);
        first.publish_refusal(&long);
        first.mark_member_ended();
        assert_eq!(second.formation_outcome(), IpcFormationOutcome::Refused(0));
        assert!(
            long.starts_with(&second.refusal_reason(0)) && second.refusal_reason(0).len() > 100
        );
        second.mark_member_ended();
        assert_eq!(first.member_phase(1), MemberPhase::Ended);
        first.mark_windows_closed();
        drop(first);
        assert!(
            second.all_peers_closed_windows()
                && second.formation_outcome() == IpcFormationOutcome::Refused(0),
            "it outlives its owner"
        );
    }

    #[test]
    fn a_region_that_is_too_small_is_no_mailbox() {
        let small = || SharedRegion::create(IpcMailbox::bytes_for_members(1)).unwrap();
        assert!(IpcMailbox::from_region(small(), (1, 2)).is_none());
        assert!(IpcMailbox::from_region(small(), (1, 1)).is_none());
    }
}
