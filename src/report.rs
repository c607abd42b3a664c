//! `pipeline report`: a run as one file to send: HTML with its pictures in it and no script, or Markdown.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use cache::OutputRecord;
use clap::Args;
use engine::history::{Origin, Recorded, RecordedStage, Words};
use serde_json::Value;
use stages::data::artifact::{Metrics, OutputKind, Samples};
use stages::view::show::RowView;

use crate::plot::{self, escaped};
use crate::progress::Verbosity;
use crate::render::Failure;
use crate::runs::{LATEST, Past, compare, state};
use crate::show::Body;
use crate::{Global, figures, show, terminal, words};

/// Write a report of a run, as one file or for a pull request: its stages, curves, metrics and completions.
///
/// An HTML report is one self-contained file without script; a Markdown report has no pictures.
#[derive(Args)]
pub(crate) struct ReportArgs {
    /// The run.
    #[arg(default_value = LATEST)]
    run: String,
    /// The file to write [default: Markdown on standard output].
    #[arg(short, long, value_name = "FILE.html|FILE.md")]
    output: Option<PathBuf>,
    /// Further runs to compare with it.
    #[arg(long, value_name = "RUN", num_args = 1..)]
    compare: Vec<String>,
    /// Number of completions to show of each `generate` stage.
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    samples: u64,
}

/// What the file's extension asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Html,
    Markdown,
}

/// A piece of a report.
enum Block {
    Heading(String),
    Text(String),
    List(Vec<String>),
    Table {
        head: Vec<String>,
        rows: Vec<Vec<String>>,
    },
    /// Named texts that belong together: a prompt and its completion.
    Said(Vec<(String, String)>),
    /// A drawing, which only HTML has.
    Picture(String),
    /// A table that is there in both forms.
    Drawn {
        html: String,
        markdown: String,
    },
}

/// Writes the report.
pub(crate) fn run(args: &ReportArgs, global: &Global) -> Result<(), Failure> {
    let form = args.output.as_deref().map_or(Ok(Form::Markdown), form)?;
    let past = Past::open(global)?;
    let recorded = past.recorded(&past.find(&args.run)?.run, Words::Read)?;
    let title = format!("{}, run {}", recorded.summary.pipeline, recorded.summary.run);
    let blocks = args.blocks(&past, &recorded)?;
    let text = match form {
        Form::Html => html(&title, &blocks),
        Form::Markdown => markdown(&title, &blocks),
    };
    let Some(path) = &args.output else {
        use std::io::Write as _;
        return Ok(write!(crate::screen::stdout_of_others(), "{text}")?);
    };
    std::fs::write(path, text)
        .map_err(|error| Failure::machine(error).with_help(format!("`{}` could not be written", path.display())))?;
    if global.verbosity() > Verbosity::Quiet {
        terminal::tell_line(format_args!("the report is in {}", words::path(path)));
    }
    Ok(())
}

fn form(path: &Path) -> Result<Form, Failure> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("html" | "htm") => Ok(Form::Html),
        Some("md" | "markdown") => Ok(Form::Markdown),
        _ => Err(Failure::wrong(format!("`{}` is neither an `.html` nor an `.md` file", path.display()))
            .with_help("the file extension selects the format")),
    }
}

impl ReportArgs {
    fn blocks(&self, past: &Past, recorded: &Recorded) -> Result<Vec<Block>, Failure> {
        let made = made(past, recorded)?;
        let mut blocks = vec![Block::Text(circumstances(recorded))];
        failures(recorded, &mut blocks);
        gates(recorded, &mut blocks);
        let runs: Vec<String> = std::iter::once(&recorded.summary.run).chain(&self.compare).cloned().collect();
        let comparison = compare::of_runs(past, &runs, true)?;
        if !self.compare.is_empty() {
            blocks.push(Block::Heading("Compared".to_owned()));
            blocks.push(Block::Drawn { html: comparison.html_table(), markdown: comparison.markdown() });
        }
        results(&made, &mut blocks);
        let panels = comparison.panels();
        if !panels.is_empty() {
            blocks.push(Block::Picture(plot::svg(&panels)));
        }
        self.samples(past, recorded, &made, &mut blocks)?;
        stages(&made, &mut blocks);
        Ok(blocks)
    }

