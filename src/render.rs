//! Prints errors and picks exit codes; nothing else in the program does either.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::process::ExitCode;

use engine::device::DeviceMissing;
use engine::error::{Cause, StageError};
use engine::explain::{ExplainError, ResultMissing};
use engine::file::problem::{Problem, Severity};
use engine::file::source::{Sources, Span};
use engine::lock_file::LockError;
use engine::plan::{Plan, Rejected};
use engine::run::{MemoryMissing, RunError};
use engine::visible::{is_hidden, on_one_line, visible};
use miette::{
    Diagnostic, GraphicalReportHandler, GraphicalTheme, LabeledSpan, MietteError, MietteSpanContents, SourceCode,
    SourceSpan, SpanContents, ThemeCharacters, ThemeStyles,
};
use serde::Serialize;

use crate::full_disk;
use crate::progress::Verbosity;
use crate::table::width;
use crate::terminal::{self, Look};
use crate::words::{self, plural};

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It did what was asked.
    Done,
    StageFailed,
    /// The pipeline file or the command line is wrong.
    Wrong,
    /// The machine lacks something: a device, disk, memory, the network.
    Machine,
    /// The user stopped it.
    Interrupted,
}

impl Exit {
    /// The process's exit code.
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::StageFailed => 1,
            Self::Wrong => 2,
            Self::Machine => 3,
            Self::Interrupted => 130,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit.code())
    }
}

impl From<Cause> for Exit {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::Machine
            | Cause::OutOfMemory
            | Cause::DeviceOutOfMemory
            | Cause::DeviceLost
            | Cause::DiskFull
            | Cause::Network => Self::Machine,
            // What only the run could find out is a mistake of the file or of the command line all the same.
            Cause::BadParameters | Cause::MissingResult => Self::Wrong,
            Cause::Cancelled => Self::Interrupted,
            Cause::BadData
            | Cause::ChangedWhileRunning
            | Cause::CorruptInput
            | Cause::Numeric
            | Cause::Timeout
            | Cause::Crashed
            | Cause::Internal => Self::StageFailed,
        }
    }
}

/// Why a command did not do what was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A pipeline file with mistakes in it.
    Rejected(Box<Rejected>),
    /// One message with what lies beneath it.
    Told {
        /// The exit code.
        exit: Exit,
        /// What to print.
        message: Message,
    },
    /// What was wrong has been printed as it happened.
    Shown(Exit),
    /// The reader of our output went away (`| head`), which is no failure.
    OutputClosed,
}

impl Failure {
    /// The command line asks for something that is not there.
    pub(crate) fn wrong(message: impl Into<String>) -> Self {
        Self::Told { exit: Exit::Wrong, message: Message::new(message) }
    }

    /// The machine refused something.
    pub(crate) fn machine(error: impl Error + 'static) -> Self {
        Self::Told { exit: Exit::Machine, message: Message::of(&error) }.with_help_if(full_disk::help(&error))
    }

    /// How a command ends that has printed what came out: a reader that went away does not make a failure a success.
    ///
    /// # Errors
    /// Fails with `exit` where that is no success, else where the result could not be printed.
    pub(crate) fn after(exit: Exit, printed: Result<(), Self>) -> Result<(), Self> {
        match exit {
            Exit::Done => printed,
            Exit::StageFailed | Exit::Wrong | Exit::Machine | Exit::Interrupted => Err(Self::Shown(exit)),
        }
    }

    /// Its messages, outermost first, and what to do about it, for a reader that is no terminal.
    pub(crate) fn told(&self) -> (Vec<String>, Option<&str>) {
        match self {
            Self::Rejected(rejected) => {
                (rejected.problems.iter().map(|problem| problem.message.clone()).collect(), None)
            }
            Self::Told { message, .. } => {
                let messages = std::iter::successors(Some(message), |message| message.source.as_deref());
                (messages.map(|message| message.text.clone()).collect(), message.help.as_deref())
            }
            Self::Shown(_) | Self::OutputClosed => (Vec::new(), None),
        }
    }

