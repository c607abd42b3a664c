//! `strftime_now` of chat templates: a day that stands still, or the local time where that is asked for.

#![allow(unsafe_code, reason = "the C library alone knows the local time")]

use std::cell::Cell;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::libc;

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A moment as a calendar and a clock show it.
#[derive(Debug, Clone, Copy)]
struct Moment {
    year: i32,
    /// From 1.
    month: i32,
    day: i32,
    /// From 0, which is a Sunday.
    weekday: i32,
    /// From 0.
    day_of_year: i32,
    hour: i32,
    minute: i32,
    second: i32,
    microsecond: u32,
    since_1970: u64,
}

/// Midnight of the day that Llama's own templates fall back to, of no time zone: a prompt that holds the date of its
/// making would differ from run to run.
const STILL: Moment = Moment {
    year: 2024,
    month: 7,
    day: 26,
    weekday: 5,
    day_of_year: 207,
    hour: 0,
    minute: 0,
    second: 0,
    microsecond: 0,
    since_1970: 1_721_952_000,
};

thread_local! {
    /// When it is for the templates that this thread renders; none where the day stands still. Like the account of a
    /// rendering it is the thread's: a template's functions know no other state.
    static NOW: Cell<Option<Moment>> = const { Cell::new(None) };
}

/// Does some work in which `strftime_now` has the local time, as in transformers. It is the same in all of it, since
/// the turns of a conversation are found by rendering it several times.
pub(super) fn at_local_time<T>(work: impl FnOnce() -> T) -> T {
    let _restores = Restores(NOW.replace(Some(Moment::now())));
    work()
}

/// Sets [`NOW`] back, also if the work panics.
struct Restores(Option<Moment>);

impl Drop for Restores {
    fn drop(&mut self) {
        NOW.set(self.0);
    }
}

/// What `strftime_now` gives.
pub(super) fn strftime(pattern: &str) -> String {
    NOW.get().unwrap_or(STILL).write(pattern)
}

