// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Chooses the algorithm of an allreduce by its bytes and by its members' hosts, and whether a
//! reduce-scatter goes by hosts. Results do not depend on it.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// A way to do an allreduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Every member sends everything to every other member: one step.
    Direct,
    /// One member of each host collects, these swap partial sums with twice as many at each step,
    /// and hand out.
    Doubling,
    /// Everybody owns a part that all others send it, and sends them the result: two steps in
    /// chunks.
    Pipeline,
    /// In the host, across hosts and back: four steps in chunks. Across hosts each element travels
    /// once to its owner and once back, whatever the number of members on a host.
    Hierarchy,
    /// As a hierarchy, but hosts swap halves with hosts at doubling distances: the same bytes in
    /// more steps, with few other hosts.
    Halving,
}

impl Algorithm {
    const NAMES: [(Self, &str); 5] = [
        (Self::Direct, "direct"),
        (Self::Doubling, "doubling"),
        (Self::Pipeline, "pipeline"),
        (Self::Hierarchy, "hierarchy"),
        (Self::Halving, "halving"),
    ];

    fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(algorithm, _)| *algorithm == self).map_or("", |(_, name)| name)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The hosts of the members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) members: usize,
    pub(crate) hosts: usize,
    /// Members on the fullest host.
    pub(crate) together: usize,
}

/// A row of the table: up to how many bytes which algorithm is the fastest for worlds of up to so
/// many members, on up to so many hosts. Larger tensors are pipelined, by hosts if members share
/// one.
struct Row {
    members: usize,
    hosts: usize,
    direct: usize,
    doubling: usize,
}

/// The first row that fits counts. One host: measured with `farandole bench allreduce` over shared
/// memory on 2 cores, 2 to 8 ranks. Several: medians of `examples/crossover.rs` on 2 cores that had
/// other work too, hosts of 1+1, 2+1, 2+2 and 1+1+1+1 ranks: doubling was the fastest up to 32 KiB
/// everywhere and up to 64 KiB but on 1+1 and 1+1+1+1, where pipeline was from there on; hierarchy
/// wherever ranks share a host. Direct never was.
const TABLE: [Row; 6] = [
    Row { members: 2, hosts: 1, direct: 32 << 10, doubling: 0 },
    Row { members: 4, hosts: 1, direct: 16 << 10, doubling: 0 },
    Row { members: 8, hosts: 1, direct: 8 << 10, doubling: 0 },
    Row { members: usize::MAX, hosts: 1, direct: 0, doubling: 0 },
    Row { members: 2, hosts: 2, direct: 0, doubling: 32 << 10 },
    Row { members: usize::MAX, hosts: usize::MAX, direct: 0, doubling: 64 << 10 },
];

/// Hosts from which on ranks that share a host swap halves. `examples/across.rs` of the simulator,
/// at 25 and 100 Gbit/s and 20 us: with 16 to 64 hosts of 4 or 8 ranks halving takes 0.44 to 1.03
/// times as long as hierarchy from 256 KiB on, and connects each rank with `log2 H` others and not
/// with `H - 1`. With fewer hosts neither is always the faster one. At 200 us halving takes longer
/// up to some MiB. Pipeline is the fastest with one rank on each host.
const MANY: usize = 16;

/// The choice of algorithms: the table that comes with the crate, or rules in its place. Nothing is
/// measured while a job runs, and all members compare their choice when they greet each other.
///
/// As text: `auto`, or rules like `direct:4096,doubling:65536,hierarchy`, of which the first counts
/// whose bytes are not exceeded. Rules for worlds of one shape begin with the shape:
/// `2x4=doubling:32768,hierarchy` is for two hosts of which the fullest has four members. Such
/// lists, and one without a shape for all other worlds, are separated by `;` or by the ends of
/// lines. A line that begins with `#` is a remark.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Crossover {
    /// By hosts, and members on the fullest host.
    shapes: BTreeMap<(usize, usize), Rules>,
    rules: Rules,
}

