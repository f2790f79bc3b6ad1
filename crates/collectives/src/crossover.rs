// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Chooses the algorithm of an allreduce by its bytes, by its members' hosts and, where it matters,
//! by the latency between hosts, and whether a reduce-scatter joins inputs on each host first.
//! Results do not depend on the choice.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Algorithm of an allreduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AllreduceAlgorithm {
    /// Every member sends everything to every other member: one step.
    Direct,
    /// The first member of each host collects its host's inputs. These members swap partial sums,
    /// over twice as many hosts at each step, and then distribute the result on their hosts.
    Doubling,
    /// Every member owns one part, receives all inputs of this part, and sends the result to all
    /// others: two steps in chunks.
    Pipeline,
    /// In the host, across hosts and back: four steps in chunks. Across hosts each element is sent
    /// once to its owner and once back, for any number of members on a host.
    Hierarchy,
    /// Like `Hierarchy`, but hosts swap halves with hosts at doubling distances: the same bytes in
    /// more steps, and each host has links to few other hosts.
    Halving,
}

impl AllreduceAlgorithm {
    const ALGORITHM_NAMES: [(Self, &str); 5] = [
        (Self::Direct, "direct"),
        (Self::Doubling, "doubling"),
        (Self::Pipeline, "pipeline"),
        (Self::Hierarchy, "hierarchy"),
        (Self::Halving, "halving"),
    ];

    fn name(self) -> &'static str {
        Self::ALGORITHM_NAMES
            .iter()
            .find(|(algorithm, _)| *algorithm == self)
            .map_or("", |(_, name)| name)
    }
}

impl fmt::Display for AllreduceAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Number of members and their distribution over hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupHostLayout {
    pub(crate) members: usize,
    pub(crate) hosts: usize,
    /// Members on the fullest host.
    pub(crate) largest_host_size: usize,
}

/// One row of the table: the fastest algorithm for worlds with at most `members` members on at most
/// `hosts` hosts. `Direct` is used up to `direct` bytes, then `Doubling` up to `doubling` bytes.
/// Larger tensors use `Pipeline`, or `Hierarchy` or `Halving` if members share a host.
struct CrossoverRow {
    members: usize,
    hosts: usize,
    direct: usize,
    doubling: usize,
}

/// Rows in order; the first that fits is used. Sources of the numbers: for one host,
/// `farandole bench allreduce` over shared memory on 2 cores, 2 to 8 ranks. For several hosts,
/// medians of `examples/crossover.rs` on 2 cores that also had other work, with hosts of 1+1, 2+1,
/// 2+2 and 1+1+1+1 ranks. Doubling was the fastest up to 32 KiB in all worlds, and up to 64 KiB
/// except with 1+1 and 1+1+1+1 ranks, where pipeline was the fastest above 32 KiB. Hierarchy was
/// the fastest for larger tensors when ranks share a host. Direct was never the fastest.
const CROSSOVER_ROWS: [CrossoverRow; 6] = [
    CrossoverRow { members: 2, hosts: 1, direct: 32 << 10, doubling: 0 },
    CrossoverRow { members: 4, hosts: 1, direct: 16 << 10, doubling: 0 },
    CrossoverRow { members: 8, hosts: 1, direct: 8 << 10, doubling: 0 },
    CrossoverRow { members: usize::MAX, hosts: 1, direct: 0, doubling: 0 },
    CrossoverRow { members: 2, hosts: 2, direct: 0, doubling: 32 << 10 },
    CrossoverRow { members: usize::MAX, hosts: usize::MAX, direct: 0, doubling: 64 << 10 },
];

