//! The readers, on well-formed and broken files.

use std::path::PathBuf;
use std::sync::Arc;

use super::*;

struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn file(&self, name: &str, bytes: &[u8]) -> SourceFile {
        let path = self.folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        SourceFile::new(path, name.to_owned()).unwrap()
    }
}

fn by(sample_by: SampleBy) -> Reading {
    Reading { sample_by, field: None }
}

fn read(file: &SourceFile, range: Range<u64>, sample_by: SampleBy) -> (Vec<Result<Record, BadRecord>>, u64) {
    let mut records = Vec::new();
    let seen = file
        .read(range, &Wanted::All, &by(sample_by), &mut |record| {
            records.push(record);
            Ok(ControlFlow::Continue(()))
        })
        .unwrap();
    (records, seen)
}

fn texts(file: &SourceFile, sample_by: SampleBy) -> Vec<(u64, String)> {
    let (records, _) = read(file, 0..u64::MAX, sample_by);
    let text = |record: Record| (record.number, record.fields["text"].as_str().unwrap().to_owned());
    records.into_iter().map(|record| text(record.unwrap())).collect()
}

#[test]
fn a_byte_order_mark_and_foreign_line_ends_are_no_part_of_a_row() {
    let files_in = Files::new();
    let lines = files_in.file("a.jsonl", b"\xEF\xBB\xBF{\"text\":\"one\"}\r\n\r\n{\"text\":\"two\"}");
    assert_eq!(texts(&lines, SampleBy::Line), [(1, "one".to_owned()), (3, "two".to_owned())]);
    let array = files_in.file("a.json", b"\xEF\xBB\xBF\r\n [{\"text\":\"one\"},\r\n{\"text\":\"two\"}]\r\n");
    assert_eq!(texts(&array, SampleBy::Line), [(1, "one".to_owned()), (2, "two".to_owned())]);
    let csv = files_in.file("a.csv", b"\xEF\xBB\xBFtext,x\r\none,1\r\n\"t\"\"w\r\no\",2\r\n");
    assert_eq!(csv.columns(&by(SampleBy::Line)).unwrap(), ["text", "x"]);
    assert_eq!(texts(&csv, SampleBy::Line), [(2, "one".to_owned()), (3, "t\"w\r\no".to_owned())]);
    let text = files_in.file("a.txt", b"\xEF\xBB\xBFone\r\ntwo\r\n");
    assert_eq!(texts(&text, SampleBy::Line), [(1, "one".to_owned()), (2, "two".to_owned())]);
}

#[test]
fn text_is_taken_by_line_by_paragraph_or_whole() {
    let files_in = Files::new();
    let file = files_in.file("a.txt", b"\none\ntwo\n\n\n  three\n \nfour");
    let samples = |sample_by| texts(&file, sample_by);
    let numbered = |pairs: &[(u64, &str)]| pairs.iter().map(|(n, text)| (*n, (*text).to_owned())).collect::<Vec<_>>();
    assert_eq!(samples(SampleBy::Line), numbered(&[(2, "one"), (3, "two"), (6, "  three"), (8, "four")]));
    assert_eq!(samples(SampleBy::Paragraph), numbered(&[(2, "one\ntwo"), (6, "  three"), (8, "four")]));
    assert_eq!(samples(SampleBy::Document), numbered(&[(1, "\none\ntwo\n\n\n  three\n \nfour")]));
    assert_eq!(file.count(&by(SampleBy::Paragraph)).unwrap(), 3);
}

#[test]
fn a_line_that_is_no_row_is_told_by_its_number() {
    let files_in = Files::new();
    let file = files_in.file("a.jsonl", b"{\"a\":1}\n{\"a\":\n\n[1]\n{\"a\":\"\xFF\"}\n7\n");
    let (records, seen) = read(&file, 0..u64::MAX, SampleBy::Line);
    assert_eq!(seen, 5);
    let bad: Vec<_> = records.into_iter().filter_map(Result::err).collect();
    assert_eq!(bad.iter().map(|bad| bad.number).collect::<Vec<_>>(), [2, 4, 5, 6]);
    let problems: Vec<&str> = bad.iter().map(|bad| bad.flaw.problem.as_str()).collect();
    assert!(problems[0].contains("not JSON: EOF"), "{}", problems[0]);
    assert!(problems[1].contains("a list"), "{}", problems[1]);
    assert_eq!((problems[2], bad[2].flaw.reason), ("it is not UTF-8", Reason::NotUtf8));
}

