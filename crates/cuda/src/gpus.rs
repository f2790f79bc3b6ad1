// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The GPUs that this process uses, and communicators among those of several.
//!
//! Libraries are loaded when the first tensor is on a GPU, never before: until then a process may fork.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use farandole_collectives::{CARD, Communicator, Error as CollectiveError, Fabric};
use farandole_world::Rank;
use parking_lot::Mutex;

use crate::{Driver, Error, Gpu, Kind, Nccl, NcclCommunicator, Places, Result, UniqueId};

/// The GPUs of a process.
#[derive(Default)]
pub struct Gpus {
    places: Mutex<Places>,
    driver: OnceLock<Result<Driver>>,
    nccl: OnceLock<Result<Nccl>>,
    known: Mutex<BTreeMap<u32, Arc<Gpu>>>,
}

impl Gpus {
    /// None is looked for yet.
    pub fn new(places: Places) -> Self {
        Self { places: Mutex::new(places), ..Self::default() }
    }

    /// As if there were no NCCL.
    #[must_use]
    pub fn without_nccl(self) -> Self {
        let tried = "it is not to be used".to_owned();
        let none = OnceLock::from(Err(Error::NotFound { library: Kind::Nccl.name(), tried }));
        Self { nccl: none, ..self }
    }

    /// The GPU of this number among those that the process sees. Wheels of libraries are also looked for in `packages`.
    ///
    /// # Errors
    /// `NotFound`, `Symbols`, `Driver`: also when there is no such GPU.
    pub fn open(&self, ordinal: u32, packages: &[PathBuf]) -> Result<Arc<Gpu>> {
        let mut known = self.known.lock();
        if let Some(gpu) = known.get(&ordinal) {
            return Ok(Arc::clone(gpu));
        }
        let mut places = self.places.lock();
        for package in packages {
            if !places.packages.contains(package) {
                places.packages.push(package.clone());
            }
        }
        let driver = self.driver.get_or_init(|| Driver::load(&places)).clone()?;
        driver.device(ordinal)?;
        let gpu = Arc::new(Gpu::new(driver, ordinal));
        Ok(Arc::clone(known.entry(ordinal).or_insert(gpu)))
    }

    fn nccl(&self) -> Result<Nccl> {
        self.nccl.get_or_init(|| Nccl::load(&self.places.lock())).clone()
    }

    fn own_card(&self, ordinal: u32) -> Result<Card> {
        let gpu = self.open(ordinal, &[])?;
        let uuid = gpu.driver().facts(ordinal)?.uuid;
        let version = self.nccl().map(|nccl| nccl.code()).unwrap_or_default();
        Ok(Card { uuid, version, rooms: gpu.driver().has_pools(ordinal) })
    }

    /// Why the members with these cards cannot have a communicator, if so.
    fn lacking(&self, cards: &[Option<Card>], members: &[Rank], place: usize) -> Option<String> {
        let rank = |member: usize| members.get(member).copied().unwrap_or_default();
        let mut seen: BTreeMap<[u8; 16], usize> = BTreeMap::new();
        for (member, card) in cards.iter().enumerate() {
            let Some(card) = card else {
                return Some(format!("rank {} has tensors on a device and no driver of CUDA", rank(member)));
            };
            if let Some(other) = seen.insert(card.uuid, member) {
                return Some(format!(
                    "ranks {} and {} use the same GPU, {}; to give each its own, call \
                     torch.cuda.set_device(farandole.torch.local_rank())",
                    rank(other),
                    rank(member),
                    spelled(&card.uuid)
                ));
            }
        }
        let versions: Vec<i32> = cards.iter().flatten().map(|card| card.version).collect();
        if let Some(member) = versions.iter().position(|version| *version == 0) {
            let own = (member == place).then(|| self.nccl().err()).flatten();
            let why = own.map(|error| format!(": {error}")).unwrap_or_default();
            return Some(format!("rank {} has no NCCL{why}", rank(member)));
        }
        let member = versions.iter().position(|version| *version != versions[0])?;
        Some(format!(
            "ranks {} and {} have different versions of NCCL: {} and {}",
            rank(0),
            rank(member),
            versions[0],
            versions[member]
        ))
    }
}