/// Fewest hosts for halving, if ranks share a host. Up to 4 hosts, hierarchy is at most as slow.
const MIN_HALVING_HOSTS: usize = 8;
/// Fewest hosts for halving of large tensors. With fewer, hierarchy takes 0.88 to 1.03 times as
/// long from `MAX_HALVING_BYTES_ON_FEW_HOSTS` on.
const MIN_HOSTS_FOR_LARGE_HALVING: usize = 16;
const MAX_HALVING_BYTES_ON_FEW_HOSTS: usize = 512 << 10;
/// Bytes from which on many chunks hide the latency of halving, which then takes 0.9 to 1.02 times
/// as long as hierarchy with many hosts.
const MIN_ALWAYS_HALVED_BYTES: usize = 16 << 20;
/// Processor time of a message at its sender, and again at its receiver, as in the simulator.
const MESSAGE_SECONDS: f64 = 2e-6;
/// Latency between hosts where none was measured, as in the simulator.
const ASSUMED_LATENCY: Duration = Duration::from_micros(20);
/// Shortest and longest chunks of a hierarchy, about, and the number of chunks of a carrier.
const SHORT_CHUNK_BYTES: usize = 16 << 10;
const LONG_CHUNK_BYTES: usize = 244 << 10;
const CHUNKS_PER_CARRIER: usize = 4;

/// Choice of algorithms: the built-in table, or rules that replace it. All members compare their
/// rules when they greet each other. If the table needs the latency between hosts, members measure
/// it before the first such operation, and agree on it.
///
/// The text form is `auto`, or rules such as `direct:4096,doubling:65536,hierarchy`. The first rule
/// with enough bytes for the operation is used. Rules for worlds of one shape begin with the shape:
/// `2x4=doubling:32768,hierarchy` is for two hosts, the fullest with four members. A text can have
/// several such lists, and one list without a shape for all other worlds. Lists are separated by
/// `;` or by line ends. A line that begins with `#` is a comment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CrossoverTable {
    /// Rules by number of hosts and number of members on the fullest host.
    // Sorted: members compare digests of the text, and it must not depend on the order of the
    // lists.
    shapes: BTreeMap<(usize, usize), AlgorithmRules>,
    rules: AlgorithmRules,
}

/// Algorithms, each with its largest number of bytes.
type AlgorithmRules = Vec<(usize, AllreduceAlgorithm)>;

impl CrossoverTable {
    pub(crate) fn choose_algorithm(
        &self,
        shape: GroupHostLayout,
        bytes: usize,
        capacity: usize,
        latency: Option<Duration>,
    ) -> AllreduceAlgorithm {
        let rules = self.shapes.get(&(shape.hosts, shape.largest_host_size)).unwrap_or(&self.rules);
        let chosen = match rules.iter().find(|(most, _)| bytes <= *most) {
            Some((_, algorithm)) => *algorithm,
            None => default_algorithm(shape, bytes, capacity, latency.unwrap_or(ASSUMED_LATENCY)),
        };
        // With one host, there is no other host to reduce across.
        let is_across =
            matches!(chosen, AllreduceAlgorithm::Hierarchy | AllreduceAlgorithm::Halving);
        if is_across && shape.hosts == 1 { AllreduceAlgorithm::Pipeline } else { chosen }
    }

    /// Returns whether the latency between hosts decides.
    pub(crate) fn depends_on_latency(
        &self,
        shape: GroupHostLayout,
        bytes: usize,
        capacity: usize,
    ) -> bool {
        let chosen = |latency| self.choose_algorithm(shape, bytes, capacity, Some(latency));
        chosen(Duration::ZERO) != chosen(Duration::MAX)
    }
}

fn default_algorithm(
    shape: GroupHostLayout,
    bytes: usize,
    capacity: usize,
    latency: Duration,
) -> AllreduceAlgorithm {
    let row =
        CROSSOVER_ROWS.iter().find(|row| shape.members <= row.members && shape.hosts <= row.hosts);
    let (direct, doubling) = row.map_or((0, 0), |row| (row.direct, row.doubling));
    // Beyond the capacity of a ring, a member would wait for readers in the middle of the step.
    if bytes <= direct.min(capacity) {
        AllreduceAlgorithm::Direct
    } else if bytes <= doubling.min(capacity) {
        AllreduceAlgorithm::Doubling
    } else if shape.hosts > 1 && shape.largest_host_size > 1 {
        if is_halving_faster(shape, bytes, latency) {
            AllreduceAlgorithm::Halving
        } else {
            AllreduceAlgorithm::Hierarchy
        }
    } else {
        AllreduceAlgorithm::Pipeline
    }
}