#[test]
fn a_value_over_several_lines_is_told_apart_from_a_broken_one() {
    let files_in = Files::new();
    let hint = |text: &[u8]| {
        let bad = files_in.file("a.jsonl", text).first_bad_row(&by(SampleBy::Line)).unwrap().unwrap();
        bad.flaw.problem.contains("each line is to be a JSON value")
    };
    assert!(hint(b"{\n  \"a\": 1\n}\n") && hint(b"[\n  {\"a\": 1}\n]\n"));
    assert!(!hint(b"{\"a\": \n") && !hint(b"}\n"));
}

/// Why a file cannot be read.
fn failure(file: &SourceFile) -> String {
    let error = file.count(&by(SampleBy::Line)).unwrap_err();
    std::error::Error::source(&error).unwrap().to_string()
}

#[test]
fn compression_that_the_name_does_not_tell_is_told() {
    let files_in = Files::new();
    let gzip = failure(&files_in.file("a.jsonl", b"\x1F\x8B\x08\0"));
    assert_eq!(gzip, "it is compressed with gzip, and its name does not end in `.gz`");
    assert!(failure(&files_in.file("a.csv", b"\x28\xB5\x2F\xFD\0")).contains("zstd"));
}

#[test]
fn a_pipe_is_not_waited_for() {
    let files_in = Files::new();
    for name in ["a.jsonl", "a.csv.gz", "a.parquet", "a.arrow"] {
        let path = files_in.folder.path().join(name);
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let file = SourceFile::new(path, name.to_owned()).unwrap();
        assert_eq!(failure(&file), "it is a named pipe, where a regular file is needed", "{name}");
    }
}

#[test]
fn bytes_that_are_no_utf8_are_told_by_their_line() {
    let files_in = Files::new();
    let file = files_in.file("a.txt", b"one\ntwo\nth\xFFree\n");
    let (records, _) = read(&file, 0..u64::MAX, SampleBy::Document);
    assert_eq!(records, [Err(BadRecord::new(3, Reason::NotUtf8, "it is not UTF-8"))]);
    let file = files_in.file("a.csv", b"caf\xE9,b\n1,2\n");
    let error = file.columns(&by(SampleBy::Line)).unwrap_err();
    assert!(error.help.is_some_and(|help| help.contains("iconv -f LATIN1 -t UTF-8")));
}

#[test]
fn a_malformed_table_or_array_stops_the_reading() {
    let files_in = Files::new();
    let files = [
        files_in.file("a.json", b"[{\"a\":1}, {\"a\""),
        files_in.file("b.json", b"[{\"a\":1}] trailing"),
        files_in.file("c.json", b"{\"data\": [{\"a\":1}, {\"a\""),
        files_in.file("a.csv", b"a,b\n1,\"2\n"),
        files_in.file("a.parquet", b"PAR1 not really"),
        files_in.file("a.arrow", b"ARROW1 not really"),
        files_in.file("utf16.csv", b"\xFF\xFEa\0,\0"),
    ];
    for file in &files {
        let error = file
            .read(0..u64::MAX, &Wanted::All, &by(SampleBy::Line), &mut |_| Ok(ControlFlow::Continue(())))
            .unwrap_err();
        assert!(error.message.contains(&file.name), "{}", error.message);
        assert_eq!(error.cause, Cause::BadData, "{}", file.name);
    }
}

#[test]
fn a_range_is_read_and_no_more_than_it() {
    let files_in = Files::new();
    let lines: String = (0..10).map(|n| format!("{{\"text\":\"{n}\"}}\n")).collect();
    let array = format!("[{}] and this is never read", lines.trim().replace('\n', ","));
    let csv: String = std::iter::once("text\n".to_owned()).chain((0..10).map(|n| format!("{n}\n"))).collect();
    let files: Vec<SourceFile> = [("a.jsonl", &lines), ("b.json", &lines), ("c.json", &array), ("d.csv", &csv)]
        .into_iter()
        .map(|(name, text)| files_in.file(name, text.as_bytes()))
        .collect();
    for file in &files {
        let (records, seen) = read(file, 3..5, SampleBy::Line);
        let texts: Vec<_> = records.iter().map(|record| record.as_ref().unwrap().fields["text"].clone()).collect();
        assert_eq!((texts, seen), (vec!["3".into(), "4".into()], 5), "{}", file.name);
        if file.name != "c.json" {
            assert_eq!(read(file, 8..20, SampleBy::Line).1, 10, "{}", file.name);
            assert_eq!(file.count(&by(SampleBy::Line)).unwrap(), 10, "{}", file.name);
        }
    }
}

