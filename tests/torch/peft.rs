//! An adapter that was published, in the hands of PEFT: it finds the base by itself, and computes what we compute.

use std::fs;
use std::process::Command;

use test_harness::{Unmet, test};

use crate::bench::Bench;

/// Loads the adapter by its folder alone, as `AutoPeftModelForCausalLM` and servers do, and saves it again.
const LOAD: &str = "
import json, sys
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained('out/adapter')
model.save_pretrained('saved')
config = lambda folder: json.load(open(folder + '/adapter_config.json'))
ours, theirs = config('out/adapter'), config('saved')
for one in (ours, theirs):
    one['target_modules'] = sorted(one['target_modules'])
differ = {key: (ours.get(key), theirs.get(key)) for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
print(json.dumps({'base': ours['base_model_name_or_path'], 'differ': differ}))";

const BASE: &str = "version: 1
name: base
stages:
  text: { uses: dataset, with: { source: ./text.txt } }
  fresh: { uses: new_model, with: { text: text, vocab_size: 300, hidden_size: 32, intermediate_size: 48, \
num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64 } }
publish: { fresh.model: ./base }
";

const TRAIN: &str = "version: 1
name: peft
stages:
  base: { uses: download, with: { path: ./base } }
  rows: { uses: dataset, with: { source: ./text.txt } }
  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base, max_seq_len: 64 } }
  adapter: { uses: train, with: { model: base, data: tokens, epochs: 1, micro_batch_size: 2, \
lora: { target_modules: all-linear } } }
publish: { adapter.adapter: ./out/adapter }
";

#[test]
fn peft_finds_the_base_of_a_published_adapter() -> Result<(), Unmet> {
    let bench = Bench::new()?;
    bench.project.write("text.txt", &"The quick brown fox jumps over the lazy dog.\n".repeat(20));
    bench.project.write("base.yaml", BASE);
    bench.project.write("train.yaml", TRAIN);
    bench.run(&["run", "base.yaml"]).ends_with(0);
    bench.run(&["run", "train.yaml"]).ends_with(0);
    let mut python = Command::new(&bench.python);
    let ran =
        python.args(["-c", LOAD]).current_dir(bench.project.path("")).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let said = String::from_utf8(ran.stdout).unwrap();
    assert_eq!(said.lines().last().unwrap(), "{\"base\": \"./base\", \"differ\": {}}");
    assert!(fs::exists(bench.project.path("out/adapter/README.md")).unwrap());
    Ok(())
}
