//! Preference training: the losses of all tools in one table, and rows of a prompt with two responses, or with one that
//! is good or bad.

use serde_json::json;

use super::job::{Job, Method};
use super::parameters::{Note, Parameters};
use super::reading::Reading;

/// What is said of methods that are not carried over.
pub(super) const OTHERS: &str = "reinforcement learning and reward models (GRPO, PPO, rewards) are not supported yet";

/// Methods that train on no rows of preferences.
const REINFORCEMENT: &[&str] = &["grpo", "gdpo", "ppo", "rloo", "rm", "gkd", "ebft"];

/// A tool's keys for the numbers of a loss. What a tool has no key for is `None`, and has the default of here.
pub(super) struct Names {
    /// The key that the loss is reported under.
    pub(super) loss: &'static str,
    pub(super) beta: Option<&'static str>,
    pub(super) label_smoothing: Option<&'static str>,
    pub(super) gamma: Option<&'static str>,
    /// The weight of the likelihood of chosen responses that is a part of CPO, and of SimPO where it is one's of CPO.
    pub(super) cpo_weight: Option<&'static str>,
    /// The weight of the likelihood that any loss may add.
    pub(super) sft_weight: Option<&'static str>,
    pub(super) desirable_weight: Option<&'static str>,
    pub(super) undesirable_weight: Option<&'static str>,
    /// Whether ORPO's likelihood is that of the prompt, too.
    pub(super) orpo_scores_prompts: bool,
}

impl Names {
    fn all(&self) -> impl Iterator<Item = &'static str> {
        let Self { beta, label_smoothing, gamma, cpo_weight, sft_weight, desirable_weight, undesirable_weight, .. } =
            self;
        [beta, label_smoothing, gamma, cpo_weight, sft_weight, desirable_weight, undesirable_weight]
            .into_iter()
            .filter_map(|name| *name)
    }
}

/// What a tool's label smoothing does with the loss of DPO.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Smoothing {
    /// cDPO, as here.
    Conservative,
    /// Nothing, as TRL since 1.0.
    Ignored,
}

/// A loss of here by the name that tools have for it, and which numbers it has besides `beta`.
struct Loss {
    theirs: &'static [&'static str],
    ours: &'static str,
    numbers: &'static [Number],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    LabelSmoothing,
    Gamma,
    CpoWeight,
    SftWeight,
    Weights,
}

const LOSSES: &[Loss] = {
    use Number::{CpoWeight, Gamma, LabelSmoothing, SftWeight, Weights};
    &[
        Loss { theirs: &["sigmoid", "dpo", "sigmoid_norm"], ours: "dpo", numbers: &[LabelSmoothing, SftWeight] },
        Loss { theirs: &["robust"], ours: "robust", numbers: &[LabelSmoothing, SftWeight] },
        Loss { theirs: &["ipo"], ours: "ipo", numbers: &[SftWeight] },
        Loss { theirs: &["hinge"], ours: "hinge", numbers: &[SftWeight] },
        Loss { theirs: &["apo_zero"], ours: "apo_zero", numbers: &[SftWeight] },
        Loss { theirs: &["apo_down"], ours: "apo_down", numbers: &[SftWeight] },
        Loss { theirs: &["nca_pair"], ours: "nca", numbers: &[SftWeight] },
        Loss { theirs: &["sppo_hard"], ours: "sppo", numbers: &[SftWeight] },
        Loss { theirs: &["orpo"], ours: "orpo", numbers: &[] },
        Loss { theirs: &["simpo"], ours: "simpo", numbers: &[Gamma, CpoWeight] },
        Loss { theirs: &["cpo"], ours: "cpo", numbers: &[LabelSmoothing, CpoWeight] },
        Loss { theirs: &["kto"], ours: "kto", numbers: &[Weights] },
    ]
};

