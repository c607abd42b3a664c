//! Losses of preferences in the stage kind `train`: references, packs, validation, what is refused.

use std::fs;
use std::path::Path;

use engine::artifact::Facts;
use engine::context::Artifact;
use engine::stage::InputFacts;
use engine::test_bench::TestBench;
use serde_json::{Value, json};
use stages::data::artifact::{OptionalColumn, Role, Shape, TokenRow, TokensFacts, TokensWriter};
use stages::kinds::log_probs::LogProbabilities;
use stages::kinds::pack::Pack;
use test_harness::test;

use crate::tiny::Tiny;
use crate::training::{self, adapter, merged, problems, records, steps, train, with};

/// A document whose first tokens are its prompt.
fn document(prompt: u32, response: &[u32]) -> TokenRow {
    let prompt: Vec<u32> = (0..3).map(|at| 5 + (prompt * 11 + at * 3) % 150).collect();
    let mut labels = vec![-100; prompt.len()];
    labels.extend(response.iter().map(|id| *id as i32));
    TokenRow::document([&prompt, response].concat(), labels)
}

fn group(number: u32, documents: &[(Role, TokenRow)]) -> TokenRow {
    let mut row = TokenRow::default();
    for (role, document) in documents {
        row.extend(&TokenRow { groups: vec![u64::from(number)], roles: vec![*role], ..document.clone() });
    }
    row
}

/// Pairs in which the chosen response counts up and the rejected one down; in one they are equal.
fn pairs(count: u32) -> Vec<TokenRow> {
    let of = |number: u32| {
        let up: Vec<u32> = (0..3 + number % 4).map(|at| 160 + at).collect();
        let down: Vec<u32> = (0..4 + number % 3).map(|at| 190 - at).collect();
        let worse = if number == 4 { &up } else { &down };
        group(number, &[(Role::Chosen, document(number, &up)), (Role::Rejected, document(number, worse))])
    };
    (0..count).map(of).collect()
}

/// Every second response is desirable; beside each stands the response of the one before.
fn judged(count: u32) -> Vec<TokenRow> {
    let response = |number: u32| -> Vec<u32> {
        let base = if number.is_multiple_of(2) { 160 } else { 180 };
        (0..3 + number % 3).map(|at| base + at).collect()
    };
    let of = |number: u32| {
        let role = if number.is_multiple_of(2) { Role::Chosen } else { Role::Rejected };
        let before = response((number + count - 1) % count);
        group(number, &[(role, document(number, &response(number))), (Role::Mismatched, document(number, &before))])
    };
    (0..count).map(of).collect()
}

fn write(folder: &Path, shape: Shape, rows: Vec<TokenRow>) -> Facts {
    fs::create_dir_all(folder).unwrap();
    let columns = vec![OptionalColumn::Group, OptionalColumn::Role, OptionalColumn::DocumentLengths];
    let facts = TokensFacts { shape, columns, ..training::facts() };
    let mut writer = TokensWriter::tokens(folder, facts);
    rows.into_iter().for_each(|row| writer.write(row).unwrap());
    writer.finish(|_| ()).unwrap().0.to_facts()
}

/// A bench with rows of preferences as `tokens`, and some of them as `held_out`.
fn bench(tiny: &Tiny, folder: &Path, shape: Shape, rows: Vec<TokenRow>) -> TestBench {
    let bench = TestBench::new(folder).input_of("base.model", &tiny.model.folder).unwrap();
    let held_out = rows[..4].to_vec();
    [("tokens", rows), ("held_out", held_out)].into_iter().fold(bench, |bench, (name, rows)| {
        let tokens = folder.join("rows of tokens").join(name);
        let facts = write(&tokens, shape, rows);
        bench.input(&format!("{name}.tokens"), "tokens", &tokens, facts).unwrap()
    })
}

fn number(record: &Value, name: &str) -> f64 {
    record[name].as_f64().unwrap_or_else(|| panic!("no `{name}` in {record}"))
}

fn constant(loss: Value) -> Value {
    json!({"loss": loss, "scheduler": {"name": "constant"}, "epochs": 4})
}

