//! `pipeline export argo` and `export kubernetes`: what is written is of the published schemas, says what the file asks
//! for, holds no secret, and does what the pipeline does: its tasks are run here, each as a pod would, on a machine of
//! its own.
//!
//! And where an output may be copied to.
//!
//! `PIPELINE_MANIFESTS=FOLDER` keeps the manifests that are checked against the schemas, for other checks
//! (docs/kubernetes.md).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};
use test_harness::test;

use crate::support::{self, Project, Ran};

const SECRET: &str = "hf_zq7-correct-horse-battery-9";

/// Everything that a manifest can have to say.
const RICH: &str = r#"
version: 1
name: Rich_Job
remote: { url: s3://team/cache, endpoint: https://minio.example, region: eu-central-1 }
vars: { level: "${env.LEVEL}" }
include: { data: ./common/data.yaml }
stages:
  base:
    uses: download
    with: { repo: owner/name, token_env: OUR_TOKEN }
    retries: 2
    timeout: 30m
  cleaned:
    uses: command
    with:
      run: [sh, "${files.script}", "${inputs.rows}", "${outputs.rows}"]
      inputs: { rows: data/articles }
      files: { script: ./clean.sh }
      outputs: { rows: { kind: rows, template: none, column_map: { input: text, output: text } } }
      env: { LEVEL: "${vars.level}" }
      pass_env: [MY_SECRET]
    resources: { threads: 2, memory: 2GiB }
  tokens:
    uses: tokenize
    with: { dataset: cleaned, tokenizer: base, max_seq_len: 64 }
  adapter:
    uses: train
    with: { model: base, data: tokens, lora: { rank: 8 } }
    matrix: { lora.rank: [4, 16] }
    resources: { device: cuda, count: 4, threads: 8, memory: 40GiB }
    retries: { max: 1, delay: 5s }
  merged:
    uses: merge
    with: { model: base, adapter: adapter }
  asked:
    uses: generate
    with: { model: merged, prompts: ["Who are you?"] }
publish: { merged: "./out/${matrix.lora.rank}" }
"#;

fn rich() -> Project {
    let project = Project::new();
    for folder in ["jobs", "common", "jobs/common"] {
        fs::create_dir_all(project.path(folder)).unwrap();
    }
    project.write("rich.yaml", RICH);
    project.write("clean.sh", "cat \"$1\"/*.jsonl >\"$2\"/rows.jsonl\n");
    let data = "version: 1\nstages: { articles: { uses: dataset, with: { source: ../rows/*.jsonl } } }\n";
    project.write("common/data.yaml", data);
    fs::create_dir_all(project.path("rows")).unwrap();
    project.write("rows/a.jsonl", "{\"text\": \"a\"}\n");
    project.write("rows/b.jsonl", "{\"text\": \"b\"}\n");
    let pins =
        "{\"version\": 1, \"pins\": {\"hub-model:owner/name@main\": \"0123456789abcdef0123456789abcdef01234567\"}}";
    project.write("pipeline.lock", pins);
    project
}

/// Runs `export` with the secrets in the environment.
fn export(project: &Project, kind: &str, file: &str, arguments: &[&str]) -> Ran {
    let all = [&["export", kind, file, "--image", "registry.example/pipeline:1"], arguments].concat();
    let mut command = project.command(&all);
    command.env("OUR_TOKEN", SECRET).env("MY_SECRET", SECRET).env("HF_TOKEN", SECRET).env("LEVEL", "3");
    command.env("AWS_SECRET_ACCESS_KEY", SECRET).env_remove("PIPELINE_REMOTE");
    Ran::of(command, &all)
}

/// The documents of a manifest, by kind.
#[track_caller]
fn documents(ran: &Ran) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    // Texts in a manifest are indented, so only the marks between documents stand at the begin of a line.
    for text in ran.stdout.split("---\n").skip(1) {
        let document: Value = serde_yaml::from_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        found.insert(document["kind"].as_str().unwrap().to_owned(), document);
    }
    found
}

fn templates(workflow: &Value) -> BTreeMap<String, &Value> {
    let templates = workflow["spec"]["templates"].as_array().unwrap();
    templates.iter().map(|template| (template["name"].as_str().unwrap().to_owned(), template)).collect()
}

