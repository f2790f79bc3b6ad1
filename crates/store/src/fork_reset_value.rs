// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Values of a process that a forked child does not inherit. Another thread of its parent may hold
//! a lock at the fork, which is never released in the child.

use std::mem;
use std::process;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwapOption;

/// A value behind a lock. A forked child begins with a default value.
pub(crate) struct ForkResetValue<T>(ArcSwapOption<PidTaggedValue<T>>);

struct PidTaggedValue<T> {
    process_id: u32,
    value: Mutex<T>,
}

impl<T: Default> ForkResetValue<T> {
    pub(crate) const fn new() -> Self {
        Self(ArcSwapOption::const_empty())
    }

    /// Calls `work` with the value of this process.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        let owned = self.value_of_this_process();
        let mut value = owned.value.lock().unwrap_or_else(PoisonError::into_inner);
        work(&mut value)
    }

    fn value_of_this_process(&self) -> Arc<PidTaggedValue<T>> {
        let process_id = process::id();
        loop {
            let current = self.0.load_full();
            if let Some(owned) = current.as_ref().filter(|owned| owned.process_id == process_id) {
                return Arc::clone(owned);
            }
            let value = Mutex::default();
            // Of several threads, one stores its value, and all find it in the next round.
            self.0.compare_and_swap(&current, Some(Arc::new(PidTaggedValue { process_id, value })));
            // The parent's value is never dropped here: a runtime would wait for its threads.
            mem::forget(current);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_share_one_value() {
        static COUNT: ForkResetValue<u32> = ForkResetValue::new();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..1000).for_each(|_| COUNT.with(|count| *count += 1)));
            }
        });
        assert_eq!(COUNT.with(|count| *count), 8000);
    }

    #[test]
    fn the_value_of_another_process_is_neither_used_nor_dropped() {
        static HELD: ForkResetValue<Arc<()>> = ForkResetValue::new();
        let parents = HELD.with(|held| Arc::clone(held));
        let owned = HELD.value_of_this_process();
        let copy = PidTaggedValue { process_id: owned.process_id + 1, value: Mutex::new(parents) };
        let copy = Arc::new(copy);
        HELD.0.store(Some(Arc::clone(&copy)));
        let locked = copy.value.lock().unwrap();
        assert!(!HELD.with(|held| Arc::ptr_eq(held, &locked)), "nor waited for");
        assert_eq!(Arc::strong_count(&copy), 2, "the copy here and the forgotten one");
    }
}
