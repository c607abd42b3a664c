//! Text tables with aligned columns, for results that a person reads.

use std::fmt;

use engine::visible::on_one_line;

use crate::bars::in_columns;
use crate::terminal::{Look, wrapped_in_column};

/// Columns below which words are set under each other only where there is no other way, and no text is shortened while
/// there are columns to leave out.
const NARROWEST_TEXT: usize = 16;

/// Columns below which a text is never shortened, nor words set under each other: nothing of it could be recognised.
const SHORTEST_TEXT: usize = 6;

/// Columns between two cells.
const GAP: usize = 2;

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
    /// Names of columns that may lose the middle of their texts.
    shortened: Vec<&'static str>,
    /// Names of columns that may be left out, the first one first.
    spared: Vec<&'static str>,
}

impl Table {
    /// A table with these column names.
    pub(crate) fn new<S: Into<String>>(header: impl IntoIterator<Item = S>) -> Self {
        Self { header: header.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    /// Adds a row.
    pub(crate) fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(|cell| on_one_line(&cell.into()).into_owned()).collect());
    }

    /// Whether it has no row.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// With columns whose texts lose their middle on a terminal that is too narrow for them. No ids, numbers or sizes,
    /// which say something else without it.
    pub(crate) fn shortening(mut self, columns: impl IntoIterator<Item = &'static str>) -> Self {
        self.shortened = columns.into_iter().collect();
        self
    }

    /// With columns that are left out, in this order, on a terminal that is too narrow for all of them.
    pub(crate) fn sparing(mut self, columns: impl IntoIterator<Item = &'static str>) -> Self {
        self.spared = columns.into_iter().collect();
        self
    }

    /// As it is printed for a person who watches, no wider than the terminal: without columns that can be spared where
    /// there is no room for them, with the widest texts shortened, and what is long in the last column going on below,
    /// between words, or within one that no line has room for. It is wider only where columns that are always whole
    /// leave no room for the others. Elsewhere it is complete.
    pub(crate) fn fitted(mut self, look: Look) -> Self {
        if !look.live {
            return self;
        }
        for name in std::mem::take(&mut self.spared) {
            if self.needed() <= look.width {
                break;
            }
            self.leave_out(name);
        }
        let widths = self.widths_within(look.width);
        self.in_widths(&widths, look)
    }

    /// With cells that are no wider than their columns: the last one goes on below, all others lose their middle.
    fn in_widths(self, widths: &[usize], look: Look) -> Self {
        let last = self.header.len().saturating_sub(1);
        let wraps = !self.is_shortened(last);
        let mut rows = Vec::new();
        for row in self.rows {
            let cells = row.iter().zip(widths).map(|(cell, columns)| in_columns(cell, *columns, look));
            let mut cells: Vec<String> = cells.collect();
            let Some(text) = row.get(last).filter(|text| wraps && width(text) > widths[last]) else {
                rows.push(cells);
                continue;
            };
            for line in wrapped_in_column(text, widths[last]).split('\n') {
                cells.truncate(last);
                cells.push(line.to_owned());
                rows.push(std::mem::replace(&mut cells, vec![String::new(); last]));
            }
        }
        Self { header: self.header, rows, ..Self::default() }
    }

    /// What each column takes where all of them take no more than `room`, the widest of those that can be narrower
    /// being so. Words of the last one stay whole where they can. Where there is no such way, it is not wrapped: words
    /// under each other need some room.
    fn widths_within(&self, room: usize) -> Vec<usize> {
        let of_the_last = [self.longest_word().max(NARROWEST_TEXT), NARROWEST_TEXT, SHORTEST_TEXT, usize::MAX];
        let floors = of_the_last.map(|least| self.floors(SHORTEST_TEXT, least));
        let [.., unwrapped] = &floors;
        let floors = floors.iter().find(|floors| taken(floors) <= room).unwrap_or(unwrapped);
        let mut widths = self.widths();
        while taken(&widths) > room {
            let narrower = (0..widths.len()).filter(|column| widths[*column] > floors[*column]);
            let Some(widest) = narrower.max_by_key(|column| widths[*column]) else { break };
            widths[widest] -= 1;
        }
        widths
    }