    /// The first answers of each generation.
    fn samples(
        &self,
        past: &Past,
        recorded: &Recorded,
        made: &[Made<'_>],
        blocks: &mut Vec<Block>,
    ) -> Result<(), Failure> {
        for (stage, name, _) in outputs(made, Samples::NAME) {
            let shown = show::of_run(past, recorded, stage, name, self.samples)?;
            let Body::Rows { rows } = shown.body else { continue };
            if rows.is_empty() {
                continue;
            }
            blocks.push(Block::Heading(format!("Answers: {stage}")));
            let said = rows.into_iter().filter_map(|row| match row {
                RowView::Text { fields, .. } => {
                    Some(Block::Said(fields.into_iter().map(|field| (field.name, field.text)).collect()))
                }
                RowView::Tokens { .. } => None,
            });
            blocks.extend(said);
        }
        Ok(())
    }
}

/// A stage, and how its result was made, where it has one.
type Made<'a> = (&'a RecordedStage, Option<Origin>);

/// The stages of the run with their results, which all parts of the report read.
fn made<'a>(past: &Past, recorded: &'a Recorded) -> Result<Vec<Made<'a>>, Failure> {
    let stages = recorded.stages.iter();
    stages.map(|stage| Ok((stage, stage.summary.key.map(|key| past.made(&key)).transpose()?.flatten()))).collect()
}

/// The outputs of a kind that the run has, with their stage and name.
fn outputs<'a>(made: &'a [Made<'_>], kind: &str) -> impl Iterator<Item = (&'a str, &'a str, &'a OutputRecord)> {
    made.iter().flat_map(move |(stage, made)| {
        let all = made.iter().flat_map(|made| &made.record.outputs);
        let of_kind = all.filter(move |(_, output)| output.kind == kind);
        of_kind.map(move |(name, output)| (stage.summary.stage.as_str(), name.as_str(), output))
    })
}

fn circumstances(recorded: &Recorded) -> String {
    let Recorded { summary, program, host, .. } = recorded;
    let took = summary.seconds.map(|seconds| format!(" after {}", words::seconds(seconds))).unwrap_or_default();
    let machine = [&host.name, &host.processor, &host.system];
    let machine: Vec<&str> = machine.into_iter().map(String::as_str).filter(|word| !word.is_empty()).collect();
    format!(
        "{}{took}, started {}, pipeline {}{}{}; {}",
        state(summary.state),
        summary.started,
        program,
        if machine.is_empty() { "" } else { " on " },
        machine.join(", "),
        crate::run::counts(summary.counts),
    )
}

fn failures(recorded: &Recorded, blocks: &mut Vec<Block>) {
    let failed = recorded.stages.iter().filter_map(|stage| Some((stage, stage.failure()?)));
    for (stage, failure) in failed {
        blocks.push(Block::Heading(format!("{} failed", stage.summary.stage)));
        blocks.push(Block::Text(failure.messages.join(": ")));
        blocks.extend(failure.help.iter().map(|help| Block::Text(help.clone())));
    }
}

fn gates(recorded: &Recorded, blocks: &mut Vec<Block>) {
    if recorded.gates.is_empty() {
        return;
    }
    let line = |gate: &engine::history::RecordedGate| {
        let holds = if gate.holds { "holds" } else { "does not hold" };
        format!("{}: {holds}: {}", gate.gate, gate.because)
    };
    blocks.push(Block::Heading("Gates".to_owned()));
    blocks.push(Block::List(recorded.gates.iter().map(line).collect()));
}

