//! Recipes: each is valid, and runs for every family that is computed natively; and what `init` makes of rows and of a
//! machine.

use std::fs::{self, File};
use std::io::{Read, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use test_harness::test;

use crate::support::fake_tools::FakeTools;
use crate::support::terminal::{Session, pseudo_terminal};
use crate::support::tiny::{FAMILIES, Tokenizer};
use crate::support::{Project, Ran};

/// The rows that each recipe reads by default, by the name of the file.
fn write_rows(project: &Project) {
    let rows = |row: fn(usize) -> Value| -> String { (0..24).map(|at| format!("{}\n", row(at))).collect() };
    let turns = rows(|at| {
        json!({ "messages": [{ "role": "user", "content": format!("Who are you, {at}?") },
                             { "role": "assistant", "content": "I am Pip." }] })
    });
    project.write("rows.jsonl", &turns);
    project.write("text.jsonl", &rows(|at| json!({ "text": format!("Number {at}. I am Pip, and you are you.") })));
    let pair = |at| json!({ "prompt": format!("Who, {at}?"), "chosen": " I am Pip.", "rejected": " No." });
    project.write("pairs.jsonl", &rows(pair));
    let judged = |at| json!({ "prompt": format!("Who, {at}?"), "completion": " I am Pip.", "label": at % 2 == 0 });
    project.write("judged.jsonl", &rows(judged));
    let article = |at| json!({ "document": format!("Pip was seen {at} times."), "summary": "Pip was seen." });
    project.write("articles.jsonl", &rows(article));
}

/// What a recipe is given besides a model, and what it is changed by on a machine without a GPU.
fn settings(recipe: &str) -> (&'static [&'static str], &'static [&'static str]) {
    match recipe {
        "distillation" => (&["teacher=./model"], &[]),
        "merge" | "gguf" => (&["adapter=./adapter"], &[]),
        // What divides the sizes of all these small models.
        "qat" => (&["group_size=16"], &[]),
        "scaling" => {
            (&["data=./articles.jsonl"], &["adapter.resources.device=cpu", "adapter.matrix.resources.count=[1, 2]"])
        }
        _ => (&[], &[]),
    }
}

/// The recipes that take a model.
fn recipes(project: &Project) -> Vec<String> {
    let listed = project.run(&["ls", "--format", "json", "qwen3-0.6b"]).ends_with(0).json();
    listed.as_array().unwrap().iter().map(|pair| pair["recipe"].as_str().unwrap().to_owned()).collect()
}

fn copy(project: &Project, recipe: &str) -> Vec<&'static str> {
    let (values, overrides) = settings(recipe);
    let arguments = [&["cp", recipe, "job.yaml", "--overwrite", "model=./model"], values].concat();
    project.run(&arguments).ends_with(0);
    overrides.to_vec()
}

#[test]
fn every_recipe_is_valid_for_every_family_and_runs() {
    let tokenizer = Tokenizer::train();
    let project = Project::new();
    write_rows(&project);
    let recipes = recipes(&project);
    assert!(recipes.len() >= 11, "{recipes:?}");
    // The adapter that `merge` and `gguf` read.
    tokenizer.checkpoint("llama31", &project.path("model"));
    copy(&project, "lora");
    project.edit("job.yaml", "epochs: 2", "max_steps: 1");
    project.run(&["run", "job.yaml", "--until", "adapter"]).ends_with(0);
    fs::rename(project.path("out/job/adapter"), project.path("adapter")).unwrap();
    for family in FAMILIES {
        fs::remove_dir_all(project.path("model")).unwrap();
        tokenizer.checkpoint(family, &project.path("model"));
        for recipe in &recipes {
            let overrides = copy(&project, recipe);
            // An adapter is one model's.
            let is_of_another = ["merge", "gguf"].contains(&recipe.as_str()) && family != "llama31";
            if !is_of_another {
                project.run(&["validate", "job.yaml"]).ends_with(0);
            }
            // Every recipe on one family; on the others those that train: an adapter, and all weights.
            if family == "llama31" || ["lora", "full"].contains(&recipe.as_str()) {
                let arguments = [&["run", "job.yaml", "--smoke"], overrides.as_slice()].concat();
                project.run(&arguments).ends_with(0);
            }
        }
    }
}

