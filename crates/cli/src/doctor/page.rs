// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The page of the doctor: its sections, with the problems at the end.

use std::time::Instant;

use anyhow::Result;

/// The text of the page, and the problems.
#[derive(Default)]
pub(super) struct DoctorPage {
    pub(super) text: String,
    pub(super) problems: Vec<String>,
}

impl DoctorPage {
    pub(super) fn add_section(&mut self, title: &str) {
        self.text.push_str(&format!("\n{title}\n"));
    }

    pub(super) fn add_line(&mut self, name: &str, value: &str) {
        self.text.push_str(&format!("    {name:<16}{value}\n"));
    }

    pub(super) fn add_check(&mut self, works: bool, name: &str, detail: &str) {
        let mark = if works { 'X' } else { ' ' };
        self.text.push_str(&format!("    [{mark}] {name:<24}{detail}\n"));
    }

    /// Runs a trial, and records the advice as a problem if the trial fails.
    pub(super) fn run_and_record_trial(
        &mut self,
        name: &str,
        advice: &str,
        trial: impl FnOnce() -> Result<String>,
    ) {
        let started = Instant::now();
        match trial() {
            Ok(detail) => {
                let took = format!("{detail} ({:.1} ms)", started.elapsed().as_secs_f64() * 1e3);
                self.add_check(true, name, &took);
            }
            Err(error) => {
                self.add_check(false, name, &format!("{error:#}"));
                self.problems.push(format!("{name}: {error:#}. {advice}"));
            }
        }
    }
}
