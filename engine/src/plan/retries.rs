//! `retries:` of a stage: after which failures it is tried again, how often, and after which wait.

use std::time::Duration;

use serde_json::json;

use crate::error::Cause;
use crate::file::problem::Problem;
use crate::file::tree::{Node, Value};
use crate::parameter::{Json, KeyWriter, Parameter, Parameters, Period, Reader};

/// The wait before the second try, where the file does not say.
const DELAY: Duration = Duration::from_secs(2);

/// What the wait grows to, where the file does not say.
const MAX_DELAY: Duration = Duration::from_secs(300);

/// Tries of a mapping that does not say how many.
const MAX: u32 = 2;

/// When and how often a stage is tried again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retries {
    /// Most tries after the first one. A try with less memory does not count.
    pub max: u32,
    /// The wait before the second try; each later one is twice as long.
    pub delay: Duration,
    /// The longest wait.
    pub max_delay: Duration,
    /// The causes after which there is another try.
    pub on: Vec<Cause>,
}

impl Default for Retries {
    fn default() -> Self {
        let on = [RetryCause::Network, RetryCause::Crashed, RetryCause::Timeout, RetryCause::DeviceLost]
            .into_iter()
            .chain([RetryCause::OutOfMemory, RetryCause::DeviceOutOfMemory]);
        Self { max: 0, delay: DELAY, max_delay: MAX_DELAY, on: on.map(Cause::from).collect() }
    }
}

impl Retries {
    /// The wait after so many failed tries: it doubles with each, without any share of chance.
    pub fn delay_after(&self, tries: u32) -> Duration {
        let doubled = self.delay.checked_mul(1_u32.checked_shl(tries.saturating_sub(1)).unwrap_or(u32::MAX));
        doubled.unwrap_or(self.max_delay).min(self.max_delay)
    }
}

/// The causes that may pass with nothing changed. The others are not among them: a mistake stays a mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parameters)]
enum RetryCause {
    /// A server could not be reached or refused.
    Network,
    /// The process died without reporting an error.
    Crashed,
    /// It took longer than its `timeout`.
    Timeout,
    /// The machine's memory did not suffice.
    OutOfMemory,
    /// A device's memory did not suffice.
    DeviceOutOfMemory,
    /// A device no longer answers.
    DeviceLost,
    /// A file system is full.
    DiskFull,
    /// The machine refused something.
    Machine,
}

impl From<RetryCause> for Cause {
    fn from(cause: RetryCause) -> Self {
        match cause {
            RetryCause::Network => Self::Network,
            RetryCause::Crashed => Self::Crashed,
            RetryCause::Timeout => Self::Timeout,
            RetryCause::OutOfMemory => Self::OutOfMemory,
            RetryCause::DeviceOutOfMemory => Self::DeviceOutOfMemory,
            RetryCause::DeviceLost => Self::DeviceLost,
            RetryCause::DiskFull => Self::DiskFull,
            RetryCause::Machine => Self::Machine,
        }
    }
}

/// The mapping form of `retries:`.
#[derive(Parameters)]
struct RetryKeys {
    /// Most tries after the first one.
    #[cosmetic(default = MAX)]
    max: u32,
    /// The wait before the second try, such as `5s`; each later one is twice as long.
    #[cosmetic(default = Period(DELAY))]
    delay: Period,
    /// The longest wait; `5m` if left out, or `delay` where that is longer.
    #[cosmetic]
    max_delay: Option<Period>,
    /// The causes after which it is tried again. Those of memory also allow the tries with less of it.
    #[cosmetic]
    on: Option<Vec<RetryCause>>,
}

impl Parameter for Retries {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        match &node.value {
            Value::Map(_) => {
                let RetryKeys { max, delay, max_delay, on } = RetryKeys::read(node, reader)?;
                let max_delay = max_delay.map_or(MAX_DELAY.max(delay.0), |longest| longest.0);
                if max_delay < delay.0 {
                    let at = node.get("max_delay").unwrap_or(node);
                    let message = "`retries.max_delay` must be at least as long as `delay`";
                    reader.problems.push(Problem::error(
                        "out-of-range",
                        at.span,
                        message,
                        "shorter than the first wait",
                    ));
                    return None;
                }
                let on = on.map(|on| on.into_iter().map(Cause::from).collect()).unwrap_or_else(|| Self::default().on);
                Some(Self { max, delay: delay.0, max_delay, on })
            }
            Value::List(_) => {
                reader.wrong_type(node, "an integer, or a mapping of `max`, `delay`, `max_delay` and `on`");
                None
            }
            _ => Some(Self { max: u32::read(node, reader)?, ..Self::default() }),
        }
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        key.value(format!("{self:?}"));
    }

    fn schema() -> Json {
        let count = json!({ "type": "integer", "minimum": 0, "default": 0 });
        json!({ "anyOf": [count, RetryKeys::schema()] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_up_to_its_longest() {
        let retries =
            Retries { delay: Duration::from_secs(5), max_delay: Duration::from_secs(30), ..Retries::default() };
        let waits: Vec<u64> = [1, 2, 3, 4, 40, u32::MAX].map(|tries| retries.delay_after(tries).as_secs()).to_vec();
        assert_eq!(waits, [5, 10, 20, 30, 30, 30]);
    }
}
