// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole store`: lists a store, its size, and prepared data that is no longer used.

use std::collections::BTreeMap;
use std::io::{BufRead, Write as _};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::builder::ArgPredicate;
use clap::{Arg, ArgAction, ArgMatches, Command};
use farandole::config::environment_variable;
use farandole::store::{
    BackendOptions, StaleData, Store, SweepLimits, configure_options, find_stale_data, is_free,
    sweep_stale_data,
};

use crate::embedding_interpreter::EmbeddingInterpreter;

/// Returns the command line.
pub(crate) fn build_command() -> Command {
    let url = || {
        Arg::new("url")
            .value_name("URL")
            .required(true)
            .help("A path or URL, such as s3://bucket/prefix")
    };
    let json = || {
        Arg::new("json")
            .long("json")
            .action(ArgAction::SetTrue)
            .help("Print one JSON object per line instead of a table")
    };
    add_store_options(Command::new("store"))
        .about("Lists and cleans up stores: local paths, s3://, gs://, abfss://, hdfs://, dbfs:/.")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("ls")
                .about("Lists what is directly in a directory.")
                .arg(url())
                .arg(json()),
        )
        .subcommand(
            Command::new("du")
                .about(
                    "Prints the size of each directory (prepared data, runs, other files), and \
                        what is in use.",
                )
                .arg(url())
                .arg(json()),
        )
        .subcommand(
            Command::new("gc")
                .about(
                    "Deletes prepared data that is old, or too much, and that no process uses. \
                     Runs, checkpoints and files of others stay.",
                )
                .arg(url())
                .arg(
                    Arg::new("older-than")
                        .long("older-than")
                        .value_name("AGE")
                        .default_value("7d")
                        .default_value_if("max-size", ArgPredicate::IsPresent, None)
                        .value_parser(parse_age)
                        .help("Age of a data set's newest file, such as 90s, 30m, 12h or 7d"),
                )
                .arg(
                    Arg::new("max-size")
                        .long("max-size")
                        .value_name("SIZE")
                        .allow_hyphen_values(true)
                        .value_parser(parse_size)
                        .help(
                            "Delete the oldest prepared data until all of it takes no more than \
                             this, such as 500MB, 20GiB or 1TB. Without --older-than, data of any \
                             age",
                        ),
                )
                .arg(
                    Arg::new("dry-run")
                        .long("dry-run")
                        .action(ArgAction::SetTrue)
                        .help("Print what would be deleted, and delete nothing"),
                )
                .arg(json()),
        )
}

/// Adds the options of stores to the command.
pub(crate) fn add_store_options(command: Command) -> Command {
    command
        .arg(
            Arg::new("option")
                .long("option")
                .global(true)
                .value_name("KEY=VALUE")
                .action(ArgAction::Append)
                .value_parser(parse_storage_option)
                .help(
                    "A storage option, such as endpoint_url=http://localhost:9000; may be \
                     repeated. Secrets do not belong on a command line, which other users can see: \
                     KEY=env:NAME takes a variable, KEY=file:PATH the first line of a file, KEY=- \
                     a line of standard input",
                ),
        )
        .arg(Arg::new("option-file").long("option-file").global(true).value_name("PATH").help(
            "A file of storage options, one KEY=VALUE per line, # begins a comment; - is \
                       standard input",
        ))
}

