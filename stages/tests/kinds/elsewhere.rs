//! What kinds list of the keys of other programs (`KEYS_ELSEWHERE`), against the keys that they have.

use std::collections::BTreeSet;

use engine::stage::Kind;
use serde_json::Value;
use test_harness::test;

/// The keys of a kind, nested ones with dots.
fn keys_of(kind: &Kind) -> BTreeSet<String> {
    let mut keys = BTreeSet::new();
    collect(&(kind.schema)(), "", &mut keys);
    keys
}

fn collect(schema: &Value, outer: &str, keys: &mut BTreeSet<String>) {
    for alternative in schema["anyOf"].as_array().into_iter().flatten() {
        collect(alternative, outer, keys);
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let key = format!("{outer}{name}");
        collect(property, &format!("{key}."), keys);
        keys.insert(key);
    }
}

/// The key that a text says to write.
fn to_be_written(instead: &str) -> Option<&str> {
    let rest = instead.strip_prefix("write `").or_else(|| instead.strip_prefix("did you mean `"))?;
    rest.split(['`', ':']).next()
}

#[test]
fn what_is_to_be_written_is_there_and_what_is_listed_is_not() {
    let registry = stages::registry();
    let tokenize = keys_of(registry.get("tokenize").unwrap());
    for kind in registry.kinds() {
        let keys = keys_of(kind);
        for (listed, instead) in kind.keys_elsewhere {
            let (key, is_value) = listed.split_once(": ").map_or((*listed, false), |(key, _)| (key, true));
            assert_eq!(keys.contains(key), is_value, "{}: `{listed}`", kind.name);
            let Some(ours) = to_be_written(instead) else { continue };
            let outer = key.rsplit_once('.').map_or(String::new(), |(outer, _)| format!("{outer}."));
            let is_there = keys.contains(ours) || keys.contains(&format!("{outer}{ours}"));
            let is_of_tokenize = instead.ends_with("in the `tokenize` stage") && tokenize.contains(ours);
            assert!(is_there || is_of_tokenize, "{}, `{listed}`: `{ours}`", kind.name);
        }
    }
}

#[test]
fn rows_of_a_length_have_the_same_names_for_it_in_each_kind() {
    let registry = stages::registry();
    let names = |kind: &str| -> Vec<&'static str> {
        let listed = registry.get(kind).unwrap().keys_elsewhere.iter();
        listed.filter(|(_, instead)| *instead == "write `max_seq_len`").map(|(key, _)| *key).collect()
    };
    assert!(names("tokenize").len() == 6 && names("tokenize").contains(&"cutoff_len"), "{:?}", names("tokenize"));
    assert_eq!(names("tokenize"), names("pack"));
}
