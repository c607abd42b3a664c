//! The stage: numbers that JSON and expressions know nothing of, and values that have no order.

use arrow::array::{
    BinaryArray, Decimal128Array, Float32Array, Float32Builder, Float64Array, MapBuilder, StringBuilder, StructArray,
    TimestampMicrosecondArray,
};
use arrow::datatypes::{Field, Float64Type};

use super::*;

/// The texts of the rows that a filter leaves, and how many it could not be worked out on.
fn kept(folder: &Path, file: &Path, filter: &str) -> (Vec<String>, u64) {
    let made = run(folder, &[file.to_owned()], json!({"filter": filter, "on_bad_row": "drop"})).unwrap();
    let dropped = made.description.facts.get("dropped_by").and_then(|by| by.get("expression")?.as_u64());
    (column(&made, "text"), dropped.unwrap_or(0))
}

#[test]
fn what_has_no_order_is_left_out_and_infinity_is_great() {
    let folder = tempfile::tempdir().unwrap();
    let rows: [(&str, Option<f64>); 5] =
        [("null", None), ("nan", Some(f64::NAN)), ("inf", Some(f64::INFINITY)), ("1", Some(1.0)), ("9", Some(9.0))];
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values(rows.map(|row| row.0)));
    let scores: ArrayRef = Arc::new(Float64Array::from_iter(rows.map(|row| row.1)));
    let batch = RecordBatch::try_from_iter([("text", texts), ("score", scores)]).unwrap();
    let mut parquet = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    let file = write(folder.path(), "a.parquet", parquet.into_inner().unwrap());
    for (filter, texts, unusable) in [
        ("score < 5", &["1"][..], 1),
        ("score > 5", &["inf", "9"], 1),
        ("not score > 5", &["nan", "1"], 1),
        ("score is none or score >= 9", &["null", "inf", "9"], 0),
        ("score is not none and score < 5", &["1"], 0),
        ("row.score < 5", &["1"], 1),
    ] {
        let expected = texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        assert_eq!(kept(folder.path(), &file, filter), (expected, unusable), "{filter}");
    }
    let lists = write(folder.path(), "a.jsonl", "{\"text\":\"list\",\"score\":[1]}\n{\"text\":\"9\",\"score\":9}\n");
    assert_eq!(kept(folder.path(), &lists, "score > 5"), (vec!["9".to_owned()], 1));
}

#[test]
fn numbers_are_written_as_python_writes_them() {
    let folder = tempfile::tempdir().unwrap();
    let floats: ArrayRef = Arc::new(Float64Array::from(vec![f64::NAN, f64::NEG_INFINITY, 1e-7, 1e22]));
    let small: ArrayRef = Arc::new(Float32Array::from(vec![0.1, 0.5, f32::INFINITY, 2.0]));
    let lists: ArrayRef = Arc::new(arrow::array::ListArray::from_iter_primitive::<Float64Type, _, _>(
        [f64::NAN, 1e-7, 1.0, 2.0].map(|float| Some([Some(float), None])),
    ));
    let field = Arc::new(Field::new("f", floats.data_type().clone(), true));
    let nested: ArrayRef = Arc::new(StructArray::from(vec![(field, floats.clone())]));
    let columns = [("c", floats), ("s", small), ("l", lists), ("n", nested)];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut parquet = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    let file = [write(folder.path(), "a.parquet", parquet.into_inner().unwrap())];
    for (text, expected) in [
        ("{{ c }}", ["nan", "-inf", "1e-07", "1e+22"]),
        ("{{ c }}!", ["nan!", "-inf!", "1e-07!", "1e+22!"]),
        ("{{ 'c=' ~ c }}", ["c=nan", "c=-inf", "c=1e-07", "c=1e+22"]),
        (
            "{{ c|string }}{{ [c, none]|join('/') }}",
            ["nannan/None", "-inf-inf/None", "1e-071e-07/None", "1e+221e+22/None"],
        ),
        ("{{ s }}", ["0.10000000149011612", "0.5", "inf", "2.0"]),
        ("x{{ l }}", ["x[nan, None]", "x[1e-07, None]", "x[1.0, None]", "x[2.0, None]"]),
        ("x{{ n }}", ["x{'f': nan}", "x{'f': -inf}", "x{'f': 1e-07}", "x{'f': 1e+22}"]),
    ] {
        let made = run(folder.path(), &file, json!({"map": {"text": text}})).unwrap();
        assert_eq!(column(&made, "text"), expected, "{text}");
    }
}

