// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The registry of settings: one row for each; `cargo xtask docs` renders it.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::value::{
    AnyKnobValue, GradientConvention, HostCooldownRange, KnobError, KnobValue, LogLevel, PortRange,
};
use crate::{FARANDOLE_PREFIX, HOROVOD_PREFIX, environment_variable};

/// A row of the registry.
#[derive(Clone, Copy, Debug)]
pub struct KnobDefinition {
    /// Field of [`Config`], also the Python keyword.
    pub key: &'static str,
    /// Name without a prefix: `FARANDOLE_<name>`, and `HOROVOD_<name>`.
    pub name: &'static str,
    /// Flag of `farandole run`, when it has one.
    pub flag: Option<&'static str>,
    /// The accepted values.
    pub expected: &'static str,
    /// Default as text.
    pub default: &'static str,
    /// Whether launchers forward it to workers.
    pub propagate: bool,
    /// The documentation.
    pub doc: &'static str,
}

impl KnobDefinition {
    /// Returns the accepted values, with the limits of this knob.
    pub fn accepted_values(&self) -> &'static str {
        if self.expected == Duration::EXPECTED_FORMAT {
            duration_limits(self.key).expected
        } else {
            self.expected
        }
    }
}

macro_rules! knobs {
    ($( $(#[doc = $doc:literal])+ $key:ident: $type:ty = $default:literal, $name:literal, $flag:expr, $propagate:literal; )+) => {
        /// The chosen values.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config {
            $( $(#[doc = $doc])+ pub $key: $type, )+
            /// Keys of the knobs that were set.
            pub given: Vec<&'static str>,
        }

        /// Every knob, in the order of the reference page.
        pub const KNOBS: &[KnobDefinition] = &[
            $( KnobDefinition {
                key: stringify!($key), name: $name, flag: $flag, expected: <$type as KnobValue>::EXPECTED_FORMAT,
                default: $default, propagate: $propagate, doc: concat!($($doc,)+),
            }, )+
        ];

        impl Config {
            /// Reads one knob, by its name without a prefix; `None` if there is no such knob.
            ///
            /// # Errors
            /// A value that does not parse or is outside of the limits.
            pub fn read_knob(
                name: &str,
                lookup: impl Fn(&str) -> Option<String>,
            ) -> Result<Option<AnyKnobValue>, KnobError> {
                let none = BTreeMap::new();
                Ok(match name {
                    $( $name => Some(
                        read_knob::<$type>(stringify!($key), $name, $default, &lookup, &none)?.into_any_knob_value(),
                    ), )+
                    _ => None,
                })
            }

            /// Reads every knob: `lookup` maps a full variable name to its value, `arguments` map
            /// keys to values and win.
            ///
            /// # Errors
            /// A value that does not parse, or an argument that is no knob.
            pub fn read(
                lookup: impl Fn(&str) -> Option<String>,
                arguments: &BTreeMap<String, String>,
            ) -> Result<Self, KnobError> {
                // A misspelt argument would otherwise be ignored, and the default used.
                if let Some((key, value)) = arguments.iter().find(|(key, _)| !KNOBS.iter().any(|knob| knob.key == **key)) {
                    return Err(KnobError { name: key.clone(), expected: "a known option", value: value.clone() });
                }
                Ok(Self {
                    $( $key: read_knob::<$type>(stringify!($key), $name, $default, &lookup, arguments)?, )+
                    given: KNOBS.iter().filter(|knob| is_knob_given(knob, &lookup, arguments)).map(|knob| knob.key).collect(),
                })
            }
        }
    };
}

fn is_knob_given(
    knob: &KnobDefinition,
    lookup: &impl Fn(&str) -> Option<String>,
    arguments: &BTreeMap<String, String>,
) -> bool {
    let named = |prefix: &str| lookup(&format!("{prefix}{}", knob.name)).is_some();
    arguments.contains_key(knob.key) || named(FARANDOLE_PREFIX) || named(HOROVOD_PREFIX)
}

fn read_knob<T: KnobValue>(
    key: &str,
    name: &str,
    default: &str,
    lookup: &impl Fn(&str) -> Option<String>,
    arguments: &BTreeMap<String, String>,
) -> Result<T, KnobError> {
    let named = |variable: String| lookup(&variable).map(|value| (variable, value));
    let (source, text) = arguments
        .get(key)
        .map(|value| (key.to_owned(), value.clone()))
        // An argument is the nearest to the user, and Horovod's variable may be left from another
        // program.
        .or_else(|| named(format!("{FARANDOLE_PREFIX}{name}")))
        .or_else(|| named(format!("{HOROVOD_PREFIX}{name}")))
        .unwrap_or_else(|| (key.to_owned(), default.to_owned()));
    // Variables from files often end with a line feed.
    match T::parse_text(text.trim()) {
        None => Err(KnobError { name: source, expected: T::EXPECTED_FORMAT, value: text }),
        Some(value) => {
            let limits = duration_limits(key);
            if value.as_duration().is_none_or(|duration| limits.allows_duration(duration)) {
                return Ok(value);
            }
            Err(KnobError { name: source, expected: limits.expected, value: text })
        }
    }
}

/// Durations that a knob takes: beyond them nothing works, or time itself overflows.
struct DurationLimits {
    least: Duration,
    most: Duration,
    expected: &'static str,
}

impl DurationLimits {
    fn allows_duration(&self, duration: Duration) -> bool {
        (self.least..=self.most).contains(&duration)
    }
}

/// Returns the limits of a duration knob; the last ones are the default.
fn duration_limits(key: &str) -> DurationLimits {
    const ONE_DAY: Duration = Duration::from_secs(86_400);
    let tenth = Duration::from_millis(100);
    let (least, most, expected) = match key {
        "peer_timeout" => (
            tenth,
            ONE_DAY,
            "a duration from 100ms to 24h: seconds, or a number with ms, s, m or h",
        ),
        "start_timeout" | "spark_start_timeout" | "collective_timeout" | "discovery_timeout" => (
            tenth,
            365 * ONE_DAY,
            "a duration from 100ms to 8760h: seconds, or a number with ms, s, m or h",
        ),
        // Requests are signed once: S3 and Azure refuse a signature that is 15 minutes old.
        "store_timeout" => (
            Duration::from_secs(1),
            Duration::from_secs(600),
            "a duration from 1s to 10m: seconds, or a number with ms, s, m or h",
        ),
        "spin" => (
            Duration::ZERO,
            Duration::from_secs(1),
            "a duration from 0 to 1s: seconds, or a number with ms, s, m or h",
        ),
        _ => (
            Duration::ZERO,
            365 * ONE_DAY,
            "a duration from 0 to 8760h: seconds, or a number with ms, s, m or h",
        ),
    };
    DurationLimits { least, most, expected }
}

knobs! {
    /// Ticket of this process's job: addresses, certificate fingerprint and token. Set by
    /// launchers.
    job: String = "", "JOB", None, false;
    /// Task number of this process within its job. Set by launchers.
    task: u64 = "0", "TASK", None, false;
    /// Secret of a job that mpirun, srun, torchrun or a similar launcher started. It must be the
    /// same in all processes, and the launcher must forward it. At least 16 random characters, for
    /// example from `openssl rand -hex 32`. Never printed.
    job_secret: String = "", "JOB_SECRET", None, false;
    /// Meeting place of the ranks of such a job: `host:port` of rank 0, which needs a
    /// `FARANDOLE_JOB_SECRET`, or a directory that all ranks see, as `/path` or `file:///path`.
    rendezvous: String = "", "RENDEZVOUS", None, false;
    /// Generation of the job for which this process was started; 0 if it is unknown. Set by
    /// launchers.
    generation: u64 = "0", "GENERATION", None, false;
    /// Whether workers come and go while the job runs. If so, `init` waits until this worker has a
    /// place. Set by launchers.
    elastic: bool = "0", "ELASTIC", None, false;
    /// Time for which this process waits for a lost registrar if the job has a journal. Set by
    /// launchers.
    outage: Duration = "0", "OUTAGE", None, false;
    /// Addresses at which the registrar is reached. Default: all addresses of the driver.
    driver_host: String = "", "DRIVER_HOST", Some("--driver-host"), true;
    /// Address on which the driver and the ranks listen, or a network such as `10.0.0.0/8`, in
    /// which each host uses its own address. Several, such as `10.1.0.0/16,10.2.0.0/16`: ranks
    /// listen on all of them, links between hosts use all of them side by side, and the driver
    /// listens on the first. Default: all addresses.
    bind_address: String = "", "BIND_ADDRESS", Some("--bind-address"), true;
    /// Ports on which the driver and the ranks listen. With `0` the system chooses.
    port_range: PortRange = "0", "PORT_RANGE", Some("--port-range"), true;
    /// For hosts that open connections but accept none: links between hosts pass through the
    /// driver's port, which is slower. For the driver and the workers.
    dial_out: bool = "0", "DIAL_OUT", Some("--dial-out"), true;
    /// Time within which all tasks must register.
    start_timeout: Duration = "600", "START_TIMEOUT", Some("--start-timeout"), true;
    /// Time for which `farandole.spark` waits for all Spark tasks to start. Read by the driver, in
    /// seconds.
    spark_start_timeout: Duration = "600", "SPARK_START_TIMEOUT", None, false;
    /// Whether workers start from a fork server that has imported torch: `on`, `off` or `auto`.
    /// With `auto` they do so in notebooks, in Spark's tuners, and for `LocalBackend`. Read by the
    /// driver.
    warm_workers: String = "auto", "WARM_WORKERS", None, false;
    /// Time after which such a server ends if it has no work. Default: 120 s, and 600 s for servers
    /// that Spark's plugin starts before the first job. Read by the driver.
    warm_idle: Option<Duration> = "", "WARM_IDLE_SECONDS", None, false;
    /// Elastic training: the smallest number of processes. With fewer, the job waits for more.
    /// Setting it makes the job elastic. Default in an elastic job: the number of processes.
    min_num_proc: Option<u32> = "", "MIN_NUM_PROC", Some("--min-num-proc"), false;
    /// Elastic training: the largest number of processes. Default: all slots; with spares, the
    /// number of processes.
    max_num_proc: Option<u32> = "", "MAX_NUM_PROC", Some("--max-num-proc"), false;
    /// Elastic training: additional processes that are started, wait, and take over when a process
    /// is lost.
    spares: u64 = "0", "SPARES", Some("--spares"), false;
    /// Elastic training: a program that prints the available hosts, one `host` or `host:slots` on
    /// each line. The shell runs it every second. Setting it makes the job elastic.
    host_discovery_script: String = "", "HOST_DISCOVERY_SCRIPT", Some("--host-discovery-script"), false;
    /// Elastic training: time after which that program is killed and started again.
    discovery_timeout: Duration = "20", "DISCOVERY_TIMEOUT", Some("--discovery-timeout"), false;
    /// Elastic training: slots of a host for which that program prints no number.
    slots_per_host: Option<u32> = "", "SLOTS_PER_HOST", Some("--slots-per-host"), false;
    /// Elastic training: time after which the job fails if there are too few slots for the smallest
    /// number of processes.
    elastic_timeout: Duration = "600", "ELASTIC_TIMEOUT", Some("--elastic-timeout"), false;
    /// Elastic training: number of changes of the world after which the job fails. Default: no
    /// limit.
    reset_limit: Option<u32> = "", "RESET_LIMIT", Some("--reset-limit"), false;
    /// Elastic training: seconds for which a host gets no new process after a failure there: after
    /// the first failure, and at most. Each further failure doubles the time.
    blacklist_cooldown_range: HostCooldownRange = "5 300", "BLACKLIST_COOLDOWN_RANGE", Some("--blacklist-cooldown-range"), false;
    /// Elastic training: a file in which `farandole run` records the state of the job. If the
    /// command is killed and started again with the same file, it continues the job with the same
    /// processes. The file contains the job's secrets. Removed from the environment of the
    /// processes.
    journal: String = "", "JOURNAL", Some("--journal"), false;
    /// Elastic training: time for which the processes of a job with a journal wait for a `farandole
    /// run` that was killed. Then they end.
    registrar_timeout: Duration = "60", "REGISTRAR_TIMEOUT", Some("--registrar-timeout"), false;
    /// Requeues of a batch job of Slurm, by anything, after which `farandole run --requeue` does
    /// not requeue it.
    max_requeues: u64 = "100", "MAX_REQUEUES", Some("--max-requeues"), false;
    /// Time after which a collective fails with an error that names the missing ranks.
    collective_timeout: Duration = "1800", "COLLECTIVE_TIMEOUT", Some("--collective-timeout"), true;
    /// Time after which a silent peer counts as lost: a stopped process, a lost host, a network
    /// partition.
    peer_timeout: Duration = "5", "PEER_TIMEOUT", Some("--peer-timeout"), true;
    /// Time for which an operation on a store over the network is repeated while the service is
    /// busy, refuses connections or does not answer. It counts for each request: a read, each part
    /// of a large file, each page of a listing.
    store_timeout: Duration = "180", "STORE_TIMEOUT", None, true;
    /// Largest size of a fused operation.
    fusion_threshold: u64 = "128MiB", "FUSION_THRESHOLD", Some("--fusion-threshold"), true;
    /// Fuses the tensors of a group only with each other.
    disable_group_fusion: bool = "0", "DISABLE_GROUP_FUSION", Some("--disable-group-fusion"), true;
    /// Process sets may be added and removed while the job runs.
    dynamic_process_sets: bool = "0", "DYNAMIC_PROCESS_SETS", None, true;
    /// Number of tensors in the response cache of each process set; 0 turns the cache off.
    cache_capacity: u64 = "1024", "CACHE_CAPACITY", Some("--cache-capacity"), true;
    /// Shared memory between the ranks of a host. If it is off, all links use TCP.
    shared_memory: bool = "1", "SHARED_MEMORY", None, true;
    /// Bytes of shared memory that a host may use for links. Half of them are for the links of the
    /// world. If it is not set, a host with more than 45 ranks may use as much as the smallest
    /// rings need.
    shared_memory_bytes: u64 = "256MiB", "SHARED_MEMORY_BYTES", None, true;
    /// TCP connections of each link between two hosts, 1 to 16. Several are faster if the network
    /// limits each flow.
    tcp_streams: u64 = "1", "TCP_STREAMS", None, true;
    /// Number of ranks on other machines up to which a rank opens its links for data to all of them
    /// when a world or a process set forms: by default all. With more, it opens those to a few, and
    /// each other link when an operation first needs it. It must be the same on all ranks.
    links_at_start: u64 = "65536", "LINKS_AT_START", None, true;
    /// TCP's congestion control between hosts, if the system has and allows it. An empty value uses
    /// the system's default, which may be faster on a network that loses packets.
    tcp_congestion: String = "cubic", "TCP_CONGESTION", None, true;
    /// Algorithm of allreduces: `auto`, `direct`, `doubling`, `pipeline`, `hierarchy` or
    /// `halving`, or several with the largest number of bytes for each, such as
    /// `direct:4096,doubling:65536,hierarchy`. `2x4=doubling:32768,hierarchy;pipeline` has rules
    /// for worlds of two hosts with four ranks, and others for all other worlds. `@FILE` reads them
    /// from a file, which `farandole bench allreduce --write FILE` makes. It must be the same on
    /// all ranks.
    allreduce_algorithm: String = "auto", "ALLREDUCE_ALGORITHM", None, true;
    /// Time for which a waiting thread spins before it sleeps.
    spin: Duration = "1ms", "SPIN", None, true;
    /// Turns the stall check off.
    stall_check_disable: bool = "0", "STALL_CHECK_DISABLE", Some("--no-stall-check"), true;
    /// Time after which a tensor that waits for other ranks is reported; 0 means never.
    stall_check_time: Duration = "60", "STALL_CHECK_TIME_SECONDS", Some("--stall-check-warning-time-seconds"), true;
    /// Time after which a tensor that waits for other ranks ends the job; 0 means never.
    stall_shutdown_time: Duration = "0", "STALL_SHUTDOWN_TIME_SECONDS", Some("--stall-check-shutdown-time-seconds"), true;
    /// If every rank has waited this long in a barrier, a join or a change of process sets that
    /// some ranks did not call, the job ends with an error that lists where each rank waits.
    /// Checked with every stall report; 0 means never.
    meeting_timeout: Duration = "300", "MEETING_TIMEOUT", Some("--meeting-timeout"), true;
    /// File for the timeline of operations; `{rank}` in it stands for the rank, and then every rank
    /// writes one. `DYNAMIC` or nothing: none until `start_timeline`. `GATHER`: a file for each
    /// rank, which its agent sends to the driver; `--timeline` and `timeline=` set it.
    timeline: String = "", "TIMELINE", Some("--timeline-filename"), true;
    /// Bytes that the timelines of all ranks may take together where each rank writes one, an equal
    /// share for each: the oldest records are dropped. 0 means no limit.
    timeline_limit: u64 = "256MiB", "TIMELINE_LIMIT", Some("--timeline-limit"), true;
    /// Marks every negotiation round in the timeline.
    timeline_mark_cycles: bool = "0", "TIMELINE_MARK_CYCLES", Some("--timeline-mark-cycles"), true;
    /// Tunes the fusion threshold in the first steps, unless it is set.
    autotune: bool = "0", "AUTOTUNE", Some("--autotune"), true;
    /// CSV file for the samples of autotune, written by rank 0.
    autotune_log: String = "", "AUTOTUNE_LOG", Some("--autotune-log-file"), true;
    /// Number of first samples of autotune that are ignored.
    autotune_warmup_samples: u64 = "3", "AUTOTUNE_WARMUP_SAMPLES", Some("--autotune-warmup-samples"), true;
    /// Number of steps in a score of autotune. A sample is the median of five scores.
    autotune_steps_per_sample: u64 = "10", "AUTOTUNE_STEPS_PER_SAMPLE", Some("--autotune-steps-per-sample"), true;
    /// Number of samples after which autotune stops and keeps the best threshold.
    autotune_samples: u64 = "20", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES", Some("--autotune-bayes-opt-max-samples"), true;
    /// Accepted and not used: the search has no Gaussian process.
    autotune_noise: String = "0.8", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE", Some("--autotune-gaussian-process-noise"), true;
    /// Way in which tensors of torch on GPUs are reduced. `auto`: by NCCL if every rank has its own
    /// GPU, by CUDA IPC if all ranks share one GPU, otherwise in host memory. `staged`: always in
    /// host memory. `copied`: in host memory, and torch makes the copies.
    gpu_tensors: String = "auto", "GPU_TENSORS", None, true;
    /// With `gradient_as_bucket_view`, NCCL allocates (`ncclMemAlloc`) and registers the memory of
    /// gradients on GPUs, which saves copies if the links between the GPUs allow it. It must be the
    /// same on all ranks.
    nccl_memory: bool = "0", "NCCL_MEMORY", None, true;
    /// Groups of torch.distributed with the backend `gloo` run on the engine of Farandole. torch
    /// calls Farandole at `import torch`, unless `TORCH_DEVICE_BACKEND_AUTOLOAD` is 0. It must be
    /// the same on all ranks.
    as_gloo: bool = "0", "AS_GLOO", Some("--as-gloo"), true;
    /// Folders with CUDA's libraries, separated by colons. They are searched before the wheels of
    /// torch and the system.
    cuda_libraries: String = "", "CUDA_LIBRARIES", None, true;
    /// TensorFlow: XLA calls the collectives inside functions that it compiles for the CPU. If this
    /// is off, or XLA cannot call them, such functions are split around their collectives.
    enable_xla_ops: bool = "1", "ENABLE_XLA_OPS", None, true;
    /// The gradients of collectives in torch and TensorFlow. `farandole`: the gradients of the sum
    /// of all ranks' losses. `horovod`: the gradients of Horovod 0.28. For n ranks these are 1/n of
    /// the former for `allgather` and `broadcast`, n times the former for `reducescatter`, and the
    /// gradients reduced by the same op for an allreduce by `Min`, `Max`, `Product` or `Adasum`.
    /// `import horovod` sets `horovod` if nothing is set. It must be the same on all ranks.
    gradient_convention: GradientConvention = "farandole", "GRADIENT_CONVENTION", None, true;
    /// Turns off the ranges for NVIDIA's profilers, which are on if their library is found.
    disable_nvtx_ranges: bool = "0", "DISABLE_NVTX_RANGES", None, true;
    /// Lowest level of the engine's events that are logged, in upper or lower case: in workers
    /// through Python's `logging`, in the command on stderr. If it is set, it is also the level of
    /// the Python logger `farandole`, unless the script sets one.
    log_level: LogLevel = "warning", "LOG_LEVEL", Some("--log-level"), true;
    /// Omits the time at the beginning of lines that the engine writes to stderr.
    log_hide_time: bool = "0", "LOG_HIDE_TIME", None, true;
    /// Address on which the driver of a job serves its metrics to Prometheus, under `/metrics`: a
    /// port of the loopback, or `host:port`. Port 0 means any free port; the address is printed.
    metrics: String = "", "METRICS", Some("--metrics"), false;
    /// Whether files of a store may be unpickled, which runs their code. Not set: refused when a
    /// run continues, allowed with a warning in `load(path)`. The option `allow_pickle` has
    /// priority.
    allow_pickle: Option<bool> = "", "ALLOW_PICKLE", None, false;
    /// Secret with which the driver signs the checkpoints of its runs. With it, a run continues
    /// only from checkpoints that a holder of the secret wrote. Never printed, and not forwarded:
    /// workers get a key for their run from the driver.
    store_secret: String = "", "STORE_SECRET", None, false;
    /// Bytes that the rows of a saved estimator or model may take in memory, if that is more than
    /// the limit that the size of its files gives.
    saved_bytes: u64 = "0", "SAVED_BYTES", None, false;
    /// Directory that stands for `/dbfs` outside of Databricks.
    dbfs_root: String = "", "DBFS_ROOT", None, false;
    /// Chooses the GPU of a worker by its local rank even if Spark has assigned one.
    spark_use_local_rank_gpu_index: bool = "0", "SPARK_USE_LOCAL_RANK_GPU_INDEX", None, false;
    /// Consent to tf.data's service on a network: it has no authentication, and its workers run the
    /// functions that they receive.
    tf_data_open_to_the_network: bool = "0", "TF_DATA_OPEN_TO_THE_NETWORK", None, false;
}

impl Config {
    /// This process's configuration.
    ///
    /// # Errors
    /// Like [`Config::read`].
    pub fn from_env() -> Result<Self, KnobError> {
        Self::read(environment_variable, &BTreeMap::new())
    }

    /// Returns `FARANDOLE_STORE_TIMEOUT` of this process without reading the other knobs.
    ///
    /// # Errors
    /// A value that does not parse or is outside of the limits.
    pub fn store_timeout_from_env() -> Result<Duration, KnobError> {
        let (key, name) = ("store_timeout", "STORE_TIMEOUT");
        // A wrong value of another knob must not make a store fail.
        let default = KNOBS.iter().find(|knob| knob.key == key).map_or("", |knob| knob.default);
        read_knob(key, name, default, &environment_variable, &BTreeMap::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Config, KnobError> {
        let map: BTreeMap<String, String> =
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Config::read(|name| map.get(name).cloned(), &BTreeMap::new())
    }

    #[test]
    fn every_default_parses() {
        assert_eq!(read(&[]).unwrap().fusion_threshold, 128 << 20);
    }

    #[test]
    fn our_name_wins_over_horovods() {
        let both = read(&[("FARANDOLE_CACHE_CAPACITY", "1"), ("HOROVOD_CACHE_CAPACITY", "2")]);
        assert_eq!(both.unwrap().cache_capacity, 1);
        let one = read(&[("HOROVOD_CACHE_CAPACITY", "2")]).unwrap();
        assert_eq!((one.cache_capacity, &*one.given), (2, &["cache_capacity"][..]));
    }

    #[test]
    fn a_bad_value_names_the_variable() {
        let error = read(&[("HOROVOD_CACHE_CAPACITY", "many")]).unwrap_err();
        assert!(
            error.to_string().starts_with("HOROVOD_CACHE_CAPACITY must be a whole number"),
            "{error}"
        );
    }

    #[test]
    fn a_duration_that_cannot_work_is_refused_by_name_and_range() {
        for (name, value, range) in [
            ("FARANDOLE_PEER_TIMEOUT", "0", "from 100ms to 24h"),
            ("HOROVOD_PEER_TIMEOUT", "soon", "a number with ms, s, m or h"),
            ("FARANDOLE_PEER_TIMEOUT", "1000000000h", "from 100ms to 24h"),
            ("FARANDOLE_COLLECTIVE_TIMEOUT", "0", "from 100ms to 8760h"),
            ("FARANDOLE_START_TIMEOUT", "99999999999", "from 100ms to 8760h"),
            ("FARANDOLE_STALL_CHECK_TIME_SECONDS", "9999999h", "from 0 to 8760h"),
            ("FARANDOLE_SPIN", "2", "from 0 to 1s"),
        ] {
            let error = read(&[(name, value)]).unwrap_err().to_string();
            assert!(
                error.starts_with(name) && error.contains(range) && error.ends_with(value),
                "{error}"
            );
        }
        assert_eq!(
            read(&[("FARANDOLE_PEER_TIMEOUT", "200ms")]).unwrap().peer_timeout.as_millis(),
            200
        );
        assert!(read(&[("FARANDOLE_STALL_SHUTDOWN_TIME_SECONDS", "0")]).is_ok());
    }

    #[test]
    fn the_convention_of_gradients_is_one_of_two_words() {
        assert_eq!(read(&[]).unwrap().gradient_convention, GradientConvention::Farandole);
        let horovods = read(&[("FARANDOLE_GRADIENT_CONVENTION", "Horovod")]).unwrap();
        assert_eq!(horovods.gradient_convention, GradientConvention::Horovod);
        let error = read(&[("HOROVOD_GRADIENT_CONVENTION", "theirs")]).unwrap_err().to_string();
        assert_eq!(error, "HOROVOD_GRADIENT_CONVENTION must be farandole or horovod: theirs");
    }

    #[test]
    fn an_unknown_log_level_is_refused_with_the_known_ones() {
        assert_eq!(read(&[]).unwrap().log_level, LogLevel::Warning);
        assert_eq!(read(&[("HOROVOD_LOG_LEVEL", "DEBUG")]).unwrap().log_level, LogLevel::Debug);
        let error = read(&[("FARANDOLE_LOG_LEVEL", "verbose")]).unwrap_err().to_string();
        assert_eq!(
            error,
            "FARANDOLE_LOG_LEVEL must be trace, debug, info, warning, error or fatal: verbose"
        );
    }

    #[test]
    fn an_unknown_argument_is_refused() {
        let arguments = BTreeMap::from([("cache_capcity".to_owned(), "1".to_owned())]);
        assert_eq!(Config::read(|_| None, &arguments).unwrap_err().name, "cache_capcity");
    }
}
