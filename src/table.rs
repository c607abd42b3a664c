//! Text tables with aligned columns, for results that a person reads.

use std::fmt;

use engine::visible::on_one_line;

use crate::bars::in_columns;
use crate::terminal::{Look, wrapped};

/// Columns below which words are not set under each other.
const NARROWEST_TEXT: usize = 16;

/// Names and what is said of each, set in and under each other; a longer text goes on in its own column for a person
/// who watches.
pub(crate) fn list(lines: &[(String, String)], look: Look) -> String {
    let widest = lines.iter().map(|(name, _)| width(name)).max().unwrap_or(0);
    let line = |(name, text): &(String, String)| {
        let room = " ".repeat(widest - width(name));
        look.wrap(&format!("  {name}{room}  {text}"), widest + 2) + "\n"
    };
    lines.iter().map(line).collect()
}

/// Rows of cells under a header.
#[derive(Debug, Clone, Default)]
pub(crate) struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column names.
    pub(crate) fn new<S: Into<String>>(header: impl IntoIterator<Item = S>) -> Self {
        Self { header: header.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    pub(crate) fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(|cell| on_one_line(&cell.into()).into_owned()).collect());
    }

    /// Whether it has no row.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// As it is printed for a person who watches: what is long in its last column goes on below, between words, where
    /// the terminal ends.
    pub(crate) fn fitted(self, look: Look) -> Self {
        let last = self.header.len().saturating_sub(1);
        let cell = |line: &'_ [String], column: usize| line.get(column).map_or(0, |cell| width(cell));
        let lines = || std::iter::once(&self.header).chain(&self.rows);
        let before: usize = (0..last).map(|column| 2 + lines().map(|line| cell(line, column)).max().unwrap_or(0)).sum();
        let room = look.width.saturating_sub(before);
        if !look.live || room < NARROWEST_TEXT {
            return self;
        }
        let mut rows = Vec::new();
        for mut row in self.rows {
            let text = row.get(last).map(|text| wrapped(text, room, 0)).unwrap_or_default();
            for (number, line) in text.split('\n').enumerate() {
                if number > 0 {
                    row = vec![String::new(); last];
                }
                row.truncate(last);
                row.push(line.to_owned());
                rows.push(row.clone());
            }
        }
        Self { header: self.header, rows }
    }

    /// Without its last column.
    pub(crate) fn without_last(mut self) -> Self {
        let last = self.header.len().saturating_sub(1);
        self.header.truncate(last);
        self.rows.iter_mut().for_each(|row| row.truncate(last));
        self
    }

    /// With so many columns less for the ids in its first column, which lose their middle.
    pub(crate) fn with_short_ids(mut self, less: usize, look: Look) -> Self {
        let cells = || self.rows.iter().filter_map(|row| row.first());
        let widest = cells().map(|cell| width(cell)).max().unwrap_or(0);
        let room = widest.saturating_sub(less).max(NARROWEST_TEXT);
        for cell in self.rows.iter_mut().filter_map(|row| row.first_mut()) {
            *cell = in_columns(cell, room, look);
        }
        self
    }

    /// Columns that it takes.
    pub(crate) fn width(&self) -> usize {
        self.to_string().lines().map(width).max().unwrap_or(0)
    }

    /// Columns of figures are set flush right.
    fn is_numeric(&self, column: usize) -> bool {
        let mut cells = self.rows.iter().filter_map(|row| row.get(column)).filter(|cell| !cell.is_empty()).peekable();
        cells.peek().is_some()
            && cells.all(|cell| cell.trim_end_matches(['%', '*', ' ']).replace([',', '_'], "").parse::<f64>().is_ok())
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).chain([self.header.len()]).max().unwrap_or(0);
        let lines = || std::iter::once(&self.header).chain(&self.rows);
        let cell = |line: &'_ [String], column: usize| line.get(column).cloned().unwrap_or_default();
        let widths: Vec<usize> =
            (0..columns).map(|column| lines().map(|line| width(&cell(line, column))).max().unwrap_or(0)).collect();
        let numeric: Vec<bool> = (0..columns).map(|column| self.is_numeric(column)).collect();
        for line in lines() {
            let mut text = String::new();
            for column in 0..columns {
                let cell = cell(line, column);
                let padding = " ".repeat(widths[column] - width(&cell));
                let gap = if column == 0 { "" } else { "  " };
                text +=
                    &if numeric[column] { format!("{gap}{padding}{cell}") } else { format!("{gap}{cell}{padding}") };
            }
            writeln!(f, "{}", text.trim_end())?;
        }
        Ok(())
    }
}

/// How many columns a text takes on a terminal: East Asian wide characters take two, combining marks none.
pub(crate) fn width(text: &str) -> usize {
    unicode_width::UnicodeWidthStr::width(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stand_left_and_figures_right() {
        let mut table = Table::new(["metric", "before", "after"]);
        table.row(["perplexity", "291.5", "1.75"]);
        table.row(["rouge1", "0", "0.5"]);
        assert_eq!(
            table.to_string(),
            "metric      before  after\nperplexity   291.5   1.75\nrouge1           0    0.5\n"
        );
    }

    #[test]
    fn what_is_long_goes_on_in_its_own_column_where_a_person_watches() {
        let look = Look { colour: false, unicode: true, width: 30, live: true };
        let table = || {
            let mut table = Table::new(["stage", "why"]);
            table.row(["adapter", "its input is made first, so it may stay"]);
            table.row(["base", "cached"]);
            table
        };
        let narrow = "stage    why\nadapter  its input is made\n         first, so it may stay\nbase     cached\n";
        assert_eq!(table().fitted(look).to_string(), narrow);
        assert_eq!(table().fitted(Look { live: false, ..look }).to_string(), table().to_string());
        assert_eq!(table().fitted(Look { width: 20, ..look }).to_string(), table().to_string());
        let mut ids = Table::new(["stage", "state"]);
        ids.row(["adapter[lora.rank=4,epochs=2]", "done"]);
        assert_eq!(
            ids.with_short_ids(8, look).to_string(),
            "stage                  state\nadapter[lo…,epochs=2]  done\n"
        );
        let lines = [("rows".to_owned(), "48".to_owned()), ("time".to_owned(), "about as long as before".to_owned())];
        assert_eq!(list(&lines, look), "  rows  48\n  time  about as long as\n        before\n");
    }

    #[test]
    fn a_cell_is_one_line_in_which_nothing_is_hidden() {
        let mut table = Table::new(["file", "size"]);
        table.row(["a\nb\x1b[31m", "1"]);
        assert_eq!(table.to_string(), "file          size\na\\nb\\x1b[31m     1\n");
    }

    #[test]
    fn a_wide_character_counts_twice() {
        let mut table = Table::new(["a", "b"]);
        table.row(["你是谁", "x"]);
        assert_eq!(table.to_string(), "a       b\n你是谁  x\n");
    }
}
