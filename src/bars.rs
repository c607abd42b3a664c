//! Bars on a terminal: one for each running stage, and a line below them for the whole run.
//!
//! It leaves to others: what is counted and the words for it (`progress`).

use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::table;
use crate::terminal::{Look, SilentKeys};

/// A note longer than this gets lines of its own, so that a narrow terminal never cuts off the time left.
const LONGEST_NOTE_BESIDE_BAR: usize = 16;

/// Columns of a bar where there is room, and those below which there is none at all.
const WIDEST_BAR: usize = 24;
const NARROWEST_BAR: usize = 6;

/// By how much the lines of a note are set in.
const NOTE_INDENT: usize = 4;

/// The bars of a run.
pub(crate) struct Bars {
    all: MultiProgress,
    footer: ProgressBar,
    /// Width of the column of stage ids.
    width: usize,
    look: Look,
    _keys: SilentKeys,
}

/// The bar of a running stage.
pub(crate) struct StageBar {
    bar: ProgressBar,
    /// The stage's id, as long as its column.
    name: String,
    shape: Shape,
    /// Columns of the bar itself.
    width: usize,
    look: Look,
}

/// How a stage's bar is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// The stage has not said how much there is to do.
    WithoutBar,
    /// Bar, count, time left and a short note.
    OneLine,
    /// A long note is below.
    WithLines,
}

impl Bars {
    /// Begins to show a run of this many stages, the longest id of which takes `width` columns.
    pub(crate) fn new(stages: u64, width: usize, look: Look) -> Self {
        let width = width.min(28).min(look.width / 3);
        let all = MultiProgress::new();
        let footer = all.add(ProgressBar::new(stages));
        let dot = look.either("·", "-");
        footer.set_style(style(&format!("  {{pos}} of {{len}} stages {dot} {{elapsed}}"), look));
        footer.enable_steady_tick(Duration::from_millis(250));
        Self { all, footer, width, look, _keys: SilentKeys::new() }
    }

    /// Adds a running stage.
    pub(crate) fn stage(&self, stage: &str, text: &str) -> StageBar {
        let bar = self.all.insert_before(&self.footer, ProgressBar::new(0));
        let name = self.pad(&in_columns(stage, self.width, self.look));
        let shape = Shape::WithoutBar;
        bar.set_style(style(&shape.template(&name, 0), self.look));
        bar.set_prefix(text.to_owned());
        bar.enable_steady_tick(Duration::from_millis(120));
        // Counting alone draws nothing before the next tick: what was cached would be missing in what is seen first.
        self.footer.force_draw();
        StageBar { bar, name, shape, width: 0, look: self.look }
    }

    /// Prints a line about a stage above the bars.
    pub(crate) fn say(&self, sign: &str, stage: &str, text: &str) {
        // A line that cannot be written to the terminal is lost; the record of the run has it.
        let _ = self.all.println(self.look.wrap(&format!("{sign} {}  {text}", self.pad(stage)), self.width + 4));
    }

    /// Counts a stage that has ended.
    pub(crate) fn ended(&self) {
        self.footer.inc(1);
    }

    /// Takes the bars off the screen for a while.
    pub(crate) fn hide(&self) {
        // A screen that cannot be cleared keeps a stale bar, which is no harm.
        let _ = self.all.clear();
        self.all.set_draw_target(ProgressDrawTarget::hidden());
    }

    /// Puts them back.
    pub(crate) fn show(&self) {
        self.all.set_draw_target(ProgressDrawTarget::stderr());
    }

    /// Takes everything off the screen.
    pub(crate) fn finish(self) {
        self.footer.finish_and_clear();
        // A screen that cannot be cleared is no reason to fail a finished run.
        let _ = self.all.clear();
    }

    fn pad(&self, stage: &str) -> String {
        format!("{stage}{}", " ".repeat(self.width.saturating_sub(table::width(stage))))
    }
}

impl StageBar {
    /// Shows how far the stage is: `count` is short, `note` may be long or empty.
    pub(crate) fn show(&mut self, done: u64, total: Option<u64>, count: String, note: String) {
        let shape = match total {
            _ if table::width(&note) > LONGEST_NOTE_BESIDE_BAR => Shape::WithLines,
            Some(_) => Shape::OneLine,
            None => Shape::WithoutBar,
        };
        let (beside, note) = match shape {
            Shape::OneLine => (table::width(&note) + 2, note),
            Shape::WithoutBar => (0, note),
            Shape::WithLines => (0, lines_of(&note, self.look)),
        };
        // Spinner, id and what separates them.
        let taken = 2 + table::width(&self.name) + 2 + 1 + table::width(&count) + beside;
        let width = self.look.width.saturating_sub(taken).min(WIDEST_BAR);
        let width = if width < NARROWEST_BAR { 0 } else { width };
        if (shape, width) != (self.shape, self.width) {
            (self.shape, self.width) = (shape, width);
            self.bar.set_style(style(&shape.template(&self.name, width), self.look));
        }
        self.bar.set_length(total.unwrap_or(0));
        self.bar.set_position(done);
        self.bar.set_prefix(count);
        self.bar.set_message(note);
    }

