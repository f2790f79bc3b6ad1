// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Garbage for everything that reads bytes of others: a few seconds in tests, longer by `make
//! fuzz`.
//!
//! Each target is a test that runs cases until its budget is spent. `FARANDOLE_FUZZ_SECONDS` is the
//! budget, `FARANDOLE_FUZZ_SEED` the first case; a failing case names its seed, which repeats it. A
//! case is a pure function of its seed, so there is no corpus: seeds that found something are kept
//! as tests of their own.

#![forbid(unsafe_code)]

use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use farandole_config::environment_variable;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

/// Seconds of a target without a budget.
const QUICK: u64 = 1;

/// Numbers that depend on the seed alone.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`; 0 for no such number.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.word() % (end.max(1) as u64)).unwrap_or(0)
    }

    /// A byte.
    pub fn byte(&mut self) -> u8 {
        self.word().to_le_bytes()[7]
    }

    /// Up to `most` bytes.
    pub fn bytes(&mut self, most: usize) -> Vec<u8> {
        (0..self.below(most + 1)).map(|_| self.byte()).collect()
    }

    /// A number to put in the place of another: near it, a multiple of it, or one that breaks sums
    /// and sizes.
    pub fn number(&mut self, was: i64) -> i64 {
        let some =
            [0, 1, -1, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 33, 1 << 40, i64::MAX, i64::MIN];
        match self.below(4) {
            0 => was.saturating_add(i64::from(self.byte()) - 128),
            1 => was.saturating_mul(1 << self.below(40)),
            _ => some.get(self.below(some.len())).copied().unwrap_or(0),
        }
    }

    /// Something like `seed`: bits flipped, bytes replaced, cut short, prolonged, or repeated.
    pub fn mutated(&mut self, seed: &[u8]) -> Vec<u8> {
        let mut bytes = seed.to_vec();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            match self.below(6) {
                0 => bytes.truncate(at),
                1 => bytes.extend(self.bytes(40)),
                2 => bytes.extend_from_within(..at),
                3 => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << (at % 8)),
                4 => bytes.iter_mut().skip(at).take(8).for_each(|byte| *byte = 0xff),
                _ => {
                    let new = self.byte();
                    bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte = new);
                }
            }
        }
        bytes
    }
}

/// Runs `case` with fresh numbers until the budget is spent; prints the seed of a case that panics.
pub fn cases(mut case: impl FnMut(&mut Random)) {
    let number =
        |name: &str| environment_variable(name).and_then(|text| text.trim().parse::<u64>().ok());
    let asked = number("FARANDOLE_FUZZ_SECONDS");
    let budget = Duration::from_secs(asked.unwrap_or(QUICK));
    // Without a budget, the same few cases run every time.
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let first = number("FARANDOLE_FUZZ_SEED").unwrap_or_else(|| asked.map_or(0, |_| clock()));
    let end = Instant::now() + budget;
    for seed in (0..u64::MAX).map(|count| first.wrapping_add(count)) {
        let told = Told(seed);
        case(&mut Random::new(seed));
        drop(told);
        if Instant::now() >= end {
            return;
        }
    }
}

/// Factor by which a case may exceed its limit on a busy machine.
const BUSY: u32 = 12;

/// Asserts at its end that a case took no longer than a limit.
///
/// The processor time of the process counts, because a busy machine may give it little in a long
/// time; the time on the wall counts where it is less, because other tests of the process take
/// processor time, too. A case that waits takes no processor time, so the time on the wall has a
/// limit as well, which is twelve times as long.
#[derive(Debug)]
pub struct Limit {
    most: Duration,
    start: Instant,
    spent: Duration,
}

impl Limit {
    /// From now on.
    pub fn of(most: Duration) -> Self {
        Self { most, start: Instant::now(), spent: spent() }
    }

    /// The end of what is limited.
    ///
    /// # Panics
    /// It took longer.
    pub fn check(self) {
        let (wall, processor) = (self.start.elapsed(), spent().saturating_sub(self.spent));
        let is_within = wall.min(processor) < self.most && wall < self.most * BUSY;
        assert!(is_within, "took {wall:?}, and {processor:?} of processor time");
    }
}

/// The processor time of this process so far.
fn spent() -> Duration {
    clock_gettime(ClockId::ProcessCPUTime).try_into().unwrap_or_default()
}

/// Runs the ignored test `name` of this program in a process of its own, whose memory may be
/// limited and which may be aborted; returns how many cases it says it has begun by lines of `case
/// ...`.
///
/// # Errors
/// It did not end well: the last case, and its last words.
pub fn apart(name: &str) -> Result<usize, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let child = Command::new(program).args(["--ignored", "--exact", name, "--nocapture"]).output();
    let child = child.map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&child.stdout);
    let mut begun = said.lines().filter(|line| line.starts_with("case "));
    if child.status.success() {
        return Ok(begun.count());
    }
    let words = String::from_utf8_lossy(&child.stderr);
    let tail: Vec<&str> = words.lines().rev().take(20).collect();
    Err(format!("{} after {}: {tail:#?}", child.status, begun.next_back().unwrap_or("no case")))
}

/// From now on this process gets no more than `room` bytes of addresses beyond what it has.
///
/// # Errors
/// What the system says.
pub fn confine(room: u64) -> std::io::Result<()> {
    let told = std::fs::read_to_string("/proc/self/statm")?;
    let pages = told.split(' ').next().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    let has = pages * rustix::param::page_size() as u64;
    setrlimit(Resource::As, Rlimit { current: Some(has + room), ..getrlimit(Resource::As) })?;
    Ok(())
}

/// Names the case while a panic passes by.
struct Told(u64);

impl Drop for Told {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("this was case FARANDOLE_FUZZ_SEED={}", self.0);
        }
    }
}
