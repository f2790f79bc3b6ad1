// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `docs/reference/command-line.md`, generated from the commands. Only a test uses it.

use clap::{Arg, ArgAction, Command};
use farandole::config::{FARANDOLE_PREFIX, KNOBS};

use crate::arguments::build_command;
use crate::run::flags::{FlagEffect, IGNORED_VARIABLES, RUN_FLAGS, knob_flags};

/// Returns the whole page: `run` with its keys and variables, then every other visible command.
fn reference_page() -> String {
    let mut page = String::from(
        "# The command line\n\n<!-- Written by `FARANDOLE_WRITE=1 cargo test -p farandole-cli \
         reference`; do not edit. -->\n\n\
         The `farandole` command. `farandole COMMAND --help` prints the same.\n\n",
    );
    let mut whole = build_command();
    whole.build();
    for one in whole.get_subcommands().filter(|one| is_user_command(one)) {
        let name = one.get_name();
        let link = format!("farandole-{name}");
        page.push_str(&format!(
            "- [`farandole {name}`](#{link}): {}\n",
            first_sentence(&about_text(one))
        ));
    }
    append_run_section(&mut page);
    for one in
        whole.get_subcommands_mut().filter(|one| is_user_command(one) && one.get_name() != "run")
    {
        append_command(&mut page, one, &format!("farandole {}", one.get_name()), 2);
    }
    page
}

/// Returns whether a command is for users.
fn is_user_command(command: &Command) -> bool {
    !command.is_hide_set() && command.get_name() != "help"
}

/// Returns the description of a command.
fn about_text(command: &Command) -> String {
    command.get_about().map(ToString::to_string).unwrap_or_default()
}

fn first_sentence(text: &str) -> String {
    let (first, rest) = text.split_once(". ").unwrap_or((text, ""));
    if rest.is_empty() { first.to_owned() } else { format!("{first}.") }
}

/// Appends a command and its subcommands.
fn append_command(page: &mut String, command: &mut Command, name: &str, level: usize) {
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    let heading = "#".repeat(level);
    page.push_str(&format!(
        "\n{heading} `{name}`\n\n{}\n\n```text\n{usage}\n```\n",
        escape_markdown(&about_text(command))
    ));
    let args: Vec<&Arg> = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set() && arg.get_id() != "help")
        .collect();
    if !args.is_empty() {
        page.push_str("\n| argument | what it does | default |\n| --- | --- | --- |\n");
    }
    for arg in args {
        let default: Vec<String> = arg
            .get_default_values()
            .iter()
            .map(|value| format!("`{}`", value.to_string_lossy()))
            .collect();
        let shown = if arg.get_action().takes_values() { default.join(" ") } else { String::new() };
        page.push_str(&format!(
            "| {} | {} | {shown} |\n",
            argument_usage(arg),
            argument_description(arg)
        ));
    }
    for inner in command.get_subcommands_mut().filter(|inner| is_user_command(inner)) {
        append_command(page, inner, &format!("{name} {}", inner.get_name()), level + 1);
    }
}

/// Returns an argument as written on the command line.
fn argument_usage(arg: &Arg) -> String {
    let named = arg.get_value_names().and_then(|names| names.first());
    let value = format!("<{}>", named.map_or(arg.get_id().as_str(), |name| name.as_str()));
    let short = arg.get_short().map(|short| format!("`-{short}`"));
    let long = arg.get_long().map(|long| match matches!(arg.get_action(), ArgAction::SetTrue) {
        true => format!("`--{long}`"),
        false => format!("`--{long} {value}`"),
    });
    let names: Vec<String> = short.into_iter().chain(long).collect();
    let names = if names.is_empty() { format!("`{value}`") } else { names.join(", ") };
    names.replace('|', "\\|")
}

