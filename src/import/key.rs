//! Tables of keys: what each key of a tool becomes. A new key is one row.

/// One key of a tool.
#[derive(Debug, Clone)]
pub(super) struct Key {
    pub(super) name: &'static str,
    /// What the tool takes where the key is not set, as YAML; `None` where that is nothing.
    pub(super) default: Option<&'static str>,
    pub(super) becomes: Becomes,
}

/// What becomes of a key. A path is that of a parameter below its stage: `train.lora.rank`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Becomes {
    /// The parameter of the same meaning.
    Same(&'static str),
    /// The same, where an integer is needed and the tool may have a float.
    Whole(&'static str),
    /// Read by the tool's own function, together with other keys.
    Read(&'static str),
    /// Nothing, since it changes no result here; why not.
    Nothing(&'static str),
    /// Nothing, which changes results unless it has its default; what is missing here.
    Missing(&'static str),
}

/// The keys of a tool.
#[derive(Debug, Default)]
pub(super) struct Keys(pub(super) Vec<Key>);

impl Keys {
    /// The parameter of the same meaning; `row` is a name, or `name=default`.
    pub(super) fn same(self, row: &'static str, path: &'static str) -> Self {
        self.row(row, Becomes::Same(path))
    }

    pub(super) fn whole(self, row: &'static str, path: &'static str) -> Self {
        self.row(row, Becomes::Whole(path))
    }

    pub(super) fn read(self, row: &'static str, path: &'static str) -> Self {
        self.row(row, Becomes::Read(path))
    }

    pub(super) fn nothing(self, why: &'static str, rows: &[&'static str]) -> Self {
        rows.iter().fold(self, |keys, row| keys.row(row, Becomes::Nothing(why)))
    }

    pub(super) fn missing(self, what: &'static str, rows: &[&'static str]) -> Self {
        rows.iter().fold(self, |keys, row| keys.row(row, Becomes::Missing(what)))
    }

    /// These and those of another table, of which a row of this one takes the place of a namesake.
    pub(super) fn and(mut self, others: Self) -> Self {
        let others: Vec<Key> = others.0.into_iter().filter(|other| self.find(other.name).is_none()).collect();
        self.0.extend(others);
        self
    }

    /// Those of these names, for a tool that has some keys of another.
    pub(super) fn only(self, names: &[&str]) -> Self {
        Self(self.0.into_iter().filter(|key| names.contains(&key.name)).collect())
    }

    pub(super) fn find(&self, name: &str) -> Option<&Key> {
        self.0.iter().find(|key| key.name == name)
    }

    fn row(mut self, row: &'static str, becomes: Becomes) -> Self {
        let (name, default) = match row.split_once('=') {
            Some((name, default)) => (name, Some(default)),
            None => (row, None),
        };
        debug_assert!(self.find(name).is_none(), "`{name}` has two rows");
        self.0.push(Key { name, default, becomes });
        self
    }
}
