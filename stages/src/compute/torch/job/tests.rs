//! What we write is what the worker's schema describes.

use jsonschema::Validator;
use model::optimizer::{AdamW, Sgd};
use serde_json::Value;

use super::*;

fn schema() -> Validator {
    let text = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../workers/torch/src/pipeline_torch_worker/job.schema.json"
    ));
    jsonschema::validator_for(&serde_json::from_str(text).unwrap()).unwrap()
}

fn check(job: &Job) -> Value {
    let job = serde_json::to_value(job).unwrap();
    let problems: Vec<String> = schema().iter_errors(&job).map(|error| error.to_string()).collect();
    assert!(problems.is_empty(), "{problems:?}\n{job:#}");
    job
}

fn common(device: DeviceKind, adapter: Option<&str>) -> Common {
    Common {
        protocol: Common::PROTOCOL,
        device,
        dtype: Dtype::Bf16.in_job(),
        threads: 4,
        model: "/inputs/model".into(),
        adapter: adapter.map(Into::into),
        output: "/scratch/output".into(),
    }
}

fn rows(packed: bool) -> RowsFiles {
    RowsFiles { parts: vec!["/inputs/rows/part-00000.parquet".into()], packed, rows: 7 }
}

fn train() -> Train {
    Train {
        common: common(DeviceKind::Npu, Some("/scratch/adapter")),
        method: "lora",
        dropout: 0.1,
        parallel: Parallel::Fsdp2,
        attention: Attention::Auto,
        data: rows(true),
        validation: Some(rows(false)),
        steps: "/scratch/steps.jsonl".into(),
        total_steps: 3,
        micro_batch_size: 2,
        optimizer: AdamW::default().into(),
        clip_grad_norm: Some(1.0),
        loss_scale: Some(crate::kinds::train::LossScale::default().into()),
        activation_checkpointing: true,
        seed: 5,
        save_every: 20,
        keep_last: 2,
        eval_steps: Some(10),
        keep_best: true,
        early_stopping: Some((&crate::kinds::train::EarlyStopping { patience: 2, min_delta: 0.0 }).into()),
        working: "/working".into(),
        resume: Some("/working/step-20".into()),
        computed_by: "torch on npu, 8 ranks, micro-batches of 2".to_owned(),
        run_folder: "/run".into(),
        profile: false,
        watchdog_seconds: 600,
    }
}

#[test]
fn a_training_job_is_as_described() {
    let job = check(&Job::Train(Box::new(train())));
    assert_eq!((job["task"].as_str(), job["device"].as_str()), (Some("train"), Some("npu")));
    let plain = Train {
        common: common(DeviceKind::Cpu, None),
        method: "full",
        optimizer: Sgd { momentum: 0.9, ..Sgd::default() }.into(),
        validation: None,
        clip_grad_norm: None,
        loss_scale: None,
        eval_steps: None,
        early_stopping: None,
        resume: None,
        ..train()
    };
    check(&Job::Train(Box::new(plain)));
}

#[test]
fn the_schema_refuses_what_is_no_job() {
    let mut job = serde_json::to_value(Job::Train(Box::new(train()))).unwrap();
    job["learning_rate"] = 0.1.into();
    assert!(!schema().is_valid(&job));
}

#[test]
fn jobs_for_models_that_are_asked_are_as_described() {
    let common = || common(DeviceKind::Rocm, None);
    check(&Job::Score(Score { common: common(), rows: "/scratch/rows.jsonl".into(), batch_size: 8 }));
    check(&Job::Compare(Compare {
        common: Common { adapter: Some("/inputs/adapter".into()), ..common() },
        merged: "/outputs/model".into(),
        rows: "/scratch/rows.jsonl".into(),
    }));
    check(&Job::Generate(Generate {
        common: common(),
        prompts: "/scratch/prompts.jsonl".into(),
        max_new_tokens: 16,
        min_new_tokens: 0,
        stop_ids: vec![2],
        temperature: 0.0,
        top_k: Some(3),
        top_p: None,
        min_p: None,
        repetition_penalty: None,
        batch_size: 8,
    }));
}
