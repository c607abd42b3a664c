//! What keys of the training become, and what its launcher decides.

use serde_json::Value;
use test_harness::test;

use super::{AXOLOTL, base_with, is_said, is_written, items, project, said_of};

const TRL: &str = "trl/scripts/sft.py --model_name_or_path a/b --dataset_name chats.jsonl --per_device_train_batch_size 2 \
                   --learning_rate 1e-4";

#[test]
fn what_a_launcher_decides_is_carried_over_or_named() {
    let project = project();
    project.write(
        "accelerate.yaml",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_machines: \
         2\nnum_processes: 16\ngradient_accumulation_steps: 4\n",
    );
    let import = |launcher: &str, rest: &str| said_of(&project, "a.sh", &format!("{launcher} {TRL} {rest}\n"));
    let said = import("accelerate launch --config_file accelerate.yaml", "--bf16 false");
    is_written(
        &said,
        &["micro_batch_size: 32", "nodes: 2", "count: 8", "dtype: bf16", "gradient_accumulation_steps: 1"],
    );
    is_said(&said, "other_meaning", "gradient_accumulation_steps", "without effect there");
    let said = import("accelerate launch --config_file accelerate.yaml --num_processes 4 --num_machines 1", "--bf16");
    is_written(&said, &["micro_batch_size: 8", "count: 4", "dtype: bf16"]);
    let said = import("accelerate launch --config_file nowhere.yaml", "");
    is_written(&said, &["micro_batch_size: 2"]);
    is_said(&said, "other_meaning", "config_file", "the number of processes is not known");
    is_said(&import("accelerate launch --multi_gpu", ""), "other_meaning", "num_processes", "taken for one");
    is_said(&import("torchrun --nproc_per_node gpu", ""), "other_meaning", "nproc_per_node", "taken for one");
    let said = import("torchrun --nnodes 2 --nproc_per_node 4", "");
    is_written(&said, &["micro_batch_size: 16", "nodes: 2", "count: 4"]);
    // Its other scripts, and LLaMA-Factory's.
    project.write("pairs.jsonl", r#"{"prompt": "Who?", "chosen": "Pip.", "rejected": "No."}"#);
    let pairs = TRL.replace("sft.py", "dpo.py").replace("chats.jsonl", "pairs.jsonl");
    let said = said_of(&project, "a.sh", &format!("accelerate launch --num_processes 2 {pairs} --beta 0.3\n"));
    is_written(&said, &["name: dpo", "beta: 0.3", "count: 2"]);
    project.write("data/dataset_info.json", r#"{"own": {"file_name": "own.json"}}"#);
    project.write("data/own.json", r#"[{"instruction": "Who?", "input": "", "output": "Pip."}]"#);
    let factory = "src/train.py --stage sft --do_train --model_name_or_path a/b --dataset own --template qwen --finetuning_type lora \
                   --output_dir out";
    let said = said_of(&project, "a.sh", &format!("torchrun --nproc_per_node 4 {factory}\n"));
    is_written(&said, &["count: 4"]);
    // What `trl` passes on to its launcher.
    project.write("a.sh", "trl sft --model_name_or_path a/b --dataset_name chats.jsonl --accelerate_config zero2\n");
    let ran = project.run(&["import", "a.sh"]).ends_with(0);
    assert!(ran.stdout.contains("micro_batch_size: 64") && ran.stdout.contains("count: 8"), "{ran}");
    let recipe = "full_finetune_distributed --config qwen2_5/0.5B_full batch_size=3";
    let said = said_of(&project, "a.sh", &format!("tune run --nnodes 2 --nproc_per_node 8 {recipe}\n"));
    is_written(&said, &["micro_batch_size: 48", "nodes: 2", "count: 8"]);
    let said = said_of(&project, "a.sh", &format!("tune run --nproc_per_node 8 {recipe} tensor_parallel_dim=2\n"));
    is_written(&said, &["micro_batch_size: 12", "count: 8"]);
    is_said(&said, "other_meaning", "tensor_parallel_dim", "8 processes have 4 batches");
}

#[test]
fn a_hub_of_ms_swift_that_a_variable_names_is_the_one_of_the_model() {
    let project = project();
    let text = "USE_HF=1 swift sft --model a/b --dataset chats.jsonl\n";
    is_written(&said_of(&project, "a.sh", text), &["repo: a/b"]);
}

#[test]
fn batches_that_devices_share_are_not_multiplied() {
    let project = project();
    let options = r#"--accelerator_config '{"split_batches": true}'"#;
    let text = format!("accelerate launch --num_processes 2 {TRL} {options}\n");
    let said = said_of(&project, "a.sh", &text);
    is_written(&said, &["micro_batch_size: 2", "count: 2"]);
    is_said(&said, "carried_over", "accelerator_config", "split_batches");
}

#[test]
fn the_order_the_dropout_and_the_length_of_trl_are_carried_over() {
    let project = project();
    let import = |own: &str| said_of(&project, "a.yaml", &base_with("trl", own));
    let said = import("train_sampling_strategy: sequential\nshuffle_dataset: true\ndataset_name: chats.jsonl\n");
    is_written(&said, &["shuffle: false", "shuffle: true"]);
    let said = import("train_sampling_strategy: group_by_length\n");
    is_said(&said, "not_carried_over", "train_sampling_strategy", "not supported");
    // `trl dpo` disables dropout by default, that of an adapter too.
    let said = import("dataset_name: preferences.jsonl\nbeta: 0.1\nlora_dropout: 0.2\n");
    is_written(&said, &["dropout: 0"]);
    is_said(&said, "other_meaning", "lora_dropout", "`disable_dropout`");
    assert_eq!(items(&said, "carried_over", "dataset_name")[0]["becomes"], "rows.source");
    let said = import("dataset_name: preferences.jsonl\nbeta: 0.1\nlora_dropout: 0.2\ndisable_dropout: false\n");
    is_written(&said, &["dropout: 0.2"]);
    let said = import("max_seq_length: 4096\npacking: true\n");
    let text = said["pipeline"].as_str().unwrap();
    assert_eq!(text.matches("max_seq_len: 4096").count(), 2, "{text}");
    let said = import("max_length:\n");
    assert!(!said["pipeline"].as_str().unwrap().contains("max_seq_len"), "{said:#}");
}

#[test]
fn names_of_transformers_that_axolotl_ignores_are_errors() {
    let project = project();
    for (line, key) in [
        ("num_train_epochs: 7", "num_train_epochs"),
        ("per_device_train_batch_size: 4", "per_device_train_batch_size"),
        ("optim: adafactor", "optim"),
        ("lr_scheduler_type: linear", "lr_scheduler_type"),
        ("label_smoothing_factor: 0.1", "label_smoothing_factor"),
    ] {
        project.write("a.yaml", &format!("{AXOLOTL}{line}\n"));
        project.run(&["import", "a.yaml"]).ends_with(2).warns(&format!("`{key}` is no key of axolotl"));
    }
}

#[test]
fn steps_between_measurements_are_those_of_the_tool_or_named() {
    let project = project();
    let share = "a share of all steps";
    let factory = "val_size: 0.5\neval_strategy: steps\nload_best_model_at_end: true\n";
    let said = said_of(&project, "a.yaml", &base_with("llama-factory", &format!("{factory}eval_steps: 0.1\n")));
    is_said(&said, "not_carried_over", "eval_steps", share);
    // Left out, it is the number of steps between lines of the log.
    let factory = base_with("llama-factory", factory);
    let factory: String = factory
        .lines()
        .filter(|line| !line.starts_with("eval_steps") && !line.starts_with("logging_steps"))
        .map(|line| format!("{line}\n"))
        .collect();
    is_written(&said_of(&project, "a.yaml", &factory), &["eval_steps: 500", "keep_best: true"]);
    let trl = base_with("trl", "dataset_name: c/d\neval_strategy: steps\neval_steps: 0.25\n");
    is_said(&said_of(&project, "a.yaml", &trl), "not_carried_over", "eval_steps", share);
    let swift = |own: &str| {
        let text = format!("swift sft --model a/b --dataset alpaca.jsonl --split_dataset_ratio 0.5 {own}\n");
        said_of(&project, "a.sh", &text)
    };
    is_said(&swift("--eval_steps 0.1"), "not_carried_over", "eval_steps", share);
    is_written(&swift("--save_steps 30"), &["eval_steps: 30"]);
    let said = swift("--eval_strategy no");
    assert!(!said["pipeline"].as_str().unwrap().contains("test_size"), "{said:#}");
}

#[track_caller]
fn is_unmeasured(said: &Value) {
    let text = said["pipeline"].as_str().unwrap_or_else(|| panic!("nothing is written: {said:#}"));
    assert!(!text.contains("validation") && !text.contains("held_out"), "{text}");
}

/// Rows of TRL, some of which are split off.
const MIXTURE: &str = "dataset_name:\ndatasets: [{ path: chats.jsonl }]\ntest_split_size: 0.5\n";

#[test]
fn without_a_strategy_of_evaluation_nothing_is_measured() {
    let project = project();
    for off in ["\"no\"", "no", "No", "false"] {
        let strategy = format!("eval_strategy: {off}\n");
        // Rows that are split off are not trained on all the same.
        for text in [
            format!("{AXOLOTL}val_set_size: 0.5\n{strategy}"),
            base_with("llama-factory", &format!("val_size: 0.5\n{strategy}")),
            base_with("trl", &format!("{MIXTURE}{strategy}")),
        ] {
            let said = said_of(&project, "a.yaml", &text);
            is_said(&said, "carried_over", "eval_strategy", "no loss is measured");
            is_written(&said, &["test_size: 0.5", "dataset: rows.train"]);
            is_unmeasured(&said);
            project.run(&["validate", "out.yaml"]).ends_with(0);
        }
        for (text, key) in [
            (format!("{AXOLOTL}test_datasets: [{{ path: more.jsonl, type: alpaca }}]\n{strategy}"), "test_datasets"),
            (base_with("llama-factory", &format!("eval_dataset: more\n{strategy}")), "eval_dataset"),
            (base_with("trl", &format!("dataset_test_split: validation\n{strategy}")), "dataset_test_split"),
        ] {
            let said = said_of(&project, "a.yaml", &text);
            is_said(&said, "carried_over", "eval_strategy", "no loss is measured");
            is_said(&said, "carried_over", key, "no loss is measured");
            is_unmeasured(&said);
        }
    }
}

#[test]
fn without_a_key_of_the_strategy_the_default_of_the_tool_decides() {
    let project = project();
    let import = |tool: &str, own: &str| said_of(&project, "a.yaml", &base_with(tool, own));
    let said = import("llama-factory", "eval_dataset: more\n");
    is_said(&said, "carried_over", "eval_dataset", "no loss is measured");
    is_unmeasured(&said);
    for (tool, own) in [("llama-factory", "val_size: 0.5\n"), ("trl", MIXTURE)] {
        let said = import(tool, own);
        is_written(&said, &["test_size: 0.5", "dataset: rows.train"]);
        is_unmeasured(&said);
    }
    let said = import("llama-factory", "val_size: 0.5\ndo_eval: true\n");
    is_written(&said, &["validation: held_out"]);
    is_said(&said, "other_meaning", "do_eval", "once, after training");
    let said = said_of(&project, "a.yaml", &format!("{AXOLOTL}val_set_size: 0.5\n"));
    is_written(&said, &["validation: held_out"]);
}

#[test]
fn ms_swift_measures_when_it_saves_unless_a_strategy_is_set() {
    let project = project();
    let import =
        |own: &str| said_of(&project, "a.sh", &format!("swift sft --model a/b --dataset alpaca.jsonl {own}\n"));
    for off in ["--eval_strategy no", "--eval_strategy false", "--save_strategy no"] {
        for (rows, key) in
            [("--val_dataset more.jsonl", "val_dataset"), ("--split_dataset_ratio 0.5", "split_dataset_ratio")]
        {
            let said = import(&format!("{rows} {off}"));
            is_said(&said, "carried_over", key, "no rows are held out");
            is_unmeasured(&said);
            assert!(!said["pipeline"].as_str().unwrap().contains("test_size"), "{said:#}");
        }
    }
    let said = import("--val_dataset more.jsonl --save_strategy no --eval_strategy epoch");
    is_written(&said, &["validation: held_out"]);
}

#[test]
fn an_empty_system_message_is_none_and_an_empty_word_is_no_switch() {
    let project = project();
    let none = |said: &Value, key: &str| {
        is_said(said, "carried_over", key, "no system message");
        assert!(!said["pipeline"].as_str().unwrap().contains("system_prompt"), "{said:#}");
    };
    none(&said_of(&project, "a.yaml", &base_with("llama-factory", "default_system: \"\"\n")), "default_system");
    let swift = |own: &str| said_of(&project, "a.sh", &format!("swift sft --model a/b --dataset chats.jsonl {own}\n"));
    none(&swift("--system ''"), "system");
    none(&swift("--system="), "system");
    let said = swift("--deepspeed '' --packing_length 64 --packing");
    is_written(&said, &["uses: pack"]);
    assert!(!said["pipeline"].as_str().unwrap().contains("parallel"), "{said:#}");
    project.write("a.sh", "swift sft --model a/b --dataset chats.jsonl --system --packing false\n");
    project.run(&["import", "a.sh"]).ends_with(2).warns("`system` is").warns("a text");
}

#[test]
fn keys_that_change_the_loss_or_the_rows_are_not_dropped() {
    let project = project();
    let said = said_of(&project, "a.yaml", &format!("{AXOLOTL}liger_use_token_scaling: true\n"));
    is_said(&said, "not_carried_over", "liger_use_token_scaling", "weights the loss");
    let factory = |own: &str| said_of(&project, "a.yaml", &base_with("llama-factory", own));
    let said = factory("template: qwen3\nenable_thinking: false\nignore_pad_token_for_loss: false\n");
    is_said(&said, "not_carried_over", "enable_thinking", "reasoning");
    is_said(&said, "not_carried_over", "ignore_pad_token_for_loss", "padding");
    is_said(&factory("template: qwen\nenable_thinking: false\n"), "carried_over", "enable_thinking", "that reason");
    let text = "swift sft --model a/b --dataset chats.jsonl --add_non_thinking_prefix false --router_aux_loss_coef 0.01 \
                --lora_dtype bfloat16 --use_chat_template false\n";
    let said = said_of(&project, "a.sh", text);
    is_said(&said, "not_carried_over", "add_non_thinking_prefix", "without reasoning");
    is_said(&said, "not_carried_over", "router_aux_loss_coef", "router");
    is_said(&said, "not_carried_over", "use_chat_template", "a chat template");
    is_said(&said, "other_meaning", "lora_dtype", "kept in bfloat16");
    let text = "swift pt --model a/b --dataset texts.jsonl --use_chat_template false\n";
    is_said(&said_of(&project, "a.sh", text), "carried_over", "use_chat_template", "plain text");
}

#[test]
fn switches_that_are_on_by_default_are_switched_off() {
    let project = project();
    let import = |own: &str| {
        project.write("a.sh", &format!("trl sft --model_name_or_path a/b --dataset_name chats.jsonl {own}\n"));
        project.run(&["import", "a.sh"])
    };
    for flag in ["--no_gradient_checkpointing", "--no-gradient-checkpointing"] {
        let ran = import(flag).ends_with(0);
        assert!(ran.stdout.contains("activation_checkpointing: false"), "{ran}");
    }
    import("--no_packing").ends_with(2).warns("`no_packing` is no key of TRL");
}
