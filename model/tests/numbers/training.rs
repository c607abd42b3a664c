//! The laws of training: how a step is split, packed, threaded or interrupted does not change what is learned.

use std::sync::Arc;

use model::batch::Batch;
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::init::{Fill, fresh_tensor};
use model::ops::{Compute, Ops};
use model::optimizer::MomentDtype;
use model::parameter::Trainability;
use model::peft::{Adapter, AdapterConfig};
use model::trainer::{
    AdamW, EmbeddingNoise, LossScaling, Optimizer, Recompute, RestoreError, Sgd, StepReport, TrainError, TrainOptions,
    Trained, TrainedTensor, Trainer,
};
use test_harness::test;

use crate::support::{self, bits};

const ADAMW: AdamW = AdamW { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.1, state_dtype: MomentDtype::F32 };
const ADAPTER: TrainOptions =
    TrainOptions { max_grad_norm: Some(0.5), ..TrainOptions::new(Trained::Adapter, Optimizer::AdamW(ADAMW)) };

fn ops(threads: usize) -> Arc<Cpu> {
    Arc::new(Cpu::new(threads, Compute::F32).unwrap())
}

/// A decoder with an adapter that already does something.
fn adapted(ops: &Arc<Cpu>, targets: &[&str]) -> Decoder<Cpu> {
    let mut decoder = support::decoder(ops, "llama", Trainability::Frozen);
    let targets = targets.iter().map(|target| (*target).to_owned()).collect();
    let mut adapter = decoder.fresh_adapter(&AdapterConfig::new(2, 4.0, targets), 9).unwrap();
    for (name, module) in &mut adapter.modules {
        module.lora_b = fresh_tensor(6, name, module.lora_b.len(), Fill::Normal(0.1));
    }
    decoder.attach(&adapter).unwrap();
    decoder
}

fn trainer(ops: &Arc<Cpu>) -> Trainer<Cpu> {
    Trainer::new(adapted(ops, &["q_proj", "v_proj", "down_proj"]), ADAPTER).unwrap()
}

/// Eight rows of one or two documents.
fn rows(step: u32) -> Vec<Batch> {
    (0..8).map(|row| support::documents(step * 8 + row, &[5 + row as usize, 2 * (row as usize % 3)])).collect()
}

/// Trains some steps of eight rows, `micro_batch_size` of them at a time.
fn train(trainer: &mut Trainer<Cpu>, steps: std::ops::Range<u32>, micro_batch_size: usize) -> Vec<StepReport> {
    let step = |step| {
        for micro in rows(step).chunks(micro_batch_size) {
            let mut batch = Batch::default();
            for (index, row) in micro.iter().enumerate() {
                batch.push_row(index as u64, &row.input_ids, &row.labels, &row.document_lengths);
            }
            trainer.accumulate(&batch).unwrap();
        }
        trainer.step(1e-2).unwrap()
    };
    steps.map(step).collect()
}