#[test]
fn the_first_step_is_ln_2_and_margins_grow() {
    let tiny = Tiny::new();
    for more in [json!({}), json!({"method": "full", "optimizer": {"learning_rate": 1e-3}})] {
        let folder = tempfile::tempdir().unwrap();
        let bench = bench(&tiny, folder.path(), Shape::Pairs, pairs(10));
        let parameters = merged(constant(json!("dpo")), merged(json!({"validation": "held_out"}), more));
        let outputs = train(&bench, parameters).unwrap();
        let found = steps(&outputs);
        let first = &found[0];
        assert!((number(first, "loss") - std::f64::consts::LN_2).abs() < 1e-12, "{first}");
        for figure in ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"] {
            assert_eq!(number(first, figure), 0.0, "{figure}: {first}");
        }
        let last = found.last().unwrap();
        assert!(number(last, "rewards/margins") > 0.05 && number(last, "loss") < 0.69, "{last}");
        assert!(number(last, "log_probs/chosen") < 0.0);
        let validations = records(&outputs, "validation");
        assert!((number(&validations[0], "loss") - std::f64::consts::LN_2).abs() < 1e-6, "{}", validations[0]);
        let last = validations.last().unwrap();
        assert!(number(last, "rewards/accuracies") >= 0.75 && number(last, "rewards/margins") > 0.05, "{last}");
    }
}

#[test]
fn packs_micro_batches_and_attempts_change_nothing() {
    let tiny = Tiny::new();
    let fresh = || tempfile::tempdir().unwrap();
    let losses = |outputs: &_| -> Vec<f64> { steps(outputs).iter().map(|step| number(step, "loss")).collect() };
    for (loss, shape, rows) in
        [(json!({"name": "dpo", "sft_weight": 0.2}), Shape::Pairs, pairs(8)), (json!("kto"), Shape::Judged, judged(8))]
    {
        let parameters = |more: Value| merged(merged(constant(loss.clone()), json!({"shuffle": false})), more);
        let folder = fresh();
        let one = bench(&tiny, folder.path(), shape, rows.clone());
        let split = |micro: u64| json!({"micro_batch_size": micro, "gradient_accumulation_steps": 4 / micro});
        let whole = train(&one, parameters(split(2))).unwrap();
        for other in [split(1), split(4)] {
            let folder = fresh();
            let found = train(&bench(&tiny, folder.path(), shape, rows.clone()), parameters(other)).unwrap();
            for (found, expected) in losses(&found).iter().zip(losses(&whole)) {
                assert!((found - expected).abs() < 1e-5, "{loss}: {found} {expected}");
            }
        }
        // All rows in one pack, against all rows in one step.
        let length: usize = rows.iter().map(TokenRow::real_tokens).sum();
        let packs = one.run::<Pack>(json!({"tokens": "tokens", "max_seq_len": length})).unwrap();
        assert_eq!(packs["packs"].description.facts["rows"], 1);
        let apart = fresh();
        let in_one_step = json!({"micro_batch_size": 1, "gradient_accumulation_steps": 8, "epochs": 6});
        let apart = train(&bench(&tiny, apart.path(), shape, rows.clone()), parameters(in_one_step)).unwrap();
        let folder = fresh();
        let packed = TestBench::new(folder.path()).input_of("base.model", &tiny.model.folder).unwrap();
        let packed = packed.input_of("tokens.packs", &packs["packs"].folder).unwrap();
        let in_packs = json!({"micro_batch_size": 1, "gradient_accumulation_steps": 1, "epochs": 6});
        let packed = train(&packed, parameters(in_packs)).unwrap();
        assert_eq!(losses(&apart).len(), 6);
        for (found, expected) in losses(&packed).iter().zip(losses(&apart)) {
            assert!((found - expected).abs() < 1e-5, "{loss} packed: {found} {expected}");
        }
        // An attempt that ends early keeps its reference.
        let folder = fresh();
        let resumed = bench(&tiny, folder.path(), shape, rows.clone());
        let until = |max_steps: u64| merged(split(2), json!({"max_steps": max_steps}));
        train(&resumed, parameters(until(3))).unwrap();
        let resumed = train(&resumed, parameters(until(8))).unwrap();
        assert_eq!((adapter(&resumed), steps(&resumed)), (adapter(&whole), steps(&whole)), "{loss}");
    }
}