/// Returns the description of an argument, and its possible values.
fn argument_description(arg: &Arg) -> String {
    let mut text = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let possible: Vec<String> =
        arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
    if arg.get_action().takes_values() && !possible.is_empty() {
        text = format!("{text}. One of {}", possible.join(", "));
    }
    escape_markdown(&text)
}

/// Escapes the text of a command for Markdown: `|` separates columns of a table, and `<` begins
/// HTML.
fn escape_markdown(text: &str) -> String {
    text.trim().replace('|', "\\|").replace('<', "\\<")
}

/// Appends `farandole run`, whose flags also have keys in a file and variables.
fn append_run_section(page: &mut String) {
    page.push_str(
        "\n## `farandole run`\n\n\
         `farandole run [FLAGS] COMMAND...`, and `horovodrun [FLAGS] COMMAND...` of the drop-in \
         package, which is the same command.\nA flag has priority over the file of \
         `--config-file`, the file over a variable, a variable over the default.\n\
         Variables begin with `FARANDOLE_`. If one is not set, the same name with `HOROVOD_` is \
         read.\n\n\
         | flag | what it does | key in the file | variable |\n| --- | --- | --- | --- |\n",
    );
    let text = |text: &str| text.trim().replace('|', "\\|");
    for flag in RUN_FLAGS {
        let mut names: Vec<String> =
            flag.single_dash.iter().map(|name| format!("`-{name}`")).collect();
        names.extend(flag.short.map(|short| format!("`-{short}`")));
        names.push(format!("`--{}`", flag.name));
        names.extend(
            flag.aliases.iter().filter(|name| **name != "np").map(|name| format!("`--{name}`")),
        );
        let effect = match flag.effect {
            FlagEffect::Ignored(reason) => format!("accepted, means nothing here: {reason}"),
            _ => flag.help.to_owned(),
        };
        let key = flag.key.map_or(String::new(), |(section, key)| format!("`{section}.{key}`"));
        page.push_str(&format!(
            "| {} | {} | {key} | {} |\n",
            names.join(", "),
            text(&effect),
            knob_variable(flag.effect)
        ));
    }
    for (name, knob) in knob_flags() {
        let variable = format!("`{FARANDOLE_PREFIX}{}`", knob.name);
        page.push_str(&format!(
            "| `--{name}` | {} | `farandole.{}` | {variable} |\n",
            text(knob.doc),
            knob.key
        ));
    }
    page.push_str(
        "| `-v`, `--version` | Print the version |  |  |\n| `-h`, `--help` | Print the flags |  |  \
         |\n",
    );
    let ignored = IGNORED_VARIABLES.map(|(name, flag)| format!("`{name}` (`--{flag}`)")).join(", ");
    page.push_str(&format!(
        "\nThese Horovod variables mean nothing here, for the same reason as the flag. The command \
         prints that once: {ignored}.\n"
    ));
    page.push_str(
        "\nThe exit status is that of the worker that failed first, 128 + n for signal n, and 1 \
         when the job could not begin or a host was lost.\n",
    );
}

fn knob_variable(does: FlagEffect) -> String {
    let key = match does {
        FlagEffect::SetKnob(key) | FlagEffect::SetKnobMib(key) | FlagEffect::SetKnobTo(key, _) => {
            key
        }
        FlagEffect::Ignored(_) | FlagEffect::HandledByRun => return String::new(),
    };
    let knob = KNOBS.iter().find(|knob| knob.key == key);
    knob.map_or(String::new(), |knob| format!("`{FARANDOLE_PREFIX}{}`", knob.name))
}

#[test]
fn the_reference_says_what_the_commands_do() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/command-line.md");
    if farandole::config::environment_variable("FARANDOLE_WRITE").is_some() {
        std::fs::write(path, reference_page()).unwrap();
    }
    let found = std::fs::read_to_string(path).unwrap();
    assert!(
        found == reference_page(),
        "run FARANDOLE_WRITE=1 cargo test -p farandole-cli reference"
    );
}
