//! Groups of tasks: files, and groups within groups, that name tasks, groups and tags.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::TaskError;
use super::file::{GROUP_KEYS, Keys, WITHOUT_EFFECT, unknown};
use super::template::printed;

/// A metric of a group, put together from its tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupMetric {
    pub metric: String,
    /// Whether a task counts by its rows; else all count the same.
    pub weight_by_size: bool,
    /// The filters that it is taken of; all that there are if left out.
    pub filters: Option<Vec<String>>,
}

/// A group of tasks.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    pub name: String,
    pub members: Vec<Member>,
    pub metrics: Vec<GroupMetric>,
}

/// What a group consists of.
#[derive(Debug, Clone, PartialEq)]
pub enum Member {
    /// A task, group or tag by its name, with keys that the tasks have in place of their own.
    Named { name: String, overrides: Overrides },
    /// A group that is written where it belongs.
    Group(Group),
}

/// Keys that a task has in place of those of its file, and where they are written.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Overrides {
    pub values: Map<String, Value>,
    pub file: PathBuf,
    pub line: usize,
}

impl Member {
    /// The name that its figures have.
    pub fn name(&self) -> &str {
        match self {
            Self::Named { name, .. } => name,
            Self::Group(group) => &group.name,
        }
    }
}

impl Overrides {
    /// These keys, and of `outer` those that are not among them.
    pub fn within(&self, outer: &Self) -> Self {
        let mut all = if self.values.is_empty() { outer.clone() } else { self.clone() };
        for (key, value) in &outer.values {
            if !all.values.contains_key(key) {
                all.values.insert(key.clone(), value.clone());
            }
        }
        all
    }
}

impl Group {
    pub(super) fn read(keys: &Keys) -> Result<Self, TaskError> {
        let name = keys.text("group")?.unwrap_or_default();
        let whole: Map<String, Value> = ["task", "aggregate_metric_list"]
            .into_iter()
            .filter_map(|key| Some((key.to_owned(), keys.value(key)?.clone())))
            .collect();
        Self::of(keys, name, &whole)
    }

    /// A group of a file, or one within it.
    fn of(keys: &Keys, name: String, group: &Map<String, Value>) -> Result<Self, TaskError> {
        let members = match group.get("task") {
            Some(Value::String(task)) => vec![Member::Named { name: task.clone(), overrides: Overrides::default() }],
            Some(Value::Array(members)) => {
                members.iter().map(|member| member_of(keys, &name, member)).collect::<Result<_, _>>()?
            }
            _ => return Err(keys.wrong("task", "is missing: the names of the group's tasks")),
        };
        let metrics = match group.get("aggregate_metric_list") {
            None | Some(Value::Null) => Vec::new(),
            // One metric stands for a list of one.
            Some(metric @ Value::Object(_)) => vec![metric_of(keys, metric)?],
            Some(Value::Array(list)) => list.iter().map(|metric| metric_of(keys, metric)).collect::<Result<_, _>>()?,
            Some(_) => return Err(keys.wrong("aggregate_metric_list", "is to be a list")),
        };
        Ok(Self { name, members, metrics })
    }

    /// The names of what it consists of.
    pub fn names(&self) -> Vec<&str> {
        self.members.iter().map(Member::name).collect()
    }
}

fn member_of(keys: &Keys, group: &str, member: &Value) -> Result<Member, TaskError> {
    let wrong = |message: String| keys.wrong("task", message);
    let entry = match member {
        Value::String(name) => return Ok(Member::Named { name: name.clone(), overrides: Overrides::default() }),
        Value::Object(entry) => entry,
        other => return Err(wrong(format!("has names, and mappings with `task` or `group`; `{other}` is neither"))),
    };
    if let Some(Value::String(name)) = entry.get("group") {
        if let Some(other) = entry.keys().find(|key| !GROUP_KEYS.contains(&key.as_str())) {
            return Err(wrong(format!("the group `{name}` in it: `{other}` is no key of a group")));
        }
        return Group::of(keys, format!("{group}::{name}"), entry).map(Member::Group);
    }
    let Some(Value::String(name)) = entry.get("task") else {
        return Err(wrong("a mapping in it lacks `task`, the name of a task".to_owned()));
    };
    for key in entry.keys() {
        if let Some(message) = unknown(key, false) {
            return Err(wrong(format!("`{key}` of `{name}`: {message}")));
        }
    }
    let mut values = entry.clone();
    values.retain(|key, _| key != "task" && !WITHOUT_EFFECT.contains(&key.as_str()));
    let overrides = Overrides { values, file: keys.file.clone(), line: keys.line("task") };
    Ok(Member::Named { name: name.clone(), overrides })
}

fn metric_of(keys: &Keys, metric: &Value) -> Result<GroupMetric, TaskError> {
    let key = "aggregate_metric_list";
    let entry = metric.as_object().ok_or_else(|| keys.wrong(key, "must contain mappings"))?;
    let name = entry.get("metric").and_then(Value::as_str);
    if entry.get("aggregation").is_some_and(|aggregation| aggregation != "mean") {
        return Err(keys.wrong(key, "the only `aggregation` of a group is `mean`"));
    }
    keys.only(key, entry, &["metric", "aggregation", "weight_by_size", "filter_list"])?;
    let filters = match entry.get("filter_list") {
        None | Some(Value::Null) => None,
        Some(Value::String(name)) => Some(vec![name.clone()]),
        Some(Value::Array(names)) => Some(names.iter().map(printed).collect()),
        Some(_) => return Err(keys.wrong(key, "`filter_list` has names of filters")),
    };
    Ok(GroupMetric {
        filters,
        metric: name.ok_or_else(|| keys.wrong(key, "lacks `metric`"))?.to_owned(),
        weight_by_size: entry.get("weight_by_size").is_none_or(|weighs| *weighs == Value::Bool(true)),
    })
}