/// What the engine says where an adapter meets another base than it was trained on, and what a merge tells of both.
#[test]
fn the_quickstart_of_qlora_runs_and_warns_where_the_base_is_another() {
    let project = Project::new();
    project.run(&["cp", "quickstart_qlora", "job.yaml"]).ends_with(0);
    project.edit("job.yaml", "epochs: 10", "max_steps: 3");
    project.edit("job.yaml", "epochs: 2", "max_steps: 3");
    let warning = "the adapter was trained on its base in `nf4`, and is used with the format that it is stored in";
    let ran = project.run(&["run", "job.yaml"]).ends_with(0).warns(warning);
    assert_eq!(ran.stderr.matches("the adapter was trained on its base in").count(), 1, "{ran}");
    project.edit("job.yaml", ", into: dequantized", "");
    project.run(&["validate", "job.yaml"]).ends_with(2).warns("on its base in `nf4`, and `into` is not given");
}

#[test]
fn every_family_has_models_and_words_filter_them() {
    let project = Project::new();
    project.run(&["ls"]).ends_with(0).says("lora ").says("scaling ").says("quickstart_dpo ");
    for family in ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"] {
        let pairs = project.run(&["ls", "--format", "json"]).json();
        assert!(pairs.as_array().unwrap().iter().any(|pair| pair["family"] == family), "{family}");
    }
    let filtered = project.run(&["ls", "lora", "qwen3-4b"]).ends_with(0).says("Qwen/Qwen3-4B");
    assert!(!filtered.stdout.contains("Qwen2.5") && !filtered.stdout.contains("kto"), "{filtered}");
    project.run(&["ls", "nonsense"]).ends_with(2).warns("`nonsense`");
}

#[test]
fn a_copy_is_named_for_its_file_and_never_written_over_another() {
    let project = Project::new();
    let shipped = project.run(&["cat", "lora"]).ends_with(0);
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/pipelines/recipes/lora.yaml");
    assert_eq!(shipped.stdout, fs::read_to_string(source).unwrap());
    fs::create_dir(project.path("jobs")).unwrap();
    project.write("chats.jsonl", "{\"messages\": []}\n");
    project.run(&["cp", "lora", "jobs/pip.yaml", "data=chats.jsonl", "model=Qwen/Qwen3-0.6B"]).ends_with(0);
    let text = fs::read_to_string(project.path("jobs/pip.yaml")).unwrap();
    for line in
        ["name: pip", "  model: Qwen/Qwen3-0.6B", "  merged: ./out/pip/model", "#   pipeline run pip.yaml --smoke"]
    {
        assert!(text.lines().any(|written| written == line), "lacks `{line}`:\n{text}");
    }
    // Written from where the file is.
    assert!(text.contains(&format!("data: {}\n", project.path("chats.jsonl").display())), "{text}");
    project.run(&["cp", "lora", "jobs/pip.yaml"]).ends_with(2).warns("exists already").warns("--overwrite");
    project.run(&["cp", "lora", "x.yaml", "modle=a/b"]).ends_with(2).warns("no variable `modle`").warns("`model`");
    project.run(&["cp", "lorra", "x.yaml"]).ends_with(2).warns("did you mean `lora`?");
    assert!(!project.path("x.yaml").exists());
}

#[test]
fn a_copy_brings_what_it_reads() {
    let project = Project::new();
    project.run(&["cp", "quickstart", "first.yaml"]).ends_with(0);
    project.run(&["validate", "first.yaml"]).ends_with(0);
    project.run(&["cp", "command", "own.yaml"]).ends_with(0);
    project.run(&["run", "own.yaml", "--until", "cleaned"]).ends_with(0);
    // What the user has changed stays.
    project.write("command/questions.txt", "mine");
    project.run(&["cp", "command", "other.yaml"]).ends_with(0).warns("is kept");
    assert_eq!(fs::read_to_string(project.path("command/questions.txt")).unwrap(), "mine");
}