fn tasks(workflow: &Value) -> Vec<&Value> {
    templates(workflow)["graph"]["dag"]["tasks"].as_array().unwrap().iter().collect()
}

fn texts(values: &Value) -> Vec<String> {
    values.as_array().into_iter().flatten().map(|value| value.as_str().unwrap().to_owned()).collect()
}

/// Keeps a manifest for checks outside these tests.
fn keep(name: &str, ran: &Ran) {
    if let Some(folder) = std::env::var_os("PIPELINE_MANIFESTS") {
        fs::create_dir_all(&folder).unwrap();
        fs::write(Path::new(&folder).join(name), &ran.stdout).unwrap();
    }
}

#[test]
fn manifests_are_of_the_published_schemas() {
    let project = rich();
    let all = [
        "--namespace",
        "training",
        "--service-account",
        "trainer",
        "--node-selector",
        "zone=a",
        "--node-selector",
        "cuda:card=h100",
        "--env",
        "HF_ENDPOINT=https://hub.example",
        "--volume",
        "rows=/mnt/rows",
        "--home-claim",
        "homes",
        "--secret",
        "keys",
    ];
    let manifests = [
        ("plain", "argo", &[][..]),
        ("all", "argo", &all[..]),
        ("plain", "kubernetes", &[]),
        ("all", "kubernetes", &all),
    ];
    let written = manifests.map(|(name, kind, arguments)| {
        let ran = export(&project, kind, "rich.yaml", arguments).ends_with(0);
        keep(&format!("{kind}-{name}.yaml"), &ran);
        ran
    });
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/export/schema.json");
    let schema: Value = serde_json::from_slice(&fs::read(schema).unwrap()).unwrap();
    let errors = |document: &Value| -> Vec<String> {
        let mut schema = schema.clone();
        schema["$ref"] = format!("#/$defs/{}", document["kind"].as_str().unwrap()).into();
        let validator = jsonschema::validator_for(&schema).unwrap();
        validator.iter_errors(document).map(|error| format!("{}: {error}", error.instance_path())).collect()
    };
    for ran in &written {
        let documents = documents(ran);
        assert_eq!(documents.len(), 2, "{ran}");
        for document in documents.values() {
            assert_eq!(errors(document), [""; 0], "{ran}");
        }
        // The schema is one that says no, too.
        let mut wrong = documents.values().last().unwrap().clone();
        wrong["spec"]["activeDeadline"] = 1.into();
        assert_eq!(errors(&wrong).len(), 1);
    }
}

