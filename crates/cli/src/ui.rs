// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole ui`: shows the runs of stores in the browser.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Arg, ArgMatches, Command, value_parser};
use farandole::launcher::StopLevel;
use farandole::ui::{RunViewer, ViewerSettings};

use crate::embedding_interpreter::EmbeddingInterpreter;
use crate::store;

/// Interval at which the command checks for signals while it serves the page.
const SIGNAL_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Returns the command line.
pub(crate) fn build_command() -> Command {
    store::add_store_options(Command::new("ui"))
        .about(
            "Shows the runs of stores in the browser: what is training now, curves, parameters, \
             comparisons. The page is served on 127.0.0.1 until Ctrl-C; its link has a token. From \
             another machine: ssh -L PORT:127.0.0.1:PORT.",
        )
        .arg_required_else_help(true)
        .arg(Arg::new("stores").value_name("STORE").required(true).num_args(1..).help(
            "Stores, or directories of runs, such as /data/farandole or \
                       s3://bucket/prefix",
        ))
        .arg(
            Arg::new("port")
                .long("port")
                .value_name("PORT")
                .default_value("0")
                .value_parser(value_parser!(u16))
                .help("Port on 127.0.0.1; 0 chooses a free one"),
        )
}

/// Runs the command.
pub(crate) fn run_ui(matches: &ArgMatches, surroundings: &dyn EmbeddingInterpreter) -> Result<i32> {
    let stores: Vec<String> = matches
        .get_many::<String>("stores")
        .unwrap_or_default()
        .cloned()
        .map(absolute_location)
        .collect();
    let stores = store::configure_stores(matches, stores, surroundings)?;
    let port = matches.get_one("port").copied().unwrap_or_default();
    let settings = ViewerSettings { stores, page: page_folder(surroundings), port };
    let mut viewer = RunViewer::start_server(&settings)?;
    // A closed stdout ends the command, because the user then cannot get the link.
    let mut out = std::io::stdout();
    writeln!(out, "the runs are at {} (Ctrl-C ends this)", viewer.url())?;
    out.flush()?;
    while surroundings.requested_stop_level() == StopLevel::Continue {
        std::thread::sleep(SIGNAL_POLL_INTERVAL);
    }
    viewer.close();
    Ok(0)
}

/// Returns the folder of the page's script and style.
fn page_folder(surroundings: &dyn EmbeddingInterpreter) -> PathBuf {
    surroundings.package_folder().join("ui")
}

/// Returns a local path as an absolute path, and a URL unchanged.
pub(crate) fn absolute_location(store: String) -> String {
    if store.contains(":/") {
        return store;
    }
    std::path::absolute(&store).map_or(store, |path| path.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_and_a_port_are_read() {
        let matches = build_command()
            .try_get_matches_from(["ui", "a", "s3://b/c", "--port", "80", "--option", "k=v"])
            .unwrap();
        assert_eq!(
            matches.get_many::<String>("stores").unwrap().collect::<Vec<_>>(),
            ["a", "s3://b/c"]
        );
        assert_eq!(matches.get_one::<u16>("port"), Some(&80));
        assert!(build_command().try_get_matches_from(["ui"]).is_err());
        assert!(build_command().try_get_matches_from(["ui", "a", "--port", "70000"]).is_err());
    }

    #[test]
    fn a_path_is_shown_from_its_root_and_a_url_unchanged() {
        assert!(absolute_location("here".to_owned()).starts_with('/'));
        assert_eq!(absolute_location("dbfs:/a".to_owned()), "dbfs:/a");
        assert_eq!(absolute_location("s3://a".to_owned()), "s3://a");
    }
}
