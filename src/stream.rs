//! An answer as it grows, on a terminal: of one stage at a time, under its name.
//!
//! It leaves to others: bars and lines about stages (`progress`), and the report that says the same at the end (`run`).

use std::collections::BTreeSet;
use std::io::Write;

use engine::visible::visible;

use crate::terminal::Look;

/// Shows what a stage says piece by piece.
pub(crate) struct Stream {
    out: Box<dyn Write>,
    look: Look,
    /// The stage that is shown.
    stage: Option<String>,
    /// Stages that began while another was shown; their answers come with the report, whole.
    late: BTreeSet<String>,
    /// Text stands on the line.
    mid_line: bool,
}

impl Stream {
    /// A stream onto a terminal.
    pub(crate) fn new(out: Box<dyn Write>, look: Look) -> Self {
        Self { out, look, stage: None, late: BTreeSet::new(), mid_line: false }
    }

    /// Whether a stage is shown currently.
    pub(crate) fn is_open(&self) -> bool {
        self.stage.is_some()
    }

    /// Whether a piece of this stage will be shown.
    pub(crate) fn takes(&self, stage: &str) -> bool {
        !self.late.contains(stage) && self.stage.as_deref().is_none_or(|shown| shown == stage)
    }

    /// Shows the next piece of what a stage says, unless another is shown.
    pub(crate) fn piece(&mut self, stage: &str, text: &str) {
        if !self.takes(stage) {
            self.late.insert(stage.to_owned());
            return;
        }
        if self.stage.is_none() {
            self.stage = Some(stage.to_owned());
            self.write(&format!("{}\n", self.look.paint("1", &format!("[{stage}]"))));
        }
        self.write(&visible(text));
    }

    /// Makes room for a line of another kind.
    pub(crate) fn interrupt(&mut self) {
        if self.mid_line {
            self.write("\n");
        }
    }

    /// Ends what a stage says; whether it was shown from its begin to its end.
    pub(crate) fn close(&mut self, stage: &str) -> bool {
        self.late.remove(stage);
        let shown = self.stage.as_deref() == Some(stage);
        if shown {
            self.interrupt();
            self.stage = None;
        }
        shown
    }

    /// A terminal that has gone away is no reason to end the run.
    fn write(&mut self, text: &str) {
        let _ = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush());
        self.mid_line = !text.ends_with('\n') && (self.mid_line || !text.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Screen(Arc<Mutex<Vec<u8>>>);

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn stream() -> (Stream, impl Fn() -> String) {
        let screen = Screen::default();
        let shown = screen.clone();
        let look = Look { colour: false, unicode: true, width: 80, live: true };
        let text = move || String::from_utf8(shown.0.lock().unwrap().clone()).unwrap();
        (Stream::new(Box::new(screen), look), text)
    }

    #[test]
    fn one_answer_is_shown_at_a_time_and_whole() {
        let (mut stream, text) = stream();
        stream.piece("asked", "Who?\n  I");
        stream.piece("other", "never");
        stream.piece("asked", " am");
        assert!(stream.is_open() && stream.takes("asked") && !stream.takes("other"));
        assert!(stream.close("asked"));
        // It began unseen, so what is left of it is not shown either.
        stream.piece("other", " shown");
        assert!(!stream.close("other"));
        assert_eq!(text(), "[asked]\nWho?\n  I am\n");
        stream.piece("other", "now");
        assert!(stream.close("other"));
        assert_eq!(text(), "[asked]\nWho?\n  I am\n[other]\nnow\n");
    }

    #[test]
    fn another_line_does_not_run_into_the_answer() {
        let (mut stream, text) = stream();
        stream.interrupt();
        stream.piece("asked", "I am");
        stream.interrupt();
        stream.interrupt();
        stream.piece("asked", " here");
        stream.close("asked");
        assert_eq!(text(), "[asked]\nI am\n here\n");
    }
}
