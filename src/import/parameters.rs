//! Parameters by their paths, each with where it comes from.

use serde_json::Value as Json;

/// Why a parameter has its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Note {
    /// The tool's file says so, in the same sense.
    Given,
    /// The tool's default, by its name and version.
    Default(String),
    /// The tool's key means something else.
    Differs { name: String, reason: String, default: Option<String> },
    /// It is needed here, and no key of the tool stands for it.
    Needed(&'static str),
}

#[derive(Debug, Clone)]
pub(crate) struct Parameter {
    pub(super) path: String,
    pub(super) value: Json,
    pub(super) note: Note,
}

/// Parameters in the order in which they were set.
#[derive(Debug, Clone, Default)]
pub(crate) struct Parameters(Vec<Parameter>);

impl Parameters {
    /// Sets a parameter; one of the same path is replaced where it is.
    pub(super) fn set(&mut self, path: &str, value: impl Into<Json>, note: Note) {
        let parameter = Parameter { path: path.to_owned(), value: value.into(), note };
        match self.0.iter_mut().find(|known| known.path == path) {
            Some(known) => *known = parameter,
            None => self.0.push(parameter),
        }
    }

    /// Sets what is needed here.
    pub(super) fn need(&mut self, path: &str, value: impl Into<Json>, why: &'static str) {
        self.set(path, value, Note::Needed(why));
    }

    pub(crate) fn get(&self, path: &str) -> Option<&Json> {
        self.0.iter().find(|parameter| parameter.path == path).map(|parameter| &parameter.value)
    }

    /// Whether a parameter of this path is set, or one above or below it; one above that is a mapping has to hold it.
    pub(super) fn touches(&self, path: &str) -> bool {
        let below = |path: &str, above: &str| path.strip_prefix(above)?.strip_prefix('.').map(str::to_owned);
        self.0.iter().any(|known| match (below(path, &known.path), &known.value) {
            (Some(rest), Json::Object(map)) => map.contains_key(&rest),
            (Some(_), _) => true,
            (None, _) => known.path == path || below(&known.path, path).is_some(),
        })
    }

    pub(crate) fn remove(&mut self, path: &str) -> Option<Parameter> {
        let at = self.0.iter().position(|parameter| parameter.path == path)?;
        Some(self.0.remove(at))
    }

    /// Those below a prefix, by the rest of their paths.
    pub(super) fn below(&self, prefix: &str) -> Self {
        let rest = |parameter: &Parameter| {
            let path = parameter.path.strip_prefix(prefix)?.strip_prefix('.')?.to_owned();
            Some(Parameter { path, ..parameter.clone() })
        };
        Self(self.0.iter().filter_map(rest).collect())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Parameter> {
        self.0.iter()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Parameters {
    /// Sets all of these, too.
    pub(super) fn extend(&mut self, others: &Self) {
        for Parameter { path, value, note } in others.iter() {
            self.set(path, value.clone(), note.clone());
        }
    }

    /// Puts those of the groups named into their order, and all others behind them.
    pub(super) fn sort(&mut self, groups: &[&str]) {
        let group = |parameter: &Parameter| parameter.path.split('.').next().unwrap_or_default().to_owned();
        self.0.sort_by_key(|parameter| {
            let group = group(parameter);
            groups.iter().position(|known| *known == group).unwrap_or(groups.len())
        });
    }
}
