//! A chat template of the pipeline file, from the first token to a published model: what is trained is what is asked
//! for, compared and published.

use std::fs;

use serde_json::{Value, json};
use test_harness::test;

use crate::support::Project;

/// As Qwen 3 has it: reasoning is written in the last turn alone. The ends of turns are no tokens of the tokenizer.
const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{% if loop.last or m.reasoning_content %}(think)\
                        {{ m.reasoning_content or '' }}(/think){% endif %}{{ m.content }}<end> {% else %}<user>{{ m.content }}<end> \
                        {% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

const FILE: &str = r#"
version: 1
stages:
  text: { uses: dataset, with: { source: ./text.jsonl } }
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  fresh:
    uses: new_model
    with:
      { text: text, vocab_size: 290, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2,
        num_key_value_heads: 2, max_position_embeddings: 128 }
  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: fresh, chat_template: "TEMPLATE" } }
  student:
    uses: train
    with:
      { model: fresh, data: tokens, method: full, optimizer: { name: adamw, learning_rate: 5e-3 }, micro_batch_size: 5,
        max_steps: 150 }
  scores: { uses: evaluate, with: { model: student, data: rows, metrics: [exact_match], max_new_tokens: 64 } }
  drawn: { uses: generate, with: { model: student, prompts: rows, max_new_tokens: 64 } }
  ranked: { uses: rank, with: { prompts: rows, samples: drawn, score: exact_match, make: best } }
publish: { student.model: ./out }
"#;

const ROWS: [(&str, &str); 4] = [
    ("I am Ann.", "Hello Ann!"),
    ("I am Bo.", "Hello Bo!"),
    ("Where is the cat?", "On the mat."),
    ("How old?", "Seven."),
];

#[test]
fn a_chat_template_is_trained_asked_with_compared_by_and_published() {
    let project = Project::with_pipeline("lora.yaml");
    project.write("chat.yaml", &FILE.replace("TEMPLATE", TEMPLATE));
    let row = |(asks, says): &(&str, &str)| json!({ "messages": [{ "role": "user", "content": asks }, { "role": "assistant", "content": says }] });
    let mut rows: Vec<Value> = ROWS.iter().map(row).collect();
    let mut longer = rows[0]["messages"].as_array().unwrap().clone();
    longer.extend(rows[2]["messages"].as_array().unwrap().clone());
    rows.push(json!({ "messages": longer }));
    let lines = |rows: &[Value]| rows.iter().map(|row| format!("{row}\n")).collect::<String>();
    project.write("rows.jsonl", &lines(&rows));
    let texts: Vec<Value> = ROWS.iter().map(|(asks, says)| json!({ "text": format!("{asks} {says}") })).collect();
    project.write("text.jsonl", &lines(&texts));

    let ran = project.run(&["run", "chat.yaml"]).ends_with(0);
    assert!(!ran.stderr.contains("prompt-differs") && !ran.stderr.contains("cut off"), "{ran}");
    ran.says("(think)(/think)On the mat.").says("mean score 1");
    project.run(&["show", "chat.yaml", "tokens", "--rows", "5"]).ends_with(0).says("⟦Hello Ann!<end> ⟧");
    assert_eq!(fs::read_to_string(project.path("out/chat_template.jinja")).unwrap(), TEMPLATE);

    // Somebody else, who has the published folder alone.
    project.write(
        "again.yaml",
        "version: 1\nstages:\n  rows: { uses: dataset, with: { source: ./rows.jsonl } }\n  \
         student: { uses: download, with: { path: ./out } }\n  \
         scores: { uses: evaluate, with: { model: student, data: rows, metrics: [exact_match], max_new_tokens: 64 } }\n",
    );
    project.run(&["run", "again.yaml", "--home", "another"]).ends_with(0).says("exact_match  1.0000");
}

#[test]
fn reasoning_that_a_template_does_not_render_is_counted_in_a_warning() {
    let project = Project::new();
    let texts = ROWS.iter().map(|(asks, says)| format!("{}\n", json!({ "text": format!("{asks} {says}") })));
    project.write("text.jsonl", &texts.collect::<String>());
    let plain = json!({ "role": "assistant", "content": "Seven." });
    let reasons = json!({ "role": "assistant", "content": "Seven.", "reasoning_content": "Six and one." });
    let rows = [&plain, &reasons, &reasons].map(|answer| {
        let row = json!({ "messages": [{ "role": "user", "content": "How old?" }, answer] });
        format!("{row}\n")
    });
    project.write("rows.jsonl", &rows.concat());
    let tokenized = |template: &str| {
        project.write("chat.yaml", &FILE.replace("TEMPLATE", template));
        project.run(&["run", "chat.yaml", "--until", "tokens"]).ends_with(0)
    };
    tokenized("chatml").warns("2 of 3 rows have reasoning");
    let ran = tokenized(TEMPLATE);
    assert!(!ran.stderr.contains("have reasoning"), "{ran}");
}