    /// Adds what to do about it.
    #[must_use]
    pub(crate) fn with_help(mut self, help: impl Into<String>) -> Self {
        if let Self::Told { message, .. } = &mut self {
            message.help = Some(help.into());
        }
        self
    }
}

impl Failure {
    /// Adds what to do about it, unless something better is known.
    #[must_use]
    pub(crate) fn or_help(self, help: impl Into<String>) -> Self {
        match &self {
            Self::Told { message: Message { help: None, .. }, .. } => self.with_help(help),
            _ => self,
        }
    }

    /// Adds what to do about it, where something is known.
    #[must_use]
    pub(crate) fn with_help_if(self, help: Option<String>) -> Self {
        match help {
            Some(help) => self.with_help(help),
            None => self,
        }
    }

    /// A plan that cannot be explained; `sources` are the texts of the plan.
    pub(crate) fn explain(error: ExplainError, sources: Sources) -> Self {
        match error {
            ExplainError::Sources(problems) => Rejected::new(sources, problems).into(),
            ExplainError::Lock(error) => error.into(),
            error @ (ExplainError::Store(_) | ExplainError::History(_)) => Self::machine(error),
        }
    }
}

impl Failure {
    /// A run that did not begin; `sources` are the texts of the plan.
    pub(crate) fn run(error: RunError, sources: Sources) -> Self {
        match error {
            RunError::Sources(problems) | RunError::Rejected(problems) | RunError::Targets(problems) => {
                Rejected::new(sources, problems).into()
            }
            RunError::Lock(error) => error.into(),
            RunError::Explain(error) => Self::explain(*error, sources),
            RunError::Devices(ref missing) => {
                let help: Vec<String> = missing.iter().map(DeviceMissing::help).collect();
                Self::machine(error).with_help(help.join("\n"))
            }
            RunError::Memory(ref missing) => {
                let help: Vec<String> = missing.iter().map(MemoryMissing::help).collect();
                Self::machine(error).with_help(help.join("\n"))
            }
            RunError::Results(ref missing) => {
                let help: Vec<String> = missing.iter().map(ResultMissing::help).collect();
                Self::wrong(error.to_string()).with_help(help.join("\n"))
            }
            RunError::NoLocks { .. } => Self::machine(error).with_help("runs on several machines need locks (flock) that all of them see: put the home on another file system (`--home`), or have this one mounted with locks (Lustre: `-o flock`; NFS: version 4, without `nolock` and `local_lock`)"),
            RunError::Store(_) | RunError::Machine { .. } => Self::machine(error),
        }
    }
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Self {
        let exit = match &error {
            LockError::Form { .. }
            | LockError::Conflict { .. }
            | LockError::Version { .. }
            | LockError::NotPinned { .. } => Exit::Wrong,
            LockError::Read { .. } | LockError::Write { .. } => Exit::Machine,
            LockError::Resolve { source, .. } => source.cause.into(),
        };
        let help = error.help().or_else(|| full_disk::help(&error));
        Self::Told { exit, message: Message::of(&error) }.with_help_if(help)
    }
}

impl From<Rejected> for Failure {
    fn from(rejected: Rejected) -> Self {
        Self::Rejected(Box::new(rejected))
    }
}

impl From<StageError> for Failure {
    fn from(error: StageError) -> Self {
        let mut message = Message::of(&error);
        message.help = error.help.clone();
        Self::Told { exit: error.cause.into(), message }
    }
}

impl From<std::io::Error> for Failure {
    /// What comes by `?` is of printing: whatever else is written says where.
    fn from(error: std::io::Error) -> Self {
        let help = full_disk::help_to_print(&error);
        match error.kind() {
            std::io::ErrorKind::BrokenPipe => Self::OutputClosed,
            _ => Self::machine(error).with_help_if(help),
        }
    }
}

/// An error for a person: a message, what lay beneath it, and what to do.
#[derive(Debug, Default)]
pub(crate) struct Message {
    text: String,
    source: Option<Box<Message>>,
    help: Option<String>,
}

