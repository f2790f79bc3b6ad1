// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Keys and values of the current generation. Values are opaque bytes.

use std::collections::HashMap;

use bytes::Bytes;
use farandole_world::Generation;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

/// Longest key.
pub(crate) const MAX_KEY: usize = 1 << 10;
/// Longest value.
pub(crate) const MAX_VALUE: usize = 1 << 20;
/// Most bytes of keys and values together.
const MAX_TOTAL: usize = 256 << 20;

/// The reason why a value was not taken.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Full {
    #[error("a key has at most {MAX_KEY} bytes, this one has {length}")]
    Key { length: usize },
    #[error("a value has at most {MAX_VALUE} bytes, this one has {length}")]
    Value { length: usize },
    #[error("the generation is over")]
    Over,
    #[error("all keys and values together have at most {MAX_TOTAL} bytes")]
    Total,
}

/// A key and its value, as a journal has them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Pair {
    pub(crate) generation: Generation,
    pub(crate) key: String,
    #[serde(with = "text")]
    pub(crate) value: Bytes,
}

/// A value, or a place in the queue for it.
pub(crate) enum Lookup {
    Found(Bytes),
    Wait(oneshot::Receiver<Bytes>),
}

#[derive(Default)]
struct Slot {
    value: Option<Bytes>,
    waiters: Vec<oneshot::Sender<Bytes>>,
}

/// The store.
#[derive(Default)]
pub(crate) struct KeyValues {
    generation: Generation,
    slots: HashMap<String, Slot>,
    bytes: usize,
}

impl KeyValues {
    /// Forgets everything when `generation` is a new one. Waiters of an older one learn by their
    /// channel's end. False for an older one, which changes nothing.
    fn enter(&mut self, generation: Generation) -> bool {
        if self.generation < generation {
            *self = Self { generation, ..Self::default() };
        }
        self.generation == generation
    }

    /// Sets `key`; the last value wins. Wakes all that wait for it.
    pub(crate) fn put(
        &mut self,
        generation: Generation,
        key: String,
        value: Bytes,
    ) -> Result<(), Full> {
        if !self.enter(generation) {
            return Err(Full::Over);
        }
        if key.len() > MAX_KEY {
            return Err(Full::Key { length: key.len() });
        }
        if value.len() > MAX_VALUE {
            return Err(Full::Value { length: value.len() });
        }
        let old = self
            .slots
            .get(&key)
            .and_then(|slot| slot.value.as_ref())
            .map_or(0, |old| old.len() + key.len());
        let total = self.bytes - old + key.len() + value.len();
        if total > MAX_TOTAL {
            return Err(Full::Total);
        }
        self.bytes = total;
        let slot = self.slots.entry(key).or_default();
        for waiter in slot.waiters.drain(..) {
            // A waiter that gave up is gone already.
            drop(waiter.send(value.clone()));
        }
        slot.value = Some(value);
        Ok(())
    }

    /// Sets `key` unless it has a value, and returns what it holds then.
    pub(crate) fn put_if_absent(
        &mut self,
        generation: Generation,
        key: String,
        value: Bytes,
    ) -> Result<Bytes, Full> {
        if !self.enter(generation) {
            return Err(Full::Over);
        }
        if let Some(held) = self.held(generation, &key) {
            return Ok(held);
        }
        self.put(generation, key, value.clone())?;
        Ok(value)
    }

    /// Returns the value of `key`, if it has one.
    pub(crate) fn held(&self, generation: Generation, key: &str) -> Option<Bytes> {
        self.slots.get(key).filter(|_| generation == self.generation)?.value.clone()
    }

    /// Returns all keys that have values.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = Pair> {
        self.slots.iter().filter_map(|(key, slot)| {
            Some(Pair { generation: self.generation, key: key.clone(), value: slot.value.clone()? })
        })
    }

    /// Looks `key` up, or queues for it.
    pub(crate) fn get(&mut self, generation: Generation, key: String) -> Lookup {
        if !self.enter(generation) {
            // The channel's end says that its generation is over.
            return Lookup::Wait(oneshot::channel().1);
        }
        let slot = self.slots.entry(key).or_default();
        if let Some(value) = &slot.value {
            return Lookup::Found(value.clone());
        }
        slot.waiters.retain(|waiter| !waiter.is_closed());
        let (sender, receiver) = oneshot::channel();
        slot.waiters.push(sender);
        Lookup::Wait(receiver)
    }
}

/// Bytes as text, in base64.
pub(crate) mod text {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use bytes::Bytes;
    use serde::{Deserialize as _, Deserializer, Serializer, de};

    pub(crate) fn serialize<S: Serializer>(bytes: &Bytes, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&STANDARD.encode(bytes))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Bytes, D::Error> {
        let text = String::deserialize(from)?;
        STANDARD.decode(text).map(Bytes::from).map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Generation = Generation(1);

    #[test]
    fn a_waiter_gets_the_value_that_comes_later() {
        let mut kv = KeyValues::default();
        let Lookup::Wait(mut waiter) = kv.get(ONE, "a".into()) else { panic!("found") };
        kv.put(ONE, "a".into(), Bytes::from_static(b"1")).unwrap();
        assert_eq!(waiter.try_recv().unwrap(), "1");
        kv.put(ONE, "a".into(), Bytes::from_static(b"22")).unwrap();
        assert!(matches!(kv.get(ONE, "a".into()), Lookup::Found(value) if value == "22"));
        assert_eq!(kv.bytes, 3);
    }

    #[test]
    fn the_first_claim_of_a_key_holds() {
        let mut kv = KeyValues::default();
        let Lookup::Wait(mut waiter) = kv.get(ONE, "a".into()) else { panic!("found") };
        assert_eq!(
            kv.put_if_absent(ONE, "a".into(), Bytes::from_static(b"1")),
            Ok(Bytes::from_static(b"1"))
        );
        assert_eq!(waiter.try_recv().unwrap(), "1");
        assert_eq!(
            kv.put_if_absent(ONE, "a".into(), Bytes::from_static(b"2")),
            Ok(Bytes::from_static(b"1"))
        );
        assert_eq!(kv.put_if_absent(Generation(2), "a".into(), Bytes::new()), Ok(Bytes::new()));
    }

    #[test]
    fn a_new_generation_starts_empty_and_ends_the_waits_of_the_old() {
        let mut kv = KeyValues::default();
        kv.put(ONE, "a".into(), Bytes::from_static(b"1")).unwrap();
        let Lookup::Wait(mut waiter) = kv.get(ONE, "b".into()) else { panic!("found") };
        assert!(matches!(kv.get(Generation(2), "a".into()), Lookup::Wait(_)));
        assert_eq!(waiter.try_recv(), Err(oneshot::error::TryRecvError::Closed));
    }

    #[test]
    fn oversized_keys_and_values_are_refused() {
        let mut kv = KeyValues::default();
        let long = "k".repeat(MAX_KEY + 1);
        assert_eq!(kv.put(ONE, long, Bytes::new()), Err(Full::Key { length: MAX_KEY + 1 }));
        let big = Bytes::from(vec![0; MAX_VALUE + 1]);
        assert_eq!(kv.put(ONE, "k".into(), big), Err(Full::Value { length: MAX_VALUE + 1 }));
    }
}
