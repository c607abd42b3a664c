//! `pipeline show`: an artefact as a person wants to see it.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use cache::{Digest, OutputRecord, Store, StoreError, Tree, Verify};
use clap::Args;
use engine::artifact::{Facts, stored_files};
use engine::history::Recorded;
use engine::visible::on_one_line;
use serde::Serialize;
use serde_json::{Map, Value};
use stages::data::artifact::{Metrics, OutputKind, Packs, Rows, Samples, Tokens};
use stages::data::tokenizer::Tokenizer;
use stages::kinds::generate;
use stages::view::lengths::{Lengths, lengths};
use stages::view::show::{DocumentView, Field, RowView, SegmentView, describe_rows, shortened};

use crate::locate::Invocation;
use crate::render::Failure;
use crate::runs::Past;
use crate::table::Table;
use crate::terminal::Look;
use crate::{Format, Global, figures, locate, words};

/// Show the output of a stage: rows as text, trained tokens in brackets, borders of documents in packs; metrics; files.
#[derive(Args)]
pub(crate) struct ShowArgs {
    /// The pipeline file.
    file: PathBuf,
    /// The stage, or one of its outputs; without an output all are shown.
    #[arg(value_name = "STAGE[.OUTPUT]")]
    output: String,
    /// Changes to the file, as `stage.path=value` or `vars.name=value`.
    #[arg(value_name = "OVERRIDE")]
    overrides: Vec<String>,
    /// How many rows to show [default: 3], or steps of a training [default: 10].
    #[arg(long, value_name = "COUNT")]
    rows: Option<u64>,
    /// Show the result of a smoke run (`run --smoke`).
    #[arg(long)]
    smoke: bool,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// What stages call the files that people want to see.
const METRICS_FILE: &str = "metrics.json";
const STEPS_FILE: &str = "metrics.jsonl";
const MERGE_REPORT: &str = "merge_report.json";

const DEFAULT_ROWS: u64 = 3;
const DEFAULT_STEPS: u64 = 10;

/// Characters of a column, a turn or a stretch of tokens that are printed; JSON has all of them.
const MOST_OF_A_TEXT: usize = 4000;

/// Documents of a pack that are printed.
const MOST_DOCUMENTS: usize = 32;

/// Columns from which on the two documents of a pair stand side by side.
const NARROWEST_PAIR: usize = 60;

/// What is shown of an artefact.
#[derive(Serialize)]
pub(crate) struct Shown {
    /// The stage and its output.
    output: String,
    kind: String,
    identity: Digest,
    facts: Facts,
    files: Vec<ShownFile>,
    #[serde(flatten)]
    pub body: Body,
}

#[derive(Serialize)]
struct ShownFile {
    path: String,
    size: u64,
}

#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum Body {
    Rows {
        rows: Vec<RowView>,
    },
    /// Figures, and those of each step and each validation where there were any.
    Metrics {
        metrics: Value,
        steps: Vec<Map<String, Value>>,
    },
    /// The list of files is all, but for what the stage reports about them.
    Files {
        report: Option<Value>,
    },
}

/// Shows each artefact.
pub(crate) fn run(args: &ShowArgs, global: &Global) -> Result<(), Failure> {
    let (file, overrides, scale) = (&args.file, &args.overrides, crate::scale(args.smoke));
    let invocation = Invocation { file, overrides, scale, global };
    let names = locate::names(&invocation, &args.output)?;
    // Each output is located by itself, and the warnings of the file are told with the first.
    let quiet = Global { home: global.home.clone(), quiet: true, verbose: false };
    let shown = |(at, name): (usize, &String)| {
        let global = if at == 0 { global } else { &quiet };
        shown(&Invocation { global, ..invocation }, name, args.rows.unwrap_or(DEFAULT_ROWS))
    };
    let shown = names.iter().enumerate().map(shown).collect::<Result<Vec<Shown>, Failure>>()?;
    match (args.format, shown.as_slice()) {
        (Format::Json, [one]) => crate::print_json(one),
        (Format::Json, several) => crate::print_json(&several),
        (Format::Text, several) => {
            let steps = args.rows.unwrap_or(DEFAULT_STEPS);
            let mut out = crate::screen::stdout_of_others();
            for (at, shown) in several.iter().enumerate() {
                if at > 0 {
                    writeln!(out)?;
                }
                shown.print(&mut out, steps, Look::stdout())?;
            }
            Ok(())
        }
    }
}