fn parse_storage_option(text: &str) -> Result<(String, String)> {
    // The value may be a secret, so it is not repeated.
    let (key, value) = text.split_once('=').context("a storage option must be KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Returns whether an option's name suggests that its value is a secret.
fn is_secret_option(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    let words = [
        "secret",
        "token",
        "password",
        "passwd",
        "credential",
        "private",
        "account_key",
        "access_key",
        "sas",
    ];
    // The ID of an access key is public; only its secret is not.
    !key.ends_with("_id") && words.iter().any(|word| key.contains(word))
}

/// Returns whether a value names the source of the real value.
fn is_indirect_value(value: &str) -> bool {
    value == "-" || value.starts_with("env:") || value.starts_with("file:")
}

/// Returns the options of the file and of the command line, each with its real value. The command
/// line has priority.
fn read_storage_options(
    given: Vec<(String, String)>,
    file: Option<&str>,
    input: &mut impl BufRead,
) -> Result<BTreeMap<String, String>> {
    let mut options = BTreeMap::new();
    if let Some(path) = file {
        let mut text = String::new();
        if path == "-" {
            input
                .read_to_string(&mut text)
                .context("cannot read storage options from standard input")?;
        } else {
            text = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read storage options: {path}"))?;
        }
        let lines = text.lines().map(str::trim).enumerate();
        for (index, line) in lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
            let (key, value) = parse_storage_option(line)
                .with_context(|| format!("line {} of {path}", index + 1))?;
            options.insert(key.trim().to_owned(), value.trim().to_owned());
        }
    }
    // In the order of the command line, because each `-` takes the next line of the input.
    for (key, value) in given {
        let value = resolve_option_value(&key, value, input)?;
        options.insert(key, value);
    }
    Ok(options)
}

fn resolve_option_value(key: &str, value: String, input: &mut impl BufRead) -> Result<String> {
    let text = if let Some(name) = value.strip_prefix("env:") {
        environment_variable(name)
            .with_context(|| format!("the variable for option {key} is not set: {name}"))?
    } else if let Some(path) = value.strip_prefix("file:") {
        std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the file for option {key}: {path}"))?
    } else if value == "-" {
        let mut line = String::new();
        input
            .read_line(&mut line)
            .with_context(|| format!("cannot read option {key} from standard input"))?;
        line
    } else {
        return Ok(value);
    };
    // Editors end a file with a line break, which is no part of a secret.
    let line = text.lines().next().unwrap_or_default();
    if line.is_empty() {
        bail!("the value for option {key} is empty");
    }
    Ok(line.to_owned())
}

fn parse_age(text: &str) -> Result<Duration> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 24 * 3600), ("w", 7 * 24 * 3600)];
    let unit = units.iter().find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, *seconds)));
    let (digits, seconds) =
        unit.with_context(|| format!("an age needs a unit, such as 7d: {text}"))?;
    let count: u64 = digits.trim().parse().with_context(|| format!("not an age: {text}"))?;
    count
        .checked_mul(seconds)
        .map(Duration::from_secs)
        .with_context(|| format!("not an age: {text}"))
}

fn parse_size(text: &str) -> Result<u64> {
    let binary = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)]
        .map(|(unit, shift)| (unit, 1_u64 << shift));
    let decimal = [("KB", 1), ("MB", 2), ("GB", 3), ("TB", 4)]
        .map(|(unit, power)| (unit, 1000_u64.pow(power)));
    // `B` is last, because all units end in it.
    let units = binary.into_iter().chain(decimal).chain([("B", 1)]);
    let unit = units.into_iter().find_map(|(unit, bytes)| Some((text.strip_suffix(unit)?, bytes)));
    let (digits, unit) =
        unit.with_context(|| format!("a size needs a unit, such as 20GiB: {text}"))?;
    let count: u64 = digits.trim().parse().with_context(|| format!("not a size: {text}"))?;
    count.checked_mul(unit).with_context(|| format!("not a size: {text}"))
}

/// Sets the options of the command line for all stores that are opened later. Returns the URLs of
/// the stores; for a volume of Unity Catalog, the URL of its location.
pub(crate) fn configure_stores(
    matches: &ArgMatches,
    paths: Vec<String>,
    surroundings: &dyn EmbeddingInterpreter,
) -> Result<Vec<String>> {
    let given: Vec<(String, String)> =
        matches.get_many::<(String, String)>("option").unwrap_or_default().cloned().collect();
    for (key, _) in
        given.iter().filter(|(key, value)| is_secret_option(key) && !is_indirect_value(value))
    {
        eprintln!(
            "warning: the value of {key} is on the command line, where other users of this host \
             can see it: use --option {key}=env:NAME, --option {key}=file:PATH, --option {key}=- \
             or --option-file"
        );
    }
    let file = matches.get_one::<String>("option-file").map(String::as_str);
    let options = read_storage_options(given, file, &mut std::io::stdin().lock())?;
    let mut urls = Vec::with_capacity(paths.len());
    for path in paths {
        if let Some(url) =
            surroundings.open_volume(&path, &options).map_err(|reason| anyhow!(reason))?
        {
            urls.push(url);
            continue;
        }
        if !options.is_empty() {
            configure_options(&path, BackendOptions(options.clone()));
        }
        urls.push(path);
    }
    Ok(urls)
}

