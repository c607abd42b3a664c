//! Two answers one beside the other, as they come: a row of the terminal is shown once neither of them changes it.

use unicode_width::UnicodeWidthStr;

use crate::terminal::Look;

/// Columns of the terminal below which a text is better read alone.
const NARROWEST: usize = 30;

/// Two texts that grow.
pub(super) struct Columns {
    /// Columns of the terminal that each has.
    width: usize,
    separator: &'static str,
    texts: [Text; 2],
    /// Rows that were shown.
    shown: usize,
}

#[derive(Default)]
struct Text {
    text: String,
    is_complete: bool,
}

impl Columns {
    /// For a terminal; none where there is no room for two.
    pub(super) fn new(look: Look) -> Option<Self> {
        let separator = look.either(" │ ", " | ");
        let width = look.width.saturating_sub(separator.width()) / 2;
        let has_room = look.live && width >= NARROWEST;
        has_room.then(|| Self { width, separator, texts: Default::default(), shown: 0 })
    }

    /// The row above them, with what each is.
    pub(super) fn head(&self, names: [&str; 2]) -> String {
        let [left, right] = names.map(|name| self.wrapped(name).swap_remove(0));
        self.row(&left, &right)
    }

    /// Adds to one of them; returns the rows that can be shown now.
    pub(super) fn push(&mut self, column: usize, text: &str) -> String {
        // A terminal's own columns of tabulators are not those of the text.
        self.texts[column].text.push_str(&text.replace('\t', "    "));
        self.rows()
    }

    /// Ends one of them; returns the rows that can be shown now.
    pub(super) fn end(&mut self, column: usize) -> String {
        self.texts[column].is_complete = true;
        self.rows()
    }

    fn rows(&mut self) -> String {
        let lines = [0, 1].map(|column| self.wrapped(&self.texts[column].text));
        // The last line of a text may yet change, and further ones may follow it.
        let settled =
            [0, 1].map(|column| if self.texts[column].is_complete { usize::MAX } else { lines[column].len() - 1 });
        let longest = lines[0].len().max(lines[1].len());
        let end = settled[0].min(settled[1]).min(longest);
        let cell = |column: usize, row: usize| lines[column].get(row).map_or("", String::as_str);
        let rows: String = (self.shown..end).map(|row| self.row(cell(0, row), cell(1, row))).collect();
        self.shown = self.shown.max(end);
        rows
    }

    fn row(&self, left: &str, right: &str) -> String {
        let padding = " ".repeat(self.width.saturating_sub(left.width()));
        format!("{}\n", format!("{left}{padding}{}{right}", self.separator).trim_end())
    }

    /// The lines of a text, one at least. Those before the last stay what they are as it grows.
    fn wrapped(&self, text: &str) -> Vec<String> {
        let options = textwrap::Options::new(self.width)
            .word_separator(textwrap::WordSeparator::AsciiSpace)
            .word_splitter(textwrap::WordSplitter::NoHyphenation)
            .wrap_algorithm(textwrap::WrapAlgorithm::FirstFit);
        text.split('\n').flat_map(|line| textwrap::wrap(line, &options)).map(|line| line.into_owned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(width: usize) -> Look {
        Look { colour: false, unicode: false, width, live: true }
    }

    #[test]
    fn there_have_to_be_columns_for_two_and_somebody_who_watches() {
        assert!(Columns::new(look(63)).is_some());
        assert!(Columns::new(look(62)).is_none());
        assert!(Columns::new(Look { live: false, ..look(100) }).is_none());
    }

    #[test]
    fn a_row_is_shown_once_neither_text_changes_it() {
        let mut columns = Columns::new(look(63)).unwrap();
        let right = |text: &str| format!("{:30} | {text}\n", "");
        assert_eq!(columns.head(["one", "base"]), format!("{:30} | base\n", "one"));
        assert_eq!(columns.push(0, "a first line\nand a"), "");
        assert_eq!(columns.push(1, "so it"), "");
        assert_eq!(columns.push(1, " is\n"), format!("{:30} | so it is\n", "a first line"));
        assert_eq!(columns.end(0), "");
        assert_eq!(columns.push(1, "x\ty\nz"), format!("{:30} | x    y\n", "and a"));
        assert_eq!(columns.end(1), right("z"));
    }

    #[test]
    fn rows_are_the_same_however_the_texts_come() {
        let text = "Words of many lengths, 很多没有空格的中文字符连在一起写成一行直到行尾, and-one-word-that-no-column-has-room-for\n\n  end";
        let mut at_once = Columns::new(look(80)).unwrap();
        let whole = [at_once.push(0, text), at_once.push(1, "short"), at_once.end(0), at_once.end(1)].concat();
        let mut by_letter = Columns::new(look(80)).unwrap();
        let mut shown = by_letter.push(1, "short") + &by_letter.end(1);
        for letter in text.chars() {
            shown += &by_letter.push(0, letter.encode_utf8(&mut [0; 4]));
        }
        shown += &by_letter.end(0);
        assert_eq!(shown, whole);
        assert!(whole.lines().count() > 4 && whole.lines().all(|line| line.width() <= 80), "{whole}");
        let letters = |text: &str| text.replace(['|', ' ', '\n'], "").replace("short", "");
        assert_eq!(letters(&whole), letters(text));
    }
}
