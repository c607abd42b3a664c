//! Figures of a result, as far as they are known before there is one.

use std::fmt;

/// What a figure is in, which says what values it can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// A part of all: 0 to 1.
    Share,
    /// Points of a hundred: 0 to 100.
    Points,
    /// A coefficient of correlation: −1 to 1.
    Correlation,
    /// A difference of natural logarithms.
    Nats,
    Bits,
    /// A count, or a number without a scale.
    Number,
}

impl Unit {
    /// The least and the largest value, where there are bounds.
    pub fn limits(self) -> Option<(f64, f64)> {
        match self {
            Self::Share => Some((0.0, 1.0)),
            Self::Points => Some((0.0, 100.0)),
            Self::Correlation => Some((-1.0, 1.0)),
            Self::Nats | Self::Bits | Self::Number => None,
        }
    }
}

/// `a share, from 0 to 1`.
impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Share => "a share",
            Self::Points => "points",
            Self::Correlation => "a correlation",
            Self::Nats => "nats",
            Self::Bits => "bits",
            Self::Number => "a number",
        };
        match self.limits() {
            Some((least, most)) => write!(f, "{name}, from {least} to {most}"),
            None => f.write_str(name),
        }
    }
}

/// What is known of a figure of a stage before the stage has run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Foreseen {
    /// Nothing: only the run finds out which figures there are.
    Nothing,
    /// The stage will not have it, but these.
    Absent {
        others: Vec<String>,
    },
    In(Unit),
}

/// The name of a figure's standard error, as lm-eval has it: `acc` has `acc_stderr`, and `acc,none` has
/// `acc_stderr,none`.
pub fn name_of_standard_error(name: &str) -> String {
    name.split_once(',')
        .map_or_else(|| format!("{name}_stderr"), |(metric, filter)| format!("{metric}_stderr,{filter}"))
}