/// Runs the command.
pub(crate) fn run_store(
    matches: &ArgMatches,
    surroundings: &dyn EmbeddingInterpreter,
) -> Result<i32> {
    let Some((action, matches)) = matches.subcommand() else { bail!("no such command") };
    let path = matches.get_one::<String>("url").cloned().unwrap_or_default();
    let urls = configure_stores(matches, vec![path], surroundings)?;
    let store = Store::open(&urls[0])?;
    let json = matches.get_flag("json");
    let rows = match action {
        "ls" => list_directory(&store)?,
        "du" => directory_usage(&store)?,
        _ => {
            let limits = SweepLimits {
                older_than: matches.get_one("older-than").copied(),
                max_size: matches.get_one("max-size").copied(),
            };
            let now = SystemTime::now();
            let dry = matches.get_flag("dry-run");
            let StaleData { stale, skipped } = if dry {
                find_stale_data(&store, limits, now)?
            } else {
                sweep_stale_data(&store, limits, now)?
            };
            for one in skipped {
                eprintln!("left: {}: {}", one.path, one.reason);
            }
            let state = if dry { "would go" } else { "deleted" };
            stale
                .into_iter()
                .map(|one| StoreListingRow {
                    path: one.path,
                    files: Some(one.files),
                    bytes: one.bytes,
                    note: state.to_owned(),
                })
                .collect()
        }
    };
    print_rows(&rows, json, action == "ls");
    Ok(0)
}

/// A line of output.
struct StoreListingRow {
    path: String,
    files: Option<usize>,
    bytes: u64,
    note: String,
}

fn list_directory(store: &Store) -> Result<Vec<StoreListingRow>> {
    let items = store.list_directory("")?;
    // A missing directory has an empty listing, too.
    if items.is_empty() && !store.exists("")? {
        bail!("there is nothing here: {}", store.url());
    }
    let row = |item: farandole::store::DirectoryItem| StoreListingRow {
        path: if item.is_directory { format!("{}/", item.name) } else { item.name },
        files: None,
        bytes: item.bytes,
        note: item.modified.map(format_timestamp).unwrap_or_default(),
    };
    Ok(items.into_iter().map(row).collect())
}

fn directory_usage(store: &Store) -> Result<Vec<StoreListingRow>> {
    let mut sums: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    // `list` would fail for a symbolic link to a directory.
    for entry in store.list_with_links("")?.0 {
        let mut parts = entry.path.split('/');
        let first = parts.next().unwrap_or_default();
        let name = match (parts.next(), parts.next()) {
            (None, _) => ".".to_owned(),
            // Each run is counted separately.
            (Some(run), Some(_)) if first == "runs" => format!("{first}/{run}/"),
            _ => format!("{first}/"),
        };
        let sum = sums.entry(name).or_default();
        *sum = (sum.0 + 1, sum.1 + entry.bytes);
    }
    if sums.is_empty() && !store.exists("")? {
        bail!("there is nothing here: {}", store.url());
    }
    let mut rows = Vec::new();
    for (path, (files, bytes)) in sums {
        let note = if path.starts_with("intermediate_") {
            prepared_data_state(store, &path)?
        } else {
            String::new()
        };
        rows.push(StoreListingRow { path, files: Some(files), bytes, note });
    }
    let (files, bytes) =
        rows.iter().fold((0, 0), |sum, row| (sum.0 + row.files.unwrap_or(0), sum.1 + row.bytes));
    rows.push(StoreListingRow {
        path: "total".to_owned(),
        files: Some(files),
        bytes,
        note: String::new(),
    });
    Ok(rows)
}

/// Returns the state of prepared data: complete or unfinished, and whether it is in use.
fn prepared_data_state(store: &Store, path: &str) -> Result<String> {
    let directory = store.open_child(path.trim_end_matches('/'))?;
    let complete = directory.exists("_manifest.json")?;
    let used = !is_free(&directory, SystemTime::now())?;
    let state = if complete { "complete" } else { "unfinished" };
    Ok(if used { format!("{state}, in use") } else { state.to_owned() })
}

/// Formats a time as `2024-02-29T12:00:00Z`.
fn format_timestamp(time: SystemTime) -> String {
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, rest) = (seconds / 86400, seconds % 86400);
    // Years begin in March here, so that the leap day is their last day.
    let day = days + 719_468;
    let era = day / 146_097;
    let of_era = day % 146_097;
    // The algorithm is `civil_from_days` of Howard Hinnant.
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let date = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Formats a size as `12.3 MiB`.
fn format_size(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, shift)| bytes >> shift > 0) {
        None => format!("{bytes} B"),
        Some((unit, shift)) => {
            format!("{}.{} {unit}", bytes >> shift, (bytes >> (shift - 10)) % 1024 * 10 / 1024)
        }
    }
}

