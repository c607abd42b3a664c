//! Preference losses against TRL's, as tables of log-probabilities and as whole runs, on every kernel set.
//!
//! The cases lie in `tests/golden/preference` of the repository, or in the folder `preference` of what
//! `PIPELINE_GOLDEN_DIR` names, beside the checkpoints of the families. Every run found there must be one that can be
//! run; `tests/golden/preference/README.md` says what is in them and how near the figures have to be.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::batch::{Batch, Role, TargetScope};
use model::blocks::Blocks;
use model::candle::Candle;
use model::checkpoint::Checkpoint;
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::loss::{
    ApoDown, ApoZero, Compared, Cpo, DocumentObjective, DocumentScore, Dpo, DpoDivergence, Gathering, Hinge, Ipo, Kto,
    Nca, Orpo, Pair, PairLoss, Preference, Response, Robust, Sft, SimPo, Sppo, StepTotals,
};
use model::ops::Compute;
use model::parameter::Trainability;
use model::peft::{Adapter, AdapterConfig};
use model::trainer::{AdamW, DocumentBatch, Optimizer, TrainOptions, Trained, Trainer};
use serde_json::Value;
use test_harness::{Unmet, test};

use crate::in_process;
use crate::support::on_cuda;
use crate::tensors::Tensors;

/// The runs of the repository: none may be missing.
const RUNS: [&str; 13] = [
    "llama31/dpo_full",
    "llama31/dpo_lora",
    "llama31/dpo_lora_continued",
    "llama31/dpo_smoothed_lora",
    "llama31/hinge_lora",
    "llama31/ipo_lora",
    "llama31/kto_lora",
    "llama31/kto_step_kl_lora",
    "llama31/orpo_lora",
    "llama31/robust_lora",
    "llama31/rpo_lora",
    "llama31/simpo_lora",
    "qwen2/dpo_lora",
];

/// Losses of the tables that there are none of here.
const NOT_OFFERED: [&str; 7] = ["aot", "aot_unpaired", "bco_pair", "cpo_hinge", "cpo_ipo", "discopop", "exo_pair"];

/// The folder with the families, the folder of the cases in it, and whether it is one that was named.
fn folders() -> (PathBuf, PathBuf, bool) {
    let given = std::env::var_os("PIPELINE_GOLDEN_DIR").map(PathBuf::from);
    let families = given.clone().unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden"));
    let cases = families.join("preference");
    (families, cases, given.is_some())
}

