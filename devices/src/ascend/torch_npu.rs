//! Which torch, torch-npu and CANN go together.

use super::toolkit::{self, Cann};
use crate::DeviceKind;
use crate::doctor::{Finding, Installed, Severity, Subject, finding, rows};

const TORCH_NPU: &str = include_str!("torch_npu.txt");

pub(super) fn check(subject: &Subject, installed: &Installed) -> Vec<Finding> {
    let (has_npus, cann) = (subject.has(DeviceKind::Npu), toolkit::cann(subject));
    let mut findings = Vec::new();
    if has_npus || installed.version("torch_npu").is_some() {
        findings.extend(npu_packages(installed));
        findings.extend(cann_of(installed, cann.as_ref()));
    }
    if has_npus {
        findings.extend(cann_found(subject, cann.as_ref()));
    }
    findings
}

/// torch-npu X.Y.Z is built against torch X.Y.Z, and its binary interface lasts for an X.Y.
fn npu_packages(installed: &Installed) -> Option<Finding> {
    let torch = installed.version("torch")?;
    let Some(npu) = installed.version("torch_npu") else {
        let row = rows(TORCH_NPU).find(|row| same_minor(row[1], torch));
        let wanted = row.map_or_else(|| "torch-npu".to_owned(), |row| format!("torch-npu=={}", row[0]));
        let help = format!("`{} -m pip install {wanted}`", installed.executable);
        let message = "there are NPUs, and torch-npu is not installed";
        return Some(finding(Severity::Error, "torch-npu-missing", message, format!("torch {torch}"), help));
    };
    if same_minor(npu, torch) {
        return None;
    }
    let wanted = npu.split(".post").next().unwrap_or(npu);
    let help = format!("`{} -m pip install torch=={wanted}`, or the torch-npu of torch {torch}", installed.executable);
    let (message, seen) = ("torch and torch-npu are of different versions", format!("torch {torch}, torch-npu {npu}"));
    Some(finding(Severity::Error, "torch-npu-version", message, seen, help))
}

fn cann_of(installed: &Installed, cann: Option<&Cann>) -> Option<Finding> {
    let npu = installed.version("torch_npu")?;
    let cann = cann?;
    let Some(row) = rows(TORCH_NPU).find(|row| row[0] == npu) else {
        let message = "which CANN this torch-npu is built for is not known here";
        let seen = format!("torch-npu {npu}, CANN {}", cann.version);
        let help = "look it up in COMPATIBILITY.md of github.com/Ascend/pytorch";
        return Some(finding(Severity::Note, "cann-unknown", message, seen, help));
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
    let seen = format!("torch-npu {npu} is for CANN {}, and {} has {}", row[2], cann.file, cann.version);
    Some(finding(Severity::Error, "cann-version", "torch-npu is built for another CANN", seen, help))
}

fn cann_found(subject: &Subject, cann: Option<&Cann>) -> Option<Finding> {
    let driver = toolkit::driver(subject).map_or_else(String::new, |version| format!(", driver {version}"));
    match cann {
        None => Some(finding(
            Severity::Error,
            "cann-missing",
            "there are NPUs, and no CANN toolkit was found",
            format!("neither ASCEND_TOOLKIT_HOME nor /usr/local/Ascend leads to one{driver}"),
            "install the CANN toolkit and kernels for your chip, then `source /usr/local/Ascend/ascend-toolkit/set_env.sh`",
        )),
        Some(cann) if !cann.in_environment => Some(finding(
            Severity::Error,
            "cann-environment",
            "CANN is installed, and the environment does not lead to it",
            format!("{} has {}, and ASCEND_TOOLKIT_HOME is not set{driver}", cann.file, cann.version),
            "`source` its set_env.sh before `pipeline run`",
        )),
        Some(_) => None,
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Python;
    use crate::test_machine::{TestMachine, TestSubject, names, python, variable};

    fn checks(machine: &TestMachine, python: Python, home: Option<&str>) -> Vec<Finding> {
        let variables = home.map(|home| variable("ASCEND_TOOLKIT_HOME", home)).into_iter().collect();
        let tested = TestSubject { python, variables, ..TestSubject::new(machine, DeviceKind::Npu, &["x"]) };
        check(&tested.subject(), tested.python.installed.as_ref().unwrap())
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
        assert_eq!(names(&checks(&with_cann("8.3.RC1"), python, HOME)), [] as [&str; 0]);
    }

    #[test]
    fn torch_and_its_extension_of_two_versions() {
        let python = python(&[("torch", "2.15.0+cu132"), ("torch_npu", "2.7.1.post2")]);
        let findings = checks(&with_cann("8.5.0"), python, HOME);
        assert_eq!(names(&findings), ["torch-npu-version"]);
        assert!(findings[0].help.contains("torch==2.7.1"), "{}", findings[0].help);
    }

    #[test]
    fn another_cann() {
        let python = python(&[("torch", "2.6.0"), ("torch_npu", "2.6.0")]);
        let findings = checks(&with_cann("8.5.0"), python, HOME);
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
        assert_eq!(names(&checks(&TestMachine::new(), python.clone(), None)), ["cann-missing"]);
        let machine = TestMachine::new();
        machine.file(
            "usr/local/Ascend/ascend-toolkit/latest/x86_64-linux/ascend_toolkit_install.info",
            "version=8.2.RC1\n",
        );
        assert_eq!(names(&checks(&machine, python, None)), ["cann-environment"]);
    }

    #[test]
    fn npus_without_torch_npu_name_its_version() {
        let python = python(&[("torch", "2.7.1")]);
        let findings = checks(&with_cann("8.5.0"), python, HOME);
        assert_eq!(names(&findings), ["torch-npu-missing"]);
        assert!(findings[0].help.contains("torch-npu==2.7.1"), "{}", findings[0].help);
    }

    #[test]
    fn the_table_has_its_columns() {
        assert!(rows(TORCH_NPU).all(|row| row.len() == 3 && same_minor(row[0], row[1])));
        assert!(
            same_cann("8.2.RC1", "8.2.rc1.alpha003") && same_cann("8.5.0", "8.5.1") && !same_cann("8.2.RC1", "8.3.RC1")
        );
    }
}
