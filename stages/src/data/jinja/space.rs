//! `namespace()`: what templates carry from one turn of a loop to the next.
//!
//! minijinja's own namespaces may hold themselves: then they are never freed, and printing one never ends. These hold
//! only what is older than they are.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use minijinja::value::{Enumerator, Object, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::checks::kept;
use super::measure::measure;
use super::meter;

/// The filter that stands for an assignment to an attribute.
pub(super) const SET: &str = "=set";

pub(super) fn install(environment: &mut Environment<'_>) {
    environment.add_function("namespace", namespace);
    environment.add_filter(SET, set);
}

/// A namespace.
#[derive(Debug)]
pub(super) struct Space {
    number: u64,
    values: Mutex<BTreeMap<Arc<str>, Value>>,
}

impl Space {
    /// Its number in its rendering: an older one has a smaller number.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    fn values(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Value>> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, name: &str, value: Value) -> Result<(), Error> {
        meter::made(name.len() as u64 + 64)?;
        if value.as_object().is_some() {
            let size = measure(&value)?;
            let refused = |problem: &'static str| Err(Error::new(ErrorKind::InvalidOperation, problem));
            if size.newest_space >= self.number {
                return refused("a namespace cannot contain a later namespace, nor itself");
            }
            // A loop remembers what it walks, which may be this.
            if size.has_loop {
                return refused(
                    "a namespace can contain values of a loop, such as `loop.index`, but not `loop` itself",
                );
            }
        }
        let value = kept(value)?;
        let replaced = self.values().insert(name.into(), value);
        // What was there is dropped without the lock.
        drop(replaced);
        Ok(())
    }
}

impl Object for Space {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.values().get(key).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.values().keys().map(|key| Value::from(&**key)).collect())
    }
}

fn namespace(args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let space = Space { number: meter::next_space(), values: Mutex::default() };
    for defaults in args.into_values() {
        let pairs = defaults.as_object().filter(|_| defaults.kind() == ValueKind::Map);
        let Some(pairs) = pairs.and_then(|object| object.try_iter_pairs()) else {
            let problem = format!("expected object or keyword arguments, got {}", defaults.kind());
            return Err(Error::new(ErrorKind::InvalidOperation, problem));
        };
        for (key, value) in pairs {
            if let Some(key) = key.as_str() {
                space.set(key, value)?;
            }
        }
    }
    Ok(Value::from_object(space))
}

/// `{% set space.name = value %}`.
fn set(value: Value, space: Value, name: &str) -> Result<Value, Error> {
    let Some(space) = space.downcast_object_ref::<Space>() else {
        let problem = format!("can only assign to namespaces, not {}", space.kind());
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    };
    space.set(name, value)?;
    Ok(Value::UNDEFINED)
}
