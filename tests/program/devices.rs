//! `pipeline devices` and `pipeline devices doctor`, on stand-ins for the vendors' tools.

use serde_json::Value;
use test_harness::test;

use crate::support::fake_tools::{FakeTools, block};
use crate::support::{Project, Ran};

fn devices(tools: &FakeTools, arguments: &[&str], variables: &[(&str, &str)]) -> Ran {
    in_project(&Project::new(), tools, arguments, variables)
}

fn in_project(project: &Project, tools: &FakeTools, arguments: &[&str], variables: &[(&str, &str)]) -> Ran {
    let arguments = [&["devices"], arguments].concat();
    let mut command = project.command(&arguments);
    tools.give_to(&mut command);
    command.envs(variables.iter().copied());
    Ran::of(command, &arguments)
}

#[track_caller]
fn follows_schema(answer: &Value, schema: &str) {
    let path = format!("{}/devices/{schema}", env!("CARGO_MANIFEST_DIR"));
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> =
        validator.iter_errors(answer).map(|error| format!("{}: {error}", error.instance_path())).collect();
    assert!(errors.is_empty(), "{}\n{answer:#}", errors.join("\n"));
}

fn checks(answer: &Value) -> Vec<(&str, &str)> {
    let findings = answer["findings"].as_array().unwrap();
    findings.iter().map(|finding| (finding["severity"].as_str().unwrap(), finding["check"].as_str().unwrap())).collect()
}

#[test]
fn a_machine_with_a_processor_alone() {
    let tools = FakeTools::new();
    let ran = devices(&tools, &[], &[]).ends_with(0).says("cpu").says("no GPU or NPU");
    ran.says("CPU kernels: f32 with ");
    let named = [("PIPELINE_CPU_KERNELS", "portable")];
    let ran = devices(&tools, &[], &named).ends_with(0);
    ran.says("CPU kernels: f32 with portable, bf16 with portable, named by PIPELINE_CPU_KERNELS");
    let unknown = devices(&tools, &[], &[("PIPELINE_CPU_KERNELS", "sse")]).ends_with(0);
    unknown.says("CPU kernels: PIPELINE_CPU_KERNELS names `sse`, which is no set of instructions");
    let answer = devices(&tools, &["--format", "json"], &[]).ends_with(0).json();
    follows_schema(&answer, "inventory.schema.json");
    assert_eq!(answer["devices"].as_array().unwrap().len(), 1);
    assert_eq!(answer["devices"][0]["kind"], "cpu");
    assert!(answer["devices"][0]["memory_total"].as_u64().unwrap() > 0);
    assert_eq!(answer["cpu_kernels"]["named"], false);
    let answer = devices(&tools, &["--format", "json"], &named).ends_with(0).json();
    assert_eq!((&answer["cpu_kernels"]["bf16"], &answer["cpu_kernels"]["named"]), (&"portable".into(), &true.into()));
}

#[test]
fn eight_npus_and_their_links() {
    let tools = FakeTools::new();
    tools.npu_smi("910b3x8.info.txt", "910b3x8.topo.txt");
    let ran = devices(&tools, &[], &[]).ends_with(0);
    let ran = ran.says("npu:7   Ascend 910B3").says("64.0 GiB").says("102 W").says("0000:c1:00.0").says("144-167");
    ran.says("HCCS  HCCS, directly or through its switch").says("not yet run on hardware: npu");
    let answer = devices(&tools, &["--format", "json"], &[]).ends_with(0).json();
    follows_schema(&answer, "inventory.schema.json");
    let npus: Vec<&Value> =
        answer["devices"].as_array().unwrap().iter().filter(|device| device["kind"] == "npu").collect();
    assert_eq!(npus.len(), 8);
    assert_eq!(npus[1]["memory_free"], (65536u64 - 3314) << 20);
    let links = answer["links"].as_array().unwrap();
    assert_eq!(links.len(), 28);
    assert!(links.iter().all(|link| link["link"] == "HCCS"));
    assert!(answer["not_yet_run_on_hardware"].as_array().unwrap().contains(&"npu".into()));
}

#[test]
fn sick_and_busy_npus() {
    let tools = FakeTools::new();
    tools.npu_smi("910b-sick.info.txt", "910b3x8.topo.txt");
    let ran = devices(&tools, &[], &[]).ends_with(0);
    ran.says("alarm").says("npu:3 is in use by process 20481 python (57.2 GiB)").says("Please reinstall it.");
    let answer = devices(&tools, &["doctor", "--format", "json"], &[]).ends_with(1).json();
    let found = checks(&answer);
    for check in [
        ("error", "device-health"),
        ("warning", "device-health"),
        ("warning", "memory-taken"),
        ("warning", "tool-failed"),
    ] {
        assert!(found.contains(&check), "{check:?} is not in {found:?}");
    }
}

#[test]
fn gpus_of_both_vendors() {
    let tools = FakeTools::new();
    tools.answers(
        "nvidia-smi",
        &[
            ("--query-gpu*", block("nvidia-smi/h100x2.csv").trim_end()),
            ("'topo -m'", "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X "),
        ],
    );
    let (gpus, topo) = (block("rocm-smi/mi300x-x2.json"), block("rocm-smi/mi300x-x2.topo.json"));
    tools.answers("rocm-smi", &[("'--showtopo --json'", &topo), ("*", &gpus)]);
    let ran = devices(&tools, &[], &[]).ends_with(0);
    let ran =
        ran.says("cuda:1  NVIDIA H100 80GB HBM3").says("NV18").says("rocm:0  AMD Instinct MI300X OAM").says("XGMI");
    ran.says("not yet run on hardware: several cuda devices at once").says("not yet run on hardware: rocm");
    let answer = devices(&tools, &["--format", "json"], &[]).ends_with(0).json();
    follows_schema(&answer, "inventory.schema.json");
    assert_eq!(answer["devices"].as_array().unwrap().len(), 5);
}

