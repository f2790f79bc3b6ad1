// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The GPUs that this process uses, and the communicators between GPUs.
//!
//! Libraries are loaded when the first tensor is on a GPU, never before: until then a process may
//! fork.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use farandole_collectives::{
    Communicator, DeviceCommunicatorFactory, Error as CollectiveError, MAX_CAPABILITIES_BYTES,
};
use farandole_shm::SharedRegion;
use farandole_world::Rank;
use parking_lot::Mutex;

use crate::ipc::{self, GpuIpcDevice, IpcCommunicator, IpcMailbox};
use crate::nccl::{MIN_ARCH_FOR_FLOAT8, MIN_VERSION_FOR_FLOAT8};
use crate::{
    CudaDriver, CudaLibrary, Error, GpuDevice, KernelCache, LibrarySearchPath,
    MAX_MEMBERS_PER_LAUNCH, NcclCommunicator, NcclLibrary, NcclMemory, Result, UniqueId,
};

/// The GPUs of a process.
#[derive(Default)]
pub struct ProcessGpus {
    search_path: Mutex<LibrarySearchPath>,
    driver: OnceLock<Result<CudaDriver>>,
    nccl: OnceLock<Result<NcclLibrary>>,
    opened_gpus: Mutex<BTreeMap<u32, Arc<GpuDevice>>>,
    /// Cache of kernels for ranks that share a GPU; without it they meet in host memory.
    kernel_cache: Option<KernelCache>,
    /// Mailboxes that were named, for communicators to be formed.
    mailboxes: Mutex<Vec<SharedRegion>>,
    /// Memory is asked of NCCL, and registered.
    registers_memory: bool,
}

impl ProcessGpus {
    /// Creates the object without a search for GPUs.
    pub fn new(search_path: LibrarySearchPath) -> Self {
        Self { search_path: Mutex::new(search_path), ..Self::default() }
    }

    /// Disables NCCL.
    #[must_use]
    pub fn with_nccl_disabled(self) -> Self {
        let tried = "it is not to be used".to_owned();
        let none = OnceLock::from(Err(Error::NotFound {
            library: CudaLibrary::Nccl.library_name(),
            tried,
        }));
        Self { nccl: none, ..self }
    }

    /// Enables CUDA IPC: ranks that share a GPU reduce there. The compiled kernels are kept in this
    /// folder.
    #[must_use]
    pub fn with_ipc_enabled(self, kernels: KernelCache) -> Self {
        Self { kernel_cache: Some(kernels), ..self }
    }

    /// Enables registration: NCCL communicators register memory of
    /// [`ProcessGpus::allocate_registered`], if all members do.
    #[must_use]
    pub fn with_memory_registration_enabled(self) -> Self {
        Self { registers_memory: true, ..self }
    }

    /// Returns memory of a GPU that communicators register, for work in the order of this stream;
    /// nothing where none is to be, or this version of NCCL has none.
    ///
    /// # Errors
    /// `Nccl` when there is none left; as [`ProcessGpus::open_gpu`].
    pub fn allocate_registered(
        &self,
        ordinal: u32,
        stream: usize,
        bytes: usize,
    ) -> Result<Option<NcclMemory>> {
        let Some(nccl) = self.nccl_if_registering() else { return Ok(None) };
        nccl.allocate_memory(&self.open_gpu(ordinal, &[])?.create_stream()?, stream, bytes)
            .map(Some)
    }

    fn nccl_if_registering(&self) -> Option<NcclLibrary> {
        self.registers_memory
            .then(|| self.nccl_library().ok())
            .flatten()
            .filter(NcclLibrary::supports_registration)
    }

    /// Returns the GPU with this ordinal among the GPUs that the process sees. The search for
    /// libraries includes wheels in `packages`.
    ///
    /// # Errors
    /// `NotFound`, `Symbols`, `CudaDriver`: also when there is no such GPU.
    pub fn open_gpu(&self, ordinal: u32, packages: &[PathBuf]) -> Result<Arc<GpuDevice>> {
        // Held until the end, so that two threads do not open the same GPU twice.
        let mut known = self.opened_gpus.lock();
        if let Some(gpu) = known.get(&ordinal) {
            return Ok(Arc::clone(gpu));
        }
        let mut search_path = self.search_path.lock();
        for package in packages {
            if !search_path.packages.contains(package) {
                search_path.packages.push(package.clone());
            }
        }
        let driver = self.driver.get_or_init(|| CudaDriver::load_from(&search_path)).clone()?;
        driver.device_handle(ordinal)?;
        let gpu = Arc::new(GpuDevice::new(driver, ordinal));
        Ok(Arc::clone(known.entry(ordinal).or_insert(gpu)))
    }