impl Message {
    /// A message alone.
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), source: None, help: None }
    }

    /// An error and the chain of its sources.
    pub(crate) fn of(error: &dyn Error) -> Self {
        Self { text: error.to_string(), source: error.source().map(|source| Box::new(Self::of(source))), help: None }
    }

    /// Adds what to do about it, where something is known.
    #[must_use]
    pub(crate) fn with_help_if(self, help: Option<String>) -> Self {
        Self { help: help.or(self.help), ..self }
    }

    /// Messages of a chain, outermost first.
    pub(crate) fn chain(texts: &[String], help: Option<String>) -> Self {
        let inner =
            |source: Option<Box<Self>>, text: &String| Some(Box::new(Self { text: text.clone(), source, help: None }));
        let chain = texts.iter().rev().fold(None, inner);
        Self { help, ..chain.map_or_else(Self::default, |chain| *chain) }
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&visible(&self.text))
    }
}

impl Error for Message {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| source as &dyn Error)
    }
}

impl Diagnostic for Message {
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.help.as_ref().map(|help| Box::new(visible(help)) as Box<dyn fmt::Display>)
    }
}

/// Prints a failure on standard error and says how the program ends.
pub(crate) fn failure(failure: &Failure) -> Exit {
    let look = Look::stderr();
    match failure {
        Failure::Rejected(rejected) => {
            terminal::tell(problems(&rejected.sources, &rejected.problems, look));
            terminal::tell_line(count(&rejected.problems));
            Exit::Wrong
        }
        Failure::Told { exit, message } => {
            terminal::tell(report(message, look));
            *exit
        }
        Failure::Shown(exit) => *exit,
        Failure::OutputClosed => Exit::Done,
    }
}

/// Prints a message on standard error in the form of an error.
pub(crate) fn message(message: &Message) {
    terminal::tell(report(message, Look::stderr()));
}

/// Says which stages of a file are not in its plan, and why.
pub(crate) fn left_out(plan: &Plan, verbosity: Verbosity) {
    if verbosity > Verbosity::Quiet {
        plan.left_out.iter().for_each(|left_out| terminal::tell_line(words::left_out(left_out, &plan.sources)));
        if let Some(gate) = plan.withheld.first() {
            let text = format!("nothing is published: this run leaves out a stage of the gate `{gate}`");
            terminal::tell_line(Look::stderr().wrap(&text, 2));
        }
    }
}

/// Prints warnings about a pipeline file on standard error, unless errors and results alone are wanted.
pub(crate) fn warnings(sources: &Sources, warnings: &[Problem], verbosity: Verbosity) {
    if verbosity == Verbosity::Quiet {
        return;
    }
    terminal::tell(problems(sources, warnings, Look::stderr()));
}

/// Problems that are shown of a file, and those of one code: nobody reads more at once, and those behind them tend to
/// be the same.
const MOST_SHOWN: usize = 200;
const MOST_OF_A_CODE: usize = 20;

/// The problems of a file, in the order of the text, each with its place underlined.
pub(crate) fn problems(sources: &Sources, problems: &[Problem], look: Look) -> String {
    let mut problems: Vec<&Problem> = problems.iter().collect();
    problems.sort_by_key(|problem| (problem.span.source.0, problem.span.offset));
    let texts: Vec<Cow<'_, str>> = sources.all().map(|source| in_place(&source.text)).collect();
    let mut of_codes: BTreeMap<&str, usize> = BTreeMap::new();
    let (mut text, mut shown) = (String::new(), 0);
    for problem in &problems {
        let of_code = of_codes.entry(problem.code).or_default();
        *of_code += 1;
        if *of_code <= MOST_OF_A_CODE && shown < MOST_SHOWN {
            shown += 1;
            text += &(report(&Shown::new(problem, sources, &texts, look), look) + "\n");
        }
    }
    for (code, count) in of_codes.iter().filter(|(_, count)| **count > MOST_OF_A_CODE) {
        text += &format!("  and {} more [{code}]\n", count - MOST_OF_A_CODE);
    }
    if shown < problems.len() {
        let hidden = problems.len() - shown;
        text += &format!(
            "  {hidden} of {} are not shown: `--format json` of `pipeline validate` lists all\n\n",
            problems.len()
        );
    }
    text
}

