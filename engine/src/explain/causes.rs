//! From two key documents to what somebody did: the field that was edited, the file that was changed, the input that
//! came out different. Entries that only follow from another one stand behind it, or are left out where it says it all.

use std::collections::{BTreeMap, BTreeSet};

use cache::{Digest, KeyDifference, KeyDocument, differences};

use super::edits::{Edits, top};
use super::past::{Before, Last, Past, Present};
use super::{ExplainError, Reason};
use crate::change::{Change, FileChange, file_changes};
use crate::file::source::Span;
use crate::keys::{KIND_OF, PIN};
use crate::parameter::NOT_KNOWN;
use crate::plan::ResolvedInput;
use crate::stage::{Outside, WorkingState};

impl Past<'_> {
    /// Why a stage whose result is not there runs, as far as its key document is known: causes first, what follows from
    /// them behind.
    ///
    /// # Errors
    /// Fails where the history or the store does.
    pub(crate) fn reasons(&self, now: &Present<'_>) -> Result<Vec<Reason>, ExplainError> {
        let mut reasons = match self.last(now.stage)? {
            Last::Never => vec![Reason::NeverRan],
            Last::Gone => vec![Reason::ResultRemoved],
            Last::Known(before) => causes(self, &before, now),
        };
        if let Some(state) = self.working_state(now) {
            // An attempt that was cut off says more than that none came to its end.
            if reasons == [Reason::NeverRan] && state != WorkingState::Unmeasured {
                reasons.clear();
            }
            reasons.push(Reason::WorkingState(state));
        }
        Ok(reasons)
    }
}

/// Why a stage does not have the key that it had; causes first.
fn causes(past: &Past<'_>, before: &Before, now: &Present<'_>) -> Vec<Reason> {
    let different = differences(&before.document, now.document);
    if different.is_empty() {
        let key = before.document.result_key();
        let is_recorded = past.store.is_some_and(|store| store.see(&key).is_some());
        return vec![if is_recorded { Reason::ResultMissing } else { Reason::ResultRemoved }];
    }
    let edits = before.parameters.as_ref().map(|old| Edits::between(old, &now.stage.parameters));
    let mut found = CauseSearch { past, before, now, edits, causes: Vec::new(), effects: Vec::new() };
    let mut roles = BTreeSet::new();
    for difference in different {
        let KeyDifference { path, old, new } = &difference;
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        if path == "@kind" {
            // Another kind has other parameters: they say nothing more.
            return vec![Reason::KindChanged { old: text(old), new: text(new) }];
        } else if path == "@version" {
            found.causes.push(Reason::VersionRaised { old: text(old), new: text(new) });
        } else if let Some(file) = path.strip_prefix("@files.") {
            let role = file.rfind('[').map_or(file, |bracket| &file[..bracket]);
            if roles.insert(role.to_owned()) {
                found.source(role);
            }
        } else if let Some(pin) = path.strip_prefix(PIN) {
            found.pin(pin, old, new);
        } else if let Some(field) = path.strip_prefix(KIND_OF) {
            // An input that is new or gone is itself a difference.
            if old.is_some() && new.is_some() {
                found.kind_of(field);
            }
        } else if new.as_deref() != Some(NOT_KNOWN) {
            found.field(&difference);
        }
    }
    found.finish()
}

struct CauseSearch<'a> {
    past: &'a Past<'a>,
    before: &'a Before,
    now: &'a Present<'a>,
    /// `None` where the earlier parameters are not known.
    edits: Option<Edits>,
    causes: Vec<Reason>,
    /// What follows from a cause, by the field that it is in.
    effects: Vec<(String, Reason)>,
}