#[test]
fn the_split_of_a_step_into_micro_batches_changes_nothing() {
    let ops = ops(2);
    let mut whole = trainer(&ops);
    let expected = train(&mut whole, 0..5, 8);
    let expected_state = whole.state().unwrap();
    for micro_batch_size in [1, 2, 4] {
        let mut split = trainer(&ops);
        for (found, expected) in train(&mut split, 0..5, micro_batch_size).iter().zip(&expected) {
            assert_eq!(found.target_tokens, expected.target_tokens);
            assert!((found.loss - expected.loss).abs() <= 1e-6 * expected.loss, "{found:?} {expected:?}");
        }
        for (found, expected) in split.state().unwrap().iter().zip(&expected_state) {
            let largest = expected.value.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            let furthest = found.value.iter().zip(&expected.value).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(furthest <= 1e-5 * largest, "{}: {furthest} of {largest}", found.name);
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let states = [1, 2, 5].map(|threads| {
        let mut trainer = trainer(&ops(threads));
        train(&mut trainer, 0..3, 4);
        trainer.state().unwrap()
    });
    assert!(bits(&states[0]) == bits(&states[1]) && bits(&states[0]) == bits(&states[2]));
}

#[test]
fn a_resumed_run_is_the_uninterrupted_one_to_the_bit() {
    let ops = ops(2);
    let mut uninterrupted = trainer(&ops);
    train(&mut uninterrupted, 0..6, 4);
    let mut first = trainer(&ops);
    train(&mut first, 0..2, 4);
    // Some of the third step is lost with the process.
    first.accumulate(&rows(2)[0]).unwrap();
    let (steps, state) = (first.steps(), first.state().unwrap());
    drop(first);
    let mut second = trainer(&ops);
    second.restore(steps, state).unwrap();
    train(&mut second, 2..6, 4);
    assert_eq!(second.steps(), 6);
    assert!(bits(&second.state().unwrap()) == bits(&uninterrupted.state().unwrap()));
}

#[test]
fn a_state_of_another_run_is_refused() {
    let mut trainer = trainer(&ops(1));
    let state = trainer.state().unwrap();
    let missing = trainer.restore(1, state[1..].to_vec()).unwrap_err();
    assert!(matches!(missing, RestoreError::Missing(name) if name == state[0].name));
    let mut more = state.clone();
    more.push(TrainedTensor { name: "another".to_owned(), ..state[0].clone() });
    assert!(matches!(trainer.restore(1, more).unwrap_err(), RestoreError::Unexpected(name) if name == "another"));
    let mut misshapen = state;
    misshapen[0].shape.reverse();
    assert!(matches!(trainer.restore(1, misshapen).unwrap_err(), RestoreError::Shape { .. }));
}

#[test]
fn a_pack_has_the_loss_and_gradient_of_its_documents_one_by_one() {
    let ops = ops(2);
    let pack = support::documents(1, &[9, 4, 1, 13]);
    let mut together = trainer(&ops);
    let report = together.accumulate(&pack).unwrap();
    let mut alone = trainer(&ops);
    let (mut first, mut loss_sum, mut target_tokens) = (0, 0.0, 0);
    for &length in &pack.document_lengths {
        let tokens = first..first + length;
        let report =
            alone.accumulate(&Batch::document(pack.input_ids[tokens.clone()].to_vec(), pack.labels[tokens].to_vec()));
        let report = report.unwrap();
        (first, loss_sum, target_tokens) =
            (first + length, loss_sum + report.loss_sum, target_tokens + report.target_tokens);
    }
    assert_eq!(report.target_tokens, target_tokens);
    assert!((report.loss_sum - loss_sum).abs() < 1e-5);
    for ((name, packed), (_, single)) in together.gradients().unwrap().iter().zip(&alone.gradients().unwrap()) {
        assert!(packed.iter().zip(single).all(|(a, b)| (a - b).abs() < 1e-6), "{name}");
    }
}

#[test]
fn scores_are_the_losses_that_training_sees() {
    let mut trainer = trainer(&ops(2));
    let batch = support::documents(2, &[6, 8]);
    let report = trainer.accumulate(&batch).unwrap();
    let scores = trainer.decoder_mut().score(&batch).unwrap();
    assert_eq!(scores.len(), report.target_tokens);
    assert!((scores.iter().map(|score| f64::from(score.nll)).sum::<f64>() - report.loss_sum).abs() < 1e-6);
    // Each score names the token it is of.
    let expected: Vec<usize> = batch.targets().rows.iter().map(|row| *row as usize + 1).collect();
    assert_eq!(scores.iter().map(|score| score.token).collect::<Vec<_>>(), expected);
}

#[test]
fn full_training_learns_a_text_by_heart() {
    let ops = ops(2);
    let options = TrainOptions { trained: Trained::Weights, max_grad_norm: Some(1.0), ..ADAPTER };
    for (shape, _) in support::SHAPES {
        let mut trainer = Trainer::new(support::decoder(&ops, shape, Trainability::Trainable), options).unwrap();
        let text = Batch::text(support::documents(5, &[16]).input_ids);
        let mut losses = Vec::new();
        for _ in 0..60 {
            trainer.accumulate(&text).unwrap();
            losses.push(trainer.step(1e-2).unwrap().loss);
        }
        assert!(losses[59] < 0.3 * losses[0], "{shape}: {losses:?}");
        assert!(
            trainer.decoder_mut().score(&text).unwrap().iter().filter(|score| score.correct).count() > 11,
            "{shape}"
        );
    }
}

#[test]
fn a_step_without_targets_is_an_error() {
    let mut trainer = trainer(&ops(1));
    let batch = Batch::document(vec![1, 2, 3], vec![1, -100, -100]);
    assert_eq!(trainer.accumulate(&batch).unwrap().target_tokens, 0);
    assert!(matches!(trainer.step(1e-3).unwrap_err(), TrainError::NoTargets { step: 1 }));
}

#[test]
fn what_is_not_finite_is_named() {
    let mut trainer = trainer(&ops(1));
    let mut state = trainer.state().unwrap();
    state[0].value[0] = f32::NAN;
    trainer.restore(4, state).unwrap();
    let error = trainer.accumulate(&support::documents(1, &[5])).unwrap_err();
    assert!(matches!(error, TrainError::LossNotFinite { step: 5, .. }), "{error}");
}

#[test]
fn an_adapter_that_no_gradient_reaches_is_found() {
    // The first of two tokens attends to itself alone, whatever its query: only here has q_proj no gradient.
    let optimizer = Optimizer::AdamW(AdamW { weight_decay: 0.0, ..ADAMW });
    let options = TrainOptions { optimizer, ..ADAPTER };
    let mut trainer = Trainer::new(adapted(&ops(1), &["q_proj"]), options).unwrap();
    let batch = Batch::text(vec![3, 4]);
    for _ in 0..2 {
        trainer.accumulate(&batch).unwrap();
        trainer.step(1e-2).unwrap();
    }
    trainer.accumulate(&batch).unwrap();
    let error = trainer.step(1e-2).unwrap_err();
    assert!(matches!(&error, TrainError::NotMoved { tensor, steps: 3 } if tensor.contains("q_proj")), "{error}");
}

#[test]
fn beside_an_adapter_nothing_is_trained_kept_or_changed() {
    let ops = ops(2);
    let mut trainer = trainer(&ops);
    let text = support::documents(3, &[9]);
    let frozen = |trainer: &Trainer<Cpu>| -> Vec<u32> {
        let norms = trainer.decoder().parameters().into_iter().filter(|parameter| !parameter.is_trained());
        norms.flat_map(|norm| ops.read(&norm.value).unwrap()).map(f32::to_bits).collect()
    };
    let norms = frozen(&trainer);
    train(&mut trainer, 0..4, 4);
    assert_eq!(frozen(&trainer), norms);
    // A frozen matrix has no values of its own that could be trained, and no gradient.
    assert!(trainer.decoder().projections().iter().all(|projection| projection.matrix.trained.is_none()));
    assert!(trainer.state().unwrap().iter().all(|tensor| tensor.name.contains(".lora_")));
    // Without its adapter the trained model is the one it was.
    let config = AdapterConfig::new(2, 4.0, Vec::new());
    let nothing = Adapter {
        config,
        modules: Default::default(),
        saved_tensors: Default::default(),
        token_rows: Default::default(),
    };
    trainer.decoder_mut().attach(&nothing).unwrap();
    let mut untouched = support::decoder(&ops, "llama", Trainability::Frozen);
    assert_eq!(trainer.decoder_mut().logits(&text).unwrap(), untouched.logits(&text).unwrap());
}

#[test]
fn a_learning_rate_that_rounds_away_is_no_cut_graph() {
    let mut trainer = trainer(&ops(1));
    for step in 0..6 {
        trainer.accumulate(&rows(step)[0]).unwrap();
        trainer.step(1e-12).unwrap();
    }
}

#[test]
fn there_must_be_something_to_train() {
    let ops = ops(1);
    let frozen = || support::decoder(&ops, "llama", Trainability::Frozen);
    assert!(matches!(Trainer::new(frozen(), ADAPTER), Err(TrainError::NothingToTrain(_))));
    let weights = TrainOptions { trained: Trained::Weights, ..ADAPTER };
    assert!(matches!(Trainer::new(frozen(), weights), Err(TrainError::NothingToTrain(_))));
}

#[test]
fn layers_that_run_again_change_no_bit() {
    let ops = ops(2);
    for (shape, _) in support::SHAPES {
        let weights = |recompute| {
            let options = TrainOptions { recompute, ..TrainOptions::new(Trained::Weights, Optimizer::AdamW(ADAMW)) };
            Trainer::new(support::decoder(&ops, shape, Trainability::Trainable), options).unwrap()
        };
        let (mut keeping, mut recomputing) = (weights(Recompute::None), weights(Recompute::Layers));
        assert_eq!(train(&mut recomputing, 0..2, 4), train(&mut keeping, 0..2, 4), "{shape}");
        assert!(bits(&recomputing.state().unwrap()) == bits(&keeping.state().unwrap()), "{shape}");
    }
    // An adapter on the upper part alone: the backward ends above the first layer.
    for targets in [&["q_proj", "down_proj"][..], &["layers.1.mlp.up_proj"], &["layers.1.self_attn.o_proj"]] {
        let adapter = |recompute| Trainer::new(adapted(&ops, targets), TrainOptions { recompute, ..ADAPTER }).unwrap();
        let (mut keeping, mut recomputing) = (adapter(Recompute::None), adapter(Recompute::Layers));
        assert_eq!(train(&mut recomputing, 0..2, 4), train(&mut keeping, 0..2, 4), "{targets:?}");
        assert!(bits(&recomputing.state().unwrap()) == bits(&keeping.state().unwrap()), "{targets:?}");
    }
}

/// Dropout draws by address, so that the second forward of a layer has the mask of the first.
#[test]
fn layers_that_run_again_drop_the_same_elements() {
    let ops = ops(2);
    let run = |dropout, recompute| {
        let mut decoder = support::decoder(&ops, "llama", Trainability::Frozen);
        let targets = ["q_proj", "o_proj", "gate_proj", "down_proj"].map(str::to_owned).to_vec();
        let config = AdapterConfig { dropout, ..AdapterConfig::new(2, 4.0, targets) };
        let mut adapter = decoder.fresh_adapter(&config, 9).unwrap();
        for (name, module) in &mut adapter.modules {
            module.lora_b = fresh_tensor(6, name, module.lora_b.len(), Fill::Normal(0.1));
        }
        decoder.attach(&adapter).unwrap();
        let mut trainer = Trainer::new(decoder, TrainOptions { recompute, seed: 5, ..ADAPTER }).unwrap();
        train(&mut trainer, 0..3, 4);
        bits(&trainer.state().unwrap())
    };
    let keeping = run(0.4, Recompute::None);
    assert!(run(0.4, Recompute::Layers) == keeping);
    assert!(run(0.0, Recompute::None) != keeping, "something was dropped");
}

const NOISE: TrainOptions = TrainOptions { embedding_noise: Some(EmbeddingNoise { alpha: 10.0 }), seed: 3, ..ADAPTER };

fn with_noise(options: TrainOptions) -> Trainer<Cpu> {
    Trainer::new(adapted(&ops(2), &["q_proj", "v_proj", "down_proj"]), options).unwrap()
}

#[test]
fn noise_on_the_embeddings_is_the_same_however_a_step_is_computed() {
    let mut whole = with_noise(NOISE);
    let reports = train(&mut whole, 0..4, 8);
    let state = whole.state().unwrap();
    let mut split = with_noise(NOISE);
    for (found, expected) in train(&mut split, 0..4, 2).iter().zip(&reports) {
        assert!((found.loss - expected.loss).abs() <= 1e-6 * expected.loss, "{found:?} {expected:?}");
    }
    let mut again = with_noise(TrainOptions { recompute: Recompute::Layers, ..NOISE });
    train(&mut again, 0..4, 8);
    assert!(bits(&again.state().unwrap()) == bits(&state), "layers that run again");
    let mut first = with_noise(NOISE);
    train(&mut first, 0..2, 8);
    let mut resumed = with_noise(NOISE);
    resumed.restore(first.steps(), first.state().unwrap()).unwrap();
    train(&mut resumed, 2..4, 8);
    assert!(bits(&resumed.state().unwrap()) == bits(&state), "a resumed run");
    let mut other = with_noise(TrainOptions { seed: 4, ..NOISE });
    assert_ne!(train(&mut other, 0..1, 8)[0].loss, reports[0].loss, "another seed");
}

#[test]
fn noise_on_the_embeddings_does_not_depend_on_packs() {
    let loss = |packs: &[(u64, &[usize])]| {
        let mut trainer = with_noise(NOISE);
        let documents = support::documents(5, &[7, 4, 9]);
        let mut from = 0;
        for (row, lengths) in packs {
            let tokens = lengths.iter().sum::<usize>();
            let (ids, labels) = (&documents.input_ids[from..from + tokens], &documents.labels[from..from + tokens]);
            let mut batch = Batch::default();
            batch.push_row(*row, ids, labels, lengths);
            trainer.accumulate(&batch).unwrap();
            from += tokens;
        }
        trainer.step(1e-2).unwrap().loss
    };
    let apart = loss(&[(0, &[7]), (1, &[4]), (2, &[9])]);
    for packed in [loss(&[(0, &[7, 4, 9])]), loss(&[(8, &[7]), (3, &[4, 9])])] {
        assert!((packed - apart).abs() <= 1e-6 * apart, "{packed}, {apart} apart");
    }
}

#[test]
fn noise_on_the_embeddings_is_of_training_alone() {
    let (mut with, mut without) = (with_noise(NOISE), with_noise(ADAPTER));
    let batch = support::documents(3, &[9, 5]);
    assert_eq!(with.decoder_mut().score(&batch).unwrap(), without.decoder_mut().score(&batch).unwrap());
    assert_eq!(with.decoder_mut().logits(&batch).unwrap(), without.decoder_mut().logits(&batch).unwrap());
    let losses = [&mut with, &mut without].map(|trainer| trainer.accumulate(&batch).unwrap().loss_sum);
    assert_ne!(losses[0], losses[1]);
}

/// With LoRA+ a step of A is that of plain LoRA, and a step of B that of plain LoRA at a higher learning rate.
#[test]
fn lora_plus_gives_b_another_learning_rate() {
    for optimizer in [Optimizer::AdamW(ADAMW), Optimizer::Sgd(Sgd::default())] {
        let step = |lora_learning_rate_ratio, learning_rate| {
            let options = TrainOptions { lora_learning_rate_ratio, optimizer, ..ADAPTER };
            let mut trainer = with_noise(options);
            trainer.accumulate(&rows(0)[7]).unwrap();
            trainer.step(learning_rate).unwrap();
            trainer.state().unwrap()
        };
        let (plus, plain, faster) = (step(16.0, 1e-3), step(1.0, 1e-3), step(1.0, 1.6e-2));
        let mut of_b = 0;
        for ((plus, plain), faster) in plus.iter().zip(&plain).zip(&faster) {
            let is_b = plus.name.contains("lora_B");
            of_b += usize::from(is_b);
            assert_eq!(plus.value, if is_b { &faster.value } else { &plain.value }[..], "{}", plus.name);
            assert_ne!(plain.value, faster.value, "{}", plus.name);
        }
        assert!(of_b > 0 && of_b < plus.len());
    }
}

#[test]
fn a_run_with_momentum_resumes_to_the_bit() {
    let ops = ops(1);
    for sgd in [Sgd::default(), Sgd { momentum: 0.9, dampening: 0.1, nesterov: false, weight_decay: 0.01 }] {
        let options = TrainOptions { optimizer: Optimizer::Sgd(sgd), ..ADAPTER };
        let trainer = || Trainer::new(adapted(&ops, &["q_proj", "up_proj"]), options).unwrap();
        let mut uninterrupted = trainer();
        train(&mut uninterrupted, 0..5, 4);
        let mut first = trainer();
        train(&mut first, 0..2, 4);
        let state = first.state().unwrap();
        let kept: &[&str] = if sgd.momentum == 0.0 { &[] } else { &["exp_avg"] };
        assert!(state.iter().all(|tensor| tensor.state.keys().eq(kept)));
        let mut second = trainer();
        second.restore(first.steps(), state).unwrap();
        train(&mut second, 2..5, 4);
        assert!(bits(&second.state().unwrap()) == bits(&uninterrupted.state().unwrap()));
    }
}

#[test]
fn the_moments_of_another_optimizer_are_refused() {
    let ops = ops(1);
    let state = trainer(&ops).state().unwrap();
    let sgd = Sgd { momentum: 0.9, ..Sgd::default() };
    let options = TrainOptions { optimizer: Optimizer::Sgd(sgd), ..ADAPTER };
    let mut other = Trainer::new(adapted(&ops, &["q_proj", "v_proj", "down_proj"]), options).unwrap();
    let error = other.restore(1, state).unwrap_err();
    let RestoreError::OptimizerState { expected, found, .. } = &error else { panic!("{error}") };
    assert_eq!((expected.len(), found.len()), (1, 2), "{error}");
}

/// Eight bits of the exponent are far from full: without an overflow a factor that is a power of two changes no bit.
#[test]
fn loss_scaling_changes_nothing_while_nothing_overflows() {
    let ops = ops(2);
    let mut plain = trainer(&ops);
    let scaling = LossScaling { growth_interval: 2, ..LossScaling::default() };
    let options = TrainOptions { loss_scaling: Some(scaling), ..ADAPTER };
    let mut scaled = Trainer::new(adapted(&ops, &["q_proj", "v_proj", "down_proj"]), options).unwrap();
    let (expected, found) = (train(&mut plain, 0..5, 4), train(&mut scaled, 0..5, 4));
    let scales: Vec<_> = found.iter().map(|report| report.loss_scale.unwrap()).collect();
    assert_eq!(scales, [1024.0, 1024.0, 2048.0, 2048.0, 4096.0]);
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(StepReport { loss_scale: None, ..*found }, *expected);
    }
    assert!(bits(&scaled.state().unwrap()) == bits(&plain.state().unwrap()));
}

#[test]
fn an_overflow_is_skipped_and_the_schedule_held() {
    let ops = ops(1);
    let scaling = LossScaling { init_scale: 2f64.powi(127), growth_interval: 1000, ..LossScaling::default() };
    let options = TrainOptions { loss_scaling: Some(scaling), ..ADAPTER };
    let new = || Trainer::new(adapted(&ops, &["q_proj", "v_proj"]), options).unwrap();
    let mut trainer = new();
    let before = trainer.state().unwrap();
    let (mut skipped, mut scale) = (0, 2f64.powi(127));
    let taken = loop {
        let report = train(&mut trainer, 0..1, 4).remove(0);
        assert_eq!((report.step, report.loss_scale), (1, Some(scale)));
        if !report.skipped {
            break report;
        }
        assert!(!report.grad_norm.is_finite() && report.loss.is_finite());
        assert_eq!(trainer.steps(), 0);
        assert!(bits(&trainer.state().unwrap()) == bits(&before), "nothing moved");
        (skipped, scale) = (skipped + 1, scale / 2.0);
    };
    assert!(skipped > 0 && trainer.steps() == 1);
    // The step that was taken at last is the one without a factor.
    let mut plain = Trainer::new(adapted(&ops, &["q_proj", "v_proj"]), ADAPTER).unwrap();
    let expected = train(&mut plain, 0..1, 4).remove(0);
    assert!((taken.grad_norm / expected.grad_norm - 1.0).abs() < 1e-6, "{taken:?} {expected:?}");
    // The factor goes on from where it was.
    let mut resumed = new();
    resumed.restore(trainer.steps(), trainer.state().unwrap()).unwrap();
    resumed.restore_loss_scaler(trainer.loss_scaler().unwrap());
    assert_eq!(train(&mut resumed, 1..3, 4), train(&mut trainer, 1..3, 4));
    assert!(bits(&resumed.state().unwrap()) == bits(&trainer.state().unwrap()));
}

#[test]
fn a_gradient_that_never_is_finite_ends_the_run() {
    let scale = 2f64.powi(127);
    let scaling = LossScaling { init_scale: scale, min_scale: scale, ..LossScaling::default() };
    let options = TrainOptions { loss_scaling: Some(scaling), ..ADAPTER };
    let mut trainer = Trainer::new(adapted(&ops(1), &["v_proj"]), options).unwrap();
    let step = |trainer: &mut Trainer<Cpu>| {
        trainer.accumulate(&rows(0)[0]).unwrap();
        trainer.step(1e-2)
    };
    for _ in 0..7 {
        assert!(step(&mut trainer).unwrap().skipped);
    }
    let error = step(&mut trainer).unwrap_err();
    assert!(
        matches!(&error, TrainError::OverflowPersists { step: 1, tensor, skipped: 8, loss_scale }
            if tensor.contains("v_proj") && *loss_scale == scale),
        "{error}"
    );
}

/// A decoder that makes of one token something that is not a number.
fn with_bad_token(ops: &Arc<Cpu>, token: usize) -> Decoder<Cpu> {
    let config = support::decoder(ops, "llama, untied, biases", Trainability::Frozen).config().clone();
    let hidden_size = config.hidden_size;
    let mut decoder = Decoder::build(Arc::clone(ops), config, Trainability::Frozen, |name, shape| {
        let mut values = fresh_tensor(1, name, shape.iter().product(), Fill::Normal(0.3));
        if name.contains("embed_tokens") {
            values[token * hidden_size] = f32::NAN;
        }
        Ok(values)
    })
    .unwrap();
    let config = AdapterConfig::new(2, 4.0, vec!["q_proj".to_owned(), "down_proj".to_owned()]);
    let adapter = decoder.fresh_adapter(&config, 9).unwrap();
    decoder.attach(&adapter).unwrap();
    decoder
}

#[test]
fn a_loss_that_is_not_finite_names_its_documents_and_the_largest_gradient() {
    let ops = ops(1);
    let good = Batch::text(vec![1, 2, 3, 4]);
    let mut bad = Batch::default();
    for (row, ids) in [[5, 6, 7, 8], [9, 36, 1, 2], [3, 4, 5, 6], [36, 1, 1, 1]].into_iter().enumerate() {
        bad.push_row(row as u64, &ids, &ids.map(|id| id as i32), &[4]);
    }
    let error_after = |good_batches: usize, good_steps: usize| {
        let mut trainer = Trainer::new(with_bad_token(&ops, 36), ADAPTER).unwrap();
        for _ in 0..good_steps {
            trainer.accumulate(&good).unwrap();
            trainer.step(1e-2).unwrap();
        }
        for _ in 0..good_batches {
            trainer.accumulate(&good).unwrap();
        }
        let largest = trainer.gradients().unwrap().into_iter().max_by(|one, other| {
            let size = |values: &[f32]| values.iter().map(|value| value * value).sum::<f32>();
            size(&one.1).total_cmp(&size(&other.1))
        });
        match trainer.accumulate(&bad).unwrap_err() {
            TrainError::LossNotFinite { step, loss, documents, largest_gradient } => {
                assert!(loss.is_nan() && documents == [1, 3], "{documents:?}");
                assert_eq!(step, good_steps as u64 + 1);
                (largest_gradient, largest.unwrap().0)
            }
            error => panic!("{error}"),
        }
    };
    // Of this step's gradients; of the last step's; of none.
    let (found, largest) = error_after(2, 1);
    assert_eq!(found, Some(largest));
    assert!(error_after(0, 1).0.is_some_and(|name| name.contains(".lora_")));
    assert_eq!(error_after(0, 0).0, None);
}