/// Returns whether halving is faster than hierarchy, if ranks share a host.
///
/// Halving takes more latencies. For each chunk of a carrier it saves messages, because it
/// exchanges them with few other hosts. The limits come from the simulator with 4 to 64 hosts of 4
/// and 8 ranks, 5 to 500 us, 25 and 100 Gbit/s, and 128 KiB to 16 MiB; its test of a grid holds
/// them.
fn is_halving_faster(shape: GroupHostLayout, bytes: usize, latency: Duration) -> bool {
    let many = shape.hosts >= MIN_HOSTS_FOR_LARGE_HALVING;
    if shape.hosts < MIN_HALVING_HOSTS || (!many && bytes > MAX_HALVING_BYTES_ON_FEW_HOSTS) {
        return false;
    }
    if bytes >= MIN_ALWAYS_HALVED_BYTES {
        return true;
    }
    // Hosts beyond a power of two are paired, which takes a step before and one after the others.
    let steps = shape.hosts.ilog2() as usize + if shape.hosts.is_power_of_two() { 0 } else { 2 };
    let share = bytes / shape.largest_host_size.max(1);
    let chunk = (share / CHUNKS_PER_CARRIER).clamp(SHORT_CHUNK_BYTES, LONG_CHUNK_BYTES);
    // Of each chunk, partials and results are sent and received.
    let saved_messages = 4 * (shape.hosts - 1).saturating_sub(steps) * share.div_ceil(chunk);
    let added_latencies = 2 * (steps - 1);
    latency.as_secs_f64() * added_latencies as f64 <= MESSAGE_SECONDS * saved_messages as f64
}

impl FromStr for CrossoverTable {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
        let lists: Vec<&str> = lines
            .flat_map(|line| line.split(';'))
            .map(str::trim)
            .filter(|list| !list.is_empty())
            .collect();
        if lists.is_empty() {
            return Err("no rule of algorithms: nothing".to_owned());
        }
        let (mut found, mut has_rules) = (Self::default(), false);
        for list in lists {
            let twice = match list.split_once('=') {
                Some((shape, list)) => found
                    .shapes
                    .insert(parse_host_layout(shape)?, parse_algorithm_rules(list)?)
                    .is_some(),
                None => {
                    found.rules = parse_algorithm_rules(list)?;
                    std::mem::replace(&mut has_rules, true)
                }
            };
            if twice {
                return Err(format!("two lists of rules for the same worlds: {list}"));
            }
        }
        Ok(found)
    }
}

/// Parses a shape such as `2x4`: the number of hosts, and the number of members on the fullest one.
fn parse_host_layout(text: &str) -> Result<(usize, usize), String> {
    let number = |text: &str| text.trim().parse().ok().filter(|number| *number > 0);
    let shape = text
        .split_once('x')
        .and_then(|(hosts, together)| Some((number(hosts)?, number(together)?)));
    shape.ok_or_else(|| format!("no shape of a world, such as 2x4: {text}"))
}

fn parse_algorithm_rules(text: &str) -> Result<AlgorithmRules, String> {
    if text.trim() == "auto" {
        return Ok(AlgorithmRules::new());
    }
    let rule = |rule: &str| {
        let (name, most) =
            rule.split_once(':').map_or((rule, None), |(name, most)| (name, Some(most)));
        let algorithm =
            AllreduceAlgorithm::ALGORITHM_NAMES.iter().find(|(_, known)| *known == name.trim());
        let most = most.map_or(Ok(usize::MAX), |most| most.trim().parse());
        match (algorithm, most) {
            (Some((algorithm, _)), Ok(most)) => Ok((most, *algorithm)),
            _ => Err(format!("no rule of algorithms: {rule}")),
        }
    };
    text.split(',').map(rule).collect()
}