fn init(project: &Project, data: &str, more: &[&str]) -> Ran {
    project.run(&[&["init", "job.yaml", "--overwrite", "--data", data, "--model", "./model"], more].concat())
}

#[test]
fn what_init_writes_runs_whatever_the_rows_are() {
    let project = Project::new();
    write_rows(&project);
    Tokenizer::train().checkpoint("qwen2", &project.path("model"));
    let alpaca = vec![json!({ "instruction": "Who?", "input": "", "output": "Pip." }); 24];
    project.write("alpaca.json", &Value::from(alpaca).to_string());
    project.write("faq.csv", &("question,answer\n".to_owned() + &"Who?,Pip.\n".repeat(200)));
    let of = [("rows.jsonl", "lora"), ("text.jsonl", "pretrain"), ("pairs.jsonl", "dpo"), ("judged.jsonl", "kto")];
    for (data, recipe) in of.into_iter().chain([("alpaca.json", "lora"), ("faq.csv", "lora")]) {
        init(&project, data, &[]).ends_with(0);
        let text = fs::read_to_string(project.path("job.yaml")).unwrap();
        assert!(text.starts_with(&format!("# Written by `pipeline init`: `{recipe}`")), "{text}");
        project.run(&["run", "job.yaml", "--smoke"]).ends_with(0);
        assert!(text.contains("max_seq_len: 512"), "what the model reads at once:\n{text}");
    }
    // 200 rows in 20 steps.
    let text = fs::read_to_string(project.path("job.yaml")).unwrap();
    assert!(text.contains("gradient_accumulation_steps: 3"), "{text}");
    init(&project, "rows.jsonl", &["--purpose", "full"]).ends_with(0);
    init(&project, "rows.jsonl", &["--purpose", "scaling"]).ends_with(2).warns("--purpose");
    init(&project, "nothing.jsonl", &[]).ends_with(2).warns("there is no file `nothing.jsonl`");
}

/// Rows are corrected in a file that is there.
#[test]
fn init_writes_its_file_beside_rows_that_have_to_be_corrected() {
    let project = Project::new();
    Tokenizer::train().checkpoint("qwen2", &project.path("model"));
    let good = r#"{"instruction": "Who?", "output": "Pip."}"#;
    for bad in [
        r#"{"instuction": "Who?", "output": "Pip."}"#,
        r#"{"instruction": null, "output": "Pip."}"#,
        r#"{"instruction": "Who?"}"#,
    ] {
        project.write("rows.jsonl", &format!("{good}\n{bad}\n{good}\n"));
        init(&project, "rows.jsonl", &[])
            .ends_with(0)
            .warns("`rows.jsonl`, line 2")
            .warns("until these rows are as they should be");
        project.run(&["validate", "job.yaml"]).ends_with(2).warns("`rows.jsonl`, line 2");
    }
    project.write("rows.jsonl", &format!("{good}\n").repeat(24));
    project.run(&["run", "job.yaml", "--smoke"]).ends_with(0);
}

#[test]
fn a_checkpoint_gets_its_chat_template_beside_bad_rows_too() {
    let project = Project::new();
    Tokenizer::train().checkpoint("qwen2", &project.path("model"));
    fs::remove_file(project.path("model/chat_template.jinja")).unwrap();
    let good = r#"{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Pip."}]}"#;
    project.write("rows.jsonl", &format!("{good}\n{{\"messages\": 7}}\n{good}\n"));
    let ran = init(&project, "rows.jsonl", &[]).ends_with(0).warns("until these rows are as they should be");
    assert!(!ran.stderr.contains("no-chat-template"), "{ran}");
    let text = fs::read_to_string(project.path("job.yaml")).unwrap();
    assert!(text.contains("chat_template: chatml") && text.contains("uses: add_tokens"), "{text}");
    let ran = project.run(&["validate", "job.yaml"]).ends_with(2).reports("bad-row");
    assert!(!ran.stderr.contains("no-chat-template"), "{ran}");
    // What is wrong with a file that is not written has no place in it.
    fs::create_dir(project.path("broken")).unwrap();
    project.write("broken/config.json", "{}");
    let arguments = ["init", "other.yaml", "--data", "rows.jsonl", "--model", "./broken"];
    let ran = project.run(&arguments).ends_with(2).warns("nothing is written");
    assert!(!ran.stderr.contains("other.yaml:") && !project.path("other.yaml").exists(), "{ran}");
}

