//! Versions that do not go together: driver, toolkit, torch and its extensions. Those of a vendor are in its
//! folder.

use super::python::{AUTOLOAD, Installed};
use super::{Finding, Severity, Subject, finding};
use crate::DeviceKind;

/// Looks at what the torch worker would run on.
pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    let mut findings: Vec<Finding> = no_python(subject).into_iter().collect();
    let Some(installed) = &subject.python.installed else { return findings };
    findings.extend(imports(subject, installed));
    findings.extend(missing_packages(subject, installed));
    findings.extend(missing_bitsandbytes(subject, installed));
    findings.extend(DeviceKind::ALL.into_iter().flat_map(|kind| kind.vendor().check_torch(subject, installed)));
    findings
}

/// Whether there is a device that only the torch worker computes on.
fn needs_torch(subject: &Subject) -> bool {
    subject.has_accelerator(|torch| torch.alone)
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
    let has_gpu = subject.has_accelerator(|torch| torch.bitsandbytes);
    if !has_gpu || installed.version("pipeline_torch_worker").is_none() || installed.version("bitsandbytes").is_some() {
        return None;
    }
    let message =
        "without bitsandbytes, adapters on a base in 4 bits (`quantize: { base: nf4 }`) are trained on the CPU";
    let seen = format!("{} has no bitsandbytes", installed.executable);
    let help = format!("`{} -m pip install bitsandbytes`, to train them on the GPU", installed.executable);
    Some(finding(Severity::Note, "python-bitsandbytes", message, seen, help))
}

/// The rows of a vendor's table: words apart by blanks, `#` before a comment.
pub(crate) fn rows(table: &'static str) -> impl Iterator<Item = Vec<&'static str>> {
    table
        .lines()
        .filter(|line| !line.starts_with('#') && !line.trim().is_empty())
        .map(|line| line.split_whitespace().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Python;
    use crate::test_machine::{TestMachine, TestSubject, names, python, with};

    fn checks(kind: DeviceKind, python: Python) -> Vec<Finding> {
        check(&TestSubject { python, ..TestSubject::new(&TestMachine::new(), kind, &["x"]) }.subject())
    }

    #[test]
    fn the_extension_that_breaks_torch() {
        let error = "RuntimeError: Failed to load the backend extension: torch_npu";
        let broken = with(python(&[("torch", "2.14.0"), ("torch_npu", "2.14.0")]), |installed| {
            installed.torch_error = Some(error.to_owned())
        });
        let broken = Python { imports_without_extensions: true, ..broken };
        let findings = checks(DeviceKind::Cpu, broken);
        assert_eq!(names(&findings), ["torch-import"]);
        assert!(findings[0].help.contains("TORCH_DEVICE_BACKEND_AUTOLOAD=0"));
    }

    #[test]
    fn a_machine_without_torch_is_no_sick_one() {
        let bare = with(python(&[]), |installed| installed.packages.clear());
        assert_eq!(names(&checks(DeviceKind::Cpu, bare.clone())), [] as [&str; 0]);
        assert_eq!(names(&checks(DeviceKind::Rocm, bare)), ["python-packages"]);
    }

    #[test]
    fn a_torch_without_the_worker_is_worth_a_note() {
        let other = with(python(&[("torch", "2.15.0")]), |installed| {
            installed.packages.remove("pipeline_torch_worker");
        });
        let findings = checks(DeviceKind::Cpu, other);
        assert_eq!(names(&findings), ["python-packages"]);
        assert_eq!(findings[0].severity, Severity::Note);
        assert_eq!(findings[0].seen, "python3 has no pipeline_torch_worker");
    }
}
