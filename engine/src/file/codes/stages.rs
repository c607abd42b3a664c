//! Codes of what flows between stages: models, tokens and schedules that do not go together.

use super::{Example, ProblemCode};
use crate::file::problem::Severity;

/// A file with a small model, ten rows of tokens, and what is written behind them.
macro_rules! with_model {
    ($rest:literal) => {
        concat!(
            "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl, split: \"train[:10]\" } }
  base:
    uses: new_model
    with:
      text: rows
      vocab_size: 300
      hidden_size: 32
      intermediate_size: 64
      num_hidden_layers: 1
      num_attention_heads: 2
      max_position_embeddings: 128
",
            $rest
        )
    };
}

pub(super) const CODES: &[ProblemCode] = &[
    ProblemCode {
        code: "wrong-input",
        severity: Severity::Error,
        title: "inputs that do not go together",
        meaning: "What a stage reads does not fit something else that it reads: `target_modules` that name no module of the model, tokens of a \
            larger vocabulary than the model's, an adapter of another model.",
        advice: "Tokenize with the tokenizer of the model that is trained, merge an adapter into the model that it was trained on, and name \
            modules as the model's weights do: `q_proj`, `v_proj`.",
        example: Example::File {
            wrong: with_model!(
                "  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
  adapter: { uses: train, with: { model: base, data: tokens, lora: { target_modules: [query_key_value] } } }
"
            ),
            right: with_model!(
                "  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
  adapter: { uses: train, with: { model: base, data: tokens, lora: { target_modules: [q_proj, v_proj] } } }
"
            ),
        },
    },
    ProblemCode {
        code: "no-chat-template",
        severity: Severity::Error,
        title: "conversations without a chat template",
        meaning: "`tokenize`, `evaluate` or `generate` is to render conversations, its tokenizer has no chat template, and `chat_template` gives \
            none. Base models often have none.",
        advice: "Say `chat_template: chatml`, give a template's text, or take the tokenizer of a chat model; the same in every stage.",
        example: Example::File {
            wrong: with_model!(
                "  chats: { uses: dataset, with: { source: ./chats.jsonl } }
  tokens: { uses: tokenize, with: { dataset: chats, tokenizer: base } }
"
            ),
            right: with_model!(
                "  chats: { uses: dataset, with: { source: ./chats.jsonl } }
  tokens: { uses: tokenize, with: { dataset: chats, tokenizer: base, chat_template: chatml } }
"
            ),
        },
    },
    ProblemCode {
        code: "prompt-differs",
        severity: Severity::Warning,
        title: "a model is asked in another way than it was taught",
        meaning: "The prompts of `evaluate` or `generate` are made with other options (`add_bos`, `chat_template`, `system_prompt` …) than \
            those that the model was trained on, which costs quality without any error.",
        advice: "Give the same values as in the `tokenize` stage that it was trained on.",
        example: Example::File {
            wrong: with_model!(
                "  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base, add_bos: false } }
  adapter: { uses: train, with: { model: base, data: tokens } }
  scores: { uses: evaluate, with: { model: base, adapter: adapter, data: rows, metrics: [perplexity] } }
"
            ),
            right: with_model!(
                "  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base, add_bos: false } }
  adapter: { uses: train, with: { model: base, data: tokens } }
  scores: { uses: evaluate, with: { model: base, adapter: adapter, data: rows, metrics: [perplexity], add_bos: false } }
"
            ),
        },
    },
    ProblemCode {
        code: "no-steps",
        severity: Severity::Warning,
        title: "training makes no step",
        meaning: "The rows do not fill one optimizer step of `micro_batch_size × gradient_accumulation_steps` rows, and `leftover: drop` \
            leaves out what does not fill one.",
        advice: "Lower `gradient_accumulation_steps`, take more rows, or keep the last ones with `leftover: step`.",
        example: Example::File {
            wrong: with_model!(
                "  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
  adapter: { uses: train, with: { model: base, data: tokens, gradient_accumulation_steps: 16, leftover: drop } }
"
            ),
            right: with_model!(
                "  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
  adapter: { uses: train, with: { model: base, data: tokens, gradient_accumulation_steps: 5, leftover: drop } }
"
            ),
        },
    },
    ProblemCode {
        code: "warmup-too-long",
        severity: Severity::Warning,
        title: "the warm-up does not end within the run",
        meaning: "The learning rate climbs for `warmup_steps`, and the run has fewer steps: it never reaches the rate that the file gives.",
        advice: "Lower `scheduler.warmup_steps`, or give `warmup_ratio` in its place; or train longer.",
        example: Example::File {
            wrong: with_model!(
                "  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
  adapter: { uses: train, with: { model: base, data: tokens, scheduler: { name: linear, warmup_steps: 100 } } }
"
            ),
            right: with_model!(
                "  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
  adapter: { uses: train, with: { model: base, data: tokens, scheduler: { name: linear, warmup_steps: 2 } } }
"
            ),
        },
    },
    ProblemCode {
        code: "schedule-too-long",
        severity: Severity::Warning,
        title: "the schedule never reaches its highest rate",
        meaning: "The run has so few steps that none of them falls on the top of the schedule.",
        advice: "Train longer, or choose a schedule without a climb, such as `constant`.",
        example: Example::File {
            wrong: with_model!(
                "  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
  adapter:
    uses: train
    with: { model: base, data: tokens, max_steps: 2, scheduler: { name: one_cycle } }
"
            ),
            right: with_model!(
                "  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
  adapter:
    uses: train
    with: { model: base, data: tokens, scheduler: { name: one_cycle } }
"
            ),
        },
    },
    ProblemCode {
        code: "too-long-for-model",
        severity: Severity::Warning,
        title: "documents may be longer than the model reads",
        meaning: "`max_seq_len` allows more tokens than the model has positions (`max_position_embeddings`); training fails at the first \
            document that is longer.",
        advice: "Lower `max_seq_len` of `tokenize`, or of `pack`.",
        example: Example::File {
            wrong: with_model!(
                "  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base, max_seq_len: 256 } }
  adapter: { uses: train, with: { model: base, data: tokens } }
"
            ),
            right: with_model!(
                "  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base, max_seq_len: 128 } }
  adapter: { uses: train, with: { model: base, data: tokens } }
"
            ),
        },
    },
    ProblemCode {
        code: "unused-stage",
        severity: Severity::Warning,
        title: "a stage whose result nobody uses",
        meaning: "No stage reads it or waits for it, it is not published, and it is no end in itself as training, merging, evaluating and \
            generating are. It would run all the same.",
        advice: "Let a stage read it (perhaps one names another by mistake), publish it, or remove it.",
        example: Example::File {
            wrong: with_model!(
                "  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
  packs: { uses: pack, with: { tokens: tokens, max_seq_len: 128 } }
  adapter: { uses: train, with: { model: base, data: tokens } }
"
            ),
            right: with_model!(
                "  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
  packs: { uses: pack, with: { tokens: tokens, max_seq_len: 128 } }
  adapter: { uses: train, with: { model: base, data: packs } }
"
            ),
        },
    },
    ProblemCode {
        code: "no-device",
        severity: Severity::Warning,
        title: "nothing that computes the stage",
        meaning: "`resources.device` asks for a device that this kind of stage cannot compute on: where the stage has no result yet, `run` \
            refuses to begin, with exit code 3. It is an error where `dtype: f16` or `backend: torch` needs the torch worker, and that is \
            not installed on this machine.",
        advice: "Say `device: auto`, which takes the first of those that the stage prefers and the machine has, or run with \
            `STAGE.resources.device=cpu`. Say `dtype: bf16`, leave `backend` out, or install the worker (docs/devices.md).",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows:
    uses: dataset
    with: { source: ./rows.jsonl }
    resources: { device: cuda }
",
            right: "\
version: 1
stages:
  rows:
    uses: dataset
    with: { source: ./rows.jsonl }
    resources: { device: auto }
",
        },
    },
];
