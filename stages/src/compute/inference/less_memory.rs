//! The same answers with less memory: fewer of them at once.

use engine::stage::LessMemory;
use serde_json::Value;

/// The answers that grow together when a file does not say.
pub(super) const BATCH_SIZE: usize = 8;

/// The same answers with half as many of them growing together.
pub fn with_less_memory(parameters: &Value) -> LessMemory {
    let batch_size = parameters.get("batch_size").and_then(Value::as_u64).unwrap_or(BATCH_SIZE as u64);
    if batch_size <= 1 {
        return LessMemory::Advice(
            "`batch_size` is 1 already: lower `max_new_tokens`, or shorten the prompts".to_owned(),
        );
    }
    let mut lowered = parameters.clone();
    lowered["batch_size"] = (batch_size / 2).into();
    LessMemory::Set { parameters: lowered, change: format!("batch_size {batch_size} → {}", batch_size / 2) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn answers_grow_in_smaller_batches_down_to_one() {
        let mut parameters = json!({ "max_new_tokens": 5 });
        let mut seen = Vec::new();
        while let LessMemory::Set { parameters: lowered, .. } = with_less_memory(&parameters) {
            seen.push(lowered["batch_size"].clone());
            parameters = lowered;
        }
        assert_eq!(seen, [4, 2, 1]);
        assert_eq!(parameters["max_new_tokens"], 5);
    }
}