/// Columns are chosen in a file that is there, or by an option.
#[test]
fn init_helps_where_columns_do_not_say_what_a_row_is() {
    let project = Project::new();
    Tokenizer::train().checkpoint("qwen2", &project.path("model"));
    let text = || fs::read_to_string(project.path("job.yaml")).unwrap();
    project.write("odd.csv", &("Review Text,Star-Rating \n".to_owned() + &"Good.,5\n".repeat(24)));
    init(&project, "odd.csv", &[]).ends_with(0).warns("columns are chosen").warns("--columns prompt=");
    let example = "    #   template: none, column_map: { input: \"Review Text\", output: \"Star-Rating \" },\n";
    assert!(text().contains(example), "{}", text());
    project.run(&["validate", "job.yaml"]).ends_with(2).reports("unclear-rows");
    init(&project, "odd.csv", &["--columns", "prompt=Review Text,response=Star-Rating "]).ends_with(0);
    project.run(&["run", "job.yaml", "--smoke"]).ends_with(0);
    init(&project, "odd.csv", &["--columns", "prompt=Stars,response=Review Text"])
        .ends_with(2)
        .warns("no column `Stars`");
    init(&project, "odd.csv", &["--columns", "prompt=Review Text"]).ends_with(2).warns("make no rows");
    // Names of another case are these names.
    project.write("named.jsonl", &"{\"Prompt\": \"Who?\", \"Response\": \"Pip.\"}\n".repeat(24));
    init(&project, "named.jsonl", &[]).ends_with(0);
    project.run(&["run", "job.yaml", "--smoke"]).ends_with(0);
    // Rows under a key of one object.
    let turns = json!([{ "role": "user", "content": "Who?" }, { "role": "assistant", "content": "Pip." }]);
    let held = json!({ "data": vec![json!({ "messages": turns }); 24] });
    project.write("held.json", &held.to_string());
    init(&project, "held.json", &[]).ends_with(0).warns("`field: data`");
    assert!(text().contains("    #   field: data,\n"), "{}", text());
    project.edit("job.yaml", "with: { source:", "with: { field: data, source:");
    project.run(&["run", "job.yaml", "--smoke"]).ends_with(0);
}

/// What `--columns` names is what `dataset` reads, whatever else the data has.
#[test]
fn init_reads_the_columns_that_are_chosen() {
    let project = Project::new();
    Tokenizer::train().checkpoint("qwen2", &project.path("model"));
    let turn = |role: &str, content: &str| json!({ "role": role, "content": content });
    let turns = json!([turn("user", "Who?"), turn("assistant", "Pip.")]);
    let row = json!({ "messages": turns, "text": "All of Pip.", "before": [turn("user", "Where?")],
        "after": [turn("assistant", "Here.")], "chosen": "Yes.", "rejected": "No." });
    project.write("rows.jsonl", &format!("{row}\n").repeat(24));
    for (columns, recipe, said) in [
        ("text=text", "pretrain", "All of Pip."),
        ("messages=messages", "lora", "Who?"),
        ("prompt=before,response=after", "lora", "Here."),
        ("prompt=text,chosen=chosen,rejected=rejected", "dpo", "All of Pip."),
    ] {
        init(&project, "rows.jsonl", &["--columns", columns]).ends_with(0);
        let text = fs::read_to_string(project.path("job.yaml")).unwrap();
        assert!(text.starts_with(&format!("# Written by `pipeline init`: `{recipe}`")), "{columns}:\n{text}");
        let stage = if recipe == "dpo" { "pairs" } else { "rows" };
        project.run(&["run", "job.yaml", "--until", stage]).ends_with(0);
        let output = format!("{stage}.train");
        project.run(&["show", "job.yaml", &output, "--rows", "1"]).ends_with(0).says(said);
    }
    let judged = ["--columns", "completion=text", "--columns", "label=chosen"];
    init(&project, "rows.jsonl", &judged).ends_with(2).warns("the data has pairs of responses");
    init(&project, "rows.jsonl", &["--columns", "prompt=text,prompt=chosen,response=after"])
        .ends_with(2)
        .warns("`--columns` names `prompt` twice");
    init(&project, "rows.jsonl", &["--columns", "prompt=text", "--columns", "response=chosen,completion=rejected"])
        .ends_with(2)
        .warns("names `response` and `completion`, which are the same");
}

