// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The GPUs that this process uses, and communicators among those of several.
//!
//! Libraries are loaded when the first tensor is on a GPU, never before: until then a process may
//! fork.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use farandole_collectives::{CARD, Communicator, Error as CollectiveError, Fabric};
use farandole_shm::Region;
use farandole_world::Rank;
use parking_lot::Mutex;

use crate::ipc::{self, GpuSite, IpcCommunicator, Mailbox};
use crate::nccl::{ARCH_FOR_FLOAT8, LEAST_FOR_FLOAT8};
use crate::{
    Cache, Driver, Error, Gpu, Kind, MEMBERS, Nccl, NcclCommunicator, NcclMemory, Places, Result,
    UniqueId,
};

/// The GPUs of a process.
#[derive(Default)]
pub struct Gpus {
    places: Mutex<Places>,
    driver: OnceLock<Result<Driver>>,
    nccl: OnceLock<Result<Nccl>>,
    known: Mutex<BTreeMap<u32, Arc<Gpu>>>,
    /// Cache of kernels for ranks that share a GPU; without it they meet in host memory.
    kernels: Option<Cache>,
    /// Mailboxes that were named, for communicators to be formed.
    mailboxes: Mutex<Vec<Region>>,
    /// Memory is asked of NCCL, and registered.
    registers: bool,
}

impl Gpus {
    /// Creates the object without a search for GPUs.
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

    /// Ranks that share a GPU reduce there, by kernels that are kept in this folder.
    #[must_use]
    pub fn with_ipc(self, kernels: Cache) -> Self {
        Self { kernels: Some(kernels), ..self }
    }

    /// Communicators of NCCL register the memory that [`Gpus::memory`] gives, where all members do.
    #[must_use]
    pub fn with_registration(self) -> Self {
        Self { registers: true, ..self }
    }

    /// Returns memory of a GPU that communicators register, for work in the order of this stream;
    /// nothing where none is to be, or this version of NCCL has none.
    ///
    /// # Errors
    /// `Nccl` when there is none left; as [`Gpus::open`].
    pub fn memory(&self, ordinal: u32, stream: usize, bytes: usize) -> Result<Option<NcclMemory>> {
        let Some(nccl) = self.registering() else { return Ok(None) };
        nccl.memory(&self.open(ordinal, &[])?.lane()?, stream, bytes).map(Some)
    }

    fn registering(&self) -> Option<Nccl> {
        self.registers.then(|| self.nccl().ok()).flatten().filter(Nccl::registers)
    }

