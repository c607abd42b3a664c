//! Tasks that are part of the program: the files of `pipelines/tasks`, each written from what its dataset holds and
//! from what lm-evaluation-harness 0.4.13 asks.

/// Name and definition of each.
const FILES: [(&str, &str); 11] = [
    ("arc_challenge", include_str!("../../../pipelines/tasks/arc_challenge.yaml")),
    ("arc_easy", include_str!("../../../pipelines/tasks/arc_easy.yaml")),
    ("boolq", include_str!("../../../pipelines/tasks/boolq.yaml")),
    ("gsm8k", include_str!("../../../pipelines/tasks/gsm8k.yaml")),
    ("hellaswag", include_str!("../../../pipelines/tasks/hellaswag.yaml")),
    ("lambada_openai", include_str!("../../../pipelines/tasks/lambada_openai.yaml")),
    ("piqa", include_str!("../../../pipelines/tasks/piqa.yaml")),
    ("truthfulqa_mc1", include_str!("../../../pipelines/tasks/truthfulqa_mc1.yaml")),
    ("truthfulqa_mc2", include_str!("../../../pipelines/tasks/truthfulqa_mc2.yaml")),
    ("wikitext", include_str!("../../../pipelines/tasks/wikitext.yaml")),
    ("winogrande", include_str!("../../../pipelines/tasks/winogrande.yaml")),
];

/// What each subject of MMLU is asked.
const MMLU_SUBJECT: &str = include_str!("../../../pipelines/tasks/mmlu_subject.yaml");

/// A set of examinations: the group's name, what its tasks' names begin with, what each subject is asked, and the
/// subjects with what the prompt calls them.
const EXAMINATIONS: [(&str, &str, &str, &str); 2] = [
    (
        "ceval-valid",
        "ceval-valid_",
        include_str!("../../../pipelines/tasks/ceval_subject.yaml"),
        include_str!("../../../pipelines/tasks/ceval_subjects.tsv"),
    ),
    (
        "cmmlu",
        "cmmlu_",
        include_str!("../../../pipelines/tasks/cmmlu_subject.yaml"),
        include_str!("../../../pipelines/tasks/cmmlu_subjects.tsv"),
    ),
];

/// The subjects of MMLU, by the part that they belong to.
const MMLU: [(&str, &[&str]); 4] = [
    (
        "stem",
        &[
            "abstract_algebra",
            "anatomy",
            "astronomy",
            "college_biology",
            "college_chemistry",
            "college_computer_science",
            "college_mathematics",
            "college_physics",
            "computer_security",
            "conceptual_physics",
            "electrical_engineering",
            "elementary_mathematics",
            "high_school_biology",
            "high_school_chemistry",
            "high_school_computer_science",
            "high_school_mathematics",
            "high_school_physics",
            "high_school_statistics",
            "machine_learning",
        ],
    ),
    (
        "other",
        &[
            "business_ethics",
            "clinical_knowledge",
            "college_medicine",
            "global_facts",
            "human_aging",
            "management",
            "marketing",
            "medical_genetics",
            "miscellaneous",
            "nutrition",
            "professional_accounting",
            "professional_medicine",
            "virology",
        ],
    ),
    (
        "social_sciences",
        &[
            "econometrics",
            "high_school_geography",
            "high_school_government_and_politics",
            "high_school_macroeconomics",
            "high_school_microeconomics",
            "high_school_psychology",
            "human_sexuality",
            "professional_psychology",
            "public_relations",
            "security_studies",
            "sociology",
            "us_foreign_policy",
        ],
    ),
    (
        "humanities",
        &[
            "formal_logic",
            "high_school_european_history",
            "high_school_us_history",
            "high_school_world_history",
            "international_law",
            "jurisprudence",
            "logical_fallacies",
            "moral_disputes",
            "moral_scenarios",
            "philosophy",
            "prehistory",
            "professional_law",
            "world_religions",
        ],
    ),
];

/// All names that stand for something, without the subjects of MMLU.
pub fn names() -> Vec<String> {
    let files = FILES.iter().map(|(name, _)| (*name).to_owned());
    let mmlu = MMLU.iter().map(|(part, _)| format!("mmlu_{part}"));
    let examinations = EXAMINATIONS.iter().map(|(name, ..)| (*name).to_owned());
    let mut names: Vec<String> = files.chain(mmlu).chain(examinations).chain(["mmlu".to_owned()]).collect();
    names.sort();
    names
}

/// Whether there is a task or a group of a name.
pub fn has(name: &str) -> bool {
    definition(name).is_some()
}

/// What a name stands for, as a task file.
pub fn definition(name: &str) -> Option<String> {
    if let Some((_, text)) = FILES.iter().find(|(known, _)| *known == name) {
        return Some((*text).to_owned());
    }
    let group = |members: Vec<String>, metrics: &[&str], version: u32| {
        let members = members.join(", ");
        let metric = |metric: &&str| format!("{{ metric: {metric}, aggregation: mean, weight_by_size: true }}");
        let metrics: Vec<String> = metrics.iter().map(metric).collect();
        let metrics = metrics.join(", ");
        format!(
            "group: {name}\ntask: [{members}]\naggregate_metric_list: [{metrics}]\nmetadata: {{ version: {version} }}\n"
        )
    };
    for (group_name, prefix, text, subjects) in EXAMINATIONS {
        let mut subjects = subjects.lines().filter_map(|line| line.split_once('\t'));
        if name == group_name {
            return Some(group(
                subjects.map(|(subject, _)| format!("{prefix}{subject}")).collect(),
                &["acc", "acc_norm"],
                1,
            ));
        }
        let subject = name.strip_prefix(prefix).and_then(|name| subjects.find(|(subject, _)| *subject == name));
        if let Some((subject, about)) = subject {
            return Some(text.replace("{subject}", subject).replace("{about}", about));
        }
    }
    let part = name.strip_prefix("mmlu")?;
    if part.is_empty() {
        return Some(group(MMLU.iter().map(|(part, _)| format!("mmlu_{part}")).collect(), &["acc"], 2));
    }
    let part = part.strip_prefix('_')?;
    if let Some((_, subjects)) = MMLU.iter().find(|(known, _)| *known == part) {
        return Some(group(subjects.iter().map(|subject| format!("mmlu_{subject}")).collect(), &["acc"], 2));
    }
    let is_subject = MMLU.iter().any(|(_, subjects)| subjects.contains(&part));
    is_subject.then(|| MMLU_SUBJECT.replace("{subject}", part).replace("{about}", &part.replace('_', " ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::file::TaskFile;
    use crate::tasks::group::Overrides;

    #[test]
    fn every_name_has_a_definition_that_can_be_read() {
        let subjects = MMLU.iter().flat_map(|(_, subjects)| subjects.iter().map(|subject| format!("mmlu_{subject}")));
        let all: Vec<String> = names().into_iter().chain(subjects).collect();
        assert_eq!(all.len(), 18 + 57);
        for name in all {
            match TaskFile::shipped(&name, &definition(&name).unwrap(), &Overrides::default())
                .unwrap_or_else(|error| panic!("{error}"))
            {
                TaskFile::Task(task) => assert_eq!(task.name, name),
                TaskFile::Group(group) => {
                    assert!(group.name == name && group.names().into_iter().all(has));
                    assert!(group.members.len() >= 4, "{name}");
                }
            }
        }
        assert!(!has("mmlu_x") && !has("mmlux") && !has("hella"));
    }
}