#[test]
fn a_workflow_says_what_the_file_asks_for() {
    let project = rich();
    let ran = export(&project, "argo", "rich.yaml", &["--node-selector", "cuda:card=h100"]).ends_with(0);
    let found = documents(&ran);
    let (workflow, files) = (&found["Workflow"], &found["ConfigMap"]);
    let tasks = tasks(workflow);
    let task =
        |name: &str| *tasks.iter().find(|task| task["name"] == name).unwrap_or_else(|| panic!("no task {name}\n{ran}"));
    let names: BTreeSet<&str> = tasks.iter().map(|task| task["name"].as_str().unwrap()).collect();
    let expected = [
        "adapter-lora-rank-16",
        "adapter-lora-rank-4",
        "asked-lora-rank-16",
        "asked-lora-rank-4",
        "base",
        "cleaned",
        "data-articles",
        "merged-lora-rank-16",
        "merged-lora-rank-4",
        "tokens",
    ];
    assert_eq!(names, BTreeSet::from(expected));
    assert_eq!(texts(&task("merged-lora-rank-4")["dependencies"]), ["base", "adapter-lora-rank-4"]);
    assert_eq!(task("base")["dependencies"], Value::Null);
    let stage = json!([{ "name": "stage", "value": "adapter[lora.rank=4]" }]);
    assert_eq!(task("adapter-lora-rank-4")["arguments"]["parameters"], stage);

    // Children of a sweep are of one template.
    let templates = templates(workflow);
    assert_eq!(templates.len(), 8, "{ran}");
    assert_eq!(task("adapter-lora-rank-4")["template"], task("adapter-lora-rank-16")["template"]);
    let adapter = templates["adapter"];
    let amounts = json!({ "cpu": "8", "nvidia.com/gpu": "4" });
    assert_eq!(adapter["container"]["resources"], json!({ "requests": amounts, "limits": amounts }));
    let amounts = json!({ "cpu": "2", "memory": "2560Mi" });
    assert_eq!(templates["cleaned"]["container"]["resources"]["limits"], amounts, "with room for the run itself");
    assert_eq!(adapter["nodeSelector"], json!({ "card": "h100" }));
    assert_eq!(adapter["tolerations"][0]["key"], "nvidia.com/gpu");
    assert_eq!(adapter["retryStrategy"]["limit"], "1");
    assert_eq!(adapter["retryStrategy"]["backoff"]["duration"], "5s");
    assert_eq!(adapter["activeDeadlineSeconds"], Value::Null);
    let mounts = |template: &Value| template["container"]["volumeMounts"].to_string();
    assert!(mounts(adapter).contains("/dev/shm"));
    assert!(!mounts(templates["base"]).contains("/dev/shm"));
    // Three tries of 30 min and 10 s, waits of 2 s and 4 s, and an hour.
    assert_eq!(templates["base"]["activeDeadlineSeconds"], 3 * 1810 + 6 + 3600);
    assert_eq!(templates["base"]["nodeSelector"], Value::Null);
    assert_eq!(templates["asked"]["retryStrategy"], Value::Null);

    let data = files["data"].as_object().unwrap();
    assert_eq!(data.len(), 6, "the file, the included one, two of rows, the script, the pins: {data:?}");
    assert_eq!(data["rich-yaml"], RICH);
    let volumes = workflow["spec"]["volumes"].as_array().unwrap();
    let volume = volumes.iter().find(|volume| volume["name"] == "files").unwrap();
    assert_eq!(volume["configMap"]["name"], files["metadata"]["name"]);
    let paths: BTreeSet<&str> =
        volume["configMap"]["items"].as_array().unwrap().iter().map(|item| item["path"].as_str().unwrap()).collect();
    let expected = ["clean.sh", "common/data.yaml", "pipeline.lock", "rich.yaml", "rows/a.jsonl", "rows/b.jsonl"];
    assert_eq!(
        paths,
        expected.iter().map(|path| format!("job/{path}")).collect::<Vec<_>>().iter().map(String::as_str).collect()
    );
}

#[test]
fn secrets_are_named_and_never_written() {
    let project = rich();
    for kind in ["argo", "kubernetes"] {
        let ran = export(&project, kind, "rich.yaml", &["--secret", "keys"]).ends_with(0);
        assert!(!ran.stdout.contains(SECRET) && !ran.stderr.contains(SECRET), "{ran}");
        let found = documents(&ran);
        let containers = match kind {
            "argo" => {
                templates(&found["Workflow"]).into_iter().map(|(name, of)| (name, of["container"].clone())).collect()
            }
            _ => {
                BTreeMap::from([("job".to_owned(), found["Job"]["spec"]["template"]["spec"]["containers"][0].clone())])
            }
        };
        let variables = |template: &str| -> BTreeMap<String, Value> {
            let env = containers[template]["env"].as_array().unwrap();
            env.iter().map(|entry| (entry["name"].as_str().unwrap().to_owned(), entry.clone())).collect()
        };
        let (of_base, of_command) = if kind == "argo" { ("base", "cleaned") } else { ("job", "job") };
        let reference = json!({ "name": "keys", "key": "OUR_TOKEN" });
        assert_eq!(variables(of_base)["OUR_TOKEN"]["valueFrom"]["secretKeyRef"], reference);
        assert_eq!(variables(of_command)["MY_SECRET"]["valueFrom"]["secretKeyRef"]["key"], "MY_SECRET");
        let of_remote = &variables(of_base)["AWS_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"];
        assert_eq!(of_remote["optional"], true, "a role of the service account may open the bucket");
        assert_eq!(variables(of_command)["LEVEL"]["value"], "3");
        if kind == "argo" {
            assert!(!variables("cleaned").contains_key("OUR_TOKEN"), "a pod gets what its own stage names");
        }
        assert!(ran.stdout.contains("# The Secret `keys` contains: AWS_ACCESS_KEY_ID,"), "{ran}");
    }
}

/// A machine that has what a pod has, and nothing else.
struct Pod {
    folder: tempfile::TempDir,
}

