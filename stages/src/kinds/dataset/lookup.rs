//! A row as an expression sees it: columns by their names, the row as a whole, and the names that were asked for in
//! vain.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use minijinja::Value;
use minijinja::value::{Enumerator, Object, ObjectExt};
use serde_json::Map;

use crate::data::number;

/// The name of the whole row, where no column has it.
pub(super) const ROW: &str = "row";

/// A record's values by column.
pub(super) type Fields = Map<String, serde_json::Value>;

/// What the names in an expression stand for. A column becomes a value of the expression when it is asked for, so that
/// long texts that nothing asks for are not copied.
#[derive(Debug)]
pub(super) struct Lookup {
    row: Arc<WholeRow>,
    missed: Mutex<Vec<String>>,
}

impl Lookup {
    pub(super) fn new(fields: Arc<Fields>) -> Arc<Self> {
        let row = WholeRow { fields, values: Mutex::default(), too_large: Mutex::default() };
        Arc::new(Self { row: Arc::new(row), missed: Mutex::default() })
    }

    /// An integer that was asked for and is none that expressions know.
    pub(super) fn too_large(&self) -> Option<String> {
        self.row.too_large.lock().expect("nothing panics while it is held").clone()
    }

    /// The names that were asked for and are no columns.
    pub(super) fn missed(&self) -> Vec<String> {
        self.missed.lock().expect("nothing panics while it is held").clone()
    }
}

impl Object for Lookup {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, name: &str) -> Option<Value> {
        match self.row.value(name) {
            Some(value) => Some(value),
            None if name == ROW => Some(Value::from_dyn_object(Arc::clone(&self.row))),
            None => {
                self.missed.lock().expect("nothing panics while it is held").push(name.to_owned());
                None
            }
        }
    }
}

/// All columns, for names that are no identifiers and for columns that not every row has.
#[derive(Debug)]
struct WholeRow {
    fields: Arc<Fields>,
    /// The columns that were asked for: a loop that names a long text a million times must not copy it as often.
    values: Mutex<BTreeMap<String, Value>>,
    too_large: Mutex<Option<String>>,
}

impl WholeRow {
    fn values(&self) -> MutexGuard<'_, BTreeMap<String, Value>> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn value(&self, name: &str) -> Option<Value> {
        if let Some(value) = self.values().get(name) {
            return Some(value.clone());
        }
        let value = as_value(self.fields.get(name)?, &self.too_large);
        self.values().insert(name.to_owned(), value.clone());
        Some(value)
    }
}

impl Object for WholeRow {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.value(key.as_str()?)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_enumerator(|row| Box::new(row.fields.keys().map(|name| Value::from(name.as_str()))))
    }
}

fn as_value(value: &serde_json::Value, too_large: &Mutex<Option<String>>) -> Value {
    number::to_value(value, &mut |digits| {
        *too_large.lock().expect("nothing panics while it is held") = Some(digits.to_owned());
    })
}