/// Algorithms, each with the largest number of bytes.
type Rules = Vec<(usize, Algorithm)>;

impl Crossover {
    pub(crate) fn choose(&self, shape: Shape, bytes: usize, capacity: usize) -> Algorithm {
        let rules = self.shapes.get(&(shape.hosts, shape.together)).unwrap_or(&self.rules);
        let chosen = match rules.iter().find(|(most, _)| bytes <= *most) {
            Some((_, algorithm)) => *algorithm,
            None => shipped(shape, bytes, capacity),
        };
        // There is nothing across.
        let is_across = matches!(chosen, Algorithm::Hierarchy | Algorithm::Halving);
        if is_across && shape.hosts == 1 { Algorithm::Pipeline } else { chosen }
    }
}

fn shipped(shape: Shape, bytes: usize, capacity: usize) -> Algorithm {
    let row = TABLE.iter().find(|row| shape.members <= row.members && shape.hosts <= row.hosts);
    let (direct, doubling) = row.map_or((0, 0), |row| (row.direct, row.doubling));
    if bytes <= direct.min(capacity) {
        Algorithm::Direct
    } else if bytes <= doubling.min(capacity) {
        Algorithm::Doubling
    } else if shape.hosts > 1 && shape.together > 1 {
        if shape.hosts < MANY { Algorithm::Hierarchy } else { Algorithm::Halving }
    } else {
        Algorithm::Pipeline
    }
}

impl FromStr for Crossover {
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
                Some((shape, list)) => {
                    found.shapes.insert(shape_of(shape)?, rules(list)?).is_some()
                }
                None => {
                    found.rules = rules(list)?;
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

/// `2x4`: hosts, and members on the fullest one.
fn shape_of(text: &str) -> Result<(usize, usize), String> {
    let number = |text: &str| text.trim().parse().ok().filter(|number| *number > 0);
    let shape = text
        .split_once('x')
        .and_then(|(hosts, together)| Some((number(hosts)?, number(together)?)));
    shape.ok_or_else(|| format!("no shape of a world, such as 2x4: {text}"))
}

fn rules(text: &str) -> Result<Rules, String> {
    if text.trim() == "auto" {
        return Ok(Rules::new());
    }
    let rule = |rule: &str| {
        let (name, most) =
            rule.split_once(':').map_or((rule, None), |(name, most)| (name, Some(most)));
        let algorithm = Algorithm::NAMES.iter().find(|(_, known)| *known == name.trim());
        let most = most.map_or(Ok(usize::MAX), |most| most.trim().parse());
        match (algorithm, most) {
            (Some((algorithm, _)), Ok(most)) => Ok((most, *algorithm)),
            _ => Err(format!("no rule of algorithms: {rule}")),
        }
    };
    text.split(',').map(rule).collect()
}

impl fmt::Display for Crossover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ((hosts, together), rules) in &self.shapes {
            write!(f, "{hosts}x{together}={};", Text(rules))?;
        }
        Text(&self.rules).fmt(f)
    }
}

/// Rules as text.
struct Text<'a>(&'a Rules);

