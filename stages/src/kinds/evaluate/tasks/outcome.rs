//! What the answers come to: figures of tasks and groups as files, facts and a table.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Float64Array, StringArray, UInt64Array};
use engine::artifact::Facts;
use engine::context::StageContext;
use engine::error::StageError;
use engine::figure::name_of_standard_error;
use serde_json::{Map, Value, json};

use super::beside::{Difference, Other};
use super::contamination::Contamination;
use super::prepared::Prepared;
use crate::data::results::TableWriter;
use crate::kinds::evaluate::write_text;
use crate::tasks::file::Task;
use crate::tasks::group::Group;
use crate::tasks::metric::{BOOTSTRAP_ITERATIONS, Metric};
use crate::tasks::request::{Request, Sample};
use crate::tasks::results::{Answer, Measured, Results};

/// Says which metrics of a task have no figure, or one that is no number.
fn warn_of_no_figures(task: &Task, found: &Results, context: &mut StageContext) {
    for Metric { name, .. } in &task.metrics {
        let of_it = |key: &str| key.split_once(',').is_some_and(|(metric, _)| metric == name);
        let figures: Vec<f64> =
            found.figures.iter().filter(|(key, _)| of_it(key)).map(|(_, figure)| figure.value).collect();
        if figures.is_empty() {
            context.warn(format!("no row of the task `{}` has a figure for the metric `{name}`", task.name));
        } else if figures.iter().any(|value| value.is_nan()) {
            context.warn(format!("the metric `{name}` of the task `{}` is NaN", task.name));
        }
    }
}

/// The figures of tasks and groups: their table, their files, their facts.
pub(super) fn finish(
    prepared: &[Prepared],
    groups: &[Group],
    answers: Vec<Vec<Vec<Answer>>>,
    others: &[Other],
    contamination: &[Contamination],
    context: &mut StageContext,
) -> Result<(), StageError> {
    let draft = context.create("metrics")?;
    let mut results: BTreeMap<&str, Results> = BTreeMap::new();
    for (at, (Prepared { task, samples, .. }, answers)) in prepared.iter().zip(answers).enumerate() {
        let measured = task.measured(samples, &answers)?;
        let found = task.figures(&measured, BOOTSTRAP_ITERATIONS)?;
        warn_of_no_figures(task, &found, context);
        results.insert(&task.name, found);
        let held = contamination.get(at).map(|found| found.rows.as_slice());
        write_samples(samples, &answers, &measured, held, &draft.folder.join(samples_file(&task.name)))?;
    }
    let of_groups = of_groups(groups, &results);
    let mut facts = Facts::new();
    let mut add = |name: &str, results: &Results| {
        let single = prepared.len() == 1;
        for (key, figure) in &results.figures {
            let error = figure.stderr.filter(|error| error.is_finite());
            for (key, value) in [(key.clone(), Some(figure.value)), (name_of_standard_error(key), error)] {
                let Some(value) = value else { continue };
                // JSON has no NaN: null is a figure that is none.
                facts.insert(format!("{name}.{key}"), value.into());
                // Those of one task have their own names, too: children of a sweep over tasks are compared by them.
                if single {
                    facts.insert(key, value.into());
                }
            }
        }
    };
    prepared.iter().for_each(|of| add(&of.task.name, &results[of.task.name.as_str()]));
    of_groups.iter().for_each(|(group, found)| add(&group.name, found));
    for (of, found) in prepared.iter().zip(contamination) {
        facts.insert(format!("{}.contaminated_rows", of.task.name), found.count().into());
    }
    facts.insert("rows".to_owned(), prepared.iter().map(|of| of.samples.len()).sum::<usize>().into());
    let of_tasks = prepared.iter().map(|of| (of.task.name.as_str(), &results[of.task.name.as_str()]));
    let all = || of_tasks.clone().chain(of_groups.iter().map(|(group, found)| (group.name.as_str(), found)));
    let mut differences: Vec<Difference> = Vec::new();
    for other in others {
        for (name, found) in all() {
            for (key, figure) in &found.figures {
                differences.extend(other.difference(name, key, (figure.value, figure.stderr), &draft.folder)?);
            }
        }
    }
    let mut value = report(prepared, &results, &of_groups);
    if !differences.is_empty() {
        value["compared"] = differences.iter().map(Difference::json).collect();
    }
    if !contamination.is_empty() {
        let of_task = |(of, found): (&Prepared, &Contamination)| (of.task.name.clone(), found.json());
        value["contamination"] = prepared.iter().zip(contamination).map(of_task).collect::<Map<_, _>>().into();
    }
    let text = serde_json::to_string_pretty(&value).expect("figures are plain data");
    write_text(&draft.folder.join("metrics.json"), &(text + "\n"))?;
    let compared = differences.iter().map(|difference| format!("\n{}", difference.words())).collect::<String>();
    let found = prepared.iter().zip(contamination).filter_map(|(of, found)| found.words(&of.task.name));
    let mut found: Vec<String> = found.collect();
    if found.is_empty() && !contamination.is_empty() {
        found.push("the training data contains no row of a task".to_owned());
    }
    let found: String = found.iter().map(|line| format!("\n{line}")).collect();
    context.report(table(prepared, &results, &of_groups) + &compared + &found);
    context.seal(draft, facts, None)
}

