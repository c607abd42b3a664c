//! `loss` of the stage kind `train`, and the weights of tokens.

use std::path::Path;

use engine::artifact::Facts;
use engine::context::Artifact;
use engine::stage::InputFacts;
use engine::test_bench::TestBench;
use serde_json::{Value, json};
use stages::data::artifact::{OptionalColumn, TokenRow, TokensFacts, TokensWriter};
use stages::kinds::new_model::NewModel;
use test_harness::test;

use crate::tiny::Tiny;
use crate::training::{self, adapter, bench, problems, rows, steps, train, with};

fn losses(steps: &[Value]) -> Vec<f64> {
    steps.iter().map(|step| step["loss"].as_f64().unwrap()).collect()
}

/// A model with the tokenizer of the tiny one and other weights.
fn teacher(tiny: &Tiny, more: Value) -> Artifact {
    let mut parameters = json!({
        "text": "rows", "vocab_size": 300, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "seed": 8,
        "initializer_range": 0.3,
    });
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    tiny.bench().run::<NewModel>(parameters).unwrap().remove("model").unwrap()
}

fn distilling(tiny: &Tiny, folder: &Path, teacher: &Artifact) -> TestBench {
    bench(tiny, folder, rows(), None).input_of("teacher.model", &teacher.folder).unwrap()
}

#[test]
fn the_default_loss_is_cross_entropy_and_smoothing_is_another() {
    let tiny = Tiny::new();
    let run = |more: Value| {
        let folder = tempfile::tempdir().unwrap();
        let outputs = train(&bench(&tiny, folder.path(), rows(), None), more).unwrap();
        (adapter(&outputs), losses(&steps(&outputs)))
    };
    let plain = run(json!({}));
    assert_eq!(run(json!({"loss": "cross_entropy"})), plain);
    assert_eq!(run(json!({"loss": {"name": "cross_entropy", "label_smoothing": 0}})), plain);
    let smoothed = run(json!({"loss": {"name": "cross_entropy", "label_smoothing": 0.2}}));
    assert_ne!(smoothed.0, plain.0);
    assert_ne!(smoothed.1[0], plain.1[0]);
    let on_candle = run(json!({"loss": {"label_smoothing": 0.2}, "kernels": "candle"}));
    for (one, other) in smoothed.1.iter().zip(&on_candle.1) {
        assert!((one - other).abs() < 1e-4 * one, "{one} {other}");
    }
}