/// What there is to show of an output.
fn shown(invocation: &Invocation<'_>, name: &str, rows: u64) -> Result<Shown, Failure> {
    let located = locate::output_of(invocation, name)?;
    let unreadable = |error| locate::unreadable_by(error, &located.store, &invocation.run());
    let tokenizer = located.tokenizer.as_ref();
    of_record(&located.store, located.name, located.record, tokenizer, rows, Verify::Contents, &unreadable)
}

/// What there is to show of an output in the store.
fn of_record(
    store: &Store,
    output: String,
    record: OutputRecord,
    tokenizer: Option<&OutputRecord>,
    rows: u64,
    verify: Verify,
    unreadable: &dyn Fn(StoreError) -> Failure,
) -> Result<Shown, Failure> {
    let staging = store.staging_to_look().map_err(Failure::machine)?;
    let folder = staging.path().join("shown");
    let OutputRecord { kind, tree, identity, facts } = record;
    let tree = stored_files(store, &tree, &identity).map_err(unreadable)?;
    store.link_files(&tree, &folder, verify).map_err(unreadable)?;
    let tokenizer = match tokenizer {
        Some(record) => {
            let folder = staging.path().join("tokenizer");
            store.link_folder(&record.tree, &folder, Verify::Contents).map_err(unreadable)?;
            Some(Tokenizer::from_folder(&folder).map_err(engine::error::StageError::from)?)
        }
        None => None,
    };
    let body = body(&folder, &tree, (&kind, &facts), tokenizer.as_ref(), rows)?;
    let files = tree.files().iter().map(|file| ShownFile { path: file.path.clone(), size: file.size }).collect();
    Ok(Shown { output, kind, identity, facts, files, body })
}

/// An output of a recorded run: its first rows, its figures, its files.
///
/// # Errors
/// Fails where the run has no such output, or the store has it no more.
pub(crate) fn of_run(past: &Past, recorded: &Recorded, stage: &str, output: &str, rows: u64) -> Result<Shown, Failure> {
    let name = format!("{stage}.{output}");
    let record = past.output(recorded, stage, output)?;
    let record =
        record.ok_or_else(|| Failure::wrong(format!("`{name}` has no result, or the store has it no more")))?;
    let tokenizer = match tokenizer_behind(recorded, stage) {
        Some((stage, output)) => past.output(recorded, &stage, &output)?,
        None => None,
    };
    // Of what is only listed nothing is read: a model may be large.
    let is_read = [Rows::NAME, Tokens::NAME, Packs::NAME, Samples::NAME, Metrics::NAME].contains(&record.kind.as_str());
    let verify = if is_read { Verify::Contents } else { Verify::None };
    of_record(&past.store, name, record, tokenizer.as_ref(), rows, verify, &|error| Failure::machine(error))
}

/// How long the documents of an output of tokens or packs are.
///
/// # Errors
/// As [`of_run`].
pub(crate) fn lengths_of_run(past: &Past, recorded: &Recorded, stage: &str, output: &str) -> Result<Lengths, Failure> {
    let record = past.output(recorded, stage, output)?;
    let record = record
        .ok_or_else(|| Failure::wrong(format!("`{stage}.{output}` has no result, or the store has it no more")))?;
    let staging = past.store.staging_to_look().map_err(Failure::machine)?;
    let folder = staging.path().join("shown");
    let tree = stored_files(&past.store, &record.tree, &record.identity).map_err(Failure::machine)?;
    past.store.link_files(&tree, &folder, Verify::Contents).map_err(Failure::machine)?;
    Ok(lengths(&folder, &record.kind, &record.facts)?)
}