impl Pod {
    /// With the files of a ConfigMap where the volume says.
    fn new(config_map: &Value, volumes: &Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let volumes = volumes.as_array().unwrap();
        let volume = volumes.iter().find(|volume| volume["name"] == "files").unwrap();
        for item in volume["configMap"]["items"].as_array().unwrap() {
            let path = folder.path().join("files").join(item["path"].as_str().unwrap());
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, config_map["data"][item["key"].as_str().unwrap()].as_str().unwrap()).unwrap();
        }
        Self { folder }
    }

    /// Runs a container's command, with its parameters filled in.
    fn run(&self, container: &Value, stage: Option<&str>) -> Ran {
        let root = self.folder.path().display().to_string();
        let place = |text: String| {
            text.replace("/pipeline/", &format!("{root}/"))
                .replace("{{inputs.parameters.stage}}", stage.unwrap_or_default())
        };
        assert_eq!(container["command"], json!(["pipeline"]));
        let arguments: Vec<String> = texts(&container["args"]).into_iter().map(place).collect();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut command = support::program(self.folder.path());
        command.args(&arguments).env_remove("PIPELINE_REMOTE");
        Ran::of(command, &arguments)
    }
}

/// A project whose results are shared in a folder.
fn shared() -> (Project, String) {
    let project = Project::with_pipeline("train.yaml");
    project.edit("train.yaml", "epochs: 20", "epochs: 2");
    fs::create_dir(project.path("shared")).unwrap();
    let folder = project.path("shared").display().to_string();
    project.edit("train.yaml", "name: train", &format!("name: train\nremote: {folder}"));
    (project, folder)
}

#[test]
fn the_tasks_of_a_workflow_make_what_the_pipeline_makes() {
    let (project, folder) = shared();
    let volume = format!("cache={folder}");
    let ran = export(&project, "argo", "train.yaml", &["adapter.lora.rank=2,4", "publish=", "--volume", &volume])
        .ends_with(0);
    let found = documents(&ran);
    let workflow = &found["Workflow"];
    let (templates, tasks) = (templates(workflow), tasks(workflow));
    let mut done: BTreeSet<&str> = BTreeSet::new();
    let mut last = None;
    while done.len() < tasks.len() {
        let ready = tasks.iter().find(|task| {
            let waits_for = texts(&task["dependencies"]);
            !done.contains(task["name"].as_str().unwrap())
                && waits_for.iter().all(|before| done.contains(before.as_str()))
        });
        let task = ready.expect("the graph has no cycle");
        let stage = task["arguments"]["parameters"][0]["value"].as_str().unwrap();
        let pod = Pod::new(&found["ConfigMap"], &workflow["spec"]["volumes"]);
        let container = &templates[task["template"].as_str().unwrap()]["container"];
        let ran = pod.run(container, Some(stage)).ends_with(0).warns(&format!("{stage}: done in"));
        assert_eq!(ran.stderr.matches(": done in").count(), 1, "only its own stage: {ran}");
        done.insert(task["name"].as_str().unwrap());
        last = Some((container, stage));
    }
    assert_eq!(done.len(), 12, "{done:?}");
    // Again: nothing runs, and nothing is fetched that nobody reads.
    let (container, stage) = last.unwrap();
    let pod = Pod::new(&found["ConfigMap"], &workflow["spec"]["volumes"]);
    let again = pod.run(container, Some(stage)).ends_with(0).warns("nothing to do");
    assert!(!again.stderr.contains("fetch"), "{again}");
    // Whoever runs the file has the results, and publishes them.
    let here = project
        .run(&["run", "train.yaml", "adapter.lora.rank=2,4", "publish.merged=./out/${matrix.lora.rank}"])
        .ends_with(0);
    assert!(!here.stderr.contains(": running"), "{here}");
    assert!(project.path("out/4/model.safetensors").is_file(), "{here}");
}

#[test]
fn a_job_runs_the_whole_file() {
    let (project, folder) = shared();
    let volume = format!("cache={folder}");
    let found = documents(&export(&project, "kubernetes", "train.yaml", &["--volume", &volume]).ends_with(0));
    let job = &found["Job"]["spec"];
    let pod = Pod::new(&found["ConfigMap"], &job["template"]["spec"]["volumes"]);
    let container = &job["template"]["spec"]["containers"][0];
    let ran = pod.run(container, None).ends_with(0);
    assert!(!ran.stderr.contains("published"), "a folder of a pod goes with it: {ran}");
    let here = project.run(&["run", "train.yaml"]).ends_with(0).warns("merged: published to out/model");
    assert!(!here.stderr.contains(": running"), "{here}");
}

