//! Functions of Python in task files, run by the `python3` that is here.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use serde_json::{Value, json};
use test_harness::Requirement;

use super::{Function, Python};
use crate::tasks::documents::{self, Document};
use crate::tasks::file::{Task, TaskFile};
use crate::tasks::processor::RowProcessor;
use crate::tasks::prompt::PromptOptions;
use crate::tasks::request::{Asking, Request, Sample};
use crate::tasks::results::{Answer, Results};

/// Functions, and of `datasets` what they use.
const UTILS: &str = r#"
import os, random, sys, types

class Dataset(list):
    from_list = classmethod(lambda cls, rows: cls(rows))
    def map(self, function):
        return Dataset({**row, **function(row)} for row in self)

sys.modules["datasets"] = types.SimpleNamespace(Dataset=Dataset, disable_progress_bars=lambda: None)
print("printed while it is imported")

def process_docs(dataset):
    print("printed while it runs")
    def one(row):
        choices = [row["right"], row["wrong"]]
        random.shuffle(choices)
        return {"choices": choices, "gold": choices.index(row["right"])}
    return dataset.map(one)

def text(row):
    return f"Q: {row['q']}\nA:"

def gold(row):
    return row["gold"]

def choices(row):
    return row["choices"]

def shown():
    return [{"q": "shown?", "choices": ["x", "y"], "gold": 1}]

def results(row, answers):
    (first, greedy), (second, _) = answers
    figures = {"acc": int(first >= second), "pairs": (first, second), "odd": {first}}
    if row["gold"]:
        figures["sometimes"] = float("nan")
    return figures

def widest(pairs):
    return max(one - other for one, other in pairs)

def count(sets):
    assert all(isinstance(item, set) for item in sets)
    return len(sets)

class Cut:
    def __init__(self, letters=1):
        self.letters = letters
    def apply(self, responses, rows):
        return [[text[:self.letters] + row["mark"] for text in of_row] for of_row, row in zip(responses, rows)]

def joined(responses, rows):
    return ["+".join(of_row) for of_row in responses]

def same(references, predictions, loose=False):
    one, other = references[0], predictions[0]
    return float(one.lower() == other.lower() if loose else one == other)

def both(items):
    right, said = items
    return {"starts": right.startswith(said), "length": len(said)}

def of_one(row, answers):
    return {"whole": answers == ["a!+b!"]}

def fails(row):
    return {}["missing"]

def leaves(row):
    sys.exit("away")

def dies(row):
    os._exit(3)

def odd(row):
    return {1, 2}

def infinite(row):
    return float("inf")

def half(row):
    return "\ud800"
"#;

/// None where none is required.
fn python() -> Option<Arc<Python>> {
    let look = Command::new("python3").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if look.as_ref().is_ok_and(|status| status.success()) {
        return Some(Arc::new(Python::new("python3".into())));
    }
    Requirement::Python.may_be_lacking(format!("`python3 --version`: {look:?}"));
    None
}

fn task(folder: &Path, text: &str, python: &Arc<Python>) -> Task {
    std::fs::write(folder.join("utils.py"), UTILS).unwrap();
    std::fs::write(folder.join("task.yaml"), text).unwrap();
    match TaskFile::read(&folder.join("task.yaml"), Some(python)) {
        Ok(TaskFile::Task(task)) => *task,
        other => panic!("{other:?}"),
    }
}

fn rows(rows: &[Value]) -> Vec<Document> {
    rows.iter().map(|row| row.as_object().unwrap().clone()).collect()
}

fn samples(task: &Task, rows: &[Document]) -> Vec<Sample> {
    let options = PromptOptions::default();
    let asking = Asking { task, options, chat_template: None, num_fewshot: None };
    asking.samples(rows, &[]).unwrap_or_else(|error| panic!("{error}"))
}

/// The figures of responses, one to each row.
fn of_responses(task: &Task, given: &[Value], said: &[&[&str]]) -> Results {
    let answers: Vec<Vec<Answer>> =
        said.iter().map(|said| said.iter().map(|text| Answer::Text((*text).to_owned())).collect()).collect();
    task.results(&samples(task, &rows(given)), &answers, 10).unwrap_or_else(|error| panic!("{error}"))
}

const CHOICES: &str = "task: own
output_type: multiple_choice
test_split: test
num_fewshot: 1
process_docs: !function utils.process_docs
doc_to_text: !function utils.text
doc_to_target: !function utils.gold
doc_to_choice: !function utils.choices
process_results: !function utils.results
fewshot_config: { sampler: first_n, samples: !function utils.shown }
metric_list:
- { metric: acc, aggregation: mean }
- { metric: pairs, aggregation: !function utils.widest }
- { metric: odd, aggregation: !function utils.count }
- { metric: sometimes, aggregation: nanmean }
";