/// The tokenizer that a stage of a run reads, or that the nearest stage before it reads: its stage and output.
fn tokenizer_behind(recorded: &Recorded, stage: &str) -> Option<(String, String)> {
    let inputs = &recorded.stage(stage)?.plan.inputs;
    let direct = inputs.iter().find(|input| input.kind == stages::data::artifact::Tokenizer::NAME);
    let direct = direct.map(|input| (input.stage.clone(), input.output.clone()));
    direct.or_else(|| inputs.iter().find_map(|input| tokenizer_behind(recorded, &input.stage)))
}

fn body(
    folder: &Path,
    tree: &Tree,
    (kind, of_artifact): (&str, &Facts),
    tokenizer: Option<&Tokenizer>,
    rows: u64,
) -> Result<Body, Failure> {
    let has_samples = kind == Samples::NAME && tree.get(generate::TABLE).is_some();
    if has_samples || [Rows::NAME, Tokens::NAME, Packs::NAME].contains(&kind) {
        return Ok(Body::Rows { rows: describe_rows(folder, kind, of_artifact, tokenizer, rows)? });
    }
    if kind == Metrics::NAME && tree.get(METRICS_FILE).is_some() {
        let steps = match tree.get(STEPS_FILE) {
            Some(_) => read_lines(&folder.join(STEPS_FILE))?,
            None => Vec::new(),
        };
        return Ok(Body::Metrics { metrics: read_json(&folder.join(METRICS_FILE))?, steps });
    }
    let report = tree.get(MERGE_REPORT).map(|file| read_json(&folder.join(&file.path)));
    Ok(Body::Files { report: report.transpose()? })
}

fn read_json(path: &Path) -> io::Result<Value> {
    Ok(serde_json::from_slice(&std::fs::read(path)?)?)
}