/// Commands can be typed as they are shown, and what options say is not told again.
#[test]
fn init_shows_commands_for_the_shell() {
    let project = Project::new();
    write_rows(&project);
    Tokenizer::train().checkpoint("qwen2", &project.path("model"));
    let arguments = ["init", "my job.yaml", "--data", "rows.jsonl", "--model", "./model"];
    project.run(&arguments).ends_with(0).warns("`pipeline run 'my job.yaml' --smoke`");
    let text = fs::read_to_string(project.path("my job.yaml")).unwrap();
    assert!(text.contains("#   pipeline run 'my job.yaml'"), "{text}");
    fs::remove_file(project.path("model/chat_template.jinja")).unwrap();
    let ran = project.run(&[&arguments[..], &["--overwrite"]].concat()).ends_with(0);
    ran.warns("`pipeline export 'my job.yaml' wider.model FOLDER`");
    let text = fs::read_to_string(project.path("my job.yaml")).unwrap();
    assert!(text.contains("#   pipeline export 'my job.yaml' wider.model FOLDER"), "{text}");
    let arguments = ["init", "--data", "owner/name", "--model", "gpt2"];
    let ran = project.run(&arguments);
    assert!(!ran.stderr.contains("taken for"), "{ran}");
}

/// A folder of rows is not published into.
#[test]
fn init_publishes_nothing_into_what_it_reads() {
    let project = Project::new();
    write_rows(&project);
    Tokenizer::train().checkpoint("qwen2", &project.path("model"));
    fs::create_dir(project.path("rows")).unwrap();
    fs::rename(project.path("rows.jsonl"), project.path("rows/rows.jsonl")).unwrap();
    let arguments = ["init", "rows/j.yaml", "--data", "rows", "--model", "./model"];
    project.run(&arguments).ends_with(0).warns("publishes nothing");
    let text = fs::read_to_string(project.path("rows/j.yaml")).unwrap();
    assert!(!text.contains("\npublish:") && text.contains("pipeline export j.yaml merged FOLDER"), "{text}");
    project.run(&["validate", "rows/j.yaml"]).ends_with(0);
    project.run(&["run", "rows/j.yaml", "--smoke"]).ends_with(0);
}

/// Compressed files, quoted headers, several files: `init` reads them with the readers of `dataset`.
#[test]
fn init_reads_what_dataset_reads() {
    let project = Project::new();
    Tokenizer::train().checkpoint("qwen2", &project.path("model"));
    let table = "\"question\",\"answer\"\n".to_owned() + &"\"Who, Pip?\",\"Pip.\"\n".repeat(100);
    let mut compressed = GzEncoder::new(File::create(project.path("faq.csv.gz")).unwrap(), Compression::fast());
    compressed.write_all(table.as_bytes()).unwrap();
    compressed.finish().unwrap();
    fs::create_dir(project.path("parts")).unwrap();
    let pair = "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n";
    project.write("parts/1.jsonl", &pair.repeat(30));
    project.write("parts/2.jsonl", &pair.repeat(40));
    for (data, recipe, rows) in
        [("faq.csv.gz", "lora", 100), ("parts", "dpo", 70), ("parts/*.jsonl", "dpo", 70), ("parts/2.jsonl", "dpo", 40)]
    {
        init(&project, data, &[]).ends_with(0);
        let text = fs::read_to_string(project.path("job.yaml")).unwrap();
        assert!(text.contains(&format!("`{recipe}`")) && text.contains(&format!("{rows} rows")), "{text}");
        project.run(&["run", "job.yaml", "--smoke"]).ends_with(0);
    }
}

