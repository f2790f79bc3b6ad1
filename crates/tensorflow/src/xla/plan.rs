// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The text of a custom call: the operation, and the shapes of its tensors.
//!
//! ```text
//! call    = kind "," reduction "," prescale "," postscale "," root "," process set "," ranks "," name { ";" tensor }
//! tensor  = dtype ":" bytes of the output ":" [ extent { "," extent } ]
//! ```
//! Numbers are decimal; factors are doubles by their bits; kinds below 100 are the engine table's
//! operations, from 100 on questions about the world; dtypes are TensorFlow's; ranks are how many
//! the shapes were made for, 0 when they fit any number. The name is the rest of its part, without
//! a semicolon.

use std::ffi::c_int;

use farandole_door::{OperationCode, SubmissionHeader};

/// Kinds from here on are questions.
pub(super) const FIRST_QUERY_KIND: u32 = 100;
/// The kind that doubles one 32-bit integer, for Python to try.
pub(super) const PROBE_KIND: u32 = 200;

/// The operation to execute.
#[derive(Debug, PartialEq)]
pub(super) enum XlaCallPlan {
    Collective(OperationCode, PlannedCollective),
    WorldQuery { question: u32, process_set: u32 },
    Probe,
}

/// A collective on one or several tensors.
#[derive(Debug)]
pub(super) struct PlannedCollective {
    pub(super) call: SubmissionHeader,
    /// Members of the process set that shapes were made for; 0 when it does not matter.
    pub(super) ranks: u32,
    pub(super) name: String,
    pub(super) tensors: Vec<PlannedTensor>,
}

impl PartialEq for PlannedCollective {
    fn eq(&self, other: &Self) -> bool {
        (&self.name, self.ranks, &self.tensors) == (&other.name, other.ranks, &other.tensors)
    }
}

/// One tensor of a collective.
#[derive(Debug, PartialEq)]
pub(super) struct PlannedTensor {
    pub(super) dtype: c_int,
    pub(super) output_bytes: usize,
    pub(super) shape: Vec<u64>,
}

/// Reads a call's text.
///
/// # Errors
/// A description of the error in the text.
pub(super) fn parse_call_plan(text: &str) -> Result<XlaCallPlan, String> {
    let mut parts = text.split(';');
    // The name may contain commas, so it is the rest of the head.
    let mut head = parts.next().unwrap_or_default().splitn(8, ',');
    let mut number = || head.next().and_then(|part| part.parse::<u64>().ok());
    let wrong = || format!("no such call: {text}");
    let small = |number: Option<u64>| number.and_then(|number| u32::try_from(number).ok());
    let (kind, reduction) = (small(number()), small(number()));
    let (prescale, postscale) = (number().map(f64::from_bits), number().map(f64::from_bits));
    let (root, process_set, ranks) = (small(number()), small(number()), small(number()));
    let kind = kind.ok_or_else(wrong)?;
    let process_set = process_set.ok_or_else(wrong)?;
    if kind == PROBE_KIND {
        return Ok(XlaCallPlan::Probe);
    }
    if kind >= FIRST_QUERY_KIND {
        return Ok(XlaCallPlan::WorldQuery { question: kind - FIRST_QUERY_KIND, process_set });
    }
    let operation = OperationCode::from_number(kind).ok_or_else(wrong)?;
    let call = SubmissionHeader {
        operation: kind,
        reduction: reduction.ok_or_else(wrong)?,
        prescale: prescale.ok_or_else(wrong)?,
        postscale: postscale.ok_or_else(wrong)?,
        root: root.ok_or_else(wrong)?,
        process_set,
        // Names come from the traced program, so that each run of it has the same ones.
        numbered: 0,
        // XLA's thread waits for the result and drives the operation meanwhile.
        attended: 1,
    };
    let name = head.next().filter(|name| !name.is_empty()).ok_or_else(wrong)?.to_owned();
    let ranks = ranks.ok_or_else(wrong)?;
    let tensors =
        parts.map(parse_tensor).collect::<Option<Vec<_>>>().filter(|tensors| !tensors.is_empty());
    Ok(XlaCallPlan::Collective(
        operation,
        PlannedCollective { call, ranks, name, tensors: tensors.ok_or_else(wrong)? },
    ))
}

fn parse_tensor(text: &str) -> Option<PlannedTensor> {
    let mut parts = text.splitn(3, ':');
    let dtype = parts.next()?.parse().ok()?;
    let output_bytes = parts.next()?.parse().ok()?;
    let extents = parts.next()?;
    let shape = if extents.is_empty() {
        Vec::new()
    } else {
        extents.split(',').map(|extent| extent.parse().ok()).collect::<Option<_>>()?
    };
    Some(PlannedTensor { dtype, output_bytes, shape })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: u64 = 1.0f64.to_bits();

    #[test]
    fn a_text_says_what_is_done_with_which_tensors() {
        let plan =
            parse_call_plan(&format!("0,1,{ONE},{},0,3,4,a,name;1:24:2,3;9:8:", 0.5f64.to_bits()))
                .unwrap();
        let XlaCallPlan::Collective(operation, collective) = plan else { unreachable!("{plan:?}") };
        assert_eq!((operation, &*collective.name), (OperationCode::Allreduce, "a,name"));
        let call = collective.call;
        assert_eq!(
            (call.reduction, call.prescale, call.postscale, call.process_set),
            (1, 1.0, 0.5, 3)
        );
        assert_eq!((call.attended, call.numbered, collective.ranks), (1, 0, 4));
        let expected = [(1, 24, vec![2, 3]), (9, 8, vec![])];
        let tensors = collective.tensors.iter().map(|t| (t.dtype, t.output_bytes, t.shape.clone()));
        assert_eq!(tensors.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn questions_need_no_tensors() {
        let plan = parse_call_plan(&format!("101,0,{ONE},{ONE},0,7,0,")).unwrap();
        assert_eq!(plan, XlaCallPlan::WorldQuery { question: 1, process_set: 7 });
        assert_eq!(
            parse_call_plan(&format!("200,0,{ONE},{ONE},0,0,0,")).unwrap(),
            XlaCallPlan::Probe
        );
    }

    #[test]
    fn an_invalid_call_is_named() {
        for text in [
            "",
            "0",
            "0,1,2,3,4,5,6,",
            "0,1,2,3,4,5,6,name",
            "0,1,2,3,4,5,6,name;x:1:2",
            "77,1,2,3,4,5,6,name;1:4:1",
        ] {
            assert_eq!(parse_call_plan(text).unwrap_err(), format!("no such call: {text}"));
        }
    }
}
