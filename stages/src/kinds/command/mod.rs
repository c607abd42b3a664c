//! `uses: command`: any program as a stage, with declared inputs, files, outputs and environment.
//!
//! What the program may depend on is what its key holds: the words that start it, the contents of the files named, the
//! identities of its inputs, the environment given. It runs in an empty folder of its own with an environment of its
//! own, so that a thing that was not declared is missing, and not silently different on the next machine. What it
//! writes is checked to be what was declared.

mod inputs;
mod mask;
mod outputs;
mod parameters;
mod placeholders;
mod process;
mod secrets;

use std::collections::BTreeMap;
use std::env::VarError;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};

use devices::DeviceKind;
use engine::artifact::Output;
use engine::context::{Artifact, StageContext};
use engine::error::{Cause, OrFail, StageError};
use engine::execute::stragglers::Mark;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::LocalPath;
use engine::protocol::{FileGrant, Named};
use engine::stage::{Counted, InputFacts, Outside, Secret, Smoke, Stage, StageKind, Workers};
use serde_json::Value;

use crate::compute::checkpoint;
use crate::data::artifact::{Adapter, Files, Metrics, Model, OutputKind, Rows, Tokenizer};
use crate::smoke::Lowered;
use inputs::Watched;
use mask::Masker;
use outputs::Made;
pub use parameters::{Anything, Command, OutputForm, OutputParams, Program};
use process::{Ended, Start};

/// Set to 1 in a smoke run.
const SMOKE: &str = "PIPELINE_SMOKE";

/// What a program gets of the environment of `pipeline run`: where programs and the user's own files are, how to reach
/// the network, and which devices the stage was given. Nothing of it is meant to change a result.
const INHERITED: [&str; 15] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LD_LIBRARY_PATH",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
];

/// What a job of a cluster is told of itself, so that `srun` and `mpirun` find its nodes.
const OF_A_JOB: &str = "SLURM_";

/// What is the same on every machine, since results tend to depend on it: the order of sorted lines, dates, the order
/// of Python's sets.
const FIXED: [(&str, &str); 3] = [("LANG", "C.UTF-8"), ("TZ", "UTC"), ("PYTHONHASHSEED", "0")];

impl StageKind for Command {
    const NAME: &'static str = "command";
    /// 2: the key has the kinds of the inputs, which the program is told.
    const VERSION: u32 = 2;
    const ABOUT: &'static str =
        "Runs any program: declared inputs, files, outputs and environment, all of them in the key.";
    const PLACEHOLDERS: &'static [&'static str] = &[placeholders::INPUTS, placeholders::FILES, placeholders::OUTPUTS];
    const TEXTS: &'static [&'static str] = &["env"];
    const GOAL: bool = true;

    /// Only the program knows what it can leave out: it is told.
    fn smoke(parameters: &Value) -> Smoke {
        Lowered::from(parameters).set(&format!("env.{SMOKE}"), "1").done()
    }
}

impl Stage for Command {
    fn outputs(&self) -> Vec<Output> {
        let output = |(name, output): (&String, &OutputParams)| match output.kind {
            OutputForm::Files => Files::output(name),
            OutputForm::Rows => Rows::output(name),
            OutputForm::Model => Model::output(name),
            OutputForm::Tokenizer => Tokenizer::output(name),
            OutputForm::Adapter => Adapter::output(name),
            OutputForm::Metrics => Metrics::output(name),
        };
        self.outputs.iter().map(output).collect()
    }

    fn check(&self, _: &InputFacts, span: Span) -> Vec<Problem> {
        self.problems(span)
    }

    fn outside(&self) -> Vec<Outside> {
        let files = |(name, path): (&String, &LocalPath)| Outside::Files {
            role: name.clone(),
            pattern: path.text.clone(),
            span: path.span,
            count: Counted::All,
        };
        self.files.iter().map(files).collect()
    }

    fn secrets(&self) -> Vec<Secret> {
        let named = self.pass_env.iter().cloned();
        named.map(|variable| Secret { variable, field: Some("pass_env") }).collect()
    }

    /// Whatever the program can, which nobody else knows. One that does not say what it wants gets the processor.
    fn devices(&self) -> Vec<DeviceKind> {
        DeviceKind::ALL.to_vec()
    }

    fn workers(&self) -> Workers {
        Workers::Many
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let passed = passed(self)?;
        let masker =
            || Masker::new(passed.iter().map(|(_, value)| value.as_str()).chain(proxies().iter().map(String::as_str)));
        secrets::clean_working(context, &masker())?;
        let ended = attempt(self, &passed, &masker, context);
        if ended.is_err() {
            // Why it failed is what counts.
            let _ = secrets::clean_working(context, &masker());
        }
        ended
    }
}