/// All that belongs to the prompt is read, and what is not read is named.
#[test]
fn init_reads_all_that_a_prompt_is_made_of() {
    let project = Project::new();
    Tokenizer::train().checkpoint("qwen2", &project.path("model"));
    let turn = |role: &str, content: &str| json!({ "role": role, "content": content });
    let turns = json!([turn("user", "Who?"), turn("assistant", "Pip.")]);
    let tools = json!([{ "type": "function", "function": { "name": "clock" } }]);
    let share_gpt = json!([{ "from": "human", "value": "Who?" }, { "from": "gpt", "value": "Pip." }]);
    let written = |row: Value| {
        project.write("rows.jsonl", &format!("{row}\n").repeat(24));
        let ran = init(&project, "rows.jsonl", &[]).ends_with(0);
        project.run(&["run", "job.yaml", "--until", "rows"]).ends_with(0);
        let shown = project.run(&["show", "job.yaml", "rows.train", "--rows", "1"]).ends_with(0).stdout;
        (ran, fs::read_to_string(project.path("job.yaml")).unwrap(), shown)
    };
    let (ran, text, shown) = written(json!({ "messages": turns, "tools": tools, "id": 7, "topic": "names" }));
    ran.warns("not read: the columns `id`, `topic`");
    assert!(text.contains("# Not read: the columns `id`, `topic`.") && shown.contains("clock"), "{text}\n{shown}");
    let (_, _, shown) = written(json!({ "conversations": share_gpt, "system": "Be brief." }));
    assert!(shown.contains("Be brief."), "{shown}");
    let history = json!([["Hello?", "Hello <you>."]]);
    let alpaca =
        json!({ "instruction": "Who?", "input": "", "output": "Pip.", "system": "Be kind.", "history": history });
    let (ran, _, shown) = written(alpaca);
    assert!(!ran.stderr.contains("not read"), "{ran}");
    for said in ["Be kind.", "Hello?", "Hello <you>.", "Who?", "Pip."] {
        assert!(shown.contains(said), "`{said}`:\n{shown}");
    }
    let dolly = json!({ "instruction": "Who?", "context": "Pip is here.", "response": "Pip.", "category": "qa" });
    let (ran, _, shown) = written(dolly);
    assert!(shown.contains("Who?\n") && shown.contains("Pip is here."), "{shown}");
    ran.warns("not read: the column `category`");
    // TRL's prompts and completions as turns.
    let (_, text, shown) = written(json!({ "prompt": [turns[0]], "completion": [turns[1]] }));
    assert!(!text.contains("map:") && shown.contains("Who?") && shown.contains("Pip."), "{text}\n{shown}");
    project.run(&["run", "job.yaml", "--smoke"]).ends_with(0);
}

