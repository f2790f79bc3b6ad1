// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `--config-file`: Horovod's sections and keys, and any knob under `farandole`.

use anyhow::{Context as _, Result, bail};
use farandole::config::KNOBS;
use serde_json::{Map, Value};

use super::flags::{FlagValue, RUN_FLAGS, RunFlag};

/// Section for knobs that Horovod does not have.
const FARANDOLE_SECTION: &str = "farandole";
/// Keys that older documentation names and that have no effect.
const OBSOLETE_KEYS: [(&str, &str); 1] = [("logging", "hide_timestamp")];

/// The content of a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RunConfigFile {
    /// Flags and their values; a flag without a value has `true` or `false`.
    pub(crate) flags: Vec<(&'static str, String)>,
    /// Knobs and their values, by key.
    pub(crate) knobs: Vec<(String, String)>,
    /// Remarks about unknown entries.
    pub(crate) warnings: Vec<String>,
}

/// Parses the text of a file; `name` is the name of the file, for errors.
///
/// # Errors
/// The text is not YAML, is no table of sections, or has a value of the wrong kind.
pub(crate) fn parse_config_file(name: &str, text: &str) -> Result<RunConfigFile> {
    let mut file = RunConfigFile::default();
    // The parser refuses a text without a document.
    if text.trim().is_empty() {
        return Ok(file);
    }
    let all: Value = serde_saphyr::from_str(text).with_context(|| format!("{name} is not YAML"))?;
    let Value::Object(sections) = all else {
        if all.is_null() {
            return Ok(file);
        }
        bail!("{name} must hold sections with keys, such as \"params:\"");
    };
    for (section, content) in &sections {
        match content {
            // A section whose keys are all comments is null.
            Value::Null => {}
            Value::Object(keys) => read_section_keys(name, section, keys, &mut file)?,
            other if section == "controller" => read_controller(name, other, &mut file)?,
            _ if is_known_section(section) => bail!("{name}: the section {section} must hold keys"),
            _ => file.warnings.push(format!("{name}: no such section, {section} is ignored")),
        }
    }
    Ok(file)
}

fn read_controller(name: &str, value: &Value, file: &mut RunConfigFile) -> Result<()> {
    match value.as_str().map(str::to_lowercase).as_deref() {
        Some("gloo") => file.flags.push(("gloo", "true".to_owned())),
        Some("mpi") => file.flags.push(("mpi", "true".to_owned())),
        _ => bail!("{name}: controller must be gloo or mpi: {value}"),
    }
    Ok(())
}

fn read_section_keys(
    name: &str,
    section: &str,
    keys: &Map<String, Value>,
    file: &mut RunConfigFile,
) -> Result<()> {
    for (key, value) in keys {
        // As text, so that a value is checked like one on the command line.
        let text = match value {
            Value::Null => continue,
            Value::String(text) => text.clone(),
            Value::Bool(_) | Value::Number(_) => value.to_string(),
            Value::Array(_) | Value::Object(_) => {
                bail!("{name}: {section}.{key} must be one value: {value}")
            }
        };
        if section == FARANDOLE_SECTION {
            // Horovod ignores unknown keys: a file that works there must work here, too.
            match KNOBS.iter().find(|knob| knob.key == key) {
                Some(knob) => file.knobs.push((knob.key.to_owned(), text)),
                None => file.warnings.push(unknown_key_warning(name, section, key)),
            }
        } else if let Some(flag) = find_flag_by_key(section, key) {
            let text = match (flag.value, normalize_bool(&text)) {
                (FlagValue::Nothing, Some(truth)) => truth.to_owned(),
                (FlagValue::Nothing, None) => {
                    bail!("{name}: {section}.{key} must be true or false: {value}")
                }
                _ => text,
            };
            file.flags.push((flag.name, text));
        } else if !OBSOLETE_KEYS.contains(&(section, key.as_str())) {
            file.warnings.push(unknown_key_warning(name, section, key));
        }
    }
    Ok(())
}

fn is_known_section(section: &str) -> bool {
    section == FARANDOLE_SECTION
        || RUN_FLAGS.iter().any(|flag| flag.key.is_some_and(|(known, _)| known == section))
}

/// Parses the words for true and false of all versions of YAML and of Horovod.
fn normalize_bool(text: &str) -> Option<&'static str> {
    match text.to_lowercase().as_str() {
        "true" | "yes" | "on" | "1" => Some("true"),
        "false" | "no" | "off" | "0" => Some("false"),
        _ => None,
    }
}