fn json(file: &Path) -> Value {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    serde_json::from_str(&text).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// The loss of this name with the options of a case; `None` where there is none of it.
fn pair_loss(name: &str, options: &Value) -> Option<Arc<dyn PairLoss>> {
    let beta = number(&options["beta"]);
    let label_smoothing = options["label_smoothing"].as_f64().unwrap_or(0.0);
    let dpo = |label_smoothing, length_normalized| Dpo {
        beta,
        label_smoothing,
        length_normalized,
        divergence: DpoDivergence::ReverseKl,
    };
    Some(match name {
        // TRL takes no notice of `label_smoothing` here.
        "sigmoid" => Arc::new(dpo(0.0, false)),
        "sigmoid_smoothed" => Arc::new(dpo(label_smoothing, false)),
        "sigmoid_norm" => Arc::new(dpo(0.0, true)),
        "robust" => Arc::new(Robust { beta, label_smoothing }),
        "hinge" => Arc::new(Hinge { beta }),
        "ipo" => Arc::new(Ipo { beta, length_normalized: true }),
        "ipo_sum" => Arc::new(Ipo { beta, length_normalized: false }),
        "nca_pair" => Arc::new(Nca { beta }),
        "sppo_hard" => Arc::new(Sppo { beta }),
        "apo_zero" => Arc::new(ApoZero { beta }),
        "apo_down" => Arc::new(ApoDown { beta }),
        "cpo" => Arc::new(Cpo { beta, label_smoothing }),
        "simpo" => Arc::new(SimPo { beta, gamma: number(&options["gamma"]), label_smoothing }),
        "orpo" => Arc::new(Orpo { beta }),
        _ => return None,
    })
}

/// The objective of some terms: a loss of pairs, with the likelihood of the chosen responses or without.
fn objective(loss: &Value) -> Result<Box<dyn DocumentObjective>, String> {
    let mut sft = None;
    let mut others = Vec::new();
    for term in loss["terms"].as_array().unwrap() {
        let (name, weight) = (term["loss"].as_str().unwrap(), number(&term["weight"]));
        if name != "nll" {
            others.push((name, weight));
            continue;
        }
        let scope = match loss["nll_tokens"].as_str() {
            None | Some("response") => TargetScope::Response,
            Some("full") => TargetScope::Document,
            Some(other) => return Err(format!("likelihood of `{other}`")),
        };
        sft = Some(Sft { weight, scope });
    }
    let [(name, 1.0)] = others[..] else { return Err(format!("terms {others:?}")) };
    if name == "kto" {
        let estimate = match loss["kl"].as_str() {
            Some("step") => Gathering::Step,
            Some("micro_batch") => Gathering::Groups,
            other => return Err(format!("kl over {other:?}")),
        };
        let [beta, desirable_weight, undesirable_weight] =
            ["beta", "desirable_weight", "undesirable_weight"].map(|name| number(&loss[name]));
        return Ok(Box::new(Kto { beta, desirable_weight, undesirable_weight, estimate, sft }));
    }
    let loss = pair_loss(name, loss).ok_or_else(|| format!("loss `{name}`"))?;
    Ok(Box::new(Preference { loss, sft }))
}

fn near(what: &str, found: f64, expected: f64, tolerance: f64) {
    assert!((found - expected).abs() <= tolerance, "{what}: {found}, not {expected}");
}

/// A number of a table; `None` where the reference has none.
fn of_table(value: &Value) -> Option<f64> {
    match value {
        Value::String(text) => text.parse().ok().filter(|number: &f64| !number.is_nan()),
        other => Some(number(other)),
    }
}

fn pair_of(row: &Value) -> Pair {
    let response = |side: &str| Response {
        log_prob: number(&row[format!("{side}_logp")]),
        reference: number(&row[format!("ref_{side}_logp")]),
        targets: number(&row[format!("{side}_len")]) as usize,
    };
    Pair { chosen: response("chosen"), rejected: response("rejected") }
}

/// A row of the table by its name.
fn row<'a>(table: &'a Value, name: &Value) -> &'a Value {
    let rows = table["rows"].as_array().unwrap();
    rows.iter().find(|row| row["name"] == *name).unwrap()
}

#[test]
fn losses_and_derivatives_are_those_of_the_table() {
    let table = json(&folders().1.join("losses.json"));
    let (mut compared, mut missing) = (0, BTreeSet::new());
    for case in table["cases"].as_array().unwrap() {
        let name = case["loss"].as_str().unwrap();
        let Some(loss) = pair_loss(name, case) else {
            missing.insert(name);
            continue;
        };
        for expected in case["rows"].as_array().unwrap() {
            let pair = pair_of(row(&table, &expected["row"]));
            let (found, [chosen, rejected]) = (loss.value(&pair), loss.rewards(&pair));
            for (what, found) in [
                ("loss", found.loss),
                ("grad_chosen", found.chosen),
                ("grad_rejected", found.rejected),
                ("chosen_reward", chosen),
                ("rejected_reward", rejected),
                ("margin", chosen - rejected),
                ("accuracy", f64::from(u8::from(chosen > rejected))),
            ] {
                let what_of = format!("{loss:?} {} {what}", expected["row"]);
                assert!(found.is_finite(), "{what_of}: {found}");
                let Some(expected) = of_table(&expected[what]) else { continue };
                near(&what_of, found, expected, 1e-7 * expected.abs().max(1.0));
                compared += 1;
            }
        }
    }
    for case in table["batches"].as_array().unwrap() {
        let names = case["terms"].as_array().unwrap().iter().map(|term| term["loss"].as_str().unwrap());
        let unknown: Vec<&str> =
            names.filter(|name| *name != "nll" && pair_loss(name, &case_with_beta(case)).is_none()).collect();
        let alone = case["terms"].as_array().unwrap().iter().all(|term| term["loss"] == "nll");
        if !unknown.is_empty() || alone {
            missing.extend(unknown);
            continue;
        }
        compared += check_batch(&table, case);
    }
    for case in table["kto"].as_array().unwrap() {
        compared += check_kto(case);
    }
    println!("losses.json: {compared} comparisons; no loss here: {missing:?}");
    assert!(missing.iter().all(|name| NOT_OFFERED.contains(name)), "{missing:?}");
    assert!(compared > 1500, "{compared}");
}