/// Runs the program and stores what it made.
fn attempt(
    params: &Command,
    passed: &[(String, String)],
    masker: &dyn Fn() -> Masker,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let mut made = Vec::new();
    for (name, output) in &params.outputs {
        made.push(Made::begin(name, output, context)?);
    }
    let paths = paths(params, &made, context)?;
    let folder = context.scratch().join("work");
    make_folder(&folder)?;
    let start = Start {
        arguments: arguments(&params.run, &paths),
        environment: environment(params, &paths, passed, context)?,
        folder: &folder,
        mark: Mark::new(),
    };
    let mut watched = Watched::default();
    for input in params.inputs.values() {
        watched.add(&context.open(input)?.folder)?;
    }
    let ended = process::run(&start, masker(), std::io::stderr(), &mut |lines| {
        context.progress("lines", lines, None, None);
    })?;
    // A program may have closed folders of its own, as Go does with its modules: whoever is not root could not remove
    // them.
    let own = made.iter().map(|made| made.folder.as_path());
    own.chain([context.working(), context.scratch()]).for_each(open_folders);
    context.stop_if_cancelled()?;
    watched.check()?;
    judge(&start.arguments[0], ended)?;
    for made in made {
        made.seal(&masker(), context)?;
    }
    forget(context.working())
}

/// The variables of `pass_env` with the values of this machine.
fn passed(params: &Command) -> Result<Vec<(String, String)>, StageError> {
    let value = |name: &String| match std::env::var(name) {
        Ok(value) => Ok((name.clone(), value)),
        Err(VarError::NotUnicode(_)) => Err(StageError::new(
            Cause::Machine,
            format!("the environment variable `{name}`, which `pass_env` names, is set to what is not UTF-8"),
        )),
        Err(VarError::NotPresent) => Err(StageError::new(
            Cause::Machine,
            format!("the environment variable `{name}`, which `pass_env` names, is not set"),
        )
        .with_help(format!("set it where `pipeline run` is started: `export {name}=…`"))),
    };
    params.pass_env.iter().map(value).collect()
}

/// Proxies with a password in their address, which is as good as a secret.
fn proxies() -> Vec<String> {
    let set = INHERITED.iter().filter(|name| name.to_ascii_uppercase().ends_with("_PROXY"));
    let values = set.filter_map(|name| std::env::var(name).ok());
    values.filter_map(|value| Some(value.rsplit_once('@')?.0.rsplit_once(':')?.1.to_owned())).collect()
}

