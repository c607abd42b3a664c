//! The model card that goes with an adapter: `README.md`, whose front matter hubs read, as PEFT writes it.

use super::{AdapterConfig, TargetModules};

/// The card of an adapter. What only its maker knows (data, purpose, licence) is not in it.
pub fn model_card(config: &AdapterConfig) -> String {
    let base = config.base_model.as_deref();
    // JSON's strings are YAML's.
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let mut lines = vec!["---".to_owned()];
    lines.extend(base.map(|base| format!("base_model: {}", quoted(base))));
    lines.extend(["library_name: peft", "pipeline_tag: text-generation", "tags:"].map(str::to_owned));
    lines.extend(base.map(|base| format!("- {}", quoted(&format!("base_model:adapter:{base}")))));
    lines.extend(["- lora", "- transformers", "---", ""].map(str::to_owned));
    lines.push(format!(
        "A LoRA adapter{} in PEFT's form.",
        base.map(|base| format!(" of `{base}`")).unwrap_or_default()
    ));
    lines.push(String::new());
    lines.push(format!("- rank {}, alpha {}", config.rank, config.alpha));
    lines.push(format!(
        "- target modules: {}",
        match &config.target_modules {
            TargetModules::Names(names) => names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", "),
            TargetModules::Pattern(pattern) => format!("`{pattern}`"),
        }
    ));
    let variants = [(config.use_rslora, "rsLoRA"), (config.use_dora, "DoRA")];
    lines.extend(variants.iter().filter(|(is_used, _)| *is_used).map(|(_, name)| format!("- {name}")));
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_matter_names_the_base_where_it_has_a_name() {
        let mut config = AdapterConfig::new(8, 16.0, vec!["q_proj".to_owned(), "v_proj".to_owned()]);
        let nameless = "---\nlibrary_name: peft\npipeline_tag: text-generation\ntags:\n- lora\n- transformers\n---\n\n\
                        A LoRA adapter in PEFT's form.\n\n- rank 8, alpha 16\n- target modules: `q_proj`, `v_proj`\n";
        assert_eq!(model_card(&config), nameless);
        config.name_base("./a \"base\"".to_owned(), None);
        config.use_dora = true;
        let named = "---\nbase_model: \"./a \\\"base\\\"\"\nlibrary_name: peft\npipeline_tag: text-generation\ntags:\n\
                     - \"base_model:adapter:./a \\\"base\\\"\"\n- lora\n- transformers\n---\n\n\
                     A LoRA adapter of `./a \"base\"` in PEFT's form.\n\n- rank 8, alpha 16\n\
                     - target modules: `q_proj`, `v_proj`\n- DoRA\n";
        assert_eq!(model_card(&config), named);
    }
}
