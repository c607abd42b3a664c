//! Functions of Python that task files name with `!function`, and the Python that runs them.

#[cfg(test)]
mod tests;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::documents::Document;

/// The other end, which runs the functions.
const HELPER: &str = include_str!("helper.py");

/// A Python that runs functions: started when the first is called, and ended with the last [`Function`].
#[derive(Debug)]
pub struct Python {
    program: PathBuf,
    running: Mutex<Option<Running>>,
    /// What is no longer needed of what it keeps; it is told with the next request.
    forgotten: Mutex<Vec<u64>>,
}

#[derive(Debug)]
struct Running {
    process: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Running {
    /// How it ended, unless it still runs.
    fn ended(mut self) -> Option<ExitStatus> {
        // It closes its end a moment before.
        for _ in 0..100 {
            if let Ok(Some(status)) = self.process.try_wait() {
                return Some(status);
            }
            sleep(Duration::from_millis(10));
        }
        None
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Python {
    /// One of a program that can be started, as `python3`.
    pub fn new(program: PathBuf) -> Self {
        Self { program, running: Mutex::new(None), forgotten: Mutex::default() }
    }

    /// Its version, and those of packages that functions are likely to use.
    ///
    /// # Errors
    /// Says why it cannot be asked.
    pub fn versions(&self) -> Result<Value, String> {
        self.ask(json!({ "kind": "versions" }))
    }

    fn ask(&self, mut request: Value) -> Result<Value, String> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        request["forget"] = json!(std::mem::take(&mut *self.forgotten.lock().unwrap_or_else(PoisonError::into_inner)));
        if running.is_none() {
            *running = Some(self.start()?);
        }
        let Some(python) = running.as_mut() else { unreachable!("it was started") };
        let mut line = String::new();
        let asked = writeln!(python.requests, "{request}").and_then(|()| python.requests.flush());
        let answer = asked.and_then(|()| python.answers.read_line(&mut line)).ok();
        let answer = answer.and_then(|_| serde_json::from_str::<Map<String, Value>>(&line).ok());
        let Some(mut answer) = answer else {
            let ended = running.take().and_then(Running::ended);
            let how = ended.map_or_else(|| "gave no answer".to_owned(), |status| format!("ended: {status}"));
            return Err(format!("`{}` {how}; what it said is in the stage's log", self.program.display()));
        };
        match answer.remove("error") {
            Some(error) => Err(error.as_str().unwrap_or_default().to_owned()),
            None => Ok(answer.remove("value").unwrap_or_default()),
        }
    }

    fn start(&self) -> Result<Running, String> {
        let mut command = Command::new(&self.program);
        command.args(["-c", HELPER]).stdin(Stdio::piped()).stdout(Stdio::piped());
        // Not of the working folder, and the order of a set is the same each time.
        command.env("PYTHONSAFEPATH", "1").env("PYTHONHASHSEED", "0");
        let started = command.spawn();
        let mut process = started.map_err(|error| {
            format!("`{}` cannot be started ({error}): PIPELINE_PYTHON names a Python", self.program.display())
        })?;
        let (Some(requests), Some(answers)) = (process.stdin.take(), process.stdout.take()) else {
            unreachable!("both are pipes")
        };
        Ok(Running { process, requests, answers: BufReader::new(answers) })
    }
}

/// A function of a module beside a task file.
#[derive(Debug, Clone)]
pub struct Function {
    /// `utils.process_docs`.
    written: String,
    module: PathBuf,
    python: Arc<Python>,
}

/// What a function returned and Python keeps, for as long as this or a clone of it is there.
#[derive(Debug, Clone, PartialEq)]
pub struct Kept {
    held: Arc<Held>,
    /// If it is one.
    pub number: Option<f64>,
    /// If it is two.
    pub pair: Option<(f64, f64)>,
}

#[derive(Debug)]
struct Held {
    id: u64,
    python: Arc<Python>,
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.python.forgotten.lock().unwrap_or_else(PoisonError::into_inner).push(self.id);
    }
}

impl PartialEq for Function {
    fn eq(&self, other: &Self) -> bool {
        (&self.written, &self.module) == (&other.written, &other.module)
    }
}

impl Function {
    /// The function that a task file names: of the module of that name in the file's folder.
    ///
    /// # Errors
    /// Says which module is not there.
    pub fn named(written: &str, task: &Path, python: &Arc<Python>) -> Result<Self, String> {
        let (module, _) = written.rsplit_once('.').ok_or_else(|| {
            format!("`{written}` is no function of a module, as `utils.process_docs` is one of `utils.py`")
        })?;
        let file = format!("{module}.py");
        let module = task.parent().unwrap_or_else(|| Path::new(".")).join(&file);
        if !module.is_file() {
            return Err(format!("the function `{written}` is one of `{file}`, which is not beside the task file"));
        }
        Ok(Self { written: written.to_owned(), module, python: Arc::clone(python) })
    }

    /// The file that has it.
    pub fn module(&self) -> &Path {
        &self.module
    }

