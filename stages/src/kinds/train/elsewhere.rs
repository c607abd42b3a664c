//! Keys of other trainers (transformers, axolotl, LLaMA-Factory, ms-swift, torchtune) that name matching cannot lead to
//! a key of ours, with what to write instead.

pub(super) const KEYS: &[(&str, &str)] = &[
    ("bf16", "write `dtype: bf16`"),
    ("fp16", "write `dtype: f16`"),
    ("fp32", "write `dtype: f32`"),
    ("tf32", "leave it out: `dtype` is `f32`, `bf16` or `f16`"),
    ("torch_dtype", "write `dtype`: `f32`, `bf16` or `f16`"),
    ("precision", "write `dtype`: `f32`, `bf16` or `f16`"),
    ("load_in_4bit", QLORA),
    ("load_in_8bit", "write `quantize: { base: q8_0 }`: 8 bits, 32 weights to a scale"),
    ("quantization_bit", QLORA),
    ("qlora", QLORA),
    ("per_device_train_batch_size", "write `micro_batch_size`: rows computed at once, over all devices together"),
    ("train_batch_size", "write `micro_batch_size`: rows computed at once, over all devices together"),
    ("batch_size", "write `micro_batch_size`, and `gradient_accumulation_steps` for more rows per step"),
    ("num_train_epochs", "write `epochs`"),
    ("num_epochs", "write `epochs`"),
    ("max_grad_norm", "write `clip_grad_norm`"),
    ("gradient_checkpointing", "write `activation_checkpointing`"),
    ("lr_scheduler_type", "write `scheduler: cosine`"),
    ("lr_scheduler", "write `scheduler: cosine`"),
    ("optim", "write `optimizer: { name: adamw, learning_rate: 3e-4 }`"),
    ("lora_target", "write `lora: { target_modules: all-linear }`, or names of modules"),
    ("lora_target_linear", "write `lora: { target_modules: all-linear }`"),
    ("lora_target_modules", "write `lora: { target_modules: all-linear }`, or names of modules"),
    ("sample_packing", "put a `pack` stage between `tokenize` and `train`"),
    ("packing", "put a `pack` stage between `tokenize` and `train`"),
    ("output_dir", "put `publish: { adapter.adapter: ./out }` at the level of `stages:`"),
    ("val_set_size", "let `dataset` make two outputs with `train_test_split`, and read the test rows as `validation`"),
    ("cutoff_len", "write `max_seq_len` in the `tokenize` stage"),
    ("sequence_len", "write `max_seq_len` in the `tokenize` stage"),
    ("resume_from_checkpoint", "leave it out: the same command continues an interrupted run"),
    ("report_to", "leave it out: TensorBoard's curves are in the run's folder"),
    ("logging_steps", "leave it out: every step is recorded"),
    ("deepspeed", "write `parallel`, with `resources: { count: N }` at the level of `with:`"),
    ("flash_attention", "write `attention`"),
    ("torch_compile", "write `compile: auto`"),
];

const QLORA: &str = "write `quantize: { base: nf4 }`";

#[cfg(test)]
mod tests {
    use engine::parameter::{Parameter as _, declared_fields};

    use super::*;
    use crate::kinds::train::Train;

    #[test]
    fn what_is_to_be_written_is_there() {
        let fields = declared_fields(&Train::schema());
        let top: Vec<&str> = fields.iter().filter_map(|field| field.path.split('.').next()).collect();
        for (key, instead) in KEYS {
            assert!(!top.contains(key), "`{key}` is a key of our own");
            let Some(ours) = instead.strip_prefix("write `").and_then(|rest| rest.split(['`', ':']).next()) else {
                continue;
            };
            assert!(top.contains(&ours) || ours == "max_seq_len", "{key}: `{ours}`");
        }
    }
}