impl Fabric for Gpus {
    fn card(&self, device: u32) -> Vec<u8> {
        self.own_card(device).map(|card| card.write()).unwrap_or_default()
    }

    fn obstacle(&self, cards: &[&[u8]], members: &[Rank], place: usize) -> Option<String> {
        let cards: Vec<Option<Card>> = cards.iter().map(|card| Card::read(card)).collect();
        self.lacking(&cards, members, place).map(|reason| detour(&reason))
    }

    fn name(&self, cards: &[&[u8]]) -> Result<Vec<u8>, String> {
        let rooms = cards.iter().all(|card| Card::read(card).is_some_and(|card| card.rooms));
        let id = self.nccl().and_then(|nccl| nccl.unique_id());
        id.map(|id| [&[u8::from(rooms)], &id.0[..]].concat()).map_err(|error| detour(&error.to_string()))
    }

    fn form(
        &self,
        device: u32,
        name: &[u8],
        place: (usize, usize),
        patience: Duration,
    ) -> Result<Box<dyn Communicator>, CollectiveError> {
        let named = name.split_first().and_then(|(rooms, rest)| Some((*rooms, rest.first_chunk::<128>()?)));
        let Some((rooms, id)) = named else {
            return Err(CollectiveError::Lost { reason: "a communicator has no name".to_owned() });
        };
        let gpu = self.open(device, &[])?;
        let (nccl, lane) = (self.nccl()?, gpu.lane()?);
        let formed = NcclCommunicator::form(nccl, lane, UniqueId(*id), place, patience)?;
        Ok(Box::new(if rooms == 1 { formed.with_rooms() } else { formed }))
    }
}

fn detour(reason: &str) -> String {
    format!("tensors on GPUs go through host memory: {reason}")
}

/// What a member brings.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Card {
    uuid: [u8; 16],
    /// Of NCCL; 0 where there is none.
    version: i32,
    /// Whether its memory is taken and given back in the order of streams.
    rooms: bool,
}

/// A mark of there being a card, the GPU, the version and whether it has rooms.
const WRITTEN: usize = 1 + 16 + 4 + 1;
/// Whether all have rooms, and NCCL's name.
const NAME: usize = 1 + size_of::<UniqueId>();
const _: () = assert!(WRITTEN <= CARD && NAME < CARD, "a card has room for it");

impl Card {
    fn write(&self) -> Vec<u8> {
        [&[1][..], &self.uuid, &self.version.to_le_bytes(), &[u8::from(self.rooms)]].concat()
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (mark, rest) = bytes.split_first()?;
        let (uuid, rest) = rest.split_first_chunk::<16>()?;
        let (version, rest) = rest.split_first_chunk::<4>()?;
        let rooms = *rest.first()? == 1;
        let card = Self { uuid: *uuid, version: i32::from_le_bytes(*version), rooms };
        (*mark == 1).then_some(card)
    }
}

/// As `nvidia-smi` writes it.
fn spelled(uuid: &[u8; 16]) -> String {
    let digits: Vec<String> = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |from: usize, to: usize| digits[from..to].concat();
    format!("GPU-{}-{}-{}-{}-{}", part(0, 4), part(4, 6), part(6, 8), part(8, 10), part(10, 16))
}

#[cfg(test)]
mod tests {
    use farandole_collectives::Operation;

    use super::*;
    use crate::device::tests::driver;
    use crate::nccl::fake::{calls, fake, nccl};

    fn gpus(library: Result<Nccl>) -> Gpus {
        let gpus = Gpus::default();
        assert!(gpus.driver.set(Ok(driver())).is_ok() && gpus.nccl.set(library).is_ok());
        gpus
    }

