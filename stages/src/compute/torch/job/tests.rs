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

fn common(device: DeviceKind) -> Common {
    Common {
        protocol: Common::PROTOCOL,
        device,
        dtype: Dtype::Bf16.in_job(),
        threads: 4,
        model: "/inputs/model".into(),
        quantize: None,
    }
}

fn train() -> Train {
    Train {
        common: common(DeviceKind::Npu),
        adapter: Some("/scratch/adapter".into()),
        method: "lora",
        dropout: 0.1,
        parallel: Parallel::Fsdp2,
        attention: Attention::Auto,
        compile: Compile::Layers,
        packed: false,
        label_smoothing: 0.0,
        distillation: None,
        optimizer: AdamW::default().into(),
        clip_grad_norm: Some(1.0),
        loss_scale: Some(crate::kinds::train::LossScale::default().into()),
        activation_checkpointing: true,
        seed: 5,
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
        common: common(DeviceKind::Cpu),
        adapter: None,
        method: "full",
        optimizer: Sgd { momentum: 0.9, ..Sgd::default() }.into(),
        clip_grad_norm: None,
        loss_scale: None,
        label_smoothing: 0.1,
        distillation: Some(Distillation {
            teacher: "/inputs/teacher".into(),
            loss: loss::Distillation { temperature: 2.0, alpha: 0.5, divergence: loss::Divergence::ForwardKl },
        }),
        ..train()
    };
    check(&Job::Train(Box::new(plain)));
    let base =
        Quantize { base: "nf4", double_quantization: true, block_size: 64, skip_modules: vec!["lm_head".to_owned()] };
    let quantized = Common { quantize: Some(base), ..common(DeviceKind::Cuda) };
    check(&Job::Train(Box::new(Train { common: quantized, ..train() })));
}

#[test]
fn the_schema_refuses_what_is_no_job() {
    let mut job = serde_json::to_value(Job::Train(Box::new(train()))).unwrap();
    job["learning_rate"] = 0.1.into();
    assert!(!schema().is_valid(&job));
}

#[test]
fn jobs_for_inference_are_as_described() {
    let job = check(&Job::Infer(Infer { common: common(DeviceKind::Rocm), widen: false, adapter: None }));
    assert_eq!(job["task"], "infer");
    assert_eq!(check(&Job::Serve(common(DeviceKind::Cuda)))["task"], "serve");
}