    /// Returns the GPU of this number among those that the process sees. Wheels of libraries are
    /// also looked for in `packages`.
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
        let facts = gpu.driver().facts(ordinal)?;
        let version = self.nccl().map(|nccl| nccl.code()).unwrap_or_default();
        let shares = self.kernels.is_some() && gpu.driver().has_windows();
        let neighbours = if shares { ipc::neighbourhood() } else { 0 };
        let abilities = [
            (gpu.driver().has_pools(ordinal), ROOMS),
            (self.registering().is_some(), REGISTERS),
            (version >= LEAST_FOR_FLOAT8 && facts.arch >= ARCH_FOR_FLOAT8, FLOAT8),
        ];
        let abilities =
            abilities.iter().filter(|(there, _)| *there).map(|(_, ability)| ability).sum();
        let memory = facts.bytes;
        Ok(Card { uuid: facts.uuid, version, abilities, neighbours, memory })
    }

    /// Like [`Fabric::form`], where all members have the same GPU.
    fn form_by_ipc(
        &self,
        gpu: &Gpu,
        name: &[u8; 128],
        place: (usize, usize),
        patience: Duration,
    ) -> Result<Box<dyn Communicator>, CollectiveError> {
        let lost = |reason: String| CollectiveError::Lost {
            reason: format!("a mailbox of CUDA IPC {reason}"),
        };
        let card = ipc::read(name).ok_or_else(|| lost("has no card".to_owned()))?;
        let mut mailboxes = self.mailboxes.lock();
        let own = mailboxes.iter().position(|region| *region.card() == card);
        let region = own.map(|index| mailboxes.swap_remove(index));
        drop(mailboxes);
        let region = region.map_or_else(|| Region::open(&card), Ok);
        let region = region.map_err(|error| lost(format!("was not found: {error}")))?;
        let mailbox =
            Mailbox::over(region, place).ok_or_else(|| lost("is too small".to_owned()))?;
        let kernels = self.kernels.clone().ok_or_else(|| lost("came unasked".to_owned()))?;
        let piece = name[ipc::WRITTEN];
        let site = GpuSite::new(gpu.lane()?, piece, self.places.lock().clone(), kernels)?;
        Ok(Box::new(IpcCommunicator::form(site, mailbox, patience)))
    }

    /// Returns the reason why the members with these cards cannot have a communicator of NCCL, if
    /// so.
    fn lacking(&self, cards: &[Option<Card>], members: &[Rank], place: usize) -> Option<String> {
        let rank = |member: usize| members.get(member).copied().unwrap_or_default();
        let mut seen: BTreeMap<[u8; 16], usize> = BTreeMap::new();
        for (member, card) in cards.iter().enumerate() {
            let Some(card) = card else {
                return Some(format!(
                    "rank {} has tensors on a device and no driver of CUDA",
                    rank(member)
                ));
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
        if share(&cards) {
            return None;
        }
        self.lacking(&cards, members, place).map(|reason| detour(&reason))
    }

    fn remark(&self, cards: &[&[u8]], members: &[Rank], place: usize) -> Option<String> {
        let cards: Vec<Option<Card>> = cards.iter().map(|card| Card::read(card)).collect();
        let why = self.lacking(&cards, members, place).filter(|_| share(&cards))?;
        Some(format!(
            "allreduces of tensors on GPUs go by CUDA IPC, the rest through host memory: {why}"
        ))
    }

    fn name(&self, cards: &[&[u8]]) -> Result<Vec<u8>, String> {
        let read: Vec<Option<Card>> = cards.iter().map(|card| Card::read(card)).collect();
        if share(&read) {
            let failed =
                |error: farandole_shm::Error| detour(&format!("no mailbox for CUDA IPC: {error}"));
            let region = Region::create(Mailbox::bytes(cards.len())).map_err(failed)?;
            // Members may be told different sizes of the same GPU, where a program limits them.
            let memory = read.iter().flatten().map(|card| card.memory).min().unwrap_or_default();
            let piece = ipc::piece_of(memory);
            let name = [&[IPC], &ipc::write(region.card())[..], &[piece]].concat();
            self.mailboxes.lock().push(region);
            return Ok(name);
        }
        let abilities = |card: &Option<Card>| card.as_ref().map_or(0, |card| card.abilities);
        let common =
            read.iter().map(abilities).fold(ROOMS | REGISTERS | FLOAT8, |all, own| all & own);
        let id = self.nccl().and_then(|nccl| nccl.unique_id());
        id.map(|id| [&[common], &id.0[..]].concat()).map_err(|error| detour(&error.to_string()))
    }

    fn form(
        &self,
        device: u32,
        name: &[u8],
        place: (usize, usize),
        patience: Duration,
    ) -> Result<Box<dyn Communicator>, CollectiveError> {
        let named = name
            .split_first()
            .and_then(|(common, rest)| Some((*common, rest.first_chunk::<128>()?)));
        let Some((common, id)) = named else {
            return Err(CollectiveError::Lost { reason: "a communicator has no name".to_owned() });
        };
        let gpu = self.open(device, &[])?;
        if common == IPC {
            return self.form_by_ipc(&gpu, id, place, patience);
        }
        let (nccl, lane) = (self.nccl()?, gpu.lane()?);
        let formed = NcclCommunicator::form(nccl, lane, UniqueId(*id), place, patience)?;
        let formed = if common & ROOMS == 0 { formed } else { formed.with_rooms() };
        let formed = if common & REGISTERS == 0 { formed } else { formed.with_registration() };
        Ok(Box::new(if common & FLOAT8 == 0 { formed } else { formed.with_float8() }))
    }
}

fn detour(reason: &str) -> String {
    format!("tensors on GPUs go through host memory: {reason}")
}

/// Returns whether members with these cards have one GPU, and find each other there.
fn share(cards: &[Option<Card>]) -> bool {
    let [Some(first), others @ ..] = cards else { return false };
    let alike = |card: &Option<Card>| {
        card.as_ref()
            .is_some_and(|card| card.uuid == first.uuid && card.neighbours == first.neighbours)
    };
    first.neighbours != 0 && (1..MEMBERS).contains(&others.len()) && others.iter().all(alike)
}

/// The offer of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Card {
    uuid: [u8; 16],
    /// The version of NCCL; 0 if there is none.
    version: i32,
    /// Abilities that count if all members have them: [`ROOMS`], [`REGISTERS`], [`FLOAT8`].
    abilities: u8,
    /// Equal for processes that can use each other's windows; 0 if this one can use no other's.
    neighbours: u64,
    /// The GPU's, in bytes.
    memory: u64,
}