    /// What each column takes at least: a text that can be shortened `shortest` columns, one of the last column
    /// `of_the_last`, or as many as its title does.
    fn floors(&self, shortest: usize, of_the_last: usize) -> Vec<usize> {
        let last = self.header.len().saturating_sub(1);
        let floor = |(column, widest): (usize, usize)| match self.header.get(column) {
            Some(title) if self.is_shortened(column) => widest.min(shortest.max(width(title))),
            Some(title) if column == last => widest.min(of_the_last.max(width(title))),
            _ => widest,
        };
        self.widths().into_iter().enumerate().map(floor).collect()
    }

    /// What it takes where its texts are as short as they may be beside columns that can be spared. Words of the last
    /// column are not cut.
    fn needed(&self) -> usize {
        taken(&self.floors(NARROWEST_TEXT, self.longest_word().max(NARROWEST_TEXT)))
    }

    /// What the longest word of the last column takes.
    fn longest_word(&self) -> usize {
        let last = self.header.len().saturating_sub(1);
        let cells = self.rows.iter().filter_map(|row| row.get(last));
        cells.flat_map(|cell| cell.split(' ')).map(width).max().unwrap_or(0)
    }

    fn is_shortened(&self, column: usize) -> bool {
        self.header.get(column).is_some_and(|title| self.shortened.contains(&title.as_str()))
    }

    fn leave_out(&mut self, name: &str) {
        let Some(column) = self.header.iter().position(|title| title == name) else { return };
        for line in std::iter::once(&mut self.header).chain(&mut self.rows).filter(|line| column < line.len()) {
            line.remove(column);
        }
    }

    /// What each column takes.
    fn widths(&self) -> Vec<usize> {
        let lines = || std::iter::once(&self.header).chain(&self.rows);
        let columns = lines().map(Vec::len).max().unwrap_or(0);
        let cells = |column: usize| lines().filter_map(move |line| line.get(column));
        (0..columns).map(|column| cells(column).map(|cell| width(cell)).max().unwrap_or(0)).collect()
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
        let widths = self.widths();
        let columns = widths.len();
        let lines = || std::iter::once(&self.header).chain(&self.rows);
        let cell = |line: &'_ [String], column: usize| line.get(column).cloned().unwrap_or_default();
        let numeric: Vec<bool> = (0..columns).map(|column| self.is_numeric(column)).collect();
        for line in lines() {
            let mut text = String::new();
            for column in 0..columns {
                let cell = cell(line, column);
                let padding = " ".repeat(widths[column] - width(&cell));
                let gap = " ".repeat(if column == 0 { 0 } else { GAP });
                text +=
                    &if numeric[column] { format!("{gap}{padding}{cell}") } else { format!("{gap}{cell}{padding}") };
            }
            writeln!(f, "{}", text.trim_end())?;
        }
        Ok(())
    }
}

