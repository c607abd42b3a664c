//! The stage: in which order rows come out, in which parts, and several datasets as one.

use parquet::basic::Compression;

use super::*;

fn numbers(folder: &Path, rows: usize) -> PathBuf {
    let lines: String = (0..rows).map(|n| format!("{{\"text\":\"{n}\"}}\n")).collect();
    write(folder, "numbers.jsonl", lines)
}

#[test]
fn a_shuffle_is_a_function_of_the_seed_and_the_rows() {
    let folder = tempfile::tempdir().unwrap();
    let file = [numbers(folder.path(), 1000)];
    let shuffled = |with: Value| run(folder.path(), &file, with).map(|made| column(&made, "text"));
    let one = shuffled(json!({"shuffle": true, "seed": 7})).unwrap();
    let mut sorted: Vec<usize> = one.iter().map(|text| text.parse().unwrap()).collect();
    // The order is part of every result: it must never change.
    assert_eq!(sorted[..6], EXPECTED_ORDER);
    sorted.sort_unstable();
    assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
    assert_eq!(
        shuffled(json!({"shuffle": true, "seed": 7, "limit": 10})).unwrap(),
        one[..10],
        "a limit takes the first of them"
    );
    assert_ne!(shuffled(json!({"shuffle": true, "seed": 8})).unwrap(), one);
    let text = std::fs::read_to_string(&file[0]).unwrap();
    let (first, second) = text.split_at(text.find("{\"text\":\"300\"").unwrap());
    let halves = [write(folder.path(), "a.jsonl", first), write(folder.path(), "b.jsonl", second)];
    assert_eq!(column(&run(folder.path(), &halves, json!({"shuffle": true, "seed": 7})).unwrap(), "text"), one);
}

/// The first rows of 1000 under seed 7.
const EXPECTED_ORDER: [usize; 6] = [42, 304, 802, 666, 840, 41];

#[test]
fn train_and_test_are_apart_and_stay_so_under_another_order() {
    let folder = tempfile::tempdir().unwrap();
    let file = [numbers(folder.path(), 500)];
    let parts = |with: Value| {
        let mut made = run_all(folder.path(), &file, with).unwrap();
        assert_eq!(made.len(), 2);
        let mut part = |name: &str| column(&made.remove(name).unwrap(), "text");
        (part("train"), part("test"))
    };
    let sorted = |texts: &[String]| {
        let mut numbers: Vec<usize> = texts.iter().map(|text| text.parse().unwrap()).collect();
        numbers.sort_unstable();
        numbers
    };
    let split = |test_size: f64, seed: u64| json!({"test_size": test_size, "seed": seed});
    let (train, test) = parts(json!({"train_test_split": split(0.1, 0)}));
    assert_eq!((train.len(), test.len()), (450, 50));
    assert_eq!(sorted(&[train.clone(), test.clone()].concat()), (0..500).collect::<Vec<_>>());
    let as_numbers: Vec<usize> = test.iter().map(|text| text.parse().unwrap()).collect();
    assert_eq!(as_numbers, sorted(&test), "without a shuffle rows stay in their order");
    let spread = as_numbers.iter().filter(|number| **number < 250).count();
    assert!((15..35).contains(&spread), "the held out rows are of all parts of the data: {spread}");

    let (shuffled_train, shuffled_test) = parts(json!({"train_test_split": split(0.1, 0), "shuffle": true, "seed": 3}));
    assert_ne!(shuffled_test, test);
    assert_eq!((sorted(&shuffled_train), sorted(&shuffled_test)), (sorted(&train), sorted(&test)));
    assert_ne!(sorted(&parts(json!({"train_test_split": split(0.1, 1)})).1), sorted(&test));
    assert_eq!(parts(json!({"train_test_split": split(7.0, 0), "limit": 30, "shuffle": true})).0.len(), 23);
    let error = run_all(folder.path(), &file, json!({"train_test_split": split(500.0, 0)})).unwrap_err();
    assert!(error.message.contains("500 of them `test`"), "{}", error.message);
}

/// The rows of two datasets, mixed.
fn mixed(folder: &Path, one: &Artifact, two: &Artifact, with: Value) -> Result<Artifact, StageError> {
    let bench = TestBench::new(folder).input_of("one.rows", &one.folder)?.input_of("two.rows", &two.folder)?;
    Ok(bench.run::<Dataset>(with)?.remove("rows").unwrap())
}

