//! Variables that nothing reads, since they are misspelt or never existed, and values that a variable cannot have.
//!
//! A vendor has a table of those that its runtime reads, one to a line, with the values they may have: `0|1` is a
//! choice (capitals do not matter), `120..7200` a range of integers. A name alone takes any text; one with `*` stands
//! for all that begin so. The first word of a name, such as `HCCL_`, is a prefix of which all names are in the table.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use super::{Finding, Severity, Variable, finding};
use crate::DeviceKind;

/// What a variable may have for a value.
#[derive(Debug, PartialEq, Eq)]
enum Values {
    Any,
    Choice(Vec<&'static str>),
    Range(i64, i64),
}

struct Known {
    name: &'static str,
    values: Values,
}

static KNOWN: LazyLock<Vec<Known>> =
    LazyLock::new(|| DeviceKind::ALL.into_iter().flat_map(|kind| read(kind.facts().variables)).collect());

/// The prefixes whose variables are all known.
static PREFIXES: LazyLock<BTreeSet<&str>> = LazyLock::new(|| KNOWN.iter().map(|known| prefix(known.name)).collect());

fn prefix(name: &str) -> &str {
    &name[..name.find('_').map_or(name.len(), |end| end + 1)]
}

fn read(table: &'static str) -> impl Iterator<Item = Known> {
    let lines = table.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| {
        let (name, values) = line.split_once(' ').unwrap_or((line, ""));
        Known { name, values: Values::read(values.trim()) }
    })
}

impl Values {
    fn read(text: &'static str) -> Self {
        if let Some((first, last)) = text.split_once("..")
            && let (Ok(first), Ok(last)) = (first.parse(), last.parse())
        {
            return Self::Range(first, last);
        }
        if text.is_empty() { Self::Any } else { Self::Choice(text.split('|').collect()) }
    }

    fn allow(&self, value: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Choice(choices) => choices.iter().any(|choice| choice.eq_ignore_ascii_case(value)),
            Self::Range(first, last) => value.parse().is_ok_and(|value: i64| (*first..=*last).contains(&value)),
        }
    }

    fn in_words(&self) -> String {
        match self {
            Self::Any => "any text".to_owned(),
            Self::Choice(choices) => match choices.split_last() {
                Some((last, [])) => (*last).to_owned(),
                Some((last, others)) => format!("{} or {last}", others.join(", ")),
                None => String::new(),
            },
            Self::Range(first, last) => format!("an integer from {first} to {last}"),
        }
    }
}

/// Looks at every variable under a prefix that is known.
pub(super) fn check(variables: &[Variable]) -> Vec<Finding> {
    let ours = variables.iter().filter(|variable| PREFIXES.contains(prefix(&variable.name)));
    ours.filter_map(check_one).collect()
}

fn check_one(variable: &Variable) -> Option<Finding> {
    match KNOWN.iter().find(|known| known.is(&variable.name)) {
        None => Some(unknown(variable)),
        Some(known) if variable.value.is_empty() || known.values.allow(&variable.value) => None,
        Some(known) => {
            let message = format!("`{}` cannot be `{}`", known.name, variable.value);
            let help = format!("it must be {}", known.values.in_words());
            Some(finding(Severity::Error, "variable-value", message, variable.seen(), help))
        }
    }
}

fn unknown(variable: &Variable) -> Finding {
    let name = &variable.name;
    let (severity, help) = match nearest(name) {
        Some((known, edits)) => {
            let values = match known.values {
                Values::Any => String::new(),
                ref values => format!(", which must be {}", values.in_words()),
            };
            let severity = if is_surely_a_slip(name, edits) { Severity::Error } else { Severity::Warning };
            (severity, format!("did you mean `{}`{values}?", known.name))
        }
        None => (Severity::Warning, "unset it, or leave it if a tool of yours reads it".to_owned()),
    };
    let message = format!("nothing that is known reads `{name}`");
    finding(severity, "variable-unknown", message, variable.seen(), help)
}

impl Known {
    /// A name that ends with `*` stands for all that begin so: those of a plugin.
    fn is(&self, name: &str) -> bool {
        match self.name.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => self.name == name,
        }
    }
}

/// Collectives alone read names of these prefixes. The others are build tools' too, so that a name must be very near to
/// be a slip.
fn is_surely_a_slip(name: &str, edits: usize) -> bool {
    prefix(name).ends_with("CCL_") || (edits <= 2 && name.len() >= 12)
}