#[test]
fn a_checkpoint_without_a_chat_template_gets_one() {
    let project = Project::new();
    write_rows(&project);
    Tokenizer::train().checkpoint("qwen2", &project.path("model"));
    fs::remove_file(project.path("model/chat_template.jinja")).unwrap();
    let added = "the model has no chat template: ChatML's `<|im_start|>` and `<|im_end|>` are added to it";
    init(&project, "rows.jsonl", &[]).ends_with(0).warns(added);
    let text = fs::read_to_string(project.path("job.yaml")).unwrap();
    assert_eq!(text.matches("chat_template: chatml").count(), 5, "{text}");
    assert_eq!((text.matches("uses: add_tokens").count(), text.matches(": wider").count()), (1, 5), "{text}");
    // The adapter's own base is named beside it.
    let beside = "  #   pipeline export job.yaml wider.model FOLDER\n  adapter.adapter: ./out/job/adapter\n";
    assert!(text.contains(beside), "{text}");
    project.run(&["validate", "job.yaml"]).ends_with(0);
    for recipe in ["full", "qlora", "qat", "lora"] {
        init(&project, "rows.jsonl", &["--purpose", recipe]).ends_with(0).warns(added);
        let sizes: &[&str] = if recipe == "qat" { &["tuned.quantize.group_size=16"] } else { &[] };
        project.run(&[&["run", "job.yaml", "--smoke"], sizes].concat()).ends_with(0);
    }
    // Tools and calls are written, too.
    let call = json!({ "type": "function", "function": { "name": "clock", "arguments": "{}" } });
    let turns = json!([{ "role": "user", "content": "When?" }, { "role": "assistant", "tool_calls": [call] }]);
    let row = json!({ "messages": turns, "tools": [{ "type": "function", "function": { "name": "clock" } }] });
    project.write("calls.jsonl", &format!("{row}\n").repeat(24));
    init(&project, "calls.jsonl", &[]).ends_with(0).warns(added);
    project.run(&["run", "job.yaml", "--smoke"]).ends_with(0);
    let plain = "ChatML's `<|im_start|>` and `<|im_end|>` are no tokens of it";
    init(&project, "rows.jsonl", &["--purpose", "distillation"]).ends_with(0).warns(plain);
    init(&project, "rows.jsonl", &[]).ends_with(0);
    // What the model has is not added once more.
    project.run(&["run", "job.yaml", "--until", "wider"]).ends_with(0);
    project.run(&["export", "job.yaml", "wider.model", "known"]).ends_with(0);
    fs::rename(project.path("model"), project.path("before")).unwrap();
    fs::rename(project.path("known"), project.path("model")).unwrap();
    let ran = init(&project, "rows.jsonl", &[]).ends_with(0);
    assert!(!ran.stderr.contains("are added"), "{ran}");
    fs::remove_dir_all(project.path("model")).unwrap();
    fs::rename(project.path("before"), project.path("model")).unwrap();
    // Whether responses are turns, only the rows themselves say.
    let turn = |role: &str, content: &str| json!({ "role": role, "content": content });
    let turns = json!([turn("user", "Who?"), turn("assistant", "Pip.")]);
    let of_share_gpt = json!({ "conversations": [{ "from": "human", "value": "Who?" }],
        "chosen": { "from": "gpt", "value": "Pip." }, "rejected": { "from": "gpt", "value": "No." } });
    for (recipe, row) in [
        ("dpo", of_share_gpt),
        ("dpo", json!({ "messages": turns, "rejected_response": "No." })),
        ("kto", json!({ "messages": turns, "kto_tag": true })),
    ] {
        // As many good as bad responses.
        let other = row.to_string().replace("true", "false");
        project.write("turns.jsonl", &format!("{row}\n{other}\n").repeat(12));
        init(&project, "turns.jsonl", &[]).ends_with(0);
        let text = fs::read_to_string(project.path("job.yaml")).unwrap();
        assert!(text.contains(&format!("`{recipe}`")) && text.contains("chat_template: chatml"), "{text}");
        project.run(&["run", "job.yaml", "--smoke"]).ends_with(0);
    }
    project.write("pairs.jsonl", &"{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n".repeat(24));
    init(&project, "pairs.jsonl", &[]).ends_with(0);
    assert!(!fs::read_to_string(project.path("job.yaml")).unwrap().contains("chatml"));
}

