//! Recipes: the pipeline files of `pipelines/`, which are part of the program, and those made of them for a model, for
//! rows and for a machine.
//!
//! What a recipe leaves open is in its `vars`. [`edit`] puts values there, and keeps the text's comments.

pub(crate) mod cat;
pub(crate) mod cp;
mod edit;
pub(crate) mod init;
pub(crate) mod ls;
mod models;

use engine::suggest;

use crate::render::Failure;

/// A pipeline file to copy.
#[derive(Debug)]
struct Recipe {
    name: &'static str,
    text: &'static str,
    /// What it reads that is shipped with it, by the path beside it.
    files: &'static [(&'static str, &'static str)],
}

macro_rules! recipes {
    ($($folder:literal $name:literal [$($file:literal)*])*) => {
        &[$(Recipe {
            name: $name,
            text: include_str!(concat!("../../pipelines/", $folder, $name, ".yaml")),
            files: &[$(($file, include_str!(concat!("../../pipelines/", $folder, $file)))),*],
        }),*]
    };
}

const ALL: &[Recipe] = recipes! {
    "recipes/" "lora" []
    "recipes/" "dora" []
    "recipes/" "qlora" []
    "recipes/" "full" []
    "recipes/" "qat" []
    "recipes/" "pretrain" []
    "recipes/" "dpo" []
    "recipes/" "kto" []
    "recipes/" "distillation" []
    "recipes/" "sweep" []
    "recipes/" "evaluation" []
    "recipes/" "merge" []
    "recipes/" "gguf" []
    "recipes/" "scaling" []
    "" "xsum_lora" []
    "" "quickstart" ["quickstart/text.jsonl" "quickstart/identity.jsonl" "quickstart/identity_held_out.jsonl"]
    "" "quickstart_sweep" ["quickstart/text.jsonl" "quickstart/identity.jsonl" "quickstart/identity_held_out.jsonl"]
    "" "quickstart_dpo" ["quickstart/text.jsonl" "quickstart/pairs.jsonl" "quickstart/pairs_held_out.jsonl"]
    "" "quickstart_qlora" ["quickstart/text.jsonl" "quickstart/identity.jsonl" "quickstart/identity_held_out.jsonl"]
    "" "quickstart_qat" ["quickstart/text.jsonl" "quickstart/identity.jsonl" "quickstart/identity_held_out.jsonl"]
    "" "quickstart_tasks" ["quickstart/text.jsonl" "quickstart/identity.jsonl" "quickstart/tasks/identity.yaml" "quickstart/tasks/identity.jsonl"
        "quickstart/tasks/trades.yaml" "quickstart/tasks/trades.jsonl"]
    "" "quickstart_rank" ["quickstart/text.jsonl" "quickstart/identity.jsonl" "quickstart/identity_held_out.jsonl"]
    "" "quickstart_gguf" ["quickstart/text.jsonl"]
    "" "command" ["command/clean.sh" "command/questions.txt"]
};

/// Whether there is a recipe of this name.
pub(crate) fn is_recipe(name: &str) -> bool {
    ALL.iter().any(|recipe| recipe.name == name)
}

impl Recipe {
    fn find(name: &str) -> Result<&'static Self, Failure> {
        let names: Vec<&str> = ALL.iter().map(|recipe| recipe.name).collect();
        let missing = || {
            let help = suggest::nearest(name, &names).map(|near| format!("did you mean `{near}`?"));
            Failure::wrong(format!("there is no recipe `{name}`"))
                .with_help(help.unwrap_or_else(|| "`pipeline ls` lists them".to_owned()))
        };
        ALL.iter().find(|recipe| recipe.name == name).ok_or_else(missing)
    }

    /// What it does, by the first line of its comment.
    fn summary(&self) -> &'static str {
        self.text.lines().next().unwrap_or_default().trim_start_matches("# ")
    }

    /// Whether its model is a variable.
    fn takes_a_model(&self) -> bool {
        self.text.contains("\n  model: ")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_file_of_the_folders_is_a_recipe_and_has_a_summary() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines");
        for folder in [folder.join("recipes"), folder] {
            for entry in fs::read_dir(folder).expect("the folder is there") {
                let path = entry.expect("it can be listed").path();
                if path.extension().is_none_or(|extension| extension != "yaml") {
                    continue;
                }
                let name = path.file_stem().expect("a file").to_string_lossy();
                let recipe = Recipe::find(&name).unwrap_or_else(|_| panic!("{name} is not listed"));
                assert_eq!(recipe.text, fs::read_to_string(&path).expect("it is text"), "{name}");
                assert!(recipe.text.starts_with("# "), "{name} begins with what it does");
                assert_eq!(recipe.takes_a_model(), recipe.text.contains("${vars.model}"), "{name}");
            }
        }
    }
}