fn case_with_beta(case: &Value) -> Value {
    let mut case = case.clone();
    case["gamma"] = case["gamma"].as_f64().unwrap_or(0.0).into();
    case
}

/// A batch of the table, as documents of one step.
fn check_batch(table: &Value, case: &Value) -> usize {
    let objective = objective(&case_with_beta(case)).unwrap();
    let full = objective.scope() == TargetScope::Document;
    let mut documents = Vec::new();
    let mut totals = StepTotals::default();
    for (group, name) in case["rows"].as_array().unwrap().iter().enumerate() {
        let row = row(table, name);
        let pair = pair_of(row);
        let (prompt, predicted) = (number(&row["prompt_logp"]), number(&row["prompt_predicted"]) as usize);
        for (role, response) in [(Role::Chosen, pair.chosen), (Role::Rejected, pair.rejected)] {
            let document = DocumentScore {
                response_log_prob: response.log_prob,
                response_targets: response.targets,
                log_prob: response.log_prob + if full { prompt } else { 0.0 },
                targets: response.targets + if full { predicted } else { 0 },
                reference_log_prob: Some(response.reference),
                group: group as u64,
                role,
            };
            totals.documents += 1;
            totals.targets += document.targets as u64;
            totals.response_targets += document.response_targets as u64;
            totals.chosen_targets += if role == Role::Chosen { document.targets as u64 } else { 0 };
            documents.push(document);
        }
        totals.groups += 1;
    }
    let losses = objective.losses(&documents, &totals).unwrap();
    let what = case["terms"].to_string();
    let total: f64 = losses.iter().map(|document| document.loss).sum();
    near(&what, total, number(&case["mean_loss"]), 1e-7 * total.abs());
    for (role, side) in ["grad_chosen", "grad_rejected"].into_iter().enumerate() {
        for (pair, expected) in case[side].as_array().unwrap().iter().enumerate() {
            let loss = losses[2 * pair + role];
            near(&what, -(loss.response_weight + loss.document_weight), number(expected), 1e-7);
        }
    }
    let compared = objective.compared(&documents);
    if let Some(nll) = case["nll"].as_f64() {
        near(&what, -compared.likelihood / compared.likelihood_targets, nll, 1e-7 * nll);
    }
    2 + 2 * losses.len()
}

fn check_kto(case: &Value) -> usize {
    let numbers = |name: &str| -> Vec<f64> { case[name].as_array().into_iter().flatten().map(number).collect() };
    let name = case["name"].as_str().unwrap();
    let [beta, desirable_weight, undesirable_weight] =
        ["beta", "desirable_weight", "undesirable_weight"].map(|name| number(&case[name]));
    let kto = Kto { beta, desirable_weight, undesirable_weight, estimate: Gathering::Step, sft: None };
    let desirable: Vec<bool> = case["desirable"].as_array().unwrap().iter().map(|x| x.as_bool().unwrap()).collect();
    let document = |role, log_prob, reference, group| DocumentScore {
        response_log_prob: log_prob,
        response_targets: 9,
        reference_log_prob: Some(reference),
        group,
        role,
        ..DocumentScore::default()
    };
    let (log_probs, references) = (numbers("logp"), numbers("ref_logp"));
    let mut documents: Vec<DocumentScore> = Vec::new();
    for (index, &desirable) in desirable.iter().enumerate() {
        let role = if desirable { Role::Chosen } else { Role::Rejected };
        documents.push(document(role, log_probs[index], references[index], index as u64));
    }
    let mismatched = match case["loss"].as_str().unwrap() {
        // The same without an estimate: mismatched documents that have gained nothing.
        "apo_zero_unpaired" => vec![(-5.0, -5.0)],
        _ => numbers("kl_logp").into_iter().zip(numbers("kl_ref_logp")).collect(),
    };
    for (index, (log_prob, reference)) in mismatched.into_iter().enumerate() {
        documents.push(document(Role::Mismatched, log_prob, reference, index as u64));
    }
    let totals = StepTotals { groups: desirable.len() as u64, ..StepTotals::default() };
    let losses = kto.losses(&documents, &totals).unwrap();
    let share = totals.groups as f64;
    let close = |what: &str, found: f64, expected: f64| {
        near(&format!("kto {name} {what}"), found, expected, 1e-7 * expected.abs().max(1.0));
    };
    for (index, (loss, gradient)) in numbers("losses").into_iter().zip(numbers("grad")).enumerate() {
        close("loss", losses[index].loss * share, loss);
        close("gradient", -losses[index].response_weight, gradient);
    }
    close("mean", losses.iter().map(|document| document.loss).sum(), number(&case["mean_loss"]));
    assert!(losses[desirable.len()..].iter().all(|loss| *loss == Default::default()));
    2 * desirable.len() + 1
}