fn print_rows(rows: &[StoreListingRow], json: bool, plain: bool) {
    let mut out = std::io::stdout().lock();
    for row in rows {
        let line = if json {
            let path = row.path.replace('\\', "\\\\").replace('"', "\\\"");
            let files = row.files.map_or(String::new(), |files| format!(", \"files\": {files}"));
            format!(
                "{{\"path\": \"{path}\"{files}, \"bytes\": {}, \"note\": \"{}\"}}",
                row.bytes, row.note
            )
        } else if plain {
            format!("{:>20} {:>10}  {}", row.note, format_size(row.bytes), row.path)
        } else {
            let files = row.files.unwrap_or_default();
            format!(
                "{:>10} {files:>7} files  {:<18} {}",
                format_size(row.bytes),
                row.note,
                row.path
            )
        };
        // A closed stdout (`| head`) ends the listing.
        if writeln!(out, "{line}").is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_units() {
        let seconds =
            ["90s", "2m", "1h", "7d", "1w"].map(|text| parse_age(text).unwrap().as_secs());
        assert_eq!(seconds, [90, 120, 3600, 604_800, 604_800]);
        for wrong in ["7", "d", "-1d", "1y", "99999999999999999999w"] {
            assert!(parse_age(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn limits_of_size_have_units() {
        let sizes =
            ["7B", "2KB", "2KiB", "3 MB", "20GiB", "1TB"].map(|text| parse_size(text).unwrap());
        assert_eq!(sizes, [7, 2000, 2048, 3_000_000, 20 << 30, 1_000_000_000_000]);
        for wrong in ["7", "GB", "-1GB", "1.5GB", "1PB", "99999999TiB"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_wrong_option_is_not_repeated() {
        assert!(!parse_storage_option("hidden").unwrap_err().to_string().contains("hidden"));
        assert_eq!(parse_storage_option("a=b=c").unwrap(), ("a".to_owned(), "b=c".to_owned()));
    }

    #[test]
    fn secrets_come_from_variables_files_and_standard_input() {
        let directory =
            std::env::temp_dir().join(format!("farandole-options-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = |name: &str| directory.join(name).to_string_lossy().into_owned();
        std::fs::write(path("secret"), "from a file\n").unwrap();
        std::fs::write(path("all"), "# mine\nregion = here\n\nkey=a=b\n").unwrap();
        std::fs::write(path("wrong"), "region=here\nhidden\n").unwrap();
        let given = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let file = format!("file:{}", path("secret"));
        let asked =
            given(&[("secret", &file), ("token", "-"), ("path", "env:PATH"), ("region", "there")]);
        let found =
            read_storage_options(asked, Some(&path("all")), &mut "typed\nmore\n".as_bytes())
                .unwrap();
        let of = |name: &str| found.get(name).map(String::as_str).unwrap_or_default().to_owned();
        assert_eq!(
            [of("secret"), of("token"), of("region"), of("key")],
            ["from a file", "typed", "there", "a=b"]
        );
        assert!(!of("path").is_empty());
        let all =
            read_storage_options(Vec::new(), Some("-"), &mut "secret=s\ntoken=t\n".as_bytes())
                .unwrap();
        assert_eq!(all.len(), 2);
        let error =
            read_storage_options(Vec::new(), Some(&path("wrong")), &mut "".as_bytes()).unwrap_err();
        assert!(
            error.to_string().starts_with("line 2 of") && !format!("{error:?}").contains("hidden")
        );
        for wrong in ["env:FARANDOLE_NO_SUCH_VARIABLE", "file:/nowhere/at/all", "-"] {
            let error = read_storage_options(given(&[("secret", wrong)]), None, &mut "".as_bytes())
                .unwrap_err();
            assert!(error.to_string().contains("option secret"), "{error}");
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn names_of_secrets_are_known() {
        for key in [
            "secret",
            "AWS_SECRET_ACCESS_KEY",
            "account_key",
            "sas_token",
            "password",
            "client_secret",
        ] {
            assert!(is_secret_option(key), "{key}");
        }
        for key in ["region", "endpoint_url", "aws_access_key_id", "account_name", "client_id"] {
            assert!(!is_secret_option(key), "{key}");
        }
        assert!(
            is_indirect_value("env:X") && is_indirect_value("-") && !is_indirect_value("hunter2")
        );
    }

    #[test]
    fn sizes_and_times_are_readable() {
        assert_eq!(
            [0, 1023, 1024, 1536, 5 << 20, 3 << 30].map(format_size).join(" "),
            "0 B 1023 B 1.0 KiB 1.5 KiB 5.0 MiB 3.0 GiB"
        );
        let at = |seconds| format_timestamp(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_825_600), "2000-02-29T12:00:00Z");
        assert_eq!(at(1_767_225_599), "2025-12-31T23:59:59Z");
    }
}