impl fmt::Display for Text<'_> {
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

    fn shape(hosts: usize, together: usize) -> Shape {
        Shape { members: hosts * together, hosts, together }
    }

    #[test]
    fn text_is_read_back() {
        for text in
            ["auto", "pipeline", "direct:4096,doubling:65536,hierarchy", "doubling:65536,halving"]
        {
            assert_eq!(text.parse::<Crossover>().unwrap().to_string(), text);
        }
        assert_eq!("ring".parse::<Crossover>().unwrap_err(), "no rule of algorithms: ring");
        assert_eq!("direct:x".parse::<Crossover>().unwrap_err(), "no rule of algorithms: direct:x");
    }

    #[test]
    fn lists_for_shapes_are_read_back_in_one_order() {
        let file = "# measured\n 2x4 = doubling:32768, hierarchy\n\n1x8=auto\ndirect:4096\n";
        let (read, text) = (
            file.parse::<Crossover>().unwrap(),
            "1x8=auto;2x4=doubling:32768,hierarchy;direct:4096",
        );
        assert_eq!(read.to_string(), text);
        assert_eq!(text.parse::<Crossover>().unwrap(), read);
        assert_eq!("2x4=pipeline".parse::<Crossover>().unwrap().to_string(), "2x4=pipeline;auto");
        for wrong in
            ["", "# none", "2=pipeline", "0x4=pipeline", "ax4=pipeline", "2x4=", "2x4=ring"]
        {
            assert!(wrong.parse::<Crossover>().is_err(), "{wrong}");
        }
        let twice = "two lists of rules for the same worlds: direct";
        assert_eq!(
            "2x4=direct;2x4=direct".parse::<Crossover>().unwrap_err(),
            "two lists of rules for the same worlds: 2x4=direct"
        );
        assert_eq!("auto;direct".parse::<Crossover>().unwrap_err(), twice);
    }

    #[test]
    fn a_world_takes_the_list_of_its_shape() {
        let table: Crossover = "2x4=pipeline:100;1x4=auto;doubling".parse().unwrap();
        let chosen = |hosts, together, bytes| table.choose(shape(hosts, together), bytes, 1 << 20);
        assert_eq!(
            (chosen(2, 4, 100), chosen(2, 4, 101)),
            (Algorithm::Pipeline, Algorithm::Doubling)
        );
        assert_eq!(
            (chosen(1, 4, 4), chosen(1, 4, 1 << 20)),
            (Algorithm::Direct, Algorithm::Pipeline)
        );
        assert_eq!(
            (chosen(2, 8, 1 << 20), chosen(4, 2, 4)),
            (Algorithm::Doubling, Algorithm::Doubling)
        );
    }

    #[test]
    fn rules_come_before_the_table_and_the_table_where_they_end() {
        let rules: Crossover = "doubling:100".parse().unwrap();
        assert_eq!(rules.choose(shape(2, 2), 100, 1 << 20), Algorithm::Doubling);
        assert_eq!(rules.choose(shape(2, 2), 101, 1 << 20), Algorithm::Doubling);
        assert_eq!(rules.choose(shape(1, 2), 101, 1 << 20), Algorithm::Direct);
        let everywhere: Crossover = "hierarchy".parse().unwrap();
        assert_eq!(everywhere.choose(shape(1, 4), 5, 1 << 20), Algorithm::Pipeline);
    }

    #[test]
    fn small_goes_in_few_steps_and_large_by_hosts() {
        let auto = Crossover::default();
        let chosen = |hosts, together, bytes| auto.choose(shape(hosts, together), bytes, 1 << 20);
        assert_eq!(chosen(1, 2, 32 << 10), Algorithm::Direct);
        assert_eq!(chosen(1, 2, (32 << 10) + 1), Algorithm::Pipeline);
        assert_eq!(chosen(1, 16, 4), Algorithm::Pipeline);
        assert_eq!((chosen(2, 1, 4), chosen(16, 1, 4)), (Algorithm::Doubling, Algorithm::Doubling));
        assert_eq!(chosen(4, 1, 1 << 20), Algorithm::Pipeline);
        assert_eq!(chosen(2, 4, 1 << 20), Algorithm::Hierarchy);
        assert_eq!(
            (chosen(15, 4, 1 << 20), chosen(16, 4, 1 << 20)),
            (Algorithm::Hierarchy, Algorithm::Halving)
        );
        assert_eq!(
            (chosen(1, 4, 1 << 20), chosen(64, 1, 1 << 20)),
            (Algorithm::Pipeline, Algorithm::Pipeline)
        );
        let everywhere: Crossover = "halving".parse().unwrap();
        assert_eq!(everywhere.choose(shape(1, 4), 5, 1 << 20), Algorithm::Pipeline);
    }
}
