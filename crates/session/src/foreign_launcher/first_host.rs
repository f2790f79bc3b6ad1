// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The first host in the lists of batch systems, which is the host of rank 0.

use farandole_world::slurm_nodelist::expand_nodes;

use super::VariableLookup;

/// Returns the likely host of rank 0. `read` returns the text of a file.
pub(super) fn likely_first_host(
    lookup: VariableLookup<'_>,
    read: &dyn Fn(&str) -> Option<String>,
) -> Option<String> {
    let word = |text: String| text.split_whitespace().next().map(str::to_owned);
    // The most specific source first: a step may use only some of the nodes of its job.
    lookup("MASTER_ADDR")
        .or_else(|| lookup("SLURM_STEP_NODELIST").and_then(|list| first_slurm_host(&list)))
        .or_else(|| lookup("SLURM_JOB_NODELIST").and_then(|list| first_slurm_host(&list)))
        .or_else(|| lookup("SLURM_NODELIST").and_then(|list| first_slurm_host(&list)))
        .or_else(|| lsf_first_host(lookup))
        .or_else(|| lookup("PBS_NODEFILE").and_then(|file| read(&file)).and_then(word))
        .or_else(|| lookup("PE_HOSTFILE").and_then(|file| read(&file)).and_then(word))
}

/// Returns LSF's first host. LSF lists the host of the batch script first, and jsrun starts nothing
/// there.
fn lsf_first_host(lookup: VariableLookup<'_>) -> Option<String> {
    let skip = usize::from(lookup("JSM_NAMESPACE_RANK").is_some());
    if let Some(hosts) = lookup("LSB_MCPU_HOSTS") {
        let names: Vec<&str> = hosts.split_whitespace().step_by(2).collect();
        return names.get(skip).or(names.first()).map(|name| (*name).to_owned());
    }
    let hosts = lookup("LSB_HOSTS")?;
    let mut names: Vec<&str> = hosts.split_whitespace().collect();
    names.dedup();
    names.get(skip).or(names.first()).map(|name| (*name).to_owned())
}

/// Returns the first host of a list in Slurm's notation: `node[01-04,7],other`.
pub(super) fn first_slurm_host(list: &str) -> Option<String> {
    expand_nodes(list.trim())?.into_iter().next()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_host_of_slurms_lists() {
        for (list, host) in [
            ("vm", "vm"),
            ("node[01-04,7],other", "node01"),
            ("other,node[1-2]", "other"),
            ("node[7,01-04]", "node7"),
            ("rack[1-2]node[008-010]-ib", "rack1node008-ib"),
            ("a.b.c,d", "a.b.c"),
        ] {
            assert_eq!(first_slurm_host(list).as_deref(), Some(host), "{list}");
        }
        for list in ["", "node[", "node[1", ",", "[]"] {
            assert_eq!(first_slurm_host(list), None, "{list}");
        }
    }

    #[test]
    fn every_batch_system_tells_it_its_own_way() {
        let first_of = |pairs: &[(&str, &str)]| {
            let map: BTreeMap<&str, &str> = pairs.iter().copied().collect();
            let read = |file: &str| (file == "/nodes").then(|| "pbs1\npbs1\npbs2\n".to_owned());
            likely_first_host(&|name| map.get(name).map(|value| (*value).to_owned()), &read)
        };
        assert_eq!(
            first_of(&[("SLURM_STEP_NODELIST", "b[2-3]"), ("SLURM_JOB_NODELIST", "b[1-3]")])
                .unwrap(),
            "b2"
        );
        assert_eq!(
            first_of(&[("MASTER_ADDR", "m"), ("SLURM_JOB_NODELIST", "b[1-3]")]).unwrap(),
            "m"
        );
        assert_eq!(first_of(&[("LSB_MCPU_HOSTS", "l1 4 l2 4")]).unwrap(), "l1");
        assert_eq!(
            first_of(&[("LSB_MCPU_HOSTS", "batch 1 l2 4 l3 4"), ("JSM_NAMESPACE_RANK", "0")])
                .unwrap(),
            "l2"
        );
        assert_eq!(first_of(&[("LSB_HOSTS", "l1 l1 l2")]).unwrap(), "l1");
        assert_eq!(first_of(&[("PBS_NODEFILE", "/nodes")]).unwrap(), "pbs1");
        assert_eq!(first_of(&[("PBS_NODEFILE", "/elsewhere")]), None);
        assert_eq!(first_of(&[]), None);
    }

    proptest! {
        #[test]
        fn the_first_of_any_list_of_ranges_is_found(prefix in "[a-z]{1,5}", first in 0u32..999, width in 1usize..5) {
            let list = format!("{prefix}[{first:0width$}-{:0width$},1],z", first + 3);
            prop_assert_eq!(first_slurm_host(&list), Some(format!("{prefix}{first:0width$}")));
        }
    }
}
