//! All that is known of one stage of a run: what it was told, what it read, how it came about, what it made.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;

use cache::{KeyDocument, OutputRecord};
use engine::history::{Attempt, LOG_FILE, Origin, Recorded, RecordedStage, RunInput, StageSummary};
use engine::pin::Pinned;
use engine::protocol::FileGrant;
use serde::Serialize;
use serde_json::{Map, Value};

use super::Past;
use crate::render::Failure;
use crate::table::{Table, list};
use crate::terminal::Look;
use crate::{figures, words};

/// One stage of a run.
pub(crate) struct StageStory<'a> {
    recorded: &'a Recorded,
    stage: &'a RecordedStage,
    /// Where and how the result was made, here or in an earlier run; `None` where there is no result, or all trace of
    /// it is gone.
    made: Option<Origin>,
}

/// The same as a program reads it.
#[derive(Serialize)]
pub(crate) struct StoryView<'a> {
    #[serde(flatten)]
    summary: &'a StageSummary,
    run: &'a str,
    /// Of its kind.
    version: u32,
    parameters: &'a Value,
    why: &'a [String],
    attempts: &'a [Attempt],
    warnings: &'a [String],
    reports: &'a [String],
    inputs: &'a [RunInput],
    /// The run that made the result.
    made_by: Option<&'a str>,
    key_document: Option<&'a KeyDocument>,
    outputs: Option<&'a BTreeMap<String, OutputRecord>>,
    how: Option<&'a Map<String, Value>>,
    files: Option<&'a BTreeMap<String, Vec<FileGrant>>>,
    pins: Option<&'a BTreeMap<String, Pinned>>,
    log: PathBuf,
}

impl<'a> StageStory<'a> {
    /// Gathers what is known.
    ///
    /// # Errors
    /// Fails where the store or the history does.
    pub(crate) fn of(past: &Past, recorded: &'a Recorded, stage: &'a RecordedStage) -> Result<Self, Failure> {
        let made = match &stage.summary.key {
            Some(key) => past.made(key)?,
            None => None,
        };
        Ok(Self { recorded, stage, made })
    }

    /// As a program reads it.
    pub(crate) fn view(&self) -> StoryView<'_> {
        let RecordedStage { summary, plan, why, attempts, warnings, reports, .. } = self.stage;
        let made = self.made.as_ref();
        let record = made.map(|made| &made.record);
        let job = made.and_then(|made| made.job.as_ref());
        StoryView {
            summary,
            run: &self.recorded.summary.run,
            version: plan.version,
            parameters: &plan.parameters,
            why,
            attempts,
            warnings,
            reports,
            inputs: &plan.inputs,
            made_by: made.and_then(|made| made.by.as_ref()).map(|(run, _)| run.as_str()),
            key_document: record.map(|record| &record.key),
            outputs: record.map(|record| &record.outputs),
            how: record.map(|record| &record.how),
            files: job.map(|job| &job.files),
            pins: job.map(|job| &job.pins),
            log: self.recorded.stage_folder(&summary.stage).join(LOG_FILE),
        }
    }

    /// For a person.
    ///
    /// # Errors
    /// Fails where the output does.
    pub(super) fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        self.heading(out)?;
        for reason in &self.stage.why {
            writeln!(out, "{}", Look::stdout().wrap(&format!("  because {reason}"), 2))?;
        }
        print_attempts(out, self.stage)?;
        for warning in &self.stage.warnings {
            writeln!(out, "{}", Look::stdout().wrap(&format!("  warning: {warning}"), 2))?;
        }
        print_values(out, "parameters that differ from the defaults", &self.given())?;
        let Some(made) = &self.made else { return Ok(()) };
        self.print_inputs(out, made)?;
        print_values(out, "made with", &Value::Object(made.record.how.clone()))?;
        for (name, output) in &made.record.outputs {
            let title = format!("output {name} ({}), identity {}", output.kind, output.identity.short());
            writeln!(out, "\n{}", Look::stdout().wrap(&title, 2))?;
            let facts: Map<String, Value> = output.facts.clone();
            write!(out, "{}", figures::lines(&Value::Object(facts)))?;
        }
        Ok(())
    }

    fn heading(&self, out: &mut dyn Write) -> io::Result<()> {
        let summary = &self.stage.summary;
        let version = self.stage.plan.version;
        let title = format!("{} ({}, version {version})", summary.stage, summary.kind);
        let look = Look::stdout();
        let title = format!("{} in run {}", look.paint("1", &title), self.recorded.summary.run);
        writeln!(out, "{}", look.wrap(&title, 2))?;
        let took = summary.seconds.map(|seconds| format!(" after {}", words::seconds(seconds)));
        let peak = summary.peak_memory_bytes.map(|peak| format!(", peak memory {}", words::bytes(peak)));
        let threads = self.stage.threads.map(|threads| format!(", {}", words::plural(threads, "thread")));
        let key = summary.key.map(|key| format!(", key {}", key.short()));
        let more: String = [took, peak, threads, key].into_iter().flatten().collect();
        writeln!(out, "{}", look.wrap(&format!("{}{more}", summary.status), 2))
    }

    /// The parameters of the file, without those that say what the default says.
    fn given(&self) -> Value {
        let schema = stages::registry().get(&self.stage.summary.kind).map(|kind| (kind.schema)());
        let mut given = self.stage.plan.parameters.clone();
        if let Some(schema) = schema {
            remove_defaults(&mut given, &schema);
        }
        given
    }

    fn print_inputs(&self, out: &mut dyn Write, made: &Origin) -> io::Result<()> {
        let mut table = Table::new(["reads", "digest", ""]).shortening(["reads"]);
        let job = made.job.as_ref();
        for (name, grant) in job.iter().flat_map(|job| &job.inputs) {
            table.row([name.clone(), grant.identity.short(), grant.kind.clone()]);
        }
        for grant in job.iter().flat_map(|job| job.files.values().flatten()) {
            table.row([words::path(&grant.path), grant.digest.short(), words::bytes(grant.size)]);
        }
        for (name, pinned) in job.iter().flat_map(|job| &job.pins) {
            table.row([name.clone(), pinned.commit.clone(), "pinned".to_owned()]);
        }
        if table.is_empty() { Ok(()) } else { write!(out, "\n{}", table.fitted(Look::stdout())) }
    }
}