    /// Its name in the module.
    pub fn name(&self) -> &str {
        self.written.rsplit('.').next().unwrap_or(&self.written)
    }

    /// Looks it up, so that what its module imports is known to be there.
    ///
    /// # Errors
    /// Says what is not there.
    pub fn load(&self) -> Result<(), String> {
        self.ask("load", json!({})).map(drop)
    }

    /// Seeds Python's random numbers, as the harness does before a task.
    ///
    /// # Errors
    /// Says why Python cannot be asked.
    pub fn seed(&self) -> Result<(), String> {
        self.ask("seeded", json!({})).map(drop)
    }

    /// What it returns, as JSON.
    ///
    /// # Errors
    /// Says what it raises, or that it returns what JSON has not.
    pub fn call(&self, arguments: &[Value]) -> Result<Value, String> {
        self.ask("call", json!({ "arguments": arguments }))
    }

    /// The rows that it makes of a `datasets.Dataset` of these.
    ///
    /// # Errors
    /// As for [`Function::call`].
    pub fn documents(&self, rows: Vec<Document>) -> Result<Vec<Document>, String> {
        let made = self.ask("documents", json!({ "rows": rows }))?;
        serde_json::from_value(made).map_err(|error| self.of(&format!("returned no rows: {error}")))
    }

    /// The figures of a row, by their names, from its answers, log-likelihoods being pairs.
    ///
    /// # Errors
    /// As for [`Function::call`].
    pub fn results(&self, row: &Document, answers: Vec<Value>, are_pairs: bool) -> Result<Vec<(String, Kept)>, String> {
        let made = self.ask("results", json!({ "row": row, "answers": answers, "are_pairs": are_pairs }))?;
        self.kept(&made)
    }

    /// What a response is worth beside the right one, or beside several, as a metric that calls itself `name`.
    ///
    /// # Errors
    /// As for [`Function::call`].
    pub fn metric(
        &self,
        name: &str,
        right: &[String],
        said: Value,
        arguments: &Map<String, Value>,
    ) -> Result<Vec<(String, Kept)>, String> {
        let several = right.len() != 1;
        let right = if several { json!(right) } else { json!(right[0]) };
        let about = json!({ "name": name, "right": right, "several": several, "said": said, "arguments": arguments });
        self.kept(&self.ask("metric", about)?)
    }

    /// The figure of values, kept ones by [`Kept::json`].
    ///
    /// # Errors
    /// As for [`Function::call`].
    pub fn aggregate(&self, values: &[Value]) -> Result<f64, String> {
        let made = self.ask("aggregate", json!({ "values": values }))?;
        number(&made).ok_or_else(|| self.of("returned no number"))
    }

    /// What it makes of the responses to each of some rows: it filters, or is a class of filters, if there are
    /// arguments.
    ///
    /// # Errors
    /// As for [`Function::call`], and if it returns no list as long as there are rows.
    pub fn filtered(
        &self,
        responses: &[Value],
        rows: &[&Document],
        arguments: Option<&Map<String, Value>>,
    ) -> Result<Vec<Value>, String> {
        let made = self.ask("filtered", json!({ "responses": responses, "rows": rows, "arguments": arguments }))?;
        match made {
            Value::Array(made) if made.len() == rows.len() => Ok(made),
            Value::Array(made) => {
                Err(self.of(&format!("returned {} lists of responses for {} rows", made.len(), rows.len())))
            }
            _ => Err(self.of("returned no list")),
        }
    }

    fn ask(&self, kind: &str, mut request: Value) -> Result<Value, String> {
        request["kind"] = kind.into();
        // A module is known by its whole path: it must not be another one in another folder.
        let module = std::path::absolute(&self.module).unwrap_or_else(|_| self.module.clone());
        request["function"] = json!([module, self.name()]);
        self.python.ask(request).map_err(|error| self.of(&error))
    }

    fn of(&self, message: &str) -> String {
        format!("the function `{}`: {message}", self.written)
    }

    fn kept(&self, made: &Value) -> Result<Vec<(String, Kept)>, String> {
        let of_one = |entry: &Value| {
            let (name, value) = (entry.get(0)?.as_str()?, entry.get(1)?);
            let pair = value["pair"].as_array().and_then(|pair| Some((number(&pair[0])?, number(&pair[1])?)));
            let held = Arc::new(Held { id: value["kept"].as_u64()?, python: Arc::clone(&self.python) });
            Some((name.to_owned(), Kept { held, number: number(&value["number"]), pair }))
        };
        let entries = made.as_array().and_then(|entries| entries.iter().map(of_one).collect());
        entries.ok_or_else(|| self.of("returned no figures"))
    }
}

impl Kept {
    /// What stands for it in a request.
    pub fn json(&self) -> Value {
        json!({ "kept": self.held.id })
    }
}

/// A number that is written as Python prints it.
fn number(value: &Value) -> Option<f64> {
    value.as_str()?.parse().ok()
}
