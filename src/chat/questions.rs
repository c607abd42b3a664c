//! Where questions come from: a line that is edited on the terminal, with those of earlier conversations to go back to,
//! or the lines of a script.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, Lines, StdinLock, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use engine::error::StageError;
use rustyline::Editor;
use rustyline::config::Config;
use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;

use crate::render::Failure;
use crate::terminal;

/// Lines of earlier conversations that can be gone back to.
const KEPT_LINES: usize = 1000;

/// Lines, one after the other.
pub(super) enum Questions {
    /// Of somebody at a terminal.
    Edited(Box<Edited>),
    /// Of a script.
    Read(Lines<StdinLock<'static>>),
}

/// Lines that are edited.
pub(super) struct Edited {
    editor: Editor<(), MemHistory>,
    /// None where they cannot be kept.
    history: Option<History>,
}

impl Questions {
    /// Those of a script.
    pub(super) fn read() -> Self {
        Self::Read(io::stdin().lock().lines())
    }

    /// Those of somebody at a terminal.
    ///
    /// # Errors
    /// Fails if the terminal does.
    pub(super) fn edited() -> Result<Self, Failure> {
        let config = Config::builder().max_history_size(KEPT_LINES).map_err(failure)?.build();
        let lines = MemHistory::with_config(&config);
        let mut editor = Editor::with_history(config, lines).map_err(failure)?;
        let opened = History::open().transpose().map(|opened| {
            let (history, lines) = opened?;
            for line in lines {
                editor.add_history_entry(line).map_err(io::Error::other)?;
            }
            Ok(history)
        });
        let history = opened.and_then(|opened| opened.map_err(|error: io::Error| not_kept(&error)).ok());
        Ok(Self::Edited(Box::new(Edited { editor, history })))
    }

    /// The next line; none at the end.
    ///
    /// # Errors
    /// Fails if it cannot be read.
    pub(super) fn next(&mut self) -> Result<Option<String>, Failure> {
        match self {
            Self::Edited(edited) => edited.next(),
            Self::Read(lines) => Ok(lines.next().transpose()?),
        }
    }
}

impl Edited {
    fn next(&mut self) -> Result<Option<String>, Failure> {
        loop {
            match self.editor.readline("> ") {
                Ok(line) => {
                    self.keep(&line)?;
                    return Ok(Some(line));
                }
                Err(ReadlineError::Interrupted) => terminal::tell_line("/quit or Ctrl-D ends"),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => return Err(failure(error)),
            }
        }
    }

    fn keep(&mut self, line: &str) -> Result<(), Failure> {
        // Not what is empty, nor the same twice.
        let is_kept = !line.trim().is_empty() && self.editor.add_history_entry(line).map_err(failure)?;
        if let Some(Err(error)) = self.history.as_mut().filter(|_| is_kept).map(|history| history.add(line)) {
            not_kept(&error);
            self.history = None;
        }
        Ok(())
    }
}

fn not_kept(error: &io::Error) {
    terminal::tell_line(format_args!("warning: questions are not kept for the next conversation: {error}"));
}

fn failure(error: ReadlineError) -> Failure {
    match error {
        ReadlineError::Io(error) => error.into(),
        error => StageError::internal("the terminal cannot be read").with_source(error).into(),
    }
}

/// The lines of earlier conversations: a file that its owner alone can read, each line as JSON, for a pasted one may
/// have several.
struct History(File);

impl History {
    /// The user's, with its newest lines; none where the user has no home.
    fn open() -> io::Result<Option<(Self, Vec<String>)>> {
        let named = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        let states = named.or_else(|| std::env::home_dir().map(|home| home.join(".local/state")));
        let Some(folder) = states.map(|states| states.join("pipeline")) else { return Ok(None) };
        fs::create_dir_all(&folder)?;
        let path = folder.join("chat_history");
        let text = match fs::read(&path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error),
        };
        let lines: Vec<&str> = text.lines().collect();
        let newest = &lines[lines.len().saturating_sub(KEPT_LINES)..];
        if lines.len() > 2 * KEPT_LINES {
            let shorter = folder.join(format!("chat_history.{}", std::process::id()));
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&shorter)?;
            newest.iter().try_for_each(|line| writeln!(file, "{line}"))?;
            fs::rename(&shorter, &path)?;
        }
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path)?;
        // What is none of ours, or was cut off, is no line.
        let newest = newest.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
        Ok(Some((Self(file), newest)))
    }

    fn add(&mut self, line: &str) -> io::Result<()> {
        self.0.write_all(format!("{}\n", serde_json::Value::from(line)).as_bytes())
    }
}