/// Describes the location of a flag in the file, for errors.
pub(crate) fn flag_location(name: &str, flag: &RunFlag) -> String {
    match flag.key {
        Some((section, key)) => format!("{name}: {section}.{key}"),
        None => format!("{name}: controller"),
    }
}

fn find_flag_by_key(section: &str, key: &str) -> Option<&'static RunFlag> {
    RUN_FLAGS.iter().find(|flag| flag.key == Some((section, key)))
}

fn unknown_key_warning(name: &str, section: &str, key: &str) -> String {
    let written = format!("{section}.{key}");
    let known = RUN_FLAGS
        .iter()
        .filter_map(|flag| flag.key.map(|(section, key)| format!("{section}.{key}")))
        .chain(KNOBS.iter().map(|knob| format!("{FARANDOLE_SECTION}.{}", knob.key)));
    let nearest = known
        .map(|one| (strsim::jaro_winkler(&written, &one), one))
        .max_by(|one, other| one.0.total_cmp(&other.0))
        .filter(|(likeness, _)| *likeness > 0.85);
    match nearest {
        Some((_, nearest)) => {
            format!("{name}: no such key, {written} is ignored; perhaps {nearest} is meant")
        }
        None => format!("{name}: no such key, {written} is ignored"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: &str = "
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 5.5
  cache_capacity: 0
  hierarchical_allreduce: true
autotune:
  enabled: true
  log_file: horovod.csv
stall_check:
  enabled: false
  warning_time_seconds: 10
timeline: {filename: t.json, mark_cycles: false}
library_options: {mpi_threads_disable: true, num_nccl_streams: 2}
farandole: {peer_timeout: 7s}
";

    #[test]
    fn every_section_is_read() {
        let file = parse_config_file("c.yaml", EVERY).unwrap();
        let value = |name: &str| {
            file.flags
                .iter()
                .find(|(flag, _)| *flag == name)
                .map(|(_, value)| value.as_str())
                .unwrap()
        };
        assert_eq!(
            (value("gloo"), value("fusion-threshold-mb"), value("cycle-time-ms")),
            ("true", "32", "5.5")
        );
        assert_eq!((value("stall-check"), value("timeline-mark-cycles")), ("false", "false"));
        assert_eq!(value("autotune-log-file"), "horovod.csv");
        assert_eq!(file.knobs, [("peer_timeout".to_owned(), "7s".to_owned())]);
        assert!(file.warnings.is_empty(), "{:?}", file.warnings);
    }

    #[test]
    fn an_unknown_key_is_reported_with_the_nearest_one() {
        let file = parse_config_file(
            "c.yaml",
            "params:\n  fusion_treshold_mb: 1\nlogging:\n  hide_timestamp: true\nverbose: 2\nx: \
             {y: 1}\n",
        );
        assert_eq!(
            file.unwrap().warnings,
            [
                "c.yaml: no such key, params.fusion_treshold_mb is ignored; perhaps \
                 params.fusion_threshold_mb is meant",
                "c.yaml: no such section, verbose is ignored",
                "c.yaml: no such key, x.y is ignored"
            ]
        );
    }

    #[test]
    fn truth_has_every_form_that_yaml_ever_had() {
        for (text, truth) in
            [("yes", "true"), ("Off", "false"), ("1", "true"), ("0", "false"), ("'on'", "true")]
        {
            let file =
                parse_config_file("c.yaml", &format!("autotune: {{enabled: {text}}}")).unwrap();
            assert_eq!(file.flags, [("autotune", truth.to_owned())], "{text}");
        }
    }

    #[test]
    fn an_invalid_configuration_is_refused_by_name() {
        for (text, part) in [
            ("- a\n- b\n", "c.yaml must hold sections"),
            ("params: 3\n", "the section params must hold keys"),
            ("controller: nccl\n", "controller must be gloo or mpi"),
            (
                "params: {hierarchical_allreduce: 3}\n",
                "params.hierarchical_allreduce must be true or false: 3",
            ),
            ("params: {cache_capacity: [1]}\n", "params.cache_capacity must be one value"),
            ("a: [\n", "c.yaml is not YAML"),
        ] {
            let error = parse_config_file("c.yaml", text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(parse_config_file("c.yaml", "# nothing\n").unwrap(), RunConfigFile::default());
    }
}
