//! Whether the driver is new enough for the CUDA that torch was built for.

use std::cmp::Ordering;

use crate::DeviceKind;
use crate::doctor::{Finding, Installed, Severity, Subject, finding, rows};

const CUDA: &str = include_str!("cuda.txt");

pub(super) fn check(subject: &Subject, installed: &Installed) -> Option<Finding> {
    let torch = installed.version("torch")?;
    if installed.torch_error.is_some() || !subject.has(DeviceKind::Cuda) {
        return None;
    }
    let Some(cuda) = installed.cuda.as_deref() else {
        let (message, seen) = ("torch was built without CUDA", format!("torch {torch}"));
        let help = "install the build of torch for CUDA: `pip install torch` on Linux";
        return Some(finding(Severity::Warning, "torch-cuda", message, seen, help));
    };
    let mut asked = subject.inventory.asked.iter().filter(|asked| asked.device == DeviceKind::Cuda);
    let driver = asked.find_map(|asked| asked.version.as_deref())?;
    let least = rows(CUDA).find_map(|row| (Some(row[0]) == cuda.split('.').next()).then_some(row[1]))?;
    if compare(driver, least) != Ordering::Less {
        return None;
    }
    let help = format!("update the driver to {least} or later, or install a torch for an older CUDA");
    let seen = format!("driver {driver}, torch {torch} for CUDA {cuda}");
    Some(finding(Severity::Error, "cuda-driver", "the driver is older than the CUDA of torch needs", seen, help))
}

/// Compares versions of numbers.
fn compare(a: &str, b: &str) -> Ordering {
    let numbers = |version: &str| version.split('.').map(|part| part.parse::<u64>().unwrap_or(0)).collect::<Vec<_>>();
    numbers(a).cmp(&numbers(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Python;
    use crate::inventory::Queried;
    use crate::test_machine::{TestMachine, TestSubject, python, with};

    fn found(driver: &str, python: &Python) -> Option<&'static str> {
        let mut tested = TestSubject::new(&TestMachine::new(), DeviceKind::Cuda, &["x"]);
        tested.inventory.asked =
            vec![Queried { version: Some(driver.to_owned()), ..Queried::new(DeviceKind::Cuda, "tool") }];
        check(&tested.subject(), python.installed.as_ref().unwrap()).map(|finding| finding.check)
    }

    #[test]
    fn a_driver_that_is_too_old_for_torchs_cuda() {
        let torch = with(python(&[("torch", "2.15.0+cu132")]), |installed| installed.cuda = Some("13.2".to_owned()));
        assert_eq!(found("550.90.07", &torch), Some("cuda-driver"));
        assert_eq!(found("580.65.06", &torch), None);
        assert_eq!(found("580.65.06", &python(&[("torch", "2.15.0")])), Some("torch-cuda"));
        assert!(rows(CUDA).all(|row| row.len() == 2));
    }
}
