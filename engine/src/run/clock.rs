//! Times as people and sorted lists need them: UTC, without a time zone database.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chrono::{DateTime, NaiveDateTime, Utc};

/// RFC 3339 with milliseconds, as `chrono` spells formats.
const RFC3339: &str = "%Y-%m-%dT%H:%M:%S%.3fZ";

/// The moment in a run's id.
const RUN_ID: &str = "%Y%m%d-%H%M%S-%3f";

/// The last millisecond of the year 9999: later years have more digits, and their ids are not sorted by time.
const LAST_OF_RUN_IDS: Moment = Moment { milliseconds: 253_402_300_799_999 };

/// A moment, to the millisecond.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    milliseconds: u64,
}

impl Moment {
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
        self.utc().format(RFC3339).to_string()
    }

    /// Reads what [`Moment::rfc3339`] writes, and nothing else.
    pub fn parse(text: &str) -> Option<Self> {
        let time = NaiveDateTime::parse_from_str(text, RFC3339).ok()?.and_utc();
        let moment = Self { milliseconds: u64::try_from(time.timestamp_millis()).ok()? };
        (moment.rfc3339() == text).then_some(moment)
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

    /// This moment, or the first one behind all of these where one of them is not earlier.
    #[must_use]
    pub fn behind(self, earlier: impl Iterator<Item = Self>) -> Self {
        let next = |earlier: Self| Self { milliseconds: earlier.milliseconds.saturating_add(1) };
        earlier.map(next).fold(self, Ord::max)
    }

    /// A new run's id, such as `20260301-090507-042-5f3a`: sorted by time, and different even for runs of the same
    /// millisecond.
    pub fn run_id(self) -> String {
        // The standard library seeds each state from the system's random source.
        let random = RandomState::new().build_hasher().finish() & 0xffff;
        format!("{}-{random:04x}", self.utc().format(RUN_ID))
    }

    /// The moment of a run's id; `None` of any other name, and where no later id can exist.
    pub fn of_run_id(id: &str) -> Option<Self> {
        let (text, random) = id.rsplit_once('-')?;
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if random.len() != 4 || !random.bytes().all(is_digit) {
            return None;
        }
        let time = NaiveDateTime::parse_from_str(text, RUN_ID).ok()?.and_utc();
        let moment = Self { milliseconds: u64::try_from(time.timestamp_millis()).ok()? };
        let is_exact = moment.utc().format(RUN_ID).to_string() == text;
        (is_exact && moment < LAST_OF_RUN_IDS).then_some(moment)
    }

    fn utc(self) -> DateTime<Utc> {
        i64::try_from(self.milliseconds)
            .ok()
            .and_then(DateTime::from_timestamp_millis)
            .unwrap_or(DateTime::<Utc>::MAX_UTC)
    }
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
        for wrong in [
            "",
            "2026-03-01",
            "2026-03-01T09:05:07Z",
            "2026-13-01T09:05:07.042Z",
            "2026-02-30T09:05:07.042Z",
            "2026-03-01T09:05:07.04éZ",
        ] {
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

    #[test]
    fn an_id_has_its_moment_and_no_other_name_has_one() {
        let moment = Moment { milliseconds: 1_772_355_907_042 };
        assert_eq!(Moment::of_run_id(&moment.run_id()), Some(moment));
        for other in [
            "",
            "run",
            "20260301-090507",
            "20261301-090507-042-5f3a",
            ".removed-20260301-090507-042-5f3a",
            "20260301-090507-042",
            "20260301-090507-042-",
            "20260301-090507-042-bak",
            "20260301-090507-042-back",
            "20260301-090507-042-5F3A",
            "20260301-090507-042-5f3a1",
            "20260301-090507-042-5f3a-bak",
            "+20260301-090507-042-5f3a",
            " 20260301-090507-042-5f3a",
        ] {
            assert_eq!(Moment::of_run_id(other), None, "{other}");
        }
    }

    #[test]
    fn no_id_puts_others_behind_the_year_9999() {
        let known = "99991231-235959-998-5f3a";
        let last = Moment::of_run_id(known).unwrap();
        let behind = Moment { milliseconds: 0 }.behind([last].into_iter());
        assert_eq!(behind, LAST_OF_RUN_IDS);
        assert!(behind.run_id().starts_with("99991231-235959-999-"));
        assert!(known < behind.run_id().as_str());
        for beyond in ["99991231-235959-999-5f3a", "+100000101-000000-000-5f3a", "100000101-000000-000-5f3a"] {
            assert_eq!(Moment::of_run_id(beyond), None, "{beyond}");
        }
    }

    #[test]
    fn a_moment_is_put_behind_those_that_are_not_earlier() {
        let [first, second, third] = [1, 2, 3].map(|milliseconds| Moment { milliseconds });
        assert_eq!(second.behind([first].into_iter()), second);
        assert_eq!(first.behind([second, first].into_iter()), third);
        assert_eq!(first.behind([first].into_iter()), second);
    }
}
