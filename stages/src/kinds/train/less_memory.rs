//! The same training with less memory: the rows of an optimizer step computed in smaller parts.

use engine::stage::LessMemory;
use serde_json::Value;

/// Micro-batches of at most half as many rows, and as many more of them: their product, and with it the key, is the
/// same.
pub(super) fn with_less_memory(parameters: &Value) -> LessMemory {
    let whole = |name: &str| parameters.get(name).and_then(Value::as_u64).unwrap_or(1).max(1);
    let (rows, parts) = (whole("micro_batch_size"), whole("gradient_accumulation_steps"));
    let Some((fewer, more)) = split(rows, parts) else { return LessMemory::Advice(advice(parameters)) };
    let mut lowered = parameters.clone();
    lowered["micro_batch_size"] = fewer.into();
    lowered["gradient_accumulation_steps"] = more.into();
    let change = format!("micro_batch_size {rows} → {fewer}, gradient_accumulation_steps {parts} → {more}");
    LessMemory::Set { parameters: lowered, change }
}

/// The largest micro-batch of at most half the rows that the rows of a step can be divided into, and how many there are
/// of it.
fn split(rows: u64, parts: u64) -> Option<(u64, u64)> {
    let product = rows.checked_mul(parts)?;
    (1..=rows / 2).rev().find(|fewer| product.is_multiple_of(*fewer)).map(|fewer| (fewer, product / fewer))
}

fn advice(parameters: &Value) -> String {
    let checkpointing = parameters.get("activation_checkpointing").and_then(Value::as_bool) == Some(true);
    let recompute = if checkpointing { "" } else { "set `activation_checkpointing: true`, or " };
    format!("`micro_batch_size` is 1 already: {recompute}shorten the rows (`max_seq_len` of their stage)")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_product_stays_what_it_was() {
        let halved = [(8, 4), (6, 1), (5, 2), (3, 4), (2, 1)].map(|(rows, parts)| split(rows, parts));
        assert_eq!(halved, [Some((4, 8)), Some((3, 2)), Some((2, 5)), Some((1, 12)), Some((1, 2))]);
        assert_eq!(split(1, 64), None);
    }

    #[test]
    fn nothing_but_the_split_changes() {
        let LessMemory::Set { parameters, change } = with_less_memory(&json!({ "micro_batch_size": 4, "epochs": 2 }))
        else {
            panic!("four rows can be divided")
        };
        assert_eq!(parameters, json!({ "micro_batch_size": 2, "epochs": 2, "gradient_accumulation_steps": 2 }));
        assert_eq!(change, "micro_batch_size 4 → 2, gradient_accumulation_steps 1 → 2");
    }

    #[test]
    fn at_the_end_there_is_advice() {
        let told = |parameters| match with_less_memory(&parameters) {
            LessMemory::Advice(advice) => advice,
            other => panic!("{other:?}"),
        };
        assert!(told(json!({})).contains("activation_checkpointing"));
        let last = told(json!({ "activation_checkpointing": true }));
        assert_eq!(last, "`micro_batch_size` is 1 already: shorten the rows (`max_seq_len` of their stage)");
    }
}