#[test]
fn a_student_comes_nearer_to_its_teacher_and_resumes_to_the_bit() {
    let tiny = Tiny::new();
    let teacher = teacher(&tiny, json!({}));
    for divergence in ["forward_kl", "reverse_kl", "jensen_shannon"] {
        let loss = json!({"name": "distillation", "teacher": "teacher", "temperature": 2, "alpha": 1, "divergence": divergence});
        let run = |max_steps: u64| {
            json!({"loss": loss, "epochs": 9, "max_steps": max_steps, "scheduler": {"name": "constant"}, "shuffle": false,
                   "gradient_accumulation_steps": 6})
        };
        let (fresh, resumed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let whole = train(&distilling(&tiny, fresh.path(), &teacher), run(8)).unwrap();
        let found = losses(&steps(&whole));
        assert!(found[7] < 0.95 * found[0], "{divergence}: {found:?}");
        let resumed = distilling(&tiny, resumed.path(), &teacher);
        train(&resumed, run(3)).unwrap();
        let resumed = train(&resumed, run(8)).unwrap();
        assert_eq!((adapter(&resumed), steps(&resumed)), (adapter(&whole), steps(&whole)), "{divergence}");
    }
}

#[test]
fn every_weight_can_learn_from_a_teacher_too() {
    let tiny = Tiny::new();
    let teacher = teacher(&tiny, json!({}));
    let folder = tempfile::tempdir().unwrap();
    let parameters = json!({"loss": {"name": "distillation", "teacher": "teacher"}, "method": "full", "epochs": 3});
    let found = losses(&steps(&train(&distilling(&tiny, folder.path(), &teacher), parameters).unwrap()));
    assert!(found[8] < found[0], "{found:?}");
}

#[test]
fn a_teacher_with_other_tokens_is_refused() {
    let tiny = Tiny::new();
    let run = |teacher: &Artifact| {
        let folder = tempfile::tempdir().unwrap();
        let loss = json!({"loss": {"name": "distillation", "teacher": "teacher"}});
        train(&distilling(&tiny, folder.path(), teacher), loss).unwrap_err()
    };
    let smaller = teacher(&tiny, json!({"vocab_size": 280}));
    let error = run(&smaller);
    // The text of the tiny model makes fewer ids than it asks for.
    let ids = tiny.model.description.facts["vocab_size"].as_u64().unwrap();
    let says = format!("the teacher has a vocabulary of 280 tokens, and the model one of {ids}");
    assert_eq!(error.message, says);
    let facts = |artifact: &Artifact| artifact.description.facts.clone();
    let inputs: InputFacts =
        [("base.model".to_owned(), facts(&tiny.model)), ("teacher.model".to_owned(), facts(&smaller))].into();
    let loss = json!({"loss": {"name": "distillation", "teacher": "teacher"}});
    let found = problems(with(loss), &inputs);
    assert!(found.contains(&says), "{found:?}");
    // As many tokens, and two of them the other way round.
    let text = std::fs::read_to_string(tiny.tokenizer.folder.join("tokenizer.json")).unwrap();
    let mut swapped: Value = serde_json::from_str(&text).unwrap();
    let vocab = swapped["model"]["vocab"].as_object_mut().unwrap();
    let names: Vec<String> = vocab.keys().skip(9).take(2).cloned().collect();
    let first = vocab[&names[0]].take();
    let second = std::mem::replace(&mut vocab[&names[1]], first);
    vocab[&names[0]] = second;
    let run = |tokenizer: &str| {
        let folder = tempfile::tempdir().unwrap();
        let mut bench = bench(&tiny, folder.path(), rows(), None);
        for (name, tokenizer) in [("base", text.as_str()), ("teacher", tokenizer)] {
            let model = folder.path().join("models").join(name);
            std::fs::create_dir_all(&model).unwrap();
            for file in ["config.json", "model.safetensors"] {
                std::fs::copy(tiny.model.folder.join(file), model.join(file)).unwrap();
            }
            std::fs::write(model.join("tokenizer.json"), tokenizer).unwrap();
            bench = bench.input(&format!("{name}.model"), "model", &model, facts(&tiny.model)).unwrap();
        }
        train(&bench, json!({"loss": {"name": "distillation", "teacher": "teacher"}}))
    };
    assert!(run(&text).is_ok());
    let error = run(&swapped.to_string()).unwrap_err();
    assert!(error.message.contains("the teacher has another tokenizer: `"), "{error:?}");
}

#[test]
fn losses_with_wrong_options_are_refused() {
    for (wrong, says) in [
        (json!({"loss": {"label_smoothing": 1.0}}), "label_smoothing` must be"),
        (json!({"loss": {"name": "distillation", "teacher": "teacher", "alpha": 1.5}}), "alpha` must be"),
        (json!({"loss": {"name": "distillation", "teacher": "teacher", "temperature": 0}}), "temperature` must be"),
        (json!({"loss": "distillation"}), "`loss.teacher` is missing"),
        (json!({"loss": {"name": "cross_entropy", "alpha": 0.5}}), "`cross_entropy` has no option `alpha`"),
    ] {
        let found = problems(with(wrong.clone()), &InputFacts::new());
        assert!(found.len() == 1 && found[0].contains(says), "{wrong}: {found:?}");
    }
}

/// Writes rows with weights.
fn write_weighted(folder: &Path, rows: Vec<TokenRow>) -> Facts {
    std::fs::create_dir_all(folder).unwrap();
    let facts = TokensFacts { columns: vec![OptionalColumn::Weight], ..training::facts() };
    let mut writer = TokensWriter::tokens(folder, facts);
    rows.into_iter().for_each(|row| writer.write(row).unwrap());
    writer.finish(|_| ()).unwrap().0.to_facts()
}

#[test]
fn weights_decide_what_a_row_counts_for() {
    let tiny = Tiny::new();
    let run = |weight: &dyn Fn(usize) -> f32, micro_batch_size: usize| {
        let folder = tempfile::tempdir().unwrap();
        let tokens = folder.path().join("weighted");
        let weighted = rows().into_iter().enumerate().map(|(index, row)| {
            let weights = vec![weight(index); row.input_ids.len()];
            TokenRow { weights, ..row }
        });
        let facts = write_weighted(&tokens, weighted.collect());
        let bench = TestBench::new(folder.path()).input_of("base.model", &tiny.model.folder).unwrap();
        let bench = bench.input("tokens.tokens", "tokens", &tokens, facts).unwrap();
        let split = json!({"micro_batch_size": micro_batch_size, "gradient_accumulation_steps": 4 / micro_batch_size,
                           "shuffle": false});
        let outputs = train(&bench, split).unwrap();
        (adapter(&outputs), losses(&steps(&outputs)))
    };
    let folder = tempfile::tempdir().unwrap();
    let plain = train(&bench(&tiny, folder.path(), rows(), None), json!({"shuffle": false})).unwrap();
    let plain = (adapter(&plain), losses(&steps(&plain)));
    assert_eq!(run(&|_| 1.0, 2), plain);
    assert_eq!(run(&|_| 0.5, 2), plain, "what all have in common is divided out, a power of two to the bit");
    let uneven = |index: usize| 0.25 + index as f32;
    let (one, other) = (run(&uneven, 1), run(&uneven, 4));
    assert_ne!(one.0, plain.0);
    for (one, other) in one.1.iter().zip(&other.1) {
        assert!((one - other).abs() < 1e-6 * one, "{one} {other}");
    }
}