fn read_lines(path: &Path) -> io::Result<Vec<Map<String, Value>>> {
    std::fs::read_to_string(path)?.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

impl Shown {
    fn print(&self, out: &mut dyn Write, most_steps: u64, look: Look) -> io::Result<()> {
        let size = words::bytes(self.files.iter().map(|file| file.size).sum());
        writeln!(out, "{} ({}, {size})", look.paint("1", &self.output), self.kind)?;
        // The facts of metrics are among those metrics.
        if !matches!(self.body, Body::Metrics { .. }) {
            write!(out, "{}", figures::facts(&self.facts, look))?;
        }
        match &self.body {
            Body::Rows { rows } => rows.iter().try_for_each(|row| print_row(out, row, look)),
            Body::Metrics { metrics, steps } => {
                write!(out, "\n{}", figures::table(metrics))?;
                let of_kinds = figures::by_kind(steps);
                of_kinds
                    .iter()
                    .try_for_each(|of_kind| write!(out, "\n{}", figures::spread(of_kind, most_steps as usize)))
            }
            Body::Files { report } => {
                if let Some(report) = report {
                    write!(out, "\n{}", figures::table(report).fitted(look))?;
                }
                let mut table = Table::new(["file", "size"]);
                self.files.iter().for_each(|file| table.row([file.path.clone(), words::bytes(file.size)]));
                write!(out, "\n{table}")
            }
        }
    }
}

fn print_row(out: &mut dyn Write, row: &RowView, look: Look) -> io::Result<()> {
    match row {
        RowView::Text { index, fields } => {
            writeln!(out, "\n{}", look.paint("1", &format!("row {}", index + 1)))?;
            fields.iter().try_for_each(|field| print_field(out, field, look))
        }
        RowView::Tokens { index, documents, padding } => {
            let tokens: usize = documents.iter().map(|document| document.tokens).sum();
            let trained: usize = documents.iter().map(|document| document.trained).sum();
            let mut title = format!("row {}: {}, {trained} trained", index + 1, words::plural(tokens, "token"));
            if documents.len() > 1 {
                title += &format!(", {} documents", documents.len());
            }
            if *padding > 0 {
                title += &format!(", {padding} of padding behind them");
            }
            writeln!(out, "\n{}", look.paint("1", &title))?;
            if let [left, right] = documents.as_slice()
                && left.role.is_some()
                && look.width >= NARROWEST_PAIR
            {
                return print_side_by_side(out, left, right, look);
            }
            for (number, document) in documents.iter().take(MOST_DOCUMENTS).enumerate() {
                if documents.len() > 1 {
                    writeln!(out, "{}", border(number + 1, document, look))?;
                }
                let text: String = document.segments.iter().map(|segment| marked(segment, look)).collect();
                print_indented(out, &text)?;
            }
            match documents.len().saturating_sub(MOST_DOCUMENTS) {
                0 => Ok(()),
                more => writeln!(out, "  … and {}", words::plural(more, "more document")),
            }
        }
    }
}

fn print_field(out: &mut dyn Write, field: &Field, look: Look) -> io::Result<()> {
    writeln!(out, "  {}", look.paint("36", &format!("{}:", on_one_line(&field.name))))?;
    words::visible(&shortened(&field.text, MOST_OF_A_TEXT)).lines().try_for_each(|line| writeln!(out, "    {line}"))
}

/// The line above a document of a pack.
fn border(number: usize, document: &DocumentView, look: Look) -> String {
    let DocumentView { role, tokens, trained, .. } = document;
    let line = look.either("──", "--");
    let role = role.as_ref().map_or_else(String::new, |role| format!(" ({role})"));
    let title = format!("{line} document {number}{role}: {}, {trained} trained ", words::plural(*tokens, "token"));
    let rest = look.width.min(80).saturating_sub(crate::table::width(&title));
    look.paint("2", &format!("{title}{}", look.either("─", "-").repeat(rest)))
}

/// Trained text in brackets, and in colour where there is any.
fn marked(segment: &SegmentView, look: Look) -> String {
    let text = words::visible(&shortened(&segment.text, MOST_OF_A_TEXT));
    if !segment.trained {
        return text;
    }
    let (open, close) = (look.either("⟦", "[["), look.either("⟧", "]]"));
    // Colours end at each line's end: pagers begin every line without one.
    let lines = text.split('\n').map(|line| look.paint("32", line));
    format!("{open}{}{close}", lines.collect::<Vec<_>>().join("\n"))
}

/// Two documents of a pair in two columns, without colours.
fn print_side_by_side(out: &mut dyn Write, left: &DocumentView, right: &DocumentView, look: Look) -> io::Result<()> {
    let bar = look.either("│", "|");
    let columns = (look.width - 5) / 2;
    let lines = |document: &DocumentView| -> Vec<String> {
        let DocumentView { role, tokens, trained, segments } = document;
        let role = role.as_deref().unwrap_or_default();
        let title = format!("{role}: {}, {trained} trained", words::plural(*tokens, "token"));
        let plain = Look { colour: false, ..look };
        let text: String = segments.iter().map(|segment| marked(segment, plain)).collect();
        std::iter::once(title).chain(text.split('\n').flat_map(|line| cut(line, columns))).collect()
    };
    let (left, right) = (lines(left), lines(right));
    for number in 0..left.len().max(right.len()) {
        let line = |lines: &[String]| lines.get(number).cloned().unwrap_or_default();
        let (left, right) = (line(&left), line(&right));
        let room = " ".repeat(columns.saturating_sub(crate::table::width(&left)));
        writeln!(out, "{}", format!("  {left}{room} {bar} {right}").trim_end())?;
    }
    Ok(())
}

/// A line in pieces of so many columns.
fn cut(line: &str, columns: usize) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for letter in line.chars() {
        let last = pieces.last_mut().expect("there is one");
        last.push(letter);
        if crate::table::width(last) > columns {
            last.pop();
            pieces.push(letter.to_string());
        }
    }
    pieces
}

