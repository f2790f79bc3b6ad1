// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Counts in texts for users.

/// Returns a number and its noun, such as `1 rank` and `3 processes`.
///
/// # Examples
///
/// ```
/// use farandole_world::format_counted_noun;
///
/// assert_eq!(format_counted_noun(1, "rank"), "1 rank");
/// assert_eq!(format_counted_noun(2, "process"), "2 processes");
/// ```
pub fn format_counted_noun(count: u64, noun: &str) -> String {
    let ending = if count == 1 {
        ""
    } else if (noun.ends_with('s') || noun.ends_with("ch") || noun.ends_with('x'))
        && !noun.ends_with("epoch")
    {
        "es"
    } else {
        "s"
    };
    format!("{count} {noun}{ending}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_thing_is_singular() {
        for (count, noun, expected) in [
            (0, "run", "0 runs"),
            (1, "run", "1 run"),
            (2, "run", "2 runs"),
            (1, "process", "1 process"),
            (0, "process", "0 processes"),
            (3, "batch", "3 batches"),
            (3, "epoch", "3 epochs"),
            (1000, "row group", "1000 row groups"),
        ] {
            assert_eq!(format_counted_noun(count, noun), expected);
        }
    }
}