/// The figures of each stage that measures: all stages beside each other.
fn results(made: &[Made<'_>], blocks: &mut Vec<Block>) {
    let mut names: Vec<String> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut rows = Vec::new();
    for (stage, _, output) in outputs(made, Metrics::NAME) {
        let mut told: BTreeMap<String, String> = BTreeMap::new();
        figures::flatten(&Value::Object(output.facts.clone()), String::new(), &mut |name, value| {
            if value.is_number() {
                if seen.insert(name.clone()) {
                    names.push(name.clone());
                }
                told.entry(name).or_insert_with(|| words::figure(value));
            }
        });
        rows.push((stage.to_owned(), told));
    }
    if names.is_empty() {
        return;
    }
    let row = |(stage, told): &(String, BTreeMap<String, String>)| {
        let cells = names.iter().map(|name| told.get(name).cloned().unwrap_or_default());
        std::iter::once(stage.clone()).chain(cells).collect()
    };
    let rows = rows.iter().map(row).collect();
    blocks.push(Block::Heading("Figures".to_owned()));
    let head = std::iter::once("stage".to_owned()).chain(names.iter().cloned()).collect();
    blocks.push(Block::Table { head, rows });
}

fn stages(made: &[Made<'_>], blocks: &mut Vec<Block>) {
    let mut rows = Vec::new();
    for (RecordedStage { summary, why, .. }, made) in made {
        let how = |name: &str| made.as_ref().and_then(|made| made.record.how.get(name)?.as_f64());
        let took = summary.seconds.or_else(|| how("seconds"));
        let memory = summary.peak_memory_bytes.or_else(|| how("peak_memory_bytes").map(|bytes| bytes as u64));
        rows.push(vec![
            summary.stage.clone(),
            summary.kind.clone(),
            summary.status.clone(),
            took.map(words::seconds).unwrap_or_default(),
            memory.map(words::bytes).unwrap_or_default(),
            summary.key.map(|key| key.short()).unwrap_or_default(),
            why.join("; "),
        ]);
    }
    let head = ["stage", "kind", "state", "took", "peak memory", "key", "why"].map(str::to_owned).to_vec();
    blocks.push(Block::Heading("Stages".to_owned()));
    blocks.push(Block::Table { head, rows });
}

const STYLE: &str = "\
    body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; padding: 0 1em; max-width: 1000px; color-scheme: light dark; }\n\
    svg { max-width: 100%; height: auto; } .wide { overflow-x: auto; }\n\
    table { border-collapse: collapse; } th, td { padding: 0.3em 0.9em 0.3em 0; text-align: left; vertical-align: top; }\n\
    tr { border-bottom: 1px solid #8884; } h2 { margin-top: 1.6em; }\n\
    .said { border-left: 3px solid #8886; padding-left: 0.8em; margin: 1em 0; } .said p { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 0.5em; }\n\
    .said b { font-weight: 500; font-size: 0.85em; opacity: 0.75; }\n";

/// A page that runs nothing and asks nobody for anything, whatever the texts in it hold.
fn html(title: &str, blocks: &[Block]) -> String {
    let mut text = format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n<h1>{title}</h1>\n",
        title = escaped(title)
    );
    for block in blocks {
        let _ = match block {
            Block::Heading(heading) => writeln!(text, "<h2>{}</h2>", escaped(heading)),
            Block::Text(paragraph) => writeln!(text, "<p>{}</p>", escaped(paragraph)),
            Block::List(items) => {
                let items: String = items.iter().map(|item| format!("<li>{}</li>\n", escaped(item))).collect();
                writeln!(text, "<ul>\n{items}</ul>")
            }
            Block::Table { head, rows } => {
                let cells = |tag: &str, cells: &[String]| -> String {
                    cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell))).collect()
                };
                let rows: String = rows.iter().map(|row| format!("<tr>{}</tr>\n", cells("td", row))).collect();
                writeln!(text, "<div class=\"wide\"><table>\n<tr>{}</tr>\n{rows}</table></div>", cells("th", head))
            }
            Block::Said(fields) => {
                let lines = |said: &str| said.lines().map(escaped).collect::<Vec<_>>().join("\n");
                let field =
                    |(name, said): &(String, String)| format!("<b>{}</b><p>{}</p>\n", escaped(name), lines(said));
                writeln!(text, "<div class=\"said\">\n{}</div>", fields.iter().map(field).collect::<String>())
            }
            Block::Picture(svg) => writeln!(text, "{svg}"),
            Block::Drawn { html, .. } => writeln!(text, "<div class=\"wide\">{html}</div>"),
        };
    }
    text + "</html>\n"
}