fn print_indented(out: &mut dyn Write, text: &str) -> io::Result<()> {
    text.lines().try_for_each(|line| writeln!(out, "  {line}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_of_the_data_do_not_reach_the_terminal() {
        let segment = segment("a\x1b]0;title\x07\tb", true);
        assert_eq!(marked(&segment, PIPE), "⟦a\\x1b]0;title\\x07\tb⟧");
    }

    const PIPE: Look = Look { colour: false, unicode: true, width: 100, live: false };

    fn segment(text: &str, trained: bool) -> SegmentView {
        SegmentView { text: text.to_owned(), tokens: 2, trained }
    }

    fn printed(row: &RowView, look: Look) -> String {
        let mut out = Vec::new();
        print_row(&mut out, row, look).expect("a vector takes everything");
        String::from_utf8(out).expect("it was text")
    }

    #[test]
    fn trained_text_stands_in_brackets_and_documents_have_borders() {
        let document = |text: &str| DocumentView {
            role: None,
            tokens: 4,
            trained: 2,
            segments: vec![segment("Who?\nMe: ", false), segment(text, true)],
        };
        let row = RowView::Tokens { index: 7, documents: vec![document("I"), document("You")], padding: 3 };
        let text = printed(&row, PIPE);
        assert!(text.contains("row 8: 8 tokens, 4 trained, 2 documents, 3 of padding behind them"), "{text}");
        assert!(text.contains("  Who?\n  Me: ⟦I⟧\n── document 2: 4 tokens, 2 trained ──"), "{text}");
        let ascii = printed(&row, Look { unicode: false, ..PIPE });
        assert!(ascii.is_ascii() && ascii.contains("Me: [[You]]"), "{ascii}");
    }

    #[test]
    fn the_documents_of_a_pair_stand_side_by_side() {
        let document = |role: &str, text: &str| DocumentView {
            role: Some(role.to_owned()),
            tokens: 4,
            trained: 2,
            segments: vec![segment("Who?\n", false), segment(text, true)],
        };
        let documents = vec![document("chosen", "I am a small model."), document("rejected", "You.")];
        let row = RowView::Tokens { index: 0, documents, padding: 0 };
        let text = printed(&row, Look { width: 60, ..PIPE });
        let lines: Vec<&str> = text.lines().skip(2).collect();
        let expected = [
            "  chosen: 4 tokens, 2 trained │ rejected: 4 tokens, 2 trained",
            "  Who?                        │ Who?",
            "  ⟦I am a small model.⟧       │ ⟦You.⟧",
        ];
        assert_eq!(lines, expected, "{text}");
        let narrow = printed(&row, Look { width: 40, ..PIPE });
        assert!(narrow.contains("document 2 (rejected)"), "{narrow}");
        assert_eq!(cut("größer als", 4), ["größ", "er a", "ls"]);
    }

    #[test]
    fn a_huge_row_is_cut_and_says_so() {
        let long = DocumentView {
            role: None,
            tokens: 9000,
            trained: 0,
            segments: vec![segment(&"word ".repeat(9000), false)],
        };
        let text = printed(&RowView::Tokens { index: 0, documents: vec![long.clone(); 40], padding: 0 }, PIPE);
        assert!(text.contains("… 41000 characters left out …") && text.contains("… and 8 more documents"), "{text}");
        assert!(text.len() < 32 * 5000, "{} bytes", text.len());
        let field = Field { name: "text".to_owned(), text: "é".repeat(10_000) };
        let text = printed(&RowView::Text { index: 0, fields: vec![field] }, PIPE);
        assert!(text.contains("… 6000 characters left out …"), "{text}");
    }

    #[test]
    fn colour_is_added_to_the_brackets_and_ends_with_the_line() {
        let text = marked(&segment("a\nb", true), Look { colour: true, ..PIPE });
        assert_eq!(text, "⟦\x1b[32ma\x1b[0m\n\x1b[32mb\x1b[0m⟧");
    }
}
