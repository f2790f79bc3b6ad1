// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Keys and values of the current generation. Values are opaque bytes.

use std::collections::HashMap;

use bytes::Bytes;
use farandole_world::Generation;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

/// Longest key.
pub(crate) const MAX_KEY_BYTES: usize = 1 << 10;
/// Longest value.
pub(crate) const MAX_VALUE_BYTES: usize = 1 << 20;
/// Largest total size of keys and values.
// Tasks that publish without an end must not take the driver's memory.
const MAX_TOTAL_BYTES: usize = 256 << 20;

/// The reason why a value was refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum KeyValueRefusal {
    #[error("a key has at most {MAX_KEY_BYTES} bytes, this one has {length}")]
    Key { length: usize },
    #[error("a value has at most {MAX_VALUE_BYTES} bytes, this one has {length}")]
    Value { length: usize },
    #[error("the generation is over")]
    GenerationOver,
    #[error("all keys and values together have at most {MAX_TOTAL_BYTES} bytes")]
    Total,
}

/// A key and its value, as the journal records them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct KeyValuePair {
    pub(crate) generation: Generation,
    pub(crate) key: String,
    #[serde(with = "base64_text")]
    pub(crate) value: Bytes,
}

/// A value, or a receiver of the value.
pub(crate) enum ValueLookup {
    Found(Bytes),
    Wait(oneshot::Receiver<Bytes>),
}

#[derive(Default)]
struct ValueSlot {
    value: Option<Bytes>,
    waiters: Vec<oneshot::Sender<Bytes>>,
}

/// The keys and values of one generation, and the waiters for values.
#[derive(Default)]
pub(crate) struct KeyValueStore {
    generation: Generation,
    slots: HashMap<String, ValueSlot>,
    bytes: usize,
}

impl KeyValueStore {
    /// Clears the store if `generation` is newer, which closes the channels of older waiters.
    /// Returns false, and changes nothing, if `generation` is older.
    fn clear_for_newer_generation(&mut self, generation: Generation) -> bool {
        if self.generation < generation {
            *self = Self { generation, ..Self::default() };
        }
        self.generation == generation
    }

    /// Sets `key`; the last value wins. Wakes all waiters of the key.
    pub(crate) fn put_value(
        &mut self,
        generation: Generation,
        key: String,
        value: Bytes,
    ) -> Result<(), KeyValueRefusal> {
        if !self.clear_for_newer_generation(generation) {
            return Err(KeyValueRefusal::GenerationOver);
        }
        if key.len() > MAX_KEY_BYTES {
            return Err(KeyValueRefusal::Key { length: key.len() });
        }
        if value.len() > MAX_VALUE_BYTES {
            return Err(KeyValueRefusal::Value { length: value.len() });
        }
        let old = self
            .slots
            .get(&key)
            .and_then(|slot| slot.value.as_ref())
            .map_or(0, |old| old.len() + key.len());
        let total = self.bytes - old + key.len() + value.len();
        if total > MAX_TOTAL_BYTES {
            return Err(KeyValueRefusal::Total);
        }
        self.bytes = total;
        let slot = self.slots.entry(key).or_default();
        for waiter in slot.waiters.drain(..) {
            // Sending fails only for a waiter that gave up.
            drop(waiter.send(value.clone()));
        }
        slot.value = Some(value);
        Ok(())
    }

    /// Sets `key` if it has no value, and returns the value of the key.
    pub(crate) fn put_if_absent(
        &mut self,
        generation: Generation,
        key: String,
        value: Bytes,
    ) -> Result<Bytes, KeyValueRefusal> {
        if !self.clear_for_newer_generation(generation) {
            return Err(KeyValueRefusal::GenerationOver);
        }
        if let Some(held) = self.current_value(generation, &key) {
            return Ok(held);
        }
        self.put_value(generation, key, value.clone())?;
        Ok(value)
    }

    /// Returns the value of `key`, if it has one.
    pub(crate) fn current_value(&self, generation: Generation, key: &str) -> Option<Bytes> {
        self.slots.get(key).filter(|_| generation == self.generation)?.value.clone()
    }

    /// Returns all keys that have values.
    pub(crate) fn key_value_pairs(&self) -> impl Iterator<Item = KeyValuePair> {
        self.slots.iter().filter_map(|(key, slot)| {
            Some(KeyValuePair {
                generation: self.generation,
                key: key.clone(),
                value: slot.value.clone()?,
            })
        })
    }

    /// Returns the value of `key`, or a receiver of its later value.
    pub(crate) fn value_or_receiver(&mut self, generation: Generation, key: String) -> ValueLookup {
        if !self.clear_for_newer_generation(generation) {
            // A closed channel reports that the generation is over.
            return ValueLookup::Wait(oneshot::channel().1);
        }
        let slot = self.slots.entry(key).or_default();
        if let Some(value) = &slot.value {
            return ValueLookup::Found(value.clone());
        }
        // A caller asks again each half minute, so closed waiters would collect.
        slot.waiters.retain(|waiter| !waiter.is_closed());
        let (sender, receiver) = oneshot::channel();
        slot.waiters.push(sender);
        ValueLookup::Wait(receiver)
    }
}

/// Serialization of bytes as base64 text.
pub(crate) mod base64_text {
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
        let mut kv = KeyValueStore::default();
        let ValueLookup::Wait(mut waiter) = kv.value_or_receiver(ONE, "a".into()) else {
            panic!("found")
        };
        kv.put_value(ONE, "a".into(), Bytes::from_static(b"1")).unwrap();
        assert_eq!(waiter.try_recv().unwrap(), "1");
        kv.put_value(ONE, "a".into(), Bytes::from_static(b"22")).unwrap();
        assert!(
            matches!(kv.value_or_receiver(ONE, "a".into()), ValueLookup::Found(value) if value == "22")
        );
        assert_eq!(kv.bytes, 3);
    }

    #[test]
    fn the_first_claim_of_a_key_holds() {
        let mut kv = KeyValueStore::default();
        let ValueLookup::Wait(mut waiter) = kv.value_or_receiver(ONE, "a".into()) else {
            panic!("found")
        };
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
        let mut kv = KeyValueStore::default();
        kv.put_value(ONE, "a".into(), Bytes::from_static(b"1")).unwrap();
        let ValueLookup::Wait(mut waiter) = kv.value_or_receiver(ONE, "b".into()) else {
            panic!("found")
        };
        assert!(matches!(kv.value_or_receiver(Generation(2), "a".into()), ValueLookup::Wait(_)));
        assert_eq!(waiter.try_recv(), Err(oneshot::error::TryRecvError::Closed));
    }

    #[test]
    fn oversized_keys_and_values_are_refused() {
        let mut kv = KeyValueStore::default();
        let long = "k".repeat(MAX_KEY_BYTES + 1);
        assert_eq!(
            kv.put_value(ONE, long, Bytes::new()),
            Err(KeyValueRefusal::Key { length: MAX_KEY_BYTES + 1 })
        );
        let big = Bytes::from(vec![0; MAX_VALUE_BYTES + 1]);
        assert_eq!(
            kv.put_value(ONE, "k".into(), big),
            Err(KeyValueRefusal::Value { length: MAX_VALUE_BYTES + 1 })
        );
    }
}