impl Moment {
    fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = libc::time_t::try_from(since.as_secs()).unwrap_or_default();
        // SAFETY: it has numbers and a pointer, which may all be zero.
        let mut time: libc::tm = unsafe { std::mem::zeroed() };
        // SAFETY: both values live, and nobody else writes to them.
        let is_known = !unsafe { libc::localtime_r(&raw const seconds, &raw mut time) }.is_null();
        if !is_known {
            return STILL;
        }
        Self {
            year: time.tm_year + 1900,
            month: time.tm_mon + 1,
            day: time.tm_mday,
            weekday: time.tm_wday,
            day_of_year: time.tm_yday,
            hour: time.tm_hour,
            minute: time.tm_min,
            second: time.tm_sec,
            microsecond: since.subsec_micros(),
            since_1970: since.as_secs(),
        }
    }

    fn write(self, pattern: &str) -> String {
        let mut text = String::new();
        let mut letters = pattern.chars().peekable();
        while let Some(letter) = letters.next() {
            if letter != '%' {
                text.push(letter);
                continue;
            }
            // glibc's flag: a number without what pads it.
            let flag = if letters.next_if_eq(&'-').is_some() { "-" } else { "" };
            let Some(directive) = letters.next() else {
                text.extend(["%", flag]);
                break;
            };
            match self.written(directive) {
                Some(written) if flag.is_empty() => text.push_str(&written),
                // This one is Python's own, and has no flag.
                Some(written) if directive != 'f' => text.push_str(without_padding(&written)),
                _ => {
                    text.extend(["%", flag]);
                    text.push(directive);
                }
            }
        }
        text
    }

    /// What a directive writes, in the C locale; nothing of time zones, as of a Python `datetime` that has none.
    fn written(self, directive: char) -> Option<String> {
        let Self { year, month, day, weekday, day_of_year, hour, minute, second, .. } = self;
        let day_name = DAYS[(weekday % 7) as usize];
        let month_name = MONTHS[((month - 1) % 12) as usize];
        let hour_of_twelve = if hour % 12 == 0 { 12 } else { hour % 12 };
        let half = if hour < 12 { "am" } else { "pm" };
        let since_monday = (weekday + 6) % 7;
        Some(match directive {
            'a' => day_name[..3].to_owned(),
            'A' => day_name.to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'B' => month_name.to_owned(),
            'c' => self.write("%a %b %e %H:%M:%S %Y"),
            'C' => format!("{:02}", year / 100),
            'd' => format!("{day:02}"),
            'D' | 'x' => self.write("%m/%d/%y"),
            'e' => format!("{day:2}"),
            'f' => format!("{:06}", self.microsecond),
            'F' => self.write("%Y-%m-%d"),
            'g' => format!("{:02}", self.iso_week().0 % 100),
            'G' => self.iso_week().0.to_string(),
            'H' => format!("{hour:02}"),
            'I' => format!("{hour_of_twelve:02}"),
            'j' => format!("{:03}", day_of_year + 1),
            'k' => format!("{hour:2}"),
            'l' => format!("{hour_of_twelve:2}"),
            'm' => format!("{month:02}"),
            'M' => format!("{minute:02}"),
            'n' => "\n".to_owned(),
            'p' => half.to_uppercase(),
            'P' => half.to_owned(),
            'r' => self.write("%I:%M:%S %p"),
            'R' => self.write("%H:%M"),
            's' => self.since_1970.to_string(),
            'S' => format!("{second:02}"),
            't' => "\t".to_owned(),
            'T' | 'X' => self.write("%H:%M:%S"),
            'u' => (since_monday + 1).to_string(),
            'U' => format!("{:02}", (day_of_year + 7 - weekday) / 7),
            'V' => format!("{:02}", self.iso_week().1),
            'w' => weekday.to_string(),
            'W' => format!("{:02}", (day_of_year + 7 - since_monday) / 7),
            'y' => format!("{:02}", year % 100),
            'Y' => year.to_string(),
            'z' | 'Z' => String::new(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }

    /// The year and the week of ISO 8601: the week of a year's first Thursday is its first one.
    fn iso_week(self) -> (i32, i32) {
        let thursday = self.day_of_year + 3 - (self.weekday + 6) % 7;
        let days_in = |year: i32| if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) { 366 } else { 365 };
        match thursday {
            ..0 => (self.year - 1, (thursday + days_in(self.year - 1)) / 7 + 1),
            _ if thursday >= days_in(self.year) => (self.year + 1, 1),
            _ => (self.year, thursday / 7 + 1),
        }
    }
}

/// A number without the zeros and spaces before it; of zeros alone the last. Other text, such as a date, as it is.
fn without_padding(written: &str) -> &str {
    let is_number = written.bytes().all(|letter| letter == b' ' || letter.is_ascii_digit());
    match written.trim_start_matches([' ', '0']) {
        _ if !is_number => written,
        "" => &written[written.len().saturating_sub(1)..],
        bare => bare,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_date_stands_still() {
        assert_eq!(strftime("%d %b %Y"), "26 Jul 2024");
        assert_eq!(strftime("%A, %F 100%%"), "Friday, 2024-07-26 100%");
        assert_eq!(strftime("%B %-d, %Y, %-m/%-H at %-I:%M %p"), "July 26, 2024, 7/0 at 12:00 AM");
        assert_eq!(strftime("%u %w %U %W %V %G %s %D %R%z"), "5 5 29 30 30 2024 1721952000 07/26/24 00:00");
        assert_eq!(strftime("%Q %-Q %"), "%Q %-Q %");
    }

    #[test]
    fn a_flag_drops_what_pads_a_number_alone() {
        // As `datetime(2024, 7, 26).strftime` writes them: Python 3.11 on glibc 2.36.
        for (pattern, expected) in [
            (
                "%-d %-e %-m %-y %-g %-C %-Y %-G %-j %-U %-W %-V %-u %-w %-s",
                "26 26 7 24 24 20 2024 2024 208 29 30 30 5 5 1721952000",
            ),
            ("%-H %-k %-I %-l %-M %-S", "0 0 12 12 0 0"),
            (
                "%-D|%-x|%-F|%-T|%-X|%-R|%-r|%-c",
                "07/26/24|07/26/24|2024-07-26|00:00:00|00:00:00|00:00|12:00:00 AM|Fri Jul 26 00:00:00 2024",
            ),
            ("%-a %-A %-b %-h %-B %-p %-P%-z%-Z%-n%-t%-%", "Fri Friday Jul Jul July AM am\n\t%"),
            ("%-f %-Q %-E %-", "%-f %-Q %-E %-"),
            ("%k|%l|%e|%D|%T", " 0|12|26|07/26/24|00:00:00"),
        ] {
            assert_eq!(strftime(pattern), expected, "{pattern}");
        }
    }

    /// As `datetime(…).strftime` writes them: Python 3.11 on glibc.
    #[test]
    fn other_moments_are_written_as_python_writes_them() {
        let of = |date: [i32; 3], [weekday, day_of_year]: [i32; 2], time: [i32; 3], microsecond: u32| Moment {
            year: date[0],
            month: date[1],
            day: date[2],
            weekday,
            day_of_year,
            hour: time[0],
            minute: time[1],
            second: time[2],
            microsecond,
            since_1970: 0,
        };
        for (moment, expected) in [
            (
                of([2021, 1, 1], [5, 0], [0, 5, 9], 7),
                "Fri January Fri Jan  1 00:05:09 2021|20 01  1 000007 20 2020 00 12 001  0 12 01 05 AM am 12:05:09 AM|\
                 09 5 00 53 5 00 21 2021 1 1",
            ),
            (
                of([2020, 12, 31], [4, 365], [12, 0, 0], 0),
                "Thu December Thu Dec 31 12:00:00 2020|20 31 31 000000 20 2020 12 12 366 12 12 12 00 PM pm 12:00:00 PM|\
                 00 4 52 53 4 52 20 2020 31 366",
            ),
            (
                of([2024, 12, 30], [1, 364], [13, 45, 59], 999_999),
                "Mon December Mon Dec 30 13:45:59 2024|20 30 30 999999 25 2025 13 01 365 13  1 12 45 PM pm 01:45:59 PM|\
                 59 1 52 01 1 53 24 2024 30 365",
            ),
            (
                of([2026, 2, 3], [2, 33], [23, 59, 1], 0),
                "Tue February Tue Feb  3 23:59:01 2026|20 03  3 000000 26 2026 23 11 034 23 11 02 59 PM pm 11:59:01 PM|\
                 01 2 05 06 2 05 26 2026 3 34",
            ),
            (
                of([2023, 1, 1], [0, 0], [9, 0, 0], 0),
                "Sun January Sun Jan  1 09:00:00 2023|20 01  1 000000 22 2022 09 09 001  9  9 01 00 AM am 09:00:00 AM|\
                 00 7 01 52 0 00 23 2023 1 1",
            ),
        ] {
            let written = moment
                .write("%a %B %c|%C %d %e %f %g %G %H %I %j %k %l %m %M %p %P %r|%S %u %U %V %w %W %y %Y %-d %-j");
            assert_eq!(written, expected);
        }
    }

    #[test]
    fn the_local_time_is_within_its_work_alone() {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let before = now();
        let (begin, end) = at_local_time(|| (strftime("%s %f"), strftime("%s %f")));
        assert_eq!(begin, end);
        let seconds: u64 = begin.split(' ').next().unwrap().parse().unwrap();
        assert!((before..=now()).contains(&seconds), "{begin}");
        assert_eq!(strftime("%F"), "2024-07-26");
        assert!(std::panic::catch_unwind(|| at_local_time::<()>(|| panic!("a template"))).is_err());
        assert_eq!(strftime("%F"), "2024-07-26");
        // No zone is a day ahead of another or behind it by more than its hours.
        let day = at_local_time(|| strftime("%Y %j"));
        let of_year = |days: u64| days as f64 / 365.2425 + 1970.0;
        let (year, day) = day.split_once(' ').unwrap();
        let found = year.parse::<f64>().unwrap() + (day.parse::<f64>().unwrap() - 1.0) / 365.2425;
        assert!((found - of_year(before / 86_400)).abs() < 0.01, "{found}");
    }
}