#[test]
fn init_looks_at_the_machine() {
    let project = Project::new();
    write_rows(&project);
    let tools = FakeTools::new();
    tools.npu_smi("910b3x8.info.txt", "910b3x8.topo.txt");
    let arguments = ["init", "--data", "rows.jsonl"];
    let mut command = project.command(&arguments);
    tools.give_to(&mut command);
    Ran::of(command, &arguments).ends_with(0);
    let text = fs::read_to_string(project.path("pipeline.yaml")).unwrap();
    assert!(text.contains("8 × Ascend 910B3 of 64.0 GiB"), "{text}");
    for line in ["  model: Qwen/Qwen2.5-7B-Instruct", "    resources: { count: all }", "      micro_batch_size: 8"] {
        assert!(text.lines().any(|written| written == line), "lacks `{line}`:\n{text}");
    }
}

#[test]
fn on_a_terminal_init_asks() {
    let project = Project::new();
    write_rows(&project);
    project.run(&["init"]).ends_with(2).warns("`--data` is not given");
    let (person, program) = pseudo_terminal();
    let mut command = project.command(&["init"]);
    command.env("TERM", "xterm").stdin(program.try_clone().unwrap());
    command.stdout(program.try_clone().unwrap()).stderr(program);
    let mut child = command.spawn().unwrap();
    drop(command);
    let mut person = File::from(person);
    person.write_all(b"rows.jsonl\nsweep\n\n").unwrap();
    let mut shown = Vec::new();
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = person.read(&mut bytes) {
        shown.extend_from_slice(&bytes[..count]);
    }
    let shown = String::from_utf8_lossy(&shown);
    assert!(child.wait().unwrap().success(), "{shown}");
    assert!(shown.contains("What for: lora, dora"), "{shown}");
    let text = fs::read_to_string(project.path("pipeline.yaml")).unwrap();
    assert!(text.contains("matrix:") && text.contains("name: pipeline"), "{text}");
}

#[test]
fn where_a_recipe_is_run_by_its_name_it_is_said_how_it_becomes_a_file() {
    let project = Project::new();
    for command in [&["run", "lora"][..], &["plan", "lora"], &["show", "lora", "tokens"]] {
        project.run(command).ends_with(2).reports("file-missing").warns("`pipeline cp lora lora.yaml`");
    }
    let other = project.run(&["run", "job.yaml"]).ends_with(2);
    assert!(!other.stderr.contains("pipeline cp"), "{other}");
    project.run(&["cp", "lora", "lora.yaml"]).ends_with(0);
    let copied = project.run(&["run", "lora"]).ends_with(2).warns("`lora.yaml`");
    assert!(!copied.stderr.contains("pipeline cp"), "{copied}");
}

#[test]
fn a_wrong_answer_is_asked_for_again() {
    let project = Project::new();
    write_rows(&project);
    Tokenizer::train().checkpoint("qwen2", &project.path("model"));
    let answered = |answers: &str| {
        let mut session = Session::start(&project.command(&["init"]), &[]);
        session.press(answers);
        session.end()
    };
    let (code, shown) =
        answered("nofile\n./absent.jsonl\nrows.jsonl\nscaling\nlora\n./absent\n./rows.jsonl/x\n./model\n");
    assert_eq!(code, Some(0), "{shown}");
    for wrong in ["no file `nofile`", "no file `./absent.jsonl`", "`scaling` is not made", "no folder `./absent`"] {
        assert!(shown.contains(wrong), "lacks `{wrong}`:\n{shown}");
    }
    assert!(fs::read_to_string(project.path("pipeline.yaml")).unwrap().contains("model: ./model"));
    fs::remove_file(project.path("pipeline.yaml")).unwrap();
    let (code, shown) = answered("one\ntwo\nthree\n");
    assert_eq!((code, shown.matches("Your rows").count()), (Some(2), 3), "{shown}");
    // What is typed and is not here is said to be of a hub, once.
    let (_, shown) = answered("owner/name\nlora\ngpt2\n");
    let said =
        ["taken for a data set of the Hub", "taken for a model of the Hub"].map(|text| shown.matches(text).count());
    assert_eq!(said, [1, 1], "{shown}");
}
