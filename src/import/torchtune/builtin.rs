//! The configs that torchtune brings, by name.

use engine::file::parse::parse;
use engine::file::source::{SourceId, Sources};
use engine::file::tree::{Node, Value};

const CONFIGS: &str = include_str!("configs.yaml");

/// The config of a name that `tune ls` prints, in 0.2.1's words where there is one and the command uses them.
pub(in crate::import) fn builtin(name: &str, is_old: bool, sources: &mut Sources) -> Result<Node, Option<String>> {
    let source = sources.add("torchtune's own configs", CONFIGS);
    let root = read(source);
    let old = format!("0.2.1/{name}");
    let found = is_old.then(|| root.get(&old)).flatten().or_else(|| root.get(name)).cloned();
    found.ok_or_else(|| {
        let Value::Map(entries) = &root.value else { return None };
        engine::suggest::nearest(name, entries.iter().map(|entry| entry.key.as_str())).map(str::to_owned)
    })
}

fn read(source: SourceId) -> Node {
    parse(source, CONFIGS, &mut Vec::new()).expect("the configs that are built in are YAML")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_configs_can_be_read_and_are_found_by_name() {
        let mut problems = Vec::new();
        let root = parse(SourceId(0), CONFIGS, &mut problems).expect("it is YAML");
        assert!(problems.is_empty(), "{problems:?}");
        let Value::Map(entries) = root.value else { panic!("a mapping") };
        assert!(entries.len() > 100, "{}", entries.len());
        let mut sources = Sources::default();
        let new = builtin("llama3_1/8B_lora", false, &mut sources).expect("torchtune has it");
        let old = builtin("llama3_1/8B_lora", true, &mut sources).expect("torchtune had it");
        assert_ne!(new.get("gradient_accumulation_steps"), old.get("gradient_accumulation_steps"));
        assert_eq!(builtin("llama3_1/8B_lorra", false, &mut sources).unwrap_err().as_deref(), Some("llama3_1/8B_lora"));
    }
}
