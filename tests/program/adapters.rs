//! Adapters that were published and are taken back: each belongs to the model it was trained on.

use test_harness::test;

use crate::support::Project;

const TAKEN: &str = "\
version: 1
name: taken
stages:
  text:
    uses: dataset
    with: { source: ./text.jsonl }
  fresh:
    uses: new_model
    with:
      text: text
      vocab_size: 320
      hidden_size: 32
      intermediate_size: 64
      num_hidden_layers: 2
      num_attention_heads: 4
      num_key_value_heads: 2
      max_position_embeddings: 128
      seed: 1
  adapter:
    uses: download
    with: { path: ./out/adapter, as: adapter }
  merged:
    uses: merge
    with: { model: fresh, adapter: adapter, proof_rows: 1 }
  samples:
    uses: generate
    with: { model: fresh, adapter: adapter, prompts: [\"Where is it?\"], max_new_tokens: 2, temperature: 0 }
";

#[test]
fn an_adapter_that_is_taken_back_belongs_to_its_model() {
    let project = Project::with_pipeline("train.yaml");
    project.edit("train.yaml", "publish: { merged: ./out/model }", "publish: { adapter.adapter: ./out/adapter }");
    project.edit("train.yaml", "epochs: 20", "epochs: 1");
    project.run(&["run", "train.yaml", "--until", "adapter"]).ends_with(0);
    project.write("taken.yaml", TAKEN);
    project.run(&["run", "taken.yaml"]).ends_with(0);

    // Another model of the same shape would take it without a word and compute nonsense.
    project.edit("taken.yaml", "seed: 1", "seed: 2");
    // The weights are known as soon as the model is made: the stage is not even started, which a wrong file ends with
    // 2.
    let other = "the adapter `adapter` was trained on another model than `fresh`";
    for stage in ["merged", "samples"] {
        project.run(&["run", "taken.yaml", "--until", stage]).ends_with(2).warns(other);
    }
}