/// The known variable that a name is nearest to, with the edits between them, if it is near enough for a slip: half of
/// the letters after the prefix may differ, and no more than seven.
fn nearest(name: &str) -> Option<(&'static Known, usize)> {
    let edits = |known: &'static Known| (known, strsim::damerau_levenshtein(name, known.name));
    let named = KNOWN.iter().filter(|known| !known.name.ends_with('*'));
    let (best, edits) = named.map(edits).min_by_key(|(_, edits)| *edits)?;
    // The prefix is no merit: all have it.
    let longer = name.len().max(best.name.len()).saturating_sub(prefix(best.name).len());
    (edits <= (longer / 2).clamp(1, 7)).then_some((best, edits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_machine::variable;

    fn found(name: &str, value: &str) -> Option<Finding> {
        check(&[variable(name, value)]).pop()
    }

    #[test]
    fn the_tables_hold_nothing_twice() {
        let mut names: Vec<_> = KNOWN.iter().map(|known| known.name).collect();
        assert!(names.len() > 300, "{}", names.len());
        assert_eq!(
            PREFIXES.iter().copied().collect::<Vec<_>>(),
            ["ASCEND_", "CUDA_", "HCCL_", "HIP_", "NCCL_", "ROCR_"]
        );
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn every_variable_that_we_set_is_known() {
        for kind in DeviceKind::ALL {
            for (name, value) in kind.environment(&[0, 1]) {
                assert_eq!(found(name, &value), None);
            }
        }
    }

    #[test]
    fn the_migration_guides_variables() {
        for name in ["HCCL_INTRA_ROCE_SIZE", "HCCL_INTER_ROCE_SIZE"] {
            let finding = found(name, "8").unwrap_or_else(|| panic!("{name}"));
            assert_eq!(finding.severity, Severity::Error);
            assert_eq!(finding.help, "did you mean `HCCL_INTRA_ROCE_ENABLE`, which must be 0 or 1?");
            assert_eq!(finding.seen, format!("{name}=8 in the environment"));
        }
        assert_eq!(found("HCCL_WHITELIST_DISABLE", "1"), None);
    }

    #[test]
    fn slips_of_the_keyboard() {
        let slips = [
            ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
            ("NCCL_IB_DISABLED", "NCCL_IB_DISABLE"),
            ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
            ("CUDA_VISBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
            ("ASCEND_RT_VISIBLE_DEVICE", "ASCEND_RT_VISIBLE_DEVICES"),
            ("HIP_VISIBLE_DEVICE", "HIP_VISIBLE_DEVICES"),
            ("HCCL_CONECT_TIMEOUT", "HCCL_CONNECT_TIMEOUT"),
            ("HCCL_BUFFERSIZE", "HCCL_BUFFSIZE"),
        ];
        for (slip, name) in slips {
            let finding = found(slip, "0").unwrap_or_else(|| panic!("{slip}"));
            assert!(finding.help.starts_with(&format!("did you mean `{name}`")), "{slip}: {}", finding.help);
        }
    }

    #[test]
    fn names_of_build_tools_and_plugins_are_no_errors() {
        for name in ["CUDA_QUARTERLY_REPORT", "CUDA_ARCH", "ASCEND_CANN_PACKAGE_PATH", "HIP_ARCH"] {
            assert_eq!(found(name, "1").map(|finding| finding.severity), Some(Severity::Warning), "{name}");
        }
        assert_eq!(found("NCCL_OFI_NIC_DUP_CONNS", "1"), None);
        assert_eq!(found("OMP_NUM_THREADS", "x"), None);
    }

    #[test]
    fn values_out_of_range() {
        for (name, value) in [
            ("HCCL_CONNECT_TIMEOUT", "60"),
            ("HCCL_CONNECT_TIMEOUT", "2m"),
            ("HCCL_IF_BASE_PORT", "65535"),
            ("HCCL_DETERMINISTIC", "1"),
            ("NCCL_P2P_LEVEL", "NVLINK"),
            ("CUDA_DEVICE_ORDER", "BUS"),
            ("CUDA_DEVICE_MAX_CONNECTIONS", "0"),
        ] {
            assert_eq!(found(name, value).map(|finding| finding.check), Some("variable-value"), "{name}={value}");
        }
        for (name, value) in [
            ("HCCL_CONNECT_TIMEOUT", "7200"),
            ("HCCL_DETERMINISTIC", "TRUE"),
            ("NCCL_DEBUG", "info"),
            ("NCCL_DEBUG", ""),
        ] {
            assert_eq!(found(name, value), None, "{name}={value}");
        }
    }
}