#[test]
fn bytes_and_maps_of_a_table_are_text_and_numbers_at_any_depth() {
    let folder = tempfile::tempdir().unwrap();
    let bytes: ArrayRef = Arc::new(BinaryArray::from_vec(vec![b"hi", "größe".as_bytes()]));
    let field = Arc::new(Field::new("body", bytes.data_type().clone(), true));
    let nested: ArrayRef = Arc::new(StructArray::from(vec![(field, bytes)]));
    let mut scores = MapBuilder::new(None, StringBuilder::new(), Float32Builder::new());
    for score in [0.1, f32::NAN] {
        scores.keys().append_value("a");
        scores.values().append_value(score);
        scores.append(true).unwrap();
    }
    let maps: ArrayRef = Arc::new(scores.finish());
    let batch = RecordBatch::try_from_iter([("n", nested), ("m", maps)]).unwrap();
    let mut parquet = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    let file = [write(folder.path(), "a.parquet", parquet.into_inner().unwrap())];
    let texts = |text: &str| column(&run(folder.path(), &file, json!({"map": {"text": text}})).unwrap(), "text");
    assert_eq!(texts("{{ n.body }}"), ["hi", "größe"]);
    assert_eq!(texts("{{ m.a }}"), ["0.10000000149011612", "nan"]);
}

#[test]
fn decimals_are_not_rounded_and_instants_have_their_zone() {
    let folder = tempfile::tempdir().unwrap();
    let decimals = |values: [i128; 2], scale| -> ArrayRef {
        Arc::new(Decimal128Array::from(values.to_vec()).with_precision_and_scale(38, scale).unwrap())
    };
    let at =
        |zone: &str| -> ArrayRef { Arc::new(TimestampMicrosecondArray::from(vec![0, 1_500_000]).with_timezone(zone)) };
    let field = Arc::new(Field::new("at", at("UTC").data_type().clone(), true));
    let nested: ArrayRef = Arc::new(StructArray::from(vec![(field, at("UTC"))]));
    let columns = [
        ("id", decimals([123_456_789_012_345_678_901_234_567_890, -1], 0)),
        ("price", decimals([1_234_567_890_123_456_789, 150], 2)),
        ("at", at("UTC")),
        ("there", at("+02:00")),
        ("n", nested),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut parquet = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    let file = [write(folder.path(), "a.parquet", parquet.into_inner().unwrap())];
    let texts = |text: &str| column(&run(folder.path(), &file, json!({"map": {"text": text}})).unwrap(), "text");
    assert_eq!(
        texts("{{ id }} {{ row['at'] }}"),
        ["123456789012345678901234567890 1970-01-01T00:00:00Z", "-1 1970-01-01T00:00:01.500Z"]
    );
    assert_eq!(
        texts("{{ there }} {{ n.at }}"),
        ["1970-01-01T02:00:00+02:00 1970-01-01T00:00:00Z", "1970-01-01T02:00:01.500+02:00 1970-01-01T00:00:01.500Z"]
    );
    let with = json!({"map": {"text": "{{ price }}"}, "on_bad_row": "drop"});
    assert_eq!(column(&run(folder.path(), &file, with).unwrap(), "text"), ["1.5"]);
    let error = run(folder.path(), &file, json!({"map": {"text": "{{ price }}"}})).unwrap_err();
    assert!(error.message.contains("12345678901234567.89 has more digits"), "{}", error.message);
}

#[test]
fn words_of_python_for_numbers_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let lines = "{\"text\": \"NaN\", \"a\": NaN, \"b\": [-Infinity]}\n{\"text\": \"x\", \"a\": 1, \"b\": []}\n";
    let file = [write(folder.path(), "a.jsonl", lines)];
    assert_eq!(column(&run(folder.path(), &file, json!({})).unwrap(), "text"), ["NaN", "x"]);
    let made = run(folder.path(), &file, json!({"map": {"text": "{{ a }} {{ b }}"}})).unwrap();
    assert_eq!(column(&made, "text"), ["nan [-inf]", "1 []"]);
    let file = [write(folder.path(), "b.jsonl", "{\"text\": NaNa}\n")];
    let error = run(folder.path(), &file, json!({})).unwrap_err();
    assert!(error.message.contains("not JSON"), "{}", error.message);
}

