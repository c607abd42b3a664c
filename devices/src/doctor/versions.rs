//! Versions that do not go together: driver, toolkit, torch and its extensions. The tables are data, in `data/`.

use std::cmp::Ordering;

use super::python::{AUTOLOAD, Installed};
use super::toolkit::{self, Cann};
use super::{Finding, Severity, Subject};
use crate::DeviceKind;

const TORCH_NPU: &str = include_str!("../../data/torch_npu.txt");
const CUDA: &str = include_str!("../../data/cuda.txt");

/// Looks at what the torch worker would run on.
pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    let mut findings: Vec<Finding> = no_python(subject).into_iter().collect();
    let Some(installed) = &subject.python.installed else { return findings };
    findings.extend(imports(subject, installed));
    findings.extend(missing_packages(subject, installed));
    findings.extend(missing_bitsandbytes(subject, installed));
    if subject.has(DeviceKind::Cuda) {
        findings.extend(cuda(subject, installed));
    }
    if subject.has(DeviceKind::Rocm) {
        findings.extend(rocm(installed));
    }
    let cann = toolkit::cann(subject);
    if subject.has(DeviceKind::Npu) || installed.version("torch_npu").is_some() {
        findings.extend(npu_packages(installed));
        findings.extend(cann_of(installed, cann.as_ref()));
    }
    if subject.has(DeviceKind::Npu) {
        findings.extend(cann_found(subject, cann.as_ref()));
    }
    findings
}

fn finding(severity: Severity, check: &'static str, message: &str, seen: String, help: String) -> Finding {
    Finding { severity, check, message: message.to_owned(), seen, help }
}

/// Whether there is a device that only the torch worker computes on.
fn needs_torch(subject: &Subject) -> bool {
    subject.has(DeviceKind::Npu) || subject.has(DeviceKind::Rocm)
}

fn no_python(subject: &Subject) -> Option<Finding> {
    let problem = subject.python.problem.clone()?;
    let severity = if needs_torch(subject) { Severity::Error } else { Severity::Note };
    let help = "set PIPELINE_PYTHON to the Python that has torch; the native worker needs none".to_owned();
    Some(finding(severity, "python", "the torch worker's Python could not be asked", problem, help))
}

fn imports(subject: &Subject, installed: &Installed) -> Option<Finding> {
    let error = installed.torch_error.as_ref()?;
    let help = if subject.python.imports_without_extensions {
        format!(
            "it imports with {AUTOLOAD}=0, so an extension is to blame: for NPUs `source` CANN's set_env.sh first; elsewhere uninstall torch-npu, or set {AUTOLOAD}=0"
        )
    } else {
        format!("`{} -c 'import torch'` shows the whole of it", installed.executable)
    };
    Some(finding(Severity::Error, "torch-import", "`import torch` fails", error.clone(), help))
}

fn missing_packages(subject: &Subject, installed: &Installed) -> Option<Finding> {
    let needed = ["pipeline_torch_worker", "torch", "transformers", "peft", "safetensors", "numpy"];
    let missing: Vec<&str> = needed.into_iter().filter(|name| installed.version(name).is_none()).collect();
    if missing.is_empty() || (missing.contains(&"torch") && !needs_torch(subject)) {
        return None; // Who never installed torch does not mean to use it.
    }
    // Torch may be there for other work.
    let severity = if needs_torch(subject) { Severity::Error } else { Severity::Note };
    let program = &installed.executable;
    let help = format!("in a checkout of this project: `{program} -m pip install ./workers/torch`");
    let seen = format!("{program} has no {}", missing.join(", "));
    Some(finding(severity, "python-packages", "packages that the torch worker needs are missing", seen, help))
}

fn missing_bitsandbytes(subject: &Subject, installed: &Installed) -> Option<Finding> {
    let has_gpu = subject.has(DeviceKind::Cuda) || subject.has(DeviceKind::Rocm);
    if !has_gpu || installed.version("pipeline_torch_worker").is_none() || installed.version("bitsandbytes").is_some() {
        return None;
    }
    let message =
        "without bitsandbytes, adapters on a base in 4 bits (`quantize: { base: nf4 }`) are trained on the CPU";
    let seen = format!("{} has no bitsandbytes", installed.executable);
    let help = format!("`{} -m pip install bitsandbytes`, to train them on the GPU", installed.executable);
    Some(finding(Severity::Note, "python-bitsandbytes", message, seen, help))
}