fn markdown(title: &str, blocks: &[Block]) -> String {
    let mut text = format!("# {}\n", plain(title));
    for block in blocks {
        let _ = match block {
            Block::Heading(heading) => write!(text, "\n## {}\n", plain(heading)),
            Block::Text(paragraph) => write!(text, "\n{}\n", plain(paragraph)),
            Block::List(items) => {
                write!(text, "\n{}", items.iter().map(|item| format!("- {}\n", plain(item))).collect::<String>())
            }
            Block::Table { head, rows } => {
                let line = |cells: &[String]| {
                    format!("| {} |\n", cells.iter().map(|cell| plain(cell)).collect::<Vec<_>>().join(" | "))
                };
                let rows: String = rows.iter().map(|row| line(row)).collect();
                write!(text, "\n{}|{}\n{rows}", line(head), "---|".repeat(head.len()))
            }
            Block::Said(fields) => {
                let field = |(name, said): &(String, String)| format!("\n**{}**\n\n{}", plain(name), quoted(said));
                write!(text, "{}", fields.iter().map(field).collect::<String>())
            }
            Block::Picture(_) => Ok(()),
            Block::Drawn { markdown, .. } => write!(text, "\n{markdown}"),
        };
    }
    text
}

/// A text on one line that is no Markdown and no HTML.
fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for letter in words::visible(text).chars() {
        match letter {
            '\n' | '\r' => plain.push(' '),
            '\\' | '`' | '*' | '_' | '<' | '>' | '|' | '#' | '[' | ']' | '&' => plain.extend(['\\', letter]),
            letter => plain.push(letter),
        }
    }
    plain
}

/// A text as it is, in a block of code that it cannot end.
fn quoted(text: &str) -> String {
    let longest = text.split(|letter| letter != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(3.max(longest + 1));
    format!("{fence}text\n{}\n{fence}\n", words::visible(text).trim_end_matches('\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_gets_out_of_its_place() {
        let hostile = "</p><script>alert(1)</script> | `x` ````\n# [a](javascript:b)";
        let blocks = [
            Block::Heading(hostile.to_owned()),
            Block::List(vec![hostile.to_owned()]),
            Block::Table { head: vec![hostile.to_owned()], rows: vec![vec![hostile.to_owned()]] },
            Block::Said(vec![(hostile.to_owned(), hostile.to_owned())]),
        ];
        let page = html(hostile, &blocks);
        assert!(!page.contains("<script") && page.matches("&lt;script&gt;").count() == 8, "{page}");
        let text = markdown(hostile, &blocks);
        assert!(
            text.contains("`````text\n") && text.lines().filter(|line| line.starts_with("# ")).count() == 2,
            "{text}"
        );
        let table: Vec<&str> = text.lines().filter(|line| line.starts_with('|')).collect();
        assert_eq!(table.len(), 3, "{text}");
        assert!(table.iter().all(|line| line.replace("\\|", "").matches('|').count() == 2), "{text}");
    }

    #[test]
    fn the_extension_selects_the_form() {
        assert_eq!(form(Path::new("a/report.html")).ok(), Some(Form::Html));
        assert_eq!(form(Path::new("report.md")).ok(), Some(Form::Markdown));
        assert!(form(Path::new("report.pdf")).is_err());
    }
}