/// The paths that the program is given, by the variables that hold them.
fn paths(
    params: &Command,
    made: &[Made<'_>],
    context: &mut StageContext,
) -> Result<BTreeMap<String, PathBuf>, StageError> {
    let mut paths = BTreeMap::new();
    for (name, input) in &params.inputs {
        let Artifact { folder, description } = context.open(input)?;
        inputs::covered(description).write_beside(&folder)?;
        paths.insert(placeholders::variable(placeholders::INPUTS, name), folder);
    }
    for (name, path) in &params.files {
        paths.insert(placeholders::variable(placeholders::FILES, name), copy_files(name, path, context)?);
    }
    for made in made {
        paths.insert(placeholders::variable(placeholders::OUTPUTS, made.name), made.folder.clone());
    }
    Ok(paths)
}

/// Copies the files of a name, each checked to be what was planned with, and gives the path of the one file, or of the
/// folder.
fn copy_files(name: &str, path: &LocalPath, context: &StageContext) -> Result<PathBuf, StageError> {
    let granted: Vec<FileGrant> = context.files(name).to_vec();
    let folder = context.scratch().join("files").join(name);
    for file in &granted {
        let to = folder.join(&file.relative);
        make_folder(to.parent().expect("a file has a folder"))?;
        checkpoint::copy_source(file, &to, context)?;
        let executable = fs::metadata(&file.path).map_or(0, |metadata| metadata.permissions().mode() & 0o111);
        fs::set_permissions(&to, fs::Permissions::from_mode(0o644 | executable))
            .or_fail(Cause::Machine, || format!("cannot set the permissions of `{}`", to.display()))?;
        context.stop_if_cancelled()?;
    }
    // What was written is a file's own path, or that of a folder or glob that holds it. A job of a version that did not
    // say which has the paths alone.
    let written = path.text.strip_prefix("./").unwrap_or(&path.text);
    let is_single = |file: &FileGrant| match file.named {
        Some(named) => named == Named::Single,
        None => file.path.ends_with(written),
    };
    match granted.as_slice() {
        [only] if is_single(only) => Ok(folder.join(&only.relative)),
        _ => Ok(folder),
    }
}

/// The words that start the program. A script reads paths as its shell's variables, so that nothing in a path is read
/// as shell.
fn arguments(program: &Program, paths: &BTreeMap<String, PathBuf>) -> Vec<String> {
    match program {
        Program::Arguments(arguments) => arguments.iter().map(|argument| filled(argument, paths)).collect(),
        Program::Script(text) => {
            let text = placeholders::replaced(text, |named| format!("${{{}}}", named.variable()));
            vec!["sh".to_owned(), "-eu".to_owned(), "-c".to_owned(), text]
        }
    }
}

/// A text with the paths in it.
fn filled(text: &str, paths: &BTreeMap<String, PathBuf>) -> String {
    placeholders::replaced(text, |named| {
        let path = paths.get(&named.variable()).expect("the check refuses names that lead nowhere");
        path.to_string_lossy().into_owned()
    })
}

fn environment(
    params: &Command,
    paths: &BTreeMap<String, PathBuf>,
    passed: &[(String, String)],
    context: &StageContext,
) -> Result<BTreeMap<OsString, OsString>, StageError> {
    let temporary = context.scratch().join("tmp");
    make_folder(&temporary)?;
    // What the machine has set need not be UTF-8, whatever the variable.
    let inherited = INHERITED.into_iter().chain(DeviceKind::visible_variables());
    let inherited = inherited.filter_map(|name| Some((name.into(), std::env::var_os(name)?)));
    let of_a_job = std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(OF_A_JOB.as_bytes()));
    let fixed = FIXED.iter().map(|(name, value)| (name.into(), value.into()));
    let mut environment: BTreeMap<OsString, OsString> = inherited.chain(of_a_job).chain(fixed).collect();
    let devices = context.devices();
    let own = [
        ("PIPELINE_THREADS", context.threads().to_string()),
        ("PIPELINE_DEVICE", devices.kind.to_string()),
        ("PIPELINE_DEVICE_COUNT", devices.count.to_string()),
        ("PIPELINE_NODES", devices.nodes.to_string()),
    ];
    environment.extend(own.map(|(name, value)| (name.into(), value.into())));
    environment.insert("TMPDIR".into(), temporary.into());
    environment.insert("PIPELINE_WORKING".into(), context.working().into());
    environment.extend(paths.iter().map(|(name, path)| (name.into(), path.into())));
    environment.extend(params.env.iter().map(|(name, value)| (name.into(), filled(&value.0, paths).into())));
    environment.extend(passed.iter().map(|(name, value)| (name.into(), value.into())));
    Ok(environment)
}

/// Whether the program ended well.
fn judge(program: &str, ended: Ended) -> Result<(), StageError> {
    let Ended { status, last_lines } = ended;
    if status.success() {
        return Ok(());
    }
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, signal) => {
            let signal = signal.and_then(|number| nix::sys::signal::Signal::try_from(number).ok());
            format!("was ended by {}", signal.map_or("a signal", |signal| signal.as_str()))
        }
    };
    let error = StageError::new(Cause::Crashed, format!("`{program}` {how}"));
    Err(match last_lines.is_empty() {
        true => error,
        false => error.with_source(format!("it said last:\n{}", last_lines.join("\n"))),
    })
}

/// Lets the owner of a folder change it, and those below it; links are not followed. What cannot be opened is told by
/// whoever meets it.
fn open_folders(folder: &Path) {
    const ALL: u32 = 0o700;
    let Ok(found) = fs::symlink_metadata(folder) else { return };
    if !found.is_dir() {
        return;
    }
    let mode = found.permissions().mode();
    if mode & ALL != ALL {
        let _ = fs::set_permissions(folder, fs::Permissions::from_mode(mode | ALL));
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        open_folders(&entry.path());
    }
}

/// Makes sure that the folder for the next try is one: a program may have removed it, or put a link in its place, and
/// what that leads to is not ours to change.
fn own_working(working: &Path) -> Result<(), StageError> {
    let failed = || format!("cannot look at `{}`", working.display());
    match fs::symlink_metadata(working) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => fs::remove_file(working).or_fail(Cause::Machine, failed)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).or_fail(Cause::Machine, failed),
    }
    make_folder(working)
}

/// Removes what the program kept for a try that is cut off: its outputs are in the store.
fn forget(working: &Path) -> Result<(), StageError> {
    own_working(working)?;
    let failed = || format!("cannot empty `{}`", working.display());
    for entry in fs::read_dir(working).or_fail(Cause::Machine, failed)? {
        let path = entry.or_fail(Cause::Machine, failed)?.path();
        let removed =
            if path.is_dir() && !path.is_symlink() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.or_fail(Cause::Machine, failed)?;
    }
    Ok(())
}

fn make_folder(folder: &Path) -> Result<(), StageError> {
    fs::create_dir_all(folder).or_fail(Cause::Machine, || format!("cannot create folder `{}`", folder.display()))
}
