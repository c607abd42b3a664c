//! Plain scalars, by the core schema of YAML 1.2 (section 10.3.2) and by nothing else.
//!
//! The parser's own guesses are wider (`1_000` a number, `tRue` a boolean, `017` a float), so the text decides.

use super::tree::Value;

/// What a scalar without quotes stands for.
pub fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => Value::Bool(true),
        "false" | "False" | "FALSE" => Value::Bool(false),
        _ => number(text).unwrap_or_else(|| Value::String(text.to_owned())),
    }
}

fn number(text: &str) -> Option<Value> {
    let (negative, digits) = match text.as_bytes()[0] {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    if let Some(whole) = based(text) {
        return Some(whole);
    }
    match digits {
        ".inf" | ".Inf" | ".INF" => {
            return Some(Value::Float(if negative { f64::NEG_INFINITY } else { f64::INFINITY }));
        }
        ".nan" | ".NaN" | ".NAN" if digits == text => return Some(Value::Float(f64::NAN)),
        _ => {}
    }
    if !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) {
        // An integer beyond 64 bits keeps its size as a float; no field takes it for a whole one.
        return text.parse().map(Value::Integer).or_else(|_| text.parse().map(Value::Float)).ok();
    }
    is_float(digits).then(|| text.parse().ok().map(Value::Float)).flatten()
}

/// Why a number that is written so cannot be kept, where it cannot: the nearest that can is another one.
pub fn lost(text: &str, value: &Value) -> Option<&'static str> {
    let Value::Float(kept) = value else { return None };
    let digits = text.trim_start_matches(['-', '+']);
    let mantissa = digits.split(['e', 'E']).next().unwrap_or_default();
    let whole = digits.trim_start_matches('0');
    match () {
        () if kept.is_infinite() && digits.bytes().any(|byte| byte.is_ascii_digit()) => Some("it is too large"),
        () if *kept == 0.0 && mantissa.bytes().any(|byte| matches!(byte, b'1'..=b'9')) => Some("it is too near to 0"),
        () if !whole.is_empty()
            && whole.bytes().all(|byte| byte.is_ascii_digit())
            && kept.abs().to_string() != whole =>
        {
            Some("an integer has at most 64 bits, one of which is its sign")
        }
        () => None,
    }
}

/// `0o17` and `0x1f`, which take no sign.
fn based(text: &str) -> Option<Value> {
    let (digits, base) =
        text.strip_prefix("0o").map(|digits| (digits, 8)).or_else(|| Some((text.strip_prefix("0x")?, 16)))?;
    let fits = digits.chars().all(|digit| digit.is_digit(base));
    fits.then(|| i64::from_str_radix(digits, base).ok().map(Value::Integer)).flatten()
}

/// `[0-9]+ ( \. [0-9]* )?` or `\. [0-9]+`, then perhaps an exponent.
fn is_float(text: &str) -> bool {
    let (mantissa, exponent) = match text.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent.strip_prefix(['+', '-']).unwrap_or(exponent))),
        None => (text, None),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let all_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let has_digits = !(whole.is_empty() && fraction.is_empty());
    let exponent_fits = exponent.is_none_or(|exponent| !exponent.is_empty() && all_digits(exponent));
    has_digits && all_digits(whole) && all_digits(fraction) && exponent_fits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_core_schema() {
        for (text, value) in [("0", 0), ("17", 17), ("-3", -3), ("+5", 5), ("017", 17), ("0x1f", 31), ("0o17", 15)] {
            assert_eq!(plain(text), Value::Integer(value), "{text}");
        }
        for (text, value) in [
            ("1.", 1.0),
            (".5", 0.5),
            ("-.5", -0.5),
            ("1.10", 1.1),
            ("3e-4", 3e-4),
            ("1E+3", 1e3),
            ("99999999999999999999", 1e20),
        ] {
            assert_eq!(plain(text), Value::Float(value), "{text}");
        }
        assert_eq!(plain("-.inf"), Value::Float(f64::NEG_INFINITY));
        assert!(matches!(plain(".nan"), Value::Float(nan) if nan.is_nan()));
    }

    #[test]
    fn what_only_looks_like_a_number_or_a_truth_value_is_text() {
        for text in [
            "no", "off", "yes", "tRue", "1_000", "1e", "e5", ".", "-", "+", "1.2.3", "0x", "0o8", "-0x1", "-.nan",
            "inf", "nan", "1:30", "12h", "NuLL", "é",
        ] {
            assert_eq!(plain(text), Value::String(text.to_owned()), "{text}");
        }
    }

    #[test]
    fn a_number_that_would_be_another_one_is_known() {
        for text in
            ["18446744073709551615", "-9223372036854775809", "1e999", "-1e999", "1e-999", "99999999999999999999"]
        {
            assert!(lost(text, &plain(text)).is_some(), "{text}");
        }
        for text in
            ["9223372036854775807", "100000000000000000000", "0.1", "0e-999", "007.5", ".inf", "-.Inf", ".nan", "0.0"]
        {
            assert_eq!(lost(text, &plain(text)), None, "{text}");
        }
    }

    #[test]
    fn nothing_has_four_spellings() {
        for text in ["", "~", "null", "Null", "NULL"] {
            assert_eq!(plain(text), Value::Null);
        }
    }
}