impl fmt::Display for CrossoverTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ((hosts, together), rules) in &self.shapes {
            write!(f, "{hosts}x{together}={};", AlgorithmRulesText(rules))?;
        }
        AlgorithmRulesText(&self.rules).fmt(f)
    }
}

/// Rules as text.
struct AlgorithmRulesText<'a>(&'a AlgorithmRules);

impl fmt::Display for AlgorithmRulesText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("auto");
        }
        for (k, (most, algorithm)) in self.0.iter().enumerate() {
            let comma = if k == 0 { "" } else { "," };
            match most {
                &usize::MAX => write!(f, "{comma}{}", algorithm.name())?,
                most => write!(f, "{comma}{}:{most}", algorithm.name())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(hosts: usize, together: usize) -> GroupHostLayout {
        GroupHostLayout { members: hosts * together, hosts, largest_host_size: together }
    }

    #[test]
    fn text_is_read_back() {
        for text in
            ["auto", "pipeline", "direct:4096,doubling:65536,hierarchy", "doubling:65536,halving"]
        {
            assert_eq!(text.parse::<CrossoverTable>().unwrap().to_string(), text);
        }
        assert_eq!("ring".parse::<CrossoverTable>().unwrap_err(), "no rule of algorithms: ring");
        assert_eq!(
            "direct:x".parse::<CrossoverTable>().unwrap_err(),
            "no rule of algorithms: direct:x"
        );
    }

    #[test]
    fn lists_for_shapes_are_read_back_in_one_order() {
        let file = "# measured\n 2x4 = doubling:32768, hierarchy\n\n1x8=auto\ndirect:4096\n";
        let (read, text) = (
            file.parse::<CrossoverTable>().unwrap(),
            "1x8=auto;2x4=doubling:32768,hierarchy;direct:4096",
        );
        assert_eq!(read.to_string(), text);
        assert_eq!(text.parse::<CrossoverTable>().unwrap(), read);
        assert_eq!(
            "2x4=pipeline".parse::<CrossoverTable>().unwrap().to_string(),
            "2x4=pipeline;auto"
        );
        for wrong in
            ["", "# none", "2=pipeline", "0x4=pipeline", "ax4=pipeline", "2x4=", "2x4=ring"]
        {
            assert!(wrong.parse::<CrossoverTable>().is_err(), "{wrong}");
        }
        let twice = "two lists of rules for the same worlds: direct";
        assert_eq!(
            "2x4=direct;2x4=direct".parse::<CrossoverTable>().unwrap_err(),
            "two lists of rules for the same worlds: 2x4=direct"
        );
        assert_eq!("auto;direct".parse::<CrossoverTable>().unwrap_err(), twice);
    }

    #[test]
    fn a_world_takes_the_list_of_its_shape() {
        let table: CrossoverTable = "2x4=pipeline:100;1x4=auto;doubling".parse().unwrap();
        let chosen = |hosts, together, bytes| {
            table.choose_algorithm(shape(hosts, together), bytes, 1 << 20, None)
        };
        assert_eq!(
            (chosen(2, 4, 100), chosen(2, 4, 101)),
            (AllreduceAlgorithm::Pipeline, AllreduceAlgorithm::Doubling)
        );
        assert_eq!(
            (chosen(1, 4, 4), chosen(1, 4, 1 << 20)),
            (AllreduceAlgorithm::Direct, AllreduceAlgorithm::Pipeline)
        );
        assert_eq!(
            (chosen(2, 8, 1 << 20), chosen(4, 2, 4)),
            (AllreduceAlgorithm::Doubling, AllreduceAlgorithm::Doubling)
        );
    }

    #[test]
    fn rules_come_before_the_table_and_the_table_where_they_end() {
        let rules: CrossoverTable = "doubling:100".parse().unwrap();
        assert_eq!(
            rules.choose_algorithm(shape(2, 2), 100, 1 << 20, None),
            AllreduceAlgorithm::Doubling
        );
        assert_eq!(
            rules.choose_algorithm(shape(2, 2), 101, 1 << 20, None),
            AllreduceAlgorithm::Doubling
        );
        assert_eq!(
            rules.choose_algorithm(shape(1, 2), 101, 1 << 20, None),
            AllreduceAlgorithm::Direct
        );
        let everywhere: CrossoverTable = "hierarchy".parse().unwrap();
        assert_eq!(
            everywhere.choose_algorithm(shape(1, 4), 5, 1 << 20, None),
            AllreduceAlgorithm::Pipeline
        );
    }

    #[test]
    fn small_goes_in_few_steps_and_large_by_hosts() {
        let auto = CrossoverTable::default();
        let chosen = |hosts, together, bytes| {
            auto.choose_algorithm(shape(hosts, together), bytes, 1 << 20, None)
        };
        assert_eq!(chosen(1, 2, 32 << 10), AllreduceAlgorithm::Direct);
        assert_eq!(chosen(1, 2, (32 << 10) + 1), AllreduceAlgorithm::Pipeline);
        assert_eq!(chosen(1, 16, 4), AllreduceAlgorithm::Pipeline);
        assert_eq!(
            (chosen(2, 1, 4), chosen(16, 1, 4)),
            (AllreduceAlgorithm::Doubling, AllreduceAlgorithm::Doubling)
        );
        assert_eq!(chosen(4, 1, 1 << 20), AllreduceAlgorithm::Pipeline);
        assert_eq!(chosen(2, 4, 1 << 20), AllreduceAlgorithm::Hierarchy);
        assert_eq!(
            (chosen(15, 4, 4 << 20), chosen(16, 4, 4 << 20)),
            (AllreduceAlgorithm::Hierarchy, AllreduceAlgorithm::Halving)
        );
        assert_eq!(
            (chosen(1, 4, 1 << 20), chosen(64, 1, 1 << 20)),
            (AllreduceAlgorithm::Pipeline, AllreduceAlgorithm::Pipeline)
        );
        let everywhere: CrossoverTable = "halving".parse().unwrap();
        assert_eq!(
            everywhere.choose_algorithm(shape(1, 4), 5, 1 << 20, None),
            AllreduceAlgorithm::Pipeline
        );
    }

    #[test]
    fn a_long_latency_keeps_tensors_of_middle_size_from_halving() {
        let auto = CrossoverTable::default();
        let chosen = |hosts, bytes, microseconds| {
            let latency = Some(Duration::from_micros(microseconds));
            auto.choose_algorithm(shape(hosts, 4), bytes, 1 << 20, latency)
        };
        assert_eq!(chosen(16, 1 << 20, 20), AllreduceAlgorithm::Halving);
        assert_eq!(chosen(16, 1 << 20, 200), AllreduceAlgorithm::Hierarchy);
        assert_eq!(chosen(16, 4 << 20, 200), AllreduceAlgorithm::Hierarchy);
        assert_eq!(chosen(16, 64 << 20, 200), AllreduceAlgorithm::Halving);
        assert_eq!(chosen(8, 256 << 10, 20), AllreduceAlgorithm::Halving);
        assert_eq!(chosen(8, 1 << 20, 20), AllreduceAlgorithm::Hierarchy);
        let depends = |hosts, together, bytes| {
            auto.depends_on_latency(shape(hosts, together), bytes, 1 << 20)
        };
        assert!(depends(16, 4, 1 << 20) && depends(8, 2, 256 << 10));
        assert!(!depends(7, 4, 1 << 20), "too few hosts");
        assert!(!depends(16, 4, 1 << 10) && !depends(16, 4, 64 << 20), "small and large ones");
        assert!(!depends(16, 1, 1 << 20), "a rank on each host");
        let fixed: CrossoverTable = "halving".parse().unwrap();
        assert!(!fixed.depends_on_latency(shape(16, 4), 1 << 20, 1 << 20));
    }
}
