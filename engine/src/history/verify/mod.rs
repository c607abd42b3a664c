//! Checks a run by doing it again: chosen stages are executed with what they were told and read, in a store of their
//! own, and what they make is compared with what was recorded.
//!
//! Nothing of the home changes. Before a stage runs, its records are held against each other and its inputs against
//! their digests, so that a record or a stored file that somebody changed is named.

mod record;
mod scratch;

use std::path::Path;

use cache::{Digest, OutputRecord, Store, Tree};
use serde::Serialize;

use self::record::Records;
use self::scratch::{Made, Scratch};
use super::index::{History, HistoryError};
use super::recorded::Recorded;
use super::results::LookUpError;
use crate::artifact::stored_files;
use crate::error::StageError;
use crate::home::Home;
use crate::protocol::Job;
use crate::stage::Registry;

/// What is to be checked, and with what.
pub struct Verification<'a> {
    /// The home of the run.
    pub home: &'a Home,
    pub history: &'a History,
    pub store: &'a Store,
    /// The stage kinds.
    pub registry: &'a Registry,
    pub run: &'a Recorded,
    /// Threads for each stage; `None` takes as many as it had.
    pub threads: Option<usize>,
    /// Says how two files differ, in words, where it knows their form.
    pub describe: &'a dyn Fn(&Path, &Path) -> Option<String>,
}

/// What became of the check of one stage.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verified {
    pub stage: String,
    /// The run that made the result, where it is another than the one checked.
    pub made_by: Option<String>,
    /// Records and stored files that are not what they were.
    pub tampered: Vec<String>,
    /// What came of doing it again.
    pub verdict: Verdict,
    /// What should be known beside: another version of the program, another machine.
    pub notes: Vec<String>,
}

/// What came of doing a stage again.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// Every file of every output is the same, to the bit.
    Equal {
        /// How long it ran.
        seconds: f64,
    },
    /// Some output differs.
    Differs {
        /// How long it ran.
        seconds: f64,
        /// The outputs that do.
        outputs: Vec<DifferentOutput>,
    },
    /// It failed this time.
    Failed {
        /// The message and its sources, outermost first.
        messages: Vec<String>,
    },
    /// It was not done again.
    NotRun {
        /// Why, as a lower-case fragment.
        because: String,
    },
}

/// An output that came out in other bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DifferentOutput {
    /// Its name.
    pub output: String,
    /// Whether what it stands for is the same all the same (rows in another compression).
    pub same_identity: bool,
    /// Whether the facts about it are the same.
    pub same_facts: bool,
    /// The files that differ.
    pub files: Vec<DifferentFile>,
}

/// A file that came out in other bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DifferentFile {
    /// Its path in the output.
    pub path: String,
    /// The digest recorded; `None` where there was no such file.
    pub recorded: Option<Digest>,
    /// The digest now; `None` where there is no such file.
    pub now: Option<Digest>,
    /// How the two differ, where their form is known and both are there.
    pub how: Option<String>,
}

