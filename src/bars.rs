//! Bars on a terminal: one for each running stage, and a line below them for the whole run.
//!
//! It leaves to others: what is counted and the words for it (`progress`).

use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::table;
use crate::terminal::Look;

/// A note longer than this gets a line of its own, so that a narrow terminal never cuts off the time left.
const LONGEST_NOTE_BESIDE_BAR: usize = 16;

/// The bars of a run.
pub(crate) struct Bars {
    all: MultiProgress,
    footer: ProgressBar,
    /// Width of the column of stage ids.
    width: usize,
    look: Look,
}

/// The bar of a running stage.
pub(crate) struct StageBar {
    bar: ProgressBar,
    /// The stage's id as it is in a template.
    name: String,
    shape: Shape,
    look: Look,
}

/// How a stage's bar is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// The stage has not said how much there is to do.
    WithoutBar,
    /// Bar, count, time left and a short note.
    OneLine,
    /// A long note stands below.
    TwoLines,
}

impl Bars {
    /// Begins to show a run of this many stages.
    pub(crate) fn new(stages: u64, width: usize, look: Look) -> Self {
        let all = MultiProgress::new();
        let footer = all.add(ProgressBar::new(stages));
        let dot = look.either("·", "-");
        footer.set_style(style(&format!("  {{pos}} of {{len}} stages {dot} {{elapsed}}"), look));
        footer.enable_steady_tick(Duration::from_millis(250));
        Self { all, footer, width, look }
    }

    /// Adds a running stage.
    pub(crate) fn stage(&self, stage: &str, text: &str) -> StageBar {
        let bar = self.all.insert_before(&self.footer, ProgressBar::new(0));
        let name = self.pad(stage).replace('{', "{{").replace('}', "}}");
        let shape = Shape::WithoutBar;
        bar.set_style(style(&shape.template(&name), self.look));
        bar.set_prefix(text.to_owned());
        bar.enable_steady_tick(Duration::from_millis(120));
        // Counting alone draws nothing before the next tick: what was cached would be missing in what is seen first.
        self.footer.force_draw();
        StageBar { bar, name, shape, look: self.look }
    }

    /// Prints a line about a stage above the bars.
    pub(crate) fn say(&self, sign: &str, stage: &str, text: &str) {
        // A line that cannot be written to the terminal is lost; the record of the run has it.
        let _ = self.all.println(format!("{sign} {}  {text}", self.pad(stage)));
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
            _ if table::width(&note) > LONGEST_NOTE_BESIDE_BAR => Shape::TwoLines,
            Some(_) => Shape::OneLine,
            None => Shape::WithoutBar,
        };
        if shape != self.shape {
            self.shape = shape;
            self.bar.set_style(style(&shape.template(&self.name), self.look));
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
    fn template(self, name: &str) -> String {
        match self {
            Self::WithoutBar => format!("{{spinner}} {name}  {{prefix}}  {{wide_msg}}"),
            Self::OneLine => format!("{{spinner}} {name}  {{bar:24}} {{prefix}}  {{wide_msg}}"),
            Self::TwoLines => format!("{{spinner}} {name}  {{bar:24}} {{prefix}}\n    {{wide_msg}}"),
        }
    }
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
        assert_eq!(bar.shape, Shape::TwoLines);
        bar.finish();
        bars.finish();
    }
}