/// A text in which nothing is hidden and everything stays at its place: each character that a terminal would obey is
/// replaced by one of as many bytes.
fn in_place(text: &str) -> Cow<'_, str> {
    let is_hidden = |letter: char| is_hidden(letter) && !matches!(letter, '\n' | '\t');
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut letters = text.chars().peekable();
    let mut shown = String::with_capacity(text.len());
    while let Some(letter) = letters.next() {
        shown.push(match letter.len_utf8() {
            _ if !is_hidden(letter) => letter,
            // The end of a line as Windows writes it.
            1 if letter == '\r' && letters.peek() == Some(&'\n') => ' ',
            1 => '?',
            2 => '¿',
            _ => char::REPLACEMENT_CHARACTER,
        });
    }
    Cow::Owned(shown)
}

/// `2 errors, 1 warning`.
pub(crate) fn count(problems: &[Problem]) -> String {
    let of = |severity| problems.iter().filter(|problem| problem.severity == severity).count();
    match (of(Severity::Error), of(Severity::Warning)) {
        (errors, 0) => plural(errors, "error"),
        (0, warnings) => plural(warnings, "warning"),
        (errors, warnings) => format!("{}, {}", plural(errors, "error"), plural(warnings, "warning")),
    }
}

/// A problem as a program reads it.
#[derive(Serialize)]
pub(crate) struct ProblemView<'a> {
    severity: Severity,
    code: &'a str,
    message: &'a str,
    #[serde(flatten)]
    place: PlaceView<'a>,
    end_line: usize,
    end_column: usize,
    label: &'a str,
    help: Option<&'a str>,
    related: Vec<RelatedView<'a>>,
}

/// Another place that belongs to a problem.
#[derive(Serialize)]
struct RelatedView<'a> {
    #[serde(flatten)]
    place: PlaceView<'a>,
    label: &'a str,
}

/// Where a span begins.
#[derive(Serialize)]
struct PlaceView<'a> {
    file: Option<&'a str>,
    line: usize,
    column: usize,
}

impl<'a> ProblemView<'a> {
    pub(crate) fn of_all(sources: &'a Sources, problems: &'a [Problem]) -> Vec<Self> {
        problems.iter().map(|problem| Self::of(sources, problem)).collect()
    }

    fn of(sources: &'a Sources, problem: &'a Problem) -> Self {
        let (end_line, end_column) = sources.line_column(Span { offset: problem.span.end(), ..problem.span });
        let related = |(span, label): &'a (Span, String)| RelatedView { place: PlaceView::of(sources, *span), label };
        Self {
            severity: problem.severity,
            code: problem.code,
            message: &problem.message,
            place: PlaceView::of(sources, problem.span),
            end_line,
            end_column,
            label: &problem.label,
            help: problem.help.as_deref(),
            related: problem.related.iter().map(related).collect(),
        }
    }
}

impl<'a> PlaceView<'a> {
    fn of(sources: &'a Sources, span: Span) -> Self {
        let (line, column) = sources.line_column(span);
        Self { file: sources.get(span.source).map(|source| source.name.as_str()), line, column }
    }
}

/// A problem as an annotation that GitHub Actions puts beside the line.
pub(crate) fn problem_github(sources: &Sources, problem: &Problem) -> String {
    let escape = |text: &str| visible(text).replace('%', "%25").replace('\n', "%0A");
    let property = |text: &str| escape(text).replace(':', "%3A").replace(',', "%2C");
    let (line, column) = sources.line_column(problem.span);
    let (end_line, end_column) = sources.line_column(Span { offset: problem.span.end(), ..problem.span });
    let file = sources.get(problem.span.source).map_or("", |source| &source.name);
    let help = problem.help.as_ref().map(|help| format!(" ({help})")).unwrap_or_default();
    // Columns of places that span lines are not taken.
    let end = if end_line == line { format!(",endColumn={end_column}") } else { String::new() };
    format!(
        "::{} file={},line={line},endLine={end_line},col={column}{end},title={}::{}",
        problem.severity.name(),
        property(file),
        property(problem.code),
        escape(&format!("{}{help}", problem.message)),
    )
}