/// With each divergence the derivatives are differences of the loss, and the loss is that of the formula.
#[test]
fn divergences_of_dpo_are_torchs() {
    let golden = json(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/dpo_divergences.json"));
    let mut compared = 0;
    for case in golden.as_array().unwrap() {
        let divergence = match case["divergence"].as_str().unwrap() {
            "forward_kl" => DpoDivergence::ForwardKl,
            "reverse_kl" => DpoDivergence::ReverseKl,
            "jensen_shannon" => DpoDivergence::JensenShannon,
            "alpha" => DpoDivergence::Alpha(number(&case["alpha"])),
            other => panic!("{other}"),
        };
        let loss = Dpo {
            beta: number(&case["beta"]),
            label_smoothing: number(&case["label_smoothing"]),
            length_normalized: case["length_normalized"].as_bool().unwrap(),
            divergence,
        };
        for row in case["rows"].as_array().unwrap() {
            let value = loss.value(&pair_of(row));
            for (what, found) in
                [("loss", value.loss), ("grad_chosen", value.chosen), ("grad_rejected", value.rejected)]
            {
                let expected = number(&row[what]);
                near(&format!("{loss:?} {what}"), found, expected, 1e-9 * expected.abs().max(1.0));
                compared += 1;
            }
        }
    }
    assert!(compared >= 100, "{compared}");
}

#[test]
fn certain_and_empty_responses_have_finite_losses_and_slopes() {
    let options = serde_json::json!({"beta": 0.5, "gamma": 1.0, "label_smoothing": 0.1});
    let response = |log_prob: f64, targets| Response { log_prob, reference: -1.0, targets };
    let responses = [response(0.0, 3), response(0.0, 0), response(-1e-9, 2), response(-4e5, 9)];
    for name in ["sigmoid_smoothed", "sigmoid_norm", "robust", "ipo", "apo_zero", "apo_down", "cpo", "simpo", "orpo"] {
        let loss = pair_loss(name, &options).unwrap();
        for chosen in responses {
            for rejected in responses {
                let value = loss.value(&Pair { chosen, rejected });
                let finite = [value.loss, value.chosen, value.rejected].iter().all(|number| number.is_finite());
                assert!(finite, "{name} {chosen:?} {rejected:?}: {value:?}");
            }
        }
    }
    // The limit, from values near to it.
    let orpo = Orpo { beta: 0.5 };
    let rejected = Response { log_prob: -3.0, reference: 0.0, targets: 2 };
    let at = |log_prob| orpo.value(&Pair { chosen: Response { log_prob, reference: 0.0, targets: 2 }, rejected });
    near("the limit of a certain response", at(0.0).chosen, at(-1e-9).chosen, 1e-8);
    assert!(at(0.0).chosen < -0.01);
}

#[test]
fn cpu_agrees_with_the_reference() {
    for threads in [1, 3] {
        check_all(|| Arc::new(Cpu::new(threads, Compute::F32).unwrap()));
    }
}

#[test]
fn candle_agrees_with_the_reference() {
    check_all(|| Arc::new(Candle::on_processor()));
}

#[test]
fn candle_on_cuda_agrees_with_the_reference() -> Result<(), Unmet> {
    let kernels = Arc::new(on_cuda()?);
    check_all(|| Arc::clone(&kernels));
    Ok(())
}

fn check_all<B: Blocks>(ops: impl Fn() -> Arc<B>) {
    let (families, cases, given) = folders();
    let mut run = Vec::new();
    for family in subfolders(&cases) {
        let checkpoint = families.join(&family);
        for variant in subfolders(&cases.join(&family)) {
            let case = Case::read(&checkpoint, &cases.join(&family).join(&variant));
            let ops = ops();
            let mut findings = Findings { case: format!("{family}/{variant}"), compared: 0 };
            case.check(&ops, &mut findings);
            println!("{}: {}: {} comparisons", ops.describe(), findings.case, findings.compared);
            run.push(findings.case);
        }
    }
    assert!(!run.is_empty(), "no case in {}", cases.display());
    if !given {
        assert_eq!(run, RUNS);
    }
}

/// Each worker has every second micro-batch, and of steps with one the second worker has none.
#[test]
fn two_workers_agree_with_the_reference() {
    let (families, cases, given) = folders();
    if given {
        return;
    }
    for name in ["dpo_lora", "rpo_lora", "orpo_lora", "kto_step_kl_lora"] {
        let case = Case::read(&families.join("llama31"), &cases.join("llama31").join(name));
        let reports = in_process::workers(2, |rank, collective| {
            let ops = Arc::new(Cpu::new(1, Compute::F32).unwrap());
            let mut reference = case.reference(&ops);
            let mut trainer = case.trainer(&ops).together(collective);
            let mut reports = Vec::new();
            for (number, step) in case.steps.iter().enumerate() {
                let batches = case.batches_of(number, step, reference.as_mut());
                let own: Vec<DocumentBatch> = batches.into_iter().skip(rank).step_by(2).collect();
                let compared = trainer.accumulate_documents(&own, &*case.objective).unwrap().compared;
                reports.push((trainer.step(number_of(step, "lr")).unwrap(), compared));
            }
            reports
        });
        assert_eq!(reports[0], reports[1], "{name}");
        let mut findings = Findings { case: format!("two workers {name}"), compared: 0 };
        for ((report, compared), step) in reports[0].iter().zip(&case.steps) {
            case.check_step(step, report.loss, report.grad_norm, compared, &mut findings);
        }
    }
}

/// A reference that was computed in the micro-batches of training makes margins of exactly 0, as long as the policy is
/// that reference.
#[test]
fn a_policy_that_is_its_reference_has_exactly_no_margin() {
    let (families, cases, _) = folders();
    for name in ["dpo_full", "dpo_lora_continued"] {
        let case = Case::read(&families.join("llama31"), &cases.join("llama31").join(name));
        let ops = Arc::new(Cpu::new(2, Compute::F32).unwrap());
        let mut reference = case.reference(&ops);
        let batches = case.batches_of(0, &case.steps[0], reference.as_mut());
        let report = case.trainer(&ops).accumulate_documents(&batches, &*case.objective).unwrap();
        let Compared { pairs, accurate, chosen_reward, rejected_reward, .. } = report.compared;
        assert_eq!((pairs, accurate, chosen_reward, rejected_reward), (4.0, 0.0, 0.0, 0.0), "{name}");
        near(name, report.loss, std::f64::consts::LN_2, 1e-15);
    }
}

/// A hinge that is satisfied has no gradient, and that is no lost one.
#[test]
fn steps_without_a_loss_may_move_nothing() {
    let (families, cases, _) = folders();
    let case = Case::read(&families.join("llama31"), &cases.join("llama31").join("hinge_lora"));
    let ops = Arc::new(Cpu::new(2, Compute::F32).unwrap());
    let mut batches = case.batches_of(0, &case.steps[0], case.reference(&ops).as_mut());
    for DocumentBatch { batch, reference_log_probs } in &mut batches {
        for (role, log_prob) in batch.roles.iter().zip(reference_log_probs) {
            *log_prob += if *role == Role::Chosen { -1e6 } else { 1e6 };
        }
    }
    let mut trainer = case.trainer(&ops);
    for _ in 0..4 {
        trainer.accumulate_documents(&batches, &*case.objective).unwrap();
        let report = trainer.step(1e-2).unwrap();
        assert_eq!((report.loss, report.grad_norm), (0.0, 0.0));
    }
}

/// One run of the reference.
struct Case {
    checkpoint: PathBuf,
    folder: PathBuf,
    settings: Value,
    steps: Vec<Value>,
    batches: Tensors,
    objective: Box<dyn DocumentObjective>,
    start: Option<Adapter>,
    options: TrainOptions,
}

fn number_of(value: &Value, name: &str) -> f64 {
    value[name].as_f64().unwrap_or_else(|| panic!("no number `{name}`"))
}

impl Case {
    fn read(checkpoint: &Path, folder: &Path) -> Self {
        let settings = json(&folder.join("steps.json"));
        let objective =
            objective(&settings["loss"]).unwrap_or_else(|what| panic!("{} cannot be run: {what}", folder.display()));
        let adapter = folder.join("adapter_init.safetensors");
        let start = adapter.exists().then(|| {
            let config = AdapterConfig::read(&folder.join("adapter/adapter_config.json")).unwrap();
            read_adapter(&config, &adapter)
        });
        let optimizer = &settings["optimizer"];
        assert_eq!(optimizer["name"], "adamw", "{}", folder.display());
        let betas = (number(&optimizer["betas"][0]), number(&optimizer["betas"][1]));
        let (eps, weight_decay) = (number_of(optimizer, "eps"), number_of(optimizer, "weight_decay"));
        let optimizer = Optimizer::AdamW(AdamW { betas, eps, weight_decay, ..AdamW::default() });
        let trained = if start.is_some() { Trained::Adapter } else { Trained::Weights };
        let options = TrainOptions {
            max_grad_norm: Some(number_of(&settings, "clip_grad_norm")),
            ..TrainOptions::new(trained, optimizer)
        };
        Self {
            checkpoint: checkpoint.to_owned(),
            folder: folder.to_owned(),
            steps: settings["steps"].as_array().unwrap().clone(),
            settings,
            batches: Tensors::read(&folder.join("batches.safetensors")),
            objective,
            start,
            options,
        }
    }

    fn decoder<B: Blocks>(&self, ops: &Arc<B>, with_adapter: bool) -> Decoder<B> {
        let keep = if self.start.is_some() { Trainability::Frozen } else { Trainability::Trainable };
        let mut decoder = Decoder::load(Arc::clone(ops), &self.checkpoint, keep).unwrap();
        if let Some(start) = self.start.as_ref().filter(|_| with_adapter) {
            decoder.attach(start).unwrap_or_else(|error| panic!("{}: {error}", self.folder.display()));
        }
        decoder
    }

    fn trainer<B: Blocks>(&self, ops: &Arc<B>) -> Trainer<B> {
        Trainer::new(self.decoder(ops, true), self.options).unwrap()
    }

    /// The model that the run is compared with.
    fn reference<B: Blocks>(&self, ops: &Arc<B>) -> Option<Decoder<B>> {
        let reference = match &self.settings["reference"] {
            Value::Null => None,
            Value::String(name) => match name.as_str() {
                "adapter_disabled" | "checkpoint" => Some(self.decoder(ops, false)),
                "adapter_init" => Some(self.decoder(ops, true)),
                other => panic!("{}: reference `{other}`", self.folder.display()),
            },
            other => panic!("{other}"),
        };
        assert_eq!(reference.is_some(), self.objective.needs_reference(), "{}", self.folder.display());
        reference
    }

    /// The micro-batches of a step, scored by the reference.
    fn batches_of<B: Blocks>(
        &self,
        number: usize,
        step: &Value,
        mut reference: Option<&mut Decoder<B>>,
    ) -> Vec<DocumentBatch> {
        let micro_batches = step["micro_batches"].as_array().unwrap().len();
        let mut group = 0;
        let of_micro_batch = |micro: usize| {
            let batch = documents(&self.batches, &format!("step{number}.micro{micro}"), &mut group);
            let mut reference_log_probs = Vec::new();
            if let Some(reference) = &mut reference {
                reference_log_probs = vec![0.0; batch.document_lengths.len()];
                for (document, score) in reference.score_documents(&batch, TargetScope::Response).unwrap() {
                    reference_log_probs[document] = score.response_log_prob;
                }
            }
            DocumentBatch { batch, reference_log_probs }
        };
        (0..micro_batches).map(of_micro_batch).collect()
    }

    fn check<B: Blocks>(&self, ops: &Arc<B>, findings: &mut Findings) {
        let mut reference = self.reference(ops);
        let mut trainer = self.trainer(ops);
        let first_gradients = Tensors::read(&self.folder.join("grads_step0.safetensors"));
        for (number, step) in self.steps.iter().enumerate() {
            let batches = self.batches_of(number, step, reference.as_mut());
            self.check_scores(step, &batches, trainer.decoder_mut(), findings);
            let report = trainer.accumulate_documents(&batches, &*self.objective).unwrap();
            if number == 0 {
                let gradients = trainer.gradients().unwrap();
                findings.equal("trained tensors", gradients.len(), first_gradients.names().count());
                for (tensor, gradient) in gradients {
                    let expected = first_gradients.floats(&tensor);
                    let largest = expected.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                    findings.all_near(
                        &format!("gradient of {tensor}"),
                        &gradient,
                        &expected,
                        5e-5 * f64::from(largest),
                    );
                }
            }
            let compared = report.compared;
            let report = trainer.step(number_of(step, "lr")).unwrap();
            self.check_step(step, report.loss, report.grad_norm, &compared, findings);
        }
        self.check_result(&mut trainer, findings);
    }

    /// The log-probabilities of a step's documents, under the policy and under the reference.
    fn check_scores<B: Blocks>(
        &self,
        step: &Value,
        batches: &[DocumentBatch],
        policy: &mut Decoder<B>,
        findings: &mut Findings,
    ) {
        let of_examples = step["examples"].as_array();
        let mut mismatched = (Vec::new(), Vec::new());
        let mut rows = of_examples.or(step["pairs"].as_array()).unwrap().iter();
        let mut row = rows.next();
        for DocumentBatch { batch, reference_log_probs } in batches {
            for (document, score) in policy.score_documents(batch, TargetScope::Response).unwrap() {
                let (side, last) = match (score.role, of_examples.is_some()) {
                    (Role::Mismatched, _) => {
                        mismatched.0.push(score.response_log_prob);
                        mismatched.1.extend(reference_log_probs.get(document));
                        continue;
                    }
                    (_, true) => ("", true),
                    (Role::Chosen, false) => ("chosen_", false),
                    (Role::Rejected, false) => ("rejected_", true),
                };
                let expected = row.unwrap();
                let name = |what: &str| match what {
                    "ref" => format!("ref_{side}logp"),
                    what => format!("{side}{what}"),
                };
                findings.relative(&name("logp"), score.response_log_prob, number_of(expected, &name("logp")), 5e-5);
                findings.equal("tokens", score.response_targets, number_of(expected, &name("tokens")) as usize);
                if let Some(reference) = reference_log_probs.get(document) {
                    findings.relative("reference", *reference, number_of(expected, &name("ref")), 5e-5);
                }
                if last {
                    row = rows.next();
                }
            }
        }
        let numbers = |name: &str| -> Vec<f64> {
            step[name].as_array().into_iter().flatten().flat_map(|all| all.as_array().unwrap()).map(number).collect()
        };
        for (found, name) in [(mismatched.0, "kl_logps"), (mismatched.1, "kl_ref_logps")] {
            findings.equal(name, found.len(), numbers(name).len());
            let pairs = found.into_iter().zip(numbers(name));
            pairs.for_each(|(found, expected)| findings.relative(name, found, expected, 5e-5));
        }
    }

    fn check_step(&self, step: &Value, loss: f64, norm: f64, compared: &Compared, findings: &mut Findings) {
        findings.near("loss", loss, number_of(step, "loss"), 5e-5);
        findings.relative("gradient norm", norm, number_of(step, "grad_norm"), 1e-4);
        let mean = |sum: f64, count: f64| sum / count;
        if let Some(nll) = step["nll"].as_f64() {
            findings.near("nll", -mean(compared.likelihood, compared.likelihood_targets), nll, 2e-5);
            findings.equal("tokens", compared.likelihood_targets as usize, number_of(step, "nll_token_count") as usize);
        }
        let chosen = mean(compared.chosen_reward, compared.chosen);
        let rejected = mean(compared.rejected_reward, compared.rejected);
        if step["examples"].is_array() {
            for (name, found) in [("reward_desirable", chosen), ("reward_undesirable", rejected)] {
                if let Some(expected) = step[name].as_f64() {
                    findings.near(name, found, expected, 1e-4);
                }
            }
            if self.settings["loss"]["kl"] == "step" {
                let estimate = mean(compared.mismatched_gain, compared.mismatched);
                findings.near("kl_raw", estimate, number(&step["kl_raw"][0]), 1e-4);
                findings.near("kl", estimate.max(0.0), number(&step["kl"][0]), 1e-4);
            }
            return;
        }
        findings.near("chosen_reward", chosen, number_of(step, "chosen_reward"), 1e-4);
        findings.near("rejected_reward", rejected, number_of(step, "rejected_reward"), 1e-4);
        findings.near("margin", chosen - rejected, number_of(step, "margin"), 1e-4);
        // Where policy and reference agree but for rounding, so does the sign of a margin.
        let margins = step["pairs"].as_array().unwrap().iter().map(|pair| number_of(pair, "margin"));
        if margins.into_iter().all(|margin| margin.abs() > 1e-4) {
            findings.near("accuracy", mean(compared.accurate, compared.pairs), number_of(step, "accuracy"), 1e-9);
        }
    }

    fn check_result<B: Blocks>(&self, trainer: &mut Trainer<B>, findings: &mut Findings) {
        let Some(start) = &self.start else {
            let expected = Tensors::read(&self.folder.join("final.safetensors"));
            let state = trainer.state().unwrap();
            findings.equal("final tensors", state.len(), expected.names().count());
            for tensor in &state {
                let tolerance = if tensor.name.contains("embed_tokens") { 2e-4 } else { 5e-5 };
                findings.all_near(&tensor.name, &tensor.value, &expected.floats(&tensor.name), tolerance);
            }
            return;
        };
        let found = trainer.decoder().adapter(&start.config).unwrap();
        let expected = Tensors::read(&self.folder.join("adapter/adapter_model.safetensors"));
        for (tensor, _, values) in found.tensors() {
            findings.all_near(&tensor, values, &expected.floats(&tensor), 5e-5);
        }
    }
}

fn read_adapter(config: &AdapterConfig, file: &Path) -> Adapter {
    let checkpoint = Checkpoint::open_file(file).unwrap();
    let tensors = checkpoint
        .tensors()
        .map(|(name, info)| (name.to_owned(), info.shape.clone(), checkpoint.tensor_f32(name).unwrap()));
    Adapter::from_tensors(config.clone(), tensors).unwrap()
}

fn subfolders(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let folders = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    let mut found: Vec<String> = folders.map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect();
    found.sort();
    found
}

/// What of a case was compared.
struct Findings {
    case: String,
    compared: usize,
}

impl Findings {
    fn near(&mut self, what: &str, found: f64, expected: f64, tolerance: f64) {
        self.compared += 1;
        let near = (found - expected).abs() <= tolerance;
        assert!(near, "{}: {what}: {found}, not {expected}", self.case);
    }

    fn relative(&mut self, what: &str, found: f64, expected: f64, tolerance: f64) {
        self.near(what, found, expected, tolerance * expected.abs());
    }

    fn all_near(&mut self, what: &str, found: &[f32], expected: &[f32], tolerance: f64) {
        self.compared += 1;
        assert_eq!(found.len(), expected.len(), "{}: {what}", self.case);
        for (found, expected) in found.iter().zip(expected) {
            let off = (f64::from(*found) - f64::from(*expected)).abs();
            assert!(off <= tolerance, "{}: {what}: {found}, not {expected}", self.case);
        }
    }

    fn equal(&mut self, what: &str, found: usize, expected: usize) {
        self.compared += 1;
        assert_eq!(found, expected, "{}: {what}", self.case);
    }
}

/// The documents of a micro-batch: pairs, or examples that are desirable or not, each with its mismatched one.
fn documents(batches: &Tensors, prefix: &str, group: &mut u64) -> Batch {
    let plain = batches.batch(0, prefix);
    if batches.find(&format!("{prefix}.desirable")).is_none() {
        let pairs = plain.document_lengths.len() / 2;
        let groups = (0..pairs as u64).flat_map(|pair| [*group + pair; 2]).collect();
        *group += pairs as u64;
        let roles = (0..pairs).flat_map(|_| [Role::Chosen, Role::Rejected]).collect();
        return Batch { groups, roles, ..plain };
    }
    let mismatched = batches.batch(0, &format!("{prefix}.kl"));
    let (mut batch, mut starts) = (Batch::default(), [0, 0]);
    for (index, desirable) in batches.integers(&format!("{prefix}.desirable")).into_iter().enumerate() {
        let role = if desirable == 1 { Role::Chosen } else { Role::Rejected };
        for (side, (documents, role)) in [(&plain, role), (&mismatched, Role::Mismatched)].into_iter().enumerate() {
            let length = documents.document_lengths[index];
            let piece = documents.piece(0, starts[side]..starts[side] + length);
            starts[side] += length;
            batch.push(0, &Batch { groups: vec![*group], roles: vec![role], ..piece });
        }
        *group += 1;
    }
    batch
}
