//! Keys of other programs that name matching cannot lead to a key of `merge`, with what to write instead.

pub(super) const KEYS: &[(&str, &str)] = &[
    ("base", MODEL),
    ("base_model", MODEL),
    ("model_name_or_path", MODEL),
    ("pretrained_model_name_or_path", MODEL),
    ("adapter_name_or_path", ADAPTER),
    ("lora_model_dir", ADAPTER),
    ("peft_model", ADAPTER),
    ("torch_dtype", "write `dtype`: `f32`, `bf16` or `f16`"),
    ("export_size", "write `max_shard_size`, such as `5GB`"),
    ("export_dir", OUTPUT),
    ("output_dir", OUTPUT),
];

const ADAPTER: &str = "write `adapter`: the id of a `train` stage";
const MODEL: &str = "write `model`: the id of the stage that makes the base";
const OUTPUT: &str = "put `publish: { STAGE.model: ./out }` at the level of `stages:`";