/// One diagnostic in miette's form, without the line that closes the frame.
fn report(diagnostic: &dyn Diagnostic, look: Look) -> String {
    let mut text = String::new();
    GraphicalReportHandler::new_themed(theme(look))
        .with_links(false)
        .with_width(look.width)
        .with_break_words(false)
        .with_word_separator(textwrap::WordSeparator::AsciiSpace)
        .with_word_splitter(textwrap::WordSplitter::NoHyphenation)
        .render_report(&mut text, diagnostic)
        .expect("writing to a string cannot fail");
    let closes = |line: &&str| !matches!(line.trim(), "╰────" | "`----");
    text.lines().filter(closes).map(|line| format!("{}\n", line.trim_end())).collect()
}

fn theme(look: Look) -> GraphicalTheme {
    GraphicalTheme {
        characters: if look.unicode { ThemeCharacters::unicode() } else { ThemeCharacters::ascii() },
        styles: if look.colour { ThemeStyles::ansi() } else { ThemeStyles::none() },
    }
}

/// Columns around a line of the text: its number and the frame.
const FRAME: usize = 10;

/// The narrowest part of a line that is shown around a place.
const NARROWEST_PART: usize = 40;

/// A problem together with the text it is in.
struct Shown<'a> {
    problem: &'a Problem,
    sources: &'a Sources,
    /// The text to point at, if there is any. An empty file has a line to point at all the same; one that could not be
    /// read has none, and its problem no label. Of a line that is too wide it has the part around the place.
    text: Option<Cow<'a, str>>,
    /// Where the labels are in that text, the problem's own first.
    labels: Vec<LabeledSpan>,
}

impl fmt::Debug for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problem.fmt(f)
    }
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", visible(&clipped_words(&self.problem.message)), self.problem.code)
    }
}

impl Error for Shown<'_> {}

/// A message of others' values may be as long as they are.
fn clipped_words(text: &str) -> Cow<'_, str> {
    const MOST: usize = 1000;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => Cow::Owned(format!("{} [...]", &text[..end])),
        None => Cow::Borrowed(text),
    }
}

impl<'a> Shown<'a> {
    /// `texts` are those of the sources as they may be shown.
    fn new(problem: &'a Problem, sources: &'a Sources, texts: &'a [Cow<'a, str>], look: Look) -> Self {
        let text = texts.get(problem.span.source.0 as usize).map(AsRef::as_ref);
        let text = match text {
            Some("") => (!problem.label.is_empty()).then_some("\n"),
            text => text,
        };
        let Some(text) = text else { return Self { problem, sources, text: None, labels: Vec::new() } };
        let here = problem.related.iter().filter(|(span, _)| span.source == problem.span.source);
        let places = std::iter::once((problem.span, &problem.label)).chain(here.map(|(span, label)| (*span, label)));
        let mut places: Vec<(Range<usize>, &String)> =
            places.map(|(span, label)| (first_line(text, span), label)).collect();
        let text = clip_lines(text, &mut places, look);
        let labels = places.into_iter().enumerate().map(|(at, (place, label))| {
            let label = (!label.is_empty()).then(|| on_one_line(&clipped_words(label)).into_owned());
            let span = SourceSpan::new(place.start.into(), place.len());
            match at {
                0 => LabeledSpan::new_primary_with_span(label, span),
                _ => LabeledSpan::new_with_span(label, span),
            }
        });
        let labels = labels.collect();
        Self { problem, sources, text: Some(text), labels }
    }

    /// Other places in another text, which are told in words.
    fn elsewhere(&self) -> impl Iterator<Item = &(Span, String)> {
        self.problem.related.iter().filter(|(span, _)| span.source != self.problem.span.source)
    }
}

/// A span within its first line: what spans lines (a whole mapping) is marked where it begins.
fn first_line(text: &str, span: Span) -> Range<usize> {
    let line = text.get(span.offset..span.offset + span.len).and_then(|text| text.lines().next());
    span.offset..span.offset + line.map_or(0, |line| line.trim_end().len())
}

