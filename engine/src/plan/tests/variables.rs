//! Variables and the environment.

use super::*;

#[test]
fn variables_keep_their_type_and_say_where_they_were_given() {
    let text = |vars: &str, value: &str| {
        format!("version: 1\nvars: {vars}\nstages:\n  rows: {{ uses: dataset, with: {{ source: {value} }} }}\n")
    };
    let source = |vars: &str, value: &str| plan(&text(vars, value)).stages[0].parameters["source"].to_string();
    assert_eq!(
        source("{ a: x, b: '${vars.a}y', c: 3, d: 0.0001 }", "'${vars.b}-${vars.c}-${vars.d}'"),
        r#""xy-3-0.0001""#
    );
    assert_eq!(source("{ a: { b: deep } }", "'${ vars.a.b }'"), r#""deep""#);
    assert_eq!(
        wrong(&text("{ a: 3 }", "'${vars.a}'")),
        ["wrong-type 4:42 & 2:12 `source`: expected a string, found an integer (put it in quotes)"]
    );
    assert_eq!(
        wrong(&text("{ a: '${vars.b}', b: [1] }", "'${vars.a}${vars.b}'")),
        [
            "unknown-variable 2:13 no variable `b` (declare it under `vars:`, above where it is used)",
            "wrong-type 4:52 `vars.b` is a list and cannot be part of a string",
        ]
    );
    assert_eq!(
        wrong(&text("{}", "'é ${env.HF_TOKEN} ${env.NOPE} ${foo} ${open'")),
        [
            "secret-in-file 4:45 `HF_TOKEN` is a secret, and a secret never enters a pipeline (leave it out: what needs a token (the Hub: HF_TOKEN) reads it from the environment itself)",
            "unknown-variable 4:61 environment variable `NOPE` is not set (set it where the program is started: `NOPE=… pipeline …`)",
            "bad-reference 4:73 `${foo}` is no reference (write `$${` for a string that contains `${`)",
            "bad-reference 4:80 `${` is not closed",
        ]
    );
}

#[test]
fn a_number_that_cannot_be_kept_is_an_error_where_it_stands() {
    let text = |vars: &str| {
        format!(
            "version: 1\nvars: {vars}\nstages:\n  rows: {{ uses: dataset, with: {{ source: '${{vars.a}}.jsonl' }} }}\n"
        )
    };
    for (number, why) in
        [("18446744073709551615", "at most 64 bits"), ("1e999", "too large"), ("1e-999", "too near to 0")]
    {
        let found = wrong(&text(&format!("{{ a: {number} }}")));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("out-of-range 2:12 ") && found[0].contains(why), "{found:?}");
        let found = wrong_over(&text("{ a: b }"), &[&format!("vars.a={number}")]);
        assert!(found[0].starts_with("out-of-range ") && found[0].contains(why), "{found:?}");
    }
    plan(&text("{ a: '18446744073709551615' }"));
    plan(&text("{ a: -9223372036854775808 }"));
}

#[test]
fn a_variable_of_the_machine_that_is_not_utf8_is_set_all_the_same() {
    let text = |when: &str, source: &str| {
        format!("version: 1\nstages:\n  rows: {{ uses: dataset, when: '{when}', with: {{ source: '{source}' }} }}\n")
    };
    let not_utf8 = "environment variable `NOT_UTF8` is set to what is not UTF-8";
    for text in [text("true", "${env.NOT_UTF8}"), text("${env.NOT_UTF8}", "rows.jsonl")] {
        let found = wrong(&text);
        assert!(found.len() == 1 && found[0].starts_with("bad-value ") && found[0].contains(not_utf8), "{found:?}");
    }
}

#[test]
fn variables_that_double_each_other_end_early() {
    for doubled in ["'${vars.V}${vars.V}'", "['${vars.V}', '${vars.V}']"] {
        let vars: String =
            (1..60).map(|level| format!(", v{level}: {}", doubled.replace('V', &format!("v{}", level - 1)))).collect();
        let uses = "${vars.v59}";
        let text = format!(
            "version: 1\nvars: {{ v0: xxxxxxxxxx{vars} }}\nstages:\n  rows: {{ uses: dataset, with: {{ source: '{uses}' }} }}\n"
        );
        let found = wrong(&text);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("too-large 2:") && found[0].contains("more than 16 MiB"), "{found:?}");
    }
}

#[test]
fn a_variable_that_nothing_uses_is_a_warning() {
    let plan =
        plan("version: 1\nvars: { a: 1, b: x }\nstages:\n  r: { uses: dataset, with: { source: '${vars.b}' } }\n");
    assert_eq!((plan.warnings.len(), plan.warnings[0].code), (1, "unused-variable"));
    assert_eq!(plan.sources.line_column(plan.warnings[0].span), (2, 9));
}

#[test]
fn a_variable_of_a_value_that_the_command_line_replaces_is_used() {
    let text = "version: 1\nvars: { go: true, b: x, c: 1 }\nstages:\n  r: { uses: dataset, when: '${vars.go}', with: { source: '${vars.b}' } }\n";
    let plan = plan_over(text, &["r.when=true", "r.source=y"]);
    let warned: Vec<&str> = plan.warnings.iter().map(|warning| warning.message.as_str()).collect();
    assert_eq!(warned, ["variable `c` is not used"]);
}