/// Memory is taken and given back in the order of streams.
const ROOMS: u8 = 1;
/// Memory that NCCL has given is registered.
const REGISTERS: u8 = 2;
/// NCCL reduces floats of eight bits.
const FLOAT8: u8 = 4;
/// The first byte in the name of a communicator by CUDA IPC. For NCCL it has the abilities of all
/// members.
const IPC: u8 = 0x80;

/// A mark of there being a card, the GPU, the version, what it is able to, its neighbours, and its
/// memory.
const WRITTEN: usize = 1 + 16 + 4 + 1 + 8 + 8;
/// The length of the abilities and of NCCL's name.
const NAME: usize = 1 + size_of::<UniqueId>();
const _: () = assert!(WRITTEN <= CARD && NAME < CARD, "a card has room for it");
const _: () = assert!(ipc::WRITTEN + 1 < NAME, "names are read up to the length of the longest");

impl Card {
    fn write(&self) -> Vec<u8> {
        let (version, neighbours) = (self.version.to_le_bytes(), self.neighbours.to_le_bytes());
        let memory = self.memory.to_le_bytes();
        [&[1][..], &self.uuid, &version, &[self.abilities], &neighbours, &memory].concat()
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (mark, rest) = bytes.split_first()?;
        let (uuid, rest) = rest.split_first_chunk::<16>()?;
        let (version, rest) = rest.split_first_chunk::<4>()?;
        let (abilities, rest) = rest.split_first()?;
        let (neighbours, rest) = rest.split_first_chunk::<8>()?;
        let (neighbours, memory) =
            (u64::from_le_bytes(*neighbours), u64::from_le_bytes(*rest.first_chunk()?));
        let (version, abilities) = (i32::from_le_bytes(*version), *abilities);
        let card = Self { uuid: *uuid, version, abilities, neighbours, memory };
        (*mark == 1).then_some(card)
    }
}

/// Like `nvidia-smi` writes it.
fn spelled(uuid: &[u8; 16]) -> String {
    let digits: Vec<String> = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |from: usize, to: usize| digits[from..to].concat();
    format!("GPU-{}-{}-{}-{}-{}", part(0, 4), part(4, 6), part(6, 8), part(8, 10), part(10, 16))
}