/// The figures of groups from those of tasks, in the order of the groups.
pub(in crate::kinds) fn of_groups<'g>(
    groups: &'g [Group],
    results: &BTreeMap<&str, Results>,
) -> Vec<(&'g Group, Results)> {
    let figures = |group: &'g Group| {
        let mut names = BTreeSet::new();
        leaves(group, groups, &mut names);
        let members: Vec<&Results> = names.iter().filter_map(|name| results.get(*name)).collect();
        (group, group.results(&members))
    };
    groups.iter().map(figures).collect()
}

/// The tasks of a group, and of the groups in it.
fn leaves<'g>(group: &'g Group, groups: &'g [Group], names: &mut BTreeSet<&'g str>) {
    for name in group.names() {
        match groups.iter().find(|known| known.name == name) {
            Some(inner) => leaves(inner, groups, names),
            None => drop(names.insert(name)),
        }
    }
}

/// The file with what was asked for each row of a task, and what came back.
pub(super) fn samples_file(task: &str) -> String {
    format!("samples_{task}.parquet")
}

/// The results as the harness writes them.
fn report(prepared: &[Prepared], results: &BTreeMap<&str, Results>, groups: &[(&Group, Results)]) -> Value {
    let figures = |name: &str, results: &Results| {
        let mut value = Map::new();
        value.insert("alias".to_owned(), name.into());
        for (key, figure) in &results.figures {
            value.insert(key.clone(), json!(figure.value));
            value.insert(name_of_standard_error(key), figure.stderr.map_or_else(|| json!("N/A"), |error| json!(error)));
        }
        value.insert("sample_len".to_owned(), results.sample_len.into());
        Value::Object(value)
    };
    let of_tasks = |make: &dyn Fn(&Prepared) -> Value| -> Map<String, Value> {
        prepared.iter().map(|of| (of.task.name.clone(), make(of))).collect()
    };
    let mut all = of_tasks(&|of| figures(&of.task.name, &results[of.task.name.as_str()]));
    let of_groups: Map<String, Value> =
        groups.iter().map(|(group, found)| (group.name.clone(), figures(&group.name, found))).collect();
    all.extend(of_groups.clone());
    json!({
        "results": all,
        "groups": of_groups,
        "group_subtasks": groups.iter().map(|(group, _)| (group.name.clone(), json!(group.names()))).collect::<Map<_, _>>(),
        "versions": of_tasks(&|of| of.task.version.clone()),
        "n-shot": of_tasks(&|of| of.num_fewshot.into()),
        "higher_is_better": of_tasks(&|of| {
            of.task.metrics.iter().map(|metric| (metric.name.clone(), json!(metric.higher_is_better))).collect::<Map<_, _>>().into()
        }),
        "n-samples": of_tasks(&|of| json!({ "original": of.original, "effective": of.samples.len() })),
    })
}

