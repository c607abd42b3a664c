//! `when:`: which stages it leaves out, and what is said of a wrong one.

use super::*;

const TEXT: &str = "version: 1
vars: { evaluate: false, size: small }
stages:
  rows: { uses: dataset, with: { source: x } }
  a: { uses: split, with: { rows: rows }, when: \"${vars.evaluate}\" }
  b: { uses: split, with: { rows: a.left } }
  c: { uses: split, with: { rows: rows }, needs: [b] }
  d: { uses: split, with: { rows: rows }, when: \"${vars.size} == small and not ${env.NOT_SET}\" }
publish: { a.left: ./a, d.left: ./d, d.right: ./right }
";

#[test]
fn a_false_condition_leaves_out_its_stage_and_those_that_need_it() {
    let plan = plan(TEXT);
    assert_eq!(ids(&plan), ["rows", "d"]);
    let left_out: Vec<_> = plan.left_out.iter().map(|out| (out.stage.as_str(), out.follows.as_deref())).collect();
    assert_eq!(left_out, [("a", None), ("b", Some("a")), ("c", Some("b"))]);
    assert_eq!(plan.sources.line_column(plan.left_out[0].span), (5, 49));
    assert_eq!(plan.left_out[0].publish, [Path::new("./a")]);
    assert_eq!(plan.publish.len(), 2);
    assert_eq!(edges(&plan).len(), 1);
    assert_eq!(ids(&plan_over(TEXT, &["vars.evaluate=true"])).len(), 5);
    assert_eq!(ids(&plan_over(TEXT, &["a.when=true"])).len(), 5);
    assert_eq!(ids(&plan_over(TEXT, &["rows.when=false"])).len(), 0);
    assert_eq!(ids(&plan_over(TEXT, &["d.when=${vars.size} == large"])), ["rows"]);
    // What is left out is checked all the same.
    assert_eq!(wrong_over(TEXT, &["a.left=3"]), ["unknown-key command line:3 unknown key `left` (known keys: `rows`)"]);
}

#[test]
fn all_children_are_left_out_together() {
    let text = TEXT.replace("with: { source: x }", "matrix: { source: [x, y] }");
    let plan = plan(&text.replace("publish", "# publish"));
    assert_eq!(ids(&plan), ["rows[source=x]", "rows[source=y]", "d[source=x]", "d[source=y]"]);
    assert_eq!(plan.left_out.iter().map(|out| out.stage.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
}

#[test]
fn a_condition_is_in_no_key() {
    let parameters = |text: &str| plan(text).stage("d").unwrap().parameters.to_string();
    assert_eq!(parameters(TEXT), parameters(&TEXT.replace("== small", "!= large")));
}

#[test]
fn a_wrong_condition_is_explained() {
    let of = |condition: &str| wrong(&TEXT.replace("${vars.evaluate}", condition));
    assert_eq!(
        of("${vars.evaluate} && true"),
        [
            "bad-condition 5:67 this is no condition: conditions have `==`, `!=`, `and`, `or`, `not` and parentheses (write `${vars.x}`, or compare: `${vars.size} == large and not ${env.CI}`)"
        ]
    );
    assert_eq!(of("${vars.evalute}")[0], "unknown-variable 5:50 no variable `evalute` (did you mean `vars.evaluate`?)");
    let has = |condition: &str, code: &str| of(condition).iter().any(|line| line.starts_with(code));
    assert!(has("${env.HF_TOKEN} == x", "secret-in-file 5:50"));
    assert!(has("${matrix.x}", "bad-reference 5:50"));
    assert_eq!(
        wrong_over(TEXT, &["b.when=3"]),
        ["wrong-type command line:8 `when`: expected true or false, found an integer"]
    );
    let found = of("${vars.size}");
    assert!(
        found[0].starts_with("bad-condition 5:50 this is no condition: expected true or false, found a string"),
        "{found:?}"
    );
}