/// Carries the loss over, and its numbers; `which` is the tool's name for it.
pub(super) fn loss(reading: &mut Reading<'_>, names: &Names, which: &str, smoothing: Smoothing) {
    let Some(loss) = LOSSES.iter().find(|loss| loss.theirs.contains(&which)) else {
        if REINFORCEMENT.contains(&which) {
            return reading.missing(names.loss, format!("`{which}`: {OTHERS}"));
        }
        reading.missing(names.loss, format!("`{which}` is no loss here: docs/preferences.md lists them"));
        reading.parameters.need("train.loss.name", "dpo", "The rows are preferences, and their loss is not supported.");
        return without(reading, names, "numbers of a loss that is not supported");
    };
    if which == "kto" {
        let reason =
            "the divergence that KTO compares with is estimated from each micro-batch there, here from the step";
        reading.put_differing(names.loss, "train.loss.name", loss.ours, reason);
    } else {
        reading.put(names.loss, "train.loss.name", loss.ours);
    }
    if which == "sigmoid_norm" {
        reading.parameters.set("train.loss.length_normalized", true, Note::Given);
    }
    if loss.ours == "orpo" && names.orpo_scores_prompts {
        reading.parameters.need("train.loss.nll", "full", "The prompt's likelihood is a part of the loss there.");
    }
    let has = |number: Number| loss.numbers.contains(&number);
    number(reading, names.beta, "train.loss.beta");
    if let Some(name) = names.label_smoothing.filter(|_| has(Number::LabelSmoothing)) {
        let is_ignored = smoothing == Smoothing::Ignored && loss.ours == "dpo";
        match reading.number(name) {
            Some(share) if is_ignored && share > 0.0 => {
                reading
                    .differs(name, "without effect on this loss there since TRL 1.0; here `label_smoothing` is cDPO");
            }
            _ if is_ignored => reading.nothing(name, "without effect on this loss"),
            _ => number(reading, Some(name), "train.loss.label_smoothing"),
        }
    }
    let wanted = [
        (Number::Gamma, names.gamma, "train.loss.gamma"),
        (Number::CpoWeight, names.cpo_weight, "train.loss.sft_weight"),
        (Number::SftWeight, names.sft_weight, "train.loss.sft_weight"),
        (Number::Weights, names.desirable_weight, "train.loss.desirable_weight"),
        (Number::Weights, names.undesirable_weight, "train.loss.undesirable_weight"),
    ];
    for (_, name, path) in wanted.into_iter().filter(|(of, ..)| has(*of)) {
        number(reading, name, path);
    }
    without(reading, names, "a number of other losses");
}

fn number(reading: &mut Reading<'_>, name: Option<&'static str>, path: &str) {
    let Some(name) = name else { return };
    match reading.number(name) {
        Some(value) if value.fract() == 0.0 => reading.put(name, path, value as i64),
        Some(value) => reading.put(name, path, value),
        None => {}
    }
}

/// Leaves out the adapter's dropout: the trainers of preferences disable every dropout of a model (`disable_dropout`).
pub(super) fn without_dropout(reading: &mut Reading<'_>, job: &Job) {
    const PATH: &str = "train.lora.dropout";
    let is_some = reading.number("lora_dropout").is_some_and(|share| share > 0.0);
    match reading.is_given("lora_dropout") {
        _ if job.method == Method::Full || !is_some => {}
        true => {
            let reason = "a training by preferences disables every dropout there (`disable_dropout`)";
            reading.put_differing("lora_dropout", PATH, 0, reason);
        }
        false => reading.put("lora_dropout", PATH, 0),
    }
}

/// What is said of the numbers where the job has no such loss.
pub(super) fn without(reading: &mut Reading<'_>, names: &Names, why: &str) {
    names.all().for_each(|name| {
        if !reading.is_reported(name) {
            reading.nothing(name, why);
        }
    });
}

/// Rows with a user's turn as the prompt and an assistant's turn for each response: all are expressions.
pub(super) fn pair(rows: &mut Parameters, system: Option<&str>, user: &str, [chosen, rejected]: [&str; 2]) {
    let map = json!({ "prompt": prompt(system, user), "chosen": response(chosen), "rejected": response(rejected) });
    rows.set("map", map, Note::Given);
    rows.set("column_map", json!({ "prompt": "prompt", "chosen": "chosen", "rejected": "rejected" }), Note::Given);
}

/// The same with one response, which the column `label` judges.
pub(super) fn judged(rows: &mut Parameters, system: Option<&str>, user: &str, completion: &str) {
    let map = json!({
        "prompt": prompt(system, user), "completion": response(completion), "label": "{{ row['label'] }}",
    });
    rows.set("map", map, Note::Given);
    rows.set("column_map", json!({ "prompt": "prompt", "completion": "completion", "label": "label" }), Note::Given);
}

fn turn(role: &str, content: &str) -> String {
    format!("{{'role': '{role}', 'content': {content}}}")
}

fn prompt(system: Option<&str>, user: &str) -> String {
    let user = format!("[{}]", turn("user", user));
    match system {
        Some(column) => format!("{{{{ ([{}] if {column} else []) + {user} }}}}", turn("system", column)),
        None => format!("{{{{ {user} }}}}"),
    }
}

fn response(content: &str) -> String {
    format!("{{{{ [{}] }}}}", turn("assistant", content))
}

/// Rows that are read by the names of their columns.
pub(super) fn as_they_are(rows: &mut Parameters) {
    rows.need("turn_order", "any", "The tool accepts turns in any order.");
}