#[test]
fn functions_make_rows_requests_and_figures() {
    let (folder, Some(python)) = (tempfile::tempdir().unwrap(), python()) else { return };
    let task = task(folder.path(), CHOICES, &python);
    let row = |q: &str| json!({ "q": q, "right": "yes", "wrong": "no" });
    let given = rows(&[row("a?"), row("b?"), row("c?"), row("d?")]);
    // The same whatever ran before it was seeded.
    let seed = || task.process_docs.as_ref().and_then(RowProcessor::function).unwrap().seed().unwrap();
    seed();
    let made = documents::processed(&task, given.clone()).unwrap();
    let next = documents::processed(&task, given.clone()).unwrap();
    seed();
    assert_eq!(documents::processed(&task, given).unwrap(), made);
    assert_ne!(next, made);
    let gold: Vec<&Value> = made.iter().map(|row| &row["gold"]).collect();
    assert!(gold.contains(&&json!(0)) && gold.contains(&&json!(1)), "{gold:?}");
    let found = samples(&task, &made);
    let Request::Continuation { context, continuation } = &found[0].requests[0] else { panic!("no continuation") };
    assert_eq!(context, "Q: shown?\nA: y\n\nQ: a?\nA:");
    assert_eq!(continuation, &format!(" {}", made[0]["choices"][0].as_str().unwrap()));
    let of = |sum| Answer::Loglikelihood { sum, is_greedy: false };
    let answers: Vec<Vec<Answer>> = [1.0, 2.0, -3.0, 0.5].map(|by| vec![of(-1.0 + by), of(-1.0)]).into();
    let results = task.results(&found, &answers, 0).unwrap();
    let figure = |key: &str| results.figures[key];
    assert_eq!((figure("acc,none").value, figure("pairs,none").value, figure("odd,none").value), (0.75, 2.0, 4.0));
    assert!(figure("acc,none").stderr.is_some() && figure("pairs,none").stderr.is_none());
    assert!(figure("sometimes,none").value.is_nan());
    assert_eq!(results.sample_len, 4);
    assert!(python.versions().unwrap()["python"].is_string());
}

const TEXTS: &str = "task: own
test_split: test
doc_to_text: q
doc_to_target: t
repeats: 2
";

#[test]
fn functions_filter_and_measure_responses() {
    let (folder, Some(python)) = (tempfile::tempdir().unwrap(), python()) else { return };
    let given = [json!({ "q": "?", "t": "Ab", "mark": "!" }), json!({ "q": "?", "t": "ab", "mark": "?" })];
    let with = |more: &str| task(folder.path(), &format!("{TEXTS}{more}"), &python);
    let first = "filter_list: [{ name: x, filter: [{ function: take_first }] }]\n";
    let measured = with(&format!(
        "{first}metric_list:\n- {{ metric: !function utils.same, aggregation: mean, loose: true }}\n\
         - {{ metric: !function utils.both, aggregation: mean }}\n"
    ));
    let found = of_responses(&measured, &given, &[&["ab"], &["a"]]);
    let values: Vec<(&str, f64)> = found.figures.iter().map(|(key, figure)| (key.as_str(), figure.value)).collect();
    assert_eq!(values, [("length,x", 1.5), ("same,x", 0.5), ("starts,x", 0.5)]);
    let filtered = with(
        "filter_list: [{ name: x, filter: [{ function: !function utils.Cut, letters: 1 }, { function: custom, \
         filter_fn: !function utils.joined }] }]\nprocess_results: !function utils.of_one\n\
         metric_list: [{ metric: whole, aggregation: mean }]\ngeneration_kwargs: { do_sample: true, temperature: 1.0 }\n",
    );
    let found = of_responses(&filtered, &given, &[&["abc", "bcd"], &["abc", "bcd"]]);
    assert_eq!(found.figures["whole,x"].value, 0.5);
}

