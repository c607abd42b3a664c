//! The tools of a conversation: a list of functions, as OpenAI's format has them, or that list as JSON text.

use serde_json::Value;

use super::conversation::number_that_is_not_read;
use super::flaw::{Flaw, Reason, describe};
use crate::data::number;

fn flaw(problem: impl Into<String>) -> Flaw {
    Flaw::new(Reason::Turns, problem)
}

/// The tools of a row; `None` where it has none.
pub(super) fn read(value: Value) -> Result<Option<Value>, Flaw> {
    // What is text was written down as it is meant.
    let is_text = value.is_string();
    let tools = match value {
        Value::Null => return Ok(None),
        Value::String(text) if text.trim().is_empty() => return Ok(None),
        Value::String(text) => match serde_json::from_str::<Value>(&text) {
            Ok(Value::Array(tools)) => tools,
            Ok(other) => return Err(flaw(format!("has {} as JSON, not a list of tools", describe(&other)))),
            Err(error) => return Err(flaw(format!("has a string that is not JSON: {error}"))),
        },
        Value::Array(tools) => tools,
        other => return Err(flaw(format!("has {}, not a list of tools", describe(&other)))),
    };
    if let Some(digits) = tools.iter().find_map(number::find) {
        return Err(flaw(number_that_is_not_read(digits)));
    }
    let checked = tools.into_iter().enumerate().map(|(index, mut tool)| {
        if !is_text {
            without_nulls(&mut tool);
        }
        check(&tool)
            .map(|()| tool)
            .map_err(|problem| flaw(format!("has tools of which number {} {problem}", index + 1)))
    });
    let tools = checked.collect::<Result<Vec<_>, _>>()?;
    Ok((!tools.is_empty()).then_some(Value::Array(tools)))
}

/// Tables have every field in every row; those that are null say nothing.
fn without_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(without_nulls);
        }
        Value::Array(values) => values.iter_mut().for_each(without_nulls),
        _ => {}
    }
}

/// A tool is an object with a name, its own or that of its `function`.
fn check(tool: &Value) -> Result<(), String> {
    let Value::Object(fields) = tool else { return Err(format!("is {}, not an object", describe(tool))) };
    let function = match fields.get("function") {
        Some(Value::Object(function)) => function,
        Some(other) => return Err(format!("has a `function` that is {}, not an object", describe(other))),
        None => fields,
    };
    match function.get("name") {
        Some(Value::String(name)) if !name.trim().is_empty() => Ok(()),
        _ => Err("has no `name`".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tools_are_a_list_or_its_json() {
        let tool = json!({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}});
        let expected = Some(json!([tool]));
        assert_eq!(read(json!([tool])).unwrap(), expected);
        assert_eq!(read(json!([tool]).to_string().into()).unwrap(), expected);
        let with_null = json!([{"name": "time", "strict": null}]);
        assert_eq!(read(with_null.clone()).unwrap(), Some(json!([{"name": "time"}])));
        assert_eq!(read(with_null.to_string().into()).unwrap(), Some(with_null));
        for nothing in [Value::Null, json!([]), json!(""), json!(" [] ")] {
            assert_eq!(read(nothing).unwrap(), None);
        }
    }

    #[test]
    fn what_is_no_tool_is_told_by_its_number() {
        for (wrong, problem) in [
            (json!({"name": "x"}), "not a list of tools"),
            (json!("{}"), "as JSON, not a list of tools"),
            (json!("[{]"), "not JSON"),
            (json!([{"name": "x"}, "y"]), "number 2 is"),
            (json!([{"type": "function"}]), "number 1 has no `name`"),
            (json!([{"function": "weather"}]), "not an object"),
        ] {
            let flaw = read(wrong.clone()).unwrap_err();
            assert!(flaw.problem.contains(problem), "{wrong}: {}", flaw.problem);
        }
    }
}