/// A text in which lines with a place are no wider than the terminal: what is far from the first place in such a line
/// is replaced by an ellipsis. The places move with the text; one that is no longer in it is where its line is cut.
fn clip_lines<'a>(text: &'a str, places: &mut [(Range<usize>, &String)], look: Look) -> Cow<'a, str> {
    let columns = look.width.saturating_sub(FRAME).max(NARROWEST_PART);
    let ellipsis = look.either("…", "...");
    let mut clipped = Cow::Borrowed(text);
    for at in 0..places.len() {
        let place = places[at].0.clone();
        let start = clipped.get(..place.start).and_then(|before| before.rfind('\n')).map_or(0, |at| at + 1);
        let end = clipped.get(start..).and_then(|rest| rest.find('\n')).map_or(clipped.len(), |at| start + at);
        let Some(line) = clipped.get(start..end) else { continue };
        if width(line) <= columns {
            continue;
        }
        let part = part_around(line, place.start - start..place.end.min(end) - start, columns);
        let before = if part.start > 0 { ellipsis } else { "" };
        let after = if part.end < line.len() { ellipsis } else { "" };
        let short = format!("{before}{}{after}", &line[part.clone()]);
        let moved = |offset: usize| match offset {
            offset if offset < start => offset,
            offset if offset > end => offset + short.len() - line.len(),
            offset => {
                let within = (offset - start).clamp(part.start, part.end) - part.start;
                start + before.len() + within
            }
        };
        let all = format!("{}{short}{}", &clipped[..start], &clipped[end..]);
        for (place, _) in places.iter_mut() {
            *place = moved(place.start)..moved(place.end);
        }
        clipped = Cow::Owned(all);
    }
    clipped
}

/// The part of a line that is shown of it: the place and what is around it, a third of that before it.
fn part_around(line: &str, place: Range<usize>, columns: usize) -> Range<usize> {
    // Ellipses on both sides, of three columns at most.
    let room = columns.saturating_sub(6);
    let marked = width(&line[place.clone()]).min(room);
    // As much before the place as leaves a third of the rest behind it, and all there is where little is behind it.
    let behind = width(&line[place.end..]).min((room - marked) * 2 / 3);
    let before = room - marked - behind;
    let mut start = place.start;
    let mut used = 0;
    for (offset, letter) in line[..place.start].char_indices().rev() {
        used += letter_width(letter);
        if used > before {
            break;
        }
        start = offset;
    }
    let mut end = start;
    let mut used = 0;
    for letter in line[start..].chars() {
        used += letter_width(letter);
        if used > room {
            break;
        }
        end += letter.len_utf8();
    }
    start..end
}

fn letter_width(letter: char) -> usize {
    let mut bytes = [0; 4];
    width(letter.encode_utf8(&mut bytes))
}

impl Diagnostic for Shown<'_> {
    fn severity(&self) -> Option<miette::Severity> {
        Some(match self.problem.severity {
            Severity::Error => miette::Severity::Error,
            Severity::Warning => miette::Severity::Warning,
        })
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        let elsewhere = self.elsewhere().filter_map(|(span, label)| {
            let (line, column) = self.sources.line_column(*span);
            Some(format!("{} ({}:{line}:{column})", label, self.sources.get(span.source)?.name))
        });
        let lines: Vec<String> = self.problem.help.iter().cloned().chain(elsewhere).collect();
        (!lines.is_empty()).then(|| Box::new(visible(&lines.join("\n")).into_owned()) as Box<dyn fmt::Display>)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.text.is_some().then_some(self as &dyn SourceCode)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        Some(Box::new(self.labels.iter().cloned()))
    }
}

