//! Text tables with aligned columns, for results that a person reads.

use std::fmt;

use engine::visible::on_one_line;

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
