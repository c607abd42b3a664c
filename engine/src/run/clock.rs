//! Times as people and sorted lists need them: UTC, without a time zone database.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// A moment, to the millisecond.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    milliseconds: u64,
}

impl Moment {
    /// Now.
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { milliseconds: u64::try_from(since.as_millis()).unwrap_or(u64::MAX) }
    }

    /// Such as `2026-03-01T09:05:07.042Z` (RFC 3339).
    pub fn rfc3339(self) -> String {
        let (year, month, day) = self.date();
        let (hour, minute, second) = self.time();
        let fraction = self.milliseconds % 1000;
        format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{fraction:03}Z")
    }

    /// A new run's id, such as `20260301-090507-042-5f3a`: sorted by time, and different even for runs of the same millisecond.
    pub fn run_id(self) -> String {
        let (year, month, day) = self.date();
        let (hour, minute, second) = self.time();
        let fraction = self.milliseconds % 1000;
        // The standard library seeds each state from the system's random source.
        let random = RandomState::new().build_hasher().finish() & 0xffff;
        format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}-{fraction:03}-{random:04x}")
    }

    fn time(self) -> (u64, u64, u64) {
        let seconds = self.milliseconds / 1000 % 86_400;
        (seconds / 3600, seconds / 60 % 60, seconds % 60)
    }

    /// Year, month and day of the Gregorian calendar, from days since 1970.
    ///
    /// Source: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`, for days not before 1970.
    fn date(self) -> (u64, u64, u64) {
        let days = self.milliseconds / 86_400_000 + 719_468;
        let era = days / 146_097;
        let day_of_era = days % 146_097;
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        (year_of_era + era * 400 + u64::from(month <= 2), month, day)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_known_moments() {
        let at = |seconds: u64| Moment { milliseconds: seconds * 1000 + 42 }.rfc3339();
        assert_eq!(at(0), "1970-01-01T00:00:00.042Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59.042Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.042Z");
        assert_eq!(at(1_772_355_907), "2026-03-01T09:05:07.042Z");
        assert_eq!(at(4_107_542_399), "2100-02-28T23:59:59.042Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00.042Z");
    }

    #[test]
    fn ids_sort_by_time() {
        let early = Moment { milliseconds: 1_772_355_907_042 }.run_id();
        let late = Moment { milliseconds: 1_772_355_907_043 }.run_id();
        assert!(early.starts_with("20260301-090507-042-"));
        assert!(early < late);
    }
}
