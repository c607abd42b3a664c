//! What expressions hold for any text: they end without a panic, within their limits, and say the same of a row each
//! time.

use std::ops::ControlFlow;

use engine::file::tree::Node;
use engine::parameter::{Parameter as _, Reader};
use serde_json::json;

use super::Dataset;
use super::expression::{Expressions, environment};

/// A text is taken for a filter and for a new column.
pub fn filter(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let rows = [
        json!({"a": "Hello", "b": "there\n", "n": 3, "text": "Hello there", "lang": "en", "list": [1, {"x": null}]}),
        json!({"a": null, "b": -1.5, "n": 1e300, "text": "", "lang": [], "list": {}}),
    ];
    for with in [json!({"source": "./a.jsonl", "filter": text}), json!({"source": "./a.jsonl", "map": {"made": text}})]
    {
        let Some(params) = Dataset::read(&Node::from_json(&with), &mut Reader::default()) else { continue };
        let environment = environment();
        let Ok(expressions) = Expressions::compile(&params, &environment) else { continue };
        for row in &rows {
            let fields = || row.as_object().expect("a row is an object").clone();
            let said = |made: Result<ControlFlow<(), _>, _>| match made {
                Ok(ControlFlow::Break(())) => None,
                Ok(ControlFlow::Continue(fields)) => Some(Ok(fields)),
                Err(super::flaw::Flaw { problem, .. }) => Some(Err(problem)),
            };
            assert_eq!(said(expressions.apply(fields())), said(expressions.apply(fields())), "{text}");
        }
    }
}