/// What columns of these widths take beside each other.
fn taken(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
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
        let narrower = "stage    why\nadapter  its input\n         is made\n         first, so\n         it may \
                        stay\nbase     cached\n";
        assert_eq!(table().fitted(Look { width: 20, ..look }).to_string(), narrower);
        assert_eq!(table().fitted(Look { width: 14, ..look }).to_string(), table().to_string());
        let lines = [("rows".to_owned(), "48".to_owned()), ("time".to_owned(), "about as long as before".to_owned())];
        assert_eq!(list(&lines, look), "  rows  48\n  time  about as long as\n        before\n");
    }

    /// A table of results, at a terminal of so many columns.
    fn results(columns: usize) -> String {
        let mut table = Table::new(["key", "stage", "outputs", "files", "size", "why"])
            .shortening(["stage", "outputs"])
            .sparing(["outputs", "files"]);
        let stage = "a_pipeline_of_a_long_name/its_first_stage +3 more";
        table.row(["0123456789ab", stage, "model, tokenizer (files)", "12", "100.0 MiB", "not of the newest runs"]);
        table.row(["ba9876543210", "p/s", "rows", "3", "1.0 KiB", "requested"]);
        table.fitted(Look { colour: false, unicode: true, width: columns, live: true }).to_string()
    }

    #[test]
    fn the_widest_text_is_shortened_and_columns_that_can_be_spared_are_left_out_where_there_is_no_room() {
        let table = results(100);
        assert!(table.contains("outputs") && table.contains("…") && table.contains("12  100.0 MiB"), "{table}");
        assert!(table.contains(" +3 more") && !table.contains("its_first_stage +3 more"), "{table}");
        let table = results(70);
        assert!(!table.contains("outputs") && table.contains("files"), "{table}");
        let table = results(60);
        assert!(!table.contains("files") && table.contains("not of the\n"), "{table}");
        for columns in 51..130 {
            let table = results(columns);
            assert!(table.lines().all(|line| width(line) <= columns), "{columns}: {table}");
            for whole in ["0123456789ab", "ba9876543210", "100.0 MiB", "requested"] {
                assert!(table.contains(whole), "{columns}: {table}");
            }
        }
    }

    #[test]
    fn a_table_is_as_it_is_in_a_pipe_and_where_there_is_room() {
        let table = || {
            let mut table = Table::new(["stage", "size"]).shortening(["stage"]).sparing(["size"]);
            table.row(["a_stage_of_a_rather_long_name", "1.0 MiB"]);
            table
        };
        let look = Look { colour: false, unicode: true, width: 30, live: true };
        let narrow = "stage                  size\na_stage_of…_long_name  1.0 MiB\n";
        assert_eq!(table().fitted(look).to_string(), narrow);
        for whole in [Look { live: false, ..look }, Look { width: 38, ..look }] {
            assert_eq!(table().fitted(whole).to_string(), table().to_string());
        }
    }

    #[test]
    fn a_column_is_left_out_before_a_word_of_the_last_one_is_too_long() {
        let mut table = Table::new(["recipe", "family", "model"]).sparing(["family"]);
        table.row(["lora", "llama", "meta-llama/Llama-3.2-1B-Instruct"]);
        let look = Look { colour: false, unicode: true, width: 40, live: true };
        let narrow = "recipe  model\nlora    meta-llama/Llama-3.2-1B-Instruct\n";
        assert_eq!(table.fitted(look).to_string(), narrow);
    }

    #[test]
    fn a_word_of_the_last_column_is_cut_where_no_text_beside_it_can_be_shorter() {
        let file = "out/adapter/adapter_model.safetensors";
        let mut table = Table::new(["stage", "file"]).shortening(["stage"]);
        table.row(["a_stage_of_a_rather_long_name", file]);
        let look = |width| Look { colour: false, unicode: true, width, live: true };
        let whole = format!("stage        file\na_sta…_name  {file}\n");
        assert_eq!(table.clone().fitted(look(50)).to_string(), whole);
        let cut = "stage                file\na_stage_o…long_name  out/adapter/adapter\n                     \
                   _model.safetensors\n";
        assert_eq!(table.fitted(look(40)).to_string(), cut);
    }

    /// Numbers without any order, the same ones each time.
    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, bound: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % bound
        }

        /// A text of at most so many words of at most so many letters.
        fn text(&mut self, most_words: usize, longest: usize) -> String {
            let mut text = String::new();
            for word in 0..self.below(most_words + 1) {
                text += if word == 0 { "" } else { " " };
                for _ in 0..=self.below(longest) {
                    text += ["a", "é", "e\u{301}", "你", "-", "7"][self.below(6)];
                }
            }
            text
        }
    }

    /// Of what can be neither shortened nor left out there is as much as the narrowest terminal here has room for.
    #[test]
    fn no_line_is_wider_than_the_terminal() {
        let mut numbers = Numbers(1);
        let shortened: [&[&'static str]; 2] = [&["stage", "file"], &["stage", "file", "why"]];
        let spared: [&[&'static str]; 3] = [&[], &["size"], &["file", "size", "no such column"]];
        for _ in 0..3000 {
            let mut table = Table::new(["key", "stage", "size", "file", "why"])
                .shortening(shortened[numbers.below(2)].iter().copied())
                .sparing(spared[numbers.below(3)].iter().copied());
            for _ in 0..numbers.below(4) {
                let [key, size] = [0, 1].map(|_| numbers.text(1, 3));
                let [stage, file] = [0, 1].map(|_| numbers.text(4, 40));
                table.row([key, stage, size, file, numbers.text(8, 60)]);
            }
            let columns = 40 + numbers.below(120);
            let shown = table.fitted(Look { colour: false, unicode: true, width: columns, live: true }).to_string();
            assert!(shown.lines().all(|line| width(line) <= columns), "{columns}: {shown}");
        }
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