    fn formed(gpus: &Gpus, cards: &[Vec<u8>], place: usize) -> Result<usize, String> {
        let cards: Vec<&[u8]> = cards.iter().map(Vec::as_slice).collect();
        match gpus.obstacle(&cards, &[Rank(4), Rank(7)], place) {
            Some(reason) => Err(reason),
            None => {
                let name = gpus.name(&cards)?;
                let mut formed = gpus.form(1, &name, (place, 2), Duration::from_secs(20)).unwrap();
                while !formed.progress(&mut Vec::new()).unwrap() {}
                Ok(formed.size())
            }
        }
    }

    #[test]
    fn members_with_a_gpu_each_form_one_under_the_name_that_one_gives() {
        let gpus = gpus(nccl());
        let cards = [gpus.card(0), gpus.card(1)];
        assert_eq!(calls(), Vec::<String>::new(), "nobody has a name before all cards are there");
        assert_eq!(formed(&gpus, &cards, 1), Ok(2));
        assert_eq!(calls(), ["name", "init 1/2 id 9 blocking 1", "abort"]);
    }

    #[test]
    fn gathers_go_by_nccl_where_all_members_have_rooms_for_what_comes() {
        let gpus = gpus(nccl());
        let (roomy, small) = (gpus.card(0), Card { rooms: false, ..Card::read(&gpus.card(1)).unwrap() });
        let gathers = |other: Vec<u8>| {
            let name = gpus.name(&[&roomy, &other]).unwrap();
            let formed = gpus.form(1, &name, (1, 2), Duration::from_secs(1)).unwrap();
            formed.carries(&Operation::Allgather { segments: Vec::new(), bytes: Vec::new() })
        };
        assert!(gathers(gpus.card(1)));
        assert!(!gathers(small.write()));
    }

    #[test]
    fn members_that_share_a_gpu_are_named_and_go_through_the_host_without_a_port_of_nccl() {
        let gpus = gpus(nccl());
        let reason = formed(&gpus, &[gpus.card(1), gpus.card(1)], 0).unwrap_err();
        let same = "ranks 4 and 7 use the same GPU, GPU-01010101-0101-0101-0101-010101010101;";
        assert!(reason.contains(same) && reason.contains("set_device"), "{reason}");
        assert_eq!(calls(), Vec::<String>::new(), "a name opens a port that only its communicator closes");
    }

    #[test]
    fn who_has_no_driver_or_no_nccl_or_another_one_is_named() {
        let (gpus, missing) = (gpus(nccl()), Error::NotFound { library: "libnccl", tried: "x".to_owned() });
        let without = super::tests::gpus(Err(missing));
        let card = gpus.card(0);
        let reason = |other: Vec<u8>| formed(&gpus, &[card.clone(), other], 0).unwrap_err();
        assert!(reason(vec![0; CARD]).ends_with("rank 7 has tensors on a device and no driver of CUDA"));
        assert!(reason(without.card(1)).ends_with("rank 7 has no NCCL"));
        let own = formed(&without, &[card.clone(), without.card(1)], 1).unwrap_err();
        assert!(own.ends_with("rank 7 has no NCCL: libnccl was not found: x"), "{own}");
        let old = Card { version: 21_800, ..Card::read(&gpus.card(1)).unwrap() };
        assert!(reason(old.write()).contains("different versions of NCCL: 23007 and 21800"));
        assert_eq!(calls(), Vec::<String>::new());
    }

    #[test]
    fn a_first_member_that_cannot_name_one_says_why() {
        let gpus = gpus(nccl());
        fake(|fake| fake.naming = 2);
        let reason = formed(&gpus, &[gpus.card(0), gpus.card(1)], 0).unwrap_err();
        let words = "tensors on GPUs go through host memory: ncclGetUniqueId failed: unhandled system error";
        assert!(reason.starts_with(words), "{reason}");
    }

    #[test]
    fn a_gpu_that_is_not_there_brings_no_card() {
        assert!(gpus(nccl()).open(9, &[]).is_err());
        assert_eq!(gpus(nccl()).card(9), Vec::<u8>::new());
    }
}