fn cuda(subject: &Subject, installed: &Installed) -> Option<Finding> {
    let torch = installed.version("torch")?;
    if installed.torch_error.is_some() {
        return None;
    }
    let Some(cuda) = installed.cuda.as_deref() else {
        let help = "install the build of torch for CUDA: `pip install torch` on Linux".to_owned();
        return Some(finding(
            Severity::Warning,
            "torch-cuda",
            "torch was built without CUDA",
            format!("torch {torch}"),
            help,
        ));
    };
    let driver = subject
        .inventory
        .asked
        .iter()
        .filter(|asked| asked.device == DeviceKind::Cuda)
        .find_map(|asked| asked.version.as_deref())?;
    let least = rows(CUDA).find_map(|row| (Some(row[0]) == cuda.split('.').next()).then_some(row[1]))?;
    if compare(driver, least) != Ordering::Less {
        return None;
    }
    let help = format!("update the driver to {least} or later, or install a torch for an older CUDA");
    Some(finding(
        Severity::Error,
        "cuda-driver",
        "the driver is older than the CUDA of torch needs",
        format!("driver {driver}, torch {torch} for CUDA {cuda}"),
        help,
    ))
}

fn rocm(installed: &Installed) -> Option<Finding> {
    let torch = installed.version("torch")?;
    if installed.hip.is_some() || installed.torch_error.is_some() {
        return None;
    }
    let help = "`uv pip install torch --torch-backend=rocm6.4`, or the version of your ROCm".to_owned();
    Some(finding(Severity::Error, "torch-rocm", "torch was built without ROCm", format!("torch {torch}"), help))
}

/// torch-npu X.Y.Z is built against torch X.Y.Z, and its binary interface lasts for an X.Y.
fn npu_packages(installed: &Installed) -> Option<Finding> {
    let torch = installed.version("torch")?;
    let Some(npu) = installed.version("torch_npu") else {
        let row = rows(TORCH_NPU).find(|row| same_minor(row[1], torch));
        let wanted = row.map_or_else(|| "torch-npu".to_owned(), |row| format!("torch-npu=={}", row[0]));
        let help = format!("`{} -m pip install {wanted}`", installed.executable);
        return Some(finding(
            Severity::Error,
            "torch-npu-missing",
            "there are NPUs, and torch-npu is not installed",
            format!("torch {torch}"),
            help,
        ));
    };
    if same_minor(npu, torch) {
        return None;
    }
    let wanted = npu.split(".post").next().unwrap_or(npu);
    let help = format!("`{} -m pip install torch=={wanted}`, or the torch-npu of torch {torch}", installed.executable);
    Some(finding(
        Severity::Error,
        "torch-npu-version",
        "torch and torch-npu are of different versions",
        format!("torch {torch}, torch-npu {npu}"),
        help,
    ))
}

fn cann_of(installed: &Installed, cann: Option<&Cann>) -> Option<Finding> {
    let npu = installed.version("torch_npu")?;
    let cann = cann?;
    let Some(row) = rows(TORCH_NPU).find(|row| row[0] == npu) else {
        let help = "look it up in COMPATIBILITY.md of github.com/Ascend/pytorch".to_owned();
        return Some(finding(
            Severity::Note,
            "cann-unknown",
            "which CANN this torch-npu is built for is not known here",
            format!("torch-npu {npu}, CANN {}", cann.version),
            help,
        ));
    };
    if same_cann(row[2], &cann.version) {
        return None;
    }
    let fitting: Vec<&str> =
        rows(TORCH_NPU).filter(|other| same_cann(other[2], &cann.version)).map(|other| other[0]).collect();
    let help = match fitting.as_slice() {
        [] => format!("install CANN {}", row[2]),
        fitting => format!("install CANN {}, or for CANN {} torch-npu {}", row[2], cann.version, fitting.join(" or ")),
    };
    Some(finding(
        Severity::Error,
        "cann-version",
        "torch-npu is built for another CANN",
        format!("torch-npu {npu} is for CANN {}, and {} has {}", row[2], cann.file, cann.version),
        help,
    ))
}

fn cann_found(subject: &Subject, cann: Option<&Cann>) -> Option<Finding> {
    let driver = toolkit::ascend_driver(subject).map_or_else(String::new, |version| format!(", driver {version}"));
    match cann {
        None => Some(finding(
            Severity::Error,
            "cann-missing",
            "there are NPUs, and no CANN toolkit was found",
            format!("neither ASCEND_TOOLKIT_HOME nor /usr/local/Ascend leads to one{driver}"),
            "install the CANN toolkit and kernels for your chip, then `source /usr/local/Ascend/ascend-toolkit/set_env.sh`".to_owned(),
        )),
        Some(cann) if !cann.in_environment => Some(finding(
            Severity::Error,
            "cann-environment",
            "CANN is installed, and the environment does not lead to it",
            format!("{} has {}, and ASCEND_TOOLKIT_HOME is not set{driver}", cann.file, cann.version),
            "`source` its set_env.sh before `pipeline run`".to_owned(),
        )),
        Some(_) => None,
    }
}

