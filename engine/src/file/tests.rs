//! What reading a text promises: right values, right places, and one clear problem where it is not YAML.

use std::time::{Duration, Instant};

use super::parse::parse;
use super::source::{SourceId, Sources, Span};
use super::tree::{Node, Value};

fn tree(text: &str) -> Node {
    let mut problems = Vec::new();
    let node = parse(SourceId(0), text, &mut problems).unwrap();
    assert_eq!(problems, [], "{text}");
    node
}

fn at(text: &str, span: Span) -> &str {
    &text[span.offset..span.end()]
}

/// `code line:column` of everything wrong with a text.
fn wrong(text: &str) -> Vec<String> {
    let mut sources = Sources::default();
    let source = sources.add("file.yaml", text);
    let mut problems = Vec::new();
    if let Err(problem) = parse(source, text, &mut problems) {
        problems = vec![*problem];
    }
    let place = |span| {
        let (line, column) = sources.line_column(span);
        format!("{line}:{column}")
    };
    problems
        .iter()
        .map(|problem| {
            let related: String = problem.related.iter().map(|(span, _)| format!(" and {}", place(*span))).collect();
            format!("{} {}{related}", problem.code, place(problem.span))
        })
        .collect()
}

#[test]
fn every_value_has_its_type() {
    let text =
        "{a: 1, b: 2.5e-3, c: no, d: ~, e: '5', f: [true, off, 1_000, 017, 3e-4], g: !!str 7, h: !!float '1', i: tRue}";
    assert_eq!(
        tree(text).to_json().to_string(),
        r#"{"a":1,"b":0.0025,"c":"no","d":null,"e":"5","f":[true,"off","1_000",17,0.0003],"g":"7","h":1.0,"i":"tRue"}"#
    );
    assert_eq!(tree("a:\nb: |\n  x\n  y\n").to_json().to_string(), r#"{"a":null,"b":"x\ny\n"}"#);
    assert_eq!(tree("a: .inf").get("a").unwrap().value, Value::Float(f64::INFINITY));
}

#[test]
fn every_key_and_value_has_its_bytes() {
    let text = "# größe\n\"é\": {x: \"ü y\", z: [1, {q: 2} , ] , } # } ]\nb:\n  - c: 1\n    d: >-\n      x\n      y\n  - []\nnull: ~\n";
    let root = tree(text);
    let Value::Map(entries) = &root.value else { panic!("a mapping") };
    assert_eq!(at(text, entries[0].key_span), "\"é\"");
    assert_eq!(at(text, entries[0].value.span), "{x: \"ü y\", z: [1, {q: 2} , ] , }");
    assert_eq!(at(text, root.get("é").unwrap().get("x").unwrap().span), "\"ü y\"");
    let z = root.get("é").unwrap().get("z").unwrap();
    assert_eq!(at(text, z.span), "[1, {q: 2} , ]");
    let Value::List(items) = &root.get("b").unwrap().value else { panic!("a list") };
    assert_eq!(at(text, items[0].span), "c: 1\n    d: >-\n      x\n      y");
    assert_eq!(at(text, items[1].span), "[]");
    assert_eq!(at(text, root.get("b").unwrap().span), "- c: 1\n    d: >-\n      x\n      y\n  - []");
    assert_eq!((entries[2].key.as_str(), at(text, entries[2].value.span)), ("null", "~"));
    assert!(at(text, root.span).starts_with("\"é\"") && at(text, root.span).ends_with("null: ~"));
}

#[test]
fn line_and_column_count_characters_in_any_line_ending() {
    let text = "a: 1\r\n\"ééé\": {b: 2, c: 3}\r\n";
    let mut sources = Sources::default();
    sources.add("file.yaml", text);
    let root = tree(text);
    assert_eq!(sources.line_column(root.get("ééé").unwrap().get("c").unwrap().span), (2, 18));
    let text = "\u{feff}a: 1\n";
    assert_eq!(at(text, tree(text).get("a").unwrap().span), "1");
}

#[test]
fn an_alias_stands_where_it_is_used() {
    let text = "a: &x {q: 017}\nb: *x\n";
    let b = tree(text).get("b").unwrap().clone();
    assert_eq!((at(text, b.span), at(text, b.get("q").unwrap().span)), ("*x", "*x"));
    assert_eq!(b.to_json().to_string(), r#"{"q":17}"#);
    assert_eq!(tree("a: &x b\n*x : 1\n&y 2: *y\n").to_json().to_string(), r#"{"a":"b","b":1,"2":2}"#);
}

#[test]
fn a_mapping_of_one_in_a_list_needs_no_braces() {
    let text = "[a: 1 , b]";
    let Value::List(items) = tree(text).value else { panic!("a list") };
    assert_eq!((items.len(), at(text, items[0].span)), (2, "a: 1"));
}

#[test]
fn duplicate_keys_and_merge_keys_are_reported_together_at_every_depth() {
    assert_eq!(
        wrong("a: 1\nb: {c: 1, d: 2, c: 3}\na: 2\n<<: {e: 1}\n? [x]\n: 1\n"),
        ["duplicate-key 2:17 and 2:5", "duplicate-key 3:1 and 1:1", "merge-key 4:1", "bad-key 5:3"]
    );
    assert_eq!(wrong("'<<': 1\n"), [""; 0]);
}

#[test]
fn what_is_not_yaml_is_one_problem_at_its_place() {
    for (text, expected) in [
        ("a: 1\n\tb: 2\n", "syntax 2:1"),
        ("a:\n\t- 1\n", "syntax 2:1"),
        ("é: 1\nb: [1, 2\nc: 3\n", "syntax 3:2"),
        ("a: b: c\n", "syntax 1:5"),
        ("é: \"ü\": c\n", "syntax 1:7"),
        ("{\"a\": 1\n", "syntax 1:1"),
        ("@a: 1\n", "syntax 1:1"),
        ("a: x\0y\n", "syntax 1:5"),
        ("a: 1\nb: 2\n c: 3\n", "syntax 3:3"),
        ("a: \"x\n", "syntax 2:1"),
        ("a: *nope\n", "syntax 1:4"),
        ("a: &x [*x]\n", "syntax 1:8"),
        ("a: 1\n---\nb: 2\n", "second-document 3:1"),
        ("a: {b: ${vars.x}}\n", "syntax 1:9"),
        ("a: !include é.yaml\n", "unknown-tag 1:4"),
        ("é: !!set x\n", "unknown-tag 1:4"),
        ("a: !!map [x]\n", "unknown-tag 1:4"),
        ("a: !!int x\n", "syntax 1:10"),
        // What comes behind the document is read, too.
        ("\"a\" b\n", "syntax 1:5"),
        ("a: 1\n...\n@\n", "syntax 3:1"),
    ] {
        assert_eq!(wrong(text), [expected], "{text}");
    }
    assert_eq!(wrong("---\na: 1\n...\n"), [""; 0]);
}

fn alias_of(level: usize) -> String {
    if level == 0 { "x".to_owned() } else { format!("*a{}", level - 1) }
}

#[test]
fn hostile_texts_end_early() {
    let bomb = (1..10).fold("a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned(), |text, level| {
        let alias = format!("*a{}", level - 1);
        format!("{text}a{level}: &a{level} [{}]\n", vec![alias; 9].join(", "))
    });
    let deep_block: String = (0..1000).map(|level| format!("{}a:\n", " ".repeat(level))).collect();
    let deep_aliases: String = (0..1000).map(|level| format!("a{level}: &a{level} [{}]\n", alias_of(level))).collect();
    for (text, expected) in [
        ("[".repeat(20_000), "too-deep 1:65"),
        ("{a: ".repeat(20_000), "too-deep 1:257"),
        (deep_block, "too-deep 65:65"),
        (bomb, "too-many-aliases 6:10"),
        (deep_aliases, "too-deep 64:12"),
        (format!("a: [{}]", "1, ".repeat(300_000)), "too-large 1:749996"),
        (" ".repeat((1 << 20) + 1), "too-large 1:1"),
    ] {
        let started = Instant::now();
        let found = wrong(&text);
        assert!(started.elapsed() < Duration::from_secs(20), "{expected} took {:?}", started.elapsed());
        assert_eq!(found, [expected]);
    }
}

#[test]
fn a_tree_survives_json() {
    let root = tree("{a: [1, 2.0, 3e-4, x, true, null], b: {c: {}}, d: []}");
    let json = serde_json::to_string(&root.to_json()).unwrap();
    assert_eq!(Node::from_json(&serde_json::from_str(&json).unwrap()).to_json(), root.to_json());
    assert_eq!(json, r#"{"a":[1,2.0,0.0003,"x",true,null],"b":{"c":{}},"d":[]}"#);
}
