// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole agent`: the process that a launcher on another host starts here.

use std::io;

use anyhow::Result;
use clap::Command;
use farandole::launcher::{AgentHello, serve_one_launcher};

use crate::embedding_interpreter::EmbeddingInterpreter;

pub(crate) fn build_command() -> Command {
    Command::new("agent")
        .about(
            "Serves a launcher on another host through standard input and output; `farandole run` \
             starts it.",
        )
        .hide(true)
}

/// Serves until the launcher is gone or all workers have ended.
pub(crate) fn run_agent(surroundings: &dyn EmbeddingInterpreter) -> Result<i32> {
    let python = surroundings.installation();
    serve_one_launcher(
        &AgentHello::new(python.version, python.executable),
        io::stdin(),
        io::stdout(),
    )?;
    Ok(0)
}