/// The rows of a table: words apart by blanks, `#` before a comment.
fn rows(table: &'static str) -> impl Iterator<Item = Vec<&'static str>> {
    table
        .lines()
        .filter(|line| !line.starts_with('#') && !line.trim().is_empty())
        .map(|line| line.split_whitespace().collect())
}

fn same_minor(a: &str, b: &str) -> bool {
    let minor = |version: &str| version.split(['.', '+']).take(2).map(str::to_owned).collect::<Vec<_>>();
    minor(a) == minor(b)
}

/// `8.2.RC1` and `8.2.RC1.alpha003` are of one release, and so are `8.5.0` and `8.5.1`.
fn same_cann(a: &str, b: &str) -> bool {
    let release = |version: &str| {
        let parts: Vec<String> = version.split('.').take(3).map(str::to_ascii_uppercase).collect();
        match parts.as_slice() {
            [major, minor, third] if third.starts_with("RC") => format!("{major}.{minor}.{third}"),
            [major, minor, ..] => format!("{major}.{minor}"),
            _ => version.to_owned(),
        }
    };
    release(a) == release(b)
}

/// Compares versions of numbers.
fn compare(a: &str, b: &str) -> Ordering {
    let numbers = |version: &str| version.split('.').map(|part| part.parse::<u64>().unwrap_or(0)).collect::<Vec<_>>();
    numbers(a).cmp(&numbers(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{Limits, Python, Variable, VariableSource};
    use crate::inventory::Asked;
    use crate::test_machine::TestMachine;
    use crate::{Device, Inventory};

    fn python(packages: &[(&str, &str)]) -> Python {
        let all = ["pipeline_torch_worker", "transformers", "peft", "safetensors", "numpy", "bitsandbytes"];
        let all = all.map(|name| (name, "1.0"));
        let packages = packages
            .iter()
            .copied()
            .chain(all)
            .map(|(name, version)| (name.to_owned(), Some(version.to_owned())))
            .collect();
        let installed = Installed {
            python: "3.11.2".to_owned(),
            executable: "python3".to_owned(),
            packages,
            ..Installed::default()
        };
        Python { installed: Some(installed), ..Python::missing() }
    }

    fn with(python: &Python, change: impl FnOnce(&mut Installed)) -> Python {
        let mut python = python.clone();
        change(python.installed.as_mut().unwrap());
        python
    }

    fn checks(
        machine: &TestMachine,
        kind: DeviceKind,
        driver: &str,
        python: &Python,
        home: Option<&str>,
    ) -> Vec<Finding> {
        let asked = Asked { version: Some(driver.to_owned()), ..Asked::new(kind, "tool") };
        let inventory = Inventory { devices: vec![Device::new(kind, 0, "x")], links: Vec::new(), asked: vec![asked] };
        let variables: Vec<Variable> = home
            .map(|home| Variable {
                name: "ASCEND_TOOLKIT_HOME".to_owned(),
                value: home.to_owned(),
                place: VariableSource::Environment,
            })
            .into_iter()
            .collect();
        let machine = machine.machine();
        check(&Subject {
            machine: &machine,
            inventory: &inventory,
            variables: &variables,
            limits: Limits::default(),
            python,
        })
    }

    fn names(findings: &[Finding]) -> Vec<&'static str> {
        findings.iter().map(|finding| finding.check).collect()
    }

    fn with_cann(version: &str) -> TestMachine {
        let machine = TestMachine::new();
        machine.file(
            "opt/cann/aarch64-linux/ascend_toolkit_install.info",
            &format!("package_name=Ascend-cann-toolkit\nversion={version}\narch=aarch64\n"),
        );
        machine
    }

    const HOME: Option<&str> = Some("/opt/cann");

    #[test]
    fn an_npu_machine_where_all_fits() {
        let python = python(&[("torch", "2.6.0"), ("torch_npu", "2.6.0.post3")]);
        assert_eq!(names(&checks(&with_cann("8.3.RC1"), DeviceKind::Npu, "24.1", &python, HOME)), [] as [&str; 0]);
    }

    #[test]
    fn torch_and_its_extension_of_two_versions() {
        let python = python(&[("torch", "2.15.0+cu132"), ("torch_npu", "2.7.1.post2")]);
        let findings = checks(&with_cann("8.5.0"), DeviceKind::Npu, "24.1", &python, HOME);
        assert_eq!(names(&findings), ["torch-npu-version"]);
        assert!(findings[0].help.contains("torch==2.7.1"), "{}", findings[0].help);
    }

    #[test]
    fn another_cann() {
        let python = python(&[("torch", "2.6.0"), ("torch_npu", "2.6.0")]);
        let findings = checks(&with_cann("8.5.0"), DeviceKind::Npu, "24.1", &python, HOME);
        assert_eq!(names(&findings), ["cann-version"]);
        assert!(
            findings[0].help.starts_with("install CANN 8.2.RC1, or for CANN 8.5.0 torch-npu 2.9.0"),
            "{}",
            findings[0].help
        );
    }

    #[test]
    fn cann_that_is_missing_or_not_in_the_environment() {
        let python = python(&[("torch", "2.6.0"), ("torch_npu", "2.6.0")]);
        assert_eq!(names(&checks(&TestMachine::new(), DeviceKind::Npu, "24.1", &python, None)), ["cann-missing"]);
        let machine = TestMachine::new();
        machine.file(
            "usr/local/Ascend/ascend-toolkit/latest/x86_64-linux/ascend_toolkit_install.info",
            "version=8.2.RC1\n",
        );
        assert_eq!(names(&checks(&machine, DeviceKind::Npu, "24.1", &python, None)), ["cann-environment"]);
    }

    #[test]
    fn npus_without_torch_npu_name_its_version() {
        let python = python(&[("torch", "2.7.1")]);
        let findings = checks(&with_cann("8.5.0"), DeviceKind::Npu, "24.1", &python, HOME);
        assert_eq!(names(&findings), ["torch-npu-missing"]);
        assert!(findings[0].help.contains("torch-npu==2.7.1"), "{}", findings[0].help);
    }

    #[test]
    fn a_driver_that_is_too_old_for_torchs_cuda() {
        let torch = with(&python(&[("torch", "2.15.0+cu132")]), |installed| installed.cuda = Some("13.2".to_owned()));
        assert_eq!(names(&checks(&TestMachine::new(), DeviceKind::Cuda, "550.90.07", &torch, None)), ["cuda-driver"]);
        assert_eq!(names(&checks(&TestMachine::new(), DeviceKind::Cuda, "580.65.06", &torch, None)), [] as [&str; 0]);
        let cpu = python(&[("torch", "2.15.0")]);
        assert_eq!(names(&checks(&TestMachine::new(), DeviceKind::Cuda, "580.65.06", &cpu, None)), ["torch-cuda"]);
    }

    #[test]
    fn the_extension_that_breaks_torch() {
        let error = "RuntimeError: Failed to load the backend extension: torch_npu";
        let broken = with(&python(&[("torch", "2.14.0"), ("torch_npu", "2.14.0")]), |installed| {
            installed.torch_error = Some(error.to_owned())
        });
        let broken = Python { imports_without_extensions: true, ..broken };
        let findings = checks(&TestMachine::new(), DeviceKind::Cpu, "", &broken, None);
        assert_eq!(names(&findings), ["torch-import"]);
        assert!(findings[0].help.contains("TORCH_DEVICE_BACKEND_AUTOLOAD=0"));
    }

    #[test]
    fn a_machine_without_torch_is_no_sick_one() {
        let bare = with(&python(&[]), |installed| installed.packages.clear());
        assert_eq!(names(&checks(&TestMachine::new(), DeviceKind::Cpu, "", &bare, None)), [] as [&str; 0]);
        assert_eq!(names(&checks(&TestMachine::new(), DeviceKind::Rocm, "", &bare, None)), ["python-packages"]);
    }

    #[test]
    fn a_torch_without_the_worker_is_worth_a_note() {
        let other = with(&python(&[("torch", "2.15.0")]), |installed| {
            installed.packages.remove("pipeline_torch_worker");
        });
        let findings = checks(&TestMachine::new(), DeviceKind::Cpu, "", &other, None);
        assert_eq!(names(&findings), ["python-packages"]);
        assert_eq!(findings[0].severity, Severity::Note);
        assert_eq!(findings[0].seen, "python3 has no pipeline_torch_worker");
    }

    #[test]
    fn the_tables_have_their_columns() {
        assert!(rows(TORCH_NPU).all(|row| row.len() == 3 && same_minor(row[0], row[1])));
        assert!(rows(CUDA).all(|row| row.len() == 2));
        assert!(
            same_cann("8.2.RC1", "8.2.rc1.alpha003") && same_cann("8.5.0", "8.5.1") && !same_cann("8.2.RC1", "8.3.RC1")
        );
    }
}
