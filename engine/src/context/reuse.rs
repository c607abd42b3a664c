//! Work that earlier results have in them: a stage that goes through an input piece by piece takes over what it made of
//! equal pieces.

use cache::{Class, Digest, KeyDocument, Reusable, Verify};
use serde_json::Value;

use super::{Artifact, StageContext, stored};
use crate::artifact::{Description, described_among};
use crate::error::StageError;
use crate::keys::PIN;
use crate::parameter::{KeyWriter, Parameter, Reference};
use crate::stage::StageKind;

impl StageContext {
    /// What a result of this stage depends on apart from one input: results that agree in it were made of equal pieces
    /// in equal ways.
    ///
    /// # Errors
    /// Fails where the job does not grant an input that the parameters name, which is a defect of the engine.
    pub fn family<K: StageKind>(&self, stage: &K, apart_from: &Reference) -> Result<Digest, StageError> {
        let identity = |reference: &Reference, kinds: &'static [&'static str]| {
            if reference == apart_from {
                return Some(Digest::of(b"the input that differs"));
            }
            Some(self.job.inputs.get(&self.resolve(reference, kinds)?)?.identity)
        };
        let mut document = KeyDocument::default();
        document.push("@kind", K::NAME, Class::Semantic);
        document.push("@version", K::VERSION.to_string(), Class::Semantic);
        let mut writer = KeyWriter::new(&mut document, &identity);
        stage.write_whole_key(&mut writer);
        let granted = writer.unresolved.is_empty();
        for (role, files) in &self.job.files {
            for (order, file) in files.iter().enumerate() {
                document.push(format!("@files.{role}[{order}]"), file.digest.to_string(), Class::Semantic);
            }
        }
        for (name, pinned) in &self.job.pins {
            document.push(format!("{PIN}{name}"), pinned.commit.as_str(), Class::Semantic);
        }
        if granted { Ok(document.result_key()) } else { Err(StageError::internal("an input is not granted")) }
    }

    /// What pieces of results of this stage depend on where a part of its parameters decides them: that part, with the
    /// inputs that it names. All else that a piece depends on has to be in what the stage calls it by.
    ///
    /// # Errors
    /// As [`StageContext::family`].
    pub fn family_of<K: StageKind>(&self, part: &impl Parameter) -> Result<Digest, StageError> {
        let identity = |reference: &Reference, kinds: &'static [&'static str]| {
            Some(self.job.inputs.get(&self.resolve(reference, kinds)?)?.identity)
        };
        let mut document = KeyDocument::default();
        document.push("@part_of", K::NAME, Class::Semantic);
        document.push("@version", K::VERSION.to_string(), Class::Semantic);
        let mut writer = KeyWriter::new(&mut document, &identity);
        part.write_key(&mut writer);
        let granted = writer.unresolved.is_empty();
        if granted { Ok(document.result_key()) } else { Err(StageError::internal("an input is not granted")) }
    }

    /// The newest results of a family that are whole in the store.
    pub fn reusable(&self, family: &Digest) -> Vec<Reusable> {
        // What cannot be looked up is made anew.
        self.store.reusable(family).unwrap_or_default()
    }

    /// Opens one of them: a read-only folder of links in which every file has been checked against its digest, gone
    /// when the stage ends. `None` where it cannot be used, and the work is to be done anew.
    pub fn open_reusable(&self, reusable: &Reusable) -> Option<Artifact> {
        let folder = self.scratch.join("earlier").join(reusable.tree.to_string());
        // The run does not refer to that result, so nothing but this keeps it from being collected.
        match self.store.hold_tree(&reusable.tree) {
            Ok(true) => {}
            Ok(false) | Err(_) => return None,
        }
        let tree = self.store.link_folder(&reusable.tree, &folder, Verify::Contents);
        let tree = tree.inspect_err(|error| tracing::warn!("an earlier result is not used: {error}")).ok()?;
        let description = match &reusable.output {
            Some(output) => Description::new(&output.kind, output.identity, output.facts.clone()),
            None => described_among(&self.store, &tree, |_| true)?,
        };
        Some(Artifact { folder, description })
    }

    /// Offers an output that has been sealed, and the pieces it was made of, to later results of its family.
    ///
    /// # Errors
    /// Fails where the output is not sealed, which is a defect of the stage, or the disk refuses.
    pub fn offer(&self, family: &Digest, output: &str, pieces: Value) -> Result<(), StageError> {
        let sealed = self.outputs.get(output).cloned();
        let sealed = sealed.ok_or_else(|| StageError::internal(format!("`{output}` is offered and not sealed")))?;
        let reusable = Reusable { tree: sealed.tree, output: Some(sealed), pieces };
        self.store.offer(family, reusable).map_err(stored)
    }
}