#[test]
fn datasets_are_made_one() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, texts: &[&str]| {
        let lines: String = texts.iter().map(|text| json!({"text": text}).to_string() + "\n").collect();
        run(folder.path(), &[write(folder.path(), name, lines)], json!({})).unwrap()
    };
    let (one, two) = (of("a.jsonl", &["a", "b", "c"]), of("b.jsonl", &["x", "y"]));
    let made = |with: Value| mixed(folder.path(), &one, &two, with).map(|made| column(&made, "text"));
    let both = json!([{"rows": "one"}, {"rows": "two"}]);
    assert_eq!(made(json!({"datasets": both})).unwrap(), ["a", "b", "c", "x", "y"]);
    assert_eq!(made(json!({"datasets": both, "mix": "interleave"})).unwrap(), ["a", "x", "b", "y"]);
    let filtered = json!({"datasets": both, "filter": "text in 'bxy'", "limit": 2});
    assert_eq!(made(filtered).unwrap(), ["b", "x"]);
    let weighted = json!({
        "datasets": [{"rows": "one", "weight": 1}, {"rows": "two", "weight": 9}], "mix": "interleave",
        "stopping_strategy": "all_exhausted", "seed": 1,
    });
    let drawn = made(weighted.clone()).unwrap();
    let count = |texts: &str| drawn.iter().filter(|text| texts.contains(text.as_str())).count();
    assert!(count("abc") == 3 && count("xy") > 6, "{drawn:?}");
    assert_eq!(made(weighted).unwrap(), drawn);

    let file = [write(folder.path(), "c.jsonl", "{\"input\":\"q\",\"output\":\"a\"}\n")];
    let other = run(folder.path(), &file, json!({})).unwrap();
    let error = mixed(folder.path(), &one, &other, json!({"datasets": both})).unwrap_err();
    let message = "the rows of `one` and `two` are different: plain text and prompts";
    assert_eq!(error.message, message);
    // What is in the store already is compared before anything runs.
    let params = Dataset::read(&Node::from_json(&json!({"datasets": both})), &mut Reader::default()).unwrap();
    let facts = |made: &Artifact| made.description.facts.clone();
    let known = |two| InputFacts::from([("one.rows".to_owned(), facts(&one)), ("two.rows".to_owned(), facts(two))]);
    let problems = Dataset::check(&params, &known(&other), Span::default());
    assert_eq!(problems.iter().map(|problem| problem.message.as_str()).collect::<Vec<_>>(), [message]);
    assert!(Dataset::check(&params, &known(&two), Span::default()).is_empty());
}

#[test]
fn neither_threads_nor_the_codec_of_the_source_change_a_bit() {
    let folder = tempfile::tempdir().unwrap();
    let texts: ArrayRef =
        Arc::new((0..5000).map(|n| Some(format!("text {n} {}", "x".repeat(n % 90)))).collect::<StringArray>());
    let batch = RecordBatch::try_from_iter([("text", texts)]).unwrap();
    let with = json!({"shuffle": true, "filter": "text|length > 20", "train_test_split": {"test_size": 0.2}});
    let mut identities = Vec::new();
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::ZSTD(Default::default()),
        Compression::GZIP(Default::default()),
        Compression::LZ4,
        Compression::LZ4_RAW,
    ];
    for (index, codec) in codecs.into_iter().enumerate() {
        let properties = parquet::file::properties::WriterProperties::builder()
            .set_compression(codec)
            .set_max_row_group_row_count(Some(700 * (index + 1)))
            .build();
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        let file = write(folder.path(), &format!("{index}.parquet"), writer.into_inner().unwrap());
        let mut with = with.clone();
        with["source"] = "./source".into();
        let bench = TestBench::new(folder.path()).file("source", &file).unwrap().threads(index + 1);
        let made = bench.run::<Dataset>(with).unwrap();
        identities.push((made["train"].description.identity, made["test"].description.identity));
    }
    assert!(identities.iter().all(|identity| *identity == identities[0]), "{identities:?}");
}

#[test]
fn rows_are_foretold_where_no_filter_takes_some_away() {
    let foretold = |with: Value| {
        let params = Dataset::read(&Node::from_json(&with), &mut Reader::default()).unwrap();
        let outputs = params.forecast(&Ahead::of_results(&InputFacts::new(), Span::default())).outputs;
        let facts = outputs.get("rows").or_else(|| outputs.get("train")).cloned().unwrap_or_default().expected;
        (facts.get("rows").and_then(Value::as_u64), facts.get("shape").and_then(Value::as_str).map(str::to_owned))
    };
    let with = |more: Value| {
        let mut with = json!({"source": "./a.jsonl", "split": "train[:200]"});
        with.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        with
    };
    assert_eq!(foretold(with(json!({}))), (Some(200), None));
    assert_eq!(foretold(with(json!({"filter": "n > 3"}))), (None, None));
    let halves = json!({"template": "alpaca", "train_test_split": {"test_size": 0.5}});
    assert_eq!(foretold(with(halves)), (Some(100), Some("prompt".to_owned())));
    assert_eq!(foretold(with(json!({"column_map": {"text": "body"}}))), (Some(200), Some("text".to_owned())));
}

#[test]
fn an_image_in_a_part_of_a_mix_is_certain_only_where_no_row_is_left_out() {
    let mut facts = RowsFacts::messages().to_facts();
    let medium = json!({"place": "`a.jsonl`, line 3", "turn": 1, "role": "user", "kind": "image_url"});
    facts.insert(MEDIUM.to_owned(), medium.clone());
    let inputs = InputFacts::from_iter([("images.rows".to_owned(), facts)]);
    let foreseen = |more: Value| {
        let mut with = json!({"datasets": [{"rows": "images"}]});
        with.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let params = Dataset::read(&Node::from_json(&with), &mut Reader::default()).unwrap();
        let outputs = params.forecast(&Ahead::of_results(&inputs, Span::default())).outputs;
        let found = outputs.get("rows").or_else(|| outputs.get("train")).unwrap();
        assert_eq!(found.certain.get("shape"), Some(&json!("messages")), "{more}");
        found.certain.get(MEDIUM).cloned()
    };
    assert_eq!(foreseen(json!({})), Some(medium.clone()));
    assert_eq!(foreseen(json!({"shuffle": true})), Some(medium));
    for loses in [
        json!({"filter": "messages|length > 2"}),
        json!({"limit": 10}),
        json!({"mix": "interleave"}),
        json!({"train_test_split": {"test_size": 0.5}}),
        json!({"decontaminate": "evaluation"}),
    ] {
        assert_eq!(foreseen(loses.clone()), None, "{loses}");
    }
}