impl CauseSearch<'_> {
    fn finish(self) -> Vec<Reason> {
        let explained = |effect: &str| {
            self.causes.iter().any(|cause| match cause {
                Reason::Changed { field, .. } => effect.is_empty() || top(field) == effect,
                _ => false,
            })
        };
        let effects: Vec<Reason> =
            self.effects.iter().filter(|(field, _)| !explained(field)).map(|(_, reason)| reason.clone()).collect();
        self.causes.into_iter().chain(effects).collect()
    }

    /// The files of a role.
    fn source(&mut self, role: &str) {
        let span = self.now.stage.bound.outside().into_iter().find_map(|outside| match outside {
            Outside::Files { role: other, span, .. } if other == role => Some(span),
            _ => None,
        });
        let field = span.and_then(|span| self.field_at(span));
        if let (Some(field), Some(edits)) = (&field, &self.edits)
            && edits.touch(field)
        {
            let changed: Vec<Reason> = edits.inside(field).map(|(path, edit)| self.changed(path, edit)).collect();
            changed.into_iter().for_each(|cause| self.add(cause));
            return;
        }
        let files = self.changed_files(role);
        let place = span.and_then(|span| self.place(span));
        let reason = Reason::SourceChanged { role: role.to_owned(), files, place };
        match span {
            Some(_) => self.add(reason),
            // It is no longer read: a field says why.
            None => self.effects.push((String::new(), reason)),
        }
    }

    fn changed_files(&self, role: &str) -> Vec<FileChange> {
        let of = |document: &KeyDocument| -> Vec<(String, String)> {
            let prefix = format!("@files.{role}[");
            let of_role = |path: &str| path.strip_prefix(&prefix).is_some_and(|rest| !rest.contains('['));
            let values = document.entries.iter().filter(|entry| of_role(&entry.path)).map(|entry| &entry.value);
            values
                .filter_map(|value| value.rsplit_once(' '))
                .map(|(name, digest)| (name.into(), digest.into()))
                .collect()
        };
        let (old, new) = (of(&self.before.document), of(self.now.document));
        let grants = self.now.outside.files.get(role).map(Vec::as_slice).unwrap_or_default();
        if let ([_], [_], [grant]) = (old.as_slice(), new.as_slice(), grants) {
            // Of a single file the key has the extension alone.
            let path = grant.path.strip_prefix(&self.past.plan.folder).unwrap_or(&grant.path);
            let file = path.components().collect::<std::path::PathBuf>().display().to_string();
            return vec![FileChange { file, change: Change::Changed }];
        }
        let by_name = |files: Vec<(String, String)>| files.into_iter().collect::<BTreeMap<_, _>>();
        file_changes(&by_name(old), &by_name(new))
    }

    fn pin(&mut self, pin: &str, old: &Option<String>, new: &Option<String>) {
        let reason = Reason::PinChanged { pin: pin.to_owned(), old: old.clone(), new: new.clone() };
        match (old, new) {
            (Some(_), Some(_)) => self.add(reason),
            // What is pinned now and was not, or the other way round, another field asked for.
            _ => self.effects.push((String::new(), reason)),
        }
    }

    fn field(&mut self, difference: &KeyDifference) {
        let KeyDifference { path, old, new } = difference;
        let identity = |value: &Option<String>| value.as_ref().and_then(|value| value.parse::<Digest>().ok());
        let edit = self.edits.as_ref().and_then(|edits| edits.at(path));
        match (identity(old), identity(new)) {
            (Some(_), _) | (_, Some(_)) if edit.is_some() => {
                let changed = edit.map(|edit| self.changed(path, edit));
                changed.into_iter().for_each(|cause| self.add(cause));
            }
            (Some(old), Some(_)) => {
                let reason = self.input(path, &old);
                self.add(reason);
            }
            _ => self.value(path, &(old.clone(), new.clone())),
        }
    }

    /// An input that is another one than before, under the same name.
    fn input(&self, path: &str, old: &Digest) -> Reason {
        let Some(input) = self.input_at(path) else {
            return Reason::InputChanged { field: path.to_owned(), input: path.to_owned(), change: None };
        };
        let change = (self.now.output)(input).and_then(|output| self.past.input_change(input, old, &output));
        Reason::InputChanged { field: path.to_owned(), input: self.past.name_of(input), change }
    }

    /// An input of the same content and of another kind.
    fn kind_of(&mut self, field: &str) {
        let reason = match self.edits.as_ref().and_then(|edits| edits.at(field)) {
            Some(edit) => self.changed(field, edit),
            None => {
                let input = self.input_at(field).map_or_else(|| field.to_owned(), |input| self.past.name_of(input));
                Reason::InputChanged { field: field.to_owned(), input, change: None }
            }
        };
        self.add(reason);
    }

    /// A value: an edit itself, or what follows from edits elsewhere.
    fn value(&mut self, path: &str, edit: &(Option<String>, Option<String>)) {
        let reason = self.changed(path, edit);
        let Some(edits) = &self.edits else { return self.add(reason) };
        if let Some((before, now)) = edits.at(path) {
            // As the file says it; where it says nothing, the key has the default.
            let (old, new) = edit;
            let said = (before.clone().or_else(|| old.clone()), now.clone().or_else(|| new.clone()));
            let reason = self.changed(path, &said);
            return self.add(reason);
        }
        // Of a mapping that has become empty, or is no longer, the edit is what stood in it.
        let inside: Vec<Reason> = edits.inside(path).map(|(path, edit)| self.changed(path, edit)).collect();
        if !inside.is_empty() {
            return inside.into_iter().for_each(|cause| self.add(cause));
        }
        if edits.touch(path) {
            return self.add(reason);
        }
        let factors = self.now.stage.bound.derived_from(top(path)).iter();
        let edited: Vec<Reason> =
            factors.flat_map(|factor| edits.inside(factor)).map(|(path, edit)| self.changed(path, edit)).collect();
        edited.into_iter().for_each(|cause| self.add(cause));
        self.effects.push((top(path).to_owned(), reason));
    }

    fn changed(&self, path: &str, (old, new): &(Option<String>, Option<String>)) -> Reason {
        let place = self.innermost_span(path).and_then(|span| self.place(span));
        Reason::Changed { field: path.to_owned(), old: old.clone(), new: new.clone(), place }
    }

    fn add(&mut self, cause: Reason) {
        if !self.causes.contains(&cause) {
            self.causes.push(cause);
        }
    }

    /// The planned input that the reference at a path stands for.
    fn input_at(&self, path: &str) -> Option<&ResolvedInput> {
        let (_, span) = self.now.stage.field_spans.iter().find(|(known, _)| known == path)?;
        self.now.stage.inputs.iter().find(|input| input.span == *span)
    }

    /// The innermost field at a place.
    fn field_at(&self, span: Span) -> Option<String> {
        self.now.stage.field_spans.iter().find(|(_, known)| *known == span).map(|(field, _)| field.clone())
    }

    /// Where a field stands: itself, or the innermost mapping around it that does.
    fn innermost_span(&self, field: &str) -> Option<Span> {
        let mut path = field;
        loop {
            if let Some((_, span)) = self.now.stage.field_spans.iter().find(|(known, _)| known == path) {
                return Some(*span);
            }
            let Some(outer) = path.rfind(['.', '[']) else { return Some(self.now.stage.span) };
            path = &path[..outer];
        }
    }

    fn place(&self, span: Span) -> Option<String> {
        let sources = &self.past.plan.sources;
        let source = sources.get(span.source)?;
        let (line, column) = sources.line_column(span);
        Some(format!("{}:{line}:{column}", source.name))
    }
}