#[test]
fn digits_of_great_integers_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let great = "158456325028528675187087900672";
    let object = format!("{{\"a\": {great}, \"b\": [-{great}], \"c\": 1e30, \"text\": \"{great}\"}}");
    for (name, content) in [
        ("a.jsonl", format!("{object}\n")),
        ("a.json", format!("[{{\"a\": 1, \"b\": [1], \"c\": 1}} , {object}]")),
        ("b.json", format!("{object}\n{object}")),
        ("c.json", format!("{{\"meta\": {great}, \"data\": [{object}]}}")),
    ] {
        let file = [write(folder.path(), name, content)];
        for (text, expected) in [
            ("{{ a }}", great.to_owned()),
            ("{{ a + 1 }} {{ b }} {{ c }}", format!("158456325028528675187087900673 [-{great}] 1e+30")),
            ("{{ row.b[0] }} {{ b|tojson }}", format!("-{great} [-{great}]")),
        ] {
            let field = if name == "c.json" { json!("data") } else { Value::Null };
            let with = json!({"map": {"text": text}, "field": field, "filter": "c > 1"});
            let made = run(folder.path(), &file, with).unwrap();
            assert_eq!(column(&made, "text").last(), Some(&expected), "{name}: {text}");
        }
    }
    let beyond = "9".repeat(50);
    let file = [write(folder.path(), "d.jsonl", format!("{{\"a\": {beyond}}}\n"))];
    let error = run(folder.path(), &file, json!({"map": {"text": "{{ a }}"}})).unwrap_err();
    assert!(error.message.contains(&format!("{beyond} has more than 128 bits")), "{}", error.message);
    // A conversation is stored as JSON, in which it would be rounded.
    let turns = format!(
        "{{\"messages\": [{{\"role\": \"user\", \"content\": \"x\", \"tool_calls\": [{{\"n\": {great}}}]}}]}}\n"
    );
    let file = [write(folder.path(), "e.jsonl", turns)];
    let error = run(folder.path(), &file, json!({})).unwrap_err();
    assert!(error.message.contains(&format!("the number {great}")), "{}", error.message);
    // What nothing asks for harms nobody.
    let file = [write(folder.path(), "f.jsonl", format!("{{\"id\": {beyond}, \"text\": \"x\"}}\n"))];
    assert_eq!(column(&run(folder.path(), &file, json!({})).unwrap(), "text"), ["x"]);
}

#[test]
fn pairs_of_answers_are_not_taken_for_conversations() {
    let folder = tempfile::tempdir().unwrap();
    let turn = |role: &str, text: &str| json!({"from": role, "value": text});
    let row =
        json!({"conversations": [turn("human", "Who?")], "chosen": turn("gpt", "Me."), "rejected": turn("gpt", "No.")});
    let pairs = [write(folder.path(), "a.jsonl", format!("{row}\n"))];
    let found = rows(&run(folder.path(), &pairs, json!({})).unwrap());
    let [Row::Judged(judged)] = found.as_slice() else { panic!("no pair: {found:?}") };
    assert!(judged.chosen.is_some() && judged.rejected.is_some());
    let map = "{{ conversations + [chosen] }}";
    let made = run(folder.path(), &pairs, json!({"map": {"messages": map}})).unwrap();
    let made = rows(&made);
    let [Row::Messages(messages)] = made.as_slice() else { panic!("no conversation") };
    assert_eq!(messages.last().unwrap().content, "Me.");
    // Who says which column is what gets it.
    assert!(run(folder.path(), &pairs, json!({"column_map": {"messages": "conversations"}})).is_ok());
    let texts = json!({"prompt": "Who?", "chosen": "Me.", "rejected": "No."});
    let texts = [write(folder.path(), "b.jsonl", format!("{texts}\n"))];
    let with = json!({"template": "{prompt}", "column_map": {"output": "chosen"}});
    assert_eq!(column(&run(folder.path(), &texts, with).unwrap(), "output"), ["Me."]);
    let half = run(folder.path(), &texts, json!({"column_map": {"chosen": "prompt", "rejected": "nowhere"}}));
    assert!(half.unwrap_err().message.contains("no column `nowhere`"));
    let lacking = [write(
        folder.path(),
        "c.jsonl",
        "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n{\"prompt\": \"a\", \"chosen\": \"b\"}\n",
    )];
    let error = run(folder.path(), &lacking, json!({})).unwrap_err();
    assert!(
        error.message.contains("c.jsonl`, line 2") && error.message.contains("`rejected` is missing"),
        "{}",
        error.message
    );
    let counted = run(folder.path(), &lacking, json!({"on_bad_row": "drop"})).unwrap();
    assert_eq!(
        (counted.description.facts["rows"].as_u64(), counted.description.facts["dropped"].as_u64()),
        (Some(1), Some(1))
    );
}