#[test]
fn a_task_whose_result_cannot_be_handed_over_fails() {
    let (project, folder) = shared();
    fs::remove_dir(&folder).unwrap();
    let ran = project.run(&["run", "train.yaml", "--only", "text", "--hand-over"]).ends_with(3);
    ran.warns("nothing can be handed over through the shared cache").warns("text: done in");
    // What it was to take may be there: that is no mistake of the file.
    project.run(&["run", "train.yaml", "--only", "merged", "--hand-over"]).ends_with(3);
    fs::create_dir(&folder).unwrap();
    project.run(&["run", "train.yaml", "--only", "merged", "--hand-over"]).ends_with(2).warns("has no result");
    // What was here before goes there as well: another task counts on it.
    let list = |folder: &str| fs::read_dir(format!("{folder}/results")).map_or(0, |entries| entries.count());
    project.run(&["run", "train.yaml", "--only", "text", "--hand-over"]).ends_with(0).warns("nothing to do");
    assert!(list(&folder) > 0);
    fs::remove_dir_all(format!("{folder}/results")).unwrap();
    project.run(&["run", "train.yaml", "--only", "text", "--hand-over"]).ends_with(0);
    assert!(list(&folder) > 0);
    let (unshared, _) = shared();
    unshared.edit("train.yaml", "remote: ", "# remote: ");
    unshared.run(&["run", "train.yaml", "--hand-over"]).ends_with(2).warns("no shared cache is named");
}