impl SourceCode for Shown<'_> {
    /// As for a plain string, but with the file's name; a snippet is the lines of the span and none around them, which
    /// miette cannot be asked for; and a place, which miette asks for as a snippet without context, has a column that
    /// counts characters where miette counts bytes.
    fn read_span<'a>(
        &'a self,
        span: &SourceSpan,
        before: usize,
        _after: usize,
    ) -> Result<Box<dyn SpanContents<'a> + 'a>, MietteError> {
        let text = self.text.as_deref().ok_or(MietteError::OutOfBounds)?;
        let (start, end) = (span.offset(), span.offset() + span.len());
        let whole_lines = || {
            let from = text.get(..start)?.rfind('\n').map_or(0, |at| at + 1);
            let to = text.get(end..)?.find('\n').map_or(text.len(), |at| end + at + 1);
            Some(SourceSpan::new(from.into(), to - from))
        };
        let (column, span) = if before == 0 {
            (self.sources.line_column(self.problem.span).1 - 1, *span)
        } else {
            (0, whole_lines().ok_or(MietteError::OutOfBounds)?)
        };
        let contents = text.read_span(&span, 0, 0)?;
        let name = self.sources.get(self.problem.span.source).map_or("", |source| &source.name);
        Ok(Box::new(MietteSpanContents::new_named(
            on_one_line(name).into_owned(),
            contents.data(),
            *contents.span(),
            contents.line(),
            column,
            contents.line_count(),
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::file::source::Sources;
    use engine::plan::Retries;

    const PLAIN: Look = Look { colour: false, unicode: true, width: 100, live: false };

    fn at(sources: &mut Sources, name: &str, text: &str, word: &str) -> Span {
        let source = sources.add(name, text);
        Span { source, offset: text.find(word).expect("the word is in the text"), len: word.len() }
    }

    #[test]
    fn the_page_of_causes_says_what_is_done() {
        let page = include_str!("../docs/exit-codes.md");
        let rows: Vec<Vec<&str>> = page
            .lines()
            .filter(|line| line.starts_with("| `"))
            .map(|line| line.split('|').map(str::trim).collect())
            .collect();
        let listed: Vec<&str> = rows.iter().map(|row| row[1].trim_matches('`')).collect();
        assert_eq!(listed, Cause::ALL.map(Cause::name));
        let by_default = Retries::default().on;
        for (cause, row) in Cause::ALL.into_iter().zip(rows) {
            assert_eq!(row[4], Exit::from(cause).code().to_string(), "the exit code of {}", cause.name());
            assert_eq!(row[3].ends_with("yes"), by_default.contains(&cause), "whether {} is tried again", cause.name());
        }
    }

    #[test]
    fn a_problem_shows_its_line_underlined_with_the_label_and_the_help() {
        let mut sources = Sources::default();
        let span = at(&mut sources, "xsum_lora.yaml", "stages:\n  packs:\n      tokens: tokenise\n", "tokenise");
        let problem = Problem::error(
            "unknown-stage",
            span,
            "stage `packs` reads `tokenise`, which no stage produces",
            "not declared by any stage",
        )
        .with_help("did you mean `tokens`?");
        let expected = "  × stage `packs` reads `tokenise`, which no stage produces [unknown-stage]
   ╭─[xsum_lora.yaml:3:15]
 3 │       tokens: tokenise
   ·               ────┬───
   ·                   ╰── not declared by any stage
  help: did you mean `tokens`?

";
        assert_eq!(problems(&sources, std::slice::from_ref(&problem), PLAIN), expected);
        let ascii = problems(&sources, &[problem], Look { unicode: false, ..PLAIN });
        assert!(ascii.is_ascii(), "{ascii}");
    }

    #[test]
    fn what_stands_in_a_file_is_shown_and_not_obeyed_and_stays_at_its_place() {
        let mut sources = Sources::default();
        let text = "\"s\u{1b}[31m\u{9b}\u{202e}\": 1\r\nx: 2\r\n";
        let span = at(&mut sources, "a\u{1b}.yaml", text, "1\r");
        let span = Span { len: 1, ..span };
        let problem = Problem::error("c", span, "no \u{1b}[31m", "l\u{7}").with_help("h\u{9b}\nh");
        let text = problems(&sources, &[problem], PLAIN);
        assert!(text.contains("no \\x1b[31m [c]") && text.contains("[a\\x1b.yaml:1:13]"), "{text}");
        assert!(text.contains("1 │ \"s?[31m¿\u{fffd}\": 1\n") && text.contains("l\\x07"), "{text}");
        assert!(text.contains("h\\x9b"), "{text}");
        assert!(!text.contains(|letter: char| is_hidden(letter) && letter != '\n'), "{text:?}");
    }

    #[test]
    fn of_very_many_problems_the_first_are_shown() {
        let mut sources = Sources::default();
        let span = at(&mut sources, "a.yaml", "a: 1\n", "1");
        let many = |codes: &[&'static str]| -> Vec<Problem> {
            (0..500).map(|at| Problem::error(codes[at % codes.len()], span, "m", "l")).collect()
        };
        let text = problems(&sources, &many(&["c"]), PLAIN);
        assert_eq!(text.matches("m [c]").count(), MOST_OF_A_CODE);
        assert!(text.contains("and 480 more [c]") && text.contains("480 of 500 are not shown"), "{text}");
        let codes = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o"];
        assert_eq!(problems(&sources, &many(&codes), PLAIN).matches("× m [").count(), MOST_SHOWN);
    }

    #[test]
    fn of_a_wide_line_the_part_around_the_place_is_shown() {
        let mut sources = Sources::default();
        let text = format!("a: 1\nmatrix: [{}, wrong, {}]\nb: 2\n", "1, ".repeat(2000), "你好, ".repeat(2000));
        let span = at(&mut sources, "a.yaml", &text, "wrong");
        let elsewhere = Span { offset: 5, len: 6, ..span };
        let problem = Problem::error("c", span, "m", "here").with_related(elsewhere, "there");
        let column = sources.line_column(span).1;
        let shown = problems(&sources, &[problem], PLAIN);
        assert!(shown.contains(&format!("[a.yaml:2:{column}]")), "{shown}");
        assert!(shown.contains(" 2 │ …") && shown.contains("wrong") && shown.contains("here"), "{shown}");
        assert!(shown.lines().all(|line| width(line) <= PLAIN.width), "{shown}");
    }

    #[test]
    fn columns_count_characters() {
        let mut sources = Sources::default();
        let span = at(&mut sources, "a.yaml", "\"你好\": x", "x");
        let text = problems(&sources, &[Problem::error("c", span, "m", "l")], PLAIN);
        assert!(text.contains("[a.yaml:1:7]"), "{text}");
    }

    #[test]
    fn a_mapping_is_marked_in_its_first_line() {
        let mut sources = Sources::default();
        let span = at(&mut sources, "a.yaml", "with:\n  a: 1\n  b: 2\n", "a: 1\n  b: 2");
        let text = problems(&sources, &[Problem::error("c", span, "m", "l")], PLAIN);
        assert!(text.contains("a: 1") && !text.contains("b: 2"), "{text}");
    }

    #[test]
    fn an_empty_file_has_a_place_to_point_at() {
        let mut sources = Sources::default();
        let source = sources.add("e.yaml", "");
        let span = Span { source, offset: 0, len: 0 };
        let text = problems(&sources, &[Problem::error("c", span, "the file is empty", "nothing here")], PLAIN);
        assert!(text.contains("[e.yaml:1:1]") && text.contains("nothing here"), "{text}");
    }

    #[test]
    fn other_places_are_marked_too_and_those_in_another_text_are_told() {
        let mut sources = Sources::default();
        let first = at(&mut sources, "a.yaml", "one: 1\none: 2\n", "one: 1");
        let second = Span { offset: 7, len: 3, ..first };
        let other = at(&mut sources, "command line", "one=3", "one");
        let problem = Problem::error("duplicate-key", second, "`one` stands twice", "second")
            .with_related(Span { len: 3, ..first }, "first")
            .with_related(other, "and here");
        let text = problems(&sources, &[problem], PLAIN);
        assert!(text.contains("[a.yaml:2:1]") && text.contains("first") && text.contains("second"), "{text}");
        assert!(text.contains("help: and here (command line:1:1)"), "{text}");
    }

    #[test]
    fn a_chain_is_printed_from_the_outermost() {
        let chain = ["cannot read `a`".to_owned(), "permission denied".to_owned()];
        let text = report(&Message::chain(&chain, Some("chmod it".to_owned())), PLAIN);
        assert_eq!(text, "  × cannot read `a`\n  ╰─▶ permission denied\n  help: chmod it\n");
    }
}