#[test]
fn every_loss_trains() {
    let tiny = Tiny::new();
    for (loss, first) in [
        ("dpo", std::f64::consts::LN_2),
        ("robust", std::f64::consts::LN_2),
        ("ipo", 25.0),
        ("hinge", 1.0),
        ("apo_zero", 1.0),
        ("apo_down", 1.0),
        ("nca", 1.386_294_36),
        ("sppo", 50.0),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let found = train(&bench(&tiny, folder.path(), Shape::Pairs, pairs(8)), constant(json!(loss))).unwrap();
        let found = steps(&found);
        assert!((number(&found[0], "loss") - first).abs() < 1e-6, "{loss}: {}", found[0]);
        assert!(number(found.last().unwrap(), "loss") < first, "{loss}");
    }
    for loss in ["orpo", "simpo", "cpo"] {
        let folder = tempfile::tempdir().unwrap();
        let found = train(&bench(&tiny, folder.path(), Shape::Pairs, pairs(8)), constant(json!(loss))).unwrap();
        let found: Vec<f64> = steps(&found).iter().map(|step| number(step, "loss")).collect();
        assert!(found[7] < found[0], "{loss}: {found:?}");
        assert!(!folder.path().join("working/reference-data.f64").exists());
    }
    let folder = tempfile::tempdir().unwrap();
    let found = train(&bench(&tiny, folder.path(), Shape::Judged, judged(8)), constant(json!("kto"))).unwrap();
    let found = steps(&found);
    assert!((number(&found[0], "loss") - 0.5).abs() < 1e-9 && number(&found[0], "kl") == 0.0, "{}", found[0]);
    assert!(number(&found[7], "loss") < 0.5 && found[7]["rewards/accuracies"].is_null(), "{}", found[7]);
}

#[test]
fn an_adapter_that_is_gone_on_from_is_its_own_reference_unless_it_is_disabled() {
    let tiny = Tiny::new();
    let folder = tempfile::tempdir().unwrap();
    let before = train(&bench(&tiny, folder.path(), Shape::Pairs, pairs(8)), constant(json!("dpo"))).unwrap();
    let goes_on = |reference: &str| {
        let folder = tempfile::tempdir().unwrap();
        let bench = bench(&tiny, folder.path(), Shape::Pairs, pairs(8));
        let bench = bench.input_of("before.adapter", &before["adapter"].folder).unwrap();
        let more = json!({"adapter": "before", "reference": reference, "shuffle": false});
        steps(&train(&bench, merged(constant(json!("dpo")), more)).unwrap()).remove(0)
    };
    assert_eq!(number(&goes_on("start"), "rewards/margins"), 0.0);
    let disabled = goes_on("disabled");
    assert!(number(&disabled, "rewards/margins") > 0.05, "{disabled}");
}

#[test]
fn a_reference_may_be_computed_by_a_stage_of_its_own() {
    let tiny = Tiny::new();
    let folder = tempfile::tempdir().unwrap();
    let of_pairs = bench(&tiny, folder.path(), Shape::Pairs, pairs(8));
    let score = |parameters: Value| of_pairs.run::<LogProbabilities>(parameters).unwrap().remove("log_probs").unwrap();
    let reference = score(json!({"model": "base", "data": "tokens", "micro_batch_size": 3}));
    assert_eq!(reference.description.facts["documents"], 16);
    assert!(reference.description.facts["perplexity"].as_f64().unwrap() > 1.0);
    let of_validation = score(json!({"model": "base", "data": "held_out"}));
    let own = constant(json!("dpo"));
    let whole = train(&of_pairs, own.clone()).unwrap();
    let run = |rows: Vec<TokenRow>, reference: Value, of_data: &Artifact| {
        let folder = tempfile::tempdir().unwrap();
        let bench = bench(&tiny, folder.path(), Shape::Pairs, rows);
        let bench = bench.input_of("likely.log_probs", &of_data.folder).unwrap();
        let bench = bench.input_of("likely_held_out.log_probs", &of_validation.folder).unwrap();
        let parameters = merged(own.clone(), merged(json!({"validation": "held_out"}), reference));
        train(&bench, parameters).map(|outputs| steps(&outputs))
    };
    let stages = json!({"reference": {"log_probs": "likely", "validation": "likely_held_out"}});
    let found = run(pairs(8), stages.clone(), &reference).unwrap();
    assert!(number(&found[0], "rewards/margins").abs() < 1e-4);
    for (found, expected) in found.iter().zip(steps(&whole)) {
        assert!((number(found, "loss") - number(&expected, "loss")).abs() < 1e-4, "{found} {expected}");
    }
    let error = run(pairs(9), stages.clone(), &reference).unwrap_err();
    assert!(error.message.contains("of other tokens"), "{error:?}");
    let error = run(pairs(8), stages, &of_validation).unwrap_err();
    assert!(error.message.contains("of other tokens"), "{error:?}");
    let without = json!({"reference": {"validation": "likely_held_out"}, "loss": "dpo"});
    let found = problems(with(without), &InputFacts::new());
    assert!(found.iter().any(|problem| problem.contains("there are none")), "{found:?}");
}

