//! A row as an expression sees it: columns by their names, the row as a whole, and the names that were asked for in vain.

use std::sync::{Arc, Mutex};

use minijinja::Value;
use minijinja::value::{Enumerator, Object, ObjectExt};
use serde_json::Map;

use super::number;

/// The name of the whole row, where no column has it.
pub(super) const ROW: &str = "row";

/// A record's values by column.
pub(super) type Fields = Map<String, serde_json::Value>;

/// What the names in an expression stand for. A column becomes a value of the expression when it is asked for, so that long texts
/// that nothing asks for are not copied.
#[derive(Debug)]
pub(super) struct Lookup {
    fields: Arc<Fields>,
    missed: Mutex<Vec<String>>,
    too_large: Arc<Mutex<Option<String>>>,
}

impl Lookup {
    pub(super) fn new(fields: Arc<Fields>) -> Arc<Self> {
        Arc::new(Self { fields, missed: Mutex::default(), too_large: Arc::default() })
    }

    /// An integer that was asked for and is none that expressions know.
    pub(super) fn too_large(&self) -> Option<String> {
        self.too_large.lock().expect("nothing panics while it is held").clone()
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
        match self.fields.get(name) {
            Some(value) => Some(as_value(value, &self.too_large)),
            None if name == ROW => {
                Some(Value::from_object(WholeRow(Arc::clone(&self.fields), Arc::clone(&self.too_large))))
            }
            None => {
                self.missed.lock().expect("nothing panics while it is held").push(name.to_owned());
                None
            }
        }
    }
}

/// All columns, for names that are no identifiers and for columns that not every row has.
#[derive(Debug)]
struct WholeRow(Arc<Fields>, Arc<Mutex<Option<String>>>);

impl Object for WholeRow {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_str()?).map(|value| as_value(value, &self.1))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_enumerator(|row| Box::new(row.0.keys().map(|name| Value::from(name.as_str()))))
    }
}

fn as_value(value: &serde_json::Value, too_large: &Mutex<Option<String>>) -> Value {
    number::to_value(value, &mut |digits| {
        *too_large.lock().expect("nothing panics while it is held") = Some(digits.to_owned());
    })
}