#[test]
fn what_no_pod_can_do_is_refused_with_what_to_do() {
    let project = Project::with_pipeline("data.yaml");
    let refused = |kind: &str, arguments: &[&str], says: &[&str]| {
        let ran = export(&project, kind, "data.yaml", arguments).ends_with(2);
        assert_eq!(ran.stdout, "", "{ran}");
        // Messages are broken at the width of the terminal.
        let said = ran.stderr.replace('│', " ").split_whitespace().collect::<Vec<_>>().join(" ");
        says.iter().for_each(|text| assert!(said.contains(text), "lacks `{text}`:\n{ran}"));
    };
    let remote = ["--remote", "s3://team/cache"];
    let with = |arguments: &[&'static str]| [&remote[..], arguments].concat();
    refused("argo", &[], &["data.yaml names no shared cache", "(data.yaml:1:1)", "remote: s3://bucket/prefix"]);
    refused("kubernetes", &[], &["what a pod makes goes with it", "--home-claim"]);
    refused("argo", &["--remote", "/srv/cache"], &["is a folder of this machine", "--volume CLAIM=/srv/cache"]);
    refused("argo", &with(&["text.source=/data/rows.jsonl"]), &["there is no file"]);
    refused("argo", &with(&["text.resources.device=metal"]), &["Metal device", "data.yaml:8:11"]);
    let all = with(&["text.resources.device=npu", "text.resources.count=all"]);
    refused("argo", &all, &["`count: all`", "text.resources.count=8"]);
    refused("argo", &with(&["text.resources.nodes=2"]), &["several nodes", "data.yaml:8:11"]);
    refused("argo", &with(&["name=of {{x}}"]), &["which Argo reads as one of its references"]);
    refused("argo", &with(&["--env", "HF_TOKEN=x"]), &["would write a secret", "Secret `pipeline`"]);
    let two = ["text.resources.device=cuda", "fresh.resources.device=npu"];
    refused("kubernetes", &with(&two), &["no pod has both", "export argo"]);

    let absolute = project.path("text.jsonl").display().to_string();
    let source = format!("text.source={absolute}");
    let ran = export(&project, "argo", "data.yaml", &["--remote", "s3://team/cache", &source]).ends_with(2);
    let folder = Path::new(&absolute).parent().unwrap().display().to_string();
    ran.warns("an absolute path that pods do not have").warns("--volume");
    let mounted = format!("sources={folder}");
    let ran = export(&project, "argo", "data.yaml", &["--remote", "s3://team/cache", &source, "--volume", &mounted]);
    assert!(!documents(&ran.ends_with(0))["ConfigMap"]["data"].as_object().unwrap().contains_key("text-jsonl"));

    project.write("large.jsonl", &"{\"text\": \"x\"}\n".repeat(90_000));
    refused(
        "argo",
        &with(&["text.source=./large.jsonl"]),
        &["a ConfigMap has less than 1 MiB", "large.jsonl (1.2 MiB)", "--folder"],
    );
    let ran = export(&project, "argo", "data.yaml", &with(&["text.source=./large.jsonl", "--folder", "/work/job"]))
        .ends_with(0);
    assert_eq!(documents(&ran).len(), 1);
    ran.says("/work/job/data.yaml");
    project.write("hub.yaml", "version: 1\nstages: { base: { uses: download, with: { repo: owner/name } } }\n");
    let ran = export(&project, "argo", "hub.yaml", &["--remote", "s3://team/cache"]).ends_with(2);
    ran.warns("not pinned: owner/name").warns("pipeline lock hub.yaml");
}

#[test]
fn one_file_gives_one_manifest_and_another_file_another() {
    let project = Project::with_pipeline("data.yaml");
    let written = |arguments: &[&str]| {
        let arguments = [&["--remote", "s3://team/cache"], arguments].concat();
        let found = documents(&export(&project, "argo", "data.yaml", &arguments).ends_with(0));
        let name = |kind: &str| found[kind]["metadata"]["name"].as_str().unwrap().to_owned();
        (name("Workflow"), name("ConfigMap"))
    };
    let first = written(&[]);
    assert_eq!(written(&[]), first);
    let overridden = written(&["text_packs.max_seq_len=32"]);
    assert_ne!(overridden.0, first.0);
    assert_eq!(overridden.1, first.1, "the files are the same");
    project.edit("data.yaml", "max_seq_len: 64", "max_seq_len: 48");
    assert_ne!(written(&[]).1, first.1);
    let target = project.path("workflow.yaml");
    let ran =
        export(&project, "argo", "data.yaml", &["--remote", "s3://team/cache", "-o", &target.display().to_string()]);
    assert_eq!(ran.ends_with(0).stdout, "");
    assert!(fs::read_to_string(target).unwrap().contains("kind: Workflow"));
}

#[test]
fn a_manifest_is_not_written_over_the_pipeline_file() {
    let project = Project::with_pipeline("data.yaml");
    let before = fs::read(project.path("data.yaml")).unwrap();
    for kind in ["argo", "kubernetes"] {
        let ran = export(&project, kind, "data.yaml", &["--remote", "s3://team/cache", "-o", "./data.yaml"]);
        ran.ends_with(2).warns("is the pipeline file itself");
    }
    assert_eq!(fs::read(project.path("data.yaml")).unwrap(), before);
}

#[test]
fn an_output_is_copied_to_a_folder_of_its_own_alone() {
    let project = Project::with_pipeline("data.yaml");
    project.run(&["run", "data.yaml", "--until", "text"]).ends_with(0);
    fs::create_dir(project.path("empty")).unwrap();
    symlink("empty", project.path("link")).unwrap();
    symlink("nowhere", project.path("dangling")).unwrap();
    project.write("file", "mine");
    let export = |folder: &str| project.run(&["export", "data.yaml", "text", folder]);
    for (folder, told) in [
        ("link", "`link` is a link"),
        ("link/", "`link` is a link"),
        ("dangling", "`dangling` is a link"),
        ("file", "`file` exists already and is not an empty folder"),
        ("file/x", "`file/x` cannot be made: `file` is not a folder"),
        ("file/x/y", "`file/x/y` cannot be made: `file` is not a folder"),
        ("dangling/x", "`dangling` is not a folder"),
        (".pipeline/x", "`.pipeline/x` is in the home"),
        (".pipeline/store/objects/x", "is in the home"),
        ("link/../.pipeline/x", "is in the home"),
    ] {
        let refused = export(folder).ends_with(2).warns(told);
        assert!(!refused.stderr.contains("os error"), "{refused}");
    }
    assert_eq!(fs::read_to_string(project.path("file")).unwrap(), "mine");
    assert!(!project.path("nowhere").exists() && !project.path(".pipeline/x").exists());
    export("empty").ends_with(0);
    export("new/folder/").ends_with(0);
    for folder in ["empty", "new/folder"] {
        assert!(fs::read_dir(project.path(folder)).unwrap().count() > 0, "{folder}");
    }
}