#[test]
fn what_a_function_fails_over_is_told_with_its_place() {
    let (folder, Some(python)) = (tempfile::tempdir().unwrap(), python()) else { return };
    let text = |function: &str, python: &Arc<Python>| {
        let text = TEXTS.replace("doc_to_text: q", &format!("doc_to_text: !function utils.{function}"));
        let task = task(folder.path(), &(text + "metric_list: [{ metric: exact_match }]\n"), python);
        let options = PromptOptions::default();
        let asking = Asking { task: &task, options, chat_template: None, num_fewshot: None };
        asking.samples(&rows(&[json!({ "t": "x" })]), &[]).unwrap_err().to_string()
    };
    for (function, expected) in [
        ("fails", "row 1, `doc_to_text`: the function `utils.fails`: KeyError: 'missing' (utils.py:"),
        ("leaves", "the function `utils.leaves`: SystemExit: away (utils.py:"),
        ("dies", "the function `utils.dies`: `python3` ended: exit status: 3; what it said is in the stage's log"),
        ("odd", "the function `utils.odd`: TypeError: returned a set, which JSON has not"),
        ("infinite", "TypeError: returned inf, which JSON has not"),
        ("half", "UnicodeEncodeError: 'utf-8' codec can't encode"),
        ("nothing", "AttributeError: module 'utils' has no attribute 'nothing'"),
    ] {
        let said = text(function, &python);
        assert!(said.contains(expected), "{function}: {said}");
    }
    let nowhere = Arc::new(Python::new("/nowhere/python".into()));
    let said = text("text", &nowhere);
    assert!(said.contains("`/nowhere/python` cannot be started") && said.contains("PIPELINE_PYTHON"), "{said}");
    std::fs::write(folder.path().join("task.yaml"), CHOICES.replace("utils.gold", "other.gold")).unwrap();
    let said = TaskFile::read(&folder.path().join("task.yaml"), Some(&python)).unwrap_err().to_string();
    let expected = "task.yaml:7, `doc_to_target`: the function `other.gold` is one of `other.py`, which is not beside";
    assert!(said.contains(expected), "{said}");
}

/// Validation evaluates again and again in one process.
#[test]
fn what_nobody_reads_any_more_is_forgotten() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let module = "import gc\nclass Big: pass\ndef results(row, answers): return {'big': Big()}\n\
                  def alive(): return sum(isinstance(one, Big) for one in gc.get_objects())\n";
    std::fs::write(folder.path().join("big.py"), module).unwrap();
    let function = |name| Function::named(name, &folder.path().join("task.yaml"), &python).unwrap();
    let alive = || function("big.alive").call(&[]).unwrap();
    let made = || function("big.results").results(&Document::default(), Vec::new(), false).unwrap();
    let (one, other) = (made(), made());
    assert_eq!(alive(), 2);
    let again = other.clone();
    drop((one, other));
    assert_eq!(alive(), 1);
    drop(again);
    assert_eq!(alive(), 0);
}

/// As in the harness, which a filter may count on.
#[test]
fn a_filter_is_given_all_rows_at_once() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let module = "def numbered(resps, docs): return [[f'{at} of {len(docs)}'] for at, _ in enumerate(resps)]\n\
                  def short(resps, docs): return [['x']]\ndef none(row): return None\n";
    std::fs::write(folder.path().join("all.py"), module).unwrap();
    let of_filter = |name: &str| {
        format!(
            "task: t\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: rows.jsonl}}}}\ntest_split: test\n\
             output_type: generate_until\ndoc_to_text: '{{{{ q }}}}'\ndoc_to_target: '{{{{ q }}}} of 2'\n\
             generation_kwargs: {{until: [x]}}\nmetric_list: [{{metric: exact_match}}]\n\
             filter_list: [{{name: f, filter: [{{function: custom, filter_fn: !function all.{name}}}, {{function: take_first}}]}}]\n"
        )
    };
    let given = [json!({"q": "0"}), json!({"q": "1"})];
    let said: [&[&str]; 2] = [&["a"], &["b"]];
    let numbered = task(folder.path(), &of_filter("numbered"), &python);
    assert_eq!(of_responses(&numbered, &given, &said).figures["exact_match,f"].value, 1.0);

    let short = task(folder.path(), &of_filter("short"), &python);
    let samples = samples(&short, &rows(&given));
    let answers: Vec<Vec<Answer>> =
        said.iter().map(|said| said.iter().map(|text| Answer::Text((*text).to_owned())).collect()).collect();
    let error = short.results(&samples, &answers, 0).unwrap_err().to_string();
    assert!(error.contains("`all.short`: returned 1 lists of responses for 2 rows"), "{error}");

    let text = of_filter("numbered").replace("doc_to_text: '{{ q }}'", "doc_to_text: !function all.none");
    let without = task(folder.path(), &text, &python);
    let asking = Asking { task: &without, options: PromptOptions::default(), chat_template: None, num_fewshot: None };
    let error = asking.samples(&rows(&given), &[]).unwrap_err().to_string();
    assert!(error.contains("row 1") && error.contains("`doc_to_text`: there is no text, but None"), "{error}");
}