#[test]
fn the_best_step_may_be_that_of_another_figure() {
    let tiny = Tiny::new();
    let folder = tempfile::tempdir().unwrap();
    let more = json!({"validation": "held_out", "keep_best": true, "best_by": "rewards/margins", "eval_steps": 1});
    let bench = bench(&tiny, folder.path(), Shape::Pairs, pairs(8));
    let outputs = train(&bench, merged(constant(json!("dpo")), more)).unwrap();
    let validations = records(&outputs, "validation");
    let margins: Vec<f64> = validations[1..].iter().map(|record| number(record, "rewards/margins")).collect();
    let highest = margins.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let facts = &outputs["metrics"].description.facts;
    assert_eq!(facts["best_validation_rewards/margins"].as_f64(), Some(highest), "{facts:?}");
    let at = margins.iter().position(|margin| *margin == highest).unwrap() as u64 + 1;
    assert_eq!(facts["result_step"].as_u64(), Some(at));
    for wrong in [json!({"best_by": "rewards/margins"}), json!({"best_by": "rewards/accuracies", "loss": "kto"})] {
        let found = problems(with(merged(json!({"validation": "held_out"}), wrong)), &InputFacts::new());
        assert!(found.len() == 1 && found[0].contains("has no `rewards/"), "{found:?}");
    }
}

#[test]
fn rows_of_another_kind_are_refused() {
    let tiny = Tiny::new();
    let run = |shape: Shape, rows: Vec<TokenRow>, loss: &str| {
        let folder = tempfile::tempdir().unwrap();
        train(&bench(&tiny, folder.path(), shape, rows), json!({"loss": loss})).unwrap_err().message
    };
    assert!(run(Shape::Pairs, pairs(4), "cross_entropy").contains("`loss: cross_entropy` is for prompts"));
    assert!(run(Shape::Pairs, pairs(4), "kto").contains("`loss: kto` is for responses with a label"));
    assert!(run(Shape::Judged, judged(4), "dpo").contains("the rows are judged responses"));
    let one_class: Vec<TokenRow> = judged(8).into_iter().step_by(2).collect();
    assert!(run(Shape::Judged, one_class, "kto").contains("no row is undesirable"));
    // Before anything runs, from what is known of the rows.
    let inputs: InputFacts =
        [("tokens.tokens".to_owned(), Facts::from_iter([("shape".to_owned(), json!("messages"))]))].into();
    let found = problems(with(json!({"loss": "dpo"})), &inputs);
    assert!(found.iter().any(|problem| problem.contains("the rows are conversations")), "{found:?}");
}

#[test]
fn what_is_no_preference_training_is_refused() {
    for (wrong, says) in [
        (json!({"loss": {"name": "dpo", "beta": 0}}), "`loss.beta` must be"),
        (json!({"loss": {"name": "robust", "label_smoothing": 0.5}}), "label_smoothing` must be"),
        (json!({"loss": {"name": "hinge", "gamma": 1}}), "`hinge` has no option `gamma`"),
        (json!({"loss": {"name": "dpo", "divergence": "alpha", "alpha": 1}}), "alpha` must be"),
        (json!({"loss": "dpo", "method": "full", "reference": "disabled"}), "`method: full` has none"),
        (json!({"loss": "simpo", "reference": "disabled"}), "`loss: simpo` does not"),
        (json!({"reference": "disabled"}), "`loss: cross_entropy` does not"),
    ] {
        let found = problems(with(wrong.clone()), &InputFacts::new());
        assert!(found.len() == 1 && found[0].contains(says), "{wrong}: {found:?}");
    }
}