#[cfg(test)]
mod tests {
    use farandole_collectives::{DataType, Operation, ReduceOp};

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
        let (roomy, small) =
            (gpus.card(0), Card { abilities: 0, ..Card::read(&gpus.card(1)).unwrap() });
        let gathers = |other: Vec<u8>| {
            let name = gpus.name(&[&roomy, &other]).unwrap();
            let formed = gpus.form(1, &name, (1, 2), Duration::from_secs(1)).unwrap();
            formed.carries(&Operation::Allgather { segments: Vec::new(), bytes: Vec::new() })
        };
        assert!(gathers(gpus.card(1)));
        assert!(!gathers(small.write()));
    }

    #[test]
    fn memory_is_registered_where_all_members_register_theirs() {
        let (gpus, unwilling) = (gpus(nccl()).with_registration(), super::tests::gpus(nccl()));
        assert!(unwilling.memory(1, 0, 64).unwrap().is_none(), "nobody has asked for it");
        let memory = gpus.memory(1, 0, 64).unwrap().unwrap();
        assert_eq!(calls(), [format!("memory of 64 at {:#x}", memory.address())]);
        let common = |other: Vec<u8>| gpus.name(&[&gpus.card(0), &other]).unwrap()[0];
        assert_eq!(common(gpus.card(1)), ROOMS | REGISTERS | FLOAT8);
        assert_eq!(common(unwilling.card(1)), ROOMS | FLOAT8);
    }

    #[test]
    fn floats_of_eight_bits_go_by_nccl_where_all_members_can() {
        let carried = |gpus: &Gpus, others: [Card; 2]| {
            let cards = others.map(|card| card.write());
            let name = padded(&gpus.name(&[&cards[0], &cards[1]]).unwrap());
            let formed = gpus.form(1, &name, (1, 2), Duration::from_secs(1)).unwrap();
            let (dtype, op, segments) = (DataType::F8E5M2, ReduceOp::Sum, Vec::new());
            formed.carries(&Operation::Allreduce {
                dtype,
                op,
                prescale: 1.0,
                postscale: 1.0,
                segments,
            })
        };
        let own = |gpus: &Gpus| [gpus.card(0), gpus.card(1)].map(|card| Card::read(&card).unwrap());
        let gpus_of = |version: i32| {
            fake(|fake| fake.version = version);
            gpus(nccl())
        };
        let newer = gpus_of(22_403);
        let [first, second] = own(&newer);
        assert_eq!(first.abilities, ROOMS | FLOAT8, "the GPU of tests is an sm_90");
        assert!(carried(&newer, [first.clone(), second.clone()]));
        for abilities in [ROOMS, 0] {
            let older_gpu = Card { abilities, ..second.clone() };
            assert!(!carried(&newer, [first.clone(), older_gpu.clone()]));
            assert!(!carried(&newer, [older_gpu, first.clone()]));
        }
        let older = gpus_of(22_304);
        assert!(!carried(&older, own(&older)));
    }

    #[test]
    fn members_that_share_a_gpu_are_named_and_go_through_the_host_without_a_port_of_nccl() {
        let gpus = gpus(nccl());
        let reason = formed(&gpus, &[gpus.card(1), gpus.card(1)], 0).unwrap_err();
        let same = "ranks 4 and 7 use the same GPU, GPU-01010101-0101-0101-0101-010101010101;";
        assert!(reason.contains(same) && reason.contains("set_device"), "{reason}");
        assert_eq!(
            calls(),
            Vec::<String>::new(),
            "a name opens a port that only its communicator closes"
        );
    }

    fn padded(name: &[u8]) -> Vec<u8> {
        let mut name = name.to_vec();
        name.resize(CARD - 1, 0);
        name
    }

    #[test]
    fn members_that_share_a_gpu_have_a_mailbox_if_they_find_it_and_all_but_one_gpu_is_theirs() {
        let folder = tempfile::tempdir().unwrap();
        let gpus = gpus(nccl()).with_ipc(Cache::new(folder.path()));
        let (own, other) = (gpus.card(1), gpus.card(1));
        let cards: [&[u8]; 2] = [&own, &other];
        let ranks = [Rank(4), Rank(7)];
        assert_eq!(gpus.obstacle(&cards, &ranks, 0), None);
        let remark = gpus.remark(&cards, &ranks, 0).unwrap();
        let words = "allreduces of tensors on GPUs go by CUDA IPC, the rest through host memory: \
                     ranks 4 and 7";
        assert!(remark.starts_with(words), "{remark}");
        let name = padded(&gpus.name(&cards).unwrap());
        let card = ipc::read(&name[1..]).unwrap();
        assert_eq!(gpus.mailboxes.lock().first().map(|region| *region.card()), Some(card));
        let told = |bytes| Card { memory: bytes, ..Card::read(&own).unwrap() }.write();
        let name_of = |first: u64, second: u64| gpus.name(&[&told(first), &told(second)]).unwrap();
        let piece = |first, second| name_of(first, second)[1 + ipc::WRITTEN];
        assert_eq!((piece(80 << 30, 80 << 30), piece(80 << 30, 24 << 30)), (64, 24));
        gpus.mailboxes.lock().truncate(1);
        let formed = |place| gpus.form(1, &name, (place, 2), Duration::from_secs(1)).unwrap();
        let first = formed(0);
        assert!(gpus.mailboxes.lock().is_empty(), "the communicator has it");
        assert!(first.is_forming() && formed(1).size() == 2);
        drop(first);
        let lost = gpus.form(1, &name, (0, 2), Duration::from_secs(1)).map(drop).unwrap_err();
        assert!(lost.to_string().contains("a mailbox of CUDA IPC was not found"), "{lost}");
        assert_eq!(calls(), Vec::<String>::new());
    }

    #[test]
    fn a_member_without_the_mailbox_or_with_another_gpu_is_no_neighbour() {
        let folder = tempfile::tempdir().unwrap();
        let gpus = gpus(nccl()).with_ipc(Cache::new(folder.path()));
        let own = Card::read(&gpus.card(1)).unwrap();
        assert_ne!(own.neighbours, 0);
        let way = |others: &[Card]| {
            let cards: Vec<Vec<u8>> =
                [&[own.clone()][..], others].concat().iter().map(Card::write).collect();
            let cards: Vec<&[u8]> = cards.iter().map(Vec::as_slice).collect();
            let ranks: Vec<Rank> = (0..).take(cards.len()).map(Rank).collect();
            assert_eq!(gpus.remark(&cards, &ranks, 0), None);
            gpus.obstacle(&cards, &ranks, 0)
        };
        let stranger = Card { neighbours: own.neighbours ^ 2, ..own.clone() };
        assert!(way(&[stranger]).unwrap().contains("use the same GPU"));
        assert!(
            way(&[Card { neighbours: 0, ..own.clone() }]).unwrap().contains("use the same GPU")
        );
        let far = Card { uuid: [9; 16], ..own.clone() };
        assert!(way(&[own.clone(), far.clone()]).unwrap().contains("use the same GPU"));
        assert_eq!(way(&[far]), None, "that is for NCCL");
        assert!(way(&vec![own.clone(); MEMBERS]).is_some(), "more than a kernel reads");
        assert_eq!(way(&[]), None);
    }

    #[test]
    fn a_member_without_the_driver_or_the_same_nccl_is_named() {
        let (gpus, missing) =
            (gpus(nccl()), Error::NotFound { library: "libnccl", tried: "x".to_owned() });
        let without = super::tests::gpus(Err(missing));
        let card = gpus.card(0);
        let reason = |other: Vec<u8>| formed(&gpus, &[card.clone(), other], 0).unwrap_err();
        assert!(
            reason(vec![0; CARD]).ends_with("rank 7 has tensors on a device and no driver of CUDA")
        );
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
        let words = "tensors on GPUs go through host memory: ncclGetUniqueId failed: unhandled \
                     system error";
        assert!(reason.starts_with(words), "{reason}");
    }

    #[test]
    fn a_gpu_that_is_not_there_brings_no_card() {
        assert!(gpus(nccl()).open(9, &[]).is_err());
        assert_eq!(gpus(nccl()).card(9), Vec::<u8>::new());
    }
}