/// Takes out of parameters what a JSON Schema has as the default in its place.
fn remove_defaults(parameters: &mut Value, schema: &Value) {
    let Value::Object(fields) = parameters else { return };
    let Some(properties) = properties(schema) else { return };
    for (name, value) in fields.iter_mut() {
        if let Some(property) = properties.get(name) {
            remove_defaults(value, property);
        }
    }
    fields.retain(|name, value| {
        let default = properties.get(name).and_then(|property| property.get("default"));
        default != Some(value) && !value.as_object().is_some_and(Map::is_empty)
    });
}

/// The fields of a mapping, in whichever of the alternatives describes one.
fn properties(schema: &Value) -> Option<&Map<String, Value>> {
    let own = schema.get("properties").and_then(Value::as_object);
    let alternatives = schema.get("anyOf").and_then(Value::as_array).into_iter().flatten();
    own.or_else(|| alternatives.into_iter().find_map(properties))
}

/// The values of a mapping under their dotted names, lists and texts as JSON would have them on one line.
pub(super) fn flattened(value: &Value) -> Vec<(String, String)> {
    let mut values = Vec::new();
    figures::flatten(value, String::new(), &mut |name, value| values.push((name, words::exact(value))));
    values
}

/// What went wrong with a stage, attempt by attempt.
pub(super) fn print_attempts(out: &mut dyn Write, stage: &RecordedStage) -> io::Result<()> {
    let several = stage.attempts.len() > 1;
    for Attempt { number, seconds, failure, .. } in &stage.attempts {
        let Some(failure) = failure else { continue };
        let after = seconds.map(|seconds| format!(" after {}", words::seconds(seconds))).unwrap_or_default();
        let attempt = if several { format!(" at attempt {number}") } else { String::new() };
        let text = format!("{} failed{attempt}{after}: {}", stage.summary.stage, failure.messages.join(": "));
        writeln!(out, "\n{}", Look::stdout().wrap(&text, 2))?;
        if let Some(help) = &failure.help {
            writeln!(out, "{}", Look::stdout().wrap(&format!("  help: {help}"), 2))?;
        }
    }
    Ok(())
}

/// A value of the parameters, as the file would have it.
pub(super) fn print_values(out: &mut dyn Write, title: &str, value: &Value) -> io::Result<()> {
    let values = flattened(value);
    if !values.is_empty() {
        writeln!(out, "\n{title}")?;
    }
    let values: Vec<_> = values.into_iter().map(|(name, value)| (name, words::visible(&value))).collect();
    write!(out, "{}", list(&values, Look::stdout()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_says_the_default_is_left_out_at_every_depth() {
        let schema = json!({ "properties": {
            "epochs": { "default": 1 },
            "optimizer": { "anyOf": [{ "$ref": "#/x" }, { "properties": {
                "name": { "default": "adamw" }, "learning_rate": { "default": 0.0003 },
            } }] },
        } });
        let mut given =
            json!({ "epochs": 1, "optimizer": { "name": "adamw", "learning_rate": 0.001 }, "model": "base" });
        remove_defaults(&mut given, &schema);
        assert_eq!(given, json!({ "optimizer": { "learning_rate": 0.001 }, "model": "base" }));
        let mut given = json!({ "optimizer": { "name": "adamw" } });
        remove_defaults(&mut given, &schema);
        assert_eq!(given, json!({}));
    }
}