/// The table of the harness.
fn table(prepared: &[Prepared], results: &BTreeMap<&str, Results>, groups: &[(&Group, Results)]) -> String {
    let head = ["task", "version", "filter", "n-shot", "metric", "", "value", "", "stderr"];
    let mut rows: Vec<Vec<String>> = vec![head.map(str::to_owned).to_vec()];
    let mut add = |name: &str, task: Option<&Prepared>, results: &Results| {
        for (at, (key, figure)) in results.figures.iter().enumerate() {
            let (metric, filter) = key.split_once(',').unwrap_or((key, "none"));
            let of = |value: &dyn Fn(&Prepared) -> String| task.map(value).filter(|_| at == 0).unwrap_or_default();
            let better = task.and_then(|of| of.task.metrics.iter().find(|known| known.name == metric));
            let arrow = better.map_or("", |metric| if metric.higher_is_better { "↑" } else { "↓" });
            let (sign, error) = figure.stderr.map_or(("", String::new()), |error| ("±", format!("{error:.4}")));
            rows.push(vec![
                if at == 0 { name.to_owned() } else { String::new() },
                of(&|of| of.task.version.to_string().trim_matches('"').replace("null", "")),
                filter.to_owned(),
                of(&|of| of.num_fewshot.to_string()),
                metric.to_owned(),
                arrow.to_owned(),
                format!("{:.4}", figure.value),
                sign.to_owned(),
                error,
            ]);
        }
    };
    prepared.iter().for_each(|of| add(&of.task.name, Some(of), &results[of.task.name.as_str()]));
    groups.iter().for_each(|(group, found)| add(&group.name, None, found));
    crate::kinds::evaluate::report::aligned(&rows).join("\n")
}

/// What was asked for each row, what came back, and what it is worth.
fn write_samples(
    samples: &[Sample],
    answers: &[Vec<Answer>],
    measured: &[Measured<'_>],
    in_training_data: Option<&[bool]>,
    path: &Path,
) -> Result<(), StageError> {
    let texts = |text: &dyn Fn(usize) -> String| -> ArrayRef {
        Arc::new((0..samples.len()).map(|row| Some(text(row))).collect::<StringArray>())
    };
    let request = |request: &Request| match request {
        Request::Continuation { context, continuation } => json!([context, continuation]),
        Request::Rolling { text } => json!([text]),
        Request::Generation { context } => json!([context]),
    };
    let asked = |row: usize| samples[row].requests.iter().map(request).collect::<Value>().to_string();
    let answered = |row: usize| answers[row].iter().map(Answer::json).collect::<Value>().to_string();
    let mut columns: Vec<(String, ArrayRef)> = vec![
        ("doc_id".to_owned(), Arc::new((0..samples.len() as u64).collect::<UInt64Array>())),
        ("doc".to_owned(), texts(&|row| Value::Object(samples[row].document.clone()).to_string())),
        ("target".to_owned(), texts(&|row| samples[row].target.to_string())),
        ("arguments".to_owned(), texts(&asked)),
        ("resps".to_owned(), texts(&answered)),
    ];
    if let Some(held) = in_training_data {
        columns.push(("in_training_data".to_owned(), Arc::new(BooleanArray::from(held.to_vec()))));
    }
    for of in measured {
        columns.push((of.key.clone(), Arc::new(of.numbers().into_iter().collect::<Float64Array>())));
    }
    let mut writer = TableWriter::new(path.to_owned());
    writer.write(columns.iter().map(|(name, column)| (name.as_str(), Arc::clone(column))))?;
    writer.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::group::{GroupMetric, Member, Overrides};
    use crate::tasks::results::Figure;

    #[test]
    fn a_group_of_groups_is_of_their_tasks() {
        let metrics = vec![GroupMetric { metric: "acc".to_owned(), weight_by_size: false, filters: None }];
        let group = |name: &str, tasks: &[&str]| Group {
            name: name.to_owned(),
            members: tasks
                .iter()
                .map(|&name| Member::Named { name: name.to_owned(), overrides: Overrides::default() })
                .collect(),
            metrics: metrics.clone(),
        };
        let groups = [group("outer", &["inner", "c"]), group("inner", &["a", "b"])];
        let results = |value: f64| Results {
            sample_len: 10,
            figures: BTreeMap::from([("acc,none".to_owned(), Figure { value, stderr: None })]),
        };
        let results = BTreeMap::from([("a", results(0.6)), ("b", results(0.5)), ("c", results(0.7))]);
        let found = of_groups(&groups, &results);
        let values: Vec<f64> = found.iter().map(|(_, found)| found.figures["acc,none"].value).collect();
        assert!((values[0] - 0.6).abs() < 1e-12 && (values[1] - 0.55).abs() < 1e-12, "{values:?}");
        assert_eq!((found[0].1.sample_len, found[1].1.sample_len), (30, 20));
    }
}