#[test]
fn a_tool_that_hangs_and_one_that_fails_are_told() {
    let tools = FakeTools::new();
    tools.script("npu-smi", "echo asking the driver; sleep 1000");
    tools.script("rocm-smi", "echo 'Driver not initialized (amdgpu not found in modules)' >&2; exit 2");
    let ran = devices(&tools, &["--tool-timeout", "500ms"], &[]).ends_with(0).says("cpu");
    let ran = ran.says("npu-smi info: it gave no answer within 0.5 s: asking the driver");
    ran.says("rocm-smi: it ended with code 2: Driver not initialized");
    let answer = devices(&tools, &["--format", "json", "--tool-timeout", "500ms"], &[]).ends_with(0).json();
    follows_schema(&answer, "inventory.schema.json");
    devices(&tools, &["doctor", "--tool-timeout", "500ms"], &[])
        .ends_with(1)
        .says("error: `npu-smi info` could not tell all");
}

#[test]
fn the_doctor_knows_the_variables_of_the_migration_guide() {
    let tools = FakeTools::new();
    tools.npu_smi("910b3x8.info.txt", "910b3x8.topo.txt");
    let variables = [
        ("ASCEND_VISIBLE_DEVICES", "0,1,2,3"),
        ("HCCL_WHITELIST_DISABLE", "1"),
        ("HCCL_INTRA_ROCE_SIZE", "8"),
        ("HCCL_CONNECT_TIMEOUT", "60"),
    ];
    let ran = devices(&tools, &["doctor"], &variables).ends_with(1);
    let ran = ran.says("did you mean `HCCL_INTRA_ROCE_ENABLE`, which must be 0 or 1?");
    ran.says("ASCEND_RT_VISIBLE_DEVICES=0,1,2,3")
        .says("an integer from 120 to 7200")
        .says("looked at the CPU; 8 of npu");
    let answer = devices(&tools, &["doctor", "--format", "json"], &variables).ends_with(1).json();
    follows_schema(&answer, "doctor.schema.json");
    assert!(checks(&answer).contains(&("error", "variable-unknown")));
}

#[test]
fn a_machine_with_a_processor_alone_is_well() {
    let ran = devices(&FakeTools::new(), &["doctor"], &[]).ends_with(0).says("looked at the CPU");
    assert!(!ran.stdout.contains("error"), "{ran}");
}

#[test]
fn the_doctor_asks_the_python_of_the_torch_worker() {
    let tools = FakeTools::new();
    tools.npu_smi("910b3x8.info.txt", "910b3x8.topo.txt");
    tools.script(
        "python-of-ours",
        "echo '{\"python\": \"3.11.2\", \"executable\": \"python-of-ours\", \"packages\": {\"torch\": \"2.15.0\", \"torch_npu\": \"2.7.1\", \
         \"transformers\": \"5\", \"peft\": \"0.21\", \"safetensors\": \"0.6\", \"numpy\": \"2\", \"pipeline_torch_worker\": \"\"}}'",
    );
    let answer =
        devices(&tools, &["doctor", "--format", "json"], &[("PIPELINE_PYTHON", "python-of-ours")]).ends_with(1).json();
    follows_schema(&answer, "doctor.schema.json");
    let found = checks(&answer);
    assert!(found.contains(&("error", "torch-npu-version")), "{found:?}");
    assert!(found.contains(&("error", "cann-missing")) || found.contains(&("error", "cann-environment")), "{found:?}");
}

const FILE: &str = "version: 1
name: demo
stages:
  made:
    uses: command
    with:
      run: 'true'
      outputs: { out: files }
      env:
        HCCL_BUFFERSIZE: '200'
        ASCEND_VISIBLE_DEVICES: '0,1'
  big:
    uses: command
    with: { run: 'true', outputs: { out: files } }
    resources: { device: npu, count: 16 }
";

#[test]
fn a_files_variables_and_what_its_stages_ask_for() {
    let (project, tools) = (Project::new(), FakeTools::new());
    project.write("job.yaml", FILE);
    let ran = in_project(&project, &tools, &["doctor", "job.yaml"], &[]).ends_with(1);
    let ran = ran.says("HCCL_BUFFERSIZE=200 at job.yaml:10:26 (stage made)").says("did you mean `HCCL_BUFFSIZE`");
    ran.says("`ASCEND_VISIBLE_DEVICES` chooses devices for a container")
        .says("stage `big` can never have what it requests");
    // What a cluster has is not known here.
    project.edit("job.yaml", "name: demo\n", "name: demo\nexecutor: slurm\n");
    let ran = in_project(&project, &tools, &["doctor", "job.yaml"], &[]).ends_with(1);
    assert!(!ran.stdout.contains("stage-resources"), "{ran}");
}

#[test]
fn a_file_with_mistakes_is_refused() {
    let (project, tools) = (Project::new(), FakeTools::new());
    project.write("job.yaml", "version: 1\nname: demo\nstages: { a: { uses: no_such } }\n");
    in_project(&project, &tools, &["doctor", "job.yaml"], &[]).ends_with(2).warns("no_such");
}