    /// Takes the bar off the screen.
    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
    }
}

impl Shape {
    /// With a bar of this many columns, none where that is 0.
    fn template(self, name: &str, bar: usize) -> String {
        let name = name.replace('{', "{{").replace('}', "}}");
        let bar = if bar == 0 { String::new() } else { format!("{{bar:{bar}}} ") };
        match self {
            Self::WithoutBar => format!("{{spinner}} {name}  {{prefix}}  {{wide_msg}}"),
            Self::OneLine => format!("{{spinner}} {name}  {bar}{{prefix}}  {{wide_msg}}"),
            Self::WithLines => format!("{{spinner}} {name}  {bar}{{prefix}}\n{{msg}}"),
        }
    }
}

/// A note in lines that a terminal has room for, broken between its figures: none of them is cut.
fn lines_of(note: &str, look: Look) -> String {
    let dot = look.either(" · ", " - ");
    let mut lines: Vec<String> = Vec::new();
    for figure in note.split(" · ") {
        match lines.last_mut() {
            Some(line) if table::width(line) + table::width(dot) + table::width(figure) < look.width => {
                line.push_str(dot);
                line.push_str(figure);
            }
            _ => lines.push(format!("{}{figure}", " ".repeat(NOTE_INDENT))),
        }
    }
    lines.join("\n")
}

/// An id in at most this many columns, without its middle where it is longer: its end tells children of a sweep apart.
pub(crate) fn in_columns(id: &str, columns: usize, look: Look) -> String {
    if table::width(id) <= columns {
        return id.to_owned();
    }
    let gap = look.either("…", "~");
    let half = columns.saturating_sub(1) / 2;
    let letters: Vec<char> = id.chars().collect();
    let mut end: String = String::new();
    for letter in letters.iter().rev() {
        if table::width(&end) + table::width(&letter.to_string()) > columns.saturating_sub(1 + half) {
            break;
        }
        end.insert(0, *letter);
    }
    let mut begin = String::new();
    for letter in letters {
        if table::width(&begin) + table::width(&letter.to_string()) > half {
            break;
        }
        begin.push(letter);
    }
    format!("{begin}{gap}{end}")
}

fn style(template: &str, look: Look) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .expect("the templates here are well formed, and the ids in them escaped")
        .tick_chars(look.either("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏✓", r"|/-\+"))
        .progress_chars(look.either("━╸╌", "=>."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_is_a_template_whatever_the_stage_is_called() {
        let look = Look { colour: false, unicode: true, width: 80, live: true };
        let bars = Bars::new(2, 10, look);
        let mut bar = bars.stage("a{b}[lora.rank=4]", "running");
        bar.show(1, None, "1 rows".to_owned(), String::new());
        assert_eq!(bar.shape, Shape::WithoutBar);
        bar.show(1, Some(2), "1/2 rows".to_owned(), "5 rows/s".to_owned());
        assert_eq!(bar.shape, Shape::OneLine);
        bar.show(2, Some(2), "2/2 rows".to_owned(), "loss 2.31, 8062 trained tokens/s".to_owned());
        assert_eq!(bar.shape, Shape::WithLines);
        bar.finish();
        bars.finish();
    }

    #[test]
    fn no_figure_of_a_note_is_cut_on_a_narrow_terminal() {
        let note = "1|5|Loss: 6.4839 lr: 8.00e-4 grad_norm: 2.097 · 4370 trained tokens/s · 6300 tokens/s · \
                    6400 padded tokens/s · peak memory 0.12 GiB";
        for width in [60, 80, 120] {
            let look = Look { colour: false, unicode: true, width, live: true };
            let lines = lines_of(note, look);
            assert!(lines.lines().all(|line| table::width(line) <= width), "{lines}");
            assert!(note.split(" · ").all(|figure| lines.contains(figure)), "{lines}");
        }
    }

    #[test]
    fn of_a_long_id_both_ends_are_shown() {
        let look = Look { colour: false, unicode: true, width: 60, live: true };
        assert_eq!(in_columns("adapter[lora.rank=4]", 12, look), "adapt…ank=4]");
        assert_eq!(in_columns("adapter", 12, look), "adapter");
        assert!(table::width(&in_columns("你是谁你是谁你是谁", 7, look)) <= 7);
    }
}