/// Why a check could not be made.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// What was recorded could not be looked up.
    #[error(transparent)]
    LookUp(#[from] LookUpError),
    /// The machine refused what it takes to run a stage.
    #[error("cannot do a stage again")]
    Machine(#[source] StageError),
}

impl From<HistoryError> for VerifyError {
    fn from(error: HistoryError) -> Self {
        Self::LookUp(error.into())
    }
}

impl Verified {
    /// Whether the stage is as it was recorded: nothing was changed, and it came out the same.
    pub fn is_sound(&self) -> bool {
        self.tampered.is_empty() && matches!(self.verdict, Verdict::Equal { .. })
    }

    /// Whether something speaks against what was recorded. A stage that could not be done again speaks neither way.
    pub fn is_refuted(&self) -> bool {
        !self.tampered.is_empty() || matches!(self.verdict, Verdict::Differs { .. } | Verdict::Failed { .. })
    }
}

impl Verification<'_> {
    /// The stages that are checked where none is named: those that this run executed, but for those that fetch from a
    /// server.
    pub fn executed(&self) -> Vec<String> {
        let done = self.run.stages.iter().filter(|stage| stage.summary.status == "done");
        let fetches = |id: &str| self.run.job(id).is_some_and(|job| !job.pins.is_empty());
        done.map(|stage| stage.summary.stage.clone()).filter(|id| !fetches(id)).collect()
    }

    /// Checks stages of the run, in the order of its plan. `tell` hears of each as it begins.
    ///
    /// # Errors
    /// Fails where the history, the store or the machine does; what is wrong with a stage is part of the result.
    pub fn verify(&self, stages: &[String], mut tell: impl FnMut(&str)) -> Result<Vec<Verified>, VerifyError> {
        let mut scratch = Scratch::new(self.store).map_err(VerifyError::Machine)?;
        let chosen = self.run.stages.iter().filter(|stage| stages.contains(&stage.summary.stage));
        chosen
            .map(|stage| {
                tell(&stage.summary.stage);
                self.stage(&stage.summary.stage, &mut scratch)
            })
            .collect()
    }

    fn stage(&self, id: &str, scratch: &mut Scratch) -> Result<Verified, VerifyError> {
        let not_run = |because: &str| Verified {
            stage: id.to_owned(),
            made_by: None,
            tampered: Vec::new(),
            verdict: Verdict::NotRun { because: because.to_owned() },
            notes: Vec::new(),
        };
        let Some(key) = self.run.stage(id).and_then(|stage| stage.summary.key) else {
            return Ok(not_run("it has no result in this run"));
        };
        let Some((run, made_as)) = self.maker(id, &key)? else {
            return Ok(not_run("the record of the run that made its result is gone"));
        };
        let records = Records::read(self.home, self.store, &run, &made_as, &key);
        let mut verified = Verified {
            stage: id.to_owned(),
            made_by: (run.summary.run != self.run.summary.run).then(|| run.summary.run.clone()),
            tampered: records.contradictions(self.registry),
            verdict: Verdict::NotRun { because: String::new() },
            notes: records.notes(self.registry),
        };
        verified.tampered.extend(records.damaged_outputs(self.store));
        verified.verdict = match &records.job {
            // What is not what the key says would only show that another thing comes out otherwise.
            _ if !verified.tampered.is_empty() => Verdict::NotRun { because: "its record was changed".to_owned() },
            None => Verdict::NotRun { because: "its job file is gone".to_owned() },
            Some(job) => self.again(job, &records, scratch, &mut verified)?,
        };
        Ok(verified)
    }

    /// The run that made the result, and the stage's id in it.
    fn maker(&self, id: &str, key: &Digest) -> Result<Option<(Recorded, String)>, VerifyError> {
        if self.run.stage(id).is_some_and(|stage| stage.summary.status == "done") {
            return Ok(Some((self.run.clone(), id.to_owned())));
        }
        let Some((run, stage)) = self.history.maker(key)? else { return Ok(None) };
        Ok(Recorded::read(&self.home.run(&run), super::Words::Skip).map(|run| (run, stage)))
    }

    fn again(
        &self,
        job: &Job,
        records: &Records,
        scratch: &mut Scratch,
        verified: &mut Verified,
    ) -> Result<Verdict, VerifyError> {
        let Verified { tampered, notes, .. } = verified;
        if let Some(because) = sources_changed(job) {
            return Ok(Verdict::NotRun { because });
        }
        for (name, grant) in &job.inputs {
            match scratch.take_in(self.store, &grant.tree) {
                Ok(()) => {}
                Err(scratch::NotTaken::Damaged(what)) => tampered.push(format!("input `{name}`: {what}")),
                Err(scratch::NotTaken::Missing) => {
                    return Ok(Verdict::NotRun { because: format!("its input `{name}` is no longer in the store") });
                }
                Err(scratch::NotTaken::Outside(what)) => {
                    return Ok(Verdict::NotRun { because: format!("its input `{name}` is not what it was: {what}") });
                }
                Err(scratch::NotTaken::Refused(error)) => return Err(VerifyError::Machine(error)),
            }
        }
        if !tampered.is_empty() {
            return Ok(Verdict::NotRun { because: "an input is damaged".to_owned() });
        }
        let ended = scratch.execute(job, self.threads).map_err(VerifyError::Machine)?;
        let Made { outputs, how, seconds } = match ended {
            Ok(made) => made,
            Err(messages) => return Ok(Verdict::Failed { messages }),
        };
        notes.extend(records.otherwise_computed(&how));
        let different: Vec<DifferentOutput> = records
            .outputs
            .iter()
            .filter_map(|(name, output)| self.compare(name, output, outputs.get(name), scratch.store()))
            .collect();
        Ok(match different.is_empty() {
            true => Verdict::Equal { seconds },
            false => Verdict::Differs { seconds, outputs: different },
        })
    }

    fn compare(
        &self,
        name: &str,
        recorded: &OutputRecord,
        now: Option<&OutputRecord>,
        scratch: &Store,
    ) -> Option<DifferentOutput> {
        let files = |store: &Store, output: &OutputRecord| stored_files(store, &output.tree, &output.identity).ok();
        let before = files(self.store, recorded);
        let after = now.and_then(|now| files(scratch, now));
        let same_facts = now.is_some_and(|now| now.facts == recorded.facts);
        let same_files = now.is_some_and(|now| now.tree == recorded.tree) || before.is_some() && before == after;
        if same_files && same_facts {
            return None;
        }
        let paths: Vec<&str> = [&before, &after].into_iter().flatten().flat_map(paths).collect();
        let mut seen = std::collections::BTreeSet::new();
        let different = paths.into_iter().filter(|path| seen.insert(*path)).filter_map(|path| {
            let digest = |tree: &Option<Tree>| Some(tree.as_ref()?.get(path)?.digest);
            let (recorded, now) = (digest(&before), digest(&after));
            if recorded == now {
                return None;
            }
            let places = recorded.zip(now).map(|(old, new)| (self.store.place(&old), scratch.place(&new)));
            let how = places.and_then(|(old, new)| (self.describe)(old.path(), new.path()));
            Some(DifferentFile { path: path.to_owned(), recorded, now, how })
        });
        Some(DifferentOutput {
            output: name.to_owned(),
            same_identity: now.is_some_and(|now| now.identity == recorded.identity),
            same_facts,
            files: different.collect(),
        })
    }
}

fn paths(tree: &Tree) -> impl Iterator<Item = &str> {
    tree.files().iter().map(|file| file.path.as_str())
}

/// Why the source files of a job do not allow to do it again.
fn sources_changed(job: &Job) -> Option<String> {
    job.files.values().flatten().find_map(|file| {
        let now = Digest::of_file(&file.path);
        match now {
            Ok((digest, _)) if digest == file.digest => None,
            Ok(_) => Some(format!("source file `{}` is no longer what it was", file.path.display())),
            Err(_) => Some(format!("source file `{}` cannot be read", file.path.display())),
        }
    })
}