#[test]
fn the_sinks_failure_ends_the_reading() {
    let files_in = Files::new();
    let file = files_in.file("a.json", b"[{\"a\":1},{\"a\":2},{\"a\":3}]");
    let mut calls = 0;
    let error = file.read(0..u64::MAX, &Wanted::All, &by(SampleBy::Line), &mut |_| {
        calls += 1;
        Err(StageError::bad_data("enough"))
    });
    assert_eq!((error.unwrap_err().message.as_str(), calls), ("enough", 1));
}

#[test]
fn a_missing_file_is_the_machines_affair() {
    let file = SourceFile::new(PathBuf::from("/nowhere/a.csv"), "a.csv".to_owned()).unwrap();
    assert_eq!(file.columns(&by(SampleBy::Line)).unwrap_err().cause, Cause::Machine);
}

#[test]
fn a_row_of_another_width_or_encoding_is_told_by_its_line() {
    let files_in = Files::new();
    let file = files_in.file("a.csv", b"a,b\n1,\"x\ny\"\n\n1,2,3\n1\n1,\xFF\n5,6\n");
    let (records, seen) = read(&file, 0..u64::MAX, SampleBy::Line);
    assert_eq!((seen, file.count(&by(SampleBy::Line)).unwrap()), (5, 5));
    let bad: Vec<BadRecord> = records.iter().cloned().filter_map(Result::err).collect();
    let ragged =
        |number, values: &str| BadRecord::new(number, Reason::Ragged, format!("it has {values}, and the header has 2"));
    let expected =
        [ragged(5, "3 values"), ragged(6, "1 value"), BadRecord::new(7, Reason::NotUtf8, "column `b` is not UTF-8")];
    assert_eq!(bad, expected);
    let fine: Vec<&Record> = records.iter().filter_map(|record| record.as_ref().ok()).collect();
    assert_eq!((fine.len(), fine[0].number, &fine[0].fields["b"], fine[1].number), (2, 2, &"x\ny".into(), 8));
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut encoder, bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn compressed_files_hold_the_same_rows() {
    let files_in = Files::new();
    let lines: String = (0..3000).map(|n| format!("{{\"text\":\"line {n}\"}}\n")).collect();
    let table: String = std::iter::once("text\n".to_owned()).chain((0..3000).map(|n| format!("line {n}\n"))).collect();
    let expected: Vec<String> = (0..3000).map(|n| format!("line {n}")).collect();
    let two_members = [gzip(&lines.as_bytes()[..1000]), gzip(&lines.as_bytes()[1000..])].concat();
    let two_frames = [
        zstd::encode_all(&lines.as_bytes()[..1000], 1).unwrap(),
        zstd::encode_all(&lines.as_bytes()[1000..], 1).unwrap(),
    ];
    let files = [
        files_in.file("a.jsonl.gz", &gzip(lines.as_bytes())),
        files_in.file("b.jsonl.gz", &two_members),
        files_in.file("a.jsonl.zst", &two_frames.concat()),
        files_in.file("a.json.gz", &gzip(format!("[{}]", lines.trim().replace('\n', ",")).as_bytes())),
        files_in.file("a.csv.zst", &zstd::encode_all(table.as_bytes(), 1).unwrap()),
        files_in.file("a.txt.gz", &gzip(&table.as_bytes()[5..])),
    ];
    for file in &files {
        let made: Vec<String> = texts(file, SampleBy::Line).into_iter().map(|(_, text)| text).collect();
        assert_eq!(made, expected, "{}", file.name);
        assert_eq!(file.count(&by(SampleBy::Line)).unwrap(), 3000);
    }
}

#[test]
fn damaged_compression_is_told_as_such() {
    let files_in = Files::new();
    let lines: String = (0..3000).map(|n| format!("{{\"text\":\"line {n}\"}}\n")).collect();
    for (name, whole) in
        [("a.jsonl.gz", gzip(lines.as_bytes())), ("a.jsonl.zst", zstd::encode_all(lines.as_bytes(), 1).unwrap())]
    {
        let mut damaged = whole.clone();
        let middle = damaged.len() / 2;
        damaged[middle..middle + 8].iter_mut().for_each(|byte| *byte ^= 0xFF);
        for (bytes, problem) in
            [(&whole[..whole.len() - 5], "cut off"), (&whole[..20], "cut off"), (&damaged, "damaged"), (b"{}", "")]
        {
            let file = files_in.file(name, bytes);
            let error = file.count(&by(SampleBy::Line)).unwrap_err();
            assert!(error.message.contains(name), "{}", error.message);
            let beneath = error.source.unwrap().to_string();
            assert!(beneath.contains(problem) && !beneath.is_empty(), "{name}: {beneath}");
            assert_eq!(error.cause, Cause::BadData);
        }
    }
}

#[test]
fn rows_under_a_key_of_one_object_are_read() {
    let files_in = Files::new();
    let text =
        r#" {"version": "1", "big": [[1, 2], {"data": []}], "data": [{"text": "one"}, {"text": "two"}], "after": 7} "#;
    let file = files_in.file("a.json", text.as_bytes());
    let reading = |field: &str| Reading { sample_by: SampleBy::Line, field: Some(field.to_owned()) };
    assert_eq!(file.columns(&reading("data")).unwrap(), ["text"]);
    assert_eq!(file.count(&reading("data")).unwrap(), 2);
    for (field, problem) in
        [("rows", "no key `rows`; it has `version`, `big`, `data`"), ("version", "an array of objects")]
    {
        let error = file.count(&reading(field)).unwrap_err();
        let beneath = error.source.unwrap().to_string();
        assert!(beneath.contains(problem) && !beneath.contains("not JSON"), "{beneath}");
    }
    let array = files_in.file("b.json", b"[1]");
    assert!(
        array.count(&reading("data")).unwrap_err().source.unwrap().to_string().contains("with the rows under `data`")
    );
}

#[test]
fn the_columns_are_those_of_the_first_rows_that_are_rows() {
    let files_in = Files::new();
    let file = files_in.file("a.jsonl", b"no row\n{\"a\":1}\n[]\n{\"b\":2,\"a\":3}\n");
    assert_eq!(file.columns(&by(SampleBy::Line)).unwrap(), ["a", "b"]);
}

#[test]
fn bytes_in_a_table_are_text_where_they_are_utf8() {
    let files_in = Files::new();
    let column: arrow::array::ArrayRef = std::sync::Arc::new(arrow::array::BinaryArray::from_opt_vec(vec![
        Some("größe".as_bytes()),
        Some(b"\xFF"),
        None,
    ]));
    let batch = arrow::array::RecordBatch::try_from_iter([("text", column)]).unwrap();
    let mut parquet = parquet::arrow::ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    let file = files_in.file("a.parquet", &parquet.into_inner().unwrap());
    let (records, _) = read(&file, 0..u64::MAX, SampleBy::Line);
    assert_eq!(records[0].as_ref().unwrap().fields["text"], "größe");
    assert_eq!(records[1], Err(BadRecord::new(2, Reason::NotUtf8, "column `text` is not UTF-8")));
    assert_eq!(records[2].as_ref().unwrap().fields["text"], Value::Null);
}

#[test]
fn bytes_within_a_value_are_text_or_the_row_is_unusable() {
    use arrow::array::{ArrayRef, BinaryArray, FixedSizeBinaryArray, ListArray, StructArray};
    use arrow::buffer::OffsetBuffer;
    use arrow::datatypes::{DataType, Field};

    let texts = || BinaryArray::from_opt_vec(vec![Some(b"caf\xc3\xa9"), Some(b"caf\xe9 "), None]);
    let field = Arc::new(Field::new("b", DataType::Binary, true));
    let objects: ArrayRef = Arc::new(StructArray::from(vec![(field, Arc::new(texts()) as ArrayRef)]));
    let each = || OffsetBuffer::from_lengths([1; 3]);
    let item = Arc::new(Field::new("item", DataType::Binary, true));
    let lists: ArrayRef = Arc::new(ListArray::new(item, each(), Arc::new(texts()), None));
    let item = Arc::new(Field::new("item", objects.data_type().clone(), true));
    let nested: ArrayRef = Arc::new(ListArray::new(item, each(), Arc::clone(&objects), None));
    let fixed = [b"ok", b"\xff\xfe", b"no"].into_iter();
    let fixed: ArrayRef = Arc::new(FixedSizeBinaryArray::try_from_iter(fixed).unwrap());
    for (column, first) in [
        (objects, serde_json::json!({ "b": "café" })),
        (lists, serde_json::json!(["café"])),
        (nested, serde_json::json!([{ "b": "café" }])),
        (fixed, serde_json::json!("ok")),
    ] {
        let batch = arrow::array::RecordBatch::try_from_iter([("x", column)]).unwrap();
        let mut parquet = parquet::arrow::ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
        parquet.write(&batch).unwrap();
        let files_in = Files::new();
        let file = files_in.file("a.parquet", &parquet.into_inner().unwrap());
        let (records, _) = read(&file, 0..u64::MAX, SampleBy::Line);
        assert_eq!(records[0].as_ref().unwrap().fields["x"], first);
        assert_eq!(records[1], Err(BadRecord::new(2, Reason::NotUtf8, "column `x` is not UTF-8")), "{first}");
        assert!(records[2].is_ok());
    }
}