    fn nccl_library(&self) -> Result<NcclLibrary> {
        self.nccl.get_or_init(|| NcclLibrary::load_from(&self.search_path.lock())).clone()
    }

    fn own_capabilities(&self, ordinal: u32) -> Result<GpuCapabilities> {
        let gpu = self.open_gpu(ordinal, &[])?;
        let facts = gpu.cuda_driver().device_properties(ordinal)?;
        let version = self.nccl_library().map(|nccl| nccl.version_code()).unwrap_or_default();
        let shares = self.kernel_cache.is_some() && gpu.cuda_driver().supports_ipc();
        let neighbours = if shares { ipc::region_namespace_id() } else { 0 };
        let abilities = [
            (gpu.cuda_driver().supports_memory_pools(ordinal), ABILITY_STREAM_ORDERED_MEMORY),
            (self.nccl_if_registering().is_some(), ABILITY_REGISTERED_MEMORY),
            (
                version >= MIN_VERSION_FOR_FLOAT8 && facts.arch >= MIN_ARCH_FOR_FLOAT8,
                ABILITY_FLOAT8_REDUCTION,
            ),
        ];
        let abilities =
            abilities.iter().filter(|(there, _)| *there).map(|(_, ability)| ability).sum();
        let memory = facts.bytes;
        Ok(GpuCapabilities {
            uuid: facts.uuid,
            nccl_version: version,
            abilities,
            neighbourhood: neighbours,
            memory_bytes: memory,
        })
    }

    /// Forms a communicator, like [`DeviceCommunicatorFactory::form_communicator`], of members on
    /// the same GPU.
    fn form_ipc_communicator(
        &self,
        gpu: &GpuDevice,
        name: &[u8; 128],
        position: (usize, usize),
        timeout: Duration,
    ) -> Result<Box<dyn Communicator>, CollectiveError> {
        let lost = |reason: String| CollectiveError::Lost {
            reason: format!("a mailbox of CUDA IPC {reason}"),
        };
        let handle =
            ipc::decode_region_handle(name).ok_or_else(|| lost("has no handle".to_owned()))?;
        let mut mailboxes = self.mailboxes.lock();
        let own = mailboxes.iter().position(|region| *region.region_handle() == handle);
        let region = own.map(|index| mailboxes.swap_remove(index));
        drop(mailboxes);
        let region = region.map_or_else(|| SharedRegion::open_peer_region(&handle), Ok);
        let region = region.map_err(|error| lost(format!("was not found: {error}")))?;
        let mailbox = IpcMailbox::from_region(region, position)
            .ok_or_else(|| lost("is too small".to_owned()))?;
        let kernels = self.kernel_cache.clone().ok_or_else(|| lost("came unasked".to_owned()))?;
        let piece = name[ipc::REGION_HANDLE_BYTES];
        let device_window = GpuIpcDevice::new(
            gpu.create_stream()?,
            piece,
            self.search_path.lock().clone(),
            kernels,
        )?;
        Ok(Box::new(IpcCommunicator::begin_forming(device_window, mailbox, timeout)))
    }

