//! Times as people and sorted lists need them: UTC, without a time zone database.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A moment, to the millisecond.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    milliseconds: u64,
}

impl Moment {
    /// Now.
    pub fn now() -> Self {
        Self::at(SystemTime::now())
    }

    /// The moment of a file's time.
    pub fn at(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { milliseconds: u64::try_from(since.as_millis()).unwrap_or(u64::MAX) }
    }

    /// Such as `2026-03-01T09:05:07.042Z` (RFC 3339).
    pub fn rfc3339(self) -> String {
        let (year, month, day) = self.date();
        let (hour, minute, second) = self.time();
        let fraction = self.milliseconds % 1000;
        format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{fraction:03}Z")
    }

    /// Reads what [`Moment::rfc3339`] writes, and nothing else.
    pub fn parse(text: &str) -> Option<Self> {
        let form = "####-##-##T##:##:##.###Z";
        let fits = |(expected, found): (char, char)| match expected {
            '#' => found.is_ascii_digit(),
            sign => found == sign,
        };
        if text.len() != form.len() || !form.chars().zip(text.chars()).all(fits) {
            return None;
        }
        let number = |range: std::ops::Range<usize>| text[range].parse::<u64>().ok();
        let days = days_from_civil(number(0..4)?, number(5..7)?, number(8..10)?)?;
        let seconds = ((days * 24 + number(11..13)?) * 60 + number(14..16)?) * 60 + number(17..19)?;
        Some(Self { milliseconds: seconds * 1000 + number(20..23)? })
    }

    /// The time from an earlier moment to this one; nothing where it is not earlier.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.milliseconds.saturating_sub(earlier.milliseconds))
    }

    /// The moment that lies so long before; 1970 where that is earlier.
    #[must_use]
    pub fn before(self, time: Duration) -> Self {
        let milliseconds = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self { milliseconds: self.milliseconds.saturating_sub(milliseconds) }
    }

    /// A new run's id, such as `20260301-090507-042-5f3a`: sorted by time, and different even for runs of the same
    /// millisecond.
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
    /// Source: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`, for days not before
    /// 1970.
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

/// Days from 1970 to a date of the Gregorian calendar; `None` before 1970 and for months that there are not.
///
/// Source: as above, `days_from_civil`.
fn days_from_civil(year: u64, month: u64, day: u64) -> Option<u64> {
    if !(1..=12).contains(&month) {
        return None;
    }
    let year = year.checked_sub(u64::from(month <= 2))?;
    let (era, year_of_era) = (year / 400, year % 400);
    let shifted_month = (month + 9) % 12;
    let day_of_year = (153 * shifted_month + 2) / 5 + day.checked_sub(1)?;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    (era * 146_097 + day_of_era).checked_sub(719_468)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        for seconds in (0..4_200_000_000).step_by(12_345_678) {
            let moment = Moment { milliseconds: seconds * 1000 + 7 };
            assert_eq!(Moment::parse(&moment.rfc3339()), Some(moment));
        }
        for wrong in ["", "2026-03-01", "2026-03-01T09:05:07Z", "2026-13-01T09:05:07.042Z", "2026-03-01T09:05:07.04éZ"]
        {
            assert_eq!(Moment::parse(wrong), None, "{wrong}");
        }
    }

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