    /// Returns the reason why the members with these capabilities cannot have a communicator of
    /// NCCL, if so.
    fn nccl_obstacle(
        &self,
        capabilities: &[Option<GpuCapabilities>],
        members: &[Rank],
        own_member: usize,
    ) -> Option<String> {
        let rank = |member: usize| members.get(member).copied().unwrap_or_default();
        let mut seen: BTreeMap<[u8; 16], usize> = BTreeMap::new();
        for (member, gpu) in capabilities.iter().enumerate() {
            let Some(gpu) = gpu else {
                return Some(format!(
                    "rank {} has tensors on a device and no driver of CUDA",
                    rank(member)
                ));
            };
            if let Some(other) = seen.insert(gpu.uuid, member) {
                return Some(format!(
                    "ranks {} and {} use the same GPU, {}; to give each its own, call \
                     torch.cuda.set_device(farandole.torch.local_rank())",
                    rank(other),
                    rank(member),
                    format_uuid(&gpu.uuid)
                ));
            }
        }
        let versions: Vec<i32> =
            capabilities.iter().flatten().map(|gpu| gpu.nccl_version).collect();
        if let Some(member) = versions.iter().position(|version| *version == 0) {
            let own = (member == own_member).then(|| self.nccl_library().err()).flatten();
            let reason = own.map(|error| format!(": {error}")).unwrap_or_default();
            return Some(format!("rank {} has no NCCL{reason}", rank(member)));
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

impl DeviceCommunicatorFactory for ProcessGpus {
    fn device_capabilities(&self, device: u32) -> Vec<u8> {
        self.own_capabilities(device).map(|gpu| gpu.to_bytes()).unwrap_or_default()
    }

    fn formation_obstacle(
        &self,
        capabilities: &[&[u8]],
        members: &[Rank],
        own_member: usize,
    ) -> Option<String> {
        let capabilities: Vec<Option<GpuCapabilities>> =
            capabilities.iter().map(|bytes| GpuCapabilities::from_bytes(bytes)).collect();
        if members_share_one_gpu(&capabilities) {
            return None;
        }
        self.nccl_obstacle(&capabilities, members, own_member)
            .map(|reason| host_memory_fallback_notice(&reason))
    }

    fn formation_notice(
        &self,
        capabilities: &[&[u8]],
        members: &[Rank],
        own_member: usize,
    ) -> Option<String> {
        let capabilities: Vec<Option<GpuCapabilities>> =
            capabilities.iter().map(|bytes| GpuCapabilities::from_bytes(bytes)).collect();
        let reason = self
            .nccl_obstacle(&capabilities, members, own_member)
            .filter(|_| members_share_one_gpu(&capabilities))?;
        Some(format!(
            "allreduces of tensors on GPUs go by CUDA IPC, the rest through host memory: {reason}"
        ))
    }

    fn create_communicator_id(&self, capabilities: &[&[u8]]) -> Result<Vec<u8>, String> {
        let read: Vec<Option<GpuCapabilities>> =
            capabilities.iter().map(|bytes| GpuCapabilities::from_bytes(bytes)).collect();
        if members_share_one_gpu(&read) {
            let failed = |error: farandole_shm::Error| {
                host_memory_fallback_notice(&format!("no mailbox for CUDA IPC: {error}"))
            };
            let region = SharedRegion::create(IpcMailbox::bytes_for_members(capabilities.len()))
                .map_err(failed)?;
            // If a program limits the memory of a GPU, members may see different sizes of the same
            // GPU.
            let memory =
                read.iter().flatten().map(|gpu| gpu.memory_bytes).min().unwrap_or_default();
            let piece = ipc::piece_size_mib(memory);
            let name =
                [&[IPC_NAME_TAG], &ipc::encode_region_handle(region.region_handle())[..], &[piece]]
                    .concat();
            self.mailboxes.lock().push(region);
            return Ok(name);
        }
        let abilities = |gpu: &Option<GpuCapabilities>| gpu.as_ref().map_or(0, |gpu| gpu.abilities);
        let common = read.iter().map(abilities).fold(
            ABILITY_STREAM_ORDERED_MEMORY | ABILITY_REGISTERED_MEMORY | ABILITY_FLOAT8_REDUCTION,
            |all, own| all & own,
        );
        let id = self.nccl_library().and_then(|nccl| nccl.create_unique_id());
        id.map(|id| [&[common], &id.0[..]].concat())
            .map_err(|error| host_memory_fallback_notice(&error.to_string()))
    }

    fn form_communicator(
        &self,
        device: u32,
        name: &[u8],
        position: (usize, usize),
        timeout: Duration,
    ) -> Result<Box<dyn Communicator>, CollectiveError> {
        let named = name
            .split_first()
            .and_then(|(common, rest)| Some((*common, rest.first_chunk::<128>()?)));
        let Some((common, id)) = named else {
            return Err(CollectiveError::Lost { reason: "a communicator has no name".to_owned() });
        };
        let gpu = self.open_gpu(device, &[])?;
        if common == IPC_NAME_TAG {
            return self.form_ipc_communicator(&gpu, id, position, timeout);
        }
        let (nccl, stream) = (self.nccl_library()?, gpu.create_stream()?);
        let formed =
            NcclCommunicator::begin_forming(nccl, stream, UniqueId(*id), position, timeout)?;
        let formed = if common & ABILITY_STREAM_ORDERED_MEMORY == 0 {
            formed
        } else {
            formed.with_result_memory_enabled()
        };
        let formed = if common & ABILITY_REGISTERED_MEMORY == 0 {
            formed
        } else {
            formed.with_memory_registration_enabled()
        };
        Ok(Box::new(if common & ABILITY_FLOAT8_REDUCTION == 0 {
            formed
        } else {
            formed.with_float8_enabled()
        }))
    }
}

fn host_memory_fallback_notice(reason: &str) -> String {
    format!("tensors on GPUs go through host memory: {reason}")
}

/// Returns whether members with these capabilities have one GPU, and find each other there.
fn members_share_one_gpu(capabilities: &[Option<GpuCapabilities>]) -> bool {
    let [Some(first), others @ ..] = capabilities else { return false };
    let alike = |gpu: &Option<GpuCapabilities>| {
        gpu.as_ref()
            .is_some_and(|gpu| gpu.uuid == first.uuid && gpu.neighbourhood == first.neighbourhood)
    };
    first.neighbourhood != 0
        // Together with the first member, one launch takes at most MAX_MEMBERS_PER_LAUNCH inputs.
        && (1..MAX_MEMBERS_PER_LAUNCH).contains(&others.len())
        && others.iter().all(alike)
}

/// The properties of a GPU that a member sends to the others before they form a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GpuCapabilities {
    uuid: [u8; 16],
    /// The version of NCCL; 0 if there is none.
    nccl_version: i32,
    /// Abilities that count if all members have them: [`ABILITY_STREAM_ORDERED_MEMORY`],
    /// [`ABILITY_REGISTERED_MEMORY`], [`ABILITY_FLOAT8_REDUCTION`].
    abilities: u8,
    /// Equal for processes that can use each other's windows; 0 if this one can use no other's.
    neighbourhood: u64,
    /// The GPU's, in bytes.
    memory_bytes: u64,
}

/// Memory is taken and given back in the order of streams.
const ABILITY_STREAM_ORDERED_MEMORY: u8 = 1;
/// Memory that NCCL has given is registered.
const ABILITY_REGISTERED_MEMORY: u8 = 2;
/// NCCL reduces floats of eight bits.
const ABILITY_FLOAT8_REDUCTION: u8 = 4;
/// The first byte in the name of a communicator by CUDA IPC. For NCCL it has the abilities of all
/// members.
// No sum of abilities has this bit.
const IPC_NAME_TAG: u8 = 0x80;

/// The length of the encoded capabilities: a presence byte, the UUID of the GPU, the NCCL version,
/// the abilities, the neighbourhood and the memory size.
const CAPABILITIES_BYTES: usize = 1 + 16 + 4 + 1 + 8 + 8;
/// The length of the abilities and of NCCL's name.
const COMMUNICATOR_NAME_BYTES: usize = 1 + size_of::<UniqueId>();
const _: () = assert!(
    CAPABILITIES_BYTES <= MAX_CAPABILITIES_BYTES
        && COMMUNICATOR_NAME_BYTES < MAX_CAPABILITIES_BYTES,
    "MAX_CAPABILITIES_BYTES has room for both"
);
const _: () = assert!(
    ipc::REGION_HANDLE_BYTES + 1 < COMMUNICATOR_NAME_BYTES,
    "names are read up to the length of the longest"
);

impl GpuCapabilities {
    fn to_bytes(&self) -> Vec<u8> {
        let (version, neighbours) =
            (self.nccl_version.to_le_bytes(), self.neighbourhood.to_le_bytes());
        let memory = self.memory_bytes.to_le_bytes();
        [&[1][..], &self.uuid, &version, &[self.abilities], &neighbours, &memory].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (presence, rest) = bytes.split_first()?;
        let (uuid, rest) = rest.split_first_chunk::<16>()?;
        let (version, rest) = rest.split_first_chunk::<4>()?;
        let (abilities, rest) = rest.split_first()?;
        let (neighbours, rest) = rest.split_first_chunk::<8>()?;
        let (neighbours, memory) =
            (u64::from_le_bytes(*neighbours), u64::from_le_bytes(*rest.first_chunk()?));
        let (version, abilities) = (i32::from_le_bytes(*version), *abilities);
        let decoded = Self {
            uuid: *uuid,
            nccl_version: version,
            abilities,
            neighbourhood: neighbours,
            memory_bytes: memory,
        };
        (*presence == 1).then_some(decoded)
    }
}

/// Formats a UUID like `nvidia-smi`.
fn format_uuid(uuid: &[u8; 16]) -> String {
    let digits: Vec<String> = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |from: usize, to: usize| digits[from..to].concat();
    format!("GPU-{}-{}-{}-{}-{}", part(0, 4), part(4, 6), part(6, 8), part(8, 10), part(10, 16))
}

#[cfg(test)]
mod tests {
    use farandole_collectives::CollectiveOperation;
    use farandole_kernels::{DataType, ReduceOp};

    use super::*;
    use crate::device::tests::driver;
    use crate::nccl::fake::{fake_nccl, take_calls, with_fake};

    fn gpus(library: Result<NcclLibrary>) -> ProcessGpus {
        let gpus = ProcessGpus::default();
        assert!(gpus.driver.set(Ok(driver())).is_ok() && gpus.nccl.set(library).is_ok());
        gpus
    }

    fn formed(
        gpus: &ProcessGpus,
        capabilities: &[Vec<u8>],
        position: usize,
    ) -> Result<usize, String> {
        let capabilities: Vec<&[u8]> = capabilities.iter().map(Vec::as_slice).collect();
        match gpus.formation_obstacle(&capabilities, &[Rank(4), Rank(7)], position) {
            Some(reason) => Err(reason),
            None => {
                let name = gpus.create_communicator_id(&capabilities)?;
                let mut formed = gpus
                    .form_communicator(1, &name, (position, 2), Duration::from_secs(20))
                    .unwrap();
                while !formed.make_progress(&mut Vec::new()).unwrap() {}
                Ok(formed.member_count())
            }
        }
    }

    #[test]
    fn members_with_a_gpu_each_form_one_under_the_name_that_one_gives() {
        let gpus = gpus(fake_nccl());
        let capabilities = [gpus.device_capabilities(0), gpus.device_capabilities(1)];
        assert_eq!(
            take_calls(),
            Vec::<String>::new(),
            "no member creates a name before it has all capabilities"
        );
        assert_eq!(formed(&gpus, &capabilities, 1), Ok(2));
        assert_eq!(take_calls(), ["name", "init 1/2 id 9 blocking 1", "abort"]);
    }

    #[test]
    fn gathers_go_by_nccl_where_all_members_have_rooms_for_what_comes() {
        let gpus = gpus(fake_nccl());
        let (roomy, small) = (
            gpus.device_capabilities(0),
            GpuCapabilities {
                abilities: 0,
                ..GpuCapabilities::from_bytes(&gpus.device_capabilities(1)).unwrap()
            },
        );
        let gathers = |other: Vec<u8>| {
            let name = gpus.create_communicator_id(&[&roomy, &other]).unwrap();
            let formed = gpus.form_communicator(1, &name, (1, 2), Duration::from_secs(1)).unwrap();
            formed.can_execute(&CollectiveOperation::Allgather {
                segments: Vec::new(),
                bytes: Vec::new(),
            })
        };
        assert!(gathers(gpus.device_capabilities(1)));
        assert!(!gathers(small.to_bytes()));
    }

    #[test]
    fn memory_is_registered_where_all_members_register_theirs() {
        let (gpus, unwilling) =
            (gpus(fake_nccl()).with_memory_registration_enabled(), super::tests::gpus(fake_nccl()));
        assert!(
            unwilling.allocate_registered(1, 0, 64).unwrap().is_none(),
            "registration is off by default"
        );
        let memory = gpus.allocate_registered(1, 0, 64).unwrap().unwrap();
        assert_eq!(take_calls(), [format!("memory of 64 at {:#x}", memory.start_address())]);
        let common = |other: Vec<u8>| {
            gpus.create_communicator_id(&[&gpus.device_capabilities(0), &other]).unwrap()[0]
        };
        assert_eq!(
            common(gpus.device_capabilities(1)),
            ABILITY_STREAM_ORDERED_MEMORY | ABILITY_REGISTERED_MEMORY | ABILITY_FLOAT8_REDUCTION
        );
        assert_eq!(
            common(unwilling.device_capabilities(1)),
            ABILITY_STREAM_ORDERED_MEMORY | ABILITY_FLOAT8_REDUCTION
        );
    }

    #[test]
    fn floats_of_eight_bits_go_by_nccl_where_all_members_can() {
        let carried = |gpus: &ProcessGpus, others: [GpuCapabilities; 2]| {
            let capabilities = others.map(|gpu| gpu.to_bytes());
            let name = padded(
                &gpus.create_communicator_id(&[&capabilities[0], &capabilities[1]]).unwrap(),
            );
            let formed = gpus.form_communicator(1, &name, (1, 2), Duration::from_secs(1)).unwrap();
            let (dtype, op, segments) = (DataType::F8E5M2, ReduceOp::Sum, Vec::new());
            formed.can_execute(&CollectiveOperation::Allreduce {
                dtype,
                op,
                prescale: 1.0,
                postscale: 1.0,
                segments,
            })
        };
        let own = |gpus: &ProcessGpus| {
            [gpus.device_capabilities(0), gpus.device_capabilities(1)]
                .map(|bytes| GpuCapabilities::from_bytes(&bytes).unwrap())
        };
        let gpus_of = |version: i32| {
            with_fake(|fake| fake.version = version);
            gpus(fake_nccl())
        };
        let newer = gpus_of(22_403);
        let [first, second] = own(&newer);
        assert_eq!(
            first.abilities,
            ABILITY_STREAM_ORDERED_MEMORY | ABILITY_FLOAT8_REDUCTION,
            "the GPU of tests is an sm_90"
        );
        assert!(carried(&newer, [first.clone(), second.clone()]));
        for abilities in [ABILITY_STREAM_ORDERED_MEMORY, 0] {
            let older_gpu = GpuCapabilities { abilities, ..second.clone() };
            assert!(!carried(&newer, [first.clone(), older_gpu.clone()]));
            assert!(!carried(&newer, [older_gpu, first.clone()]));
        }
        let older = gpus_of(22_304);
        assert!(!carried(&older, own(&older)));
    }

    #[test]
    fn members_that_share_a_gpu_are_named_and_go_through_the_host_without_a_port_of_nccl() {
        let gpus = gpus(fake_nccl());
        let reason = formed(&gpus, &[gpus.device_capabilities(1), gpus.device_capabilities(1)], 0)
            .unwrap_err();
        let same = "ranks 4 and 7 use the same GPU, GPU-01010101-0101-0101-0101-010101010101;";
        assert!(reason.contains(same) && reason.contains("set_device"), "{reason}");
        assert_eq!(
            take_calls(),
            Vec::<String>::new(),
            "a name opens a port that only its communicator closes"
        );
    }

    fn padded(name: &[u8]) -> Vec<u8> {
        let mut name = name.to_vec();
        name.resize(MAX_CAPABILITIES_BYTES - 1, 0);
        name
    }

    #[test]
    fn members_that_share_a_gpu_have_a_mailbox_if_they_find_it_and_all_but_one_gpu_is_theirs() {
        let folder = tempfile::tempdir().unwrap();
        let gpus = gpus(fake_nccl()).with_ipc_enabled(KernelCache::new(folder.path()));
        let (own, other) = (gpus.device_capabilities(1), gpus.device_capabilities(1));
        let capabilities: [&[u8]; 2] = [&own, &other];
        let ranks = [Rank(4), Rank(7)];
        assert_eq!(gpus.formation_obstacle(&capabilities, &ranks, 0), None);
        let remark = gpus.formation_notice(&capabilities, &ranks, 0).unwrap();
        let words = "allreduces of tensors on GPUs go by CUDA IPC, the rest through host memory: \
                     ranks 4 and 7";
        assert!(remark.starts_with(words), "{remark}");
        let name = padded(&gpus.create_communicator_id(&capabilities).unwrap());
        let handle = ipc::decode_region_handle(&name[1..]).unwrap();
        assert_eq!(
            gpus.mailboxes.lock().first().map(|region| *region.region_handle()),
            Some(handle)
        );
        let capabilities_with = |bytes| {
            GpuCapabilities { memory_bytes: bytes, ..GpuCapabilities::from_bytes(&own).unwrap() }
                .to_bytes()
        };
        let name_of = |first: u64, second: u64| {
            gpus.create_communicator_id(&[&capabilities_with(first), &capabilities_with(second)])
                .unwrap()
        };
        let piece = |first, second| name_of(first, second)[1 + ipc::REGION_HANDLE_BYTES];
        assert_eq!((piece(80 << 30, 80 << 30), piece(80 << 30, 24 << 30)), (64, 24));
        gpus.mailboxes.lock().truncate(1);
        let formed = |position| {
            gpus.form_communicator(1, &name, (position, 2), Duration::from_secs(1)).unwrap()
        };
        let first = formed(0);
        assert!(gpus.mailboxes.lock().is_empty(), "the communicator has it");
        assert!(first.is_forming() && formed(1).member_count() == 2);
        drop(first);
        let lost =
            gpus.form_communicator(1, &name, (0, 2), Duration::from_secs(1)).map(drop).unwrap_err();
        assert!(lost.to_string().contains("a mailbox of CUDA IPC was not found"), "{lost}");
        assert_eq!(take_calls(), Vec::<String>::new());
    }

    #[test]
    fn a_member_without_the_mailbox_or_with_another_gpu_is_no_neighbour() {
        let folder = tempfile::tempdir().unwrap();
        let gpus = gpus(fake_nccl()).with_ipc_enabled(KernelCache::new(folder.path()));
        let own = GpuCapabilities::from_bytes(&gpus.device_capabilities(1)).unwrap();
        assert_ne!(own.neighbourhood, 0);
        let obstacle = |others: &[GpuCapabilities]| {
            let capabilities: Vec<Vec<u8>> = [&[own.clone()][..], others]
                .concat()
                .iter()
                .map(GpuCapabilities::to_bytes)
                .collect();
            let capabilities: Vec<&[u8]> = capabilities.iter().map(Vec::as_slice).collect();
            let ranks: Vec<Rank> = (0..).take(capabilities.len()).map(Rank).collect();
            assert_eq!(gpus.formation_notice(&capabilities, &ranks, 0), None);
            gpus.formation_obstacle(&capabilities, &ranks, 0)
        };
        let stranger = GpuCapabilities { neighbourhood: own.neighbourhood ^ 2, ..own.clone() };
        assert!(obstacle(&[stranger]).unwrap().contains("use the same GPU"));
        assert!(
            obstacle(&[GpuCapabilities { neighbourhood: 0, ..own.clone() }])
                .unwrap()
                .contains("use the same GPU")
        );
        let far = GpuCapabilities { uuid: [9; 16], ..own.clone() };
        assert!(obstacle(&[own.clone(), far.clone()]).unwrap().contains("use the same GPU"));
        assert_eq!(obstacle(&[far]), None, "that is for NCCL");
        assert!(
            obstacle(&vec![own.clone(); MAX_MEMBERS_PER_LAUNCH]).is_some(),
            "more than a kernel reads"
        );
        assert_eq!(obstacle(&[]), None);
    }

    #[test]
    fn a_member_without_the_driver_or_the_same_nccl_is_named() {
        let (gpus, missing) =
            (gpus(fake_nccl()), Error::NotFound { library: "libnccl", tried: "x".to_owned() });
        let without = super::tests::gpus(Err(missing));
        let own = gpus.device_capabilities(0);
        let reason = |other: Vec<u8>| formed(&gpus, &[own.clone(), other], 0).unwrap_err();
        assert!(
            reason(vec![0; MAX_CAPABILITIES_BYTES])
                .ends_with("rank 7 has tensors on a device and no driver of CUDA")
        );
        assert!(reason(without.device_capabilities(1)).ends_with("rank 7 has no NCCL"));
        let own = formed(&without, &[own.clone(), without.device_capabilities(1)], 1).unwrap_err();
        assert!(own.ends_with("rank 7 has no NCCL: libnccl was not found: x"), "{own}");
        let old = GpuCapabilities {
            nccl_version: 21_800,
            ..GpuCapabilities::from_bytes(&gpus.device_capabilities(1)).unwrap()
        };
        assert!(reason(old.to_bytes()).contains("different versions of NCCL: 23007 and 21800"));
        assert_eq!(take_calls(), Vec::<String>::new());
    }

    #[test]
    fn a_first_member_that_cannot_name_one_says_why() {
        let gpus = gpus(fake_nccl());
        with_fake(|fake| fake.naming = 2);
        let reason = formed(&gpus, &[gpus.device_capabilities(0), gpus.device_capabilities(1)], 0)
            .unwrap_err();
        let words = "tensors on GPUs go through host memory: ncclGetUniqueId failed: unhandled \
                     system error";
        assert!(reason.starts_with(words), "{reason}");
    }

    #[test]
    fn a_missing_gpu_has_no_capabilities() {
        assert!(gpus(fake_nccl()).open_gpu(9, &[]).is_err());
        assert_eq!(gpus(fake_nccl()).device_capabilities(9), Vec::<u8>::new());
    }
}
